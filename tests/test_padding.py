"""Structures that fill a batch up to a size, and that nobody sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ase.build import bulk, molecule

from mlff.atoms import graph_from_atoms
from mlff.data.batch import collate, collate_targets
from mlff.derivatives import evaluate
from mlff.graph import Graph
from mlff.loss import differences, loss, loss_terms
from mlff.padding import Sizes, pad, pad_targets, unpad
from mlff.sezm.potential import SeZM

from toy import structure  # isort: skip
from mlff.config import LossConfig

CUTOFF = 4.0


def batch() -> Graph:
    """A molecule, an isolated atom and a crystal."""
    atoms = [molecule("CH3OH"), molecule("O"), bulk("CO", "zincblende", a=4.5)]
    return collate([graph_from_atoms(a, CUTOFF) for a in atoms])


@pytest.fixture(scope="module")
def model() -> SeZM:
    options = {"channels": 8, "lmax": 2, "n_blocks": 2, "rcut": CUTOFF, "random_gamma": False}
    potential = SeZM.from_options(options, ["H", "C", "O"], seed=1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    for value in potential.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return potential


@pytest.mark.parametrize("sizes", [(1, 0, 1), (3, 0, 2), (1, 7, 1), (5, 101, 4), (40, 3, 1)])
def test_a_padded_batch_says_the_same(model: SeZM, sizes: tuple[int, int, int]) -> None:
    """Values bit for bit but for the order of sums; gradients too; nothing that was added has a force."""
    graph = batch()
    own = Sizes.of(graph)
    wanted = Sizes(own.atoms + sizes[0], own.edges + sizes[1], own.structures + sizes[2])
    padded = pad(graph, wanted, CUTOFF)
    assert Sizes.of(padded) == wanted
    assert bool((padded.receivers.diff() >= 0).all()) and bool((padded.structure.diff() >= 0).all())
    whole = evaluate(model, padded, create_graph=True)
    found, expected = unpad(whole, own), evaluate(model, graph, create_graph=True)
    for item in dataclasses.fields(expected):
        first, second = getattr(found, item.name), getattr(expected, item.name)
        if second is not None:
            torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert not bool(whole.forces[own.atoms :].any())
    gradients = [
        torch.autograd.grad(p.forces.square().sum() + p.energy.sum(), list(model.parameters()), materialize_grads=True)
        for p in (found, expected)
    ]
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-11, atol=1e-11)


def test_padded_labels_count_nowhere(model: SeZM) -> None:
    items = [structure([[0, 0, 0], [0, 0, 1.1]], [6, 8], energy=-3.0, forces=torch.ones(2, 3)) for _ in range(2)]
    graph, targets = collate([g for g, _ in items]), collate_targets([t for _, t in items])
    sizes = Sizes(graph.n_atoms + 4, graph.n_edges + 6, graph.n_structures + 3)
    config = LossConfig()
    values = []
    for g, t in ((graph, targets), (pad(graph, sizes, CUTOFF), pad_targets(targets, sizes))):
        values.append(loss(loss_terms(differences(evaluate(model, g), t, g), config), config))
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=0)


def test_every_optional_table_is_padded() -> None:
    graph = dataclasses.replace(
        batch(), spins=torch.ones(9, 3), frame_parameters=torch.ones(3, 2), atom_parameters=torch.ones(9, 4)
    )
    padded = pad(graph, Sizes(12, graph.n_edges + 1, 5), CUTOFF)
    assert padded.spins is not None and padded.frame_parameters is not None and padded.atom_parameters is not None
    assert padded.spins.shape == (12, 3) and not bool(padded.spins[9:].any())
    assert padded.frame_parameters.shape == (5, 2) and padded.atom_parameters.shape == (12, 4)


def test_a_graph_that_does_not_fit_is_refused() -> None:
    graph = batch()
    own = Sizes.of(graph)
    for wrong in ((0, 0, 1), (1, -1, 1), (1, 0, 0)):
        sizes = Sizes(*(a + b for a, b in zip(dataclasses.astuple(own), wrong, strict=True)))
        with pytest.raises(ValueError, match="does not fit into"):
            pad(graph, sizes, CUTOFF)
