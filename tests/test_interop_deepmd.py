"""Checkpoints of deepmd-kit, read and written."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import molecule
from test_sezm_oracle import CASES, close, graph, reference, structures

import mlff
from mlff import checkpoint, presets
from mlff.atoms import graph_from_atoms
from mlff.cli import main
from mlff.derivatives import evaluate
from mlff.interop import deepmd
from mlff.sezm.potential import SeZM


def config_and_state(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    file = reference(case)
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    return json.loads(str(file["config_normalized_json"])), state


def write(path: Path, config: dict[str, Any], state: dict[str, Any], **more: Any) -> Path:
    """A training checkpoint as deepmd-kit lays it out."""
    tensors: dict[str, Any] = {f"model.Default.{name}": torch.tensor(values) for name, values in state.items()}
    tensors["_extra_state"] = {"model_params": config, "train_infos": {"lr": np.float64(1e-3), "step": 7}}
    torch.save({"model": tensors, "optimizer": {"state": {}, "param_groups": []}, **more}, path)
    return path


# Index tables, and statistics that the model does not use.
TABLES = {
    "balance_weight", "degree_index_m", "dens_force_rmsd", "expand_index", "kernel_compact_index", "kernel_dense_index",
    "l1_perm", "l1_sign_outer", "m0_idx", "min_nbor_dist", "neg_indices", "non_scalar_row_index", "out_std",
    "pos_indices", "radial_slot_index_for_row", "zonal_m0_col_index_for_row",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_the_same_model(case: str, tmp_path: Path) -> None:
    """Every option: what is written holds each tensor of the original file, index tables included, bit for bit."""
    config, state = config_and_state(case)
    potential = deepmd.from_state(config, state)
    path = deepmd.save(potential, tmp_path / "model.pt")
    content = torch.load(path, weights_only=True)["model"]
    written = {
        name.removeprefix("model.Default."): tensor for name, tensor in content.items() if name != "_extra_state"
    }
    assert state.keys() <= written.keys()
    # The cases beside the tests were stored without index tables, which follow from the options.
    assert all(name.rpartition(".")[2] in TABLES for name in written.keys() - state.keys())
    assert written.keys() == state.keys() or not any(name.rpartition(".")[2] in TABLES for name in state)
    for name, expected in state.items():
        found = written[name].numpy()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        if name.endswith("adam_type_embedding") and "charge_spin" not in name:
            assert not found[-1].any()  # padding, which no atom has; the reference put noise there
            found, expected = found[:-1], expected[:-1]
        if name.endswith("balance_weight"):  # a product of three reciprocals, in another order
            np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(expected.dtype).eps)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)
    again = deepmd.load(path)
    assert (again.options, again.elements, again.dtype) == (potential.options, potential.elements, potential.dtype)
    assert not again.training
    before, after = potential.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("case", CASES)
def test_deepmd_kit_opens_what_is_written(case: str, tmp_path: Path) -> None:
    """Energies, forces and virials of deepmd-kit from our file are ours; no tensor is missing or left over in it."""
    pytest.importorskip("deepmd", reason="deepmd-kit 3.2.0 is not installed: see CONTRIBUTING.md for how to add it")
    from deepmd.infer import DeepPot  # pyright: ignore[reportMissingImports]

    file = reference(case)
    config, state = config_and_state(case)
    potential = deepmd.from_state(config, state).eval()
    path = deepmd.save(potential, tmp_path / "model.pt")
    theirs = DeepPot(str(path))
    theirs.deep_eval.dp.load_state_dict(torch.load(path, weights_only=True)["model"], strict=True)
    # Both are float64. Their product grids are float32, which test_sezm_oracle measures; all else is round-off.
    tolerance = 5e-7 if not all(potential.options.lebedev_quadrature) else 1e-9
    for name in structures(file):
        ours = evaluate(potential, graph(file, name, potential.cutoff))
        cell = file[f"{name}::cell"].reshape(1, 9) if file[f"{name}::cell"].size else None
        more = {"spin": file[f"{name}::spin"][None]} if potential.options.use_spin else {}
        energy, forces, virial, *_ = theirs.eval(
            file[f"{name}::coord"].reshape(1, -1), cell, file[f"{name}::type"].tolist(), **more
        )
        close(ours.energy, energy, tolerance)
        close(ours.forces, forces, tolerance)
        if cell is not None:
            close(ours.virial, virial, tolerance)


def toy_checkpoint() -> Path:
    path = Path(os.environ.get("MLFF_PEERS", Path(__file__).parents[2] / "shared" / "data" / "peers"))
    path = path / "deepmd_water_dpa4_tiny.pt"
    if not path.exists():
        pytest.skip("deepmd-kit's public water checkpoint is not here; set MLFF_PEERS to the folder that has it")
    return path


@pytest.mark.parametrize("name", [name for name in presets.names() if presets.weights_path(name) is not None])
def test_deepmd_kit_agrees_on_trained_presets(name: str, tmp_path: Path) -> None:
    """In float32, the precision in which presets are trained and used."""
    pytest.importorskip("deepmd", reason="deepmd-kit 3.2.0 is not installed: see CONTRIBUTING.md for how to add it")
    from deepmd.calculator import DP  # pyright: ignore[reportMissingImports]

    path = deepmd.save(mlff.load(name, device="cpu"), tmp_path / f"{name}.pt")
    ours, theirs = mlff.Calculator(name, device="cpu"), DP(str(path))
    for kind in ("H2O", "CH3CH2OH", "C6H6"):
        atoms = molecule(kind)
        atoms.rattle(0.05, seed=1)
        found = []
        for calculator in (ours, theirs):
            atoms.calc = calculator
            found.append((atoms.get_potential_energy(), atoms.get_forces()))
        (energy, forces), (expected, expected_forces) = found
        print(name, kind, abs(energy - expected), np.abs(forces - expected_forces).max())
        # float32 rounds each of two evaluations: 1e-5 eV/atom and 1e-4 eV/Å are what one model may differ by.
        assert abs(energy - expected) < 1e-5 * len(atoms)
        assert np.abs(forces - expected_forces).max() < 1e-4


class Inputs(dict):
    """Arrays by name, as a reference file has them."""

    @property
    def files(self) -> list[str]:
        return list(self)


def test_a_public_checkpoint_gives_the_energies_of_deepmd_kit() -> None:
    """64 water molecules, float32."""
    potential = deepmd.load(toy_checkpoint())
    file = reference("pretrained_water")
    inputs = {f"water::{name}": file[name] for name in ("coord", "type", "cell")}
    renamed = Inputs(inputs, config_normalized_json=str(file["config_json"]))
    found = evaluate(potential, graph(renamed, "water", potential.cutoff))  # type: ignore[arg-type]
    # Energies of atoms are some 0.1 eV in float32 beside reference energies in float64: 192 of them round to 1e-6 eV.
    assert abs(float(found.energy) - file["float32::energy"].item()) <= 1e-6
    assert float((found.forces - torch.tensor(file["float32::force"]).reshape(-1, 3)).abs().max()) < 1e-6


def test_a_checkpoint_is_loaded_by_every_way_that_takes_weights(tmp_path: Path) -> None:
    """`mlff.load`, its description, elements in another order, float64."""
    config, state = config_and_state("mini")
    path = write(tmp_path / "training.pt", config, state)
    expected = deepmd.from_state(config, state).eval()
    water = graph(reference("mini"), "water", expected.cutoff)
    wanted = evaluate(expected, water).energy
    other = deepmd.load(path, elements=["C", "O", "H"])
    assert other.elements == (6, 8, 1)
    for potential in (deepmd.load(path), other, mlff.load(path, device="cpu", dtype="float64")):
        # The order of elements changes nothing but the order of rows.
        assert abs(float(evaluate(potential, water).energy - wanted)) < 1e-12 * float(wanted.abs())


def shifted(state: dict[str, Any], by: float) -> dict[str, Any]:
    """The same model with other reference energies."""
    return {name: values + by if name.endswith("out_bias") else values for name, values in state.items()}


def multitask(path: Path) -> Path:
    config, state = config_and_state("mini")
    tensors = {}
    for head, by in (("Metals", 1.0), ("Water", 2.0)):
        tensors |= {f"model.{head}.{name}": torch.tensor(values) for name, values in shifted(state, by).items()}
    section = {**config, "descriptor": "both", "model_branch_alias": ["H2O"]}
    models = {"Metals": {**config, "descriptor": "both:1"}, "Water": section}
    shared = {"both": config["descriptor"]}
    extra = {"model_params": {"model_dict": models, "shared_dict": shared}, "train_infos": {}}
    torch.save({"model": {**tensors, "_extra_state": extra}}, path)
    return path


def test_a_multi_task_file_needs_a_head(tmp_path: Path) -> None:
    path = multitask(tmp_path / "multi.pt")
    config, state = config_and_state("mini")
    expected = deepmd.from_state(config, state).get_buffer("reference_energies")
    for head, by in (("Metals", 1.0), ("Water", 2.0), ("water", 2.0), ("H2O", 2.0)):
        assert torch.equal(deepmd.load(path, head).get_buffer("reference_energies"), expected + by)
    assert torch.equal(
        mlff.load(f"{path}::Water", device="cpu", dtype="float64").get_buffer("reference_energies"), expected + 2.0
    )
    with pytest.raises(ValueError, match=r"multi\.pt holds several models; say which with head: Metals, Water\."):
        deepmd.load(path)
    with pytest.raises(ValueError, match=r"there is no head 'Wood': Metals, Water\."):
        deepmd.load(path, "Wood")
    single = write(tmp_path / "single.pt", config, state)
    with pytest.raises(ValueError, match="holds one model only; leave out head"):
        deepmd.load(single, "Water")


def test_the_average_of_weights_is_taken_where_there_is_one(tmp_path: Path) -> None:
    config, state = config_and_state("mini")
    key = "atomic_model.descriptor.radial_basis.adam_freqs"
    shadow = {key: torch.tensor(state[key]) * 2}
    path = write(tmp_path / "x.pt", config, state, ema={"decay": 0.999, "model": shadow, "validation_state": {}})
    assert torch.equal(deepmd.load(path).basis.frequencies, 2 * torch.tensor(state[key]).flatten())
    assert torch.equal(deepmd.load(path, average=False).basis.frequencies, torch.tensor(state[key]).flatten())
    assert deepmd.read(path).averaged
    assert not deepmd.read(path, average=False).averaged
    wrong = write(tmp_path / "y.pt", config, state, ema={"decay": 0.999, "model": {"novelty": torch.zeros(1)}})
    with pytest.raises(ValueError, match="its average of weights has a tensor 'novelty' that its model lacks"):
        deepmd.load(wrong)


class Harmful:
    """What a hostile file would hold: on opening it, `reduce` is called."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_is_opened_without_running_anything(tmp_path: Path) -> None:
    config, state = config_and_state("mini")
    mark = tmp_path / "executed"
    path = write(tmp_path / "harmful.pt", config, state, surprise=Harmful(mark))
    with pytest.raises(ValueError, match=r"harmful\.pt holds an object \S+, which could run code"):
        deepmd.load(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)  # the file is what it claims to be
    assert mark.exists()


