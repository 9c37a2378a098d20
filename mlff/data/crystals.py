"""Inorganic crystals of many elements, strained, shaken and with defects: what the presets for crystals learn from.

A *task* names a prototype, the elements on its sites and a seed; `frames_of` turns it into labelled frames and depends
on the task alone. Elements are drawn so that charges balance in ionic prototypes, and from metals in alloys. The cell
is scaled to the lowest energy of the teacher first; frames are made around it:

    relaxed     the prototype at its best volume
    strained    the cell deformed by some per cent, volume and shape, atoms moved by some hundredths of an Å
    shaken      atoms moved by 0.02 to 0.3 Å, as heat does, in a slightly deformed cell
    descent     on the way down from a shaken frame along its forces

in a supercell that may have a vacancy, foreign atoms or a surface.

Units: Å, eV, eV/Å, eV/Å³. Radii and oxidation states are textbook values; space groups and positions of the prototypes
those of the International Tables.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from ase import Atoms
from ase.data import atomic_numbers, covalent_radii
from ase.spacegroup import crystal

from mlff.data import generate
from mlff.data.generate import Frames, LabelError
from mlff.data.molecules import split_of
from mlff.data.teacher import Label

MAX_FORCE = 30.0  # eV/Å
MAX_STRESS = 0.5  # eV/Å³, 80 GPa
POSITION_GRID = 1e-4  # Å

OXIDATION: dict[int, tuple[str, ...]] = {
    1: ("Li", "Na", "K", "Rb", "Cs", "Cu", "Ag", "Tl"),
    2: ("Be", "Mg", "Ca", "Sr", "Ba", "Zn", "Cd", "Mn", "Fe", "Co", "Ni", "Cu", "Sn", "Pb", "Hg", "Eu"),
    3: ("B", "Al", "Ga", "In", "Sc", "Y", "La", "Ce", "Nd", "Sm", "Gd", "Dy", "Er", "Lu", "Ti", "V", "Cr", "Fe", "Rh",
        "Bi", "Sb"),
    4: ("C", "Si", "Ge", "Sn", "Ti", "Zr", "Hf", "Mn", "Ru", "Ir", "Ce", "Pb", "Mo", "W"),
    5: ("V", "Nb", "Ta", "P", "As", "Sb"),
    -1: ("H", "F", "Cl", "Br", "I"),
    -2: ("O", "S", "Se", "Te"),
    -3: ("N", "P", "As", "Sb"),
    -4: ("C", "Si", "Ge"),
}  # fmt: skip
METALS = (
    "Li", "Be", "Na", "Mg", "Al", "K", "Ca", "Sc", "Ti", "V", "Cr", "Mn", "Fe", "Co", "Ni", "Cu", "Zn", "Ga", "Rb",
    "Sr", "Y", "Zr", "Nb", "Mo", "Ru", "Rh", "Pd", "Ag", "Cd", "In", "Sn", "Cs", "Ba", "La", "Ce", "Nd", "Sm", "Gd",
    "Dy", "Er", "Lu", "Hf", "Ta", "W", "Re", "Os", "Ir", "Pt", "Au", "Hg", "Tl", "Pb", "Bi", "Sb", "Si", "Ge",
)  # fmt: skip
COVALENT = ("C", "Si", "Ge", "Sn", "B", "P", "As", "Se", "Te")


@dataclass(frozen=True)
class Prototype:
    """Sites of a structure type: space group, cell shape, and for each site its kind of element and its position."""

    name: str
    group: int
    sites: tuple[tuple[int, tuple[float, float, float]], ...]  # which element, fractional position
    charges: tuple[tuple[int, ...], ...] = ()  # possible oxidation states of the elements; none: any metals
    axes: tuple[float, float] = (1.0, 1.0)  # b/a, c/a
    angles: tuple[float, float, float] = (90.0, 90.0, 90.0)
    pool: tuple[str, ...] = METALS
    setting: int = 1

    @property
    def elements(self) -> int:
        """How many different elements it has."""
        return 1 + max(which for which, _ in self.sites)


_HEX = (90.0, 90.0, 120.0)
PROTOTYPES = (
    Prototype("fcc", 225, ((0, (0, 0, 0)),)),
    Prototype("bcc", 229, ((0, (0, 0, 0)),)),
    Prototype("hcp", 194, ((0, (1 / 3, 2 / 3, 0.25)),), axes=(1.0, 1.63), angles=_HEX),
    Prototype("simple cubic", 221, ((0, (0, 0, 0)),), pool=METALS + COVALENT),
    Prototype("diamond", 227, ((0, (0, 0, 0)),), pool=COVALENT),
    Prototype("beta tin", 141, ((0, (0, 0, 0)),), axes=(1.0, 0.546), pool=COVALENT),
    Prototype("rocksalt", 225, ((0, (0, 0, 0)), (1, (0.5, 0.5, 0.5))), ((1, -1), (2, -2), (3, -3), (4, -4))),
    Prototype("caesium chloride", 221, ((0, (0, 0, 0)), (1, (0.5, 0.5, 0.5))), ((1, -1), (2, -2))),
    Prototype("zincblende", 216, ((0, (0, 0, 0)), (1, (0.25, 0.25, 0.25))), ((1, -1), (2, -2), (3, -3), (4, -4))),
    Prototype("wurtzite", 186, ((0, (1 / 3, 2 / 3, 0)), (1, (1 / 3, 2 / 3, 0.375))), ((2, -2), (3, -3)), (1.0, 1.63),
              _HEX),
    Prototype("nickel arsenide", 194, ((0, (0, 0, 0)), (1, (1 / 3, 2 / 3, 0.25))), ((2, -2), (3, -3)), (1.0, 1.5),
              _HEX),
    Prototype("fluorite", 225, ((0, (0, 0, 0)), (1, (0.25, 0.25, 0.25))), ((2, -1), (4, -2), (-2, 1), (-4, 2))),
    Prototype("rutile", 136, ((0, (0, 0, 0)), (1, (0.305, 0.305, 0))), ((2, -1), (4, -2)), (1.0, 0.65)),
    Prototype("cadmium iodide", 164, ((0, (0, 0, 0)), (1, (1 / 3, 2 / 3, 0.24))), ((2, -1), (4, -2)), (1.0, 1.6), _HEX),
    Prototype("corundum", 167, ((0, (0, 0, 0.352)), (1, (0.306, 0, 0.25))), ((3, -2),), (1.0, 2.73), _HEX),
    Prototype("rhenium trioxide", 221, ((0, (0, 0, 0)), (1, (0.5, 0, 0))), ((3, -1), (-3, 1))),
    Prototype("perovskite", 221, ((0, (0.5, 0.5, 0.5)), (1, (0, 0, 0)), (2, (0.5, 0, 0))),
              ((2, 4, -2), (1, 5, -2), (3, 3, -2), (1, 2, -1))),
    Prototype("spinel", 227, ((0, (0.125, 0.125, 0.125)), (1, (0.5, 0.5, 0.5)), (2, (0.262, 0.262, 0.262))),
              ((2, 3, -2), (4, 2, -2)), setting=2),
    Prototype("chalcopyrite", 122, ((0, (0, 0, 0)), (1, (0, 0, 0.5)), (2, (0.25, 0.25, 0.125))),
              ((1, 3, -2), (2, 4, -3)), (1.0, 1.98)),
    Prototype("delafossite", 166, ((0, (0, 0, 0)), (1, (0, 0, 0.5)), (2, (0, 0, 0.24))), ((1, 3, -2),), (1.0, 5.2),
              _HEX),
    Prototype("half-Heusler", 216, ((0, (0, 0, 0)), (1, (0.25, 0.25, 0.25)), (2, (0.5, 0.5, 0.5)))),
    Prototype("Heusler", 225, ((0, (0.25, 0.25, 0.25)), (1, (0, 0, 0)), (2, (0.5, 0.5, 0.5)))),
    Prototype("B2", 221, ((0, (0, 0, 0)), (1, (0.5, 0.5, 0.5)))),
    Prototype("L1_0", 123, ((0, (0, 0, 0)), (1, (0.5, 0.5, 0.5))), axes=(1.0, 1.37)),
    Prototype("L1_2", 221, ((0, (0, 0, 0)), (1, (0, 0.5, 0.5)))),
    Prototype("A15", 223, ((0, (0, 0, 0)), (1, (0.25, 0, 0.5)))),
    Prototype("Laves C15", 227, ((0, (0.125, 0.125, 0.125)), (1, (0.5, 0.5, 0.5))), setting=2),
    Prototype("omega", 191, ((0, (0, 0, 0)), (1, (1 / 3, 2 / 3, 0.5))), axes=(1.0, 0.65), angles=_HEX),
)  # fmt: skip
RHOMBOHEDRAL = (166, 167)
WEIGHTS = tuple(4.0 if p.elements == 1 else 2.0 if p.elements == 2 else 1.5 for p in PROTOTYPES)
ELEMENTS = tuple(
    sorted({s for group in OXIDATION.values() for s in group} | {*METALS, *COVALENT}, key=atomic_numbers.__getitem__)
)


@dataclass(frozen=True)
class Task(generate.Task):
    """What one group of frames is made from; `smiles` are the symbols on the prototype's sites."""

    prototype: int  # place in PROTOTYPES
    formula: str
    max_atoms: int

    @property
    def origin(self) -> dict[str, str]:
        """What the file says of the group."""
        return {"formula": self.formula, "prototype": PROTOTYPES[self.prototype].name}


