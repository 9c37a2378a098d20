"""Time the fused kernels on this machine's GPU against plain PyTorch, eager and compiled.

    python scripts/benchmark_kernels.py                      # a table in Markdown; some minutes, most of them compiling
    python scripts/benchmark_kernels.py nodes=300 dtypes=fp32

Grid-pair product, three orders: (a) the composition of matrix products, eager; (b) the same compiled by Inductor;
(c) a dense tile walk: the same kernel routine with the large projectors; (d) the operator as the model calls it. Times
are medians after warm-up, by CUDA events, for one call; the last column is time over the memory floor: each operand
read and each result written once at the speed of a copy, which is measured first.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlff.kernels import grid_pair_reference as reference
from mlff.kernels.grid_pair_triton import OPERANDS, run_product
from mlff.sezm.grid import Grid, rotation_grid

SHAPES = ((3, 3, 2, 32), (3, 3, 1, 64), (4, 3, 1, 64), (5, 3, 2, 64), (6, 3, 2, 96))  # degree, K, F, C
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ORDERS = ("forward", "backward", "second backward")
DEFINITIONS = (reference.forward, reference.backward, reference.double_backward)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    given = dict(word.partition("=")[::2] for word in arguments)
    unknown = set(given) - {"nodes", "dtypes", "compiled"}
    if unknown:
        print(f"benchmark_kernels: keys are nodes, dtypes, compiled; got {', '.join(unknown)}.", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("benchmark_kernels: needs a CUDA device; this machine shows none.", file=sys.stderr)
        return 2
    counts = [int(number) for number in given.get("nodes", "300,20000").split(",")]
    dtypes = given.get("dtypes", "fp32,bf16").split(",")
    speed = copy_speed()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {speed / 1e12:.2f} TB/s\n")
    print(
        "| degree, K, F, C | N | operands | order | eager, µs | Inductor | dense walk | ours | a/ours | b/ours | c/ours"
    )
    print("| time / floor | error |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for nodes in counts:
            for dtype in dtypes:
                for order in range(3):
                    print(row(shape, nodes, dtype, order, speed, given.get("compiled", "1") == "1"), flush=True)
    return 0


def row(shape: tuple[int, int, int, int], nodes: int, dtype_name: str, order: int, speed: float, compiled: bool) -> str:
    """Return the times of one operator at one size."""
    degree, frames, focus, channels = shape
    dtype = DTYPES[dtype_name]
    grid = rotation_grid(degree, 1).to("cuda")
    operands = [
        torch.randn(nodes, (degree + 1) ** 2, focus, frames * channels, device="cuda", dtype=dtype)
        for _ in range(OPERANDS[order])
    ]
    projectors = tuple(grid.get_buffer(name).to(dtype) for name in ("to_grid", "from_grid"))
    definition = DEFINITIONS[order]

    def eager() -> object:
        return definition(*operands, *projectors, frames)

    times = [measure(eager)]
    if compiled:
        torch._dynamo.reset()
        fused = torch.compile(definition, dynamic=False)
        times.append(measure(lambda: fused(*operands, *projectors, frames)))
    else:
        times.append(float("nan"))
    times.append(measure(lambda: run_product(order, operands, projectors, None, frames)))
    factors = factors_of(grid, dtype)
    times.append(measure(lambda: run_product(order, operands, projectors, factors, frames)))
    found = run_product(order, [x[:16] for x in operands], projectors, factors, frames)
    assert found is not None
    exact = definition(*[x[:16].double() for x in operands], *(x.double() for x in exact_projectors(grid)), frames)
    exact = exact if isinstance(exact, tuple) else (exact,)
    error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True))
    size = (OPERANDS[order] + order + 1) * operands[0].numel() * operands[0].element_size()
    floor = size / speed
    ratios = [time / times[-1] for time in times[:3]] + [times[-1] / floor]
    cells = [*(f"{time * 1e6:.0f}" for time in times), *(f"{ratio:.1f}" for ratio in ratios), f"{error:.0e}"]
    title = f"{degree}, {frames}, {focus}, {channels} | {nodes} | {dtype_name} | {ORDERS[order]}"
    return f"| {title} | {' | '.join(cells)} |"


def exact_projectors(grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the projectors in float64, which a grid keeps whatever it was moved to."""
    exact = grid.to(torch.float64)
    return exact.get_buffer("to_grid").clone(), exact.get_buffer("from_grid").clone()


def factors_of(grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the small projectors as `run_product` takes them."""
    factors = grid.factors()
    assert factors is not None
    matrix = factors.matrix_for(dtype)
    assert matrix is not None
    return matrix, factors.slots, factors.scale.float()


def copy_speed() -> float:
    """Return bytes a second, read and written, of a large copy."""
    source = torch.empty(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / measure(lambda: target.copy_(source))


def measure(call: Callable[[], object], repeats: int = 15) -> float:
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
