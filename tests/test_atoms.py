"""From `ase.Atoms` to graph and labels: where labels are found, units and signs, what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms

from mlff.atoms import LabelKeys, graph_from_atoms, label_names, targets_from_atoms

FILES = Path(__file__).parent / "data"

FORCES = np.array([[0.1, -0.2, 0.3], [-0.1, 0.2, -0.3]])
STRESS = 1e-3 * np.array([[1.0, 6, 5], [6, 2, 4], [5, 4, 3]])  # eV/Å³
VOIGT = 1e-3 * np.arange(1.0, 7)  # xx yy zz yz xz xy
WATER = Atoms("OH2", [[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]])


def salt(**info):
    atoms = Atoms("NaCl", [[0, 0, 0], [2.6, 0.3, 0.1]], cell=10 * np.eye(3), pbc=True)
    atoms.info.update(info)
    return atoms


def stress_of(atoms, **keys):
    return targets_from_atoms(atoms, LabelKeys(**keys)).stress[0].numpy()


def test_rd1_labels_in_the_calculator_or_in_info_and_arrays():
    in_calculator = salt()
    in_calculator.calc = SinglePointCalculator(in_calculator, energy=-7.0, forces=FORCES, stress=VOIGT)
    in_tables = salt(energy=-7.0, stress=STRESS)
    in_tables.arrays["forces"] = FORCES
    for atoms in (in_calculator, in_tables):
        targets = targets_from_atoms(atoms, index=4)
        assert targets.energy.tolist() == [-7.0]
        np.testing.assert_array_equal(targets.forces.numpy(), FORCES)
        np.testing.assert_array_equal(targets.stress[0].numpy(), STRESS)
        assert (targets.weight.tolist(), targets.group, targets.index.tolist()) == ([1.0], ("",), [4])
        assert {tensor.dtype for tensor in (targets.energy, targets.forces, targets.stress)} == {torch.float64}
        assert label_names(atoms) == ["energy", "forces", "stress"]


def test_forces_are_those_of_the_calculation_where_atoms_are_fixed():
    """ASE's `get_forces` sets the forces on fixed atoms to zero; the label must not."""
    atoms = salt()
    atoms.set_constraint(FixAtoms([0]))
    atoms.calc = SinglePointCalculator(atoms, forces=FORCES)
    assert not atoms.get_forces()[0].any()
    np.testing.assert_array_equal(targets_from_atoms(atoms).forces.numpy(), FORCES)


def test_labels_are_copies():
    atoms = salt()
    atoms.arrays["forces"] = FORCES.copy()
    targets_from_atoms(atoms).forces.zero_()
    graph_from_atoms(atoms, 3.0).positions.zero_()
    np.testing.assert_array_equal(atoms.arrays["forces"], FORCES)
    assert atoms.positions[1, 0] == 2.6


def test_missing_labels_are_nan():
    targets = targets_from_atoms(WATER)
    assert targets.energy.isnan().all()
    assert targets.forces.isnan().all()
    assert targets.stress.isnan().all()
    assert targets.forces.shape == (3, 3)


def test_rd3_six_or_nine_numbers():
    for value in (VOIGT, STRESS, STRESS.reshape(9), VOIGT.tolist()):
        np.testing.assert_array_equal(stress_of(salt(stress=value)), STRESS)


def test_rd4_units_of_stress():
    kilobar = -1602.1766 * STRESS  # VASP's sign
    np.testing.assert_allclose(
        stress_of(salt(stress=kilobar), stress_unit="kB"), STRESS, rtol=1e-6
    )  # digits of 1602.1766
    np.testing.assert_allclose(stress_of(salt(stress=160.21766 * STRESS), stress_unit="GPa"), STRESS, rtol=1e-6)
    with pytest.raises(ValueError, match=r"one of eV/A\^3, GPa, kB; got 'bar'"):
        stress_of(salt(stress=STRESS), stress_unit="bar")


