"""The ASE calculator: what users of such calculators run into, with a small noisy model and with trained weights."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import laws
import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, fcc111, molecule
from ase.calculators.calculator import CalculationFailed, PropertyNotImplementedError
from ase.calculators.emt import EMT
from ase.filters import FrechetCellFilter
from ase.io import read
from ase.md.velocitydistribution import Stationary
from ase.md.verlet import VelocityVerlet
from ase.optimize import BFGS
from ase.stress import full_3x3_to_voigt_6_stress
from torch import nn

import mlff
from mlff import presets
from mlff.atoms import graph_from_atoms, targets_from_atoms
from mlff.calculator import Calculator
from mlff.compiled import CompiledEvaluation
from mlff.data.batch import collate, collate_targets
from mlff.derivatives import evaluate
from mlff.sezm.potential import SeZM, edge_vectors

DATA = Path(__file__).parent / "data"
ELEMENTS = ("H", "C", "O", "Na", "Si", "Cl", "Cu")
SMALL = {"channels": 8, "lmax": 2, "n_blocks": 1, "n_radial": 8, "mixing_layers": 2, "message_node_so3": True}

# What "equal" means for users: by atom in eV, and in eV/Å.
EQUAL = {"float32": (1e-5, 1e-4), "float64": (1e-8, 1e-6)}
BOTH = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.fixture(scope="module")
def potential() -> SeZM:
    return laws.noisy(SeZM.from_options(SMALL, ELEMENTS, dtype=torch.float64))


def files(name: str) -> list[Atoms]:
    return read(DATA / f"{name}.extxyz", ":")  # type: ignore[return-value]


def result(calculator: Calculator, atoms: Atoms) -> dict:
    """Everything that a calculator says of a copy of a structure."""
    atoms = atoms.copy()
    atoms.calc = calculator
    found = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    if atoms.pbc.any():
        found["stress"] = atoms.get_stress()
    return found


def same(found: dict, expected: dict, dtype: str = "float64", n_atoms: int = 1) -> None:
    energy, forces = EQUAL[dtype]
    assert found.keys() == expected.keys()
    assert abs(found["energy"] - expected["energy"]) < energy * n_atoms
    assert np.abs(found["forces"] - expected["forces"]).max() < forces
    if "stress" in expected:
        # A stress is a sum of forces times distances over a volume: of the size of forces per area of some Å².
        assert np.abs(found["stress"] - expected["stress"]).max() < forces


def count_calls(calculator: Calculator) -> list[int]:
    """A list that grows with every call of the model."""
    calls: list[int] = []
    calculator.potential.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def weights(name: str = "mini") -> Path:
    path = presets.weights_path(name)
    if path is None:
        pytest.skip(f"preset {name} has no trained weights in this checkout yet")
    return path


class Repulsion(nn.Module):
    """E = Σ 2 (1 - r/4)⁴ over pairs up to 4 Å: pushes atoms apart, so that every compressed cell pushes outwards."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.cutoff = (29,), 4.0

    def forward(self, graph, vectors=None) -> torch.Tensor:
        vectors = edge_vectors(graph) if vectors is None else vectors
        pair = (1 - vectors.square().sum(-1).sqrt() / self.cutoff) ** 4
        return torch.zeros(graph.n_atoms, dtype=torch.float64).index_add(0, graph.receivers, pair)


# R-A1 to R-A14


@BOTH
def test_ra1_atoms_outside_the_cell(potential: SeZM, dtype: str) -> None:
    calculator = Calculator(potential, dtype=dtype)
    inside, outside = files("wrapped_unwrapped")
    assert np.abs(outside.get_scaled_positions(wrap=False)).max() > 3
    same(result(calculator, outside), result(calculator, inside), dtype, len(inside))


@BOTH
def test_ra2_a_cell_without_periodicity_is_ignored(potential: SeZM, dtype: str) -> None:
    calculator = Calculator(potential, dtype=dtype)
    frames = files("molecule_any_cell")
    assert len(frames) == 5
    first = result(calculator, frames[0])
    for frame in frames[1:]:
        same(result(calculator, frame), first, dtype, 3)