def tasks(first_seed: int, frames: int = 12, max_atoms: int = 32) -> Iterator[Task]:
    """Yield tasks without an end; a formula is in one split, whatever the prototype."""
    rng = random.Random(first_seed)
    for index in itertools.count():
        place = rng.choices(range(len(PROTOTYPES)), WEIGHTS)[0]
        prototype, seed = PROTOTYPES[place], rng.randrange(2**31)
        symbols = _draw(prototype, rng)
        formula = structure(prototype, symbols).get_chemical_formula("hill", empirical=True)
        kind = "elements" if prototype.elements == 1 else "compounds" if prototype.charges else "alloys"
        split = split_of(formula)
        yield Task(index, seed, kind, symbols, split, frames, POSITION_GRID, place, formula, max_atoms)


def _draw(prototype: Prototype, rng: random.Random) -> tuple[str, ...]:
    while True:
        if prototype.charges:
            symbols = tuple(rng.choice(OXIDATION[charge]) for charge in rng.choice(prototype.charges))
        else:
            symbols = tuple(rng.sample(prototype.pool, prototype.elements))
        if len(set(symbols)) == len(symbols):
            return symbols


def structure(prototype: Prototype, symbols: tuple[str, ...]) -> Atoms:
    """Return the primitive cell (of rhombohedral lattices the hexagonal one), its closest atoms touching.

    Atoms touch when they are as far apart as their covalent radii together.
    """
    atoms = crystal(
        [symbols[which] for which, _ in prototype.sites],
        [position for _, position in prototype.sites],
        spacegroup=prototype.group,
        setting=prototype.setting,
        cellpar=[4.0, 4.0 * prototype.axes[0], 4.0 * prototype.axes[1], *prototype.angles],
        primitive_cell=prototype.group not in RHOMBOHEDRAL,
        onduplicates="error",
    )
    atoms = Atoms(atoms.numbers, cell=atoms.cell, scaled_positions=atoms.get_scaled_positions(), pbc=True)
    atoms.set_cell(atoms.cell.array / closeness(atoms), scale_atoms=True)
    return atoms


