"""The folder of a run: its name, files that are never half-written, and the table of errors over steps."""

from __future__ import annotations

import csv
import datetime
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mlff.config import Config
from mlff.loss import ERROR_NAMES

METRICS_COLUMNS: tuple[str, ...] = (
    "step",
    "epoch",
    "learning_rate",
    *(f"{part}_{name}" for part in ("train", "valid") for name in ("loss", *ERROR_NAMES)),
)
"""Columns of metrics.csv: energies in eV/atom, forces in eV/Å, stress in eV/Å³; empty where there is nothing to say."""


def choose_folder(config: Config, today: datetime.date | None = None, kind: str = "") -> Path:
    """Return the folder of a run without making it: `output`, or the next free runs/<kind><preset>-<date>-<n>.

    Raises:
        ValueError: `output` is a file, or it already holds a run and `resume=never`.
    """
    if config.output is not None:
        folder = Path(config.output)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output={folder} is a file; name a folder.")
        if config.resume == "never" and (folder / "checkpoints" / "last.ckpt").exists():
            raise ValueError(f"output={folder} already holds a run; name another folder, or continue it: resume=auto.")
        return folder
    name = "-".join(part for part in (kind, config.preset or Path(config.weights or "model").stem) if part)
    date = (today or datetime.date.today()).isoformat()
    number = 1
    while (Path("runs") / f"{name}-{date}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{date}-{number}"


def find_checkpoint(config: Config, folder: Path) -> Path | None:
    """Return the checkpoint from which a run continues, if it does.

    Raises:
        FileNotFoundError: `resume` names a file that does not exist.
    """
    if config.resume == "auto":
        last = folder / "checkpoints" / "last.ckpt"
        return last if last.exists() else None
    if config.resume == "never":
        return None
    path = Path(config.resume)
    if not path.is_file():
        raise FileNotFoundError(f"resume={path}: there is no such checkpoint; give auto, never or the path of a .ckpt.")
    return path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that it is there whole or not at all: under another name beside it first, then moved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}.{path.name}")  # with its ending, by which some writers choose a format
    try:
        write(draft)
        draft.chmod(0o666 & ~_umask())  # some writers make files that only the owner may read
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class MetricsFile:
    """metrics.csv, one row for each step at which something was measured; a run that is continued goes on in it.

    Args:
        path: the file; it is made with the first row.
        after_step: rows beyond this step are dropped, since a continued run will write them again.
    """

    def __init__(self, path: Path, after_step: int | None = None) -> None:
        self.path = path
        self._last: dict[str, str] = {}
        self._last_start = 0
        if after_step is not None and path.exists():
            kept = [row for row in read_metrics(path) if row["step"] <= after_step]
            write_whole(path, lambda draft: _write_rows(draft, kept[:-1]))
            for row in kept[-1:]:
                self.add(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
        elif path.exists():
            path.unlink()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row, or add values to the last row if that is of the same step."""
        row = {"step": str(step), **{name: _text(value) for name, value in values.items()}}
        unknown = set(row) - set(METRICS_COLUMNS)
        assert not unknown, f"metrics.csv has no column {unknown}"
        new = not self.path.exists()
        with open(self.path, "w+" if new else "r+", newline="", encoding="utf-8") as file:
            if new:
                csv.writer(file).writerow(METRICS_COLUMNS)
            if self._last.get("step") == row["step"]:
                row = {**self._last, **{name: text for name, text in row.items() if text}}
                file.seek(self._last_start)
                file.truncate()
            else:
                file.seek(0, os.SEEK_END)
            self._last, self._last_start = row, file.tell()
            csv.DictWriter(file, METRICS_COLUMNS, restval="").writerow(row)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.csv as numbers; NaN where a field is empty."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: float(text) if text else math.nan for name, text in row.items()} for row in csv.DictReader(file)]


def _write_rows(path: Path, rows: list[dict[str, float]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, METRICS_COLUMNS, restval="")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)


def _text(value: float) -> str:
    if math.isnan(value):
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
