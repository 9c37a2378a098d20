"""Predictions in batches: in order, within budgets, equal to the calculator's."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

import mlff
from mlff import prediction
from mlff.calculator import Calculator
from mlff.sezm.potential import SeZM

BUDGETS: list[dict[str, Any]] = [
    {"batch_atoms": 8},
    {"batch_edges": 100},
    {"batch_atoms": 1},
    {"batch_atoms": 10, "batch_edges": 400},
]
SMALL = {"channels": 8, "lmax": 2, "n_blocks": 1, "n_radial": 8, "mixing_layers": 2}


@pytest.fixture(scope="module")
def potential() -> SeZM:
    return laws.noisy(SeZM.from_options(SMALL, ["H", "C", "O", "Cu"], dtype=torch.float64))


def structures() -> list[Atoms]:
    crystal = bulk("Cu", cubic=True)
    crystal.rattle(0.1, seed=1)
    return [molecule("H2O"), crystal, Atoms("O"), molecule("CH3CH2OH"), bulk("Cu"), molecule("CH4")]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Structures, atoms and edges of every batch that is evaluated."""
    seen: list[tuple[int, int, int]] = []
    evaluate = prediction.evaluate

    def counting(model, graph):
        seen.append((graph.n_structures, graph.n_atoms, graph.n_edges))
        return evaluate(model, graph)

    monkeypatch.setattr(prediction, "evaluate", counting)
    return seen


def test_equals_the_calculator_structure_by_structure(potential: SeZM) -> None:
    calculator = Calculator(potential)
    results = mlff.predict(potential, structures())
    assert len(results) == 6
    for atoms, found in zip(structures(), results, strict=True):
        atoms.calc = calculator
        assert type(found) is mlff.Prediction
        assert type(found.energy) is float
        assert found.energy == pytest.approx(atoms.get_potential_energy(), abs=laws.ROUNDING)
        assert found.energies.shape == (len(atoms),)
        assert np.abs(found.energies - atoms.get_potential_energies()).max() < laws.ROUNDING
        assert np.abs(found.forces - atoms.get_forces()).max() < laws.ROUNDING
        if atoms.pbc.any():
            assert found.stress is not None and found.stress.shape == (6,)
            assert np.abs(found.stress - atoms.get_stress()).max() < laws.ROUNDING
            tensor = -found.virial / atoms.get_volume()
            voigt = [tensor[0, 0], tensor[1, 1], tensor[2, 2], tensor[1, 2], tensor[0, 2], tensor[0, 1]]
            assert np.abs(found.stress - voigt).max() < laws.ROUNDING
        else:
            assert found.stress is None
        assert found.virial.shape == (3, 3)
        for field in dataclasses.fields(found):
            value = getattr(found, field.name)
            assert value is None or isinstance(value, float) or value.dtype == np.float64


def test_budgets_hold_and_do_not_change_results(potential: SeZM, batches: list) -> None:
    expected = mlff.predict(potential, structures())
    assert [n for n, _, _ in batches] == [6]
    for budget in BUDGETS:
        batches.clear()
        found = mlff.predict(potential, structures(), **budget)
        assert sum(n for n, _, _ in batches) == 6
        for n, atoms, edges in batches:
            within = atoms <= budget.get("batch_atoms", 256) and edges <= budget.get("batch_edges", 8_000)
            assert within or n == 1, "only a structure beyond the budget itself may exceed it"
        for one, other in zip(found, expected, strict=True):
            assert one.energy == pytest.approx(other.energy, abs=laws.ROUNDING)
            assert np.abs(one.forces - other.forces).max() < laws.ROUNDING
    batches.clear()
    mlff.predict(potential, [molecule("H2O")] * 5, batch_atoms=6)
    assert [n for n, _, _ in batches] == [2, 2, 1], "budgets are filled to the brim"


def test_any_iterable_is_read_as_it_goes(potential: SeZM) -> None:
    expected = [one.energy for one in mlff.predict(potential, structures())]
    assert [one.energy for one in mlff.predict(potential, (a for a in structures()))] == expected
    assert mlff.predict(potential, []) == []


def test_a_file_and_its_precision(potential: SeZM, tmp_path: Path) -> None:
    path = mlff.save(potential, tmp_path / "model.safetensors")
    exact = mlff.predict(path, structures(), dtype="float64")
    assert [one.energy for one in exact] == [one.energy for one in mlff.predict(potential, structures())]
    rough = mlff.predict(str(path), structures())
    differences = [abs(a.energy - b.energy) / len(a.energies) for a, b in zip(rough, exact, strict=True)]
    assert 0 < max(differences) < 1e-4  # float32, in eV/atom


def test_a_module_is_left_as_it_was(potential: SeZM) -> None:
    model = copy.deepcopy(potential).train()
    mlff.predict(model, structures())
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_one_structure_alone_is_refused(potential: SeZM) -> None:
    with pytest.raises(ValueError, match=r"list of structures.*\[atoms\]"):
        mlff.predict(potential, molecule("H2O"))  # type: ignore[arg-type]


def test_an_empty_budget_is_refused(potential: SeZM) -> None:
    with pytest.raises(ValueError, match="must be positive; got 0"):
        mlff.predict(potential, structures(), batch_atoms=0)


def test_an_unknown_element_is_named_with_its_structure(potential: SeZM) -> None:
    with pytest.raises(ValueError, match=r"atom 1 \(structure 2\) is Cl.*it knows H, C, O, Cu"):
        mlff.predict(potential, [molecule("H2O"), molecule("H2O"), Atoms("HCl", [[0, 0, 0], [0, 0, 1.3]])])


@pytest.mark.gpu
def test_on_a_gpu(potential: SeZM) -> None:
    expected = mlff.predict(potential, structures())
    found = mlff.predict(potential, structures(), device="cuda")
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one.forces, np.ndarray)
        # Sums on the GPU run in another order; float64.
        assert np.abs(one.forces - other.forces).max() < 1e-9
