"""What a data set says before anything is trained: reference energies of elements, and how many neighbours atoms have.

The energy of a structure is mostly a sum over its atoms of a constant for each element. These reference energies are
fitted by least squares over all structures and taken off, so that a network learns only what binding adds.

    sum_e count[s, e] * reference[e] = energy[s]        for every structure s, in the least-squares sense

Where compositions do not fix every element (a data set of water alone knows H2O, not H and O), many solutions are
equally good. Taken is the one nearest to a starting point: to the reference energies of the pretrained model when
fine-tuning, to zero from scratch, which is the minimum-norm solution. What the data fix is the same for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from mlff.data.read import Dataset
from mlff.elements import SYMBOLS

# Compositions are whole numbers: a singular value of a direction that the data know is not below one part in 1e6 of the
# largest even when a single structure of 1e6 has that composition, while rounding leaves 1e-13.
_RANK_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ReferenceEnergies:
    """Reference energies before and after a fit, in eV, one for each column of the compositions."""

    before: Float[np.ndarray, "E"]
    after: Float[np.ndarray, "E"]
    determined: Bool[np.ndarray, "E"]  # whether the data alone fix this element's value
    error: Float[np.ndarray, "E"]  # standard error of what is determined, eV; NaN elsewhere, and without spare energies
    present: Bool[np.ndarray, "E"]  # whether the element occurs
    rank: int  # independent compositions
    residual: float  # root mean square of what is left, eV per structure; NaN without energies
    warning: str  # about elements that occur but are not determined; "" when there are none

    @property
    def shift(self) -> Float[np.ndarray, "E"]:
        """Change in eV."""
        return self.after - self.before


def reference_energies(
    compositions: Float[np.ndarray, "S E"],
    energies: Float[np.ndarray, "S"],
    before: Float[np.ndarray, "E"] | None = None,
    elements: Sequence[int] | None = None,
) -> ReferenceEnergies:
    """Fit the reference energies of elements to total energies, as near as possible to a starting point.

    Among all least-squares solutions the one with the smallest sum of squared changes is returned; elements that do not
    occur keep their value. Standard errors are those of linear regression, sqrt(s² diag (XᵀX)⁺) with s² the sum of
    squared residuals over (structures - rank): they take the residuals of structures for independent, which frames of
    one trajectory are not.

    Args:
        compositions: how many atoms of each element each structure has.
        energies: total energies in eV, or what another model leaves of them; NaN = unknown, left out.
        before: starting point in eV; None = zeros.
        elements: atomic numbers of the columns, to name them in the warning.

    Raises:
        ValueError: shapes do not agree, a number is infinite, or a composition is not of whole numbers.
    """
    compositions = np.asarray(compositions, dtype=np.float64)
    energies = np.asarray(energies, dtype=np.float64)
    columns = compositions.shape[1] if compositions.ndim == 2 else -1
    start = np.zeros(columns) if before is None else np.array(before, dtype=np.float64)
    if columns < 0 or energies.shape != compositions.shape[:1] or start.shape != (columns,):
        raise ValueError(
            "expected compositions (structures, elements), energies (structures) and reference energies (elements); "
            f"got the shapes {compositions.shape}, {energies.shape} and {start.shape}."
        )
    if np.isinf(energies).any() or not np.isfinite(compositions).all() or not np.isfinite(start).all():
        raise ValueError("energies and starting reference energies must be finite (NaN marks a missing energy).")
    if not np.array_equal(compositions, np.rint(compositions)):
        raise ValueError("compositions are numbers of atoms, and energies those of whole structures, not per atom.")
    known = np.isfinite(energies)
    counts, remaining = compositions[known], energies[known] - compositions[known] @ start
    present = np.asarray(counts.any(axis=0))
    left, sizes, directions = np.linalg.svd(counts[:, present], full_matrices=False)
    kept = sizes > _RANK_TOLERANCE * sizes.max(initial=0.0)
    shift = np.zeros(columns)
    shift[present] = directions[kept].T @ ((left[:, kept].T @ remaining) / sizes[kept])
    determined = np.zeros(columns, dtype=bool)
    # An element is fixed when its axis lies in the space of compositions, that is, when its projection has length one.
    determined[present] = (directions[kept] ** 2).sum(axis=0) > 1.0 - 1e-6
    spare = int(known.sum() - kept.sum())
    error = np.full(columns, np.nan)
    if spare > 0:
        variances = (
            ((remaining - counts @ shift) ** 2).sum() / spare * ((directions / sizes[:, None])[kept] ** 2).sum(0)
        )
        error[present] = np.where(determined[present], np.sqrt(variances), np.nan)
    residual = float(np.sqrt(np.mean((remaining - counts @ shift) ** 2))) if known.any() else float("nan")
    free = present & ~determined
    return ReferenceEnergies(
        before=start,
        after=start + shift,
        determined=determined,
        error=error,
        present=present,
        rank=int(kept.sum()),
        residual=residual,
        warning=_warning(counts[:, free], np.flatnonzero(free), elements, int(kept.sum()), before is not None),
    )


def mean_neighbors(dataset: Dataset) -> float:
    """Return the mean number of neighbours of an atom within the data set's cutoff."""
    return float(dataset.n_edges().sum() / max(1, dataset.n_atoms.sum()))


