"""The grid-pair product: its definition, its derivatives, its words when shapes do not fit."""

from __future__ import annotations

import pytest
import torch

from mlff.kernels.grid_pair import grid_pair

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def operands(
    nodes: int = 3, rows: int = 4, focus: int = 2, frames: int = 3, channels: int = 5, points: int = 7
) -> Operands:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    left, right = (random(nodes, rows, focus, frames * channels) for _ in range(2))
    to_grid, from_grid = (random(points, rows * frames) for _ in range(2))
    return left, right, to_grid, from_grid, frames


@pytest.mark.parametrize("nodes", [0, 1, 3])
@pytest.mark.parametrize("frames", [1, 3, 5])
def test_definition(nodes: int, frames: int) -> None:
    """out[p] = Σ_g B[g,p] (Σ_q A[g,q] left[q]) (Σ_q A[g,q] right[q]) with slots (row, frame)."""
    left, right, to_grid, from_grid, _ = operands(nodes=nodes, frames=frames)
    slots = [x.unflatten(-1, (frames, 5)) for x in (left, right)]  # [N, D, F, K, C]
    a, b = (matrix.unflatten(1, (4, frames)) for matrix in (to_grid, from_grid))  # [G, D, K]
    on_grid = [torch.einsum("gdk,ndfkc->ngfc", a, x) for x in slots]
    expected = torch.einsum("gdk,ngfc->ndfkc", b, on_grid[0] * on_grid[1]).flatten(-2)
    found = grid_pair(left, right, to_grid, from_grid, frames)
    assert found.shape == left.shape
    assert torch.allclose(found, expected, atol=1e-12)  # sums of about 100 products of order one


def test_first_and_second_derivatives() -> None:
    left, right, to_grid, from_grid, frames = operands(nodes=2, channels=2, points=5)
    inputs = (left.requires_grad_(), right.requires_grad_())

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return grid_pair(a, b, to_grid, from_grid, frames)

    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


def test_strided_operands() -> None:
    """Channel slices and degree-major views are as good as contiguous tensors."""
    left, right, to_grid, from_grid, frames = operands()
    both = torch.cat((left, right), -1)
    halves = both.chunk(2, -1)
    degree_major = left.transpose(0, 1).contiguous().transpose(0, 1)
    expected = grid_pair(left, right, to_grid, from_grid, frames)
    assert torch.equal(grid_pair(degree_major, halves[1], to_grid, from_grid, frames), expected)


def test_shapes_that_do_not_fit() -> None:
    left, right, to_grid, from_grid, frames = operands()
    for arguments, words in (
        ((left, right[:, :3], to_grid, from_grid, frames), "one shape"),
        ((left, right, to_grid, from_grid, 4), "K = 4"),
        ((left, right, to_grid[:, :-1], from_grid, frames), r"\(G, 12\)"),
    ):
        with pytest.raises(ValueError, match=words):
            grid_pair(*arguments)
