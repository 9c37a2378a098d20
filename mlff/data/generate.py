"""Geometries of molecules and their GFN2-xTB labels: what data sets of this project are made of.

A *task* names one or several molecules and a seed; `frames_of` turns it into labelled frames. It depends on the task
alone, so that a data set is the same whatever the number of processes that made it. `scripts/make_dataset.py` is the
program.

Units: Å, eV, eV/Å, fs, atomic mass units, K. RDKit and tblite are imported on first use
(`pip install "mlff[dataset]"`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlff.data import molecules

HARTREE = 27.211386245988  # eV, CODATA 2018
BOHR = 0.529177210903  # Å, CODATA 2018
KCAL_PER_MOL = 0.0433641  # eV
BOLTZMANN = 8.617333262e-5  # eV/K, CODATA 2018
ACCELERATION = 9.648533212e-3  # (eV/Å/amu) in Å/fs²

METHOD = "GFN2-xTB"
# tblite's accuracy 0.1 converges energies to 1e-7 hartree = 3e-6 eV, well below the fixed-point grid's effect.
LABEL_ACCURACY = 0.1
MAX_FORCE = 30.0  # eV/Å on one atom; harder contacts are outside what a model of bonds is for
PAIR_EVERY = 30  # molecules
PAIR_REACH = 7.0  # Å; beyond the cutoff of every preset
# Unpaired electrons of free atoms (Hund's rule); GFN2-xTB's own energies of free atoms with these occupations.
UNPAIRED = {"H": 1, "B": 1, "C": 2, "N": 3, "O": 2, "F": 1, "Si": 2, "P": 3, "S": 2, "Cl": 1, "Br": 1, "I": 1}

Potential = Callable[[np.ndarray], tuple[float, np.ndarray]]  # positions (N, 3) Å -> energy eV, forces (N, 3) eV/Å


class LabelError(RuntimeError):
    """GFN2-xTB gave no usable energy for a geometry (not converged, not finite), or there is no geometry."""


@dataclass(frozen=True)
class Task:
    """What one group of frames is made from."""

    index: int
    seed: int
    kind: str  # "molecules", "dimers", "clusters" or "pairs"; the group name by which errors are reported
    smiles: tuple[str, ...]  # of a pair of atoms or a crystal: symbols
    split: str
    frames: int
    position_scale: float  # Å; labels belong to positions on this grid

    @property
    def origin(self) -> dict[str, str]:
        """What the file says of the group."""
        return {"smiles": ".".join(self.smiles)}


@dataclass
class Frames:
    """Labelled frames of the same atoms, and what was dropped on the way."""

    task: Task
    numbers: np.ndarray  # (N,)
    positions: np.ndarray  # (F, N, 3) Å, on the grid
    energy: np.ndarray  # (F,) eV
    forces: np.ndarray  # (F, N, 3) eV/Å
    kinds: tuple[str, ...]  # how each frame was made
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    cell: np.ndarray | None = None  # (F, 3, 3) Å, of crystals
    stress: np.ndarray | None = None  # (F, 6) eV/Å³


class GFN2:
    """GFN2-xTB energies and forces of fixed atoms by tblite.

    Calling it starts each self-consistent field from the previous one, as dynamics want; `label` starts afresh, so
    that the result depends on the positions only.

    Args:
        numbers: Atomic numbers (N,).
        unpaired: Number of unpaired electrons; 0 for a closed shell.
        accuracy: tblite's accuracy, 1.0 its default, smaller is tighter.
    """

    def __init__(self, numbers: np.ndarray, unpaired: int = 0, accuracy: float = 1.0) -> None:
        self._interface = molecules.require("tblite.interface")
        self._numbers, self._unpaired, self._accuracy = np.asarray(numbers), unpaired, accuracy
        self._calculator: Any = None
        self._last: Any = None
        self.calls = 0

    def __call__(self, positions: np.ndarray) -> tuple[float, np.ndarray]:
        """Return energy and forces, starting from the last converged density.

        Raises:
            LabelError: no convergence, or a result that is not finite.
        """
        calculator = self._at(positions, self._accuracy)
        self.calls += 1
        try:
            self._last = calculator.singlepoint(self._last)
        except RuntimeError as error:
            self._last = None
            raise LabelError(str(error)) from error
        return _checked(self._last)

    def label(self, positions: np.ndarray) -> tuple[float, np.ndarray]:
        """Return energy and forces at `LABEL_ACCURACY` from tblite's own starting guess.

        Raises:
            LabelError: no convergence, or a result that is not finite.
        """
        calculator = self._at(positions, LABEL_ACCURACY)
        self.calls += 1
        try:
            return _checked(calculator.singlepoint())
        except RuntimeError as error:
            raise LabelError(str(error)) from error

    def _at(self, positions: np.ndarray, accuracy: float) -> Any:
        bohr = np.ascontiguousarray(positions, dtype=float) / BOHR
        if self._calculator is None:
            self._calculator = self._interface.Calculator(METHOD, self._numbers, bohr, uhf=self._unpaired)
            self._calculator.set("verbosity", 0)
        else:
            self._calculator.update(bohr)
        self._calculator.set("accuracy", accuracy)
        return self._calculator


class ForceField:
    """MMFF94 where it has parameters for the molecule, else UFF: quick forces for moving atoms about, never labels.

    Args:
        molecule: RDKit molecule with hydrogens and a conformer.
        conformer: Which of its conformers to start from.

    Raises:
        LabelError: neither force field knows the molecule.
    """

    def __init__(self, molecule: Any, conformer: int = 0) -> None:
        fields = molecules.require("rdkit.Chem.rdForceFieldHelpers")
        self._field: Any = None
        if fields.MMFFHasAllMoleculeParams(molecule):
            properties = fields.MMFFGetMoleculeProperties(molecule)
            self._field = fields.MMFFGetMoleculeForceField(molecule, properties, confId=conformer)
        elif fields.UFFHasAllMoleculeParams(molecule):
            self._field = fields.UFFGetMoleculeForceField(molecule, confId=conformer)
        if self._field is None:
            raise LabelError("no force field knows this molecule")
        self._field.Initialize()

    def __call__(self, positions: np.ndarray) -> tuple[float, np.ndarray]:
        """Return energy and forces."""
        flat = positions.ravel().tolist()
        energy = self._field.CalcEnergy(flat)  # must come first: CalcGrad alone uses distances of the last CalcEnergy
        gradient = np.array(self._field.CalcGrad(flat)).reshape(-1, 3)
        return energy * KCAL_PER_MOL, -gradient * KCAL_PER_MOL

    def minimum(self, steps: int = 500) -> np.ndarray:
        """Return the positions after minimising from where the field stands."""
        self._field.Minimize(maxIts=steps)
        return np.array(self._field.Positions()).reshape(-1, 3)


def label_frames(
    task: Task,
    numbers: np.ndarray,
    geometries: Sequence[tuple[str, np.ndarray]],
    dropped: Counter[str],
    unpaired: Sequence[int] = (0,),
    highest: float = 3.0,
) -> Frames:
    """Round the geometries to the grid, label them, and leave out what is of no use.

    Args:
        task: Gives the grid and goes into the result.
        numbers: Atomic numbers (N,).
        geometries: How a frame was made, and its positions (N, 3) in Å.
        dropped: What was lost before; the losses here are added: `scf` (no convergence), `force` (an atom feels more
            than `MAX_FORCE`), `energy` (too high), `same` (twice the same).
        unpaired: Numbers of unpaired electrons; each frame has the one with the lowest energy.
        highest: Energy above the lowest frame in eV an atom, beyond which a frame is left out.
    """
    spins, kept, seen = [GFN2(numbers, number) for number in dict.fromkeys(unpaired)], [], set()
    for kind, raw in geometries:
        if not np.isfinite(raw).all():
            dropped["geometry"] += 1
            continue
        units = np.rint((raw - raw.mean(axis=0)) / task.position_scale)
        if units.tobytes() in seen:
            dropped["same"] += 1
            continue
        seen.add(units.tobytes())
        positions = units * task.position_scale
        if _too_close(numbers, positions):
            dropped["force"] += 1
            continue
        labels = []
        for gfn2 in spins:
            with contextlib.suppress(LabelError):
                labels.append(gfn2.label(positions))
        if not labels:
            dropped["scf"] += 1
            continue
        energy, forces = min(labels, key=lambda label: label[0])
        if np.linalg.norm(forces, axis=1).max() > MAX_FORCE:
            dropped["force"] += 1
            continue
        kept.append((kind, positions, energy, forces))
    lowest = min((frame[2] for frame in kept), default=0.0)
    usable = [frame for frame in kept if frame[2] - lowest < highest * len(numbers)]
    dropped["energy"] += len(kept) - len(usable)
    shape = (len(usable), len(numbers), 3)
    return Frames(
        task=task,
        numbers=np.asarray(numbers),
        positions=np.array([frame[1] for frame in usable]).reshape(shape),
        energy=np.array([frame[2] for frame in usable]),
        forces=np.array([frame[3] for frame in usable]).reshape(shape),
        kinds=tuple(frame[0] for frame in usable),
        dropped=+dropped,
    )


def frames_of(task: Task) -> Frames:
    """Make the frames of a task; the same task gives the same frames.

    Raises:
        LabelError: no frame of it could be made (no conformer, no force field, no convergence).
    """
    random_numbers = np.random.default_rng(task.seed)
    if task.kind == "molecules":
        return _frames_of_molecule(task, random_numbers)
    if task.kind == "pairs":
        return _frames_of_pair(task, random_numbers)
    return _frames_of_complex(task, random_numbers)


def _frames_of_molecule(task: Task, rng: np.random.Generator) -> Frames:
    """Frames of one molecule: a relaxation, normal modes, dynamics of two kinds, stretched bonds, turned groups."""
    dropped: Counter[str] = Counter()
    molecule, numbers = embedded(task.smiles[0], int(rng.integers(2**31 - 1)), conformers=2)
    field = ForceField(molecule)
    start = field.minimum()
    gfn2 = GFN2(numbers)
    hessian = force_field_hessian(field, start)
    path = relaxed(gfn2, start, hessian, steps=10)
    bottom = path[-1]
    masses = masses_of(numbers)
    modes = NormalModes(hessian, masses)
    made: list[tuple[str, np.ndarray]] = [("relaxed", bottom)]
    plan = _plan(task.frames - 1, rng, rotors=bool(_rotors(molecule)), size=len(numbers))

    for _ in range(plan["relaxation"]):
        made.append(("relaxation", path[int(rng.integers(min(len(path), 6)))]))
    for _ in range(plan["modes"]):
        made.append(("modes", modes.sample(bottom, _temperature(rng), rng)))
    if plan["force-field"]:
        temperature = _temperature(rng)
        other = ForceField(molecule, conformer=molecule.GetNumConformers() - 1)
        begin = modes.sample(other.minimum(), temperature / 2, rng)
        for there in langevin(other, begin, masses, temperature, rng, steps=120, frames=plan["force-field"]):
            made.append(("force-field", there))
    if plan["dynamics"]:
        temperature = _temperature(rng)
        try:
            walk = langevin(
                gfn2, modes.sample(bottom, temperature / 2, rng), masses, temperature, rng, 10, plan["dynamics"]
            )
            made.extend(("dynamics", there) for there in walk)
        except LabelError:
            dropped["scf"] += 1
    for _ in range(plan["stretch"]):
        there = modes.sample(bottom, 200.0, rng)
        made.append(("stretch", stretched(molecule, there, rng)))
    for _ in range(plan["turn"]):
        there = modes.sample(bottom, 300.0, rng)
        made.append(("turn", turned(molecule, there, rng)))
    return label_frames(task, numbers, made, dropped)


def _frames_of_complex(task: Task, rng: np.random.Generator) -> Frames:
    """Frames of two or more molecules: near, far and pressed together, and on the way to their minimum."""
    dropped: Counter[str] = Counter()
    parts: list[tuple[np.ndarray, np.ndarray]] = []  # numbers and a sampler's centre
    samplers: list[Callable[[], np.ndarray]] = []
    known: dict[str, tuple[np.ndarray, np.ndarray, NormalModes]] = {}
    for smiles in task.smiles:
        if smiles not in known:
            molecule, numbers = embedded(smiles, int(rng.integers(2**31 - 1)))
            field = ForceField(molecule)
            start = field.minimum()
            hessian = force_field_hessian(field, start)
            bottom = relaxed(GFN2(numbers), start, hessian, steps=6)[-1]
            known[smiles] = (numbers, bottom, NormalModes(hessian, masses_of(numbers)))
        numbers, bottom, modes = known[smiles]
        parts.append((numbers, bottom))

        def sample(bottom: np.ndarray = bottom, modes: NormalModes = modes) -> np.ndarray:
            return modes.sample(bottom, float(rng.uniform(50.0, 500.0)), rng)

        samplers.append(sample)
    numbers = np.concatenate([part[0] for part in parts])
    masses, gfn2 = masses_of(numbers), GFN2(numbers)
    made: list[tuple[str, np.ndarray]] = []
    # Two molecules: one approach along a line, from touching hard to far apart. More: each distance anew.
    while len(made) < task.frames:
        shapes = [sample() for sample in samplers]
        shapes = [(shape - shape.mean(axis=0)) @ rotation(rng).T for shape in shapes]
        directions = [direction(rng) for _ in shapes[1:]]
        room = task.frames - len(made)
        contacts = [float(rng.uniform(0.5, 0.85)), float(rng.uniform(0.8, 1.05)), float(rng.uniform(0.95, 1.7))]
        placed = shapes[0]
        for contact in contacts[: room if len(parts) == 2 else 1]:
            if len(parts) > 2:
                contact = float(rng.uniform(0.65, 1.2))
            placed = assembled_complex([part[0] for part in parts], shapes, directions, contact)
            made.append(("approach", placed))
        room = task.frames - len(made)
        if room:
            # Forces between molecules are weak: a few steps downhill, then dynamics, where nature would put them.
            touching = assembled_complex([part[0] for part in parts], shapes, directions, 0.95)
            try:
                path = descended(gfn2, touching, steps=10)
                made.append(("relaxation", path[-1]))
                if room > 1:
                    temperature = float(rng.uniform(150.0, 600.0))
                    walk = langevin(gfn2, path[-1], masses, temperature, rng, 10, min(2, room - 1))
                    made.extend(("dynamics", there) for there in walk)
            except LabelError:
                dropped["scf"] += 1
    return label_frames(task, numbers, made[: task.frames], dropped)


def _frames_of_pair(task: Task, rng: np.random.Generator) -> Frames:
    """Two atoms at distances from deep in the wall to out of reach, most of them short.

    Of the lowest spin or that of two free atoms: the former binds, the latter is where the two part.
    """
    table = molecules.require("rdkit.Chem").GetPeriodicTable()
    numbers = np.array([table.GetAtomicNumber(symbol) for symbol in task.smiles])
    nearest = 0.55 * sum(table.GetRcovalent(int(number)) for number in numbers)
    made = []
    for _ in range(task.frames):
        distance = nearest * (PAIR_REACH / nearest) ** rng.random() ** 1.3
        made.append(("pair", np.outer((0.0, 1.0), distance * direction(rng))))
    # A pair may be as high as its wall is steep: `MAX_FORCE` alone limits it.
    spins = int(numbers.sum()) % 2, sum(UNPAIRED[symbol] for symbol in task.smiles)
    return label_frames(task, numbers, made, Counter(), spins, highest=np.inf)


def _plan(frames: int, rng: np.random.Generator, rotors: bool, size: int) -> Counter[str]:
    """Return how many frames of each kind to make, `frames` in all."""
    weights = {"modes": 4.0, "force-field": 2.0, "dynamics": 2.0, "stretch": 1.6, "relaxation": 1.0, "turn": 1.0}
    if not rotors:
        weights["turn"] = 0.0
    if size < 5:
        weights |= {"stretch": 4.0, "force-field": 1.0}
    names = list(weights)
    shares = np.array([weights[name] for name in names])
    exact = frames * shares / shares.sum()
    whole = np.floor(exact).astype(int)
    rest = exact - whole
    missing = frames - int(whole.sum())
    if missing:
        chosen = rng.choice(len(names), size=missing, replace=False, p=rest / rest.sum())
        whole[chosen] += 1
    return Counter({name: int(count) for name, count in zip(names, whole, strict=True)})


def _temperature(rng: np.random.Generator) -> float:
    """Return a temperature between 300 and 1500 K, cool ones more often."""
    return float(300.0 * 5.0 ** rng.random() ** 1.3)


def embedded(smiles: str, seed: int, conformers: int = 1) -> tuple[Any, np.ndarray]:
    """Return an RDKit molecule with hydrogens and conformers (ETKDG), and its atomic numbers (N,).

    Raises:
        LabelError: no conformer was found.
    """
    chem, distance_geometry = molecules.require("rdkit.Chem"), molecules.require("rdkit.Chem.rdDistGeom")
    molecule = chem.AddHs(chem.MolFromSmiles(smiles))
    options = distance_geometry.ETKDGv3()
    options.randomSeed, options.maxIterations, options.numThreads = seed % (2**31 - 1) + 1, 30, 1
    if not len(distance_geometry.EmbedMultipleConfs(molecule, conformers, options)):
        options.useRandomCoords = True
        if not len(distance_geometry.EmbedMultipleConfs(molecule, conformers, options)):
            raise LabelError("no conformer")
    return molecule, np.array([atom.GetAtomicNum() for atom in molecule.GetAtoms()])


def masses_of(numbers: np.ndarray) -> np.ndarray:
    """Return atomic masses (N,) in amu."""
    table = molecules.require("rdkit.Chem").GetPeriodicTable()
    return np.array([table.GetAtomicWeight(int(number)) for number in numbers])


def force_field_hessian(field: Potential, positions: np.ndarray, step: float = 2e-3) -> np.ndarray:
    """Return second derivatives (3N, 3N) in eV/Å² by central differences of the forces."""
    size = positions.size
    hessian = np.empty((size, size))
    for column in range(size):
        shift = np.zeros(size)
        shift[column] = step
        shift = shift.reshape(-1, 3)
        hessian[column] = (field(positions - shift)[1] - field(positions + shift)[1]).ravel() / (2 * step)
    return 0.5 * (hessian + hessian.T)


class NormalModes:
    """Thermal displacements along harmonic modes, softened where they would leave what is harmonic.

    Classical: the amplitude of a mode of frequency w is sqrt(k T)/w in mass-weighted coordinates.
    """

    def __init__(self, hessian: np.ndarray, masses: np.ndarray) -> None:
        self._roots = np.sqrt(np.repeat(masses, 3))
        curvature, self._modes = np.linalg.eigh(hessian / np.outer(self._roots, self._roots))
        # eV/Å²/amu; the floor is a mode of about 60 cm^-1, and keeps translations, rotations and soft turns small.
        self._curvature = np.maximum(np.abs(curvature), 0.015)
        self._free = np.abs(curvature) < 1e-3

    def sample(self, centre: np.ndarray, temperature: float, rng: np.random.Generator) -> np.ndarray:
        """Return positions (N, 3) drawn around `centre`; no atom moves further than 0.7 Å."""
        amplitude = np.sqrt(BOLTZMANN * temperature / self._curvature) * rng.normal(size=len(self._curvature))
        amplitude[self._free] = 0.0
        moved = (self._modes @ amplitude / self._roots).reshape(-1, 3)
        furthest = np.linalg.norm(moved, axis=1).max(initial=0.0)
        return centre + moved * min(1.0, 0.7 / max(furthest, 1e-12))


def relaxed(potential: Potential, start: np.ndarray, hessian: np.ndarray, steps: int) -> list[np.ndarray]:
    """Return the way towards a minimum by a quasi-Newton method (BFGS) that starts from a force field's curvature.

    Stops early where no force exceeds 0.01 eV/Å. A geometry that cannot be labelled ends the way.
    """
    values, vectors = np.linalg.eigh(hessian)
    inverse = vectors / np.maximum(np.abs(values), 1.0) @ vectors.T
    there, path = start.copy(), [start.copy()]
    try:
        _, forces = potential(there)
        for _ in range(steps):
            if np.abs(forces).max() < 0.01:
                break
            step = (inverse @ forces.ravel()).reshape(-1, 3)
            step *= min(1.0, 0.2 / np.linalg.norm(step, axis=1).max())
            there = there + step
            path.append(there)
            _, ahead = potential(there)
            s, y = step.ravel(), (forces - ahead).ravel()
            if (product := s @ y) > 1e-8:
                turn = np.eye(len(s)) - np.outer(s, y) / product
                inverse = turn @ inverse @ turn.T + np.outer(s, s) / product
            forces = ahead
    except LabelError:
        return path[:-1] if len(path) > 1 else path
    return path


def descended(potential: Potential, start: np.ndarray, steps: int) -> list[np.ndarray]:
    """Return `steps` of FIRE (Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006)) downhill; unit masses, Å and eV."""
    there, velocity, path = start.copy(), np.zeros_like(start), [start.copy()]
    step, mixing, since = 0.1, 0.1, 0
    for _ in range(steps):
        _, forces = potential(there)
        power = float((forces * velocity).sum())
        if power > 0:
            ratio = np.linalg.norm(velocity) / max(float(np.linalg.norm(forces)), 1e-12)
            velocity = (1 - mixing) * velocity + mixing * ratio * forces
            since += 1
            if since > 5:
                step, mixing = min(step * 1.1, 0.3), mixing * 0.99
        else:
            velocity, step, mixing, since = np.zeros_like(velocity), step * 0.5, 0.1, 0
        velocity = velocity + step * forces
        move = step * velocity
        move *= min(1.0, 0.15 / max(float(np.linalg.norm(move, axis=1).max()), 1e-12))
        there = there + move
        path.append(there)
    return path


def langevin(
    potential: Potential,
    start: np.ndarray,
    masses: np.ndarray,
    temperature: float,
    rng: np.random.Generator,
    steps: int,
    frames: int,
    time_step: float = 0.5,
    friction: float = 0.02,
    report: Callable[[float, float], None] | None = None,
) -> Iterator[np.ndarray]:
    """Yield `frames` positions of Langevin dynamics, `steps` time steps apart.

    The BAOAB splitting of Leimkuhler and Matthews, J. Chem. Phys. 138, 174102 (2013). Velocities start from the
    Maxwell distribution. With `friction=0` it is velocity Verlet.

    Args:
        potential: Energy and forces.
        start: Positions (N, 3) in Å.
        masses: (N,) in amu.
        temperature: K.
        rng: Random numbers.
        steps: Time steps between yields.
        frames: Number of yields.
        time_step: fs.
        friction: 1/fs.
        report: Called at each yield with the kinetic and the potential energy in eV.
    """
    inertia = masses[:, None]
    spread = np.sqrt(BOLTZMANN * temperature * ACCELERATION / inertia)  # Å/fs
    there, velocity = start.copy(), spread * rng.normal(size=start.shape)
    keep = np.exp(-friction * time_step)
    energy, forces = potential(there)
    for _ in range(frames):
        for _ in range(steps):
            velocity = velocity + 0.5 * time_step * ACCELERATION * forces / inertia
            there = there + 0.5 * time_step * velocity
            if friction:
                velocity = keep * velocity + np.sqrt(1 - keep**2) * spread * rng.normal(size=start.shape)
            there = there + 0.5 * time_step * velocity
            energy, forces = potential(there)
            velocity = velocity + 0.5 * time_step * ACCELERATION * forces / inertia
        if report is not None:
            report(0.5 * float((inertia * velocity**2).sum()) / ACCELERATION, energy)
        yield there.copy()


def stretched(molecule: Any, positions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the positions with one bond at 0.75 to 1.6 of its length.

    What hangs on the bond's smaller side moves along; in a ring only one atom moves, and by a third as much.
    """
    bonds = [(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx(), bond.IsInRing()) for bond in molecule.GetBonds()]
    first, second, ring = bonds[int(rng.integers(len(bonds)))]
    factor = float(rng.uniform(0.75, 1.6))
    factor = 1.0 + (factor - 1.0) / 3.0 if ring else factor
    moving = [second] if ring else _side(molecule, first, second)
    moved = positions.copy()
    moved[moving] += (factor - 1.0) * (positions[second] - positions[first])
    return moved


