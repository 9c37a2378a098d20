"""How the processes of a run begin, and the strategy by which Lightning has them work together.

One process for each device. On one machine the first process starts the others, as copies of the command that started
it; `torchrun` and `srun` start all of them, on any number of machines. Each then does the whole run, and waits for the
others where they must agree (`mlff.ranks`).

    auto    one process: nothing of this; several: ddp
    ddp     every process has the whole model, gradients are averaged
    zero1   as ddp, with optimiser states shared out
    fsdp    weights, gradients, averages and optimiser states shared out (`mlff.sharding`)
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy

from mlff import ranks, sharding
from mlff.config import TrainerConfig


def start(machine: TrainerConfig) -> None:
    """Begin the processes of a run and join them to a group; returns in each of them.

    With one device and `strategy=auto` there is nothing to begin. A program that trains several times comes here
    several times; its processes stay the same.

    Raises:
        ValueError: the machine has fewer GPUs; the processes that `torchrun` or `srun` started are not as many as the
            keys ask for, or those of an earlier run of this program are not.
    """
    size = machine.devices * machine.num_nodes
    launcher, started = _started()
    if started not in (0, size):
        raise ValueError(
            f"{launcher} started {started} processes, but trainer.devices={machine.devices} times "
            f"trainer.num_nodes={machine.num_nodes} is {size}. Give the devices of one machine, and how many machines."
        )
    if ranks.running():
        if ranks.count() != size:
            raise ValueError(
                f"this program already runs as {ranks.count()} processes; the keys ask for {size}. "
                "Use one program for each number of devices."
            )
        return
    if size == 1 and machine.strategy == "auto":
        return
    found = torch.cuda.device_count() if machine.accelerator in ("auto", "gpu", "cuda") else 0
    if 0 < found < machine.devices:
        raise ValueError(f"trainer.devices={machine.devices}: this machine shows {found} GPUs. Give {found} or fewer.")
    with quiet():
        Fabric(
            accelerator=accelerator(machine),
            devices=machine.devices,
            num_nodes=machine.num_nodes,
            strategy="ddp",
            plugins=environment(),
        ).launch()
    atexit.register(ranks.leave)
    if ranks.rank():  # the first process speaks for all; errors still go to stderr
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _started() -> tuple[str, int]:
    """Who started the processes and how many; 0 where this program starts them itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun", int(os.environ["WORLD_SIZE"])
    if "SLURM_STEP_NUM_TASKS" in os.environ and SLURMEnvironment.detect():
        return "srun", int(os.environ["SLURM_STEP_NUM_TASKS"])
    return "", 0


def accelerator(machine: TrainerConfig) -> str:
    """Return Lightning's name of an accelerator."""
    return "gpu" if machine.accelerator == "cuda" else machine.accelerator


def environment() -> list[Any]:
    """Return what Lightning must be told of how the processes were started, as a list of plugins.

    Under SLURM it would write checkpoints of its own and put the job back into the queue; runs save themselves on a
    signal, and go on from their own checkpoint.

    Raises:
        ValueError: the job was not asked for as Lightning wants it; the message says how.
    """
    if not SLURMEnvironment.detect():
        return []
    try:
        return [SLURMEnvironment(auto_requeue=False)]
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def strategy(machine: TrainerConfig, recorded: bool = False) -> Any:
    """Return the Lightning strategy of a run; one whose gradients are recorded has them summed up by itself."""
    if machine.strategy == "auto" and machine.devices * machine.num_nodes == 1:
        return "auto"
    if machine.strategy == "fsdp":
        return FullySharded()
    if recorded:
        return Unwrapped()
    # Some parameters are unused in some batches: those of edges for an isolated atom, or the router of a single grid
    # branch in all. A parameter without a gradient on any rank keeps none, as on one. Buffers are constants.
    return DDPStrategy(find_unused_parameters=True, broadcast_buffers=False)


class Unwrapped(DDPStrategy):
    """DDP's processes around a module that brings its gradients together itself."""

    def configure_ddp(self) -> None:
        """Leave the model as it is."""


class FullySharded(DDPStrategy):
    """DDP's processes, with weights in slices instead of copies of the model; on GPU and, for tests, on CPU."""

    def configure_ddp(self) -> None:
        """Cut the weights into slices, instead of wrapping the model."""
        module: Any = self.lightning_module
        module.shard()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole tensors under the names of a run on one rank."""
        assert self.lightning_module is not None
        return sharding.whole(self.lightning_module.state_dict())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Lightning's remarks on workers, devices and logging intervals off the screen; errors stay."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        warnings.filterwarnings("ignore", message=".*LeafSpec.*")
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")  # copied, then
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
