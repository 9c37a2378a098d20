"""Files of labelled structures to a data set of graphs and labels.

Read are fixed-point HDF5 (`mlff.data.packed`), folders in deepmd-kit's npy format, and everything that ASE reads. All
frames are kept as a few flat arrays, so that a data set of 10⁵ structures is small and quick to hand to the processes
of a data loader; the graph of a structure is made when it is asked for.

A path may name a part: `x.h5::train` a split, `x.xyz::0:100` frames as ASE counts them.
"""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
from ase import Atoms
from jaxtyping import Float, Int

from mlff.atoms import LabelKeys, label_names, require_known, targets_from_atoms
from mlff.data.packed import PackedGroup, read_packed
from mlff.elements import atomic_number
from mlff.graph import Graph, Targets
from mlff.neighbors import neighbor_list

NO_NUMBER = np.nan


class Dataset:
    """Labelled structures in memory. `dataset[i]` is the graph of structure i, up to the cutoff, and its labels.

    Attributes:
        cutoff: Å.
        n_atoms: atoms of each structure.
        names_found: every name under which the files store something that could be a label.
    """

    def __init__(self, frames: _Frames, cutoff: float, indices: Int[np.ndarray, "S"] | None = None) -> None:
        self._frames = frames
        self._indices = np.arange(frames.count) if indices is None else np.asarray(indices, dtype=np.int64)
        self._n_edges: Int[np.ndarray, "S"] | None = None
        self.cutoff = cutoff
        self.n_atoms: Int[np.ndarray, "S"] = np.diff(frames.offsets)[self._indices]
        self.names_found = frames.names_found

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Graph, Targets]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"structure {index} of a data set of {len(self)}")
        frames, frame = self._frames, int(self._indices[index])
        atoms = slice(int(frames.offsets[frame]), int(frames.offsets[frame + 1]))
        senders, receivers, shifts = self._edges(frame)
        numbers = frames.numbers[atoms].astype(np.int64)
        spins = None if frames.spins is None else torch.from_numpy(frames.spins[atoms].copy())
        graph = Graph(
            positions=torch.from_numpy(frames.positions[atoms].copy()),
            numbers=torch.from_numpy(numbers),
            structure=torch.zeros(len(numbers), dtype=torch.int64),
            senders=torch.from_numpy(senders),
            receivers=torch.from_numpy(receivers),
            shifts=torch.from_numpy(shifts),
            cell=torch.from_numpy(frames.cells[frame : frame + 1].copy()),
            pbc=torch.from_numpy(frames.pbc[frame : frame + 1].copy()),
            charge=torch.from_numpy(frames.charge[frame : frame + 1].copy()),
            spin=torch.from_numpy(frames.spin[frame : frame + 1].copy()),
            spins=spins,
        )
        targets = Targets(
            energy=torch.from_numpy(frames.energy[frame : frame + 1].copy()),
            forces=torch.from_numpy(frames.forces[atoms].copy()),
            stress=torch.from_numpy(frames.stress[frame : frame + 1].copy()),
            weight=torch.from_numpy(frames.weight[frame : frame + 1].copy()),
            group=(frames.group_names[frames.groups[frame]],),
            index=torch.tensor([index % len(self)]),
        )
        return graph, targets

    def numbers_of(self, index: int) -> Int[np.ndarray, "N"]:
        """Return the atomic numbers of a structure."""
        frame = int(self._indices[index])
        return self._frames.numbers[self._frames.offsets[frame] : self._frames.offsets[frame + 1]].astype(np.int64)

    def n_edges(self) -> Int[np.ndarray, "S"]:
        """Return the number of directed edges of each structure; counted once."""
        if self._n_edges is None:
            self._n_edges = np.array([len(self._edges(int(frame))[0]) for frame in self._indices], dtype=np.int64)
        return self._n_edges

    def compositions(self, elements: Sequence[int]) -> Float[np.ndarray, "S E"]:
        """Return how many atoms of each element each structure has, columns in the given order."""
        owner = np.repeat(np.arange(self._frames.count), np.diff(self._frames.offsets))
        counts = np.zeros((self._frames.count, 119))
        np.add.at(counts, (owner, self._frames.numbers.astype(np.int64)), 1)
        return counts[self._indices][:, list(elements)]

    def energies(self) -> Float[np.ndarray, "S"]:
        """Return the total energies in eV, NaN where there is none."""
        return self._frames.energy[self._indices].copy()

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers that occur, sorted."""
        present: set[int] = set()
        for frame in self._indices:
            present.update(self._frames.numbers[self._frames.offsets[frame] : self._frames.offsets[frame + 1]].tolist())
        return tuple(sorted(present))

    @property
    def groups(self) -> tuple[str, ...]:
        """Distinct names under which errors are reported."""
        return tuple(self._frames.group_names[k] for k in np.unique(self._frames.groups[self._indices]))

    def has_label(self, label: str) -> bool:
        """Return whether any structure has an energy, forces or a stress."""
        values = getattr(self._frames, label)
        if label != "forces":
            return bool(np.isfinite(values[self._indices]).any())
        chosen = np.zeros(self._frames.count, dtype=bool)
        chosen[self._indices] = True
        return bool(np.isfinite(values[np.repeat(chosen, np.diff(self._frames.offsets))]).any())

    def subset(self, indices: Sequence[int] | Int[np.ndarray, "K"]) -> Dataset:
        """Return some of the structures as a data set that shares their memory."""
        chosen = np.asarray(indices, dtype=np.int64)
        part = Dataset(self._frames, self.cutoff, self._indices[chosen])
        if self._n_edges is not None:
            part._n_edges = self._n_edges[chosen]
        return part

    def _edges(self, frame: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        frames = self._frames
        atoms = slice(int(frames.offsets[frame]), int(frames.offsets[frame + 1]))
        try:
            return neighbor_list(frames.positions[atoms], frames.cells[frame], frames.pbc[frame], self.cutoff)
        except ValueError as error:
            raise ValueError(f"{frames.place(frame)}: {error}") from error


class _Frames:
    """The flat arrays that all subsets of a data set share."""

    def __init__(self, parts: Sequence[_Part], names_found: Collection[str]) -> None:
        sizes = np.concatenate([np.full(part.count, len(part.numbers)) for part in parts])
        self.offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
        self.count = len(sizes)
        self.numbers = np.concatenate([np.tile(part.numbers, part.count) for part in parts]).astype(np.uint8)
        self.positions = np.concatenate([part.positions.reshape(-1, 3) for part in parts])
        self.forces = np.concatenate([part.forces.reshape(-1, 3) for part in parts])
        for name in ("energy", "stress", "cells", "pbc", "charge", "spin", "weight"):
            setattr(self, name, np.concatenate([getattr(part, name) for part in parts]))
        self.energy: np.ndarray
        self.stress: np.ndarray
        self.cells: np.ndarray
        self.pbc: np.ndarray
        self.charge: np.ndarray
        self.spin: np.ndarray
        self.weight: np.ndarray
        with_spins = [part.spins is not None for part in parts]
        self.spins = np.concatenate([part.spins for part in parts]) if parts and all(with_spins) else None  # type: ignore[arg-type]
        self.group_names = tuple(dict.fromkeys(part.group for part in parts))
        number_of = {name: k for k, name in enumerate(self.group_names)}
        self.groups = np.concatenate([np.full(part.count, number_of[part.group]) for part in parts])
        self._places = [(part.count, part.where, part.first) for part in parts]
        self.names_found = tuple(sorted(names_found))

    def place(self, frame: int) -> str:
        """Return file and number of a frame, for messages."""
        for count, where, first in self._places:
            if frame < count:
                return f"{where}, frame {first + frame}"
            frame -= count
        raise IndexError(frame)


class _Part:
    """Frames of the same atoms as they come from one reader; labels that are missing are NaN."""

    def __init__(
        self,
        numbers: np.ndarray,
        positions: np.ndarray,
        where: str,
        first: int = 0,
        energy: np.ndarray | None = None,
        forces: np.ndarray | None = None,
        stress: np.ndarray | None = None,
        cells: np.ndarray | None = None,
        pbc: np.ndarray | None = None,
        charge: np.ndarray | None = None,
        spin: np.ndarray | None = None,
        weight: np.ndarray | None = None,
        spins: np.ndarray | None = None,
        group: str = "",
    ) -> None:
        count, atoms = len(positions), len(numbers)

        def filled(values: np.ndarray | None, shape: tuple[int, ...], default: float) -> np.ndarray:
            if values is None:
                return np.full((count, *shape), default)
            return np.broadcast_to(np.asarray(values, dtype=np.float64), (count, *shape)).copy()

        self.count, self.numbers, self.where, self.first, self.group = count, np.asarray(numbers), where, first, group
        self.positions = np.asarray(positions, dtype=np.float64).reshape(count, atoms, 3)
        if not np.isfinite(self.positions).all():
            bad = first + int(np.argwhere(~np.isfinite(self.positions))[0][0])
            raise ValueError(f"{where}, frame {bad}: positions are not finite")
        self.energy = filled(energy, (), NO_NUMBER)
        self.forces = filled(forces, (atoms, 3), NO_NUMBER)
        self.stress = filled(stress, (3, 3), NO_NUMBER)
        self.pbc = np.broadcast_to(False if pbc is None else pbc, (count, 3)).copy()
        self.cells = filled(cells, (3, 3), 0.0) * self.pbc.any(1)[:, None, None]
        self.charge, self.spin = filled(charge, (), 0.0), filled(spin, (), 0.0)
        self.weight = filled(weight, (), 1.0)
        self.spins = None if spins is None else np.asarray(spins, dtype=np.float64).reshape(-1, 3)


def read(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    cutoff: float,
    elements: Collection[int] | None = None,
    keys: LabelKeys | None = None,
) -> Dataset:
    """Read files, folders or globs of labelled structures.

    Args:
        paths: one or several; a folder is searched for deepmd-kit systems and for files that ASE reads.
        cutoff: of the graphs, Å.
        elements: atomic numbers that are allowed.
        keys: under which names labels are stored.

    Raises:
        FileNotFoundError: nothing is at a path.
        ValueError: a file cannot be read, is empty or contradicts itself, or holds an element that is not allowed; the
            file and the frame are named.
    """
    keys = keys or LabelKeys()
    parts: list[_Part] = []
    found: set[str] = set()
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        before = len(parts)
        for source, choice in _sources(os.fspath(path)):
            parts += _reader(source)(source, choice, keys, found)
        if len(parts) == before:
            raise ValueError(f"{os.fspath(path)!r} holds no structure")
    if not parts:
        raise ValueError("expected at least one file of structures; got none")
    for part in parts:
        require_known(part.numbers, elements, f"{part.where}, frame {part.first}")
    return Dataset(_Frames(parts, found), cutoff)


def split(dataset: Dataset, valid_fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Split a data set at random into training and validation; at least one structure stays on each side.

    Raises:
        ValueError: the fraction is not between 0 and 1, or there are fewer than two structures.
    """
    if not 0 < valid_fraction < 1:
        raise ValueError(f"data.valid_fraction must lie between 0 and 1; got {valid_fraction}")
    if len(dataset) < 2:
        raise ValueError(
            f"cannot split {len(dataset)} structure into training and validation; give data.valid, or more structures"
        )
    order = np.random.default_rng(seed).permutation(len(dataset))
    count = min(max(1, round(valid_fraction * len(dataset))), len(dataset) - 1)
    return dataset.subset(np.sort(order[count:])), dataset.subset(np.sort(order[:count]))


