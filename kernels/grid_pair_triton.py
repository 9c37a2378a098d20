"""The grid-pair product in Triton, in two forms of three kernels each: forward, backward, second backward.

All results of all orders are sums of products of two operands on the grid,

    out = Σ_terms back(there(x) · there(y))

and so every kernel is made of one routine. It walks the grid in blocks of points and keeps nothing of it in memory. A
program owns a block of columns of one result: a column is one channel of one focus stream of one node, so that
N · F · C of them stand side by side, whatever C is. [columns, slots] times [slots, points] gives values at points;
their product, [columns, points], stays in the registers in which the next matrix product, with [points, slots],
takes it.

    dense       any projectors
    factored    the small projectors of grid_pair_factors.py, for grids on the rotation group

Results of one kernel do not share the projections they have in common: with two operands at a time the registers
suffice, with five they do not, and then a kernel is several times slower than its parts.

Operands are float32 or bfloat16; products are accumulated in float32. Tensor cores do not take float32, so that:

- dense, PRECISION "tf32x3": each number is split in two by Triton;
- factored: each number x of a column is x = s (h + l / 2048), s the largest of its column, h and l float16, and of the
  four products that of the two l is left out. That is 22 bits, as in "tf32x3", and several times faster: both parts
  of the projectors are tables, and float16 takes half of the registers. Values at points cannot overflow: factorise()
  sees to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlff.kernels.grid_pair_factors import widths
from mlff.kernels.launch import Argument, Fit, Launch, choose, fit_offline, run, specialise, warn_reference

# Constants are in capitals, as launch.py asks.


@triton.jit
def _columns(columns, C: tl.constexpr, F: tl.constexpr, COLUMNS: tl.constexpr):
    """Node, focus, channel of each column of this program, and whether it is there."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    pair = column // C
    return pair // F, pair % F, column % C, column < columns


