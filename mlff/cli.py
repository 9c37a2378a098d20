"""The command `mlff` and its sub-commands. Keys are given as key=value; there are no flags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mlff import presets

_COMMANDS = {
    "finetune": "train a preset further on your structures: mlff finetune preset=mini data.train=mine.xyz",
    "train": "train from scratch: mlff train preset=neo data.train=mine.xyz",
    "evaluate": "errors on labelled structures: mlff evaluate weights=runs/x/model.safetensors data.test=test.xyz",
    "presets": "list the presets",
    "launches": "how kernels are cut on a GPU that need not be there: mlff launches preset=pro arch=sm_80,sm_120",
    "benchmark": "time training steps and forces on this machine: mlff benchmark preset=mini",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code. A user's mistake is one sentence on stderr, and code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name in ("--version", "version"):
        import mlff

        print(f"mlff {mlff.__version__}")
        return 0
    actions: dict[str, Callable[[Sequence[str]], int]] = {
        "finetune": finetune,
        "train": train,
        "evaluate": evaluate,
        "presets": list_presets,
        "launches": list_launches,
        "benchmark": benchmark,
    }
    if name not in actions:
        return _mistake(f"there is no command {name!r}; the commands are {', '.join(_COMMANDS)}.")
    return actions[name](rest)


def finetune(arguments: Sequence[str]) -> int:
    """Fine-tune a preset or other weights."""
    return _training(arguments, "finetune")


def train(arguments: Sequence[str], then: Callable[[Path], None] | None = None) -> int:
    """Train a preset's architecture from scratch; `then` is called with the path of the best model."""
    return _training(arguments, "train", then)


def _training(arguments: Sequence[str], command: str, then: Callable[[Path], None] | None = None) -> int:
    from mlff.config import read_config

    if _asks_for_help(arguments, command):
        return 0

    def action() -> None:
        config = read_config(arguments, command)  # type: ignore[arg-type]
        # Some seconds pass until torch and Lightning are there: nobody should have to wonder.
        print(f"mlff {command}: starting …", flush=True)
        from mlff.training import run

        path = run(config, command)  # type: ignore[arg-type]
        if then is not None:
            then(path)

    return _guarded(action)


def evaluate(arguments: Sequence[str]) -> int:
    """Print and write the errors of a model on labelled structures."""
    from mlff.config import read_config

    if _asks_for_help(arguments, "evaluate"):
        return 0

    def action() -> None:
        config = read_config(arguments, "evaluate")
        from mlff.report import evaluate_weights

        evaluate_weights(config)

    return _guarded(action)


def list_presets(arguments: Sequence[str] = ()) -> int:
    """Print a table of the presets."""
    from mlff import config

    def action() -> None:
        if arguments:
            raise ValueError(f"mlff presets takes no keys; got {' '.join(arguments)}.")
        rows = [("preset", "parameters", "elements", "trained on", "errors", "licence", "weights")]
        for name in presets.names():
            about = config.about(name)
            path = presets.weights_path(name)
            _, elements = config.preset_options(name)
            rows.append(
                (
                    name,
                    f"{about.parameters:,}",
                    "H-Og" if len(elements) == 118 else " ".join(elements),
                    about.trained_on or "-",
                    about.errors or "-",
                    about.licence,
                    _where(path, about.weights),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = [
                f"{cell:>{width}s}" if column == 1 else f"{cell:{width}s}"
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("  ".join(cells).rstrip())

    return _guarded(action)


def list_launches(arguments: Sequence[str] = ()) -> int:
    """Print the launch of each kernel of a preset on named architectures, by compiling for them; no GPU is needed."""

    def action() -> None:
        given = {key: value for key, _, value in (word.partition("=") for word in arguments)}
        for key in given:
            if key not in ("preset", "arch"):
                raise ValueError(f"mlff launches takes preset=NAME,… and arch=sm_80,…; got {key!r}.")
        try:
            from mlff import launches
        except ImportError as error:
            raise ValueError(
                f"mlff launches compiles kernels and needs Triton: pip install triton. ({error})"
            ) from None

        names = launches.read_presets(given.get("preset", ""))
        capabilities = launches.read_capabilities(given.get("arch", ""))
        print(launches.HEADER, flush=True)
        for row in launches.rows(names, capabilities):
            print(launches.line(row), flush=True)

    return _guarded(action)


def benchmark(arguments: Sequence[str] = ()) -> int:
    """Print how long training steps and forces take on this machine."""

    def action() -> None:
        from mlff import benchmark as measured

        if any(word in ("-h", "--help", "help") for word in arguments):
            print("usage: mlff benchmark key=value …\n")
            print("\n".join(f"  {key:12s} {default:18s} {text}" for key, (default, text) in measured.KEYS.items()))
            return
        cases = measured.cases({key: value for key, _, value in (word.partition("=") for word in arguments)})
        print(measured.HEADER, flush=True)
        for config, atoms in cases:
            print(measured.line(config, atoms), flush=True)

    return _guarded(action)


def _where(path: Path | None, weights: dict[str, str] | None) -> str:
    if path is not None:
        return str(path)
    return weights["url"] if weights else "none yet"


def _help() -> str:
    lines = ["usage: mlff COMMAND key=value …", ""]
    lines += [f"  {name:10s} {text}" for name, text in _COMMANDS.items()]
    return "\n".join([*lines, "", "mlff COMMAND --help lists the keys with their defaults and units."])


def _asks_for_help(arguments: Sequence[str], command: str) -> bool:
    if not any(word in ("-h", "--help", "help") for word in arguments):
        return False
    from mlff.config import help_text

    preset = next((word.removeprefix("preset=") for word in arguments if word.startswith("preset=")), None)
    print(f"usage: mlff {command} key=value …\n\n{help_text(command, preset)}")  # type: ignore[arg-type]
    return True


def _guarded(action: Callable[[], None]) -> int:
    """Run an action; what a user can mend is a sentence, what only we can mend keeps its traceback."""
    try:
        action()
    except (ValueError, FileNotFoundError, NotADirectoryError, PermissionError, FloatingPointError) as error:
        return _mistake(str(error))
    except KeyboardInterrupt:
        print("\nmlff: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    return 0


def _mistake(text: str) -> int:
    print(f"mlff: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
