"""The command `mlff` and its sub-commands. Keys are given as key=value; there are no flags."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlff import presets

if TYPE_CHECKING:
    from mlff.sezm.potential import SeZM

_COMMANDS = {
    "finetune": "train a preset further on your structures: mlff finetune preset=mini data.train=mine.xyz",
    "train": "train from scratch: mlff train preset=neo data.train=mine.xyz",
    "evaluate": "errors on labelled structures: mlff evaluate weights=runs/x/model.safetensors data.test=test.xyz",
    "presets": "list the presets",
    "launches": "how kernels are cut on a GPU that need not be there: mlff launches preset=pro arch=sm_80,sm_120",
    "benchmark": "time training steps and forces on this machine: mlff benchmark preset=mini",
    "import": "a deepmd-kit checkpoint to weights of ours: mlff import DPA4-Mini.pt output=mini.safetensors",
    "export": "weights to a checkpoint that deepmd-kit opens: mlff export model.safetensors output=model.pt",
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
        "import": import_checkpoint,
        "export": export_checkpoint,
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
                    _known(elements),
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


def import_checkpoint(arguments: Sequence[str]) -> int:
    """Turn a deepmd-kit checkpoint, or a public one by its name, into weights of this package."""
    keys = {
        "output": "file to write; by default the checkpoint's name with .safetensors, here",
        "head": "which model of a multi-task file; the error lists them",
        "elements": "symbols to keep, as elements=H,C,O; by default all of the file",
        "average": "true (the running average of weights, where the file has one) | false",
        "accept_license": "cc-by-nc: you may use public weights that exclude commercial use",
    }
    if any(word in ("-h", "--help", "help") for word in arguments):
        return _file_help("import", "CHECKPOINT.pt | PUBLIC-NAME", keys)

    def action() -> None:
        name, given = _file_and_keys(arguments, "import", keys, "DPA4-Mini.pt output=mini.safetensors")
        if given.get("average", "true") not in ("true", "false"):
            raise ValueError(f"average must be true or false; got {given['average']!r}.")
        from mlff import checkpoint
        from mlff.interop import deepmd

        path = checkpoint.locate(name, given.get("accept_license"))
        output = Path(given.get("output", f"{path.stem}.safetensors"))
        if output.suffix != ".safetensors":
            raise ValueError(f"output must end in .safetensors; got {str(output)!r}.")
        elements = given["elements"].replace(",", " ").split() if "elements" in given else None
        potential = deepmd.load(path, given.get("head"), elements, average=given.get("average", "true") == "true")
        checkpoint.save(potential, output, imported_from=path.name)
        print(f"{output}: {_said(potential)}")

    return _guarded(action)


def export_checkpoint(arguments: Sequence[str]) -> int:
    """Turn weights of this package into a checkpoint of deepmd-kit."""
    keys = {"output": "file to write, *.pt; by default the model's name with .pt, here"}
    if any(word in ("-h", "--help", "help") for word in arguments):
        return _file_help("export", "MODEL.safetensors | PRESET", keys)

    def action() -> None:
        name, given = _file_and_keys(arguments, "export", keys, "model.safetensors output=model.pt")
        from mlff import checkpoint
        from mlff.interop import deepmd

        potential = checkpoint.load(name, device="cpu", dtype=None)
        output = deepmd.save(potential, given.get("output", f"{Path(name).stem}.pt"))
        print(f"{output}: {_said(potential)}")

    return _guarded(action)


def _known(elements: Sequence[str]) -> str:
    """Elements on one short line."""
    if len(elements) <= 12:
        return " ".join(elements)
    return "H-Og" if len(elements) == 118 else f"{len(elements)} of {elements[0]}-{elements[-1]}"


def _file_and_keys(
    arguments: Sequence[str], command: str, keys: Mapping[str, str], example: str
) -> tuple[str, dict[str, str]]:
    """Return the file of a command that takes one, and its keys."""
    files = [word for word in arguments if "=" not in word]
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"mlff {command} takes the keys {', '.join(keys)}; got {key!r}.{hint}")
    if len(files) != 1:
        raise ValueError(f"mlff {command} takes one file, as in mlff {command} {example}; got {len(files)}.")
    return files[0], given


def _file_help(command: str, file: str, keys: Mapping[str, str]) -> int:
    lines = "\n".join(f"  {key:16s} {text}" for key, text in keys.items())
    print(f"usage: mlff {command} {file} key=value …\n\n{lines}")
    return 0


def _said(potential: SeZM) -> str:
    numbers = sum(parameter.numel() for parameter in potential.parameters())
    known = len(potential.elements)
    return f"{numbers:,} parameters, {known} elements, cutoff {potential.cutoff:g} Å"


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
