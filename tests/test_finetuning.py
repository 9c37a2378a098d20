"""What a model learns beside what it knows, added elements and adapters, and what of it must stay as it was."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import copy
import csv
from pathlib import Path

import laws
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.io import read
from safetensors.torch import load_file
from test_scripts import write_structures
from torch.nn.utils import parametrize

import mlff
from mlff import added_elements, cli, compiled, lora, optim, presets
from mlff.compiled import CompiledEvaluation
from mlff.config import make_config, preset_options
from mlff.derivatives import evaluate
from mlff.elements import group
from mlff.lora import Adapter
from mlff.sets import open_kept
from mlff.sezm.potential import SeZM

DATA = Path(__file__).parent / "data"
OPTIONS = {"channels": 8, "n_radial": 4, "n_blocks": 1, "mixing_layers": 1, "lmax": 1, "edge_norm": False}
FILES = [f"data.train={DATA / 'new_element_valid.extxyz'}", f"data.valid={DATA / 'new_element_valid.extxyz'}"]
SHORT = ["training.steps=3", "training.validate_every=3", "trainer.logger=none", "trainer.accelerator=cpu"]
WATER = Atoms("OH2", [(0, 0, 0), (0.96, 0, 0), (-0.24, 0.93, 0)])


def model(elements) -> SeZM:
    """A model that predicts something: an untrained one has branches of zeros."""
    potential = SeZM.from_options(OPTIONS, elements, seed=3)
    generator = torch.Generator().manual_seed(0)
    for parameter in potential.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return potential


def test_groups_of_the_periodic_table():
    numbers = [1, 2, 3, 5, 6, 21, 26, 31, 57, 89, 71, 72, 118]
    assert [group(number) for number in numbers] == [1, 18, 1, 13, 14, 3, 8, 13, -1, -1, 3, 4, 18]


def test_known_elements_do_not_feel_an_added_one():
    """Energies and forces are those of before, bit for bit; the new row is the mean of its group, else of all."""
    before = model(["H", "O", "S"])
    after = added_elements.extended(before, ["Se", "Fe"])
    (old,), (new,) = (mlff.predict(one.eval(), [WATER], device="cpu") for one in (before, after))
    assert old.energy == new.energy
    assert np.array_equal(old.forces, new.forces)
    assert after.elements == (1, 8, 16, 34, 26)
    for a, b in zip(added_elements.tables(before), added_elements.tables(after), strict=True):
        assert torch.equal(b[3], a[1:].mean(0))
        assert torch.equal(b[4], a.mean(0))
        assert b.optimizer_route == "adam"


@pytest.mark.parametrize("mode", ["full", "head", "lora", "frozen:types,environment"])
def test_rt6_an_added_element_is_learned_and_the_others_stay(tmp_path, mode):
    """O is absent from the data and never moves, nor does H in frozen tables; the rows of C train in every mode."""
    before = model(["H", "O"])
    weights = mlff.save(before, tmp_path / "start.safetensors")
    keys = [f"weights={weights}", "elements.add=[C]", f"finetune.mode={mode}", "training.ema=0.5"]
    assert cli.main(["finetune", *keys, *FILES, *SHORT, f"output={tmp_path / 'r'}"]) == 0
    start = added_elements.extended(before, ["C"])
    end = mlff.load(tmp_path / "r" / "model.safetensors", device="cpu")
    last = torch.load(tmp_path / "r" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert end.elements == (1, 8, 6)
    assert end.reference_energies[1] == 0.0
    names = {id(value): name for name, value in start.named_parameters()}
    for table in added_elements.tables(start):
        name = names[id(table)]
        for prefix in ("potential.", "averaged."):
            trained = last[prefix + name]
            assert torch.equal(trained[1], table[1]), name
            assert torch.equal(trained[0], table[0]) == (mode != "full"), name
            assert not torch.equal(trained[2], table[2]), name
    assert cli.main(["finetune", f"config={tmp_path / 'r' / 'config.yaml'}", "training.steps=4"]) == 0  # goes on


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], "elements.add=[…] in fine-tuning"),
        (["elements.add=[C,H]"], "knows H already"),
        (["elements.add=[C]", "finetune.e0=keep"], "finetune.e0=keep has no value for added elements"),
    ],
)
def test_rt6_mistakes_are_answered_before_the_first_step(tmp_path, capsys, keys, words):
    weights = mlff.save(model(["H", "O"]), tmp_path / "start.safetensors")
    assert cli.main(["finetune", f"weights={weights}", *keys, *FILES, *SHORT, f"output={tmp_path / 'r'}"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_a_preset_without_weights_has_nothing_to_add_to(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(presets, "weights_path", lambda name: None)
    assert cli.main(["finetune", "preset=nano", "elements.add=[Fe]", *FILES, *SHORT, f"output={tmp_path / 'r'}"]) == 2
    assert "preset nano has no weights in this version" in capsys.readouterr().err


LORA = ["finetune.mode=lora", "training.ema=0.5", "training.schedule=constant", "training.warmup=0"]
LORA += ["trainer.logger=none", "trainer.accelerator=cpu", "training.learning_rate=0.01"]


def adapted(potential: SeZM, rank: int = 2, alpha: float = 3.0) -> SeZM:
    """A copy with adapters that change what it says."""
    changed = copy.deepcopy(potential)
    lora.insert(changed, rank, alpha)
    generator = torch.Generator().manual_seed(1)
    for module in changed.modules():
        if isinstance(module, Adapter):
            noise = torch.randn(module.right.shape, generator=generator, dtype=torch.float64)
            module.right.data += 0.1 / module.left.shape[-2] ** 0.5 * noise
    return changed


def reduced(preset: str) -> SeZM:
    """A preset's every choice in few channels, in float64, with forces of order 1 eV/Å."""
    options = preset_options(preset)[0] | {"channels": 8, "n_blocks": 1}
    return laws.noisy(SeZM.from_options(options, ["H", "O", "Cu"], dtype=torch.float64))


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("preset", ["mini", "pro"])
def test_merged_adapters_are_the_adapters(preset, rank):
    """Energies and forces to 1e-6; the merged model has the names of the one before, and that one is untouched."""
    before = reduced(preset)
    model = adapted(before, rank)
    atoms = laws.cluster(before.elements)
    plain, found = laws.results(before, atoms), laws.results(model, atoms)
    merged = lora.merged(model)
    assert sorted(merged.state_dict()) == sorted(before.state_dict())
    assert lora.merged(merged) is merged
    one = laws.results(merged, atoms)
    torch.testing.assert_close(one.energy, found.energy, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.forces, found.forces, rtol=0, atol=1e-6)
    assert (found.energy - plain.energy).abs() > 1e-2 and (found.forces - plain.forces).abs().max() > 1e-2
    laws.same(laws.results(model, atoms), found)  # merging has not touched it


