"""SiLU in Triton, and what it shares with SwiGLU: tensors as rows, the choice of a launch, wide loads.

The kernels only move memory. A tensor is seen as rows of channels that are next to each other; tensors that have no
gaps at all are one long row. A program owns a block of rows and channels, and programs stand in one dimension. Offsets
are 64-bit. Numbers are computed in float32 and rounded once, at the end.

Loads of 16 bytes need data that start at multiples of 16 bytes, in every row. That is only known when a kernel runs,
and so the kernel looks: each has a wide and a narrow branch, and one compilation serves every call.
"""

# Annotations are for Triton, and a call of a kernel's part has results that only Triton knows.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlff.kernels import silu_reference as reference
from mlff.kernels.launch import Launch, choose, run, specialise, warn_reference

# Constants are in capitals, as launch.py asks.


@triton.jit
def sigmoids(x):
    """σ(x) and σ(-x), the latter not as a difference from 1, which cancels."""
    e = tl.exp(-tl.abs(x))  # at most one, so that nothing overflows
    near = 1.0 / (1.0 + e)
    far = e * near
    return tl.where(x >= 0, near, far), tl.where(x >= 0, far, near)


@triton.jit
def parts(x):
    """silu(x), its first and its second derivative; see silu_reference.py."""
    s, t = sigmoids(x)
    return x * s, s * (1.0 + x * t), s * t * (2.0 + x * (t - s))


@triton.jit
def odd_bytes(pointer):
    """Not zero where a pointer is no multiple of 16 bytes."""
    return pointer.to(tl.int64) & 15


