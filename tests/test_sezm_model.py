"""The model as a class: sizes, options, dtypes, elements, gradients of every parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import yaml

import mlff
from mlff import presets
from mlff.derivatives import evaluate
from mlff.graph import Graph
from mlff.neighbors import neighbor_list
from mlff.sezm.options import Options
from mlff.sezm.potential import SeZM

# Parameters with 118 elements as published, without and with norms on edge features.
PUBLISHED = {
    "nano": (480_268, 480_364),
    "mini": (654_988, 655_084),
    "neo": (1_124_686, 1_124_910),
    "air": (5_147_909, 5_148_101),
    "plus": (8_848_518, 8_848_710),
    "pro": (25_209_742, 25_210_702),
    "max": (99_007_722, 99_009_546),
    "ultra": (None, 281_122_352),
}
SMALL = {"channels": 8, "lmax": 2, "n_blocks": 1, "n_radial": 4, "mixing_layers": 2, "rcut": 4.5}


def water(spread: float = 0.0) -> Graph:
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.1], [-0.24, 0.93, spread]], dtype=torch.float64)
    cell, pbc = torch.zeros(3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.bool)
    senders, receivers, shifts = neighbor_list(positions.numpy(), cell.numpy(), pbc.numpy(), 4.5)
    zero = torch.zeros(1, dtype=torch.float64)
    return Graph(
        positions=positions,
        numbers=torch.tensor([8, 1, 1]),
        structure=torch.zeros(3, dtype=torch.int64),
        senders=torch.tensor(senders),
        receivers=torch.tensor(receivers),
        shifts=torch.tensor(shifts),
        cell=cell[None],
        pbc=pbc[None],
        charge=zero,
        spin=zero,
    )


def shaken(potential: SeZM, seed: int = 1) -> SeZM:
    """Add noise to every parameter, so that branches that start at zero matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in potential.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
            parameter.add_(0.1 * noise)
    return potential


def count(name: str, **changes: object) -> int:
    """Parameters as published: their element tables have one more row, always zero, for padding atoms."""
    section = yaml.safe_load(presets.open_yaml(name))["model"]
    section.pop("elements")
    potential = SeZM.from_options({**section, **changes}, range(1, 119))
    assert potential.environment is not None
    padding = potential.types.weight.shape[1] + potential.environment.types.weight.shape[1]
    return sum(parameter.numel() for parameter in potential.parameters()) + padding


@pytest.mark.parametrize("name", ["nano", "mini", "neo", "air", "plus", "pro"])
def test_parameter_counts(name: str) -> None:
    plain, normed = PUBLISHED[name]
    assert count(name, edge_norm=False) == plain
    assert count(name, edge_norm=True) == normed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["max", "ultra"])
def test_parameter_counts_of_the_large(name: str) -> None:
    plain, normed = PUBLISHED[name]
    assert count(name, edge_norm=True) == normed
    if plain is not None:
        assert count(name, edge_norm=False) == plain


@pytest.mark.parametrize("name", presets.names())
def test_presets_are_complete(name: str) -> None:
    """A preset states every option, and what it says of its size is true."""
    content = yaml.safe_load(presets.open_yaml(name))
    section = content["model"]
    section.pop("elements")
    assert set(section) == set(Options.__dataclass_fields__)
    assert Options.from_mapping(section).to_mapping() == {**section, "kmax": section["kmax"]}


