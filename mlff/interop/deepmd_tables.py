"""The index tables and constants that deepmd-kit keeps among the tensors of a DPA4 (SeZM) model.

They follow from the options and hold nothing that was trained. A reader of ours ignores them; deepmd-kit rebuilds them
for predictions, but asks for every one of them when it trains a file further. Rows are packed (l² + l + m) or m-major:

    m-major:  all (l, 0); then for m = 1, 2, …: all (l, -m), all (l, +m), each with l = m … L

Facts about the format: deepmd-kit 3.2.0, PyTorch backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mlff.sezm.options import Options


def tables(options: Options, tensors: Mapping[str, Tensor], atomic_numbers: Tensor) -> dict[str, Tensor]:
    """Return the tables that belong to a model's parameters, by deepmd-kit's names below `atomic_model`.

    Args:
        options: of the model.
        tensors: its parameters by the same kind of names; their shapes say where tables stand.
        atomic_numbers: of the elements, in the order of the file's type_map.
    """
    dtype = tensors["descriptor.type_embedding.adam_type_embedding"].dtype
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        unit, _, kind = name.rpartition(".")
        block = re.search(r"descriptor\.blocks\.(\d+)\.", name)
        degree, order = (options.degrees[int(block[1])], options.orders[int(block[1])]) if block else (0, 0)
        if re.search(r"_(so2_norm|ffn_norms\.\d+)\.adam_scale$", name):
            degrees = _packed(len(tensor) - 1)
            found[f"{unit}.expand_index"] = degrees
            found[f"{unit}.balance_weight"] = _balance(degrees, len(tensor), tensor.shape[-1], dtype)
        elif re.search(r"so2_inter_norms\.\d+\.adam_scale$", name):
            degrees = _m_major(degree, order)
            found[f"{unit}.degree_index_m"] = degrees
            found[f"{unit}.balance_weight"] = _balance(degrees, tensor.shape[1], tensor.shape[-1], dtype)
        elif kind == "weight" and _BY_DEGREE.search(unit):
            found[f"{unit}.expand_index"] = _packed(len(tensor) - 1)
        elif kind == "weight" and unit.endswith(".gate_linear"):
            degrees = _m_major(degree, order) if ".non_linearities." in unit else _packed(degree)
            if ".ffns." in unit:
                degrees = _packed(options.node_degrees[int(block[1])])  # type: ignore[index]
            found[f"{unit.removesuffix('.gate_linear')}.expand_index"] = degrees[1:] - 1
        elif kind == "weight_m0":
            found |= {f"{unit}.{key}": value for key, value in _orders(degree, order).items()}
        elif name.endswith("radial_degree_mixer.weight"):
            found |= {f"{unit}.{key}": value for key, value in _kernels(degree, order).items()}
    if options.lmax == 0:  # activations have no gates by which to find them
        none = torch.zeros(0, dtype=torch.int64)
        for block in range(len(options.degrees)):
            start = f"descriptor.blocks.{block}"
            stack = range(0 if options.s2_activation[0] else options.mixing_layers - 1)
            places = [f"so2_conv.non_linearities.{k}" for k in stack]
            if not (options.s2_activation[1] or options.ffn_so3_grid):
                places += [f"ffns.{k}.act" for k in range(options.ffn_blocks)]
            found = {f"{start}.{place}.expand_index": none for place in places} | found
    return found | _constants(options, dtype, atomic_numbers)


_BY_DEGREE = re.compile(
    r"\.(so3_linear_[12]|(pre|post)_focus_mix|attn_(focus_mix|v_proj|o_proj)|(edge|node)_cartesian_tp\.linears\.\d+)$"
)
"""Maps with one matrix for each degree."""


def _constants(options: Options, dtype: torch.dtype, atomic_numbers: Tensor) -> dict[str, Tensor]:
    """Return what stands once in a file."""
    permutation = torch.tensor([1, 2, 0])
    sign = torch.tensor([-1.0, -1.0, 1.0], dtype=dtype)
    found = {
        "min_nbor_dist": torch.tensor(-1.0, dtype=torch.float64),  # never measured
        "dens_force_rmsd": torch.tensor(1.0, dtype=torch.float64),
        "descriptor.mean": torch.zeros(0, dtype=dtype),
        "descriptor.stddev": torch.zeros(0, dtype=dtype),
    }
    calculators = ["wigner_calc"]
    if options.use_env_seed and options.first_degree:
        degrees = _packed(options.first_degree)
        found["descriptor.gie.non_scalar_row_index"] = torch.arange(1, len(degrees))
        found["descriptor.gie.zonal_m0_col_index_for_row"] = (degrees * (degrees + 1))[1:]
        found["descriptor.gie.radial_slot_index_for_row"] = degrees[1:] - 1
        calculators += ["gie_zonal_wigner_calc"] if options.extra_node_l else []
    for name in calculators:
        found[f"descriptor.{name}.l1_perm"] = permutation
        found[f"descriptor.{name}.l1_sign_outer"] = torch.outer(sign, sign)
    if options.so3_readout == "none":
        for layer in range(options.readout_layers):
            last = layer == options.readout_layers - 1
            place = "output_ffn" if last else f"readout_pre_layers.{layer}"
            found[f"descriptor.{place}.act.expand_index"] = torch.zeros(0, dtype=torch.int64)
    if options.bridging_method == "zbl":
        found["inter_potential.atomic_numbers"] = atomic_numbers.to(torch.float64)
    return found


def _packed(degree: int) -> Tensor:
    """Return the degree of each packed row."""
    degrees = torch.arange(degree + 1)
    return degrees.repeat_interleave(2 * degrees + 1)


def _m_major(degree: int, order: int) -> Tensor:
    """Return the degree of each m-major row."""
    rows = [*range(degree + 1)]
    for m in range(1, order + 1):
        rows += 2 * [*range(m, degree + 1)]
    return torch.tensor(rows)


def _balance(degrees: Tensor, n_degrees: int, channels: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of each row in a norm in which every degree counts the same."""
    rows = torch.bincount(degrees)[degrees]
    return 1 / (n_degrees * rows.to(dtype)) / channels


def _orders(degree: int, order: int) -> dict[str, Tensor]:
    """Return where the rows of m = 0, of all m > 0 and of all m < 0 stand in the m-major layout."""
    negative, positive, start = [], [], degree + 1
    for m in range(1, order + 1):
        count = degree - m + 1
        negative += range(start, start + count)
        positive += range(start + count, start + 2 * count)
        start += 2 * count
    return {
        "m0_idx": torch.arange(degree + 1),
        "neg_indices": torch.tensor(negative, dtype=torch.int64),
        "pos_indices": torch.tensor(positive, dtype=torch.int64),
    }


def _kernels(degree: int, order: int) -> dict[str, Tensor]:
    """Return where the coefficients of the degree mixer go in the dense (row in, row out) matrix.

    The coefficients of one m serve -m and +m alike.
    """
    size = len(_m_major(degree, order))
    compact, dense, coefficient, start = [], [], 0, 0
    for m in range(order + 1):
        count = degree - m + 1
        for _ in range(1 if m == 0 else 2):
            for into in range(count):
                for out in range(count):
                    compact.append(coefficient + into * count + out)
                    dense.append((start + out) * size + start + into)
            start += count
        coefficient += count * count
    return {"kernel_compact_index": torch.tensor(compact), "kernel_dense_index": torch.tensor(dense)}
