"""The ranks of a run: one process for each device, and the few things on which they must agree.

A run on one device has one rank and no process group; everything here then returns at once. What concerns the host
(a decision, an error, a result of the first rank) goes through a group of its own over the network, so that nobody
waits for a device, and so that a rank may wait for hours while the first one evaluates a large set.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")

_WAIT = timedelta(days=7)
_host: list[Any] = []  # the group for the host, once it was needed


def running() -> bool:
    """Whether there is a process group, be it of one rank."""
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """Which of the ranks this process is, counted from 0."""
    return distributed.get_rank() if running() else 0


def count() -> int:
    """Number of ranks, over all nodes."""
    return distributed.get_world_size() if running() else 1


def leave() -> None:
    """Leave the process group, at the end of a process: one that keeps it may crash in its very last moment."""
    _host.clear()
    if running():
        distributed.destroy_process_group()


def total(values: Tensor) -> Tensor:
    """Return the sum of a tensor over the ranks, without waiting for the device; all ranks must call this."""
    if count() == 1:
        return values
    values = values.detach().clone()
    distributed.all_reduce(values, group=None if values.is_cuda else _host_group())
    return values


def anywhere(flag: bool) -> bool:
    """Return whether a flag is set on any rank, the same on all; all ranks must call this."""
    if count() == 1:
        return flag
    found = torch.tensor([flag], dtype=torch.int32)
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=_host_group())
    return bool(found)


def collect(value: T) -> list[T]:
    """Return the values of all ranks on the first one, an empty list on the others; all ranks must call this."""
    if count() == 1:
        return [value]
    values: list[Any] | None = [None] * count() if rank() == 0 else None
    distributed.gather_object(value, values, group=_host_group())
    return values or []


def from_first(function: Callable[[], T]) -> T:
    """Return what a function returns on the first rank; only there it is called. All ranks must call this.

    Raises:
        SystemExit: on the other ranks, where the function failed on the first, which raises its error.
    """
    if count() == 1:
        return function()
    answer: list[Any] = [None]
    error: BaseException | None = None
    if rank() == 0:
        try:
            answer = [(True, function())]
        except Exception as caught:  # whatever it is, the others must not wait for an answer
            answer, error = [(False, None)], caught
    distributed.broadcast_object_list(answer, group=_host_group())
    if error is not None:
        raise error
    done, value = answer[0]
    if not done:
        raise SystemExit(2)
    return value


def first_alone(function: Callable[[], T]) -> T:
    """Return what a function returns on this rank, called on the first rank before it is on the others.

    What the first one leaves on disk the others find there. All ranks must call this; where it fails on any, all stop.

    Raises:
        SystemExit: where it failed on another rank, which raises its error.
    """
    result = from_first(function)
    return together(lambda: result if rank() == 0 else function())


def together(function: Callable[[], T]) -> T:
    """Return what a function returns on this rank; if it fails on any, no rank goes on. All ranks must call this.

    Raises:
        SystemExit: where it failed on a lower rank, or only elsewhere: an error is told once.
    """
    if count() == 1:
        return function()
    error: Exception | None = None
    result: Any = None
    try:
        result = function()
    except Exception as caught:  # told below, by one rank
        error = caught
    failed = torch.tensor([count() if error is None else rank()])
    distributed.all_reduce(failed, distributed.ReduceOp.MIN, group=_host_group())
    if int(failed) == count():
        return result
    if error is not None and int(failed) == rank():
        raise error
    raise SystemExit(2)


def _host_group() -> Any:
    """The group for the host; every rank comes here first in the same call, since all calls above are collective."""
    if not _host or _host[0] is not distributed.group.WORLD:
        _host[:] = [distributed.group.WORLD, distributed.new_group(backend="gloo", timeout=_WAIT)]
    return _host[1]
