"""Where functions are plain PyTorch: on a CPU, and on a GPU for what would not keep it busy, outside of graphs."""

from __future__ import annotations

import types

import pytest
import torch

from mlff.kernels import host


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands for a tensor on a GPU."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(host, "SMALL", 100)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return types.SimpleNamespace(device=torch.device("cuda", 0))


def test_small_tensors_on_a_gpu_are_plain(x: torch.Tensor) -> None:
    assert host.plain(x, 99)
    assert not host.plain(x, 100)


def test_tensors_on_a_cpu_are_plain() -> None:
    assert host.plain(torch.ones(1), 10**12)


def test_a_recorded_graph_holds_operators(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not host.plain(x, 1)


def test_a_traced_graph_holds_operators(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch._subclasses.FakeTensorMode():
        assert not host.plain(x, 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not host.plain(x, 1)


def test_the_interpreter_runs_kernels(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not host.plain(x, 1)
