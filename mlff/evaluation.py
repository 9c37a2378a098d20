"""Errors of a potential on labelled structures: by set, by group, by element, by structure.

Structures are predicted once, in batches; every table and picture is made from the arrays kept here. Errors are defined
as in `mlff.loss`: energies by atom and structure, forces by component, stress by component.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mlff.derivatives import evaluate
from mlff.elements import SYMBOLS
from mlff.graph import Graph, Targets
from mlff.loss import ErrorSums, differences

EV_PER_CUBIC_ANGSTROM_IN_GPA = 160.21766208


@dataclass(frozen=True)
class Results:
    """Predictions and labels of a set of structures. A label that is missing is NaN."""

    index: np.ndarray  # (S,) place in the set
    group: np.ndarray  # (S,) names
    n_atoms: np.ndarray  # (S,)
    composition: np.ndarray  # (S, 119) atoms of each atomic number
    energy: np.ndarray  # (S,) eV
    energy_label: np.ndarray  # (S,)
    stress: np.ndarray  # (S, 3, 3) eV/Å³, NaN without a volume
    stress_label: np.ndarray  # (S, 3, 3)
    structure: np.ndarray  # (A,) row of each atom's structure
    numbers: np.ndarray  # (A,)
    forces: np.ndarray  # (A, 3) eV/Å
    forces_label: np.ndarray  # (A, 3)

    def __len__(self) -> int:
        return len(self.energy)

    def select(self, structures: np.ndarray) -> Results:
        """Return the structures that a boolean mask names, with their atoms."""
        atoms = structures[self.structure]
        rows = np.cumsum(structures) - 1
        by_atom = {"structure": rows[self.structure[atoms]]}
        by_atom |= {name: getattr(self, name)[atoms] for name in ("numbers", "forces", "forces_label")}
        names = {field.name for field in dataclasses.fields(self)} - by_atom.keys()
        return Results(**by_atom, **{name: getattr(self, name)[structures] for name in names})

    def shifted(self, shifts: np.ndarray) -> Results:
        """Return the results with other reference energies: `shifts` (119,) in eV by atomic number."""
        return dataclasses.replace(self, energy=self.energy + self.composition @ shifts)


@dataclass(frozen=True)
class Errors:
    """Errors of a set: eV/atom, eV/Å by component, eV/Å³ by component; NaN where there is no label."""

    structures: int
    atoms: int
    energy_mae_per_atom: float
    energy_rmse_per_atom: float
    forces_mae: float
    forces_rmse: float
    forces_norm_mae: float
    stress_mae: float
    stress_rmse: float


METRICS = tuple(field.name for field in dataclasses.fields(Errors) if field.name not in ("structures", "atoms"))
"""Names of the errors."""


def predict(
    potential: nn.Module,
    batches: Iterable[tuple[Graph, Targets]],
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
    sums: ErrorSums | None = None,
) -> Results:
    """Return predictions and labels of all structures of some batches.

    Args:
        potential: the model, on `device`.
        batches: graphs with their labels.
        device: where to evaluate.
        progress: called after each batch with the number of structures done.
        sums: takes the errors and the loss of the same predictions.

    Raises:
        ValueError: there is no structure.
    """
    parts: list[dict[str, np.ndarray]] = []
    done = 0
    training = potential.training
    potential.eval()
    for graph, targets in batches:
        on_device = graph.to(device)
        prediction = evaluate(potential, on_device)
        if sums is not None:
            sums.update(differences(prediction, targets.to(device), on_device))
        count = np.bincount(graph.structure.numpy(), minlength=graph.n_structures)
        composition = np.zeros((graph.n_structures, len(SYMBOLS)))
        np.add.at(composition, (graph.structure.numpy(), graph.numbers.numpy()), 1.0)
        parts.append(
            {
                "index": targets.index.numpy(),
                "group": np.array(targets.group, dtype=object),
                "n_atoms": count,
                "composition": composition,
                "energy": prediction.energy.cpu().numpy(),
                "energy_label": targets.energy.numpy(),
                "stress": prediction.stress.cpu().numpy(),
                "stress_label": targets.stress.numpy(),
                "structure": done + graph.structure.numpy(),
                "numbers": graph.numbers.numpy(),
                "forces": prediction.forces.cpu().numpy(),
                "forces_label": targets.forces.numpy(),
            }
        )
        done += graph.n_structures
        if progress is not None:
            progress(done)
    potential.train(training)
    if not parts:
        raise ValueError("there is no structure to evaluate; the set is empty.")
    return Results(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def errors(results: Results, element: int | None = None) -> Errors:
    """Return the errors of a set; with `element`, forces are those on its atoms only."""
    energy = (results.energy - results.energy_label) / np.maximum(1, results.n_atoms)
    forces = results.forces - results.forces_label
    if element is not None:
        forces = forces[results.numbers == element]
    forces = forces[np.isfinite(forces).all(-1)]
    stress = results.stress - results.stress_label
    stress = stress[np.isfinite(stress).all((-2, -1))]
    return Errors(
        structures=len(results),
        atoms=len(results.numbers) if element is None else int((results.numbers == element).sum()),
        energy_mae_per_atom=_mean(np.abs(energy[np.isfinite(energy)])),
        energy_rmse_per_atom=math.sqrt(_mean(energy[np.isfinite(energy)] ** 2)),
        forces_mae=_mean(np.abs(forces)),
        forces_rmse=math.sqrt(_mean(forces**2)),
        forces_norm_mae=_mean(np.linalg.norm(forces, axis=-1)),
        stress_mae=_mean(np.abs(stress)),
        stress_rmse=math.sqrt(_mean(stress**2)),
    )


def by_group(results: Results) -> dict[str, Errors]:
    """Return the errors of each group, in order of first appearance; empty if no structure has a group."""
    names = list(dict.fromkeys(results.group))
    if names in ([], [""]):
        return {}
    return {name or "(no group)": errors(results.select(results.group == name)) for name in names}


def by_element(results: Results) -> dict[str, Errors]:
    """Return the errors of the forces on each element's atoms; energies are those of the structures that contain it."""
    found = {}
    for number in np.unique(results.numbers):
        containing = results.select(results.composition[:, number] > 0)
        found[SYMBOLS[number]] = errors(containing, element=int(number))
    return found


