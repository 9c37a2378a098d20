"""Errors of sets, groups and elements by hand; tables, files and pictures that are made of them."""

from __future__ import annotations

import csv
import math

import numpy as np
import pytest

from mlff import evaluation, report
from mlff.evaluation import Results
from mlff.report import Page, ReferenceEnergy
from mlff.runs import METRICS_COLUMNS

NAN = math.nan


def water_and_hydrogen() -> Results:
    """H2O, energy off by 0.3 eV and forces by 0.1 eV/Å; H2, by 0.1 eV and 0.2 eV/Å; a bare H without labels."""
    composition = np.zeros((3, 119))
    composition[0, [1, 8]], composition[1, 1], composition[2, 1] = (2, 1), 2, 1
    forces_label = np.linspace(-1, 1, 18).reshape(6, 3)
    forces = forces_label + np.array([0.1, 0.1, 0.1, 0.2, 0.2, 0.0])[:, None]
    forces_label[5] = NAN
    label = np.array([-14.0, -6.0, NAN])
    stress_label = np.full((3, 3, 3), NAN)
    stress_label[0] = 0.01
    return Results(
        index=np.arange(3),
        group=np.array(["wet", "dry", "dry"], dtype=object),
        n_atoms=np.array([3, 2, 1]),
        composition=composition,
        energy=label + np.array([0.3, -0.1, 0.0]),
        energy_label=label,
        stress=np.where(np.isnan(stress_label), NAN, 0.012),
        stress_label=stress_label,
        structure=np.array([0, 0, 0, 1, 1, 2]),
        numbers=np.array([8, 1, 1, 1, 1, 1]),
        forces=forces,
        forces_label=forces_label,
    )


def test_errors_by_hand():
    found = evaluation.errors(water_and_hydrogen())
    assert found.structures == 3 and found.atoms == 6
    assert found.energy_mae_per_atom == pytest.approx((0.1 + 0.05) / 2)
    assert found.energy_rmse_per_atom == pytest.approx(math.sqrt((0.1**2 + 0.05**2) / 2))
    assert found.forces_mae == pytest.approx((9 * 0.1 + 6 * 0.2) / 15)
    assert found.forces_rmse == pytest.approx(math.sqrt((9 * 0.01 + 6 * 0.04) / 15))
    assert found.forces_norm_mae == pytest.approx(math.sqrt(3) * (3 * 0.1 + 2 * 0.2) / 5)
    assert found.stress_mae == pytest.approx(0.002)


def test_groups_and_elements():
    results = water_and_hydrogen()
    groups = evaluation.by_group(results)
    assert list(groups) == ["wet", "dry"]
    assert groups["dry"].structures == 2
    assert groups["dry"].forces_mae == pytest.approx(0.2)
    assert groups["wet"].energy_mae_per_atom == pytest.approx(0.1)
    elements = evaluation.by_element(results)
    assert list(elements) == ["H", "O"]
    assert elements["O"].forces_mae == pytest.approx(0.1) and elements["O"].atoms == 1
    assert elements["H"].forces_mae == pytest.approx((2 * 0.1 + 2 * 0.2) / 4)


def test_other_reference_energies_shift_energies_by_composition():
    shifts = np.zeros(119)
    shifts[1], shifts[8] = -0.1, 1.0
    results = water_and_hydrogen()
    difference = results.shifted(shifts).energy - results.energy
    assert difference[:2] == pytest.approx([0.8, -0.2])


def test_tables_leave_out_what_has_no_label():
    results = water_and_hydrogen()
    text = evaluation.table({"all": evaluation.errors(results)})
    assert text.splitlines()[0].split() == ["set", "structures", *"E MAE E RMSE F MAE F RMSE stress MAE".split()]
    assert text.splitlines()[1].split() == ["all", "3", "75", "79.1", "140", "148", "0.32"]
    assert "stress" not in evaluation.table({"dry": evaluation.by_group(results)["dry"]})


