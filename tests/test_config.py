"""The configuration: layers, types, and the words of its errors."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from mlff import presets
from mlff.config import (
    Config,
    about,
    check_preset,
    continued,
    help_text,
    make_config,
    preset_options,
    read_config,
    to_mapping,
    write,
)


@pytest.mark.parametrize("name", presets.names())
def test_presets_are_complete(name):
    """No key missing, none unknown, each of the right type, for every command."""
    check_preset(name)
    assert about(name).parameters > 0
    options, elements = preset_options(name)
    assert options["rcut"] == 6.0 and elements[0] == "H"


def test_a_preset_with_a_missing_key_is_named(monkeypatch):
    import io

    text = presets.open_yaml("mini").read().replace("  magma: true", "  magmas: true")
    monkeypatch.setattr(presets, "open_yaml", lambda name: io.StringIO(text))
    with pytest.raises(ValueError, match=r"section training: missing \['magma'\], unknown \['magmas'\]"):
        check_preset("mini")


def test_layers_lie_over_each_other(tmp_path):
    """Defaults, preset, file, command line: the later wins."""
    file = tmp_path / "mine.yaml"
    file.write_text("training: {steps: 7, batch_atoms: 9, loss: {forces: 3}}\nseed: 4\n")
    config = read_config(["preset=pro", f"config={file}", "training.steps=11"], "train")
    assert config.training.steps == 11
    assert config.training.batch_atoms == 9
    assert config.training.loss.forces == 3.0
    assert config.training.loss.energy == 20.0
    assert config.training.learning_rate == 5e-4  # pro's recipe from scratch
    assert config.model.channels == 64
    assert config.seed == 4
    assert config.given == {"preset", "training.steps", "training.batch_atoms", "training.loss.forces", "seed"}


def test_finetuning_has_its_own_recipe():
    assert read_config(["preset=mini"], "finetune").training.learning_rate == 1e-4
    assert read_config(["preset=mini"], "train").training.learning_rate == 4.5e-4


def test_values_as_people_type_them():
    config = read_config(
        [
            "preset=mini",
            "data.train=[a.xyz,b/*.xyz]",
            "data.valid=*.xyz",
            "training.learning_rate=1e-3",
            "training.steps=5e3",
            "training.warmup=10",
            "weights=none",
            "output=null",
            "model.elements=[H,N,O,No]",
            "finetune.mode=frozen:types,radial",
            "training.betas=[0.9,0.99]",
        ]
    )
    assert config.data.train == ("a.xyz", "b/*.xyz")
    assert config.data.valid == ("*.xyz",)
    assert config.training.learning_rate == 1e-3
    assert config.training.steps == 5000 and isinstance(config.training.steps, int)
    assert config.training.warmup == 10.0
    assert config.weights == "none" and config.output is None
    assert config.model.elements == ("H", "N", "O", "No")
    assert config.finetune.mode == "frozen:types,radial"
    assert config.training.betas == (0.9, 0.99)


def test_the_written_configuration_runs_again(tmp_path):
    first = read_config(["preset=neo", "data.train=x.xyz", "training.steps=3", "model.elements=[O,H]"], "train")
    write(first, tmp_path / "config.yaml")
    again = read_config([f"config={tmp_path / 'config.yaml'}"], "finetune")
    assert to_mapping(again) == to_mapping(first)
    assert dataclasses.replace(again, given=frozenset()) == dataclasses.replace(first, given=frozenset())
    assert "given" not in yaml.safe_load((tmp_path / "config.yaml").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.stpes=5"], "no key 'training.stpes'. Did you mean 'training.steps'?"),
        (["steps=5"], "no key 'steps'. Did you mean 'training.steps'?"),
        (["data.trian=x"], "Did you mean 'data.train'?"),
        (["training.steps=many"], "training.steps must be a whole number; got 'many'."),
        (["training.steps=1.5"], "training.steps must be a whole number; got 1.5."),
        (["training.learning_rate=fast"], "training.learning_rate must be a number; got 'fast'."),
        (["training.magma=3"], "training.magma must be true or false; got 3."),
        (["training.optimizer=sgd"], "training.optimizer must be one of hybridmuon, adamw; got 'sgd'."),
        (["training.optimizer=hybrid_muon"], "Did you mean 'hybridmuon'?"),
        (["training.betas=[0.9]"], "training.betas must be a list of 2 values; got [0.9]."),
        (["model.rcut=six"], "model option rcut must be float; got 'six'"),
        (["model.elements=[H,Oo]"], "model.elements: expected the symbol of an element, H to Og; got 'Oo'."),
        (["training.steps=-1"], "training.steps must be 0 or more; got -1."),
        (["training.ema=1"], "training.ema must be from 0 to below 1; got 1.0."),
        (["training.final_learning_rate=1"], "training.final_learning_rate must be 0 to training.learning_rate"),
        (["training.steps=5", "training.steps=6"], "training.steps is given twice"),
        (["--training.steps=5"], "write training.steps=5 without dashes"),
        (["mine.xyz"], "expected key=value, as in training.steps=5000; got 'mine.xyz'."),
        (["finetune.mode=lora:4"], "finetune.mode must be full, head, lora or frozen:<rooms>; got 'lora:4'."),
        (["finetune.mode=lora", "finetune.rank=0"], "finetune.rank must be more than 0, or null; got 0."),
        (["finetune.mode=half"], "finetune.mode must be full, head, lora or frozen:<rooms>; got 'half'."),
        (["finetune.e0=guess"], "finetune.e0 must be refit, keep, isolated or file:PATH; got 'guess'."),
        (["trainer.strategy=zero"], "trainer.strategy must be one of auto, ddp, zero1, fsdp; got 'zero'."),
        (["trainer.devices=0"], "trainer.devices must be more than 0; got 0."),
        (["training.rates=0.1"], "training.rates must be a table of names and numbers, as {name: 0.1}; got 0.1."),
        (["training.rates={types: slow}"], "training.rates.types must be a number; got 'slow'."),
        (["training.rates.types=-1"], "training.rates.types must be 0 or more; got -1.0."),
        (["training.oversized=drop"], "training.oversized must be one of batch, error; got 'drop'."),
        (["training.compile=fast"], "training.compile must be one of auto, false, true, graphs, both; got 'fast'."),
        (["training.compile=true", "trainer.strategy=fsdp"], "training.compile does not go with trainer.strategy=fsdp"),
        (
            ["finetune.mode=lora", "weights=none"],
            "finetune.mode=lora adapts a trained model; from scratch there is none",
        ),
        (["elements.add=[Cuu]"], "elements.add: expected the symbol of an element, H to Og; got 'Cuu'."),
        (["elements.add=[Cu]", "finetune.e0=keep"], "finetune.e0=keep has no value for added elements"),
        (["elements.add=[Cu]", "weights=none"], "elements.add extends a trained model"),
        (["preset=mni"], "there is no preset 'mni'"),
        (["config=nowhere.yaml"], "config=nowhere.yaml: there is no such file."),
    ],
)
def test_mistakes_are_answered_in_one_sentence(words, message):
    start = [] if words[0].startswith("preset") else ["preset=mini"]
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        read_config(start + words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_neither_preset_nor_weights():
    with pytest.raises(ValueError, match=r"expected preset=NAME or weights=FILE; got neither. Presets: nano, mini"):
        read_config(["data.train=x.xyz"])


def test_a_file_that_is_not_yaml(tmp_path):
    (tmp_path / "bad.yaml").write_text("training: [1, 2")
    with pytest.raises(ValueError, match="is not YAML"):
        read_config(["preset=mini", f"config={tmp_path / 'bad.yaml'}"])


def test_tables_in_every_layer(tmp_path):
    """A table of names is one value, whether it stands in a file, on the line in one word or entry by entry."""
    file = tmp_path / "mine.yaml"
    file.write_text("training: {rates: {types: 0.1, trunk.blocks: 2}}\n")
    config = read_config(["preset=mini", f"config={file}", "training.group_weights={bulk: 3, slab 2: 0.5}"])
    assert config.training.rates == {"types": 0.1, "trunk.blocks": 2.0}
    assert config.training.group_weights == {"bulk": 3.0, "slab 2": 0.5}
    write(config, tmp_path / "config.yaml")
    again = read_config([f"config={tmp_path / 'config.yaml'}", "training.rates.head=5"])
    assert again.training.rates == {"types": 0.1, "trunk.blocks": 2.0, "head": 5.0}
    assert again.training.group_weights == config.training.group_weights
    assert "training.rates" in help_text("finetune", "mini")


def test_help_lists_every_key_with_its_default():
    text = help_text("finetune", "mini")
    for key, default in (("training.steps", "4000"), ("data.energy_key", "null"), ("model.rcut", "6.0"), ("seed", "0")):
        line = next(line for line in text.splitlines() if line.split()[:1] == [key])
        assert line.split()[1] == default
    assert "eV/Å" in text and "Å" in text.split("model.rcut")[1].splitlines()[0]


def test_defaults_are_valid():
    assert Config().training.steps > 0


def test_a_continued_run_takes_its_devices_from_the_machine_it_is_on(tmp_path):
    """R-P2: begun on a GPU, continued where there is none; all else is as it was."""
    begun = make_config({"preset": "nano", "trainer.accelerator": "gpu", "training.steps": 7}, "train")
    write(begun, tmp_path / "config.yaml")
    later = continued(make_config({"preset": "nano"}, "train"), tmp_path, "train")
    assert later.trainer.accelerator == "auto"
    assert later.training.steps == 7
