"""What happens to a model after training: files, devices, precisions, long simulations."""

from __future__ import annotations

import os
import pickletools
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import laws
import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.md.langevin import Langevin
from safetensors import safe_open

import mlff
from mlff import checkpoint, presets
from mlff.calculator import Calculator
from mlff.sezm.potential import SeZM

DATA = Path(__file__).parent / "data"
SMALL = {"channels": 8, "lmax": 2, "n_blocks": 1, "n_radial": 8, "mixing_layers": 2}
TRAINED = [name for name in presets.names() if presets.weights_path(name) is not None]


@pytest.fixture(scope="module")
def potential() -> SeZM:
    return laws.noisy(SeZM.from_options(SMALL, ["H", "C", "O", "Cu"], dtype=torch.float64))


# R-P1: nothing that is written or shipped executes anything when it is read


def holds_tensors_only(path: Path) -> None:
    """Read a file of any kind that the package writes, by a reader that can only make tensors and plain values."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt", device="cpu") as file:
            assert list(file.keys())
            assert file.metadata()["format"] == checkpoint.FORMAT
            for name in file.keys():  # noqa: SIM118  not a dictionary
                assert torch.isfinite(file.get_tensor(name)).all()
    else:
        assert torch.load(path, weights_only=True, map_location="cpu")


def test_rp1_a_saved_model_loads_safely(potential: SeZM, tmp_path: Path) -> None:
    path = mlff.save(potential, tmp_path / "model.safetensors")
    holds_tensors_only(path)
    raw = path.read_bytes()
    assert int.from_bytes(raw[:8], "little") < len(raw)  # the whole format: a length, JSON, and numbers
    assert not zipfile.is_zipfile(path)
    with pytest.raises(Exception, match=r".*"):
        pickletools.dis(raw, out=open(os.devnull, "w"))  # noqa: SIM115  no pickle either


@pytest.mark.parametrize("name", presets.names())
def test_rp1_presets_load_safely(name: str) -> None:
    path = presets.weights_path(name)
    if path is None:
        pytest.skip(f"preset {name} has no trained weights in this checkout yet")
    holds_tensors_only(path)
    model = mlff.load(name, device="cpu")
    assert not model.training
    # The file says what it is without the preset's configuration, and both agree.
    assert model.options == SeZM.from_preset(name, ["H"]).options


@pytest.mark.slow
def test_rp1_everything_that_a_training_run_writes_loads_safely(potential: SeZM, tmp_path: Path) -> None:
    start = mlff.save(potential, tmp_path / "start.safetensors")
    output = tmp_path / "run"
    path = mlff.finetune(
        train=str(DATA / "new_element_train.extxyz"),
        valid=str(DATA / "new_element_train.extxyz"),
        output=str(output),
        weights=str(start),
        **{"training.steps": 2, "trainer.logger": "csv", "trainer.accelerator": "cpu"},
    )
    assert path == output / "model.safetensors"
    binary = [file for file in output.rglob("*") if file.suffix in (".safetensors", ".ckpt", ".pt", ".pth")]
    assert {file.suffix for file in binary} == {".safetensors", ".ckpt"}
    for file in binary:
        holds_tensors_only(file)
    atoms = molecule("H2O")
    atoms.calc = Calculator(path)
    assert np.isfinite(atoms.get_potential_energy())


# R-P2: from a GPU to a machine without one

WITHOUT_A_GPU = """
import sys, torch, mlff
from ase.build import molecule
model, data, output = sys.argv[1:]
assert not torch.cuda.is_available()
atoms = molecule("CH3CH2OH")
atoms.calc = mlff.Calculator(model)
print("energy", repr(atoms.get_potential_energy()))
quiet = {"trainer.logger": "csv", "finetune.e0": "keep"}
mlff.finetune(weights=model, train=data, valid=data, output=output, **{"training.steps": 4, **quiet})  # goes on
mlff.finetune(weights=model, train=data, valid=data, output=output + "-new", **{"training.steps": 1, **quiet})
"""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_rp2_trained_on_a_gpu_used_without_one(device: str, potential: SeZM, tmp_path: Path) -> None:
    """Calculator, going on with a run, and fine-tuning, in a process that sees no GPU. On "cpu": that they work."""
    last_gpu = f"cuda:{torch.cuda.device_count() - 1}"  # cuda:1 where there are two
    place = "cpu" if device == "cpu" else last_gpu
    model = laws.noisy(potential).to(torch.float32).to(place)
    path, data, output = tmp_path / "model.safetensors", str(DATA / "new_element_train.extxyz"), str(tmp_path / "run")
    mlff.save(model, path)
    atoms = molecule("CH3CH2OH")
    atoms.calc = Calculator(model)
    keys = {"training.steps": 2, "trainer.logger": "csv", "finetune.e0": "keep", "trainer.accelerator": device}
    mlff.finetune(weights=str(path), train=data, valid=data, output=output, **keys)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_GPU, str(path), data, output],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    energy = re.search(r"^energy (.*)$", done.stdout, re.MULTILINE)
    assert energy is not None
    assert abs(float(energy[1]) - atoms.get_potential_energy()) < 1e-5 * len(atoms)
    assert f"Continuing {output}" in done.stdout
    for folder in (output, output + "-new"):
        assert Path(folder, "model.safetensors").is_file()
    last = torch.load(Path(output, "checkpoints", "last.ckpt"), weights_only=True, map_location="cpu")
    assert last["global_step"] == 4


# R-P4: one model in two precisions


@pytest.mark.parametrize("name", TRAINED or ["mini"])
def test_rp4_trained_weights_in_both_precisions(name: str) -> None:
    path = presets.weights_path(name)
    if path is None:
        pytest.skip(f"preset {name} has no trained weights in this checkout yet")
    rough, exact = Calculator(path, dtype="float32"), Calculator(path, dtype="float64")
    for kind in ("H2O", "CH3CH2OH", "C6H6", "CH3CONH2"):
        found = []
        for calculator in (rough, exact):
            atoms = molecule(kind)
            atoms.rattle(0.05, seed=1)
            atoms.calc = calculator
            found.append((atoms.get_potential_energy(), atoms.get_forces()))
        (e32, f32), (e64, f64) = found
        assert abs(e32 - e64) < 1e-4 * len(f32)
        assert np.abs(f32 - f64).max() < 1e-3
    for atoms in (Atoms("O"), Atoms("O2", [[0, 0, 0], [0, 0, 0.5]])):
        for calculator in (rough, exact):
            atoms.calc = calculator
            assert np.isfinite(atoms.get_potential_energy())
            assert np.isfinite(atoms.get_forces()).all()


def test_rp4_finite_for_an_atom_and_a_close_pair(potential: SeZM) -> None:
    for dtype in ("float32", "float64"):
        calculator = Calculator(potential, dtype=dtype)
        for atoms in (Atoms("O"), Atoms("O2", [[0, 0, 0], [0, 0, 0.5]])):
            atoms.calc = calculator
            assert np.isfinite(atoms.get_potential_energy())
            assert np.isfinite(atoms.get_forces()).all()


# R-P5: memory of a long simulation


def simulate(calculator: Calculator, marks: tuple[int, ...], memory: Callable[[], Any]) -> list[Any]:
    """Memory after each of the marked numbers of steps of a 64-atom crystal at 300 K."""
    atoms = bulk("Cu", cubic=True) * (4, 2, 2)
    assert len(atoms) == 64
    atoms.calc = calculator
    random = np.random.RandomState(0)
    run = Langevin(atoms, units.fs, temperature_K=300, friction=0.01 / units.fs, rng=random, fixcm=False)
    found, done = [], 0
    for mark in marks:
        run.run(mark - done)
        done = mark
        found.append(memory())
    return found


def resident() -> float:
    """Resident memory of this process in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]


@pytest.mark.slow
def test_rp5_memory_stays_in_long_dynamics() -> None:
    """Shortened for a CPU: between step 50 and step 300 resident memory grows by less than 5 %."""
    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from Linux's /proc, which is not there")
    options = {**SMALL, "channels": 4, "lmax": 1, "rcut": 4.0}
    calculator = Calculator(laws.noisy(SeZM.from_options(options, ["Cu"])))
    early, late = simulate(calculator, (50, 300), resident)
    print(f"resident memory {early:.0f} MB after 50 steps, {late:.0f} MB after 300")
    assert late < 1.05 * early


@pytest.mark.gpu
@pytest.mark.slow
def test_rp5_memory_stays_in_long_dynamics_on_a_gpu(potential: SeZM) -> None:
    calculator = Calculator(potential, device="cuda", dtype="float32")
    early, late = simulate(calculator, (200, 2000), lambda: (torch.cuda.memory_allocated() / 2**20, resident()))
    assert all(after < 1.05 * before for before, after in zip(early, late, strict=True))
