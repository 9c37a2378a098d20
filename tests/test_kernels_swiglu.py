"""SwiGLU and SiLU: their definition, three orders of derivatives, layouts, devices, and the words of their errors.

The Triton kernels run here in Triton's interpreter, which must be chosen before they are imported. So this file is also
a program: `TRITON_INTERPRET=1 python tests/test_kernels_swiglu.py` prints the results of `interpreted_results`, one run
for all tests that ask for them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
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

    for rows, width in [(5, width) for width in WIDTHS] + [(rows, 33) for rows in ROWS]:
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
    """x -> exp -> swiglu(e, e) -> sum: e is as it was after backward, and a second backward gives the same."""
    x = numbers(9, 20, dtype=dtype, device=device).requires_grad_()
    e = x.exp()
    before = e.detach().clone()
    total = swiglu(e, e).sum()
    first, second = (torch.autograd.grad(total, x, retain_graph=True)[0] for _ in range(2))
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(eager(exact.exp(), exact.exp()).sum(), exact)
    near = ((first.double() - expected).abs() <= 2 * ROUNDING.get(dtype, 1e-12) * (1 + expected.abs()) * 4).all()
    return torch.equal(e.detach(), before) and torch.equal(first, second) and bool(near)


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
    """Rows further apart than 2³¹ numbers: only few pages of that memory are ever touched. None: it is not to be had."""
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


if __name__ == "__main__":
    print(json.dumps(interpreted_results()))
