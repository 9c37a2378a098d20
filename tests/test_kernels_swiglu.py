"""SwiGLU and SiLU: their definition, three orders of derivatives, layouts, devices, and the words of their errors.

The Triton kernels run here in Triton's interpreter, which must be chosen before they are imported. So this file is also
a program: `TRITON_INTERPRET=1 python tests/test_kernels_swiglu.py` prints the results of `interpreted_results`, one run
for all tests that ask for them.
"""

# A list of tensors, unpacked, could hold a dtype for all that pyright knows.
# pyright: reportArgumentType=false

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mlff.kernels import silu_reference, swiglu_reference
from mlff.kernels.silu import silu
from mlff.kernels.swiglu import swiglu, swiglu_packed

ROOT = Path(__file__).parents[1]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ORDERS = ["gate_up", "up_gate"]

# float32 in kernel and reference: about ten operations, each exact to eps, on numbers of order one to ten.
FLOAT32 = 2e-6
# One rounding at the end: half a unit in the last place of float16 (2⁻¹¹) and bfloat16 (2⁻⁸), and the same again where
# float32 differs so that the other neighbour is nearer.
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: FLOAT32}


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device, dtype)


def three_orders(function: Callable[..., Tensor], inputs: Sequence[Tensor], seed: int = 9) -> list[Tensor]:
    """The result, the gradients of all inputs, and the gradients of a weighted sum of those."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    weight = numbers(*out.shape, seed=seed).to(out).requires_grad_()
    grads = torch.autograd.grad(out, inputs, weight, create_graph=True)
    weights = [numbers(*x.shape, seed=seed + 1 + k).to(x) for k, x in enumerate(grads)]
    return [out, *grads, *torch.autograd.grad(grads, [weight, *inputs], weights)]


def eager(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def eager_packed(order: str) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return eager(one, other) if order == "gate_up" else eager(other, one)

    return product


def packed(order: str) -> Callable[[Tensor], Tensor]:
    return lambda x: swiglu_packed(x, order)


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative where numbers are large; infinite where shapes differ."""
    largest = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return math.inf
        if one.numel():
            difference = (one.double() - other.double()).abs() / (1 + other.double().abs())
            largest = max(largest, difference.max().item() if bool(difference.isfinite().all()) else math.inf)
    return largest


