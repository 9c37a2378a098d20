"""Which launches a preset's kernels get on a GPU that need not be there: the table of `mlff launches`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlff import presets
from mlff.graph import Graph
from mlff.kernels import (
    degree_mixer_triton,
    edge_frames_triton,
    gated_triton,
    silu_triton,
    swiglu_triton,
    unit_rms_triton,
)
from mlff.kernels.grid_pair_triton import Geometry
from mlff.kernels.launch import SHARED_MEMORY, Fit, fit_offline
from mlff.sezm.grid import Grid
from mlff.sezm.linear import GatedActivation
from mlff.sezm.norm import EquivariantRMSNorm
from mlff.sezm.potential import SeZM
from mlff.sezm.so2 import SO2Convolution

ORDERS = ("forward", "backward", "second backward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """One kernel at one geometry on one architecture; `fit` is None where plain PyTorch would run."""

    presets: tuple[str, ...]
    kernel: str
    geometry: str
    order: str
    dtype: str
    capability: int
    fit: Fit | None

    @property
    def limit(self) -> int:
        """Shared memory that a block may have, in bytes."""
        return SHARED_MEMORY[self.capability]


@torch.no_grad()
def grid_shapes(preset: str) -> list[dict[str, Any]]:
    """Return what a preset's grids are called with, each shape once: arguments of `geometry_of` without the dtype.

    They are read off a run of the model on two atoms, so that nothing here has to know how the model uses its grids.
    """
    model = SeZM.from_preset(preset, ["H"])
    found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def look(module: Grid, inputs: tuple[Tensor, ...]) -> None:
        focus, width = inputs[0].shape[2:]
        projector = tuple(module.get_buffer("to_grid").shape)
        small, factors = None, module.factors()
        if factors is not None:
            small = (*factors.rounded.shape, len(factors.slots))
        shape = {
            "focus": focus,
            "channels": width // module.frames,
            "n_frames": module.frames,
            "projector": projector,
            "factors": small,
            "large": factors is not None and factors.large_for(torch.bfloat16) is not None,
        }
        found[tuple(shape.values())] = shape

    for module in model.modules():
        if isinstance(module, Grid):
            module.register_forward_pre_hook(look)
    model(_pair())
    return list(found.values())


def gated_shapes(preset: str) -> list[dict[str, int]]:
    """Return degree, order and width of the fused activations on a preset's edges, each once."""
    modules = SeZM.from_preset(preset, ["H"]).modules()
    fused = [module for module in modules if isinstance(module, GatedActivation) and module.fused]
    shapes = {(module.degree, min(module.order or 0, module.degree), module.channels) for module in fused}
    return [{"DEGREE": degree, "ORDER": order, "C": width} for degree, order, width in sorted(shapes)]


