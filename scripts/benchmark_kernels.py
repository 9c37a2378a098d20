"""Time the fused kernels on this machine's GPU against plain PyTorch, eager and compiled.

    python scripts/benchmark_kernels.py workers=8           # a table in Markdown; minutes, most of them compiling
    python scripts/benchmark_kernels.py nodes=300 dtypes=fp32 compiled=0

SwiGLU, three orders: eager, compiled by Inductor, the operator; share of the speed of a copy. Elements moved for N of
the result: 3 N forward, 5 N backward, 8 N second backward.

Grid-pair product, three orders: (a) the composition of matrix products, eager; (b) the same compiled by Inductor;
(c) a dense tile walk: the same kernel routine with the large projectors; (d) the operator as the model calls it. Times
are medians after warm-up, by CUDA events, for one call; the last column but one is time over the memory floor: each
operand read and each result written once at the speed of a copy, which is measured first. Compiling is left to
`workers` processes at first, so that what is measured finds everything in the compilers' caches.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mlff.kernels import grid_pair_reference as reference
from mlff.kernels import swiglu_reference
from mlff.kernels.grid_pair_triton import OPERANDS, run_product
from mlff.kernels.swiglu import swiglu
from mlff.sezm.grid import Grid, rotation_grid

SHAPES = ((3, 3, 2, 32), (3, 3, 1, 64), (4, 3, 1, 64), (5, 3, 2, 64), (6, 3, 2, 96))  # degree, K, F, C
SWIGLU_SHAPES = ((100_000, 96), (1_000_000, 64))  # rows, width of the result
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ORDERS = ("forward", "backward", "second backward")
DEFINITIONS: tuple[Callable[..., Any], ...] = (reference.forward, reference.backward, reference.double_backward)


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    given = {key: value for key, _, value in (word.partition("=") for word in arguments)}
    unknown = set(given) - {"what", "nodes", "dtypes", "compiled", "workers"}
    if unknown:
        print(f"keys are what, nodes, dtypes, compiled, workers; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("benchmark_kernels: needs a CUDA device; this machine shows none.", file=sys.stderr)
        return 2
    what = given.get("what", "swiglu,grid_pair").split(",")
    dtypes = given.get("dtypes", "fp32,bf16").split(",")
    counts = [int(number) for number in given.get("nodes", "300,20000").split(",")]
    compiled = given.get("compiled", "1") == "1"
    cases = list(itertools.product(SHAPES, dtypes, range(3), [compiled])) if "grid_pair" in what else []
    if int(given.get("workers", "0")) > 0:
        with multiprocessing.get_context("spawn").Pool(int(given["workers"])) as pool:
            pool.map(prepare, cases, chunksize=1)
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {speed / 1e12:.2f} TB/s")
    if "swiglu" in what:
        print("\n| rows x width | operands | order | eager, µs | Inductor, µs | ours, µs | share of copy speed |")
        print(f"{'|---' * 7}|")
        for (rows_, width), dtype, order in itertools.product(SWIGLU_SHAPES, dtypes, range(3)):
            print(swiglu_row(rows_, width, DTYPES[dtype], dtype, order, speed), flush=True)
    if cases:
        titles = "degree, K, F, C | operands | order | N | (a) eager, µs | (b) Inductor | (c) dense walk | (d) ours"
        print(f"\n| {titles} | a/d | b/d | c/d | d / floor | error |\n{'|---' * 13}|")
    for case in cases:
        for line in rows(case, counts, speed):
            print(line, flush=True)
    return 0


def swiglu_row(count: int, width: int, dtype: torch.dtype, dtype_name: str, order: int, speed: float) -> str:
    """Return the times of one order of SwiGLU with separate operands."""
    operands = [torch.randn(count, width, device="cuda", dtype=dtype) for _ in range((2, 3, 5)[order])]
    if order == 0:
        ways = [lambda gate, up: functional.silu(gate) * up, swiglu]
    else:
        operator = (torch.ops.mlff.swiglu_backward, torch.ops.mlff.swiglu_double_backward)[order - 1]
        ways = [(swiglu_reference.backward, swiglu_reference.double_backward)[order - 1], operator]
    torch._dynamo.reset()
    ways.insert(1, torch.compile(ways[0], dynamic=True))
    times = [measure(partial(way, *operands)) for way in ways]
    moved = (3, 5, 8)[order] * count * width * operands[0].element_size()
    cells = [*(f"{time * 1e6:.0f}" for time in times), f"{moved / speed / times[-1]:.0%}"]
    return f"| {count:,} x {width} | {dtype_name} | {ORDERS[order]} | {' | '.join(cells)} |"


Case = tuple[tuple[int, int, int, int], str, int, bool]  # shape, dtype, order, whether to compile (b)


def ways(case: Case, grid: Grid) -> list[Callable[..., object] | None]:
    """Return (a) to (d) as functions of the operands; None for what is not to be measured."""
    (_, frames, _, _), dtype_name, order, compiled = case
    dtype, definition = DTYPES[dtype_name], DEFINITIONS[order]
    to_grid, from_grid = (grid.get_buffer(name).to(dtype) for name in ("to_grid", "from_grid"))
    large, factors = tables_of(grid, dtype)

    def eager(*operands: Tensor) -> object:
        return definition(*operands, to_grid, from_grid, frames)

    return [
        eager,
        torch.compile(eager, dynamic=True) if compiled else None,
        lambda *operands: run_product(order, operands, (to_grid, from_grid), None, frames),
        lambda *operands: run_product(order, operands, large, factors, frames),
    ]


def operands_of(case: Case, nodes: int) -> list[Tensor]:
    """Return random operands of a case."""
    (degree, frames, focus, channels), dtype_name, order, _ = case
    shape = (nodes, (degree + 1) ** 2, focus, frames * channels)
    return [torch.randn(shape, device="cuda", dtype=DTYPES[dtype_name]) for _ in range(OPERANDS[order])]


def prepare(case: Case) -> None:
    """Compile what a case needs, in a process of its own."""
    grid = rotation_grid(case[0][0], 1).to("cuda")
    torch._dynamo.reset()
    for way in ways(case, grid):
        if way is not None:
            way(*operands_of(case, 300))


def rows(case: Case, counts: Sequence[int], speed: float) -> Iterator[str]:
    """Yield the times of one operator at several sizes."""
    (degree, frames, focus, channels), dtype_name, order, _ = case
    grid = rotation_grid(degree, 1).to("cuda")
    torch._dynamo.reset()
    chosen = ways(case, grid)
    for nodes in counts:
        operands = operands_of(case, nodes)
        times = [float("nan") if way is None else measure(partial(way, *operands)) for way in chosen]
        few = [x[:16] for x in operands]
        found: tuple[Tensor, ...] = chosen[3](*few)  # type: ignore[misc, assignment]
        exact_grid = rotation_grid(degree, 1).to("cuda", torch.float64)
        projectors = [exact_grid.get_buffer(name) for name in ("to_grid", "from_grid")]
        exact = DEFINITIONS[order](*[x.double() for x in few], *projectors, frames)
        exact = exact if isinstance(exact, tuple) else (exact,)
        error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))
        floor = (OPERANDS[order] + order + 1) * operands[0].numel() * operands[0].element_size() / speed
        ratios = [time / times[-1] for time in times[:3]] + [times[-1] / floor]
        cells = [*(f"{time * 1e6:.0f}" for time in times), *(f"{ratio:.1f}" for ratio in ratios), f"{error:.0e}"]
        title = f"{degree}, {frames}, {focus}, {channels} | {dtype_name} | {ORDERS[order]} | {nodes}"
        yield f"| {title} | {' | '.join(cells)} |"


def tables_of(grid: Grid, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
    """Return what the model gives `run_product`: large projectors, and small ones where it takes these."""
    factors = grid.factors()
    assert factors is not None
    matrix = factors.matrix_for(dtype)
    large = factors.large_for(dtype) or (grid.get_buffer("to_grid").to(dtype), grid.get_buffer("from_grid").to(dtype))
    return large, None if matrix is None else (matrix, factors.slots, factors.scale)


def copy_speed() -> float:
    """Return bytes a second, read and written, of a large copy."""
    source = torch.empty(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / measure(lambda: target.copy_(source))


def measure(call: Callable[[], object], repeats: int = 9) -> float:
    """Return the median seconds of a call, after three."""
    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return times[repeats // 2] / 1e3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