def layouts(rows: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    """Tensors (rows, width) of the same kind of numbers in every layout of R-K3, in float64."""
    return {
        "contiguous": numbers(rows, width, seed=seed),
        "chunk": numbers(rows, 2 * width, seed=seed).chunk(2, -1)[1],
        "transpose": numbers(width, rows, seed=seed).T,
        "every second row": numbers(2 * rows, width, seed=seed)[::2],
        "without the first channel": numbers(rows, width + 1, seed=seed)[..., 1:],
        "every second channel": numbers(rows, 2 * width, seed=seed)[:, ::2],
        "expanded rows": numbers(1, width, seed=seed).expand(rows, width),
        "expanded channels": numbers(rows, 1, seed=seed).expand(rows, width),
        "two strides": numbers(rows, 3, 2, width, seed=seed)[:, 0, 0],
    }


def like(values: Tensor, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A tensor of another dtype with the same strides."""
    room = torch.empty_strided(values.shape, values.stride(), dtype=dtype, device=device)
    if 0 in values.stride() and values.numel():
        full = values[tuple(slice(0, 1) if s == 0 else slice(None) for s in values.stride())]
        return full.to(device, dtype).expand(values.shape)
    return room.copy_(values)


# What runs in Triton's interpreter.


def interpreted_results() -> dict[str, Any]:
    """Run the kernels in the interpreter and return what the tests below hold to."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    from mlff.kernels import silu_triton, swiglu_triton

    torch.set_num_threads(1)
    single = torch.float32
    results: dict[str, Any] = {"numerics": {}, "layouts": {}, "odd": {}, "around": {}}

    def compare(function: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: Sequence[Tensor]) -> float:
        found = three_orders(function, [like(x, single) for x in inputs])
        assert all(x.dtype == single for x in found)
        return error(found, three_orders(plain, [like(x, single).double() for x in inputs]))

    for size in (0, 1, 127, 128, 129, 1000):
        gate, up = (numbers(size, seed=k) for k in range(2))
        results["numerics"][f"silu {size}"] = compare(silu, functional.silu, [gate])
        results["numerics"][f"swiglu {size}"] = compare(swiglu, eager, [gate, up])
        strided = [numbers(size, 9, seed=k)[:, 2:7] for k in range(2)]
        results["numerics"][f"strided {size}"] = compare(swiglu, eager, strided)
        for order in ORDERS:
            both = numbers(size, 12)[:, 1:11]
            results["numerics"][f"{order} {size}"] = compare(packed(order), eager_packed(order), [both])

    for name, gate in layouts(6, 10).items():
        up = layouts(6, 10, seed=1)["chunk"]  # another stride than most
        results["layouts"][name] = max(
            compare(silu, functional.silu, [gate]),
            compare(swiglu, eager, [gate, up]),
            compare(swiglu, eager, [up, gate]),
            *(compare(packed(order), eager_packed(order), [gate]) for order in ORDERS),
        )
    results["layouts"]["gradient expanded from a scalar"] = expanded_gradient(single)

    for rows, width in [(5, width) for width in WIDTHS] + [(rows, 7) for rows in ROWS]:
        both = numbers(rows, 2 * width)
        results["odd"][f"{rows} x {width}"] = max(
            compare(swiglu, eager, both.chunk(2, -1)), compare(packed("up_gate"), eager_packed("up_gate"), [both])
        )
        results["around"][f"{rows} x {width}"] = intact(rows, width, single, "cpu")

    gate, up = (numbers(37, 24, seed=k, dtype=single) for k in range(2))
    results["training is inference"] = training_is_inference(gate, up)
    results["inputs"] = inputs_stay(single)
    results["table"] = table_of_values(single)
    results["empty"] = empty_shapes(single)
    results["far"] = far_apart(silu_triton)
    results["refused"] = refusals(single)
    # A tensor in a dtype that the interpreter does not round as a GPU does goes to the reference.
    half = [x.to(torch.bfloat16) for x in (gate, up)]
    results["half"] = torch.equal(swiglu(*half), swiglu_reference.forward(*half))
    results["kernels"] = len(silu_triton.KERNELS + swiglu_triton.KERNELS + swiglu_triton.PACKED_KERNELS)
    return results


def expanded_gradient(dtype: torch.dtype, device: str = "cpu") -> float:
    """What `sum` sends back has strides of zero."""
    worst = 0.0
    for function, plain, count in ((swiglu, eager, 2), (packed("gate_up"), eager_packed("gate_up"), 1)):
        inputs = [numbers(7, 12, seed=k, dtype=dtype, device=device).requires_grad_() for k in range(count)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        found = torch.autograd.grad(function(*inputs).sum(), inputs)
        worst = max(worst, error(found, torch.autograd.grad(plain(*exact).sum(), exact)))
    return worst


def intact(rows: int, width: int, dtype: torch.dtype, device: str) -> bool:
    """Whether kernels write their results and nothing around them; rooms are NaN before."""
    from mlff.kernels import silu_triton, swiglu_triton

    def room(*shape: int) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        whole = torch.full((size + 66,), math.nan, dtype=dtype, device=device)
        return whole, whole[33 : 33 + size].view(shape)

    x, a, b, c, d = (numbers(rows, width, seed=k, dtype=dtype, device=device) for k in range(5))
    both = [numbers(rows, 2 * width, seed=k, dtype=dtype, device=device) for k in range(2)]
    narrow, wide = (rows, width), (rows, 2 * width)
    cases = [
        (silu_triton.KERNELS, [(x,), (a, x), (b, a, x)], [[narrow], [narrow], [narrow] * 2], ()),
        (swiglu_triton.KERNELS, [(x, a), (b, x, a), (c, d, b, x, a)], [[narrow], [narrow] * 2, [narrow] * 3], ()),
        (
            swiglu_triton.PACKED_KERNELS,
            [(both[0],), (x, both[0]), (both[1], x, both[0])],
            [[narrow], [wide], [narrow, wide]],
            (1, 0),
        ),
    ]
    for kernels, operands, shapes, halves in cases:
        for kernel, given, wanted in zip(kernels, operands, shapes, strict=True):
            rooms = [room(*shape) for shape in wanted]
            assert silu_triton.run_rows(kernel, given, [view for _, view in rooms], halves)
            for whole, view in rooms:
                if not bool(view.isfinite().all()) or int(whole.isnan().sum()) != 66:
                    return False
    return True


def training_is_inference(gate: Tensor, up: Tensor) -> bool:
    """Whether results with and without gradients are the same bits."""
    for function, inputs in (
        (silu, (gate,)),
        (swiglu, (gate, up)),
        (lambda g, u: swiglu(g, u, torch.float32), (gate, up)),
        (packed("gate_up"), (torch.cat((gate, up), -1),)),
    ):
        with torch.inference_mode():
            inference = function(*inputs)
        training = function(*(x.detach().requires_grad_() for x in inputs))
        if not torch.equal(inference, training.detach()):
            return False
    return True


def inputs_stay(dtype: torch.dtype, device: str = "cpu") -> bool:
    """In x -> exp -> swiglu(e, e) -> sum, e is as it was after backward, and a second backward gives the same."""
    x = numbers(9, 20, dtype=dtype, device=device).requires_grad_()
    e = x.exp()
    before = e.detach().clone()
    total = swiglu(e, e).sum()
    first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(eager(exact.exp(), exact.exp()).sum(), exact)
    # The gradients of both uses of e are rounded, added, and multiplied by e.
    near = error([first], [expected]) < 4 * ROUNDING.get(dtype, 1e-12)
    return torch.equal(e.detach(), before) and torch.equal(first, second) and near


# silu and its derivatives: order, where, value.
TABLE = [
    (0, 1.0, 0.7310585786),
    (1, 1.0, 0.9276705119),
    (2, 1.0, 0.3023661188),
    (2, 0.0, 0.5),
    (0, -2.0, -0.2384058440),
    (1, -2.0, -0.0907842488),
    (2, 3.0, -0.0323214045),
]


def table_of_values(dtype: torch.dtype, device: str = "cpu") -> dict[str, float]:
    """Differences from `TABLE`, for silu and for swiglu with up = 1, and behaviour far from zero."""
    worst = 0.0
    one = torch.ones(1, dtype=dtype, device=device)
    for function in (silu, lambda x: swiglu(x, one), lambda x: swiglu_packed(torch.cat((one, x)), "up_gate")):
        for order, where, value in TABLE:
            x = torch.full((1,), where, dtype=dtype, device=device, requires_grad=True)
            y = function(x)
            for _ in range(order):
                (y,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            worst = max(worst, abs(y.item() - value))
    gate, up = (torch.ones(1, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    (slope,) = torch.autograd.grad(swiglu(gate, up), gate, one, create_graph=True)
    mixed = torch.autograd.grad(slope, up, one)[0].item()
    far = torch.tensor([100.0, -100.0], dtype=dtype, device=device, requires_grad=True)
    values = silu(far)
    (first,) = torch.autograd.grad(values.sum(), far, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), far)
    return {
        "table": worst,
        "mixed": abs(mixed - 0.9276705119),
        "far": (values.detach() - torch.tensor([100.0, 0.0], dtype=dtype, device=device)).abs().max().item(),
        "finite": float(first.isfinite().all() and second.isfinite().all()),
    }


def empty_shapes(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Whether results and gradients of empty tensors have the right shape, dtype and device."""
    for shape in ((0, 64), (0, 3, 8), (5, 0)):
        for function, count in ((silu, 1), (swiglu, 2), (packed("gate_up"), 1)):
            inputs = [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]
            found = three_orders(function, inputs)
            half = (*shape[:-1], shape[-1] // 2)
            shapes = [half if count == 1 and function is not silu else shape, *[shape] * count]
            expected = [*shapes, shapes[0], *[shape] * count]
            if [tuple(x.shape) for x in found] != expected:
                return False
            if any(x.dtype != dtype or x.device.type != device for x in found):
                return False
    return True


def far_apart(silu_triton: Any) -> bool | None:
    """Rows further apart than 2³¹ numbers; few pages of that memory are ever touched. None: it is not to be had."""
    try:
        whole = torch.empty(2**31 + 64)
    except RuntimeError:
        return None
    x = whole.as_strided((2, 8), (2**31 + 8, 1))
    x.copy_(numbers(2, 8))
    return error([silu_triton.forward(x)], [functional.silu(x.double())]) < FLOAT32


def refusals(dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """What the operators say to a third derivative."""
    said = []
    for function, count in ((silu, 1), (swiglu, 2), (packed("gate_up"), 1)):
        inputs = [numbers(2, 4, seed=k, dtype=dtype, device=device).requires_grad_() for k in range(count)]
        y = function(*inputs).sum()
        for _ in range(2):
            (y, *_) = torch.autograd.grad(y, inputs, create_graph=True)
            y = y.square().sum()
        try:
            torch.autograd.grad(y, inputs)
        except RuntimeError as refused:
            said.append(str(refused))
    return said


WIDTHS = (1, 2, 3, 7, 31, 33, 64, 100, 127, 129, 1000)
ROWS = (1, 2, 5, 1023, 1025)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """Results of the kernels in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed, so that its interpreter cannot run")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Definition and derivatives.


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_b2_dtypes_and_entry_points(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    """Output in the operands' dtype or float32; computed in float32 at least and rounded once, in all three orders."""
    gate, up = (numbers(33, 20, seed=k, dtype=dtype) for k in range(2))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    expected = eager(gate.to(exact), up.to(exact)).to(out_dtype or dtype)
    assert torch.equal(swiglu(gate, up, out_dtype), expected)
    up, gate = (both := torch.cat((up, gate), -1)).chunk(2, -1)  # strides too, since sigmoids of PyTorch depend on them
    expected = eager(gate.to(exact), up.to(exact)).to(out_dtype or dtype)
    assert torch.equal(swiglu_packed(both, "up_gate", out_dtype), expected)
    found = three_orders(lambda g, u: swiglu(g, u, out_dtype), (gate, up))
    out = out_dtype or dtype
    assert [x.dtype for x in found] == [out, dtype, dtype, out, dtype, dtype]
    plain = three_orders(eager, (gate.double(), up.double()))
    # The reference rounds gradients between orders; float64 is limited by a float32 result where that is asked for.
    tolerance = 1e-12 if out == torch.float64 else 2 * ROUNDING.get(dtype, FLOAT32)
    assert error(found[:1], plain[:1]) < tolerance


@pytest.mark.parametrize("order", ORDERS)
def test_b3_packed_in_both_orders(order: str) -> None:
    x = numbers(7, 3, 10)
    one, other = x.chunk(2, -1)
    gate, up = (one, other) if order == "gate_up" else (other, one)
    assert torch.equal(swiglu_packed(x, order), functional.silu(gate) * up)
    found, expected = three_orders(packed(order), [x]), three_orders(eager_packed(order), [x])
    assert error(found, expected) < 1e-14


OPERATORS = {
    "silu": lambda x: torch.ops.mlff.silu(x),
    "swiglu": lambda gate, up: torch.ops.mlff.swiglu(gate, up, gate.dtype),
    "gate_up": lambda x: torch.ops.mlff.swiglu_packed(x, True, x.dtype),
    "up_gate": lambda x: torch.ops.mlff.swiglu_packed(x, False, x.dtype),
}
FUNCTIONS = {"silu": silu, "swiglu": swiglu, "gate_up": packed("gate_up"), "up_gate": packed("up_gate")}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("functions", [OPERATORS, FUNCTIONS], ids=["operator", "function"])
@pytest.mark.parametrize("alone", [None, 0, 1])
def test_r_k6_gradcheck(name: str, functions: dict[str, Callable[..., Tensor]], alone: int | None) -> None:
    """First and second derivatives against differences: all inputs, and each alone."""
    count = 2 if name == "swiglu" else 1
    if alone is not None and alone >= count:
        pytest.skip("has one input")
    inputs = [numbers(3, 4, seed=k).requires_grad_(alone in (None, k)) for k in range(count)]
    assert torch.autograd.gradcheck(functions[name], inputs)
    assert torch.autograd.gradgradcheck(functions[name], inputs)


def hold_to_table(found: dict[str, float], tolerance: float) -> None:
    assert found["table"] < tolerance
    assert found["mixed"] < tolerance
    assert found["far"] < 1e-30
    assert found["finite"] == 1.0


def test_r_k6_values() -> None:
    """silu, silu' and silu'' at known places; ten digits are given."""
    hold_to_table(table_of_values(torch.float64), 1e-10)


def test_r_k6_values_of_the_kernels(interpreted: dict[str, Any]) -> None:
    hold_to_table(interpreted["table"], 2e-7)  # eps of float32, and the digits that are given


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    x, y, z, w = (numbers(3, 4, seed=k).requires_grad_() for k in range(4))
    u = numbers(3, 4, seed=9).requires_grad_()
    half = numbers(3, 2).requires_grad_()
    ops = torch.ops.mlff
    calls = {
        "silu": [(ops.silu, (x,)), (ops.silu_backward, (x, y)), (ops.silu_double_backward, (x, y, z))],
        "swiglu": [
            (ops.swiglu, (x, y, torch.float64)),
            (ops.swiglu_backward, (x, y, z)),
            (ops.swiglu_double_backward, (x, y, z, w, u)),
        ],
    }
    for order in ORDERS:
        first = order == "gate_up"
        calls[order] = [
            (ops.swiglu_packed, (x, first, torch.float64)),
            (ops.swiglu_packed_backward, (half, x, first)),
            (ops.swiglu_packed_double_backward, (y, half, x, first)),
        ]
    for k, (operator, arguments) in enumerate(calls[name]):
        if k == 2:  # its derivative is refused, which opcheck would take for a fault
            arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("name", OPERATORS)
def test_third_derivative_is_refused(name: str) -> None:
    inputs = [numbers(2, 4, seed=k).requires_grad_() for k in range(2 if name == "swiglu" else 1)]
    y = OPERATORS[name](*inputs).sum()
    for _ in range(2):
        (y, *_) = torch.autograd.grad(y, inputs, create_graph=True)
        y = y.square().sum()
    with pytest.raises(RuntimeError, match="first and second derivatives; a third one was asked for"):
        torch.autograd.grad(y, inputs)


def test_third_derivative_of_the_kernels_is_refused(interpreted: dict[str, Any]) -> None:
    assert len(interpreted["refused"]) == 3
    assert all("a third one was asked for" in said for said in interpreted["refused"])


# The kernels in the interpreter.


def test_interpreter_agrees_with_float64(interpreted: dict[str, Any]) -> None:
    """Three orders at sizes 0, 1, 127, 128, 129, 1000, contiguous, strided and packed."""
    assert len(interpreted["numerics"]) == 6 * 5
    assert max(interpreted["numerics"].values()) < FLOAT32
    assert min(value for name, value in interpreted["numerics"].items() if not name.endswith(" 0")) > 0  # they ran


def test_half_precision_is_not_interpreted(interpreted: dict[str, Any]) -> None:
    assert interpreted["half"]


@pytest.mark.parametrize("name", [*layouts(1, 1), "gradient expanded from a scalar"])
def test_r_k3_layouts(interpreted: dict[str, Any], name: str) -> None:
    """Every layout as an input gives what eager does, by the kernels and by the reference."""
    assert interpreted["layouts"][name] < FLOAT32
    if name.startswith("gradient"):
        assert expanded_gradient(torch.float64) < 1e-14
        return
    gate, up = layouts(6, 10)[name], layouts(6, 10, seed=1)["chunk"]
    assert error(three_orders(swiglu, (gate, up)), three_orders(eager, (gate, up))) < 1e-14


def test_r_k4_empty(interpreted: dict[str, Any]) -> None:
    assert interpreted["empty"]
    assert empty_shapes(torch.float32)


@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 8), (5, 0)])
def test_r_k4_empty_compiled_and_exported(shape: tuple[int, ...]) -> None:
    for name, function in OPERATORS.items():
        inputs = [torch.empty(shape) for _ in range(2 if name == "swiglu" else 1)]
        expected = function(*inputs)
        compiled = torch.compile(function, backend="aot_eager")(*inputs)
        exported = torch.export.export(Wrapped(FUNCTIONS[name]), tuple(inputs)).module()(*inputs)
        assert compiled.shape == exported.shape == expected.shape
        assert compiled.dtype == exported.dtype == expected.dtype


def test_r_k5_inputs_are_not_overwritten(interpreted: dict[str, Any]) -> None:
    assert interpreted["inputs"]
    assert inputs_stay(torch.float64)


def test_r_k15_odd_sizes(interpreted: dict[str, Any]) -> None:
    """Each width and each number of rows; the full square of them is tested on a GPU."""
    assert len(interpreted["odd"]) == len(set(WIDTHS)) + len(ROWS) - 1
    assert max(interpreted["odd"].values()) < FLOAT32


def test_r_k15_memory_around_results_is_untouched(interpreted: dict[str, Any]) -> None:
    assert all(interpreted["around"].values()), interpreted["around"]


def test_b4_training_is_inference(interpreted: dict[str, Any]) -> None:
    """Bit for bit, by the kernels and by the reference."""
    assert interpreted["training is inference"]
    for dtype in DTYPES:
        assert training_is_inference(*(numbers(37, 24, seed=k, dtype=dtype) for k in range(2)))


def test_b8_offsets_are_64_bit(interpreted: dict[str, Any]) -> None:
    """Rows that are more than 2³¹ numbers apart."""
    if interpreted["far"] is None:
        pytest.skip("this machine does not lend 8 GiB of addresses")
    assert interpreted["far"]


def test_b8_empty_and_odd_sizes(interpreted: dict[str, Any]) -> None:
    assert interpreted["empty"]
    assert max(value for name, value in interpreted["numerics"].items() if "129" in name) < FLOAT32


# Compilers.


class Wrapped(torch.nn.Module):
    """A function as a module, which export asks for."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


@pytest.mark.parametrize("name", OPERATORS)
def test_r_k9_sizes_are_run_time_values(name: str) -> None:
    """Compiled and exported at 37 rows, right at 53 and 1000, forward and backward, in one compilation."""
    count = 2 if name == "swiglu" else 1
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def at(rows: int) -> list[Tensor]:
        return [numbers(rows, 12, seed=k, dtype=torch.float32) for k in range(count)]

    compiled = torch.compile(OPERATORS[name], backend=backend, dynamic=True)
    gradient = torch.compile(OPERATORS[name], backend="aot_eager", dynamic=True)
    rows = torch.export.Dim("rows", min=2)
    shapes = {"inputs": tuple({0: rows} for _ in range(count))}
    exported = torch.export.export(Wrapped(FUNCTIONS[name]), tuple(at(37)), dynamic_shapes=shapes).module()
    for size in (37, 53, 1000):
        inputs = at(size)
        expected = FUNCTIONS[name](*inputs)
        assert error([compiled(*inputs)], [expected]) < FLOAT32
        assert error([exported(*inputs)], [expected]) < FLOAT32
        needed = [x.requires_grad_() for x in inputs]
        found = torch.autograd.grad(gradient(*needed).sum(), needed)
        assert error(found, torch.autograd.grad(FUNCTIONS[name](*needed).sum(), needed)) < FLOAT32
    assert len(graphs) == 1


def test_r_k14_export_on_a_cpu_holds_the_reference() -> None:
    """An exported function on a CPU is plain PyTorch, which runs wherever PyTorch does, and equals eager."""
    gate, up = (numbers(5, 8, seed=k, dtype=torch.float32) for k in range(2))
    program = torch.export.export(Wrapped(swiglu), (gate, up))
    assert "mlff" not in str(program.graph)
    assert error([program.module()(gate, up)], [eager(gate, up)]) < 1e-6


def test_compilers_see_kernels_and_copy_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is not there: all nine kernels are in the graph, and what they write is their results alone.

    A kernel that a compiler cannot read counts as one that writes to all its arguments, which are then copied.
    """
    pytest.importorskip("triton")
    import triton
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from triton.backends.compiler import GPUTarget

    from mlff.kernels import launch, silu_triton

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    monkeypatch.setattr(silu_triton, "choose", lambda kernel, arguments, constants, candidates, device: candidates[0])
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    ops = torch.ops.mlff

    def everything(x: Tensor, y: Tensor) -> list[Tensor]:
        gate, up = x.chunk(2, -1)
        out, one, both = swiglu(gate, up), ops.swiglu_backward(y, gate, up), swiglu_packed(x, "gate_up")
        two = ops.swiglu_packed_backward(y, x, True)
        return [
            *(out, both, silu(y), *one, two, ops.silu_backward(y, y)),
            *ops.swiglu_double_backward(*one, y, gate, up),
            *ops.swiglu_packed_double_backward(two, y, x, True),
            *ops.silu_double_backward(y, y, y),
        ]

    with FakeTensorMode(), torch.no_grad():
        inputs = torch.empty(37, 64, device="cuda"), torch.empty(37, 32, device="cuda")
        graph = make_fx(dispatch_functionalize(everything))(*inputs).graph
    calls = [node for node in graph.nodes if "triton_kernel_wrapper_functional" in str(node.target)]
    written = [set(node.kwargs["tensors_to_clone"]) for node in calls]
    given = [{name for name in node.kwargs["kwargs"] if name.startswith("out")} for node in calls]
    assert len(calls) == 9
    assert written == given


# Autocast.


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_r_k11_autocast_of_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    gate, up = (numbers(6, 8, seed=k, dtype=dtypes[k]).requires_grad_() for k in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = swiglu(gate, up), eager(gate, up)
    assert out.dtype == expected.dtype
    grads = torch.autograd.grad(out.sum(), (gate, up))  # outside the block
    assert [x.dtype for x in grads] == list(dtypes)
    exact = torch.autograd.grad(eager(gate.double(), up.double()).sum(), (gate, up))
    assert error(grads, exact) < ROUNDING[torch.bfloat16]


def test_r_k11_autocast_of_float32_weights() -> None:
    """A linear map in bfloat16 feeds both; the weights' gradients are float32."""
    x = numbers(6, 8, dtype=torch.float32)
    layer = torch.nn.Linear(8, 10)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layer(x)
        out, expected = swiglu_packed(hidden, "up_gate"), eager_packed("up_gate")(hidden)
    assert out.dtype == expected.dtype == torch.bfloat16
    out.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    assert bool(layer.weight.grad.isfinite().all())


# Errors come before any launch.


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on any call of an operator."""
    from mlff.kernels import silu as silu_module
    from mlff.kernels import swiglu as swiglu_module

    def refuse(*_: Any) -> None:
        raise AssertionError("an operator was called")

    monkeypatch.setattr(silu_module, "_forward", refuse)
    for name in ("_forward", "_packed_forward"):
        monkeypatch.setattr(swiglu_module, name, refuse)


@pytest.mark.usefixtures("no_launch")
def test_b9_errors_before_any_launch() -> None:
    x, y = numbers(4, 6), numbers(4, 6, seed=1)
    elsewhere = torch.empty(4, 6, dtype=torch.float64, device="meta")
    for call, words in (
        (lambda: swiglu(x, y[:, :5]), r"one shape; got \(4, 6\) and \(4, 5\)"),
        (lambda: swiglu(x, y[:1]), "one shape"),
        (lambda: swiglu(x, elsewhere), "one device; got cpu and meta"),
        (lambda: swiglu(elsewhere, x), "one device; got meta and cpu"),
        (lambda: swiglu(x, y.float()), "one floating dtype; got torch.float64 and torch.float32"),
        (lambda: swiglu(x.long(), y.long()), "one floating dtype; got torch.int64"),
        (lambda: swiglu(x, y, torch.bfloat16), "out_dtype must be that of the operands, torch.float64, or"),
        (lambda: swiglu_packed(x, "gate"), "order must be 'gate_up' or 'up_gate'; got 'gate'"),
        (lambda: swiglu_packed(x[:, :5], "gate_up"), r"two halves, an even number of channels; got \(4, 5\)"),
        (lambda: swiglu_packed(x.long(), "gate_up"), "floating dtype; got torch.int64"),
        (lambda: silu(x.long()), r"floating numbers; got torch.int64. Convert"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# Where kernels cannot run.


def test_r_k13_the_kernel_itself_on_a_cpu() -> None:
    """The function takes the reference; the kernel, asked for by name, says what it needs."""
    swiglu_triton = pytest.importorskip("mlff.kernels.swiglu_triton")
    gate, up = (numbers(4, 6, seed=k, dtype=torch.float32) for k in range(2))
    assert torch.equal(swiglu(gate, up), swiglu_reference.forward(gate, up))
    assert torch.equal(silu(gate), silu_reference.forward(gate))
    with pytest.raises(RuntimeError, match="Triton kernels run on a GPU, or on a CPU if TRITON_INTERPRET=1"):
        swiglu_triton.forward(gate, up, torch.float32)


def test_r_k13_without_triton() -> None:
    """Importing works, and where the kernels would have run that is said once."""
    program = """
import logging, sys
sys.modules["triton"] = None  # what an import of a missing package meets
logging.basicConfig(format="%(message)s")
import torch
from mlff.kernels.host import triton_version
from mlff.kernels.silu import silu
from mlff.kernels.swiglu import swiglu
x = torch.ones(3)
assert torch.equal(swiglu(x, x), torch.nn.functional.silu(x)) and torch.equal(silu(x), torch.nn.functional.silu(x))
assert triton_version("swiglu", "cuda", torch.float32) is None
assert triton_version("swiglu", "cuda", torch.float32) is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Triton is not installed, so plain PyTorch takes over") == 1


def test_r_k12_importing_writes_nothing(tmp_path: Path) -> None:
    """A home that is not there is no harm, and neither it nor a cache appears by an import and a call on a CPU."""
    home = tmp_path / "missing"
    program = "import torch, mlff.kernels.swiglu_triton, mlff.kernels.swiglu as s; x = torch.ones(2); s.swiglu(x, x)"
    places = {"HOME": str(home), "TRITON_CACHE_DIR": str(home / "cache"), "XDG_CACHE_HOME": str(home / "xdg")}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **places}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("place", ["HOME", "TRITON_CACHE_DIR"])
def test_r_k12_no_cache_folder(place: str) -> None:
    """A kernel compiles in a temporary folder, which is said once."""
    pytest.importorskip("triton")
    program = """
import os, torch, triton
from mlff.kernels import silu_triton
from mlff.kernels.launch import fit_offline
for kernel, operands in zip(silu_triton.KERNELS[:2], (2, 3)):
    arguments = [torch.float32] * operands + [int] * (operands + 1)
    assert fit_offline(kernel, arguments, {}, silu_triton.launches(None), 90) is not None
print(triton.knobs.cache.dir)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    environment[place] = os.devnull + "/folder"  # nobody can make it, not even root
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1
    folder = Path(done.stdout.strip())
    assert folder.is_dir()
    shutil.rmtree(folder)


# The launcher and the device.


class Devices:
    """A double of `torch.cuda` that records which device is current, and which launches were made on which."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.launches: list[tuple[str, int]] = []

    def current_device(self) -> int:
        return self.current

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    launch = pytest.importorskip("mlff.kernels.launch")
    double = Devices(current=0)
    asked = []

    def module_of(device: torch.device) -> Devices:
        asked.append(device)
        return double

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.name = kernel.fn.__name__

        def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., None]:
            def call(**arguments: Any) -> None:
                double.launches.append((self.name, double.current))
                if arguments["width"] == 13:
                    raise RuntimeError("launch failed")

            return call

    monkeypatch.setattr(torch, "get_device_module", module_of)
    monkeypatch.setattr(launch, "wrap_triton", Recorded)
    return double


def all_kernels() -> list[Any]:
    from mlff.kernels import silu_triton, swiglu_triton

    return [*silu_triton.KERNELS, *swiglu_triton.KERNELS, *swiglu_triton.PACKED_KERNELS]


def runtime_arguments(kernel: Any, width: int) -> list[Any]:
    """A number for each number, a tensor for each pointer."""
    parameters = [p for p in inspect.signature(kernel.fn).parameters.values() if not p.name.isupper()]
    return [width if "int64" in str(p.annotation) else torch.empty(1) for p in parameters]


@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("fails", [False, True])
def test_b1_launches_are_made_on_the_device_of_the_input(devices: Devices, target: int, fails: bool) -> None:
    """Both directions: the launch sees the input's device, the caller finds its own again, also after an error."""
    from mlff.kernels.launch import run
    from mlff.kernels.silu_triton import launches

    devices.current = 1 - target
    for kernel in all_kernels():
        values = runtime_arguments(kernel, 13 if fails else 8)
        context = pytest.raises(RuntimeError, match="launch failed") if fails else contextlib.nullcontext()
        with context:
            run(kernel, (1,), values, {}, launches(8)[0], torch.device("cuda", target))
        assert devices.current == 1 - target
    assert len(devices.launches) == 9
    assert {where for _, where in devices.launches} == {target}


def test_b6_silu_has_the_same_guard(devices: Devices) -> None:
    from mlff.kernels import silu_triton
    from mlff.kernels.launch import run

    for kernel in silu_triton.KERNELS:
        run(kernel, (1,), runtime_arguments(kernel, 8), {}, silu_triton.launches(8)[0], torch.device("cuda", 1))
    assert devices.launches == [(name, 1) for name in ("silu_forward", "silu_backward", "silu_double_backward")]


def test_b7_device_modules_and_the_minimum_that_has_them() -> None:
    """`torch.get_device_module` came with torch 2.6; every file that names a minimum names the same one, not older."""
    assert callable(torch.get_device_module)
    files = ["pyproject.toml", "README.md", "CONTRIBUTING.md", *(p.as_posix() for p in (ROOT / "docs").glob("*.md"))]
    found = {
        tuple(map(int, version.split(".")))
        for name in files
        for version in re.findall(r"\btorch\s*(?:>=|≥)\s*(\d+(?:\.\d+)+)", (ROOT / name).read_text())
    }
    assert len(found) == 1, found
    assert found.pop() >= (2, 6)


# Compilation for GPUs that are not there.


def offline(kernel: Any, dtype: torch.dtype, capability: int, candidates: Sequence[Any]) -> Any:
    from mlff.kernels.launch import fit_offline

    arguments = [int if isinstance(x, int) else dtype for x in runtime_arguments(kernel, 8)]
    return fit_offline(kernel, arguments, {}, candidates, capability)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_kernel_fits_every_architecture(capability: int, dtype: torch.dtype) -> None:
    """Each launch of each kernel, in one long row and in rows of 96."""
    from mlff.kernels.silu_triton import launches

    for kernel in all_kernels():
        for candidate in {*launches(None), *launches(96)}:
            assert offline(kernel, dtype, capability, [candidate]) is not None, (kernel, candidate)


def test_loads_are_wide() -> None:
    """All loads and stores of one branch take 16 bytes, without which half of the bandwidth is lost."""
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mlff.kernels.silu_triton import launches
    from mlff.kernels.swiglu_triton import swiglu_packed_backward as kernel

    names = [name for name in kernel.arg_names if not name.isupper()]
    for type_name, per_thread in (("*bf16", 1), ("*fp32", 2)):  # 8 numbers a thread
        types = dict(zip(names, runtime_arguments(kernel, 8), strict=True))
        signature = {name: "i64" if isinstance(x, int) else type_name for name, x in types.items()}
        for candidate in (launches(None)[0], launches(96)[0]):
            blocks = dict(candidate.blocks)
            source = ASTSource(kernel, {**signature, **dict.fromkeys(blocks, "constexpr")}, constexprs=blocks, attrs={})
            options = {"num_warps": candidate.warps}
            code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
            assert len(re.findall(r"ld\.global[.\w:]*v4\.b32", code)) == 3 * per_thread  # grad, gate, up
            assert len(re.findall(r"st\.global[.\w:]*v4\.b32", code)) == 2 * per_thread


def test_launches_leave_no_thread_idle() -> None:
    """Blocks have 1024 numbers, and divide widths that have a large enough power of two."""
    from mlff.kernels.silu_triton import launches

    for width in (None, *WIDTHS, 96, 192, 4096):
        for candidate in launches(width):
            tall, wide = (int(size) for _, size in candidate.blocks)
            assert tall * wide == 1024
            if width in (64, 96, 192, 4096):
                assert width % wide == 0


# On a GPU.


def on_gpu(values: Sequence[Tensor], dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    return [like(x, dtype, device) for x in values]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("name", [n for n in layouts(1, 1) if n != "two strides"])
def test_gpu_agrees_with_float64(dtype: torch.dtype, out_dtype: torch.dtype | None, name: str) -> None:
    """Three orders, every layout, both entry points; float16 and bfloat16 round inputs first, then once at the end."""
    gate, up = on_gpu([layouts(129, 40)[name], layouts(129, 40, seed=1)["chunk"]], dtype)
    cases = [
        (lambda g, u: swiglu(g, u, out_dtype), eager, [gate, up]),
        (lambda x: swiglu_packed(x, "up_gate", out_dtype), eager_packed("up_gate"), [gate]),
    ]
    for function, plain, inputs in cases if out_dtype else [*cases, (silu, functional.silu, [gate])]:
        found = three_orders(function, inputs)
        out = out_dtype or dtype
        half = [dtype] * len(inputs)
        assert [x.dtype for x in found] == [out, *half, out, *half]
        # The weights of `three_orders` are rounded to the dtypes of what they weigh: the exact ones must be the same.
        expected = three_orders_exactly(plain, inputs, found)
        assert error(found, expected) < ROUNDING[dtype]


def three_orders_exactly(
    plain: Callable[..., Tensor], inputs: Sequence[Tensor], found: Sequence[Tensor]
) -> list[Tensor]:
    """`three_orders` in float64 on the CPU with the weights that those of `found` had."""
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    out = plain(*exact)
    weight = numbers(*out.shape, seed=9).to(found[0].dtype).double().requires_grad_()
    grads = torch.autograd.grad(out, exact, weight, create_graph=True)
    weights = [numbers(*x.shape, seed=10 + k).to(found[1 + k].dtype).double() for k, x in enumerate(grads)]
    everything = [out, *grads, *torch.autograd.grad(grads, [weight, *exact], weights)]
    return [x.detach().to(y.device) for x, y in zip(everything, found, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_r_k15_odd_sizes(dtype: torch.dtype) -> None:
    for width in WIDTHS:
        for rows in ROWS:
            both = numbers(rows, 2 * width, dtype=dtype, device="cuda")
            for given in (both.chunk(2, -1), [x.contiguous() for x in both.chunk(2, -1)]):
                found = three_orders(swiglu, given)
                assert error(found, three_orders_exactly(eager, given, found)) < ROUNDING[dtype], (rows, width)
            assert intact(rows, width, dtype, "cuda"), (rows, width)


@pytest.mark.gpu
def test_gpu_laws() -> None:
    """What the interpreter is held to, on a GPU."""
    assert empty_shapes(torch.bfloat16, "cuda")
    assert inputs_stay(torch.float32, "cuda")
    hold_to_table(table_of_values(torch.float32, "cuda"), 1e-6)  # exponentials and divisions are approximate there
    assert expanded_gradient(torch.float32, "cuda") < FLOAT32
    assert len(refusals(torch.float32, "cuda")) == 3
    for dtype in DTYPES:
        assert training_is_inference(*(numbers(37, 24, seed=k, dtype=dtype, device="cuda") for k in range(2)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gpu_compiled_graph_holds_the_kernels(name: str) -> None:
    """Forward and backward show their Triton kernels to the compiler; one graph serves all sizes (R-K9)."""
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(str(graph.graph))
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(FUNCTIONS[name], backend=backend, dynamic=True, fullgraph=True)
    for rows in (37, 53, 1000):
        count = 2 if name == "swiglu" else 1
        inputs = [numbers(rows, 64, seed=k, dtype=torch.float32, device="cuda").requires_grad_() for k in range(count)]
        found = torch.autograd.grad(compiled(*inputs).sum(), inputs)
        assert error(found, torch.autograd.grad(FUNCTIONS[name](*inputs).sum(), inputs)) < FLOAT32
    assert len(graphs) == 2  # forward and backward
    assert all("triton_kernel_wrapper" in graph for graph in graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gpu_inductor_and_unaligned_inputs(name: str) -> None:
    """Code compiled for aligned inputs is right for inputs that start elsewhere, eager too."""
    count = 2 if name == "swiglu" else 1
    compiled = torch.compile(FUNCTIONS[name], dynamic=True)
    for first in (0, 1, 2):
        inputs = [
            numbers(40 * 64 + first, seed=k, dtype=torch.bfloat16, device="cuda")[first:].view(40, 64)
            for k in range(count)
        ]
        assert torch.equal(compiled(*inputs), FUNCTIONS[name](*inputs))


@pytest.mark.gpu
def test_gpu_r_k14_export_holds_the_kernels() -> None:
    gate, up = (numbers(5, 8, seed=k, dtype=torch.float32, device="cuda") for k in range(2))
    program = torch.export.export(Wrapped(swiglu), (gate, up))
    assert "mlff.swiglu" in str(program.graph) or "triton_kernel_wrapper" in str(program.graph)
    assert error([program.module()(gate, up)], [swiglu(gate, up)]) < 1e-6


@pytest.mark.gpu
def test_gpu_r_k11_autocast() -> None:
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        gate, up = (numbers(6, 8, seed=k, dtype=d, device="cuda").requires_grad_() for k, d in enumerate(dtypes))
        with torch.autocast("cuda", torch.bfloat16):
            out, expected = swiglu(gate, up), eager(gate, up)
        assert out.dtype == expected.dtype
        grads = torch.autograd.grad(out.sum(), (gate, up))
        assert [x.dtype for x in grads] == list(dtypes)
        assert all(bool(x.isfinite().all()) for x in grads)


@pytest.mark.gpu
def test_gpu_b8_more_than_2_to_31_elements() -> None:
    """R-K2: 4 194 305 x 512 in bfloat16. First, middle and last four rows, in three orders, and packed."""
    rows, width = 4_194_305, 512
    needed = 9 * 2 * rows * width  # five operands, three results and one tensor in the making, 2 bytes each
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory; {free / 1e9:.0f} GB are free")
    from mlff.kernels import swiglu_triton

    def make() -> Tensor:
        return torch.randn(rows, width, dtype=torch.bfloat16, device="cuda")

    sample = [slice(0, 4), slice(rows // 2, rows // 2 + 4), slice(rows - 4, rows)]

    def hold(found: Sequence[Tensor], reference: Callable[..., Any], operands: Sequence[Tensor]) -> None:
        for part in sample:
            expected = reference(*(x[part] for x in operands))
            assert error([x[part] for x in found], expected) < ROUNDING[torch.bfloat16]

    gate, up, grad = make(), make(), make()
    hold([swiglu(gate, up)], lambda *x: [swiglu_reference.forward(*x)], (gate, up))
    hold(swiglu_triton.backward(grad, gate, up), swiglu_reference.backward, (grad, gate, up))
    operands = (make(), make(), grad, gate, up)
    hold(swiglu_triton.double_backward(*operands), swiglu_reference.double_backward, operands)
    del operands, gate, up
    torch.cuda.empty_cache()
    both = torch.randn(rows, 2 * width, dtype=torch.bfloat16, device="cuda")
    hold([swiglu_packed(both, "up_gate")], lambda x: [swiglu_reference.packed_forward(x, False)], (both,))
    found = swiglu_triton.packed_backward(grad, both, False)
    hold([found], lambda g, x: [swiglu_reference.packed_backward(g, x, False)], (grad, both))


# Two GPUs. What is expected is computed while the inputs' device is current, what is found while another one is. Where
# a driver lets one GPU read another's memory, a launch on the wrong one can give the right numbers; so launches are
# recorded, too.


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Devices and streams that were current at each launch of a kernel."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine has {torch.cuda.device_count()}")
    from mlff.kernels import launch

    wrap = launch.wrap_triton
    made: list[tuple[int, int]] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, programs: tuple[int, ...]) -> Callable[..., Any]:
            def call(**arguments: Any) -> Any:
                made.append((torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream))
                return wrap(self.kernel)[programs](**arguments)

            return call

    monkeypatch.setattr(launch, "wrap_triton", Recorded)
    return made


def across(made: list[tuple[int, int]], target: int, work: Callable[[], list[Tensor]]) -> None:
    """Hold work on the device `target` to the same numbers while the other device is current."""
    other = 1 - target
    with torch.cuda.device(target):
        expected = work()
        stream = torch.cuda.current_stream().cuda_stream
    made.clear()
    torch.cuda.set_device(other)
    try:
        found = work()
        assert torch.cuda.current_device() == other
    finally:
        torch.cuda.set_device(0)
    torch.cuda.synchronize(target)
    assert made
    assert set(made) == {(target, stream)}
    for one, two in zip(found, expected, strict=True):
        assert one.device == torch.device("cuda", target)
        assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("strided", [False, True])
def test_b5_two_gpus(two_gpus: list[Any], dtype: torch.dtype, out_dtype: torch.dtype | None, strided: bool) -> None:
    """Forward and both backwards of swiglu, of packed operands and of silu."""
    whole = [numbers(33, 96, seed=k, dtype=dtype, device="cuda:1") for k in range(2)]
    gate, up = [x[:, 16:80] for x in whole] if strided else [x[:, 16:80].contiguous() for x in whole]

    def work() -> list[Tensor]:
        return [
            *three_orders(lambda g, u: swiglu(g, u, out_dtype), (gate, up)),
            *three_orders(lambda x: swiglu_packed(x, "up_gate", out_dtype), (gate,)),
            *three_orders(silu, (up,)),
        ]

    across(two_gpus, 1, work)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_b4_two_gpus_training_is_inference(two_gpus: list[Any], dtype: torch.dtype) -> None:
    gate, up = (numbers(33, 64, seed=k, dtype=dtype, device="cuda:1") for k in range(2))
    torch.cuda.set_device(0)
    assert training_is_inference(gate, up)
    assert {device for device, _ in two_gpus} == {1}
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_b4_two_gpus_direct_backward(two_gpus: list[Any]) -> None:
    """The operators of the derivatives called as such."""
    a, b, grad, gate, up = (numbers(33, 64, seed=k, dtype=torch.bfloat16, device="cuda:1") for k in range(5))
    ops = torch.ops.mlff
    both, cotangent = torch.cat((gate, up), -1), torch.cat((a, b), -1)

    def work() -> list[Tensor]:
        return [
            *ops.swiglu_backward(grad, gate, up),
            *ops.swiglu_double_backward(a, b, grad, gate, up),
            ops.swiglu_packed_backward(grad, both, True),
            *ops.swiglu_packed_double_backward(cotangent, grad, both, True),
            ops.silu_backward(grad, gate),
            *ops.silu_double_backward(a, grad, gate),
        ]

    across(two_gpus, 1, work)


@pytest.mark.gpu
def test_b4_two_gpus_the_other_way(two_gpus: list[Any]) -> None:
    """Inputs on the first device while the second is current."""
    gate, up = (numbers(33, 64, seed=k, dtype=torch.float32, device="cuda:0") for k in range(2))
    across(two_gpus, 0, lambda: three_orders(swiglu, (gate, up)))


@pytest.mark.gpu
def test_b4_two_gpus_on_another_stream(two_gpus: list[Any]) -> None:
    """The stream that is current on the inputs' device is taken, not that of the current device."""
    gate, up = (numbers(33, 64, seed=k, dtype=torch.float32, device="cuda:1") for k in range(2))
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(1)
    with torch.cuda.device(1):
        expected = three_orders(swiglu, (gate, up))
        torch.cuda.synchronize(1)
    two_gpus.clear()
    with torch.cuda.stream(stream), torch.cuda.device(0):
        found = three_orders(swiglu, (gate, up))
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert set(two_gpus) == {(1, stream.cuda_stream)}
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


if __name__ == "__main__":
    print(json.dumps(interpreted_results()))
