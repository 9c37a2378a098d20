"""Features at unit root mean square in Triton: forward, backward and second backward.

The formulas are those of unit_rms_reference.py. A program owns a few nodes of one stream, with all their rows and
channels in registers: sums need no second pass.
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

from mlff.kernels import unit_rms_reference as reference
from mlff.kernels.launch import Argument, Launch, choose, run, specialise, warn_reference
from mlff.kernels.silu_triton import require_device

LARGEST = 16384  # numbers of a node and stream that a program may hold

# Constants are in capitals, as launch.py asks.


@triton.jit
def place(nodes, streams, R: tl.constexpr, C: tl.constexpr, NODES: tl.constexpr, NUMBERS: tl.constexpr):
    """Node, stream, row and channel of each number of this program, and whether it is there."""
    streams = tl.cast(streams, tl.int32)  # as programs are
    node = (tl.program_id(0) // streams).to(tl.int64) * NODES + tl.arange(0, NODES)[:, None]
    number = tl.arange(0, NUMBERS)[None, :]
    return node, tl.program_id(0) % streams, number // C, number % C, (node < nodes) & (number < R * C)


@triton.jit
def numbers(pointer, node_stride, row_stride, stream_stride, node, stream, row, channel):
    """Where the numbers of a tensor are."""
    return pointer + node * node_stride + row * row_stride + stream * stream_stride + channel


@triton.jit
def centre(x, row, there, C: tl.constexpr, CENTRED: tl.constexpr):
    """Take the mean over channels out of row 0."""
    if CENTRED:
        scalar = there & (row == 0)
        mean = tl.sum(tl.where(scalar, x, 0.0), 1)[:, None] / C
        x = tl.where(scalar, x - mean, x)
    return x


@triton.jit
def weights(balance, row, there, R: tl.constexpr, C: tl.constexpr, BALANCED: tl.constexpr):
    """The weight of each number, b."""
    if BALANCED:
        return tl.load(balance + row, mask=there, other=0.0).to(tl.float32)
    else:
        return tl.where(there, 1.0 / (R * C), 0.0)


@triton.jit
def inverse(z, b, EPS: tl.constexpr):
    """The inverse of the root mean square of each node, i."""
    return 1.0 / tl.sqrt_rn(tl.sum(b * z * z, 1)[:, None] + EPS)


@specialise()
def unit_rms_forward(
    x, balance, out, nodes: tl.int64, streams: tl.int64,
    x_node: tl.int64, x_row: tl.int64, x_stream: tl.int64, out_node: tl.int64, out_row: tl.int64, out_stream: tl.int64,
    R: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, BALANCED: tl.constexpr,
    NODES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Write the features at unit root mean square."""
    node, stream, row, channel, there = place(nodes, streams, R, C, NODES, NUMBERS)
    at = numbers(x, x_node, x_row, x_stream, node, stream, row, channel)
    z = centre(tl.load(at, mask=there, other=0.0).to(tl.float32), row, there, C, CENTRED)
    y = z * inverse(z, weights(balance, row, there, R, C, BALANCED), EPS)
    at = numbers(out, out_node, out_row, out_stream, node, stream, row, channel)
    tl.store(at, y.to(out.dtype.element_ty), mask=there)