def closeness(atoms: Atoms) -> float:
    """Return the distance of the closest pair of atoms or images, over the sum of their covalent radii."""
    images = atoms.repeat((3, 3, 3))
    radii = covalent_radii[images.numbers]
    start = 13 * len(atoms)  # those of the cell in the middle
    middle = slice(start, start + len(atoms))
    vectors = images.positions[None] - images.positions[middle, None]
    ratio = np.linalg.norm(vectors, axis=-1) / (radii[None] + radii[middle, None])
    ratio[np.arange(len(atoms)), start + np.arange(len(atoms))] = np.inf  # an atom and itself
    return float(ratio.min())


def frames_of(task: Task, label: Callable[[Atoms], Label] | None = None) -> Frames:
    """Return the labelled frames of a task.

    Args:
        task: what to make.
        label: the teacher; `mlff.data.teacher.label` when None.

    Raises:
        LabelError: no volume of the prototype has an energy minimum.
    """
    if label is None:
        from mlff.data import teacher

        label = teacher.label
    rng = np.random.default_rng(task.seed)
    base = _at_best_volume(structure(PROTOTYPES[task.prototype], task.smiles), label)
    cell = _with_defect(base.repeat(_repeats(len(base), task.max_atoms, rng)), rng)
    kept: list[tuple[Atoms, Label, str]] = []
    dropped: Counter[str] = Counter()

    def take(atoms: Atoms, kind: str) -> Label | None:
        atoms.positions = np.round(atoms.positions / task.position_scale) * task.position_scale
        energy, forces, stress = label(atoms)
        largest = np.linalg.norm(forces, axis=-1).max()
        if not (np.isfinite(energy) and largest < MAX_FORCE and np.abs(stress).max() < MAX_STRESS):
            dropped[f"large force or stress, {kind}"] += 1
            return None
        kept.append((atoms, (energy, forces, stress), kind))
        return energy, forces, stress

    take(cell.copy(), "relaxed")
    for _ in range(8 * task.frames):
        if len(kept) >= task.frames:
            break
        if rng.random() < 0.4:
            take(_deformed(cell, rng, strain=0.04, volume=0.12, shift=0.05), "strained")
            continue
        atoms = _deformed(cell, rng, strain=0.015, volume=0.03, shift=float(rng.choice((0.05, 0.1, 0.15, 0.2, 0.3))))
        found = take(atoms, "shaken")
        if found is not None and rng.random() < 0.4:
            for _ in range(2):
                step = 0.02 * found[1]
                largest = np.linalg.norm(step, axis=-1).max()
                atoms = atoms.copy()
                atoms.positions += step * min(1.0, 0.1 / max(largest, 1e-9))
                found = take(atoms, "descent")
                if found is None or len(kept) >= task.frames:
                    break
    kept = kept[: task.frames]
    return Frames(
        task=task,
        numbers=cell.numbers,
        positions=np.array([atoms.positions for atoms, _, _ in kept]).reshape(-1, len(cell), 3),
        energy=np.array([values[0] for _, values, _ in kept]),
        forces=np.array([values[1] for _, values, _ in kept]).reshape(-1, len(cell), 3),
        kinds=tuple(kind for _, _, kind in kept),
        dropped=dropped,
        cell=np.array([atoms.cell.array for atoms, _, _ in kept]).reshape(-1, 3, 3),
        stress=np.array([values[2] for _, values, _ in kept]).reshape(-1, 6),
    )


