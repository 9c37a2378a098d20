"""Structures to batches: one larger graph with no edge between structures, filled up to a budget of atoms and edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlff.graph import Graph, Targets


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


def _offsets(counts: Sequence[int]) -> list[int]:
    """Return the running total before each count."""
    total, offsets = 0, []
    for count in counts:
        offsets.append(total)
        total += count
    return offsets