def edge_functions(preset: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return family, function and constants of what a preset's convolutions call, derivatives included, each once."""
    found = []
    for module in SeZM.from_preset(preset, ["H"]).modules():
        if not isinstance(module, SO2Convolution) or not module.fusible:
            continue
        assert module.attention is not None
        focus, width = module.focus, module.width
        heads = module.attention.heads * module.attention.norm.scale.shape[0]
        there = (module.degree, module.order, focus, width, False)
        back = (module.degree, module.order, heads, focus * width // heads, True)
        calls = [("gather", there), ("scatter", there), ("outer", there)]
        calls += [("scatter", back), ("gather", back), ("outer", back), ("share", back)]
        found += [("edge frames", name, edge_frames_triton.constants(name, *shape)) for name, shape in calls]
        if hasattr(module, "mixer") and module.mixer.channel_basis is not None:
            shape = (module.degree, module.order, focus, width, len(module.mixer.channel_basis))
            for name in degree_mixer_triton.KERNELS:
                found.append(("degree mixer", name, degree_mixer_triton.constants(name, *shape)))
    return [call for place, call in enumerate(found) if call not in found[:place]]


def _pair() -> Graph:
    """Two hydrogen atoms 1 Å apart."""
    ends = torch.tensor([0, 1])
    return Graph(
        positions=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64),
        numbers=torch.tensor([1, 1]),
        structure=torch.tensor([0, 0]),
        senders=ends.flip(0),
        receivers=ends,
        shifts=torch.zeros(2, 3, dtype=torch.float64),
        cell=torch.zeros(1, 3, 3, dtype=torch.float64),
        pbc=torch.zeros(1, 3, dtype=torch.bool),
        charge=torch.zeros(1),
        spin=torch.zeros(1),
    )


def geometry_of(dtype: torch.dtype, large: bool, factors: Any, **shape: Any) -> Geometry:
    """Return the geometry of a call; `large`: whether bfloat16 takes large projectors though there are small ones."""
    return Geometry.of(dtype, factors=None if large and dtype == torch.bfloat16 else factors, **shape)


def rows(names: Sequence[str], capabilities: Sequence[int]) -> Iterator[Row]:
    """Yield a row for each kernel × geometry × order × dtype × architecture; equal geometries of presets share one."""
    yield from _grid_rows(names, capabilities)
    yield from _gated_rows(names, capabilities)
    yield from _edge_rows(names, capabilities)
    yield from _norm_rows(names, capabilities)
    yield from elementwise_rows(names, capabilities)


def elementwise_rows(names: Sequence[str], capabilities: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of the activations, whose kernels depend on no preset; at rows of 128 channels."""
    families = {
        "silu": silu_triton.KERNELS,
        "swiglu": swiglu_triton.KERNELS,
        "swiglu, packed": swiglu_triton.PACKED_KERNELS,
    }
    for family, kernels in families.items():
        for dtype_name, dtype in DTYPES.items():
            for order_name, kernel in zip(ORDERS, kernels, strict=True):
                arguments = [int if p.annotation_type else dtype for p in kernel.params if not p.is_constexpr]
                for capability in capabilities:
                    fit = fit_offline(kernel, arguments, {}, silu_triton.launches(128), capability)
                    yield Row(tuple(names), family, "rows of 128", order_name, dtype_name, capability, fit)


def _gated_rows(names: Sequence[str], capabilities: Sequence[int]) -> Iterator[Row]:
    users: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        for shape in gated_shapes(name):
            users.setdefault(tuple(shape.values()), []).append(name)
    for (degree, order, width), users_of in users.items():
        geometry = f"DEGREE={degree} ORDER={order} C={width}"
        for dtype_name, dtype in DTYPES.items():
            for place, order_name in enumerate(ORDERS):
                kernel = gated_triton.KERNELS[place]
                constants = gated_triton.constants(degree, order, *([True] if place == 0 else []))
                arguments = [int if p.annotation_type else dtype for p in kernel.params if not p.is_constexpr]
                for capability in capabilities:
                    fit = fit_offline(kernel, arguments, constants, gated_triton.launches(width), capability)
                    yield Row(tuple(users_of), "gated rows", geometry, order_name, dtype_name, capability, fit)


def _edge_rows(names: Sequence[str], capabilities: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of functions whose derivatives are one another, so that they have no order of their own."""
    users: list[tuple[tuple[str, str, dict[str, Any]], list[str]]] = []
    for name in names:
        for call in edge_functions(name):
            known = [presets_of for other, presets_of in users if other == call]
            if known:
                known[0].append(name)
            else:
                users.append((call, [name]))
    families: dict[str, Any] = {"edge frames": edge_frames_triton, "degree mixer": degree_mixer_triton}
    for (family, name, constants), users_of in users:
        kernels = families[family]
        geometry = " ".join(f"{key}={value}" for key, value in constants.items() if key != "UNIT")
        for dtype_name, dtype in DTYPES.items():
            known, tried = kernels.arguments(name, dtype), kernels.launches(name, constants["C"])
            for capability in capabilities:
                fit = fit_offline(kernels.KERNELS[name], known, constants, tried, capability)
                yield Row(tuple(users_of), f"{family}, {name}", geometry, "all", dtype_name, capability, fit)


def norm_shapes(preset: str) -> list[dict[str, Any]]:
    """Return the constants of the norms of all degrees of a preset, each once."""
    modules = SeZM.from_preset(preset, ["H"]).modules()
    norms = [module for module in modules if isinstance(module, EquivariantRMSNorm)]
    shapes = {(len(module.get_buffer("row_degrees")), module.scale.shape[-1], module.eps) for module in norms}
    return [unit_rms_triton.constants(*shape, centred=True, balanced=True) for shape in sorted(shapes)]


def _norm_rows(names: Sequence[str], capabilities: Sequence[int]) -> Iterator[Row]:
    users: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        for shape in norm_shapes(name):
            users.setdefault(tuple(shape.items()), []).append(name)
    for shape, users_of in users.items():
        constants = dict(shape)
        geometry = " ".join(f"{key}={value}" for key, value in shape if key not in ("CENTRED", "BALANCED"))
        tried = unit_rms_triton.launches(constants["R"], constants["C"])
        for dtype_name, dtype in DTYPES.items():
            for order, order_name in enumerate(ORDERS):
                known, kernel = unit_rms_triton.arguments(order, dtype), unit_rms_triton.KERNELS[order]
                for capability in capabilities:
                    fit = fit_offline(kernel, known, constants, tried, capability)
                    yield Row(tuple(users_of), "unit RMS", geometry, order_name, dtype_name, capability, fit)


def _grid_rows(names: Sequence[str], capabilities: Sequence[int]) -> Iterator[Row]:
    users: dict[tuple[Any, ...], list[str]] = {}
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in names:
        for shape in grid_shapes(name):
            key = tuple(shape.values())
            shapes[key] = shape
            users.setdefault(key, []).append(name)
    for key, shape in shapes.items():
        for dtype_name, dtype in DTYPES.items():
            geometry = geometry_of(dtype, **shape)
            constants = " ".join(f"{k}={v}" for k, v in geometry.constants if k != "SPLIT")
            for order, order_name in enumerate(ORDERS):
                for capability in capabilities:
                    yield Row(
                        presets=tuple(users[key]),
                        kernel=f"grid_pair, {geometry.form}",
                        geometry=constants,
                        order=order_name,
                        dtype=dtype_name,
                        capability=capability,
                        fit=geometry.fit_offline(order, capability),
                    )


HEADER = (
    "| presets | kernel | geometry | order | operands | arch | launch | shared memory, B | limit, B |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """Return a row of the table, in Markdown."""
    launch, shared = (str(row.fit.launch), str(row.fit.shared)) if row.fit else ("none fits: plain PyTorch", "-")
    names, arch = ", ".join(row.presets), f"sm_{row.capability}"
    cells = (names, row.kernel, row.geometry, row.order, row.dtype, arch, launch, shared, str(row.limit))
    return f"| {' | '.join(cells)} |"


def read_capabilities(text: str) -> list[int]:
    """Return 90 for sm_90, and so on for a list with commas; all that are known for an empty text.

    Raises:
        ValueError: an architecture is not known here.
    """
    known = {f"sm_{number}": number for number in SHARED_MEMORY}
    chosen = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"arch must be of {', '.join(known)}; got {word!r}.{hint}")
        chosen.append(known[word])
    return chosen or [80, 86, 89, 90, 100, 120]


def read_presets(text: str) -> list[str]:
    """Return the names of a list with commas; all presets for an empty text.

    Raises:
        ValueError: there is no such preset.
    """
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        presets.open_yaml(name).close()
    return names or list(presets.names())
