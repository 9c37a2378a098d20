"""DPA4 (SeZM) models of deepmd-kit as models of this package, and back.

Only names and shapes differ: both store every matrix as (in, out). `_RULES` says which of their tensors is which of
ours, `_theirs` which shape it has there; both directions read the same rules. A parameter of theirs that no rule
claims is an error, never ignored.

    load          a training checkpoint (.pt)         -> model
    from_state    configuration and arrays            -> model
    save          model                               -> a file that deepmd-kit opens

A checkpoint is a pickle. It is opened by torch's reader for weights, which makes tensors and plain values and calls
nothing else, so that a file from a stranger cannot run anything.

Facts about the format: deepmd-kit 3.2.0, PyTorch backend.
"""

from __future__ import annotations

import codecs
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlff.elements import SYMBOLS, atomic_numbers
from mlff.interop.deepmd_tables import tables
from mlff.sezm.options import Options
from mlff.sezm.potential import SeZM

_RULES: tuple[tuple[str, str], ...] = (
    (r"types\.weight", r"descriptor.type_embedding.adam_type_embedding"),
    (r"charge_spin\.(charge|spin)\.weight", r"descriptor.charge_spin_embedding.\1_embedding.adam_type_embedding"),
    (r"charge_spin\.mix\.weight", r"descriptor.charge_spin_embedding.mix_layer.matrix"),
    (r"charge_spin\.mix\.bias", r"descriptor.charge_spin_embedding.mix_layer.bias"),
    (r"spin\.first\.weight", r"descriptor.spin_embedding.mag_layer1.matrix"),
    (r"spin\.second\.weight", r"descriptor.spin_embedding.mag_layer2.matrix"),
    (r"spin\.own", r"descriptor.spin_embedding.adam_spin_vec_weight"),
    (r"spin\.neighbour", r"descriptor.spin_embedding.adam_spin_nbr_weight"),
    (r"basis\.frequencies", r"descriptor.radial_basis.adam_freqs"),
    (r"environment\.types\.weight", r"descriptor.env_seed_embedding.env_type_embed.adam_type_embedding"),
    (r"environment\.radial_first\.(weight|bias)", r"descriptor.env_seed_embedding.rbf_proj_layer1.\1"),
    (r"environment\.radial_second\.(weight|bias)", r"descriptor.env_seed_embedding.rbf_proj_layer2.\1"),
    (r"environment\.first\.(weight|bias)", r"descriptor.env_seed_embedding.g_layer1.\1"),
    (r"environment\.second\.(weight|bias)", r"descriptor.env_seed_embedding.g_layer2.\1"),
    (r"environment\.out\.weight", r"descriptor.env_seed_embedding.output_proj.weight"),
    (r"environment\.(scale|shift)_norm\.scale", r"descriptor.film_\1_norm.adam_scale"),
    (r"environment\.(scale|shift)_strength", r"descriptor.film_\1_strength_log"),
    (r"environment\.spin_scale", r"descriptor.env_seed_embedding.spin_scale"),
    (r"trunk\.blocks\.(\d+)\.(pre|post)_so2\.(\w+)", r"descriptor.blocks.\1.\2_so2_norm.\3"),
    (r"trunk\.blocks\.(\d+)\.(pre|post)_ffn\.(\d+)\.(\w+)", r"descriptor.blocks.\1.\2_ffn_norms.\3.\4"),
    (r"trunk\.blocks\.(\d+)\.scales\.(\d+)", r"descriptor.blocks.\1.adam_ffn_layer_scales.\2"),
    (r"trunk\.blocks\.(\d+)\.feedforwards\.(\d+)\.(.+)", r"descriptor.blocks.\1.ffns.\2.\3"),
    (r"trunk\.blocks\.(\d+)\.convolution\.(.+)", r"descriptor.blocks.\1.so2_conv.\2"),
    (r"trunk\.depth_so2\.(\d+)\.(.+)", r"descriptor.blocks.\1.<depth>_attn_res_so2.\2"),
    (r"trunk\.depth_ffn\.(\d+)\.(\d+)\.(.+)", r"descriptor.blocks.\1.<depth>_attn_res_ffns.\2.\3"),
    (r"trunk\.depth_last\.(.+)", r"descriptor.final_<depth>_attn_res.\1"),
    (r"head\.hidden\.(\d+)\.(\w+)", r"fitting_net.filter_layers.networks.0.hidden_layers.\1.linear.\2"),
    (r"head\.out\.(\w+)", r"fitting_net.filter_layers.networks.0.output_layer.\1"),
    (r"head\.frame_mean", r"fitting_net.fparam_avg"),
    (r"head\.frame_inverse_std", r"fitting_net.fparam_inv_std"),
    (r"head\.atom_mean", r"fitting_net.aparam_avg"),
    (r"head\.atom_inverse_std", r"fitting_net.aparam_inv_std"),
    (r"head\.case", r"fitting_net.case_embd"),
    (r"head\.film\.first\.weight", r"fitting_net.filter_layers.networks.0.case_film.case_layer1.weight"),
    (r"head\.film\.second\.weight", r"fitting_net.filter_layers.networks.0.case_film.case_layer2.weight"),
    (r"head\.film\.projections\.(\d+)", r"fitting_net.filter_layers.networks.0.case_film.projectors.\1"),
    (
        r"head\.film\.(scale|shift)_strength",
        r"fitting_net.filter_layers.networks.0.case_film.adam_case_film_\1_strength_log",
    ),
)
"""Our names to theirs, whole names; what a rule leaves inside a unit is renamed by `_PARTS`."""

