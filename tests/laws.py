"""The physics that every potential must obey, as functions of a potential and structures.

Each law raises AssertionError where it is broken. A potential is a module in float64 with `elements`, `cutoff` and
`forward(graph, vectors=None)`. An untrained SeZM predicts no forces at all, which satisfies every law and tests
nothing: `noisy` gives one with forces of the order of 1 eV/Å.

Tolerances: energies and forces here are of order 1 to 100, and float64 carries 1e-16 of that through some thousand
operations, in which sums over grids and neighbours cancel. So two equal computations differ by about 1e-13, and 1e-10
separates rounding from any real dependence. Where a law needs more, it says why.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from torch import Tensor, nn

import mlff
from mlff.atoms import graph_from_atoms
from mlff.data.batch import collate
from mlff.derivatives import evaluate
from mlff.graph import BatchPrediction, Graph
from mlff.sezm.potential import SeZM

ROUNDING = 1e-10  # eV, eV/Å, eV/Å³: see above


def noisy(potential: SeZM, seed: int = 0, forces: float = 1.0) -> SeZM:
    """Return a copy with seeded noise on every parameter, and forces of `forces` eV/Å (root mean square) in a cluster.

    Noise is measured by the square root of a matrix's height, as at initialisation, and is full on matrices that start
    at zero, which would otherwise close their branches. The output of the energy head is then scaled; more noise
    instead makes the energy so stiff that finite differences say nothing. Reference energies become some eV.
    """
    changed = copy.deepcopy(potential).eval()
    generator = torch.Generator().manual_seed(seed)

    def noise(values: Tensor) -> Tensor:
        return torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)

    with torch.no_grad():
        for parameter in changed.parameters():
            height = parameter.shape[-2] if parameter.dim() > 1 else 1
            strength = 0.3 if parameter.any() or parameter.dim() == 1 else 1.0
            parameter.add_(strength / height**0.5 * noise(parameter))
        found = results(changed, cluster(changed.elements, n_atoms=6, seed=1)).forces.square().sum(-1).mean().sqrt()
        changed.head.out.weight.mul_(forces / found.item())
        changed.get_buffer("reference_energies").copy_(5 * noise(changed.get_buffer("reference_energies")))
    return changed


def results(potential: nn.Module, structures: Atoms | Sequence[Atoms]) -> BatchPrediction:
    """Return what the potential says of one structure, or of several in one batch."""
    return evaluate(potential, graph(potential, structures))


def graph(potential: Any, structures: Atoms | Sequence[Atoms]) -> Graph:
    """Return one structure, or several in one batch, as a graph for this potential."""
    several = [structures] if isinstance(structures, Atoms) else structures
    return collate([graph_from_atoms(s, potential.cutoff, elements=potential.elements) for s in several])


# Structures


def cluster(elements: Sequence[int], n_atoms: int = 5, seed: int = 0, closest: float = 1.1) -> Atoms:
    """Return an open cluster at about the density of a molecule, no pair closer than `closest` Å."""
    generator = np.random.default_rng(seed)
    size = 1.1 * n_atoms ** (1 / 3)
    positions = np.zeros((0, 3))
    while len(positions) < n_atoms:
        new = generator.uniform(-size, size, 3)
        if len(positions) == 0 or np.linalg.norm(positions - new, axis=1).min() > closest:
            positions = np.vstack([positions, new])
    return Atoms(numbers=[elements[k % len(elements)] for k in range(n_atoms)], positions=positions)


def crystal(elements: Sequence[int], seed: int = 0) -> Atoms:
    """Return four atoms in a skewed periodic cell smaller than any cutoff, so that atoms see their own images."""
    generator = np.random.default_rng(seed)
    cell = np.array([[3.9, 0.0, 0.0], [0.6, 3.7, 0.0], [-0.5, 0.8, 4.1]])
    fractional = np.array([[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]])
    positions = fractional @ cell + generator.uniform(-0.15, 0.15, (4, 3))
    return Atoms([elements[k % len(elements)] for k in range(4)], positions, cell=cell, pbc=True)


def random_rotation(seed: int = 0) -> np.ndarray:
    """Return a proper rotation matrix, uniform over all of them."""
    matrix, upper = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    matrix = matrix * np.sign(np.diag(upper))
    return matrix * np.sign(np.linalg.det(matrix))


def turned(atoms: Atoms, rotation: np.ndarray) -> Atoms:
    """Return the structure, its cell included, turned by a rotation."""
    other = atoms.copy()
    other.set_cell(atoms.cell.array @ rotation.T)
    other.positions = atoms.positions @ rotation.T
    return other


# Laws of symmetry


def translation(potential: nn.Module, atoms: Atoms) -> None:
    """A structure that is moved as a whole keeps energy, forces and stress.

    Moving by 10 Å rounds positions at 1e-15 Å, far below the tolerance.
    """
    moved = atoms.copy()
    moved.positions += [3.7, -8.1, 10.3]
    same(results(potential, moved), results(potential, atoms))


def rotation(potential: nn.Module, atoms: Atoms, seed: int = 0) -> None:
    """E(R x) = E(x), F(R x) = R F(x), and stress turns as a tensor: R σ Rᵀ."""
    matrix = random_rotation(seed)
    before, after = results(potential, atoms), results(potential, turned(atoms, matrix))
    turn = torch.tensor(matrix)
    expected = dataclasses.replace(
        before,
        forces=before.forces @ turn.T,
        virial=turn @ before.virial @ turn.T,
        stress=turn @ before.stress @ turn.T,
    )
    same(after, expected)
    # The virial of a rotationally invariant energy is symmetric: no torque acts on a structure as a whole.
    close(after.virial, after.virial.transpose(1, 2))


def permutation(potential: nn.Module, atoms: Atoms, seed: int = 0) -> None:
    """Atoms in another order keep their own energies and forces; the total stays."""
    order = np.random.default_rng(seed).permutation(len(atoms))
    before, after = results(potential, atoms), results(potential, atoms[order])
    expected = dataclasses.replace(before, energies=before.energies[order], forces=before.forces[order])
    same(after, expected)


def supercell(potential: nn.Module, atoms: Atoms, repeats: tuple[int, int, int] = (2, 1, 3)) -> None:
    """A repeated cell has the energy of its copies, each copy the same forces, and the same stress."""
    n = int(np.prod(repeats))
    one, many = results(potential, atoms), results(potential, atoms.repeat(repeats))
    expected = BatchPrediction(
        one.energy * n, one.energies.repeat(n), one.forces.repeat(n, 1), one.virial * n, one.stress
    )
    same(many, expected)


def batch_is_singles(potential: nn.Module, structures: Sequence[Atoms]) -> None:
    """Structures evaluated together give what each gives by itself."""
    together = results(potential, structures)
    singles = [results(potential, atoms) for atoms in structures]
    fields = ("energy", "energies", "forces", "virial", "stress")
    same(together, BatchPrediction(*(torch.cat([getattr(s, name) for s in singles]) for name in fields)))


def far_apart_is_sum(potential: Any, one: Atoms, other: Atoms) -> None:
    """Two open structures further apart than the cutoff do not feel each other."""
    distant = other.copy()
    distant.positions += [np.ptp(one.positions[:, 0]) + np.ptp(other.positions[:, 0]) + 3 * potential.cutoff, 0, 0]
    separate = [results(potential, atoms) for atoms in (one, other)]
    both = results(potential, one + distant)
    close(both.energies, torch.cat([s.energies for s in separate]))
    close(both.forces, torch.cat([s.forces for s in separate]))


def saved_is_loaded(potential: Any, folder: Path, atoms: Atoms) -> None:
    """A model that was saved and loaded gives the same numbers to the last bit: both ways hold the same weights."""
    path = mlff.save(potential, folder / "model.safetensors")
    loaded = mlff.load(path, device="cpu", dtype=potential.dtype)
    assert loaded.elements == potential.elements
    before, after = results(potential, atoms), results(loaded, atoms)
    for name in ("energy", "energies", "forces", "virial"):
        assert torch.equal(getattr(after, name), getattr(before, name)), name


# Laws of differentiation

# Seven-point central difference: df/dx = Σ w_k [f(k h) - f(-k h)] / h, with an error of h⁶ f⁽⁷⁾ / 140. The shortest
# wave in these models has a wavenumber of about 10/Å, so h = 1e-3 Å leaves 1e-18 · 1e7 / 140 < 1e-12 of the energy's
# scale, and rounding leaves 1e-13 eV / 1e-3 Å = 1e-10 eV/Å.
_STEP = 1e-3
_WEIGHTS = {1: 45 / 60, 2: -9 / 60, 3: 1 / 60}
DIFFERENCE = 1e-8  # eV/Å or eV, what is required; rounding grows with the number of atoms and edges


def difference(energy: Callable[[Sequence[float]], Tensor], step: float = _STEP) -> Tensor:
    """Return the derivative at 0 of a function that takes several arguments at once."""
    places = [sign * k * step for k in _WEIGHTS for sign in (1, -1)]
    values = energy(places)
    return sum(w * (values[2 * i] - values[2 * i + 1]) for i, w in enumerate(_WEIGHTS.values())) / step  # type: ignore


def forces_are_differences(potential: nn.Module, atoms: Atoms, directions: int = 3, seed: int = 0) -> None:
    """-F · d is the derivative of the energy when all atoms move along d: random d, and one single coordinate."""
    generator = np.random.default_rng(seed)
    forces = results(potential, atoms).forces.numpy()
    single = np.zeros_like(forces)
    single[seed % len(atoms), seed % 3] = 1.0
    random = [d / np.linalg.norm(d) for d in generator.normal(size=(directions, *forces.shape))]
    for direction in [single, *random]:

        def energy(steps: Sequence[float], direction: np.ndarray = direction) -> Tensor:
            moved = [atoms.copy() for _ in steps]
            for structure, step in zip(moved, steps, strict=True):
                structure.positions += step * direction
            return results(potential, moved).energy

        found, expected = difference(energy).item(), -(forces * direction).sum()
        assert abs(found - expected) < DIFFERENCE, (found, expected)


def stress_is_difference(potential: nn.Module, atoms: Atoms, tolerance: float = DIFFERENCE) -> None:
    """V σ is the derivative of the energy under each of the six symmetric strains of cell and positions."""
    volume = atoms.get_volume()
    stress = results(potential, atoms).stress[0].numpy()
    for i, j in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        strain = np.zeros((3, 3))
        strain[i, j] = strain[j, i] = 1.0 if i == j else 0.5

        def energy(steps: Sequence[float], strain: np.ndarray = strain) -> Tensor:
            strained = [atoms.copy() for _ in steps]
            for structure, step in zip(strained, steps, strict=True):
                structure.set_cell(atoms.cell.array @ (np.eye(3) + step * strain), scale_atoms=True)
            return results(potential, strained).energy

        # A strain of 1e-4 moves neighbours at 6 Å, some hundred of them together, by 6e-4 Å. Rounding leaves 1e-9 eV.
        found, expected = difference(energy, _STEP / 10).item(), volume * stress[i, j]
        assert abs(found - expected) < tolerance, ((i, j), found, expected)


def force_loss_gradient(potential: nn.Module, atoms: Atoms, seed: int = 0) -> None:
    """The gradient of a loss on forces with respect to all parameters, along a random direction, by differences."""
    potential = copy.deepcopy(potential)
    parameters = [p.requires_grad_() for p in potential.parameters()]
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) for p in parameters]
    length = sum(d.square().sum() for d in directions) ** 0.5  # type: ignore[operator]
    directions = [d / length for d in directions]
    structure = graph(potential, atoms)

    def loss(create_graph: bool = False) -> Tensor:
        prediction = evaluate(potential, structure, create_graph=create_graph)
        return (prediction.forces - 0.3).square().mean() + prediction.virial.square().mean()

    gradients = torch.autograd.grad(loss(True), parameters, allow_unused=True, materialize_grads=True)
    expected = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)).item()  # type: ignore

    @torch.no_grad()
    def along(steps: Sequence[float]) -> Tensor:
        start = [p.clone() for p in parameters]
        values = []
        for step in steps:
            for p, s, d in zip(parameters, start, directions, strict=True):
                p.copy_(s + step * d)
            values.append(loss())
        for p, s in zip(parameters, start, strict=True):
            p.copy_(s)
        return torch.stack(values)

    found = difference(along).item()
    # The loss is of order 1 to 1e3 and has the noise of a force squared.
    assert abs(found - expected) < DIFFERENCE * max(1.0, loss().item()), (found, expected)
    assert abs(expected) > 1e-6, "a loss without a slope tests nothing"


def second_derivatives(potential: nn.Module, atoms: Atoms) -> None:
    """First and second derivatives of the energy in the positions agree with differences, by torch's own checks."""
    structure = graph(potential, atoms)

    def energy(positions: Tensor) -> Tensor:
        return potential(dataclasses.replace(structure, positions=positions)).sum()

    positions = structure.positions.clone().requires_grad_()
    # torch's central difference with h = 1e-6: rounding of 1e-15 eV / 1e-6 Å is below 1e-8, of forces below 1e-7.
    assert torch.autograd.gradcheck(energy, (positions,), eps=1e-6, atol=1e-6, rtol=1e-6)
    assert torch.autograd.gradgradcheck(energy, (positions,), eps=1e-6, atol=1e-5, rtol=1e-5)


