"""Reference energies from compositions: exact where the data fix them, nearest to a start where not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlff.data.read import read
from mlff.data.statistics import mean_neighbors, reference_energies, table

FILES = Path(__file__).parent / "data"
H_O = (1, 8)


def fit(name, before=None):
    dataset = read(FILES / name, cutoff=4.0)
    energies = np.array([targets.energy.item() for _, targets in map(dataset.__getitem__, range(len(dataset)))])
    return reference_energies(dataset.compositions(H_O), energies, before, H_O)


def test_rt7_exact():
    fitted = fit("e0_exact.extxyz")
    np.testing.assert_allclose(fitted.after, [-3.0, -5.0], atol=1e-8)
    assert fitted.determined.all()
    assert (fitted.rank, fitted.warning) == (2, "")
    assert fitted.residual < 1e-8


def test_rt7_underdetermined_from_scratch_takes_the_smallest():
    """H2O and its double, -14 eV each: the smallest (h, o) with 2h + o = -14 is -14 (2, 1) / 5."""
    fitted = fit("e0_underdetermined.extxyz")
    np.testing.assert_allclose(fitted.after, [-5.6, -2.8], atol=1e-8)
    assert fitted.residual < 1e-8
    assert not fitted.determined.any()
    assert fitted.rank == 1
    for words in ("H, O", "rank 1", "H and O occur only in the ratio 2 : 1.", "smallest sum of squares"):
        assert words in fitted.warning


def test_rt7_underdetermined_fine_tuning_stays_near_the_start():
    before = np.array([-13.6, -430.0])
    fitted = fit("e0_underdetermined.extxyz", before)
    # The residual of one H2O is -14 + 27.2 + 430 = 443.2 eV, shared out as (2, 1) / 5.
    np.testing.assert_allclose(fitted.shift, [443.2 * 2 / 5, 443.2 / 5], atol=1e-8)
    assert fitted.residual < 1e-8
    assert "nearest to those before" in fitted.warning
    # A start that fits already stays.
    np.testing.assert_allclose(fit("e0_underdetermined.extxyz", np.array([-2.0, -10.0])).shift, 0.0, atol=1e-9)


def test_what_the_data_fix_does_not_depend_on_the_start():
    """O2 fixes O; C and H come as CH4 only."""
    counts = np.array([[4.0, 1, 0], [0, 0, 2], [8, 2, 0]])
    energies = counts @ np.array([-1.0, -7.0, -5.0])
    for before in (np.zeros(3), np.array([3.0, 50.0, -80.0])):
        fitted = reference_energies(counts, energies, before, (1, 6, 8))
        assert fitted.determined.tolist() == [False, False, True]
        assert fitted.after[2] == pytest.approx(-5.0, abs=1e-9)
        assert "H, C one by one" in fitted.warning
        assert "rank 2" in fitted.warning
        assert "H and C occur only in the ratio 4 : 1." in fitted.warning
        np.testing.assert_allclose(counts @ fitted.after, energies, atol=1e-9)


def test_the_warning_says_which_elements_hang_together():
    """Na, Cl and K in NaCl and KCl alone have one number left open among three; H and O in one ratio another."""
    counts = np.array([[1.0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 3, 6], [0, 0, 0, 2, 4], [2, 2, 0, 0, 0]])
    fitted = reference_energies(counts, np.arange(5.0), None, (11, 17, 19, 1, 8))
    assert fitted.rank == 3
    assert not fitted.determined.any()
    assert "Na, Cl and K occur only in combinations that leave them open; H and O occur only in the ratio 1 : 2." in (
        fitted.warning
    )
    assert (
        "element 3 and element 4 occur only in the ratio 1 : 2." in reference_energies(counts, np.arange(5.0)).warning
    )


def test_elements_that_do_not_occur_keep_their_value():
    fitted = reference_energies(np.array([[2.0, 0.0], [1, 0]]), np.array([-4.0, -2.0]), np.array([1.0, -77.0]))
    np.testing.assert_allclose(fitted.after, [-2.0, -77.0], atol=1e-12)
    assert fitted.determined.tolist() == [True, False]
    assert fitted.warning == ""


def test_missing_energies_are_left_out():
    counts = np.array([[2.0, 0], [0, 2], [1, 1]])
    fitted = reference_energies(counts, np.array([-6.0, -10.0, np.nan]))
    np.testing.assert_allclose(fitted.after, [-3.0, -5.0], atol=1e-12)
    assert fitted.determined.all()
    none = reference_energies(counts, np.full(3, np.nan), np.array([1.0, 2.0]))
    assert none.after.tolist() == [1.0, 2.0]
    assert not none.determined.any()


def test_large_total_energies_lose_nothing():
    """Water at -29 940 eV a frame: the fit is exact to rounding, 1e-16 of the largest number."""
    random = np.random.default_rng(0)
    counts = random.integers(0, 100, size=(1000, 4)).astype(float)
    truth = np.array([-13.6, -1029.5, -1484.9, -2041.9])
    fitted = reference_energies(counts, counts @ truth)
    np.testing.assert_allclose(fitted.after, truth, atol=1e-8)


def test_one_odd_structure_among_many_still_fixes_its_element():
    counts = np.tile([200.0, 100.0], (50_000, 1))
    counts[-1] = [2, 2]
    fitted = reference_energies(counts, counts @ np.array([-3.0, -5.0]))
    assert fitted.determined.all()
    np.testing.assert_allclose(fitted.after, [-3.0, -5.0], atol=1e-6)


def test_least_squares_is_the_mean_where_data_disagree():
    fitted = reference_energies(np.ones((4, 1)), np.array([1.0, 2.0, 3.0, 6.0]))
    assert fitted.after[0] == pytest.approx(3.0)
    assert fitted.residual == pytest.approx(np.sqrt((4 + 1 + 0 + 9) / 4))


def test_standard_errors_are_those_of_linear_regression():
    """By hand for one element; by the spread of many fits for several; none where nothing is determined or spare."""
    one = reference_energies(np.array([[1.0], [1.0], [2.0]]), np.array([1.0, 3.0, 4.0]))
    # Fit 2; residuals -1, 1, 0: s² = 2 / (3 - 1), and XᵀX = 6.
    np.testing.assert_allclose(one.error, [np.sqrt(1 / 6)])
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 5, (40, 3)).astype(float)
    exact = counts @ [-13.0, -40.0, -55.0]
    fits = [reference_energies(counts, exact + 0.1 * generator.normal(size=40)) for _ in range(400)]
    spread, mean = np.std([fit.after for fit in fits], axis=0), np.mean([fit.error for fit in fits], axis=0)
    np.testing.assert_allclose(mean, spread, rtol=0.15)  # 400 fits know a spread to 1/sqrt(800) = 4 %
    water = reference_energies(np.array([[2.0, 1.0], [4.0, 2.0]]), np.array([1.0, 2.1]))
    assert np.isnan(water.error).all() and not water.determined.any()
    alone = reference_energies(np.array([[1.0]]), np.array([-13.0]))
    assert np.isnan(alone.error).all() and alone.determined.all()


def test_table_shows_what_occurs():
    text = table(fit("e0_underdetermined.extxyz"), H_O).splitlines()
    assert text[0].split() == ["element", "before", "eV", "after", "eV", "shift", "eV", "determined"]
    assert text[1].split() == ["H", "0.000000", "-5.600000", "-5.600000", "no"]
    assert len(text) == 3


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"\(2, 2\), \(3,\) and \(2,\)"):
        reference_energies(np.ones((2, 2)), np.ones(3))
    with pytest.raises(ValueError, match="not per atom"):
        reference_energies(np.array([[2 / 3, 1 / 3]]), np.array([-4.7]))
    with pytest.raises(ValueError, match="must be finite"):
        reference_energies(np.ones((2, 2)), np.array([1.0, np.inf]))


def test_ra8_mean_neighbours_of_copper():
    assert mean_neighbors(read(FILES / "fcc_cu_sizes.extxyz", cutoff=6.0)) == 78.0
