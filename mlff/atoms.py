"""`ase.Atoms` to a graph and its labels: the one conversion, for training and the calculator alike.

Labels are looked for where ASE puts them, in the attached calculator's results (ASE 3.23 and newer) and in `info` and
`arrays`. A label that is missing stays NaN.

    stress     eV/Å³, six (Voigt xx yy zz yz xz xy) or nine numbers, positive when the structure pulls inwards
    virial     eV, nine numbers, = -V stress

A stress in another unit is declared by `stress_unit`; VASP's kilobar have the opposite sign.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.units import GPa

from mlff.elements import SYMBOLS, names
from mlff.graph import Graph, Targets
from mlff.neighbors import neighbor_list

STRESS_UNITS: dict[str, float] = {"eV/A^3": 1.0, "GPa": GPa, "kB": -0.1 * GPa}
"""eV/Å³ in one unit, ASE's sign. kB is VASP's kilobar, whose sign is opposite."""

LARGE_STRESS = 1.0  # eV/Å³ = 160 GPa, more than a crystal at ambient conditions ever holds


@dataclass(frozen=True)
class LabelKeys:
    """Under which names labels and conditions are stored. `group` names the structure in tables of errors."""

    energy: str = "energy"
    forces: str = "forces"
    stress: str = "stress"
    virial: str = "virial"
    charge: str = "charge"
    spin: str = "spin"
    weight: str = "weight"
    group: str = "config_type"
    stress_unit: str = "eV/A^3"


def graph_from_atoms(
    atoms: Atoms,
    cutoff: float,
    elements: Collection[int] | None = None,
    where: str = "",
    keys: LabelKeys | None = None,
) -> Graph:
    """Return one structure as a graph on the CPU, edges up to `cutoff` (Å).

    A cell without any periodic axis is ignored. Total charge and spin come from `atoms.info`, spin vectors from an array
    "spins" of shape (N, 3). `elements` are the atomic numbers that the model knows, `where` names the structure in errors.

    Raises:
        ValueError: an element is not among `elements`, or the neighbour list refuses the geometry; `where` is named.
    """
    keys = keys or LabelKeys()
    numbers = np.asarray(atoms.numbers, dtype=np.int64)
    require_known(numbers, elements, where)
    pbc = np.asarray(atoms.pbc, dtype=bool)
    cell = np.asarray(atoms.cell.array, dtype=np.float64) if pbc.any() else np.zeros((3, 3))
    positions = np.array(atoms.positions, dtype=np.float64)
    try:
        senders, receivers, shifts = neighbor_list(positions, cell, pbc, cutoff)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error
    spins = atoms.arrays.get("spins")
    return Graph(
        positions=torch.from_numpy(positions),
        numbers=torch.from_numpy(numbers),
        structure=torch.zeros(len(numbers), dtype=torch.int64),
        senders=torch.from_numpy(senders),
        receivers=torch.from_numpy(receivers),
        shifts=torch.from_numpy(shifts),
        cell=torch.from_numpy(cell.copy())[None],
        pbc=torch.from_numpy(pbc.copy())[None],
        charge=torch.tensor([float(atoms.info.get(keys.charge, 0.0))], dtype=torch.float64),
        spin=torch.tensor([float(atoms.info.get(keys.spin, 0.0))], dtype=torch.float64),
        spins=None if spins is None else torch.tensor(np.asarray(spins, dtype=np.float64).reshape(-1, 3)),
    )


def require_known(numbers: np.ndarray, elements: Collection[int] | None, where: str = "") -> None:
    """Raise ValueError where an atom is of no known element, naming the element, the atom and the structure."""
    place = f" ({where})" if where else ""
    for atom, number in enumerate(numbers):
        if not 1 <= number < len(SYMBOLS):
            raise ValueError(f"atom {atom}{place} has atomic number {number}, which is no element; expected 1 to 118.")
        if elements is not None and number not in elements:
            raise ValueError(
                f"atom {atom}{place} is {SYMBOLS[number]}, which this model does not know; it knows {names(elements)}. "
                "Choose a preset with this element, or train one: scripts/train.py model.elements=[…]"
            )


def targets_from_atoms(atoms: Atoms, keys: LabelKeys | None = None, index: int = 0, where: str = "") -> Targets:
    """Return the labels of one structure; what is missing is NaN.

    Raises:
        ValueError: a label has the wrong number of entries, or the unit of the stress is unknown; `where` is named.
    """
    keys = keys or LabelKeys()
    count = len(atoms)
    energy = _numbers(atoms, keys.energy, "energy", 1, where)
    forces = _numbers(atoms, keys.forces, "forces", 3 * count, where)
    weight = atoms.info.get(keys.weight, 1.0)
    group = atoms.info.get(keys.group, atoms.info.get("group", ""))
    return Targets(
        energy=torch.full((1,), np.nan, dtype=torch.float64) if energy is None else torch.tensor(energy),
        forces=torch.tensor(np.full((count, 3), np.nan) if forces is None else forces.reshape(count, 3)),
        stress=torch.tensor(_stress(atoms, keys, where))[None],
        weight=torch.tensor([float(weight)], dtype=torch.float64),
        group=(str(group),),
        index=torch.tensor([index]),
    )


def label_names(atoms: Atoms) -> list[str]:
    """Return every name under which this structure stores something that could be a label."""
    results = getattr(atoms.calc, "results", None) or {}
    arrays = set(atoms.arrays) - {"numbers", "positions"}
    return sorted({*results, *atoms.info, *arrays})


def matrix_from_voigt(voigt: np.ndarray) -> np.ndarray:
    """Return the symmetric (3, 3) matrix of xx yy zz yz xz xy, or of nine numbers in rows."""
    values = np.asarray(voigt, dtype=np.float64).reshape(-1)
    if values.size == 9:
        matrix = values.reshape(3, 3)
        return 0.5 * (matrix + matrix.T)
    xx, yy, zz, yz, xz, xy = values
    return np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])


def _stress(atoms: Atoms, keys: LabelKeys, where: str) -> np.ndarray:
    """Stress in eV/Å³, from a stress or a virial label; NaN where there is neither."""
    if keys.stress_unit not in STRESS_UNITS:
        raise ValueError(f"stress_unit must be one of {', '.join(STRESS_UNITS)}; got {keys.stress_unit!r}")
    values = _numbers(atoms, keys.stress, "stress", (6, 9), where)
    if values is not None:
        stress = matrix_from_voigt(values) * STRESS_UNITS[keys.stress_unit]
        if keys.stress_unit == "eV/A^3" and np.nanmax(np.abs(stress), initial=0) > LARGE_STRESS:
            warnings.warn(
                f"{where or 'a structure'} has a stress of {np.nanmax(np.abs(stress)):.3g} eV/Å³ "
                f"({np.nanmax(np.abs(stress)) / GPa:.3g} GPa); if it is in another unit, set data.stress_unit to "
                f"{' or '.join(unit for unit in STRESS_UNITS if unit != 'eV/A^3')}",
                stacklevel=3,
            )
        return stress
    virial = _numbers(atoms, keys.virial, "virial", (6, 9), where)
    if virial is not None and atoms.pbc.any() and abs(atoms.cell.volume) > 0:
        return -matrix_from_voigt(virial) / abs(atoms.cell.volume)
    return np.full((3, 3), np.nan)


def _numbers(atoms: Atoms, key: str, label: str, size: int | tuple[int, ...], where: str) -> np.ndarray | None:
    """Return a label as a flat float64 array, or None where it is stored nowhere."""
    value = _stored(atoms, key)
    if value is None:
        return None
    try:
        values = np.asarray(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where or 'structure'}: {label} under {key!r} is not numeric; got {value!r}") from error
    sizes = size if isinstance(size, tuple) else (size,)
    if values.size not in sizes:
        raise ValueError(
            f"{where or 'structure'}: {label} under {key!r} has {values.size} numbers; expected "
            f"{' or '.join(map(str, sizes))} for {len(atoms)} atoms"
        )
    return values


def _stored(atoms: Atoms, key: str) -> Any:
    """Return what is stored under a key: in the calculator's results, in `info`, or in `arrays`."""
    results = getattr(atoms.calc, "results", None) or {}
    for table in (results, atoms.info, atoms.arrays):
        if table.get(key) is not None:
            return table[key]
    return None
