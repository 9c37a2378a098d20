"""DPA4 (SeZM) models of deepmd-kit as models of this package.

Only names and shapes differ: both store every matrix as (in, out). `_RULES` says which of their tensors is which of
ours; a parameter of theirs that no rule claims is an error, never ignored.

Facts about the format: deepmd-kit 3.2.0, PyTorch backend.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlff.elements import SYMBOLS, atomic_numbers
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
    (r"head\.film\.first\.weight", r"fitting_net.case_film.case_layer1.weight"),
    (r"head\.film\.second\.weight", r"fitting_net.case_film.case_layer2.weight"),
    (r"head\.film\.projections\.(\d+)", r"fitting_net.case_film.projectors.\1"),
    (r"head\.film\.(scale|shift)_strength", r"fitting_net.case_film.adam_case_film_\1_strength_log"),
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
        raise ValueError("expected deepmd-kit's model section with type_map, descriptor and fitting_net")
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
        if section.pop("type", known[0]) not in known:
            raise ValueError(f"the {kind} of this file is not of the DPA4 (SeZM) family")
    if not isinstance(descriptor.get("edge_norm", True), bool):
        raise ValueError("edge_norm as a list belongs to a later form of the model, which is not represented here")
    if not isinstance(descriptor.get("env_exp", []), list | tuple):
        raise ValueError("env_exp as one number belongs to a later form of the model, which is not represented here")
    if descriptor.get("basis_type", "bessel") not in ("bessel", "gaussian"):
        raise ValueError(f"basis_type {descriptor['basis_type']!r} is not represented here")
    if config.get("lora"):
        raise ValueError("LoRA adapters must be merged before import")
    type_map = list(config["type_map"])
    values = {name: value for name, value in descriptor.items() if name not in _NOT_OURS}
    if "so2_layers" in values:
        layers = values.pop("so2_layers")
        values["mixing_layers"] = values.get("mixing_layers", 4) if layers is None else layers
    pairs = [*values.pop("exclude_types", []), *config.get("pair_exclude_types", [])]
    values["exclude_types"] = [[type_map[a], type_map[b]] for a, b in pairs]
    values["atom_exclude_types"] = [type_map[k] for k in config.get("atom_exclude_types", [])]
    for theirs, ours in (("neuron", "fitting_neuron"), ("activation_function", "fitting_activation")):
        if theirs in fitting:
            values[ours] = fitting[theirs]
    for name in ("bias_out", "numb_fparam", "numb_aparam", "dim_case_embd", "case_film_embd"):
        if name in fitting:
            values[name] = fitting[name]
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


def _fill(potential: SeZM, tensors: Mapping[str, Tensor], rows: Tensor, version: float) -> None:
    """Copy their tensors into our model."""
    used = set()
    own: dict[str, Tensor] = dict(potential.named_parameters())
    own |= {name: buffer for name, buffer in potential.named_buffers() if name.startswith("head.") and buffer.numel()}
    with torch.no_grad():
        for name, target in own.items():
            theirs = _their_name(name, potential.options)
            if theirs not in tensors:
                raise ValueError(f"the file has no tensor {theirs!r}, which its configuration asks for")
            used.add(theirs)
            values = tensors[theirs]
            if name in _TABLES_BY_ELEMENT:
                values = values[rows]
            if ".stack.norms." in name and name.endswith("scale"):
                values = values.movedim(0, 1)  # theirs has the focus first
            if values.numel() != target.numel():
                raise ValueError(f"tensor {theirs!r} has shape {tuple(values.shape)}; expected {tuple(target.shape)}")
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
