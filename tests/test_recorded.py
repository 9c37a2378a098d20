"""Steps from recordings are the steps that they are recordings of. On a CPU a recording is a call of the function."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from test_training import Structures
from toy import PairPotential, molecules, structure

from mlff import compiled, training
from mlff.atoms import graph_from_atoms
from mlff.calculator import Calculator
from mlff.config import Config, TrainerConfig, TrainingConfig, make_config
from mlff.data.batch import loader
from mlff.derivatives import evaluate
from mlff.graph import Graph
from mlff.padding import Sizes
from mlff.recorded import (
    BatchSizes,
    RecordedEvaluation,
    RecordingMismatch,
    Recordings,
    cuda_record,
    is_recorded,
    rounded,
)
from mlff.runs import read_metrics
from mlff.sezm.potential import SeZM
from mlff.training import Training, fit

RECIPE = TrainingConfig(
    steps=24, learning_rate=0.01, warmup=4, schedule="cosine", ema=0.5, validate_every=12, batch_atoms=12, batch_edges=0
)


def played(function):
    """Record a function by remembering it."""
    results: list[torch.Tensor] = []

    def replay() -> None:
        results[:] = function()

    return replay, results


def labelled() -> list:
    """Molecules of 1 to 6 atoms, some without forces."""
    random = np.random.default_rng(0)
    items = []
    for number, (graph, _) in enumerate(molecules(12, atoms=(2, 3, 5, 6), seed=4)):
        forces = random.normal(size=(graph.n_atoms, 3)) if number % 3 else None
        items.append(structure(graph.positions, graph.numbers, energy=random.normal(), forces=forces))
    return [*items, structure([[0.0, 0.0, 0.0]], [8], energy=-1.0)]


def sezm(dtype: torch.dtype, device: str = "cpu") -> SeZM:
    options = {"channels": 8, "n_radial": 4, "n_blocks": 1, "mixing_layers": 1, "lmax": 1, "random_gamma": False}
    potential = SeZM.from_options(options, ["H", "O"], seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for value in potential.parameters():  # branches of a new model are zeros
        value.data += 0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype)
    return potential.to(device)


class Watched(Training):
    """Notes the weights after each step."""

    def __init__(self, potential, recipe):
        super().__init__(potential, recipe)
        self.weights = []

    def _update_average(self):
        super()._update_average()
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            self.weights.append([value.detach().clone() for _, value in self.trained])


def train(folder: Path, potential, recipe: TrainingConfig, accelerator: str = "cpu") -> Watched:
    folder.mkdir(parents=True)
    module = Watched(potential, recipe)
    settings = Config(
        preset="nano", training=recipe, trainer=TrainerConfig(accelerator=accelerator, log_every=1, logger="none")
    )
    data = Structures(labelled())
    batches = loader(data, recipe.batch_atoms, seed=3, shuffle=True)
    fit(module, batches, loader(data, 40), settings, folder, lambda module, path: torch.save(module.state_dict(), path))
    return module


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "cuda_record", lambda: played)


def both_ways(tmp_path: Path, make, recipe: TrainingConfig, accelerator: str = "cpu") -> list[Watched]:
    return [
        train(tmp_path / way, make(), dataclasses.replace(recipe, compile=way), accelerator)
        for way in ("false", "graphs")
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", ["hybridmuon", "adamw"])
def test_recorded_steps_are_steps(tmp_path: Path, on_cpu, optimizer: str, accumulate: int) -> None:
    """Weights after each step, averages, losses and errors; batches of several sizes, an isolated atom among them.

    The learning rate of a recorded step is a float32, so that a step of 1e-2 differs by 1e-9, and gradients that nearly
    cancel make more of it later on: 3e-7 was seen. A wrong step is off by 1e-2.
    """
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer, accumulate=accumulate)
    plain, recorded = both_ways(tmp_path, lambda: PairPotential(seed=1, dtype=torch.float64), recipe)
    assert len(plain.weights) == len(recorded.weights) == 24
    for first, second in zip(plain.weights, recorded.weights, strict=True):
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(plain.averaged.parameters(), recorded.averaged.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    rows = [read_metrics(tmp_path / way / "metrics.csv") for way in ("false", "graphs")]
    for name in ("step", "learning_rate", "train_loss", "train_forces_mae", "train_energy_mae_per_atom", "valid_loss"):
        expected = [row[name] for row in rows[0]]
        assert [row[name] for row in rows[1]] == pytest.approx(expected, rel=1e-4, nan_ok=True)
    assert 1 <= len(recorded._recorded._batches) <= 8 and len(recorded._recorded._updates) == 1


def test_recorded_steps_of_the_model(tmp_path: Path, on_cpu) -> None:
    """With every kind of parameter, on all routes of the optimiser."""
    recipe = dataclasses.replace(RECIPE, steps=6, validate_every=0)
    plain, recorded = both_ways(tmp_path, lambda: sezm(torch.float64), recipe)
    for one, other in zip(plain.weights[-1], recorded.weights[-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert len(recorded._recorded._batches) >= 1


def test_compiled_steps_are_recorded_too(tmp_path: Path, on_cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`both`: the recording holds compiled code."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    recipe = dataclasses.replace(RECIPE, steps=6, validate_every=0)
    plain = train(tmp_path / "plain", PairPotential(seed=1, dtype=torch.float64), recipe)
    both = train(
        tmp_path / "both", PairPotential(seed=1, dtype=torch.float64), dataclasses.replace(recipe, compile="both")
    )
    assert isinstance(both._evaluate, compiled.CompiledEvaluation) and len(both._recorded._batches) >= 1
    for one, other in zip(plain.weights[-1], both.weights[-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_recorded_run_goes_on_unrecorded(tmp_path: Path, on_cpu) -> None:
    """A checkpoint of one is a checkpoint of the other, learning rates included."""
    recipe = dataclasses.replace(RECIPE, steps=6, validate_every=6, schedule="constant")
    both_ways(tmp_path, lambda: PairPotential(seed=1, dtype=torch.float64), recipe)
    ends = [torch.load(tmp_path / way / "checkpoints" / "last.ckpt", weights_only=True) for way in ("false", "graphs")]
    assert ends[0]["optimizer_states"][0]["param_groups"] == ends[1]["optimizer_states"][0]["param_groups"]
    assert list(ends[0]["state_dict"]) == list(ends[1]["state_dict"])


def test_a_recording_that_adds_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(function):
        replay, results = played(function)
        return lambda: (replay(), replay()), results

    monkeypatch.setattr(training, "cuda_record", lambda: twice)
    with pytest.raises(RecordingMismatch, match="gradients differ by"):
        train(tmp_path / "run", PairPotential(seed=1), dataclasses.replace(RECIPE, compile="graphs"))


def test_what_cannot_be_recorded_runs_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Said once for the gradients and once for the steps, and nothing else changes."""

    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(training, "cuda_record", lambda: refuse)
    plain, refused = both_ways(tmp_path, lambda: PairPotential(seed=1, dtype=torch.float64), RECIPE)
    for one, other in zip(plain.weights[-1], refused.weights[-1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in said if "cannot be recorded, so it runs as it is" in text]) == 2
    assert all("and more" not in text for text in said)


