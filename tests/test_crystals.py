"""Crystals to pretrain on: prototypes, chemistry, splits, frames; the teacher is a double where it does not matter."""

import importlib.util
import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.calculators.lj import LennardJones
from ase.data import covalent_radii

from mlff.data import crystals, teacher
from mlff.data.crystals import PROTOTYPES, closeness, frames_of, structure, tasks
from mlff.data.generate import LabelError
from mlff.data.packed import read_packed, write_packed

_spec = importlib.util.spec_from_file_location(
    "make_dataset", Path(__file__).parents[1] / "scripts" / "make_dataset.py"
)
assert _spec is not None and _spec.loader is not None
make_dataset = importlib.util.module_from_spec(_spec)
sys.modules["make_dataset"] = make_dataset  # where dataclasses look for annotations
_spec.loader.exec_module(make_dataset)


def double(atoms: Atoms) -> teacher.Label:
    """A solid with a minimum where neighbours are two covalent radii apart: pairs of the mean radius."""
    sigma = 2 * covalent_radii[atoms.numbers].mean() / 2 ** (1 / 6)
    atoms = atoms.copy()
    atoms.calc = LennardJones(sigma=sigma, epsilon=0.3, rc=2.5 * sigma, smooth=True)
    return float(atoms.get_potential_energy()), atoms.get_forces(), atoms.get_stress()


# Formula, atoms of the primitive cell, neighbours that touch: what the structure types are known by.
KNOWN = {
    "fcc": (1, 12), "bcc": (1, 8), "diamond": (2, 4), "simple cubic": (1, 6), "rocksalt": (2, 6),
    "caesium chloride": (2, 8), "zincblende": (2, 4), "fluorite": (3, 8), "perovskite": (5, 12), "rutile": (6, 6),
    "spinel": (14, 4), "corundum": (30, 6), "half-Heusler": (3, 4), "Heusler": (4, 8), "L1_2": (4, 12), "A15": (8, 12),
    "Laves C15": (6, 16), "hcp": (2, 12),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_prototypes_have_the_atoms_and_neighbours_of_the_textbook(name):
    prototype = next(p for p in PROTOTYPES if p.name == name)
    symbols = ("Al",) if prototype.elements == 1 else ("Ti", "O") if prototype.elements == 2 else ("Ti", "Sr", "O")
    atoms = structure(prototype, symbols)
    count, neighbours = KNOWN[name]
    assert len(atoms) == count
    if prototype.elements > 1 and not prototype.charges:
        symbols = ("Al",) * prototype.elements  # alloys: whoever stands there
        atoms = structure(prototype, symbols)
    first = atoms.repeat((3, 3, 3))
    start = 13 * count
    # Coordination of the first site by what touches it within a tenth (rutile and corundum have two lengths).
    distances = np.sort(np.linalg.norm(first.positions - first.positions[start], axis=-1))[1:]
    others = first.numbers != first.numbers[start]
    if prototype.charges:
        distances = np.sort(np.linalg.norm(first.positions[others] - first.positions[start], axis=-1))
    assert int((distances < 1.12 * distances[0]).sum()) == neighbours


def test_cells_are_scaled_until_atoms_touch():
    for prototype in PROTOTYPES:
        atoms = structure(prototype, crystals._draw(prototype, random.Random(3)))
        assert closeness(atoms) == pytest.approx(1.0, abs=1e-9)


def test_tasks_are_the_same_for_a_seed_and_split_by_formula():
    first, again = (list(itertools.islice(tasks(5), 400)) for _ in range(2))
    assert first == again
    assert first[:20] != list(itertools.islice(tasks(6), 20))
    splits: dict[str, set[str]] = {}
    for task in first:
        splits.setdefault(task.formula, set()).add(task.split)
    assert all(len(found) == 1 for found in splits.values())
    assert {task.split for task in first} == {"train", "valid", "test"}
    assert len({symbol for task in first for symbol in task.smiles}) > 60
    assert {task.kind for task in first} == {"elements", "compounds", "alloys"}


def test_charges_of_compounds_balance():
    state_of = crystals.OXIDATION
    for task in itertools.islice(tasks(7), 150):
        prototype = PROTOTYPES[task.prototype]
        if not prototype.charges:
            continue
        counts = structure(prototype, task.smiles).symbols.formula.count()
        totals = [
            sum(charge * counts[symbol] for charge, symbol in zip(charges, task.smiles, strict=True))
            for charges in prototype.charges
            if all(symbol in state_of[charge] for charge, symbol in zip(charges, task.smiles, strict=True))
        ]
        assert 0 in totals, (prototype.name, task.smiles)


def test_frames_depend_on_the_task_alone_and_come_back_from_a_file(tmp_path):
    task = next(task for task in tasks(2) if task.kind == "elements")
    frames, again = frames_of(task, double), frames_of(task, double)
    assert np.array_equal(frames.positions, again.positions) and np.array_equal(frames.stress, again.stress)
    assert len(frames.energy) == task.frames and len(frames.numbers) <= task.max_atoms
    assert {"relaxed", "shaken"} <= set(frames.kinds)
    energy, forces, stress = double(Atoms(frames.numbers, frames.positions[3], cell=frames.cell[3], pbc=True))
    assert energy == frames.energy[3]
    path = tmp_path / "crystals.h5"
    write_packed(path, iter([make_dataset.packed(frames, force_scale=1e-3)]), {})
    (group,) = read_packed(path)
    assert np.allclose(group.forces[3], forces, atol=6e-4) and np.allclose(group.stress[3], stress, atol=6e-8)
    assert np.array_equal(group.cell, frames.cell)
    assert group.attributes["formula"] == task.formula


def test_no_minimum_is_said():
    task = next(iter(tasks(2)))
    with pytest.raises(LabelError, match="no volume has an energy minimum"):
        frames_of(task, lambda atoms: (-atoms.get_volume(), np.zeros((len(atoms), 3)), np.zeros(6)))


def test_violent_frames_are_dropped_and_counted():
    task = next(task for task in tasks(2) if task.kind == "elements")

    def violent(atoms: Atoms) -> teacher.Label:
        energy, forces, stress = double(atoms)
        return energy, forces * (1e4 if np.abs(forces).max() > 0.05 else 1.0), stress

    frames = frames_of(task, violent)
    assert len(frames.energy) < task.frames
    assert any(name.startswith("large force") for name in frames.dropped)


def test_the_teacher_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "mlff\[crystals\]"'):
        teacher.check()


@pytest.mark.skipif(importlib.util.find_spec("sevenn") is None, reason="SevenNet is not installed (extra `crystals`)")
def test_stress_of_the_teacher_is_the_derivative_of_its_energy():
    atoms = structure(next(p for p in PROTOTYPES if p.name == "rocksalt"), ("Mg", "O"))
    atoms.rattle(0.05, seed=1)
    _, _, stress = teacher.label(atoms)
    step = 1e-3
    for place, (i, j) in enumerate(((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))):
        strain = np.zeros((3, 3))
        strain[i, j] += step / 2
        strain[j, i] += step / 2
        energies = []
        for sign in (1, -1):
            other = atoms.copy()
            other.set_cell(atoms.cell.array @ (np.eye(3) + sign * strain), scale_atoms=True)
            energies.append(teacher.label(other)[0])
        slope = (energies[0] - energies[1]) / (2 * step) / atoms.get_volume()
        assert slope == pytest.approx(stress[place], abs=2e-3)  # float32 energies