@triton.jit
def _load(pointer, base, there, slot, row, K: tl.constexpr, C: tl.constexpr):
    """[columns, slots] of an operand; `base` is the offset of each column, `row` the stride of D."""
    offset = (slot // K).to(tl.int64) * row + (slot % K) * C
    mask = there[:, None] & (slot >= 0)[None, :]  # slots below zero are padding
    return tl.load(pointer + base[:, None] + offset[None, :], mask=mask, other=0.0)


@triton.jit
def _store(pointer, base, there, slot, row, value, K: tl.constexpr, C: tl.constexpr):
    """Write [columns, slots] to a result."""
    offset = (slot // K).to(tl.int64) * row + (slot % K) * C
    mask = there[:, None] & (slot >= 0)[None, :]
    tl.store(pointer + base[:, None] + offset[None, :], value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _to_points(data, matrix, PRECISION: tl.constexpr):
    """[columns, slots] and [points, slots] to [columns, points]."""
    return tl.dot(data, tl.trans(matrix), input_precision=PRECISION)


@triton.jit
def _to_slots(total, values, matrix, PRECISION: tl.constexpr):
    """Add [columns, points] times [points, slots] to [columns, slots]."""
    return tl.dot(values.to(matrix.dtype), matrix, acc=total, input_precision=PRECISION)


@triton.jit
def _tile(matrix, point, first, POINTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Rows `point` and columns first … first + SIZE of a matrix with WIDTH columns."""
    column = first + tl.arange(0, SIZE)
    return tl.load(matrix + point[:, None] * WIDTH + column[None, :], mask=(point < POINTS)[:, None], other=0.0)


# Dense projectors, padded to WIDTH columns.


@triton.jit
def _dense(
    x, x_base, x_row, x_matrix, y, y_base, y_row, y_matrix, back, total, there,
    K: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, POINTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of two operands, each with its projector, to `total`, [columns, WIDTH]."""
    slot = tl.arange(0, WIDTH)
    slot = tl.where(slot < SLOTS, slot, -1)
    x_data = _load(x, x_base, there, slot, x_row, K, C)
    y_data = _load(y, y_base, there, slot, y_row, K, C)
    for first in range(0, POINTS, BLOCK):
        point = first + tl.arange(0, BLOCK)
        x_values = _to_points(x_data, _tile(x_matrix, point, 0, POINTS, WIDTH, WIDTH), PRECISION)
        y_values = _to_points(y_data, _tile(y_matrix, point, 0, POINTS, WIDTH, WIDTH), PRECISION)
        total = _to_slots(total, x_values * y_values, _tile(back, point, 0, POINTS, WIDTH, WIDTH), PRECISION)
    return total


@triton.jit
def _store_dense(
    out, base, row, there, total, K: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr
):
    slot = tl.arange(0, WIDTH)
    _store(out, base, there, tl.where(slot < SLOTS, slot, -1), row, total, K, C)


@specialise(aligned=("to_grid", "from_grid"))
def dense_forward(
    left, right, out, to_grid, from_grid,
    columns: tl.int64,
    left_n: tl.int64, left_d: tl.int64, left_f: tl.int64,
    right_n: tl.int64, right_d: tl.int64, right_f: tl.int64,
    out_n: tl.int64, out_d: tl.int64, out_f: tl.int64,
    K: tl.constexpr, C: tl.constexpr, F: tl.constexpr, SLOTS: tl.constexpr, POINTS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write back(left · right)."""
    node, focus, channel, there = _columns(columns, C, F, COLUMNS)
    total = _dense(
        left, node * left_n + focus * left_f + channel, left_d, to_grid,
        right, node * right_n + focus * right_f + channel, right_d, to_grid,
        from_grid, tl.zeros([COLUMNS, WIDTH], tl.float32), there, K, C, SLOTS, POINTS, WIDTH, BLOCK, PRECISION,
    )  # fmt: skip
    _store_dense(out, node * out_n + focus * out_f + channel, out_d, there, total, K, C, SLOTS, WIDTH)


@specialise(aligned=("to_grid", "from_grid"))
def dense_backward(
    grad, left, right, out_left, out_right, to_grid, from_grid,
    columns: tl.int64,
    grad_n: tl.int64, grad_d: tl.int64, grad_f: tl.int64,
    left_n: tl.int64, left_d: tl.int64, left_f: tl.int64,
    right_n: tl.int64, right_d: tl.int64, right_f: tl.int64,
    out_n: tl.int64, out_d: tl.int64, out_f: tl.int64,
    K: tl.constexpr, C: tl.constexpr, F: tl.constexpr, SLOTS: tl.constexpr, POINTS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out_left = grad · right and out_right = grad · left; the second axis of the grid says which."""
    node, focus, channel, there = _columns(columns, C, F, COLUMNS)
    if tl.program_id(1) == 0:
        y, y_n, y_d, y_f = right, right_n, right_d, right_f
        out = out_left
    else:
        y, y_n, y_d, y_f = left, left_n, left_d, left_f
        out = out_right
    total = _dense(
        grad, node * grad_n + focus * grad_f + channel, grad_d, from_grid,
        y, node * y_n + focus * y_f + channel, y_d, to_grid,
        to_grid, tl.zeros([COLUMNS, WIDTH], tl.float32), there, K, C, SLOTS, POINTS, WIDTH, BLOCK, PRECISION,
    )  # fmt: skip
    _store_dense(out, node * out_n + focus * out_f + channel, out_d, there, total, K, C, SLOTS, WIDTH)


@specialise(aligned=("to_grid", "from_grid"))
def dense_double_backward(
    grad_left, grad_right, grad, left, right, out_grad, out_left, out_right, to_grid, from_grid,
    columns: tl.int64,
    gl_n: tl.int64, gl_d: tl.int64, gl_f: tl.int64,
    gr_n: tl.int64, gr_d: tl.int64, gr_f: tl.int64,
    grad_n: tl.int64, grad_d: tl.int64, grad_f: tl.int64,
    left_n: tl.int64, left_d: tl.int64, left_f: tl.int64,
    right_n: tl.int64, right_d: tl.int64, right_f: tl.int64,
    out_n: tl.int64, out_d: tl.int64, out_f: tl.int64,
    K: tl.constexpr, C: tl.constexpr, F: tl.constexpr, SLOTS: tl.constexpr, POINTS: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write one of three results, by the grid's second axis.

    out_grad = grad_left · right + left · grad_right, out_left = grad · grad_right, out_right = grad · grad_left.
    """
    node, focus, channel, there = _columns(columns, C, F, COLUMNS)
    result = tl.program_id(1)
    if result == 0:
        out, terms, back, x_matrix = out_grad, 2, from_grid, to_grid
    elif result == 1:
        out, terms, back, x_matrix = out_left, 1, to_grid, from_grid
    else:
        out, terms, back, x_matrix = out_right, 1, to_grid, from_grid
    total = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for term in range(terms):
        if result == 0 and term == 0:
            x, x_n, x_d, x_f = grad_left, gl_n, gl_d, gl_f
            y, y_n, y_d, y_f = right, right_n, right_d, right_f
        elif result == 0:
            x, x_n, x_d, x_f = left, left_n, left_d, left_f
            y, y_n, y_d, y_f = grad_right, gr_n, gr_d, gr_f
        elif result == 1:
            x, x_n, x_d, x_f = grad, grad_n, grad_d, grad_f
            y, y_n, y_d, y_f = grad_right, gr_n, gr_d, gr_f
        else:
            x, x_n, x_d, x_f = grad, grad_n, grad_d, grad_f
            y, y_n, y_d, y_f = grad_left, gl_n, gl_d, gl_f
        total = _dense(
            x, node * x_n + focus * x_f + channel, x_d, x_matrix,
            y, node * y_n + focus * y_f + channel, y_d, to_grid,
            back, total, there, K, C, SLOTS, POINTS, WIDTH, BLOCK, PRECISION,
        )  # fmt: skip
    _store_dense(out, node * out_n + focus * out_f + channel, out_d, there, total, K, C, SLOTS, WIDTH)


# Factored projectors. z, c, s and the classes e (even) and o (odd) are those of grid_pair_factors.py. A column has four
# parts: z even, z odd, (c, s) even, (c, s) odd; a field at points has six: z even, z odd, c even, s even, c odd, s odd.


@triton.jit
def _parts(table, N: tl.constexpr, W: tl.constexpr):
    """A table by slots in its four parts."""
    n = tl.arange(0, N)
    w = tl.arange(0, W)
    return tl.load(table + n), tl.load(table + N + n), tl.load(table + 2 * N + w), tl.load(table + 2 * N + W + w)


@triton.jit
def _halves(x):
    """The two float16 numbers h and l with x = h + l / 2048."""
    high = x.to(tl.float16)
    return high, ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)


@triton.jit
def _scales(scale, scaled, N: tl.constexpr, W: tl.constexpr):
    """The scale of the four parts as [1, slots], or ones."""
    t0, t1, t2, t3 = _parts(scale, N, W)
    t0, t1 = tl.where(scaled, t0, 1.0), tl.where(scaled, t1, 1.0)
    t2, t3 = tl.where(scaled, t2, 1.0), tl.where(scaled, t3, 1.0)
    return t0[None, :], t1[None, :], t2[None, :], t3[None, :]


@triton.jit
def _load_parts(
    pointer, base, row, scaled, there, slots, scale, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """An operand in its four parts, each as high and low part, and the largest number of each column.

    An incoming gradient is scaled first. Without SPLIT the low parts mean nothing and the largest number is one.
    """
    p0, p1, p2, p3 = _parts(slots, N, W)
    t0, t1, t2, t3 = _scales(scale, scaled, N, W)
    x0 = _load(pointer, base, there, p0, row, K, C) * t0
    x1 = _load(pointer, base, there, p1, row, K, C) * t1
    x2 = _load(pointer, base, there, p2, row, K, C) * t2
    x3 = _load(pointer, base, there, p3, row, K, C) * t3
    if SPLIT:
        low = tl.maximum(tl.max(tl.abs(x0), 1), tl.max(tl.abs(x1), 1))
        high = tl.maximum(tl.max(tl.abs(x2), 1), tl.max(tl.abs(x3), 1))
        largest = tl.maximum(tl.maximum(low, high), 1e-30)
        inverse = (1.0 / largest)[:, None]
        h0, l0 = _halves(x0 * inverse)
        h1, l1 = _halves(x1 * inverse)
        h2, l2 = _halves(x2 * inverse)
        h3, l3 = _halves(x3 * inverse)
        return h0, h1, h2, h3, l0, l1, l2, l3, largest
    else:
        kind = pointer.dtype.element_ty
        x0, x1, x2, x3 = x0.to(kind), x1.to(kind), x2.to(kind), x3.to(kind)
        return x0, x1, x2, x3, x0, x1, x2, x3, tl.full([base.shape[0]], 1.0, tl.float32)


@triton.jit
def _tiles(matrix, point, first, POINTS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SPLIT: tl.constexpr):
    """High and low part of a tile of the small projectors; the low parts stand behind all high ones."""
    if SPLIT:
        high = _tile(matrix, point, first, POINTS, 2 * WIDTH, SIZE)
        return high, _tile(matrix, point, WIDTH + first, POINTS, 2 * WIDTH, SIZE)
    else:
        high = _tile(matrix, point, first, POINTS, WIDTH, SIZE)
        return high, high


@triton.jit
def _field(high, low, m_high, m_low, SPLIT: tl.constexpr):
    """[columns, slots] and [points, slots] to [columns, points]."""
    if SPLIT:
        m_high = tl.trans(m_high)
        crossed = tl.dot(high, tl.trans(m_low))
        crossed = tl.dot(low, m_high, acc=crossed)
        return tl.dot(high, m_high, acc=crossed * (1.0 / 2048.0))
    else:
        return tl.dot(high, tl.trans(m_high))


@triton.jit
def _back(total, values, m_high, m_low, SPLIT: tl.constexpr):
    """Add [columns, points] times [points, slots] to [columns, slots]."""
    if SPLIT:
        high, low = _halves(values)
        crossed = tl.dot(high, m_low)
        crossed = tl.dot(low, m_high, acc=crossed)
        return tl.dot(high, m_high, acc=total + crossed * (1.0 / 2048.0))
    else:
        return tl.dot(values.to(m_high.dtype), m_high, acc=total)


@triton.jit
def _factored(
    q0, q1, q2, q3, x, x_base, x_row, scaled, y, y_base, y_row, there, matrix, slots, scale,
    K: tl.constexpr, C: tl.constexpr, POINTS: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add the product of two operands, the first scaled or not, to the four parts of a result."""
    WIDTH: tl.constexpr = 2 * N + 4 * W
    x0, x1, x2, x3, x0_, x1_, x2_, x3_, x_max = _load_parts(
        x, x_base, x_row, scaled, there, slots, scale, K, C, N, W, SPLIT
    )
    y0, y1, y2, y3, y0_, y1_, y2_, y3_, y_max = _load_parts(
        y, y_base, y_row, False, there, slots, scale, K, C, N, W, SPLIT
    )
    r0, r1, r2, r3 = _nothing(x_base.shape[0], N, W)
    for first in range(0, POINTS, BLOCK):
        point = first + tl.arange(0, BLOCK)
        ze, ze_ = _tiles(matrix, point, 0, POINTS, WIDTH, N, SPLIT)
        zo, zo_ = _tiles(matrix, point, N, POINTS, WIDTH, N, SPLIT)
        ce, ce_ = _tiles(matrix, point, 2 * N, POINTS, WIDTH, W, SPLIT)
        se, se_ = _tiles(matrix, point, 2 * N + W, POINTS, WIDTH, W, SPLIT)
        co, co_ = _tiles(matrix, point, 2 * N + 2 * W, POINTS, WIDTH, W, SPLIT)
        so, so_ = _tiles(matrix, point, 2 * N + 3 * W, POINTS, WIDTH, W, SPLIT)
        x_ze = _field(x0, x0_, ze, ze_, SPLIT)
        x_zo = _field(x1, x1_, zo, zo_, SPLIT)
        x_ce = _field(x2, x2_, ce, ce_, SPLIT)
        x_se = _field(x2, x2_, se, se_, SPLIT)
        x_co = _field(x3, x3_, co, co_, SPLIT)
        x_so = _field(x3, x3_, so, so_, SPLIT)
        y_ze = _field(y0, y0_, ze, ze_, SPLIT)
        y_zo = _field(y1, y1_, zo, zo_, SPLIT)
        y_ce = _field(y2, y2_, ce, ce_, SPLIT)
        y_se = _field(y2, y2_, se, se_, SPLIT)
        y_co = _field(y3, y3_, co, co_, SPLIT)
        y_so = _field(y3, y3_, so, so_, SPLIT)
        even = x_ze * y_ze + x_zo * y_zo + x_ce * y_ce + x_co * y_co + x_se * y_se + x_so * y_so
        odd = x_ze * y_zo + x_zo * y_ze + x_ce * y_co + x_co * y_ce + x_se * y_so + x_so * y_se
        r0 = _back(r0, even, ze, ze_, SPLIT)
        r1 = _back(r1, odd, zo, zo_, SPLIT)
        r2 = _back(r2, x_ze * y_ce + x_zo * y_co + x_ce * y_ze + x_co * y_zo, ce, ce_, SPLIT)
        r2 = _back(r2, x_ze * y_se + x_zo * y_so + x_se * y_ze + x_so * y_zo, se, se_, SPLIT)
        r3 = _back(r3, x_ze * y_co + x_zo * y_ce + x_ce * y_zo + x_co * y_ze, co, co_, SPLIT)
        r3 = _back(r3, x_ze * y_so + x_zo * y_se + x_se * y_zo + x_so * y_ze, so, so_, SPLIT)
    unit = (x_max * y_max)[:, None]
    return q0 + r0 * unit, q1 + r1 * unit, q2 + r2 * unit, q3 + r3 * unit


@triton.jit
def _nothing(COLUMNS: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    zero_n = tl.zeros([COLUMNS, N], tl.float32)
    zero_w = tl.zeros([COLUMNS, W], tl.float32)
    return zero_n, zero_n, zero_w, zero_w


@triton.jit
def _store_parts(
    out, base, row, there, slots, scale, scaled, q0, q1, q2, q3, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Write the four parts of a result, scaled or not."""
    p0, p1, p2, p3 = _parts(slots, N, W)
    t0, t1, t2, t3 = _scales(scale, scaled, N, W)
    _store(out, base, there, p0, row, q0 * t0, K, C)
    _store(out, base, there, p1, row, q1 * t1, K, C)
    _store(out, base, there, p2, row, q2 * t2, K, C)
    _store(out, base, there, p3, row, q3 * t3, K, C)


@specialise(aligned=("matrix", "slots", "scale"))
def factored_forward(
    left, right, out, matrix, slots, scale,
    columns: tl.int64,
    left_n: tl.int64, left_d: tl.int64, left_f: tl.int64,
    right_n: tl.int64, right_d: tl.int64, right_f: tl.int64,
    out_n: tl.int64, out_d: tl.int64, out_f: tl.int64,
    K: tl.constexpr, C: tl.constexpr, F: tl.constexpr, POINTS: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scale · (left · right)."""
    node, focus, channel, there = _columns(columns, C, F, COLUMNS)
    q0, q1, q2, q3 = _nothing(COLUMNS, N, W)
    q0, q1, q2, q3 = _factored(
        q0, q1, q2, q3, left, node * left_n + focus * left_f + channel, left_d, False,
        right, node * right_n + focus * right_f + channel, right_d, there, matrix, slots, scale,
        K, C, POINTS, N, W, BLOCK, SPLIT,
    )  # fmt: skip
    base = node * out_n + focus * out_f + channel
    _store_parts(out, base, out_d, there, slots, scale, True, q0, q1, q2, q3, K, C, N, W)


@specialise(aligned=("matrix", "slots", "scale"))
def factored_backward(
    grad, left, right, out_left, out_right, matrix, slots, scale,
    columns: tl.int64,
    grad_n: tl.int64, grad_d: tl.int64, grad_f: tl.int64,
    left_n: tl.int64, left_d: tl.int64, left_f: tl.int64,
    right_n: tl.int64, right_d: tl.int64, right_f: tl.int64,
    out_n: tl.int64, out_d: tl.int64, out_f: tl.int64,
    K: tl.constexpr, C: tl.constexpr, F: tl.constexpr, POINTS: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out_left = (scale · grad) · right and out_right = (scale · grad) · left, by the grid's second axis."""
    node, focus, channel, there = _columns(columns, C, F, COLUMNS)
    if tl.program_id(1) == 0:
        y, y_n, y_d, y_f = right, right_n, right_d, right_f
        out = out_left
    else:
        y, y_n, y_d, y_f = left, left_n, left_d, left_f
        out = out_right
    q0, q1, q2, q3 = _nothing(COLUMNS, N, W)
    q0, q1, q2, q3 = _factored(
        q0, q1, q2, q3, grad, node * grad_n + focus * grad_f + channel, grad_d, True,
        y, node * y_n + focus * y_f + channel, y_d, there, matrix, slots, scale,
        K, C, POINTS, N, W, BLOCK, SPLIT,
    )  # fmt: skip
    base = node * out_n + focus * out_f + channel
    _store_parts(out, base, out_d, there, slots, scale, False, q0, q1, q2, q3, K, C, N, W)


@specialise(aligned=("matrix", "slots", "scale"))
def factored_double_backward(
    grad_left, grad_right, grad, left, right, out_grad, out_left, out_right, matrix, slots, scale,
    columns: tl.int64,
    gl_n: tl.int64, gl_d: tl.int64, gl_f: tl.int64,
    gr_n: tl.int64, gr_d: tl.int64, gr_f: tl.int64,
    grad_n: tl.int64, grad_d: tl.int64, grad_f: tl.int64,
    left_n: tl.int64, left_d: tl.int64, left_f: tl.int64,
    right_n: tl.int64, right_d: tl.int64, right_f: tl.int64,
    out_n: tl.int64, out_d: tl.int64, out_f: tl.int64,
    K: tl.constexpr, C: tl.constexpr, F: tl.constexpr, POINTS: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
    SPLIT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one of three results, by the grid's second axis.

    out_grad = scale · (grad_left · right + left · grad_right), out_left = (scale · grad) · grad_right, and
    out_right = (scale · grad) · grad_left.
    """
    node, focus, channel, there = _columns(columns, C, F, COLUMNS)
    result = tl.program_id(1)
    if result == 0:
        out, terms = out_grad, 2
    elif result == 1:
        out, terms = out_left, 1
    else:
        out, terms = out_right, 1
    q0, q1, q2, q3 = _nothing(COLUMNS, N, W)
    for term in range(terms):
        if result == 0 and term == 0:
            x, x_n, x_d, x_f = grad_left, gl_n, gl_d, gl_f
            y, y_n, y_d, y_f = right, right_n, right_d, right_f
        elif result == 0:
            x, x_n, x_d, x_f = left, left_n, left_d, left_f
            y, y_n, y_d, y_f = grad_right, gr_n, gr_d, gr_f
        elif result == 1:
            x, x_n, x_d, x_f = grad, grad_n, grad_d, grad_f
            y, y_n, y_d, y_f = grad_right, gr_n, gr_d, gr_f
        else:
            x, x_n, x_d, x_f = grad, grad_n, grad_d, grad_f
            y, y_n, y_d, y_f = grad_left, gl_n, gl_d, gl_f
        q0, q1, q2, q3 = _factored(
            q0, q1, q2, q3, x, node * x_n + focus * x_f + channel, x_d, result != 0,
            y, node * y_n + focus * y_f + channel, y_d, there, matrix, slots, scale,
            K, C, POINTS, N, W, BLOCK, SPLIT,
        )  # fmt: skip
    base = node * out_n + focus * out_f + channel
    _store_parts(out, base, out_d, there, slots, scale, result == 0, q0, q1, q2, q3, K, C, N, W)


OPERANDS = (2, 3, 5)
KERNELS = {
    "dense": (dense_forward, dense_backward, dense_double_backward),
    "factored": (factored_forward, factored_backward, factored_double_backward),
}


@dataclass(frozen=True)
class Geometry:
    """What of a call is static: the form of the projectors, the operands' dtype, and the constants of the kernels."""

    form: str
    dtype: torch.dtype
    constants: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        focus: int,
        channels: int,
        n_frames: int,
        projector: Sequence[int],
        factors: Sequence[int] | None,
    ) -> Geometry:
        """Return the geometry of operands and projectors.

        Args:
            dtype: of the operands, float32 or bfloat16.
            focus: streams F.
            channels: C.
            n_frames: K.
            projector: (G, P), the shape of the large projectors.
            factors: points, width and slots of the small ones, or None.
        """
        constants = {"K": n_frames, "C": channels, "F": focus}
        if factors is None:
            points, slots = projector
            constants |= {"SLOTS": slots, "POINTS": points, "WIDTH": padded_width(slots)}
            return cls("dense", dtype, tuple(constants.items()))
        points, columns, slots = factors
        n, w = widths(slots, columns)
        constants |= {"POINTS": points, "N": n, "W": w, "SPLIT": dtype == torch.float32}
        return cls("factored", dtype, tuple(constants.items()))

    def kernel(self, order: int) -> Any:
        """Return the kernel of an order."""
        return KERNELS[self.form][order]

    def arguments(self, order: int) -> list[Argument]:
        """Return what is known of a kernel's pointers and numbers before there is data."""
        dtype = self.dtype
        tables: list[Argument] = [dtype, dtype]
        if self.form == "factored":
            tables = [torch.float16 if dtype == torch.float32 else dtype, torch.int32, torch.float32]
        return [dtype] * (OPERANDS[order] + order + 1) + tables + [int] * (1 + 3 * (OPERANDS[order] + 1))

    def candidates(self) -> tuple[Launch, ...]:
        """Return launches to try, best first."""
        if self.form == "factored":
            return FACTORED
        if self.dtype == torch.bfloat16:
            return DENSE_BFLOAT16
        return DENSE_FLOAT32 if torch.get_float32_matmul_precision() == "highest" else DENSE_TF32

    def fit_offline(self, order: int, capability: int, limit: int | None = None) -> Fit | None:
        """Return the launch of an order on a device that need not be there; see `launch.fit_offline`."""
        kernel, arguments, constants = self.kernel(order), self.arguments(order), dict(self.constants)
        return fit_offline(kernel, arguments, constants, self.candidates(), capability, limit)


def padded_width(slots: int) -> int:
    """Return the columns of dense projectors in memory: what a tile can have."""
    return max(16, triton.next_power_of_2(slots))


def _launch(columns: int, block: int, warps: int, stages: int, precision: str | None = None) -> Launch:
    blocks: list[tuple[str, int | str]] = [("COLUMNS", columns), ("BLOCK", block)]
    return Launch((*blocks, ("PRECISION", precision)) if precision else tuple(blocks), warps, stages)


# Measured on an H200 (docs/benchmarks.md). The first that fits is taken: later ones need less shared memory.
FACTORED = (_launch(16, 16, 2, 2), _launch(16, 16, 2, 1), _launch(16, 16, 4, 1))
DENSE_BFLOAT16 = (
    _launch(64, 32, 4, 2, "tf32"),  # PRECISION means nothing for bfloat16
    _launch(32, 32, 4, 2, "tf32"),
    _launch(16, 32, 4, 1, "tf32"),
    _launch(16, 16, 4, 1, "tf32"),
)
DENSE_FLOAT32 = (_launch(32, 32, 4, 1, "tf32x3"), _launch(16, 32, 4, 1, "tf32x3"), _launch(16, 16, 2, 1, "tf32x3"))
DENSE_TF32 = (_launch(32, 32, 4, 2, "tf32"), _launch(16, 32, 4, 1, "tf32"), _launch(16, 16, 2, 1, "tf32"))


def run_product(
    order: int,
    operands: Sequence[Tensor],
    projectors: tuple[Tensor, Tensor],
    factors: tuple[Tensor, Tensor, Tensor] | None,
    n_frames: int,
) -> tuple[Tensor, ...] | None:
    """Return the results of a kernel, or None where no launch of it fits the device.

    Args:
        order: 0, 1, 2 for forward, backward, second backward.
        operands: as the reference's function of that order takes them, (N, D, F, K C) each; any strides, but the last
            axis is copied unless it is contiguous.
        projectors: to and from the grid, (G, P) or padded to (G, `padded_width(P)`), in the operands' dtype.
        factors: None, or the matrix of `Factors` as `Factors.matrix_for` gives it, its slots and its scale.
        n_frames: K.
    """
    nodes, rows, focus, width = operands[0].shape
    # While a graph is traced, only the number of nodes is left open.
    rows, focus, width = int(rows), int(focus), int(width)
    dtype, device = operands[0].dtype, operands[0].device
    small = None
    if factors is not None:
        points, columns = factors[0].shape
        small = (int(points), int(columns) // (2 if dtype == torch.float32 else 1), int(factors[1].shape[0]))
    channels = width // n_frames
    large = (int(projectors[0].shape[0]), rows * n_frames)
    geometry = Geometry.of(dtype, focus, channels, n_frames, large, small)
    kernel, constants = geometry.kernel(order), dict(geometry.constants)
    launch = choose(kernel, geometry.arguments(order), constants, geometry.candidates(), device)
    if launch is None:
        warn_reference(kernel, constants, dtype, device)
        return None
    operands = [x if x.stride(-1) == 1 else x.contiguous() for x in operands]
    results = tuple(operands[0].new_empty(operands[0].shape) for _ in range(order + 1))
    if factors is None:
        padding = constants["WIDTH"] - int(projectors[0].shape[1])
        tables = tuple(torch.nn.functional.pad(x, (0, padding)) for x in projectors) if padding else projectors
    else:
        tables = factors
    columns = nodes * focus * channels
    strides = [x.stride(axis) for x in (*operands, results[0]) for axis in (0, 1, 2)]
    block = dict(launch.blocks)["COLUMNS"]
    programs = ((columns + block - 1) // block, order + 1)
    run(kernel, programs, [*operands, *results, *tables, columns, *strides], constants, launch, device)
    return results
