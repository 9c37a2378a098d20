"""Folders in deepmd-kit's npy format to structures.

    type.raw            type of each atom          type_map.raw    symbol of each type
    nopbc               an empty file: not periodic
    set.000/coord.npy   (F, 3 N) Å                 box.npy         (F, 9) Å
            energy.npy  (F,) eV                    force.npy       (F, 3 N) eV/Å
            virial.npy  (F, 9) eV, = -V stress     real_atom_types.npy  (F, N), -1 for no atom

Conditions, for models that read them:

            charge_spin.npy  (F, 2) total charge (e) and spin multiplicity      spin.npy    (F, 3 N) spin vectors
            fparam.npy       (F, P) of each frame                               aparam.npy  (F, N Q) of each atom

Types are places in the folder's own type_map.raw and nothing else. Numbers may be float32. A label without a loss here,
as force_mag.npy, is named among the labels found and not read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlff.data.dataset import Frames, join_frames, make_frames
from mlff.elements import atomic_number

_NO_LABELS = ("coord", "box", "real_atom_types", "charge_spin", "spin", "fparam", "aparam")


def systems(folder: Path) -> list[Path]:
    """Return every system in a folder and the folders below it, sorted."""
    return sorted(file.parent for file in folder.rglob("type.raw"))


def read_system(folder: Path) -> tuple[Frames, set[str]]:
    """Return all frames of a system, and the names of the labels that it has.

    Raises:
        ValueError: a file is missing, cannot be read or contradicts another, or a type is no element; named are the
            folder and both numbers.
    """
    types = _types(folder)
    symbols = _symbols(folder)
    sets = sorted(path for path in folder.glob("set.*") if path.is_dir())
    if not sets:
        raise ValueError(f"{folder} has a type.raw, but no folder set.000 with coord.npy.")
    parts: list[Frames] = []
    found: set[str] = set()
    for path in sets:
        arrays = {file.stem: _load(file) for file in sorted(path.glob("*.npy"))}
        found.update(name for name in arrays if name not in _NO_LABELS)
        parts.append(_read_set(path, arrays, types, symbols, (folder / "nopbc").exists()))
    return join_frames(parts), found


def _read_set(
    path: Path, arrays: dict[str, np.ndarray], types: np.ndarray, symbols: list[str], is_open: bool
) -> Frames:
    if "coord" not in arrays:
        raise ValueError(f"{path} has no coord.npy.")
    if "box" not in arrays and not is_open:
        raise ValueError(
            f"{path} has no box.npy. Add the cells, or an empty file {path.parent / 'nopbc'} if the system is open."
        )
    n_frames, n_atoms = len(arrays["coord"]), len(types)
    widths = {"coord": 3 * n_atoms, "energy": 1, "force": 3 * n_atoms, "real_atom_types": n_atoms}
    widths |= {"charge_spin": 2, "spin": 3 * n_atoms}
    for name, count in (("fparam", n_frames), ("aparam", n_frames * n_atoms)):
        if name in arrays:
            _check_whole(path, name, arrays[name], count)
            widths[name] = arrays[name].size // n_frames
    if not is_open:
        widths |= {"box": 9, "virial": 9}
    for name, width in widths.items():
        if name in arrays:
            _check_size(path, name, arrays[name], n_frames, width, n_atoms)

    def rows(name: str, *shape: int) -> np.ndarray | None:
        return arrays[name].astype(np.float64).reshape(n_frames, *shape) if name in arrays and name in widths else None

    cell, virial, stress = rows("box", 3, 3), rows("virial", 3, 3), None
    if cell is not None and virial is not None:
        volume = np.abs(np.linalg.det(cell))
        if not volume.all():
            raise ValueError(f"{path}, frame {int(volume.argmin())}: the cell in box.npy spans no volume.")
        stress = -0.5 * (virial + virial.transpose(0, 2, 1)) / volume[:, None, None]
    kinds = arrays.get("real_atom_types")
    kinds = np.tile(types, (n_frames, 1)) if kinds is None else kinds.reshape(n_frames, n_atoms).astype(np.int64)
    there = kinds >= 0
    numbers_of = _numbers(path.parent, symbols, np.unique(kinds[there]))
    positions, forces = rows("coord", n_atoms, 3), rows("force", n_atoms, 3)
    assert positions is not None
    conditions, spins, of_atoms = rows("charge_spin", 2), rows("spin", n_atoms, 3), rows("aparam", n_atoms, -1)
    for name in ("charge_spin", "spin", "fparam", "aparam"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            raise ValueError(f"{path}: {name}.npy holds numbers that are not finite; conditions must all be known.")
    return make_frames(
        there.sum(1),
        numbers_of[kinds[there]],
        positions[there],
        str(path),
        group_names=(path.parent.name,),
        cell=cell,
        pbc=np.full(3, not is_open),
        energy=rows("energy"),
        forces=None if forces is None else forces[there],
        stress=stress,
        charge=None if conditions is None else conditions[:, 0],
        spin=None if conditions is None else conditions[:, 1],
        spins=None if spins is None else spins[there],
        frame_parameters=rows("fparam", -1),
        atom_parameters=None if of_atoms is None else of_atoms[there],
    )


def _check_whole(path: Path, name: str, array: np.ndarray, count: int) -> None:
    """Raise ValueError unless an array holds the same number of conditions for each of `count` frames or atoms."""
    if array.size == 0 or array.size % count:
        what = "frames" if name == "fparam" else "atoms in all frames"
        raise ValueError(f"{path}: {name}.npy has {array.size} numbers, no multiple of the {count} {what}.")


def _check_size(path: Path, name: str, array: np.ndarray, n_frames: int, width: int, n_atoms: int) -> None:
    if array.size == n_frames * width:
        return
    if len(array) != n_frames:
        raise ValueError(f"{path}: coord.npy has {n_frames} frames, but {name}.npy has {len(array)}.")
    if width not in (1, 2, 9):
        per_atom = 1 if name == "real_atom_types" else 3
        raise ValueError(
            f"{path}: type.raw lists {n_atoms} atoms, but {name}.npy has {array.size / n_frames / per_atom:g} in each "
            f"of its {n_frames} frames."
        )
    raise ValueError(f"{path}: {name}.npy has {array.size} numbers; {n_frames} frames need {n_frames * width}.")


def _types(folder: Path) -> np.ndarray:
    try:
        types = np.array([int(word) for word in (folder / "type.raw").read_text().split()], np.int64)
    except ValueError as error:
        raise ValueError(f"{folder / 'type.raw'} holds something else than whole numbers: {error}.") from error
    if len(types) == 0 or types.min() < 0:
        raise ValueError(f"{folder / 'type.raw'} needs a type, 0 or more, for each atom; it has {types.tolist()}.")
    return types


def _symbols(folder: Path) -> list[str]:
    file = folder / "type_map.raw"
    if not file.exists():
        raise ValueError(f"{folder} has no type_map.raw, so nobody can know which elements the types 0, 1, … are.")
    return file.read_text().split()


def _numbers(folder: Path, symbols: list[str], used: np.ndarray) -> np.ndarray:
    """Return the atomic number of each type; types that no atom has need not be elements."""
    numbers = np.zeros(len(symbols), np.int64)
    for kind in used.tolist():
        if kind >= len(symbols):
            raise ValueError(
                f"{folder}: an atom has type {kind}, but type_map.raw names {len(symbols)} types, counted from 0."
            )
        try:
            numbers[kind] = atomic_number(symbols[kind])
        except ValueError as error:
            raise ValueError(f"{folder / 'type_map.raw'}, type {kind}: {error}") from error
    return numbers


def _load(file: Path) -> np.ndarray:
    try:
        return np.atleast_1d(np.load(file))
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file} is no array of numbers, or is cut off: {error}.") from error
