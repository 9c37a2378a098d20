"""Features at unit root mean square, with exact first and second derivatives; see `unit_rms_reference.py`.

What a norm does before its scale and its bias, which are left to PyTorch. Sums over the rows and channels of a node are
taken in registers; plain PyTorch launches a dozen short kernels for the forward pass and eighty for a training step.
On CUDA devices in float16, bfloat16 and float32 the operators are Triton kernels; elsewhere, and for small tensors,
plain PyTorch (`host.py` says why).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mlff.kernels import unit_rms_reference as reference
from mlff.kernels.host import operator, plain, triton_version


def unit_rms(
    x: Float[Tensor, "N R F C"],
    balance: Float[Tensor, "R"] | None = None,
    eps: float = 1e-5,
    centred: bool = False,
) -> Float[Tensor, "N R F C"]:
    """Return x / sqrt(v + eps), v the sum of the squares of each node and stream, weighted by row; in the dtype of x.

    Args:
        x: rows of nodes, in streams.
        balance: weights of rows; None for the mean over all rows and channels.
        eps: added to v.
        centred: take the mean over channels out of row 0 first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x must be floating-point numbers [N, R, F, C]; got {x.dtype} {tuple(x.shape)}")
    if balance is not None and (balance.shape != x.shape[1:2] or balance.device != x.device):
        raise ValueError(
            f"balance must have one number for each of {x.shape[1]} rows, on {x.device}; "
            f"got {tuple(balance.shape)} on {balance.device}"
        )
    function = reference.forward if plain(x, x.numel()) else _forward
    return function(x, balance, eps, centred)


@operator("mlff::unit_rms")
def _forward(x: Tensor, balance: Tensor | None, eps: float, centred: bool) -> Tensor:
    return _version(x).forward(x, balance, eps, centred)


@operator("mlff::unit_rms_backward")
def _backward(grad: Tensor, x: Tensor, balance: Tensor | None, eps: float, centred: bool) -> Tensor:
    return _version(grad, x).backward(grad, x, balance, eps, centred)


@operator("mlff::unit_rms_double_backward")
def _double_backward(
    grad_grad: Tensor, grad: Tensor, x: Tensor, balance: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    return _version(grad_grad, grad, x).double_backward(grad_grad, grad, x, balance, eps, centred)


def _version(*given: Tensor) -> ModuleType:
    """The Triton version, if all that is given can go there, or the reference."""
    found = [triton_version("unit_rms", x.device.type, x.dtype) for x in given]
    return found[0] if found[0] is not None and all(found) else reference


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, balance, ctx.eps, ctx.centred = inputs
    ctx.save_for_backward(*tensors, balance)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.centred), None, None, None)


def _differentiate_twice(ctx: Any, grad_grad: Tensor) -> tuple[Any, ...]:
    return (*_double_backward(grad_grad, *ctx.saved_tensors, ctx.eps, ctx.centred), None, None, None)


def _refuse(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise RuntimeError("unit_rms has first and second derivatives; a third one was asked for, which is not there.")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_twice, setup_context=_save)
_double_backward.register_autograd(_refuse, setup_context=_save)
