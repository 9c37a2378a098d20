"""Launches on GPUs that are not there: for every kernel a tile that fits, and the words of `mlff launches`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from mlff import presets
from mlff.cli import main

pytest.importorskip("triton", reason="Triton is not installed; its kernels cannot be compiled")

from mlff.kernels.launch import SHARED_MEMORY, Argument, Fit, fit_offline
from mlff.launches import (
    edge_functions,
    gated_shapes,
    geometry_of,
    grid_shapes,
    norm_shapes,
    read_capabilities,
    read_presets,
    rows,
)

PRO = dict(focus=2, channels=64, n_frames=3, projector=(344, 108), factors=(43, 320, 192), large=True)
MAX = dict(focus=2, channels=96, n_frames=3, projector=(584, 147), factors=(73, 320, 192), large=False)
ULTRA = dict(focus=1, channels=352, n_frames=1, projector=(146, 49), factors=None, large=False)  # on the sphere


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [PRO, MAX, ULTRA], ids=["pro", "max", "ultra"])
def test_every_order_has_a_tile_that_fits(shape: dict, dtype: torch.dtype, capability: int) -> None:
    """A part of the table in docs/launches.md, on a large and a small architecture."""
    geometry = geometry_of(dtype, **shape)
    for order in range(3):
        fit = geometry.fit_offline(order, capability)
        assert fit is not None
        assert 0 < fit.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize(("preset", "known"), [("pro", PRO), ("mini", None)])
def test_shapes_are_those_the_model_calls_its_grids_with(preset: str, known: dict | None) -> None:
    shapes = grid_shapes(preset)
    assert known is None or known in shapes
    for shape in shapes:
        assert shape["factors"] is not None, "grids on the rotation group have small projectors"


def test_gated_rows_are_those_of_the_edges() -> None:
    assert gated_shapes("pro") == [{"DEGREE": 5, "ORDER": 1, "C": 64}]
    assert gated_shapes("nano") == [{"DEGREE": 1, "ORDER": 1, "C": 32}]


def test_functions_of_edges_are_those_of_the_convolutions() -> None:
    functions = edge_functions("mini")
    assert [name for _, name, _ in functions] == [
        *("gather", "scatter", "outer"),  # into the frames, and its derivatives
        *("scatter", "gather", "outer", "share"),  # out of them, with weights of edges
        *("mix", "kernels", "basis"),
    ]
    assert functions[0][2] == {"DEGREE": 2, "ORDER": 1, "FOCUS": 1, "C": 32, "WEIGHTED": False, "UNIT": 4}


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launches", "preset=nano", "arch=sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| presets | kernel | geometry | order | operands | arch | launch | shared memory, B |")
    # Three orders in two dtypes: the preset's grids, gated rows and norms, and silu, swiglu and packed swiglu.
    orders = 3 * 2 * (len(grid_shapes("nano")) + len(gated_shapes("nano")) + len(norm_shapes("nano")) + 3)
    assert len(lines) == 2 + orders + 2 * len(edge_functions("nano"))
    for text in lines[2:]:
        cells = [cell.strip() for cell in text.strip("|").split("|")]
        assert cells[0] == "nano" and cells[5] == "sm_90"
        assert "warps=" in cells[6] and int(cells[7]) <= int(cells[8]) == SHARED_MEMORY[90]


def test_rk10_kernels_take_sizes_that_are_written_into_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size or stride of 1 becomes a constant where Inductor compiles a kernel, so it has no methods of a tensor."""
    fits = []

    def fit_with_ones(
        kernel: Any, arguments: Sequence[Argument], constants: Mapping[str, Any], *rest: Any
    ) -> Fit | None:
        names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        ones = {name: 1 for name, argument in zip(names, arguments, strict=True) if argument is int}
        pointers = [argument for argument in arguments if argument is not int]
        fits.append(fit_offline(kernel, pointers, {**constants, **ones}, *rest))
        return fits[-1]

    monkeypatch.setattr("mlff.launches.DTYPES", {"fp32": torch.float32})  # the code is the same in bfloat16
    for module in ("mlff.launches", "mlff.kernels.grid_pair_triton"):
        monkeypatch.setattr(f"{module}.fit_offline", fit_with_ones)
    assert len(list(rows(["nano"], [90]))) == len(fits) > 20
    assert None not in fits


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["arch=sm_9"], "arch must be of sm_80, sm_86"),
        (["arch=sm_9"], "Did you mean sm_90?"),
        (["preset=nanno"], "there is no preset 'nanno'"),
        (["prest=nano"], "takes preset=NAME,… and arch=sm_80,…; got 'prest'"),
    ],
)
def test_mistakes(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launches", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_defaults() -> None:
    assert read_capabilities("") == [80, 86, 89, 90, 100, 120]
    assert read_capabilities("sm_80, sm_120") == [80, 120]
    assert read_presets("") == list(presets.names())
