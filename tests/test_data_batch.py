"""Batches: what collating keeps, and the plan by which structures are shared out over batches, epochs and ranks."""

from __future__ import annotations

import itertools
import time
import warnings
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from toy import molecules

from mlff.data.batch import BudgetSampler, collate, collate_targets, loader
from mlff.data.read import read

FILES = Path(__file__).parent / "data"


def plans(sizes, edges=None, ranks=1, epoch=0, **options):
    """The batches of every rank."""
    result = []
    for rank in range(ranks):
        sampler = BudgetSampler(sizes, edges, rank=rank, world_size=ranks, **options)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(sampler) == len(batches)
        result.append(batches)
    return result


def seen(plan):
    return sorted(itertools.chain.from_iterable(plan))


# Collating


def test_a_batch_is_its_structures_side_by_side():
    pairs = molecules(count=4, atoms=(3, 1, 5))
    graph, targets = collate([graph for graph, _ in pairs]), collate_targets([targets for _, targets in pairs])
    assert (graph.n_structures, graph.n_atoms) == (4, 3 + 1 + 5 + 3)
    assert torch.equal(graph.structure[graph.senders], graph.structure[graph.receivers])
    assert torch.equal(graph.receivers, graph.receivers.sort().values)
    first = 0
    for number, (single, labels) in enumerate(pairs):
        mine = graph.structure == number
        edges = mine[graph.receivers]
        assert torch.equal(graph.positions[mine], single.positions)
        assert torch.equal(graph.numbers[mine], single.numbers)
        assert torch.equal(graph.senders[edges] - first, single.senders)
        assert torch.equal(graph.receivers[edges] - first, single.receivers)
        assert torch.equal(graph.shifts[edges], single.shifts)
        torch.testing.assert_close(targets.forces[mine], labels.forces, equal_nan=True, rtol=0, atol=0)
        assert targets.index[number] == labels.index[0]
        first += single.n_atoms


def test_collating_batches_again_gives_the_same_as_at_once():
    graphs = [graph for graph, _ in molecules(count=5)]
    nested, flat = collate([collate(graphs[:2]), collate(graphs[2:])]), collate(graphs)
    for name in ("structure", "senders", "receivers", "positions", "cell"):
        assert torch.equal(getattr(nested, name), getattr(flat, name))


def test_collating_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one graph"):
        collate([])


# Budgets


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_batches_keep_both_budgets_and_hold_every_structure_once(shuffle, ranks):
    random = np.random.default_rng(0)
    sizes = random.integers(1, 30, size=200)
    edges = sizes * random.integers(5, 40, size=200)
    for epoch in range(2):
        parts = plans(sizes, edges, ranks, epoch, batch_atoms=64, batch_edges=2000, shuffle=shuffle)
        assert len({len(plan) for plan in parts}) == 1
        assert seen(itertools.chain(*parts)) == list(range(200))
        for batch in itertools.chain(*parts):
            assert batch
            assert sizes[batch].sum() <= 64
            assert edges[batch].sum() <= 2000


def test_batches_are_well_filled():
    """First fit into 16 open batches wastes a few percent of 64 atoms; one after another wastes about 15."""
    sizes = np.random.default_rng(0).integers(1, 30, size=1000)
    (plan,) = plans(sizes, batch_atoms=64)
    assert len(plan) <= 1.05 * np.ceil(sizes.sum() / 64)


def test_without_shuffling_the_order_stays():
    sizes = [5, 6, 7, 100, 3, 4, 20]
    with pytest.warns(UserWarning, match="structure 3 .*100 atoms"):
        (plan,) = plans(sizes, batch_atoms=16, shuffle=False)
    assert plan == [[0, 1], [2], [3], [4, 5], [6]]


def test_rt9_fewer_structures_than_a_batch_holds():
    (plan,) = plans([1, 1, 1], batch_atoms=10)
    assert [sorted(batch) for batch in plan] == [[0, 1, 2]]
    assert plans([1], batch_atoms=10) == [[[0]]]