def test_ra3_stress_is_the_derivative_by_strain(potential: SeZM) -> None:
    """Six numbers xx yy zz yz xz xy in eV/Å³; central differences under each symmetric strain of ±1e-4."""
    atoms = bulk("Cu", cubic=True)
    atoms.set_cell(atoms.cell.array @ np.array([[1, 0.04, -0.02], [0, 1, 0.03], [0, 0, 1]]), scale_atoms=True)
    atoms.rattle(0.08, seed=3)
    atoms.calc = Calculator(potential)
    stress = atoms.get_stress()
    assert stress.shape == (6,)
    expected = np.zeros((3, 3))
    for i, j in ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)):
        energies = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[i, j] += sign * 1e-4 / (1 if i == j else 2)
            strain[j, i] += 0 if i == j else sign * 1e-4 / 2
            strained = atoms.copy()
            strained.set_cell(atoms.cell.array @ strain, scale_atoms=True)
            energies.append(result(atoms.calc, strained)["energy"])
        expected[i, j] = expected[j, i] = (energies[0] - energies[1]) / 2e-4 / atoms.get_volume()
    # The difference itself is off by the strain squared, 1e-8, times third derivatives over first ones, some hundred.
    assert np.abs(stress - full_3x3_to_voigt_6_stress(expected)).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(stress).min() > 1e-5, "an entry that is zero by symmetry tests nothing"


def test_ra3_a_compressed_crystal_has_negative_stress() -> None:
    atoms = bulk("Cu", cubic=True)
    atoms.calc = Calculator(Repulsion(), dtype="float64")
    assert (atoms.get_stress()[:3] < -1e-3).all()
    # The pressure of E(V): dE/dV by a small uniform expansion.
    volumes, energies = [], []
    for scale in (0.9999, 1.0001):
        scaled = atoms.copy()
        scaled.set_cell(atoms.cell.array * scale, scale_atoms=True)
        volumes.append(scaled.get_volume())
        energies.append(result(atoms.calc, scaled)["energy"])
    slope = (energies[1] - energies[0]) / (volumes[1] - volumes[0])
    assert atoms.get_stress()[:3].mean() == pytest.approx(slope, rel=1e-5)


@BOTH
def test_ra4_plain_result_types(potential: SeZM, dtype: str) -> None:
    atoms = bulk("Cu") * (2, 1, 1)
    atoms.calc = Calculator(potential, dtype=dtype)
    assert type(atoms.get_potential_energy()) is float
    shapes = {"energies": (2,), "forces": (2, 3), "stress": (6,)}
    for name, value in atoms.calc.results.items():
        if name in shapes:
            assert type(value) is np.ndarray and value.dtype == np.float64 and value.shape == shapes[name], name
            assert value.base is None or not isinstance(value.base, torch.Tensor)
        else:
            assert type(value) is float, name


@BOTH
def test_ra5_no_neighbours_at_all(potential: SeZM, dtype: str) -> None:
    check_isolated_atom(Calculator(potential, dtype=dtype), dtype)


def check_isolated_atom(calculator: Calculator, dtype: str) -> None:
    frames = files("isolated_atom")
    assert len(frames) == 3
    found = [result(calculator, frame) for frame in frames]
    for one in found:
        assert np.isfinite(one["energy"])
        assert one["energy"] == found[0]["energy"]
        assert (one["forces"] == 0.0).all()
        if "stress" in one:
            assert (one["stress"] == 0.0).all()
    assert ["stress" in one for one in found] == [frame.pbc.any() for frame in frames]


@pytest.mark.gpu
def test_ra5_no_neighbours_at_all_on_a_gpu(potential: SeZM) -> None:
    check_isolated_atom(Calculator(potential, device="cuda"), "float64")


@pytest.mark.parametrize("name", ["charge", "spin"])
def test_ra6_charge_and_spin_are_noticed(name: str) -> None:
    """A model that reads them is asked again when only they change; one that does not gives the same again."""
    options = {**SMALL, "add_chg_spin_ebd": True, "default_chg_spin": None}
    reader = laws.noisy(SeZM.from_options(options, ["H", "O"], dtype=torch.float64))
    atoms = molecule("H2O")
    atoms.info.update(charge=0, spin=1)
    atoms.calc = Calculator(reader)
    before = atoms.get_potential_energy()
    atoms.info[name] = 2
    after = atoms.get_potential_energy()
    assert abs(after - before) > 1e-6
    fresh = atoms.copy()
    fresh.calc = Calculator(reader)
    assert after == fresh.get_potential_energy()
    del atoms.info[name]
    assert atoms.get_potential_energy() != after
    calls = count_calls(atoms.calc)
    atoms.info["comment"] = "not read by any model"
    atoms.get_forces()
    assert not calls


