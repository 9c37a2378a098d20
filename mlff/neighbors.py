"""Neighbours within a cutoff: positions, cell, pbc, cutoff -> senders, receivers, shifts.

Every pair gives two edges, one for each direction, and every periodic image its own, an atom's own images included:

    r = positions[sender] + shift @ cell - positions[receiver]        Å, |r| < cutoff

The formula holds for the positions as given, also where atoms lie many cells away from the origin cell. Work and memory
grow with the number of atoms and edges, not with their square and not with the volume of empty space.

The search itself is done by vesin (https://github.com/Luthaf/vesin); this module fixes the conventions, completes cells
that are open along some axis, and answers for wrong input.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import vesin
from jaxtyping import Bool, Float, Int

# Up to here all pairs are looked at directly where one image of each suffices: 64² differences take 0.1 ms, while
# laying a grid over two atoms in a 2000 Å cell takes 15 ms (vesin 0.6.2, one core).
_FEW_ATOMS = 64

# vesin's threads cost more than they bring below this, and a data loader's workers are parallel already.
_MANY_ATOMS = 20_000

# A receiver would see more than a million images of each atom; real cells give at most a few thousand.
_MOST_IMAGES = 1e6

# Two atoms closer than this have no direction between them, so a model's forces would be NaN.
SAME_PLACE = 1e-6
"""Å"""


def neighbor_list(
    positions: Float[np.ndarray, "A 3"],
    cell: Float[np.ndarray, "3 3"],
    pbc: Bool[np.ndarray, "3"] | Sequence[bool],
    cutoff: float,
) -> tuple[Int[np.ndarray, "E"], Int[np.ndarray, "E"], Float[np.ndarray, "E 3"]]:
    """Return all edges shorter than the cutoff: senders, receivers and shifts.

    Shifts are whole cells, zero along axes that are not periodic, such that
    r = positions[sender] + shift @ cell - positions[receiver]. Edges are sorted by receiver, then sender, then shift.

    Args:
        positions: Å, anywhere in space.
        cell: Å, rows are lattice vectors; the rows of axes that are not periodic may hold anything, also zeros.
        pbc: which axes repeat.
        cutoff: Å, positive.

    Returns:
        senders (int64), receivers (int64), shifts (float64).

    Raises:
        ValueError: positions or periodic cell vectors are not finite, periodic vectors are zero or parallel or so short
            that the cutoff spans millions of images, two atoms are at the same place, or a shape is wrong.
    """
    positions, cell, periodic = _checked(positions, cell, pbc, cutoff)
    if len(positions) == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3))
    if not periodic.any():
        cell, heights = np.eye(3), np.full(3, np.inf)
    else:
        cell = complete_cell(cell, periodic)
        heights = 1.0 / np.linalg.norm(np.linalg.inv(cell), axis=0)  # between opposite faces of the cell, Å
    images = np.prod(2.0 * np.ceil(cutoff / heights[periodic]) + 1.0)
    if images > _MOST_IMAGES:
        raise ValueError(
            f"the periodic cell {cell[periodic].tolist()} Å is so small that a cutoff of {cutoff} Å spans {images:.0e} "
            "images of each atom. Lattice vectors are expected in Å: check the cell's units."
        )
    if len(positions) <= _FEW_ATOMS and np.all(heights[periodic] >= 2.0 * cutoff):
        senders, receivers, shifts, lengths = _all_pairs(positions, cell, periodic, cutoff)
    else:
        senders, receivers, shifts, lengths = _grid(positions, cell, periodic, cutoff)
    if len(lengths) and lengths.min() < SAME_PLACE:
        edge = int(lengths.argmin())
        one, other = sorted((int(receivers[edge]), int(senders[edge])))
        where = f"at {positions[one].tolist()} Å" if not shifts[edge].any() else "through a periodic image"
        raise ValueError(
            f"atoms {one} and {other} (counted from 0) are at the same place ({where}). "
            "Two atoms need different positions: remove the duplicate."
        )
    return senders, receivers, shifts


def complete_cell(cell: Float[np.ndarray, "3 3"], pbc: Bool[np.ndarray, "3"]) -> Float[np.ndarray, "3 3"]:
    """Return the cell with the rows of open axes replaced by unit vectors normal to the periodic rows and each other.

    Such a cell can always be inverted, whatever stood in the open rows (slabs and wires often have zeros there), and no
    distance depends on the replaced rows, because shifts along them are zero.

    Raises:
        ValueError: the periodic rows are zero or linearly dependent.
    """
    periodic = np.asarray(pbc, bool)
    rows = np.asarray(cell, np.float64)[periodic]
    lengths = np.linalg.norm(rows, axis=1)
    # Singular values of the directions: 1 each when orthogonal, 0 when a row lies in the span of the others.
    directions = np.linalg.svd(rows / np.where(lengths > 0.0, lengths, 1.0)[:, None], full_matrices=True)
    if len(rows) and (lengths.min() <= 0.0 or directions[1].min() < 1e-10):
        raise ValueError(
            f"the structure is periodic along {_axes(periodic)}, but the lattice vectors there are {rows.tolist()} Å, "
            "which are zero or linearly dependent. Give lattice vectors that span a cell, or set pbc to False."
        )
    completed = np.array(cell, np.float64)
    completed[~periodic] = directions[2][len(rows) :]
    return completed


def _checked(
    positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray | Sequence[bool], cutoff: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions = np.ascontiguousarray(positions, np.float64)
    cell = np.asarray(cell, np.float64)
    periodic = np.asarray(pbc, bool)
    if positions.ndim != 2 or positions.shape[1] != 3:
        raise ValueError(f"positions need the shape (number of atoms, 3), not {positions.shape}.")
    if cell.shape != (3, 3):
        raise ValueError(f"the cell needs the shape (3, 3) with lattice vectors as rows, not {cell.shape}.")
    if periodic.shape != (3,):
        raise ValueError(f"pbc needs three values, one for each axis, not the shape {periodic.shape}.")
    if not (np.isfinite(cutoff) and cutoff > 0.0):
        raise ValueError(f"the cutoff needs to be a positive number of Å, not {cutoff}.")
    strange = ~np.isfinite(positions).all(axis=1)
    if strange.any():
        atom = int(strange.argmax())
        raise ValueError(
            f"the position of atom {atom} (counted from 0) is {positions[atom].tolist()} Å; every coordinate needs to "
            f"be a finite number ({int(strange.sum())} of {len(positions)} atoms are affected)."
        )
    if not np.isfinite(cell[periodic]).all():
        raise ValueError(f"the lattice vectors {cell.tolist()} Å are not finite; check the structure's cell.")
    cell = np.where(periodic[:, None], cell, 0.0)
    return positions, cell, periodic


def _all_pairs(
    positions: np.ndarray, cell: np.ndarray, periodic: np.ndarray, cutoff: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the edges among few atoms, where the cell is at least two cutoffs high along each periodic axis.

    A vector shorter than the cutoff then has fractional coordinates within ±1/2, so that rounding finds its image.
    """
    vectors = positions[None, :, :] - positions[:, None, :]  # [receiver, sender, 3]
    if periodic.any():
        shifts = np.where(periodic, -np.rint(vectors @ np.linalg.inv(cell)), 0.0)
        vectors += shifts @ cell
    else:
        shifts = np.zeros_like(vectors)
    lengths = np.sqrt(np.einsum("rsi,rsi->rs", vectors, vectors))
    near = lengths < cutoff
    np.fill_diagonal(near, False)
    receivers, senders = np.nonzero(near)  # in the order that was promised
    return senders, receivers, shifts[near], lengths[near]


