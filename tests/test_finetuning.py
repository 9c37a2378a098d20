"""What a model learns beside what it knows, added elements and adapters, and what of it must stay as it was."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOptionalMemberAccess=false

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms

import mlff
from mlff import added_elements, cli, presets
from mlff.elements import group
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