def test_inputs_go_where_the_recording_looks() -> None:
    """Called once, recorded at the second call of a shape, replayed on what each call brings."""
    calls = []

    def function(inputs):
        calls.append([x.data_ptr() for x in inputs])
        return (inputs[0] * 2 + inputs[1],)

    recordings = Recordings(function, played)
    for number in range(5):
        x, y = torch.full((3,), float(number)), torch.ones(3)
        assert torch.equal(recordings([x, y])[0], 2 * x + y)
    assert len(recordings) == 1 and len({tuple(call) for call in calls[1:]}) == 1
    recordings([torch.ones(4), torch.ones(4)])
    recordings([torch.ones(3), torch.ones(3)], key="another")
    assert len(recordings) == 1


def test_batches_take_few_sizes() -> None:
    """Of 500 batches with as many atoms as fit, and edges that vary by a third: a handful, few edges too many."""
    random = np.random.default_rng(0)
    sizes = BatchSizes()
    for _ in range(500):
        atoms = int(random.integers(280, 301))
        own = Sizes(atoms, int(atoms * random.uniform(45, 60)), int(random.integers(8, 30)))
        chosen = sizes.fitting(own)
        assert chosen.atoms > own.atoms and chosen.structures > own.structures
        assert own.edges <= chosen.edges <= 1.25 * own.edges
        # An added atom has no more than eight times the edges of another: one program goes through all of them.
        assert (chosen.edges - own.edges) / (chosen.atoms - own.atoms) <= 8 * own.edges / own.atoms + 1
    assert len(sizes.chosen) <= 6
    assert sizes.fitting(Sizes(3000, 180_000, 1)).atoms == 3328  # a large structure has a size of its own,
    assert sizes.fitting(Sizes(290, 9_000, 9)).atoms == 320  # and batches that come later do not pay for it
    assert [rounded(number) for number in (1, 7, 16, 17, 33, 1000, 1025)] == [1, 7, 16, 18, 36, 1024, 1152]


