"""The grid-pair product: its definition, its derivatives, its kernels, its words when shapes do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from grid_pair_cases import CASES, Case, all_orders, error, laid_out
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx

from mlff.kernels import grid_pair_reference as reference
from mlff.kernels.grid_pair import grid_pair
from mlff.kernels.grid_pair_factors import product, reduced
from mlff.sezm.grid import Grid, rotation_grid, sphere_grid

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def operands(
    nodes: int = 3, rows: int = 4, focus: int = 2, frames: int = 3, channels: int = 5, points: int = 7
) -> Operands:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    left, right = (random(nodes, rows, focus, frames * channels) for _ in range(2))
    to_grid, from_grid = (random(points, rows * frames) for _ in range(2))
    return left, right, to_grid, from_grid, frames


@pytest.mark.parametrize("nodes", [0, 1, 3])
@pytest.mark.parametrize("frames", [1, 3, 5])
def test_definition(nodes: int, frames: int) -> None:
    """out[p] = Σ_g B[g,p] (Σ_q A[g,q] left[q]) (Σ_q A[g,q] right[q]) with slots (row, frame)."""
    left, right, to_grid, from_grid, _ = operands(nodes=nodes, frames=frames)
    slots = [x.unflatten(-1, (frames, 5)) for x in (left, right)]  # [N, D, F, K, C]
    a, b = (matrix.unflatten(1, (4, frames)) for matrix in (to_grid, from_grid))  # [G, D, K]
    on_grid = [torch.einsum("gdk,ndfkc->ngfc", a, x) for x in slots]
    expected = torch.einsum("gdk,ngfc->ndfkc", b, on_grid[0] * on_grid[1]).flatten(-2)
    found = grid_pair(left, right, to_grid, from_grid, frames)
    assert found.shape == left.shape
    assert torch.allclose(found, expected, atol=1e-12)  # sums of about 100 products of order one


def test_rk6_first_and_second_derivatives() -> None:
    left, right, to_grid, from_grid, frames = operands(nodes=2, channels=2, points=5)
    inputs = (left.requires_grad_(), right.requires_grad_())

    def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return grid_pair(a, b, to_grid, from_grid, frames)

    assert gradcheck(times, inputs)
    assert gradgradcheck(times, inputs)
    for only in (0, 1):  # and where only one of them requires a gradient
        single = tuple(x.detach().requires_grad_(k == only) for k, x in enumerate(inputs))
        assert gradcheck(times, single)
        assert gradgradcheck(times, single)


def test_strided_operands() -> None:
    """Channel slices and degree-major views are as good as contiguous tensors."""
    left, right, to_grid, from_grid, frames = operands()
    both = torch.cat((left, right), -1)
    halves = both.chunk(2, -1)
    degree_major = left.transpose(0, 1).contiguous().transpose(0, 1)
    expected = grid_pair(left, right, to_grid, from_grid, frames)
    assert torch.equal(grid_pair(degree_major, halves[1], to_grid, from_grid, frames), expected)


def test_shapes_that_do_not_fit() -> None:
    left, right, to_grid, from_grid, frames = operands()
    for arguments, words in (
        ((left, right[:, :3], to_grid, from_grid, frames), "one shape"),
        ((left, right, to_grid, from_grid, 4), "K = 4"),
        ((left, right, to_grid[:, :-1], from_grid, frames), r"\(G, 12\)"),
    ):
        with pytest.raises(ValueError, match=words):
            grid_pair(*arguments)


def test_rk6_numbers() -> None:
    """On a grid of one point, u·v: d2/(du dv) = 1 and d2/du2 = 0."""
    one = torch.ones(1, 1, dtype=torch.float64)
    u, v = (torch.full((1, 1, 1, 1), 1.0, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (du,) = torch.autograd.grad(grid_pair(u, v, one, one, 1).sum(), u, create_graph=True)
    mixed, twice = torch.autograd.grad(du.sum(), (v, u), allow_unused=True)
    assert mixed.item() == 1.0
    assert twice is None or twice.item() == 0.0


def test_a_third_derivative_is_refused() -> None:
    left, right, to_grid, from_grid, frames = operands(nodes=1, channels=1)
    left.requires_grad_(), right.requires_grad_()
    (first,) = torch.autograd.grad(grid_pair(left, right, to_grid, from_grid, frames).sum(), left, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), right, create_graph=True)
    with pytest.raises(RuntimeError, match="has first and second derivatives; a third one was asked for"):
        second.sum().backward()


@pytest.mark.parametrize("order", [0, 1, 2])
def test_operators_are_well_behaved(order: int) -> None:
    """Schema, fakes, autograd registration, and tracing with dynamic sizes, by torch's own check."""
    left, right, to_grid, from_grid, frames = operands(nodes=3, channels=2)
    tables = (to_grid, from_grid, None, None, None, frames)
    extra = [torch.randn_like(left) for _ in range(3)]
    name = ("grid_pair", "grid_pair_backward", "grid_pair_double_backward")[order]
    tensors = [*extra[: (0, 1, 3)[order]], left, right]
    if order < 2:  # the second backward has no derivative
        tensors = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(getattr(torch.ops.mlff, name).default, (*tensors, *tables))


