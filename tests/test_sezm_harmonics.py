"""Harmonics, frames, Wigner matrices and quadratures, against their defining properties and against e3nn."""

from __future__ import annotations

import math

import pytest
import torch

from mlff.sezm.grid import rotation_grid, sphere_grid
from mlff.sezm.harmonics import WignerRows, edge_frames, packed_degrees, reduced_layout, spherical_harmonics
from mlff.sezm.lebedev import lebedev_rule

DEGREE = 6
EXACT = 1e-13  # a few dozen float64 operations on numbers of order one


def directions(count: int = 40, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    axes = torch.cat((torch.eye(3), -torch.eye(3))).to(torch.float64)
    return torch.cat((axes, vectors / vectors.norm(dim=1, keepdim=True)))


def in_first_harmonics(vectors: torch.Tensor) -> torch.Tensor:
    return torch.stack((vectors[:, 1], vectors[:, 2], -vectors[:, 0]), -1)


def test_layouts() -> None:
    index, degrees = reduced_layout(2, 1)
    assert index.tolist() == [0, 2, 6, 1, 5, 3, 7]
    assert degrees.tolist() == [0, 1, 2, 1, 2, 1, 2]
    assert packed_degrees(2).tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 2]


def test_harmonics_have_unit_norm_and_the_stated_axes() -> None:
    u = directions()
    harmonics = spherical_harmonics(u, DEGREE)
    assert torch.allclose(harmonics[:, 1:4], in_first_harmonics(u), atol=EXACT)
    for l in range(DEGREE + 1):
        assert torch.allclose(
            harmonics[:, l * l : (l + 1) ** 2].square().sum(1), torch.ones(len(u)).double(), atol=EXACT
        )


def test_harmonics_of_degree_two_by_hand() -> None:
    """S_2 = √3 (-xy·1, yz·1, …): -S_2,-2 = √3 xy, S_20 = (3z²-1)/2, S_2,+1 = -√3 xz, S_2,+2 = √3/2 (x²-y²)."""
    x, y, z = directions().unbind(1)
    expected = torch.stack(
        (
            -math.sqrt(3) * x * y,
            math.sqrt(3) * y * z,
            (3 * z * z - 1) / 2,
            -math.sqrt(3) * x * z,
            math.sqrt(0.75) * (x * x - y * y),
        ),
        1,
    )
    assert torch.allclose(spherical_harmonics(directions(), 2)[:, 4:], expected, atol=EXACT)


def test_harmonics_equal_e3nn() -> None:
    o3 = pytest.importorskip("e3nn.o3", reason="compares with e3nn, which is not a dependency")
    u = directions()
    theirs = o3.spherical_harmonics(list(range(DEGREE + 1)), in_first_harmonics(u), True, normalization="norm")
    assert torch.allclose(spherical_harmonics(u, DEGREE), theirs, atol=EXACT)


def test_frames_turn_each_edge_onto_z() -> None:
    u = directions()
    frames = edge_frames(u, torch.linspace(0, 6, len(u), dtype=torch.float64))
    assert torch.allclose(torch.linalg.det(frames), torch.ones(len(u)).double(), atol=EXACT)
    onto = torch.einsum("eij,ej->ei", frames, in_first_harmonics(u))
    assert torch.allclose(onto, torch.tensor([0.0, 1.0, 0.0]).double().expand_as(onto), atol=EXACT)


def test_wigner_rows_represent_rotations() -> None:
    """S(R v) = D(R) S(v) for random R and v, and fewer rows are the same rows."""
    u, v = directions(seed=1), directions(seed=2)
    frames = edge_frames(u, torch.linspace(0, 6, len(u), dtype=torch.float64))
    matrices = WignerRows(DEGREE, DEGREE).double()(frames)
    turned = torch.einsum("eij,ej->ei", frames, in_first_harmonics(v))
    turned = torch.stack((-turned[:, 2], turned[:, 0], turned[:, 1]), -1)
    before, after = spherical_harmonics(v, DEGREE), spherical_harmonics(turned, DEGREE)
    few = WignerRows(DEGREE, 1).double()(frames)
    for l, matrix in enumerate(matrices):
        part = slice(l * l, (l + 1) ** 2)
        assert torch.allclose(torch.einsum("eij,ej->ei", matrix, before[:, part]), after[:, part], atol=EXACT)
        kept = slice(l - min(1, l), l + min(1, l) + 1)
        assert torch.allclose(few[l], matrix[:, kept], atol=EXACT)


@pytest.mark.parametrize("axis", range(6))
def test_second_derivatives_along_the_axes(axis: int) -> None:
    """Rows m = 0 do not depend on the frame's roll, so their derivatives must be finite and right on every axis."""
    base = directions()[axis]

    def zonal(vector: torch.Tensor) -> torch.Tensor:
        unit = vector / vector.norm()
        rows = WignerRows(3, 1).double()(edge_frames(unit[None]))
        return torch.cat([rows[l][0, rows[l].shape[1] // 2] for l in range(4)])

    vector = (1.3 * base).requires_grad_()
    assert torch.autograd.gradcheck(zonal, vector, eps=1e-6, atol=1e-7)
    assert torch.autograd.gradgradcheck(zonal, vector, eps=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", [3, 7, 13, 19, 31])
def test_lebedev_rules_integrate_harmonics(precision: int) -> None:
    points, weights = lebedev_rule(precision)
    integrals = weights @ spherical_harmonics(points, min(precision, 12))
    assert abs(float(integrals[0]) - 1) < 1e-14
    assert float(integrals[1:].abs().max()) < 1e-14


def test_lebedev_rule_beyond_the_table() -> None:
    with pytest.raises(ValueError, match="largest Lebedev rule"):
        lebedev_rule(99)


@pytest.mark.parametrize(
    ("degree", "points", "slots"), [(1, 24, 12), (2, 104, 27), (3, 152, 48), (4, 296, 75), (5, 344, 108), (6, 584, 147)]
)
def test_rotation_grids_have_the_published_sizes(degree: int, points: int, slots: int) -> None:
    grid = rotation_grid(degree, 1)
    assert tuple(grid.get_buffer("to_grid").shape) == (points, slots)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sphere_grid(3),
        lambda: sphere_grid(3, 1),
        lambda: sphere_grid(3, None, lebedev=False),
        lambda: sphere_grid(3, 1, lebedev=False, isotropic=False),
        lambda: rotation_grid(3, 0),
        lambda: rotation_grid(3, 1),
        lambda: rotation_grid(4, 2),
        lambda: rotation_grid(3, 1, 1),
    ],
)
def test_projecting_there_and_back_is_the_identity(make) -> None:
    """On slots that exist (|k| <= l); with fewer orders than degrees, T and P share a scale that cancels in no degree
    above the order, so there the product is the squared scale.
    """
    grid = make().double()
    there, back = grid.get_buffer("to_grid"), grid.get_buffer("from_grid")
    product = back.T @ there
    exists = there.abs().sum(0) > 0
    degrees = grid.row_degrees.repeat_interleave(grid.frames).double()
    rows = len(grid.row_degrees)
    order = 1 if rows == 3 * grid.degree + 1 and grid.frames == 1 else None
    diagonal = exists.double()
    if order is not None:
        diagonal = diagonal * torch.where(degrees > order, (2 * degrees + 1) / (2 * order + 1), 1.0)
    assert torch.allclose(product, torch.diag(diagonal), atol=1e-12)
