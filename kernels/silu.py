"""SiLU, x / (1 + exp(-x)), with exact first and second derivatives.

Energies need the forward pass, forces the first derivative, and a loss on forces the second: three operators, each the
derivative of the one before. A third derivative is refused rather than approximated.

On CUDA devices in float16, bfloat16 and float32 the operators are Triton kernels, which a compiler sees through;
elsewhere they are the reference. On a CPU, and for small tensors, the functions are that reference as it is (`host.py`
says why), differentiated by PyTorch as often as one likes.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mlff.kernels import silu_reference as reference
from mlff.kernels.host import operator, plain, triton_version


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return x / (1 + exp(-x)) in the dtype of x; computed in float32 at least, rounded once.

    Raises:
        ValueError: x is not floating.
    """
    if not x.is_floating_point():
        raise ValueError(f"silu takes floating numbers; got {x.dtype}. Convert them first: x.to(torch.float32).")
    return reference.forward(x) if plain(x, x.numel()) else _forward(x)


@operator("mlff::silu")
def _forward(x: Tensor) -> Tensor:
    return _version(x).forward(x)


@operator("mlff::silu_backward")
def _backward(grad: Tensor, x: Tensor) -> Tensor:
    return _version(x).backward(grad, x)


@operator("mlff::silu_double_backward")
def _double_backward(grad_grad: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return _version(x).double_backward(grad_grad, grad, x)


def _version(x: Tensor) -> ModuleType:
    """The reference or its Triton version, whichever takes a tensor like x."""
    return triton_version("silu", x.device.type, x.dtype) or reference


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor:
    return _backward(grad, *ctx.saved_tensors)


def _differentiate_twice(ctx: Any, grad_grad: Tensor) -> tuple[Tensor, Tensor]:
    return _double_backward(grad_grad, *ctx.saved_tensors)


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("silu has first and second derivatives; a third one was asked for, which is not there.")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice, setup_context=_save)
_double_backward.register_autograd(_refuse, setup_context=_save)