def turned(molecule: Any, positions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the positions with one side of a rotatable bond turned by a random angle."""
    rotors = _rotors(molecule)
    first, second = rotors[int(rng.integers(len(rotors)))]
    moving = _side(molecule, first, second)
    axis = positions[second] - positions[first]
    turn = about(axis, float(rng.uniform(0.0, 2 * np.pi)))
    moved = positions.copy()
    moved[moving] = (positions[moving] - positions[second]) @ turn.T + positions[second]
    return moved


def intact(molecule: Any, positions: np.ndarray) -> bool:
    """Whether the bonds are the molecule's: none over 1.4 of the sum of covalent radii, no new one below 1.1 of it."""
    table = molecules.require("rdkit.Chem").GetPeriodicTable()
    radii = np.array([table.GetRcovalent(atom.GetAtomicNum()) for atom in molecule.GetAtoms()])
    ratio = np.linalg.norm(positions[:, None] - positions[None], axis=-1) / (radii[:, None] + radii[None])
    bonded = np.zeros(ratio.shape, dtype=bool)
    for bond in molecule.GetBonds():
        ends = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        bonded[ends] = bonded[ends[::-1]] = True
    np.fill_diagonal(ratio, np.inf)
    return bool((ratio[bonded] < 1.4).all() and (ratio[~bonded] > 1.1).all())


def about(axis: np.ndarray, angle: float) -> np.ndarray:
    """Return the rotation (3, 3) about an axis (3,) by an angle in radians (Rodrigues' formula)."""
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def rotation(rng: np.random.Generator) -> np.ndarray:
    """Return a rotation (3, 3) drawn evenly, by way of a random unit quaternion."""
    w, x, y, z = (q := rng.normal(size=4)) / np.linalg.norm(q)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def direction(rng: np.random.Generator) -> np.ndarray:
    """Return a unit vector (3,) drawn evenly."""
    vector = rng.normal(size=3)
    return vector / np.linalg.norm(vector)


def assembled_complex(
    numbers: Sequence[np.ndarray], shapes: Sequence[np.ndarray], directions: Sequence[np.ndarray], contact: float
) -> np.ndarray:
    """Return molecules put side by side: each comes in along its direction until it touches those already there.

    Args:
        numbers: Atomic numbers of each molecule.
        shapes: Their positions, each about its own centre.
        directions: Unit vectors, one for each molecule but the first.
        contact: The closest pair's distance in units of the sum of their van der Waals radii.
    """
    placed, kinds = shapes[0], numbers[0]
    for number, shape, towards in zip(numbers[1:], shapes[1:], directions, strict=True):
        limits = contact * (van_der_waals(kinds)[:, None] + van_der_waals(number)[None, :])
        gaps = shape[None, :, :] - placed[:, None, :]  # at distance zero between the centres
        # |gap + d * towards|² = limit² for each pair; the largest root is where the first pair touches.
        along = gaps @ towards
        inside = along**2 - (gaps**2).sum(-1) + limits**2
        roots = -along + np.sqrt(np.maximum(inside, 0.0))
        distance = float(np.where(inside >= 0, roots, 0.0).max())
        placed = np.concatenate([placed, shape + distance * towards])
        placed = placed - placed.mean(axis=0)
        kinds = np.concatenate([kinds, number])
    return placed


def van_der_waals(numbers: np.ndarray) -> np.ndarray:
    """Return RDKit's van der Waals radii (N,) in Å."""
    table = molecules.require("rdkit.Chem").GetPeriodicTable()
    return np.array([table.GetRvdw(int(number)) for number in numbers])


def free_atoms(elements: Sequence[str]) -> dict[str, float]:
    """Return GFN2-xTB energies of the free atoms in eV, with the unpaired electrons of Hund's rule."""
    table = molecules.require("rdkit.Chem").GetPeriodicTable()
    return {
        symbol: GFN2(np.array([table.GetAtomicNumber(symbol)]), unpaired=UNPAIRED[symbol]).label(np.zeros((1, 3)))[0]
        for symbol in elements
    }


def tasks(
    seed: int,
    elements: Sequence[str] = molecules.ELEMENTS,
    max_atoms: int = 30,
    frames_per_molecule: int = 12,
    position_scale: float = 1e-3,
) -> Iterator[Task]:
    """Yield what to make without end: molecules, after every third one a complex of smaller ones, and pairs of atoms.

    Every pair of elements comes again and again, at other distances. A complex is put together from molecules of one
    split only, so that it belongs to it without doubt. Its orbitals are limited, so that labelling it does not cost ten
    times what a molecule costs.
    """
    dice = random.Random(seed)
    small: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for smiles in molecules.known_molecules(elements, 12):
        small[molecules.split_of(smiles)].append(smiles)
    sizes = {
        smiles: (molecules.n_atoms(smiles), molecules.n_orbitals(smiles))
        for names in small.values()
        for smiles in names
    }
    index = 0
    pairs = list(itertools.combinations_with_replacement(elements, 2))
    for count, smiles in enumerate(molecules.molecules(seed, elements, max_atoms)):
        split = molecules.split_of(smiles)
        size, orbitals = molecules.n_atoms(smiles), molecules.n_orbitals(smiles)
        chosen: list[tuple[str, tuple[str, ...], str]] = [("molecules", (smiles,), split)]
        partners = [
            name for name in small[split] if sizes[name][0] + size <= max_atoms and sizes[name][1] + orbitals <= 90
        ]
        if count % 3 == 0 and size <= 18 and partners:
            twice = 2 * size <= max_atoms and 2 * orbitals <= 90 and dice.random() < 0.2
            chosen.append(("dimers", (smiles, smiles if twice else dice.choice(partners)), split))
        elif count % 12 == 1 and (fitting := [n for n in small[split] if sizes[n][0] <= 6 and sizes[n][1] <= 20]):
            pieces = [dice.choice(fitting) for _ in range(dice.choice((1, 1, 2)))]
            if split == "train" and dice.random() < 0.4:
                pieces = ["O"]
            many = [dice.choice(pieces) for _ in range(dice.randint(3, 6))]
            while sum(sizes[name][0] for name in many) > max_atoms or sum(sizes[name][1] for name in many) > 70:
                many.pop()
            if len(many) > 2:
                chosen.append(("clusters", tuple(many), split))
        if count % PAIR_EVERY == 2:
            visit, place = divmod(count // PAIR_EVERY, len(pairs))
            if place == 0:
                dice.shuffle(pairs)
            chosen.append(("pairs", pairs[place], molecules.split_of(f"{pairs[place]} {visit}")))
        for kind, names, part in chosen:
            task_seed = int.from_bytes(np.random.SeedSequence([seed, index]).generate_state(2).tobytes(), "big")
            yield Task(index, task_seed, kind, names, part, frames_per_molecule, position_scale)
            index += 1


def _checked(result: Any) -> tuple[float, np.ndarray]:
    energy, forces = float(result.get("energy")) * HARTREE, -np.asarray(result.get("gradient")) * (HARTREE / BOHR)
    if not (np.isfinite(energy) and np.isfinite(forces).all()):
        raise LabelError("the energy or a force is not finite")
    return energy, forces


def _too_close(numbers: np.ndarray, positions: np.ndarray) -> bool:
    """Whether two atoms are nearer than 0.4 of the sum of their covalent radii, where tblite may not come back."""
    table = molecules.require("rdkit.Chem").GetPeriodicTable()
    radii = np.array([table.GetRcovalent(int(number)) for number in numbers])
    distance = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    return bool((distance < 0.4 * (radii[:, None] + radii[None])).any())


def _rotors(molecule: Any) -> list[tuple[int, int]]:
    """Return bonds that may be turned: single, in no ring, neither end a last atom."""
    single = molecules.require("rdkit.Chem").BondType.SINGLE
    return [
        (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx())
        for bond in molecule.GetBonds()
        if bond.GetBondType() == single
        and not bond.IsInRing()
        and bond.GetBeginAtom().GetDegree() > 1
        and bond.GetEndAtom().GetDegree() > 1
    ]


def _side(molecule: Any, first: int, second: int) -> list[int]:
    """Return the atoms on `second`'s side of the bond from `first`."""
    found, queue = {first, second}, [second]
    while queue:
        for neighbour in molecule.GetAtomWithIdx(queue.pop()).GetNeighbors():
            if neighbour.GetIdx() not in found:
                found.add(neighbour.GetIdx())
                queue.append(neighbour.GetIdx())
    return sorted(found - {first})