def test_rt10_a_structure_over_the_budget_is_a_batch_of_its_own():
    dataset = read(FILES / "sizes_2_3_5_40_4.extxyz", cutoff=3.0)
    for shuffle in (False, True):
        with pytest.warns(
            UserWarning,
            match=r"structure 3 .*sizes_2_3_5_40_4.extxyz, frame 3\) has 40 atoms, more than training.batch_atoms=32",
        ) as caught:
            batches = loader(dataset, batch_atoms=32, shuffle=shuffle)
            taken = [targets.index.tolist() for _, targets in batches]
        assert len(caught) == 1
        assert [3] in taken
        assert sorted(map(len, taken)) == [1, 4] if shuffle else taken == [[0, 1, 2], [3], [4]]
        assert sorted(itertools.chain(*taken)) == [0, 1, 2, 3, 4]


def test_edges_over_the_budget_are_warned_about_too():
    with pytest.warns(UserWarning, match=r"structure 1 .* has 90 edges, .*batch_edges=50.*1 more are too large"):
        (plan,) = plans([2, 3, 4], [10, 90, 91], batch_atoms=10, batch_edges=50)
    assert sorted(plan) == [[0], [1], [2]]


def test_a_structure_over_the_budget_can_be_an_error():
    """On every rank, so that none waits for another."""
    dataset = read(FILES / "sizes_2_3_5_40_4.extxyz", cutoff=3.0)
    for rank in range(2):
        with pytest.raises(
            ValueError, match=r"structure 3 .*frame 3\) has 40 atoms, more than training.batch_atoms=32\."
        ):
            loader(dataset, batch_atoms=32, rank=rank, world_size=2, oversized="error")
    loader(dataset, batch_atoms=40, oversized="error")


# Ranks and epochs


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("count", [200, 2000])
def test_a_mixed_set_gives_the_ranks_equal_work(ranks, count):
    """Molecules, slabs and bulk, 20 to 90 edges an atom: edges over an epoch within 10 %, also of few steps."""
    for seed in range(10):
        random = np.random.default_rng(seed)
        sizes = random.choice([3, 12, 20, 64, 130], size=count)
        edges = sizes * random.choice([20, 60, 90], size=count) + random.integers(0, 9, size=count)
        parts = plans(sizes, edges, ranks, epoch=seed, batch_atoms=300, batch_edges=16000, seed=seed)
        work = np.array([[edges[batch].sum() for batch in plan] for plan in parts])  # [rank, step]
        assert work.sum(1).max() <= 1.1 * work.sum(1).min()
        assert work.max(0).sum() <= 1.1 * work.sum() / ranks  # at each step all wait for the slowest
        assert sizes[max(itertools.chain(*parts), key=lambda batch: sizes[batch].sum())].sum() <= 300


def test_rt2_unequal_structures_give_equal_numbers_of_steps():
    sizes = np.array([2, 3, 5, 40, 4, 17, 29])
    for epoch in range(20):
        parts = plans(sizes, None, 2, epoch, batch_atoms=48)
        assert len(parts[0]) == len(parts[1]) > 0
        assert seen(itertools.chain(*parts)) == list(range(7))
        assert all(sizes[batch].sum() <= 48 for batch in itertools.chain(*parts))


def test_rt15_ranks_are_disjoint_and_epochs_differ_and_repeat():
    epochs = []
    for epoch in range(3):
        parts = plans([3] * 16, [12] * 16, 2, epoch, batch_atoms=6, seed=7)
        assert parts == plans([3] * 16, [12] * 16, 2, epoch, batch_atoms=6, seed=7)
        assert not set(seen(parts[0])) & set(seen(parts[1]))
        assert seen(itertools.chain(*parts)) == list(range(16))
        epochs.append(parts)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != plans([3] * 16, [12] * 16, 2, 0, batch_atoms=6, seed=8)


def test_the_ranks_of_a_step_have_similar_work():
    """Half the structures are dense. Atoms fill the batches, edges decide which batches meet at a step."""
    sizes = np.full(400, 10)
    edges = np.where(np.arange(400) % 2, 900, 100) + np.arange(400)
    parts = plans(sizes, edges, 4, batch_atoms=20)
    work = np.array([[edges[batch].sum() for batch in plan] for plan in parts])  # [rank, step]
    idle = 1 - work.sum() / (4 * work.max(axis=0).sum())
    np.testing.assert_allclose(work.sum(axis=1) / work.sum(axis=1).mean(), 1.0, atol=0.1)
    assert idle < 0.1  # at random, three of four wait for a dense batch: 0.3
    assert len(set(work.argmax(axis=0).tolist())) == 4  # and not always the same one is the last