def test_rk3_layouts_and_incoming_gradients() -> None:
    left, right, to_grid, from_grid, frames = operands(nodes=4)
    right.requires_grad_()
    for layout in ("slices", "degree major", "every other node", "shifted by one", "last axis transposed", "expanded"):
        x = laid_out(left, layout).detach().requires_grad_()
        out = grid_pair(x, right, to_grid, from_grid, frames)
        found = torch.autograd.grad(out.sum(), (x, right))  # the incoming gradient is one number, expanded
        plain = x.detach().contiguous().requires_grad_()
        expected = torch.autograd.grad(
            grid_pair(plain, right, to_grid, from_grid, frames), (plain, right), [out * 0 + 1]
        )
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)  # float64 sums in another order


def test_rk4_empty() -> None:
    """No node: right shape, dtype and device of result and gradients; eager, compiled, exported."""
    left, right, to_grid, from_grid, frames = operands(nodes=0)

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return grid_pair(a, b, to_grid, from_grid, frames)

    for function in (run, torch.compile(run, backend="aot_eager")):
        a, b = left.clone().requires_grad_(), right.clone().requires_grad_()
        out = function(a, b)
        grads = torch.autograd.grad(out.sum(), (a, b))
        assert all(x.shape == left.shape and x.dtype == left.dtype for x in (out, *grads))


class Times(torch.nn.Module):
    """A grid's product as a module."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.grid(left, right)


def test_rk9_rk14_exported_at_one_size_and_right_at_others() -> None:
    grid = rotation_grid(2, 1)
    nodes = torch.export.Dim("nodes", min=2)
    left, right = (torch.randn(37, 9, 1, 12) for _ in range(2))
    exported = torch.export.export(Times(grid), (left, right), dynamic_shapes=({0: nodes}, {0: nodes}))
    # The operator itself is in the export, and takes the version of the device on which that runs.
    assert any("mlff.grid_pair" in str(node.target) for node in exported.graph.nodes)
    for size in (37, 53, 1000):
        left, right = (torch.randn(size, 9, 1, 12) for _ in range(2))
        assert torch.equal(exported.module()(left, right), grid(left, right))


def test_rk5_inputs_are_not_overwritten() -> None:
    x = torch.randn(3, 4, 1, 6, dtype=torch.float64, requires_grad=True)
    _, _, to_grid, from_grid, _ = operands()
    e = x.exp()
    before = e.detach().clone()
    loss = grid_pair(e, e, to_grid, from_grid, 3).sum()
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    (again,) = torch.autograd.grad(loss, x)
    assert torch.equal(e.detach(), before)
    assert torch.equal(once, again)
    plain = reference.forward(x.exp(), x.exp(), to_grid, from_grid, 3).sum()
    (expected,) = torch.autograd.grad(plain, x)
    assert torch.allclose(once, expected, rtol=1e-12, atol=1e-12)  # float64, another order of sums


@pytest.mark.parametrize("pair", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_rk11_autocast(pair: tuple[torch.dtype, torch.dtype]) -> None:
    """Mixed operands: the result has autocast's dtype, as a matrix product's; gradients have their input's dtype."""
    grid = rotation_grid(2, 1)
    left, right = (torch.randn(3, 9, 1, 12, dtype=dtype, requires_grad=True) for dtype in pair)
    with torch.autocast("cpu", torch.bfloat16):
        out = grid(left, right)
        assert out.dtype == (left.float() @ right.float().mT).dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().square().sum(), (left, right))  # outside of the block
    assert [g.dtype for g in grads] == list(pair)
    assert all(bool(g.isfinite().all()) for g in grads)