def test_without_a_gpu_graphs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keys = {"preset": "nano", "training.compile": "graphs", "output": str(tmp_path / "run")}
    with pytest.raises(ValueError, match="training.compile=graphs or both records the work of a GPU"):
        training.run(make_config(keys))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["hybridmuon", "adamw"])
def test_cuda_graphs_take_the_same_steps(tmp_path: Path, optimizer: str) -> None:
    """In float32, of a model with all its operators; sums over neighbours come in another order each time."""
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer, steps=12, learning_rate=1e-3)
    plain, recorded = both_ways(tmp_path, lambda: sezm(torch.float32, "cuda"), recipe, "gpu")
    assert len(recorded._recorded._batches) >= 1 and len(recorded._recorded._updates) == 1
    assert not recorded._recorded._batches.refused and not recorded._recorded._updates.refused
    rows = [read_metrics(tmp_path / way / "metrics.csv") for way in ("false", "graphs")]
    assert [row["train_loss"] for row in rows[1]] == pytest.approx([row["train_loss"] for row in rows[0]], rel=1e-2)


@pytest.mark.gpu
def test_a_cuda_graph_draws_new_random_numbers() -> None:
    """Each replay rolls the frames of edges anew, as the seed of its step says."""
    recordings = Recordings(lambda inputs: (torch.rand_like(inputs[0]),), cuda_record())
    x = torch.zeros(8, device="cuda")
    found = []
    for seed in (1, 1, 2, 1):
        torch.manual_seed(seed)
        found.append(recordings([x])[0].clone())
    assert torch.equal(found[1], found[3]) and not torch.equal(found[1], found[2])
    assert len(recordings) == 1


@pytest.mark.parametrize(
    ("way", "device", "strategy", "recorded"),
    [
        ("auto", "cuda", "auto", True),
        ("auto", "cuda", "zero1", True),
        ("auto", "cuda", "fsdp", False),  # weights are in slices there
        ("auto", "cpu", "auto", False),
        ("graphs", "cuda", "auto", True),
        ("both", "cuda", "ddp", True),
        ("false", "cuda", "auto", False),
        ("true", "cuda", "auto", False),
    ],
)
def test_by_default_steps_are_recorded_where_they_can_be(way, device, strategy, recorded):
    assert is_recorded(way, torch.device(device), strategy) is recorded


# Calculations.