_PARTS: tuple[tuple[str, str], ...] = (
    (r"\.pre_mix\.", ".pre_focus_mix."),
    (r"\.post_mix\.", ".post_focus_mix."),
    (r"\.radial_proj$", ".radial_hidden_proj.weight"),
    (r"\.competition\.norm\.", ".focus_compete_norm."),
    (r"\.competition\.weight$", ".adamw_focus_compete_w"),
    (r"\.competition\.bias$", ".focus_compete_bias"),
    (r"\.mixer\.", ".radial_degree_mixer."),
    (r"\.stack\.linears\.(\d+)\.bias$", r".so2_linears.\1.bias0"),
    (r"\.stack\.linears\.", ".so2_linears."),
    (r"\.stack\.activations\.", ".non_linearities."),
    (r"\.stack\.norms\.(\d+)\.bias$", r".so2_inter_norms.\1.bias0"),
    (r"\.stack\.norms\.", ".so2_inter_norms."),
    (r"\.stack\.scales\.", ".adam_so2_layer_scales."),
    (r"\.stack\.depth\.", ".so2_layer_attn_res."),
    (r"\.attention\.norm\.", ".attn_qk_norm."),
    (r"\.attention\.query\.", ".attn_q_proj."),
    (r"\.attention\.key\.", ".attn_k_proj."),
    (r"\.attention\.logit_weight$", ".adamw_attn_logit_w"),
    (r"\.attention\.null$", ".adamw_attn_z_bias_raw"),
    (r"\.attention\.gate_norm\.", ".attn_output_gate_norm."),
    (r"\.attention\.gate_weight$", ".adamw_attn_gate_w"),
    (r"\.focus_mix\.", ".attn_focus_mix."),
    (r"\.value_proj\.", ".attn_v_proj."),
    (r"so2_conv\.out_proj\.", "so2_conv.attn_o_proj."),
    (r"\.message_node\.", ".message_node_grid_product."),
    (r"\.node_wise\.", ".node_wise_grid_product."),
    (r"so2_conv\.node_cartesian\.", "so2_conv.node_cartesian_tp."),
    (r"so2_conv\.cartesian\.", "so2_conv.edge_cartesian_tp."),
    (r"\.first\.(weight|bias)$", r".so3_linear_1.\1"),
    (r"\.second\.(weight|bias)$", r".so3_linear_2.\1"),
    (r"\.(left_proj|right_proj|router|out_proj)$", r".grid_op.\1.weight"),
    (r"_attn_res(\S*)\.query$", r"_attn_res\1.adamw_pseudo_query"),
    (r"\.scale$", ".adam_scale"),
)

