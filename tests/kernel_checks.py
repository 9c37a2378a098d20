"""What tests of several kernels share: Triton's interpreter in a process of its own, and launches without a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# float32 against float64, of the largest result: found 2e-7.
NARROW = 5e-7
# bfloat16: operands are the same, results are rounded once, half a unit of 2^-8; sums are taken in float32.
HALF = 4e-3


def in_interpreter(file: str) -> dict[str, float]:
    """Return what a test file prints when Triton's interpreter runs it."""
    pytest.importorskip("triton", reason="Triton is not installed, so that its interpreter cannot run")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def print_errors(error: Callable[[Any, str, torch.dtype], float], cases: Iterable[Any]) -> None:
    """Print what `in_interpreter` reads."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    json.dump({str(case): error(case, "cpu", torch.float32) for case in cases}, sys.stdout)


def largest(results: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """Return the largest difference, of the largest number of each result."""
    errors = [0.0]
    for result, value in zip(results, expected, strict=True):
        assert result.shape == value.shape
        if value.numel():
            size = float(value.abs().max())
            errors.append(float((result.double() - value).abs().max()) / (size or 1.0))
    return max(errors)


def fits(kernels: Any, name: str, constants: dict[str, Any], dtype: torch.dtype, capability: int) -> bool:
    """Whether a kernel of a family has a launch that fits an architecture."""
    from mlff.kernels.launch import SHARED_MEMORY, fit_offline

    known = kernels.arguments(name, dtype)
    fit = fit_offline(kernels.KERNELS[name], known, constants, kernels.launches(name, constants["C"]), capability)
    return fit is not None and fit.shared <= SHARED_MEMORY[capability]
