"""The chemical elements by atomic number, hydrogen to oganesson."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable

SYMBOLS: tuple[str, ...] = tuple(
    (
        "X H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr "
        "Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu "
        "Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr "
        "Rf Db Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og"
    ).split()
)
"""Chemical symbols; the index is the atomic number, "X" stands at 0."""

ALL_ELEMENTS: tuple[int, ...] = tuple(range(1, len(SYMBOLS)))
"""Atomic numbers 1 (H) to 118 (Og)."""

_NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS) if number > 0}


def atomic_number(symbol: str) -> int:
    """Return the atomic number of a chemical symbol.

    Raises:
        ValueError: there is no element of that name.
    """
    if symbol not in _NUMBERS:
        near = difflib.get_close_matches(symbol.capitalize(), _NUMBERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected the symbol of an element, H to Og; got {symbol!r}.{hint}")
    return _NUMBERS[symbol]


def atomic_numbers(elements: Iterable[str | int]) -> tuple[int, ...]:
    """Return atomic numbers of elements given as symbols or numbers, in the given order.

    Raises:
        ValueError: an element is unknown or is named twice.
    """
    numbers = []
    for element in elements:
        number = atomic_number(element) if isinstance(element, str) else int(element)
        if not 1 <= number < len(SYMBOLS):
            raise ValueError(f"expected an atomic number from 1 to {len(SYMBOLS) - 1}; got {number}.")
        if number in numbers:
            raise ValueError(f"element {SYMBOLS[number]} is listed twice; list each element once.")
        numbers.append(number)
    return tuple(numbers)


def names(numbers: Iterable[int]) -> str:
    """Return a readable list of elements, as "H, C, N"."""
    return ", ".join(SYMBOLS[number] for number in numbers)


def group(number: int) -> int:
    """Return the group of an element in the periodic table, 1 to 18; -1 to -14 along the lanthanides and actinides."""
    noble = (0, 2, 10, 18, 36, 54, 86, 118)
    last, following = next((a, b) for a, b in itertools.pairwise(noble) if a < number <= b)
    if number - last <= 2 and number != 2:
        return number - last
    return 18 - (following - number) if following - number <= 15 else 2 - (number - last)
