"""The gated activation in Triton: forward, backward and second backward.

The formulas are those of gated_reference.py. A program owns a block of edges and channels and walks over degrees and
their rows, whose numbers are known when a kernel is compiled; each number is read and written once. Rows, launches and
wide loads are those of silu_triton.py.
"""

# Annotations are for Triton, and a call of a kernel's part has results that only Triton knows.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mlff.kernels import gated_reference as reference
from mlff.kernels.launch import Launch, choose, run, specialise, warn_reference
from mlff.kernels.silu_triton import empty, load, odd_bytes, parts, place, require_device, row_stride, sigmoids, store

# Constants are in capitals, as launch.py asks.


@triton.jit
def slopes(x):
    """σ(x), its first and its second derivative."""
    s, t = sigmoids(x)
    return s, s * t, s * t * (t - s)


@triton.jit
def place_of(k: tl.constexpr, l, DEGREE: tl.constexpr):
    """The row of degree l in the k-th run of rows, m = 0, -1, +1, …: the runs before it have degree + 1 - |m| each."""
    return k * (DEGREE + 1) - k * k // 4 + l - (k + 1) // 2


@triton.jit
def _forward(
    zero, others, gates, residual, out, rows, width, zero_row, others_row, gates_row, residual_row, out_row,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    value, _, _ = parts(load(zero, zero_row, row, channel, there, UNIT))
    if RESIDUAL:
        value += load(residual, residual_row, row, channel, there, UNIT)
    store(out, out_row, row, channel, there, value, UNIT)
    for l in range(1, DEGREE + 1):  # not unrolled: the compiler's time grows with the square of the loads
        s, _, _ = slopes(load(gates + (l - 1) * width, gates_row, row, channel, there, UNIT))
        for k in tl.static_range(0, 2 * ORDER + 1):  # m = 0, -1, +1, -2, …
            if l >= (k + 1) // 2:
                at = place_of(k, l, DEGREE) * width
                if k == 0:
                    y = load(zero + at, zero_row, row, channel, there, UNIT) * s
                else:
                    y = load(others + at - (DEGREE + 1) * width, others_row, row, channel, there, UNIT) * s
                if RESIDUAL:
                    y += load(residual + at, residual_row, row, channel, there, UNIT)
                store(out + at, out_row, row, channel, there, y, UNIT)


@specialise()
def gated_forward(
    zero, others, gates, residual, out,
    rows: tl.int64, width: tl.int64, zero_row: tl.int64, others_row: tl.int64, gates_row: tl.int64,
    residual_row: tl.int64, out_row: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the activated rows, and what is added."""
    UNIT: tl.constexpr = 128 // zero.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    odd = odd_bytes(zero) | odd_bytes(others) | odd_bytes(gates) | odd_bytes(residual) | odd_bytes(out)
    if (odd | ((zero_row | others_row | gates_row | residual_row | out_row | width) % UNIT)) == 0:
        _forward(zero, others, gates, residual, out, rows, width, zero_row, others_row, gates_row, residual_row,
                 out_row, DEGREE, ORDER, RESIDUAL, ROWS, WIDTH, UNIT)  # fmt: skip
    else:
        _forward(zero, others, gates, residual, out, rows, width, zero_row, others_row, gates_row, residual_row,
                 out_row, DEGREE, ORDER, RESIDUAL, ROWS, WIDTH, 1)  # fmt: skip


@triton.jit
def _backward(
    grad, zero, others, gates, out_zero, out_others, out_gates, rows, width,
    grad_row, zero_row, others_row, gates_row, out_zero_row, out_others_row, out_gates_row,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    _, slope, _ = parts(load(zero, zero_row, row, channel, there, UNIT))
    g = load(grad, grad_row, row, channel, there, UNIT)
    store(out_zero, out_zero_row, row, channel, there, g * slope, UNIT)
    for l in range(1, DEGREE + 1):
        s, ds, _ = slopes(load(gates + (l - 1) * width, gates_row, row, channel, there, UNIT))
        total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        for k in tl.static_range(0, 2 * ORDER + 1):
            if l >= (k + 1) // 2:
                at = place_of(k, l, DEGREE) * width
                g = load(grad + at, grad_row, row, channel, there, UNIT)
                if k == 0:
                    total += g * load(zero + at, zero_row, row, channel, there, UNIT)
                    store(out_zero + at, out_zero_row, row, channel, there, g * s, UNIT)
                else:
                    at -= (DEGREE + 1) * width
                    total += g * load(others + at, others_row, row, channel, there, UNIT)
                    store(out_others + at, out_others_row, row, channel, there, g * s, UNIT)
        store(out_gates + (l - 1) * width, out_gates_row, row, channel, there, total * ds, UNIT)


@specialise()
def gated_backward(
    grad, zero, others, gates, out_zero, out_others, out_gates,
    rows: tl.int64, width: tl.int64, grad_row: tl.int64, zero_row: tl.int64, others_row: tl.int64, gates_row: tl.int64,
    out_zero_row: tl.int64, out_others_row: tl.int64, out_gates_row: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and of the gates."""
    UNIT: tl.constexpr = 128 // zero.dtype.element_ty.primitive_bitwidth
    odd = odd_bytes(grad) | odd_bytes(zero) | odd_bytes(others) | odd_bytes(gates)
    odd = odd | odd_bytes(out_zero) | odd_bytes(out_others) | odd_bytes(out_gates)
    odd = odd | ((grad_row | zero_row | others_row | gates_row) % UNIT)
    if (odd | ((out_zero_row | out_others_row | out_gates_row | width) % UNIT)) == 0:
        _backward(grad, zero, others, gates, out_zero, out_others, out_gates, rows, width,
                  grad_row, zero_row, others_row, gates_row, out_zero_row, out_others_row, out_gates_row,
                  DEGREE, ORDER, ROWS, WIDTH, UNIT)  # fmt: skip
    else:
        _backward(grad, zero, others, gates, out_zero, out_others, out_gates, rows, width,
                  grad_row, zero_row, others_row, gates_row, out_zero_row, out_others_row, out_gates_row,
                  DEGREE, ORDER, ROWS, WIDTH, 1)  # fmt: skip


@triton.jit
def _double_backward(
    a, b, c, grad, zero, others, gates, out_grad, out_zero, out_others, out_gates, rows, width,
    a_row, b_row, c_row, grad_row, zero_row, others_row, gates_row,
    out_grad_row, out_zero_row, out_others_row, out_gates_row,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row, channel, there = place(rows, width, ROWS, WIDTH, UNIT)
    _, slope, bend = parts(load(zero, zero_row, row, channel, there, UNIT))
    h = load(a, a_row, row, channel, there, UNIT)
    g = load(grad, grad_row, row, channel, there, UNIT)
    store(out_grad, out_grad_row, row, channel, there, h * slope, UNIT)
    store(out_zero, out_zero_row, row, channel, there, h * g * bend, UNIT)
    for l in range(1, DEGREE + 1):
        s, ds, dds = slopes(load(gates + (l - 1) * width, gates_row, row, channel, there, UNIT))
        turned = load(c + (l - 1) * width, c_row, row, channel, there, UNIT)
        first = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        second = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        for k in tl.static_range(0, 2 * ORDER + 1):
            if l >= (k + 1) // 2:
                at = place_of(k, l, DEGREE) * width
                g = load(grad + at, grad_row, row, channel, there, UNIT)
                if k == 0:
                    h = load(a + at, a_row, row, channel, there, UNIT)
                    y = load(zero + at, zero_row, row, channel, there, UNIT)
                    store(out_zero + at, out_zero_row, row, channel, there, turned * ds * g, UNIT)
                else:
                    place_in_others = at - (DEGREE + 1) * width
                    h = load(b + place_in_others, b_row, row, channel, there, UNIT)
                    y = load(others + place_in_others, others_row, row, channel, there, UNIT)
                    store(out_others + place_in_others, out_others_row, row, channel, there, turned * ds * g, UNIT)
                first += h * g
                second += g * y
                store(out_grad + at, out_grad_row, row, channel, there, h * s + turned * ds * y, UNIT)
        value = first * ds + turned * dds * second
        store(out_gates + (l - 1) * width, out_gates_row, row, channel, there, value, UNIT)


@specialise()
def gated_double_backward(
    a, b, c, grad, zero, others, gates, out_grad, out_zero, out_others, out_gates,
    rows: tl.int64, width: tl.int64, a_row: tl.int64, b_row: tl.int64, c_row: tl.int64, grad_row: tl.int64,
    zero_row: tl.int64, others_row: tl.int64, gates_row: tl.int64,
    out_grad_row: tl.int64, out_zero_row: tl.int64, out_others_row: tl.int64, out_gates_row: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of grad, x and the gates of a · grad_zero + b · grad_others + c · grad_gates."""
    UNIT: tl.constexpr = 128 // zero.dtype.element_ty.primitive_bitwidth
    odd = odd_bytes(a) | odd_bytes(b) | odd_bytes(c) | odd_bytes(grad) | odd_bytes(zero) | odd_bytes(others)
    odd = odd | odd_bytes(gates) | odd_bytes(out_grad) | odd_bytes(out_zero) | odd_bytes(out_others)
    odd = odd | odd_bytes(out_gates) | ((a_row | b_row | c_row | grad_row | zero_row | others_row) % UNIT)
    odd = odd | ((gates_row | out_grad_row | out_zero_row | out_others_row | out_gates_row | width) % UNIT)
    if odd == 0:
        _double_backward(a, b, c, grad, zero, others, gates, out_grad, out_zero, out_others, out_gates, rows, width,
                         a_row, b_row, c_row, grad_row, zero_row, others_row, gates_row,
                         out_grad_row, out_zero_row, out_others_row, out_gates_row,
                         DEGREE, ORDER, ROWS, WIDTH, UNIT)  # fmt: skip
    else:
        _double_backward(a, b, c, grad, zero, others, gates, out_grad, out_zero, out_others, out_gates, rows, width,
                         a_row, b_row, c_row, grad_row, zero_row, others_row, gates_row,
                         out_grad_row, out_zero_row, out_others_row, out_gates_row,
                         DEGREE, ORDER, ROWS, WIDTH, 1)  # fmt: skip


KERNELS = (gated_forward, gated_backward, gated_double_backward)


def forward(zero: Tensor, others: Tensor, gates: Tensor, residual: Tensor | None, degree: int, order: int) -> Tensor:
    """Return the activated rows, plus the residual if there is one."""
    count = zero.shape[-2] + others.shape[-2]
    out = empty((*zero.shape[:-2], count, zero.shape[-1]), zero, zero.dtype if residual is None else residual.dtype)
    operands = (zero, others, gates, zero if residual is None else residual)  # a pointer that is not read
    if _run(KERNELS[0], operands, (out,), constants(degree, order, residual is not None)):
        return out
    return reference.forward(zero, others, gates, residual, degree, order)


def backward(
    grad: Tensor, zero: Tensor, others: Tensor, gates: Tensor, degree: int, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, in its two parts, and of the gates."""
    zero_, others_, gates_ = (empty(x.shape, x, x.dtype) for x in (zero, others, gates))
    if _run(KERNELS[1], (grad, zero, others, gates), (zero_, others_, gates_), constants(degree, order)):
        return zero_, others_, gates_
    return reference.backward(grad, zero, others, gates, degree, order)


def double_backward(
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
    """Return the gradients of grad, x in its two parts, and the gates, given those of the results of `backward`."""
    operands = grad_grad_zero, grad_grad_others, grad_grad_gates, grad, zero, others, gates
    grad_, zero_, others_, gates_ = (empty(x.shape, x, x.dtype) for x in (grad, zero, others, gates))
    if _run(KERNELS[2], operands, (grad_, zero_, others_, gates_), constants(degree, order)):
        return grad_, zero_, others_, gates_
    return reference.double_backward(*operands, degree, order)


def constants(degree: int, order: int, residual: bool | None = None) -> dict[str, Any]:
    """Return the constants of a kernel; only the forward one asks whether there is a residual."""
    found: dict[str, Any] = {"DEGREE": degree, "ORDER": min(order, degree)}
    return found if residual is None else {**found, "RESIDUAL": residual}


def _run(kernel: Any, operands: Sequence[Tensor], results: Sequence[Tensor], geometry: dict[str, Any]) -> bool:
    """Fill the results, and return whether a launch of the kernel fits the device."""
    full, device = results[0], results[0].device
    require_device(kernel, device)
    if 0 in full.shape:
        return True
    width = full.shape[-1]
    rows = full.numel() // (full.shape[-2] * width)
    operands, strides = zip(*(edges_as_rows(operand) for operand in operands), strict=True)
    tensors = [*operands, *results]
    numbers = [rows, width, *strides, *(result.shape[-2] * width for result in results)]
    arguments = [*(tensor.dtype for tensor in tensors), *[int] * len(numbers)]
    launch = choose(kernel, arguments, geometry, launches(width), device)
    if launch is None:
        warn_reference(kernel, geometry, operands[0].dtype, device)
        return False
    tall, wide = (int(size) for _, size in launch.blocks)
    run(kernel, (-(-rows // tall) * -(-width // wide),), [*tensors, *numbers], geometry, launch, device)
    return True


def edges_as_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return a tensor [*n, rows, C] whose rows and channels are next to each other, and the stride of all n."""
    if x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]:
        stride = row_stride(x.flatten(-2))
        if stride is not None:
            return x, stride
    return x.contiguous(), x.shape[-2] * x.shape[-1]


def launches(width: int) -> tuple[Launch, ...]:
    """Return launches to try, best first: programs of 1024, 512 or 256 numbers of each row."""
    block = min(max(width & -width, 32) if isinstance(width, int) else 32, 128)
    return tuple(
        Launch((("ROWS", size // block), ("WIDTH", block)), warps) for size, warps in ((1024, 4), (512, 4), (256, 2))
    )
