"""Mixing degrees of equal m by kernels of each edge in Triton: mix, kernels, basis.

The formulas are those of degree_mixer_reference.py. A program owns a block of edges and channels of one stream; it
walks over orders and degrees, which are known when a kernel is compiled.
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

from mlff.kernels import degree_mixer_reference as reference
from mlff.kernels.edge_frames_triton import edges_in_units, of_edges, strides_in_units
from mlff.kernels.gated_triton import place_of
from mlff.kernels.launch import Argument, Launch, choose, run, specialise, warn_reference
from mlff.kernels.silu_triton import require_device

PARTIAL_SUMS = 512  # programs among which the sum over all edges is divided

# Constants are in capitals, as launch.py asks. Strides of rows are counted in UNITs, so that the compiler knows that
# wide loads are possible.


@triton.jit
def entries_before(m: tl.constexpr, DEGREE: tl.constexpr):
    """How many entries an edge's kernels have for orders below m: (L+1)² + L² and so on."""
    return m * (DEGREE + 1) * (DEGREE + 1) - (DEGREE + 1) * m * (m - 1) + (m - 1) * m * (2 * m - 1) // 6


@triton.jit
def entry(i, j, m: tl.constexpr, DEGREE: tl.constexpr):
    """Which entry of an edge's kernels leads from degree i to degree j."""
    return entries_before(m, DEGREE) + (i - m) * (DEGREE + 1 - m) + j - m