@pytest.mark.parametrize("preset", ["mini", "pro"])
def test_adapters_keep_the_laws(preset):
    """A rotation, another order of atoms, a supercell; forces and stress are derivatives of the energy."""
    model = adapted(reduced(preset))
    cluster, crystal = laws.cluster(model.elements), laws.crystal(model.elements)
    for atoms in (cluster, crystal):
        laws.rotation(model, atoms)
        laws.permutation(model, atoms)
    laws.supercell(model, crystal)
    laws.forces_are_differences(model, cluster, directions=1)
    laws.force_loss_gradient(model, cluster)


@pytest.mark.parametrize("preset", ["mini", "pro"])
def test_adapters_are_a_tenth_of_a_model_at_most(preset):
    """With the default rank. Every adapter is on the route of matrices, and starts as nothing."""
    options, elements = preset_options(preset)
    potential = SeZM.from_options(options, elements)
    whole = sum(parameter.numel() for parameter in potential.parameters())
    lora.insert(potential, lora.default_rank(potential.options.channels), 1.0)
    trained = [parameter for parameter in potential.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) < whole / 10
    assert {optim.route(parameter) for parameter in trained} == {"muon"}
    adapters = [module for module in potential.modules() if isinstance(module, Adapter)]
    assert len(trained) == 2 * len(adapters)
    for adapter in adapters:
        assert adapter.left.any() and not adapter.right.any()


