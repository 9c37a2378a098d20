"""Training with Lightning: the step, what is kept of a run, and the loop around them.

One step is four lines: evaluate the potential with forces that can be differentiated again, compare with the labels,
sum up the loss, let the optimiser move the weights. Around it:

- Training counts steps, not epochs. The loader is endless; the epoch is only a column of metrics.csv.
- Validation, and everything that is written, uses the averaged weights, which live in a module of their own: the raw
  weights are never exchanged for them, so that a checkpoint holds both at any moment.
- All randomness of a step follows from the seed and the number of the batch, so that a run that was interrupted and
  continued takes the same steps as one that was not.
- On several ranks each takes a part of every batch. The means of the loss are over the whole batch, so that the
  gradient is that of one rank that takes it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

import mlff
from mlff import added_elements, checkpoint, distributed, evaluation, finetuning, lora, optim, ranks, report, sharding
from mlff.compiled import CannotCompile, Comparison, CompiledEvaluation
from mlff.config import Command, Config, ModelConfig, TrainingConfig, continued, make_config, write
from mlff.data.batch import collate
from mlff.derivatives import evaluate
from mlff.distributed import quiet
from mlff.elements import SYMBOLS, atomic_number
from mlff.evaluation import errors
from mlff.graph import BatchPrediction, Graph, Targets
from mlff.loss import ErrorSums, differences, error_sums, label_counts, loss, loss_terms
from mlff.recorded import RECORDED, Record, RecordedSteps, check_device, cuda_record, is_recorded
from mlff.runs import MetricsFile, choose_folder, find_checkpoint, read_metrics, write_whole
from mlff.sets import Sets

Batch = tuple[Graph, Targets]

ENDLESS = 10**12
"""The length that an endless loader claims: more batches than any run takes."""


class Training(pl.LightningModule):
    """A potential while it is being trained.

    Args:
        potential: the model; parameters that do not require gradients stay as they are.
        config: the recipe.
        seed: of everything random in a step.
    """

    def __init__(self, potential: nn.Module, config: TrainingConfig, seed: int = 0) -> None:
        super().__init__()
        self.potential = potential
        self.config = config
        self.seed = seed
        self.average = optim.WeightAverage(potential, config.ema) if config.ema > 0 else None
        # Registered as a module of its own, so that it is moved and saved with the rest.
        self.averaged = None if self.average is None else self.average.module
        self.guard = optim.GradientGuard(config.gradient_clip)
        self.train_errors = ErrorSums(config.loss)
        self.valid_errors = ErrorSums(config.loss)
        self.valid_values: dict[str, float] = {}
        self.batches: EndlessBatches | None = None
        self.last_terms: Tensor | None = None  # of the loss, for the whole batch
        self.block_dtype: torch.dtype | None = None  # of the blocks' matrix products in training steps
        self.shared_out = False  # whether each rank has its own part of the optimiser's state
        self._terms: Callable[[Graph, Targets], Tensor] = self._loss_terms
        # The method itself, not the module: see `mlff.sharding.shard`.
        self._evaluate: Callable[[Graph], BatchPrediction] = functools.partial(
            evaluate, potential.forward, create_graph=True
        )
        self._recorded: RecordedSteps | None = None
        self._batch: Batch
        self._plain: list[nn.Module] = []  # a copy to write from, once the weights are in slices; no part of the state

    @property
    def judged(self) -> nn.Module:
        """The weights that are validated and written: averaged if there is an average."""
        return self.potential if self.averaged is None else self.averaged

    @property
    def last_loss(self) -> float:
        """The loss of the last batch; waits for the device."""
        return math.nan if self.last_terms is None else float(loss(self.last_terms, self.config.loss))

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Names and values of the parameters that training moves."""
        return [(name, value) for name, value in self.potential.named_parameters() if value.requires_grad]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return this rank's share of the loss of a batch; its mean over the ranks is the loss."""
        if self._recorded is not None:
            self._batch = batch
            return batch[0].positions.new_zeros(())  # gradient and loss come with the recording, in `backward`
        terms = self._terms(*batch)
        self.last_terms = ranks.total(terms.detach())
        # The strategies average gradients over the ranks: the share is multiplied by their number.
        return ranks.count() * loss(terms, self.config.loss, counts=self.last_terms[:, 1])

    def _loss_terms(self, graph: Graph, targets: Targets) -> Tensor:
        terms, sums = self._terms_and_errors(graph, targets)
        self.train_errors.add(sums)
        return terms

    def _terms_and_errors(self, graph: Graph, targets: Targets) -> tuple[Tensor, Tensor]:
        with blocks_in(self.potential, self.block_dtype):
            prediction = self._evaluate(graph)
        found = differences(prediction, targets, graph)
        terms = loss_terms(found, self.config.loss)
        return terms, error_sums(found, terms)

    def backward(self, loss: Tensor, *arguments: Any, **keys: Any) -> None:
        """Take the gradient of the batch that `training_step` was given."""
        if self._recorded is None:
            super().backward(loss, *arguments, **keys)
            return
        graph, targets = self._batch
        counts = ranks.total(label_counts(targets, graph)) if ranks.count() > 1 else None
        terms, sums = self._recorded.add(graph, targets, counts)
        self.train_errors.add(sums)
        self.last_terms = ranks.total(terms.clone())

    def _share(self, graph: Graph, targets: Targets, counts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """A batch's share of the loss of an optimiser step, its terms, and its errors."""
        terms, sums = self._terms_and_errors(graph, targets)
        return loss(terms, self.config.loss, counts) / self.config.accumulate, terms, sums

    def record_steps(self, record: Record) -> None:
        """Have the steps to come recorded, each size of a batch when it comes for the second time."""
        cutoff: Any = self.potential.cutoff
        self._recorded = RecordedSteps(self._share, [value for _, value in self.trained], float(cutoff), record)

    def compile_steps(self, example: Graph) -> None:
        """Have the steps to come run compiled code, if this installation can compile the model; all ranks must call it.

        The first rank compiles before the others, which then find most of it done. Says how long it took, or why it
        cannot be.

        Args:
            example: a small batch, on the device, on which compiled and uncompiled gradients are compared.

        Raises:
            GradientMismatch: they differ.
        """
        compiled = CompiledEvaluation(self.potential.train())

        def prepare() -> tuple[Comparison | None, str]:
            try:
                with blocks_in(self.potential, self.block_dtype):
                    return compiled.compare(example), ""
            except CannotCompile as error:
                return None, str(error)

        say("Compiling the training step; the first time this takes minutes …")
        began = time.monotonic()
        found, why = ranks.first_alone(prepare)
        if ranks.anywhere(found is None):
            say(f"The training step cannot be compiled here, so it goes on without: {why or 'another rank failed.'}")
            return
        assert found is not None
        self._evaluate = compiled
        say(
            f"Compiled in {time.monotonic() - began:.0f} s; of {len(self.trained)} gradients on a first batch none is "
            f"further from uncompiled code than {found.gradients:.0e} of its norm."
        )

    def shard(self) -> None:
        """Cut weights and averages into slices, one a rank; before optimisers are made."""
        self._plain = [sharding.plain_copy(self.judged)]
        self._terms = sharding.shard(self.potential, self._loss_terms)
        if self.averaged is not None:
            sharding.shard(self.averaged)

    def to_write(self) -> nn.Module:
        """Return the weights that are validated and written, whole; all ranks must call this."""
        if not self._plain:
            return self.judged
        self._plain[0].load_state_dict(sharding.whole(self.judged.state_dict()))
        return self._plain[0]

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Make what is random in this step a function of seed, batch and process."""
        torch.manual_seed((self.seed * 1_000_003 + batch_idx) * 4099 + self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimiser over the trained parameters."""
        parameters = [value for _, value in self.trained]
        if self.shared_out:
            return sharding.ShardedOptimizer(parameters, lambda some: optim.build_optimizer(some, self.config))
        return optim.build_optimizer(parameters, self.config)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip the gradients of a whole optimiser step."""
        self.guard.clip([value for _, value in self.trained])

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Move the weights at the learning rate of this step, then their average."""
        optim.set_learning_rate(optimizer, self.trainer.global_step, self.config)
        if self._recorded is None:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self._update_average()
            return
        optimizer_closure()
        for flat in self._recorded.flat.values():
            flat.copy_(ranks.total(flat))
        if self.shared_out:  # the optimiser talks to other ranks, through the host
            self.configure_gradient_clipping(optimizer)
            optimizer.optimizer.step()
            self._update_average()
        else:
            self._recorded.update(
                optimizer.optimizer, lambda: self.configure_gradient_clipping(optimizer), self._update_average
            )

    def _update_average(self) -> None:
        if self.average is not None:
            self.average.update(self.potential)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Forget the gradients of the last step; those of recordings stay where they are."""
        if self._recorded is None:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        else:
            self._recorded.zero()

    def on_validation_epoch_start(self) -> None:
        """Forget the last validation."""
        self.valid_errors.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the errors of a batch."""
        self._judge(batch)

    def on_validation_epoch_end(self) -> None:
        """Reduce the errors over all batches and processes."""
        self.valid_values = self.valid_errors.compute()

    def on_test_epoch_start(self) -> None:
        """As validation."""
        self.on_validation_epoch_start()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation."""
        self._judge(batch)

    def on_test_epoch_end(self) -> None:
        """As validation."""
        self.on_validation_epoch_end()

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Return energies, forces and stresses of a batch by name, since Lightning cannot move a frozen dataclass."""
        prediction = evaluate(self.judged, batch[0])
        return {name: value for name, value in vars(prediction).items() if value is not None}

    def _judge(self, batch: Batch) -> None:
        graph, targets = batch
        self.valid_errors.update(differences(evaluate(self.judged, graph), targets, graph))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Move a batch; labels and positions stay float64."""
        if self._recorded is not None and self.trainer.training:
            batch = self._recorded.fill(*batch)
        graph, targets = batch
        return graph.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the place in the data."""
        if self.batches is not None:
            checkpoint["data_position"] = self.batches.position()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go back to the place in the data."""
        if self.batches is not None and "data_position" in checkpoint:
            self.batches.go_to(checkpoint["data_position"])


class EndlessBatches:
    """The batches of one epoch after another, without an end.

    Args:
        loader: a loader over one epoch, whose `batch_sampler` is a `BudgetSampler`.

    Attributes:
        epoch: the epoch of the last batch given out.
        taken: batches of that epoch given out so far.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        self.taken = 0

    def __len__(self) -> int:
        return ENDLESS

    def position(self) -> dict[str, int]:
        """Return the place in the data, and what the order of the data follows from."""
        return {"epoch": self.epoch, "batches": self.taken, **self.loader.batch_sampler.plan_of}

    def go_to(self, position: Mapping[str, int]) -> None:
        """Go to a place in the data.

        If it lies inside an epoch that was cut into batches otherwise, as on another number of ranks, nobody can say
        what its rest is; then the next epoch comes.
        """
        self.epoch, self.taken = position["epoch"], position["batches"]
        plan = self.loader.batch_sampler.plan_of
        changed = [f"{name} {position[name]} -> {now}" for name, now in plan.items() if position.get(name, now) != now]
        if changed and self.taken:
            say(f"The batches are not those of before ({', '.join(changed)}): going on with the next epoch.")
            self.epoch, self.taken = self.epoch + 1, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            sampler = self.loader.batch_sampler
            sampler.set_epoch(self.epoch)
            sampler.start = self.taken
            for batch in self.loader:
                self.taken += 1
                yield batch
            if self.taken == 0:
                raise ValueError("the training set gives no batch; it needs at least one structure.")
            self.epoch, self.taken = self.epoch + 1, 0


class Records(Checkpoint):
    """Keeps what a run leaves behind: metrics.csv, checkpoints/last.ckpt, the best model; stops early when asked to.

    The best model is the one with the lowest validation loss: the loss of training, over the whole validation set, with
    the averaged weights. `last.ckpt` is written after every validation, and at the end.

    Args:
        folder: of the run.
        config: the recipe.
        save: writes a potential to a path.
        log_every: steps between rows of training errors.
    """

    def __init__(
        self, folder: Path, config: TrainingConfig, save: Callable[[nn.Module, Path], object], log_every: int = 50
    ) -> None:
        self.folder = folder
        self.config = config
        self.save = save
        self.log_every = log_every
        self.best_loss = math.inf
        self.best_step = -1
        self.unimproved = 0
        self.best_values: dict[str, float] = {}
        self._metrics: MetricsFile | None = None
        self._seen_step = -1
        self._validated_step = -1

    def state_dict(self) -> dict[str, Any]:
        """Return what a continued run must know."""
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "best_values": self.best_values,
            "unimproved": self.unimproved,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name, value in state_dict.items():
            setattr(self, name, value)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Open metrics.csv; a continued run goes on after its last checkpoint."""
        step = trainer.global_step
        self._seen_step = step
        if trainer.is_global_zero:
            self._metrics = MetricsFile(self.folder / "metrics.csv", after_step=step)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write training errors every `log_every` steps; ask for a last validation when the steps are done."""
        step = trainer.global_step
        if step == self._seen_step:
            return  # in the middle of an accumulated step
        self._seen_step = step
        if step % self.log_every == 0:
            self._write(trainer, module, {})
        if step >= self.config.steps:
            trainer.should_stop = True  # which makes Lightning validate once more before it leaves

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Write the errors, keep the model if it is the best so far, and save a checkpoint."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        ranks.together(lambda: module.guard.check(module.trained))
        step = trainer.global_step
        if step == self._validated_step:
            return
        self._validated_step = step
        values = module.valid_values
        self._write(trainer, module, {f"valid_{name}": value for name, value in values.items()})
        # Without any label in the validation set there is no order among models: then the newest is the best.
        if values["loss"] < self.best_loss or not any(math.isfinite(values[name]) for name in values if name != "loss"):
            self.best_loss, self.best_step, self.best_values, self.unimproved = values["loss"], step, dict(values), 0
            best = module.to_write()
            if trainer.is_global_zero:
                write_whole(self.folder / "model.safetensors", lambda draft: self.save(best, draft))
        else:
            self.unimproved += 1
            if 0 < self.config.early_stopping <= self.unimproved:
                trainer.should_stop = True
        self.save_checkpoint(trainer)

    def save_checkpoint(self, trainer: pl.Trainer) -> None:
        """Write checkpoints/last.ckpt, whole or not at all; every process must call this."""
        last = self.folder / "checkpoints" / "last.ckpt"
        draft = last.with_name(".last.ckpt.draft")
        last.parent.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(draft)
        if trainer.is_global_zero:
            with open(draft, "rb") as file:
                os.fsync(file.fileno())  # a machine that loses power may else keep the new name and not the content
            draft.replace(last)

    def _write(self, trainer: pl.Trainer, module: Any, values: dict[str, float]) -> None:
        ranks.together(lambda: module.guard.check(module.trained))
        errors = module.train_errors.compute() if module.train_errors.any() else {}
        module.train_errors.reset()
        row = {
            "epoch": float(module.batches.epoch) if module.batches is not None else math.nan,
            "learning_rate": _last_learning_rate(trainer, self.config),
            **{f"train_{name}": value for name, value in errors.items()},
            **values,
        }
        if self._metrics is not None:
            self._metrics.add(trainer.global_step, row)
        for logger in trainer.loggers:
            shown = {name.replace("_", "/", 1) if name != "learning_rate" else name: v for name, v in row.items()}
            logger.log_metrics({name: v for name, v in shown.items() if math.isfinite(v)}, trainer.global_step)


def _last_learning_rate(trainer: pl.Trainer, config: TrainingConfig) -> float:
    return optim.learning_rate(max(0, trainer.global_step - 1), config)


class Interrupt(Callback):
    """Lets Ctrl-C and SIGTERM end a run in order, validated and saved; a second Ctrl-C ends it at once.

    SIGUSR1, by which SLURM can be asked to announce the end of a job, does the same. A signal to one rank stops all of
    them after the same step.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

    def __init__(self) -> None:
        self.asked = False
        self._seen_step = -1
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Take over the signals, where this thread may."""

        def stop(number: int, frame: Any) -> None:
            self.asked = True
            if ranks.count() == 1:
                trainer.should_stop = True
            self._restore()
            if ranks.count() > 1:  # whoever started the ranks may pass the signal on to those that have it already
                for other in set(self.SIGNALS) - {signal.SIGINT}:
                    self._before[other] = signal.signal(other, signal.SIG_IGN)
            print("\nStopping after this step, validating and saving. Again to leave at once.", file=sys.stderr)

        with contextlib.suppress(ValueError):  # only the main thread may set handlers
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, stop)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Agree with the other ranks on whether this step is the last."""
        if trainer.global_step == self._seen_step:
            return  # in the middle of an accumulated step
        self._seen_step = trainer.global_step
        if ranks.anywhere(self.asked):
            self.asked = trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Give the signals back."""
        self._restore()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Give the signals back."""
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)


class Progress(Callback):
    """One line that says where the run is: step, loss, errors, time left. On a terminal it is rewritten in place."""

    def __init__(self, steps: int, every_seconds: float | None = None) -> None:
        self.steps = steps
        self.live = sys.stderr.isatty()
        self.every = every_seconds if every_seconds is not None else (0.5 if self.live else 10.0)
        self._start = self._shown = 0.0
        self._first_step = 0
        self._valid = ""
        self._loss: Tensor | None = None

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Start the clock."""
        self._start, self._first_step = time.monotonic(), trainer.global_step
        self._shown = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show the line, now and then: reading the loss waits for the device."""
        now = time.monotonic()
        if now - self._shown < self.every and trainer.global_step < self.steps:
            return
        self._shown = now
        done = trainer.global_step - self._first_step
        left = (now - self._start) / max(1, done) * (self.steps - trainer.global_step)
        shown = f"loss {module.last_loss:.4g}{self._valid}  {_duration(left)} left"
        self._show(trainer, f"step {trainer.global_step}/{self.steps}  {shown}")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Show the errors of the validation, on a line that stays."""
        values = module.valid_values
        self._valid = "  valid " + short_errors(values)
        self._show(trainer, f"step {trainer.global_step}/{self.steps}  validation: {short_errors(values)}", stays=True)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Show that a long validation moves."""
        now = time.monotonic()
        if now - self._shown >= self.every:
            self._shown = now
            total = trainer.num_val_batches[0] if trainer.num_val_batches else 0
            self._show(trainer, f"step {trainer.global_step}/{self.steps}  validating {batch_idx + 1}/{total}")

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Leave the line."""
        if self.live and trainer.is_global_zero:
            print(file=sys.stderr)

    def _show(self, trainer: pl.Trainer, line: str, stays: bool = False) -> None:
        if trainer.is_global_zero:
            if self.live:
                print(f"\r\033[K{line}", end="\n" if stays else "", file=sys.stderr, flush=True)
            else:
                print(line, file=sys.stderr, flush=True)