def test_rd4_a_large_stress_without_a_unit_is_warned_about():
    with pytest.warns(UserWarning, match=r"frame 3: a stress of 9\.613.*GPa.*data\.stress_unit=GPa or kB"):
        targets_from_atoms(salt(stress=-1602.1766 * STRESS), where="frame 3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        targets_from_atoms(salt(stress=-1602.1766 * STRESS), LabelKeys(stress_unit="kB"))
        targets_from_atoms(salt(stress=STRESS))
        targets_from_atoms(salt(stress=np.full(9, np.nan)))


def test_rd5_a_virial_is_minus_volume_times_stress():
    np.testing.assert_allclose(stress_of(salt(virial=-1000.0 * STRESS)), STRESS, rtol=1e-15)
    # The handedness of the cell does not turn the sign.
    left = salt(virial=-1000.0 * STRESS)
    left.set_cell(10 * np.eye(3)[[1, 0, 2]])
    np.testing.assert_allclose(stress_of(left), STRESS, rtol=1e-15)
    # A stress that is there goes first; one that is NaN does not hide the virial.
    np.testing.assert_array_equal(stress_of(salt(stress=VOIGT, virial=np.ones(9))), STRESS)
    np.testing.assert_allclose(stress_of(salt(stress=np.full(6, np.nan), virial=-1e3 * STRESS)), STRESS, rtol=1e-15)


def test_no_stress_without_a_periodic_axis():
    atoms = salt(stress=STRESS)
    atoms.pbc = False
    assert np.isnan(stress_of(atoms)).all()


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"energy": [1.0, 2.0]}, r"frame 5: energy under 'energy' has 2 numbers; expected 1"),
        ({"forces": np.zeros((3, 3))}, r"frame 5: forces under 'forces' has 9 numbers; expected 6 for 2 atoms"),
        ({"stress": np.zeros(3)}, r"stress under 'stress' has 3 numbers; expected 6 or 9"),
        ({"energy": "low"}, r"energy under 'energy' is not numeric; got 'low'"),
        ({"energy": np.inf}, r"frame 5: energy under 'energy' is infinite"),
        ({"weight": "heavy"}, r"frame 5: 'weight' is 'heavy'; expected one number"),
    ],
)
def test_labels_that_make_no_sense_are_named(info, words):
    with pytest.raises(ValueError, match=words):
        targets_from_atoms(salt(**info), where="frame 5")


def test_charge_spin_and_spin_vectors():
    atoms = WATER.copy()
    graph = graph_from_atoms(atoms, 3.0)
    assert (graph.charge.tolist(), graph.spin.tolist(), graph.spins) == ([0.0], [0.0], None)
    atoms.info.update(charge=-1, spin=2, multiplicity=3)
    atoms.arrays["spins"] = np.arange(9.0).reshape(3, 3)
    graph = graph_from_atoms(atoms, 3.0)
    assert (graph.charge.tolist(), graph.spin.tolist()) == ([-1.0], [2.0])
    assert graph.spins is not None
    np.testing.assert_array_equal(graph.spins.numpy(), atoms.arrays["spins"])
    assert graph_from_atoms(atoms, 3.0, keys=LabelKeys(spin="multiplicity")).spin.tolist() == [3.0]
    atoms.arrays["spins"] = np.zeros(3)
    with pytest.raises(ValueError, match=r"'spins' has the shape \(3,\); expected \(3, 3\)"):
        graph_from_atoms(atoms, 3.0)
    atoms.info["charge"] = "plus"
    with pytest.raises(ValueError, match="'charge' is 'plus'; expected one number"):
        graph_from_atoms(atoms, 3.0)


def test_ra2_a_cell_without_periodicity_is_ignored():
    graphs = [graph_from_atoms(atoms, 3.0) for atoms in ase.io.read(FILES / "molecule_any_cell.extxyz", index=":")]
    assert len(graphs) == 5
    for graph in graphs:
        assert not graph.cell.any()
        assert not graph.shifts.any()
        assert torch.equal(graph.senders, graphs[0].senders)
        vectors = graph.positions[graph.senders] - graph.positions[graph.receivers]
        wanted = graphs[0].positions[graph.senders] - graphs[0].positions[graph.receivers]
        # The file gives the far molecule with ten digits, 1e-7 Å.
        torch.testing.assert_close(vectors, wanted, atol=1e-7, rtol=0)


def test_a_periodic_graph_points_from_receiver_to_sender():
    """Vectors to all neighbours of one copper atom sum to zero, and are as ASE measures them."""
    atoms = ase.io.read(FILES / "fcc_cu_sizes.extxyz", index=1)
    graph = graph_from_atoms(atoms, 3.0, elements=(29,))
    vectors = graph.positions[graph.senders] + graph.shifts @ graph.cell[0] - graph.positions[graph.receivers]
    assert graph.n_edges == 12 * 8
    torch.testing.assert_close(vectors.norm(dim=1), torch.full((96,), 3.61 / 2**0.5, dtype=torch.float64))
    assert vectors.reshape(8, 12, 3).sum(1).abs().max() < 1e-12  # sums of numbers near 3 Å


def test_rd9_unknown_elements_are_named():
    atoms = Atoms("HOg", [[0, 0, 0], [0, 0, 2]])
    with pytest.raises(ValueError, match=r"atom 1 \(frame 2 of x\.xyz\) is Og, which this model does not know.*H, O"):
        graph_from_atoms(atoms, 3.0, elements=(1, 8), where="frame 2 of x.xyz")
    assert graph_from_atoms(atoms, 3.0).numbers.tolist() == [1, 118]
    with pytest.raises(ValueError, match="atom 0 has atomic number 0, which is no element"):
        graph_from_atoms(Atoms("X"), 3.0)


def test_a_geometry_that_is_refused_names_the_structure():
    with pytest.raises(ValueError, match=r"frame 7: atoms 0 and 1 .* same place"):
        graph_from_atoms(Atoms("H2", np.zeros((2, 3))), 3.0, where="frame 7")