def test_ra7_one_calculator_for_many_structures(potential: SeZM) -> None:
    calculator = Calculator(potential)
    copper, salt, water = bulk("Cu", cubic=True), bulk("NaCl", "rocksalt", a=5.64, cubic=True), molecule("H2O")
    for atoms in (copper, salt, water, copper):
        same(result(calculator, atoms), result(Calculator(potential), atoms))

    def check(atoms: Atoms) -> None:
        same(result_in_place(atoms), result(Calculator(potential), atoms))

    def result_in_place(atoms: Atoms) -> dict:
        found = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        return found | ({"stress": atoms.get_stress()} if atoms.pbc.any() else {})

    atoms = copper.copy()
    atoms.calc = calculator
    check(atoms)
    atoms.positions[1] += [0.1, -0.05, 0.2]
    check(atoms)
    atoms.cell.array[0] *= 1.02
    check(atoms)
    atoms.numbers[2] = 14
    check(atoms)
    atoms.pbc = [True, False, True]
    check(atoms)
    atoms.pbc = False
    check(atoms)


def test_ra7_one_model_call_for_all_properties(potential: SeZM) -> None:
    atoms = bulk("Cu", cubic=True)
    atoms.calc = Calculator(potential)
    calls = count_calls(atoms.calc)
    for _ in range(2):
        for ask in (atoms.get_potential_energy, atoms.get_forces, atoms.get_stress, atoms.get_potential_energies):
            ask()
    assert len(calls) == 1
    atoms.positions[0, 0] += 0.01
    atoms.get_stress()
    atoms.get_forces()
    assert len(calls) == 2


@BOTH
def test_ra8_small_periodic_cells(potential: SeZM, dtype: str) -> None:
    calculator = Calculator(potential, dtype=dtype)
    frames = files("fcc_cu_sizes")
    assert [len(frame) for frame in frames] == [1, 8, 27]
    found = [result(calculator, frame) for frame in frames]
    for frame, one in zip(frames, found, strict=True):
        graph = graph_from_atoms(frame, 6.0)
        assert torch.bincount(graph.receivers).tolist() == [78] * len(frame)
        assert abs(one["energy"] / len(frame) - found[0]["energy"]) < EQUAL[dtype][0]
        assert np.abs(one["stress"] - found[0]["stress"]).max() < EQUAL[dtype][1]
        assert np.abs(one["forces"]).max() < EQUAL[dtype][1], "zero by symmetry"


def test_ra9_empty_space_costs_nothing(potential: SeZM) -> None:
    """Far from the origin, or alone in a huge cell: the same energy, memory and time."""
    status, refs = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not refs.exists():
        pytest.skip("peak memory is read from Linux's /proc, which is not there")

    def measured(atoms: Atoms) -> tuple[float, float, float]:
        """Energy, peak of resident memory above the start in MB, seconds (the best of three)."""
        calculator = Calculator(potential)
        seconds = []
        result(calculator, atoms)
        refs.write_text("5")  # sets the peak back to what is resident now
        start = resident("VmHWM")
        for _ in range(3):
            began = time.perf_counter()
            found = result(calculator, shifted_by_nothing(atoms))
            seconds.append(time.perf_counter() - began)
        return found["energy"], resident("VmHWM") - start, min(seconds)

    def resident(field: str) -> float:
        return int(re.search(rf"{field}:\s+(\d+)", status.read_text())[1]) / 1024  # type: ignore[index]

    def shifted_by_nothing(atoms: Atoms) -> Atoms:
        """A copy that differs in the last bits, so that nothing is taken from the last calculation."""
        other = atoms.copy()
        other.positions += np.random.default_rng().uniform(-1e-12, 1e-12)
        return other

    water = molecule("H2O")
    energy, _, seconds = measured(water)
    for distance in (237.0, 1e5):
        moved = water.copy()
        moved.positions += distance
        far, extra, needed = measured(moved)
        assert abs(far - energy) < 1e-6
        assert extra < 200
        assert needed < 5 * seconds
    pair = Atoms("O2", [[0, 0, 0], [0, 0, 1.2]])
    energy, _, seconds = measured(pair)
    far, extra, needed = measured(Atoms("O2", [[0, 0, 1999.9], [0, 0, 1.1]], cell=[2000] * 3, pbc=True))
    assert abs(far - energy) < 1e-6
    assert extra < 200
    assert needed < 5 * seconds