def test_a_rank_that_saves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"finetune.rank=100 is no smaller than any matrix of this model"):
        lora.insert(model(["H"]), 100, 1.0)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Small molecules of H and O in several compositions, and a model that knows C besides."""
    folder = tmp_path_factory.mktemp("structures")
    keys = [
        f"data.{name}={write_structures(folder / f'{name}.xyz', 8, n)}" for n, name in enumerate(("train", "valid"))
    ]
    weights = mlff.save(model(["H", "C", "O"]), folder / "start.safetensors")
    return [*keys, f"weights={weights}", "training.batch_atoms=12"]


def last_checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def test_only_adapters_move(files, tmp_path):
    """Weights below adapters and all others are those of before, bit for bit; the file is their sum, of averages."""
    start = model(["H", "C", "O"])
    keys = ["finetune.alpha=5", "training.steps=6", "training.validate_every=0"]
    assert cli.main(["finetune", *LORA, *files, *keys, f"output={tmp_path / 'r'}"]) == 0
    state, written = last_checkpoint(tmp_path / "r")["state_dict"], load_file(tmp_path / "r" / "model.safetensors")
    adapters = 0
    for name, value in start.named_parameters():
        room, _, own = name.rpartition(".")
        inner = f"{room}.parametrizations.{own}"
        for prefix in ("potential", "averaged"):
            original = f"{prefix}.{inner}.original"
            assert torch.equal(state[original if original in state else f"{prefix}.{name}"], value), name
        if f"averaged.{inner}.original" not in state:
            assert torch.equal(written[name], value), name
            continue
        adapters += 1
        left, right = (state[f"averaged.{inner}.0.{side}"] for side in ("left", "right"))
        assert right.any() and not torch.equal(right, state[f"potential.{inner}.0.right"])
        torch.testing.assert_close(written[name], value + 2.5 * (left @ right).view(value.shape), rtol=0, atol=1e-6)
        assert not torch.equal(written[name], value)
    assert adapters == sum(optim.route(value) == "muon" for value in start.parameters())
    assert written["reference_energies"][1] == 0.0  # C is not in the data
    assert written["reference_energies"][[0, 2]].abs().min() > 1.0


def test_a_continued_run_with_adapters_is_the_unbroken_one(files, tmp_path):
    """Weights, adapters, their averages and momenta, bit for bit; a learning rate that does not depend on the end."""
    keys = ["finetune", *LORA, *files, "training.validate_every=3"]
    assert cli.main([*keys, "training.steps=6", f"output={tmp_path / 'whole'}"]) == 0
    assert cli.main([*keys, "training.steps=3", f"output={tmp_path / 'parts'}"]) == 0
    assert cli.main([*keys[:1], *files[2:3], "training.steps=6", f"output={tmp_path / 'parts'}"]) == 0
    one, other = (last_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert one["global_step"] == other["global_step"] == 6
    assert one["state_dict"].keys() == other["state_dict"].keys()
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    moments = [end["optimizer_states"][0]["state"] for end in (one, other)]
    trained = [name for name in one["state_dict"] if name.startswith("potential.") and name.endswith(("left", "right"))]
    assert len(moments[0]) == len(trained)
    for first, second in zip(moments[0].values(), moments[1].values(), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_adapters_compile(monkeypatch):
    """Every gradient of a loss on forces through compiled code, on sizes it was not compiled for."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    # Few operations, which take the compiler less time; matrices by degree, by order, and plain ones are among them.
    options = {**OPTIONS, "random_gamma": False, "use_env_seed": False, "so3_readout": "none", "n_atten_head": 0}
    options |= {"ffn_so3_grid": False, "s2_activation": [False, False], "message_node_so3": False}
    potential = adapted(laws.noisy(SeZM.from_options(options, ["H", "O", "Cu"], dtype=torch.float64))).train()
    step = CompiledEvaluation(potential)
    trained = [parameter for parameter in potential.parameters() if parameter.requires_grad]
    for count in (5, 8):
        graph = laws.graph(potential, laws.cluster(potential.elements, count, seed=count))
        gradients = []
        for way in (step, lambda graph: evaluate(potential, graph, create_graph=True)):
            found = way(graph)
            total = found.energy.sum() + torch.linalg.vector_norm(found.forces, dim=-1).sum()
            gradients.append(torch.autograd.grad(total, trained, materialize_grads=True))
        norms = torch.stack([gradient.norm() for gradient in gradients[1]])
        assert (norms > 0).sum() > 0.8 * len(trained)
        for one, other in zip(*gradients, strict=True):  # float64; far smaller ones are differences of larger numbers
            assert (one - other).norm() <= 1e-9 * max(float(other.norm()), 1e-3 * float(norms.max()))
    torch._dynamo.reset()


