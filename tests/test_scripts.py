"""The command line from end to end on tiny models: what it writes, what it says, and how it answers mistakes."""

# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from toy import PairPotential, molecules, structure

import mlff
from mlff import cli, presets
from mlff.config import read_config
from mlff.derivatives import evaluate
from mlff.elements import SYMBOLS
from mlff.runs import choose_folder, read_metrics
from mlff.sezm.potential import SeZM

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[1]
OPTIONS = {"channels": 8, "n_radial": 4, "n_blocks": 1, "mixing_layers": 1, "lmax": 1, "edge_norm": False}
TINY = ["preset=nano", "weights=none", "trainer.accelerator=cpu", "trainer.logger=none"]
TINY += [f"model.{key}={str(value).lower()}" for key, value in OPTIONS.items()]
LEARN = ["training.steps=80", "training.validate_every=20", "training.batch_atoms=12", "training.learning_rate=0.01"]
SHORT = ["training.steps=4", "training.validate_every=2", "training.batch_atoms=12"]


def write_structures(path: Path, count: int, seed: int) -> Path:
    """Two molecules of H and O, shaken, with energies and forces of a pair potential; each energy far from zero."""
    truth = PairPotential(seed=5)
    truth.reference_energies += torch.tensor([-13.0, -40.0], dtype=torch.float64)
    generator = np.random.default_rng(seed)
    frames = []
    for place in range(count):
        base, _ = molecules(2, atoms=(4, 5), seed=7)[place % 2]
        positions = base.positions.numpy() + 0.15 * generator.normal(size=(base.n_atoms, 3))
        found = evaluate(truth, structure(positions, base.numbers)[0])
        atoms = Atoms(base.numbers.numpy(), positions=positions)
        atoms.info["config_type"] = "odd" if place % 2 else "even"
        atoms.calc = SinglePointCalculator(atoms, energy=found.energy.item(), forces=found.forces.numpy())
        frames.append(atoms)
    write(path, frames)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("structures")
    sets = {"train": (16, 0), "valid": (4, 1), "test": (4, 2)}
    return {name: str(write_structures(folder / f"{name}.xyz", *how)) for name, how in sets.items()}


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A model that has seen training: noisy, with reference energies."""
    potential = SeZM.from_options(OPTIONS_OF_NANO, ["H", "C", "O"], seed=3)
    generator = torch.Generator().manual_seed(0)
    for parameter in potential.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    potential.reference_energies += torch.tensor([-10.0, -50.0, -70.0], dtype=torch.float64)
    return mlff.save(potential, tmp_path_factory.mktemp("weights") / "start.safetensors")


def _options_of_nano() -> dict:
    from mlff.config import preset_options

    return {**preset_options("nano")[0], **OPTIONS}


OPTIONS_OF_NANO = _options_of_nano()


def data(files, *names):
    return [f"data.{name}={files[name]}" for name in names or ("train", "valid", "test")]


def run(*words) -> int:
    return cli.main([str(word) for word in words])


def frames_of(path, index=":"):
    return read(path, index)


def energies(model, frames):
    return np.array([prediction.energy for prediction in mlff.predict(model, frames, device="cpu")])


def test_a_whole_run(files, tmp_path, capsys):
    """Everything INTERFACE names is there, the errors went down, and nothing is left half-written."""
    output = tmp_path / "run"
    assert run("finetune", *TINY, *data(files), *LEARN, f"output={output}") == 0
    said = capsys.readouterr().out
    names = {path.name for path in output.iterdir()}
    assert names == {
        *("config.yaml", "model.safetensors", "checkpoints", "metrics.csv", "e0.csv"),
        *("report.html", "parity.png", "curves.png"),
    }
    for name in names - {"checkpoints"}:
        assert str(output / name) in said
    assert (output / "checkpoints").exists() and [p.name for p in (output / "checkpoints").iterdir()] == ["last.ckpt"]

    rows = [row for row in read_metrics(output / "metrics.csv") if np.isfinite(row["valid_loss"])]
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 80
    assert rows[-1]["valid_loss"] < rows[0]["valid_loss"]
    assert rows[-1]["valid_forces_mae"] < rows[0]["valid_forces_mae"]
    assert "Before training:" in said and "Errors, validation:" in said and "Errors, test:" in said

    with open(output / "e0.csv", newline="") as file:
        energy_rows = list(csv.DictReader(file))
    assert [row["element"] for row in energy_rows] == ["H", "O"]
    assert all(float(row["before"]) == 0 and row["determined"] == "true" for row in energy_rows)
    shift = float(energy_rows[0]["after"]) - float(energy_rows[0]["before"])
    assert float(energy_rows[0]["shift"]) == shift and -16 < shift < -10

    trained = mlff.load(output / "model.safetensors", device="cpu")
    test = frames_of(files["test"])
    off = energies(trained, test) - [atoms.get_potential_energy() for atoms in test]
    assert np.abs(off).max() < 3.0  # eV; without reference energies it is 100
    assert "the best model by validation loss" in (output / "report.html").read_text(encoding="utf-8")


def test_the_written_configuration_runs_again(files, tmp_path):
    """config=PATH with another output gives the same model, bit for bit."""
    first, second = tmp_path / "a", tmp_path / "b"
    assert run("train", *TINY, *data(files, "train", "valid"), *SHORT, f"output={first}") == 0
    assert run("train", f"config={first / 'config.yaml'}", f"output={second}") == 0
    one, two = (mlff.load(folder / "model.safetensors").state_dict() for folder in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (first, second)]
    assert configs[0] | {"output": ""} == configs[1] | {"output": ""}


def test_rt8_zero_steps_write_the_starting_model(files, weights, tmp_path, capsys):
    """Without steps and without a fit of reference energies: the same energies; the log says how much was loaded."""
    keys = ["training.steps=0", "finetune.e0=keep", f"weights={weights}", f"output={tmp_path / 'run'}"]
    assert run("finetune", *keys, *data(files)) == 0
    tensors = len(mlff.load(weights).state_dict())
    assert f"Loaded all {tensors} tensors" in capsys.readouterr().out
    test = frames_of(files["test"])
    before, after = energies(weights, test), energies(tmp_path / "run" / "model.safetensors", test)
    assert after == pytest.approx(before, abs=1e-12)
    assert np.abs(before).min() > 1.0


@pytest.mark.parametrize(
    "name", [name for name in presets.names() if presets.weights_path(name) is not None] or ["none"]
)
def test_rt8_zero_steps_write_the_preset(name, tmp_path, capsys):
    """As above, for every preset that has weights."""
    if name == "none":
        pytest.skip("no preset has trained weights in this checkout")
    keys = [
        "training.steps=0",
        "finetune.e0=keep",
        f"output={tmp_path / 'run'}",
        "data.valid_limit=3",
        "data.test_limit=3",
    ]
    assert run("finetune", f"preset={name}", "trainer.accelerator=cpu", *keys) == 0
    said = f"Loaded all {len(mlff.load(name).state_dict())} tensors"
    assert said in capsys.readouterr().out
    water = [Atoms("OH2", positions=[[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])]
    after = energies(tmp_path / "run" / "model.safetensors", water)
    assert after == pytest.approx(energies(name, water), abs=3e-6)  # 1e-6 eV an atom


def test_missing_and_unexpected_tensors_are_errors(weights, files, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    state = load_file(weights)
    with open(weights, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    state["stranger"] = state.pop(next(name for name in state if "head" in name))
    save_file(state, tmp_path / "bad.safetensors", metadata=header)
    assert run("finetune", f"weights={tmp_path / 'bad.safetensors'}", *data(files), f"output={tmp_path / 'r'}") == 2
    error = capsys.readouterr().err
    assert "missing" in error and "stranger" in error
    assert not (tmp_path / "r").exists()


def test_weights_that_are_not_the_preset(weights, files, tmp_path, capsys):
    """The difference is named; without a preset the file decides."""
    keys = [f"weights={weights}", *data(files), f"output={tmp_path / 'r'}", "training.steps=0"]
    assert run("finetune", "preset=mini", *keys) == 2
    assert "channels is 8 in the file, 32 here" in capsys.readouterr().err
    assert run("finetune", "model.channels=16", *keys) == 2
    assert "channels is 8 in the file, 16 here" in capsys.readouterr().err
    assert run("finetune", "model.elements=[H,O]", *keys) == 2
    assert "elements are [H,C,O] in the file, [H,O] here" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_rt6_elements_in_fine_tuning(weights, tmp_path, capsys):
    """Training on H and O, validating with C: a model without C says so; one with C keeps what it knows of it."""
    keys = [f"data.train={DATA / 'new_element_train.extxyz'}", f"data.valid={DATA / 'new_element_valid.extxyz'}"]
    output = tmp_path / "r"
    assert run("finetune", *TINY, *SHORT, *keys, f"output={output}") == 2
    assert "is C, which this model does not know" in capsys.readouterr().err
    assert not output.exists()

    assert run("finetune", f"weights={weights}", "trainer.logger=none", *SHORT, *keys, f"output={output}") == 0
    last = torch.load(output / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    before, after = mlff.load(weights), {name.removeprefix("potential."): value for name, value in last.items()}
    carbon = before.elements.index(6)
    assert after["reference_energies"][carbon] == before.reference_energies[carbon]
    assert after["reference_energies"][0] != before.reference_energies[0]
    for name, value in before.state_dict().items():
        if (
            value.ndim == 2
            and value.shape[0] in (3, 4)
            and getattr(before.get_parameter(name), "optimizer_route", "") == "adam"
        ):
            assert torch.equal(after[name][carbon], value[carbon]), name
            assert not torch.equal(after[name][0], value[0]), name


@pytest.mark.parametrize("mode", ["head", "frozen:trunk,types"])
def test_parts_of_the_model_stay(weights, files, tmp_path, mode):
    keys = [f"weights={weights}", f"finetune.mode={mode}", "trainer.logger=none", "training.ema=0", *SHORT]
    assert run("finetune", *keys, *data(files, "train", "valid"), f"output={tmp_path / 'r'}") == 0
    last = torch.load(tmp_path / "r" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in mlff.load(weights).named_parameters():
        room = name.partition(".")[0]
        frozen = room not in ("head", "readout") if mode == "head" else room in ("trunk", "types")
        assert torch.equal(last[f"potential.{name}"], value) == frozen, name


@pytest.mark.parametrize("mode", ["isolated", "file"])
def test_reference_energies_from_atoms_or_a_file(files, weights, tmp_path, mode):
    """Isolated atoms then have exactly their energy; a file's numbers are taken as they are."""
    atoms = [Atoms("H"), Atoms("O")]
    for one, energy in zip(atoms, (-12.5, -2000.0), strict=True):
        one.calc = SinglePointCalculator(one, energy=energy, forces=np.zeros((1, 3)))
    write(tmp_path / "train.xyz", [*frames_of(files["train"]), *atoms])
    (tmp_path / "e0.csv").write_text("element,eV\nH,-12.5\nO,-2000\n")
    e0 = "isolated" if mode == "isolated" else f"file:{tmp_path / 'e0.csv'}"
    keys = [f"weights={weights}", f"finetune.e0={e0}", "training.steps=0", f"output={tmp_path / 'r'}"]
    assert run("finetune", *keys, f"data.train={tmp_path / 'train.xyz'}", *data(files, "valid")) == 0
    written = mlff.load(tmp_path / "r" / "model.safetensors", device="cpu")
    if mode == "isolated":
        assert energies(written, atoms) == pytest.approx([-12.5, -2000.0], abs=1e-5)  # float32 network
    else:
        assert written.reference_energies.tolist() == [-12.5, -50.0, -2000.0]


