"""Structures to batches: one larger graph with no edge between structures, filled up to a budget of atoms and edges."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from mlff.graph import Graph, Targets

_UNEVEN = 0.05  # part of a step's largest batch by which the smallest may cost less
_OPEN_BATCHES = 16  # looked at for each structure: more fills batches no better and takes longer


def collate(graphs: Sequence[Graph]) -> Graph:
    """Return several graphs as one: atoms and edges concatenated, indices offset.

    Raises:
        ValueError: there is no graph, or only some graphs carry an optional table.
    """
    if not graphs:
        raise ValueError("expected at least one graph to collate; got none")
    atoms = _offsets([graph.n_atoms for graph in graphs])
    structures = _offsets([graph.n_structures for graph in graphs])

    def joined(name: str, offsets: list[int] | None = None) -> Tensor:
        parts = [getattr(graph, name) for graph in graphs]
        if offsets is not None:
            parts = [part + offset for part, offset in zip(parts, offsets, strict=True)]
        return torch.cat(parts)

    def optional(name: str) -> Tensor | None:
        present = [getattr(graph, name) is not None for graph in graphs]
        if any(present) and not all(present):
            raise ValueError(f"{sum(present)} of {len(graphs)} structures have {name}; expected all or none")
        return joined(name) if all(present) else None

    return Graph(
        positions=joined("positions"),
        numbers=joined("numbers"),
        structure=joined("structure", structures),
        senders=joined("senders", atoms),
        receivers=joined("receivers", atoms),
        shifts=joined("shifts"),
        cell=joined("cell"),
        pbc=joined("pbc"),
        charge=joined("charge"),
        spin=joined("spin"),
        spins=optional("spins"),
        frame_parameters=optional("frame_parameters"),
        atom_parameters=optional("atom_parameters"),
    )


def collate_targets(targets: Sequence[Targets]) -> Targets:
    """Return the labels of several structures as one table, in the same order as `collate`."""
    return Targets(
        energy=torch.cat([target.energy for target in targets]),
        forces=torch.cat([target.forces for target in targets]),
        stress=torch.cat([target.stress for target in targets]),
        weight=torch.cat([target.weight for target in targets]),
        group=tuple(name for target in targets for name in target.group),
        index=torch.cat([target.index for target in targets]),
    )


class BudgetSampler(Sampler[list[int]]):
    """Batches of structures, each up to a number of atoms and of edges, for one of several ranks.

    All batches of an epoch follow from `seed` and `epoch` alone, so that every rank makes the same plan and takes its
    own part of it. Each rank gets the same number of batches. With `shuffle`, the batches that the ranks take at the
    same step are of similar cost (edges, or atoms where edges are not counted); without it, structures keep their
    order.

    A structure above a budget is a batch of its own, with one warning, or an error if `oversized` says so. Where the
    number of batches is no multiple of the number of ranks, the largest are split. Where every batch is a single
    structure already, some come twice; with `shuffle` under their index, without it under index - S, counted from the
    end as Python does it, so that whoever averages over structures can tell.

    Args:
        n_atoms: atoms of each structure.
        n_edges: edges of each structure; None is allowed where `batch_edges` is 0.
        batch_atoms: most atoms in a batch.
        batch_edges: most edges in a batch, 0 = no limit.
        seed: of the order.
        rank: which of the ranks this is.
        world_size: number of ranks.
        shuffle: whether to mix structures, differently in each epoch.
        place: gives a structure's name for messages, as file and frame; None = its index says enough.
        oversized: what a structure above a budget is: `batch` or `error`.

    Attributes:
        epoch: whose batches come next.
        start: batches to leave out at the beginning of the next pass, for a run that goes on in the middle of an epoch;
            0 again afterwards.
        sampler: the sampler itself; Lightning calls `set_epoch` on it where it counts epochs.

    Raises:
        ValueError: there is no structure, a budget is not positive, the rank is not one of the ranks, or a structure is
            above a budget where `oversized` is `error`.
    """

    def __init__(
        self,
        n_atoms: Sequence[int] | Int[np.ndarray, "S"],
        n_edges: Sequence[int] | Int[np.ndarray, "S"] | None,
        batch_atoms: int,
        batch_edges: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        place: Callable[[int], str] | None = None,
        oversized: Literal["batch", "error"] = "batch",
    ) -> None:
        self._atoms = np.asarray(n_atoms, dtype=np.int64)
        self._edges = None if n_edges is None else np.asarray(n_edges, dtype=np.int64)
        if not len(self._atoms):
            raise ValueError("there is no structure to make batches of; the set is empty.")
        if batch_atoms < 1 or batch_edges < 0:
            raise ValueError(
                f"expected batch_atoms of 1 or more and batch_edges of 0 (no limit) or more; "
                f"got {batch_atoms} and {batch_edges}."
            )
        if batch_edges and self._edges is None:
            raise ValueError("a limit on the edges of a batch needs the number of edges of each structure.")
        if not 0 <= rank < world_size:
            raise ValueError(f"expected a rank from 0 to {world_size - 1}; got {rank}.")
        self.batch_atoms, self.batch_edges = batch_atoms, batch_edges
        self.seed, self.rank, self.world_size, self.shuffle = seed, rank, world_size, shuffle
        self.epoch = 0
        self.start = 0
        self._planned: tuple[int, list[list[int]]] | None = None
        self._tell_of_large_structures(place, oversized)

    @property
    def plan_of(self) -> dict[str, int]:
        """What the batches of an epoch follow from: with other values, a place in the middle of it means nothing."""
        return {
            "seed": self.seed,
            "structures": len(self._atoms),
            "batch_atoms": self.batch_atoms,
            "batch_edges": self.batch_edges,
            "ranks": self.world_size,
        }

    @property
    def sampler(self) -> BudgetSampler:
        """This sampler, under the name by which Lightning looks for something with `set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Number of batches of this rank in the whole epoch, the same for every rank."""
        return len(self._plan())

    def __iter__(self) -> Iterator[list[int]]:
        start, self.start = self.start, 0
        return iter(self._plan()[start:])

    def _plan(self) -> list[list[int]]:
        """The batches of this rank in this epoch."""
        epoch = self.epoch if self.shuffle else 0
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (epoch, self._make_plan(np.random.default_rng([self.seed, epoch])))
        return self._planned[1]

    def _make_plan(self, random: np.random.Generator) -> list[list[int]]:
        if self.shuffle:
            batches = self._filled(random.permutation(len(self._atoms)), _OPEN_BATCHES)
        else:
            batches = self._filled(np.arange(len(self._atoms)), 1)
        ranks, repeat = self.world_size, 0
        self._split_until_divisible(batches)
        while len(batches) % ranks:  # every batch is one structure
            (again,) = batches[repeat % len(self._atoms)]
            batches.append([again if self.shuffle else again - len(self._atoms)])
            repeat += 1
        if not self.shuffle:
            return batches[self.rank :: ranks]
        costs = np.array([self._cost(batch) for batch in batches])
        # Neighbours by cost meet at a step, so that no rank waits long for another. Within a step the costlier batch
        # goes to the rank that has had less so far, so that all have the same work in the end; the steps that differ
        # most are shared out first, while the others can still make up for it.
        steps = np.argsort(costs, kind="stable")[::-1].reshape(-1, ranks)
        for step in steps:
            for place, batch in zip(step.tolist(), self._evened([batches[place] for place in step]), strict=True):
                batches[place], costs[place] = batch, self._cost(batch)
        spread = costs[steps].max(1) - costs[steps].min(1)
        had, mine = np.zeros(ranks, np.int64), np.zeros(len(steps), np.int64)
        for step in np.argsort(-spread, kind="stable").tolist():
            from_least = np.lexsort((random.permutation(ranks), had))  # ties by chance
            from_most = steps[step][np.argsort(-costs[steps[step]], kind="stable")]
            had[from_least] += costs[from_most]
            mine[step] = from_most[np.flatnonzero(from_least == self.rank)[0]]
        return [batches[mine[step]] for step in random.permutation(len(steps)).tolist()]

    def _filled(self, order: np.ndarray, open_batches: int) -> list[list[int]]:
        """Put structures into batches in order: each into the first open one that has room."""
        done: list[list[int]] = []
        filling: list[tuple[list[int], int, int]] = []  # structures, room for atoms, room for edges
        most_atoms, most_edges = self.batch_atoms, self.batch_edges or np.iinfo(np.int64).max
        edges_of = self._edges if self._edges is not None else np.zeros_like(self._atoms)
        for structure, atoms, edges in zip(
            order.tolist(), self._atoms[order].tolist(), edges_of[order].tolist(), strict=True
        ):
            for place, (batch, room, edge_room) in enumerate(filling):
                if atoms <= room and edges <= edge_room:
                    batch.append(structure)
                    filling[place] = (batch, room - atoms, edge_room - edges)
                    break
            else:
                if atoms > most_atoms or edges > most_edges:
                    if open_batches == 1:  # the order is kept: what came before is complete
                        done += [batch for batch, _, _ in filling]
                        filling = []
                    done.append([structure])
                    continue
                if len(filling) == open_batches:
                    fullest = min(range(len(filling)), key=lambda place: filling[place][1])
                    done.append(filling.pop(fullest)[0])
                filling.append(([structure], most_atoms - atoms, most_edges - edges))
        return done + [batch for batch, _, _ in filling]

    def _evened(self, step: list[list[int]]) -> list[list[int]]:
        """Share the structures of a step's batches out again if one costs much less than another, as the last ones do.

        Costliest first, each to the batch with the least so far that has room; if one finds no room all stays.
        """
        costs = [self._cost(batch) for batch in step]
        if max(costs) - min(costs) <= _UNEVEN * max(costs):
            return step
        most_edges = self.batch_edges or np.iinfo(np.int64).max
        edges_of = self._edges if self._edges is not None else np.zeros_like(self._atoms)
        new: list[list[int]] = [[] for _ in step]
        sums = np.zeros((len(step), 3), np.int64)  # atoms, edges, cost
        for structure in sorted((s for batch in step for s in batch), key=lambda s: -int(self._costs[s])):
            own = np.array([self._atoms[structure], edges_of[structure], self._costs[structure]])
            room = (sums[:, 0] + own[0] <= self.batch_atoms) & (sums[:, 1] + own[1] <= most_edges)
            room |= sums[:, 0] == 0  # a structure above the budget is a batch of its own
            if not room.any():
                return step
            place = int(np.argmin(np.where(room, sums[:, 2], np.iinfo(np.int64).max)))
            new[place].append(structure)
            sums[place] += own
        evener = all(new) and np.ptp(sums[:, 2]) < max(costs) - min(costs)
        return new if evener else step

    def _split_until_divisible(self, batches: list[list[int]]) -> None:
        """Split the costliest batches in two until the ranks get equally many; the order of structures stays."""
        while len(batches) % self.world_size:
            divisible = [place for place, batch in enumerate(batches) if len(batch) > 1]
            if not divisible:
                return
            place = max(divisible, key=lambda place: self._cost(batches[place]))
            batch = batches[place]
            costs = np.cumsum(self._costs[batch])
            half = 1 + int(np.argmin(np.abs(costs[:-1] - costs[-1] / 2)))
            batches[place : place + 1] = [batch[:half], batch[half:]]

    def _cost(self, batch: list[int]) -> int:
        return int(self._costs[batch].sum())

    @property
    def _costs(self) -> np.ndarray:
        return self._atoms if self._edges is None else self._edges

    def _tell_of_large_structures(self, place: Callable[[int], str] | None, oversized: str) -> None:
        if self.rank and oversized == "batch":  # the others would say the same
            return
        budgets = [("atoms", self._atoms, self.batch_atoms)]
        if self.batch_edges and self._edges is not None:
            budgets.append(("edges", self._edges, self.batch_edges))
        for what, counts, most in budgets:
            large = np.flatnonzero(counts > most)
            if len(large):
                first = int(large[0])
                where = f", {place(first)}" if place is not None else ""
                others = f" ({len(large) - 1} more are too large)" if len(large) > 1 else ""
                found = (
                    f"structure {first} (counted from 0{where}) has {counts[first]} {what}, more than "
                    f"training.batch_{what}={most}"
                )
                if oversized == "error":
                    raise ValueError(
                        f"{found}{others}. Raise training.batch_{what}, remove the structure, or take such structures "
                        "as batches of their own: training.oversized=batch."
                    )
                warnings.warn(
                    f"{found}: it is a batch of its own{others}. If memory suffices, raise training.batch_{what}.",
                    stacklevel=3,
                )


@runtime_checkable
class Structures(Protocol):
    """What a loader needs of a data set."""

    n_atoms: Int[np.ndarray, "S"]

    def n_edges(self) -> Int[np.ndarray, "S"]:
        """Return the number of edges of each structure."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Graph, Targets]: ...


class _CountedOnce:
    """A data set in which a negative index gives the structure without its labels, so that no average has it twice."""

    def __init__(self, dataset: Structures) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Graph, Targets]:
        graph, targets = self.dataset[index]
        if index >= 0:
            return graph, targets
        missing = {name: torch.full_like(getattr(targets, name), torch.nan) for name in ("energy", "forces", "stress")}
        return graph, dataclasses.replace(targets, **missing)


def loader(
    dataset: Structures,
    batch_atoms: int,
    batch_edges: int = 0,
    seed: int = 0,
    shuffle: bool = False,
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    start_method: str | None = None,
    oversized: Literal["batch", "error"] = "batch",
) -> DataLoader[Any]:
    """Return the batches of a data set: a `DataLoader` that gives (Graph, Targets) of several structures.

    Its `batch_sampler` is a `BudgetSampler`. Edges are counted only where they matter, for `batch_edges` or for several
    ranks; the first count takes about as long as one pass over the neighbour lists. No global random number is drawn.

    Every rank gets the same number of batches. Where that takes a structure twice (less than one for each rank and
    step), its second appearance has no labels without `shuffle`: averages over a validation set count it once.

    Args:
        dataset: structures with labels.
        batch_atoms: most atoms in a batch.
        batch_edges: most edges in a batch, 0 = no limit.
        seed: of the order.
        shuffle: whether to mix structures, differently in each epoch; else they keep their order.
        workers: processes that prepare batches, 0 = this one.
        rank: which of the ranks this is.
        world_size: number of ranks.
        start_method: how workers begin (fork, spawn or forkserver); None = Python's default.
        oversized: what a structure above a budget is: `batch`, one of its own, or `error`.

    Raises:
        ValueError: the data set is empty, a budget is not positive, or a structure above one is an error.
    """
    n_edges = dataset.n_edges() if len(dataset) and (batch_edges or world_size > 1) else None
    sampler = BudgetSampler(
        dataset.n_atoms,
        n_edges,
        batch_atoms,
        batch_edges,
        seed,
        rank,
        world_size,
        shuffle,
        place=getattr(dataset, "place", None),
        oversized=oversized,
    )
    return DataLoader(
        dataset if shuffle or world_size == 1 else _CountedOnce(dataset),  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=collate_pairs,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=start_method if workers else None,
        generator=torch.Generator().manual_seed(seed),
        worker_init_fn=_leave_signals_to_the_parent,
    )


def _leave_signals_to_the_parent(worker: int) -> None:
    """Put a worker into a process group of its own.

    Ctrl-C, or a SIGTERM to the group of a run, then reaches the run alone, which ends in order and its workers with it.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()


def collate_pairs(structures: Sequence[tuple[Graph, Targets]]) -> tuple[Graph, Targets]:
    """Return several structures and their labels as one graph and one table."""
    graphs, targets = zip(*structures, strict=True)
    return collate(graphs), collate_targets(targets)


def _offsets(counts: Sequence[int]) -> list[int]:
    """Return the running total before each count."""
    total, offsets = 0, []
    for count in counts:
        offsets.append(total)
        total += count
    return offsets
