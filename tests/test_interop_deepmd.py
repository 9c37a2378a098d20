"""Checkpoints of deepmd-kit, read and written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sezm_oracle import CASES, close, graph, reference, structures

import mlff
from mlff.derivatives import evaluate
from mlff.interop import deepmd
from mlff.sezm.potential import SeZM


def config_and_state(case: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    file = reference(case)
    state = {name.removeprefix("sd::"): file[name] for name in file.files if name.startswith("sd::")}
    return json.loads(str(file["config_normalized_json"])), state


def write(path: Path, config: dict[str, Any], state: dict[str, Any], **more: Any) -> Path:
    """A training checkpoint as deepmd-kit lays it out."""
    tensors: dict[str, Any] = {f"model.Default.{name}": torch.tensor(values) for name, values in state.items()}
    tensors["_extra_state"] = {"model_params": config, "train_infos": {"lr": np.float64(1e-3), "step": 7}}
    torch.save({"model": tensors, "optimizer": {"state": {}, "param_groups": []}, **more}, path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_is_the_same_model(case: str, tmp_path: Path) -> None:
    """Every option: what is written holds each tensor of the original file, index tables included, bit for bit."""
    config, state = config_and_state(case)
    potential = deepmd.from_state(config, state)
    path = deepmd.save(potential, tmp_path / "model.pt")
    content = torch.load(path, weights_only=True)["model"]
    written = {name.removeprefix("model.Default."): tensor for name, tensor in content.items() if name != "_extra_state"}
    assert written.keys() == state.keys()
    for name, expected in state.items():
        found = written[name].numpy()
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        if name.endswith("adam_type_embedding") and "charge_spin" not in name:
            assert not found[-1].any()  # padding, which no atom has; the reference put noise there
            found, expected = found[:-1], expected[:-1]
        if name.endswith("balance_weight"):  # a product of three reciprocals, in another order
            np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(expected.dtype).eps)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)
    again = deepmd.load(path)
    assert (again.options, again.elements, again.dtype) == (potential.options, potential.elements, potential.dtype)
    assert not again.training
    before, after = potential.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
