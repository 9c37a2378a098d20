"""Frames in HDF5 as fixed-point numbers: small enough to travel with a package, exact enough to train on.

A file holds groups of frames that share their atoms. Positions and forces are whole numbers times a `scale`. Positions
are rounded *before* they are labelled, so that storing them costs nothing; forces on a grid of 1e-4 eV/Å are off by
3e-5 eV/Å rms, far below any model's error. Energies stay float64.

    file        attributes format = "mlff packed frames", version = 1, and whatever says where the data come from
    group       attributes name (by which errors are reported), split ("train", "valid", …), and any others
      numbers     uint8   (N,)          atomic numbers
      positions   int     (F, N, 3)     attribute scale, Å
      energy      float64 (F,)          eV, total
      forces      int     (F, N, 3)     attribute scale, eV/Å
      stress      int     (F, 6)        attribute scale, eV/Å³; Voigt xx yy zz yz xz xy, positive when pulling inwards
      cell        float64 (3, 3) or (F, 3, 3), Å; absent where not periodic
      pbc         bool    (3,) or (F, 3); absent: periodic along all axes with a cell, along none without
      charge, spin int8 (F,); weight float32 (F,)

All but numbers and positions may be absent. The most negative whole number of its type stands for a missing label.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

FORMAT = "mlff packed frames"
VERSION = 1


@dataclass
class PackedGroup:
    """Frames of the same atoms in the same order; a label that is None, or NaN in places, is missing."""

    numbers: np.ndarray  # (N,) atomic numbers
    positions: np.ndarray  # (F, N, 3) Å
    energy: np.ndarray | None = None  # (F,) eV
    forces: np.ndarray | None = None  # (F, N, 3) eV/Å
    stress: np.ndarray | None = None  # (F, 6) eV/Å³, Voigt
    cell: np.ndarray | None = None  # (3, 3) or (F, 3, 3) Å
    pbc: np.ndarray | None = None  # (3,) or (F, 3)
    charge: np.ndarray | None = None  # (F,)
    spin: np.ndarray | None = None  # (F,) multiplicity
    weight: np.ndarray | None = None  # (F,)
    name: str = ""  # by which errors are reported
    key: str = ""  # of the group in the file; a running number when empty
    attributes: dict[str, Any] = field(default_factory=dict)  # split, and anything else worth keeping
    position_scale: float = 1e-4  # Å
    force_scale: float = 1e-4  # eV/Å
    stress_scale: float = 1e-7  # eV/Å³

    @property
    def split(self) -> str:
        """The part of the data set to which these frames belong, "" when not said."""
        return str(self.attributes.get("split", ""))


def write_packed(path: str | Path, groups: Iterable[PackedGroup], attributes: Mapping[str, Any]) -> None:
    """Write groups of frames; `attributes` say where the data come from.

    Raises:
        ValueError: positions are not on the grid of `position_scale` (they must be rounded before they are labelled),
            an array has the wrong shape, or a number does not fit into its type.
    """
    try:
        with h5py.File(path, "w", libver="latest") as file:
            _set_attributes(file, {**attributes, "format": FORMAT, "version": VERSION})
            for count, group in enumerate(groups):
                _write_group(file, group.key or f"{count:06d}", group)
    except BaseException:
        Path(path).unlink(missing_ok=True)  # half a file would be read as a whole one
        raise


def read_packed(path: str | Path, splits: Collection[str] | None = None) -> Iterator[PackedGroup]:
    """Yield the groups of a file as float64 in Å and eV; `splits` keeps those whose split is named.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no HDF5 file of this format, is damaged, or has no such split.
    """
    try:
        file = h5py.File(path, "r")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} is not an HDF5 file, or is cut off: {error}") from error
    with file:
        if _text(file.attrs.get("format", "")) != FORMAT:
            raise ValueError(
                f"{path} is an HDF5 file, but not of the format {FORMAT!r} (mlff/data/packed.py describes it). "
                "Convert it, for example to extended XYZ."
            )
        version = file.attrs.get("version")
        if version != VERSION:
            raise ValueError(f"{path} has version {version} of its format; this program reads {VERSION}.")
        seen: set[str] = set()
        for key, group in file.items():
            split = _text(group.attrs.get("split", ""))
            seen.add(split)
            if splits is None or split in splits:
                try:
                    read = _read_group(key, group)
                except (KeyError, OSError) as error:
                    raise ValueError(f"{path}, group {key} is damaged: {error}. Fetch or write it anew.") from error
                yield read
        if unknown := set(splits or ()) - seen:
            known = ", ".join(sorted(seen - {""})) or "none"
            raise ValueError(f"{path} has no split {', '.join(sorted(unknown))!r}; it has {known}.")


# Stored as whole numbers times a scale.
_FIXED = ("positions", "forces", "stress")

# Stored as they are, with their types.
_PLAIN = {
    "energy": np.float64,
    "cell": np.float64,
    "pbc": np.bool_,
    "charge": np.int8,
    "spin": np.int8,
    "weight": np.float32,
}


def _write_group(file: Any, key: str, group: PackedGroup) -> None:
    _check(group, key)
    target = file.create_group(key)
    _set_attributes(target, {**group.attributes, "name": group.name})
    _put(target, "numbers", _fitting(group.numbers, np.uint8, f"{key}: numbers"))
    _put(target, "positions", _on_grid(group, key), group.position_scale)
    for label, scale in (("forces", group.force_scale), ("stress", group.stress_scale)):
        values = getattr(group, label)
        if values is not None:
            _put(target, label, _fixed(np.asarray(values, np.float64), scale, f"{key}: {label}"), scale)
    for label, dtype in _PLAIN.items():
        values = getattr(group, label)
        if values is not None:
            _put(target, label, _fitting(values, dtype, f"{key}: {label}"))


def _read_group(key: str, group: Any) -> PackedGroup:
    arrays: dict[str, np.ndarray] = {}
    scales: dict[str, float] = {}
    for name, stored in group.items():
        values = stored[()]
        if name in _FIXED:
            scales[name] = float(stored.attrs["scale"])
            missing = values == np.iinfo(values.dtype).min
            values = np.where(missing, np.nan, values * scales[name])
        arrays[name] = values
    attributes = {name: _text(value) for name, value in group.attrs.items()}
    return PackedGroup(
        numbers=arrays["numbers"],
        positions=arrays["positions"],
        forces=arrays.get("forces"),
        stress=arrays.get("stress"),
        name=attributes.pop("name", ""),
        key=key,
        attributes=attributes,
        position_scale=scales["positions"],
        force_scale=scales.get("forces", PackedGroup.force_scale),
        stress_scale=scales.get("stress", PackedGroup.stress_scale),
        **{name: arrays[name] for name in _PLAIN if name in arrays},
    )


def _check(group: PackedGroup, key: str) -> None:
    if np.ndim(group.positions) != 3:
        raise ValueError(f"group {key}: positions need the shape (frames, atoms, 3), not {np.shape(group.positions)}.")
    frames, atoms = np.shape(group.positions)[:2]
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "numbers": ((atoms,),),
        "positions": ((frames, atoms, 3),),
        "forces": ((frames, atoms, 3),),
        "stress": ((frames, 6),),
        "cell": ((3, 3), (frames, 3, 3)),
        "pbc": ((3,), (frames, 3)),
        **{name: ((frames,),) for name in ("energy", "charge", "spin", "weight")},
    }
    for name, allowed in shapes.items():
        value = getattr(group, name)
        if value is not None and np.shape(value) not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise ValueError(f"group {key}: {name} needs the shape {wanted}, not {np.shape(value)}.")


def _on_grid(group: PackedGroup, key: str) -> np.ndarray:
    positions = np.asarray(group.positions, np.float64)
    whole = np.rint(positions / group.position_scale)
    away = np.abs(whole * group.position_scale - positions).max(initial=0.0)
    if not away < 1e-9:  # rounding of coordinates up to 1e5 Å is 1e-11 Å; NaN fails as well
        raise ValueError(
            f"group {key}: positions lie up to {away:.2g} Å off the grid of {group.position_scale} Å. "
            "Round positions first and compute the labels of the rounded ones."
        )
    return _fitting(whole, np.int32, f"{key}: positions")


def _fixed(values: np.ndarray, scale: float, what: str) -> np.ndarray:
    """Return whole numbers, two bytes each where they fit, with the most negative one for NaN."""
    missing = np.isnan(values)
    whole = np.rint(np.where(missing, 0.0, values) / scale)
    dtype = np.int16 if np.abs(whole).max(initial=0.0) < 2**15 - 1 else np.int32
    fixed = _fitting(whole, dtype, what)
    fixed[missing] = np.iinfo(dtype).min
    return fixed


def _fitting(values: Any, dtype: type, what: str) -> np.ndarray:
    values = np.asarray(values)
    with np.errstate(invalid="ignore"):  # what does not fit is found below
        converted = values.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(converted, values):
        span = f"from {values.min()} to {values.max()}"
        raise ValueError(f"group {what} do not fit into {np.dtype(dtype)}: they reach {span}.")
    return converted


def _put(target: Any, name: str, values: np.ndarray, scale: float | None = None) -> None:
    # One chunk each: groups are small, and an index of chunks would be larger than the data.
    packing: dict[str, Any] = {"chunks": values.shape, "compression": "gzip", "compression_opts": 9, "shuffle": True}
    data = target.create_dataset(name, data=values, **(packing if values.size else {}))
    if scale is not None:
        data.attrs["scale"] = scale


def _set_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if isinstance(value, str):  # of fixed length: strings of variable length take a heap of 4 kB
            encoded = value.encode()
            target.attrs.create(name, encoded, dtype=h5py.string_dtype("utf-8", max(1, len(encoded))))
        else:
            target.attrs[name] = value


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
