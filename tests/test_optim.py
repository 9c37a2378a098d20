"""The optimiser against its formulas written out matrix by matrix in float64, and what training relies on around it."""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import nn

from mlff.config import TrainingConfig
from mlff.optim import (
    GradientGuard,
    HybridMuon,
    WeightAverage,
    agreement,
    build_optimizer,
    learning_rate,
    orthogonal,
    rate,
    route,
    route_table,
    set_learning_rate,
    set_rates,
    warmup_steps,
)
from mlff.sezm.potential import SeZM

# Published coefficients, written down here a second time on purpose.
SQUARE = [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2
POLAR = [
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
]


def reference_orthogonal(u: torch.Tensor) -> torch.Tensor:
    """The iteration on the matrix itself, through its singular values: p(x) = a x + b x³ + c x⁵."""
    steps = SQUARE if u.shape[0] == u.shape[1] else [(a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in POLAR]
    left, values, right = torch.linalg.svd(u / u.norm(), full_matrices=False)
    for a, b, c in steps:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def reference_muon(weights, gradients, lr, wd, beta=0.95, magma=True):
    """One matrix through several steps, straight from the formulas."""
    w, momentum, score = weights.clone(), torch.zeros_like(weights), 0.5
    for g in gradients:
        w = (1 - lr * wd) * w
        momentum = beta * momentum + (1 - beta) * g
        update = reference_orthogonal(beta * momentum + (1 - beta) * g)
        kappa = float((momentum * g).sum() / (momentum.norm() * g.norm()))
        sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
        score = 0.9 * score + 0.1 * (sigma(kappa / 2) - sigma(-0.5)) / (sigma(0.5) - sigma(-0.5))
        factor = 0.1 + 0.9 * score if magma else 1.0
        w = w - lr * 0.18 * math.sqrt(max(w.shape)) * factor * update
    return w


def reference_adam(weights, gradients, lr, wd, betas=(0.9, 0.95), eps=1e-20):
    w, first, second = weights.clone(), torch.zeros_like(weights), torch.zeros_like(weights)
    for t, g in enumerate(gradients, start=1):
        w = (1 - lr * wd) * w
        first = betas[0] * first + (1 - betas[0]) * g
        second = betas[1] * second + (1 - betas[1]) * g**2
        w = w - lr * (first / (1 - betas[0] ** t)) / ((second / (1 - betas[1] ** t)).sqrt() + eps)
    return w


SHAPES = [(8, 8), (8, 8), (4, 12), (12, 4), (4, 9), (3, 4, 12), (2, 3, 5, 5), (1, 6, 2), (5,), (1, 7), (3, 1, 1)]
SHAPES += [(6, 1, 9), (4, 3, 5), (9, 2, 2)]
ONE_MATRIX = {12, 13}  # of these, the first axis is the rows and all others are columns


def parameters_and_gradients(dtype=torch.float64, steps=4):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    for place in ONE_MATRIX:
        parameters[place].optimizer_rows = 1
    gradients = [[torch.randn(shape, dtype=dtype) for shape in SHAPES] for _ in range(steps)]
    return parameters, gradients


def take_steps(optimizer, parameters, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("magma", [True, False])
def test_hybridmuon_equals_its_formulas(magma):
    """Stacked, padded and transposed batches give what each matrix alone gives."""
    parameters, gradients = parameters_and_gradients()
    start = [parameter.detach().clone() for parameter in parameters]
    optimizer = HybridMuon(parameters, lr=0.02, weight_decay=0.1, magma=magma)
    take_steps(optimizer, parameters, gradients)
    for place, (parameter, weights) in enumerate(zip(parameters, start, strict=True)):
        own, shape = [step[place] for step in gradients], weights.shape
        if route(parameter) == "adam":
            expected = reference_adam(weights, own, 0.02, 0.0)
        elif weights.ndim == 2 or place in ONE_MATRIX or shape == (6, 1, 9):
            flat = [g.flatten(1) for g in own]
            expected = reference_muon(weights.flatten(1), flat, 0.02, 0.1, magma=magma).reshape(shape)
        else:
            matrices = weights.flatten(0, -3)
            slices = [[g.flatten(0, -3)[i] for g in own] for i in range(len(matrices))]
            expected = torch.stack(
                [reference_muon(w, g, 0.02, 0.1, magma=magma) for w, g in zip(matrices, slices, strict=True)]
            ).reshape(shape)
        # The Gram route and the singular values differ by round-off, which the steep polynomials enlarge.
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 16, 16), (3, 16, 48), (1, 1, 5), (2, 1, 1)])
def test_updates_are_orthogonal(shape):
    """Singular values end near one whatever they were, as long as they are not far below the largest."""
    torch.manual_seed(1)
    left = torch.linalg.qr(torch.randn(shape[0], shape[1], shape[1], dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(shape[0], shape[2], shape[1], dtype=torch.float64)).Q
    values = torch.linspace(1.0, 0.1, shape[1], dtype=torch.float64)
    matrices = 1e-3 * left @ torch.diag(values) @ right.mT
    result = torch.linalg.svdvals(orthogonal(matrices, square=shape[1] == shape[2]))
    # Over starting values from 0.01 to 1 the five rectangular polynomials end between 0.84 and 1.13: they
    # trade exactness for speed; the square route is polished by its last two steps.
    tolerance = 0.01 if shape[1] == shape[2] else 0.17
    assert (result - 1).abs().max() < tolerance
    assert torch.equal(orthogonal(torch.zeros(shape), shape[1] == shape[2]), torch.zeros(shape))


def test_padding_is_exact():
    """A matrix padded along its long side has the same update as alone."""
    torch.manual_seed(2)
    matrix = torch.randn(1, 6, 10, dtype=torch.float64)
    padded = torch.cat([matrix, torch.zeros(1, 6, 7, dtype=torch.float64)], dim=-1)
    # Only the order of sums differs.
    torch.testing.assert_close(orthogonal(padded, False)[..., :10], orthogonal(matrix, False), rtol=0, atol=1e-11)


def test_agreement_runs_from_zero_to_one():
    torch.manual_seed(3)
    g = torch.randn(2, 4, 4, dtype=torch.float64)
    assert agreement(g, g).tolist() == pytest.approx([1.0, 1.0])
    assert agreement(-g, g).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert agreement(torch.zeros_like(g), g).tolist() == pytest.approx([0.5, 0.5])


def test_routes_by_attribute_then_by_rank():
    def parameter(*shape, chosen=None, rows=None):
        value = nn.Parameter(torch.zeros(shape))
        if rows is not None:
            value.optimizer_rows = rows
        if chosen:
            value.optimizer_route = chosen
        return value

    assert route(parameter(4, 4)) == "muon"
    assert route(parameter(1, 4)) == "adam"
    assert route(parameter(2, 1, 3)) == "muon"
    assert route(parameter(1, 2, 3)) == "muon"
    assert route(parameter(1, 2, 3, rows=1)) == "adam"
    assert route(parameter(4)) == "adam"
    assert route(parameter()) == "adam"
    assert route(parameter(4, 4, chosen="adam")) == "adam"
    assert route(parameter(4, chosen="adamw")) == "adamw"
    with pytest.raises(ValueError, match="adam, adamw or muon; got 'sgd'"):
        route(parameter(4, chosen="sgd"))
    with pytest.raises(ValueError, match="needs a matrix"):
        route(parameter(4, chosen="muon"))


def test_only_matrices_and_adamw_decay():
    parameters = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    parameters[1].optimizer_route = "adamw"
    optimizer = HybridMuon(parameters, lr=0.1, weight_decay=0.5)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(parameters[0], torch.full((3, 3), 0.95))
    assert torch.allclose(parameters[1], torch.full((3,), 0.95))
    assert torch.equal(parameters[2].detach(), torch.ones(3))


def test_the_route_table_counts_every_parameter():
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2, bias=False))
    module[1].weight.requires_grad_(False)
    lines = route_table(module).splitlines()
    assert lines[1].split()[:3] == ["muon", "1", "24"]
    assert lines[3].split()[:3] == ["adam", "1", "6"]
    assert lines[4].split()[:2] == ["frozen", "12"]


