"""Turning features into the frames of edges and back: definition, derivatives, layouts, the interpreter, a GPU."""

from typing import Any

import pytest
import torch
from kernel_checks import HALF, NARROW, fits, in_interpreter, largest, print_errors
from torch import Tensor

from mlff.kernels import edge_frames_reference as reference
from mlff.kernels.edge_frames import Ends, _gather, _outer, _scatter, _share, into_frames, out_of_frames
from mlff.sezm.harmonics import reduced_layout

SHAPES = [(0, 0), (1, 0), (1, 1), (2, 1), (3, 2), (2, 2), (5, 1)]  # degree, order


def tensors(
    degree: int,
    order: int,
    edges: int = 5,
    atoms: int = 3,
    streams: int = 2,
    width: int = 2,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Ends]:
    """Rotations (any numbers), x, y, weights and ends; with several atoms the last one has no edge."""
    generator = torch.Generator().manual_seed(degree + 10 * order + edges)
    rows = sum(rows for rows, _ in reference.block_sizes(degree, order))
    shapes = (
        (edges, reference.count(degree, order)),
        (atoms, (degree + 1) ** 2, streams * width),
        (edges, rows, streams, width),
        (edges, streams),
    )
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    index = torch.randint(max(atoms - 1, 1), (edges,), generator=generator)
    return (*found, Ends.of(index, atoms))  # type: ignore[return-value]


def dense(coefficients: Tensor, degree: int, order: int) -> Tensor:
    """The matrices with their zeros, rows in the reduced layout, one number after another."""
    index, degrees = reduced_layout(degree, order)
    matrix = coefficients.new_zeros(len(coefficients), len(index), (degree + 1) ** 2)
    place = 0
    for l in range(degree + 1):
        for m in range(-min(order, l), min(order, l) + 1):
            row = next(r for r, (i, d) in enumerate(zip(index, degrees, strict=True)) if d == l and i == l * l + l + m)
            matrix[:, row, l * l : (l + 1) ** 2] = coefficients[:, place : place + 2 * l + 1]
            place += 2 * l + 1
    return matrix


@pytest.mark.parametrize(("degree", "order"), SHAPES)
def test_definition(degree: int, order: int) -> None:
    coefficients, x, y, weights, ends = tensors(degree, order)
    matrix = dense(coefficients, degree, order)
    found = into_frames(coefficients, x, ends, degree, order, streams=2)
    assert torch.allclose(found.flatten(2), matrix @ x[ends.index], rtol=0, atol=1e-13)
    assert found.movedim(2, 0).is_contiguous()
    turned = matrix.transpose(1, 2) @ (y * weights[:, None, :, None]).flatten(2)
    expected = torch.zeros_like(x).index_add(0, ends.index, turned)
    found = out_of_frames(coefficients, y, ends, degree, order, weights)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_ends_list_the_edges_of_each_atom_in_order() -> None:
    ends = Ends.of(torch.tensor([2, 0, 2, 2, 0]), 4)
    assert ends.order.tolist() == [1, 4, 0, 2, 3] and ends.starts.tolist() == [0, 2, 2, 5, 5]


def test_sums_are_taken_in_float32_at_least() -> None:
    coefficients, _, y, _, ends = tensors(1, 1, dtype=torch.bfloat16)
    assert out_of_frames(coefficients, y, ends, 1, 1).dtype == torch.float32


FUNCTIONS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "gather": (_gather, (0, 1, 3)),
    "scatter": (_scatter, (0, 2, 3)),
    "outer": (_outer, (1, 2, 3)),
    "share": (_share, (0, 1, 2)),
}


def call(name: str, degree: int, order: int, **sizes: Any) -> tuple[Any, list[Tensor], tuple]:
    """A function of its three tensors, these, and the rest of its arguments."""
    *given, ends = tensors(degree, order, **sizes)
    operator, places = FUNCTIONS[name]
    rest = (*ends, degree, order, *([2] if name == "gather" else []), torch.float64)
    return operator, [given[place] for place in places], rest


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("degree", "order"), [(0, 0), (2, 1), (2, 2)])
def test_rk6_first_and_second_derivatives(name: str, degree: int, order: int) -> None:
    operator, given, rest = call(name, degree, order, edges=2, atoms=2, width=1)
    given = [tensor.requires_grad_() for tensor in given]
    assert torch.autograd.gradcheck(lambda *tensors: operator(*tensors, *rest), given)
    assert torch.autograd.gradgradcheck(lambda *tensors: operator(*tensors, *rest), given)


