"""Features of atoms in the frames of edges and back, with derivatives of every order; see `edge_frames_reference.py`.

A rotation of all neighbours' features, done with matrix products, is a table of the neighbours (36 rows an edge at
degree 5), one of matrices that are mostly zeros, and one of the results, each read and written several times. Here a
program holds an edge's rows in registers, and the tables of neighbours are never made. Sums over the edges of an atom
are taken by one program in a fixed order, so that results do not change from run to run.

On CUDA devices in bfloat16, float16 and float32 the operators are Triton kernels; elsewhere they are plain PyTorch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mlff.kernels import edge_frames_reference as reference
from mlff.kernels.host import operator, triton_version


class Ends(NamedTuple):
    """The atoms at one end of E edges, and the edges of each of the A atoms."""

    index: Int[Tensor, "E"]  # the atom of each edge
    order: Int[Tensor, "E"]  # edges, sorted by their atom
    starts: Int[Tensor, "A1"]  # where in that order the edges of an atom begin; the last number is E

    @classmethod
    def of(cls, index: Int[Tensor, "E"], atoms: int) -> Ends:
        """Return the ends of edges by the atom of each."""
        found, order = torch.sort(index, stable=True)
        bounds = torch.arange(atoms + 1, device=index.device, dtype=index.dtype)
        return cls(index, order, torch.searchsorted(found, bounds))


def into_frames(
    coefficients: Float[Tensor, "E n"],
    x: Float[Tensor, "A M W"],
    ends: Ends,
    degree: int,
    order: int,
    streams: int = 1,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "E R F C"]:
    """Return the features of the atom at one end of each edge, in the edge's frame; streams come first in memory.

    Args:
        coefficients: of the rotations, without their zeros: `edge_frames_reference.py` has their order.
        x: packed features of degrees 0 to `degree`, channels in `streams` equal parts.
        ends: of the edges.
        degree: the largest l.
        order: the largest |m'| that is kept.
        streams: F.
        dtype: of the result; x's unless given.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    _check(degree, order, ends, coefficients=coefficients, x=x)
    atoms, rows = ends.starts.shape[0] - 1, (degree + 1) ** 2
    if x.dim() != 3 or x.shape[0] != atoms or x.shape[1] != rows or x.shape[2] % streams:
        raise ValueError(
            f"x must have {atoms} atoms, {rows} rows and channels for {streams} streams; its shape is {tuple(x.shape)}"
        )
    return _gather(coefficients, x, None, *ends, degree, order, streams, dtype or x.dtype)