def test_the_innermost_room_decides_the_rate():
    module = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.Linear(3, 3), "c": nn.Linear(3, 3)}), "d": nn.Linear(3, 3)})
    set_rates(module, {"a": 0.5, "a.b": 2.0})
    assert [rate(value) for value in module.parameters()] == [2.0, 2.0, 0.5, 0.5, 1.0, 1.0]
    lines = route_table(module).splitlines()
    assert [line.split("rate x ")[1:] for line in lines[1:]] == [["2"], [], ["0.5"], [], ["2"], [], ["0.5"]]
    config = TrainingConfig(steps=10, schedule="constant", warmup=0, learning_rate=0.3)
    optimizer = build_optimizer(module.parameters(), config)
    set_learning_rate(optimizer, 3, config)
    assert {group["lr"] for group in optimizer.param_groups} == {0.6, 0.3, 0.15}
    with pytest.raises(ValueError, match=r"training.rates: the model has no room 'e'; it has a, d and what is in them"):
        set_rates(module, {"e": 1.0})
    with pytest.raises(ValueError, match=r"the factor of d must be 0 or more; got -1"):
        set_rates(module, {"d": -1.0})


def test_a_parameter_without_gradient_is_left_alone():
    """Its value, momentum and score stay, and those that share its batch move as ever."""
    parameters, gradients = parameters_and_gradients()
    other = [copy.deepcopy(parameter) for parameter in parameters]
    for place in ONE_MATRIX:
        other[place].optimizer_rows = 1
    skipped = 3  # shares a batch with (4, 12), (4, 9) and (3, 4, 12)
    first, second = HybridMuon(parameters, lr=0.02), HybridMuon(other, lr=0.02)
    take_steps(first, parameters, gradients)
    holes = [
        [None if place == skipped and i == 1 else g for place, g in enumerate(step)] for i, step in enumerate(gradients)
    ]
    before = []
    for i, step in enumerate(holes):
        if i == 1:
            before = copy.deepcopy(second.state_dict()["state"])
            value = other[skipped].detach().clone()
        take_steps(second, other, [step])
        if i == 1:
            assert torch.equal(other[skipped].detach(), value)
            after = second.state_dict()["state"]
            same = [
                k for k in after if "momentum" in after[k] and torch.equal(after[k]["momentum"], before[k]["momentum"])
            ]
            assert len(same) == 1
    for place, (one, two) in enumerate(zip(parameters, other, strict=True)):
        if place != skipped:
            torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["hybridmuon", "adamw"])
