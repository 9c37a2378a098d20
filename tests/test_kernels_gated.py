"""The gated activation of edges: definition, three orders, layouts, the interpreter, launches, and a GPU."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from kernel_checks import in_interpreter
from torch import Tensor

from mlff.kernels import gated_reference as reference
from mlff.kernels.gated import _backward, _double_backward, _forward, gated_rows

SHAPES = [(1, 0), (1, 1), (2, 1), (3, 2), (5, 1), (3, 3)]  # degree, order
CASES = [(*shape, *size) for shape in SHAPES for size in ((5, 32), (33, 48), (3, 7), (0, 32), (1, 1))]  # edges, width
INTERPRETED = [(1, 0, 33, 48), (1, 1, 0, 32), (2, 1, 5, 32), (3, 2, 3, 7), (5, 1, 3, 7), (3, 3, 1, 1)]
NARROW = 5e-7  # float32 against float64, of the largest result: found 2e-7
# bfloat16: operands are the same, results are rounded once, half a unit of 2^-8; sums over rows are taken in float32.
HALF = 4e-3


def others_of(degree: int, order: int) -> int:
    return sum(2 * (degree + 1 - m) for m in range(1, order + 1))


def tensors(
    degree: int, order: int, edges: int = 3, width: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """The two parts of x, gates, residual, and gradients of: the result, both parts, the gates."""
    generator = torch.Generator().manual_seed(degree + 10 * order + edges)
    rest = others_of(degree, order)
    counts = (degree + 1, rest, degree, degree + 1 + rest, degree + 1 + rest, degree + 1, rest, degree)
    return [torch.randn(2, edges, n, width, generator=generator, dtype=torch.float64).to(dtype) for n in counts]


def by_index(zero: Tensor, others: Tensor, gates: Tensor, degree: int, order: int, residual: Tensor) -> Tensor:
    """The definition, row by row."""
    degrees = [*range(degree + 1), *(l for m in range(1, order + 1) for _ in range(2) for l in range(m, degree + 1))]
    x = torch.cat((zero, others), -2)
    rows = [x[..., 0, :] * torch.sigmoid(x[..., 0, :])]
    rows += [x[..., r, :] * torch.sigmoid(gates[..., l - 1, :]) for r, l in enumerate(degrees) if r]
    return torch.stack(rows, -2) + residual


@pytest.mark.parametrize(("degree", "order"), SHAPES)
def test_definition(degree: int, order: int) -> None:
    zero, others, gates, residual, *_ = tensors(degree, order)
    expected = by_index(zero, others, gates, degree, order, residual)
    assert torch.allclose(gated_rows(zero, others, gates, degree, order, residual), expected, rtol=0, atol=1e-14)
    assert torch.allclose(_forward(zero, others, gates, residual, degree, order), expected, rtol=0, atol=1e-14)
    alone = gated_rows(zero, others, gates, degree, order)
    assert torch.allclose(alone + residual, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("degree", "order"), SHAPES)
def test_rk6_first_and_second_derivatives(degree: int, order: int) -> None:
    given = [x[:1, :2].clone().requires_grad_() for x in tensors(degree, order, width=1)[:4]]

    def function(zero: Tensor, others: Tensor, gates: Tensor, residual: Tensor) -> Tensor:
        return _forward(zero, others, gates, residual, degree, order)

    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


def test_operators_are_what_torch_asks_of_them() -> None:
    zero, others, gates, residual, grad, *cotangents = tensors(2, 1)
    for tensor in (zero, others, gates, residual, grad, *cotangents):
        tensor.requires_grad_()
    torch.library.opcheck(_forward, (zero, others, gates, residual, 2, 1))
    torch.library.opcheck(_forward, (zero, others, gates, None, 2, 1))
    torch.library.opcheck(_backward, (grad, zero, others, gates, 2, 1))
    utilities = ("test_schema", "test_faketensor")  # its derivative is refused
    torch.library.opcheck(_double_backward, (*cotangents, grad, zero, others, gates, 2, 1), test_utils=utilities)


def test_a_third_derivative_is_refused() -> None:
    zero, others, gates, residual, *_ = (x.requires_grad_() for x in tensors(1, 1))
    (first,) = torch.autograd.grad(
        _forward(zero, others, gates, residual, 1, 1).square().sum(), zero, create_graph=True
    )
    (second,) = torch.autograd.grad(first.square().sum(), gates, create_graph=True)
    with pytest.raises(RuntimeError, match="a third one was asked for"):
        torch.autograd.grad(second.sum(), zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    zero, others, gates, residual, *_ = tensors(2, 1, dtype=dtype)
    exact = reference.forward(zero.float(), others.float(), gates.float(), residual.float(), 2, 1)
    assert torch.equal(gated_rows(zero, others, gates, 2, 1, residual), exact.to(dtype))
    wide = gated_rows(zero, others, gates, 2, 1, residual.float())
    assert wide.dtype == torch.float32 and torch.equal(wide, exact)


def test_b9_errors_before_any_launch() -> None:
    zero, others, gates, residual, *_ = tensors(2, 1)
    with pytest.raises(ValueError, match="degree 2 and order 1 have 3 rows of m = 0, 4 others and 2 gates, all of one"):
        gated_rows(zero, others[..., 1:, :], gates, 2, 1)
    with pytest.raises(ValueError, match=r"residual \(2, 3, 6, 2\)"):
        gated_rows(zero, others, gates, 2, 1, residual[..., 1:, :])
    with pytest.raises(ValueError, match="one floating dtype"):
        gated_rows(zero, others, gates.float(), 2, 1)
    with pytest.raises(ValueError, match="one device; got cpu, cpu, meta"):
        gated_rows(zero, others, gates.to("meta"), 2, 1)


# Triton.


def largest_errors(device: str, dtype: torch.dtype, cases: Iterable[tuple[int, ...]]) -> dict[str, float]:
    """Three orders of the kernels against float64, of the largest number of each result, over shapes and layouts."""
    from mlff.kernels import gated_triton as kernels

    found = {}
    for degree, order, edges, width in cases:
        given = [x.to(device) for x in tensors(degree, order, edges, width, dtype)]
        # Parts of wider tensors, as slices of a batch of streams are.
        spread = [torch.cat((x, x + 1), -2)[..., : x.shape[-2], :] for x in given]
        for name, used in (("", given), ("strided ", spread)):
            zero, others, gates, residual, grad, a, b, c = used
            exact = [x.double() for x in used]
            pairs = [
                (kernels.forward(zero, others, gates, residual, degree, order),),
                (kernels.forward(zero, others, gates, None, degree, order),),
                kernels.backward(grad, zero, others, gates, degree, order),
                kernels.double_backward(a, b, c, grad, zero, others, gates, degree, order),
            ]
            plain = [
                (reference.forward(*exact[:4], degree, order),),
                (reference.forward(*exact[:3], None, degree, order),),
                reference.backward(exact[4], *exact[:3], degree, order),
                reference.double_backward(*exact[5:], exact[4], *exact[:3], degree, order),
            ]
            errors = [0.0]
            for results, expected in zip(pairs, plain, strict=True):
                for result, value in zip(results, expected, strict=True):
                    assert result.shape == value.shape and result.dtype == dtype
                    if value.numel():
                        errors.append(float((result.double() - value).abs().max() / value.abs().max()))
            found[f"{name}{degree} {order} {edges} {width}"] = max(errors)
    return found


def test_rk13_rk15_kernels_in_the_interpreter() -> None:
    """Odd sizes, none, strided parts, against float64, in three orders."""
    errors = in_interpreter(__file__)
    assert len(errors) == 2 * len(INTERPRETED)
    assert max(errors.values()) < NARROW, errors


def test_kernels_on_a_cpu_say_what_to_do() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from mlff.kernels import gated_triton

    zero, others, gates, *_ = tensors(1, 1, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="Triton kernels run on a GPU"):
        gated_triton.forward(zero, others, gates, None, 1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("capability", [80, 120])
def test_every_order_has_a_launch_that_fits(capability: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed; its kernels cannot be compiled")
    from mlff.kernels import gated_triton
    from mlff.kernels.launch import SHARED_MEMORY, fit_offline

    for place, kernel in enumerate(gated_triton.KERNELS):
        arguments = [int if p.annotation_type else dtype for p in kernel.params if not p.is_constexpr]
        constants = gated_triton.constants(2, 1, *([True] if place == 0 else []))
        fit = fit_offline(kernel, arguments, constants, gated_triton.launches(32), capability)
        assert fit is not None and fit.shared <= SHARED_MEMORY[capability]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, NARROW), (torch.bfloat16, HALF)], ids=["fp32", "bf16"]
)
def test_kernels_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    errors = largest_errors("cuda", dtype, CASES)
    assert max(errors.values()) < tolerance, errors


@pytest.mark.gpu
def test_b1_kernels_run_on_the_stream_of_the_caller() -> None:
    zero, others, gates, residual, *_ = (x.cuda() for x in tensors(2, 1, 4000, 32, torch.float32))
    from mlff.kernels import gated_triton

    expected = reference.forward(zero, others, gates, residual, 2, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gated_triton.forward(zero, others, gates, residual, 2, 1)
        error = (found - expected).abs().max()
    torch.cuda.current_stream().wait_stream(stream)
    assert float(error) < 1e-5


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    json.dump(largest_errors("cpu", torch.float32, INTERPRETED), sys.stdout)
