"""How a run begins: the model it starts from, its elements, its reference energies, and which parameters move.

A model trained on one level of theory meets energies of another. Most of the difference is a constant for each element,
so reference energies are fitted first, by least squares on what the old model leaves unexplained; the network then only
learns what is new.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mlff import added_elements, checkpoint, lora, optim, presets
from mlff.config import Command, Config, make_config
from mlff.data import statistics
from mlff.data.batch import loader
from mlff.derivatives import evaluate
from mlff.elements import SYMBOLS, atomic_number, atomic_numbers, names
from mlff.evaluation import Errors, Results, errors
from mlff.graph import Graph, Targets
from mlff.loss import differences, loss, loss_terms
from mlff.report import ReferenceEnergy
from mlff.sets import Sets, limited, open_kept, open_sets, predict
from mlff.sezm.potential import SeZM

HEAD = ("readout", "head")
"""The rooms that `finetune.mode=head` trains."""


@dataclass(frozen=True)
class Start:
    """Where a run starts from."""

    potential: SeZM
    trained: bool
    note: str  # one line for the screen


def open_start(config: Config, command: Command) -> tuple[Start, Sets]:
    """Open the model that a run starts from and its data; raise for all that is wrong with either.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file cannot be read, holds another model than asked for, lacks the labels that the loss needs,
        or has an
            element that the model does not know.
    """
    start = trained_start(config) if command == "finetune" else None
    if start is not None:
        cutoff, elements = start.potential.cutoff, start.potential.elements
        sets = open_sets(config, cutoff, elements)
        return start, dataclasses.replace(sets, kept=open_kept(config, cutoff, elements))
    if config.finetune.mode == "lora":
        raise ValueError(
            f"finetune.mode=lora adapts a trained model; preset {config.preset} has no weights in this version. Give "
            "weights=FILE, or leave out finetune.mode."
        )
    if config.elements.add:
        raise ValueError(
            f"elements.add extends a trained model; preset {config.preset} has no weights in this version. Name its "
            "elements instead: model.elements=[…]."
        )
    if config.model.elements is not None:
        sets = open_sets(config, config.model.rcut, atomic_numbers(config.model.elements))
        return untrained_start(config, ()), sets
    sets = open_sets(config, config.model.rcut, None)
    return untrained_start(config, sets.train.elements), sets


def trained_start(config: Config) -> Start | None:
    """Return the trained model that a configuration names, or None where it starts untrained.

    Raises:
        FileNotFoundError: the weights file is not there.
        ValueError: it is no model of this package, or differs from what `preset` or `model.*` ask for.
    """
    if config.weights == "none":
        return None
    if config.weights is not None:
        path = checkpoint.locate(config.weights, config.accept_license)
    else:
        path = presets.weights_path(str(config.preset))
    if path is None:
        return None
    _check_same(config, *checkpoint.describe(path), path)
    potential = checkpoint.load(path, device="cpu")
    tensors, numbers = len(potential.state_dict()), sum(p.numel() for p in potential.parameters())
    whose = f"preset {config.preset}" if config.weights is None else str(path)
    note = f"Loaded all {tensors} tensors ({numbers:,} parameters) of {whose}."
    if config.elements.add:
        note += " " + added_elements.describe(config.elements.add, potential.elements)
        potential = added_elements.extended(potential, config.elements.add)
    return Start(potential.train(), True, note)


def untrained_start(config: Config, elements: Iterable[int]) -> Start:
    """Return a model with seeded initial weights, for `model.elements` or else for the elements of the data."""
    symbols = config.model.elements or tuple(SYMBOLS[number] for number in elements)
    potential = SeZM.from_options(config.model.options(), symbols, seed=config.seed)
    numbers = sum(parameter.numel() for parameter in potential.parameters())
    if config.preset is not None and config.weights is None and presets.weights_path(config.preset) is None:
        why = f"Preset {config.preset} has no trained weights in this version"
    else:
        why = "No weights asked for"
    note = f"{why}: starting from a seeded initialisation ({numbers:,} parameters, {', '.join(symbols)})."
    return Start(potential.train(), False, note)


def _check_same(config: Config, options: dict, elements: Sequence[str], path: Path) -> None:
    """Raise ValueError if a file holds another model than the configuration asks for."""
    asked = config.model.options().to_mapping()
    if config.preset is None:  # then the file decides, except where a key was given
        asked = {key: value for key, value in asked.items() if f"model.{key}" in config.given}
    different = [
        f"{key} is {options.get(key)} in the file, {value} here"
        for key, value in asked.items()
        if options.get(key) != value
    ]
    if config.model.elements is not None and set(config.model.elements) - set(config.elements.add) != set(elements):
        different.append(f"elements are [{','.join(elements)}] in the file, [{','.join(config.model.elements)}] here")
    if different:
        raise ValueError(
            f"{path} holds another model than {'preset ' + config.preset if config.preset else 'the keys ask for'}: "
            f"{'; '.join(different[:4])}. Leave out preset and model.* to take the file's, or give weights=none."
        )


def prepare(config: Config, potential: SeZM) -> str:
    """Set which parameters train; return a remark ("" if there is none).

    All (`full`), the last rooms (`head`), all but some (`frozen:trunk,types`), or adapters that are put beside the
    model's matrices (`lora`).

    Raises:
        ValueError: a room does not exist, the rank of adapters is too high, or nothing is left to train.
    """
    mode = config.finetune.mode
    if mode == "lora":
        rank = config.finetune.rank or lora.default_rank(potential.options.channels)
        lora.insert(potential, rank, config.finetune.alpha or float(rank), config.seed)
        return lora.describe(potential)
    if mode != "full":
        _freeze(potential, mode)
    return ""


def _freeze(potential: nn.Module, mode: str) -> None:
    rooms = [name for name, _ in potential.named_modules() if name]
    named = HEAD if mode == "head" else tuple(room.strip() for room in mode.partition(":")[2].split(","))
    for room in named:
        if room not in rooms:
            top = ", ".join(
                name for name, module in potential.named_children() if any(True for _ in module.parameters())
            )
            raise ValueError(f"finetune.mode={mode}: the model has no room {room!r}; it has {top} and what is in them.")
    for name, parameter in potential.named_parameters():
        inside = any(name.startswith(f"{room}.") for room in named)
        parameter.requires_grad_(inside if mode == "head" else not inside)
    if not any(parameter.requires_grad for parameter in potential.parameters()):
        raise ValueError(f"finetune.mode={mode} leaves nothing to train; freeze fewer rooms.")


@dataclass(frozen=True)
class Unexplained:
    """What the network of a model leaves to the reference energies, on some structures."""

    composition: np.ndarray  # (S, n_elements) in the order of the model
    energy: np.ndarray  # (S,) eV, label less network
    n_atoms: np.ndarray  # (S,)


@dataclass(frozen=True)
class Fitted:
    """New reference energies of a model, in the order of its elements."""

    after: np.ndarray  # eV
    determined: np.ndarray  # whether the data alone fix an element's value
    error: np.ndarray  # standard error, eV; NaN where there is none
    remark: str = ""  # for the user


def fit_reference_energies(config: Config, potential: SeZM, sets: Sets, device: torch.device) -> Fitted:
    """Return `new_reference_energies` of the training set; the model is not changed."""
    data = None
    if config.finetune.e0 in ("refit", "isolated"):
        dataset = sets.train
        if config.finetune.e0 == "refit":
            # A least-squares fit of a few numbers gains nothing from more structures than this; on a CPU time counts.
            dataset = limited(dataset, config.data.valid_limit if device.type == "cpu" else 2000)
        batches = loader(dataset, config.training.batch_atoms, config.training.batch_edges)
        data = unexplained(potential, batches, device)
    return new_reference_energies(potential, config.finetune.e0, data)


@torch.no_grad()
def unexplained(potential: SeZM, batches: Iterable[tuple[Graph, Targets]], device: torch.device) -> Unexplained:
    """Return label minus network energy of every structure that has an energy label."""
    rows = potential.get_buffer("row_of_number").cpu().numpy()
    before = potential.get_buffer("reference_energies").cpu().numpy()
    compositions, energies = [], []
    training = potential.training
    potential.eval()
    for graph, targets in batches:
        composition = np.zeros((graph.n_structures, len(before)))
        np.add.at(composition, (graph.structure.numpy(), rows[graph.numbers.numpy()]), 1.0)
        on_device = graph.to(device)
        total = torch.zeros(graph.n_structures, dtype=torch.float64, device=device)
        total = total.index_add(0, on_device.structure, potential(on_device)).cpu().numpy()
        known = np.isfinite(targets.energy.numpy())
        compositions.append(composition[known])
        energies.append((targets.energy.numpy() - (total - composition @ before))[known])
    potential.train(training)
    composition = np.concatenate(compositions)
    return Unexplained(composition, np.concatenate(energies), composition.sum(1))


def new_reference_energies(potential: SeZM, mode: str, data: Unexplained | None) -> Fitted:
    """Return the reference energies that a mode asks for.

    Args:
        potential: the model; it is not changed.
        mode: `refit`, `keep`, `isolated` or `file:PATH`.
        data: what the network leaves unexplained on the training set; not needed for `keep` and `file`.

    Raises:
        ValueError: there is no isolated atom of an element, or the file is not a table of elements and energies.
        FileNotFoundError: the file is not there.
    """
    before = potential.get_buffer("reference_energies").cpu().numpy().copy()
    unknown = np.full(len(before), np.nan)
    kept = Fitted(before, np.zeros(len(before), dtype=bool), unknown)
    if mode == "keep":
        return kept
    if mode.startswith("file:"):
        return Fitted(*_from_file(Path(mode.removeprefix("file:")), potential.elements, before), unknown)
    assert data is not None
    if mode == "isolated":
        return Fitted(*_from_isolated_atoms(potential.elements, before, data), unknown)
    if not len(data.energy):
        return kept
    fitted = statistics.reference_energies(data.composition, data.energy, before, potential.elements)
    return Fitted(fitted.after, fitted.determined, fitted.error, fitted.warning)


def _from_isolated_atoms(
    elements: Sequence[int], before: np.ndarray, data: Unexplained
) -> tuple[np.ndarray, np.ndarray]:
    alone = data.n_atoms == 1
    after, found = before.copy(), np.zeros(len(before), dtype=bool)
    for place in range(len(before)):
        energies = data.energy[alone & (data.composition[:, place] == 1)]
        if energies.size:
            after[place], found[place] = energies.mean(), True
    lacking = [elements[place] for place in np.flatnonzero(data.composition.any(0) & ~found).tolist()]
    if lacking:
        raise ValueError(
            f"finetune.e0=isolated needs a structure of one atom in data.train for each element; {names(lacking)} has "
            "none. Add them, or use finetune.e0=refit."
        )
    return after, found


def _from_file(path: Path, elements: Sequence[int], before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"finetune.e0=file:{path}: there is no such file; it holds lines of element,eV.")
    after, found = before.copy(), np.zeros(len(before), dtype=bool)
    with open(path, newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if not row or row[0].startswith("#") or row[0].strip().lower() == "element":
                continue
            try:
                element, energy = atomic_number(row[0].strip()), float(row[1])
            except (ValueError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected element,eV as in O,-2043.2; got {','.join(row)}."
                ) from error
            if not math.isfinite(energy):
                raise ValueError(f"{path}, line {number}: the energy of {row[0].strip()} is {row[1].strip()}.")
            if element in elements:
                place = list(elements).index(element)
                after[place], found[place] = energy, True
    return after, found


def set_reference_energies(potential: SeZM, fitted: Fitted, present: Iterable[int]) -> list[ReferenceEnergy]:
    """Put new reference energies into a model; return a row for each element that is present or has changed."""
    after, determined, error = fitted.after, fitted.determined, fitted.error
    before = potential.get_buffer("reference_energies").cpu().numpy().copy()
    potential.get_buffer("reference_energies").copy_(torch.from_numpy(np.asarray(after, dtype=np.float64)))
    shown = set(present)
    return [
        ReferenceEnergy(
            SYMBOLS[number], float(before[place]), float(after[place]), bool(determined[place]), float(error[place])
        )
        for place, number in enumerate(potential.elements)
        if number in shown or after[place] != before[place]
    ]


def settle(
    config: Config,
    potential: SeZM,
    sets: Sets,
    device: torch.device,
    results: dict[str, Results],
    rows: list[ReferenceEnergy],
) -> tuple[dict[str, Results], list[ReferenceEnergy], bool]:
    """Fit reference energies once more to what the trained network leaves, and keep them if validation agrees.

    The loss cares little for a constant offset beside its forces, so that short runs end with one; forces do not
    change.

    Args:
        config: the run.
        potential: the trained model; its reference energies are changed if that makes energies better.
        sets: the structures.
        device: where the model is.
        results: of the trained model.
        rows: reference energies before and after the first fit.

    Returns:
        Results and rows with the new values, and whether there are any.
    """
    fitted = fit_reference_energies(config, potential, sets, device)
    shifts = shifts_to(potential, fitted.after)
    moved = {name: found.shifted(shifts) for name, found in results.items()}
    old, new = (errors(found["validation"]).energy_mae_per_atom for found in (results, moved))
    if not new < old:
        return results, rows, False
    changed = {row.element: row for row in set_reference_energies(potential, fitted, potential.elements)}
    return moved, [dataclasses.replace(changed[row.element], before=row.before) for row in rows], True


def shifts_to(potential: SeZM, reference_energies: np.ndarray) -> np.ndarray:
    """Return what other reference energies would add to those of a model, (119,) in eV by atomic number."""
    shifts = np.zeros(len(SYMBOLS))
    shifts[list(potential.elements)] = reference_energies - potential.get_buffer("reference_energies").cpu().numpy()
    return shifts


KEPT_ON_CPU = 60
"""Structures of the pretraining that are judged at most without a GPU, where one takes some 30 ms under preset mini."""


def judge_kept(
    potential: SeZM, reference_energies: np.ndarray, sets: Sets, config: Config, device: torch.device
) -> Errors:
    """Return the errors on structures of the pretraining, with the reference energies of that time.

    New reference energies are those of another method, and would add a constant for each element to every error.

    Args:
        potential: the model; it is not changed.
        reference_energies: eV, in the order of its elements.
        sets: `kept` is judged, evenly spaced parts of it where it is large and there is no GPU.
        config: the run.
        device: where the model is.
    """
    assert sets.kept is not None
    few = min(KEPT_ON_CPU, config.data.test_limit or KEPT_ON_CPU) if device.type == "cpu" else 0
    found = predict(potential, limited(sets.kept, few), config, device, "kept sample")
    return errors(found.shifted(shifts_to(potential, reference_energies)))


FASTEST = 0.01
"""Highest learning rate chosen for a short run from scratch. Measured on the embedded set, force MAE in meV/Å, at the
start 600. Nano, 100 steps of three structures: 589, 481 and 322 at 0.002, 0.005 and 0.01. Pro, steps of one structure:
585 after 25 at 0.004, 453 after 37 at 0.01."""

TRAIN_SECONDS = 120.0
VALID_SECONDS = 10.0
TEST_SECONDS = 20.0
"""What a run without a GPU may take for its steps, for one validation and for one test, unless the user decides."""


def scaled(config: Config, start: Start, sets: Sets, device: torch.device) -> Config:
    """Return the configuration with values that fit this machine and this start where the user has not given any.

    - Without a GPU a step is timed, and steps, batch and sets are cut so that the run ends within some five minutes.
    - An untrained model learns at the rate for training from scratch, and faster in a run that is much shorter than
      one.
    - The average of weights must be shorter than the run: its decay is at most 1 - 25/steps.
    - Without any label for stress its weight is 0.
    """
    free = {
        key for key in ("training.steps", "training.batch_atoms", "training.learning_rate") if key not in config.given
    }
    training, data = config.training, config.data
    if device.type == "cpu" and "training.steps" in free:
        print("No GPU: timing a step …", flush=True)
        gradient, update, forces = _seconds(start.potential, sets.train[0], config)
        mean_atoms = float(np.mean(sets.train.n_atoms))
        together = max(1, int(training.batch_atoms / mean_atoms)) if "training.batch_atoms" in free else 1
        while together > 1 and TRAIN_SECONDS / (update + together * gradient) < 100:
            together //= 2
        if "training.batch_atoms" in free:
            atoms = max(int(sets.train.n_atoms.max()), round(together * mean_atoms))
            training = dataclasses.replace(training, batch_atoms=min(training.batch_atoms, atoms))
        else:
            together = max(1, int(training.batch_atoms / mean_atoms))
        seconds = update + together * gradient
        steps = min(training.steps, max(10, int(TRAIN_SECONDS / seconds)))
        every = (
            max(1, math.ceil(steps / 3)) if "training.validate_every" not in config.given else training.validate_every
        )
        training = dataclasses.replace(training, steps=steps, validate_every=every)
        limits = {"valid_limit": max(8, int(VALID_SECONDS / forces)), "test_limit": max(12, int(TEST_SECONDS / forces))}
        limits = {name: count for name, count in limits.items() if f"data.{name}" not in config.given}
        data = dataclasses.replace(data, **limits)
        print(
            f"No GPU: scaled down to {steps} steps of at most {training.batch_atoms} atoms, about "
            f"{max(1, round(steps * seconds / 60))} min here; training.steps=… sets it yourself.",
            flush=True,
        )
    if not start.trained and "training.learning_rate" in free and config.preset is not None:
        recipe = make_config({"preset": config.preset}, "train").training
        faster = math.sqrt(recipe.steps / max(1, training.steps))
        rate = max(recipe.learning_rate, min(FASTEST, recipe.learning_rate * faster))
        training = dataclasses.replace(training, learning_rate=rate)
    # An average over more than some 4 % of a run still holds weights from before the learning rate fell: on 2,000
    # steps, over 500 of them, it had five times the force error of the weights themselves.
    if "training.ema" not in config.given and training.ema > 0 and training.steps > 0:
        training = dataclasses.replace(training, ema=min(training.ema, max(0.0, 1.0 - 25.0 / training.steps)))
    if training.loss.stress > 0 and not sets.train.has_label("stress"):
        # Molecules have none. What is written says so: a run that is continued, or run again, asks for no more.
        training = dataclasses.replace(training, loss=dataclasses.replace(training.loss, stress=0.0))
    return dataclasses.replace(config, training=training, data=data)


def _seconds(potential: SeZM, item: tuple[Graph, Targets], config: Config) -> tuple[float, float, float]:
    """Time, on one structure and the CPU, a gradient of the loss, an optimiser step, and forces alone."""
    trial = copy.deepcopy(potential)
    optimizer = optim.build_optimizer(trial.parameters(), config.training)
    graph, targets = item
    times = [math.inf, math.inf, math.inf]
    for _ in range(3):  # the first also pays for what is set up once, and others may be using the machine
        clock = time.perf_counter()
        found = differences(evaluate(trial, graph, create_graph=True), targets, graph)
        loss(loss_terms(found, config.training.loss), config.training.loss).backward()
        times[0] = min(times[0], time.perf_counter() - clock)
        clock = time.perf_counter()
        optimizer.step()
        times[1] = min(times[1], time.perf_counter() - clock)
        clock = time.perf_counter()
        evaluate(trial, graph)
        times[2] = min(times[2], time.perf_counter() - clock)
    return times[0], times[1], times[2]
