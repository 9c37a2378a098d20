"""Every preset obeys the laws of `laws.py`: all at reduced width, the two small ones at full width too.

Reduced width keeps every choice of a preset (degrees, orders, grids, attention, read-out) and takes fewer channels and
blocks. The last tests turn the laws around: each must notice a potential that breaks it.
"""

from __future__ import annotations

import functools
from pathlib import Path

import laws
import pytest
import torch
import yaml
from torch import nn
from torch.autograd.gradcheck import GradcheckError

from mlff import presets
from mlff.graph import Graph
from mlff.sezm.potential import SeZM, edge_vectors

ELEMENTS = ("H", "O", "Cu")
QUICK = ("mini", "pro")  # between them every kind of grid, focus stream and degree mixer of the presets
REDUCED = [pytest.param((n, False), id=n, marks=() if n in QUICK else pytest.mark.slow) for n in presets.names()]
FULL = [pytest.param((name, True), id=f"{name}-full", marks=pytest.mark.slow) for name in ("nano", "mini")]


@functools.cache
def model(name: str, full: bool) -> SeZM:
    """One noisy model of a preset, made once."""
    with presets.open_yaml(name) as file:
        options = yaml.safe_load(file)["model"]
    del options["elements"]
    if not full:
        options |= {"channels": 4, "n_blocks": min(2, options["n_blocks"])}
    return laws.noisy(SeZM.from_options(options, ELEMENTS, dtype=torch.float64))


@pytest.fixture(params=REDUCED + FULL)
def potential(request: pytest.FixtureRequest) -> SeZM:
    return model(*request.param)


def structures(potential: SeZM) -> dict:
    return {"cluster": laws.cluster(potential.elements), "crystal": laws.crystal(potential.elements)}


def test_forces_are_of_order_one(potential: SeZM) -> None:
    """Otherwise the laws below would hold for want of an effect."""
    for atoms in structures(potential).values():
        largest = laws.results(potential, atoms).forces.abs().max()
        assert 0.05 < largest < 50


@pytest.mark.parametrize("kind", ["cluster", "crystal"])
def test_translation(potential: SeZM, kind: str) -> None:
    laws.translation(potential, structures(potential)[kind])


@pytest.mark.parametrize("kind", ["cluster", "crystal"])
def test_rotation(potential: SeZM, kind: str) -> None:
    laws.rotation(potential, structures(potential)[kind])


@pytest.mark.parametrize("kind", ["cluster", "crystal"])
def test_permutation(potential: SeZM, kind: str) -> None:
    laws.permutation(potential, structures(potential)[kind])


def test_supercell(potential: SeZM) -> None:
    laws.supercell(potential, laws.crystal(potential.elements))


def test_batch_is_singles(potential: SeZM) -> None:
    sizes = (5, 1, 2)
    clusters = [laws.cluster(potential.elements, n, seed=n) for n in sizes]
    laws.batch_is_singles(potential, [clusters[0], laws.crystal(potential.elements), *clusters[1:]])


def test_far_apart_is_sum(potential: SeZM) -> None:
    laws.far_apart_is_sum(potential, laws.cluster(potential.elements), laws.cluster(potential.elements, 3, seed=5))


def test_saved_is_loaded(potential: SeZM, tmp_path: Path) -> None:
    laws.saved_is_loaded(potential, tmp_path, laws.cluster(potential.elements))


@pytest.mark.parametrize("kind", ["cluster", "crystal"])
def test_forces_are_differences(potential: SeZM, kind: str) -> None:
    laws.forces_are_differences(potential, structures(potential)[kind])


def test_stress_is_difference(potential: SeZM) -> None:
    laws.stress_is_difference(potential, laws.crystal(potential.elements))


def test_gradient_of_a_loss_on_forces(potential: SeZM) -> None:
    laws.force_loss_gradient(potential, laws.cluster(potential.elements, 3))


def test_second_derivatives_of_a_pair(potential: SeZM) -> None:
    laws.second_derivatives(potential, laws.cluster(potential.elements, 2))


def test_axes_are_directions_like_others(potential: SeZM) -> None:
    laws.axes_are_directions_like_others(potential, potential.elements)


def test_finite_at_short_distance(potential: SeZM) -> None:
    laws.finite_at_short_distance(potential, potential.elements[0])