@pytest.mark.parametrize("shuffle", [False, True])
def test_fewer_structures_than_ranks(shuffle):
    parts = plans([4, 5, 6], None, 8, batch_atoms=100, shuffle=shuffle)
    assert [len(plan) for plan in parts] == [1] * 8
    indices = seen(itertools.chain(*parts))
    assert {index % 3 for index in indices} == {0, 1, 2}
    if not shuffle:  # what comes again is counted from the end
        assert [index for index in indices if index >= 0] == [0, 1, 2]
        assert len(indices) == 8


def test_rt10_only_one_rank_warns():
    with pytest.warns(UserWarning, match="40 atoms") as caught:
        plans([2, 40, 3], None, 4, batch_atoms=32)
    assert len(caught) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_atoms", [4, 8, 12, 100])
def test_rt18_each_structure_is_counted_once_over_the_ranks(ranks, batch_atoms):
    """Labels of six structures, of which some come twice so that every rank has as many batches."""
    dataset = read(FILES / "sizes_4_and_8.extxyz", cutoff=3.0)
    labelled, lengths = [], set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 8 atoms are more than 4
        for rank in range(ranks):
            batches = list(loader(dataset, batch_atoms, rank=rank, world_size=ranks))
            lengths.add(len(batches))
            for graph, targets in batches:
                assert targets.index.min() >= 0
                present = targets.energy.isfinite()
                assert torch.equal(targets.forces.isfinite().all(1), present[graph.structure])
                labelled += targets.index[present].tolist()
    assert len(lengths) == 1
    assert sorted(labelled) == list(range(6))


def test_rt5_going_on_in_the_middle_of_an_epoch():
    sampler = BudgetSampler([3] * 20, None, 6, seed=3)
    sampler.set_epoch(4)
    whole = list(sampler)
    sampler.start = 7
    assert len(sampler) == len(whole)
    assert list(sampler) == whole[7:]
    assert sampler.start == 0
    assert list(sampler) == whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_atoms": []}, "no structure"),
        ({"batch_atoms": 0}, "batch_atoms of 1 or more"),
        ({"batch_edges": -1}, "batch_edges of 0"),
        ({"batch_edges": 10}, "number of edges of each structure"),
        ({"rank": 2, "world_size": 2}, "rank from 0 to 1; got 2"),
    ],
)
def test_wrong_budgets_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        BudgetSampler(**{"n_atoms": [1, 2], "n_edges": None, "batch_atoms": 4, **options})


def test_a_plan_for_many_structures_is_quick():
    """10⁵ molecules in a second or so: an epoch of them takes minutes."""
    sizes = np.random.default_rng(0).integers(5, 30, size=100_000)
    start = time.perf_counter()
    sampler = BudgetSampler(sizes, sizes * 12, 300, 5000)
    assert len(sampler) > 5000
    assert time.perf_counter() - start < 5.0


# Loading


def test_loading_draws_no_global_random_number():
    dataset = read(FILES / "sizes_4_and_8.extxyz", cutoff=3.0)
    before = torch.get_rng_state()
    batches = loader(dataset, batch_atoms=12, shuffle=True, seed=1)
    first = [targets.index.tolist() for _, targets in batches]
    assert torch.equal(torch.get_rng_state(), before)
    sampler = cast(BudgetSampler, batches.batch_sampler)
    sampler.set_epoch(1)
    assert [targets.index.tolist() for _, targets in batches] != first
    sampler.set_epoch(0)
    assert [targets.index.tolist() for _, targets in batches] == first


def test_edge_budget_uses_the_true_number_of_edges():
    dataset = read(FILES / "sizes_4_and_8.extxyz", cutoff=3.1)
    most = int(dataset.n_edges().max())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = list(loader(dataset, batch_atoms=1000, batch_edges=most))
    assert max(graph.n_edges for graph, _ in batches) <= most
    assert sum(graph.n_structures for graph, _ in batches) == len(dataset)
