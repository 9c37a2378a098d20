"""Constant tables of a module, computed once in float64 and kept exact when the module changes its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Tables(nn.Module):
    """A module with constant tensors that are never saved: they follow from the options.

    Each is registered as a buffer, so that it moves with the module. A change of dtype takes it from its float64
    original again, so that `model.to(torch.float64)` is as exact as a model that was built in float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self._originals: dict[str, Tensor] = {}

    def table(self, name: str, values: Tensor) -> None:
        """Register a constant under `name`; floating-point values are given in float64."""
        self._originals[name] = values
        kept = values.to(torch.float32) if values.is_floating_point() else values
        self.register_buffer(name, kept, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for name, original in self._originals.items():
            buffer = self._buffers[name]
            if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
                self._buffers[name] = original.to(device=buffer.device, dtype=buffer.dtype)
        return self