def test_rd2_names_of_labels(tmp_path):
    """REF_energy, REF_forces and REF_stress are found under the names given."""
    file = DATA / "keys_ref.extxyz"
    keys = [f"data.{name}_key=REF_{name}" for name in ("energy", "forces", "stress")]
    assert (
        run("train", *TINY, *SHORT, *keys, f"data.train={file}", f"data.valid={file}", f"output={tmp_path / 'r'}") == 0
    )
    row = next(row for row in read_metrics(tmp_path / "r" / "metrics.csv") if np.isfinite(row["valid_loss"]))
    assert all(
        np.isfinite(row[f"valid_{name}_mae{'_per_atom' * (name == 'energy')}"])
        for name in ("energy", "forces", "stress")
    )


def test_rd2_labels_under_unknown_names(tmp_path, capsys):
    file = DATA / "keys_unrelated.extxyz"
    assert run("train", *TINY, f"data.train={file}", f"data.valid={file}", f"output={tmp_path / 'r'}") == 2
    error = capsys.readouterr().err
    assert "my_label" in error and "my_forces" in error and "energy" in error
    assert not (tmp_path / "r").exists()


def test_rd7_nan_labels_are_left_out_and_said(tmp_path, capsys):
    """The file with NaN and missing labels trains, with finite errors, and the log counts what is there."""
    file = DATA / "missing_labels.extxyz"
    keys = [f"data.train={file}", f"data.valid={file}", f"output={tmp_path / 'r'}", "training.loss.stress=5"]
    assert run("train", *TINY, *SHORT, *keys) == 0
    said = capsys.readouterr().out
    assert "Labels that are missing or NaN are left out" in said
    rows = read_metrics(tmp_path / "r" / "metrics.csv")
    assert all(np.isfinite(row["valid_loss"]) for row in rows)
    assert all(
        value.isfinite().all() for value in mlff.load(tmp_path / "r" / "model.safetensors").state_dict().values()
    )