def _at_best_volume(atoms: Atoms, label: Callable[[Atoms], Label]) -> Atoms:
    """Return the structure scaled to the lowest energy between 0.8 and 1.4 of its first length."""

    def scaled(factor: float) -> Atoms:
        other = atoms.copy()
        other.set_cell(atoms.cell.array * factor, scale_atoms=True)
        return other

    factors = np.arange(0.80, 1.41, 0.06)
    energies = np.array([label(scaled(factor))[0] for factor in factors])
    best = int(np.argmin(energies))
    if not (0 < best < len(factors) - 1 and np.isfinite(energies).all()):
        raise LabelError("no volume has an energy minimum")
    a, b, c = energies[best - 1 : best + 2]
    return scaled(factors[best] + 0.03 * (a - c) / (a - 2 * b + c))


def _repeats(count: int, most: int, rng: np.random.Generator) -> tuple[int, int, int]:
    triples = [(a, b, c) for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3)]
    choices = [(a, b, c) for a, b, c in triples if count * a * b * c <= most and max(a, b, c) - min(a, b, c) <= 1]
    large = [(a, b, c) for a, b, c in choices if count * a * b * c > most / 3]
    pick = large if large and rng.random() < 0.7 else choices or [(1, 1, 1)]
    return pick[int(rng.integers(len(pick)))]


def _with_defect(atoms: Atoms, rng: np.random.Generator) -> Atoms:
    """Return the supercell as it is, or with an atom less, foreign atoms, or a surface."""
    what = rng.random()
    atoms = atoms.copy()
    if what < 0.12 and len(atoms) >= 6:
        del atoms[int(rng.integers(len(atoms)))]
    elif what < 0.22 and len(atoms) >= 2:
        for place in rng.choice(len(atoms), size=int(rng.integers(1, 1 + max(1, len(atoms) // 6))), replace=False):
            atoms.numbers[place] = atomic_numbers[str(rng.choice(METALS))]
    elif what < 0.30 and len(atoms) >= 4:
        axis = int(rng.integers(3))
        cell = atoms.cell.array.copy()
        normal = np.cross(cell[axis - 2], cell[axis - 1])
        cell[axis] += normal / np.linalg.norm(normal) * rng.uniform(3.0, 9.0)
        atoms.set_cell(cell)
    return atoms


def _deformed(atoms: Atoms, rng: np.random.Generator, strain: float, volume: float, shift: float) -> Atoms:
    """Return the structure with a random symmetric strain, a change of volume, and atoms moved at random."""
    other = atoms.copy()
    tensor = rng.normal(scale=strain, size=(3, 3))
    deformation = np.eye(3) * (1 + rng.uniform(-volume, volume)) ** (1 / 3) + (tensor + tensor.T) / 2
    other.set_cell(atoms.cell.array @ deformation, scale_atoms=True)
    other.positions += rng.normal(scale=shift / np.sqrt(3), size=other.positions.shape)
    return other
