"""Turning features of atoms into the frames of edges and back, in plain torch: four functions and their derivatives.

    gather    y[e, r, c] = w[e, f] Σ_m D[e, r, m] x[s_e, m, c]
    scatter   x[a, m, c] = Σ_{e: s_e = a} w[e, f] Σ_r D[e, r, m] y[e, r, c]
    outer     D[e, r, m] = Σ_c w[e, f] y[e, r, c] x[s_e, m, c]
    share     w[e, f]    = Σ_{r, c of f} y[e, r, c] Σ_m D[e, r, m] x[s_e, m, c]

are the four derivatives of one number, Σ_{e, r, m, c} w D x y: each is linear in its three arguments, and the
derivative by one of them is one of the other three functions. So derivatives of any order are these four again.

D is block diagonal in the degree l and has only the rows |m'| ≤ order of each block. It is stored as one row of numbers
an edge: block after block, in each m' from -min(order, l) up, and in each of these m from -l up. Rows r of y are in the
reduced layout: m' = 0, then -1, +1, -2, …, each from l = |m'| up. The channels c lie in streams f. Without weights,
w = 1.

Everything is computed in float32 at least and rounded once, at the end.
"""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mlff.kernels.silu_reference import exact

Coefficients = Float[Tensor, "E n"]
Atoms = Float[Tensor, "A M W"]
Rows = Float[Tensor, "E R F C"]
Weights = Float[Tensor, "E F"]
Index = Int[Tensor, "E"]


def block_sizes(degree: int, order: int) -> list[tuple[int, int]]:
    """Return rows and columns of D's block of each degree."""
    return [(2 * min(order, l) + 1, 2 * l + 1) for l in range(degree + 1)]


def count(degree: int, order: int) -> int:
    """Return how many numbers D has for an edge."""
    return sum(rows * columns for rows, columns in block_sizes(degree, order))


@functools.cache
def _reduced_places(degree: int, order: int) -> tuple[int, ...]:
    """Where in the reduced layout the rows stand, taken degree after degree with m' ascending."""
    starts, rows = {}, 0
    for m in range(min(order, degree) + 1):
        for sign in (-1, 1) if m else (1,):
            starts[sign * m] = rows
            rows += degree + 1 - m
    return tuple(starts[m] + l - abs(m) for l in range(degree + 1) for m in range(-min(order, l), min(order, l) + 1))


def gather(
    coefficients: Coefficients,
    x: Atoms,
    weights: Weights | None,
    index: Index,
    degree: int,
    order: int,
    streams: int,
    dtype: torch.dtype,
) -> Rows:
    """Return what each edge sees of its atom, with the streams first in memory."""
    sent = exact(x).index_select(0, index)
    pieces = []
    for l, block in enumerate(_blocks(coefficients, degree, order)):
        pieces.append(block @ sent[:, l * l : (l + 1) ** 2])
    y = _unflatten(_to_reduced(torch.cat(pieces, 1), degree, order), streams)
    y = y if weights is None else y * exact(weights)[:, None, :, None]
    return y.movedim(2, 0).to(dtype, copy=True).contiguous().movedim(0, 2)


def scatter(
    coefficients: Coefficients,
    y: Rows,
    weights: Weights | None,
    index: Index,
    atoms: int,
    degree: int,
    order: int,
    dtype: torch.dtype,
) -> Atoms:
    """Return the sums over the edges of each atom."""
    y = exact(y) if weights is None else exact(y) * exact(weights)[:, None, :, None]
    parts = _by_degree(y.flatten(2), degree, order)
    turned = [
        block.transpose(1, 2) @ part for block, part in zip(_blocks(coefficients, degree, order), parts, strict=True)
    ]
    values = torch.cat(turned, 1)
    return values.new_zeros(atoms, *values.shape[1:]).index_add(0, index, values).to(dtype)


def outer(
    x: Atoms, y: Rows, weights: Weights | None, index: Index, degree: int, order: int, dtype: torch.dtype
) -> Coefficients:
    """Return the products of the two sides of each edge."""
    sent = exact(x).index_select(0, index)
    y = exact(y) if weights is None else exact(y) * exact(weights)[:, None, :, None]
    parts = _by_degree(y.flatten(2), degree, order)
    blocks = [part @ sent[:, l * l : (l + 1) ** 2].transpose(1, 2) for l, part in enumerate(parts)]
    return torch.cat([block.flatten(1) for block in blocks], 1).to(dtype)


def share(
    coefficients: Coefficients, x: Atoms, y: Rows, index: Index, degree: int, order: int, dtype: torch.dtype
) -> Weights:
    """Return what each stream of an edge contributes."""
    turned = gather(coefficients, x, None, index, degree, order, y.shape[2], exact(x).dtype)
    return (turned * exact(y)).sum((1, 3)).to(dtype)


def _blocks(coefficients: Coefficients, degree: int, order: int) -> list[Tensor]:
    sizes = block_sizes(degree, order)
    parts = exact(coefficients).split([rows * columns for rows, columns in sizes], 1)
    return [part.unflatten(1, size) for part, size in zip(parts, sizes, strict=True)]


def _to_reduced(rows: Tensor, degree: int, order: int) -> Tensor:
    places = _reduced_places(degree, order)
    return rows[:, sorted(range(len(places)), key=places.__getitem__)]


def _by_degree(y: Tensor, degree: int, order: int) -> tuple[Tensor, ...]:
    return y[:, list(_reduced_places(degree, order))].split([rows for rows, _ in block_sizes(degree, order)], 1)


def _unflatten(y: Tensor, streams: int) -> Tensor:
    return y.unflatten(-1, (streams, y.shape[-1] // streams))
