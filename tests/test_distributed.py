"""Several ranks do what one does: two processes on the CPU, joined by gloo.

This file is also the program that the ranks run: each test starts it twice with the name of a function.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toy import molecules, structure

from mlff import distributed, ranks, sharding
from mlff.checkpoint import save
from mlff.config import Config, TrainerConfig, TrainingConfig
from mlff.data.batch import collate, collate_targets
from mlff.runs import read_metrics
from mlff.sezm.potential import SeZM
from mlff.training import Training, fit

ROOT = Path(__file__).parents[1]
STRATEGIES = ("ddp", "zero1", "fsdp")
OPTIONS = {"channels": 8, "n_radial": 4, "n_blocks": 1, "mixing_layers": 1, "lmax": 1, "random_gamma": False}
RECIPE = TrainingConfig(
    steps=4, learning_rate=0.01, warmup=0, schedule="constant", ema=0.5, validate_every=2, batch_edges=0
)


def launch(function: str, folder: Path, *words: str, count: int = 2, timeout: float = 120) -> list[str]:
    """Run a function of this file on several ranks; return what each printed. All must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(count), "NODE_RANK": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, function, str(folder), *words],
            env={**shared, "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        told = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, told, strict=True):
        assert process.returncode == 0, error
    return [out for out, _ in told]


def config(strategy="ddp", devices=2, recipe=RECIPE, **machine) -> Config:
    keys = {"accelerator": "cpu", "strategy": strategy, "devices": devices, "log_every": 1, "logger": "none"}
    return Config(preset="nano", training=recipe, trainer=TrainerConfig(**{**keys, **machine}))


def join(items):
    graphs, targets = zip(*items, strict=True)
    return collate(graphs), collate_targets(targets)


class Given:
    """A loader of given batches, the same in each epoch."""

    def __init__(self, batches):
        self.batches, self.batch_sampler, self.start, self.plan_of = batches, self, 0, {}

    def set_epoch(self, epoch):
        pass

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        start, self.start = self.start, 0
        return iter(self.batches[start:])


def potential(dtype=torch.float64) -> SeZM:
    """A model whose every branch counts: a new one has branches of zeros."""
    model = SeZM.from_options(OPTIONS, ["H", "O"], seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for value in model.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=generator).to(dtype)
    return model


def labelled(count, seed, atoms=(3, 2, 5), forces=True, weight=1.0):
    """Molecules with energies and forces that follow from nothing but the seed."""
    random = np.random.default_rng(seed)
    items = []
    for graph, _ in molecules(count, atoms=atoms, seed=seed):
        labels = random.normal(size=(graph.n_atoms, 3)) if forces else None
        kept = structure(graph.positions, graph.numbers, energy=random.normal(), forces=labels, weight=weight)
        items.append(kept)
    return items


def isolated(energy=-1.0):
    return structure([[0.0, 0.0, 0.0]], [8], energy=energy)


def parts() -> list[list[list]]:
    """Three batches as [batch][rank][structure]: unequal, once without forces, once with an atom alone, weighted."""
    return [
        [labelled(3, 1), labelled(1, 2, forces=False)],
        [labelled(2, 3, atoms=(5, 4)), [isolated()]],
        [labelled(1, 4, weight=3.0), labelled(4, 5, atoms=(2,))],
    ]


VALID = labelled(3, 9)


class Watched(Training):
    """Notes the whole gradient of every step before it is clipped."""

    def __init__(self, potential, recipe):
        super().__init__(potential, recipe)
        self.gradients = []

    def configure_gradient_clipping(self, optimizer, *_, **__):
        found = {name: value.grad for name, value in self.trained if value.grad is not None}
        self.gradients.append({name: gradient.clone() for name, gradient in sharding.whole(found).items()})
        super().configure_gradient_clipping(optimizer)


def train(folder: Path, strategy: str, devices: int, batches, recipe=RECIPE, resume=None, model=None, **machine):
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(strategy, devices, recipe, **machine)
    module = Watched(potential() if model is None else model, recipe)
    valid = Given([join(VALID[ranks.rank() :: ranks.count()])])
    outcome = fit(module, Given(batches), valid, settings, folder, save, resume)
    torch.save(module.gradients, folder / f"gradients-{ranks.rank()}.pt")
    return module, outcome


OPTIMIZERS = ("adamw", "hybridmuon")


def train_both(folder: Path, strategy: str, devices: int, batches, resume: Path | None = None, steps: int = 4):
    """Train over the batches with either optimiser."""
    for name in OPTIMIZERS:
        recipe = dataclasses.replace(RECIPE, optimizer=name, steps=steps)
        checkpoint = None if resume is None else resume / name / "checkpoints" / "last.ckpt"
        train(folder / name, strategy, devices, batches, recipe, checkpoint)


def rank_train(folder: Path, strategy: str, resume: str = "", steps: str = "4"):
    """One rank of a run over `parts`."""
    distributed.start(config(strategy).trainer)
    batches = [join(batch[ranks.rank()]) for batch in parts()]
    train_both(folder, strategy, 2, batches, Path(resume) if resume else None, int(steps))


def train_alone(folder: Path, resume: Path | None = None, steps: int = 4) -> Path:
    """The same batches, whole, on one rank."""
    batches = [join([item for part in batch for item in part]) for batch in parts()]
    train_both(folder, "auto", 1, batches, resume, steps)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return train_alone(tmp_path_factory.mktemp("alone"))


def last(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def close(one, other, tolerance):
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# Sums of float64 in another order make 1e-14 of gradients of some tens. AdamW divides them by their size or by 1e-8,
# whichever is more. A matrix whose gradient is round-off alone, as of edges that only another rank has, is made
# orthogonal like any other; a wrong step would be off by the learning rate, 1e-2.
TOLERANCE = {"adamw": 1e-9, "hybridmuon": 1e-5}


def same_runs(one: Path, two: Path, optimizer: str, gradients: int):
    """Gradients, weights, averages, optimiser states, losses and names are those of the other run."""
    pairs = [torch.load(folder / optimizer / "gradients-0.pt") for folder in (one, two)]
    assert len(pairs[0]) == len(pairs[1])
    for first, second in list(zip(*pairs, strict=True))[:gradients]:
        assert max(gradient.abs().max() for gradient in first.values()) > 1.0
        close(first, second, 1e-12)
    tolerance = TOLERANCE[optimizer]
    ends = [last(folder / optimizer) for folder in (one, two)]
    assert list(ends[0]["state_dict"]) == list(ends[1]["state_dict"])
    close(ends[0]["state_dict"], ends[1]["state_dict"], tolerance)
    states = [end["optimizer_states"][0] for end in ends]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for number, state in states[0]["state"].items():
        assert state.keys() == states[1]["state"][number].keys()
        close(state, states[1]["state"][number], tolerance)
    rows = [read_metrics(folder / optimizer / "metrics.csv") for folder in (one, two)]
    for name in ("step", "train_loss", "train_energy_mae_per_atom", "train_forces_mae", "valid_loss"):
        expected = [row[name] for row in rows[0]]
        assert [row[name] for row in rows[1]] == pytest.approx(expected, rel=tolerance, nan_ok=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rt14_two_ranks_are_one(alone, tmp_path, strategy):
    """The gradient is that of one rank to round-off only if the means of the loss are over the whole batch."""
    launch("rank_train", tmp_path / "two", strategy)
    for optimizer in OPTIMIZERS:
        same_runs(alone, tmp_path / "two", optimizer, gradients=2)
        written = load_file(tmp_path / "two" / optimizer / "model.safetensors")
        assert written.keys() == potential().state_dict().keys()
    # What two ranks have saved, one goes on from, and the other way about.
    train_alone(tmp_path / "whole", steps=7)
    train_alone(tmp_path / "then_one", tmp_path / "two", steps=7)
    launch("rank_train", tmp_path / "then_two", strategy, str(alone), "7")
    for optimizer in OPTIMIZERS:
        ends = [last(tmp_path / name / optimizer) for name in ("whole", "then_one", "then_two")]
        assert ends[1]["global_step"] == ends[2]["global_step"] == 7
        for end in ends[1:]:
            close(ends[0]["state_dict"], end["state_dict"], 10 * TOLERANCE[optimizer])


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
