"""The gated activation of an edge's features in plain torch, and its first and second backward.

    y_0 = silu(x_0)          y_r = x_r s_l          s_l = σ(g_l), l the degree of row r; z is added where there is one

with rows in the reduced layout: m = 0, then -1, +1, -2, … up to an order, each from l = |m| up. The rows of m = 0 come
in one tensor and all others in another, as the matrix products that make them leave them. With t = 1 - s,

    grad_x_0 = grad_0 silu'(x_0)      grad_x_r = grad_r s_l      grad_g_l = Σ_r grad_r x_r s_l t_l

and with cotangents a of grad_x and b of grad_g:

    of grad:    a_0 silu'(x_0)              a_r s_l + b_l x_r s_l t_l
    of x:       a_0 grad_0 silu''(x_0)      b_l grad_r s_l t_l
    of g:       s_l t_l Σ_r a_r grad_r + b_l s_l t_l (t_l - s_l) Σ_r grad_r x_r

Half-precision operands are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mlff.kernels.silu_reference import exact, first, second

Rows = Float[Tensor, "*n R C"]
Gates = Float[Tensor, "*n L C"]


def reduced_rows(values: Tensor, degree: int, order: int, dim: int, lowest: int = 0) -> Tensor:
    """Return values by degree, `lowest` to `degree` along `dim`, as rows of the reduced layout from that degree on.

    The same as an `index_select`, but a few long copies, which a GPU makes faster, and the sum of a few in reverse.
    """
    starts = [max(m, lowest) for m in range(min(order, degree) + 1)]
    cuts = sorted(set(starts))
    parts = values.split([end - start for start, end in zip(cuts, [*cuts[1:], degree + 1], strict=True)], dim)
    pieces = []
    for m, start in enumerate(starts):
        pieces += parts[cuts.index(start) :] * (2 if m else 1)
    return torch.cat(pieces, dim) if len(pieces) > 1 else values


def sums_by_degree(rows: Tensor, degree: int, order: int) -> Tensor:
    """Return for each degree from 1 the sum of its rows, [*n, R - 1, C] without that of l = 0 -> [*n, L, C]."""
    starts = [1, *(m for m in range(1, min(order, degree) + 1) for _ in range(2))]
    parts = rows.split([degree + 1 - start for start in starts], -2)
    return sum((functional.pad(part, (0, 0, start - 1, 0)) for start, part in zip(starts, parts, strict=True)), start=0)  # type: ignore[return-value]


def forward(zero: Rows, others: Rows, gates: Gates, residual: Rows | None, degree: int, order: int) -> Tensor:
    """Return the activated rows, plus the residual if there is one, in its dtype or else in that of x."""
    (x_0, x_r), factors = _split(zero, others), _rows(torch.sigmoid(exact(gates)), degree, order)
    y = torch.cat((functional.silu(x_0), x_r * factors), -2)
    return y.to(zero.dtype) if residual is None else (exact(residual) + y).to(residual.dtype)


def backward(
    grad: Rows, zero: Rows, others: Rows, gates: Gates, degree: int, order: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, in its two parts, and of the gates; that of a residual is `grad` itself."""
    (g_0, g), (x_0, x_r) = _split(grad), _split(zero, others)
    s, slope, _ = _sigmoids(gates)
    of_x = torch.cat((g_0 * first(x_0), g * _rows(s, degree, order)), -2).to(zero.dtype)
    of_gates = (sums_by_degree(g * x_r, degree, order) * slope).to(gates.dtype)
    return (*_parts(of_x, degree), of_gates)


def double_backward(
    grad_grad_zero: Rows,
    grad_grad_others: Rows,
    grad_grad_gates: Gates,
    grad: Rows,
    zero: Rows,
    others: Rows,
    gates: Gates,
    degree: int,
    order: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of grad, x in its two parts, and the gates, given those of the results of `backward`."""
    (a_0, a), (g_0, g), (x_0, x_r) = _split(grad_grad_zero, grad_grad_others), _split(grad), _split(zero, others)
    b = exact(grad_grad_gates)
    s, slope, bend = _sigmoids(gates)
    turned = _rows(b * slope, degree, order)
    of_grad = torch.cat((a_0 * first(x_0), a * _rows(s, degree, order) + turned * x_r), -2)
    of_x = torch.cat((a_0 * g_0 * second(x_0), turned * g), -2).to(zero.dtype)
    of_gates = sums_by_degree(a * g, degree, order) * slope + b * bend * sums_by_degree(g * x_r, degree, order)
    return (of_grad.to(grad.dtype), *_parts(of_x, degree), of_gates.to(gates.dtype))


def _split(*parts: Rows) -> tuple[Tensor, Tensor]:
    """The row of l = 0 and all others, of rows in one or two parts."""
    rows = exact(parts[0] if len(parts) == 1 else torch.cat(parts, -2))
    scalars, rest = rows.split([1, rows.shape[-2] - 1], -2)
    return scalars, rest


def _parts(rows: Rows, degree: int) -> tuple[Tensor, Tensor]:
    zero, others = rows.split([degree + 1, rows.shape[-2] - degree - 1], -2)
    return zero.clone(), others.clone()  # an operator's results share no memory


def _rows(values: Tensor, degree: int, order: int) -> Tensor:
    return reduced_rows(values, degree, order, -2, lowest=1)


def _sigmoids(gates: Gates) -> tuple[Tensor, Tensor, Tensor]:
    """σ and its first and second derivative."""
    s, t = torch.sigmoid(exact(gates)), torch.sigmoid(-exact(gates))
    return s, s * t, s * t * (t - s)
