"""A small pair potential with parameters of every kind, for tests of what trains, reads or runs a potential."""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from mlff.graph import Graph, Targets


@dataclass(frozen=True)
class ToyOptions:
    """What a saved potential must say of itself."""

    rcut: float = 4.0
    width: int = 8

    def to_mapping(self) -> dict[str, Any]:
        return {"rcut": self.rcut, "width": self.width}


class PairPotential(nn.Module):
    """E_i = E0(Z_i) + ½ Σ_j c(r_ij) f(r_ij; Z_i, Z_j), smooth to the cutoff, with a small network for f."""

    def __init__(self, elements=(1, 8), cutoff=4.0, width=8, seed=0, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def noise(*shape):
            return nn.Parameter((torch.randn(*shape, generator=generator, dtype=torch.float64) / 2).to(dtype))

        self.options = ToyOptions(cutoff, width)
        self.elements, self.cutoff = tuple(elements), cutoff
        self.table = noise(len(elements), width)
        self.table.optimizer_route = "adam"
        self.first, self.second, self.bias = noise(width, 2 * width), noise(2 * width, width), noise(width)
        self.register_buffer("reference_energies", torch.zeros(len(elements), dtype=torch.float64))
        rows = torch.full((119,), -1)
        rows[list(elements)] = torch.arange(len(elements))
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, graph: Graph, vectors=None):
        if vectors is None:
            shifts = torch.einsum("ei,eij->ej", graph.shifts, graph.cell[graph.structure[graph.receivers]])
            vectors = graph.positions[graph.senders] + shifts - graph.positions[graph.receivers]
        species = self.rows[graph.numbers]
        lengths = vectors.square().sum(-1).clamp_min(1e-12).sqrt()
        envelope = (1 - (lengths / self.cutoff).clamp(max=1.0)) ** 3
        waves = torch.arange(1, self.table.shape[1] + 1, device=lengths.device) * lengths[:, None] / self.cutoff
        pair = self.table[species[graph.senders]] + self.table[species[graph.receivers]]
        hidden = torch.tanh((torch.sin(3 * waves).to(pair.dtype) + pair) @ self.first)
        energy = (torch.tanh(hidden @ self.second + self.bias)).sum(-1).double() * envelope
        zeros = torch.zeros(graph.n_atoms, dtype=torch.float64, device=energy.device)
        return self.reference_energies[species] + zeros.index_add(0, graph.receivers, 0.5 * energy)


def molecules(count=6, atoms=(3, 2, 5), seed=0, cutoff=4.0, elements=(1, 8), label=None):
    """Open clusters as (Graph, Targets), all pairs within the cutoff; labels from `label(graph)` or from noise."""
    generator = np.random.default_rng(seed)
    structures = []
    for index in range(count):
        n = atoms[index % len(atoms)]
        positions = generator.normal(size=(n, 3)) * 1.2
        numbers = np.array([elements[i % len(elements)] for i in range(n)])
        structures.append(structure(positions, numbers, cutoff=cutoff, index=index))
    if label is None:
        return structures
    return [(graph, label(graph, targets)) for graph, targets in structures]


def structure(
    positions, numbers, cell=None, cutoff=4.0, index=0, energy=float("nan"), forces=None, stress=None, weight=1.0
):
    """One structure with its labels; with a cell it is periodic, and the cell must be wider than two cutoffs."""
    positions = np.asarray(positions, dtype=float)
    n = len(positions)
    delta = positions[None, :] - positions[:, None]  # [receiver, sender]
    shift = np.zeros_like(delta)
    if cell is not None:
        cell = np.asarray(cell, dtype=float)
        shift = -np.round(delta @ np.linalg.inv(cell))
        delta = delta + shift @ cell
    near = (np.linalg.norm(delta, axis=-1) < cutoff) & ~np.eye(n, dtype=bool)
    receivers, senders = np.nonzero(near)
    graph = Graph(
        positions=torch.tensor(positions),
        numbers=torch.tensor(np.asarray(numbers)),
        structure=torch.zeros(n, dtype=torch.long),
        senders=torch.tensor(senders),
        receivers=torch.tensor(receivers),
        shifts=torch.tensor(shift[near]),
        cell=torch.zeros(1, 3, 3, dtype=torch.float64) if cell is None else torch.tensor(cell)[None],
        pbc=torch.full((1, 3), cell is not None),
        charge=torch.zeros(1, dtype=torch.float64),
        spin=torch.zeros(1, dtype=torch.float64),
    )
    nan = float("nan")
    targets = Targets(
        energy=torch.tensor([energy], dtype=torch.float64),
        forces=torch.full((n, 3), nan, dtype=torch.float64)
        if forces is None
        else torch.tensor(np.asarray(forces, dtype=float)),
        stress=torch.full((1, 3, 3), nan, dtype=torch.float64)
        if stress is None
        else torch.tensor(np.asarray(stress, dtype=float))[None],
        weight=torch.tensor([weight], dtype=torch.float64),
        group=("",),
        index=torch.tensor([index]),
    )
    return graph, targets