def test_what_is_no_training_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    config, state = config_and_state("mini")
    whole = write(tmp_path / "whole.pt", config, state)
    (tmp_path / "cut.pt").write_bytes(whole.read_bytes()[:-2000])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    torch.save(torch.zeros(3), tmp_path / "tensor.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), tmp_path / "frozen.pth")
    for name, words in (
        ("cut.pt", "cut short"),
        ("other.pt", "no section model_params"),
        ("tensor.pt", "holds Tensor"),
        ("frozen.pth", "frozen model: compiled code"),
    ):
        with pytest.raises(ValueError, match=words):
            deepmd.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        deepmd.load(tmp_path / "absent.pt")
    with pytest.raises(ValueError, match=r"named \*\.pt"):
        deepmd.save(deepmd.load(whole), tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("descriptor", {"env_exp": 5}, "env_exp as one number"),
        ("descriptor", {"edge_norm": [True, False, True]}, "edge_norm as a list"),
        ("descriptor", {"basis_type": "gaussian/fix"}, "'gaussian/fix' is not represented"),
        ("descriptor", {"type": "dpa3"}, "'dpa3', not of the DPA4"),
        ("fitting_net", {"type": "dipole"}, "'dipole', not of the DPA4"),
        ("fitting_net", {"use_aparam_as_mask": True}, "use_aparam_as_mask"),
        (None, {"lora": {"rank": 4}}, "LoRA adapters must be merged"),
        (None, {"spin": {"scheme": "deepspin", "use_spin": [True]}}, "spin scheme 'deepspin'"),
    ],
)
def test_forms_that_are_not_represented_are_refused_by_name(
    section: str | None, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config, state = config_and_state("mini")
    altered = {**config, **change} if section is None else {**config, section: {**config[section], **change}}
    path = write(tmp_path / "later.pt", altered, state)
    with pytest.raises(ValueError, match=r"later\.pt: .*" + words):
        deepmd.load(path)


BESIDE_THE_REFERENCES = {
    "degree zero": {"lmax": 0, "kmax": 0},
    "degree zero, gated": {"lmax": 0, "kmax": 0, "s2_activation": [False, False]},
    "degree zero, wider atoms": {"lmax": 0, "kmax": 0, "s2_activation": [True, False], "extra_node_l": 1},
    "two gated read-out layers": {"lmax": 2, "readout_layers": 2, "glu_activation": False},
    "conditions": {"lmax": 2, "numb_fparam": 2, "numb_aparam": 1},
    "case": {"lmax": 1, "dim_case_embd": 3},
    "case film": {"lmax": 1, "dim_case_embd": 3, "case_film_embd": True, "fitting_neuron": [4, 0]},
    "excluded element": {"lmax": 2, "bias_out": True, "atom_exclude_types": ["H"]},
    "excluded pairs": {"lmax": 2, "exclude_types": [["H", "H"], ["C", "H"]]},
    "focus, biases": {"lmax": 2, "mmax": None, "n_focus": 2, "focus_dim": 4, "node_wise_so3": True, "mlp_bias": True},
    "schedules": {"lmax": 3, "l_schedule": [3, 1], "m_schedule": [2, 1], "extra_node_l": 1},
    "no seed": {"lmax": 2, "use_env_seed": False, "extra_node_l": 1},
    "radial layers": {"lmax": 2, "radial_mlp": [16, 0, 8], "edge_norm": False, "fitting_activation": "tanh"},
    "residuals": {"lmax": 1, "so2_attn_res": "dependent", "block_attn_res": "independent", "mlp_bias": True},
    "edge cartesian, biases": {"lmax": 2, "edge_cartesian": True, "mlp_bias": True},
    "node cartesian, biases": {"lmax": 2, "node_cartesian": "default:2", "mlp_bias": True},
    "no frame": {"lmax": 2, "mixing_layers": 0, "radial_so2_mode": "none"},
}
"""Options and their combinations that no reference case has."""


def beside_the_references(name: str) -> SeZM:
    """A model of float64 in which every parameter and constant of the head counts."""
    options = {"channels": 8, "n_blocks": 1, "n_radial": 4, "mixing_layers": 2, **BESIDE_THE_REFERENCES[name]}
    potential = SeZM.from_options(options, ["H", "C", "O"], seed=3, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*potential.parameters(), *potential.head.buffers(), potential.get_buffer("reference_energies")):
            tensor.add_(0.2 * torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator))
        potential.head.get_buffer("case").zero_()[:1] = 1  # one of several
    return potential