def test_ra10_energies_and_free_energy(potential: SeZM) -> None:
    atoms = bulk("NaCl", "rocksalt", a=5.64)
    atoms.rattle(0.1, seed=1)
    atoms.calc = Calculator(potential)
    energy = atoms.get_potential_energy()
    assert atoms.get_potential_energies().shape == (2,)
    assert atoms.get_potential_energies().sum() == pytest.approx(energy, abs=1e-12)
    assert atoms.get_potential_energy(force_consistent=True) == energy
    assert set(Calculator.implemented_properties) == {"energy", "free_energy", "energies", "forces", "stress"}
    assert set(atoms.calc.results) == set(Calculator.implemented_properties)
    for name in Calculator.implemented_properties:
        assert np.isfinite(atoms.calc.get_property(name, atoms)).all()


def test_ra11_stress_without_a_volume(potential: SeZM) -> None:
    atoms = molecule("H2O")
    atoms.calc = Calculator(potential)
    calls = count_calls(atoms.calc)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        atoms.get_potential_energy()
        atoms.get_forces()
    for cell in (None, [8, 8, 8]):  # the second is ignored: no axis is periodic
        atoms.set_cell(cell)
        with pytest.raises(PropertyNotImplementedError, match="stress needs a volume"):
            atoms.get_stress()
    assert len(calls) == 1
    atoms.get_forces()
    assert "stress" not in atoms.calc.results
    for value in atoms.calc.results.values():
        assert np.isfinite(value).all()


def test_ra11_a_slab_without_a_third_vector_has_no_stress(potential: SeZM) -> None:
    slab = fcc111("Cu", (1, 1, 3))
    slab.cell.array[2] = 0
    slab.calc = Calculator(potential)
    assert np.isfinite(slab.get_forces()).all()
    with pytest.raises(PropertyNotImplementedError):
        slab.get_stress()
    with_vacuum = fcc111("Cu", (1, 1, 3), vacuum=8.0)
    with_vacuum.pbc = [True, True, False]
    with_vacuum.calc = Calculator(potential)
    assert np.abs(with_vacuum.get_forces() - slab.get_forces()).max() < 1e-6
    assert with_vacuum.get_stress().shape == (6,)


def process_state() -> tuple:
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index]
    )


def test_ra12_no_process_wide_side_effects(potential: SeZM) -> None:
    before = process_state()
    rough, exact = Calculator(potential, dtype="float32"), Calculator(potential, dtype="float64")
    structures = [molecule("H2O"), bulk("Cu"), molecule("CH4")]
    alternating = [(result(rough, atoms), result(exact, atoms)) for atoms in structures]
    assert process_state() == before
    alone = [[result(Calculator(potential, dtype=dtype), a) for a in structures] for dtype in ("float32", "float64")]
    for (single, double), expected_single, expected_double in zip(alternating, *alone, strict=True):
        for found, expected in ((single, expected_single), (double, expected_double)):
            assert found["energy"] == expected["energy"]
            assert (found["forces"] == expected["forces"]).all()
    assert alternating[0][0]["energy"] != alternating[0][1]["energy"], "they really differ in precision"
    SeZM.from_preset("nano", ["H", "O"], seed=3)
    assert process_state() == before


@pytest.mark.gpu
def test_ra12_gpu_random_numbers_stay(potential: SeZM) -> None:
    torch.cuda.manual_seed_all(11)
    before = torch.cuda.get_rng_state_all()
    result(Calculator(SeZM.from_preset("nano", ["H", "O"], seed=3), device="cuda"), molecule("H2O"))
    for one, other in zip(before, torch.cuda.get_rng_state_all(), strict=True):
        assert torch.equal(one, other)