def table(fitted: ReferenceEnergies, elements: Sequence[int]) -> str:
    """Return a printable table of the elements that occur: before, after and shift in eV, and whether data fix them."""
    lines = [f"{'element':8s}{'before eV':>16s}{'after eV':>16s}{'shift eV':>14s}  determined"]
    for column in np.flatnonzero(fitted.present).tolist():
        lines.append(
            f"{SYMBOLS[elements[column]]:8s}{fitted.before[column]:16.6f}{fitted.after[column]:16.6f}"
            f"{fitted.shift[column]:14.6f}  {'yes' if fitted.determined[column] else 'no'}"
        )
    return "\n".join(lines)


def _warning(
    counts: np.ndarray, columns: np.ndarray, elements: Sequence[int] | None, rank: int, from_start: bool
) -> str:
    """Say which elements are open; `counts` are their compositions, `columns` their places among all."""
    if not len(columns):
        return ""
    names = [SYMBOLS[elements[column]] if elements is not None else f"element {column}" for column in columns.tolist()]
    nearest = "the values nearest to those before" if from_start else "the values with the smallest sum of squares"
    return (
        f"The compositions do not determine the reference energies of {', '.join(names)} one by one (rank {rank} of "
        f"all compositions): {'; '.join(_tied(counts, names))}. Taken are {nearest}. Total energies are fitted all the "
        "same; those of structures with other ratios of these elements rest on the starting values. Isolated atoms "
        "among the structures would fix them."
    )


def _tied(counts: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return how the elements hang together: each group whose reference energies can only be traded with each other."""
    distinct = np.unique(counts[counts.any(axis=1)], axis=0)
    _, sizes, directions = np.linalg.svd(distinct, full_matrices=True)
    known = int((sizes > _RANK_TOLERANCE * sizes.max(initial=0.0)).sum())
    trades = directions[known:].T @ directions[known:]  # projects onto the changes that no total energy feels
    left, said = set(range(len(names))), []
    while left:
        group: set[int] = set()
        fresh = {min(left)}
        while fresh:
            group |= fresh
            fresh = {other for one in fresh for other in left - group if abs(trades[one, other]) > 1e-6}
        left -= group
        members = sorted(group)
        part = np.unique(distinct[:, members], axis=0)
        part = part[part.any(axis=1)].astype(np.int64)
        ratio = part[0] // math.gcd(*part[0].tolist())
        together = ", ".join(names[member] for member in members[:-1]) + f" and {names[members[-1]]}"
        if np.array_equal(part * ratio[0], np.outer(part[:, 0], ratio)):
            said.append(f"{together} occur only in the ratio {' : '.join(map(str, ratio.tolist()))}")
        else:
            said.append(f"{together} occur only in combinations that leave them open")
    return said
