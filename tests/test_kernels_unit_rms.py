"""Features at unit root mean square: definition, derivatives, layouts, the interpreter, a GPU."""

from typing import Any

import pytest
import torch
from kernel_checks import HALF, NARROW, in_interpreter, largest, print_errors
from torch import Tensor

from mlff.kernels import unit_rms_reference as reference
from mlff.kernels.unit_rms import _backward, _double_backward, _forward, unit_rms

EPS = 1e-3


def tensors(nodes: int, rows: int, streams: int, width: int, count: int = 3) -> tuple[list[Tensor], Tensor]:
    """Some tensors of nodes' rows, and weights of rows."""
    generator = torch.Generator().manual_seed(nodes + rows)
    shape = (nodes, rows, streams, width)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count)]
    return given, torch.rand(rows, generator=generator, dtype=torch.float64) / width


def test_definition() -> None:
    (x, *_), balance = tensors(5, 4, 2, 3)
    z = x.clone()
    z[:, 0] -= x[:, 0].mean(-1, keepdim=True)
    variance = torch.einsum("nrfc,r->nf", z**2, balance)
    expected = z / (variance + EPS).sqrt()[:, None, :, None]
    assert torch.allclose(unit_rms(x, balance, EPS, centred=True), expected, rtol=0, atol=1e-14)
    expected = x / (x.square().mean((1, 3), keepdim=True) + EPS).sqrt()
    assert torch.allclose(unit_rms(x, eps=EPS), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_rk6_first_and_second_derivatives(centred: bool, balanced: bool) -> None:
    (x, *_), balance = tensors(2, 3, 2, 2)
    rest = (balance if balanced else None, EPS, centred)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: _forward(x, *rest), x)
    assert torch.autograd.gradgradcheck(lambda x: _forward(x, *rest), x)


def test_a_third_derivative_is_refused() -> None:
    (x, *_), _ = tensors(2, 3, 1, 2)
    x.requires_grad_()
    (first,) = torch.autograd.grad(_forward(x, None, EPS, False).sin().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="unit_rms has first and second derivatives; a third one was asked for"):
        torch.autograd.grad(second.sum(), x)


def test_operators_are_what_torch_asks_of_them() -> None:
    (x, g, h), balance = tensors(3, 4, 2, 3)
    rest = (balance, EPS, True)
    torch.library.opcheck(_forward, (x.requires_grad_(), *rest))
    torch.library.opcheck(_backward, (g.requires_grad_(), x, *rest))
    torch.library.opcheck(_double_backward, (h, g.detach(), x.detach(), *rest))


def test_b9_errors_before_any_launch() -> None:
    (x, *_), balance = tensors(3, 4, 2, 3)
    with pytest.raises(ValueError, match=r"floating-point numbers \[N, R, F, C\]; got torch.float64 \(3, 4, 6\)"):
        unit_rms(x.flatten(2))
    with pytest.raises(ValueError, match=r"one number for each of 4 rows, on cpu; got \(3,\) on cpu"):
        unit_rms(x, balance[1:])
    with pytest.raises(ValueError, match="got torch.int64"):
        unit_rms(x.long())


# Triton.

# nodes, rows, streams, channels; balanced and centred.
CASES = [
    (5, 9, 1, 32, True),
    (3, 16, 2, 7, True),
    (1, 36, 1, 64, True),
    (130, 1, 2, 48, False),
    (0, 4, 1, 8, True),
]


def error(case: tuple[Any, ...], device: str, dtype: torch.dtype) -> float:
    """The kernels of three orders against float64, of the largest number of each result, in two layouts."""
    from mlff.kernels import unit_rms_triton as kernels

    *sizes, balanced = case
    given, balance = tensors(*sizes)
    given, balance = [x.to(device, dtype) for x in given], balance.to(device, torch.float32)
    # Other layouts: slices of wider tensors, and streams first in memory.
    wide = [torch.cat((x, x), 1)[:, : x.shape[1]] for x in given]
    turned = [x.movedim(2, 0).contiguous().movedim(0, 2) for x in given]
    results, expected = [], []
    for h, g, x in (given, (wide[0], turned[1], wide[2])):
        rest = (balance if balanced else None, EPS, balanced)
        exactly: Any = (balance.double() if balanced else None, EPS, balanced)
        exact: Any = [value.double() for value in (h, g, x)]
        results += [kernels.forward(x, *rest), kernels.backward(g, x, *rest), *kernels.double_backward(h, g, x, *rest)]
        expected += [
            reference.forward(exact[2], *exactly),
            reference.backward(*exact[1:], *exactly),
            *reference.double_backward(*exact, *exactly),
        ]
    return largest(results, expected)


def test_rk13_rk15_kernels_in_the_interpreter() -> None:
    """Odd sizes, none, other layouts, against float64."""
    found = in_interpreter(__file__)
    assert len(found) == len(CASES)
    assert max(found.values()) < 2 * NARROW, found  # squares are summed before their root is taken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_every_order_has_a_launch_that_fits(order: int, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("mlff.kernels.unit_rms_triton", reason="Triton is not installed")
    from mlff.kernels.launch import SHARED_MEMORY, fit_offline

    for rows, width in ((9, 32), (49, 96)):
        constants = kernels.constants(rows, width, EPS, True, True)
        for capability in (80, 120):
            known = kernels.arguments(order, dtype)
            fit = fit_offline(kernels.KERNELS[order], known, constants, kernels.launches(rows, width), capability)
            assert fit is not None and fit.shared <= SHARED_MEMORY[capability]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2 * NARROW), (torch.bfloat16, HALF)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_gpu(case: tuple[Any, ...], dtype: torch.dtype, tolerance: float) -> None:
    assert error(case, "cuda", dtype) < tolerance


if __name__ == "__main__":
    print_errors(error, CASES)
