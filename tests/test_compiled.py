"""Compiled training steps: the gradients of uncompiled ones, at any size, from one compilation; or a clear end."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from ase import Atoms
from ase.build import molecule
from toy import PairPotential, molecules

from mlff import compiled, training
from mlff.atoms import graph_from_atoms
from mlff.compiled import CannotCompile, CompiledEvaluation, GradientMismatch, trace
from mlff.config import TrainingConfig, make_config, preset_options
from mlff.data.batch import collate
from mlff.derivatives import evaluate
from mlff.graph import Graph
from mlff.padding import Sizes, pad
from mlff.runs import read_metrics
from mlff.sezm.potential import SeZM
from mlff.training import Training

SIZES = Path(__file__).parents[2] / "shared" / "requirements" / "files" / "sizes_4_and_8.extxyz"
BATCHES = (("H2O",), ("H",), ("CH4", "O", "C6H6"), ("CO2",) * 5)


def batch(*names: str) -> Graph:
    found = []
    for seed, name in enumerate(names):
        atoms = molecule(name)
        atoms.rattle(0.05, seed=seed)
        found.append(graph_from_atoms(atoms, 4.0))
    return collate(found)


def sezm(dtype: torch.dtype, **options) -> SeZM:
    given = {"channels": 8, "n_radial": 4, "lmax": 1, "n_blocks": 1, "mixing_layers": 1, "rcut": 4.0, **options}
    potential = SeZM.from_options(given, ["H", "C", "O"], seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for value in potential.parameters():  # branches of a new model are zeros
        value.data += 0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype)
    return potential.train()


def gradients(prediction, potential: torch.nn.Module) -> list[torch.Tensor]:
    """Of a loss on energies and forces."""
    total = prediction.energy.sum() + torch.linalg.vector_norm(prediction.forces, dim=-1).sum()
    return list(torch.autograd.grad(total, list(potential.parameters()), materialize_grads=True))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch):
    """Choose a compiler and count how often it was called."""

    def choose(backend: str):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        monkeypatch.setattr(compiled, "BACKEND", counter)
        return counter

    yield choose
    torch._dynamo.reset()


@pytest.fixture
def opt_einsum(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were installed: it is asked for the best order of factors, and needs their sizes."""

    class PathFinder:
        @staticmethod
        def contract_path(equation: str, *operands: torch.Tensor, **_) -> tuple[list[tuple[int, int]], str]:
            assert [int(size) for operand in operands for size in operand.shape]
            return [(0, 1)] * (len(operands) - 1), equation

    settings = torch.backends.opt_einsum
    monkeypatch.setattr(settings.m, "is_available", lambda: True)
    monkeypatch.setattr(settings.m, "get_opt_einsum", lambda: PathFinder)
    monkeypatch.setattr(settings.m, "enabled", True)
    monkeypatch.setattr(settings.m, "strategy", "auto")