def short_errors(values: dict[str, float]) -> str:
    """Return errors in a few words: meV/atom, meV/Å, GPa; a dash where there is no label."""
    energy, forces, stress = (
        values.get(name, math.nan) for name in ("energy_mae_per_atom", "forces_mae", "stress_mae")
    )
    parts = [
        f"E {1000 * energy:.4g} meV/atom" if math.isfinite(energy) else "E -",
        f"F {1000 * forces:.4g} meV/Å" if math.isfinite(forces) else "F -",
    ]
    if math.isfinite(stress):
        parts.append(f"stress {160.21766 * stress:.3g} GPa")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@dataclass(frozen=True)
class Outcome:
    """How a fit ended."""

    steps: int
    best_step: int
    best_values: dict[str, float]  # errors of the best model on the validation set
    interrupted: bool


def fit(
    training: Training,
    train_loader: Any,
    valid_loader: Iterable[Batch],
    config: Config,
    folder: Path,
    save: Callable[[nn.Module, Path], object],
    resume: Path | None = None,
    first_values: dict[str, float] | None = None,
) -> Outcome:
    """Train, validate and save until the steps are done, validation no longer improves, or somebody interrupts.

    Args:
        training: what is trained.
        train_loader: one epoch of batches; see `EndlessBatches` for what its sampler must do.
        valid_loader: the validation set.
        config: the run; `training` and `trainer` are read.
        folder: the run's folder, which exists.
        save: writes a potential to a path.
        resume: a checkpoint to continue from.
        first_values: loss and errors of the starting model on the validation set; later models must be better to be
        kept.

    Raises:
        FloatingPointError: a gradient became NaN or infinite; the message names its parameters.
    """
    records = Records(folder, config.training, save, config.trainer.log_every)
    if first_values is not None and resume is None:
        records.best_loss, records.best_step, records.best_values = first_values["loss"], 0, dict(first_values)
    interrupt = Interrupt()
    training.batches = EndlessBatches(train_loader)
    training.block_dtype = torch.bfloat16 if config.trainer.precision == "bf16" else None
    training.shared_out = config.trainer.strategy in ("zero1", "fsdp")
    device = next(training.potential.parameters()).device
    recorded = is_recorded(config.training.compile, device, config.trainer.strategy)
    loop = trainer(config, folder, [Progress(config.training.steps), records, interrupt], recorded)
    with _precision(config.trainer.precision), quiet():
        if config.training.compile in ("true", "both"):
            training.compile_steps(_few(train_loader.dataset).to(device))
        if recorded:
            training.record_steps(cuda_record())
        loop.fit(
            training, training.batches, valid_loader, ckpt_path=resume, weights_only=None if resume is None else True
        )
    return Outcome(loop.global_step, records.best_step, records.best_values, interrupt.asked)


