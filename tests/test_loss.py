"""The loss and the errors: by hand, with missing labels, and independent of how a set is cut into batches."""

# pyright: reportArgumentType=false

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from toy import PairPotential, structure

from mlff.config import LossConfig
from mlff.data.batch import collate, collate_targets
from mlff.derivatives import evaluate
from mlff.graph import BatchPrediction
from mlff.loss import ErrorSums, differences, loss, loss_terms

NAN = float("nan")
CELL = 9.0 * np.eye(3)


def labelled(index, energy=1.0, forces=True, stress=True, n=3, weight=1.0):
    generator = np.random.default_rng(index)
    positions, numbers = generator.normal(size=(n, 3)), [1, 8, 1, 8, 1][:n]
    return structure(
        positions,
        numbers,
        CELL,
        index=index,
        energy=energy,
        forces=generator.normal(size=(n, 3)) if forces else None,
        stress=0.01 * np.ones((3, 3)) if stress else None,
        weight=weight,
    )


def batch(structures):
    graphs, targets = zip(*structures, strict=True)
    return collate(list(graphs)), collate_targets(list(targets))


def training_loss(potential, structures, config):
    graph, targets = batch(structures)
    return loss(loss_terms(differences(evaluate(potential, graph, create_graph=True), targets, graph), config), config)


def gradients(potential, structures, config):
    potential.zero_grad()
    value = training_loss(potential, structures, config)
    value.backward()
    return value.item(), [p.grad.clone() for p in potential.parameters() if p.grad is not None]


def prediction_off_by(graph, targets, energy, force):
    """A prediction with given errors: `energy` eV a structure, `force` eV/Å in each component of each atom."""
    return BatchPrediction(
        energy=targets.energy + energy,
        energies=torch.zeros(graph.n_atoms, dtype=torch.float64),
        forces=targets.forces + force,
        virial=torch.zeros(graph.n_structures, 3, 3, dtype=torch.float64),
        stress=torch.full((graph.n_structures, 3, 3), NAN, dtype=torch.float64),
    )


@pytest.mark.parametrize("size", [1, 2])
def test_rt18_metrics_are_defined(size):
    """2 atoms off by 0.2 eV and 0.1 eV/Å, 10 atoms by 0.2 eV and 0.2 eV/Å: 0.06 eV/atom and 0.183333 eV/Å."""
    structures = []
    for n in (2, 10):
        positions = np.arange(3.0 * n).reshape(n, 3)
        structures.append(structure(positions, [1] * n, energy=-3.0 * n, forces=np.zeros((n, 3))))
    errors = ErrorSums(LossConfig())
    for start in range(0, 2, size):
        graph, targets = batch(structures[start : start + size])
        off = torch.tensor([0.1, 0.2], dtype=torch.float64)
        force = off[(torch.bincount(graph.structure)[graph.structure] == 10).long()][:, None]
        errors.update(differences(prediction_off_by(graph, targets, 0.2, force), targets, graph))
    values = errors.compute()
    assert values["energy_mae_per_atom"] == pytest.approx(0.06, abs=1e-12)
    assert values["forces_mae"] == pytest.approx((6 * 0.1 + 30 * 0.2) / 36, abs=1e-12)
    assert values["forces_norm_mae"] == pytest.approx(3**0.5 * (2 * 0.1 + 10 * 0.2) / 12, abs=1e-12)
    assert values["energy_rmse_per_atom"] == pytest.approx(((0.1**2 + 0.02**2) / 2) ** 0.5, abs=1e-12)
    assert values["forces_rmse"] == pytest.approx(((6 * 0.1**2 + 30 * 0.2**2) / 36) ** 0.5, abs=1e-12)
    assert np.isnan(values["stress_mae"])
    assert values["loss"] == pytest.approx(20 * 0.06 + 20 * values["forces_norm_mae"], abs=1e-12)


def test_the_loss_by_hand():
    """Energy per atom, norm of the force error, virial per atom, each a mean over what is labelled."""
    graph, targets = batch([labelled(0, energy=2.0, n=2), labelled(1, energy=5.0, n=4, weight=3.0)])
    prediction = BatchPrediction(
        energy=targets.energy + torch.tensor([0.4, -0.4]),
        energies=torch.zeros(6, dtype=torch.float64),
        forces=targets.forces + torch.tensor([3.0, 4.0, 0.0]).double(),
        virial=-(9.0**3) * targets.stress + 0.6,
        stress=targets.stress,
    )
    config = LossConfig(energy=2.0, forces=3.0, stress=5.0)
    terms = loss_terms(differences(prediction, targets, graph), config)
    energy = (0.2 + 3 * 0.1) / 4
    stress = (0.3 + 3 * 0.15) / 4
    assert (terms[:, 0] / terms[:, 1]).tolist() == pytest.approx([energy, 5.0, stress])
    assert loss(terms, config).item() == pytest.approx(2 * energy + 3 * 5.0 + 5 * stress)
    squared = loss_terms(differences(prediction, targets, graph), dataclasses.replace(config, kind="mse"))
    assert (squared[1, 0] / squared[1, 1]).item() == pytest.approx(25.0)
    huber = loss_terms(
        differences(prediction, targets, graph), dataclasses.replace(config, kind="huber", huber_delta=1.0)
    )
    assert (huber[1, 0] / huber[1, 1]).item() == pytest.approx(4.5)
    assert (huber[0, 0] / huber[0, 1]).item() == pytest.approx((0.5 * 0.04 + 3 * 0.5 * 0.01) / 4)


