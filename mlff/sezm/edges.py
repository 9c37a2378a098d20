"""Everything that an edge carries through the blocks, computed once for each structure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mlff.kernels.edge_frames import Ends
from mlff.sezm.harmonics import WignerRows, reduced_layout
from mlff.sezm.tables import Tables


@dataclass(frozen=True)
class Edges:
    """Geometry and features of the edges of a graph with A atoms and E edges."""

    n_atoms: int
    senders: Int[Tensor, "E"]
    receivers: Int[Tensor, "E"]
    directions: Float[Tensor, "E 3"]  # unit vectors, receiver to sender
    lengths: Float[Tensor, "E 1"]  # Å
    inverse_lengths: Float[Tensor, "E 1"]  # 1/Å, smooth at zero
    weight: Float[Tensor, "E 1"]  # message envelope w
    gate: Float[Tensor, "E 1"] | None  # closes the messages of atoms with a neighbour inside the bridging zone
    inverse_sqrt_degree: Float[Tensor, "A 1"]  # 1 / sqrt(Σ w² + δ)
    basis: Float[Tensor, "E B"]  # radial basis φ with its envelope

    @cached_property
    def sender_ends(self) -> Ends:
        """The edges that start at each atom."""
        return Ends.of(self.senders, self.n_atoms)

    @cached_property
    def receiver_ends(self) -> Ends:
        """The edges that end at each atom."""
        return Ends.of(self.receivers, self.n_atoms)

    def sum(self, values: Float[Tensor, "E *n"]) -> Float[Tensor, "A *n"]:
        """Return the sum over the edges of each receiver, in float32 at least.

        A bfloat16 sum of some hundred neighbours would keep two digits.
        """
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values.new_zeros(self.n_atoms, *values.shape[1:]).index_add(0, self.receivers, values)

    def gated(self, weight: Tensor) -> Tensor:
        """Return an edge weight times the bridging gate, where there is one."""
        return weight if self.gate is None else weight * self.gate


@dataclass(frozen=True)
class Rotations:
    """Matrices that turn packed coefficients into each edge's frame, reduced to the orders that a block keeps.

    They are block diagonal in the degree. `numbers` are the blocks one after another, rows m' ascending.
    """

    numbers: Float[Tensor, "E n"]
    places: Int[Tensor, "n"]  # of the numbers in the flattened dense matrix
    shape: tuple[int, int]  # rows and columns of a dense matrix

    @cached_property
    def dense(self) -> Float[Tensor, "E R M"]:
        """The matrices with their zeros, rows in the reduced layout."""
        edges, (rows, columns) = self.numbers.shape[0], self.shape
        empty = self.numbers.new_zeros(edges, rows * columns)
        return empty.index_copy(1, self.places, self.numbers).view(-1, rows, columns)


class EdgeRotations(Tables):
    """Makes the rotations of all shapes (degree, order) that blocks use."""

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.shapes = tuple(dict.fromkeys(shapes))
        degree = max((degree for degree, _ in self.shapes), default=0)
        order = max((order for _, order in self.shapes), default=0)
        self.rows = WignerRows(degree, order)
        for degree, order in self.shapes:
            self.table(f"places_{degree}_{order}", _places(degree, order))

    def forward(self, frames: Float[Tensor, "E 3 3"]) -> dict[tuple[int, int], Rotations]:
        """Return for each (degree L, order M) the rows of D that are kept."""
        blocks = self.rows(frames)
        matrices = {}
        for degree, order in self.shapes:
            kept = []
            for l, block in enumerate(blocks[: degree + 1]):
                surplus = block.shape[1] // 2 - min(order, l)
                kept.append(block[:, surplus : block.shape[1] - surplus].flatten(1))
            rows, columns = len(reduced_layout(degree, order)[0]), (degree + 1) ** 2
            places = self.get_buffer(f"places_{degree}_{order}")
            matrices[degree, order] = Rotations(torch.cat(kept, 1), places, (rows, columns))
        return matrices


def _places(degree: int, order: int) -> Int[Tensor, "n"]:
    """Where entry (m', m) of each degree's block stands in the flattened dense matrix."""
    index, _ = reduced_layout(degree, order)
    row_of = {packed: row for row, packed in enumerate(index.tolist())}
    places = []
    for l in range(degree + 1):
        for m_row in range(-min(order, l), min(order, l) + 1):
            row = row_of[l * l + l + m_row]
            places += [row * (degree + 1) ** 2 + l * l + column for column in range(2 * l + 1)]
    return torch.tensor(places)