def _few(dataset: Any, atoms: int = 64) -> Graph:
    """The first structures of a set as a batch: as many as have so many atoms together, at least one."""
    graphs, total = [], 0
    for place in range(len(dataset)):
        graph, _ = dataset[place]
        if graphs and total + graph.n_atoms > atoms:
            break
        graphs.append(graph)
        total += graph.n_atoms
    return collate(graphs)


def trainer(config: Config, folder: Path | None, callbacks: list[Callback], recorded: bool = False) -> pl.Trainer:
    """Return the Lightning trainer of a run, whose steps may be recorded; without a folder it writes nothing."""
    training, machine = config.training, config.trainer
    # Lightning counts validation in batches, we in optimiser steps; once at the end is what Records asks for.
    every = training.validate_every * training.accumulate if training.validate_every else ENDLESS
    with quiet():
        return pl.Trainer(
            accelerator=distributed.accelerator(machine),
            devices=machine.devices,
            num_nodes=machine.num_nodes,
            strategy=distributed.strategy(machine, recorded=recorded),
            plugins=distributed.environment(),
            max_steps=training.steps,
            max_epochs=1,
            accumulate_grad_batches=training.accumulate,
            check_val_every_n_epoch=None,
            val_check_interval=every,
            num_sanity_val_steps=0,
            deterministic=machine.deterministic,
            use_distributed_sampler=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            logger=_loggers(machine.logger, folder),
            callbacks=callbacks,
            default_root_dir=folder,
        )


