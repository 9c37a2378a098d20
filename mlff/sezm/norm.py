"""Norms: of scalars, and of all degrees of an atom or an edge together.

None subtracts a mean except from l = 0, where alone a mean over channels is invariant.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mlff.kernels.unit_rms import unit_rms
from mlff.sezm.harmonics import packed_degrees, reduced_layout
from mlff.sezm.linear import routed
from mlff.sezm.tables import Tables


class RMSNorm(nn.Module):
    """x / sqrt(mean_c x² + eps) · scale, over the last axis; `scale` has the given trailing shape."""

    def __init__(self, *shape: int, eps: float) -> None:
        super().__init__()
        self.scale = routed(torch.ones(shape), "adam")
        self.eps = eps

    def forward(self, x: Float[Tensor, "*n C"]) -> Float[Tensor, "*n C"]:
        """Return the scaled unit-variance features."""
        rows = x.unsqueeze(1) if x.dim() == 3 else x.reshape(-1, 1, 1, x.shape[-1])
        return unit_rms(rows, eps=self.eps).view(x.shape) * self.scale


class EquivariantRMSNorm(Tables):
    """One variance for all degrees: x / sqrt(v + eps) · scale_l, with l = 0 centred first and given a bias.

    v = 1/(L+1) Σ_l 1/n_l Σ_m mean_c x_lm², n_l rows of degree l. On [N, rows, *, C]; scale [L+1, *, C], bias [*, C].
    With an order, rows are in the reduced layout, else packed.
    """

    def __init__(self, degree: int, *width: int, eps: float = 1e-5, order: int | None = None) -> None:
        super().__init__()
        degrees = packed_degrees(degree) if order is None else reduced_layout(degree, order)[1]
        counts = torch.bincount(degrees).to(torch.float64)
        balance = 1 / (counts[degrees] * (degree + 1))
        self.eps = eps
        self.scale = routed(torch.ones(degree + 1, *width), "adam")
        self.bias = routed(torch.zeros(width), "adam")
        self.table("row_degrees", degrees)
        self.table("balance", balance / width[-1])

    def forward(self, x: Float[Tensor, "N R *f C"]) -> Float[Tensor, "N R *f C"]:
        """Return the normalised rows."""
        rows = x if x.dim() == 4 else x.unsqueeze(2)
        unit = unit_rms(rows, self.get_buffer("balance"), self.eps, centred=True).view(x.shape)
        scale = self.scale.index_select(0, self.get_buffer("row_degrees"))
        bias = functional.pad(self.bias.unsqueeze(0), (0, 0) * self.bias.dim() + (0, x.shape[1] - 1))
        return torch.addcmul(bias, unit, scale)