def out_of_frames(
    coefficients: Float[Tensor, "E n"],
    y: Float[Tensor, "E R F C"],
    ends: Ends,
    degree: int,
    order: int,
    weights: Float[Tensor, "E F"] | None = None,
) -> Float[Tensor, "A M W"]:
    """Return the sum over the edges of each atom of features turned back from the edges' frames, in float32 at least.

    Args:
        coefficients: as in `into_frames`.
        y: rows in the reduced layout.
        ends: of the edges, at the side where the sums are taken.
        degree: the largest l.
        order: the largest |m'|.
        weights: of each edge and stream, or None for 1.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    _check(degree, order, ends, coefficients=coefficients, y=y, weights=weights)
    rows = sum(rows for rows, _ in reference.block_sizes(degree, order))
    fit = y.dim() == 4 and y.shape[:2] == (coefficients.shape[0], rows)
    if not fit or (weights is not None and weights.shape != (y.shape[0], y.shape[2])):
        raise ValueError(
            f"y must have {coefficients.shape[0]} edges and {rows} rows, weights one number for each edge and stream; "
            f"their shapes are {tuple(y.shape)} and {None if weights is None else tuple(weights.shape)}"
        )
    dtype = torch.promote_types(y.dtype, torch.float32)
    return _scatter(coefficients, y, weights, *ends, degree, order, dtype)


def _check(degree: int, order: int, ends: Ends, *, coefficients: Tensor, **others: Tensor | None) -> None:
    numbers = reference.count(degree, order)
    if coefficients.shape != (ends.index.shape[0], numbers):
        raise ValueError(
            f"rotations of degree {degree} and order {order} have {numbers} numbers for each of {ends.index.shape[0]} "
            f"edges; got {tuple(coefficients.shape)}"
        )
    there = {"coefficients": coefficients, **{name: x for name, x in others.items() if x is not None}}
    if not all(x.is_floating_point() for x in there.values()):
        raise ValueError(f"{' and '.join(there)} must be floating-point numbers")
    if len({x.device for x in (*there.values(), *ends)}) > 1:
        raise ValueError(f"{', '.join(there)} and ends must be on one device")


@operator("mlff::edge_gather")
def _gather(
    coefficients: Tensor,
    x: Tensor,
    weights: Tensor | None,
    index: Tensor,
    edge_order: Tensor,
    starts: Tensor,
    degree: int,
    order: int,
    streams: int,
    dtype: torch.dtype,
) -> Tensor:
    kernels = _version(coefficients, x, weights)
    if kernels is not None:
        return kernels.gather(coefficients, x, weights, index, degree, order, streams, dtype)
    return reference.gather(coefficients, x, weights, index, degree, order, streams, dtype)


@operator("mlff::edge_scatter")
def _scatter(
    coefficients: Tensor,
    y: Tensor,
    weights: Tensor | None,
    index: Tensor,
    edge_order: Tensor,
    starts: Tensor,
    degree: int,
    order: int,
    dtype: torch.dtype,
) -> Tensor:
    kernels = _version(coefficients, y, weights)
    if kernels is not None:
        return kernels.scatter(coefficients, y, weights, index, edge_order, starts, degree, order, dtype)
    return reference.scatter(coefficients, y, weights, index, starts.shape[0] - 1, degree, order, dtype)


@operator("mlff::edge_outer")
def _outer(
    x: Tensor,
    y: Tensor,
    weights: Tensor | None,
    index: Tensor,
    edge_order: Tensor,
    starts: Tensor,
    degree: int,
    order: int,
    dtype: torch.dtype,
) -> Tensor:
    kernels = _version(x, y, weights)
    if kernels is not None:
        return kernels.outer(x, y, weights, index, degree, order, dtype)
    return reference.outer(x, y, weights, index, degree, order, dtype)


@operator("mlff::edge_share")
def _share(
    coefficients: Tensor,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    edge_order: Tensor,
    starts: Tensor,
    degree: int,
    order: int,
    dtype: torch.dtype,
) -> Tensor:
    kernels = _version(coefficients, x, y)
    if kernels is not None:
        return kernels.share(coefficients, x, y, index, degree, order, dtype)
    return reference.share(coefficients, x, y, index, degree, order, dtype)


def _version(*given: Tensor | None) -> ModuleType | None:
    """The Triton version, if all that is given can go there."""
    found = [triton_version("edge_frames", x.device.type, x.dtype) for x in given if x is not None]
    return found[0] if all(found) else None


# Each derivative is asked for only where somebody needs it; numbers, dtypes and the ends have none.


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    first, second, third, *ends = inputs[:6]
    ctx.save_for_backward(first, second, third, *ends)
    ctx.shape = inputs[6:8]


def _of_gather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    coefficients, x, weights, *ends = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (
        _outer(x, grad, weights, *ends, *ctx.shape, coefficients.dtype) if need[0] else None,
        _scatter(coefficients, grad, weights, *ends, *ctx.shape, x.dtype) if need[1] else None,
        _share(coefficients, x, grad, *ends, *ctx.shape, weights.dtype) if need[2] else None,
        *[None] * 7,
    )


def _of_scatter(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    coefficients, y, weights, *ends = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (
        _outer(grad, y, weights, *ends, *ctx.shape, coefficients.dtype) if need[0] else None,
        _gather(coefficients, grad, weights, *ends, *ctx.shape, y.shape[2], y.dtype) if need[1] else None,
        _share(coefficients, grad, y, *ends, *ctx.shape, weights.dtype) if need[2] else None,
        *[None] * 6,
    )


def _of_outer(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, y, weights, *ends = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (
        _scatter(grad, y, weights, *ends, *ctx.shape, x.dtype) if need[0] else None,
        _gather(grad, x, weights, *ends, *ctx.shape, y.shape[2], y.dtype) if need[1] else None,
        _share(grad, x, y, *ends, *ctx.shape, weights.dtype) if need[2] else None,
        *[None] * 6,
    )


def _of_share(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    coefficients, x, y, *ends = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (
        _outer(x, y, grad, *ends, *ctx.shape, coefficients.dtype) if need[0] else None,
        _scatter(coefficients, y, grad, *ends, *ctx.shape, x.dtype) if need[1] else None,
        _gather(coefficients, x, grad, *ends, *ctx.shape, y.shape[2], y.dtype) if need[2] else None,
        *[None] * 6,
    )


_gather.register_autograd(_of_gather, setup_context=_save)
_scatter.register_autograd(_of_scatter, setup_context=_save)
_outer.register_autograd(_of_outer, setup_context=_save)
_share.register_autograd(_of_share, setup_context=_save)