def test_rt5_moments_survive_saving_bit_for_bit(name, tmp_path):
    """2 + 2 steps through a file equal 4 steps; the file needs no code to load."""
    config = TrainingConfig(optimizer=name, learning_rate=0.02)
    parameters, gradients = parameters_and_gradients(torch.float32)
    other = [copy.deepcopy(parameter) for parameter in parameters]
    for place in ONE_MATRIX:
        other[place].optimizer_rows = 1
    take_steps(build_optimizer(parameters, config), parameters, gradients)

    optimizer = build_optimizer(other, config)
    take_steps(optimizer, other, gradients[:2])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = build_optimizer(other, config)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    take_steps(resumed, other, gradients[2:])
    assert all(torch.equal(a, b) for a, b in zip(parameters, other, strict=True))


def test_state_has_the_shape_of_its_parameter():
    """So that it can be read, and moved to a run whose batches are cut differently."""
    parameters, gradients = parameters_and_gradients()
    optimizer = HybridMuon(parameters)
    take_steps(optimizer, parameters, gradients[:1])
    state = optimizer.state_dict()
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(order):
        moment = state["state"][place].get("momentum", state["state"][place].get("first"))
        assert moment.shape == parameter.shape
        assert moment.untyped_storage().nbytes() == moment.numel() * moment.element_size()


@pytest.mark.parametrize("kind", ["wsd", "cosine", "constant"])
def test_schedules(kind):
    config = TrainingConfig(
        steps=1000,
        schedule=kind,
        learning_rate=2.0,
        final_learning_rate=0.1,
        warmup=100,
        warmup_start=0.2,
        decay_fraction=0.65,
    )
    rates = [learning_rate(step, config) for step in range(1001)]
    assert rates[0] == pytest.approx(0.4)
    assert rates[50] == pytest.approx(0.4 + 0.5 * 1.6)
    assert rates[100] == 2.0
    end = {"wsd": 0.1, "cosine": 0.1, "constant": 2.0}[kind]
    assert rates[1000] == pytest.approx(end)
    if kind == "wsd":
        assert rates[350] == 2.0 and rates[349] == 2.0
        assert rates[351] < 2.0
        assert rates[350 + 325] == pytest.approx(0.5 * (2.0 + 0.1))
    if kind == "cosine":
        assert rates[550] == pytest.approx(0.5 * (2.0 + 0.1))
    assert warmup_steps(dataclasses.replace(config, warmup=0.05)) == 50


