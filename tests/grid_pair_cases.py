"""Cases of the grid-pair kernels against the definition in float64; run as a program, it prints their errors as JSON.

The program is for Triton's interpreter, which has to be chosen before kernels are imported.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from mlff.kernels.grid_pair import grid_pair
from mlff.kernels.grid_pair_factors import Factors
from mlff.sezm.grid import Grid, rotation_grid, sphere_grid


@dataclass(frozen=True)
class Case:
    """A grid, the sizes of operands, and how they lie in memory."""

    degree: int = 2
    order: int | None = None
    kmax: int = 1  # 0: a grid on the sphere
    focus: int = 1
    channels: int = 5
    nodes: int = 3
    layout: str = "contiguous"
    factored: bool = True

    @property
    def name(self) -> str:
        return "-".join(f"{key}{value}" for key, value in asdict(self).items())


CASES = (
    Case(),
    Case(factored=False),
    Case(nodes=0),
    Case(nodes=1, channels=1),
    Case(degree=1, channels=33, nodes=2),
    Case(degree=3, focus=2, channels=16),
    Case(degree=4, focus=3, channels=7, layout="slices"),
    Case(degree=5, focus=2, channels=3, layout="degree major"),
    Case(degree=6, channels=2, nodes=2),
    Case(degree=3, order=1, layout="degree major"),
    Case(degree=3, kmax=0, layout="slices"),
    Case(degree=3, kmax=2, nodes=2),
    Case(channels=31, nodes=2, layout="every other node"),
    Case(channels=17, nodes=5, layout="expanded"),
    Case(channels=4, nodes=5, layout="shifted by one"),
    Case(channels=4, nodes=5, layout="last axis transposed"),
)


def make_grid(case: Case) -> Grid:
    """Return the grid of a case in float64."""
    grid = rotation_grid(case.degree, case.kmax, case.order) if case.kmax else sphere_grid(case.degree, case.order)
    return grid.to(torch.float64)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return the same numbers, otherwise in memory: (N, D, F, W)."""
    if layout == "slices":
        return torch.cat((x, x.neg()), -1)[..., : x.shape[-1]]
    if layout == "degree major":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "every other node":
        return torch.stack((x, x.neg()), 1).flatten(0, 1)[::2]
    if layout == "shifted by one":
        return torch.cat((x[..., :1], x), -1)[..., 1:]
    if layout == "last axis transposed":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if layout == "expanded":
        return x[:1].expand_as(x)
    return x


def all_orders(case: Case, dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return out, its two gradients, and the three gradients of these: by the kernels, and in float64.

    Columns differ in size by many orders of magnitude, as those of a network may.
    """
    grid = make_grid(case)
    generator = torch.Generator().manual_seed(0)
    frames, rows = grid.frames, len(grid.row_degrees)
    size = torch.logspace(-6, 6, case.channels, dtype=torch.float64).repeat(frames)
    shape = (case.nodes, rows, case.focus, frames * case.channels)
    numbers = [torch.randn(shape, dtype=torch.float64, generator=generator) * size for _ in range(5)]
    numbers = [x.to(dtype) for x in numbers]
    tables = [grid.get_buffer(name).to(device) for name in ("to_grid", "from_grid")]
    factors = grid.to(device).factors() if case.factored else None

    def run(kind: torch.dtype, place: str, small: Factors | None) -> list[Tensor]:
        left, right, grad, a, b = (laid_out(x.to(place, kind), case.layout) for x in numbers)
        left, right, grad = (x.detach().requires_grad_() for x in (left, right, grad))
        out = grid_pair(left, right, *(x.to(place) for x in tables), frames, small)
        firsts = torch.autograd.grad(out, (left, right), grad, create_graph=True)
        seconds = torch.autograd.grad((firsts[0] * a).sum() + (firsts[1] * b).sum(), (grad, left, right))
        return [x.detach() for x in (out, *firsts, *seconds)]

    return run(dtype, device, factors), run(torch.float64, "cpu", None)


def error(case: Case, found: Tensor, expected: Tensor) -> float:
    """Return the largest error of a column relative to the largest number of that column."""
    if found.numel() == 0:
        return 0.0
    # [N, F, C, slots]
    found, expected = (
        x.cpu().double().unflatten(-1, (-1, case.channels)).movedim(1, -1).movedim(2, -1).flatten(-2)
        for x in (found, expected)
    )
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def main() -> None:
    """Print the errors of all cases in float32 on the CPU."""
    found = {}
    for case in CASES:
        fast, exact = all_orders(case, torch.float32, "cpu")
        assert all(x.shape == y.shape and x.dtype == torch.float32 for x, y in zip(fast, exact, strict=True))
        found[case.name] = [error(case, x, y) for x, y in zip(fast, exact, strict=True)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
