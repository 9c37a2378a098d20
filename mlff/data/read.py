"""Files of labelled structures to a data set of graphs and labels.

Read are the packed HDF5 files of `mlff.data.packed`, folders in deepmd-kit's npy format, and everything that ASE reads:
extended XYZ (also compressed), .traj, .db, VASP's vasprun.xml and OUTCAR, and so on. All frames go into a few flat
arrays (`mlff.data.dataset`); the graph of a structure is made when it is asked for.

A path may name a part: `x.h5::train` a split, `x.xyz::0:100` frames as Python counts them, `x.db::id<9` rows as
ASE does.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import ase.io
import numpy as np

from mlff.atoms import (
    LabelKeys,
    Labels,
    charge_and_spin,
    label_names,
    labels_from_atoms,
    matrix_from_voigt,
    spins_of,
    warn_of_large_stress,
)
from mlff.data import deepmd
from mlff.data.dataset import Dataset, Frames, join_frames, make_frames
from mlff.data.packed import read_packed

__all__ = ["Dataset", "read", "require_labels", "split"]

_PACKED = (".h5", ".hdf5")

# What is read in a folder that is given as a whole; a file that is named is read whatever it is called.
_IN_FOLDERS = (".xyz", ".extxyz", ".traj", ".db", ".aselmdb", *_PACKED)
_COMPRESSED = (".gz", ".bz2", ".xz")


def read(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    cutoff: float,
    elements: Collection[int] | None = None,
    keys: LabelKeys | None = None,
) -> Dataset:
    """Read labelled structures into memory.

    Args:
        paths: a file, a folder, a glob, or several of them. In a folder and those below it, deepmd-kit systems, packed
            files, extended XYZ, .traj, .db and VASP's outputs are found.
        cutoff: of the graphs, Å.
        elements: atomic numbers that are allowed; None allows all.
        keys: names of the labels in files that ASE reads, and the unit of their stress (VASP's own files, which ASE
            converts, excepted).

    Raises:
        FileNotFoundError: nothing is at a path, or nothing matches a glob.
        ValueError: a file is empty, cannot be read or contradicts itself, or holds an element that is not allowed, or a
            number that is not finite; the file and the frame are named.

    Warns:
        UserWarning: a stress is larger than 1 eV/Å³ and its unit was not declared.
    """
    keys = keys or LabelKeys()
    parts: list[Frames] = []
    found: set[str] = set()
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        for source, choice in _sources(os.fspath(path)):
            frames, names = _read_source(source, choice, keys)
            if len(frames) == 0:
                raise ValueError(f"{_named(source, choice)} holds no structure.")
            frames.check(elements)
            parts.append(frames)
            found |= names
    if not parts:
        raise ValueError("no file of structures was given; expected a file, a folder, a glob, or several of them.")
    frames = join_frames(parts)
    sizes = np.abs(frames.stress).reshape(len(frames), -1).max(1)
    if not np.isnan(sizes).all():
        largest = int(np.nanargmax(sizes))
        warn_of_large_stress(frames.stress[largest : largest + 1], keys, frames.place(largest))
    return Dataset(frames, cutoff, names_found=found)


def split(dataset: Dataset, valid_fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a data set at random into training and validation; at least one structure stays on each side.

    Which structures go where is a function of their number and the seed. The order is kept.

    Raises:
        ValueError: the fraction is not between 0 and 1, or there are fewer than two structures.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"data.valid_fraction must lie between 0 and 1; got {valid_fraction}.")
    if len(dataset) < 2:
        raise ValueError(
            f"{len(dataset)} structure cannot be split into training and validation; give data.valid, or more of them."
        )
    order = np.random.default_rng(seed).permutation(len(dataset))
    count = min(max(1, round(valid_fraction * len(dataset))), len(dataset) - 1)
    return dataset.subset(np.sort(order[count:])), dataset.subset(np.sort(order[:count]))


def require_labels(dataset: Dataset, wanted: Collection[str], keys: LabelKeys | None = None) -> None:
    """Raise ValueError where no structure at all has one of the wanted labels: "energy", "forces" or "stress"."""
    keys = keys or LabelKeys()
    for label in wanted:
        if dataset.has_label(label):
            continue
        names = repr(getattr(keys, label)) + (f" or {keys.virial!r}" if label == "stress" else "")
        there = ", ".join(dataset.names_found) or "nothing that could be a label"
        advice = f"Set data.{label}_key to the right name, or training.loss.{label}=0 to train without."
        if label == "stress":
            advice += " A stress counts only where the structure is periodic."
        raise ValueError(f"no structure has a label for {label} (under {names}); the files hold: {there}. {advice}")


def _sources(path: str) -> Iterator[tuple[Path, str]]:
    """Yield every file or deepmd-kit system that a path stands for, with what was asked for behind `::`."""
    name, _, choice = path.partition("::")
    plain = Path(name).expanduser()
    matches = [plain] if plain.exists() else [Path(name) for name in sorted(glob.glob(str(plain), recursive=True))]
    if not matches:
        if glob.has_magic(name):
            raise FileNotFoundError(f"no file or folder matches {name!r} (looked from {Path.cwd()}).")
        hint = f" Frames are chosen as {name.replace('@', '::')!r}." if "@" in name else ""
        raise FileNotFoundError(f"there is no file or folder {name!r} (looked from {Path.cwd()}).{hint}")
    folders = {match for match in matches if match.is_dir()}
    for match in matches:
        if folders.isdisjoint(match.parents):  # else found in its folder: a glob such as data/** matches both
            for source in _in_folder(match) if match in folders else [match]:
                yield source, choice


def _in_folder(folder: Path) -> list[Path]:
    found = deepmd.systems(folder)
    for file in sorted(folder.rglob("*")):
        ending = file.with_suffix("").suffix if file.suffix in _COMPRESSED else file.suffix
        vasp = _from_vasp(file)
        if file.name.startswith("OUTCAR"):  # of the same run as a vasprun.xml beside it
            vasp = not any(file.parent.glob("vasprun.xml*"))
        if file.is_file() and not file.name.startswith(".") and (ending in _IN_FOLDERS or vasp):
            found.append(file)
    if not found:
        raise ValueError(
            f"the folder {str(folder)!r} and those below it hold neither deepmd-kit systems (type.raw) nor files named "
            f"*{', *'.join(_IN_FOLDERS)}, vasprun.xml or OUTCAR. Name the files themselves, or a glob."
        )
    return found


def _read_source(source: Path, choice: str, keys: LabelKeys) -> tuple[Frames, set[str]]:
    if source.is_dir():
        frames, names = deepmd.read_system(source)
        return (frames.select(_slice(choice, source)) if choice else frames), names
    if source.stat().st_size == 0:
        raise ValueError(f"{source} is empty.")
    return _read_packed(source, choice) if source.suffix in _PACKED else _read_ase(source, choice, keys)


def _read_packed(source: Path, choice: str) -> tuple[Frames, set[str]]:
    parts: list[Frames] = []
    found: set[str] = set()
    for group in read_packed(source, [choice] if choice else None):
        count, atoms = group.positions.shape[:2]
        found.update(name for name in ("energy", "forces", "stress") if getattr(group, name) is not None)
        given = {name: getattr(group, name) for name in ("cell", "energy", "forces", "charge", "spin", "weight")}
        stress = None if group.stress is None else np.array([matrix_from_voigt(row) for row in group.stress])
        frames = make_frames(
            np.full(count, atoms),
            np.tile(group.numbers, count).astype(np.int64),
            group.positions.reshape(-1, 3),
            f"{source}, group {group.key}",
            group_names=(group.name,),
            pbc=np.full(3, group.cell is not None) if group.pbc is None else group.pbc,
            stress=stress,
            **given,
        )
        parts.append(frames)
    if not parts:
        raise ValueError(f"{_named(source, choice)} holds no structure.")
    return join_frames(parts), found


def _read_ase(source: Path, choice: str, keys: LabelKeys) -> tuple[Frames, set[str]]:
    named = _named(source, choice)
    if _from_vasp(source):  # whose kilobar ASE has converted already
        keys = dataclasses.replace(keys, stress_unit="eV/A^3")
    atoms_of: list[Any] = []
    labels: list[Labels] = []
    conditions: list[tuple[float, float]] = []
    spins: list[np.ndarray | None] = []
    found: set[str] = set()
    for number, atoms in enumerate(_frames_of(source, choice)):
        where = f"{named}, frame {number}"
        found.update(label_names(atoms))
        labels.append(labels_from_atoms(atoms, keys, where))
        conditions.append(charge_and_spin(atoms, keys, where))
        spins.append(spins_of(atoms, where))
        atoms_of.append((atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc))
    if not atoms_of:
        raise ValueError(f"{named} holds no structure.")
    numbers, positions, cells, pbc = zip(*atoms_of, strict=True)
    names = tuple(dict.fromkeys(one.group for one in labels))
    place_of = {name: k for k, name in enumerate(names)}
    with_spins = [np.zeros((len(z), 3)) if one is None else one for z, one in zip(numbers, spins, strict=True)]
    frames = make_frames(
        np.array([len(one) for one in numbers]),
        np.concatenate(numbers).astype(np.int64),
        np.concatenate(positions),
        named,
        group_names=names,
        cell=np.array(cells),
        pbc=np.array(pbc),
        energy=np.array([one.energy for one in labels]),
        forces=np.concatenate([one.forces for one in labels]),
        stress=np.array([one.stress for one in labels]),
        charge=np.array([charge for charge, _ in conditions]),
        spin=np.array([spin for _, spin in conditions]),
        weight=np.array([one.weight for one in labels]),
        spins=None if all(one is None for one in spins) else np.concatenate(with_spins),
        group=np.array([place_of[one.group] for one in labels]),
    )
    return frames, found


def _frames_of(source: Path, choice: str) -> Iterator[Any]:
    """Yield `ase.Atoms`; whatever ASE raises becomes a ValueError with file and frame."""
    number = 0
    kind = "db" if source.suffix == ".aselmdb" else None  # whose type ASE's database finds by the name
    try:
        for atoms in ase.io.iread(source, index=choice or ":", format=kind):  # type: ignore[arg-type]
            yield atoms
            number += 1
    except Exception as error:  # ASE's readers raise whatever their format makes them raise
        words = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError):
            words = f"{error} is no element, or a name that is missing"
        elif isinstance(error, ModuleNotFoundError) and error.name == "ase_db_backends":
            words = f"{error}; pip install ase-db-backends reads this kind of file"
        elif "stress" in str(error):
            words += ". Give nine numbers, or six under another name, which data.stress_key then says"
        raise ValueError(f"{_named(source, choice)}, frame {number} cannot be read: {words}.") from error


def _from_vasp(file: Path) -> bool:
    return file.name.startswith(("vasprun.xml", "OUTCAR"))


def _slice(choice: str, source: Path) -> slice:
    if not re.fullmatch(r"-?\d*(:-?\d*){0,2}", choice):
        raise ValueError(f"{_named(source, choice)}: expected frames as 5, 0:10 or ::2 behind '::'; got {choice!r}.")
    numbers = [int(word) if word else None for word in choice.split(":")]
    if len(numbers) == 1:
        assert numbers[0] is not None
        return slice(numbers[0], numbers[0] + 1 or None)
    return slice(*numbers)


def _named(source: Path, choice: str) -> str:
    return f"{source}::{choice}" if choice else str(source)
