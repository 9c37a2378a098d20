"""The gated activation of an edge's features, with exact first and second derivatives; see `gated_reference.py`.

Activation, gates and shortcut in one pass over memory, where plain PyTorch takes six. On CUDA devices in float16,
bfloat16 and float32 the operators are Triton kernels; elsewhere, and for small tensors, plain PyTorch (`host.py` says
why).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mlff.kernels import gated_reference as reference
from mlff.kernels.host import operator, plain, triton_version


def gated_rows(
    zero: Float[Tensor, "*n L1 C"],
    others: Float[Tensor, "*n R1 C"],
    gates: Float[Tensor, "*n L C"],
    degree: int,
    order: int,
    residual: Float[Tensor, "*n R C"] | None = None,
) -> Float[Tensor, "*n R C"]:
    """Return silu(x_0) and x_r σ(gates_l) for rows r of degree l, plus the residual; in the residual's dtype, or x's.

    Args:
        zero: x's rows of m = 0, degree + 1 of them.
        others: x's rows of m = -1, +1, -2, … up to the order, each from l = |m|; none of order 0.
        gates: of the degrees 1 to `degree`.
        degree: the largest l, at least 1.
        order: the largest m.
        residual: rows of both kinds that are added, or None.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    order = min(order, degree)
    count = sum(2 * (degree + 1 - m) for m in range(1, order + 1))
    lead, width = zero.shape[:-2], zero.shape[-1]
    shapes = {"zero": zero.shape, "others": others.shape, "gates": gates.shape}
    wanted = {"zero": (*lead, degree + 1, width), "others": (*lead, count, width), "gates": (*lead, degree, width)}
    if residual is not None:
        shapes["residual"], wanted["residual"] = residual.shape, (*lead, degree + 1 + count, width)
    if degree < 1 or any(tuple(shapes[name]) != wanted[name] for name in wanted):
        said = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"degree {degree} and order {order} have {degree + 1} rows of m = 0, {count} others and {degree} gates, "
            f"all of one width; got {said}"
        )
    if not zero.dtype == others.dtype == gates.dtype or not zero.is_floating_point():
        raise ValueError(f"x and gates must have one floating dtype; got {zero.dtype}, {others.dtype}, {gates.dtype}")
    given = [zero, others, gates] if residual is None else [zero, others, gates, residual]
    if len({x.device for x in given}) > 1:
        raise ValueError(f"x, gates and residual must be on one device; got {', '.join(str(x.device) for x in given)}")
    function = reference.forward if plain(zero, zero.numel() + others.numel()) else _forward
    return function(zero, others, gates, residual, degree, order)


@operator("mlff::gated_rows")
def _forward(zero: Tensor, others: Tensor, gates: Tensor, residual: Tensor | None, degree: int, order: int) -> Tensor:
    return _version(zero).forward(zero, others, gates, residual, degree, order)


@operator("mlff::gated_rows_backward")
def _backward(
    grad: Tensor, zero: Tensor, others: Tensor, gates: Tensor, degree: int, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _version(zero).backward(grad, zero, others, gates, degree, order)


@operator("mlff::gated_rows_double_backward")
def _double_backward(
    grad_grad_zero: Tensor,
    grad_grad_others: Tensor,
    grad_grad_gates: Tensor,
    grad: Tensor,
    zero: Tensor,
    others: Tensor,
    gates: Tensor,
    degree: int,
    order: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    cotangents = grad_grad_zero, grad_grad_others, grad_grad_gates
    return _version(zero).double_backward(*cotangents, grad, zero, others, gates, degree, order)


def _version(x: Tensor) -> ModuleType:
    """The reference or its Triton version, whichever takes a tensor like x."""
    return triton_version("gated", x.device.type, x.dtype) or reference


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    zero, others, gates, residual, *ctx.shape = inputs
    ctx.save_for_backward(zero, others, gates)
    ctx.has_residual = residual is not None


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_backward(grad, *ctx.saved_tensors, *ctx.shape), grad if ctx.has_residual else None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, degree, order = inputs
    ctx.save_for_backward(*tensors)
    ctx.shape = degree, order


def _differentiate_twice(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    return (*_double_backward(*grads, *ctx.saved_tensors, *ctx.shape), None, None)


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("gated_rows has first and second derivatives; a third one was asked for, which is not there.")


_forward.register_autograd(_differentiate, setup_context=_save_forward)
_backward.register_autograd(_differentiate_twice, setup_context=_save_backward)
_double_backward.register_autograd(_refuse, setup_context=_save_backward)