def test_every_group_gets_the_learning_rate():
    parameters, _ = parameters_and_gradients()
    config = TrainingConfig(steps=10, schedule="cosine", warmup=2, learning_rate=0.5)
    optimizer = build_optimizer(parameters, config)
    for step in range(10):
        set_learning_rate(optimizer, step, config)
        assert [group["lr"] for group in optimizer.param_groups] == [learning_rate(step, config)] * 2


def test_rt12_clipping_in_float32():
    """A norm of 10 becomes 1, a norm of 0.5 stays."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))]
    for norm, expected in ((10.0, 1.0), (0.5, 0.5)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * norm / 7**0.5
        returned = GradientGuard(1.0).clip(parameters)
        assert float(returned) == pytest.approx(norm, rel=1e-6)
        after = math.sqrt(sum(float(parameter.grad.double().square().sum()) for parameter in parameters))
        assert after == pytest.approx(expected, rel=1e-6)  # float32 rounding of the factor


def test_clipping_does_not_overflow():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 2e38)  # its square is beyond float32
    assert float(GradientGuard(1.0).clip([parameter])) == pytest.approx(4e38, rel=1e-6)
    assert parameter.grad.norm().item() == pytest.approx(1.0, rel=1e-6)


def test_the_guard_names_the_first_parameters_that_broke():
    named = [(name, nn.Parameter(torch.zeros(2))) for name in ("first", "second", "third")]
    parameters = [parameter for _, parameter in named]
    guard = GradientGuard(5.0)
    for broken in (None, "second", "third"):
        for name, parameter in named:
            parameter.grad = torch.full((2,), float("nan") if name == broken else 1.0)
        if broken == "second":
            parameters[0].grad = None  # places are counted over all parameters
        guard.clip(parameters)
        if broken is None:
            guard.check(named)
    with pytest.raises(FloatingPointError, match="the gradient of second became NaN or infinite"):
        guard.check(named)


def test_rt4_average_of_weights():
    """Parameter 0 -> 1 -> 2 with decay 0.5: average 0, 0.5, 1.25, and the raw value stays itself."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    average = WeightAverage(module, 0.5)
    seen = [average.module.weight.item()]
    for value in (1.0, 2.0):
        nn.init.constant_(module.weight, value)
        average.update(module)
        seen.append(average.module.weight.item())
    assert seen == [0.0, 0.5, 1.25]
    assert module.weight.item() == 2.0
    assert not average.module.weight.requires_grad


@pytest.mark.gpu
def test_half_precision_on_a_gpu_is_close():
    """The same steps on a GPU, where matrices are made orthogonal in half precision."""
    parameters, gradients = parameters_and_gradients(torch.float32)
    there = [nn.Parameter(parameter.detach().cuda()) for parameter in parameters]
    for place in ONE_MATRIX:
        there[place].optimizer_rows = 1
    start = [parameter.detach().clone() for parameter in parameters]
    take_steps(HybridMuon(parameters, lr=0.02), parameters, gradients)
    take_steps(HybridMuon(there, lr=0.02), there, [[g.cuda() for g in step] for step in gradients])
    for one, other, before in zip(parameters, there, start, strict=True):
        moved = (one - before).norm()
        # bfloat16 keeps 8 bits: 0.4 % a product, some ten products in a row.
        assert (other.cpu() - one).norm() < 0.05 * moved


def test_a_copied_model_is_optimised_as_the_original():
    """A copy keeps which of its parameters are matrices, tables and scales."""
    model = SeZM.from_options({"channels": 8, "n_focus": 2, "n_blocks": 1, "lmax": 2}, ["H", "O"])
    copied = copy.deepcopy(model)
    assert route_table(copied) == route_table(model)
    for (name, one), other in zip(model.named_parameters(), copied.parameters(), strict=True):
        assert getattr(one, "optimizer_rows", None) == getattr(other, "optimizer_rows", None), name
    # Streams side by side are columns of one matrix, degrees are a stack.
    assert model.get_parameter("trunk.blocks.0.convolution.stack.linears.0.weight_m0").optimizer_rows == 1
    assert not hasattr(model.get_parameter("trunk.blocks.0.convolution.pre_mix.weight"), "optimizer_rows")