def test_operands_of_two_dtypes_are_refused() -> None:
    left, right, to_grid, from_grid, frames = operands()
    with pytest.raises(ValueError, match="one floating dtype; got torch.float64 and torch.float32"):
        grid_pair(left, right.float(), to_grid, from_grid, frames)


def test_b9_operands_on_two_devices_are_refused() -> None:
    left, right, to_grid, from_grid, frames = operands()
    with pytest.raises(ValueError, match="must be on one device; got cpu, meta"):
        grid_pair(left, right.to("meta"), to_grid, from_grid, frames)


# The small projectors.


@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 6])
def test_small_projectors_give_the_product_of_the_large_ones(degree: int, order: int | None) -> None:
    grid = rotation_grid(degree, 1, order).to(torch.float64)
    assert grid.factored
    to_grid, from_grid = grid.get_buffer("to_grid"), grid.get_buffer("from_grid")
    small = reduced(to_grid, from_grid, grid.row_degrees, 4)
    assert small is not None
    assert small.matrix.shape[0] == to_grid.shape[0] // 8  # four rolls and two antipodes become one point
    left, right = torch.randn(2, 5, to_grid.shape[1], dtype=torch.float64)
    expected = ((left @ to_grid.T) * (right @ to_grid.T)) @ from_grid
    error = (product(left, right, small) - expected).abs().max()
    assert error < 1e-13 * expected.abs().max()  # a few hundred terms in float64


def test_projectors_without_that_structure_are_left_alone() -> None:
    grid = rotation_grid(3, 1).to(torch.float64)
    to_grid, from_grid = grid.get_buffer("to_grid"), grid.get_buffer("from_grid")
    assert reduced(to_grid, from_grid.roll(1, 0), grid.row_degrees, 4) is None  # weights of other points
    assert reduced(to_grid.flip(0), from_grid.flip(0), grid.row_degrees, 4) is None  # rolls the other way round
    assert reduced(to_grid[4:], from_grid[4:], grid.row_degrees, 4) is None  # points without their antipode
    assert not rotation_grid(3, 2).factored
    assert not sphere_grid(3).factored


@pytest.mark.parametrize("degree", [3, 6])
def test_bfloat16_takes_the_projectors_that_are_faster(degree: int) -> None:
    """Large ones up to degree 5, rounded once and padded to a tile; on a CPU the padding is cut off again."""
    grid = rotation_grid(degree, 1)
    factors = grid.factors()
    assert factors is not None
    large, small = factors.large_for(torch.bfloat16), factors.matrix_for(torch.bfloat16)
    assert (large is None) == (degree == 6) and (small is None) == (degree == 3)
    assert factors.matrix_for(torch.float32) is not None and factors.large_for(torch.float32) is None
    left, right = torch.randn(2, 5, len(grid.row_degrees), 1, 6).bfloat16()
    tables = [grid.get_buffer(name).bfloat16() for name in ("to_grid", "from_grid")]
    assert torch.equal(grid(left, right), grid_pair(left, right, *tables, 3))
    if large is not None:
        assert all(torch.equal(a[:, : b.shape[1]], b) for a, b in zip(large, tables, strict=True))


# The kernels, in Triton's interpreter.