# Laws of distance


def hessian(potential: nn.Module, atoms: Atoms, edges_of: Graph | None = None) -> Tensor:
    """Return the second derivatives of the energy, [3N, 3N] in eV/Å²."""
    structure = graph(potential, atoms) if edges_of is None else edges_of

    def energy(flat: Tensor) -> Tensor:
        return potential(dataclasses.replace(structure, positions=flat.view(-1, 3))).sum()

    found = torch.autograd.functional.hessian(energy, structure.positions.flatten())
    assert isinstance(found, Tensor)
    return found


def axes_are_directions_like_others(potential: Any, numbers: Sequence[int], distance: float = 1.3) -> None:
    """Edges exactly along ±x, ±y, ±z have the energy, forces and second derivatives of any other direction.

    Frames of edges have poles; none may be seen from outside, not even in the curvature that a loss on forces meets.
    A third atom off the axis makes the curvature across the axis differ from zero.
    """
    along_z = Atoms(list(numbers), [[0, 0, 0], [0, 0, distance], [1.1, 0.4, 0.3]])
    general = turned(along_z, random_rotation(3))
    x = np.array([[0, 0, 1], [0, 1, 0], [-1, 0, 0]])  # turns z to x
    y = np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0]])  # turns z to y
    flip_x, flip_z = np.diag([1, -1, -1]), np.diag([-1, -1, 1])
    reference = results(potential, general)
    curvature = hessian(potential, general)
    back = torch.tensor(random_rotation(3))
    for matrix in (np.eye(3), flip_x, x, flip_z @ x, y, flip_z @ y):
        turn = torch.tensor(np.asarray(matrix, float))
        structure = turned(along_z, turn.numpy())
        found = results(potential, structure)
        close(found.energy, reference.energy)
        close(found.forces, reference.forces @ back @ turn.T)
        change = torch.block_diag(*[turn @ back.T] * 3)
        # Curvatures reach 1e3 eV/Å² here, where rounding is 1e-13 of it.
        close(hessian(potential, structure), change @ curvature @ change.T, 1e-8)


