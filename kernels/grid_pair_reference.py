"""The grid-pair product in plain torch: project two coefficient tensors on a grid, multiply there, project back.

    out[p] = Σ_g B[g, p] (Σ_q A[g, q] left[q]) (Σ_q A[g, q] right[q])        for each node, focus and channel

with slots p = (row d, frame k), k fastest, A = `to_grid` and B = `from_grid`, both (G, P). It is trilinear in its two
operands and, on the way back, the incoming gradient, so that its derivatives of all orders are products of the same
kind.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

Coefficients = Float[Tensor, "N D F KC"]
Projector = Float[Tensor, "G P"]


def forward(left: Coefficients, right: Coefficients, to_grid: Projector, from_grid: Projector, n_frames: int) -> Tensor:
    """Return the product."""
    on_grid = _project(left, to_grid, n_frames) * _project(right, to_grid, n_frames)
    return _gather(on_grid, from_grid, n_frames)


def backward(
    grad: Coefficients,
    left: Coefficients,
    right: Coefficients,
    to_grid: Projector,
    from_grid: Projector,
    n_frames: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of left and right, given that of the product."""
    cotangent = _project(grad, from_grid, n_frames)
    grad_left = _gather(cotangent * _project(right, to_grid, n_frames), to_grid, n_frames)
    grad_right = _gather(cotangent * _project(left, to_grid, n_frames), to_grid, n_frames)
    return grad_left, grad_right


def double_backward(
    grad_grad_left: Coefficients,
    grad_grad_right: Coefficients,
    grad: Coefficients,
    left: Coefficients,
    right: Coefficients,
    to_grid: Projector,
    from_grid: Projector,
    n_frames: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of grad, left and right, given those of both results of `backward`."""
    cotangent = _project(grad, from_grid, n_frames)
    l, r = _project(left, to_grid, n_frames), _project(right, to_grid, n_frames)
    a, b = _project(grad_grad_left, to_grid, n_frames), _project(grad_grad_right, to_grid, n_frames)
    return (
        _gather(a * r + l * b, from_grid, n_frames),
        _gather(cotangent * b, to_grid, n_frames),
        _gather(cotangent * a, to_grid, n_frames),
    )


def _project(x: Tensor, matrix: Tensor, n_frames: int) -> Tensor:
    """[N, D, F, K C] with (G, D K) -> [N, F, G, C]."""
    nodes, rows, focus, width = x.shape
    channels = width // n_frames
    slots = x.unflatten(-1, (n_frames, channels)).permute(0, 2, 1, 3, 4)
    slots = slots.reshape(nodes * focus, rows * n_frames, channels)
    return torch.matmul(matrix, slots).view(nodes, focus, matrix.shape[0], channels)


def _gather(grid: Tensor, matrix: Tensor, n_frames: int) -> Tensor:
    """[N, F, G, C] with (G, D K) -> [N, D, F, K C]."""
    nodes, focus, _, channels = grid.shape
    rows = matrix.shape[1] // n_frames
    slots = torch.matmul(matrix.T, grid).view(nodes, focus, rows, n_frames, channels)
    return slots.permute(0, 2, 1, 3, 4).reshape(nodes, rows, focus, n_frames * channels)