@specialise()
def unit_rms_backward(
    grad, x, balance, out, nodes: tl.int64, streams: tl.int64,
    grad_node: tl.int64, grad_row: tl.int64, grad_stream: tl.int64, x_node: tl.int64, x_row: tl.int64,
    x_stream: tl.int64, out_node: tl.int64, out_row: tl.int64, out_stream: tl.int64,
    R: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, BALANCED: tl.constexpr,
    NODES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x."""
    node, stream, row, channel, there = place(nodes, streams, R, C, NODES, NUMBERS)
    at = numbers(x, x_node, x_row, x_stream, node, stream, row, channel)
    z = centre(tl.load(at, mask=there, other=0.0).to(tl.float32), row, there, C, CENTRED)
    at = numbers(grad, grad_node, grad_row, grad_stream, node, stream, row, channel)
    g = tl.load(at, mask=there, other=0.0).to(tl.float32)
    b = weights(balance, row, there, R, C, BALANCED)
    i = inverse(z, b, EPS)
    value = i * g - i * i * i * tl.sum(g * z, 1)[:, None] * b * z
    at = numbers(out, out_node, out_row, out_stream, node, stream, row, channel)
    tl.store(at, centre(value, row, there, C, CENTRED).to(out.dtype.element_ty), mask=there)


@specialise()
def unit_rms_double_backward(
    grad_grad, grad, x, balance, out_grad, out, nodes: tl.int64, streams: tl.int64,
    grad_grad_node: tl.int64, grad_grad_row: tl.int64, grad_grad_stream: tl.int64,
    grad_node: tl.int64, grad_row: tl.int64, grad_stream: tl.int64, x_node: tl.int64, x_row: tl.int64,
    x_stream: tl.int64, out_node: tl.int64, out_row: tl.int64, out_stream: tl.int64,
    R: tl.constexpr, C: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, BALANCED: tl.constexpr,
    NODES: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of grad and x."""
    node, stream, row, channel, there = place(nodes, streams, R, C, NODES, NUMBERS)
    at = numbers(x, x_node, x_row, x_stream, node, stream, row, channel)
    z = centre(tl.load(at, mask=there, other=0.0).to(tl.float32), row, there, C, CENTRED)
    at = numbers(grad, grad_node, grad_row, grad_stream, node, stream, row, channel)
    g = tl.load(at, mask=there, other=0.0).to(tl.float32)
    at = numbers(grad_grad, grad_grad_node, grad_grad_row, grad_grad_stream, node, stream, row, channel)
    k = centre(tl.load(at, mask=there, other=0.0).to(tl.float32), row, there, C, CENTRED)
    b = weights(balance, row, there, R, C, BALANCED)
    i = inverse(z, b, EPS)
    i3 = i * i * i
    a, d, turned = tl.sum(k * g, 1)[:, None], tl.sum(g * z, 1)[:, None], tl.sum(b * z * k, 1)[:, None]
    at = numbers(out_grad, out_node, out_row, out_stream, node, stream, row, channel)
    tl.store(at, (i * k - i3 * turned * z).to(out_grad.dtype.element_ty), mask=there)
    value = (3.0 * i3 * i * i * d * turned - i3 * a) * b * z - i3 * (turned * g + d * b * k)
    at = numbers(out, out_node, out_row, out_stream, node, stream, row, channel)
    tl.store(at, centre(value, row, there, C, CENTRED).to(out.dtype.element_ty), mask=there)


KERNELS = (unit_rms_forward, unit_rms_backward, unit_rms_double_backward)


def forward(x: Tensor, balance: Tensor | None, eps: float, centred: bool) -> Tensor:
    """Return the features at unit root mean square."""
    out = empty(x)
    if x.numel() == 0 or _run(0, [x], balance, [out], eps, centred):
        return out
    return reference.forward(x, balance, eps, centred)


def backward(grad: Tensor, x: Tensor, balance: Tensor | None, eps: float, centred: bool) -> Tensor:
    """Return the gradient of x."""
    out = empty(x)
    if x.numel() == 0 or _run(1, [grad, x], balance, [out], eps, centred):
        return out
    return reference.backward(grad, x, balance, eps, centred)


def double_backward(
    grad_grad: Tensor, grad: Tensor, x: Tensor, balance: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of grad and x."""
    out_grad, out = empty(x, grad.dtype), empty(x)
    if x.numel() == 0 or _run(2, [grad_grad, grad, x], balance, [out_grad, out], eps, centred):
        return out_grad, out
    return reference.double_backward(grad_grad, grad, x, balance, eps, centred)


def empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without gaps for a result."""
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def constants(rows: int, width: int, eps: float, centred: bool, balanced: bool) -> dict[str, Any]:
    """Return the constants of a kernel apart from the sizes of its blocks."""
    return {"R": rows, "C": width, "EPS": eps, "CENTRED": centred, "BALANCED": balanced}


def arguments(order: int, dtype: torch.dtype) -> list[Argument]:
    """Return what is known of a kernel's arguments where features have one dtype and weights of rows are float32."""
    parameters = [p for p in KERNELS[order].params if not p.is_constexpr]
    return [int if p.annotation_type else torch.float32 if p.name == "balance" else dtype for p in parameters]


def launches(rows: int, width: int) -> tuple[Launch, ...]:
    """Return launches to try, best first: whole nodes, a thousand numbers or one node a program."""
    numbers = 1 << max(rows * width - 1, 0).bit_length()
    if numbers > LARGEST:
        return ()
    nodes = max(1, 1024 // numbers)
    warps = min(16, max(1, nodes * numbers // 256))
    return tuple(
        Launch((("NODES", count), ("NUMBERS", numbers)), many) for count, many in ((nodes, warps), (1, max(warps, 4)))
    )


def _run(
    order: int, given: Sequence[Tensor], balance: Tensor | None, results: Sequence[Tensor], eps: float, centred: bool
) -> bool:
    """Fill the results, and return whether a launch of the kernel fits the device."""
    kernel, device = KERNELS[order], results[-1].device
    require_device(kernel, device)
    given = [x if x.stride(3) == 1 else x.contiguous() for x in given]
    nodes, rows, streams, width = results[-1].shape
    geometry = constants(rows, width, eps, centred, balance is not None)
    tables = [*given, given[-1] if balance is None else balance.contiguous(), *results]
    strides = [stride for x in (*given, results[-1]) for stride in x.stride()[:3]]
    known = [*(x.dtype for x in tables), *[int] * (2 + len(strides))]
    launch = choose(kernel, known, geometry, launches(rows, width), device)
    if launch is None:
        warn_reference(kernel, geometry, results[-1].dtype, device)
        return False
    block = dict(launch.blocks)["NODES"]
    programs = -(-nodes // int(block)) * streams
    run(kernel, (programs,), [*tables, nodes, streams, *strides], geometry, launch, device)
    return True