def check_gradients(potential: torch.nn.Module, step, graph: Graph, tolerance: float) -> None:
    """Every parameter's gradient; one a thousandth of the largest is a difference of larger numbers."""
    found = gradients(step(graph), potential)
    expected = gradients(evaluate(potential, graph, create_graph=True), potential)
    largest = max(float(gradient.norm()) for gradient in expected)
    for (name, _), one, other in zip(potential.named_parameters(), found, expected, strict=True):
        assert float((one - other).norm()) <= tolerance * max(float(other.norm()), 1e-3 * largest), name


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "backend"), [(torch.float64, "eager"), (torch.float32, "inductor")])
def test_rt13_gradients_of_a_force_loss(dtype: torch.dtype, backend: str, counted) -> None:
    """On batches of several sizes, an isolated atom among them; compiled once.

    Random rolls of the edges' frames are left out: batches are padded, and so draw others.
    """
    counter = counted(backend)
    potential = sezm(dtype, random_gamma=False)
    step = CompiledEvaluation(potential)
    for names in BATCHES:
        check_gradients(potential, step, batch(*names), 1e-10 if dtype == torch.float64 else 1e-4)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_rt13_with_the_operators_of_a_gpu(counted, opt_einsum, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checks, their fakes and their derivatives leave sizes open, where opt_einsum is installed too."""
    for family in ("gated", "grid_pair", "silu", "swiglu", "unit_rms"):
        monkeypatch.setattr(f"mlff.kernels.{family}.plain", lambda x, elements: False)
    monkeypatch.setattr("mlff.sezm.so2.plain", lambda x, elements: False)
    counter = counted("aot_eager")
    mixer = {"radial_so2_mode": "degree_channel", "radial_so2_rank": 2}
    potential = sezm(torch.float64, random_gamma=False, n_focus=2, mixing_layers=2, **mixer)
    step = CompiledEvaluation(potential)
    for names in BATCHES:
        check_gradients(potential, step, batch(*names), 1e-10)
    assert counter.frame_count == 1


def test_rt13_sizes_stay_open_where_opt_einsum_is_installed(opt_einsum) -> None:
    """Order 2 has sums of three factors."""
    potential = sezm(torch.float64, lmax=2, mmax=2)
    step = CompiledEvaluation(potential)
    graph = batch("CH4")
    sizes = step._distinct(Sizes.of(graph))
    traced = trace(potential, pad(graph, sizes, 4.0))
    assert not re.search(rf"\b{sizes.edges}\b", traced.code)
    assert "sym_numel" not in traced.code  # with a size that is fixed, torch 2.11 cannot compile it


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("preset", ["mini", "pro"])
def test_rt13_on_a_gpu(preset: str, dtype: torch.dtype, tolerance: float, counted) -> None:
    """Preset mini, and a model of the shape of pro with fewer channels and blocks; the operators' kernels inside."""
    counter = counted("inductor")
    options = dict(preset_options(preset)[0]) | {"random_gamma": False}
    if preset == "pro":
        options |= {"channels": 16, "n_blocks": 2}
    potential = SeZM.from_options(options, ["H", "C", "O"], seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for value in potential.parameters():
        value.data += 0.05 * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(dtype)
    potential = potential.cuda().train()
    step = CompiledEvaluation(potential)
    for names in BATCHES:
        check_gradients(potential, step, batch(*names).to("cuda"), tolerance)
    assert counter.frame_count == 1


def test_rk10_one_compilation_for_all_sizes(counted) -> None:
    """50 batches of 1 to 60 atoms, no settings left behind."""
    settings = torch._dynamo.config.get_config_copy()
    counter = counted("inductor")
    potential = PairPotential(seed=3)
    step = CompiledEvaluation(potential)
    items = molecules(60, seed=1)
    for number in range(50):
        graph = collate([graph for graph, _ in items[number : number + 1 + number % 10]])
        found = gradients(step(graph), potential)
        expected = gradients(evaluate(potential, graph, create_graph=True), potential)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    assert counter.frame_count == 1
    assert torch._dynamo.config.get_config_copy() == settings


def test_rd10_open_and_periodic_structures_compiled(counted) -> None:
    """In one batch, each as it is alone; the open ones have no stress."""
    counted("aot_eager")
    potential = PairPotential(seed=3, dtype=torch.float64)
    random = np.random.default_rng(0)
    open_, periodic = (
        Atoms("HOH", random.normal(size=(3, 3)), cell=[5.0, 5.5, 6.0] if pbc else None, pbc=pbc)
        for pbc in (False, True)
    )
    graphs = [graph_from_atoms(atoms, potential.cutoff) for atoms in (open_, periodic, open_)]
    step = CompiledEvaluation(potential)
    found, start = step(collate(graphs)), 0
    for place, graph in enumerate(graphs):
        alone = evaluate(potential, graph)
        torch.testing.assert_close(found.energy[place].detach(), alone.energy[0], rtol=1e-12, atol=1e-12)
        forces = found.forces[start : start + graph.n_atoms].detach()
        torch.testing.assert_close(forces, alone.forces, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            found.stress[place].detach(), alone.stress[0], rtol=1e-12, atol=1e-12, equal_nan=True
        )
        start += graph.n_atoms
    assert found.stress.isnan().all(-1).all(-1).tolist() == [True, False, True]
    gradient = torch.autograd.grad(found.forces.square().sum() + found.stress[1].sum(), potential.first)[0]
    assert bool(gradient.isfinite().all())


def test_a_comparison_leaves_weights_and_random_numbers(counted) -> None:
    counted("aot_eager")
    potential = PairPotential(seed=3)
    before, state = copy.deepcopy(potential.state_dict()), torch.get_rng_state()
    found = CompiledEvaluation(potential).compare(collate([graph for graph, _ in molecules(3)]))
    assert found.gradients < 1e-6
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in potential.state_dict().items():
        assert torch.equal(value, before[name])


def test_rt13_a_gradient_that_is_cut_off_is_found(counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the traces of some versions of PyTorch cut it: saved results detached from what they came from."""
    counted("aot_eager")

    def cut(potential: torch.nn.Module, graph: Graph):
        traced = trace(potential, graph)
        node = next(node for node in traced.graph.nodes if node.target is torch.ops.aten.tanh.default)
        with traced.graph.inserting_after(node):
            detached = traced.graph.call_function(torch.ops.aten.detach.default, (node,))
        users = [user for user in node.users if user is not detached]
        for user in users[1:]:  # the first one is the forward pass, the others are the derivative's
            user.replace_input_with(node, detached)
        assert len(users) > 1
        traced.recompile()
        return traced

    monkeypatch.setattr(compiled, "trace", cut)
    potential = PairPotential(seed=3)
    with pytest.raises(GradientMismatch) as caught:
        CompiledEvaluation(potential).compare(collate([graph for graph, _ in molecules(3)]))
    lines = str(caught.value).splitlines()
    assert "of 4 gradients differ by more than 0.001 of their norm" in lines[0]
    assert "uncompiled" in lines[1] and {line.split()[0] for line in lines[2:]} == {"table", "first", "second", "bias"}


def test_a_compiler_that_gives_up_is_no_end(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Said once; the steps go on as they were."""

    def broken(*_):
        raise RuntimeError("no compiler for this machine")

    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", broken)
    module = Training(PairPotential(seed=3), TrainingConfig(compile="true"))
    graph = collate([graph for graph, _ in molecules(3)])
    module.compile_steps(graph)
    said = capsys.readouterr().out
    assert "cannot be compiled here, so it goes on without" in said and "no compiler for this machine" in said
    assert not isinstance(module._evaluate, CompiledEvaluation)
    with pytest.raises(CannotCompile):
        CompiledEvaluation(PairPotential(seed=3)).compare(graph)


@pytest.mark.slow
@pytest.mark.skipif(not SIZES.is_file(), reason="the requirements' files are not beside this checkout")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rt17_compiled_runs(precision: str, counted, tmp_path: Path, capsys) -> None:
    """Structures of 4 and 8 atoms, one or two in a batch, 20 steps; the first loss is that of uncompiled code.

    The compiler is the one that takes least time: `test_rt13_gradients_of_a_force_loss` has the real one.
    """
    counter = counted("eager")
    losses = []
    for way in ("true", "false"):
        keys = {"data.train": str(SIZES), "output": str(tmp_path / way), "trainer.accelerator": "cpu"}
        keys |= {"trainer.precision": precision, "training.steps": 20, "training.batch_atoms": 12}
        keys |= {"trainer.log_every": 1, "trainer.logger": "none", "training.compile": way == "true"}
        keys |= {
            "model.channels": 8,
            "model.n_radial": 4,
            "model.lmax": 1,
            "model.n_blocks": 1,
            "model.mixing_layers": 1,
        }
        training.run(make_config({"preset": "nano", "weights": "none", **keys}, "train"), "train")
        rows = read_metrics(tmp_path / way / "metrics.csv")
        losses.append([row["train_loss"] for row in rows if row["train_loss"] == row["train_loss"]])
    assert len(losses[0]) == len(losses[1]) == 20
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    assert counter.frame_count == 1
    assert "Compiled in" in capsys.readouterr().out
