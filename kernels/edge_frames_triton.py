"""Turning features into the frames of edges and back in Triton: gather, scatter, outer, share.

The formulas are those of edge_frames_reference.py. A program owns a block of edges and channels of one stream, or, in
`scatter`, one atom, one degree and such channels; it walks over degrees and rows, which are known when a kernel is
compiled. An atom's features are read where they lie, from the cache of the GPU: no table of neighbours is made.
"""

# Annotations are for Triton, and a call of a kernel's part has results that only Triton knows.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# ruff: noqa: RUF005  (Triton knows no starred items)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mlff.kernels import edge_frames_reference as reference
from mlff.kernels.gated_triton import place_of
from mlff.kernels.launch import Argument, Launch, choose, run, specialise, warn_reference
from mlff.kernels.silu_triton import require_device

# Constants are in capitals, as launch.py asks. Strides are counted in UNITs, so that the compiler knows that wide loads
# are possible.


@triton.jit
def numbers_before(l: tl.constexpr, ORDER: tl.constexpr):
    """How many numbers an edge's rotation has for degrees below l."""
    if l <= ORDER + 1:
        return l * (4 * l * l - 1) // 3
    else:
        return (ORDER + 1) * (4 * (ORDER + 1) * (ORDER + 1) - 1) // 3 + (2 * ORDER + 1) * (
            l * l - (ORDER + 1) * (ORDER + 1)
        )


@triton.jit
def block_row(k: tl.constexpr, l: tl.constexpr, ORDER: tl.constexpr):
    """Which row of the block of degree l belongs to the k-th of m' = 0, -1, +1, -2 and so on."""
    if l < ORDER:
        middle: tl.constexpr = l
    else:
        middle: tl.constexpr = ORDER
    if k % 2 == 1:
        return middle - (k + 1) // 2
    else:
        return middle + k // 2