def require_labels(dataset: Dataset, wanted: Collection[str], keys: LabelKeys | None = None) -> None:
    """Raise ValueError where no structure at all has one of the wanted labels ("energy", "forces", "stress")."""
    keys = keys or LabelKeys()
    for label in wanted:
        if dataset.has_label(label):
            continue
        there = ", ".join(dataset.names_found) or "nothing"
        raise ValueError(
            f"no structure has {label} under the key {getattr(keys, label)!r}; the files hold: {there}. "
            f"Set data.{label}_key to the right name, or training.loss.{label}=0 to train without."
        )


def _sources(path: str) -> Iterator[tuple[Path, str]]:
    """Yield every file or deepmd-kit system that a path stands for, with what was asked for behind `::`."""
    name, _, choice = path.partition("::")
    plain = Path(name).expanduser()
    if plain.exists():
        matches = [plain]
    else:
        matches = [Path(match) for match in sorted(glob.glob(str(plain), recursive=True))]
        if not matches:
            kind = "nothing matches" if glob.has_magic(name) else "there is no file or folder"
            raise FileNotFoundError(f"{kind} {name!r}")
    for match in matches:
        if not match.is_dir():
            yield match, choice
            continue
        systems = sorted(file.parent for file in match.rglob("type.raw"))
        if systems:
            yield from ((system, choice) for system in systems)
            continue
        files = sorted(file for file in match.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise ValueError(f"the folder {str(match)!r} holds no file and no deepmd-kit system")
        yield from ((file, choice) for file in files)


_Reader = Callable[[Path, str, LabelKeys, set[str]], list[_Part]]


def _reader(source: Path) -> _Reader:
    if source.is_dir():
        return _read_deepmd
    return _read_packed if source.suffix in (".h5", ".hdf5") else _read_ase


def _read_packed(source: Path, choice: str, keys: LabelKeys, found: set[str]) -> list[_Part]:
    parts = []
    for group in read_packed(source, [choice] if choice else None):
        found.update(name for name in ("energy", "forces", "stress") if getattr(group, name) is not None)
        parts.append(_part_of_group(group, str(source)))
    return parts


def _part_of_group(group: PackedGroup, where: str) -> _Part:
    stress = None
    if group.stress is not None:
        xx, yy, zz, yz, xz, xy = np.moveaxis(group.stress, -1, 0)
        stress = np.stack((xx, xy, xz, xy, yy, yz, xz, yz, zz), -1).reshape(-1, 3, 3)
    pbc = group.pbc if group.pbc is not None else None if group.cell is None else np.ones(3, dtype=bool)
    return _Part(
        group.numbers,
        group.positions,
        f"{where}, group {group.key}",
        energy=group.energy,
        forces=group.forces,
        stress=stress,
        cells=group.cell,
        pbc=pbc,
        charge=group.charge,
        spin=group.spin,
        weight=group.weight,
        group=group.name,
    )


def _read_ase(source: Path, choice: str, keys: LabelKeys, found: set[str]) -> list[_Part]:
    try:
        frames: Any = ase.io.read(source, index=choice or ":")
    except Exception as error:  # ASE's readers raise whatever their format makes them raise
        raise ValueError(f"ASE cannot read {str(source)!r}: {error or type(error).__name__}") from error
    parts = []
    for number, atoms in enumerate([frames] if isinstance(frames, Atoms) else frames):
        where = f"{source}, frame {number}"
        found.update(label_names(atoms))
        with warnings.catch_warnings():
            if number:  # one remark on units a file is enough
                warnings.simplefilter("ignore")
            targets = targets_from_atoms(atoms, keys, number, where)
        spins = atoms.arrays.get("spins")
        parts.append(
            _Part(
                np.asarray(atoms.numbers),
                atoms.positions[None],
                str(source),
                number,
                energy=targets.energy.numpy(),
                forces=targets.forces.numpy()[None],
                stress=targets.stress.numpy(),
                cells=atoms.cell.array[None],
                pbc=atoms.pbc[None],
                charge=np.array([float(atoms.info.get(keys.charge, 0.0))]),
                spin=np.array([float(atoms.info.get(keys.spin, 0.0))]),
                weight=targets.weight.numpy(),
                spins=spins,
                group=targets.group[0],
            )
        )
    return parts


def _read_deepmd(source: Path, choice: str, keys: LabelKeys, found: set[str]) -> list[_Part]:
    """Read one system of deepmd-kit: type.raw, type_map.raw and set.*/{coord,box,energy,force,virial}.npy."""
    types = np.loadtxt(source / "type.raw", dtype=np.int64, ndmin=1)
    if not (source / "type_map.raw").exists():
        raise ValueError(f"{source} has no type_map.raw, so nobody can know which elements its types are")
    symbols = (source / "type_map.raw").read_text().split()
    sets = sorted(source.glob("set.*"))
    if not sets:
        raise ValueError(f"{source} has no folder set.000")
    if types.max(initial=-1) >= len(symbols):
        raise ValueError(f"{source}: type.raw uses type {types.max()}, but type_map.raw has {len(symbols)} elements")
    try:
        number_of = np.array([atomic_number(symbol) for symbol in symbols])
    except ValueError as error:
        raise ValueError(f"{source}/type_map.raw: {error}") from error
    open_system = (source / "nopbc").exists()
    parts, first = [], 0
    for folder in sets:
        arrays = {file.stem: np.load(file) for file in folder.glob("*.npy")}
        found.update(arrays)
        if "coord" not in arrays:
            raise ValueError(f"{folder} has no coord.npy")
        coordinates = arrays["coord"].astype(np.float64)
        count = len(coordinates)
        coordinates = coordinates.reshape(count, -1)
        if coordinates.shape[1] != 3 * len(types):
            raise ValueError(
                f"{folder}: type.raw has {len(types)} atoms, but coord.npy has {coordinates.shape[1] / 3:g} a frame"
            )
        if "box" not in arrays and not open_system:
            raise ValueError(f"{folder} has no box.npy and {source} no file 'nopbc'; one of them must be there")
        for name, width in (("box", 9), ("energy", 1), ("force", 3 * len(types)), ("virial", 9)):
            if name in arrays and arrays[name].size != count * width:
                raise ValueError(
                    f"{folder}: {name}.npy has {arrays[name].size} numbers; expected {count * width} for {count} "
                    f"frames of {len(types)} atoms"
                )
        cells = None if open_system else arrays["box"].astype(np.float64).reshape(count, 3, 3)
        stress = None
        if "virial" in arrays and cells is not None:
            volumes = np.abs(np.linalg.det(cells))[:, None, None]
            virial = arrays["virial"].astype(np.float64).reshape(count, 3, 3)
            stress = -0.5 * (virial + virial.transpose(0, 2, 1)) / volumes
        labels: dict[str, np.ndarray | None] = {
            "energy": arrays["energy"].astype(np.float64).reshape(count) if "energy" in arrays else None,
            "forces": arrays["force"].astype(np.float64).reshape(count, -1, 3) if "force" in arrays else None,
            "stress": stress,
            "cells": cells,
        }
        positions = coordinates.reshape(count, -1, 3)
        real = arrays.get("real_atom_types")
        if real is None:
            pbc = np.zeros(3, dtype=bool) if open_system else np.ones(3, dtype=bool)
            parts.append(_Part(number_of[types], positions, str(folder), first, pbc=pbc, group=source.name, **labels))
        else:  # frames of different atoms, padded with type -1
            for frame in range(count):
                kinds = real.reshape(count, -1)[frame]
                there = kinds >= 0
                if kinds.max(initial=-1) >= len(symbols):
                    raise ValueError(f"{folder}, frame {frame}: type {kinds.max()} is not in type_map.raw")
                one = {name: None if values is None else values[frame : frame + 1] for name, values in labels.items()}
                if one["forces"] is not None:
                    one["forces"] = one["forces"][:, there]
                pbc = np.zeros(3, dtype=bool) if open_system else np.ones(3, dtype=bool)
                where = str(folder)
                parts.append(
                    _Part(
                        number_of[kinds[there]],
                        positions[frame : frame + 1, there],
                        where,
                        first + frame,
                        pbc=pbc,
                        group=source.name,
                        **one,
                    )
                )
        first += count
    return parts
