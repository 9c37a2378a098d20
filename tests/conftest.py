"""Shared by all tests: the GPU marker, one thread a process, structures, rotations."""

from __future__ import annotations

import os

import pytest
import torch

from mlff.kernels import host

# For the processes that tests start. By default each takes a thread a core, and its threads wait by spinning: two runs
# of scripts/finetune.py side by side on two cores took 149 s instead of 36.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none, and say so; those in Triton's interpreter are slow."""
    for item in items:
        if "interpreted" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


@pytest.fixture(autouse=True, scope="session")
def operators_for_small_tensors() -> None:
    """Tests use small tensors, and on a GPU they are there to test the kernels."""
    host.SMALL = 0


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Small tensors run fastest on one thread, and parallel test processes do not compete."""
    torch.set_num_threads(1)
