"""The grid-pair product, the equivariant nonlinearity of the model: from_grid(to_grid(left) · to_grid(right)).

Energies need the forward pass, forces the first derivative, a loss on forces the second: three operators, each the
derivative of the one before. The product is trilinear in left, right and the incoming gradient, so that the third
derivative would be one more of the same; nothing needs it, and it is refused.

On CUDA devices in float32 and bfloat16 the operators are Triton kernels; elsewhere, and where no launch fits the
device, they are the reference. Compilers see through the operators to the kernels; exports hold the operators. On a GPU
that small operands would not keep busy, the function is the reference as it is (`host.py` says why).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mlff.kernels import grid_pair_reference as reference
from mlff.kernels.grid_pair_factors import Factors
from mlff.kernels.host import operator, plain, triton_version

DEFINITIONS: tuple[Callable[..., Any], ...] = (reference.forward, reference.backward, reference.double_backward)


def grid_pair(
    left: Float[Tensor, "N D F KC"],
    right: Float[Tensor, "N D F KC"],
    to_grid: Float[Tensor, "G P"],
    from_grid: Float[Tensor, "G P"],
    n_frames: int,
    factors: Factors | None = None,
) -> Float[Tensor, "N D F KC"]:
    """Return the product of two coefficient tensors on a grid, projected back.

    `left` and `right` hold N nodes, D rows of degrees and orders, F focus streams, and K = `n_frames` frames of C
    channels each in the last axis (frame slow). The projectors have slots P = D K, frame fastest; they are constants,
    of any floating dtype. Under autocast the operands are taken in its dtype, as those of a matrix product are; sums
    are float32 at least.

    Args:
        left: one operand; any strides.
        right: the other.
        to_grid: projector to the grid.
        from_grid: projector back, transposed.
        n_frames: K.
        factors: the same projectors in a smaller form, from `grid_pair_factors.factorise`; faster on a GPU.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
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
    if any(x.device != left.device for x in (right, to_grid, from_grid)):
        devices = sorted({str(x.device) for x in (left, right, to_grid, from_grid)})
        raise ValueError(f"operands and projectors must be on one device; got {', '.join(devices)}")
    if torch.is_autocast_enabled(left.device.type):
        dtype = torch.get_autocast_dtype(left.device.type)
        left, right = (x if x.dtype == torch.float64 else x.to(dtype) for x in (left, right))
    if left.dtype != right.dtype or not left.is_floating_point():
        raise ValueError(f"left and right must have one floating dtype; got {left.dtype} and {right.dtype}")
    nodes, _, focus, width = left.shape
    if left.device.type == "cuda" and plain(left, nodes * focus * to_grid.shape[0] * (width // n_frames)):
        return reference.forward(left, right, to_grid.to(left.dtype), from_grid.to(left.dtype), n_frames)
    large = None if factors is None else factors.large_for(left.dtype)
    to_grid, from_grid = large or (to_grid.to(left.dtype), from_grid.to(left.dtype))
    matrix = None if factors is None else factors.matrix_for(left.dtype)
    if factors is None or matrix is None:
        return _forward(left, right, to_grid, from_grid, None, None, None, n_frames)
    return _forward(left, right, to_grid, from_grid, matrix, factors.slots, factors.scale.float(), n_frames)


@operator("mlff::grid_pair")
def _forward(
    left: Tensor,
    right: Tensor,
    to_grid: Tensor,
    from_grid: Tensor,
    matrix: Tensor | None,
    slots: Tensor | None,
    scale: Tensor | None,
    n_frames: int,
) -> Tensor:
    return _results(0, (left, right), to_grid, from_grid, matrix, slots, scale, n_frames)[0]


@operator("mlff::grid_pair_backward")
def _backward(
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    to_grid: Tensor,
    from_grid: Tensor,
    matrix: Tensor | None,
    slots: Tensor | None,
    scale: Tensor | None,
    n_frames: int,
) -> tuple[Tensor, Tensor]:
    of_left, of_right = _results(1, (grad, left, right), to_grid, from_grid, matrix, slots, scale, n_frames)
    return of_left, of_right


@operator("mlff::grid_pair_double_backward")
def _double_backward(
    grad_grad_left: Tensor,
    grad_grad_right: Tensor,
    grad: Tensor,
    left: Tensor,
    right: Tensor,
    to_grid: Tensor,
    from_grid: Tensor,
    matrix: Tensor | None,
    slots: Tensor | None,
    scale: Tensor | None,
    n_frames: int,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (grad_grad_left, grad_grad_right, grad, left, right)
    of_grad, of_left, of_right = _results(2, operands, to_grid, from_grid, matrix, slots, scale, n_frames)
    return of_grad, of_left, of_right


def _results(
    order: int,
    operands: tuple[Tensor, ...],
    to_grid: Tensor,
    from_grid: Tensor,
    matrix: Tensor | None,
    slots: Tensor | None,
    scale: Tensor | None,
    n_frames: int,
) -> tuple[Tensor, ...]:
    """The results of an order, by its Triton kernel, or where there is none by the reference."""
    fast = triton_version("grid_pair", operands[0].device.type, operands[0].dtype)
    if fast is not None:
        small = None if matrix is None else (matrix, slots, scale)
        results = fast.run_product(order, operands, (to_grid, from_grid), small, n_frames)
        if results is not None:
            return results
    there = operands[0].shape[1] * n_frames  # projectors for the kernels have columns of padding behind these
    projectors = to_grid[:, :there], from_grid[:, :there]
    results = DEFINITIONS[order](*operands, *projectors, n_frames)
    return results if order else (results,)


# The derivatives. Projectors and n_frames have none.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.n_frames = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, to_grid, from_grid, matrix, slots, scale = ctx.saved_tensors
    grads = _backward(grad, left, right, to_grid, from_grid, matrix, slots, scale, ctx.n_frames)
    return (*grads, *[None] * 6)


def _differentiate_twice(ctx: Any, grad_grad_left: Tensor, grad_grad_right: Tensor) -> tuple[Any, ...]:
    grad, left, right, to_grid, from_grid, matrix, slots, scale = ctx.saved_tensors
    tables = (to_grid, from_grid, matrix, slots, scale)
    grads = _double_backward(grad_grad_left, grad_grad_right, grad, left, right, *tables, ctx.n_frames)
    return (*grads, *[None] * 6)


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("grid_pair has first and second derivatives; a third one was asked for, which is not there.")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice, setup_context=_save)
_double_backward.register_autograd(_refuse, setup_context=_save)
