"""The configuration of a run: every key that a user may set, its type, its default and its unit.

A configuration is put together from four layers, each over the one before it:

    defaults below  <  the preset's YAML  <  config=PATH  <  key=value on the command line

and becomes frozen dataclasses, so that a misspelt key or a value of the wrong type stops here and not in the middle of
a run. `write` puts the whole of it into `config.yaml`, which runs again as `config=PATH`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlff import presets
from mlff.elements import SYMBOLS, atomic_number
from mlff.sezm.options import Options

Command = Literal["finetune", "train", "evaluate"]


def _key(default: Any, text: str, recipe: bool = True) -> Any:
    """A key with its default and the line that `--help` prints for it; what is no part of a recipe no preset states."""
    return field(default=default, metadata={"text": text, "recipe": recipe})


def _table(text: str) -> Any:
    """A key whose value is a table of names and numbers, by default empty; it belongs to a run, not to a recipe."""
    return field(default_factory=dict, metadata={"text": text, "recipe": False})


@dataclass(frozen=True)
class DataConfig:
    """Where structures come from, and under which names their labels stand."""

    train: tuple[str, ...] = _key((), "file, folder, glob or list of them; empty = the embedded data set")
    valid: tuple[str, ...] = _key((), "as data.train; empty = a part of data.train, see data.valid_fraction")
    test: tuple[str, ...] = _key((), "as data.train; empty = no test")
    energy_key: str | None = _key(None, "name of the total energy (eV); null = energy, or the ASE calculator's")
    forces_key: str | None = _key(None, "name of the forces (eV/Å); null = forces, or the ASE calculator's")
    stress_key: str | None = _key(None, "name of the stress, 6 or 9 numbers; null = stress, or the ASE calculator's")
    stress_unit: Literal["eV/A^3", "kB"] = _key("eV/A^3", "eV/A^3 in ASE's sign, or kB in VASP's sign")
    virial_key: str | None = _key(None, "name of the virial (eV) = -volume x stress; null = virial")
    charge_key: str | None = _key(None, "name of the total charge (e); null = charge")
    spin_key: str | None = _key(None, "name of the spin multiplicity 2S+1; null = spin")
    valid_fraction: float = _key(0.1, "share of data.train kept for validation when data.valid is empty")
    train_limit: int = _key(0, "structures of data.train used at most, evenly spaced; 0 = all")
    valid_limit: int = _key(0, "as data.train_limit, for validation")
    test_limit: int = _key(0, "as data.train_limit, for tests")
    workers: int = _key(0, "processes that prepare batches; 0 = the training process itself")


@dataclass(frozen=True)
class FinetuneConfig:
    """What changes when a trained model meets new data."""

    mode: str = _key("full", "full | head | lora | frozen:<rooms> (rooms: modules of the model, comma-separated)")
    rank: int | None = _key(None, "of the adapters of lora; null = a sixteenth of the model's channels, at least 2")
    alpha: float | None = _key(None, "adapters of lora are multiplied by alpha / rank; null = rank")
    e0: str = _key("refit", "reference energies: refit | keep | isolated | file:PATH (CSV with element,eV)")
    retention: str = _key(
        "auto", "old structures judged before and after, for what is forgotten: auto (the preset's) | none | PATH"
    )


@dataclass(frozen=True)
class ElementsConfig:
    """Which elements the model is to know besides its own."""

    add: tuple[str, ...] = _key((), "symbols of elements to add to a trained model")


@dataclass(frozen=True)
class LossConfig:
    """Weights of the loss; see `mlff.loss` for each term."""

    kind: Literal["mae", "mse", "huber"] = _key("mae", "mae (forces as vector norm) | mse | huber")
    huber_delta: float = _key(0.01, "where huber turns from square to linear, in the unit of each term")
    energy: float = _key(20.0, "weight of the energy error per atom, eV/atom")
    forces: float = _key(20.0, "weight of the force error, eV/Å")
    stress: float = _key(5.0, "weight of the error of the virial (-volume x stress) per atom, eV/atom")


@dataclass(frozen=True)
class TrainingConfig:
    """The recipe: how long, how large a batch, which optimiser, which schedule, which loss."""

    steps: int = _key(4000, "optimiser steps; 0 writes the starting model")
    batch_atoms: int = _key(128, "atoms in a batch, at most")
    batch_edges: int = _key(16000, "directed edges in a batch, at most; 0 = no limit")
    accumulate: int = _key(1, "batches for each optimiser step")
    optimizer: Literal["hybridmuon", "adamw"] = _key("hybridmuon", "hybridmuon | adamw")
    learning_rate: float = _key(1e-4, "highest learning rate")
    final_learning_rate: float = _key(1e-6, "learning rate at the last step")
    schedule: Literal["wsd", "cosine", "constant"] = _key("cosine", "wsd (stable, then cosine) | cosine | constant")
    decay_fraction: float = _key(0.65, "share of all steps in which wsd decays")
    warmup: float = _key(0.02, "steps of linear warm-up, or their share of all steps if below 1")
    warmup_start: float = _key(0.2, "first learning rate as a share of the highest")
    weight_decay: float = _key(1e-3, "decoupled decay of matrices, times learning rate, at each step")
    momentum: float = _key(0.95, "of matrices under hybridmuon")
    betas: tuple[float, float] = _key((0.9, 0.95), "decay of Adam's first and second moment")
    magma: bool = _key(True, "scale each matrix update by its agreement with the gradient")
    gradient_clip: float = _key(5.0, "largest L2 norm of all gradients together; 0 = off")
    ema: float = _key(0.999, "decay of the averaged weights, which are validated and written; 0 = off")
    loss: LossConfig = field(default_factory=LossConfig)
    validate_every: int = _key(500, "steps between validations; 0 = at the end only")
    early_stopping: int = _key(0, "validations without improvement before stopping; 0 = off")
    compile: Literal["auto", "false", "true", "graphs", "both"] = _key(
        "auto", "true: compile the step, for minutes | graphs: record it as CUDA graphs | both | auto: graphs on a GPU"
    )
    oversized: Literal["batch", "error"] = _key(
        "batch", "a structure above batch_atoms or batch_edges: batch (one of its own, said once) | error", recipe=False
    )
    rates: Mapping[str, float] = _table("factors on the learning rate by room of the model, as {types: 0.1, head: 2}")
    group_weights: Mapping[str, float] = _table("factors on the loss by group of structures, as {surface: 10}")


@dataclass(frozen=True)
class TrainerConfig:
    """The machine: devices, precision, logs."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = _key("auto", "auto | cpu | gpu | mps")
    devices: int = _key(1, "devices on each node")
    num_nodes: int = _key(1, "machines")
    strategy: Literal["auto", "ddp", "zero1", "fsdp"] = _key("auto", "auto | ddp | zero1 | fsdp")
    precision: Literal["fp32", "tf32", "bf16"] = _key(
        "fp32", "fp32 | tf32 (all matrix products on GPU) | bf16 (those of the blocks, in training)"
    )
    logger: Literal["tensorboard", "wandb", "csv", "none"] = _key("tensorboard", "tensorboard | wandb | csv | none")
    deterministic: bool = _key(False, "only algorithms that give the same bits each time")
    log_every: int = _key(50, "steps between lines of training errors in metrics.csv")


