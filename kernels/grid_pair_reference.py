"""The grid-pair product in plain torch: project two coefficient tensors on a grid, multiply there, project back.

    out[p] = Σ_g B[g, p] (Σ_q A[g, q] left[q]) (Σ_q A[g, q] right[q])        for each node, focus and channel

with slots p = (row d, frame k), k fastest, A = `to_grid` and B = `from_grid`, both (G, P).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def forward(
    left: Float[Tensor, "N D F KC"],
    right: Float[Tensor, "N D F KC"],
    to_grid: Float[Tensor, "G P"],
    from_grid: Float[Tensor, "G P"],
    n_frames: int,
) -> Float[Tensor, "N D F KC"]:
    """Return the product, by autograd differentiable any number of times."""
    on_grid = _project(left, to_grid, n_frames) * _project(right, to_grid, n_frames)
    return _gather(on_grid, from_grid, n_frames)


def _project(x: Tensor, matrix: Tensor, n_frames: int) -> Tensor:
    """[N, D, F, K C] with (G, D K) -> [N, F, G, C]."""
    nodes, rows, focus, width = x.shape
    channels = width // n_frames
    slots = x.view(nodes, rows, focus, n_frames, channels).permute(0, 2, 1, 3, 4)
    slots = slots.reshape(nodes * focus, rows * n_frames, channels)
    return torch.matmul(matrix, slots).view(nodes, focus, matrix.shape[0], channels)


def _gather(grid: Tensor, matrix: Tensor, n_frames: int) -> Tensor:
    """[N, F, G, C] with (G, D K) -> [N, D, F, K C]."""
    nodes, focus, _, channels = grid.shape
    rows = matrix.shape[1] // n_frames
    slots = torch.matmul(matrix.T, grid).view(nodes, focus, rows, n_frames, channels)
    return slots.permute(0, 2, 1, 3, 4).reshape(nodes, rows, focus, n_frames * channels)