def test_the_sum_is_taken_in_float64():
    """A part of 1e-6 eV beside -1e6 eV: float32 would step by 0.06 eV there."""
    graph, targets = batch([labelled(0, energy=-1e6, n=3)])
    error = differences(prediction_off_by(graph, targets, 1e-6, 0.0), targets, graph).energy
    assert error.item() == pytest.approx(1e-6 / 3, rel=1e-3)  # float64 steps by 1e-10 at 1e6


@pytest.mark.parametrize("term", ["energy", "forces", "stress"])
def test_rd6_missing_labels_neither_count_nor_dilute(term):
    """The loss of a labelled structure and one without that label is the loss of the first alone."""
    potential = PairPotential(dtype=torch.float64)
    config = LossConfig(**{"energy": 0.0, "forces": 0.0, "stress": 0.0, term: 2.0})
    whole = labelled(0)
    part = labelled(1, energy=NAN if term == "energy" else 1.0, forces=term != "forces", stress=term != "stress")
    alone, alone_gradients = gradients(potential, [whole], config)
    both, both_gradients = gradients(potential, [whole, part], config)
    assert both == pytest.approx(alone, rel=1e-12) and alone > 0
    for a, b in zip(alone_gradients, both_gradients, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-12)  # sums over the batch in another order


@pytest.mark.parametrize("kind", ["mae", "mse", "huber"])
def test_rd7_nan_labels_leave_exact_gradients(kind):
    """One NaN component takes out that atom's force, or that structure's stress, and nothing else."""
    potential = PairPotential(dtype=torch.float64)
    config = LossConfig(kind=kind)
    graph, targets = labelled(0)
    forces, stress = targets.forces.clone(), targets.stress.clone()
    forces[1, 2], stress[0, 0, 1] = NAN, NAN
    holed = (graph, dataclasses.replace(targets, forces=forces, stress=stress))
    forces, stress = targets.forces.clone(), targets.stress.clone()
    forces[1], stress[0] = NAN, NAN
    left_out = (graph, dataclasses.replace(targets, forces=forces, stress=stress))
    value, found = gradients(potential, [holed, labelled(1)], config)
    expected_value, expected = gradients(potential, [left_out, labelled(1)], config)
    assert np.isfinite(value) and value == expected_value
    assert all(g.isfinite().all() for g in found)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    # And by hand: the force term is the mean over the five atoms that have a label.
    graph, targets = batch([holed, labelled(1)])
    error = torch.linalg.vector_norm(evaluate(potential, graph).forces - targets.forces, dim=-1)
    terms = loss_terms(differences(evaluate(potential, graph), targets, graph), LossConfig())
    assert terms[1, 1].item() == 5
    assert terms[1, 0].item() == pytest.approx(error[error.isfinite()].sum().item(), rel=1e-12)


def test_no_labels_at_all_is_zero_with_zero_gradient():
    potential = PairPotential(dtype=torch.float64)
    value, found = gradients(potential, [labelled(0, energy=NAN, forces=False, stress=False)], LossConfig())
    assert value == 0.0
    assert all(g.abs().max() == 0 for g in found)


def test_stress_counts_only_where_all_axes_repeat():
    graph, targets = labelled(0)
    slab = dataclasses.replace(graph, pbc=torch.tensor([[True, True, False]]))
    potential = PairPotential(dtype=torch.float64)
    assert not differences(evaluate(potential, slab), targets, slab).has_stress.any()
    assert differences(evaluate(potential, graph), targets, graph).has_stress.all()


def test_the_stress_term_is_that_of_the_stress_times_volume():
    """Wrong stress by d everywhere: the term is V d / N, and the stress error is d."""
    graph, targets = labelled(0, n=3)
    potential = PairPotential(dtype=torch.float64)
    truth = evaluate(potential, graph)
    shifted = dataclasses.replace(targets, stress=truth.stress + 1e-3)
    d = differences(truth, shifted, graph)
    terms = loss_terms(d, LossConfig())
    assert (terms[2, 0] / terms[2, 1]).item() == pytest.approx(9.0**3 * 1e-3 / 3, rel=1e-9)
    errors = ErrorSums(LossConfig())
    errors.update(d)
    assert errors.compute()["stress_mae"] == pytest.approx(1e-3, rel=1e-9)


def test_errors_do_not_depend_on_batches():
    """Sums and counts: any cut of a set gives the same numbers, its loss included."""
    potential = PairPotential(dtype=torch.float64)
    structures = [labelled(i, n=2 + i % 3, forces=i != 2, stress=i != 1, weight=1.0 + i) for i in range(5)]
    results = []
    for cut in ([5], [1, 1, 1, 1, 1], [2, 3]):
        errors, start = ErrorSums(LossConfig()), 0
        for size in cut:
            graph, targets = batch(structures[start : start + size])
            errors.update(differences(evaluate(potential, graph), targets, graph))
            start += size
        results.append(errors.compute())
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-12)
    assert results[0]["loss"] == pytest.approx(training_loss(potential, structures, LossConfig()).item(), rel=1e-12)
