"""The neighbour list against a direct count over all images, and in the corners where such lists go wrong."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from pathlib import Path

import ase.io
import numpy as np
import pytest

from mlff.neighbors import complete_cell, neighbor_list

FILES = Path(__file__).parent / "data"


def every_image(positions, cell, pbc, cutoff):
    """Return the set of (sender, receiver, shift) by looking at every image that could be near: the definition."""
    cell = complete_cell(cell, np.asarray(pbc))
    inverse = np.linalg.inv(cell)
    reach = np.ceil(cutoff * np.linalg.norm(inverse, axis=0) + np.ptp(positions @ inverse, axis=0)).astype(int) + 1
    edges = set()
    for shift in itertools.product(*[range(-r, r + 1) if p else [0] for r, p in zip(reach, pbc, strict=True)]):
        vectors = positions[None] + np.array(shift) @ cell - positions[:, None]  # [receiver, sender, 3]
        near = np.linalg.norm(vectors, axis=-1) < cutoff
        if shift == (0, 0, 0):
            np.fill_diagonal(near, False)
        edges |= {(int(s), int(r), *shift) for r, s in zip(*np.nonzero(near), strict=True)}
    return edges


def as_set(senders, receivers, shifts):
    edges = [(int(s), int(r), *map(int, shift)) for s, r, shift in zip(senders, receivers, shifts, strict=True)]
    assert len(edges) == len(set(edges)), "an edge occurs twice"
    return set(edges)


def check(positions, cell, pbc, cutoff):
    """Compare with the definition, and hold the conventions: types, order, both directions, the vector's formula."""
    senders, receivers, shifts = neighbor_list(positions, cell, pbc, cutoff)
    assert (senders.dtype, receivers.dtype, shifts.dtype) == (np.int64, np.int64, np.float64)
    assert as_set(senders, receivers, shifts) == every_image(positions, cell, pbc, cutoff)
    assert as_set(senders, receivers, shifts) == as_set(receivers, senders, -shifts)
    rows = list(zip(receivers.tolist(), senders.tolist(), shifts.tolist(), strict=True))
    assert rows == sorted(rows)
    lengths = np.linalg.norm(positions[senders] + shifts @ cell - positions[receivers], axis=1)
    assert np.all(lengths < cutoff + 1e-9)  # rounding of positions up to 100 Å away
    assert not shifts[:, ~np.asarray(pbc)].any()
    return len(senders)


