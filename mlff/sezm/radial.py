"""What an edge knows of its length: the cutoff envelope, the radial basis, and the network that mixes it."""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mlff.sezm.linear import ACTIVATION, Dense, routed
from mlff.sezm.norm import RMSNorm


def envelope(lengths: Float[Tensor, "E 1"], cutoff: float, exponent: int) -> Float[Tensor, "E 1"]:
    """Return a polynomial that falls from 1 at zero to 0 at the cutoff, where three derivatives vanish too.

    (1-x)⁴ Σ_{k<exponent} binom(k+3, 3) x^k with x = r / cutoff: the series of (1-x)⁻⁴, cut short.
    """
    x = (lengths / cutoff).clamp(0, 1)
    series = torch.full_like(x, math.comb(exponent + 2, 3))
    for k in range(exponent - 2, -1, -1):
        series = series * x + math.comb(k + 3, 3)
    return (1 - x).square().square() * series


class RadialBasis(nn.Module):
    """Bessel functions sin(ω r) / r, or Gaussians, with trainable frequencies or centres, times the envelope."""

    def __init__(self, kind: str, count: int, cutoff: float, exponent: int) -> None:
        super().__init__()
        self.kind, self.cutoff, self.exponent = kind, cutoff, exponent
        if kind == "bessel":
            start = torch.arange(1, count + 1, dtype=torch.float32) * (math.pi / cutoff)
        else:
            start = torch.linspace(0, cutoff, count, dtype=torch.float32)
        self.width = cutoff / max(count - 1, 1)
        self.frequencies = routed(start, "adam")

    def forward(self, lengths: Float[Tensor, "E 1"]) -> Float[Tensor, "E B"]:
        """Return the basis functions at each length (Å)."""
        if self.kind == "bessel":
            # ω sinc(ω r / π), finite at r = 0.
            basis = self.frequencies * torch.sinc(lengths * self.frequencies / math.pi)
        else:
            basis = torch.exp(-(lengths - self.frequencies).square() / (2 * self.width**2))
        return basis * envelope(lengths, self.cutoff, self.exponent)


class RadialNetwork(nn.Module):
    """Basis functions to (L+1) C features, without biases: nothing in, nothing out."""

    def __init__(
        self, width_in: int, hidden: tuple[int, ...], width_out: int, activation: str, norm: bool, eps: float
    ) -> None:
        super().__init__()
        widths = (width_in, *hidden)
        self.layers = nn.ModuleList(Dense(a, b) for a, b in itertools.pairwise(widths))
        self.norms = nn.ModuleList(RMSNorm(width, eps=eps) for width in hidden) if norm else None
        self.last = Dense(widths[-1], width_out)
        self.activation = activation

    def forward(self, basis: Float[Tensor, "E B"]) -> Float[Tensor, "E O"]:
        """Return the mixed features."""
        x = basis
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if self.norms is not None:
                x = self.norms[k](x)
            x = ACTIVATION[self.activation](x)
        return self.last(x)
