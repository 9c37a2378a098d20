"""Mixing degrees of equal m by kernels of each edge, with derivatives of every order; see `degree_mixer_reference.py`.

The kernels are matrices of five or six rows, a different one for each edge and order, far below the size at which a
matrix product is worth its name. Here a program holds an edge's rows in registers.

On CUDA devices in bfloat16, float16 and float32 the operators are Triton kernels; elsewhere they are plain PyTorch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mlff.kernels import degree_mixer_reference as reference
from mlff.kernels.host import operator, triton_version


def mix_degrees(
    kernels: Float[Tensor, "E n q"],
    basis: Float[Tensor, "q W"],
    x: Float[Tensor, "E R F C"],
    degree: int,
    order: int,
) -> Float[Tensor, "E R F C"]:
    """Return the mixed rows, with the streams first in memory, in the dtype of x.

    So where rows are bfloat16 and weights float32, what follows works on rows of two bytes; forces of trained models
    are as far from those in float32 as with mixed rows of four (12 meV/Å where their mean is 1,750).

    Args:
        kernels: of each edge; `degree_mixer_reference.py` has the order of their entries.
        basis: over all channels.
        x: rows in the reduced layout.
        degree: the largest l.
        order: the largest |m|.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
    """
    entries, rows = reference.count(degree, order), reference.rows(degree, order)
    fit = kernels.dim() == 3 and x.dim() == 4 and basis.dim() == 2
    if (
        not fit
        or kernels.shape != (x.shape[0], entries, basis.shape[0])
        or x.shape[1] != rows
        or basis.shape[1] != x.shape[2] * x.shape[3]
    ):
        raise ValueError(
            f"degree {degree} and order {order} have {rows} rows and {entries} entries of kernels for each edge, each "
            f"with the basis' rank; got kernels {tuple(kernels.shape)}, basis {tuple(basis.shape)}, x {tuple(x.shape)}"
        )
    given = (kernels, basis, x)
    if not all(tensor.is_floating_point() for tensor in given) or len({tensor.device for tensor in given}) > 1:
        raise ValueError("kernels, basis and x must be floating-point numbers on one device")
    return _mix(kernels, basis, x, degree, order, False, x.dtype)


@operator("mlff::degree_mix")
def _mix(
    kernels: Tensor, basis: Tensor, x: Tensor, degree: int, order: int, transposed: bool, dtype: torch.dtype
) -> Tensor:
    return _version(kernels, basis, x).mix(kernels, basis, x, degree, order, transposed, dtype)


@operator("mlff::degree_mix_kernels")
def _kernels(basis: Tensor, a: Tensor, b: Tensor, degree: int, order: int, dtype: torch.dtype) -> Tensor:
    return _version(basis, a, b).kernels(basis, a, b, degree, order, dtype)


@operator("mlff::degree_mix_basis")
def _basis(kernels: Tensor, a: Tensor, b: Tensor, degree: int, order: int, dtype: torch.dtype) -> Tensor:
    return _version(kernels, a, b).basis(kernels, a, b, degree, order, dtype)


def _version(*given: Tensor) -> ModuleType:
    """The Triton version, if all that is given can go there, or the reference."""
    found = [triton_version("degree_mixer", x.device.type, x.dtype) for x in given]
    return found[0] if found[0] is not None and all(found) else reference


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = inputs[3:]


def _of_mix(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    kernels, basis, x = ctx.saved_tensors
    *shape, transposed, _ = ctx.rest
    need = ctx.needs_input_grad
    sides = (grad, x) if transposed else (x, grad)
    return (
        _kernels(basis, *sides, *shape, kernels.dtype) if need[0] else None,
        _basis(kernels, *sides, *shape, basis.dtype) if need[1] else None,
        _mix(kernels, basis, grad, *shape, not transposed, x.dtype) if need[2] else None,
        *[None] * 4,
    )


def _of_kernels(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    basis, a, b = ctx.saved_tensors
    *shape, _ = ctx.rest
    need = ctx.needs_input_grad
    return (
        _basis(grad, a, b, *shape, basis.dtype) if need[0] else None,
        _mix(grad, basis, b, *shape, True, a.dtype) if need[1] else None,
        _mix(grad, basis, a, *shape, False, b.dtype) if need[2] else None,
        *[None] * 3,
    )


def _of_basis(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    kernels, a, b = ctx.saved_tensors
    *shape, _ = ctx.rest
    need = ctx.needs_input_grad
    return (
        _kernels(grad, a, b, *shape, kernels.dtype) if need[0] else None,
        _mix(kernels, grad, b, *shape, True, a.dtype) if need[1] else None,
        _mix(kernels, grad, a, *shape, False, b.dtype) if need[2] else None,
        *[None] * 3,
    )


_mix.register_autograd(_of_mix, setup_context=_save)
_kernels.register_autograd(_of_kernels, setup_context=_save)
_basis.register_autograd(_of_basis, setup_context=_save)