@pytest.mark.parametrize("pbc", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("scale", [1.5, 4.0, 9.0, 16.0])
def test_ra1_random_skewed_cells_and_atoms_outside_them(pbc, scale):
    """Scales reach from images of images (1.5 Å cells) to cells that are wider than two cutoffs."""
    rng = np.random.default_rng([int(2 * scale), *pbc])
    for n_atoms in (1, 2, 5):
        cell = scale * (np.eye(3) + 0.4 * rng.normal(size=(3, 3)))
        while abs(np.linalg.det(cell)) < 0.3 * scale**3:
            cell = scale * (np.eye(3) + 0.4 * rng.normal(size=(3, 3)))
        positions = rng.uniform(-1.5, 2.5, size=(n_atoms, 3)) @ cell * np.where(np.any(pbc), 1.0, 0.3)
        check(positions, cell, pbc, cutoff=3.3)


def test_more_than_a_few_atoms_take_the_grid():
    """80 atoms in a cell wider than two cutoffs leave the direct route; both routes give the definition's edges."""
    rng = np.random.default_rng(1)
    cell = np.array([[10.0, 0, 0], [3.0, 9.0, 0], [-2.0, 1.0, 8.0]])
    for n_atoms in (60, 64, 65, 80):
        assert check(rng.uniform(-1, 2, size=(n_atoms, 3)) @ cell, cell, (True, True, True), cutoff=3.5) > 100


@pytest.mark.parametrize(
    ("rows", "pbc"),
    [
        ([[5, 0, 0], [1, 5, 0], [0, 0, 0]], (True, True, False)),  # a slab without third vector
        ([[5, 0, 0], [0, 5, 0], [5, 5, 0]], (True, True, False)),  # third vector in the plane of the others
        ([[0, 0, 0], [0, 0, 0], [1, 1, 4]], (False, False, True)),  # a wire
        ([[np.nan, 0, 0], [0, 4, 0], [0, 0, np.inf]], (False, True, False)),
        ([[0, 0, 0], [0, 0, 0], [0, 0, 0]], (False, False, False)),
    ],
)
def test_open_axes_may_have_any_vector(rows, pbc):
    cell = np.array(rows, float)
    positions = np.random.default_rng(3).uniform(0, 5, size=(6, 3))
    found = as_set(*neighbor_list(positions, cell, pbc, 4.0))
    assert found == every_image(positions, np.where(np.array(pbc)[:, None], cell, 0.0), pbc, 4.0)
    assert found


def test_strongly_skewed_cell():
    """The second vector leans over by 40 cells: a lattice is the same whichever of its cells describes it."""
    straight, leaning = np.diag([3.0, 3.5, 4.0]), np.array([[3.0, 0, 0], [120.0, 3.5, 0], [0, 0, 4.0]])
    positions = np.array([[0.1, 0.2, 0.3], [1.5, 1.7, 1.9]])
    pbc = (True, True, True)
    assert len(neighbor_list(positions, straight, pbc, 6.0)[0]) == check(positions, leaning, pbc, 6.0)


def test_ra8_seventy_eight_neighbours_in_fcc_copper():
    for atoms in ase.io.iread(FILES / "fcc_cu_sizes.extxyz", index=":"):
        _, receivers, _ = neighbor_list(atoms.positions, atoms.cell.array, atoms.pbc, 6.0)
        assert np.bincount(receivers, minlength=len(atoms)).tolist() == [78] * len(atoms)


def test_ra1_the_vectors_of_wrapped_and_unwrapped_atoms_agree():
    lists = []
    for atoms in ase.io.iread(FILES / "wrapped_unwrapped.extxyz", index=":"):
        senders, receivers, shifts = neighbor_list(atoms.positions, atoms.cell.array, atoms.pbc, 5.0)
        vectors = atoms.positions[senders] + shifts @ atoms.cell.array - atoms.positions[receivers]
        rows = np.column_stack([receivers, senders, vectors])
        lists.append(rows[np.lexsort(rows.round(4).T[::-1])])
    assert len(lists[0]) > 100
    # The file holds ten digits of coordinates up to 30 Å.
    np.testing.assert_allclose(lists[0], lists[1], atol=2e-8)


def test_no_atoms_one_atom_and_no_neighbours():
    for n_atoms in (0, 1):
        for cell, pbc in ((np.zeros((3, 3)), (False,) * 3), (20 * np.eye(3), (True,) * 3)):
            senders, receivers, shifts = neighbor_list(np.zeros((n_atoms, 3)), cell, pbc, 6.0)
            assert senders.shape == receivers.shape == (0,)
            assert shifts.shape == (0, 3)
            assert (senders.dtype, shifts.dtype) == (np.int64, np.float64)


def test_the_cutoff_itself_is_outside():
    pair = np.array([[0.0, 0, 0], [3.0, 0, 0]])
    assert len(neighbor_list(pair, np.zeros((3, 3)), (False,) * 3, 3.0)[0]) == 0
    assert len(neighbor_list(pair, np.zeros((3, 3)), (False,) * 3, np.nextafter(3.0, 4.0))[0]) == 2
    # An atom and its own images, where half the cell is the cutoff.
    assert len(neighbor_list(pair[:1], 3.0 * np.eye(3), (True,) * 3, 3.0)[0]) == 0


WATER = np.array([[0.0, 0, 0.4], [0, 0.76, -0.2], [0, -0.76, -0.2]])


@pytest.mark.parametrize(
    ("positions", "cell", "pbc"),
    [
        (WATER + 237.0, np.zeros((3, 3)), (False,) * 3),
        (WATER + 1e5, np.zeros((3, 3)), (False,) * 3),
        (np.array([[0.0, 0, 0], [3.0, 0, 0]]), 2000.0 * np.eye(3), (True,) * 3),
        (np.array([[0.0, 0, 0], [1000.0, 0, 0]]), 2000.0 * np.eye(3), (True,) * 3),
        (np.array([[0.0, 0, 0], [1999.0, 0, 0]]), 2000.0 * np.eye(3), (True,) * 3),
    ],
)
def test_ra9_empty_space_costs_nothing(positions, cell, pbc):
    def seconds(positions, cell, pbc):
        durations = []
        for _ in range(5):
            start = time.perf_counter()
            neighbor_list(positions, cell, pbc, 6.0)
            durations.append(time.perf_counter() - start)
        return min(durations)

    neighbor_list(WATER, np.zeros((3, 3)), (False,) * 3, 6.0)
    tracemalloc.start()
    try:
        edges = len(neighbor_list(positions, cell, pbc, 6.0)[0])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert edges == {237.0: 6, 1e5: 6, 0.0: 2 if abs(positions[1, 0]) != 1000.0 else 0}[positions[0, 0]]
    assert peak < 10e6
    # 5 times as in the origin, and 1 ms for a machine that is busy with something else.
    assert seconds(positions, cell, pbc) < 5 * seconds(WATER, np.zeros((3, 3)), (False,) * 3) + 1e-3


def test_memory_grows_with_edges_and_not_with_pairs():
    """30 000 scattered atoms: a table of pairs would hold 7 GB, and one of space 1e9 cells."""
    positions = np.random.default_rng(0).uniform(0, 5000.0, size=(30_000, 3))
    tracemalloc.start()
    try:
        neighbor_list(positions, np.zeros((3, 3)), (False,) * 3, 6.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize(
    ("positions", "cell", "pbc", "cutoff", "words"),
    [
        ([[0, 0, 0], [1, np.nan, 0]], np.eye(3), (True,) * 3, 3.0, r"position of atom 1.*nan.*1 of 2"),
        ([[0, 0, np.inf]], np.eye(3), (False,) * 3, 3.0, r"position of atom 0.*inf"),
        ([[0, 0, 0]], np.diag([5.0, 0, 5]), (True,) * 3, 3.0, r"periodic along a, b, c.*linearly dependent"),
        ([[0, 0, 0]], [[1, 1, 0], [2, 2, 0], [0, 0, 1]], (True, True, False), 3.0, r"along a, b,.*dependent"),
        ([[0, 0, 0]], np.diag([np.nan, 5, 5]), (True,) * 3, 3.0, r"lattice vectors.*not finite"),
        ([[0, 0, 0]], 1e-3 * np.eye(3), (True,) * 3, 3.0, r"so small.*units"),
        ([[0, 0, 0], [2, 0, 0], [2, 0, 0]], np.eye(3), (False,) * 3, 3.0, r"atoms 1 and 2.*same place"),
        ([[0, 0, 0], [9, 0, 0]], 9 * np.eye(3), (True,) * 3, 3.0, r"atoms 0 and 1.*periodic image"),
        ([0, 0, 0], np.eye(3), (True,) * 3, 3.0, r"shape \(number of atoms, 3\)"),
        ([[0, 0, 0]], [10, 10, 10], (True,) * 3, 3.0, r"shape \(3, 3\)"),
        ([[0, 0, 0]], np.eye(3), (True,), 3.0, r"three values"),
        ([[0, 0, 0]], np.eye(3), (True,) * 3, 0.0, r"positive number"),
    ],
)
def test_wrong_input_is_named(positions, cell, pbc, cutoff, words):
    with pytest.raises(ValueError, match=words):
        neighbor_list(np.array(positions, float), np.array(cell, float), np.array(pbc), cutoff)
