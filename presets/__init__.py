"""The presets: complete configurations by name, and where their weights are. Imports the standard library only."""

from __future__ import annotations

import difflib
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO

_ORDER = ("nano", "mini", "neo", "air", "plus", "pro", "max", "ultra")
_POINTER = b"version https://git-lfs.github.com"


def names() -> tuple[str, ...]:
    """Return the names of all presets, small to large."""
    found = {entry.name.removesuffix(".yaml") for entry in files(__name__).iterdir() if entry.name.endswith(".yaml")}
    return tuple(name for name in _ORDER if name in found) + tuple(sorted(found.difference(_ORDER)))


def open_yaml(name: str) -> IO[str]:
    """Open the configuration of a preset as text.

    Raises:
        ValueError: there is no preset of that name.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no preset {name!r}; choose one of {', '.join(names())}.{hint}")
    return (files(__name__) / f"{name}.yaml").open(encoding="utf-8")


def weights_path(name: str) -> Path | None:
    """Return the file with the weights of a preset, or None where it has none yet.

    Raises:
        ValueError: there is no preset of that name, or its file is a Git LFS pointer instead of the weights.
    """
    open_yaml(name).close()
    path = _path(f"{name}.safetensors")
    if path is None:
        return None
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"{path} is a Git LFS pointer, not the weights; run 'git lfs pull' or install the wheel")
    return path


def data_path(name: str) -> Path:
    """Return a file of the embedded data set.

    Raises:
        ValueError: there is no such file.
    """
    path = _path(f"data/{name}")
    if path is None:
        raise ValueError(f"the embedded data set has no file {name!r}")
    return path


def _path(relative: str) -> Path | None:
    resource = files(__name__).joinpath(relative)
    if not resource.is_file():
        return None
    with as_file(resource) as path:  # installed as plain files, so the path stays valid
        return path