def test_ra12_importing_changes_nothing() -> None:
    program = (
        "import torch, numpy, random\n"
        "def state(): return (torch.get_default_dtype(), torch.get_float32_matmul_precision(),\n"
        "    torch.is_grad_enabled(), torch.get_num_threads(), torch.get_rng_state().tolist(),\n"
        "    numpy.random.get_state()[1].tolist(), random.getstate())\n"
        "before = state()\n"
        "import mlff; mlff.Calculator, mlff.predict, mlff.SeZM\n"
        "assert state() == before\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_ra13_pickle_and_copy(potential: SeZM) -> None:
    atoms = molecule("H2O")
    atoms.calc = Calculator(potential)
    energy = atoms.get_potential_energy()
    for calculator in (pickle.loads(pickle.dumps(atoms.calc)), copy.deepcopy(atoms.calc)):
        assert result(calculator, molecule("H2O"))["energy"] == energy
        assert calculator.potential is not atoms.calc.potential
    assert copy.deepcopy(atoms).get_potential_energy() == energy


def energy_in_worker(task: tuple[Calculator, Atoms]) -> float:
    torch.set_num_threads(1)
    return result(*task)["energy"]


@pytest.mark.slow
def test_ra13_spawned_workers(potential: SeZM) -> None:
    structures = [bulk("Cu"), molecule("H2O"), molecule("CH4"), bulk("Si")]
    calculator = Calculator(potential)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(energy_in_worker, [(calculator, atoms) for atoms in structures])
    # Sums of float64 in the same order on the same machine; a worker may still use other vector instructions.
    assert found == pytest.approx([result(calculator, atoms)["energy"] for atoms in structures], abs=1e-10)


def test_ra14_cell_relaxation_runs(potential: SeZM) -> None:
    atoms = strained_copper()
    atoms.calc = Calculator(potential)
    before = atoms.get_potential_energy()
    BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=1e-3, steps=5)  # type: ignore[arg-type]
    assert atoms.get_potential_energy() < before


def strained_copper() -> Atoms:
    atoms = bulk("Cu", a=3.61, cubic=True)
    atoms.set_cell(atoms.cell.array @ np.diag([1.03, 1.0, 1.0]), scale_atoms=True)
    return atoms


# With weights trained on copper: a minute's training on the effective-medium potential of ASE


@pytest.fixture(scope="module")
def copper() -> SeZM:
    """A small model of copper, trained here for some seconds on strained and rattled cells labelled by ASE's EMT."""
    generator = np.random.default_rng(0)
    frames = []
    for _ in range(120):
        atoms = bulk("Cu", a=3.6, cubic=True)
        strain = np.eye(3) * generator.uniform(0.96, 1.05) + generator.uniform(-0.03, 0.03, (3, 3))
        atoms.set_cell(atoms.cell.array @ strain, scale_atoms=True)
        atoms.positions += generator.normal(size=(4, 3)) * generator.uniform(0.02, 0.2)
        atoms.calc = EMT()
        atoms.get_forces()  # EMT computes the stress with them, and the labels are taken from its results
        frames.append((graph_from_atoms(atoms, 4.5), targets_from_atoms(atoms)))
    options = {"channels": 4, "n_radial": 4, "lmax": 1, "n_blocks": 1, "mixing_layers": 1}
    options["rcut"] = 4.5  # shells of neighbours end at 4.41 Å: atoms cross the cutoff
    model = SeZM.from_options(options, ["Cu"], seed=1).train()
    model.get_buffer("reference_energies")[0] = float(np.mean([t.energy.item() / 4 for _, t in frames]))
    steps = 500
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = [frames[k] for k in generator.choice(len(frames), 4, replace=False)]
        graph, targets = collate([g for g, _ in chosen]), collate_targets([t for _, t in chosen])
        found = evaluate(model, graph, create_graph=True)
        loss = 5 * (found.energy - targets.energy).abs().mean() / 4
        loss = loss + (found.forces - targets.forces).abs().mean()
        loss = loss + 20 * (found.stress - targets.stress).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.mark.slow
def test_ra14_cell_relaxation_with_trained_weights(copper: SeZM) -> None:
    atoms = strained_copper()
    atoms.calc = Calculator(copper, dtype="float64")
    assert np.abs(atoms.get_stress()).max() > 5e-3
    optimizer = BFGS(FrechetCellFilter(atoms), logfile=None)  # type: ignore[arg-type]
    optimizer.run(fmax=1e-3, steps=100)
    assert np.abs(atoms.get_stress()).max() < 5e-4
    assert optimizer.nsteps <= 100
    # EMT's copper has a = 3.59 Å: the model has learnt it, so the relaxation found the crystal and no artefact.
    assert np.abs(atoms.cell.lengths() - 3.59).max() < 0.04


@pytest.mark.slow
def test_ra3_trained_copper_pushes_out_when_compressed(copper: SeZM) -> None:
    for scale, sign in ((0.97, -1), (1.03, 1)):
        atoms = bulk("Cu", a=3.59 * scale, cubic=True)
        atoms.calc = Calculator(copper)
        assert (sign * atoms.get_stress()[:3] > 0).all()