def test_untrained_models_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    first = SeZM.from_options(SMALL, ["H", "O"], seed=3)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    second = SeZM.from_options(SMALL, ["H", "O"], seed=3)
    other = SeZM.from_options(SMALL, ["H", "O"], seed=4)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)  # building draws nothing from the caller's generator
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_double_is_exact_whichever_way_it_is_reached() -> None:
    """Constants are taken from float64 again when the dtype changes; only parameters keep float32's rounding."""
    direct = SeZM.from_options(SMALL, ["H", "O"], dtype=torch.float64)
    detour = SeZM.from_options(SMALL, ["H", "O"]).float().to(torch.float64)
    for (name, a), (_, b) in zip(direct.named_buffers(), detour.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_reference_energies_stay_double() -> None:
    potential = SeZM.from_options(SMALL, ["H", "O"])
    potential.get_buffer("reference_energies").copy_(
        torch.tensor([-13.568421234, -2037.796871234], dtype=torch.float64)
    )
    for changed in (potential.float(), potential.half().float(), copy.deepcopy(potential)):
        kept = changed.get_buffer("reference_energies")
        assert kept.dtype == torch.float64
        assert kept.tolist() == [-13.568421234, -2037.796871234]


def test_unknown_element_is_named() -> None:
    potential = SeZM.from_options(SMALL, ["C", "H"])
    with pytest.raises(ValueError, match="knows C, H; the structure also has O"):
        potential(water())


def test_options_reject_what_is_wrong() -> None:
    for options, words in (
        ({"chanels": 8}, "did you mean 'channels'"),
        ({"lmax": "six"}, "lmax must be int; got 'six'"),
        ({"kmax": 4}, "kmax must not exceed lmax"),
        ({"n_atten_head": 3}, "does not divide"),
        ({"l_schedule": [1, 2]}, "must not increase"),
        ({"basis_type": "cosine"}, "bessel, gaussian"),
        ({"activation_function": "swish"}, "must be one of silu"),
        ({"full_attn_res": "dependent", "block_attn_res": "dependent"}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=words):
            SeZM.from_options(options, ["H"])
    with pytest.raises(ValueError, match="Did you mean 'Cu'"):
        SeZM.from_options({}, ["CU"])
    with pytest.raises(ValueError, match="did you mean|Did you mean 'mini'"):
        SeZM.from_preset("minni")


@pytest.mark.parametrize("name", ["nano", "mini", "pro"])
def test_every_parameter_learns_from_forces(name: str) -> None:
    """A loss on forces reaches every parameter once noise has opened the branches that start at zero.

    Except a router of a single branch, which is identically 1.
    """
    section = yaml.safe_load(presets.open_yaml(name))["model"]
    section.update(channels=8, n_blocks=1, mixing_layers=2, n_radial=4)
    section.pop("elements")
    potential = shaken(SeZM.from_options(section, ["H", "O"], dtype=torch.float64))
    prediction = evaluate(potential, water(), create_graph=True)
    (prediction.forces.square().sum() + prediction.energy.sum()).backward()
    silent = [n for n, p in potential.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert all("router" in n for n in silent), silent


def test_gradients_of_a_force_loss_are_exact() -> None:
    """d(loss of forces)/d(parameter) against central differences, for one number of each parameter."""
    potential = shaken(SeZM.from_options({**SMALL, "ffn_so3_grid": True}, ["H", "O"], dtype=torch.float64)).eval()
    graph = water(0.2)

    def loss() -> torch.Tensor:
        return evaluate(potential, graph, create_graph=True).forces.square().sum()

    loss().backward()
    for name, parameter in potential.named_parameters():
        if parameter.grad is None:
            continue
        place = int(parameter.grad.abs().flatten().argmax())
        flat, step = parameter.data.view(-1), 1e-5
        value = float(flat[place])
        flat[place] = value + step
        above = float(loss().detach())
        flat[place] = value - step
        below = float(loss().detach())
        flat[place] = value
        numeric, exact = (above - below) / (2 * step), float(parameter.grad.flatten()[place])
        # Central differences of a loss of order L lose 1e-16 L / step and gain step² of its third derivative.
        assert abs(numeric - exact) < 1e-5 * max(1.0, abs(exact)), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_focus": 2, "radial_so2_mode": "degree_channel", "radial_so2_rank": 2},
        {"radial_so2_mode": "degree_channel", "radial_so2_rank": 0, "n_atten_head": 2},
        {"radial_so2_mode": "degree", "atten_o_proj": True, "lmax": 3, "mmax": 2},
        {"mixing_layers": 0, "radial_so2_mode": "degree_channel", "n_focus": 2, "n_atten_head": 2},
    ],
    ids=str,
)
def test_kernels_of_edges_change_nothing(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions by the operators that a GPU takes: energies, forces and a force loss's gradients are the same."""
    potential = shaken(SeZM.from_options({**SMALL, **options}, ["H", "O"], dtype=torch.float64)).eval()
    calls = []

    def results() -> list[torch.Tensor]:
        prediction = evaluate(potential, water(), create_graph=True)
        loss = prediction.energy.sum() + prediction.forces.square().sum() + prediction.virial.square().sum()
        gradients = torch.autograd.grad(loss, list(potential.parameters()), allow_unused=True, materialize_grads=True)
        return [prediction.energy, prediction.forces, prediction.virial, *gradients]

    expected = results()
    monkeypatch.setattr("mlff.sezm.so2.plain", lambda x, elements: calls.append(elements))
    found = results()
    assert len(calls) == 1
    for one, other in zip(found, expected, strict=True):
        # Sums in another order: 1e-16 of the largest number, a hundred terms.
        assert torch.allclose(one, other, rtol=0, atol=1e-13 * max(1.0, other.abs().max().item()))


def test_random_roll_changes_nothing() -> None:
    """In training every edge frame is rolled at random; the model is blind to it."""
    potential = shaken(SeZM.from_options({**SMALL, "ffn_so3_grid": True}, ["H", "O"], dtype=torch.float64))
    rolled = evaluate(potential.train(), water())
    plain = evaluate(potential.eval(), water())
    assert torch.allclose(rolled.forces, plain.forces, atol=1e-12)
    assert torch.allclose(rolled.energy, plain.energy, atol=1e-12)


def test_public_names() -> None:
    assert set(mlff.names()) == {*PUBLISHED, "mini-crystals"}
    assert mlff.SeZM is SeZM
    with pytest.raises(AttributeError, match="no attribute 'Calculater'"):
        _ = mlff.Calculater
