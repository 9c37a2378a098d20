"""Several ranks do what one does: two processes on the CPU, joined by gloo.

The functions `rank_...` are what the ranks run; `processes.py` starts them.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import Program, all_killed, on_ranks, places, script
from safetensors.torch import load_file, save_file
from test_loss import prediction_off_by
from test_recorded import played
from test_scripts import write_structures
from test_training import Structures
from toy import PairPotential, molecules, structure

from mlff import compiled, distributed, lora, optim, ranks, sharding, training
from mlff.checkpoint import save
from mlff.config import Config, TrainerConfig, TrainingConfig, read_config
from mlff.data.batch import collate, collate_targets, loader
from mlff.loss import ErrorSums, differences
from mlff.runs import read_metrics
from mlff.sezm.potential import SeZM
from mlff.training import Training, fit

pytestmark = pytest.mark.slow  # each starts processes of its own

ROOT = Path(__file__).parents[1]
STRATEGIES = ("ddp", "zero1", "fsdp")
COMPILED = {"ddp": ("true", "graphs"), "zero1": ("graphs",)}  # to compile once more takes half a minute
OPTIONS = {"channels": 8, "n_radial": 4, "n_blocks": 1, "mixing_layers": 1, "lmax": 1, "random_gamma": False}
RECIPE = TrainingConfig(
    steps=4, learning_rate=0.01, warmup=0, schedule="constant", ema=0.5, validate_every=2, batch_edges=0
)


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
        self.dataset = VALID

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


def train(folder: Path, strategy: str, devices: int, batches, recipe=RECIPE, resume=None, model=None):
    folder.mkdir(parents=True, exist_ok=True)
    settings = config(strategy, devices, recipe)
    module = Watched(potential() if model is None else model, recipe)
    valid = Given([join(VALID[ranks.rank() :: ranks.count()])])
    write = save_merged if isinstance(module.potential, SeZM) else save_toy
    outcome = fit(module, Given(batches), valid, settings, folder, write, resume)
    torch.save(module.gradients, folder / f"gradients-{ranks.rank()}.pt")
    return module, outcome


OPTIMIZERS = ("adamw", "hybridmuon", "accumulated")


def train_each(folder: Path, strategy: str, devices: int, batches, resume: Path | None = None, steps: int = 4):
    """Train over the batches with either optimiser, and with two batches a step."""
    for name in OPTIMIZERS:
        kind = {"accumulate": 2} if name == "accumulated" else {"optimizer": name}
        recipe = dataclasses.replace(RECIPE, steps=steps, **kind)
        checkpoint = None if resume is None else resume / name / "checkpoints" / "last.ckpt"
        train(folder / name, strategy, devices, batches, recipe, checkpoint)


def train_alone(folder: Path, resume: Path | None = None, steps: int = 4) -> Path:
    """The batches of `parts`, whole, on one rank."""
    batches = [join([item for part in batch for item in part]) for batch in parts()]
    train_each(folder, "auto", 1, batches, resume, steps)
    return folder


class Choosy(PairPotential):
    """A potential that leaves most of its parameters out where there is no edge, and one always."""

    def __init__(self):
        super().__init__(seed=1)
        self.never = torch.nn.Parameter(torch.ones(3, 3))

    def forward(self, graph, vectors=None):
        if graph.n_edges:
            return super().forward(graph, vectors)
        rows = self.get_buffer("rows").index_select(0, graph.numbers)
        return self.table.sum(-1).double().index_select(0, rows) + 0.0 * vectors.sum()


def rank_work(folder: Path):
    """Everything that two ranks are asked to do, in one go: starting them takes longer."""
    me = ranks.rank
    for strategy in STRATEGIES:
        distributed.start(config(strategy).trainer)
        batches = [join(batch[me()]) for batch in parts()]
        train_each(folder / strategy, strategy, 2, batches)
        train_adapters(folder / strategy / "adapters", strategy, 2, batches)
        batches = [join([labelled(2, 1, forces=False), [isolated()]][me()]), join([[isolated()], labelled(2, 2)][me()])]
        recipe = dataclasses.replace(RECIPE, steps=3)
        module, _ = train(folder / strategy / "choosy", strategy, 2, batches, recipe, model=Choosy())
        torch.save(sharding.whole(module.state_dict()), folder / strategy / f"choosy-{me()}.pt")

    batches = [labelled_off_by(1.0, 3), labelled_off_by(2.0, 1)] if me() == 0 else [labelled_off_by(3.0, 3)]
    sums = ErrorSums(RECIPE.loss)
    for graph, targets, prediction in batches:
        sums.update(differences(prediction, targets, graph))
    said = {"average": sums.compute()["energy_mae_per_atom"]}

    data = Structures(labelled(7, 3, atoms=(2, 3, 5, 40, 4, 17, 29)))
    batches = loader(data, 48, seed=3, shuffle=True, rank=me(), world_size=2)
    recipe = dataclasses.replace(RECIPE, steps=2 * len(batches), validate_every=0)
    module = Watched(PairPotential(seed=1), recipe)
    outcome = fit(module, batches, Given([join(VALID)]), config(recipe=recipe), made(folder / "unequal"), save_toy)
    said |= {"steps": outcome.steps, "length": len(batches), "seen": data.asked, "position": module.batches.position()}

    said["anywhere"] = [ranks.anywhere(False), ranks.anywhere(me() == 1)]
    said["from_first"] = ranks.from_first(lambda: f"rank {me()}")
    for failing, function in enumerate((ranks.from_first, ranks.together)):
        try:
            function(lambda failing=failing: int("seven") if me() == failing else 7)
        except (ValueError, SystemExit) as error:
            said[f"{function.__name__} fails"] = repr(error)
    return said


def rank_few(folder: Path):
    """Three ranks share two small tensors: one owns none, and some have no slice."""
    distributed.start(config(devices=3).trainer)
    build = functools.partial(optim.build_optimizer, config=dataclasses.replace(RECIPE, optimizer="hybridmuon"))

    def module():
        torch.manual_seed(0)
        return torch.nn.ParameterDict({"matrix": torch.randn(2, 5), "vector": torch.randn(4)}).double()

    def loss_of(values, factor):
        return factor * ((values["matrix"] @ torch.arange(5.0).double()).square().sum() + values["vector"].sin().sum())

    whole, plain, sliced = module(), module(), module()
    step = sharding.shard(sliced, lambda factor: loss_of(sliced, factor))
    optimizers = [build(list(whole.parameters()))]
    optimizers += [sharding.ShardedOptimizer(values.parameters(), build) for values in (plain, sliced)]
    for _ in range(3):
        loss_of(whole, 1.0).backward()
        loss_of(plain, 1.0).backward()
        step(ranks.rank()).backward()  # 0, 1 and 2: their mean is what the others have
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = whole.state_dict()
    close(expected, plain.state_dict(), 1e-14)
    close(expected, sharding.whole(sliced.state_dict()), 1e-14)
    for optimizer in optimizers[1:]:
        optimizer.consolidate_state_dict()
        if ranks.rank() == 0:
            state = optimizer.state_dict()["state"]
            for number, values in optimizers[0].state_dict()["state"].items():
                close(values, state[number], 1e-14)


def rank_compiled(folder: Path):
    """As `rank_work`, compiled, and recorded; which compiler it is does not matter to the ranks."""
    compiled.BACKEND = "eager"
    training.cuda_record = lambda: played
    for strategy, ways in COMPILED.items():
        for way in ways:
            distributed.start(config(strategy).trainer)
            batches = [join(batch[ranks.rank()]) for batch in parts()]
            recipe = dataclasses.replace(RECIPE, compile=way, optimizer="hybridmuon")
            module, _ = train(folder / strategy / way, strategy, 2, batches, recipe)
            assert isinstance(module._evaluate, compiled.CompiledEvaluation) == (way == "true")


def train_adapters(folder: Path, strategy: str, devices: int, batches):
    """As `train_each`, of adapters alone."""
    model = potential()
    lora.insert(model, 2, 2.0)
    train(folder, strategy, devices, batches, dataclasses.replace(RECIPE, optimizer="hybridmuon"), model=model)


def rank_resume(folder: Path, resume: str):
    """Go on from the checkpoints of one rank."""
    for strategy in STRATEGIES:
        distributed.start(config(strategy).trainer)
        batches = [join(batch[ranks.rank()]) for batch in parts()]
        train_each(folder / strategy, strategy, 2, batches, Path(resume), steps=7)


def labelled_off_by(error: float, count: int):
    """Isolated atoms whose energies are predicted wrongly by so much."""
    graph, targets = join([isolated() for _ in range(count)])
    return graph, targets, prediction_off_by(graph, targets, error, 0.0)


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_merged(module, path):
    save(lora.merged(module), path)


def save_toy(module, path):
    save_file(module.state_dict(), path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return train_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[dict]]:
    """What two ranks have written, and what each has said."""
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(rank_work, folder)


def last(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


# Sums of float64 in another order change gradients of some tens by 1e-14. The orthogonal step divides by the size of a
# matrix and multiplies its small singular values by up to 10³, AdamW divides by the size of a gradient or 1e-8; some
# steps on, weights were seen to differ by 1e-13. A wrong step is off by the learning rate, 1e-2.
TOLERANCE = 1e-9


def close(one, other, tolerance=TOLERANCE):
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rt14_two_ranks_are_one(alone, two, strategy, optimizer):
    """Gradients, weights, averages, optimiser states, losses and names are those of one rank with whole batches.

    The gradient is, to round-off, only if the means of the loss are over the whole batch.
    """
    folders = alone / optimizer, two[0] / strategy / optimizer
    pairs = [torch.load(folder / "gradients-0.pt") for folder in folders]
    for first, second in zip(*pairs, strict=True):
        assert max(gradient.abs().max() for gradient in first.values()) > 1.0
        close(first, second, 1e-10)
    ends = [last(folder) for folder in folders]
    assert list(ends[0]["state_dict"]) == list(ends[1]["state_dict"])
    close(ends[0]["state_dict"], ends[1]["state_dict"])
    states = [end["optimizer_states"][0] for end in ends]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, state in states[0]["state"].items():
        assert state.keys() == states[1]["state"][number].keys()
        close(state, states[1]["state"][number])
    rows = [read_metrics(folder / "metrics.csv") for folder in folders]
    for name in ("step", "train_loss", "train_energy_mae_per_atom", "train_forces_mae", "valid_loss"):
        expected = [row[name] for row in rows[0]]
        assert [row[name] for row in rows[1]] == pytest.approx(expected, rel=TOLERANCE, nan_ok=True)
    assert load_file(folders[1] / "model.safetensors").keys() == potential().state_dict().keys()


def test_rt14_two_ranks_train_adapters(two, tmp_path):
    """As one rank does, whole or in slices; what is written is a plain model."""
    train_adapters(tmp_path, "auto", 1, [join([item for part in batch for item in part]) for batch in parts()])
    expected = last(tmp_path)["state_dict"]
    for strategy in STRATEGIES:
        folder = two[0] / strategy / "adapters"
        found = last(folder)["state_dict"]
        assert list(found) == list(expected)
        close(found, expected)
        assert load_file(folder / "model.safetensors").keys() == potential().state_dict().keys()


def test_rt14_two_ranks_compile(alone, tmp_path):
    """One after the other, without waiting for each other's gradients; then they do what one rank does uncompiled.

    Recorded steps too, whose learning rate is a float32: see `test_recorded`.
    """
    on_ranks(rank_compiled, tmp_path, timeout=600)
    for strategy, ways in COMPILED.items():
        for way in ways:
            tolerance = TOLERANCE if way == "true" else 1e-5
            folders = alone / "hybridmuon", tmp_path / strategy / way
            ends = [last(folder) for folder in folders]
            assert list(ends[0]["state_dict"]) == list(ends[1]["state_dict"])
            close(ends[0]["state_dict"], ends[1]["state_dict"], tolerance)
            rows = [read_metrics(folder / "metrics.csv") for folder in folders]
            for name in ("step", "train_loss", "train_forces_mae", "valid_loss"):
                expected = [row[name] for row in rows[0]]
                assert [row[name] for row in rows[1]] == pytest.approx(expected, rel=tolerance, nan_ok=True)
            if way == "true":
                for first, second in zip(*(torch.load(folder / "gradients-0.pt") for folder in folders), strict=True):
                    close(first, second, 1e-10)


def test_rt5_a_run_goes_on_on_another_number_of_ranks(alone, two, tmp_path):
    """Whatever strategy wrote a checkpoint, one rank goes on from it, and the other way about."""
    train_alone(tmp_path / "whole", steps=7)
    on_ranks(rank_resume, tmp_path / "two", str(alone))
    for strategy in STRATEGIES:
        train_alone(tmp_path / "one" / strategy, two[0] / strategy, steps=7)
        for optimizer in OPTIMIZERS:
            whole = last(tmp_path / "whole" / optimizer)
            for name in ("one", "two"):
                end = last(tmp_path / name / strategy / optimizer)
                assert end["global_step"] == 7
                close(whole["state_dict"], end["state_dict"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rt11_parameters_that_only_one_rank_uses(two, strategy):
    """Energies only, forces, and an atom alone on the other rank: no stop, and equal weights after three steps."""
    first, second = (torch.load(two[0] / strategy / f"choosy-{rank}.pt") for rank in range(2))
    start = Choosy()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        if name.startswith("potential.") and value.is_floating_point() and "reference" not in name:
            moved = not torch.equal(value, start.state_dict()[name.removeprefix("potential.")])
            # Slices are reduced in one piece, so that a parameter that nobody uses has a gradient of zeros: it decays.
            assert moved or name == "potential.never"
            assert strategy == "fsdp" or moved == (name != "potential.never")


def test_more_ranks_than_tensors(tmp_path):
    on_ranks(rank_few, tmp_path, count=3)


def test_rt3_averages_count_structures(two):
    """Rank 0 has batches of 3 and 1 structures with errors 1 and 2, rank 1 one of 3 with 3: 14/7."""
    assert [said["average"] for said in two[1]] == [2.0, 2.0]


def test_rt2_unequal_structures_equal_steps(two):
    """Seven structures of 2 to 40 atoms, budget 48, two epochs of a whole training."""
    first, second = two[1]
    assert first["length"] == second["length"] > 0
    assert first["steps"] == second["steps"] == 2 * first["length"]
    for said in (first, second):
        assert said["position"]["epoch"] == 1 and said["position"]["batches"] == first["length"]
    assert sorted(first["seen"] + second["seen"]) == sorted(2 * list(range(7)))


def test_ranks_agree(two):
    first, second = two[1]
    assert first["anywhere"] == second["anywhere"] == [False, True]
    assert first["from_first"] == second["from_first"] == "rank 0"
    # One rank tells its error, the other leaves.
    assert first["from_first fails"].startswith("ValueError") and second["from_first fails"] == "SystemExit(2)"
    assert second["together fails"].startswith("ValueError") and first["together fails"] == "SystemExit(2)"


# Whole runs, as users start them


TINY = {**OPTIONS, "edge_norm": False}
KEYS = ["preset=nano", "weights=none", "trainer.accelerator=cpu", "trainer.logger=none", "trainer.log_every=1"]
KEYS += [f"model.{key}={str(value).lower()}" for key, value in TINY.items() if key != "random_gamma"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("structures")
    return [f"data.{name}={write_structures(folder / f'{name}.xyz', 12, 3)}" for name in ("train", "valid")]


def begin(output: Path, *words: str, **environment: str) -> Program:
    """Start scripts/finetune.py."""
    return Program(script, ROOT / "scripts" / "finetune.py", *KEYS, f"output={output}", *words, **environment)


def begin_two(output: Path, *words: str) -> list[Program]:
    """Start it as two ranks."""
    return [begin(output, *words, "trainer.devices=2", **place) for place in places(2)]


def wait_for_step(program: Program, output: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and program.running():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if float((output / "metrics.csv").read_text().splitlines()[-1].split(",")[0]) >= step:
                return
        time.sleep(0.01)
    raise AssertionError(f"the run did not come to step {step}: {program.finish()}")


def curve(output: Path) -> dict[float, float]:
    return {row["step"]: row["train_loss"] for row in read_metrics(output / "metrics.csv") if row["step"]}


WORDS = ("training.steps=240", "training.validate_every=20", "training.batch_atoms=12")


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory) -> Path:
    """A run on two ranks that the program starts itself."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    command = [sys.executable, ROOT / "scripts" / "finetune.py", *KEYS, f"output={folder}", *data, *WORDS]
    done = subprocess.run([*command, "trainer.devices=2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Everything goes to") == done.stdout.count("Before training:") == 1
    assert list(curve(folder)) == list(range(1, 241))
    return folder


@pytest.mark.timeout(600)
def test_rt5_two_ranks_are_killed_and_go_on(data, unbroken, tmp_path):
    """Killed, then SIGTERM to one rank of two, which ends both in order: the curve is that of an unbroken run."""
    broken = tmp_path / "broken"
    with all_killed(begin_two(broken, *data, *WORDS)) as programs:
        wait_for_step(programs[0], broken, 50)
    for program in programs:
        program.finish(code=-signal.SIGKILL)
    assert 50 <= max(curve(broken)) < 240
    assert 40 <= last(broken)["global_step"] < max(curve(broken)) + 1
    draft = broken / "checkpoints" / ".last.ckpt.draft"
    draft.write_bytes((broken / "checkpoints" / "last.ckpt").read_bytes()[:1000])  # as if killed while writing

    with all_killed(begin_two(broken, *data, *WORDS)) as programs:
        wait_for_step(programs[0], broken, 130)
        os.kill(programs[0].pid, signal.SIGTERM)
        (said, errors), _ = [program.finish() for program in programs]
    assert "Stopped at step" in said and "Stopping after this step" in errors
    stopped = int(last(broken)["global_step"])
    assert 130 <= stopped < 240 and f"Stopped at step {stopped}" in said
    assert max(curve(broken)) == stopped

    with all_killed(begin_two(broken, *data, *WORDS)) as programs:
        for program in programs:
            program.finish()
    expected = curve(unbroken)
    assert curve(broken) == pytest.approx(expected, rel=1e-6)
    close(last(unbroken)["state_dict"], last(broken)["state_dict"], 1e-6)


@pytest.mark.timeout(600)
def test_torchrun_starts_the_ranks(data, unbroken, tmp_path):
    """The run is that of the ranks that the program starts itself; another number is an error in one sentence."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, ROOT / "scripts" / "finetune.py", *KEYS, f"output={tmp_path / 'run'}", *data, *WORDS]
    done = subprocess.run([*command, "trainer.devices=2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Everything goes to") == done.stdout.count("Before training:") == 1
    assert curve(tmp_path / "run") == curve(unbroken)
    wrong = begin(tmp_path / "three", *data, "trainer.devices=3", TORCHELASTIC_RUN_ID="none", **places(2)[0])
    _, errors = wrong.finish(code=2)
    assert "torchrun started 2 processes, but trainer.devices=3 times trainer.num_nodes=1 is 3." in errors


@pytest.mark.timeout(600)
def test_slurm_starts_the_ranks(data, unbroken, tmp_path):
    """Two nodes with a task each, as srun describes them to its tasks; SIGUSR1 to one stops both, and they go on."""
    names = {"JOB_ID": os.getpid(), "JOB_NAME": "train", "NTASKS": 2, "NTASKS_PER_NODE": 1, "STEP_NUM_TASKS": 2}
    names |= {"LOCALID": 0, "NNODES": 2, "NODELIST": "127.0.0.1", "JOB_NODELIST": "127.0.0.1"}

    def task(number: int, *words: str) -> Program:
        found = {**names, "PROCID": number, "NODEID": number}
        environment = {f"SLURM_{name}": str(value) for name, value in found.items()}
        return begin(tmp_path / "run", *data, *WORDS, *words, **environment)

    with all_killed([task(number, "trainer.num_nodes=2") for number in range(2)]) as tasks:
        wait_for_step(tasks[0], tmp_path / "run", 60)
        os.kill(tasks[1].pid, signal.SIGUSR1)
        said = [one.finish()[0] for one in tasks]
    assert "Stopped at step" in said[0] and said[1].count("\n") == 1
    assert 60 <= last(tmp_path / "run")["global_step"] < 240
    with all_killed([task(number, "trainer.num_nodes=2") for number in range(2)]) as tasks:
        for one in tasks:
            one.finish()
    assert curve(tmp_path / "run") == pytest.approx(curve(unbroken), rel=1e-6)
    _, errors = task(0).finish(code=2)
    assert "srun started 2 processes, but trainer.devices=1 times trainer.num_nodes=1 is 1." in errors


def test_mistakes_are_told_once(data, tmp_path):
    """By one of two ranks, which both end."""
    words = (*data, "trainer.devices=2", "training.batch_atoms=3", "training.oversized=error")
    _, errors = begin(tmp_path / "run", *words).finish(code=2)
    assert errors.count("more than training.batch_atoms=3") == 1
    assert not (tmp_path / "run").exists()


def rank_a11(folder: Path, *words: str):
    """Train a small model of the shape of pro; which compiler it is does not matter here."""
    compiled.BACKEND = "eager"
    training.run(read_config([*words, f"output={folder / 'run'}"]), "finetune")


def test_a11_two_steps_of_a_small_pro_are_finite(data, tmp_path):
    """DDP with one rank, ZeRO-1, 300 atoms a batch, float32, compiled: every floating tensor of the checkpoint."""
    words = ["preset=pro", "trainer.devices=1", "trainer.strategy=zero1", "trainer.precision=fp32"]
    words += ["training.compile=true", "training.batch_atoms=300", "training.steps=2"]
    words += ["model.channels=8", "model.n_blocks=1", "model.lmax=3", "model.mixing_layers=1"]
    kept = [key for key in KEYS if not key.startswith(("preset", "model."))]
    on_ranks(rank_a11, tmp_path, *kept, *data, *words, count=1, timeout=600)
    found = list(floating(last(tmp_path / "run")))
    assert len(found) > 150
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    assert last(tmp_path / "run")["global_step"] == 2


def floating(value):
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from floating(item)
