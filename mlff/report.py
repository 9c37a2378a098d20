"""What a run has to show: tables of reference energies and errors, parity plots, curves, and one page with all of it.

The page is a single file that can be sent to somebody: its pictures are inside it, and lie beside it as PNG too.
"""

from __future__ import annotations

import base64
import csv
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from mlff import checkpoint, evaluation
from mlff.config import Config
from mlff.evaluation import EV_PER_CUBIC_ANGSTROM_IN_GPA, Errors, Results
from mlff.runs import choose_folder, write_whole
from mlff.sets import open_test, predict

_BLUE, _GREY, _ORANGE, _INK = "#2563a8", "#b8bec6", "#d97a1e", "#22272e"


@dataclass(frozen=True)
class ReferenceEnergy:
    """The reference energy of an element before and after it was fitted to new data, in eV."""

    element: str
    before: float
    after: float
    determined: bool  # whether the data alone fix it
    error: float = math.nan  # standard error of the fit; NaN where there is none

    @property
    def shift(self) -> float:
        """Change in eV."""
        return self.after - self.before


def reference_energy_table(rows: Sequence[ReferenceEnergy]) -> str:
    """Return reference energies as a printable table."""
    lines = [f"{'element':9s}{'E0 before (eV)':>16s}{'after (eV)':>16s}{'shift (eV)':>14s}{'+- (eV)':>11s}  determined"]
    for row in rows:
        known = "yes" if row.determined else "no"
        values = f"{row.before:16.5f}{row.after:16.5f}{row.shift:14.5f}{_error_text(row):>11s}"
        lines.append(f"{row.element:9s}{values}  {known}")
    return "\n".join(lines)


def _error_text(row: ReferenceEnergy) -> str:
    return "-" if math.isnan(row.error) else f"{row.error:.2g}"


def write_reference_energies(path: Path, rows: Sequence[ReferenceEnergy]) -> None:
    """Write e0.csv: element; before, after, shift in eV; whether the data determine it; its standard error in eV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("element", "before", "after", "shift", "determined", "error"))
        for row in rows:
            values = (repr(row.before), repr(row.after), repr(row.shift))
            error = "" if math.isnan(row.error) else repr(row.error)
            writer.writerow((row.element, *values, str(row.determined).lower(), error))


def parity_plot(path: Path, after: Results, before: Results | None = None) -> None:
    """Draw predictions against labels: energies per atom, forces, and stress where there are labels.

    Energies are drawn relative to what the elements alone explain, since totals differ mostly by composition.

    Args:
        path: a PNG.
        after: the model to show.
        before: the model it started from, drawn in grey behind.
    """
    panels = [_energy_panel(after, before), _forces_panel(after, before), _stress_panel(after, before)]
    panels = [panel for panel in panels if panel is not None]
    figure = Figure(figsize=(4.6 * max(1, len(panels)), 4.7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if not panels:
        axes = figure.subplots()
        axes.text(0.5, 0.5, "no labels to compare with", ha="center", va="center")
        axes.set_axis_off()
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, max(1, len(panels)))), panels, strict=False):
        _draw_panel(axes, panel)
    figure.savefig(path)


@dataclass(frozen=True)
class _Panel:
    title: str
    unit: str
    label: np.ndarray
    after: np.ndarray
    before: np.ndarray | None
    scale: float  # from the unit of the axes to that of the errors in the corner
    error_unit: str


def _energy_panel(after: Results, before: Results | None) -> _Panel | None:
    known = np.isfinite(after.energy_label)
    if not known.any():
        return None
    one = after.select(known)
    used = one.composition.any(0)
    per_element, *_ = np.linalg.lstsq(one.composition[:, used], one.energy_label, rcond=None)
    base = one.composition[:, used] @ per_element
    atoms = np.maximum(1, one.n_atoms)
    old = None if before is None else (before.select(known).energy - base) / atoms
    label, new = (one.energy_label - base) / atoms, (one.energy - base) / atoms
    scaled = None if old is None else 1e3 * old
    return _Panel("energy per atom, composition taken off", "meV/atom", 1e3 * label, 1e3 * new, scaled, 1.0, "meV/atom")


def _forces_panel(after: Results, before: Results | None) -> _Panel | None:
    known = np.isfinite(after.forces_label).all(-1)
    if not known.any():
        return None
    old = None if before is None else before.forces[known].ravel()
    return _Panel(
        "force components", "eV/Å", after.forces_label[known].ravel(), after.forces[known].ravel(), old, 1e3, "meV/Å"
    )


def _stress_panel(after: Results, before: Results | None) -> _Panel | None:
    known = np.isfinite(after.stress_label - after.stress).all((-2, -1))
    if not known.any():
        return None
    unit = EV_PER_CUBIC_ANGSTROM_IN_GPA
    old = None if before is None else unit * before.stress[known].ravel()
    label, new = unit * after.stress_label[known].ravel(), unit * after.stress[known].ravel()
    return _Panel("stress components", "GPa", label, new, old, 1.0, "GPa")


def _draw_panel(axes: Any, panel: _Panel) -> None:
    low = min(panel.label.min(), panel.after.min())
    high = max(panel.label.max(), panel.after.max())
    margin = 0.05 * (high - low) or 1.0
    limits = (low - margin, high + margin)
    label, after, before = _thinned(panel.label, panel.after, panel.before)
    axes.plot(limits, limits, color=_INK, linewidth=0.8, zorder=1)
    size = 3.0 if len(label) > 2000 else 7.0
    if before is not None:
        inside = (before > limits[0]) & (before < limits[1])
        axes.scatter(label[inside], before[inside], s=size, color=_GREY, linewidths=0, zorder=2, label="before")
    axes.scatter(label, after, s=size, color=_BLUE, alpha=0.6, linewidths=0, zorder=3, label="after")
    axes.set(xlim=limits, ylim=limits, xlabel=f"label ({panel.unit})", ylabel=f"model ({panel.unit})", aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    axes.set_title(panel.title, fontsize=11)
    error = panel.scale * (panel.after - panel.label)
    text = f"MAE {np.abs(error).mean():.3g}\nRMSE {np.sqrt((error**2).mean()):.3g}\n{panel.error_unit}"
    axes.text(0.04, 0.96, text, transform=axes.transAxes, va="top", fontsize=9)
    if before is not None:
        axes.legend(loc="lower right", fontsize=8, edgecolor="none", framealpha=0.8, markerscale=2.0)
    axes.spines[["top", "right"]].set_visible(False)


def _thinned(
    label: np.ndarray, after: np.ndarray, before: np.ndarray | None, most: int = 20000
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """At most 20,000 points: more make the picture slow to draw, and no different."""
    step = max(1, math.ceil(len(label) / most))
    return label[::step], after[::step], None if before is None else before[::step]


def curves_plot(path: Path, rows: Sequence[dict[str, float]]) -> None:
    """Draw what metrics.csv says: loss, energy error and force error over steps, and the learning rate.

    Args:
        path: a PNG.
        rows: of `mlff.runs.read_metrics`.
    """
    figure = Figure(figsize=(12.5, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("loss", "loss", 1.0),
        ("energy MAE (meV/atom)", "energy_mae_per_atom", 1e3),
        ("force MAE (meV/Å)", "forces_mae", 1e3),
        ("learning rate", None, 1.0),
    )
    for axes, (title, name, factor) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        kinds = (("train", _GREY), ("valid", _BLUE)) if name else ((None, _ORANGE),)
        for part, color in kinds:
            key = f"{part}_{name}" if name else "learning_rate"
            points = [(row["step"], factor * row[key]) for row in rows if math.isfinite(row[key])]
            if points:
                steps, values = zip(*points, strict=True)
                marker = "o" if len(points) < 30 else None
                axes.plot(steps, values, color=color, linewidth=1.4, marker=marker, markersize=3, label=part)
        values = [line.get_ydata() for line in axes.get_lines()]
        if name and values and all((np.asarray(value) > 0).all() for value in values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(_PlainLogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        if name and axes.get_lines():
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


class _PlainLogFormatter(LogFormatter):
    """Labels the ticks that LogFormatter labels, as 0.6 where that writes 6e-01."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


