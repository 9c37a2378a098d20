"""Run a function on many tasks in several processes that may crash or hang: the others go on, and the loss is reported.

A quantum-chemistry library can end its process (a segmentation fault) or never come back on an odd geometry, which
`concurrent.futures` answers by giving up altogether. Here only the task at fault is lost.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

_AHEAD = 4  # tasks that each process is given in advance, so that it need not wait for the parent


@dataclass(frozen=True)
class Outcome:
    """What came of one task: a result, or the reason why there is none."""

    place: int  # which task, counted from 0
    result: Any
    failure: str  # "" when there is a result; else "crash", "timeout" or the error's class and words


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    waiting: deque[tuple[int, Any]] = field(default_factory=deque)
    since: float = 0.0  # when the first of `waiting` was begun


def outcomes(
    function: Callable[[Any], Any],
    tasks: Iterable[Any],
    workers: int,
    timeout: float = 120.0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Outcome]:
    """Yield the outcome of each task, in the order in which they end.

    Args:
        function: Called in another process: a function at the top of a module. Tasks and results are pickled.
        tasks: Read only as far as needed, so it may be endless.
        workers: Number of processes.
        timeout: Seconds after which a task is given up and its process replaced.
        stop: Asked often; once true, nothing more is begun or waited for. Closing the iterator has the same effect.
    """
    context = multiprocessing.get_context("spawn")
    numbered = iter(enumerate(tasks))
    again: deque[tuple[int, Any]] = deque()  # tasks that were waiting behind one that failed
    more = True

    def started() -> _Worker:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(function, there), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def fill(worker: _Worker) -> None:
        nonlocal more
        while len(worker.waiting) < _AHEAD and (again or more):
            if again:
                task = again.popleft()
            elif (following := next(numbered, None)) is not None:
                task = following
            else:
                more = False
                return
            if not worker.waiting:
                worker.since = time.monotonic()
            worker.waiting.append(task)
            try:
                worker.pipe.send(task[1])
            except OSError:  # the process has just died; its end is noticed below
                return

    crew = [started() for _ in range(workers)]
    try:
        while not stop():
            for worker in crew:
                fill(worker)
            if not any(worker.waiting for worker in crew):
                return
            ready = connection.wait([worker.pipe for worker in crew if worker.waiting], timeout=0.5)
            for place, worker in enumerate(crew):
                lost = ""
                if worker.pipe in ready:
                    try:
                        result, failure = worker.pipe.recv()
                        number, _ = worker.waiting.popleft()
                        worker.since = time.monotonic()
                        yield Outcome(number, result, failure)
                    except (EOFError, OSError):
                        lost = "crash"
                elif worker.waiting and time.monotonic() - worker.since > timeout:
                    lost = "timeout"
                if lost:
                    number, _ = worker.waiting.popleft()
                    again.extend(worker.waiting)
                    _end(worker)
                    crew[place] = started()
                    yield Outcome(number, None, lost)
    finally:
        for worker in crew:
            _end(worker)


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.kill()
    worker.process.join()


def _work(function: Callable[[Any], Any], pipe: connection.Connection) -> None:
    """Answer tasks until the pipe closes. An error of the function is an answer, too."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer = (function(task), "")
        except Exception as error:  # whatever it is, the parent reports it and goes on
            last = traceback.extract_tb(error.__traceback__)[-1]
            answer = (None, f"{type(error).__name__} in {last.name}: {error}"[:200])
        try:
            pipe.send(answer)
        except OSError:
            return
