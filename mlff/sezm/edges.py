"""Everything that an edge carries through the blocks, computed once for each structure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

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

    def sum(self, values: Float[Tensor, "E *n"]) -> Float[Tensor, "A *n"]:
        """Return the sum over the edges of each receiver, in float32 at least.

        A bfloat16 sum of some hundred neighbours would keep two digits.
        """
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values.new_zeros(self.n_atoms, *values.shape[1:]).index_add(0, self.receivers, values)

    def gated(self, weight: Tensor) -> Tensor:
        """Return an edge weight times the bridging gate, where there is one."""
        return weight if self.gate is None else weight * self.gate


class EdgeRotations(Tables):
    """Dense matrices that turn packed coefficients into each edge's frame, reduced to the orders that a block keeps."""

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self.shapes = tuple(dict.fromkeys(shapes))
        degree = max((degree for degree, _ in self.shapes), default=0)
        order = max((order for _, order in self.shapes), default=0)
        self.rows = WignerRows(degree, order)
        for degree, order in self.shapes:
            self.table(f"places_{degree}_{order}", _places(degree, order))

    def forward(self, frames: Float[Tensor, "E 3 3"]) -> dict[tuple[int, int], Float[Tensor, "E R M"]]:
        """Return for each (degree L, order M) the rows of D in reduced order, [E, R, (L+1)²]."""
        blocks = self.rows(frames)
        matrices = {}
        for degree, order in self.shapes:
            kept = []
            for l, block in enumerate(blocks[: degree + 1]):
                surplus = block.shape[1] // 2 - min(order, l)
                kept.append(block[:, surplus : block.shape[1] - surplus].flatten(1))
            rows, columns = len(reduced_layout(degree, order)[0]), (degree + 1) ** 2
            places = self.get_buffer(f"places_{degree}_{order}")
            empty = frames.new_zeros(frames.shape[0], rows * columns)
            matrices[degree, order] = empty.index_copy(1, places, torch.cat(kept, 1)).view(-1, rows, columns)
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
