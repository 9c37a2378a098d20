"""Mixing degrees by kernels of each edge: definition, derivatives, layouts, the interpreter, a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_checks import HALF, NARROW, fits, in_interpreter, largest, print_errors
from torch import Tensor

from mlff.kernels import degree_mixer_reference as reference
from mlff.kernels.degree_mixer import _basis, _kernels, _mix, mix_degrees

SHAPES = [(0, 0), (1, 0), (1, 1), (2, 1), (3, 2), (2, 2), (5, 1)]  # degree, order


def tensors(
    degree: int,
    order: int,
    edges: int = 5,
    streams: int = 2,
    width: int = 2,
    rank: int = 2,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Kernels, basis, and two tensors of rows."""
    generator = torch.Generator().manual_seed(degree + 10 * order + edges)
    rows = (edges, reference.rows(degree, order), streams, width)
    shapes = ((edges, reference.count(degree, order), rank), (rank, streams * width), rows, rows)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("degree", "order"), SHAPES)
def test_definition(degree: int, order: int) -> None:
    kernels, basis, x, _ = tensors(degree, order)
    found = mix_degrees(kernels, basis, x, degree, order)
    expected = torch.zeros_like(x)
    entry = row = 0
    for m in range(order + 1):
        count = degree + 1 - m
        for i in range(count):
            for j in range(count):
                factor = (kernels[:, entry, :, None] * basis).sum(1).unflatten(1, x.shape[2:])
                for sign in range(2 if m else 1):
                    expected[:, row + sign * count + j] += factor * x[:, row + sign * count + i]
                entry += 1
        row += count * (2 if m else 1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    assert found.movedim(2, 0).is_contiguous()


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "mix": (_mix, (0, 1, 2)),
    "kernels": (_kernels, (1, 2, 3)),
    "basis": (_basis, (0, 2, 3)),
}


def call(name: str, degree: int, order: int, transposed: bool = False, **sizes: Any) -> tuple[Any, list[Tensor], tuple]:
    """A function of its three tensors, these, and the rest of its arguments."""
    given = tensors(degree, order, **sizes)
    operator, places = FUNCTIONS[name]
    rest = (degree, order, *([transposed] if name == "mix" else []), torch.float64)
    return operator, [given[place] for place in places], rest


@pytest.mark.parametrize(("name", "transposed"), [("mix", False), ("mix", True), ("kernels", False), ("basis", False)])
@pytest.mark.parametrize(("degree", "order"), [(0, 0), (2, 1)])
def test_rk6_first_and_second_derivatives(name: str, transposed: bool, degree: int, order: int) -> None:
    operator, given, rest = call(name, degree, order, transposed, edges=2, width=1)
    given = [tensor.requires_grad_() for tensor in given]
    assert torch.autograd.gradcheck(lambda *tensors: operator(*tensors, *rest), given)
    assert torch.autograd.gradgradcheck(lambda *tensors: operator(*tensors, *rest), given)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_are_what_torch_asks_of_them(name: str) -> None:
    operator, given, rest = call(name, 2, 1)
    torch.library.opcheck(operator, (*[tensor.requires_grad_() for tensor in given], *rest))


def test_rows_keep_their_dtype() -> None:
    kernels, basis, x, _ = tensors(1, 1, dtype=torch.bfloat16)
    assert mix_degrees(kernels, basis.float(), x, 1, 1).dtype == torch.bfloat16
    assert mix_degrees(kernels, basis, x.float(), 1, 1).dtype == torch.float32


def test_b9_errors_before_any_launch() -> None:
    kernels, basis, x, _ = tensors(2, 1)
    with pytest.raises(ValueError, match=r"degree 2 and order 1 have 7 rows and 13 entries.* kernels \(5, 12, 2\)"):
        mix_degrees(kernels[:, 1:], basis, x, 2, 1)
    with pytest.raises(ValueError, match=r"basis \(1, 4\)"):
        mix_degrees(kernels, basis[1:], x, 2, 1)
    with pytest.raises(ValueError, match=r"x \(5, 6, 2, 2\)"):
        mix_degrees(kernels, basis, x[:, 1:], 2, 1)
    with pytest.raises(ValueError, match="floating-point numbers on one device"):
        mix_degrees(kernels, basis.to("meta"), x, 2, 1)


# Triton.


# degree, order; edges, streams, channels, rank.
CASES = [
    (0, 0, 3, 1, 4, 2),
    (1, 0, 9, 1, 48, 1),
    (1, 1, 1, 1, 1, 2),
    (2, 1, 6, 2, 32, 2),
    (2, 2, 0, 1, 32, 1),
    (3, 2, 3, 3, 7, 4),
    (5, 1, 2, 2, 64, 2),
]


def error(case: tuple[Any, ...], device: str, dtype: torch.dtype) -> float:
    """The kernels against float64, of the largest number of each result, in two layouts."""
    from mlff.kernels import degree_mixer_triton as triton

    shape: Any = case[:2]
    kernels, basis, a, b = (tensor.to(device, dtype) for tensor in tensors(*case))
    basis = basis.float()
    # The other layouts that a model has: streams first in memory, and slices of wider tensors.
    spread = a.movedim(2, 0).contiguous().movedim(0, 2), torch.cat((b, b), 1)[:, : b.shape[1]]
    results, expected = [], []
    for a_, b_ in ((a, b), spread):
        exact: Any = kernels.double(), basis.double(), a_.double(), b_.double()
        results += [
            triton.mix(kernels, basis, a_, *shape, False, dtype),
            triton.mix(kernels, basis, a_, *shape, True, dtype),
            triton.kernels(basis, a_, b_, *shape, dtype),
            triton.basis(kernels, a_, b_, *shape, torch.float32),
        ]
        expected += [
            reference.mix(*exact[:3], *shape, False, torch.float64),
            reference.mix(*exact[:3], *shape, True, torch.float64),
            reference.kernels(*exact[1:], *shape, torch.float64),
            reference.basis(exact[0], *exact[2:], *shape, torch.float64),
        ]
    return largest(results, expected)


def test_rk13_rk15_kernels_in_the_interpreter() -> None:
    """Odd sizes, none, other layouts, against float64; sums over edges from a few programs."""
    found = in_interpreter(__file__)
    assert len(found) == len(CASES)
    assert max(found.values()) < NARROW, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_launch_that_fits(name: str, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("mlff.kernels.degree_mixer_triton", reason="Triton is not installed")
    for capability in (80, 120):
        assert fits(kernels, name, kernels.constants(name, 2, 1, 2, 32, 2), dtype, capability)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, NARROW), (torch.bfloat16, HALF)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_gpu(case: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    assert error(case, "cuda", dtype) < tolerance


if __name__ == "__main__":
    from mlff.kernels import degree_mixer_triton

    degree_mixer_triton.PARTIAL_SUMS = 3  # the interpreter runs one program after another
    print_errors(error, CASES)
