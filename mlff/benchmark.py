"""How fast a preset trains and runs on this machine, by the very steps of `mlff train` and the calculator.

Structures are simple cubic lattices of 100 atoms, each atom displaced at random, with 15 Å³ an atom: some 60 neighbours
within 6 Å, as in molecular liquids and crystals of light elements. Elements and labels are random; they cost the same
as real ones.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms

from mlff.atoms import graph_from_atoms
from mlff.config import Config, TrainingConfig, make_config, preset_options
from mlff.data.batch import collate, collate_targets
from mlff.derivatives import evaluate
from mlff.graph import Graph, Targets
from mlff.recorded import RECORDED, check_device
from mlff.sezm.potential import SeZM
from mlff.training import Training, fit

LATTICE = (4, 5, 5)
VOLUME = 15.0  # Å³ an atom
BATCHES = 4  # different ones, taken in turn
WARM_STEPS = 14  # not timed: kernels are compiled, sizes of batches recorded
KEYS = {
    "preset": ("mini", "presets, comma-separated"),
    "atoms": ("300,1500", "atoms in a batch"),
    "precision": ("fp32,bf16", "fp32 | tf32 | bf16"),
    "compile": ("false,true,graphs,both", "false | true | graphs | both; the last two where there is a GPU"),
    "steps": ("20", "steps that are timed"),
    "accelerator": ("auto", "auto | cpu | gpu"),
}


@dataclass(frozen=True)
class Row:
    """What was measured of one way to train."""

    edges: int
    step: float  # s, mean
    first: float  # s until the first step is done, compiling included
    memory: float  # bytes at the peak, NaN without a GPU
    forces: float  # s of one evaluation of energies, forces and stress, uncompiled, float32


HEADER = (
    "| preset | atoms | edges | precision | compile | ms a step | peak GB | s to the first step | ms for forces |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def cases(given: Mapping[str, str]) -> list[tuple[Config, int]]:
    """Return what is to be measured: configurations of a run, and atoms in a batch.

    Raises:
        ValueError: a key or a value is not one of those that there are.
    """
    for key in given:
        if key not in KEYS:
            raise ValueError(f"mlff benchmark takes {', '.join(KEYS)}; got {key!r}.")
    values = {key: given.get(key, default).split(",") for key, (default, _) in KEYS.items()}
    device = _device(values["accelerator"][0])
    if "compile" not in given and device.type != "cuda":
        values["compile"] = [way for way in values["compile"] if way not in RECORDED]
    if set(RECORDED) & set(values["compile"]):
        check_device(device)
    (steps,) = (_number("steps", text) for text in values["steps"])
    found = []
    for preset, atoms, precision, way in itertools.product(
        values["preset"], values["atoms"], values["precision"], values["compile"]
    ):
        keys: dict[str, Any] = {"preset": preset, "training.compile": way, "trainer.precision": precision}
        keys |= {"trainer.accelerator": values["accelerator"][0], "training.validate_every": 0}
        keys |= {"training.steps": WARM_STEPS + steps, "trainer.logger": "none", "trainer.log_every": 10**9}
        found.append((make_config(keys, "train"), _number("atoms", atoms)))
    return found


def line(config: Config, atoms: int) -> str:
    """Measure, and return a row of the table; dashes where memory does not suffice."""
    began = f"| {config.preset} | {atoms} |"
    kind = f"{config.trainer.precision} | {config.training.compile}"
    try:
        row = measure(config, atoms)
    except torch.cuda.OutOfMemoryError:
        return f"{began} - | {kind} | out of memory | - | - | - |"
    memory = "-" if math.isnan(row.memory) else f"{row.memory / 1e9:.2f}"
    return (
        f"{began} {row.edges} | {kind} | {1e3 * row.step:.1f} | {memory} | {row.first:.1f} | {1e3 * row.forces:.1f} |"
    )


def _device(accelerator: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() and accelerator != "cpu" else "cpu")


def _number(key: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"{key} must be whole numbers above 0, comma-separated; got {text!r}.")
    return int(text)


def measure(config: Config, atoms: int) -> Row:
    """Train for the steps of a configuration on batches of so many atoms, and time them."""
    assert config.preset is not None
    device = _device(config.trainer.accelerator)
    elements = preset_options(config.preset)[1][:4]
    potential = SeZM.from_options(config.model.options(), elements, seed=config.seed).to(device)
    batches = [batch(elements, potential.cutoff, atoms, seed) for seed in range(BATCHES)]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    training = Timed(potential, config.training, config.seed)
    with tempfile.TemporaryDirectory() as folder, _silence():
        fit(training, Given(batches), Given(batches[:1]), config, Path(folder), lambda _, path: path.touch())
    last = config.training.steps
    return Row(
        edges=batches[0][0].n_edges,
        step=(training.times[last] - training.times[WARM_STEPS]) / (last - WARM_STEPS),
        first=training.times[1] - training.times[0],
        memory=training.memory,
        forces=_forces(potential.eval().requires_grad_(False).to(device), batches[0][0].to(device)),
    )


def batch(elements: Sequence[str], cutoff: float, atoms: int, seed: int) -> tuple[Graph, Targets]:
    """Return labelled structures of 100 atoms, or of one with fewer, with so many atoms together."""
    random = np.random.default_rng(seed)
    graphs, targets = [], []
    spacing = VOLUME ** (1 / 3)
    places = np.array(list(itertools.product(*map(range, LATTICE))), dtype=float) * spacing
    for start in range(0, atoms, len(places)):
        count = min(len(places), atoms - start)
        symbols = random.choice(list(elements), count)
        positions = places[:count] + random.normal(scale=0.15, size=(count, 3))
        graphs.append(graph_from_atoms(Atoms(symbols, positions, cell=np.array(LATTICE) * spacing, pbc=True), cutoff))
        targets.append(
            Targets(
                energy=torch.tensor([random.normal()]),
                forces=torch.from_numpy(random.normal(size=(count, 3))),
                stress=torch.from_numpy(random.normal(size=(1, 3, 3))),
                weight=torch.ones(1, dtype=torch.float64),
                group=("",),
                index=torch.tensor([len(graphs) - 1]),
            )
        )
    return collate(graphs), collate_targets(targets)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What a run says does not belong into a table."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


class Given:
    """A loader of given batches, in turn without an end."""

    def __init__(self, batches: Sequence[tuple[Graph, Targets]]) -> None:
        self.batches = batches
        self.dataset = batches
        self.batch_sampler = self
        self.start, self.plan_of = 0, {}

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch is the same."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Graph, Targets]]:
        return iter(self.batches)


class Timed(Training):
    """Training that notes when the first step, those not timed, and the last one were done."""

    def __init__(self, potential: SeZM, config: TrainingConfig, seed: int) -> None:
        super().__init__(potential, config, seed)
        self.times = {0: time.perf_counter()}
        self.memory = math.nan

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time, when the device has done with what it was asked for."""
        step = self.trainer.global_step
        if step in (1, WARM_STEPS, self.config.steps):
            if self.device.type == "cuda":
                torch.cuda.synchronize()
                self.memory = float(torch.cuda.max_memory_allocated())
            self.times[step] = time.perf_counter()


def _forces(potential: SeZM, graph: Graph) -> float:
    """Time energies, forces and stresses, s."""
    times = []
    for _ in range(8):
        began = time.perf_counter()
        evaluate(potential, graph).forces.cpu()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])