def _loggers(name: str, folder: Path | None) -> Any:
    if folder is None or name in ("csv", "none"):  # metrics.csv is always written, by Records
        return False
    if name == "tensorboard":
        return TensorBoardLogger(folder, name="tensorboard", version="")
    try:
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(save_dir=folder, project="mlff", name=folder.name)
    except ModuleNotFoundError as error:
        raise ValueError("trainer.logger=wandb needs the package wandb: pip install wandb.") from error


@contextlib.contextmanager
def _precision(name: str) -> Iterator[None]:
    """Set how float32 matrix products are taken, for the time of a run; bf16 is a matter of the blocks alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def blocks_in(potential: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Take the matrix products of a model's blocks in another type, for a while; None = as they are."""
    if dtype is None:
        yield
        return
    before: Any = getattr(potential, "block_dtype", None)
    potential.block_dtype = dtype  # type: ignore[assignment]
    try:
        yield
    finally:
        potential.block_dtype = before


def finetune(
    preset: str | None = None,
    train: str | Sequence[str] = (),
    valid: str | Sequence[str] = (),
    test: str | Sequence[str] = (),
    output: str | None = None,
    **keys: Any,
) -> Path:
    """Fine-tune a preset, or other weights, on labelled structures; return the path of model.safetensors.

        mlff.finetune(preset="mini", train="mine.xyz", output="runs/x", **{"training.steps": 200})

    Args:
        preset: name of a preset; or give `weights`.
        train: file, folder, glob or list of them, in any format that ASE reads, and others; empty: the embedded data.
        valid: the same; empty: a part of `train`.
        test: the same; empty: no test.
        output: folder of the run; None: runs/<preset>-<date>-<n>.
        keys: any key of the command line, dotted.

    Raises:
        ValueError: a key, a file or a label is not what it should be; the message says which.
        FileNotFoundError: a file is not there.
    """
    values: dict[str, Any] = dict(keys)
    for name, value in (("preset", preset), ("output", output)):
        if value is not None:
            values[name] = value
    for name, paths in (("train", train), ("valid", valid), ("test", test)):
        if paths:
            values[f"data.{name}"] = paths
    return run(make_config(values, "finetune"), "finetune")


