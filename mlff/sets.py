"""The structures of a run: which files, how they are split, and the batches in which they are seen.

Without `data.train` a run uses the data set that comes with the package.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mlff import evaluation, presets, ranks
from mlff.atoms import LabelKeys
from mlff.config import Config, DataConfig, about
from mlff.data.batch import loader
from mlff.data.dataset import Dataset
from mlff.data.read import read, require_labels, split
from mlff.elements import names
from mlff.evaluation import Results
from mlff.loss import ErrorSums


@dataclass(frozen=True)
class Sets:
    """The structures of a run."""

    train: Dataset
    valid: Dataset
    test: Dataset | None
    source: str  # what they are, in a few words
    kept: Dataset | None = None  # of the kind that the starting model was trained on, to see what it forgets

    def describe(self) -> str:
        """Return one line for the screen: how many structures, which elements."""
        parts = [f"{len(self.train)} structures to train on", f"{len(self.valid)} for validation"]
        if self.test is not None:
            parts.append(f"{len(self.test)} for tests")
        lines = [f"Data: {self.source}; {', '.join(parts)}; elements {names(self.train.elements)}."]
        counts = self.train.label_counts()
        wanted = {name: count for name, count in counts.items() if 0 < count < len(self.train)}
        if wanted:
            listed = ", ".join(f"{name} in {count} of {len(self.train)}" for name, count in wanted.items())
            lines.append(f"Labels that are missing or NaN are left out: there is {listed} training structures.")
        return "\n".join(lines)

    def limited(self, config: DataConfig) -> Sets:
        """Return evenly spaced parts of the sets, as `train_limit`, `valid_limit` and `test_limit` say."""
        test = self.test if self.test is None else limited(self.test, config.test_limit)
        train, valid = limited(self.train, config.train_limit), limited(self.valid, config.valid_limit)
        return dataclasses.replace(self, train=train, valid=valid, test=test)

    def judge(
        self, potential: nn.Module, config: Config, device: torch.device
    ) -> tuple[dict[str, Results], dict[str, float]]:
        """Return predictions and labels of validation and test set, and loss and errors of the former.

        One rank does this for all structures.
        """
        sums = ErrorSums(config.training.loss)
        results = {"validation": predict(potential, self.valid, config, device, "validation", sums)}
        if self.test is not None:
            results["test"] = predict(potential, self.test, config, device, "test")
        return results, sums.compute(alone=True)

    def loaders(self, config: Config) -> tuple[Any, Any]:
        """Return this rank's shuffled batches of the training set and its batches of the validation set.

        Raises:
            ValueError: a structure is above a budget, and `training.oversized=error`.
        """
        training = config.training

        def batches(dataset: Dataset, shuffle: bool) -> Any:
            return loader(
                dataset,
                training.batch_atoms,
                training.batch_edges,
                seed=config.seed,
                shuffle=shuffle,
                workers=config.data.workers,
                rank=ranks.rank(),
                world_size=ranks.count(),
                oversized=training.oversized,
            )

        return batches(self.train, shuffle=True), batches(self.valid, shuffle=False)


def limited(dataset: Dataset, limit: int) -> Dataset:
    """Return at most so many structures, evenly spaced; 0 means all."""
    if not 0 < limit < len(dataset):
        return dataset
    return dataset.subset(np.linspace(0, len(dataset) - 1, limit).round().astype(int))


def predict(
    potential: nn.Module,
    dataset: Dataset,
    config: Config,
    device: torch.device,
    name: str,
    sums: ErrorSums | None = None,
) -> Results:
    """Return predictions and labels of a data set, showing how far it is when that takes a while."""
    shown = time.monotonic()

    def progress(done: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 5.0:
            shown = time.monotonic()
            print(f"evaluating {name}: {done} of {len(dataset)} structures", file=sys.stderr, flush=True)

    batches = loader(dataset, config.training.batch_atoms, config.training.batch_edges)
    return evaluation.predict(potential, batches, device, progress, sums)


EMBEDDED = "acetylcysteine.h5"
"""The embedded data set that a run without `data.train` uses."""


def open_sets(config: Config, cutoff: float, elements: tuple[int, ...] | None) -> Sets:
    """Read the data of a run; without `elements`, those of the training set are what validation and test may have.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file cannot be read, an element is unknown, or a label that the loss needs is nowhere.
    """
    data, keys = config.data, label_keys(config.data)
    if data.train:
        paths = {"train": data.train, "valid": data.valid, "test": data.test}
        source = ", ".join(data.train)
    else:
        file = presets.data_path(EMBEDDED)
        paths = {"train": (f"{file}::train",), "valid": data.valid or (f"{file}::valid",)}
        paths["test"] = data.test or (f"{file}::test",)
        source = "the embedded set (N-acetylcysteine, GFN2-xTB)"
    train = read(paths["train"], cutoff, elements, keys)
    if not len(train):
        raise ValueError(f"data.train={','.join(paths['train'])} holds no structure; it needs at least one.")
    known = elements if elements is not None else train.elements
    if paths["valid"]:
        valid = read(paths["valid"], cutoff, known, keys)
    else:
        if len(train) < 2:
            raise ValueError(
                "data.train holds one structure and data.valid is empty; give a second one, or data.valid."
            )
        train, valid = split(train, data.valid_fraction, config.seed)
        known = elements if elements is not None else known
    test = read(paths["test"], cutoff, known, keys) if paths["test"] else None
    loss = config.training.loss
    wanted = [name for name in ("energy", "forces") if getattr(loss, name) > 0]
    if loss.stress > 0 and {"training.loss.stress", "data.stress_key", "data.virial_key"} & config.given:
        wanted.append("stress")  # by default its weight is not zero, and molecules have none
    require_labels(train, wanted, keys)
    weights = config.training.group_weights
    strange = sorted(set(weights) - {*train.groups, *valid.groups})
    if strange:
        there = ", ".join(name or "(no name)" for name in sorted({*train.groups, *valid.groups}))
        raise ValueError(f"training.group_weights: no structure has the group {strange[0]!r}; the groups are {there}.")
    return Sets(train.weighted(weights), valid.weighted(weights), test, source)


def open_kept(config: Config, cutoff: float, elements: tuple[int, ...]) -> Dataset | None:
    """Read the structures on which a run sees what it forgets: `finetune.retention`; None where there are none.

    With `auto`, those that come with the preset, unless the run has other weights or is about these structures itself.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file cannot be read, or holds an element that the model does not know, or no structure.
    """
    wanted, keys = config.finetune.retention, label_keys(config.data)
    if wanted == "none":
        return None
    if wanted == "auto":
        name = about(config.preset).kept_sample if config.preset is not None and config.weights is None else None
        if name is None:
            return None
        file = presets.data_path(name.partition("::")[0]).resolve()
        given = (*config.data.train, *config.data.valid)
        if any(file.is_relative_to(Path(path.partition("::")[0]).resolve()) for path in given):
            return None
        wanted, keys = f"{file}::{name.partition('::')[2]}", LabelKeys()
    dataset = read((wanted,), cutoff, elements, keys)
    if not len(dataset):
        raise ValueError(f"finetune.retention={wanted} holds no structure; give another file, or none.")
    return dataset


def open_test(config: Config, cutoff: float, elements: tuple[int, ...]) -> Dataset:
    """Read `data.test` for a model that is judged; without it, the embedded test set.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file cannot be read, an element is unknown, or there are neither energies nor forces.
    """
    paths = config.data.test or (f"{presets.data_path(EMBEDDED)}::test",)
    dataset = limited(read(paths, cutoff, elements, label_keys(config.data)), config.data.test_limit)
    if not len(dataset):
        raise ValueError(f"data.test={','.join(paths)} holds no structure; it needs at least one.")
    return dataset


def label_keys(data: DataConfig) -> LabelKeys:
    """Return the names under which labels are looked for; what is not set keeps the reader's default."""
    chosen = {
        "energy": data.energy_key,
        "forces": data.forces_key,
        "stress": data.stress_key,
        "virial": data.virial_key,
        "charge": data.charge_key,
        "spin": data.spin_key,
    }
    return LabelKeys(stress_unit=data.stress_unit, **{name: key for name, key in chosen.items() if key is not None})