def test_a_copy_keeps_what_parameters_say_to_the_optimiser():
    """Routes, rows and learning rates, of a model and of its adapters; a plain copy of a parameter forgets them."""
    potential = model(["H", "O"])
    lora.insert(potential, 2, 2.0)
    optim.set_rates(potential, {"trunk": 0.5, "types": 0.1})
    copied = copy.deepcopy(potential)
    rates = set()
    for one, other in zip(potential.parameters(), copied.parameters(), strict=True):
        assert optim.route(one) == optim.route(other)
        assert optim.matrix_shape(one) == optim.matrix_shape(other)
        assert optim.rate(one) == optim.rate(other)
        rates.add(optim.rate(other))
    assert rates == {1.0, 0.5, 0.1}
    assert parametrize.is_parametrized(copied.trunk.blocks[0].convolution.pre_mix)


def test_what_is_forgotten_is_judged_with_the_old_reference_energies(files, tmp_path, capsys):
    """By hand: the model before and after, energies without the change of reference energies; said, written, shown."""
    old = tmp_path / "old.xyz"
    start = mlff.load(files[2].partition("=")[2], device="cpu")
    frames = read(write_structures(old, 5, 3), ":")
    labels = [(atoms.get_potential_energy(), atoms.get_forces()) for atoms in frames]
    keys = [f"finetune.retention={old}", "training.steps=6", "training.learning_rate=0.01", "training.validate_every=0"]
    keys += ["trainer.logger=none", "trainer.accelerator=cpu", "training.ema=0.5", f"output={tmp_path / 'r'}"]
    assert cli.main(["finetune", *files, *keys]) == 0
    end = mlff.load(tmp_path / "r" / "model.safetensors", device="cpu")
    with open(tmp_path / "r" / "retention.csv", newline="") as file:
        rows = {(row["group"], row["metric"]): row["value"] for row in csv.DictReader(file)}
    end.reference_energies.copy_(start.reference_energies)
    for name, potential in (("as loaded", start), ("fine-tuned", end)):
        found = mlff.predict(potential, frames, device="cpu")
        off = [(p.energy - label[0]) / len(p.forces) for p, label in zip(found, labels, strict=True)]
        assert float(rows[name, "energy_mae_per_atom"]) == pytest.approx(np.abs(off).mean(), rel=1e-5)
        forces = np.concatenate([p.forces - label[1] for p, label in zip(found, labels, strict=True)])
        assert float(rows[name, "forces_mae"]) == pytest.approx(np.abs(forces).mean(), rel=1e-4)
    assert rows["as loaded", "forces_mae"] != rows["fine-tuned", "forces_mae"]
    assert f"What the model still knows: structures of {old}; energies with the reference" in capsys.readouterr().out
    assert "What the model still knows" in (tmp_path / "r" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({}, 120),
        ({"data.train": "mine.xyz"}, 120),
        ({"finetune.retention": "none"}, None),
        ({"finetune.retention": str(presets.data_path("acetylcysteine.h5")) + "::valid"}, 100),
        ({"weights": "mine.safetensors"}, None),
        ({"data.train": str(presets.data_path("molecules.h5")) + "::train"}, None),
        ({"data.valid": str(presets.data_path("molecules.h5").parent)}, None),
        ({"preset": "plus"}, None),
    ],
)
def test_which_old_structures_are_judged(keys, count):
    """Those of the preset, unless others are named, the weights are others, or they are what is trained on."""
    config = make_config({"preset": "mini", **keys})
    kept = open_kept(config, 6.0, (1, 6, 7, 8, 9, 15, 16, 17))
    assert (None if kept is None else len(kept)) == count