@dataclass(frozen=True)
class Page:
    """Everything that report.html shows."""

    title: str
    facts: dict[str, str]  # what was done: preset, data, steps, time
    stages: dict[str, dict[str, Errors]]  # set -> stage (as loaded, new E0, fine-tuned) -> errors
    kept: dict[str, Errors]  # stage -> errors on structures of the pretraining; empty: not judged
    kept_text: str  # which structures these are
    groups: dict[str, tuple[Errors | None, Errors]]  # group -> before, after
    elements: dict[str, tuple[Errors | None, Errors]]  # element -> before, after
    reference_energies: Sequence[ReferenceEnergy]
    pictures: dict[str, Path]  # caption -> PNG
    files: dict[str, str]  # name -> what it is


def write_page(path: Path, page: Page) -> None:
    """Write report.html, with its pictures inside."""
    parts = [f"<h1>{html.escape(page.title)}</h1>", _facts(page.facts)]
    for name, stages in page.stages.items():
        parts.append(f"<h2>Errors: {html.escape(name)}</h2>")
        parts.append(_error_table("model", {stage: (None, found) for stage, found in stages.items()}))
    if page.kept:
        parts += ["<h2>What the model still knows</h2>", f"<p>{html.escape(page.kept_text)}</p>"]
        parts.append(_error_table("model", {stage: (None, found) for stage, found in page.kept.items()}))
    for caption, picture in page.pictures.items():
        data = base64.b64encode(picture.read_bytes()).decode()
        text = html.escape(caption)
        parts.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        )
    if page.groups:
        parts += ["<h2>Errors by group</h2>", _error_table("group", page.groups)]
    if page.elements:
        parts += ["<h2>Errors by element</h2>", _error_table("element", page.elements, energies=False)]
    if page.reference_energies:
        parts += ["<h2>Reference energies</h2>", _reference_energies(page.reference_energies)]
    listed = "".join(
        f"<li><code>{html.escape(name)}</code> {html.escape(text)}</li>" for name, text in page.files.items()
    )
    parts.append(f"<h2>Files</h2><ul>{listed}</ul>")
    body = "\n".join(parts)
    path.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(page.title)}</title><style>{_CSS}</style></head><body><main>\n{body}\n</main></body></html>\n",
        encoding="utf-8",
    )


