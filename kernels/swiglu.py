"""SwiGLU, silu(gate) · up, with exact first and second derivatives, of two tensors or of one that packs both.

Energies need the forward pass, forces the first derivative, and a loss on forces the second: three operators, each the
derivative of the one before. A third derivative is refused rather than approximated. Packed operators write the
gradients of both halves into one tensor, which saves the concatenation of two.

On CUDA devices in float16, bfloat16 and float32 the operators are Triton kernels, which a compiler sees through;
elsewhere they are the reference. On a CPU, and for small tensors, the functions are that reference as it is (`host.py`
says why), differentiated by PyTorch as often as one likes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mlff.kernels import swiglu_reference as reference
from mlff.kernels.host import operator, plain, triton_version

GATE_FIRST = {"gate_up": True, "up_gate": False}


def swiglu(
    gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"], out_dtype: torch.dtype | None = None
) -> Float[Tensor, "*shape"]:
    """Return silu(gate) · up; computed in float32 at least, rounded once.

    Under autocast, operands of two dtypes are promoted to the wider one, as by a product.

    Args:
        gate: any strides; they are read where they are if the last axis is contiguous and all others are one.
        up: the same.
        out_dtype: that of the operands, which is also the default, or float32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape; got {tuple(gate.shape)} and {tuple(up.shape)}")
    if gate.device != up.device:
        raise ValueError(f"gate and up must be on one device; got {gate.device} and {up.device}")
    if gate.dtype != up.dtype and torch.is_autocast_enabled(gate.device.type):
        dtype = torch.promote_types(gate.dtype, up.dtype)
        gate, up = gate.to(dtype), up.to(dtype)
    if gate.dtype != up.dtype or not gate.is_floating_point():
        raise ValueError(f"gate and up must have one floating dtype; got {gate.dtype} and {up.dtype}")
    out_dtype = _checked(out_dtype, gate.dtype)
    return (reference.forward if plain(gate, gate.numel()) else _forward)(gate, up, out_dtype)


def swiglu_packed(
    x: Float[Tensor, "*shape C2"], order: str, out_dtype: torch.dtype | None = None
) -> Float[Tensor, "*shape C"]:
    """Return silu(gate) · up of the two halves of the last axis of x; otherwise as `swiglu`.

    Args:
        x: both halves; any strides.
        order: "gate_up" or "up_gate", which half is first.
        out_dtype: that of x, which is also the default, or float32.

    Raises:
        ValueError: the order is not known, the last axis has no halves, or a dtype does not fit.
    """
    if order not in GATE_FIRST:
        raise ValueError(f"order must be {' or '.join(map(repr, GATE_FIRST))}; got {order!r}")
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"the last axis must hold two halves, an even number of channels; got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must have a floating dtype; got {x.dtype}")
    out_dtype = _checked(out_dtype, x.dtype)
    return (reference.packed_forward if plain(x, x.numel()) else _packed_forward)(x, GATE_FIRST[order], out_dtype)


def _checked(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    if out_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"out_dtype must be that of the operands, {dtype}, or torch.float32; got {out_dtype}")
    return out_dtype or dtype


# Two tensors.


@operator("mlff::swiglu")
def _forward(gate: Tensor, up: Tensor, out_dtype: torch.dtype) -> Tensor:
    return _version(gate).forward(gate, up, out_dtype)


@operator("mlff::swiglu_backward")
def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _version(gate).backward(grad, gate, up)


@operator("mlff::swiglu_double_backward")
def _double_backward(
    grad_grad_gate: Tensor, grad_grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _version(gate).double_backward(grad_grad_gate, grad_grad_up, grad, gate, up)


def _version(x: Tensor) -> ModuleType:
    """The reference or its Triton version, whichever takes a tensor like x."""
    return triton_version("swiglu", x.device.type, x.dtype) or reference


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (*_backward(grad, *ctx.saved_tensors), None)


def _differentiate_twice(ctx: Any, grad_grad_gate: Tensor, grad_grad_up: Tensor) -> tuple[Any, ...]:
    return _double_backward(grad_grad_gate, grad_grad_up, *ctx.saved_tensors)


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("swiglu has first and second derivatives; a third one was asked for, which is not there.")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice, setup_context=_save)
_double_backward.register_autograd(_refuse, setup_context=_save)


# Both in one tensor.


@operator("mlff::swiglu_packed")
def _packed_forward(x: Tensor, gate_first: bool, out_dtype: torch.dtype) -> Tensor:
    return _version(x).packed_forward(x, gate_first, out_dtype)


@operator("mlff::swiglu_packed_backward")
def _packed_backward(grad: Tensor, x: Tensor, gate_first: bool) -> Tensor:
    return _version(x).packed_backward(grad, x, gate_first)


@operator("mlff::swiglu_packed_double_backward")
def _packed_double_backward(grad_grad: Tensor, grad: Tensor, x: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    return _version(x).packed_double_backward(grad_grad, grad, x, gate_first)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.gate_first = next(x for x in inputs if isinstance(x, bool))


def _differentiate_packed(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return _packed_backward(grad, x, ctx.gate_first), None, None


def _differentiate_packed_twice(ctx: Any, grad_grad: Tensor) -> tuple[Any, ...]:
    grad, x = ctx.saved_tensors
    return (*_packed_double_backward(grad_grad, grad, x, ctx.gate_first), None)


_packed_forward.register_autograd(_differentiate_packed, setup_context=_save_packed)
_packed_backward.register_autograd(_differentiate_packed_twice, setup_context=_save_packed)
_packed_double_backward.register_autograd(_refuse, setup_context=_save_packed)
