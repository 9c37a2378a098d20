"""The tables that travel through the package: structures as graphs, their labels, and what a model says of them.

Units everywhere: Å, eV, eV/Å, eV/Å³. Cell rows are lattice vectors. An edge runs from a *sender* (the neighbour,
whose features travel) to a *receiver* (the centre, which collects them); each pair within the cutoff gives two edges,
and each periodic image its own.

    stress = (1/V) dE/d(strain)    positive when the structure pulls inwards, as in ASE
    virial = -dE/d(strain)         = -V stress, in eV
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Graph:
    """One or more structures as a graph. A batch is one larger graph with no edge between structures."""

    positions: Float[Tensor, "A 3"]  # Å, float64
    numbers: Int[Tensor, "A"]  # atomic numbers
    structure: Int[Tensor, "A"]  # which structure each atom belongs to, sorted
    senders: Int[Tensor, "E"]  # atom whose features travel
    receivers: Int[Tensor, "E"]  # atom that collects them, sorted
    shifts: Float[Tensor, "E 3"]  # whole cells from the receiver's image to the sender's, float64
    cell: Float[Tensor, "S 3 3"]  # Å, float64; zeros where not periodic along any axis
    pbc: Bool[Tensor, "S 3"]  # which axes repeat
    charge: Float[Tensor, "S"]  # total charge, elementary charges
    spin: Float[Tensor, "S"]  # spin multiplicity 2S + 1 (or what the model was trained on), 0 when not given
    spins: Float[Tensor, "A 3"] | None = None  # spin vector of each atom, only for models with native spin
    frame_parameters: Float[Tensor, "S P"] | None = None  # conditions of each structure, only for models that read them
    atom_parameters: Float[Tensor, "A Q"] | None = None  # conditions of each atom, only for models that read them

    @property
    def n_atoms(self) -> int:
        """Number of atoms A in all structures."""
        return self.positions.shape[0]

    @property
    def n_edges(self) -> int:
        """Number of directed edges E."""
        return self.senders.shape[0]

    @property
    def n_structures(self) -> int:
        """Number of structures S."""
        return self.cell.shape[0]

    @property
    def volumes(self) -> Float[Tensor, "S"]:
        """Volume of each cell in Å³, 0 where the lattice vectors span none."""
        a, b, c = self.cell.to(torch.float64).unbind(1)
        return (a * torch.linalg.cross(b, c)).sum(-1).abs()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        """Return the graph on another device; dtypes stay."""
        return _moved(self, device, non_blocking)

    def pin_memory(self) -> Graph:
        """Return the graph in page-locked memory, as data loaders ask for it."""
        return _pinned(self)


@dataclass(frozen=True)
class Targets:
    """Labels of the structures of a graph. A label that is missing is NaN, never zero."""

    energy: Float[Tensor, "S"]  # eV, float64, total energy
    forces: Float[Tensor, "A 3"]  # eV/Å, float64
    stress: Float[Tensor, "S 3 3"]  # eV/Å³, float64, symmetric
    weight: Float[Tensor, "S"]  # weight of the structure in the loss, 1 when not given
    group: tuple[str, ...]  # a name for each structure by which errors are reported ("" when not given)
    index: Int[Tensor, "S"]  # place of the structure in its data set

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Targets:
        """Return the labels on another device; dtypes stay."""
        return _moved(self, device, non_blocking)

    def pin_memory(self) -> Targets:
        """Return the labels in page-locked memory, as data loaders ask for it."""
        return _pinned(self)


@dataclass(frozen=True)
class BatchPrediction:
    """What a model says of the structures of a graph, as tensors that may carry gradients."""

    energy: Float[Tensor, "S"]  # eV, float64
    energies: Float[Tensor, "A"]  # eV, float64, sum to energy over each structure
    forces: Float[Tensor, "A 3"]  # eV/Å, float64
    virial: Float[Tensor, "S 3 3"]  # eV, float64, -dE/d(strain)
    stress: Float[Tensor, "S 3 3"]  # eV/Å³, float64; NaN for a structure without a volume
    magnetic_forces: Float[Tensor, "A 3"] | None = None  # -dE/d(spin), only for models with native spin


@dataclass(frozen=True)
class Prediction:
    """What a model says of one structure, as plain numbers."""

    energy: float  # eV
    energies: np.ndarray  # (N,) eV
    forces: np.ndarray  # (N, 3) eV/Å
    stress: np.ndarray | None  # (6,) eV/Å³, Voigt order xx yy zz yz xz xy; None without a volume
    virial: np.ndarray  # (3, 3) eV


def _moved(table: Any, device: torch.device | str, non_blocking: bool) -> Any:
    return _each_tensor(table, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _pinned(table: Any) -> Any:
    return _each_tensor(table, lambda tensor: tensor.pin_memory())


def _each_tensor(table: Any, change: Any) -> Any:
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    return type(table)(
        **{name: change(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
    )