def test_csv_files(tmp_path):
    results = water_and_hydrogen()
    evaluation.write_summary(tmp_path / "summary.csv", {"all": evaluation.errors(results)})
    with open(tmp_path / "summary.csv", newline="") as file:
        rows = {(row["group"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    assert float(rows["all", "forces_mae"]) == pytest.approx(0.14)
    evaluation.write_structures(tmp_path / "structures.csv", results)
    with open(tmp_path / "structures.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["n_atoms"] for row in rows] == ["3", "2", "1"]
    assert float(rows[0]["forces_rmse"]) == pytest.approx(0.1)
    assert float(rows[1]["energy_error_per_atom"]) == pytest.approx(-0.05)
    assert float(rows[0]["stress_rmse"]) == pytest.approx(0.002)
    assert rows[2]["energy_label"] == "" and rows[2]["forces_rmse"] == "" and rows[1]["stress_rmse"] == ""


def test_the_page_says_it_all(tmp_path):
    after = water_and_hydrogen()
    before = after.shifted(np.full(119, 0.5))
    rows = [
        dict.fromkeys(METRICS_COLUMNS, NAN) | {"step": s, "learning_rate": 1e-3, "valid_loss": 1 / s} for s in (1, 2)
    ]
    report.parity_plot(tmp_path / "parity.png", after, before)
    report.curves_plot(tmp_path / "curves.png", rows)
    energies = [ReferenceEnergy("H", -13.0, -13.5, True, 0.0125), ReferenceEnergy("O", -40.0, -40.0, False)]
    page = Page(
        title="a <b> c",
        facts={"data": "mine.xyz"},
        stages={"test": {"as loaded": evaluation.errors(before), "fine-tuned": evaluation.errors(after)}},
        kept={"as loaded": evaluation.errors(after), "fine-tuned": evaluation.errors(before)},
        kept_text="structures of old.xyz",
        groups={"wet & dry": (evaluation.errors(before), evaluation.errors(after))},
        elements={"H": (None, evaluation.errors(after))},
        reference_energies=energies,
        pictures={"parity": tmp_path / "parity.png", "curves": tmp_path / "curves.png"},
        files={"model.safetensors": "the model"},
    )
    report.write_page(tmp_path / "report.html", page)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 2 and "http" not in text
    assert "a &lt;b&gt; c" in text and "wet &amp; dry" in text
    assert "-13.50000" in text and "as loaded" in text
    assert "<td>0.013</td><td>yes</td>" in text and "<td>-</td><td>no</td>" in text
    assert "<h2>What the model still knows</h2>\n<p>structures of old.xyz</p>" in text
    report.write_reference_energies(tmp_path / "e0.csv", energies)
    assert (tmp_path / "e0.csv").read_text().splitlines() == [
        "element,before,after,shift,determined,error",
        "H,-13.0,-13.5,-0.5,true,0.0125",
        "O,-40.0,-40.0,0.0,false,",
    ]
    lines = report.reference_energy_table(energies).splitlines()
    assert lines[1].split()[-2:] == ["0.013", "yes"] and lines[2].split()[-2:] == ["-", "no"]


def test_small_errors_are_written_plainly(tmp_path):
    """0.6, not 6e-01: ticks between powers of ten are those that a reader looks for."""
    formatter = report._PlainLogFormatter(minor_thresholds=(1.5, 0.5))
    formatter.create_dummy_axis()
    assert formatter.axis is not None
    formatter.axis.set_view_interval(0.5, 0.95)
    formatter.set_locs([0.5, 0.6, 0.7, 0.8, 0.9])
    assert formatter(0.6) == "0.6"


def test_pictures_of_sets_without_labels(tmp_path):
    """Nothing to compare with is said in the picture, and is no error."""
    after = water_and_hydrogen().select(np.array([False, False, True]))
    report.parity_plot(tmp_path / "parity.png", after)
    report.curves_plot(tmp_path / "curves.png", [])
    assert (tmp_path / "parity.png").stat().st_size > 1000
