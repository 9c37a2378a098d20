"""Products in the Cartesian picture: coefficients up to degree 2 as 3×3 matrices.

The coefficients of l = 0, 1, 2 span the trace, the antisymmetric and the traceless symmetric part of a matrix; matrix
products then mix degrees without Clebsch–Gordan tables.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mlff.sezm.linear import DegreeLinear, GatedActivation
from mlff.sezm.options import Options
from mlff.sezm.tables import Tables


def cartesian_basis(degree: int) -> Float[Tensor, "M 3 3"]:
    """Return an orthonormal 3×3 matrix for each packed coefficient up to degree 1 or 2, in float64.

    X = Σ x_lm basis_lm turns as X -> R X R^T when the coefficients turn with D(R).
    """
    a, c = 1 / math.sqrt(2), 1 / math.sqrt(6)
    entries: list[dict[tuple[int, int], float]] = [
        {(0, 0): 1 / math.sqrt(3), (1, 1): 1 / math.sqrt(3), (2, 2): 1 / math.sqrt(3)},
        {(0, 2): -a, (2, 0): a},
        {(0, 1): a, (1, 0): -a},
        {(1, 2): -a, (2, 1): a},
        {(0, 1): -a, (1, 0): -a},
        {(1, 2): a, (2, 1): a},
        {(0, 0): -c, (1, 1): -c, (2, 2): 2 * c},
        {(0, 2): -a, (2, 0): -a},
        {(0, 0): a, (1, 1): -a},
    ]
    basis = torch.zeros((degree + 1) ** 2, 3, 3, dtype=torch.float64)
    for k, entry in enumerate(entries[: (degree + 1) ** 2]):
        for place, value in entry.items():
            basis[k][place] = value
    return basis


class _Layers(Tables):
    """Linear maps by degree with gated activations between them, the last one bare, and the change of picture."""

    def __init__(self, options: Options, degree: int, layers: int) -> None:
        super().__init__()
        wide = options.n_focus * options.focus_width
        self.linears = nn.ModuleList(DegreeLinear(degree, wide, wide, bias=options.mlp_bias) for _ in range(layers))
        self.activations = nn.ModuleList(
            GatedActivation(degree, wide, 1, options.activation_function, options.mlp_bias) for _ in range(layers - 1)
        )
        self.table("basis", cartesian_basis(degree))

    def activate(self, k: int, h: Float[Tensor, "N M C"]) -> Float[Tensor, "N M C"]:
        if k >= len(self.activations):
            return h
        return self.activations[k](h.unsqueeze(2)).squeeze(2)

    def matrices(self, h: Float[Tensor, "N M C"]) -> Float[Tensor, "N C 3 3"]:
        return torch.einsum("nmc,mij->ncij", h, self.get_buffer("basis"))

    def coefficients(self, matrices: Float[Tensor, "N C 3 3"]) -> Float[Tensor, "N M C"]:
        return torch.einsum("ncij,mij->nmc", matrices, self.get_buffer("basis"))


class EdgeCartesian(_Layers):
    """The message of an edge by right multiplication with a matrix of its direction, in the global frame."""

    def __init__(self, options: Options, degree: int) -> None:
        super().__init__(options, degree, options.mixing_layers)

    def forward(
        self, sent: Float[Tensor, "E M C"], radial: Float[Tensor, "E L C"], directions: Float[Tensor, "E 3"]
    ) -> Float[Tensor, "E M C"]:
        """Return messages from the sender's coefficients and the radial features of each degree."""
        tensor = self._edge_tensor(radial, directions)
        if not len(self.linears):
            return self.coefficients(self.matrices(sent) @ tensor)
        h = sent
        for k, linear in enumerate(self.linears):
            h = h + self.activate(k, self.coefficients(self.matrices(linear(h)) @ tensor))
        return h

    def _edge_tensor(self, radial: Tensor, directions: Tensor) -> Float[Tensor, "E C 3 3"]:
        x, y, z = directions.unbind(-1)
        zero, identity = torch.zeros_like(x), torch.eye(3, dtype=x.dtype, device=x.device)
        cross = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), -1).unflatten(-1, (3, 3)) / math.sqrt(2)
        tensor = radial[:, 0, :, None, None] / math.sqrt(3) * identity
        if radial.shape[1] > 1:
            tensor = tensor + radial[:, 1, :, None, None] * cross[:, None]
        if radial.shape[1] > 2:
            outer = directions[:, :, None] * directions[:, None, :]
            traceless = (outer - identity / 3) / math.sqrt(2 / 3)
            tensor = tensor + radial[:, 2, :, None, None] * traceless[:, None]
        return tensor


class NodeCartesian(_Layers):
    """Products of an atom's gathered message with its own features, as matrices."""

    def __init__(self, options: Options, degree: int) -> None:
        mode, _, layers = options.node_cartesian.partition(":")
        super().__init__(options, degree, int(layers))
        self.parity = mode == "parity"

    def forward(self, gathered: Float[Tensor, "A M C"], own: Float[Tensor, "A M C"]) -> Float[Tensor, "A M C"]:
        """Return the message after the products."""
        h, own_matrices = gathered, self.matrices(own)
        for k, linear in enumerate(self.linears):
            mixed = self.matrices(linear(h))
            product = mixed @ own_matrices
            if self.parity:
                product = product + own_matrices @ mixed
            h = h + self.activate(k, self.coefficients(product))
        return h
