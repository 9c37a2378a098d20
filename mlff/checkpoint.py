"""Models on disk: weights in safetensors.

The header holds the whole model section, so that a stray file can say what it is. Loading is strict, and executes
nothing.
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
from mlff import presets
from mlff.elements import SYMBOLS
from mlff.sezm.options import Options
from mlff.sezm.potential import SeZM

FORMAT = "mlff model"
VERSION = 1
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def save(potential: SeZM, path: str | os.PathLike[str], **metadata: Any) -> Path:
    """Write a model to a safetensors file, whole or not at all. Extra keywords become text in the header.

    Returns the path. The file holds parameters and reference energies; everything else follows from the options.
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


def locate(name: str | os.PathLike[str]) -> Path:
    """Return the weights file that a preset's name or a path stands for.

    Raises:
        ValueError: the preset has no weights yet, or there is no preset of that name.
        FileNotFoundError: a path was given and nothing is there.
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
    if os.sep not in text and "." not in text:
        presets.open_yaml(text)  # raises with the nearest name
    return Path(text)


def load(
    name: str | os.PathLike[str], device: str | torch.device = "auto", dtype: str | torch.dtype = "float32"
) -> SeZM:
    """Return a trained model in evaluation mode, from a preset's name or the path of a safetensors file.

    `device` "auto" is the GPU where there is one. Weights of any floating-point type load as `dtype`, float32 or
    float64.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the preset has no weights; the file is not a model of this package, or lacks or exceeds what its own
            header asks for; the dtype is another.
    """
    path = locate(name)
    header = read_header(path)
    dtype = _dtype(dtype)
    options = Options.from_mapping(json.loads(header["model"]))
    potential = SeZM(options, json.loads(header["elements"]), dtype=dtype)
    state = load_file(path)
    expected = potential.state_dict()
    missing, strange = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    wrong = [key for key in expected.keys() & state.keys() if expected[key].shape != state[key].shape]
    if missing or strange or wrong:
        raise ValueError(
            f"{str(path)!r} does not hold the model that its header describes: missing {missing[:3]}, "
            f"unknown {strange[:3]}, of another shape {sorted(wrong)[:3]}"
        )
    potential.load_state_dict(state)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return potential.to(device).eval()


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if dtype in DTYPES.values():
        return dtype  # pyright: ignore[reportReturnType]
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {' or '.join(DTYPES)}; got {dtype!r}")
    return DTYPES[dtype]  # type: ignore[index]