# A column's error relative to its largest number. Each factor of a product is known to 22 bits (2.4e-7), three of them
# make a product, and sums of some hundred terms of either sign grow it little; found: 5e-7.
FLOAT32 = 2e-6
# bfloat16 has 8 bits (3.9e-3): projectors, values on the grid and the result are rounded to it; columns of few terms
# meet the worst of all three.
BFLOAT16 = 3e-2


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[float]]:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("grid_pair_cases.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rk13_rk15_kernels_in_the_interpreter(interpreted: dict[str, list[float]], case: Case) -> None:
    """Value, both first and all second derivatives, for odd sizes and every layout, against float64."""
    assert len(interpreted[case.name]) == 6
    assert max(interpreted[case.name]) < FLOAT32


def test_rk13_without_triton() -> None:
    """CPU tensors never need it."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from mlff.sezm.grid import rotation_grid\n"
        "print(rotation_grid(2, 1)(torch.ones(1, 9, 1, 3), torch.ones(1, 9, 1, 3)).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "riton" not in done.stderr  # torch has a remark for each operator


# Traced with forces and compiled.


def energy_and_weight_gradient(grid: Grid):
    """A function of weight, left, right that differentiates as a loss on forces does."""

    def run(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = (left * weight).transpose(0, 1).contiguous().transpose(0, 1)  # strides follow the number of nodes
        energy = grid(features, right * weight).square().sum()
        (force,) = torch.autograd.grad(energy, left, create_graph=True)
        (gradient,) = torch.autograd.grad(force.square().sum(), weight)
        return force.detach(), gradient

    return run


def inputs(nodes: int, grid: Grid, channels: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(nodes)
    shape = (nodes, len(grid.row_degrees), 1, grid.frames * channels)
    numbers = [torch.randn(s, generator=generator, dtype=torch.float64) for s in (shape[-1:], shape, shape)]
    return [x.to(device, dtype).requires_grad_() for x in numbers]


def traced_once(grid: Grid, channels: int, device: str, dtype: torch.dtype, backend: str, tolerance: float):
    """Trace with nodes as a symbol, compile cold, run at several sizes; return trace and number of graphs."""
    run = energy_and_weight_gradient(grid)
    graph = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(
        *inputs(5, grid, channels, device, dtype)
    )
    for node in list(graph.graph.nodes):  # a trace detaches saved results, which would cut the gradient of the force
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(graph, backend=counter, fullgraph=True, dynamic=True)
    found = {}
    for nodes in (5, 11, 6, 64):
        given = [x.detach() for x in inputs(nodes, grid, channels, device, dtype)]
        found[nodes] = [x.clone() for x in compiled(*given)]
    frames = counter.frame_count
    for nodes, values in found.items():  # eager only now: nothing was warm before
        for value, expected in zip(values, run(*inputs(nodes, grid, channels, device, dtype)), strict=True):
            assert (value - expected).abs().max() <= tolerance * expected.abs().max()
    return graph, frames


@pytest.mark.slow
def test_a4_rk9_rk10_one_graph_over_sizes_and_strides() -> None:
    grid = rotation_grid(2, 1).to(torch.float64)
    graph, frames = traced_once(grid, 2, "cpu", torch.float64, "aot_eager", 1e-10)
    assert frames == 1
    assert graph is not None


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a10_kernels_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    found, expected = all_orders(case, dtype, "cuda")
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype and a.is_cuda
        assert error(case, a, b) < (FLOAT32 if dtype == torch.float32 else BFLOAT16)


@pytest.mark.gpu
@pytest.mark.parametrize(("degree", "focus", "channels"), [(5, 2, 64), (5, 1, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a10_pro_s_layouts(degree: int, focus: int, channels: int, dtype: torch.dtype) -> None:
    case = Case(degree=degree, focus=focus, channels=channels, nodes=7, layout="degree major")
    found, expected = all_orders(case, dtype, "cuda")
    for a, b in zip(found, expected, strict=True):
        assert error(case, a, b) < (FLOAT32 if dtype == torch.float32 else BFLOAT16)


@pytest.mark.gpu
@pytest.mark.parametrize("factored", [True, False], ids=["factored", "dense"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a2_a8_a9_compiled_cold(dtype: torch.dtype, factored: bool) -> None:
    """A width of channels that nothing else uses: no launch is known before the graph is traced."""
    from mlff.kernels import launch as launcher

    launcher.forget()
    grid = rotation_grid(6, 1).to("cuda")
    grid.factored = factored
    channels = 7 if factored else 9
    tolerance = 1e-4 if dtype == torch.float32 else 0.1  # sums over all nodes of squares of squares
    _, frames = traced_once(grid, channels, "cuda", dtype, "inductor", tolerance)
    assert frames == 1
    chosen = {key[3]: fit for key, fit in launcher._choices.items() if key[0] == "device"}
    form = "factored" if factored else "dense"
    for name in ("forward", "backward", "double_backward"):
        assert chosen[f"{form}_{name}"] is not None, "a device of this size has a launch that fits"


@pytest.mark.gpu
def test_a8_the_reference_takes_over_in_eager_and_under_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from mlff.kernels import launch as launcher

    def too_small(*asked: object) -> int:
        raise OutOfResources(1, 0, "shared memory")

    monkeypatch.setattr(launcher, "_on_device", lambda device: too_small)
    launcher.forget()
    grid = rotation_grid(3, 1).to("cuda")
    grid.factored = False
    left, right = (torch.randn(9, 16, 1, 33, device="cuda") for _ in range(2))
    expected = reference.forward(left, right, grid.get_buffer("to_grid"), grid.get_buffer("from_grid"), 3)
    assert torch.equal(grid(left, right), expected)
    compiled = torch.compile(lambda a, b: grid(a, b), fullgraph=True)(left, right)
    assert torch.allclose(compiled, expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))
    launcher.forget()


@pytest.mark.gpu
def test_a3_the_kernel_that_was_checked_is_the_one_that_runs() -> None:
    """5 geometries x 2 dtypes x 3 orders x 4 layouts: after the check, no launch compiles anything."""
    import triton

    from mlff.kernels import launch as launcher

    compiled: list[str] = []
    launcher.forget()
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **given: compiled.append(given["repr"]) and None
    try:
        for degree, focus, channels in ((1, 1, 3), (2, 1, 6), (3, 2, 5), (4, 1, 10), (5, 2, 11)):
            for dtype in (torch.float32, torch.bfloat16):
                counts = []
                for layout in ("contiguous", "slices", "degree major", "shifted by one"):
                    before = len(compiled)
                    case = Case(degree=degree, focus=focus, channels=channels, nodes=4, layout=layout)
                    all_orders(case, dtype, "cuda")
                    counts.append(len(compiled) - before)
                assert counts == [3, 0, 0, 0]  # one for each order, by the check, and none by any launch
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook


@pytest.mark.gpu
def test_rk7_the_first_call_of_a_process_is_as_good_as_the_second() -> None:
    program = (
        "import torch\n"
        "from mlff.kernels import host\n"
        "from mlff.sezm.grid import rotation_grid\n"
        "host.SMALL = 0\n"
        "g = rotation_grid(3, 1).cuda()\n"
        "x = torch.ones(8, 16, 1, 15, device='cuda')\n"
        "print(bool((g(x, x) == g(x, x)).all()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "True"


@pytest.mark.gpu
def test_rk2_more_than_2_to_the_31_elements() -> None:
    """First, middle and last nodes equal those of a small product; the last is reached by 64-bit offsets alone."""
    grid = rotation_grid(1, 1).cuda()
    width, nodes = 3 * 32, 2**31 // (4 * 3 * 32) + 5
    need = 4 * nodes * 4 * width * 2
    if torch.cuda.mem_get_info()[0] < need:
        pytest.skip(f"needs {need / 2**30:.0f} GiB of GPU memory")
    some = torch.randn(12, 4, 1, width, device="cuda", dtype=torch.bfloat16)
    left = torch.zeros(nodes, 4, 1, width, device="cuda", dtype=torch.bfloat16)
    at = [*range(4), *range(nodes // 2, nodes // 2 + 4), *range(nodes - 4, nodes)]
    left[at] = some
    assert left.numel() > 2**31
    assert torch.equal(grid(left, left)[at], grid(some, some))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices; this machine has fewer")
@pytest.mark.parametrize("here", [0, 1])
@pytest.mark.parametrize("own_stream", [False, True])
def test_rk1_inputs_on_another_device_than_the_current(here: int, own_stream: bool) -> None:
    there = 1 - here
    grid = rotation_grid(3, 1).to(f"cuda:{there}")
    left = torch.randn(9, 16, 1, 15, device=f"cuda:{there}", requires_grad=True)

    def run() -> list[torch.Tensor]:
        out = grid(left, left)
        (force,) = torch.autograd.grad(out.square().sum(), left, create_graph=True)
        return [out, force, *torch.autograd.grad(force.square().sum(), left)]

    with torch.cuda.device(there):
        expected = run()
    with torch.cuda.device(here):
        stream = torch.cuda.Stream(there) if own_stream else torch.cuda.current_stream(there)
        with torch.cuda.stream(stream):
            found = run() if not own_stream else _in_current(here, run)
        stream.synchronize()
        assert torch.cuda.current_device() == here
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def _in_current(device: int, run):  # a stream's block makes its device current: go back to the other one
    with torch.cuda.device(device):
        return run()
