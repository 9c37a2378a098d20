"""Elements that a trained model never saw: a row for each in its tables of elements, and how these rows begin.

A model knows its elements by the rows of a few tables (their embedding, that of the environment, those of spins);
everything else is shared. An added element begins with the mean of the rows of its own group of the periodic table,
or of all rows where the model knows nothing of that group. No known element changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mlff.elements import SYMBOLS, atomic_number, group, names
from mlff.sezm.potential import SeZM


def extended(potential: SeZM, symbols: Iterable[str]) -> SeZM:
    """Return a model that also knows some more elements, after its own; energies of known elements are the same.

    Reference energies of the added elements are zero.

    Raises:
        ValueError: an element is unknown to chemistry, named twice, or known to the model already.
    """
    added = tuple(atomic_number(symbol) for symbol in symbols)
    known = [number for number in added if number in potential.elements]
    if known:
        raise ValueError(
            f"elements.add: this model knows {names(known)} already; leave {'it' if len(known) == 1 else 'them'} out."
        )
    larger = SeZM(potential.options, (*potential.elements, *added), dtype=potential.dtype)
    old, new = potential.state_dict(), larger.state_dict()
    count = len(potential.elements)
    with torch.no_grad():
        for name, values in old.items():
            if new[name].shape == values.shape:
                new[name].copy_(values)
                continue
            new[name][:count].copy_(values)
            for row, number in enumerate(added, start=count):
                new[name][row] = 0.0 if name == "reference_energies" else _relatives(potential, number, values)
    return larger.to(potential.types.weight.device).train(potential.training)


def _relatives(potential: SeZM, number: int, rows: Tensor) -> Tensor:
    same = [place for place, other in enumerate(potential.elements) if group(other) == group(number)]
    return (rows[same] if same else rows).mean(0)


def train_rows(potential: SeZM, symbols: Iterable[str]) -> None:
    """Let the rows of added elements train, in tables that are frozen otherwise; all other rows stay as they are.

    The gradient of a known row is zero. That holds a row still because tables are on the `adam` route, which has no
    weight decay. Call this when the model is on its device: the mask is made there.
    """
    rows = [potential.elements.index(atomic_number(symbol)) for symbol in symbols]
    for table in tables(potential):
        if rows and not table.requires_grad:
            mask = torch.zeros_like(table)
            mask[rows] = 1.0
            table.requires_grad_(True)
            table.register_hook(mask.mul)


def tables(potential: SeZM) -> list[nn.Parameter]:
    """Return the parameters that have a row for each element."""
    found = [potential.types.weight]
    if potential.environment is not None:
        found.append(potential.environment.types.weight)
    if potential.spin is not None:
        found += [potential.spin.own, potential.spin.neighbour]
    return found


def describe(symbols: Iterable[str], before: Iterable[int]) -> str:
    """Return a line that says which elements were added, and from which known ones each begins."""
    before = tuple(before)
    parts = []
    for symbol in symbols:
        same = [number for number in before if group(number) == group(atomic_number(symbol))]
        parts.append(f"{symbol} (from the mean of {', '.join(SYMBOLS[n] for n in same) or 'all known elements'})")
    return f"Added {', '.join(parts)}."