@pytest.mark.parametrize("name", ["gather", "scatter", "outer"])
def test_without_weights_they_are_one(name: str) -> None:
    operator, (first, second, weights), rest = call(name, 2, 1)
    expected = operator(first, second, torch.ones_like(weights), *rest)
    assert torch.equal(operator(first, second, None, *rest), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operators_are_what_torch_asks_of_them(name: str) -> None:
    operator, given, rest = call(name, 2, 1)
    torch.library.opcheck(operator, (*[tensor.requires_grad_() for tensor in given], *rest))


def test_b9_errors_before_any_launch() -> None:
    coefficients, x, y, weights, ends = tensors(2, 1)
    with pytest.raises(ValueError, match=r"degree 2 and order 1 have 25 numbers for each of 5 edges; got \(5, 24\)"):
        into_frames(coefficients[:, 1:], x, ends, 2, 1)
    with pytest.raises(ValueError, match=r"3 atoms, 9 rows and channels for 2 streams; its shape is \(3, 8, 4\)"):
        into_frames(coefficients, x[:, 1:], ends, 2, 1, streams=2)
    with pytest.raises(ValueError, match="channels for 3 streams"):
        into_frames(coefficients, x, ends, 2, 1, streams=3)
    with pytest.raises(ValueError, match=r"5 edges and 7 rows.*shapes are \(5, 6, 2, 2\) and None"):
        out_of_frames(coefficients, y[:, 1:], ends, 2, 1)
    with pytest.raises(ValueError, match=r"one number for each edge and stream.* \(5, 1\)"):
        out_of_frames(coefficients, y, ends, 2, 1, weights[:, 1:])
    with pytest.raises(ValueError, match="coefficients, y and ends must be on one device"):
        out_of_frames(coefficients, y.to("meta"), ends, 2, 1)
    with pytest.raises(ValueError, match="coefficients and x must be floating-point numbers"):
        into_frames(coefficients, x.long(), ends, 2, 1)


# Triton.


# degree, order; edges, atoms, streams, channels.
CASES = [
    (0, 0, 3, 2, 1, 4),
    (1, 0, 33, 5, 1, 48),
    (1, 1, 1, 1, 1, 1),
    (2, 1, 20, 4, 2, 32),
    (2, 2, 0, 2, 1, 32),
    (3, 2, 3, 2, 3, 7),
    (5, 1, 2, 2, 2, 64),
]


def error(case: tuple[Any, ...], device: str, dtype: torch.dtype) -> float:
    """The kernels against float64, of the largest number of each result, with and without weights, in two layouts."""
    from mlff.kernels import edge_frames_triton as kernels

    degree, order, edges, atoms, streams, width = case
    *given, ends = tensors(*case)
    wide = torch.float32
    c, x, y, w = (tensor.to(device, kind) for tensor, kind in zip(given, (wide, dtype, dtype, wide), strict=True))
    ends = Ends(*(part.to(device) for part in ends))
    place = (ends.index, degree, order)
    # The other layouts that a model has: streams first in memory, and slices of wider tensors.
    spread = torch.cat((x, x), 1)[:, : x.shape[1]], y.movedim(2, 0).contiguous().movedim(0, 2)
    results, expected = [], []
    for x_, y_ in ((x, y), spread):
        exact = c.double(), x_.double(), y_.double()
        for weights in (w, None):
            results += [
                kernels.gather(c, x_, weights, *place, streams, dtype),
                kernels.scatter(c, y_, weights, *ends, degree, order, wide),
                kernels.outer(x_, y_, weights, *place, wide),
                kernels.share(c, x_, y_, *place, wide),
            ]
            exactly = None if weights is None else weights.double()
            expected += [
                reference.gather(exact[0], exact[1], exactly, *place, streams, torch.float64),
                reference.scatter(exact[0], exact[2], exactly, ends.index, atoms, degree, order, torch.float64),
                reference.outer(exact[1], exact[2], exactly, *place, torch.float64),
                reference.share(*exact, *place, torch.float64),
            ]
    return largest(results, expected)


def test_rk13_rk15_kernels_in_the_interpreter() -> None:
    """Odd sizes, none, an atom without edges, other layouts, against float64."""
    found = in_interpreter(__file__)
    assert len(found) == len(CASES)
    assert max(found.values()) < NARROW, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_launch_that_fits(name: str, dtype: torch.dtype) -> None:
    kernels = pytest.importorskip("mlff.kernels.edge_frames_triton", reason="Triton is not installed")
    for capability in (80, 120):
        assert fits(kernels, name, kernels.constants(name, 2, 1, 2, 32), dtype, capability)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, NARROW), (torch.bfloat16, HALF)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_on_a_gpu(case: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    assert error(case, "cuda", dtype) < tolerance


@pytest.mark.gpu
def test_sums_do_not_change_from_run_to_run() -> None:
    c, _, y, w, ends = tensors(3, 1, 20000, 300, 2, 32, torch.float32)
    c, y, w, ends = c.cuda(), y.cuda(), w.cuda(), Ends(*(e.cuda() for e in ends))
    first = out_of_frames(c, y, ends, 3, 1, w)
    assert all(torch.equal(out_of_frames(c, y, ends, 3, 1, w), first) for _ in range(5))


if __name__ == "__main__":
    print_errors(error, CASES)