@pytest.mark.slow
def test_rp3_dynamics_of_copper_conserve_energy(copper: SeZM) -> None:
    """32 atoms, 300 K, 1 fs, 2 ps, float64: drift under 1e-4 eV/atom/ps."""
    atoms = bulk("Cu", a=3.6, cubic=True) * 2
    steps, totals = dynamics(atoms, Calculator(copper, dtype="float64"), 2000, timestep=1.0)
    slope = np.polyfit(steps * 1e-3, totals / len(atoms), 1)[0]  # eV/atom/ps
    print(f"drift {slope:.2e} eV/atom/ps, spread {np.std(totals / len(atoms)):.2e} eV/atom")
    assert abs(slope) < 1e-4


def dynamics(atoms: Atoms, calculator: Calculator, n_steps: int, timestep: float) -> tuple[np.ndarray, np.ndarray]:
    """Return times in fs and total energies in eV of an NVE run that starts at 300 K."""
    atoms.calc = calculator
    # Half of the kinetic energy of a start near the minimum becomes potential: twice the temperature gives 300 K.
    generator = np.random.default_rng(1)
    atoms.set_momenta(generator.normal(size=(len(atoms), 3)) * np.sqrt(600 * units.kB * atoms.get_masses()[:, None]))
    Stationary(atoms)
    run = VelocityVerlet(atoms, timestep * units.fs)
    times, totals = [], []
    run.attach(lambda: (times.append(run.get_time() / units.fs), totals.append(atoms.get_total_energy())), interval=5)
    run.run(n_steps)
    return np.array(times), np.array(totals)


@pytest.mark.slow
def test_pretrained_mini_conserves_energy_in_dynamics() -> None:
    """300 steps of NVE at 300 K: the total energy stays within 1 meV/atom, though the forces are float32."""
    atoms = molecule("CH3CH2OH")
    calculator = Calculator(weights("mini"))
    atoms.calc = calculator
    BFGS(atoms, logfile=None).run(fmax=0.05, steps=200)
    _, totals = dynamics(atoms, calculator, 300, timestep=0.5)
    deviation = np.abs(totals - totals[0]).max() / len(atoms)
    print(f"largest deviation {1e3 * deviation:.3f} meV/atom")
    assert deviation < 1e-3


@pytest.mark.parametrize("build", ["ethanol", "copper", "slab", "one_atom"])
def test_usual_structures_with_pretrained_mini(build: str) -> None:
    """Finite numbers of the right shapes for a molecule, a crystal, a slab and an atom."""
    path = weights("mini")
    model = mlff.load(path, device="cpu")
    metal = "Cu" if 29 in model.elements else "C"
    atoms = {
        "ethanol": lambda: molecule("CH3CH2OH"),
        "copper": lambda: bulk(metal),
        "slab": lambda: fcc111(metal, (2, 2, 3), a=3.6, vacuum=8.0),
        "one_atom": lambda: Atoms("O"),
    }[build]()
    atoms.calc = Calculator(path)
    assert np.isfinite(atoms.get_potential_energy())
    assert atoms.get_forces().shape == (len(atoms), 3)
    assert np.isfinite(atoms.get_forces()).all()
    if atoms.pbc.any():
        assert np.isfinite(atoms.get_stress()).all()


# Compiled