@dataclass(frozen=True)
class ModelConfig(Options):
    """The options of the model and the elements it is built for."""

    elements: tuple[str, ...] | None = None  # None: those of the weights, or of the training data

    def options(self) -> Options:
        """Return the model options without the elements."""
        return Options(**{item.name: getattr(self, item.name) for item in dataclasses.fields(Options)})


@dataclass(frozen=True)
class Config:
    """All keys of a run."""

    preset: str | None = _key(None, "nano | mini | neo | air | plus | pro | max | ultra")
    weights: str | None = _key(None, "file (also deepmd-kit's .pt) or public checkpoint to start from; or none")
    accept_license: str | None = _key(None, "cc-by-nc: you may use public weights that exclude commercial use")
    output: str | None = _key(None, "folder of the run; null = runs/<preset>-<date>-<n>")
    seed: int = _key(0, "of initial weights, split, order of batches")
    resume: str = _key("auto", "auto (continue what `output` holds) | never | path of a checkpoint")
    data: DataConfig = field(default_factory=DataConfig)
    elements: ElementsConfig = field(default_factory=ElementsConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    given: frozenset[str] = frozenset()  # keys that the user set, in a file or on the command line; not a key itself


@dataclass(frozen=True)
class About:
    """What `mlff presets` says of a preset; the section `about` of its YAML."""

    summary: str
    parameters: int
    trained_on: str | None
    kept_sample: str | None  # structures of the same kind that were not trained on, `file::split` of the packaged data
    errors: str | None
    licence: str
    weights: dict[str, str] | None


def read_config(arguments: Sequence[str], command: Command = "finetune") -> Config:
    """Return the configuration of a command line.

    Args:
        arguments: `key=value` words, as in `preset=pro data.train=mine.xyz training.steps=5000`; `config=PATH` names a
            YAML file of the same keys.
        command: `train` takes the preset's recipe for training from scratch, every other command that for fine-tuning.

    Raises:
        ValueError: a word is not `key=value`, a key is unknown (the nearest right one is named), a value is of the
        wrong
            type or out of range, or the key belongs to a part that this version does not have.
        FileNotFoundError: the file of `config=` is not there.
    """
    return make_config(_parse(arguments), command)


def make_config(values: Mapping[str, Any], command: Command = "finetune") -> Config:
    """Return the configuration of dotted keys and plain values, as `read_config` does of words.

    Raises:
        ValueError: a key is unknown, or a value is of the wrong type or out of range.
        FileNotFoundError: the file of the key `config` is not there.
    """
    line = dict(values)
    path = _take(line, "config")
    file = _read_yaml(path) if path is not None else {}
    given = {**_flat(file), **line}
    preset = given.get("preset")
    layers: dict[str, Any] = {}
    if preset is not None:
        layers.update(_flat(_preset_layer(_as(preset, str, "preset"), command)))
    elif command != "evaluate":
        layers.update(_flat({"training": _preset_layer("mini", command)["training"]}))
    layers.update(given)
    config = dataclasses.replace(from_flat(layers), given=frozenset(given))
    check(config, command)
    return config


def from_flat(values: Mapping[str, Any]) -> Config:
    """Return a configuration from dotted keys and plain values; keys that are absent keep their default.

    Raises:
        ValueError: a key is unknown or a value of the wrong type.
    """
    known = dict(_keys(Config))
    values = dict(values)
    for key in list(values):
        for table in _TABLES:  # training.rates.types=0.1 is one entry of training.rates
            if key.startswith(f"{table}."):
                entry = {key.removeprefix(f"{table}."): values.pop(key)}
                values[table] = {**(values.get(table) or {}), **entry}
    for key in values:
        if key not in known:
            raise ValueError(_unknown(key, list(known)))
    model = {key.removeprefix("model."): value for key, value in values.items() if key.startswith("model.")}
    elements = model.pop("elements", None)
    model_config = ModelConfig.from_mapping(model)
    if elements is not None:
        model_config = dataclasses.replace(model_config, elements=_elements(elements, "model.elements"))
    rest = {key: value for key, value in values.items() if not key.startswith("model.")}
    config = _build(Config, rest, "")
    added = tuple(_elements(config.elements.add, "elements.add"))
    return dataclasses.replace(config, model=model_config, elements=ElementsConfig(add=added))


def to_mapping(config: Config) -> dict[str, Any]:
    """Return every key as nested plain values, ready for YAML."""
    nested = {
        item.name: _plain(getattr(config, item.name)) for item in dataclasses.fields(Config) if item.name != "given"
    }
    symbols = config.model.elements
    nested["model"] = {**config.model.options().to_mapping(), "elements": None if symbols is None else list(symbols)}
    return nested


def write(config: Config, path: Path) -> None:
    """Write every key to a YAML file that runs again as `config=PATH`."""
    lines = ["# Every key of this run. Run it again: config=" + path.name]
    lines.append(
        yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    )
    path.write_text("\n".join(lines), encoding="utf-8")


def help_text(command: Command, preset: str | None = None) -> str:
    """Return the list of keys with their defaults and what they mean."""
    config = from_flat(_flat(_preset_layer(preset or "mini", command)))
    shown = preset or "mini"
    lines = [f"Keys, as key=value, with their defaults (training and model: those of preset={shown}):", ""]
    plain = _flat(to_mapping(config))
    for key, text in _keys(Config):
        value = (
            "null"
            if plain[key] is None
            else yaml.safe_dump(plain[key], default_flow_style=True, width=1000).split("\n")[0]
        )
        lines.append(f"  {key:32s} {value:22s} {text}".rstrip())
    lines += ["", "  config=PATH reads the same keys from a YAML file, under those of the command line."]
    return "\n".join(lines)


def continued(config: Config, folder: Path, command: Command) -> Config:
    """Return the configuration of a run that is continued: what its config.yaml says, under what the user says now.

    A key that the user does not give keeps the value it had when the run began, also where that was chosen by the
    program; only what names the machine's devices is never kept, since a run may go on on another machine.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        return config
    now = _flat(to_mapping(config))
    new = config.given | {f"trainer.{name}" for name in ("accelerator", "devices", "num_nodes", "strategy")}
    merged = {**_flat(_read_yaml(file)), **{key: now[key] for key in new}}
    merged["output"] = str(folder)
    result = dataclasses.replace(from_flat(merged), given=frozenset(merged))
    check(result, command)
    return result


def about(preset: str) -> About:
    """Return what a preset says of itself.

    Raises:
        ValueError: there is no such preset.
    """
    return About(**_preset(preset)["about"])


def preset_options(preset: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a preset's model options as plain values, and the elements it is for.

    Raises:
        ValueError: there is no such preset.
    """
    section = dict(_preset(preset)["model"])
    return {key: value for key, value in section.items() if key != "elements"}, _elements(
        section["elements"], "model.elements"
    )


def check_preset(preset: str) -> None:
    """Raise ValueError unless a preset's YAML states every key and no other, each with the right type."""
    content = _preset(preset)
    wanted = {
        "about": {item.name for item in dataclasses.fields(About)},
        "model": {item.name for item in dataclasses.fields(ModelConfig)},
        "training": {key.removeprefix("training.") for key, _ in _keys(Config) if key.startswith("training.")}
        - {item.name for item in dataclasses.fields(TrainingConfig) if not item.metadata.get("recipe", True)},
    }
    wanted["finetuning"] = wanted["training"]
    if set(content) != set(wanted):
        raise ValueError(f"preset {preset!r} must have the sections {', '.join(wanted)}; it has {', '.join(content)}")
    for section, names in wanted.items():
        stated = set(content[section]) if section in ("about", "model") else set(_flat(content[section]))
        if stated != names:
            missing, strange = sorted(names - stated), sorted(stated - names)
            raise ValueError(f"preset {preset!r}, section {section}: missing {missing}, unknown {strange}")
    About(**content["about"])
    options, _ = preset_options(preset)
    Options.from_mapping(options)
    for command in get_args(Command):
        check(from_flat({"preset": preset, **_flat(_preset_layer(preset, command))}), command)


def check(config: Config, command: Command) -> None:
    """Raise ValueError where values are out of range, contradict each other, or ask for what this version lacks."""
    if command != "evaluate" and config.preset is None and (config.weights is None or config.weights == "none"):
        raise ValueError(f"expected preset=NAME or weights=FILE; got neither. Presets: {', '.join(presets.names())}.")
    training, trainer = config.training, config.trainer
    for key in ("steps", "batch_edges", "weight_decay", "gradient_clip", "warmup", "validate_every", "early_stopping"):
        _demand(getattr(training, key) >= 0, f"training.{key}", "0 or more", getattr(training, key))
    for key in ("batch_atoms", "accumulate", "learning_rate"):
        _demand(getattr(training, key) > 0, f"training.{key}", "more than 0", getattr(training, key))
    for key in ("energy", "forces", "stress"):
        weight = getattr(training.loss, key)
        _demand(weight >= 0, f"training.loss.{key}", "0 or more", weight)
    _demand(training.loss.huber_delta > 0, "training.loss.huber_delta", "more than 0", training.loss.huber_delta)
    for key in ("ema", "momentum"):
        _demand(0 <= getattr(training, key) < 1, f"training.{key}", "from 0 to below 1", getattr(training, key))
    _demand(all(0 <= beta < 1 for beta in training.betas), "training.betas", "two from 0 to below 1", training.betas)
    _demand(0 < training.decay_fraction <= 1, "training.decay_fraction", "above 0, up to 1", training.decay_fraction)
    _demand(0 < training.warmup_start <= 1, "training.warmup_start", "above 0, up to 1", training.warmup_start)
    low, high = training.final_learning_rate, training.learning_rate
    _demand(0 <= low <= high, "training.final_learning_rate", f"0 to training.learning_rate = {high}", low)
    _demand(0 < config.data.valid_fraction < 1, "data.valid_fraction", "above 0, below 1", config.data.valid_fraction)
    for key in ("workers", "train_limit", "valid_limit", "test_limit"):
        _demand(getattr(config.data, key) >= 0, f"data.{key}", "0 or more", getattr(config.data, key))
    for key in ("devices", "num_nodes", "log_every"):
        _demand(getattr(trainer, key) > 0, f"trainer.{key}", "more than 0", getattr(trainer, key))
    _check_mode(config.finetune.mode)
    _check_e0(config.finetune.e0)
    for key in ("rank", "alpha"):
        value = getattr(config.finetune, key)
        _demand(value is None or value > 0, f"finetune.{key}", "more than 0, or null", value)
    if config.finetune.mode == "lora" and (command == "train" or config.weights == "none"):
        raise ValueError("finetune.mode=lora adapts a trained model; from scratch there is none. Leave it out.")
    for key, table in (("rates", training.rates), ("group_weights", training.group_weights)):
        for name, factor in table.items():
            _demand(0 <= factor < float("inf"), f"training.{key}.{name}", "0 or more", factor)
    if training.compile not in ("auto", "false") and trainer.strategy == "fsdp":
        raise ValueError(
            "training.compile does not go with trainer.strategy=fsdp, whose weights are in slices; use ddp or zero1."
        )
    if config.elements.add:
        _elements(config.elements.add, "elements.add")
        if command == "train" or config.weights == "none":
            raise ValueError("elements.add extends a trained model; from scratch use model.elements=[…].")
        if config.finetune.e0 == "keep":
            raise ValueError("finetune.e0=keep has no value for added elements; use refit, isolated or file:PATH.")
        if config.finetune.mode != "full" and trainer.strategy == "fsdp":
            raise ValueError(
                "elements.add with a frozen part does not go with trainer.strategy=fsdp; use ddp or zero1."
            )


def _check_mode(mode: str) -> None:
    name, _, rooms = mode.partition(":")
    if mode not in ("full", "head", "lora") and not (name == "frozen" and rooms):
        raise ValueError(f"finetune.mode must be full, head, lora or frozen:<rooms>; got {mode!r}.")


def _check_e0(e0: str) -> None:
    name, _, path = e0.partition(":")
    if e0 not in ("refit", "keep", "isolated") and not (name == "file" and path):
        raise ValueError(f"finetune.e0 must be refit, keep, isolated or file:PATH; got {e0!r}.")


def _demand(holds: bool, key: str, wanted: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{key} must be {wanted}; got {value}.")


def _parse(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of `key=value` words by dotted key, as YAML reads them."""
    values: dict[str, Any] = {}
    for word in arguments:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise ValueError(f"expected key=value, as in training.steps=5000; got {word!r}.")
        if key.startswith("-"):
            raise ValueError(f"write {key.lstrip('-')}={text} without dashes; got {word!r}.")
        if key in values:
            raise ValueError(f"{key} is given twice; give it once.")
        values[key] = _scalar(text)
    return values


def _scalar(text: str) -> Any:
    try:
        holder = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException):
        return text  # not YAML, as *.xyz is not: then it is what it looks like
    return holder["value"]  # type: ignore[index, call-overload]


def _read_yaml(path: Any) -> dict[str, Any]:
    file = Path(str(path))
    if not file.is_file():
        raise FileNotFoundError(f"config={path}: there is no such file.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"config={path} is not YAML: {str(error).splitlines()[0]}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"config={path} must hold keys and values; got {type(content).__name__}.")
    return content  # type: ignore[return-value]


def _preset(name: str) -> dict[str, Any]:
    if name not in presets.names():
        near = difflib.get_close_matches(name, presets.names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no preset {name!r}; the presets are {', '.join(presets.names())}.{hint}")
    with presets.open_yaml(name) as file:
        return OmegaConf.to_container(OmegaConf.create(file.read()))  # type: ignore[return-value, arg-type]


def _preset_layer(name: str, command: Command) -> dict[str, Any]:
    """The keys that a preset sets: its model without the elements, and the recipe that fits the command."""
    content = _preset(name)
    model = {key: value for key, value in content["model"].items() if key != "elements"}
    return {"model": model, "training": content["training" if command == "train" else "finetuning"]}


_TABLES = ("training.rates", "training.group_weights")
"""Keys whose value is itself a table, and so not a section."""


def _take(values: dict[str, Any], key: str) -> Any:
    return values.pop(key) if key in values else None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as dotted keys; a section is a mapping where a section is expected."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in _TABLES:
            flat.update(_flat(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _keys(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every dotted key below a dataclass, with its text."""
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if item.name == "given":
            continue
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _keys(hints[item.name], f"{prefix}{item.name}.")  # type: ignore[arg-type]
        elif cls is ModelConfig:
            yield f"{prefix}{item.name}", _MODEL_TEXT.get(item.name, "")
        else:
            yield f"{prefix}{item.name}", item.metadata["text"]


_MODEL_TEXT = {
    "elements": "symbols; null = those of the weights, or of the training data",
    "rcut": "cutoff, Å",
    "eps": "smooths lengths at zero distance, Å",
    "bridging_r_inner": "Å",
    "bridging_r_outer": "Å",
    "channels": "width",
    "lmax": "highest degree",
    "mmax": "highest order in the convolution",
    "n_blocks": "interaction blocks",
}


def _unknown(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:  # a right name in the wrong section, or in none
        near = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    hint = f" Did you mean {near[0]!r}?" if near else " --help lists all keys."
    return f"there is no key {key!r}.{hint}"


def _elements(value: Any, key: str) -> tuple[str, ...]:
    if value == "all" or value == ["all"]:
        return SYMBOLS[1:]
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} must be a list of symbols, as [H,C,O]; got {value!r}.")
    symbols = tuple("No" if item is False else str(item) for item in value)  # YAML reads nobelium as false
    for symbol in symbols:
        try:
            atomic_number(symbol)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    return symbols


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if hint is ModelConfig or item.name == "given":
            continue
        if dataclasses.is_dataclass(hint):
            below = {name: value for name, value in values.items() if name.startswith(f"{key}.")}
            arguments[item.name] = _build(hint, below, f"{key}.")  # type: ignore[arg-type]
        elif key in values:
            arguments[item.name] = _as(values[key], hint, key)
    return cls(**arguments)


def _as(value: Any, hint: Any, key: str) -> Any:
    """Return a value as the annotated type.

    Raises:
        ValueError: it is of another type; the message names key, expected type and value.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value is None and "none" in args:
            return "none"
        if isinstance(value, bool):  # as YAML reads the words
            value = str(value).lower()
        if value not in args:
            near = difflib.get_close_matches(str(value), args, n=1)
            hint_text = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{key} must be one of {', '.join(args)}; got {value!r}.{hint_text}")
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _as(value, next(arg for arg in args if arg is not type(None)), key)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping | None):
            raise ValueError(f"{key} must be a table of names and numbers, as {{name: 0.1}}; got {value!r}.")
        return {str(name): _as(number, args[1], f"{key}.{name}") for name, number in (value or {}).items()}
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if args[-1] is not Ellipsis and len(items) != len(args):
            raise ValueError(f"{key} must be a list of {len(args)} values; got {value!r}.")
        return tuple(_as(item, args[0], key) for item in items)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and not isinstance(value, bool):
        if isinstance(value, int):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is str:
        if isinstance(value, str | os.PathLike):
            return str(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    raise ValueError(f"{key} must be {_NAMES[hint]}; got {value!r}.")


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value
