"""Mixing degrees of equal m by a kernel of each edge, in plain torch: three functions and their derivatives.

    mix      y[e, i', ±m, c] = Σ_q B[q, c] Σ_i K_m[e, i, i', q] x[e, i, ±m, c]
    kernels  K_m[e, i, j, q] = Σ_c B[q, c] Σ_± a[e, i, ±m, c] b[e, j, ±m, c]
    basis    B[q, c]         = Σ_{e, m, ±, i, j} K_m[e, i, j, q] a[e, i, ±m, c] b[e, j, ±m, c]

with degrees i, j from m up. They are the derivatives of one number, Σ B K a b, by one of its arguments each; that by a
is `mix` with i and i' exchanged ("transposed"). So derivatives of any order are these three again.

K is stored as one row an edge: m after m, in each i, then j; the rank q comes last. Rows are in the reduced layout:
m = 0, then -1, +1, -2, …, each from l = |m| up; +m and -m share a kernel. The channels lie in streams, [E, R, F, C]; B
has all of them, [rank, F C].

Everything is computed in float32 at least and rounded once, at the end.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mlff.kernels.silu_reference import exact

Kernels = Float[Tensor, "E n q"]
Basis = Float[Tensor, "q W"]
Rows = Float[Tensor, "E R F C"]


def count(degree: int, order: int) -> int:
    """Return how many entries the kernels of an edge have, each of the rank."""
    return sum((degree + 1 - m) ** 2 for m in range(min(order, degree) + 1))


def rows(degree: int, order: int) -> int:
    """Return how many rows the reduced layout has."""
    return sum((degree + 1 - m) * (2 if m else 1) for m in range(min(order, degree) + 1))


def mix(kernels: Kernels, basis: Basis, x: Rows, degree: int, order: int, transposed: bool, dtype: torch.dtype) -> Rows:
    """Return the mixed rows, with the streams first in memory."""
    pieces = []
    for kernel, signs in zip(_by_order(kernels, degree, order), _rows(x, degree, order), strict=True):
        for sign in signs:
            left, right = ("j", "i") if transposed else ("i", "j")
            pieces.append(torch.einsum(f"eijq,qfc,e{left}fc->e{right}fc", kernel, _streams(basis, x), sign))
    y = torch.cat(pieces, 1)
    return y.movedim(2, 0).to(dtype, copy=True).contiguous().movedim(0, 2)


def kernels(basis: Basis, a: Rows, b: Rows, degree: int, order: int, dtype: torch.dtype) -> Kernels:
    """Return the kernels' entries."""
    pieces = []
    for left, right in zip(_rows(a, degree, order), _rows(b, degree, order), strict=True):
        entry = sum(
            torch.einsum("qfc,eifc,ejfc->eijq", _streams(basis, a), one, other)
            for one, other in zip(left, right, strict=True)
        )
        assert isinstance(entry, Tensor)
        pieces.append(entry.flatten(1, 2))
    return torch.cat(pieces, 1).to(dtype)


def basis(kernels: Kernels, a: Rows, b: Rows, degree: int, order: int, dtype: torch.dtype) -> Basis:
    """Return the sums over edges and entries."""
    total = exact(a).new_zeros(kernels.shape[2], *a.shape[2:])
    parts = zip(_by_order(kernels, degree, order), _rows(a, degree, order), _rows(b, degree, order), strict=True)
    for kernel, left, right in parts:
        for one, other in zip(left, right, strict=True):
            total = total + torch.einsum("eijq,eifc,ejfc->qfc", kernel, one, other)
    return total.flatten(1).to(dtype)


def _streams(basis: Basis, x: Rows) -> Tensor:
    return exact(basis).unflatten(1, tuple(x.shape[2:]))


def _by_order(kernels: Kernels, degree: int, order: int) -> list[Tensor]:
    sizes = [degree + 1 - m for m in range(min(order, degree) + 1)]
    parts = exact(kernels).split([n * n for n in sizes], 1)
    return [part.unflatten(1, (n, n)) for part, n in zip(parts, sizes, strict=True)]


def _rows(x: Rows, degree: int, order: int) -> list[list[Tensor]]:
    """Rows of each m: one tensor for m = 0, two for others."""
    signs = [1 if m == 0 else 2 for m in range(min(order, degree) + 1)]
    parts = iter(exact(x).split([degree + 1 - m for m, n in enumerate(signs) for _ in range(n)], 1))
    return [[next(parts) for _ in range(n)] for n in signs]