@pytest.mark.slow
def test_compiled_equals_eager(potential: SeZM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures of several sizes, an isolated atom among them (R-A5), and copies of a compiled calculator (R-A13).

    The compiler is the one that takes least time: `test_rt13_gradients_of_a_force_loss` has the real one.
    """
    monkeypatch.setattr("mlff.compiled.BACKEND", "eager")
    options = {"channels": 4, "lmax": 1, "n_blocks": 1, "mixing_layers": 1, "n_radial": 4}
    model = laws.noisy(SeZM.from_options(options, ELEMENTS))
    eager, compiled = Calculator(model), Calculator(model, compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own remarks on what it does not compile
        for atoms in (molecule("CH3CH2OH"), bulk("Cu"), molecule("H2O")):
            same(result(compiled, atoms), result(eager, atoms), "float32", len(atoms))
        check_isolated_atom(compiled, "float32")
        twin = pickle.loads(pickle.dumps(compiled))
    assert twin.compile is True
    assert isinstance(twin._evaluate, CompiledEvaluation) and twin._evaluate.potential is twin.potential


# The rest of a calculator's duties


def test_rt1_forces_whatever_the_callers_gradient_mode(potential: SeZM) -> None:
    expected = result(Calculator(potential), molecule("H2O"))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = result(Calculator(potential), molecule("H2O"))
        assert (found["forces"] == expected["forces"]).all()
    assert np.abs(expected["forces"]).max() > 0.01


def test_calculator_equals_evaluate(potential: SeZM) -> None:
    atoms = bulk("Cu", cubic=True)
    atoms.rattle(0.1, seed=2)
    found, expected = result(Calculator(potential), atoms), laws.results(potential, atoms)
    voigt = full_3x3_to_voigt_6_stress(expected.stress[0].numpy())
    # Frozen parameters let torch choose other routines for the same products: rounding only.
    for name, values in (("energy", expected.energy.item()), ("forces", expected.forces.numpy()), ("stress", voigt)):
        assert np.abs(found[name] - values).max() < laws.ROUNDING, name


def test_rd9_an_unknown_element_is_named() -> None:
    calculator = Calculator(SeZM.from_options(SMALL, ["H", "O"]))
    atoms = Atoms("HOgO", [[0, 0, 0], [0, 0, 2], [0, 2, 0]])
    atoms.calc = calculator
    with pytest.raises(ValueError, match=r"atom 1 is Og.*H, O"):
        atoms.get_potential_energy()
    assert calculator.results == {}
    with pytest.raises(ValueError, match="atom 0 has atomic number 0"):
        result(calculator, Atoms("X"))


def test_a_module_is_left_as_it_was(potential: SeZM) -> None:
    model = copy.deepcopy(potential).train()
    next(model.parameters()).requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    calculator = Calculator(model, dtype="float32")
    before = result(calculator, molecule("H2O"))
    assert model.training and [p.requires_grad for p in model.parameters()] == wanted
    assert model.dtype == torch.float64
    assert all(p.grad is None for p in model.parameters())
    assert not any(p.requires_grad for p in calculator.potential.parameters())
    assert not calculator.potential.training
    with torch.no_grad():
        model.head.out.weight.mul_(2.0)
    calculator.reset()
    assert result(calculator, molecule("H2O"))["energy"] == before["energy"]


def test_dtype_of_a_module_is_kept_unless_asked(potential: SeZM) -> None:
    assert Calculator(potential).potential.dtype == torch.float64
    assert Calculator(potential, dtype="float32").potential.dtype == torch.float32
    assert Calculator(potential, dtype=torch.float32).potential.dtype == torch.float32


def test_a_file_gives_what_the_model_gave(potential: SeZM, tmp_path: Path) -> None:
    path = mlff.save(potential, tmp_path / "model.safetensors")
    expected = result(Calculator(potential), molecule("H2O"))
    same(result(Calculator(path, dtype="float64"), molecule("H2O")), expected)
    same(result(Calculator(str(path)), molecule("H2O")), expected, "float32", 3)
    assert Calculator(path).potential.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("nowhere/model.safetensors", FileNotFoundError, "nowhere/model.safetensors"),
        ("mimi", ValueError, "mini"),
        (__file__, ValueError, "not a safetensors file"),
    ],
)
def test_a_wrong_model_is_explained(model: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Calculator(model)


def test_a_wrong_dtype_is_explained(potential: SeZM) -> None:
    for model in (potential, "mini"):
        if model == "mini" and presets.weights_path("mini") is None:
            continue
        with pytest.raises(ValueError, match="float32 or float64; got 'float16'"):
            Calculator(model, dtype="float16")


def test_two_atoms_at_one_place_are_refused(potential: SeZM) -> None:
    with pytest.raises(ValueError, match="atoms 0 and 1"):
        result(Calculator(potential), Atoms("O2", [[0, 0, 0], [0, 0, 0]]))


def test_no_atoms_have_no_energy(potential: SeZM) -> None:
    found = result(Calculator(potential), Atoms())
    assert found["energy"] == 0.0
    assert found["forces"].shape == (0, 3)


def test_numbers_that_are_not_finite_stop_a_simulation() -> None:
    model = laws.noisy(SeZM.from_options(SMALL, ["H", "O"]))
    with torch.no_grad():
        model.head.out.weight.fill_(float("nan"))
    atoms = molecule("H2O")
    atoms.calc = Calculator(model)
    with pytest.raises(CalculationFailed, match="no finite energy"):
        atoms.get_forces()
    assert atoms.calc.results == {}
