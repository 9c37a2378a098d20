"""Which version of a function a tensor takes: an operator around Triton's kernels, one around the reference, or none.

A call of an operator with its autograd and its launch takes the host a few hundred microseconds, many times those of a
function of PyTorch. A GPU has done with a small tensor long before. There, and on a CPU, functions may be their
reference as it is, which PyTorch differentiates. In a graph, compiled or recorded, the host does not count.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

logger = logging.getLogger("mlff.kernels")

# Elements of the largest intermediate tensor below which plain PyTorch is taken. Measured on an H200: on 300 nodes of
# degree 3 (3 million values on the grid) the three orders of the grid-pair product take 1.2 ms either way, and a
# training step of preset nano on 960 atoms (4 million) 0.11 s with plain PyTorch, 0.13 s with the operators.
SMALL = 2**23


def plain(x: Tensor, elements: int) -> bool:
    """Whether a function of x, whose largest intermediate has so many elements, is its reference.

    In Triton's interpreter nothing is, and everything with SMALL = 0 on a GPU is an operator.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    if x.device.type == "cpu":
        return True
    # Tracers first: a comparison of a size that is left open would be a condition on the compiled code.
    if x.device.type != "cuda" or traced() or isinstance(elements, torch.SymInt):
        return False
    return elements < SMALL and not torch.cuda.is_current_stream_capturing()


def traced() -> bool:
    """Whether a compiler or a tracer follows this call, so that it must not depend on values."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: `torch.library.triton_op` of a function that changes none of its arguments.

    Where Triton is not installed torch warns of it for each operator. The reference takes over then, which is no fault.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        remarks = logging.getLogger("torch._library.triton")
        before = remarks.level
        remarks.setLevel(logging.ERROR)
        try:
            return triton_op(name, mutates_args=())(function)
        finally:
            remarks.setLevel(before)

    return decorate


@contextlib.contextmanager
def operators() -> Iterator[None]:
    """Take operators for small tensors too, for a while: before a recording, whatever it will hold must have run."""
    global SMALL
    before, SMALL = SMALL, 0
    try:
        yield
    finally:
        SMALL = before


@functools.cache
def triton_version(family: str, device: str, dtype: torch.dtype) -> ModuleType | None:
    """Return the module of a family's Triton kernels where tensors of a device and dtype go there.

    That is on CUDA, and on any device in Triton's interpreter, there float32 only. The grid-pair product has none in
    float16. Where Triton is not installed, that is said once, and the reference is taken.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    dtypes = {torch.float32} if interpreted else {torch.float32, torch.bfloat16, torch.float16}
    if family == "grid_pair":
        dtypes.discard(torch.float16)
    if dtype not in dtypes or (device != "cuda" and not interpreted):
        return None
    try:
        return importlib.import_module(f"mlff.kernels.{family}_triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        logger.warning("%s: Triton is not installed, so plain PyTorch takes over, slower. pip install triton", family)
        return None