_CSS = """
body{margin:0;background:#fff;color:#22272e;font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;font-weight:600;margin:0 0 16px} h2{font-size:18px;font-weight:600;margin:36px 0 8px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 20px;margin:0} dt{color:#6a737d} dd{margin:0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums} th{font-weight:500;color:#6a737d;text-align:right}
th:first-child,td:first-child{text-align:left} td{text-align:right} th,td{padding:4px 14px 4px 0}
tbody tr{border-top:1px solid #e6e8eb} .old{color:#8a9199} .wide{overflow-x:auto}
figure{margin:28px 0} img{max-width:100%;height:auto} figcaption{color:#6a737d;font-size:13px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace;background:#f3f4f6;padding:1px 5px;border-radius:4px}
ul{padding-left:20px}
"""


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in facts.items())
    return f"<dl>{rows}</dl>"


_COLUMNS = (
    ("E MAE", "meV/atom", "energy_mae_per_atom", 1e3),
    ("E RMSE", "meV/atom", "energy_rmse_per_atom", 1e3),
    ("F MAE", "meV/Å", "forces_mae", 1e3),
    ("F RMSE", "meV/Å", "forces_rmse", 1e3),
    ("stress MAE", "GPa", "stress_mae", EV_PER_CUBIC_ANGSTROM_IN_GPA),
)


def _error_table(head: str, rows: dict[str, tuple[Errors | None, Errors]], energies: bool = True) -> str:
    """A table of errors; where a row has two, the one before stands in grey before the one after."""
    columns = [
        column
        for column in _COLUMNS
        if (energies or column[2].startswith("forces"))
        and any(math.isfinite(getattr(after, column[2])) for _, after in rows.values())
    ]
    heads = "".join(f"<th>{name}<br>{unit}</th>" for name, unit, *_ in columns)
    lines = []
    for name, (before, after) in rows.items():
        cells = []
        for _, _, key, factor in columns:
            value = evaluation.number(factor * getattr(after, key))
            old = "" if before is None else evaluation.number(factor * getattr(before, key))
            cells.append(f"<td>{f'<span class=old>{old} →</span> ' if old else ''}{value}</td>")
        count = after.structures if energies else after.atoms
        lines.append(f"<tr><td>{html.escape(name)}</td><td>{count:,}</td>{''.join(cells)}</tr>")
    counted = "structures" if energies else "atoms"
    return (
        f'<div class="wide"><table><thead><tr><th>{head}</th><th>{counted}</th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _reference_energies(rows: Sequence[ReferenceEnergy]) -> str:
    lines = "".join(
        f"<tr><td>{row.element}</td><td>{row.before:.5f}</td><td>{row.after:.5f}</td><td>{row.shift:+.5f}</td>"
        f"<td>{_error_text(row)}</td><td>{'yes' if row.determined else 'no'}</td></tr>"
        for row in rows
    )
    return (
        "<table><thead><tr><th>element</th><th>before (eV)</th><th>after (eV)</th><th>shift (eV)</th>"
        f"<th>standard error (eV)</th><th>determined by the data</th></tr></thead><tbody>{lines}</tbody></table>"
    )


def evaluate_weights(config: Config) -> Path:
    """Judge a model on labelled structures; print the table and return the folder of summary.csv and the rest.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: there are no weights or no test data, or they cannot be read.
    """
    name = config.weights if config.weights not in (None, "none") else config.preset
    if name is None:
        raise ValueError("evaluate needs weights=FILE or preset=NAME, and data.test=FILE.")
    device = "cpu" if config.trainer.accelerator == "cpu" else "auto"
    potential = checkpoint.load(name, device=device, accept_license=config.accept_license)
    place = next(potential.parameters()).device
    dataset = open_test(config, potential.cutoff, potential.elements)
    print(f"Evaluating {name} on {len(dataset)} structures …", flush=True)
    results = predict(potential, dataset, config, place, "test")
    rows = {"all": evaluation.errors(results)}
    groups = evaluation.by_group(results)
    rows |= groups if len(groups) > 1 else {}
    elements = {f"element {symbol}": found for symbol, found in evaluation.by_element(results).items()}
    print("\n" + evaluation.table(rows, "group") + "\n\nForces by element:\n" + evaluation.force_table(elements))

    folder = choose_folder(config, kind="evaluate")
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "summary.csv": lambda draft: evaluation.write_summary(draft, {**rows, **elements}),
        "structures.csv": lambda draft: evaluation.write_structures(draft, results),
        "parity.png": lambda draft: parity_plot(draft, results),
    }
    print("\nWritten:")
    for file, action in files.items():
        write_whole(folder / file, action)
        print(f"  {folder / file}")
    return folder
