"""The grid-pair product, the equivariant nonlinearity of the model: from_grid(to_grid(left) · to_grid(right))."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from mlff.kernels import grid_pair_reference as reference


def grid_pair(
    left: Float[Tensor, "N D F KC"],
    right: Float[Tensor, "N D F KC"],
    to_grid: Float[Tensor, "G P"],
    from_grid: Float[Tensor, "G P"],
    n_frames: int,
) -> Float[Tensor, "N D F KC"]:
    """Return the product of two coefficient tensors on a grid, projected back.

    `left` and `right` hold N nodes, D rows of degrees and orders, F focus streams, and K = `n_frames` frames of C
    channels each in the last axis (frame slow). The projectors have slots P = D K, frame fastest; they are constants.

    Raises:
        ValueError: shapes do not fit together.
    """
    if left.shape != right.shape:
        raise ValueError(f"left and right must have one shape; got {tuple(left.shape)} and {tuple(right.shape)}")
    if left.dim() != 4 or left.shape[-1] % n_frames:
        raise ValueError(f"expected (N, D, F, K C) with K = {n_frames}; got {tuple(left.shape)}")
    if to_grid.shape != from_grid.shape or to_grid.shape[1] != left.shape[1] * n_frames:
        raise ValueError(
            f"projectors must both be (G, {left.shape[1] * n_frames}); "
            f"got {tuple(to_grid.shape)} and {tuple(from_grid.shape)}"
        )
    return reference.forward(left, right, to_grid.to(left.dtype), from_grid.to(left.dtype), n_frames)