def finite_at_short_distance(potential: Any, number: int) -> None:
    """Energies, forces and second derivatives stay finite down to two atoms on top of each other.

    At distances that cannot occur the numbers mean nothing, but a NaN would destroy a training run.
    """
    pair = Atoms([number, number], [[0, 0, 0], [0, 0, 1.0]])
    start = graph(potential, pair)
    places = [[0.0, 0.0, 0.5], [0.0, 0.0, 1e-2], [1e-4, 0.0, 0.0], [0.0, 1e-4, 0.0], [0.0, 0.0, -1e-7], [0.0, 0.0, 0.0]]
    for place in places:
        positions = torch.tensor([[0.0, 0.0, 0.0], place], dtype=torch.float64)
        near = dataclasses.replace(start, positions=positions)
        found = evaluate(potential, near)
        assert torch.isfinite(found.energy).all(), place
        assert torch.isfinite(found.forces).all(), place
        assert torch.isfinite(hessian(potential, pair, near)).all(), place


def smooth_through_the_cutoff(potential: Any, numbers: tuple[int, int, int]) -> None:
    """Energy, force and force derivative are continuous when an atom leaves the cutoff of another.

    One atom walks out along z while a third keeps both connected. The energy is three times continuously
    differentiable, so that over a gap of 2δ = 2e-6 Å around the cutoff the energy changes by its slope, the slope by
    its curvature, and the curvature (some eV/Å²) by 2δ times the third derivative, below 1e3 eV/Å³ in these models.
    """
    delta, r = 1e-6, potential.cutoff

    def at(distance: float) -> tuple[float, float, float]:
        atoms = Atoms(list(numbers), [[0, 0, 0], [0.7, 0.2, 0.45 * r], [0, 0, distance]])
        found = results(potential, atoms)
        return found.energy.item(), found.forces[2, 2].item(), hessian(potential, atoms)[8, 8].item()

    (e_in, f_in, k_in), (e_out, f_out, k_out) = at(r - delta), at(r + delta)
    assert abs(e_out - e_in + (f_in + f_out) * delta) < ROUNDING
    assert abs(f_out - f_in + (k_in + k_out) * delta) < ROUNDING
    assert abs(k_out - k_in) < 2 * delta * 1e3