def test_smooth_through_the_cutoff(potential: SeZM) -> None:
    laws.smooth_through_the_cutoff(potential, potential.elements)  # type: ignore[arg-type]


def test_rp3_a_pair_leaves_the_cutoff(potential: SeZM) -> None:
    laws.pair_leaves_the_cutoff(potential, potential.elements[:2])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cluster", "crystal"])
def test_rp4_single_precision(potential: SeZM, kind: str) -> None:
    laws.single_precision(potential, structures(potential)[kind])


def test_mirror_images_are_told_apart() -> None:
    """SeZM is invariant under rotations, not under reflections: its convolution mixes orders +m and -m freely.

    Good to know of mirror images: training brings their energies together, the architecture does not.
    """
    potential = model("mini", False)
    atoms = laws.cluster(potential.elements)
    mirrored = atoms.copy()
    mirrored.positions *= [1, 1, -1]
    gap = laws.results(potential, mirrored).energy - laws.results(potential, atoms).energy
    assert abs(gap.item()) > 1e3 * laws.ROUNDING


# Choices that no preset makes, several at once where they do not exclude each other.
OTHERS = {
    "norms": {"edge_norm": True, "sandwich_norm": [True] * 4, "layer_scale": True, "mlp_bias": True},
    "charge": {"add_chg_spin_ebd": True, "basis_type": "gaussian", "activation_function": "tanh"},
    "heads": {"n_atten_head": 2, "atten_v_proj": True, "atten_o_proj": True, "n_focus": 2, "atten_f_mix": True},
    "no_attention": {"n_atten_head": 0, "n_focus": 2, "focus_dim": 3, "radial_so2_mode": "degree"},
    "all_orders": {"lmax": 3, "mmax": None, "so2_attn_res": "dependent"},
    "pyramid": {"l_schedule": [3, 2, 1], "extra_node_l": 1, "full_attn_res": "dependent"},
    "node_grids": {"node_wise_s2": True, "message_node_s2": True, "s2_activation": [True, True]},
    "frame_grids": {"node_wise_so3": True, "ffn_so3_grid": True, "kmax": 2, "grid_mlp": True},
    "product_grids": {"s2_activation": [True, True], "lebedev_quadrature": False, "grid_branch": 2},
    "cartesian_edges": {"edge_cartesian": True},
    "cartesian_nodes": {"node_cartesian": "parity:2"},
    "no_seed": {"use_env_seed": False, "glu_activation": False, "s2_activation": [False, False]},
    "no_blocks": {"n_blocks": 0},
    "scalars": {"lmax": 0, "kmax": 0, "mmax": 0},
    "excluded": {"exclude_types": [["H", "O"]], "atom_exclude_types": ["Cu"]},
    "bridging": {"bridging_method": "zbl", "bridging_r_inner": 0.8, "bridging_r_outer": 1.6},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_options(name: str) -> None:
    """Rotation and differentiation hold there too. The cutoff is left out: ZBL by definition does not end there."""
    options = {"channels": 4, "lmax": 2, "n_blocks": 2, "mixing_layers": 2, "n_radial": 6} | OTHERS[name]
    potential = laws.noisy(SeZM.from_options(options, ELEMENTS, dtype=torch.float64))
    cluster, crystal = structures(potential).values()
    laws.rotation(potential, cluster)
    laws.batch_is_singles(potential, [cluster, crystal])
    laws.forces_are_differences(potential, cluster, directions=1)
    laws.stress_is_difference(potential, crystal)
    laws.axes_are_directions_like_others(potential, potential.elements)


# The laws themselves


class Pairs(nn.Module):
    """A potential that obeys every law, or has one named fault."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.elements, self.cutoff, self.fault = (1, 8, 29), 4.0, fault
        self.strength = nn.Parameter(torch.tensor([[1.0, 1.5, 2.0]], dtype=torch.float64))

    def forward(self, graph: Graph, vectors: torch.Tensor | None = None) -> torch.Tensor:
        vectors = edge_vectors(graph) if vectors is None else vectors
        fault = self.fault
        if fault == "detached":  # right energies, wrong derivatives
            vectors = 0.5 * vectors + 0.5 * vectors.detach()
        if fault == "rough" and self.strength.dtype == torch.float32:
            vectors = vectors.to(torch.bfloat16).to(torch.float64)
        lengths = (vectors.square().sum(-1) + 1e-14).sqrt()
        place = torch.tensor([self.elements.index(number) for number in graph.numbers.tolist()])
        pair = self.strength[0, place[graph.senders]] * self.strength[0, place[graph.receivers]]
        u = (1 - lengths / self.cutoff).clamp_min(0)
        power = {"sharp": 0, "kinked": 1, "bent": 2}.get(fault, 4)
        energy = pair * u**power * torch.cos(2 * lengths)
        if fault == "axis":
            energy = energy * (1 + 0.1 * (vectors[:, 2] / lengths) ** 2)
        if fault == "pole":  # all but one direction
            energy = energy * (1 + 0.1 * ((vectors[:, 2] / lengths) > 1 - 1e-12))
        if fault == "diverging":
            energy = energy / vectors.square().sum(-1).sqrt()
        atoms = torch.zeros(graph.n_atoms, dtype=torch.float64).index_add(0, graph.receivers, energy.double())
        if fault == "origin":
            atoms = atoms + 0.01 * graph.positions.square().sum(-1)
        if fault == "order":
            atoms = atoms * (1 + 0.1 * torch.arange(graph.n_atoms) / 5)
        if fault == "size":  # energies of atoms depend on how many there are
            atoms = atoms * (1 + 0.1 * graph.n_atoms)
        return atoms


FAULTS = {
    "origin": ["translation"],
    "axis": ["rotation", "axes_are_directions_like_others"],
    "pole": ["axes_are_directions_like_others"],
    "order": ["permutation", "batch_is_singles"],
    "size": ["supercell", "batch_is_singles", "far_apart_is_sum"],
    "detached": ["forces_are_differences", "stress_is_difference", "second_derivatives", "smooth_through_the_cutoff"],
    "sharp": ["smooth_through_the_cutoff", "pair_leaves_the_cutoff"],
    "kinked": ["smooth_through_the_cutoff", "pair_leaves_the_cutoff"],
    "bent": ["smooth_through_the_cutoff"],
    "diverging": ["finite_at_short_distance"],
    "rough": ["single_precision"],
}
CALLS = {
    "translation": lambda p: laws.translation(p, laws.cluster(p.elements)),
    "rotation": lambda p: laws.rotation(p, laws.cluster(p.elements)),
    "permutation": lambda p: laws.permutation(p, laws.cluster(p.elements)),
    "supercell": lambda p: laws.supercell(p, laws.crystal(p.elements)),
    "batch_is_singles": lambda p: laws.batch_is_singles(p, [laws.cluster(p.elements), laws.crystal(p.elements)]),
    "far_apart_is_sum": lambda p: laws.far_apart_is_sum(p, laws.cluster(p.elements), laws.cluster(p.elements, 3)),
    "forces_are_differences": lambda p: laws.forces_are_differences(p, laws.cluster(p.elements)),
    "stress_is_difference": lambda p: laws.stress_is_difference(p, laws.crystal(p.elements)),
    "second_derivatives": lambda p: laws.second_derivatives(p, laws.cluster(p.elements, 2)),
    "axes_are_directions_like_others": lambda p: laws.axes_are_directions_like_others(p, p.elements),
    "finite_at_short_distance": lambda p: laws.finite_at_short_distance(p, 8),
    "smooth_through_the_cutoff": lambda p: laws.smooth_through_the_cutoff(p, p.elements),
    "pair_leaves_the_cutoff": lambda p: laws.pair_leaves_the_cutoff(p, (1, 8)),
    "single_precision": lambda p: laws.single_precision(p, laws.cluster(p.elements)),
}


@pytest.mark.parametrize("law", CALLS)
def test_a_right_potential_passes(law: str) -> None:
    CALLS[law](Pairs())


@pytest.mark.parametrize(("fault", "law"), [(fault, law) for fault, names in FAULTS.items() for law in names])
def test_a_fault_is_noticed(fault: str, law: str) -> None:
    with pytest.raises((AssertionError, GradcheckError)):
        CALLS[law](Pairs(fault))


def test_every_law_can_fail() -> None:
    """No law without a fault that it notices, but for the two that need a real model's file and parameters."""
    assert {law for names in FAULTS.values() for law in names} == set(CALLS)
