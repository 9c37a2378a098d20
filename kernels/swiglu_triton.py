"""SwiGLU in Triton: forward, backward and second backward of two tensors, and of one that packs both.

The formulas are those of swiglu_reference.py; rows, launches and wide loads are those of silu_triton.py. Packed kernels
are the others with pointers into one tensor.
"""

# Annotations are for Triton, and a call of a kernel's part has results that only Triton knows.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlff.kernels import swiglu_reference as reference
from mlff.kernels.launch import specialise
from mlff.kernels.silu_triton import empty, load, odd_bytes, parts, place, run_rows, store

# Constants are in capitals, as launch.py asks.


@triton.jit
def _forward(gate, up, out, rows, width, gate_row, up_row, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    value, _, _ = parts(load(gate, gate_row, row, channel, there, UNIT))
    store(out, width, row, channel, there, value * load(up, up_row, row, channel, there, UNIT), UNIT)


@triton.jit
def _wide_forward(gate, up, out, rows, width, gate_row, up_row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    UNIT: tl.constexpr = 128 // gate.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    odd = odd_bytes(gate) | odd_bytes(up) | odd_bytes(out)
    if (odd | ((gate_row | up_row | width) % UNIT)) == 0:
        _forward(gate, up, out, rows, width, gate_row, up_row, ROWS, WIDTH, UNIT)
    else:
        _forward(gate, up, out, rows, width, gate_row, up_row, ROWS, WIDTH, 1)


@specialise()
def swiglu_forward(
    gate, up, out,
    rows: tl.int64, width: tl.int64, gate_row: tl.int64, up_row: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write silu(gate) up."""
    _wide_forward(gate, up, out, rows, width, gate_row, up_row, ROWS, WIDTH)


@specialise()
def swiglu_packed_forward(
    x, out,
    rows: tl.int64, width: tl.int64, x_row: tl.int64, gate_at: tl.int64, up_at: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The same of gate and up in one tensor."""
    _wide_forward(x + gate_at, x + up_at, out, rows, width, x_row, x_row, ROWS, WIDTH)


@triton.jit
def _backward(
    grad, gate, up, out_gate, out_up, rows, width, grad_row, gate_row, up_row, out_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    g = load(grad, grad_row, row, channel, there, UNIT)
    u = load(up, up_row, row, channel, there, UNIT)
    value, slope, _ = parts(load(gate, gate_row, row, channel, there, UNIT))
    store(out_gate, out_row, row, channel, there, g * u * slope, UNIT)
    store(out_up, out_row, row, channel, there, g * value, UNIT)


@triton.jit
def _wide_backward(
    grad, gate, up, out_gate, out_up, rows, width, grad_row, gate_row, up_row, out_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 128 // gate.dtype.element_ty.primitive_bitwidth
    odd = odd_bytes(grad) | odd_bytes(gate) | odd_bytes(up) | odd_bytes(out_gate) | odd_bytes(out_up)
    if (odd | ((grad_row | gate_row | up_row | width) % UNIT)) == 0:
        _backward(grad, gate, up, out_gate, out_up, rows, width, grad_row, gate_row, up_row, out_row,
                  ROWS, WIDTH, UNIT)  # fmt: skip
    else:
        _backward(grad, gate, up, out_gate, out_up, rows, width, grad_row, gate_row, up_row, out_row,
                  ROWS, WIDTH, 1)  # fmt: skip


@specialise()
def swiglu_backward(
    grad, gate, up, out_gate, out_up,
    rows: tl.int64, width: tl.int64, grad_row: tl.int64, gate_row: tl.int64, up_row: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write grad up silu'(gate) and grad silu(gate)."""
    _wide_backward(grad, gate, up, out_gate, out_up, rows, width, grad_row, gate_row, up_row, width, ROWS, WIDTH)


@specialise()
def swiglu_packed_backward(
    grad, x, out,
    rows: tl.int64, width: tl.int64, grad_row: tl.int64, x_row: tl.int64, gate_at: tl.int64, up_at: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The same of gate and up in one tensor, to one tensor."""
    _wide_backward(grad, x + gate_at, x + up_at, out + gate_at, out + up_at, rows, width, grad_row, x_row, x_row,
                   2 * width, ROWS, WIDTH)  # fmt: skip


@triton.jit
def _double_backward(
    a, b, grad, gate, up, out_grad, out_gate, out_up, rows, width, a_row, b_row, grad_row, gate_row, up_row, out_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    c = load(a, a_row, row, channel, there, UNIT)
    d = load(b, b_row, row, channel, there, UNIT)
    g = load(grad, grad_row, row, channel, there, UNIT)
    cu = c * load(up, up_row, row, channel, there, UNIT)
    value, slope, bend = parts(load(gate, gate_row, row, channel, there, UNIT))
    store(out_grad, width, row, channel, there, cu * slope + d * value, UNIT)
    store(out_gate, out_row, row, channel, there, g * (cu * bend + d * slope), UNIT)
    store(out_up, out_row, row, channel, there, g * c * slope, UNIT)


@triton.jit
def _wide_double_backward(
    a, b, grad, gate, up, out_grad, out_gate, out_up, rows, width, a_row, b_row, grad_row, gate_row, up_row, out_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 128 // gate.dtype.element_ty.primitive_bitwidth
    odd = odd_bytes(a) | odd_bytes(b) | odd_bytes(grad) | odd_bytes(gate) | odd_bytes(up)
    odd = odd | odd_bytes(out_grad) | odd_bytes(out_gate) | odd_bytes(out_up)
    if (odd | ((a_row | b_row | grad_row | gate_row | up_row | width) % UNIT)) == 0:
        _double_backward(a, b, grad, gate, up, out_grad, out_gate, out_up, rows, width, a_row, b_row, grad_row,
                         gate_row, up_row, out_row, ROWS, WIDTH, UNIT)  # fmt: skip
    else:
        _double_backward(a, b, grad, gate, up, out_grad, out_gate, out_up, rows, width, a_row, b_row, grad_row,
                         gate_row, up_row, out_row, ROWS, WIDTH, 1)  # fmt: skip


@specialise()
def swiglu_double_backward(
    a, b, grad, gate, up, out_grad, out_gate, out_up,
    rows: tl.int64, width: tl.int64, a_row: tl.int64, b_row: tl.int64, grad_row: tl.int64, gate_row: tl.int64,
    up_row: tl.int64, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of grad, gate and up of a · grad_gate + b · grad_up."""
    _wide_double_backward(a, b, grad, gate, up, out_grad, out_gate, out_up, rows, width, a_row, b_row, grad_row,
                          gate_row, up_row, width, ROWS, WIDTH)  # fmt: skip


@specialise()
def swiglu_packed_double_backward(
    ab, grad, x, out_grad, out,
    rows: tl.int64, width: tl.int64, ab_row: tl.int64, grad_row: tl.int64, x_row: tl.int64,
    gate_at: tl.int64, up_at: tl.int64, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The same of gate and up, and of a and b, in one tensor."""
    _wide_double_backward(ab + gate_at, ab + up_at, grad, x + gate_at, x + up_at, out_grad, out + gate_at, out + up_at,
                          rows, width, ab_row, ab_row, grad_row, x_row, x_row, 2 * width, ROWS, WIDTH)  # fmt: skip


KERNELS = (swiglu_forward, swiglu_backward, swiglu_double_backward)
PACKED_KERNELS = (swiglu_packed_forward, swiglu_packed_backward, swiglu_packed_double_backward)


def forward(gate: Tensor, up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return silu(gate) · up."""
    out = empty(gate.shape, gate, out_dtype)
    return out if run_rows(KERNELS[0], (gate, up), (out,)) else reference.forward(gate, up, out_dtype)


def backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, given that of the product."""
    results = empty(gate.shape, gate, gate.dtype), empty(gate.shape, gate, gate.dtype)
    return results if run_rows(KERNELS[1], (grad, gate, up), results) else reference.backward(grad, gate, up)


def double_backward(
    grad_grad_gate: Tensor, grad_grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of grad, gate and up, given those of both results of `backward`."""
    operands = grad_grad_gate, grad_grad_up, grad, gate, up
    results = empty(gate.shape, gate, grad.dtype), empty(gate.shape, gate, gate.dtype), empty(gate.shape, up, up.dtype)
    return results if run_rows(KERNELS[2], operands, results) else reference.double_backward(*operands)


def packed_forward(x: Tensor, gate_first: bool, out_dtype: torch.dtype) -> Tensor:
    """Return silu(gate) · up of both halves of x."""
    out = empty((*x.shape[:-1], x.shape[-1] // 2), x, out_dtype)
    if run_rows(PACKED_KERNELS[0], (x,), (out,), _starts(gate_first)):
        return out
    return reference.packed_forward(x, gate_first, out_dtype)


def packed_backward(grad: Tensor, x: Tensor, gate_first: bool) -> Tensor:
    """Return the gradient of x, given that of the product."""
    out = empty(x.shape, x, x.dtype)
    if run_rows(PACKED_KERNELS[1], (grad, x), (out,), _starts(gate_first)):
        return out
    return reference.packed_backward(grad, x, gate_first)


def packed_double_backward(grad_grad: Tensor, grad: Tensor, x: Tensor, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of grad and x, given that of the result of `packed_backward`."""
    results = empty(grad.shape, x, grad.dtype), empty(x.shape, x, x.dtype)
    if run_rows(PACKED_KERNELS[2], (grad_grad, grad, x), results, _starts(gate_first)):
        return results
    return reference.packed_double_backward(grad_grad, grad, x, gate_first)


def _starts(gate_first: bool) -> tuple[int, int]:
    """Where gate and up begin in a row, in widths."""
    return (0, 1) if gate_first else (1, 0)