def pair_leaves_the_cutoff(potential: Any, numbers: tuple[int, int], n_points: int = 41) -> None:
    """Two atoms from cutoff - 0.02 Å to cutoff + 0.02 Å: no energy step, no force beyond, then two isolated atoms."""
    r = potential.cutoff
    distances = np.linspace(r - 0.02, r + 0.02, n_points)
    pairs = [Atoms(list(numbers), [[0, 0, 0], [0, 0, d]]) for d in distances]
    found = results(potential, pairs)
    energies, forces = found.energy.numpy(), found.forces.view(n_points, 2, 3)
    alone = results(potential, [Atoms([number], [[0, 0, 0]]) for number in numbers]).energy.sum().item()
    assert np.abs(np.diff(energies)).max() < 1e-6
    beyond = distances >= r
    assert np.abs(energies[beyond] - alone).max() < ROUNDING
    assert forces[beyond].abs().max() == 0.0
    # Every contribution carries the fourth power of (1 - r/cutoff), 1e-10 at 0.02 Å; the force its third, 4e-8.
    assert np.abs(energies - alone).max() < 1e-6
    assert forces.abs().max() < 1e-4


# Laws of precision


def single_precision(potential: Any, atoms: Atoms) -> None:
    """The same weights in float32 and float64: 1e-4 eV/atom and 1e-3 eV/Å, what users may rely on."""
    rough = copy.deepcopy(potential).to(torch.float32)
    exact = copy.deepcopy(rough).to(torch.float64)  # the same weights: rounded to float32 once
    single, double = results(rough, atoms), results(exact, atoms)
    assert single.energy.dtype == torch.float64
    assert (single.energy - double.energy).abs().max() < 1e-4 * len(atoms)
    assert (single.forces - double.forces).abs().max() < 1e-3


# Comparison


def same(found: BatchPrediction, expected: BatchPrediction) -> None:
    """Assert that two predictions agree to rounding; stress may be undefined in both."""
    for name in ("energy", "energies", "forces", "virial"):
        close(getattr(found, name), getattr(expected, name), name=name)
    torch.testing.assert_close(found.stress, expected.stress, atol=ROUNDING, rtol=0.0, equal_nan=True)


def close(found: Tensor, expected: Tensor, tolerance: float = ROUNDING, name: str = "") -> None:
    """Assert that two tensors agree to a tolerance that is relative to values above 1."""
    bound = tolerance * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    error = (found - expected).abs().max().item() if expected.numel() else 0.0
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    assert error <= bound, f"{name} differ by {error:.3e}, allowed {bound:.1e}"
