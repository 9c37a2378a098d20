"""The training loop: forces in every loop, averages kept apart, resuming bit for bit, stopping in order."""

# pyright: reportGeneralTypeIssues=false, reportOptionalIterable=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gc
import math
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import PairPotential, molecules, structure

from mlff import optim
from mlff.config import Config, TrainerConfig, TrainingConfig
from mlff.data.batch import loader
from mlff.derivatives import evaluate
from mlff.loss import differences
from mlff.runs import METRICS_COLUMNS, MetricsFile, find_checkpoint, read_metrics
from mlff.sezm.potential import SeZM
from mlff.training import EndlessBatches, Training, blocks_in, fit, trainer

RECIPE = TrainingConfig(
    steps=20, learning_rate=0.01, warmup=5, validate_every=7, ema=0.9, schedule="cosine", batch_atoms=8, batch_edges=0
)


class Structures:
    """A data set in memory, as loaders want it; remembers what was asked for."""

    def __init__(self, items):
        self.items, self.asked = items, []
        self.n_atoms = np.array([graph.n_atoms for graph, _ in items])

    def n_edges(self):
        return np.array([graph.n_edges for graph, _ in self.items])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.items[index]


def label(graph, targets):
    """Labels of a potential that is to be learnt."""
    truth = evaluate(PairPotential(seed=5), graph)
    return dataclasses.replace(targets, energy=truth.energy, forces=truth.forces)


def labelled(count=12, seed=0):
    return Structures(molecules(count, seed=seed, label=label))


def config(recipe=RECIPE, **machine):
    return Config(
        preset="nano", training=recipe, trainer=TrainerConfig(accelerator="cpu", **{"log_every": 5, **machine})
    )


def save(module, path):
    save_file(module.state_dict(), path)


class Spy(Training):
    """Notes learning rates and weights after every step, and can ask for a stop."""

    def __init__(self, potential, recipe, stop_at=None, signal_at=None):
        super().__init__(potential, recipe)
        self.rates, self.weights, self.stop_at, self.signal_at = [], [], stop_at, signal_at

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.weights.append([value.detach().clone() for value in self.potential.parameters()])

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == self.stop_at:
            self.trainer.should_stop = True
        if self.trainer.global_step == self.signal_at:
            os.kill(os.getpid(), signal.SIGINT)


def run(folder, recipe=RECIPE, resume=None, data=None, valid=None, **spy):
    """Train into a folder; return the module, the data that were seen, and the outcome."""
    folder.mkdir(exist_ok=True)
    data = data or labelled()
    valid = valid or labelled(4, seed=9)
    module = Spy(PairPotential(seed=1), recipe, **spy)
    batches = loader(data, recipe.batch_atoms, seed=3, shuffle=True)
    outcome = fit(module, batches, loader(valid, 8), config(recipe), folder, save, resume)
    return module, data.asked, outcome