@triton.jit
def place(rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """Row and channel of each number of this program, and whether it is there."""
    width = width // UNIT * UNIT  # no change: it tells the compiler that bounds fall between units
    program = tl.program_id(0)
    across = tl.cast(tl.cdiv(width, WIDTH), tl.int32)  # as programs are; a division of 64 bits is slow
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = (program % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    return row[:, None], channel[None, :], (row < rows)[:, None] & (channel < width)[None, :]


@triton.jit
def address(pointer, stride, row, channel, UNIT: tl.constexpr):
    """Where numbers of a tensor with a stride between rows are."""
    at = pointer + (row * (stride // UNIT * UNIT) + channel)
    if UNIT > 1:
        at = tl.multiple_of(at, (1, 16))
    return at


@triton.jit
def load(pointer, stride, row, channel, there, UNIT: tl.constexpr):
    """Numbers in float32."""
    return tl.load(address(pointer, stride, row, channel, UNIT), mask=there, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, stride, row, channel, there, value, UNIT: tl.constexpr):
    """Write numbers, rounded to the dtype of a tensor."""
    tl.store(address(pointer, stride, row, channel, UNIT), value.to(pointer.dtype.element_ty), mask=there)


@triton.jit
def _forward(x, out, rows, width, x_row, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    value, _, _ = parts(load(x, x_row, row, channel, there, UNIT))
    store(out, width, row, channel, there, value, UNIT)


@specialise()
def silu_forward(
    x, out,
    rows: tl.int64, width: tl.int64, x_row: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write silu(x)."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    if (odd_bytes(x) | odd_bytes(out) | ((x_row | width) % UNIT)) == 0:
        _forward(x, out, rows, width, x_row, ROWS, WIDTH, UNIT)
    else:
        _forward(x, out, rows, width, x_row, ROWS, WIDTH, 1)


@triton.jit
def _backward(grad, x, out, rows, width, grad_row, x_row, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    g = load(grad, grad_row, row, channel, there, UNIT)
    _, slope, _ = parts(load(x, x_row, row, channel, there, UNIT))
    store(out, width, row, channel, there, g * slope, UNIT)


@specialise()
def silu_backward(
    grad, x, out,
    rows: tl.int64, width: tl.int64, grad_row: tl.int64, x_row: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write grad silu'(x)."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    if (odd_bytes(grad) | odd_bytes(x) | odd_bytes(out) | ((grad_row | x_row | width) % UNIT)) == 0:
        _backward(grad, x, out, rows, width, grad_row, x_row, ROWS, WIDTH, UNIT)
    else:
        _backward(grad, x, out, rows, width, grad_row, x_row, ROWS, WIDTH, 1)


@triton.jit
def _double_backward(
    a, grad, x, out_grad, out_x, rows, width, a_row, grad_row, x_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    c = load(a, a_row, row, channel, there, UNIT)
    g = load(grad, grad_row, row, channel, there, UNIT)
    _, slope, bend = parts(load(x, x_row, row, channel, there, UNIT))
    store(out_grad, width, row, channel, there, c * slope, UNIT)
    store(out_x, width, row, channel, there, c * g * bend, UNIT)


@specialise()
def silu_double_backward(
    a, grad, x, out_grad, out_x,
    rows: tl.int64, width: tl.int64, a_row: tl.int64, grad_row: tl.int64, x_row: tl.int64,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a silu'(x) and a grad silu''(x)."""
    UNIT: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    odd = odd_bytes(a) | odd_bytes(grad) | odd_bytes(x) | odd_bytes(out_grad) | odd_bytes(out_x)
    if (odd | ((a_row | grad_row | x_row | width) % UNIT)) == 0:
        _double_backward(a, grad, x, out_grad, out_x, rows, width, a_row, grad_row, x_row, ROWS, WIDTH, UNIT)
    else:
        _double_backward(a, grad, x, out_grad, out_x, rows, width, a_row, grad_row, x_row, ROWS, WIDTH, 1)


KERNELS = (silu_forward, silu_backward, silu_double_backward)


def forward(x: Tensor) -> Tensor:
    """Return silu(x)."""
    out = empty(x.shape, x, x.dtype)
    return out if run_rows(KERNELS[0], (x,), (out,)) else reference.forward(x)


def backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given that of silu(x)."""
    out = empty(x.shape, x, x.dtype)
    return out if run_rows(KERNELS[1], (grad, x), (out,)) else reference.backward(grad, x)


def double_backward(grad_grad: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of grad and x, given that of the result of `backward`."""
    out_grad, out_x = empty(x.shape, x, grad.dtype), empty(x.shape, x, x.dtype)
    if run_rows(KERNELS[2], (grad_grad, grad, x), (out_grad, out_x)):
        return out_grad, out_x
    return reference.double_backward(grad_grad, grad, x)


# From tensors to launches, for both families.


def empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor on the device of another, for a result."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def run_rows(kernel: Any, operands: Sequence[Tensor], results: Sequence[Tensor], halves: Sequence[int] = ()) -> bool:
    """Fill the results, and return whether a launch of the kernel fits the device.

    Args:
        kernel: of the pointers to operands and results, the number of rows, their width, the stride between the rows of
            each operand and, if packed, where in a row gate and up begin.
        operands: of one shape, but packed ones are twice as wide; any strides, copied where `row_stride` has no answer.
            The last one is x, gate or up.
        results: contiguous.
        halves: nothing, or for a packed x (0, 1) for the gate first and (1, 0) for up first.

    Raises:
        RuntimeError: the tensors are on a CPU, and the kernels are not interpreted.
    """
    shape, device = operands[-1].shape, operands[-1].device
    require_device(kernel, device)
    if 0 in shape:
        return True
    flat = not halves and all(x.is_contiguous() for x in operands)
    if flat:
        rows, width = 1, operands[-1].numel()
        strides = [width] * len(operands)
    else:
        rows, width = operands[-1].numel() // shape[-1], shape[-1] // 2 if halves else shape[-1]
        operands = [x if row_stride(x) is not None else x.contiguous() for x in operands]
        strides = [row_stride(x) for x in operands]
    tensors = [*operands, *results]
    numbers = [rows, width, *strides, *(half * width for half in halves)]
    arguments = [*(x.dtype for x in tensors), *[int] * len(numbers)]
    launch = choose(kernel, arguments, {}, launches(None if flat else width), device)
    if launch is None:
        warn_reference(kernel, {}, operands[-1].dtype, device)
        return False
    tall, wide = (int(size) for _, size in launch.blocks)
    programs = -(-rows // tall) * -(-width // wide)
    run(kernel, (programs,), [*tensors, *numbers], {}, launch, device)
    return True


def require_device(kernel: Any, device: torch.device) -> None:
    """Raise RuntimeError where tensors are on a CPU, and the kernels are not interpreted."""
    if device.type == "cpu" and isinstance(kernel, triton.JITFunction):
        raise RuntimeError(
            "Triton kernels run on a GPU, or on a CPU if TRITON_INTERPRET=1 is set before Python starts; got tensors "
            "on a CPU. Call the functions of mlff.kernels.silu and mlff.kernels.swiglu: there they are plain PyTorch."
        )


def row_stride(x: Tensor) -> int | None:
    """Return the stride between the rows of a tensor, or None where its last axis has gaps or no one stride serves."""
    if x.shape[-1] != 1 and x.stride(-1) != 1:
        return None
    stride = extent = None
    for axis in reversed(range(x.dim() - 1)):
        if x.shape[axis] == 1:
            continue
        if stride is None or extent is None:
            stride = x.stride(axis)
            extent = stride * x.shape[axis]
        elif x.stride(axis) == extent:
            extent = extent * x.shape[axis]
        else:
            return None
    return x.shape[-1] if stride is None else stride


def launches(width: int | None) -> tuple[Launch, ...]:
    """Return launches to try, best first, for rows of a width, or None for one long row.

    A program has 1024 numbers, 8 a thread: two loads of 16 bytes in float32 and one in half precision. Blocks that
    divide the width leave no thread idle; under 32 channels they would cut a line of the cache.
    """
    block = 128
    if width is None:
        block = 1024
    elif isinstance(width, int):
        divisor = width & -width  # the largest power of two in it
        block = min(divisor if divisor >= 32 else 1 << (width - 1).bit_length(), 128)
    return tuple(_launch(size // block, block, warps) for size, warps in ((1024, 4), (1024, 8)))


def _launch(rows: int, width: int, warps: int) -> Launch:
    return Launch((("ROWS", rows), ("WIDTH", width)), warps)