def run(config: Config, command: Command = "finetune") -> Path:
    """Do a whole run: open model and data, fit reference energies, train, judge, report. Return model.safetensors.

    Everything that a user can get wrong is looked at before the folder of the run is made.

    Args:
        config: what to do.
        command: `finetune` starts from trained weights where there are any, `train` never does.

    Raises:
        ValueError: a file, a label, an element or a key is not what it should be.
        FileNotFoundError: a file is not there.
        FloatingPointError: training diverged.
    """
    began = time.monotonic()
    _device(config.trainer.accelerator)
    distributed.start(config.trainer)
    folder, last = ranks.from_first(lambda: _place(config))
    if last is not None:
        config = ranks.together(lambda: continued(config, folder, command))
    device = _device(config.trainer.accelerator)
    if config.training.compile in RECORDED:
        check_device(device)
    start, sets = ranks.together(lambda: finetuning.open_start(config, command))
    potential = start.potential.to(device)
    trains = ranks.together(lambda: finetuning.prepare(config, potential))
    added_elements.train_rows(potential, config.elements.add)
    ranks.together(lambda: optim.set_rates(potential, config.training.rates))
    say(start.note)
    say(sets.describe())
    if trains:
        say(trains)
    if last is None:
        config = ranks.from_first(lambda: finetuning.scaled(config, start, sets, device))
    else:
        say(f"Continuing {folder} from its last checkpoint.")
    sets = sets.limited(config.data)
    train_loader, valid_loader = ranks.together(lambda: sets.loaders(config))
    say(
        "Fitting reference energies …"
        if config.finetune.e0 in ("refit", "isolated")
        else "Reference energies are given."
    )
    fitted = ranks.from_first(lambda: finetuning.fit_reference_energies(config, potential, sets, device))

    symbols = tuple(SYMBOLS[number] for number in potential.elements)
    model = ModelConfig(**{**vars(potential.options), "elements": symbols})
    config = dataclasses.replace(config, output=str(folder), model=model)
    old_energies = potential.get_buffer("reference_energies").cpu().numpy().copy()
    rows = finetuning.set_reference_energies(potential, fitted, sets.train.elements)

    stages: dict[str, dict[str, evaluation.Results]] = {}  # kept by the first rank alone
    kept: dict[str, evaluation.Errors] = {}

    def save(module: nn.Module, path: Path) -> None:
        plain = lora.merged(module)  # type: ignore[arg-type]
        checkpoint.save(plain, path, preset=config.preset or "", command=command)

    def begin() -> dict[str, float]:
        """Write what is known before the first step; return loss and errors of the start on the validation set."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", lambda draft: write(config, draft))
        say(f"Everything goes to {folder}.")
        write_whole(folder / "e0.csv", lambda draft: report.write_reference_energies(draft, rows))
        say("\n" + report.reference_energy_table(rows))
        if fitted.remark:
            say(fitted.remark)
        before, values = sets.judge(potential, config, device)
        stages["as loaded" if start.trained else "untrained"] = before
        if any(row.shift for row in rows):
            shift = np.zeros(len(SYMBOLS))
            for row in rows:
                shift[atomic_number(row.element)] = row.shift
            for name in list(stages):
                stages[name] = {part: old.shifted(-shift) for part, old in before.items()}
            stages["new reference energies"] = before
        say("\nBefore training:\n" + evaluation.table({name: errors(found) for name, found in before.items()}))
        if sets.kept is not None and config.training.steps > 0:
            kept["as loaded"] = finetuning.judge_kept(potential, old_energies, sets, config, device)
        if last is None:
            # The start is the best model so far: a training that improves nothing must not make it worse either.
            write_whole(folder / "model.safetensors", lambda draft: save(potential, draft))
            MetricsFile(folder / "metrics.csv").add(0, {f"valid_{name}": value for name, value in values.items()})
        return values

    values = ranks.from_first(begin)
    outcome = None
    if config.training.steps > 0:
        say("\n" + optim.route_table(potential, config.training.optimizer) + "\n")
        training = Training(potential, config.training, config.seed)
        outcome = fit(training, train_loader, valid_loader, config, folder, save, last, values)

    def end() -> None:
        """Judge the best model, settle its reference energies, report."""
        best = checkpoint.load(folder / "model.safetensors", device=device)
        name = "fine-tuned" if command == "finetune" and start.trained else "trained"
        last_results, _ = sets.judge(best, config, device)
        last_rows = rows
        if outcome is not None and config.finetune.e0 == "refit":
            last_results, last_rows, moved = finetuning.settle(config, best, sets, device, last_results, rows)
            if moved:
                save(best, folder / "model.safetensors")
                write_whole(folder / "e0.csv", lambda draft: report.write_reference_energies(draft, last_rows))
                say("\nReference energies, fitted once more to what the trained network leaves:")
                say(report.reference_energy_table(last_rows))
        stages[name if config.training.steps > 0 else "written"] = last_results
        if kept:
            kept[name] = finetuning.judge_kept(best, old_energies, sets, config, device)
            write_whole(folder / "retention.csv", lambda draft: evaluation.write_summary(draft, kept))
        page = _report(folder, config, start, sets, stages, kept, last_rows, outcome, time.monotonic() - began)
        for set_name, found in page.stages.items():
            say(f"\nErrors, {set_name}:\n" + evaluation.table(found, "model"))
        if page.kept:
            say(f"\nWhat the model still knows: {page.kept_text}\n" + evaluation.table(page.kept, "model"))
        if outcome is not None and outcome.interrupted:
            say(f"\nStopped at step {outcome.steps}; the same command with output={folder} goes on from there.")
        say("\nWritten:")
        for file, text in page.files.items():
            say(f"  {folder / file}  {text}")

    ranks.from_first(end)  # the others wait: a process group is left by all at once
    return folder / "model.safetensors"


def _place(config: Config) -> tuple[Path, Path | None]:
    """Return the folder of a run and the checkpoint that it goes on from, if it does."""
    folder = choose_folder(config)
    return folder, find_checkpoint(config, folder)


def say(text: str) -> None:
    """Print a line for the user, at once; the first rank speaks for all."""
    if ranks.rank() == 0:
        print(text, flush=True)


def _device(accelerator: str) -> torch.device:
    """The device that Lightning will choose for an accelerator."""
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if accelerator in ("gpu", "cuda"):
        raise ValueError(
            "trainer.accelerator=gpu needs a CUDA device; this machine shows none. Leave it out, or give cpu."
        )
    if accelerator == "mps":
        raise ValueError("trainer.accelerator=mps cannot run this model, which sums energies in float64; give cpu.")
    return torch.device("cpu")


def _report(
    folder: Path,
    config: Config,
    start: finetuning.Start,
    sets: Sets,
    stages: dict[str, dict[str, evaluation.Results]],
    kept: dict[str, evaluation.Errors],
    rows: list[report.ReferenceEnergy],
    outcome: Outcome | None,
    seconds: float,
) -> report.Page:
    """Write parity.png, curves.png and report.html; return what they show."""
    names = list(stages)
    before, after = stages[names[-2]], stages[names[-1]]
    shown = "test" if "test" in after else "validation"
    write_whole(folder / "parity.png", lambda draft: report.parity_plot(draft, after[shown], before[shown]))
    write_whole(folder / "curves.png", lambda draft: report.curves_plot(draft, read_metrics(folder / "metrics.csv")))
    old_groups, old_elements = evaluation.by_group(before[shown]), evaluation.by_element(before[shown])
    facts = {
        "start": start.note,
        "data": sets.describe().removeprefix("Data: "),
        "steps": f"{outcome.steps} of {config.training.steps}, best at {outcome.best_step}" if outcome else "0",
        "batch": f"at most {config.training.batch_atoms} atoms",
        "loss": f"energy {config.training.loss.energy:g}, forces {config.training.loss.forces:g}, "
        f"stress {config.training.loss.stress:g}",
        "optimiser": f"{config.training.optimizer}, learning rate {config.training.learning_rate:g}, "
        f"{config.training.schedule}",
        "time": _duration(seconds),
        "written by": f"mlff {mlff.__version__}",
    }
    source = f"structures like those that preset {config.preset} was trained on, but none of them"
    if config.finetune.retention != "auto":
        source = f"structures of {config.finetune.retention}"
    page = report.Page(
        title=f"{config.preset or 'model'}: {folder.name}",
        facts=facts,
        stages={name: {stage: errors(found[name]) for stage, found in stages.items()} for name in after},
        kept=kept,
        kept_text=f"{source}; energies with the reference energies that the model came with." if kept else "",
        groups={name: (old_groups.get(name), found) for name, found in evaluation.by_group(after[shown]).items()},
        elements={name: (old_elements.get(name), found) for name, found in evaluation.by_element(after[shown]).items()},
        reference_energies=rows,
        pictures={
            f"Prediction against label, {shown} set": folder / "parity.png",
            "Errors over steps": folder / "curves.png",
        },
        files={
            "model.safetensors": "the best model by validation loss, averaged weights: mlff.Calculator(path)",
            "report.html": "this run on one page",
            "parity.png": "predictions against labels",
            "curves.png": "errors over steps",
            "metrics.csv": "errors over steps, as numbers",
            "e0.csv": "reference energies",
            **({"retention.csv": "errors on structures of the pretraining, before and after"} if kept else {}),
            "config.yaml": "every key; runs again as config=PATH",
            **({"checkpoints/last.ckpt": "to continue from"} if outcome else {}),
        },
    )
    write_whole(folder / "report.html", lambda draft: report.write_page(draft, page))
    return page