def _grid(
    positions: np.ndarray, cell: np.ndarray, periodic: np.ndarray, cutoff: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Find the edges among any number of atoms in any cell."""
    search = vesin.NeighborList(
        cutoff=cutoff, full_list=True, sorted=False, n_threads=1 if len(positions) < _MANY_ATOMS else 0
    )
    # vesin's vector is r_j + S @ cell - r_i: its i is our receiver.
    receivers, senders, shifts, lengths = search.compute(positions, cell, periodic, "ijSd")
    receivers, senders, shifts = receivers.astype(np.int64), senders.astype(np.int64), shifts.astype(np.int64)
    order = _order(receivers, senders, shifts, len(positions))
    return senders[order], receivers[order], shifts[order].astype(np.float64), lengths[order]


def _order(receivers: np.ndarray, senders: np.ndarray, shifts: np.ndarray, n_atoms: int) -> np.ndarray:
    """Sort by receiver, sender, shift: one integer for each edge where it fits into 63 bits, which is much faster."""
    if len(receivers) == 0:
        return np.zeros(0, np.int64)
    low, high = shifts.min(axis=0), shifts.max(axis=0)
    spans = [int(span) for span in high - low + 1]
    if n_atoms**2 * spans[0] * spans[1] * spans[2] >= 2**63:
        return np.lexsort((shifts[:, 2], shifts[:, 1], shifts[:, 0], senders, receivers))
    key = receivers * n_atoms + senders
    for axis in range(3):
        key = key * spans[axis] + (shifts[:, axis] - low[axis])
    return np.argsort(key)


def _axes(periodic: np.ndarray) -> str:
    return ", ".join(itertools.compress("abc", periodic))