@triton.jit
def of_edges(edges, blocks, C: tl.constexpr, FOCUS: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr):
    """Edges, stream and channels of this program, and which of them are there."""
    blocks = tl.cast(blocks, tl.int32)  # as programs are
    program = tl.program_id(0)
    block = program % blocks
    stream = (program // blocks) % FOCUS
    edge = (program // (blocks * FOCUS)).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    return edge[:, None], (edge < edges)[:, None], stream, channel[None, :], (channel < C)[None, :]


@triton.jit
def turn(source, row, there, factors, inside, l: tl.constexpr, ORDER: tl.constexpr, EDGES: tl.constexpr,
         CHANNELS: tl.constexpr):  # fmt: skip
    """The rows m' = 0, -1, +1, … of degree l in the frames of edges."""
    sums = ()
    for k in tl.static_range(2 * ORDER + 1):
        if l >= (k + 1) // 2:
            sums = sums + (tl.zeros((EDGES, CHANNELS), dtype=tl.float32),)
    for m in range(2 * l + 1):  # not unrolled: the compiler's time grows with the square of the loads
        value = tl.load(source + (l * l + m) * row, mask=there, other=0.0).to(tl.float32)
        news = ()
        for k in tl.static_range(2 * ORDER + 1):
            if l >= (k + 1) // 2:
                first = numbers_before(l, ORDER) + block_row(k, l, ORDER) * (2 * l + 1)
                news = news + (sums[k] + tl.load(factors + first + m, mask=inside, other=0.0).to(tl.float32) * value,)
        sums = news
    return sums


@specialise(aligned=("x", "out"))
def edge_gather(
    coefficients, x, weights, index, out,
    edges: tl.int64, blocks: tl.int64, coefficients_edge: tl.int64, x_atom: tl.int64, x_row: tl.int64,
    weights_edge: tl.int64, out_edge: tl.int64, out_row: tl.int64, out_stream: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr, WEIGHTED: tl.constexpr,
    UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the features of an atom in the frames of its edges."""
    edge, inside, stream, channel, known = of_edges(edges, blocks, C, FOCUS, EDGES, CHANNELS)
    there = inside & known
    atom = tl.load(index + edge, mask=inside, other=0)
    source = x + atom * (x_atom * UNIT) + stream * C + channel
    target = out + edge * (out_edge * UNIT) + stream * (out_stream * UNIT) + channel
    factors = coefficients + edge * coefficients_edge
    if WEIGHTED:
        weight = tl.load(weights + edge * weights_edge + stream, mask=inside, other=0.0).to(tl.float32)
    for l in tl.static_range(DEGREE + 1):
        turned = turn(source, x_row * UNIT, there, factors, inside, l, ORDER, EDGES, CHANNELS)
        for k in tl.static_range(2 * ORDER + 1):
            if l >= (k + 1) // 2:
                y = turned[k]
                if WEIGHTED:
                    y *= weight
                at = place_of(k, l, DEGREE) * (out_row * UNIT)
                tl.store(target + at, y.to(out.dtype.element_ty), mask=there)


@specialise(aligned=("y", "out"))
def edge_scatter(
    coefficients, y, weights, order, starts, out,
    atoms: tl.int64, blocks: tl.int64, coefficients_edge: tl.int64, y_edge: tl.int64, y_row: tl.int64,
    y_stream: tl.int64, weights_edge: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr, WEIGHTED: tl.constexpr,
    UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the sums over the edges of each atom of features that are turned back."""
    blocks = tl.cast(blocks, tl.int32)
    program = tl.program_id(0)
    channel = (program % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    stream = (program // blocks) % FOCUS
    degree = (program // (blocks * FOCUS)) % (DEGREE + 1)
    atom = (program // (blocks * FOCUS * (DEGREE + 1))).to(tl.int64)
    begin, end = tl.load(starts + atom), tl.load(starts + atom + 1)
    known = (channel < C)[None, :]
    target = out + (atom * ((DEGREE + 1) * (DEGREE + 1)) * FOCUS + stream) * C + channel
    source = y + stream * (y_stream * UNIT) + channel[None, :]
    for l in tl.static_range(DEGREE + 1):
        if degree == l:
            sums = ()
            for _ in tl.static_range(2 * l + 1):
                sums = sums + (tl.zeros((EDGES, CHANNELS), dtype=tl.float32),)
            for start in range(begin, end, EDGES):
                place = start + tl.arange(0, EDGES)[:, None]
                inside = place < end
                edge = tl.load(order + place, mask=inside, other=0)
                factors = coefficients + edge * coefficients_edge
                if WEIGHTED:
                    weight = tl.load(weights + edge * weights_edge + stream, mask=inside, other=0.0).to(tl.float32)
                for k in tl.static_range(2 * ORDER + 1):
                    if l >= (k + 1) // 2:
                        first = numbers_before(l, ORDER) + block_row(k, l, ORDER) * (2 * l + 1)
                        at = source + edge * (y_edge * UNIT) + place_of(k, l, DEGREE) * (y_row * UNIT)
                        value = tl.load(at, mask=inside & known, other=0.0).to(tl.float32)
                        if WEIGHTED:
                            value *= weight
                        news = ()
                        for m in tl.static_range(2 * l + 1):
                            factor = tl.load(factors + first + m, mask=inside, other=0.0).to(tl.float32)
                            news = news + (sums[m] + factor * value,)
                        sums = news
            for m in tl.static_range(2 * l + 1):
                total = tl.sum(sums[m], 0).to(out.dtype.element_ty)
                tl.store(target + (l * l + m) * (FOCUS * C), total, mask=channel < C)


@specialise(aligned=("x", "y"))
def edge_outer(
    x, y, weights, index, out,
    edges: tl.int64, x_atom: tl.int64, x_row: tl.int64, y_edge: tl.int64, y_row: tl.int64, y_stream: tl.int64,
    weights_edge: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr, WEIGHTED: tl.constexpr,
    UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the products of an edge's rows and its atom's, summed over channels and streams."""
    edge = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    within = edge < edges
    edge, inside = edge[:, None], within[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    there = inside & (channel < C)
    atom = tl.load(index + edge, mask=inside, other=0)
    source = x + atom * (x_atom * UNIT) + channel
    other = y + edge * (y_edge * UNIT) + channel
    target = out + (tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)) * numbers_before(DEGREE + 1, ORDER)
    factors = ()
    for f in tl.static_range(FOCUS):
        if WEIGHTED:
            weight = tl.load(weights + edge * weights_edge + f, mask=inside, other=0.0).to(tl.float32)
            factors = factors + (weight,)
    for l in tl.static_range(DEGREE + 1):
        for k in tl.static_range(2 * ORDER + 1):
            if l >= (k + 1) // 2:
                values = ()
                for f in tl.static_range(FOCUS):
                    at = other + place_of(k, l, DEGREE) * (y_row * UNIT) + f * (y_stream * UNIT)
                    value = tl.load(at, mask=there, other=0.0).to(tl.float32)
                    if WEIGHTED:
                        value *= factors[f]
                    values = values + (value,)
                first = numbers_before(l, ORDER) + block_row(k, l, ORDER) * (2 * l + 1)
                for m in range(2 * l + 1):  # not unrolled, as above
                    product = tl.zeros((EDGES, CHANNELS), dtype=tl.float32)
                    for f in tl.static_range(FOCUS):
                        row = tl.load(source + (l * l + m) * (x_row * UNIT) + f * C, mask=there, other=0.0)
                        product += values[f] * row.to(tl.float32)
                    tl.store(target + first + m, tl.sum(product, 1).to(out.dtype.element_ty), mask=within)


@specialise(aligned=("x", "y"))
def edge_share(
    coefficients, x, y, index, out,
    edges: tl.int64, coefficients_edge: tl.int64, x_atom: tl.int64, x_row: tl.int64, y_edge: tl.int64,
    y_row: tl.int64, y_stream: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr,
    UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the sum over rows and channels of an edge's features times its atom's, turned, for each stream."""
    edge, inside, stream, channel, known = of_edges(edges, 1, C, FOCUS, EDGES, CHANNELS)
    there = inside & known
    atom = tl.load(index + edge, mask=inside, other=0)
    source = x + atom * (x_atom * UNIT) + stream * C + channel
    other = y + edge * (y_edge * UNIT) + stream * (y_stream * UNIT) + channel
    factors = coefficients + edge * coefficients_edge
    total = tl.zeros((EDGES, CHANNELS), dtype=tl.float32)
    for l in tl.static_range(DEGREE + 1):
        turned = turn(source, x_row * UNIT, there, factors, inside, l, ORDER, EDGES, CHANNELS)
        for k in tl.static_range(2 * ORDER + 1):
            if l >= (k + 1) // 2:
                at = place_of(k, l, DEGREE) * (y_row * UNIT)
                total += turned[k] * tl.load(other + at, mask=there, other=0.0).to(tl.float32)
    sums = tl.sum(total, 1)
    place = (tl.program_id(0) // FOCUS).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    tl.store(out + place * FOCUS + stream, sums.to(out.dtype.element_ty), mask=place < edges)


KERNELS = {"gather": edge_gather, "scatter": edge_scatter, "outer": edge_outer, "share": edge_share}


def gather(
    coefficients: Tensor,
    x: Tensor,
    weights: Tensor | None,
    index: Tensor,
    degree: int,
    order: int,
    streams: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return what each edge sees of its atom, with the streams first in memory."""
    edges, width = index.shape[0], x.shape[2] // streams
    rows = sum(rows for rows, _ in reference.block_sizes(degree, order))
    out = x.new_empty((streams, edges, rows, width), dtype=dtype).movedim(0, 2)
    geometry = constants("gather", degree, order, streams, width, weights is not None)
    x, x_strides = atoms_in_units(x, geometry["UNIT"])
    coefficients, w = tight(coefficients), coefficients if weights is None else tight(weights)
    values = [coefficients, x, w, index, out]
    numbers = [coefficients.stride(0), *x_strides, w.stride(0), *strides_in_units(out, geometry["UNIT"])]
    if edges == 0 or _run("gather", values, edges, numbers, geometry):
        return out
    return reference.gather(coefficients, x, weights, index, degree, order, streams, dtype)


def scatter(
    coefficients: Tensor,
    y: Tensor,
    weights: Tensor | None,
    index: Tensor,
    edge_order: Tensor,
    starts: Tensor,
    degree: int,
    order: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the sums over the edges of each atom."""
    atoms, (_, _, streams, width) = starts.shape[0] - 1, y.shape
    out = y.new_empty((atoms, (degree + 1) ** 2, streams * width), dtype=dtype)
    geometry = constants("scatter", degree, order, streams, width, weights is not None)
    y, y_strides = edges_in_units(y, geometry["UNIT"])
    coefficients, w = tight(coefficients), coefficients if weights is None else tight(weights)
    values = [coefficients, y, w, edge_order, starts, out]
    numbers = [coefficients.stride(0), *y_strides, w.stride(0)]
    if atoms == 0 or _run("scatter", values, atoms, numbers, geometry):
        return out
    return reference.scatter(coefficients, y, weights, index, atoms, degree, order, dtype)


def outer(
    x: Tensor, y: Tensor, weights: Tensor | None, index: Tensor, degree: int, order: int, dtype: torch.dtype
) -> Tensor:
    """Return the products of the two sides of each edge."""
    edges, _, streams, width = y.shape
    out = y.new_empty((edges, reference.count(degree, order)), dtype=dtype)
    geometry = constants("outer", degree, order, streams, width, weights is not None)
    x, x_strides = atoms_in_units(x, geometry["UNIT"])
    y, y_strides = edges_in_units(y, geometry["UNIT"])
    w = y if weights is None else tight(weights)
    values = [x, y, w, index, out]
    if edges == 0 or _run("outer", values, edges, [*x_strides, *y_strides, w.stride(0)], geometry):
        return out
    return reference.outer(x, y, weights, index, degree, order, dtype)


def share(
    coefficients: Tensor, x: Tensor, y: Tensor, index: Tensor, degree: int, order: int, dtype: torch.dtype
) -> Tensor:
    """Return what each stream of an edge contributes."""
    edges, _, streams, width = y.shape
    out = y.new_empty((edges, streams), dtype=dtype)
    geometry = constants("share", degree, order, streams, width)
    x, x_strides = atoms_in_units(x, geometry["UNIT"])
    y, y_strides = edges_in_units(y, geometry["UNIT"])
    coefficients = tight(coefficients)
    numbers = [coefficients.stride(0), *x_strides, *y_strides]
    if edges == 0 or _run("share", [coefficients, x, y, index, out], edges, numbers, geometry):
        return out
    return reference.share(coefficients, x, y, index, degree, order, dtype)


def constants(name: str, degree: int, order: int, streams: int, width: int, weighted: bool = False) -> dict[str, Any]:
    """Return the constants of a kernel apart from the sizes of its blocks."""
    found: dict[str, Any] = {"DEGREE": degree, "ORDER": min(order, degree), "FOCUS": streams, "C": width}
    if name != "share":
        found["WEIGHTED"] = weighted
    return {**found, "UNIT": 4 if width % 4 == 0 else 1}


def arguments(name: str, dtype: torch.dtype, wide: torch.dtype = torch.float32) -> list[Argument]:
    """Return what is known of a kernel's arguments where features have one dtype, and rotations and sums another."""
    kinds = {"coefficients": wide, "weights": wide, "index": torch.int64, "order": torch.int64, "starts": torch.int64}
    found: list[Argument] = []
    for p in KERNELS[name].params:
        if p.is_constexpr:
            continue
        result = p.name == "out" and name != "gather"
        found.append(int if p.annotation_type else kinds.get(p.name, wide if result else dtype))
    return found


def launches(name: str, width: int) -> tuple[Launch, ...]:
    """Return launches to try, best first: blocks of 512, 256 or 128 numbers; sums over channels hold all of them."""
    whole = 1 << max(width - 1, 0).bit_length()
    channels = whole if name in ("outer", "share") else min(whole, 64)
    return tuple(
        Launch((("EDGES", max(size // channels, 1)), ("CHANNELS", channels)), warps)
        for size, warps in ((512, 4), (256, 2), (128, 1))
    )


def _run(name: str, tensors: Sequence[Tensor], count: int, numbers: Sequence[int], geometry: dict[str, Any]) -> bool:
    """Fill the result, the last tensor, and return whether a launch of the kernel fits the device."""
    kernel, device = KERNELS[name], tensors[-1].device
    require_device(kernel, device)
    width, streams = geometry["C"], geometry["FOCUS"]
    split = name in ("gather", "scatter")  # over channels
    known = [*(tensor.dtype for tensor in tensors), *[int] * (len(numbers) + 1 + split)]
    launch = choose(kernel, known, geometry, launches(name, width), device)
    if launch is None:
        warn_reference(kernel, geometry, tensors[-1].dtype, device)
        return False
    edges, channels = (int(size) for _, size in launch.blocks)
    blocks = -(-width // channels)
    programs = count * (geometry["DEGREE"] + 1) if name == "scatter" else -(-count // edges)
    programs = programs * (1 if name == "outer" else streams) * (blocks if split else 1)
    run(kernel, (programs,), [*tensors, count, *[blocks] * split, *numbers], geometry, launch, device)
    return True


def tight(x: Tensor) -> Tensor:
    """Return a table whose rows have no gaps inside."""
    return x if x.stride(-1) == 1 else x.contiguous()


def atoms_in_units(x: Tensor, unit: int) -> tuple[Tensor, tuple[int, int]]:
    """Return [A, M, W] whose channels are next to each other and start at whole units, and its strides in units."""
    if x.stride(2) != 1 or x.stride(0) % unit or x.stride(1) % unit or x.storage_offset() * x.element_size() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x, (x.stride(0) // unit, x.stride(1) // unit)


def edges_in_units(y: Tensor, unit: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Return [E, R, F, C] whose channels are next to each other and start at whole units, and its strides in units."""
    fit = y.stride(3) == 1 and y.storage_offset() * y.element_size() % 16 == 0
    if not fit or any(y.stride(i) % unit for i in range(3)):
        y = y.clone(memory_format=torch.contiguous_format)
    return y, strides_in_units(y, unit)


def strides_in_units(y: Tensor, unit: int) -> tuple[int, int, int]:
    """Return the strides of edges, rows and streams."""
    return y.stride(0) // unit, y.stride(1) // unit, y.stride(2) // unit
