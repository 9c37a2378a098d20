"""Batches of a size that suits a compiler or a recording, by structures that nobody asked about.

Compiled code is made for any size except 0 and 1, which compilers take for constants; recorded kernels run at the size
they were recorded at. So a batch gets one more structure of as many atoms and edges as are lacking. Its edges lead from
an atom to its own image beyond the cutoff: no atom sees another one, and the other structures do not see it. Its labels
are missing, so that it counts in no mean.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from mlff.graph import BatchPrediction, Graph, Targets


@dataclass(frozen=True)
class Sizes:
    """Sizes of a batch: atoms, directed edges, structures."""

    atoms: int
    edges: int
    structures: int

    @classmethod
    def of(cls, graph: Graph) -> Sizes:
        """Return the sizes of a graph."""
        return cls(graph.n_atoms, graph.n_edges, graph.n_structures)


def pad(graph: Graph, sizes: Sizes, cutoff: float) -> Graph:
    """Return a graph of the given sizes whose first atoms, edges and structures are those of `graph`.

    Args:
        graph: at least one atom.
        sizes: larger than the graph's in atoms and structures, and not smaller in edges.
        cutoff: of the model, Å.

    Raises:
        ValueError: the graph does not fit into the sizes.
    """
    own = Sizes.of(graph)
    atoms, edges, structures = (
        sizes.atoms - own.atoms,
        sizes.edges - own.edges,
        sizes.structures - own.structures,
    )
    if atoms < 1 or edges < 0 or structures < 1 or own.atoms < 1:
        raise ValueError(f"a graph of {own} does not fit into {sizes} with an atom and a structure to spare")
    device = graph.positions.device
    # As many edges to each added atom as to the next, give or take one; sorted, as receivers are.
    ends = own.atoms + torch.arange(edges, device=device) * atoms // max(edges, 1)
    shifts = graph.shifts.new_zeros(edges, 3)
    shifts[:, 0] = 1
    cell = graph.cell.new_zeros(structures, 3, 3)
    cell[0] = 2 * cutoff * torch.eye(3, dtype=cell.dtype, device=device)

    def rows(name: str, count: int) -> Tensor | None:
        values = getattr(graph, name)
        return None if values is None else torch.cat((values, values.new_zeros(count, *values.shape[1:])))

    return Graph(
        positions=torch.cat((graph.positions, graph.positions.new_zeros(atoms, 3))),
        numbers=torch.cat((graph.numbers, graph.numbers[:1].expand(atoms))),
        structure=torch.cat((graph.structure, graph.structure.new_full((atoms,), own.structures))),
        senders=torch.cat((graph.senders, ends.to(graph.senders.dtype))),
        receivers=torch.cat((graph.receivers, ends.to(graph.receivers.dtype))),
        shifts=torch.cat((graph.shifts, shifts)),
        cell=torch.cat((graph.cell, cell)),
        pbc=torch.cat((graph.pbc, graph.pbc.new_zeros(structures, 3))),
        charge=torch.cat((graph.charge, graph.charge.new_zeros(structures))),
        spin=torch.cat((graph.spin, graph.spin.new_zeros(structures))),
        spins=rows("spins", atoms),
        frame_parameters=rows("frame_parameters", structures),
        atom_parameters=rows("atom_parameters", atoms),
    )


def pad_targets(targets: Targets, sizes: Sizes) -> Targets:
    """Return labels for a padded graph: those that were added are missing."""
    atoms, structures = sizes.atoms - len(targets.forces), sizes.structures - len(targets.energy)

    def missing(values: Tensor, count: int) -> Tensor:
        return torch.cat((values, values.new_full((count, *values.shape[1:]), torch.nan)))

    return dataclasses.replace(
        targets,
        energy=missing(targets.energy, structures),
        forces=missing(targets.forces, atoms),
        stress=missing(targets.stress, structures),
        weight=torch.cat((targets.weight, targets.weight.new_ones(structures))),
        group=(*targets.group, *("",) * structures),
        index=torch.cat((targets.index, targets.index.new_full((structures,), -1))),
    )


def unpad(prediction: BatchPrediction, sizes: Sizes) -> BatchPrediction:
    """Return what a prediction on a padded graph says of the graph of the given sizes."""
    structures, atoms = slice(sizes.structures), slice(sizes.atoms)
    magnetic = prediction.magnetic_forces
    return BatchPrediction(
        prediction.energy[structures],
        prediction.energies[atoms],
        prediction.forces[atoms],
        prediction.virial[structures],
        prediction.stress[structures],
        None if magnetic is None else magnetic[atoms],
    )