@pytest.mark.parametrize("name", BESIDE_THE_REFERENCES)
def test_other_options_survive(name: str, tmp_path: Path) -> None:
    potential = beside_the_references(name)
    again = deepmd.load(deepmd.save(potential, tmp_path / "x.pt"))
    assert again.options == potential.options
    assert (after := again.state_dict()).keys() == (before := potential.state_dict()).keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, copied in zip(potential.head.buffers(), again.head.buffers(), strict=True):
        assert torch.equal(mine, copied)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_focus": 2, "atten_v_proj": True}, "atten_v_proj and atten_o_proj mix all focus streams here"),
        ({"n_focus": 2, "atten_o_proj": True}, "atten_v_proj and atten_o_proj mix all focus streams here"),
        ({"message_node_so3": True, "kmax": 0}, "message_node_so3 and node_wise_so3 with kmax"),
        ({"node_wise_so3": True, "l_schedule": [1, 0]}, "message_node_so3 and node_wise_so3 with kmax"),
    ],
)
def test_what_deepmd_kit_would_read_as_another_model_is_not_written(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    potential = SeZM.from_options({"channels": 8, "lmax": 1, "n_blocks": 1, "n_radial": 4, **options}, ["H"])
    with pytest.raises(ValueError, match=words):
        deepmd.save(potential, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("name", BESIDE_THE_REFERENCES)
def test_deepmd_kit_agrees_on_other_options(name: str, tmp_path: Path) -> None:
    pytest.importorskip("deepmd", reason="deepmd-kit 3.2.0 is not installed: see CONTRIBUTING.md for how to add it")
    from deepmd.infer import DeepPot  # pyright: ignore[reportMissingImports]

    potential = beside_the_references(name)
    path = deepmd.save(potential, tmp_path / "model.pt")
    theirs = DeepPot(str(path))
    theirs.deep_eval.dp.load_state_dict(torch.load(path, weights_only=True)["model"], strict=True)
    atoms = molecule("CH3OH")
    structure, given = graph_from_atoms(atoms, potential.cutoff), {}
    if potential.options.numb_fparam:
        given = {"fparam": np.array([[0.3, -0.2]]), "aparam": np.linspace(-1, 1, len(atoms))[:, None]}
        frame, each = torch.tensor(given["fparam"]), torch.tensor(given["aparam"])
        structure = dataclasses.replace(structure, frame_parameters=frame, atom_parameters=each)
    types = [["H", "C", "O"].index(symbol) for symbol in atoms.get_chemical_symbols()]
    energy, forces, *_ = theirs.eval(atoms.positions.reshape(1, -1), None, types, **given)
    ours = evaluate(potential, structure)
    assert np.abs(forces).max() > 1e-3  # zero forces would compare nothing
    close(ours.energy, energy, 1e-9)  # round-off of two float64 programs
    close(ours.forces, forces, 1e-9)


def test_import_and_export_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From deepmd-kit to ours and back is the same model; what was done is said in one line."""
    config, state = config_and_state("mini")
    path = write(tmp_path / "DPA4-Mini.pt", config, state)
    ours, theirs = tmp_path / "mini.safetensors", tmp_path / "back" / "mini.pt"
    assert main(["import", str(path), f"output={ours}"]) == 0
    assert capsys.readouterr().out.startswith(f"{ours}: 60,186 parameters, 3 elements, cutoff 4.5 Å")
    assert checkpoint.read_header(ours)["imported_from"] == "DPA4-Mini.pt"
    assert main(["export", str(ours), f"output={theirs}"]) == 0
    first, last = deepmd.load(path).state_dict(), deepmd.load(theirs).state_dict()
    assert all(torch.equal(first[name], last[name]) for name in first)  # float64 all the way
    assert main(["import", str(path), f"output={ours}", "elements=O,H"]) == 0
    assert mlff.load(ours, device="cpu").elements == (8, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import"], "mlff import takes one file, as in mlff import DPA4-Mini.pt output=mini.safetensors; got 0"),
        (["import", "a.pt", "b.pt"], "takes one file"),
        (["import", "a.pt", "outputs=x"], "got 'outputs'. Did you mean 'output'?"),
        (["import", "a.pt", "output=x.pt"], "output must end in .safetensors; got 'x.pt'"),
        (["import", "a.pt", "average=maybe"], "average must be true or false; got 'maybe'"),
        (["import", "nowhere.pt"], "there is no checkpoint 'nowhere.pt'"),
        (["export", "nowhere.safetensors"], "there is no weights file 'nowhere.safetensors'"),
        (["export", "mini", "output=x.onnx"], "deepmd-kit reads checkpoints named *.pt; got 'x.onnx'"),
        (["evaluate", "weights=nowhere.pt", "data.test=x"], "there is no weights file 'nowhere.pt'"),
    ],
)
def test_import_and_export_mistakes_are_one_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_heads_are_listed_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = multitask(tmp_path / "multi.pt")
    assert main(["import", str(path), f"output={tmp_path / 'x.safetensors'}"]) == 2
    assert "say which with head: Metals, Water." in capsys.readouterr().err
    assert main(["import", str(path), f"output={tmp_path / 'x.safetensors'}", "head=Water"]) == 0


def test_a_checkpoint_is_evaluated_and_fine_tuned_in_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`weights=x.pt`: with no step and its own reference energies a run gives back the model that it started from."""
    config, state = config_and_state("mini")
    path = write(tmp_path / "DPA4-Mini.pt", config, state)
    data = str(Path(__file__).parent / "data" / "deepmd_order_OH")
    keys = ["training.steps=0", "finetune.e0=keep", "trainer.logger=none", "trainer.accelerator=cpu"]
    output = tmp_path / "run"
    keys += [f"data.train={data}", f"data.valid={data}"]
    assert main(["finetune", f"weights={path}", f"output={output}", *keys]) == 0
    assert "parameters) of " + str(path) in capsys.readouterr().out
    atoms = molecule("CH3OH")
    energies = []
    for weights in (path, output / "model.safetensors"):
        atoms.calc = mlff.Calculator(weights, device="cpu")
        energies.append(atoms.get_potential_energy())
    assert abs(energies[0] - energies[1]) < 1e-6 * len(atoms)
    words = ["evaluate", f"weights={path}", f"data.test={data}", f"output={tmp_path / 'e'}", "trainer.accelerator=cpu"]
    assert main(words) == 0
    wrong = ["finetune", "preset=neo", f"weights={path}", f"data.train={data}", f"output={tmp_path / 'r'}"]
    assert main(wrong) == 2
    assert "holds another model than preset neo: " in capsys.readouterr().err
