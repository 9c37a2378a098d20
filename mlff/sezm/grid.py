"""Nonlinearities on grids: coefficients become values at points, are multiplied there, and are projected back.

A product of two fields on the sphere or on the rotation group is equivariant, which no pointwise function of the
coefficients is. Quadratures are exact for the product, except the latitude-longitude grid of old models.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from mlff.kernels.grid_pair import grid_pair
from mlff.kernels.grid_pair_factors import Factors, factorise
from mlff.kernels.swiglu import swiglu_packed
from mlff.sezm.harmonics import WignerRows, edge_frames, packed_degrees, reduced_layout, spherical_harmonics
from mlff.sezm.lebedev import lebedev_rule
from mlff.sezm.linear import DegreeLinear, FocusLinear, routed, uniform
from mlff.sezm.tables import Tables

FACTOR_NAMES = tuple(field.name for field in dataclasses.fields(Factors))


class Grid(Tables):
    """Projectors of coefficient rows to a grid and back. `frames` is K; both matrices are (G, rows K), K fastest.

    With `rolls`, points stand in groups of so many equal rolls about one axis, which a GPU makes use of.
    """

    def __init__(
        self,
        to_grid: Tensor,
        from_grid: Tensor,
        degree: int,
        frames: int,
        row_degrees: Int[Tensor, "R"],
        rolls: int | None = None,
    ) -> None:
        super().__init__()
        self.degree, self.frames, self.row_degrees = degree, frames, row_degrees
        self.table("to_grid", to_grid)
        self.table("from_grid", from_grid)
        factors = None if rolls is None else factorise(to_grid, from_grid, row_degrees, rolls)
        self.factored = factors is not None
        if factors is not None:
            for name, values in vars(factors).items():
                self.table(name, values)

    def forward(self, left: Float[Tensor, "N R F KC"], right: Float[Tensor, "N R F KC"]) -> Float[Tensor, "N R F KC"]:
        """Return the projection of the pointwise product."""
        to_grid, from_grid = self.get_buffer("to_grid"), self.get_buffer("from_grid")
        return grid_pair(left, right, to_grid, from_grid, self.frames, self.factors())

    def factors(self) -> Factors | None:
        """Return the smaller form of the projectors that GPUs use, if there is one."""
        return Factors(**{name: self.get_buffer(name) for name in FACTOR_NAMES}) if self.factored else None


def sphere_grid(degree: int, order: int | None = None, lebedev: bool = True, isotropic: bool = True) -> Grid:
    """Return a grid on the sphere: one frame, Lebedev points or a latitude-longitude product.

    Rows are packed, or with an `order` reduced to |m| <= order; then degrees above the order are scaled by
    sqrt((2l+1) / (2 order+1)) both ways. `isotropic` gives the product grid as many longitudes as latitudes.
    """
    if lebedev:
        points, weights = lebedev_rule(3 * degree)
    else:
        points, weights = _product_rule(degree, degree if order is None else order, isotropic)
    harmonics = spherical_harmonics(points, degree)  # [G, M]
    index, degrees = _rows(degree, order)
    scale = math.sqrt(degree + 1)
    to_grid = harmonics[:, index] / scale
    from_grid = harmonics[:, index] * weights[:, None] * (2 * degrees + 1) * scale
    if order is not None and order < degree:
        exact = degrees.to(torch.float64)
        factor = torch.where(degrees > order, ((2 * exact + 1) / (2 * order + 1)).sqrt(), 1.0)
        to_grid, from_grid = to_grid * factor, from_grid * factor
    return Grid(to_grid, from_grid, degree, 1, degrees)


def rotation_grid(degree: int, kmax: int, order: int | None = None) -> Grid:
    """Return a grid on the rotation group: frames k = 0, -1, +1, … -kmax, +kmax of Wigner functions D^l_km.

    Points are a Lebedev rule times 3 kmax + 1 rolls about each, which integrates products of three exactly. Rows as in
    `sphere_grid`. kmax is cut to the degree.
    """
    kmax = min(kmax, degree)
    points, weights = lebedev_rule(3 * degree)
    rolls = 3 * kmax + 1 if kmax else 1
    angles = torch.arange(rolls, dtype=torch.float64) * (2 * math.pi / rolls)
    frames = edge_frames(points.repeat_interleave(rolls, 0), angles.repeat(len(points)))
    wigner = WignerRows(degree, kmax).to(torch.float64)(frames)
    ks = [0] + [sign * k for k in range(1, kmax + 1) for sign in (-1, 1)]
    index, degrees = _rows(degree, order)
    to_grid = frames.new_zeros(len(frames), len(index), len(ks))
    for row, (packed, l) in enumerate(zip(index.tolist(), degrees.tolist(), strict=True)):
        for frame, k in enumerate(ks):
            if abs(k) <= l:
                to_grid[:, row, frame] = wigner[l][:, k + min(kmax, l), packed - l * l]
    quadrature = weights.repeat_interleave(rolls)[:, None, None] / rolls
    from_grid = to_grid * quadrature * (2 * degrees + 1)[:, None]
    return Grid(to_grid.flatten(1), from_grid.flatten(1), degree, len(ks), degrees, rolls)


class GridNet(nn.Module):
    """A gated product of two fields on a grid.

    mode "self": one input holds both fields, [N, R, F, 2 K C], left in the first half. mode "cross": two inputs
    [N, R, F, C], expanded to K frames and contracted again where the grid has frames. Output [N, R, F, K C] or [N,
    R, F, C].

    The product is "glu" (of the fields themselves), "mlp" (of linear images of both), or "branch" (of several pairs of
    images, weighted by a router of the scalars).
    """

    def __init__(
        self,
        grid: Grid,
        channels: int,
        focus: int,
        mode: str,
        mlp: bool = False,
        branches: int = 0,
        bias: bool = False,
        residual_scale: bool = False,
    ) -> None:
        super().__init__()
        self.grid, self.mode, self.channels = grid, mode, channels
        self.expands = mode == "cross" and grid.frames > 1
        self.branches = branches
        bound = 1 / math.sqrt(channels)
        if self.expands:
            wide = grid.frames * channels
            rows = grid.row_degrees
            self.frame_expand = DegreeLinear(grid.degree, channels, wide, bound=bound, row_degrees=rows)
            self.frame_contract = DegreeLinear(grid.degree, wide, channels, bound=1 / math.sqrt(wide), row_degrees=rows)
        self.scalar_gate = FocusLinear(2 * channels, channels, focus, bias, std=0.01)
        self.product = "branch" if branches else "mlp" if mlp else "glu"
        if self.product == "branch":
            self.left_proj = nn.Parameter(uniform(channels, branches * channels, bound=bound))
            self.right_proj = nn.Parameter(uniform(channels, branches * channels, bound=bound))
            self.router = nn.Parameter(uniform(2 * channels, branches, bound=1 / math.sqrt(2 * channels)))
            self.out_proj = nn.Parameter(uniform(channels, channels, bound=bound))
        elif self.product == "mlp":
            width = 2 * channels if mode == "self" else channels
            self.left_proj = nn.Parameter(uniform(width, 2 * channels, bound=1 / math.sqrt(width)))
            self.right_proj = nn.Parameter(uniform(width, 2 * channels, bound=1 / math.sqrt(width)))
            self.out_proj = nn.Parameter(uniform(2 * channels, channels, bound=1 / math.sqrt(2 * channels)))
        self.residual_scale = routed(torch.full((focus, channels), 1e-3), "adam") if residual_scale else None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the gated product of one input that holds both fields (mode "self") or of two (mode "cross")."""
        frames, channels = self.grid.frames, self.channels
        left, right = inputs[0].chunk(2, dim=-1) if self.mode == "self" else inputs
        left_scalars, right_scalars = left[:, 0, :, :channels], right[:, 0, :, :channels]  # [N, F, C]
        scalars = torch.cat((left_scalars, right_scalars), -1)
        if self.expands:
            # Gate and scalar branch see the inputs before the expansion.
            left, right = self.frame_expand(left), self.frame_expand(right)
        product = self._product(left, right, scalars).unflatten(-1, (frames, channels))
        product = product * torch.sigmoid(self.scalar_gate(scalars))[:, None, :, None, :]
        product = product.flatten(-2)
        scalar_branch = swiglu_packed(scalars, "gate_up")
        if frames > 1:
            scalar_branch = functional.pad(scalar_branch, (0, (frames - 1) * channels))
        first, rest = product.split([1, product.shape[1] - 1], 1)
        out = torch.cat((first + scalar_branch.unsqueeze(1), rest), 1)
        if self.expands:
            out = self.frame_contract(out)
        return out if self.residual_scale is None else out * self.residual_scale

    def _product(self, left: Tensor, right: Tensor, scalars: Float[Tensor, "N F W"]) -> Tensor:
        frames, channels = self.grid.frames, self.channels
        if self.product == "glu":
            return self.grid(left, right)
        left, right = left.unflatten(-1, (frames, channels)), right.unflatten(-1, (frames, channels))
        if self.product == "mlp":
            if self.mode == "self":
                both = torch.cat((left, right), -1)
                left = right = both
            product = self.grid((left @ self.left_proj).flatten(-2), (right @ self.right_proj).flatten(-2))
            return (product.unflatten(-1, (frames, 2 * channels)) @ self.out_proj).flatten(-2)
        product = self.grid((left @ self.left_proj).flatten(-2), (right @ self.right_proj).flatten(-2))
        product = product.unflatten(-1, (frames, self.branches, channels))
        if self.branches == 1:  # a router of one is identically 1
            mixed = product.squeeze(-2)
        else:
            share = torch.softmax(scalars @ self.router, -1)  # [N, F, branches]
            mixed = (product * share[:, None, :, None, :, None]).sum(-2)
        return (mixed @ self.out_proj).flatten(-2)