def test_evaluate(weights, files, tmp_path, capsys):
    """Tables and files; the numbers are those of the predictions."""
    output = tmp_path / "e"
    assert run("evaluate", f"weights={weights}", f"data.test={files['test']}", f"output={output}") == 0
    said = capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {"summary.csv", "structures.csv", "parity.png"}
    frames = frames_of(files["test"])
    off = energies(weights, frames) - [atoms.get_potential_energy() for atoms in frames]
    per_atom = np.abs(off) / [len(atoms) for atoms in frames]
    with open(output / "summary.csv", newline="") as file:
        rows = {(row["group"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    assert float(rows["all", "energy_mae_per_atom"]) == pytest.approx(per_atom.mean(), rel=1e-6)
    assert float(rows["even", "energy_mae_per_atom"]) == pytest.approx(per_atom[::2].mean(), rel=1e-6)
    assert {"all", "even", "odd", "element H", "element O"} == {group for group, _ in rows}
    with open(output / "structures.csv", newline="") as file:
        structures = list(csv.DictReader(file))
    assert [int(row["n_atoms"]) for row in structures] == [len(atoms) for atoms in frames]
    assert float(structures[1]["energy"]) == pytest.approx(energies(weights, frames)[1], abs=1e-5)
    assert "even" in said and str(output / "parity.png") in said


def test_an_interrupted_run_goes_on(files, tmp_path, capsys):
    """The same command with the same output continues; a finished run can be made longer."""
    keys = [*TINY, *data(files, "train", "valid"), "training.validate_every=2", "training.batch_atoms=12"]
    keys.append(f"output={tmp_path / 'r'}")
    assert run("train", *keys, "training.steps=4") == 0
    capsys.readouterr()
    assert run("train", *keys, "training.steps=8") == 0
    assert "Continuing" in capsys.readouterr().out
    assert torch.load(tmp_path / "r" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 8
    assert [row["step"] for row in read_metrics(tmp_path / "r" / "metrics.csv")] == [0, 2, 4, 6, 8]
    assert run("train", *keys, "training.steps=8", "resume=never") == 2
    assert "already holds a run" in capsys.readouterr().err


def test_from_python(files, tmp_path):
    path = mlff.finetune(
        preset="nano",
        train=files["train"],
        valid=[files["valid"]],
        output=str(tmp_path / "r"),
        **{
            "training.steps": 2,
            "weights": "none",
            "trainer.logger": "none",
            **{f"model.{k}": v for k, v in OPTIONS.items()},
        },
    )
    assert path == tmp_path / "r" / "model.safetensors"
    assert mlff.load(path).elements == (1, 8)


def test_folders_are_numbered(tmp_path, monkeypatch):
    import datetime

    from mlff.config import Config

    monkeypatch.chdir(tmp_path)
    day = datetime.date(2030, 1, 2)
    assert choose_folder(Config(preset="pro"), day) == Path("runs/pro-2030-01-02-1")
    Path("runs/pro-2030-01-02-1").mkdir(parents=True)
    assert choose_folder(Config(preset="pro"), day) == Path("runs/pro-2030-01-02-2")


def test_the_default_run_without_a_gpu_scales_itself_down(files, tmp_path, capsys, monkeypatch):
    """Steps, batch and sets are chosen by a measurement, and said in one line."""
    from mlff import finetuning

    monkeypatch.setattr(finetuning, "TRAIN_SECONDS", 0.5)
    assert run("finetune", *TINY, *data(files, "train", "valid"), f"output={tmp_path / 'r'}") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("scaled down to" in line for line in lines) == 1
    config = yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())
    assert 10 <= config["training"]["steps"] < 4000
    assert config["training"]["ema"] <= 1 - 10 / config["training"]["steps"] + 1e-9


MISTAKES = {
    "no such file": (["data.train=nowhere.xyz"], "nowhere.xyz"),
    "no such valid": (["data.valid=nowhere.xyz"], "nowhere.xyz"),
    "unknown key": (["training.stpes=5"], "Did you mean 'training.steps'?"),
    "wrong type": (["training.steps=many"], "training.steps must be a whole number; got 'many'."),
    "no such preset": (["preset=nanoo"], "nanoo"),
    "no such weights": (["weights=gone.safetensors"], "gone.safetensors"),
    "weights that are none": (["weights=FILE"], "is not a safetensors file"),
    "no such room": (["finetune.mode=frozen:cellar"], "no room 'cellar'"),
    "no such table": (["finetune.e0=file:gone.csv"], "gone.csv"),
    "no isolated atoms": (["finetune.e0=isolated"], "H, O has none"),
    "unknown element": (["model.elements=[H,C]"], "is O, which this model does not know"),
    "output is a file": (["output=FILE"], "is a file; name a folder"),
    "not structures": (["data.train=FILE"], "FILE"),
    "no such checkpoint": (["resume=gone.ckpt"], "gone.ckpt"),
    "no GPU": (["trainer.accelerator=gpu"], "needs a CUDA device"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_nothing(name, files, tmp_path, capsys, monkeypatch):
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so asking for one is no mistake")
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("hello\n")
    words, expected = MISTAKES[name]
    given = {
        word.partition("=")[0]: word for word in [*TINY, *SHORT, *data(files, "train", "valid"), "output=r", *words]
    }
    assert run("finetune", *given.values()) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("mlff: ") and captured.err.count("\n") == 1
    assert expected in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FILE"]


def test_mistakes_of_the_command_line(capsys):
    assert run("fintune") == 2
    words = (
        "there is no command 'fintune'; the commands are finetune, train, evaluate, presets, launches, benchmark, "
        "import, export."
    )
    assert words in capsys.readouterr().err
    assert run() == 2
    assert run("presets", "x=1") == 2
    assert run("evaluate") == 2
    assert "needs weights=FILE or preset=NAME" in capsys.readouterr().err


def test_help(capsys):
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert "finetune" in said and "import" in said and "export" in said and "benchmark" in said
    assert run("finetune", "--help") == 0
    assert "training.steps" in capsys.readouterr().out
    assert run("--version") == 0
    assert mlff.__version__ in capsys.readouterr().out


def test_the_table_of_presets(capsys):
    assert run("presets") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["preset", "parameters"]
    assert [line.split()[0] for line in lines[1:]] == list(presets.names())
    assert "71 of H-Bi" in lines[-1] and max(line.index("  MIT  ") for line in lines[1:]) < 200


@pytest.mark.parametrize("script", ["finetune", "train", "evaluate"])
def test_scripts_answer_from_any_folder(script, tmp_path):
    """Exit code, one line on stderr, no traceback."""
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), "preset=nano", "data.tran=x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "mlff: there is no key 'data.tran'. Did you mean 'data.train'?\n"


def test_every_symbol_may_be_an_element():
    """Also those that YAML reads as something else."""
    from mlff.config import read_config

    symbols = SYMBOLS[1:]
    words = ["preset=nano", f"model.elements=[{','.join(symbols)}]"]
    assert read_config(words).model.elements == symbols


def test_benchmark_prints_a_table(capsys):
    """Training steps and forces of each combination; without a GPU no memory, and no graphs unless asked for."""
    words = ["preset=nano", "atoms=6", "precision=fp32,bf16", "compile=false", "steps=2", "accelerator=cpu"]
    assert cli.main(["benchmark", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    cells = [cell.strip() for cell in lines[2].split("|")[1:-1]]
    assert cells[:2] == ["nano", "6"] and cells[3:5] == ["fp32", "false"] and cells[6] == "-"
    assert int(cells[2]) > 0 and all(float(cells[place]) > 0 for place in (5, 7, 8))
    for words, text in (
        (["atom=3"], "mlff benchmark takes preset, atoms, precision, compile, steps, accelerator; got 'atom'."),
        (["atoms=few"], "atoms must be whole numbers above 0, comma-separated; got 'few'."),
        (["compile=graphs", "accelerator=cpu"], "training.compile=graphs or both records the work of a GPU"),
    ):
        assert cli.main(["benchmark", *words]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_command_of_the_readme(tmp_path):
    """Fine-tuning on the embedded data with the smallest preset and no keys: ends, and the errors went down."""
    script = str(ROOT / "scripts" / "finetune.py")
    done = subprocess.run(
        [
            sys.executable,
            script,
            "preset=nano",
            "trainer.accelerator=cpu",
            "training.steps=60",
            "training.batch_atoms=38",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [row for row in read_metrics(folder / "metrics.csv") if np.isfinite(row["valid_loss"])]
    assert rows[-1]["valid_loss"] < rows[0]["valid_loss"]
    shutil.rmtree(folder)


def test_groups_weigh_in_the_loss(files, capsys):
    """A weight of zero leaves a group out, denominators and all; a weight counts as so many copies."""
    from mlff.data.batch import collate, collate_targets
    from mlff.loss import differences, loss, loss_terms
    from mlff.sets import open_sets

    potential = PairPotential()

    def loss_of(items, config):
        graphs, targets = zip(*items, strict=True)
        graph, labels = collate(graphs), collate_targets(targets)
        found = differences(evaluate(potential, graph), labels, graph)
        return loss(loss_terms(found, config.training.loss), config.training.loss).item()

    def opened(*words):
        config = read_config([*TINY, *data(files, "train", "valid"), *words])
        sets = open_sets(config, 4.0, (1, 8))
        return [sets.train[k] for k in range(len(sets.train))], config

    plain, config = opened()
    even = [item for item in plain if item[1].group == ("even",)]
    odd = [item for item in plain if item[1].group == ("odd",)]
    assert even and odd and len(even) + len(odd) == len(plain)
    assert loss_of(opened("training.group_weights={odd: 0}")[0], config) == pytest.approx(loss_of(even, config))
    assert loss_of(opened("training.group_weights={odd: 3}")[0], config) == pytest.approx(
        loss_of(even + 3 * odd, config), rel=1e-12
    )
    assert loss_of(even, config) != pytest.approx(loss_of(plain, config), rel=1e-3)
    assert run("finetune", *TINY, *data(files, "train", "valid"), "training.group_weights={od: 2}") == 2
    assert "no structure has the group 'od'; the groups are even, odd." in capsys.readouterr().err


def test_rates_are_printed_and_unknown_rooms_named(files, tmp_path, capsys):
    words = [*TINY, *data(files, "train", "valid"), *SHORT, f"output={tmp_path / 'run'}"]
    assert run("finetune", *words, "training.rates={heads: 2}") == 2
    assert "training.rates: the model has no room 'heads'; it has types, " in capsys.readouterr().err
    assert run("finetune", *words, "training.rates={head: 2, types: 0}") == 0
    said = capsys.readouterr().out
    assert "learning rate x 2" in said and "learning rate x 0" in said
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["rates"] == {
        "head": 2,
        "types": 0,
    }
