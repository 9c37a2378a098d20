"""Labelled structures in memory: a few flat arrays, from which the graph of one structure is made when it is asked for.

A hundred thousand molecules of 15 atoms take 100 MB and are handed to another process in one piece, whichever way that
process was started. Labels that are missing are NaN.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8

from mlff.elements import SYMBOLS, names
from mlff.graph import Graph, Targets
from mlff.neighbors import SAME_PLACE, neighbor_list

# Distances of open molecules are counted in blocks of this many pairs: 24 MB.
_PAIRS_AT_ONCE = 1_000_000


@dataclass
class Frames:
    """Structures one after the other. S structures with A atoms in all; a label that is missing is NaN."""

    sizes: Int[np.ndarray, "S"]  # atoms of each structure
    numbers: UInt8[np.ndarray, "A"]  # atomic numbers
    positions: Float[np.ndarray, "A 3"]  # Å
    cell: Float[np.ndarray, "S 3 3"]  # Å, zeros where no axis is periodic
    pbc: Bool[np.ndarray, "S 3"]
    energy: Float[np.ndarray, "S"]  # eV
    forces: Float[np.ndarray, "A 3"]  # eV/Å
    stress: Float[np.ndarray, "S 3 3"]  # eV/Å³
    charge: Float[np.ndarray, "S"]
    spin: Float[np.ndarray, "S"]
    weight: Float[np.ndarray, "S"]
    spins: Float[np.ndarray, "A 3"]  # vectors; zero for atoms without
    group: Int[np.ndarray, "S"]  # place of the group's name in group_names
    frame_parameters: Float[np.ndarray, "S P"]  # conditions of each structure, P = 0 where there are none
    atom_parameters: Float[np.ndarray, "A Q"]  # conditions of each atom, Q = 0 where there are none
    group_names: tuple[str, ...] = ("",)
    has_spins: bool = False
    sources: list[tuple[int, str, int]] = field(default_factory=list)  # number of structures, file, number of the first
    offsets: Int[np.ndarray, "S+1"] = field(init=False)  # first atom of each structure

    def __post_init__(self) -> None:
        self.offsets = np.concatenate(([0], np.cumsum(self.sizes))).astype(np.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def atoms(self, frame: int) -> slice:
        """Return where the atoms of a structure are."""
        return slice(int(self.offsets[frame]), int(self.offsets[frame + 1]))

    def place(self, frame: int) -> str:
        """Return file and number of a structure, for messages."""
        ends = np.cumsum([count for count, _, _ in self.sources]).tolist()
        source = bisect.bisect_right(ends, frame)
        count, where, first = self.sources[source]
        return f"{where}, frame {first + frame - (ends[source] - count)}"

    def select(self, chosen: slice) -> Frames:
        """Return some of the structures, of one source; their numbers in messages stay right."""
        frames = np.arange(len(self))[chosen]
        atoms = np.concatenate([np.zeros(0, int), *(np.r_[self.atoms(frame)] for frame in frames.tolist())])
        kept = {name: getattr(self, name)[frames] for name in _OF_STRUCTURES}
        kept |= {name: getattr(self, name)[atoms] for name in _OF_ATOMS}
        places = [(1, self.place(frame).rpartition(", frame ")) for frame in frames.tolist()]
        sources = [(count, where, int(number)) for count, (where, _, number) in places]
        return Frames(**kept, group_names=self.group_names, has_spins=self.has_spins, sources=sources)

    def check(self, elements: Collection[int] | None = None) -> None:
        """Raise ValueError where a number makes no sense or an element is not among `elements`; its place is named."""
        if len(empty := np.flatnonzero(self.sizes == 0)):
            raise ValueError(f"{self.place(int(empty[0]))} has no atoms; remove it.")
        allowed = np.zeros(256, bool)
        allowed[list(range(1, len(SYMBOLS)) if elements is None else elements)] = True
        self._require(allowed[self.numbers], "", elements)
        self._require(np.isfinite(self.positions).all(1), "positions are not finite; every coordinate must be a number")
        self._require(~np.isinf(self.forces).any(1), "a force is infinite; remove the structure, or write nan")
        for name in ("energy", "stress"):
            values = np.isinf(getattr(self, name).reshape(len(self), -1)).any(1)
            if values.any():
                frame = int(values.argmax())
                raise ValueError(f"{self.place(frame)}: the {name} is infinite; remove the structure, or write nan.")

    def _require(self, good: Any, words: str, elements: Collection[int] | None = None) -> None:
        if good.all():
            return
        atom = int(good.argmin())
        frame = int(np.searchsorted(self.offsets, atom, side="right")) - 1
        place = f"{self.place(frame)}, atom {atom - int(self.offsets[frame])}"
        if words:
            raise ValueError(f"{place}: {words} ({int((~good).sum())} of {len(good)} atoms in all files).")
        number = int(self.numbers[atom])
        if not 1 <= number < len(SYMBOLS):
            raise ValueError(f"{place}: atomic number {number} is no element; expected 1 (H) to 118 (Og).")
        raise ValueError(
            f"{place} is {SYMBOLS[number]}, which this model does not know; it knows {names(elements or ())}. Choose a "
            "preset with this element, or add it: elements.add=[…] in fine-tuning, model.elements=[…] from scratch."
        )


_OF_ATOMS = ("numbers", "positions", "forces", "spins", "atom_parameters")
_OF_STRUCTURES = ("sizes", "cell", "pbc", "energy", "stress", "charge", "spin", "weight", "group", "frame_parameters")


def make_frames(
    sizes: Int[np.ndarray, "S"],
    numbers: Int[np.ndarray, "A"],
    positions: Float[np.ndarray, "A 3"],
    where: str,
    first: int = 0,
    group_names: Sequence[str] = ("",),
    **given: Any,
) -> Frames:
    """Return structures of one source, with what is not given filled in: missing labels, open boundaries.

    Args:
        sizes: atoms of each structure.
        numbers: atomic numbers of all of them.
        positions: Å.
        where: name of the source.
        first: number of the first structure in it.
        group_names: names to which `group` points.
        given: any other array of `Frames`; None stands for one that is not there.
    """
    sizes = np.asarray(sizes, np.int64)
    S, A = len(sizes), int(sizes.sum())
    missing = float("nan")
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "cell": ((S, 3, 3), 0.0),
        "energy": ((S,), missing),
        "forces": ((A, 3), missing),
        "stress": ((S, 3, 3), missing),
        "charge": ((S,), 0.0),
        "spin": ((S,), 0.0),
        "weight": ((S,), 1.0),
        "spins": ((A, 3), 0.0),
    }
    full: dict[str, np.ndarray] = {}
    for name, (shape, default) in shapes.items():
        values = given.get(name)
        if values is None:
            full[name] = np.full(shape, default)
        elif np.ndim(values) < len(shape):  # one for all structures
            full[name] = np.broadcast_to(np.asarray(values, np.float64), shape).copy()
        else:
            full[name] = np.array(values, np.float64).reshape(shape)
    for name, count in (("frame_parameters", S), ("atom_parameters", A)):
        values = given.get(name)
        full[name] = np.zeros((count, 0)) if values is None else np.array(values, np.float64)
    pbc, group = given.get("pbc"), given.get("group")
    periodic = np.broadcast_to(np.zeros(3, bool) if pbc is None else np.asarray(pbc, bool), (S, 3)).copy()
    open_ones = ~periodic.any(1)
    full["cell"][open_ones] = 0.0
    full["stress"][open_ones] = missing  # a stress needs a volume
    return Frames(
        sizes=sizes,
        # 0 is no element: what does not fit into a byte is caught by `check` like any other wrong number.
        numbers=np.where((numbers > 0) & (numbers < 256), numbers, 0).astype(np.uint8),
        positions=np.array(positions, np.float64).reshape(A, 3),
        pbc=periodic,
        group=np.zeros(S, np.int32) if group is None else np.asarray(group, np.int32),
        group_names=tuple(group_names),
        has_spins=given.get("spins") is not None,
        sources=[(S, where, first)],
        **full,
    )


def join_frames(parts: Sequence[Frames]) -> Frames:
    """Return the structures of several sources as one table.

    Raises:
        ValueError: sources differ in the number of their frame or atom parameters.
    """
    for name in ("frame_parameters", "atom_parameters"):
        first, *others = parts
        for part in others:
            here, there = (getattr(one, name).shape[1] for one in (first, part))
            if here != there:
                raise ValueError(
                    f"{first.place(0)} has {here} {name.replace('_', ' ')}, but {part.place(0)} has {there}; "
                    "structures that are read together need the same number."
                )
    names = tuple(dict.fromkeys(name for part in parts for name in part.group_names))
    number_of = {name: k for k, name in enumerate(names)}
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in (*_OF_STRUCTURES, *_OF_ATOMS)}
    joined["group"] = np.concatenate(
        [np.array([number_of[name] for name in part.group_names], np.int32)[part.group] for part in parts]
    )
    return Frames(
        **joined,
        group_names=names,
        has_spins=any(part.has_spins for part in parts),
        sources=[source for part in parts for source in part.sources],
    )


class Dataset:
    """Labelled structures in memory. `dataset[i]` is the graph of structure i, up to the cutoff, and its labels.

    Picklable, and cheap to hand to the workers of a data loader. Where only some structures have spin vectors, those of
    the others are zero.

    Attributes:
        cutoff: Å.
        n_atoms: atoms of each structure (int64).
        names_found: every name under which the files store something that could be a label.
    """

    def __init__(
        self,
        frames: Frames,
        cutoff: float,
        indices: Int[np.ndarray, "S"] | None = None,
        names_found: Collection[str] = (),
    ) -> None:
        self._frames = frames
        self._indices = np.arange(len(frames)) if indices is None else np.asarray(indices, np.int64)
        self._n_edges: Int[np.ndarray, "S"] | None = None
        self.cutoff = cutoff
        self.n_atoms: Int[np.ndarray, "S"] = frames.sizes[self._indices]
        self.names_found = tuple(sorted(names_found))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Graph, Targets]:
        """Return the graph of a structure and its labels, as CPU tensors; `Targets.index` is `index`.

        Raises:
            ValueError: two atoms are at the same place, or the cell spans no volume; file and frame are named.
        """
        frames, frame = self._frames, self._frame(index)
        atoms, one = frames.atoms(frame), slice(frame, frame + 1)
        senders, receivers, shifts = self._edges(frame)
        numbers = frames.numbers[atoms].astype(np.int64)
        graph = Graph(
            positions=_tensor(frames.positions[atoms]),
            numbers=torch.from_numpy(numbers),
            structure=torch.zeros(len(numbers), dtype=torch.int64),
            senders=torch.from_numpy(senders),
            receivers=torch.from_numpy(receivers),
            shifts=torch.from_numpy(shifts),
            cell=_tensor(frames.cell[one]),
            pbc=_tensor(frames.pbc[one]),
            charge=_tensor(frames.charge[one]),
            spin=_tensor(frames.spin[one]),
            spins=_tensor(frames.spins[atoms]) if frames.has_spins else None,
            frame_parameters=_tensor(frames.frame_parameters[one]) if frames.frame_parameters.shape[1] else None,
            atom_parameters=_tensor(frames.atom_parameters[atoms]) if frames.atom_parameters.shape[1] else None,
        )
        targets = Targets(
            energy=_tensor(frames.energy[one]),
            forces=_tensor(frames.forces[atoms]),
            stress=_tensor(frames.stress[one]),
            weight=_tensor(frames.weight[one]),
            group=(frames.group_names[frames.group[frame]],),
            index=torch.tensor([int(index) % len(self)]),
        )
        return graph, targets

    def place(self, index: int) -> str:
        """Return the file of a structure and its number there, for messages."""
        return self._frames.place(self._frame(index))

    def numbers_of(self, index: int) -> Int[np.ndarray, "N"]:
        """Return the atomic numbers of a structure."""
        return self._frames.numbers[self._frames.atoms(self._frame(index))].astype(np.int64)

    def n_edges(self) -> Int[np.ndarray, "S"]:
        """Return the number of directed edges of each structure; counted on the first call, then remembered.

        Raises:
            ValueError: as when the structure is asked for.
        """
        if self._n_edges is None:
            counts = np.full(len(self), -1, np.int64)
            self._count_open_molecules(counts)
            for place in np.flatnonzero(counts < 0).tolist():
                counts[place] = len(self._edges(int(self._indices[place]))[0])
            self._n_edges = counts
        return self._n_edges

    def compositions(self, elements: Sequence[int]) -> Float[np.ndarray, "S E"]:
        """Return how many atoms of each element each structure has, columns in the given order."""
        frames = self._frames
        owner = np.repeat(np.arange(len(frames)), frames.sizes)
        counts = np.bincount(owner * 256 + frames.numbers, minlength=256 * len(frames)).reshape(-1, 256)
        return counts[np.ix_(self._indices, np.asarray(elements, np.int64))].astype(np.float64)

    @property
    def energies(self) -> Float[np.ndarray, "S"]:
        """Total energies in eV, NaN where there is none."""
        return self._frames.energy[self._indices]

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers that occur, sorted."""
        return tuple(np.unique(self._frames.numbers[self._atoms_chosen()]).tolist())

    @property
    def groups(self) -> tuple[str, ...]:
        """Distinct names under which errors are reported."""
        return tuple(self._frames.group_names[k] for k in np.unique(self._frames.group[self._indices]))

    def has_label(self, label: str) -> bool:
        """Return whether any structure has a label: "energy", "forces" or "stress"."""
        values = getattr(self._frames, label)
        return bool(np.isfinite(values[self._atoms_chosen() if label == "forces" else self._indices]).any())

    def label_counts(self) -> dict[str, int]:
        """Return how many structures have an energy, forces on all of their atoms, and a whole stress."""
        frames = self._frames
        gaps = np.concatenate(([0], np.cumsum(~np.isfinite(frames.forces).all(1))))[frames.offsets]
        return {
            "energy": int(np.isfinite(frames.energy[self._indices]).sum()),
            "forces": int((np.diff(gaps)[self._indices] == 0).sum()),
            "stress": int(np.isfinite(frames.stress[self._indices]).all((1, 2)).sum()),
        }

    def subset(self, indices: Sequence[int] | Int[np.ndarray, "K"]) -> Dataset:
        """Return some of the structures as a data set that shares their memory."""
        chosen = np.asarray(indices, np.int64)
        part = Dataset(self._frames, self.cutoff, self._indices[chosen], self.names_found)
        if self._n_edges is not None:
            part._n_edges = self._n_edges[chosen]
        return part

    def weighted(self, factors: Mapping[str, float]) -> Dataset:
        """Return the data set with the weights of some groups in the loss multiplied by a factor each."""
        if not factors:
            return self
        frames = copy.copy(self._frames)
        of_group = np.array([factors.get(name, 1.0) for name in frames.group_names])
        frames.weight = frames.weight * of_group[frames.group]
        other = copy.copy(self)
        other._frames = frames
        return other

    def _frame(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"structure {index} of a data set of {len(self)}")
        return int(self._indices[index])

    def _atoms_chosen(self) -> Bool[np.ndarray, "A"]:
        chosen = np.zeros(len(self._frames), bool)
        chosen[self._indices] = True
        return np.repeat(chosen, self._frames.sizes)

    def _edges(self, frame: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        frames = self._frames
        try:
            positions = frames.positions[frames.atoms(frame)]
            return neighbor_list(positions, frames.cell[frame], frames.pbc[frame], self.cutoff)
        except ValueError as error:
            raise ValueError(f"{frames.place(frame)}: {error}") from error

    def _count_open_molecules(self, counts: Int[np.ndarray, "S"]) -> None:
        """Count the pairs of small structures without a cell, many of the same size at a time.

        A structure with two atoms at one place is left to the neighbour list, which says so.
        """
        frames = self._frames
        small = (frames.sizes[self._indices] <= 64) & ~frames.pbc[self._indices].any(1)
        for size in np.unique(self.n_atoms[small]).tolist():
            same = np.flatnonzero(small & (self.n_atoms == size))
            for block in np.array_split(same, -(-len(same) * size**2 // _PAIRS_AT_ONCE)):
                atoms = frames.offsets[self._indices[block]][:, None] + np.arange(size)
                points = frames.positions[atoms]  # [block, atom, 3]
                lengths = np.linalg.norm(points[:, None] - points[:, :, None], axis=-1)
                lengths[:, range(size), range(size)] = np.inf
                good = lengths.reshape(len(block), -1).min(1) >= SAME_PLACE
                counts[block[good]] = (lengths < self.cutoff).sum((1, 2))[good]


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.copy())