def dynamics(count: int = 6) -> list[Graph]:
    """A box of atoms that moves, so that the number of its edges changes; then a molecule, an atom, and none."""
    random = np.random.default_rng(3)
    places = random.uniform(0, 7, size=(20, 3))
    numbers = [1, 8] * 10
    frames = []
    for step in range(count):
        moved = Atoms(numbers, places + 0.05 * step * random.normal(size=places.shape), cell=[7, 7, 7], pbc=True)
        frames.append(graph_from_atoms(moved, 4.0))
    frames += [graph_from_atoms(Atoms("OH2", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]), 4.0) for _ in range(2)]
    return [
        *frames,
        *(graph_from_atoms(Atoms("O", [[0, 0, 0]]), 4.0) for _ in range(2)),
        graph_from_atoms(Atoms(), 4.0),
    ]


def check_evaluation(potential: SeZM, record, device: str, tolerance: float) -> RecordedEvaluation:
    recorded = RecordedEvaluation(potential, potential.cutoff, record)
    for graph in dynamics():
        found, expected = recorded(graph.to(device)), evaluate(potential, graph.to(device))
        for name in ("energy", "energies", "forces", "virial", "stress"):
            value, other = getattr(found, name), getattr(expected, name)
            assert value.shape == other.shape and not value.requires_grad
            assert torch.equal(value.isnan(), other.isnan()), name
            scale = max(1.0, float(other.nan_to_num().abs().max())) if other.numel() else 1.0
            assert torch.allclose(value, other, rtol=0, atol=tolerance * scale, equal_nan=True), name
    return recorded


def still(dtype: torch.dtype, device: str = "cpu") -> SeZM:
    return sezm(dtype, device).eval().requires_grad_(False)


def test_recorded_calculations_are_calculations() -> None:
    """Energies, forces, virials and stresses of a moving box, a molecule and an atom, filled up to recorded sizes."""
    recorded = check_evaluation(still(torch.float64), lambda: played, "cpu", 1e-12)
    assert recorded.recordings is not None and len(recorded.recordings) >= 2
    assert len(recorded.sizes.chosen) < len(dynamics()) - 2  # frames of the box share sizes


def test_a_wrong_recorded_calculation_is_noticed() -> None:
    def wrong(function):
        replay, results = played(function)

        def replay_wrongly() -> None:
            replay()
            results[2] = results[2] * 1.1  # forces

        return replay_wrongly, results

    recorded = RecordedEvaluation(still(torch.float64), 4.0, lambda: wrong)
    graph = dynamics(1)[0]
    recorded(graph)
    with pytest.raises(RecordingMismatch, match="recorded calculation is not the one it was made from"):
        recorded(graph)


def test_recordings_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlff.recorded.MOST", 2)
    recorded = check_evaluation(still(torch.float64), lambda: played, "cpu", 1e-12)
    assert recorded.recordings is not None and len(recorded.recordings) <= 3


def test_large_structures_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlff.recorded.LARGE", 10)
    recorded = RecordedEvaluation(still(torch.float64), 4.0, lambda: played)
    graph = dynamics(1)[0]
    for _ in range(3):
        recorded(graph)
    assert recorded.recordings is None


@pytest.mark.gpu
def test_recorded_calculations_on_a_gpu() -> None:
    recorded = check_evaluation(still(torch.float32, "cuda"), cuda_record, "cuda", 1e-5)
    assert recorded.recordings is not None and len(recorded.recordings) >= 2 and not recorded.recordings.refused


@pytest.mark.gpu
def test_a_calculator_on_a_gpu_records() -> None:
    model = still(torch.float32, "cuda")
    recorded, plain = Calculator(model), Calculator(model, compile=False)
    atoms = Atoms("OH2", [[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    for _ in range(4):
        atoms.rattle(0.02)
        for calculator in (recorded, plain):
            calculator.calculate(atoms)
        assert np.abs(recorded.results["forces"] - plain.results["forces"]).max() < 1e-4
    assert len(recorded._evaluate.recordings) == 1