@specialise(aligned=("x", "out"))
def degree_mix(
    kernels, basis, x, out,
    edges: tl.int64, blocks: tl.int64, kernels_edge: tl.int64, x_edge: tl.int64, x_row: tl.int64, x_stream: tl.int64,
    out_edge: tl.int64, out_row: tl.int64, out_stream: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr,
    TRANSPOSED: tl.constexpr, UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the mixed rows."""
    edge, inside, stream, channel, known = of_edges(edges, blocks, C, FOCUS, EDGES, CHANNELS)
    there = inside & known
    source = x + edge * (x_edge * UNIT) + stream * (x_stream * UNIT) + channel
    target = out + edge * (out_edge * UNIT) + stream * (out_stream * UNIT) + channel
    factors = kernels + edge * kernels_edge
    for k in tl.static_range(2 * ORDER + 1):  # m = 0, -1, +1, -2, …
        rows = ()
        for i in tl.static_range((k + 1) // 2, DEGREE + 1):
            at = place_of(k, i, DEGREE) * (x_row * UNIT)
            rows = rows + (tl.load(source + at, mask=there, other=0.0).to(tl.float32),)
        for j in range((k + 1) // 2, DEGREE + 1):  # not unrolled: the compiler's time grows with the square of that
            y = tl.zeros((EDGES, CHANNELS), dtype=tl.float32)
            for q in tl.static_range(RANK):
                part = tl.zeros((EDGES, CHANNELS), dtype=tl.float32)
                for i in tl.static_range((k + 1) // 2, DEGREE + 1):
                    if TRANSPOSED:
                        factor = factors + entry(j, i, (k + 1) // 2, DEGREE) * RANK + q
                    else:
                        factor = factors + entry(i, j, (k + 1) // 2, DEGREE) * RANK + q
                    part += tl.load(factor, mask=inside, other=0.0).to(tl.float32) * rows[i - (k + 1) // 2]
                weight = tl.load(basis + q * (FOCUS * C) + stream * C + channel, mask=known, other=0.0)
                y += weight.to(tl.float32) * part
            row = target + place_of(k, j, DEGREE) * (out_row * UNIT)
            tl.store(row, y.to(out.dtype.element_ty), mask=there)


@specialise(aligned=("a", "b"))
def degree_mix_kernels(
    basis, a, b, out,
    edges: tl.int64, a_edge: tl.int64, a_row: tl.int64, a_stream: tl.int64,
    b_edge: tl.int64, b_row: tl.int64, b_stream: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr,
    UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the entries of the kernels: sums over the channels of all streams."""
    place = tl.program_id(0).to(tl.int64) * EDGES + tl.arange(0, EDGES)
    edge, inside = place[:, None], (place < edges)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    there = inside & (channel < C)
    one, other = a + edge * (a_edge * UNIT) + channel, b + edge * (b_edge * UNIT) + channel
    target = out + place * (entries_before(ORDER + 1, DEGREE) * RANK)
    for m in tl.static_range(ORDER + 1):
        for i in range(m, DEGREE + 1):  # not unrolled, as above
            for j in tl.static_range(m, DEGREE + 1):
                sums = ()
                for _ in tl.static_range(RANK):
                    sums = sums + (tl.zeros((EDGES, CHANNELS), dtype=tl.float32),)
                for f in tl.static_range(FOCUS):
                    product = tl.zeros((EDGES, CHANNELS), dtype=tl.float32)
                    for k in tl.static_range(2 * ORDER + 1):
                        if (k + 1) // 2 == m:
                            at = one + place_of(k, i, DEGREE) * (a_row * UNIT) + f * (a_stream * UNIT)
                            value = tl.load(at, mask=there, other=0.0).to(tl.float32)
                            at = other + place_of(k, j, DEGREE) * (b_row * UNIT) + f * (b_stream * UNIT)
                            product += value * tl.load(at, mask=there, other=0.0).to(tl.float32)
                    news = ()
                    for q in tl.static_range(RANK):
                        weight = tl.load(basis + (q * FOCUS + f) * C + channel, mask=channel < C, other=0.0)
                        news = news + (sums[q] + weight.to(tl.float32) * product,)
                    sums = news
                for q in tl.static_range(RANK):
                    at = entry(i, j, m, DEGREE) * RANK + q
                    tl.store(target + at, tl.sum(sums[q], 1).to(out.dtype.element_ty), mask=place < edges)


@specialise(aligned=("a", "b"))
def degree_mix_basis(
    kernels, a, b, out,
    edges: tl.int64, programs: tl.int64, kernels_edge: tl.int64, a_edge: tl.int64, a_row: tl.int64, a_stream: tl.int64,
    b_edge: tl.int64, b_row: tl.int64, b_stream: tl.int64,
    DEGREE: tl.constexpr, ORDER: tl.constexpr, FOCUS: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr,
    UNIT: tl.constexpr, EDGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write a program's share of the sums over all edges: every so many blocks of them."""
    stream = tl.program_id(0) % FOCUS
    first = (tl.program_id(0) // FOCUS).to(tl.int64)
    channel = tl.arange(0, CHANNELS)[None, :]
    sums = ()
    for _ in tl.static_range(RANK):
        sums = sums + (tl.zeros((EDGES, CHANNELS), dtype=tl.float32),)
    for start in range(first * EDGES, edges, programs * EDGES):
        edge = start + tl.arange(0, EDGES)[:, None]
        inside = edge < edges
        there = inside & (channel < C)
        one = a + edge * (a_edge * UNIT) + stream * (a_stream * UNIT) + channel
        other = b + edge * (b_edge * UNIT) + stream * (b_stream * UNIT) + channel
        factors = kernels + edge * kernels_edge
        for k in tl.static_range(2 * ORDER + 1):
            rows = ()
            for i in tl.static_range((k + 1) // 2, DEGREE + 1):
                at = one + place_of(k, i, DEGREE) * (a_row * UNIT)
                rows = rows + (tl.load(at, mask=there, other=0.0).to(tl.float32),)
            for j in range((k + 1) // 2, DEGREE + 1):  # not unrolled, as above
                row = other + place_of(k, j, DEGREE) * (b_row * UNIT)
                value = tl.load(row, mask=there, other=0.0).to(tl.float32)
                news = ()
                for q in tl.static_range(RANK):
                    part = tl.zeros((EDGES, CHANNELS), dtype=tl.float32)
                    for i in tl.static_range((k + 1) // 2, DEGREE + 1):
                        factor = factors + entry(i, j, (k + 1) // 2, DEGREE) * RANK + q
                        part += tl.load(factor, mask=inside, other=0.0).to(tl.float32) * rows[i - (k + 1) // 2]
                    news = news + (sums[q] + part * value,)
                sums = news
    target = out + ((first * RANK) * FOCUS + stream) * C + tl.arange(0, CHANNELS)
    for q in tl.static_range(RANK):
        tl.store(target + q * (FOCUS * C), tl.sum(sums[q], 0), mask=tl.arange(0, CHANNELS) < C)


KERNELS = {"mix": degree_mix, "kernels": degree_mix_kernels, "basis": degree_mix_basis}


def mix(
    kernels: Tensor, basis: Tensor, x: Tensor, degree: int, order: int, transposed: bool, dtype: torch.dtype
) -> Tensor:
    """Return the mixed rows, with the streams first in memory."""
    edges, rows, streams, width = x.shape
    out = x.new_empty((streams, edges, rows, width), dtype=dtype).movedim(0, 2)
    geometry = constants("mix", degree, order, streams, width, kernels.shape[2], transposed)
    unit = geometry["UNIT"]
    kernels, basis = kernels.contiguous(), basis.contiguous()
    x, x_strides = edges_in_units(x, unit)
    numbers = [kernels.stride(0), *x_strides, *strides_in_units(out, unit)]
    if edges == 0 or _run("mix", [kernels, basis, x, out], edges, numbers, geometry):
        return out
    return reference.mix(kernels, basis, x, degree, order, transposed, dtype)


def kernels(basis: Tensor, a: Tensor, b: Tensor, degree: int, order: int, dtype: torch.dtype) -> Tensor:
    """Return the kernels' entries."""
    edges, _, streams, width = a.shape
    out = a.new_empty((edges, reference.count(degree, order), basis.shape[0]), dtype=dtype)
    geometry = constants("kernels", degree, order, streams, width, basis.shape[0])
    basis = basis.contiguous()
    (a, a_strides), (b, b_strides) = (edges_in_units(x, geometry["UNIT"]) for x in (a, b))
    if edges == 0 or _run("kernels", [basis, a, b, out], edges, [*a_strides, *b_strides], geometry):
        return out
    return reference.kernels(basis, a, b, degree, order, dtype)


def basis(kernels: Tensor, a: Tensor, b: Tensor, degree: int, order: int, dtype: torch.dtype) -> Tensor:
    """Return the sums over edges and entries."""
    edges, _, streams, width = a.shape
    rank = kernels.shape[2]
    parts = a.new_zeros((PARTIAL_SUMS, rank, streams * width), dtype=torch.float32)
    geometry = constants("basis", degree, order, streams, width, rank)
    kernels = kernels.contiguous()
    (a, a_strides), (b, b_strides) = (edges_in_units(x, geometry["UNIT"]) for x in (a, b))
    numbers = [kernels.stride(0), *a_strides, *b_strides]
    if edges == 0 or _run("basis", [kernels, a, b, parts], edges, numbers, geometry):
        return parts.sum(0).to(dtype)
    return reference.basis(kernels, a, b, degree, order, dtype)


def constants(
    name: str, degree: int, order: int, streams: int, width: int, rank: int, transposed: bool = False
) -> dict[str, Any]:
    """Return the constants of a kernel apart from the sizes of its blocks."""
    found: dict[str, Any] = {"DEGREE": degree, "ORDER": min(order, degree), "FOCUS": streams, "C": width, "RANK": rank}
    if name == "mix":
        found["TRANSPOSED"] = transposed
    return {**found, "UNIT": 4 if width % 4 == 0 else 1}


def arguments(name: str, dtype: torch.dtype, wide: torch.dtype = torch.float32) -> list[Argument]:
    """Return what is known of a kernel's arguments where features and kernels have one dtype, the basis another."""
    found: list[Argument] = []
    for p in KERNELS[name].params:
        if not p.is_constexpr:
            is_wide = p.name == "basis" or (p.name == "out" and name != "kernels")
            found.append(int if p.annotation_type else wide if is_wide else dtype)
    return found


def launches(name: str, width: int) -> tuple[Launch, ...]:
    """Return launches to try, best first: blocks of 512, 256 or 128 numbers; sums hold all channels of a stream."""
    whole = 1 << max(width - 1, 0).bit_length()
    channels = min(whole, 64) if name == "mix" else whole
    return tuple(
        Launch((("EDGES", max(size // channels, 1)), ("CHANNELS", channels)), warps)
        for size, warps in ((512, 4), (256, 2), (128, 1))
    )


def _run(name: str, tensors: Sequence[Tensor], edges: int, numbers: Sequence[int], geometry: dict[str, Any]) -> bool:
    """Fill the result, the last tensor, and return whether a launch of the kernel fits the device."""
    kernel, device = KERNELS[name], tensors[-1].device
    require_device(kernel, device)
    width, streams = geometry["C"], geometry["FOCUS"]
    known = [*(tensor.dtype for tensor in tensors), *[int] * (len(numbers) + (1 if name == "kernels" else 2))]
    launch = choose(kernel, known, geometry, launches(name, width), device)
    if launch is None:
        warn_reference(kernel, geometry, tensors[-1].dtype, device)
        return False
    tall, wide = (int(size) for _, size in launch.blocks)
    blocks = -(-width // wide)
    if name == "mix":
        programs, count = -(-edges // tall) * blocks * streams, [edges, blocks]
    elif name == "basis":
        programs, count = PARTIAL_SUMS * streams, [edges, PARTIAL_SUMS]
    else:
        programs, count = -(-edges // tall), [edges]
    run(kernel, (programs,), [*tensors, *count, *numbers], geometry, launch, device)
    return True
