"""`ase.Atoms` to a graph and its labels: the one conversion, for training and the calculator alike.

Labels are looked for where ASE puts them, in the attached calculator's results (ASE 3.23 and newer) and in `info` and
`arrays`. A label that is missing stays NaN.

    stress     eV/Å³, six (Voigt xx yy zz yz xz xy) or nine numbers, positive when the structure pulls inwards
    virial     eV, nine numbers, = -V stress

A stress in another unit is declared by `stress_unit`; VASP's kilobar have the opposite sign. Under "energy", ASE gives
VASP's energy extrapolated to zero smearing; the forces are derivatives of the one under "free_energy".
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from ase import Atoms
from ase.units import GPa
from jaxtyping import Float

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

    A cell without any periodic axis is ignored. Total charge and spin come from `atoms.info`, spin vectors from an
    array "spins" of shape (N, 3). `elements` are the atomic numbers that the model knows, `where` names the structure
    in errors.

    Raises:
        ValueError: an element is not among `elements`, the neighbour list refuses the geometry, or charge, spin or
            spins are no numbers; `where` is named.
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
    charge, spin = charge_and_spin(atoms, keys, where)
    spins = spins_of(atoms, where)
    return Graph(
        positions=torch.from_numpy(positions),
        numbers=torch.from_numpy(numbers),
        structure=torch.zeros(len(numbers), dtype=torch.int64),
        senders=torch.from_numpy(senders),
        receivers=torch.from_numpy(receivers),
        shifts=torch.from_numpy(shifts),
        cell=torch.from_numpy(cell.copy())[None],
        pbc=torch.from_numpy(pbc.copy())[None],
        charge=torch.tensor([charge], dtype=torch.float64),
        spin=torch.tensor([spin], dtype=torch.float64),
        spins=None if spins is None else torch.from_numpy(spins),
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
        ValueError: a label has the wrong number of entries or is infinite, or the unit of the stress is unknown;
            `where` is named.
    """
    keys = keys or LabelKeys()
    labels = labels_from_atoms(atoms, keys, where)
    warn_of_large_stress(labels.stress[None], keys, where or "a structure")
    return Targets(
        energy=torch.tensor([labels.energy], dtype=torch.float64),
        forces=torch.from_numpy(labels.forces),
        stress=torch.from_numpy(labels.stress)[None],
        weight=torch.tensor([labels.weight], dtype=torch.float64),
        group=(labels.group,),
        index=torch.tensor([index]),
    )


class Labels(NamedTuple):
    """The labels of one structure as plain numbers; what is missing is NaN."""

    energy: float  # eV
    forces: Float[np.ndarray, "N 3"]  # eV/Å
    stress: Float[np.ndarray, "3 3"]  # eV/Å³
    weight: float
    group: str


def labels_from_atoms(atoms: Atoms, keys: LabelKeys, where: str = "") -> Labels:
    """Return the labels of one structure as numpy arrays.

    A stress means nothing where no axis is periodic, so it counts as missing there.

    Raises:
        ValueError: as for `targets_from_atoms`.
    """
    count = len(atoms)
    energy = _numbers(atoms, keys.energy, "energy", 1, where)
    forces = _numbers(atoms, keys.forces, "forces", 3 * count, where)
    return Labels(
        energy=float("nan") if energy is None else float(energy[0]),
        forces=np.full((count, 3), np.nan) if forces is None else forces.reshape(count, 3),
        stress=_stress(atoms, keys, where),
        weight=_condition(atoms, keys.weight, 1.0, where),
        group=str(atoms.info.get(keys.group, atoms.info.get("group", ""))),
    )


def charge_and_spin(atoms: Atoms, keys: LabelKeys, where: str = "") -> tuple[float, float]:
    """Return total charge and spin multiplicity from `atoms.info`, 0 when not given.

    Raises:
        ValueError: one of them is not a number; `where` is named.
    """
    return _condition(atoms, keys.charge, 0.0, where), _condition(atoms, keys.spin, 0.0, where)


def warn_of_large_stress(stress: Float[np.ndarray, "S 3 3"], keys: LabelKeys, where: str) -> None:
    """Warn once where a stress is larger than materials hold and its unit was not declared."""
    known = np.abs(stress[np.isfinite(stress)])
    largest = known.max(initial=0.0)
    if keys.stress_unit == "eV/A^3" and largest > LARGE_STRESS:
        others = " or ".join(unit for unit in STRESS_UNITS if unit != "eV/A^3")
        warnings.warn(
            f"{where}: a stress of {largest:.4g} is taken as eV/Å³, which would be {largest / GPa:.4g} GPa. "
            f"If it is in another unit, say so with data.stress_unit={others}.",
            stacklevel=3,
        )


def spins_of(atoms: Atoms, where: str = "") -> Float[np.ndarray, "N 3"] | None:
    """Return the spin vectors of an array "spins", or None where there is none.

    Raises:
        ValueError: the array does not hold three numbers for each atom; `where` is named.
    """
    spins = atoms.arrays.get("spins")
    if spins is None:
        return None
    if np.shape(spins) != (len(atoms), 3):
        raise ValueError(
            f"{where or 'structure'}: the array 'spins' has the shape {np.shape(spins)}; expected {(len(atoms), 3)}, "
            "a vector for each atom."
        )
    return np.array(spins, dtype=np.float64)


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
    """Stress in eV/Å³, from a stress or a virial label; NaN where there is neither, or no periodic axis."""
    if keys.stress_unit not in STRESS_UNITS:
        raise ValueError(f"stress_unit must be one of {', '.join(STRESS_UNITS)}; got {keys.stress_unit!r}")
    volume = abs(atoms.cell.volume) if atoms.pbc.any() else 0.0
    if volume == 0.0:
        return np.full((3, 3), np.nan)
    stress = _numbers(atoms, keys.stress, "stress", (6, 9), where)
    if stress is not None and not np.isnan(stress).all():
        return matrix_from_voigt(stress) * STRESS_UNITS[keys.stress_unit]
    virial = _numbers(atoms, keys.virial, "virial", (6, 9), where)
    return np.full((3, 3), np.nan) if virial is None else -matrix_from_voigt(virial) / volume


def _numbers(atoms: Atoms, key: str, label: str, size: int | tuple[int, ...], where: str) -> np.ndarray | None:
    """Return a label as a flat float64 array, or None where it is stored nowhere."""
    value = _stored(atoms, key)
    if value is None:
        return None
    try:
        values = np.array(value, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where or 'structure'}: {label} under {key!r} is not numeric; got {value!r}") from error
    sizes = size if isinstance(size, tuple) else (size,)
    if values.size not in sizes:
        raise ValueError(
            f"{where or 'structure'}: {label} under {key!r} has {values.size} numbers; expected "
            f"{' or '.join(map(str, sizes))} for {len(atoms)} atoms"
        )
    if np.isinf(values).any():
        raise ValueError(
            f"{where or 'structure'}: {label} under {key!r} is infinite. Remove the structure, or write nan for a "
            "label that is not known."
        )
    return values


def _condition(atoms: Atoms, key: str, default: float, where: str) -> float:
    """Return one number from `info`."""
    value = atoms.info.get(key, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise ValueError(f"{where or 'structure'}: {key!r} is {value!r}; expected one number.")
    return number


def _stored(atoms: Atoms, key: str) -> Any:
    """Return what is stored under a key: in the calculator's results, in `info`, or in `arrays`."""
    results = getattr(atoms.calc, "results", None) or {}
    for table in (results, atoms.info, atoms.arrays):
        if table.get(key) is not None:
            return table[key]
    return None
