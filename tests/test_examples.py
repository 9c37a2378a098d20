"""The scripts in examples/ run, with a model given on the command line as with a preset."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import laws
import pytest

import mlff
from mlff.sezm.potential import SeZM

FOLDER = Path(__file__).parents[1] / "examples"
DATA = Path(__file__).parent / "data"
SMALL = {"channels": 4, "lmax": 1, "n_blocks": 1, "n_radial": 4, "mixing_layers": 1}
RUNS = {
    "relaxation": ([], "minimum"),
    "dynamics": ([], "meV/atom"),
    "evaluation": ([str(DATA / "e0_exact.extxyz")], "forces MAE"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    potential = laws.noisy(SeZM.from_options(SMALL, ["H", "C", "O"]), forces=0.3)
    return mlff.save(potential, tmp_path_factory.mktemp("model") / "model.safetensors")


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_example(name: str, model: Path, tmp_path: Path) -> None:
    arguments, words = RUNS[name]
    command = [sys.executable, str(FOLDER / f"{name}.py"), str(model), *arguments]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert words in done.stdout
    assert "nan" not in done.stdout
    assert "Warning" not in done.stderr
