"""The embedded data set is what it says it is, and the program that makes data sets keeps its promises."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from mlff.data import generate, molecules
from mlff.data.parallel import outcomes

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "presets" / "data"

needs_rdkit = pytest.mark.skipif(
    importlib.util.find_spec("rdkit") is None, reason='RDKit is not installed: pip install "mlff[dataset]"'
)
needs_tblite = pytest.mark.skipif(
    importlib.util.find_spec("tblite") is None or importlib.util.find_spec("rdkit") is None,
    reason='tblite or RDKit is not installed: pip install "mlff[dataset]"',
)


def groups_of(name: str | Path) -> list[dict]:
    """Read a file's groups with h5py alone, so that the file is judged apart from the package's reader."""
    with h5py.File(DATA / name) as file:  # a whole path stays as it is
        return [
            {
                **{key: text(value) for key, value in group.attrs.items()},
                **{key: group[key][()] * group[key].attrs.get("scale", 1) for key in group},
            }
            for group in file.values()
        ]


def text(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


@pytest.fixture(scope="module")
def dynamics() -> list[dict]:
    return groups_of("acetylcysteine.h5")


@pytest.fixture(scope="module")
def varied() -> list[dict]:
    return groups_of("molecules.h5")


# The files


def test_embedded_files_are_small():
    assert sum(path.stat().st_size for path in DATA.glob("*.h5")) < 3_000_000


@pytest.mark.parametrize("name", ["acetylcysteine.h5", "molecules.h5", "atoms.h5"])
def test_embedded_files_say_where_they_come_from(name):
    with h5py.File(DATA / name) as file:
        said = {key: text(value) for key, value in file.attrs.items()}
    assert said["format"] == "mlff packed frames"
    assert "GFN2-xTB" in str(said["method"])
    assert "CC0" in str(said["licence"])
    for key in ("tblite", "rdkit", "seed", "script", "script_sha256", "date", "units", "title", "command"):
        assert str(said[key]), key


def test_dynamics_counts(dynamics):
    counts = Counter()
    for group in dynamics:
        counts[group["split"], group["name"]] += len(group["energy"])
    assert counts == {
        ("train", "300K"): 500,
        ("valid", "300K"): 100,
        ("test", "300K"): 150,
        ("test", "600K"): 150,
        ("test", "1200K"): 150,
    }


def test_dynamics_is_of_one_molecule_that_stays_whole_at_300_kelvin(dynamics):
    for group in dynamics:
        assert group["numbers"].tolist() == dynamics[0]["numbers"].tolist()
        assert group["smiles"] == molecules.FLEXIBLE
        if group["name"] == "300K":
            assert group["broken"] == 0


def test_dynamics_has_its_temperature(dynamics):
    for group in dynamics:
        # 50 frames of 57 velocity components: sqrt(2 / (50 * 57)) = 2.6 %, five times that; the time step takes 2 %.
        assert group["kinetic_temperature"] == pytest.approx(group["temperature"], rel=0.15)
    spread = [
        np.mean([g["energy"].mean() for g in dynamics if g["name"] == name]) for name in ("300K", "600K", "1200K")
    ]
    # Equipartition: 3/2 N k (T2 - T1) of potential energy if all were harmonic; half of that at least, twice at most.
    for (low, high), kelvin in (((0, 1), 300), ((1, 2), 600)):
        harmonic = 1.5 * 19 * generate.BOLTZMANN * kelvin
        assert 0.5 * harmonic < spread[high] - spread[low] < 2 * harmonic


def test_no_frame_occurs_twice(dynamics, varied):
    frames = [frame.tobytes() for group in dynamics + varied for frame in group["positions"]]
    assert len(frames) == len(set(frames))


def test_no_molecule_is_in_two_splits(varied):
    splits: dict[str, set[str]] = {}
    for group in varied:
        splits.setdefault(group["smiles"], set()).add(group["split"])
        assert group["split"] == molecules.split_of(group["smiles"])
    assert all(len(found) == 1 for found in splits.values())
    assert Counter(next(iter(found)) for found in splits.values()) == {"train": 60, "valid": 10, "test": 20}
    assert not splits.keys() & set(molecules.HELD_OUT)


def test_varied_molecules_have_all_elements_in_training(varied):
    trained = {int(number) for group in varied if group["split"] == "train" for number in group["numbers"]}
    assert trained == {1, 6, 7, 8, 9, 15, 16, 17}
    assert all({int(n) for n in group["numbers"]} <= trained for group in varied)


def test_forces_and_torques_sum_to_zero(dynamics, varied):
    """Nothing outside acts on the molecule; labels of another frame, or turned ones, would show in the torque."""
    for group in dynamics + varied:
        positions, forces = group["positions"], group["forces"]
        n = len(group["numbers"])
        torque = np.cross(positions, forces).sum(axis=1)
        reach = np.abs(positions).max()
        # Each component is rounded by up to 0.5e-4 eV/Å, and tblite's own forces sum to 1e-5 or less an atom.
        assert np.abs(forces.sum(axis=1)).max() < 0.6e-4 * n
        assert np.abs(torque).max() < 2 * 0.6e-4 * n * reach


def test_free_atoms():
    groups = groups_of("atoms.h5")
    assert sorted(int(group["numbers"][0]) for group in groups) == [1, 5, 6, 7, 8, 9, 14, 15, 16, 17, 35, 53]
    assert all(group["split"] == "isolated_atoms" and np.isfinite(group["energy"]).all() for group in groups)
    assert all(not group["forces"].any() for group in groups)


def test_molecules_are_bound(varied):
    """A molecule lies below its free atoms: energies are total energies, in eV, at one level."""
    atoms = {int(group["numbers"][0]): group["energy"][0] for group in groups_of("atoms.h5")}
    for group in varied:
        binding = group["energy"].min() - sum(atoms[int(number)] for number in group["numbers"])
        assert -8.0 < binding / len(group["numbers"]) < -1.0  # eV an atom; F2 and N2 are the ends of what there is


def test_the_package_reads_the_embedded_set():
    read = pytest.importorskip("mlff.data.read", reason="mlff.data.read is not there").read
    trained = read(f"{DATA / 'acetylcysteine.h5'}::train", cutoff=4.0)
    assert len(trained) == 500
    assert len(read(str(DATA / "molecules.h5"), cutoff=4.0)) == 540
    graph, targets = trained[0]
    group = groups_of("acetylcysteine.h5")[0]
    np.testing.assert_allclose(graph.positions.numpy(), group["positions"][0], atol=1e-9)
    np.testing.assert_allclose(targets.forces.numpy(), group["forces"][0], atol=1e-9)
    assert targets.energy.item() == group["energy"][0]
    assert targets.group == ("300K",)


@needs_tblite
@pytest.mark.parametrize("name", ["acetylcysteine.h5", "molecules.h5"])
def test_labels_belong_to_the_stored_positions(name):
    for group in groups_of(name)[::10][:3]:
        energy, forces = generate.GFN2(group["numbers"]).label(group["positions"][1])
        assert energy == pytest.approx(group["energy"][1], abs=1e-5)  # tblite's convergence, 3e-6 eV
        np.testing.assert_allclose(forces, group["forces"][1], atol=0.5e-4 + 2e-5, rtol=0)  # the grid, and convergence


# What it is made of


@needs_rdkit
def test_molecules_are_neutral_distinct_and_of_the_elements_asked_for():
    from rdkit import Chem

    names = list(itertools.islice(molecules.molecules(7, ("H", "C", "O"), max_atoms=14), 150))
    assert len(set(names)) == 150
    for name in names:
        molecule = Chem.AddHs(Chem.MolFromSmiles(name))
        assert {atom.GetSymbol() for atom in molecule.GetAtoms()} <= {"H", "C", "O"}
        assert Chem.GetFormalCharge(molecule) == 0
        assert not any(atom.GetNumRadicalElectrons() for atom in molecule.GetAtoms())
        assert 2 <= molecule.GetNumAtoms() <= 14 == max(14, molecules.n_atoms(name))


@needs_rdkit
def test_molecules_follow_the_seed():
    def first(seed: int) -> list[str]:
        return list(itertools.islice(molecules.molecules(seed), 400))

    assert first(1) == first(1)
    assert first(1)[350:] != first(2)[350:]


@needs_rdkit
@pytest.mark.parametrize("name", molecules.HELD_OUT)
def test_the_flexible_molecule_is_held_out(name):
    assert molecules.acceptable(name) is None


@needs_rdkit
@pytest.mark.parametrize("name", ["[Na+]", "C.C", "[CH3]", "CBr", "[NH4+]", "C" * 11, "[He]", "no molecule"])
def test_molecules_that_are_refused(name):
    assert molecules.acceptable(name) is None


@needs_rdkit
def test_every_written_piece_is_a_molecule():
    assert not [name for name in molecules.KNOWN if molecules.canonical(name) is None]
    pieces = molecules.SCAFFOLDS + molecules.SUBSTITUENTS + molecules.LINKERS
    assert not [name for name in pieces if molecules.canonical(name) is None]


@needs_rdkit
def test_a_complex_is_of_one_split():
    for task in itertools.islice(generate.tasks(3), 1200):
        assert {molecules.split_of(name) for name in task.smiles} == {task.split}


@needs_rdkit
@pytest.mark.parametrize("name", ["CC(=O)NC", "OP(=O)(O)O", "C1CS1"])
def test_force_field_forces_are_minus_the_slope(name):
    """RDKit's gradient is that of the last energy's positions: asking for it alone would fail here."""
    molecule, _ = generate.embedded(name, seed=1)
    field = generate.ForceField(molecule)
    rng = np.random.default_rng(0)
    here = field.minimum() + 0.05 * rng.normal(size=(molecule.GetNumAtoms(), 3))
    field(here + 1.0)
    _, forces = field(here)
    along, step = rng.normal(size=here.shape), 1e-4
    slope = (field(here + step * along)[0] - field(here - step * along)[0]) / (2 * step)
    assert -(forces * along).sum() == pytest.approx(
        slope, rel=1e-5
    )  # central difference: step² times the third derivative


@needs_tblite
def test_labels_are_minus_the_slope():
    molecule, numbers = generate.embedded("CC(=O)S", seed=1)
    here = generate.ForceField(molecule).minimum()
    gfn2 = generate.GFN2(numbers)
    _, forces = gfn2.label(here)
    along, step = np.random.default_rng(0).normal(size=here.shape), 1e-3
    along /= np.linalg.norm(along)
    slope = (gfn2.label(here + step * along)[0] - gfn2.label(here - step * along)[0]) / (2 * step)
    # step² / 6 times a third derivative of some 100 eV/Å³ is 2e-5; the rest is for the energies' convergence.
    assert -(forces * along).sum() == pytest.approx(slope, abs=1e-4)


@needs_rdkit
def test_a_turned_group_keeps_all_bonds_and_a_stretch_changes_one():
    molecule, _ = generate.embedded("CCOC(=O)CN", seed=2)
    start = generate.ForceField(molecule).minimum()
    rng = np.random.default_rng(5)

    def lengths(positions: np.ndarray) -> np.ndarray:
        ends = [(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in molecule.GetBonds()]
        return np.array([np.linalg.norm(positions[a] - positions[b]) for a, b in ends])

    for _ in range(20):
        np.testing.assert_allclose(lengths(generate.turned(molecule, start, rng)), lengths(start), atol=1e-10)
        changed = np.abs(lengths(generate.stretched(molecule, start, rng)) / lengths(start) - 1) > 1e-10
        assert changed.sum() <= 1


@needs_rdkit
def test_a_complex_touches_as_told():
    rng = np.random.default_rng(1)
    water = np.array([8, 1, 1]), np.array([[0, 0, 0.1], [0.76, 0, -0.5], [-0.76, 0, -0.5]])
    for contact in (0.6, 1.0, 1.5):
        placed = generate.assembled_complex(
            [water[0]] * 2, [water[1], water[1] @ generate.rotation(rng).T], [generate.direction(rng)], contact
        )
        radii = generate.van_der_waals(water[0])
        distance = np.linalg.norm(placed[:3, None] - placed[None, 3:], axis=-1)
        assert (distance / (radii[:, None] + radii[None])).min() == pytest.approx(contact, abs=1e-9)


def test_rotations_are_rotations():
    rng = np.random.default_rng(0)
    for matrix in (generate.rotation(rng), generate.about(rng.normal(size=3), 1.3)):
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(matrix) == pytest.approx(1.0)


# Dynamics, on springs


def spring(positions: np.ndarray) -> tuple[float, np.ndarray]:
    """Each atom on a spring of 5 eV/Å² to the origin."""
    return 2.5 * float((positions**2).sum()), -5.0 * positions


def test_dynamics_without_friction_keeps_the_energy():
    totals: list[float] = []
    walk = generate.langevin(
        spring, np.full((4, 3), 0.1), np.full(4, 12.0), 300.0, np.random.default_rng(0), 10, 200,
        friction=0.0, report=lambda kinetic, potential: totals.append(kinetic + potential),
    )  # fmt: skip
    assert len(list(walk)) == 200
    # Velocity Verlet at w h = 0.032: relative error (w h)² / 8 = 1.3e-4.
    assert np.ptp(totals) < 3e-4 * np.mean(totals)


def test_dynamics_with_friction_has_equipartition():
    kinetic: list[float] = []
    walk = generate.langevin(
        spring, np.zeros((50, 3)), np.full(50, 2.0), 600.0, np.random.default_rng(0), 100, 220,
        time_step=1.0, friction=0.05, report=lambda energy, _: kinetic.append(energy),
    )  # fmt: skip
    potential = np.array([spring(there)[0] for there in walk])
    expected = 0.5 * 150 * generate.BOLTZMANN * 600.0
    # 200 frames of 150 coordinates: sqrt(2 / 30000) = 0.8 %, five times that.
    assert potential[20:].mean() == pytest.approx(expected, rel=0.04)
    assert np.mean(kinetic[20:]) == pytest.approx(expected, rel=0.04)


def test_normal_modes_have_equipartition():
    hessian, masses = np.diag(np.repeat([4.0, 8.0, 12.0, 20.0], 3)), np.array([1.0, 12.0, 14.0, 16.0])
    modes, rng = generate.NormalModes(hessian, masses), np.random.default_rng(0)
    moved = np.array([modes.sample(np.zeros((4, 3)), 300.0, rng) for _ in range(4000)])
    # Each coordinate has k T / (2) of energy; 4000 * 3 squares: sqrt(2 / 12000) = 1.3 %, five times that.
    energy = 0.5 * np.array([4.0, 8.0, 12.0, 20.0]) * (moved**2).mean(axis=(0, 2))
    np.testing.assert_allclose(energy, 0.5 * generate.BOLTZMANN * 300.0, rtol=0.065)


# Processes


def answer(task: int) -> int:
    """Crash on 3, hang on 5, fail on 7."""
    if task == 3:
        os._exit(1)
    if task == 5:
        time.sleep(1000)
    if task == 7:
        raise ValueError("seven")
    return task * task


@pytest.mark.slow
def test_processes_may_crash_hang_or_fail():
    found = {outcome.place: outcome for outcome in outcomes(answer, range(12), workers=2, timeout=5.0)}
    assert sorted(found) == list(range(12))
    assert {place: found[place].failure.split(" ")[0] for place in (3, 5, 7)} == {
        3: "crash",
        5: "timeout",
        7: "ValueError",
    }
    assert all(found[place].result == place**2 for place in range(12) if place not in (3, 5, 7))


def test_processes_stop_when_told():
    began = time.monotonic()
    endless = outcomes(answer, itertools.repeat(5), workers=2, stop=lambda: time.monotonic() - began > 1.0)
    assert list(endless) == []
    assert time.monotonic() - began < 20.0


# The program


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "make_dataset.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("what=everything", "output=x"), "embedded, pretraining or crystals, got 'everything'"),
        (("what=pretraining",), "output is missing"),
        (("frmaes=3", "output=x"), "did you mean 'frames'"),
        (("frames=many", "output=x"), "frames must be int, got 'many'"),
        (("frames=0", "output=x"), "frames must be at least 1"),
        (("elements=H,Xx", "output=x"), "got Xx"),
        (("pretraining",), "expected key=value"),
    ],
)
def test_the_program_explains_a_wrong_call(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = program(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"mlff\[dataset\]"):
        molecules.require("no_such_package_here")


@needs_tblite
@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(tmp_path):
    for workers in (1, 2):
        done = program("what=pretraining", "frames=150", "shard_frames=100", "seed=4", "frames_per_molecule=6",
                       f"workers={workers}", f"output={tmp_path / str(workers)}")  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = ({path.name: path for path in (tmp_path / name).glob("*.h5")} for name in ("1", "2"))
    assert one.keys() == two.keys() >= {"train-00.h5", "train-01.h5", "atoms.h5"}
    for name in one:
        first, second = groups_of(one[name]), groups_of(two[name])
        assert len(first) == len(second) > 0
        for here, there in zip(first, second, strict=True):
            assert here.keys() == there.keys()
            for key in here:
                np.testing.assert_array_equal(here[key], there[key], err_msg=key)


@needs_tblite
@pytest.mark.slow
def test_the_program_stops_in_time_with_whole_files(tmp_path):
    done = program("what=pretraining", "max_seconds=8", f"output={tmp_path}", "workers=2")
    assert done.returncode == 0, done.stderr
    with h5py.File(tmp_path / "train-00.h5") as file:
        frames = sum(len(group["energy"]) for group in file.values())
        assert frames > 0
    assert not list(tmp_path.glob(".*"))


@needs_tblite
def test_pairs_of_atoms_reach_into_the_wall_and_out_of_the_cutoff():
    """Every pair of elements in turn; far apart they have the energy of free atoms."""
    found = [task for task in itertools.islice(generate.tasks(3, ("H", "C", "O")), 800) if task.kind == "pairs"]
    assert {frozenset(task.smiles) for task in found[:6]} == {
        frozenset(pair) for pair in itertools.combinations_with_replacement(("H", "C", "O"), 2)
    }
    task = next(task for task in found if task.smiles == ("H", "O"))
    frames = generate.frames_of(dataclasses.replace(task, frames=60))
    distance = np.linalg.norm(frames.positions[:, 0] - frames.positions[:, 1], axis=1)
    energy = frames.energy - frames.energy.min()
    assert distance.min() < 0.8 and distance.max() > 6.0
    assert 0.85 < distance[energy.argmin()] < 1.1  # the radical OH: 0.97 Å
    assert energy[distance < 0.8].min() > 1.0
    free = generate.free_atoms(("H", "O"))
    assert np.abs(frames.energy[distance > 5.5] - free["H"] - free["O"]).max() < 0.02
