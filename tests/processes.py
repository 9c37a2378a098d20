"""Processes for tests, forked from one that has the libraries, whose import takes eight seconds of a core."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
CONTEXT: Any = multiprocessing.get_context(METHOD)
if METHOD == "forkserver":
    CONTEXT.set_forkserver_preload(["mlff.training", "mlff.report", "tensorboard", "torch._dynamo", "pytest"])


class Program:
    """A function that runs in a process of its own; what it returns, prints and fails with.

    The process leads a session, so that `os.killpg(pid)` ends it with all that it starts.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, **environment: str) -> None:
        folder = Path(tempfile.mkdtemp())
        self.files = [str(folder / name) for name in ("value", "out", "err")]
        whole = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        self.process = CONTEXT.Process(target=_run, args=(whole, self.files, function, arguments))
        self.process.start()
        self.pid: int = self.process.pid

    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.is_alive()

    def kill(self) -> None:
        """End it and all that it has started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self, code: int = 0, timeout: float = 200) -> tuple[str, str]:
        """Wait for the end, which must be the expected one, and return what was said on stdout and stderr."""
        self.process.join(timeout)
        said = [Path(file).read_text() for file in self.files[1:]]
        ended = self.process.exitcode
        self.kill()
        assert ended == code, f"ended with {ended}, not {code} (None: not within {timeout} s)\n{said[0]}\n{said[1]}"
        return said[0], said[1]

    def value(self) -> Any:
        """What the function has returned; after `finish`."""
        return pickle.loads(Path(self.files[0]).read_bytes())


def _run(environment: dict[str, str], files: list[str], function: Callable[..., Any], arguments: tuple[Any, ...]):
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files[1:], start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    Path(files[0]).write_bytes(pickle.dumps(function(*arguments)))


def script(file: Path, *words: str) -> None:
    """Run a program as `python file words` does."""
    sys.argv = [str(file), *words]
    runpy.run_path(str(file), run_name="__main__")


def places(count: int, **others: str) -> list[dict[str, str]]:
    """What each of several ranks on this machine finds in its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "NODE_RANK": "0", **others}
    return [{**shared, "LOCAL_RANK": str(rank), "RANK": str(rank)} for rank in range(count)]


def on_ranks(function: Callable[..., Any], *arguments: Any, count: int = 2, timeout: float = 200) -> list[Any]:
    """Run a function on several ranks, all of which must end well; what it returns on each."""
    programs = [Program(function, *arguments, **place) for place in places(count)]
    with all_killed(programs):
        deadline = time.monotonic() + timeout
        for program in programs:
            program.finish(timeout=deadline - time.monotonic())
        return [program.value() for program in programs]


@contextlib.contextmanager
def all_killed(programs: list[Program]) -> Iterator[list[Program]]:
    """However a test ends, none of these go on."""
    try:
        yield programs
    finally:
        for program in programs:
            program.kill()