_DENSE = re.compile(r"(rbf_proj|g_layer|output_proj|mag_layer|mix_layer|case_layer|linear|output_layer)\w*\.weight$")
_IGNORED = re.compile(
    r"(^|\.)(min_nbor_dist|out_std|dens_force_rmsd|version_tensor|mean|stddev|_extra_state|expand_index|balance_weight"
    r"|m0_idx|pos_indices|neg_indices|degree_index_m|kernel_compact_index|kernel_dense_index|poly_\w+|atomic_numbers"
    r"|l1_perm|l1_sign_outer|bias_atom_e|out_bias)$|\.gie\.|\.gie_zonal_wigner_calc\.|\.wigner_calc\.|^dens_fitting_net\."
)
_TABLES_BY_ELEMENT = ("types.weight", "environment.types.weight", "spin.own", "spin.neighbour")
_VERSION = 1.2  # of the model, as deepmd-kit 3.2.0 writes it

# Numbers of numpy occur among the plain values of a checkpoint, as its learning rate.
_ALLOWED: list[Any] = [
    np.dtype,
    *{type(np.dtype(name)) for name in ("float32", "float64", "int32", "int64", "bool")},
    (np.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
    (np.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
    (codecs.encode, "_codecs.encode"),
]


@dataclass(frozen=True)
class Checkpoint:
    """One model of a deepmd-kit checkpoint, before anything is built."""

    config: dict[str, Any]  # deepmd-kit's model section
    state: dict[str, Tensor]  # by deepmd-kit's names
    averaged: bool  # whether parameters are the running average instead of where training stood

    @property
    def options(self) -> Options:
        """Our options of the model."""
        return options_from_config(self.config)

    @property
    def elements(self) -> tuple[str, ...]:
        """Symbols of the file's type_map."""
        return tuple(str(symbol) for symbol in self.config["type_map"])


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is an archive of torch.save, whatever its name; a frozen model counts too."""
    return zipfile.is_zipfile(path)


def load(
    path: str | os.PathLike[str],
    head: str | None = None,
    elements: Iterable[str | int] | None = None,
    dtype: torch.dtype | None = None,
    average: bool = True,
) -> SeZM:
    """Return the model of a deepmd-kit training checkpoint (.pt), on the CPU and in evaluation mode.

    Args:
        path: the file.
        head: which model of a multi-task file; a name or an alias, upper and lower case alike.
        elements: symbols or atomic numbers to choose and order out of the file's type_map, which is the default.
        dtype: of the network; by default that of the file. Reference energies are float64 always.
        average: take the running average of the parameters where the file has one (`ema`), as evaluation in training
            does. deepmd-kit's own predictions from such a file use the parameters where training stood: False gives
            those. A file without an average, as published ones are, gives the same for both.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is frozen, is cut short, would run code when opened, holds a model of another family or a
            form that this package cannot represent, or holds several models and `head` names none of them.
    """
    found = read(path, head, average)
    try:
        return from_state(found.config, found.state, elements, dtype).eval()
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def read(path: str | os.PathLike[str], head: str | None = None, average: bool = True) -> Checkpoint:
    """Return configuration and tensors of one model of a checkpoint; see `load` for arguments and errors."""
    content = _open(Path(path))
    model = content.get("model", content)
    try:
        config = dict(model["_extra_state"]["model_params"])
    except (KeyError, TypeError):
        raise ValueError(
            f"{os.fspath(path)} is not a training checkpoint of deepmd-kit: it has no section model_params. Its "
            "keys: " + ", ".join(map(str, list(content)[:8]))
        ) from None
    branch = None
    if "model_dict" in config:
        branch = _branch(config["model_dict"], head, os.fspath(path))
        config = _resolved(config["model_dict"][branch], config.get("shared_dict") or {})
    elif head not in (None, "Default"):
        raise ValueError(f"{os.fspath(path)} holds one model only; leave out head (got {head!r}).")
    prefix = f"model.{branch or 'Default'}."
    tensors = {name: values for name, values in model.items() if isinstance(values, Tensor) and name.startswith(prefix)}
    shadow = (content.get("ema") or {}).get("model") or {} if average else {}
    for name, values in shadow.items():
        inner = name if branch is None else name.removeprefix(f"{branch}.")
        if branch is None or inner != name:
            full = prefix + inner
            if full not in tensors or tensors[full].shape != values.shape:
                raise ValueError(
                    f"{os.fspath(path)}: its average of weights has a tensor {name!r} that its model lacks"
                )
            tensors[full] = values
    return Checkpoint(config, tensors, bool(shadow))


def save(potential: SeZM, path: str | os.PathLike[str]) -> Path:
    """Write a model as a checkpoint that deepmd-kit 3.2.0 opens, whole or not at all; return the path.

    The type_map has the model's elements in its order. Energies are those of the model to round-off, in deepmd-kit's
    way of computing them: its product grids (`lebedev_quadrature` false) are float32, which moves energies by 1e-7.
    The file holds tensors and plain values only.

    Raises:
        ValueError: the path does not end in .pt, by which deepmd-kit knows a checkpoint, or the options mean another
            model there.
    """
    path = Path(path)
    options = potential.options
    if options.n_focus > 1 and not options.atten_f_mix and (options.atten_v_proj or options.atten_o_proj):
        raise ValueError(
            "atten_v_proj and atten_o_proj mix all focus streams here but each alone in deepmd-kit; it cannot be told "
            "of this model unless atten_f_mix is on or n_focus is 1."
        )
    if (options.message_node_so3 or options.node_wise_so3) and 0 in (options.kmax, *options.degrees):
        raise ValueError("message_node_so3 and node_wise_so3 with kmax or a degree of 0 have other maps in deepmd-kit.")
    if path.suffix != ".pt":
        raise ValueError(f"deepmd-kit reads checkpoints named *.pt; got {path.name!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {f"model.Default.{name}": tensor for name, tensor in to_state(potential).items()}
    state["_extra_state"] = {"model_params": to_config(potential), "train_infos": {"lr": 0.0, "step": 0}}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        torch.save({"model": state}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def to_state(potential: SeZM) -> dict[str, Tensor]:
    """Return all tensors of a model by deepmd-kit's names below `model.<branch>`: the inverse of `from_state`."""
    tensors = {}
    for name, tensor in _own(potential).items():
        theirs = _their_name(name, potential.options)
        tensors[theirs] = _theirs(theirs, tensor.detach().cpu()).contiguous().clone()
    energies = potential.get_buffer("reference_energies").detach().cpu().to(torch.float64)
    count = len(energies)
    tensors |= {
        "descriptor.version_tensor": torch.tensor(_VERSION, dtype=torch.float64),
        "out_bias": energies.reshape(1, count, 1).clone(),
        "out_std": torch.ones(1, count, 1, dtype=torch.float64),
        "fitting_net.bias_atom_e": torch.zeros(count, 1, dtype=torch.float64),
    }
    tensors |= tables(potential.options, tensors, torch.tensor(potential.elements))
    return {
        name if name in ("min_nbor_dist", "inter_potential.atomic_numbers") else f"atomic_model.{name}": tensor
        for name, tensor in tensors.items()
    }


def to_config(potential: SeZM) -> dict[str, Any]:
    """Return deepmd-kit's model section of a model: the inverse of `options_from_config`, every key stated."""
    values = potential.options.to_mapping()
    symbols = [SYMBOLS[number] for number in potential.elements]
    place = {symbol: k for k, symbol in enumerate(symbols)}
    precision = str(potential.dtype).removeprefix("torch.")
    fitting: dict[str, Any] = {"type": "dpa4_ener", "precision": precision, "seed": None, "trainable": True}
    fitting |= {theirs: values.pop(ours) for ours, theirs in _FITTING.items()}
    if not fitting["bias_out"]:
        del fitting["bias_out"]  # the default, which checkpoints leave out
    magnetic = values.pop("use_spin")
    pairs = [[place[a], place[b]] for a, b in values.pop("exclude_types") if a in place and b in place]
    config: dict[str, Any] = {
        "type": "dpa4",
        "type_map": symbols,
        "fitting_net": fitting,
        "pair_exclude_types": pairs,
        "atom_exclude_types": [place[symbol] for symbol in values.pop("atom_exclude_types") if symbol in place],
        "bridging_method": values.pop("bridging_method"),
        "bridging_r_inner": values.pop("bridging_r_inner"),
        "bridging_r_outer": values.pop("bridging_r_outer"),
        "lora": None,
    }
    if magnetic:
        config["spin"] = {"scheme": "native", "use_spin": [symbol in magnetic for symbol in symbols]}
    fixed = {"type": "dpa4", "sel": 256, "precision": precision, "seed": None, "use_amp": True, "trainable": True}
    return {**config, "descriptor": {**fixed, **values, "exclude_types": pairs}}


_FITTING = {
    "fitting_neuron": "neuron",
    "fitting_activation": "activation_function",
    "bias_out": "bias_out",
    "numb_fparam": "numb_fparam",
    "numb_aparam": "numb_aparam",
    "dim_case_embd": "dim_case_embd",
    "case_film_embd": "case_film_embd",
}
"""Our options of the energy head to theirs of the fitting net."""


def _open(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {str(path)!r}")
    if path.suffix == ".pt2" or (zipfile.is_zipfile(path) and _is_frozen(path)):
        raise ValueError(
            f"{path} is a frozen model: compiled code, from which weights cannot be read. Give the training checkpoint "
            "(*.pt) that it was frozen from."
        )
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"an object {named[1]}" if named else "objects other than tensors and plain values"
        raise ValueError(
            f"{path} holds {what}, which could run code when it is opened; only tensors and plain values are read."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint of torch, or is cut short: {str(error).splitlines()[0]}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} holds {type(content).__name__}; expected a training checkpoint of deepmd-kit.")
    return dict(content)


def _is_frozen(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name or name.endswith((".so", ".cpp")) for name in archive.namelist())


def _branch(models: Mapping[str, Any], head: str | None, path: str) -> str:
    """Return the name of a model of a multi-task file; `head` may be an alias."""
    names = {str(name).lower(): str(name) for name in models}
    for name, section in models.items():
        for alias in section.get("model_branch_alias") or []:
            names.setdefault(str(alias).lower(), str(name))
    if head is not None and head.lower() in names:
        return names[head.lower()]
    asked = "say which with head" if head is None else f"there is no head {head!r}"
    raise ValueError(f"{path} holds several models; {asked}: {', '.join(map(str, models))}.")


def _resolved(section: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a branch with what it shares with others put in place of the name (`NAME` or `NAME:LEVEL`)."""
    config = dict(section)
    for key in ("type_map", "descriptor", "fitting_net"):
        if isinstance(config.get(key), str):
            name = config[key].partition(":")[0]
            if name not in shared:
                raise ValueError(f"the file's {key} is {config[key]!r}, which its shared_dict does not have")
            config[key] = shared[name]
    return config


def from_state(
    config_json: str | Mapping[str, Any],
    state: Mapping[str, np.ndarray | Tensor],
    elements: Iterable[str | int] | None = None,
    dtype: torch.dtype | None = None,
) -> SeZM:
    """Build a model from deepmd-kit's `model` configuration and its tensors.

    `state` maps deepmd-kit's names (with or without the prefixes `model.<branch>.` and `atomic_model.`) to arrays.
    `elements` chooses and orders elements out of the file's own `type_map`, which is the default. The dtype is that
    of the tensors unless given.

    Raises:
        ValueError: the configuration uses a form that this package cannot represent, a tensor is missing or is left
            over, or a shape differs; each is named.
    """
    config = json.loads(config_json) if isinstance(config_json, str) else dict(config_json)
    if "descriptor" not in config:
        raise ValueError(
            f"a model of type {config.get('type', 'unknown')!r} is not represented here; expected deepmd-kit's model "
            "section with type_map, descriptor and fitting_net"
        )
    type_map = [str(symbol) for symbol in config["type_map"]]
    wanted = atomic_numbers(type_map if elements is None else elements)
    rows = []
    for number in wanted:
        if SYMBOLS[number] not in type_map:
            raise ValueError(f"the file knows {', '.join(type_map)}; {SYMBOLS[number]} was asked for")
        rows.append(type_map.index(SYMBOLS[number]))
    tensors = _without_prefix(state)
    options = options_from_config(config)
    floating = [tensor.dtype for name, tensor in tensors.items() if "type_embedding" in name]
    potential = SeZM(options, wanted, dtype=dtype or floating[0])
    version = float(tensors.get("descriptor.version_tensor", torch.tensor(1.0)))
    if version < 1.1:
        raise ValueError(f"the file holds a SeZM of version {version}; this package represents versions 1.1 and 1.2")
    _fill(potential, tensors, torch.tensor(rows), version)
    return potential


def options_from_config(config: Mapping[str, Any]) -> Options:
    """Return our options for deepmd-kit's `model` section.

    Raises:
        ValueError: the section uses a form that this package cannot represent.
    """
    descriptor, fitting = dict(config["descriptor"]), dict(config.get("fitting_net", {}))
    for kind, section, known in (
        ("descriptor", descriptor, ("dpa4", "sezm", "SeZM", "DPA4")),
        ("fitting_net", fitting, ("dpa4_ener", "sezm_ener", "ener")),
    ):
        if (type_ := section.pop("type", known[0])) not in known:
            raise ValueError(f"the {kind} of this file is {type_!r}, not of the DPA4 (SeZM) family")
    if not isinstance(descriptor.get("edge_norm", True), bool):
        raise ValueError("edge_norm as a list belongs to a later form of the model, which is not represented here")
    if not isinstance(descriptor.get("env_exp", []), list | tuple):
        raise ValueError("env_exp as one number belongs to a later form of the model, which is not represented here")
    if descriptor.get("basis_type", "bessel") not in ("bessel", "gaussian"):
        raise ValueError(f"basis_type {descriptor['basis_type']!r} is not represented here")
    if config.get("lora"):
        raise ValueError(
            "LoRA adapters must be merged before import; deepmd-kit writes its best checkpoints and averages merged"
        )
    if fitting.get("use_aparam_as_mask"):
        raise ValueError("use_aparam_as_mask is not represented here")
    type_map = list(config["type_map"])
    values = {name: value for name, value in descriptor.items() if name not in _NOT_OURS}
    if "so2_layers" in values:
        layers = values.pop("so2_layers")
        values["mixing_layers"] = values.get("mixing_layers", 4) if layers is None else layers
    pairs = [*values.pop("exclude_types", []), *config.get("pair_exclude_types", [])]  # either or both, alike
    values["exclude_types"] = [[type_map[a], type_map[b]] for a, b in dict.fromkeys(map(tuple, pairs))]
    values["atom_exclude_types"] = [type_map[k] for k in config.get("atom_exclude_types", [])]
    values |= {ours: fitting[theirs] for ours, theirs in _FITTING.items() if theirs in fitting}
    values["bridging_method"] = str(config.get("bridging_method", "none") or "none").lower()
    for name in ("bridging_r_inner", "bridging_r_outer"):
        if name in config:
            values[name] = config[name]
    spin = config.get("spin") or {}
    if spin:
        if spin.get("scheme") != "native":
            raise ValueError(f"spin scheme {spin.get('scheme')!r} is not represented here; only 'native' is")
        flags = spin["use_spin"]
        values["use_spin"] = [symbol for symbol, flag in zip(type_map, flags, strict=True) if flag]
    return Options.from_mapping(values)


_NOT_OURS = frozenset(
    {"precision", "seed", "sel", "use_amp", "trainable", "type_map", "ntypes", "use_spin", "use_econf_tebd"}
)


def _without_prefix(state: Mapping[str, np.ndarray | Tensor]) -> dict[str, Tensor]:
    """Return tensors by names below `atomic_model`."""
    tensors = {}
    for name, values in state.items():
        if name.endswith("_extra_state"):
            continue
        short = re.sub(r"^model\.[^.]+\.", "", name)
        short = short.removeprefix("atomic_model.")
        tensors[short] = values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values))
    return tensors


def _their_name(ours: str, options: Options) -> str:
    """Return deepmd-kit's name (below `atomic_model`) of one of our tensors."""
    radial = re.fullmatch(r"radial\.(layers|norms|last)\.?(\d*)\.(\w+)", ours)
    if radial:
        step = 3 if options.edge_norm else 2
        kind, index = radial[1], int(radial[2] or len(options.radial_mlp))
        place = step * index + (1 if kind == "norms" else 0)
        return f"descriptor.radial_embedding.net.{place}.{'adam_scale' if kind == 'norms' else 'matrix'}"
    readout = re.fullmatch(r"readout\.layers\.(\d+)\.(.+)", ours)
    if readout:
        last = int(readout[1]) == options.readout_layers - 1
        theirs = f"descriptor.{'output_ffn' if last else 'readout_pre_layers.' + readout[1]}.{readout[2]}"
    else:
        matches = [re.sub(f"^{pattern}$", name, ours) for pattern, name in _RULES if re.fullmatch(pattern, ours)]
        assert len(matches) == 1, ours
        theirs = matches[0].replace("<depth>", "full" if options.full_attn_res != "none" else "block")
    for pattern, name in _PARTS:
        theirs = re.sub(pattern, name, theirs)
    if "so2" not in theirs and _DENSE.search(theirs) and "so3_linear" not in theirs and "gate_linear" not in theirs:
        theirs = re.sub(r"weight$", "matrix", theirs)
    return theirs


def _own(potential: SeZM) -> dict[str, Tensor]:
    """Return our tensors that have a counterpart of another name: parameters, and the constants of the head."""
    buffers = {
        name: buffer for name, buffer in potential.named_buffers() if name.startswith("head.") and buffer.numel()
    }
    return dict(potential.named_parameters()) | buffers


def _theirs(name: str, tensor: Tensor) -> Tensor:
    """Return one of our tensors, called `name` by deepmd-kit, in the shape that it has there.

    Axes of length one differ, focus streams stand apart from what follows them, and element tables end in a row of
    zeros for padding.
    """
    if name.endswith("adam_type_embedding") and "charge_spin" not in name:
        return torch.cat((tensor, tensor.new_zeros(1, tensor.shape[1])))
    if re.search(r"so2_inter_norms\.\d+\.adam_scale$", name):
        return tensor.movedim(1, 0)  # focus first
    if re.search(r"_(so2_norm|ffn_norms\.\d+)\.adam_scale$", name):
        return tensor.unsqueeze(1)
    if re.search(r"(adam_freqs|film_\w+_norm\.adam_scale|key_norm\.adam_scale|_norms?(\.\d+)?\.bias)$", name):
        return tensor.unsqueeze(0)
    if re.search(r"(gate_linear|scalar_gate|attn_[qk]_proj|so2_linears\.\d+)\.(weight\w*(\.\d+)?|bias0?)$", name):
        return tensor.flatten(-2)
    return tensor


def _fill(potential: SeZM, tensors: Mapping[str, Tensor], rows: Tensor, version: float) -> None:
    """Copy their tensors into our model."""
    used = set()
    with torch.no_grad():
        for name, target in _own(potential).items():
            theirs = _their_name(name, potential.options)
            if theirs not in tensors:
                raise ValueError(f"the file has no tensor {theirs!r}, which its configuration asks for")
            used.add(theirs)
            values = tensors[theirs]
            if name in _TABLES_BY_ELEMENT:
                values = values[rows]
                expected = tuple(target.shape)
            else:
                expected = tuple(_theirs(theirs, target).shape)
            if tuple(values.shape) != expected:
                raise ValueError(f"tensor {theirs!r} has shape {tuple(values.shape)}; expected {expected}")
            if ".stack.norms." in name and name.endswith("scale"):
                values = values.movedim(0, 1)  # theirs has the focus first
            target.copy_(values.reshape(target.shape))
        if potential.environment is not None and potential.environment.spin_scale is not None and version < 1.2:
            potential.environment.spin_scale.square_()  # version 1.1 scales the spin rows, not their square
        energies = tensors["out_bias"][0, :, 0]
        if "fitting_net.bias_atom_e" in tensors:
            energies = energies + tensors["fitting_net.bias_atom_e"].reshape(-1)
        potential.get_buffer("reference_energies").copy_(energies[rows])
    left = sorted(name for name in tensors if name not in used and not _IGNORED.search(name))
    if left:
        raise ValueError(f"the file holds tensors that this package does not know: {', '.join(left[:5])}")