def table(rows: dict[str, Errors], title: str = "set") -> str:
    """Return errors as a printable table, in meV/atom, meV/Å and GPa; columns without any label are left out."""
    columns = [
        (f"{head:>{max(len(head), 8)}s}", name, factor)
        for head, name, factor in (
            ("E MAE", "energy_mae_per_atom", 1e3),
            ("E RMSE", "energy_rmse_per_atom", 1e3),
            ("F MAE", "forces_mae", 1e3),
            ("F RMSE", "forces_rmse", 1e3),
            ("stress MAE", "stress_mae", EV_PER_CUBIC_ANGSTROM_IN_GPA),
        )
        if any(math.isfinite(getattr(row, name)) for row in rows.values())
    ]
    width = max(len(title), *(len(name) for name in rows)) + 2
    lines = [f"{title:{width}s}{'structures':>10s}" + "".join(f"  {head}" for head, _, _ in columns)]
    for name, row in rows.items():
        values = "".join(f"  {number(getattr(row, key) * factor):>{len(head)}s}" for head, key, factor in columns)
        lines.append(f"{name:{width}s}{row.structures:10d}{values}")
    units = {"energy": "E in meV/atom", "forces": "F in meV/Å", "stress": "stress in GPa"}
    shown = [text for key, text in units.items() if any(name.startswith(key) for _, name, _ in columns)]
    return "\n".join([*lines, ", ".join(shown)])


def force_table(rows: dict[str, Errors]) -> str:
    """Return the errors of forces by element as a printable table, in meV/Å."""
    lines = [f"{'element':14s}{'atoms':>8s}{'F MAE':>10s}{'F RMSE':>10s}"]
    for name, row in rows.items():
        mae, rmse = number(1e3 * row.forces_mae), number(1e3 * row.forces_rmse)
        lines.append(f"{name.removeprefix('element '):14s}{row.atoms:8d}{mae:>10s}{rmse:>10s}")
    return "\n".join([*lines, "F in meV/Å"])


def write_summary(path: Path, sets: dict[str, Errors]) -> None:
    """Write summary.csv: group, metric, value, in eV/atom, eV/Å and eV/Å³."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("group", "metric", "value"))
        for group, row in sets.items():
            for name, value in dataclasses.asdict(row).items():
                writer.writerow((group, name, "" if isinstance(value, float) and math.isnan(value) else repr(value)))


def write_structures(path: Path, results: Results) -> None:
    """Write structures.csv: one row for each structure, in eV, eV/Å and eV/Å³; empty where there is no label."""
    names = ("index", "group", "n_atoms", "energy", "energy_label", "energy_error_per_atom")
    names += ("forces_mae", "forces_rmse", "stress_rmse")
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        energy_error = (results.energy - results.energy_label) / np.maximum(1, results.n_atoms)
        forces = results.forces - results.forces_label
        known = np.isfinite(forces).all(-1)
        count = 3 * np.bincount(results.structure[known], minlength=len(results))
        of_structure = [
            _by_structure(results.structure[known], np.abs(forces[known]).sum(-1), count),
            np.sqrt(_by_structure(results.structure[known], (forces[known] ** 2).sum(-1), count)),
        ]
        stress = np.sqrt(((results.stress - results.stress_label) ** 2).mean((-2, -1)))
        columns = (results.energy, results.energy_label, energy_error, *of_structure, stress)
        for place, values in enumerate(zip(*columns, strict=True)):
            texts = ["" if math.isnan(value) else repr(float(value)) for value in values]
            row = (int(results.index[place]), results.group[place], int(results.n_atoms[place]), *texts)
            writer.writerow(row)


def _by_structure(structure: np.ndarray, values: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Sum values of atoms over structures and divide by a count; NaN where that is zero."""
    total = np.bincount(structure, weights=values, minlength=len(count))
    return np.divide(total, count, out=np.full(len(count), math.nan), where=count > 0)


def _mean(values: np.ndarray) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else math.nan


def number(value: float) -> str:
    """Return an error with three digits, or a dash for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