def equal_states(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_rt1_forces_in_every_loop(tmp_path):
    """Fit with validation, validate, test and predict, with the Trainer's own inference mode, give the same forces."""
    data = labelled(6)
    batches = loader(data, 8)
    module = Training(PairPotential(), RECIPE)
    expected = evaluate(module.judged, batches.dataset[0][0]).forces
    loop = trainer(config(), None, [])
    (first, *_) = loop.predict(module, batches)
    assert torch.equal(first["forces"][: len(expected)], expected)
    assert expected.abs().max() > 0.1

    from mlff.loss import ErrorSums, differences

    sums = ErrorSums(RECIPE.loss)
    for graph, targets in batches:
        sums.update(differences(evaluate(module.judged, graph), targets, graph))
    for name in ("validate", "test"):
        getattr(trainer(config(), None, []), name)(module, batches, verbose=False)
        assert module.valid_values == pytest.approx(sums.compute(), rel=1e-12, nan_ok=True)

    trained, _, outcome = run(tmp_path / "fit", valid=data)
    sums.reset()
    for graph, targets in batches:
        sums.update(differences(evaluate(trained.judged, graph), targets, graph))
    assert trained.valid_values == pytest.approx(sums.compute(), rel=1e-12, nan_ok=True)
    assert (
        outcome.best_values["forces_mae"] < 0.9 * read_metrics(tmp_path / "fit" / "metrics.csv")[1]["valid_forces_mae"]
    )


def test_rt1_memory_does_not_grow_while_validating():
    """50 batches leave no tensor behind."""
    graph, targets = labelled(1)[0]
    module = Training(PairPotential(), RECIPE)
    module.validation_step((graph, targets), 0)

    def living():
        gc.collect()
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

    before = living()
    for place in range(50):
        module.validation_step((graph, targets), place)
    assert living() <= before + 1  # the sums are one tensor, made anew each time


def test_rt4_checkpoints_hold_weights_and_average_apart(tmp_path):
    """At every validation the file holds the raw weights of that step, and the average over the steps until then."""
    start = [value.detach().clone() for value in PairPotential(seed=1).parameters()]
    module, _, outcome = run(tmp_path / "a", dataclasses.replace(RECIPE, ema=0.5), stop_at=11)
    saved = torch.load(tmp_path / "a" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    averages = [start]
    for weights in module.weights:
        averages.append([torch.lerp(old, new, 0.5) for old, new in zip(averages[-1], weights, strict=True)])
    names = [name for name, _ in module.potential.named_parameters()]
    for name, raw, mean in zip(names, module.weights[-1], averages[-1], strict=True):
        assert torch.equal(saved[f"potential.{name}"], raw)
        torch.testing.assert_close(saved[f"averaged.{name}"], mean)
        assert not torch.equal(saved[f"averaged.{name}"], raw)
    written = load_file(tmp_path / "a" / "model.safetensors")
    for name, mean in zip(names, averages[outcome.best_step], strict=True):  # the best model is an averaged one
        torch.testing.assert_close(written[name], mean)


@pytest.mark.parametrize("stop", [7, 8, 14])
def test_rt5_a_continued_run_is_the_uninterrupted_one(tmp_path, stop):
    """Learning rates, weights, averages, moments, order of data, curves, bit for bit; 7 and 14 are validations."""
    whole, seen, _ = run(tmp_path / "a")
    first, seen_first, outcome = run(tmp_path / "b", stop_at=stop)
    assert outcome.steps == stop and not outcome.interrupted
    second, seen_second, outcome = run(tmp_path / "b", resume=tmp_path / "b" / "checkpoints" / "last.ckpt")
    assert outcome.steps == 20
    assert first.rates + second.rates == whole.rates
    assert whole.rates == [optim.learning_rate(step, RECIPE) for step in range(20)]
    assert seen_first + seen_second == seen
    assert len(set(seen[:12])) == 12  # the first epoch sees each structure once
    assert equal_states(whole, second)
    ends = [torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("a", "b")]
    assert ends[0]["global_step"] == ends[1]["global_step"] == 20
    assert ends[0]["data_position"] == ends[1]["data_position"]
    moments = [end["optimizer_states"][0]["state"] for end in ends]
    for one, other in zip(moments[0].values(), moments[1].values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    if stop in (7, 14):
        assert (tmp_path / "a" / "metrics.csv").read_text() == (tmp_path / "b" / "metrics.csv").read_text()


def test_rows_after_the_checkpoint_are_written_again(tmp_path):
    """A run that was killed after its last checkpoint leaves rows that did not happen for the one that goes on."""
    run(tmp_path / "a")
    run(tmp_path / "b", stop_at=7)
    MetricsFile(tmp_path / "b" / "metrics.csv", after_step=7).add(8, {"train_loss": 1.0})
    run(tmp_path / "b", resume=tmp_path / "b" / "checkpoints" / "last.ckpt")
    assert (tmp_path / "a" / "metrics.csv").read_text() == (tmp_path / "b" / "metrics.csv").read_text()


def test_a_finished_run_can_be_made_longer(tmp_path):
    run(tmp_path / "a", dataclasses.replace(RECIPE, steps=6))
    longer = dataclasses.replace(RECIPE, steps=12)
    module, _, outcome = run(tmp_path / "a", longer, resume=tmp_path / "a" / "checkpoints" / "last.ckpt")
    assert outcome.steps == 12
    assert module.rates == [optim.learning_rate(step, longer) for step in range(6, 12)]


def test_random_numbers_of_a_step_do_not_depend_on_the_past():
    module = Training(PairPotential(), RECIPE, seed=4)
    drawn = []
    for noise in (0, 100):
        torch.rand(noise)
        module.on_train_batch_start(None, 17)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_rt9_three_structures_and_one_for_validation(tmp_path):
    """Fewer structures than a batch holds: one batch of three."""
    recipe = dataclasses.replace(RECIPE, steps=2, batch_atoms=100)
    _, seen, outcome = run(tmp_path / "a", recipe, data=labelled(3), valid=labelled(1, seed=9))
    assert sorted(seen[:3]) == [0, 1, 2] and len(seen) == 6
    assert outcome.steps == 2


def test_rt12_gradients_reach_the_optimiser_clipped(tmp_path):
    norms = []

    class Watched(Spy):
        def optimizer_step(self, *arguments):
            super().optimizer_step(*arguments)
            found = [p.grad.double().square().sum().item() for p in self.potential.parameters() if p.grad is not None]
            norms.append(math.sqrt(sum(found)))  # what the optimiser has just used

    for clip, expected in ((0.0, None), (0.25, 0.25)):
        norms.clear()
        recipe = dataclasses.replace(RECIPE, steps=3, gradient_clip=clip)
        batches = loader(labelled(), 8)
        fit(Watched(PairPotential(seed=1), recipe), batches, batches, config(recipe), tmp_path, save)
        if expected is None:
            assert min(norms) > 1.0
        else:
            assert norms == pytest.approx([expected] * 3, rel=1e-6)


def test_accumulation_counts_optimiser_steps(tmp_path):
    """Two batches a step: half the steps in the same data, and validation still by steps."""
    recipe = dataclasses.replace(RECIPE, steps=4, accumulate=2, validate_every=2, batch_atoms=5, learning_rate=1e-3)
    module, seen, outcome = run(tmp_path / "a", recipe)
    assert outcome.steps == 4 and len(module.rates) == 4
    rows = read_metrics(tmp_path / "a" / "metrics.csv")
    assert [row["step"] for row in rows if not math.isnan(row["valid_loss"])] == [2, 4]


def test_rt16_large_reference_energies_keep_small_parts():
    """-10000 eV of reference energies and a network part of 0.123 eV, in a float32 model: right to 1e-3 eV."""
    potential = PairPotential(dtype=torch.float32)
    graph, _ = molecules(1, atoms=(4,))[0]
    network = evaluate(potential, graph).energy.item()
    potential.reference_energies += -2500.0 + (0.123 - network) / 4
    assert evaluate(potential, graph).energy.item() == pytest.approx(-10000 + 0.123, abs=1e-6)
    graph, targets = structure(graph.positions, graph.numbers, energy=-10000.0)
    from mlff.loss import differences

    assert differences(evaluate(potential, graph), targets, graph).energy.item() == pytest.approx(0.123 / 4, abs=1e-6)


def sezm(**options):
    """A small model whose branches all count."""
    small = {"channels": 8, "n_radial": 4, "n_blocks": 1, "mixing_layers": 1, "lmax": 1, "n_atten_head": 1}
    model = SeZM.from_options({**small, **options}, ["H", "O"], seed=1)
    generator = torch.Generator().manual_seed(2)
    for value in model.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=generator)
    return model


def test_rt16_bfloat16_in_the_blocks_alone():
    """-10000 eV and a small network part: their sum is right, and geometry, sums and loss are not taken in bfloat16."""
    model = sezm(random_gamma=False)
    graph, targets = molecules(1, atoms=(5,))[0]
    full = evaluate(model, graph)
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, i, out, name=name: seen.update({name: getattr(out, "dtype", None)}))
    with blocks_in(model, torch.bfloat16):
        half = evaluate(model, graph, create_graph=True)
    assert model.block_dtype is None
    reduced = {name for name, dtype in seen.items() if dtype == torch.bfloat16}
    assert reduced and all(name.startswith("trunk.") for name in reduced)
    kept = ("basis", "radial", "environment", "geometry", "harmonics", "readout", "head")
    assert all(seen[name] == torch.float32 for name in kept)
    # bfloat16 keeps 8 bits: 0.4 % of what the blocks add.
    error = (half.energy - full.energy).abs().item()
    assert 0 < error < 0.004 * full.energy.abs().item()
    assert 0 < (half.forces - full.forces).abs().max() < 0.02 * full.forces.abs().max()
    model.reference_energies += -2000.0
    with blocks_in(model, torch.bfloat16):
        assert evaluate(model, graph).energy.item() + 10000 == pytest.approx(half.energy.item(), abs=1e-6)
    found = differences(half, dataclasses.replace(targets, energy=half.energy.detach() - 0.123), graph)
    assert found.energy.dtype == found.forces.dtype == torch.float64
    assert found.energy.item() * 5 == pytest.approx(0.123, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_rt16_each_precision_trains(tmp_path, precision):
    """A hundred steps without NaN, towards the labels; all that is kept is float32 or better."""
    recipe = dataclasses.replace(RECIPE, steps=100, validate_every=0, learning_rate=3e-3, batch_atoms=24)
    module = Training(sezm(), recipe, seed=1)
    valid = loader(labelled(4, seed=9), 24)
    fit(module, loader(labelled(), 24, shuffle=True), valid, config(recipe, precision=precision), tmp_path, save)
    losses = [row["train_loss"] for row in read_metrics(tmp_path / "metrics.csv")]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.9 * losses[0]
    for value in module.state_dict().values():
        assert value.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
        assert not value.is_floating_point() or bool(value.isfinite().all())


def test_a_half_written_checkpoint_is_never_picked(tmp_path):
    """A run that was killed while it wrote leaves a draft beside the last whole checkpoint, or alone."""
    settings = dataclasses.replace(config(), output=str(tmp_path / "a"))
    folder = tmp_path / "a" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / ".last.ckpt.draft").write_bytes(b"PK half of it")
    assert find_checkpoint(settings, tmp_path / "a") is None
    run(tmp_path / "a", stop_at=7)
    (folder / ".last.ckpt.draft").write_bytes(b"PK half of it")
    found = find_checkpoint(settings, tmp_path / "a")
    assert found is not None and found.name == "last.ckpt"
    _, _, outcome = run(tmp_path / "a", resume=found)
    assert outcome.steps == 20
    assert [path.name for path in folder.iterdir()] == ["last.ckpt"]


def test_another_cut_of_the_epoch_goes_on_with_the_next(tmp_path, capsys):
    """Inside an epoch the place of a checkpoint means nothing to other batches; between epochs it does."""
    run(tmp_path / "a", stop_at=7)
    position = torch.load(tmp_path / "a" / "checkpoints" / "last.ckpt", weights_only=True)["data_position"]
    assert position["batches"] > 0
    same, other = (EndlessBatches(loader(labelled(), atoms, seed=3, shuffle=True)) for atoms in (8, 16))
    same.go_to(position)
    assert same.position() == position
    other.go_to(position)
    assert (other.epoch, other.taken) == (position["epoch"] + 1, 0)
    assert "(batch_atoms 8 -> 16): going on with the next epoch" in capsys.readouterr().out
    other.go_to({**position, "batches": 0})
    assert (other.epoch, other.taken) == (position["epoch"], 0)


def test_rates_by_room(tmp_path):
    """A rate of zero leaves a room as it was, at every step and for both optimisers."""
    for optimizer in ("hybridmuon", "adamw"):
        recipe = dataclasses.replace(RECIPE, steps=5, optimizer=optimizer)
        model = sezm()
        optim.set_rates(model, {"trunk": 0.5, "trunk.blocks.0.convolution": 0.0})
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        module = Spy(model, recipe)
        batches = loader(labelled(), 8)
        fit(module, batches, batches, config(recipe), tmp_path / optimizer, save)
        still = {name for name, value in model.named_parameters() if torch.equal(value, before[name])}
        assert still and all(name.startswith("trunk.blocks.0.convolution.") for name in still)
        assert len(still) == sum(name.startswith("trunk.blocks.0.convolution.") for name in before)
        assert {group["rate"] for group in module.trainer.optimizers[0].param_groups} == {0.0, 0.5, 1.0}
        table = optim.route_table(model, optimizer)
        assert "learning rate x 0.5" in table and "learning rate x 0" in table
        assert ("muon" in table) == (optimizer == "hybridmuon")


def test_rp1_every_file_loads_without_code(tmp_path):
    run(tmp_path / "a", dataclasses.replace(RECIPE, steps=3))
    state = torch.load(tmp_path / "a" / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")
    assert {"state_dict", "optimizer_states", "callbacks", "data_position"} <= set(state)


def test_metrics_have_their_columns(tmp_path):
    run(tmp_path / "a")
    with open(tmp_path / "a" / "metrics.csv", newline="") as file:
        assert tuple(next(csv.reader(file))) == METRICS_COLUMNS
    rows = read_metrics(tmp_path / "a" / "metrics.csv")
    assert [row["step"] for row in rows] == [5, 7, 10, 14, 15, 20]
    assert all(np.isfinite(row["train_loss"]) for row in rows)
    assert [row["step"] for row in rows if np.isfinite(row["valid_forces_norm_mae"])] == [7, 14, 20]
    assert all(np.isnan(row["train_stress_mae"]) for row in rows)
    assert rows[-1]["learning_rate"] == pytest.approx(optim.learning_rate(19, RECIPE))


def test_the_best_model_is_kept_and_training_stops_early(tmp_path):
    """A learning rate that spoils everything: the starting model stays, and three bad validations are enough."""
    recipe = dataclasses.replace(
        RECIPE, learning_rate=30.0, final_learning_rate=30.0, validate_every=2, early_stopping=3
    )
    recipe = dataclasses.replace(recipe, steps=100, warmup=0, schedule="constant", ema=0.0)
    batches, valid = loader(labelled(), 8), loader(labelled(4, seed=9), 8)
    module = Training(PairPotential(seed=1), recipe)
    trainer(config(recipe), None, []).validate(module, valid, verbose=False)
    (tmp_path / "model.safetensors").write_text("the start")
    first = {**module.valid_values, "loss": 0.5 * module.valid_values["loss"]}
    outcome = fit(module, batches, valid, config(recipe), tmp_path, save, first_values=first)
    assert outcome.best_step == 0 and outcome.best_values == first
    assert outcome.steps == 6
    assert (tmp_path / "model.safetensors").read_text() == "the start"


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    """The parameters are named, and the last good checkpoint stays."""
    run(tmp_path / "a", stop_at=7)
    last = tmp_path / "a" / "checkpoints" / "last.ckpt"
    before = last.read_bytes()

    class Broken(Spy):
        def training_step(self, batch, batch_idx):
            value = super().training_step(batch, batch_idx)
            return value + (self.potential.bias.sum() * float("nan") if self.trainer.global_step == 9 else 0.0)

    batches = loader(labelled(), 8, seed=3, shuffle=True)
    module = Broken(PairPotential(seed=1), RECIPE)
    with pytest.raises(FloatingPointError, match="gradient of bias became NaN or infinite"):
        fit(module, batches, loader(labelled(4, seed=9), 8), config(), tmp_path / "a", save, last)
    assert last.read_bytes() == before


def test_ctrl_c_ends_in_order(tmp_path):
    """The step is finished, the run is validated and saved, and what follows continues it."""
    handler = signal.getsignal(signal.SIGINT)
    whole, seen, _ = run(tmp_path / "a")
    _, seen_first, outcome = run(tmp_path / "b", signal_at=9)
    assert outcome.interrupted and outcome.steps == 9
    assert signal.getsignal(signal.SIGINT) is handler
    second, seen_second, _ = run(tmp_path / "b", resume=tmp_path / "b" / "checkpoints" / "last.ckpt")
    assert equal_states(whole, second)
    assert seen_first + seen_second == seen


def test_a_checkpoint_is_whole_or_absent(tmp_path, monkeypatch):
    """If writing is cut short, the older checkpoint stays."""
    run(tmp_path / "a", stop_at=7)
    last = tmp_path / "a" / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    import lightning.pytorch as pl

    def cut_short(self, path, *_, **__):
        path.write_bytes(before[:100])
        raise OSError("disk full")

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", cut_short)
    with pytest.raises(OSError, match="disk full"):
        run(tmp_path / "a", resume=last)
    assert last.read_bytes() == before


def test_a_run_leaves_torch_as_it_was(tmp_path):
    before = (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_grad_enabled())
    module = Training(PairPotential(), dataclasses.replace(RECIPE, steps=1))
    batches = loader(labelled(3), 8)
    fit(module, batches, batches, config(module.config, precision="tf32"), tmp_path, save)
    assert (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.is_grad_enabled()) == before


@pytest.mark.slow
def test_rt18_metrics_over_two_processes(tmp_path):
    """Two ranks with a structure each give what one process gives for both."""
    program = textwrap.dedent(
        f"""
        import os, sys
        sys.path.insert(0, {str(tmp_path.parent)!r}); sys.path.insert(0, {os.path.dirname(__file__)!r})
        import numpy as np, torch
        import torch.distributed as dist
        from test_loss import batch, prediction_off_by, structure
        from mlff.config import LossConfig
        from mlff.loss import ErrorSums, differences
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=rank, world_size=2)
        n = (2, 10)[rank]
        positions = np.arange(3.0 * n).reshape(n, 3)
        graph, targets = batch([structure(positions, [1] * n, energy=-3.0 * n, forces=np.zeros((n, 3)))])
        errors = ErrorSums(LossConfig())
        errors.update(differences(prediction_off_by(graph, targets, 0.2, (0.1, 0.2)[rank]), targets, graph))
        values = errors.compute()
        assert abs(values["energy_mae_per_atom"] - 0.06) < 1e-12, values
        assert abs(values["forces_mae"] - 6.6 / 36) < 1e-12, values
        dist.barrier()
        os._exit(0)  # how the threads of torch end, which under load is with an abort, is not what is tested
        """
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank)], stderr=subprocess.PIPE) for rank in range(2)]
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.kill)
        for rank in ranks:
            _, error = rank.communicate(timeout=120)
            assert rank.returncode == 0, error.decode()
