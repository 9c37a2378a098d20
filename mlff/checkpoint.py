"""Models on disk: weights in safetensors.

The header holds the whole model section, so that a stray file can say what it is. Loading is strict, and executes
nothing.

Wherever weights are asked for, a checkpoint of deepmd-kit does too, as does the name of a public one: what a file is
and where it lies is decided here alone.

    mini                              a preset
    runs/x/model.safetensors          a file of ours
    DPA4-Neo.pt, multi.pt::Water      a checkpoint of deepmd-kit, and one head of it
    DPA4-Neo-OMat24-v20260805         a public checkpoint, see mlff.registry
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import mlff
from mlff import presets, registry
from mlff.elements import SYMBOLS
from mlff.interop import deepmd
from mlff.sezm.options import Options
from mlff.sezm.potential import SeZM

FORMAT = "mlff model"
VERSION = 1
HEADER = ("format", "format_version", "mlff_version", "model", "elements")
"""What every header says; the rest is the writer's."""
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def save(potential: SeZM, path: str | os.PathLike[str], matrices: torch.dtype | None = None, **metadata: Any) -> Path:
    """Write a model to a safetensors file, whole or not at all. Extra keywords become text in the header.

    Returns the path. The file holds parameters and reference energies; everything else follows from the options.

    Args:
        potential: the model.
        path: where to.
        matrices: what matrices are rounded to in the file, as bfloat16 to halve it; None keeps them as they are.
        metadata: what else the header says.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "format": FORMAT,
        "format_version": str(VERSION),
        "mlff_version": mlff.__version__,
        "model": json.dumps(potential.options.to_mapping()),
        "elements": json.dumps([SYMBOLS[number] for number in potential.elements]),
        **{name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()},
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in potential.state_dict().items()}
    if matrices is not None:
        tensors = {name: tensor.to(matrices) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    temporary = path.with_name(path.name + ".partial")
    save_file(tensors, temporary, metadata=header)
    temporary.chmod(0o644)  # safetensors makes it readable by its owner alone; models are passed around
    os.replace(temporary, path)
    return path


def read_header(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the header of a model file: format, mlff_version, model and elements as JSON, and what the writer added.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a model of this package.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no weights file {str(path)!r}")
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("truncated")
            header = json.loads(file.read(length)).get("__metadata__", {})
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} is not a safetensors file, or is cut short; expected weights of mlff"
        ) from error
    if header.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is a safetensors file, but not a model of mlff")
    if int(header["format_version"]) > VERSION:
        raise ValueError(
            f"{str(path)!r} has format version {header['format_version']}; this mlff ({mlff.__version__}) reads up to "
            f"{VERSION}. Install a newer mlff."
        )
    return header


def locate(name: str | os.PathLike[str], accept_license: str | None = None) -> Path:
    """Return the weights file that a name or a path stands for; `::HEAD` behind a path stays there.

    A public checkpoint is fetched if it is not here yet; a file of the same name in the working folder goes first.

    Raises:
        ValueError: the preset has no weights yet, there is no preset of that name, or the licence of a public
            checkpoint is not accepted (`accept_license`), or its file is damaged.
        FileNotFoundError: a public checkpoint is not here and cannot be fetched.
    """
    text = os.fspath(name)
    if text in presets.names():
        path = presets.weights_path(text)
        if path is None:
            ready = [other for other in presets.names() if presets.weights_path(other) is not None]
            raise ValueError(
                f"preset {text!r} has no trained weights yet; presets with weights: {', '.join(ready) or 'none'}. "
                f"mlff.SeZM.from_preset({text!r}) gives an untrained model."
            )
        return path
    if registry.knows(text) and not Path(text).is_file():
        return registry.fetch(text, accept_license)
    if os.sep not in text and "." not in text and not Path(text).exists():
        if text.lower().startswith("dpa4"):
            registry.entry(text)  # raises with the nearest name
        presets.open_yaml(text)  # and so does this
    return Path(text)


def describe(path: str | os.PathLike[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the model options of a weights file, as plain values, and the symbols of its elements.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no model that can be read here.
    """
    file, head = _file_and_head(path)
    if deepmd.is_checkpoint(file):
        found = deepmd.read(file, head)
        try:
            return found.options.to_mapping(), found.elements
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    header = read_header(file)
    return json.loads(header["model"]), tuple(json.loads(header["elements"]))


def load(
    name: str | os.PathLike[str],
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = "float32",
    accept_license: str | None = None,
) -> SeZM:
    """Return a trained model in evaluation mode.

    Args:
        name: a preset, the path of a safetensors file of ours or of a deepmd-kit checkpoint (`x.pt`, or `x.pt::HEAD`
            for one model of several), or the name of a public checkpoint.
        device: "auto" is the GPU where there is one.
        dtype: float32 or float64; weights of any floating-point type are converted. None keeps float64 where the
            file has it.
        accept_license: "cc-by-nc" where the licence of a public checkpoint excludes commercial use.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the preset has no weights; the file is no model that can be read, or lacks or exceeds what it says
            of itself; a licence is not accepted; the dtype is another.
    """
    path, head = _file_and_head(locate(name, accept_license))
    wanted = None if dtype is None else _dtype(dtype)
    potential = deepmd.load(path, head, dtype=wanted) if deepmd.is_checkpoint(path) else _load_ours(path, wanted)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return potential.to(device).eval()


def _load_ours(path: Path, dtype: torch.dtype | None) -> SeZM:
    header = read_header(path)
    options = Options.from_mapping(json.loads(header["model"]))
    state = load_file(path)
    if dtype is None:
        exact = any(tensor.dtype == torch.float64 for name, tensor in state.items() if name != "reference_energies")
        dtype = torch.float64 if exact else torch.float32
    potential = SeZM(options, json.loads(header["elements"]), dtype=dtype)
    expected = potential.state_dict()
    missing, strange = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    wrong = [key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape]
    if missing or strange or wrong:
        raise ValueError(
            f"{str(path)!r} does not hold the model that its header describes: missing {missing[:3]}, "
            f"unknown {strange[:3]}, of another shape {sorted(wrong)[:3]}"
        )
    potential.load_state_dict(state)
    return potential


def _file_and_head(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """Return a path and the head asked for behind `::`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a head is asked of a file that has none.
    """
    name, sign, head = os.fspath(path).partition("::")
    file = Path(name)
    if not file.is_file():
        raise FileNotFoundError(f"there is no weights file {name!r}")
    if sign and not deepmd.is_checkpoint(file):
        raise ValueError(f"{name!r} is no checkpoint of deepmd-kit, so it has no head {head!r}")
    return file, head or None


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if dtype in DTYPES.values():
        return dtype  # pyright: ignore[reportReturnType]
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}; got {dtype!r}")
    return DTYPES[dtype]  # type: ignore[index]