def _rows(degree: int, order: int | None) -> tuple[Int[Tensor, "R"], Int[Tensor, "R"]]:
    """Packed index and degree of each coefficient row."""
    if order is None:
        degrees = packed_degrees(degree)
        return torch.arange(len(degrees)), degrees
    return reduced_layout(degree, order)


def _product_rule(degree: int, order: int, isotropic: bool) -> tuple[Float[Tensor, "G 3"], Float[Tensor, "G"]]:
    """Latitudes of equal spacing times longitudes of equal spacing; weights sum to 1.

    Source of the latitude weights: Driscoll and Healy, Adv. Appl. Math. 15, 202 (1994).
    """
    latitudes = 2 * math.ceil((3 * degree + 2) / 2)
    longitudes = 2 * order + 4
    if isotropic:
        latitudes = longitudes = max(latitudes, longitudes)
    beta = (torch.arange(latitudes, dtype=torch.float64) + 0.5) * (math.pi / latitudes)
    alpha = torch.arange(longitudes, dtype=torch.float64) * (2 * math.pi / longitudes)
    odd = 2 * torch.arange(latitudes // 2, dtype=torch.float64) + 1
    weights = beta.sin() * (torch.sin(beta[:, None] * odd) / odd).sum(-1)
    weights = (weights / weights.sum())[:, None].expand(-1, longitudes) / longitudes
    x = -beta.sin()[:, None] * alpha.cos()
    y = beta.sin()[:, None] * alpha.sin()
    z = beta.cos()[:, None].expand_as(x)
    return torch.stack((x, y, z), -1).flatten(0, 1), weights.flatten()
