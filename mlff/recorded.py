"""Training steps and calculations as recordings: work of a GPU, recorded once for each size, and then replayed.

A step of a small model is thousands of short kernels, and the host takes longer to ask for them than the GPU to run
them. A CUDA graph asks once. What is recorded must not depend on values, must find its input where it was, and has one
size; so

    sizes       batches are filled up to one of a few sizes (`mlff.padding`), of which each has its recording
    first time  a step of a new size runs as it is, which also sets up whatever a recording may not
    second      the same is recorded, and replayed from then on

One recording gives gradients, another one moves the weights. Between them there is room for other batches of the same
optimiser step, and for other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mlff.derivatives import Potential, evaluate
from mlff.graph import BatchPrediction, Graph, Targets
from mlff.kernels import host
from mlff.padding import Sizes, pad, pad_targets, unpad

logger = logging.getLogger("mlff")

Function = Callable[[], tuple[Tensor, ...]]
# Records a function: returns what replays it, and the tensors that then hold its results.
Record = Callable[[Function], tuple[Callable[[], None], Sequence[Tensor]]]

RECORDED = ("graphs", "both")
"""Values of `training.compile` with which steps are recorded: what PyTorch runs, or what its compiler made of it."""
TOLERANCE = 0.02
"""Largest difference between recorded and unrecorded gradients, relative to their norm: they are the same kernels, and
differ by the order in which sums over neighbours are taken on a GPU, which bfloat16 makes as large as its own rounding.
A recording that read old data or random numbers would be off by as much as the gradients are large."""
SPARE = 1.25
"""A recording may have so many times the atoms and edges of a batch that it is used for; 64 always do."""


LARGE = 500_000
"""Edges of a graph above which its evaluation is not recorded: the GPU is busy for longer than the host takes to ask.
Measured on an H200: forces of preset mini take 41 ms for 20,000 edges and for 98,000."""
MOST = 16
"""Recordings of an evaluation that are kept; one more, and all are made anew."""


class RecordingMismatch(RuntimeError):
    """A recording has other gradients than what it is a recording of."""


def check_device(device: torch.device) -> None:
    """Raise ValueError if nothing can be recorded on a device."""
    if device.type != "cuda":
        raise ValueError("training.compile=graphs or both records the work of a GPU; this run has none. Leave it out.")


def is_recorded(way: str, device: torch.device, strategy: str) -> bool:
    """Return whether steps are recorded under a value of `training.compile`; with "auto" they are where they can be."""
    return way in RECORDED or (way == "auto" and device.type == "cuda" and strategy != "fsdp")


def cuda_record() -> Record:
    """Return what records on the current GPU; all its recordings share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(function: Function) -> tuple[Callable[[], None], Sequence[Tensor]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process, as those that pin memory for batches, may go on with what they do.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = function()
        return graph.replay, results

    return record


class Recordings:
    """A function of tensors, recorded once for each key and shape of its inputs.

    Args:
        function: of a list of tensors. It may change tensors of its own in place, and must do the same on every call.
        record: makes a recording.
    """

    def __init__(self, function: Callable[[list[Tensor]], tuple[Tensor, ...]], record: Record) -> None:
        self.function = function
        self.record = record
        self.refused = ""  # why nothing is recorded any more
        self._made: dict[Any, _Recording | None] = {}

    def __call__(self, inputs: Sequence[Tensor], key: Any = None) -> Sequence[Tensor]:
        """Return the function's results; they hold until the next call."""
        place = (key, *((tuple(x.shape), x.dtype) for x in inputs))
        recording = self._made.get(place)
        if recording is None and place in self._made and not self.refused:
            recording = self._made[place] = self._recording(inputs)
        if recording is None:
            self._made[place] = None
            with host.operators():
                return self.function(list(inputs))
        for given, mine in zip(inputs, recording.inputs, strict=True):
            mine.copy_(given)
        recording.replay()
        return recording.results

    def _recording(self, inputs: Sequence[Tensor]) -> _Recording | None:
        held = [x.clone() for x in inputs]
        try:
            with host.operators():
                return _Recording(held, *self.record(lambda: self.function(held)))
        except RuntimeError as error:
            self.refused = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("This step cannot be recorded, so it runs as it is from now on, slower: %s", self.refused)
            return None

    def __len__(self) -> int:
        return sum(recording is not None for recording in self._made.values())


@dataclass(frozen=True)
class _Recording:
    inputs: list[Tensor]
    replay: Callable[[], None]
    results: Sequence[Tensor]


@dataclass
class BatchSizes:
    """The sizes that batches are filled up to: few, and none much larger than what it is for."""

    chosen: list[Sizes] = field(default_factory=list)

    def fitting(self, own: Sizes) -> Sizes:
        """Return the size for a batch: one of those before, if there is one, or a new one."""
        # The edges that fill a batch up are shared by the atoms that do. One program sums the edges of an atom: were
        # there one atom for all of them, the whole device would wait for it.
        least = own.atoms + own.atoms // 32 + 1
        fitting = [
            sizes
            for sizes in self.chosen
            if least <= sizes.atoms <= _limit(own.atoms + 1)
            and own.edges <= sizes.edges <= _limit(own.edges)
            and own.structures < sizes.structures
        ]
        if fitting:
            return min(fitting, key=lambda sizes: (sizes.edges, sizes.atoms))
        # Edges are what a step costs most for, so that recordings differ in them. Of atoms a new size has as many as
        # another one, if that suits; structures cost nothing.
        shared = [sizes.atoms for sizes in self.chosen if least <= sizes.atoms <= _limit(own.atoms + 1)]
        structures = max([2 ** own.structures.bit_length(), *(sizes.structures for sizes in self.chosen)])
        sizes = Sizes(max([rounded(least), *shared]), rounded(max(own.edges, 1)), structures)
        self.chosen.append(sizes)
        return sizes


def _limit(number: int) -> float:
    return max(SPARE * number, 64)


def rounded(number: int) -> int:
    """Return the next number of the form k · 2ⁿ with k from 8 to 16: at most an eighth more."""
    step = 2 ** max(0, math.floor(math.log2(number)) - 3)
    return math.ceil(number / step) * step


class RecordedEvaluation:
    """`mlff.derivatives.evaluate(potential, graph)` from recordings: molecular dynamics asks for the same sizes again.

    A size that comes for the first time runs as it is, and so does a graph so large that the host does not count.

    Args:
        potential: the model, in evaluation mode; its weights may change in place, nothing else of it.
        cutoff: of the model, Å.
        record: returns what makes recordings; called on the device of the graphs.
    """

    def __init__(self, potential: Potential, cutoff: float, record: Callable[[], Record]) -> None:
        self.potential, self.cutoff, self._record = potential, cutoff, record
        self._start()

    def _start(self) -> None:
        self.sizes = BatchSizes()
        self.recordings: Recordings | None = None
        self._names: tuple[str, ...] = ()

    def __call__(self, graph: Graph) -> BatchPrediction:
        """Return energies, forces, virials and stresses, detached.

        Raises:
            RecordingMismatch: the first recording gives something else than what it was made from.
        """
        own = Sizes.of(graph)
        if own.atoms == 0 or own.edges > LARGE:
            return evaluate(self.potential, graph)
        if self.recordings is not None and len(self.recordings) > MOST:
            self._start()
        device = graph.positions.device
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if self.recordings is None:
                self.recordings = Recordings(self._evaluated, self._record())
            padded = pad(graph, self.sizes.fitting(own), self.cutoff)
            tables = {item.name: getattr(padded, item.name) for item in dataclasses.fields(Graph)}
            tables = {name: value for name, value in tables.items() if value is not None}
            self._names = tuple(tables)
            unchecked = not len(self.recordings)
            found = [x.clone() for x in self.recordings(list(tables.values()), self._names)]
            if unchecked and len(self.recordings):
                with host.operators():
                    self._compare(found, self._evaluated(list(tables.values())))
        return unpad(BatchPrediction(*found), own)

    def _evaluated(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        found = evaluate(self.potential, Graph(**dict(zip(self._names, inputs, strict=True))))
        return tuple(value for item in dataclasses.fields(found) if (value := getattr(found, item.name)) is not None)

    @staticmethod
    def _compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for value, other in zip(found, expected, strict=True):
            value, other = value.nan_to_num(), other.nan_to_num()
            difference, norm = float((value - other).norm()), float(other.norm())
            if not difference <= TOLERANCE * max(norm, 1e-3):
                raise RecordingMismatch(
                    f"A recorded calculation is not the one it was made from: results differ by {difference:.2e}, "
                    f"their norm is {norm:.2e}. Use Calculator(…, compile=False), and tell us of torch "
                    f"{torch.__version__}."
                )


class RecordedSteps:
    """The gradients of batches, and the steps of an optimiser, from recordings.

    Gradients live in tensors of their own, one after the other in a flat one for each dtype, and are added to; a
    parameter that no batch has used so far has none.

    Args:
        share: the loss of a batch, its terms and its errors; the terms' counts, where given, are those of the loss.
        parameters: those that are trained.
        cutoff: of the model, Å.
        record: makes a recording.
    """

    def __init__(
        self,
        share: Callable[[Graph, Targets, Tensor | None], tuple[Tensor, Tensor, Tensor]],
        parameters: Sequence[nn.Parameter],
        cutoff: float,
        record: Record,
    ) -> None:
        self.share = share
        self.parameters = list(parameters)
        self.cutoff = cutoff
        self.sizes = BatchSizes()
        numbers: dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            numbers[parameter.dtype] = numbers.get(parameter.dtype, 0) + parameter.numel()
        device = self.parameters[0].device
        self.flat = {dtype: torch.zeros(count, dtype=dtype, device=device) for dtype, count in numbers.items()}
        self._gradients = self._views()
        self._used = [False] * len(self.parameters)
        self._names: tuple[tuple[str, ...], tuple[str, ...], bool] = ((), (), False)
        self._batches = Recordings(self._add_gradients, record)
        self._updates = Recordings(self._update, record)
        self._optimizer: Any = None
        self._clip: Callable[[], Any]
        self._finish: Callable[[], Any]

    def _views(self) -> list[Tensor]:
        views, start = [], dict.fromkeys(self.flat, 0)
        for parameter in self.parameters:
            place = start[parameter.dtype]
            views.append(self.flat[parameter.dtype][place : place + parameter.numel()].view(parameter.shape))
            start[parameter.dtype] = place + parameter.numel()
        return views

    def fill(self, graph: Graph, targets: Targets) -> tuple[Graph, Targets]:
        """Return a batch filled up to the size of a recording."""
        sizes = self.sizes.fitting(Sizes.of(graph))
        return pad(graph, sizes, self.cutoff), pad_targets(targets, sizes)

    def zero(self) -> None:
        """Set all gradients to zero."""
        for flat in self.flat.values():
            flat.zero_()

    def add(self, graph: Graph, targets: Targets, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the gradients of a batch that `fill` gave; return terms of the loss and errors, which hold till the next.

        Args:
            graph: the batch.
            targets: its labels.
            counts: as `share` takes it.
        """
        tables = {item.name: getattr(graph, item.name) for item in dataclasses.fields(Graph)}
        labels = {name: getattr(targets, name) for name in ("energy", "forces", "stress", "weight")}
        tables = {name: value for name, value in tables.items() if value is not None}
        self._names = (tuple(tables), tuple(labels), counts is not None)
        inputs = [*tables.values(), *labels.values(), *(() if counts is None else (counts,))]
        checked = bool(len(self._batches))
        before = None if checked else ([flat.clone() for flat in self.flat.values()], _random_state(inputs))
        terms, sums = self._batches(inputs, self._names)
        if before is not None and len(self._batches):
            self._check(inputs, *before)
        for parameter, gradient, used in zip(self.parameters, self._gradients, self._used, strict=True):
            parameter.grad = gradient if used else None
        return terms, sums

    def _check(self, inputs: list[Tensor], before: list[Tensor], random: Tensor) -> None:
        """Raise RecordingMismatch unless the first recording has added what its function adds."""
        replayed = [flat.clone() for flat in self.flat.values()]
        after = _random_state(inputs)
        for flat, value in zip(self.flat.values(), before, strict=True):
            flat.copy_(value)
        _set_random_state(inputs, random)
        with host.operators():
            self._add_gradients(inputs)
        _set_random_state(inputs, after)
        for flat, value, old in zip(self.flat.values(), replayed, before, strict=True):
            difference, norm = float((flat - value).norm()), float((flat - old).norm())
            flat.copy_(value)
            if not difference <= TOLERANCE * max(norm, 1e-30):
                raise RecordingMismatch(
                    f"A recorded training step is not the step it was made from: gradients differ by {difference:.2e}, "
                    f"their norm is {norm:.2e}. Train without recording, and tell us of torch "
                    f"{torch.__version__}."
                )

    def _add_gradients(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        tables, labels, counted = self._names
        values = iter(inputs)
        graph = Graph(**{name: next(values) for name in tables})
        found = {name: next(values) for name in labels}
        structures = graph.n_structures
        targets = Targets(**found, group=("",) * structures, index=graph.numbers[:structures])
        loss, terms, sums = self.share(graph, targets, next(values) if counted else None)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        present = [place for place, gradient in enumerate(gradients) if gradient is not None]
        for place in present:
            self._used[place] = True
        for dtype in self.flat:
            these = [place for place in present if self.parameters[place].dtype == dtype]
            torch._foreach_add_([self._gradients[place] for place in these], [gradients[place] for place in these])  # type: ignore[misc]
        return terms.detach(), sums

    def update(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any], finish: Callable[[], Any]) -> None:
        """Clip, move the weights, and do what comes after.

        Args:
            optimizer: one that does not talk to other ranks; the learning rates of its groups may change.
            clip: changes gradients in place.
            finish: what comes after the step, as averaging weights.
        """
        self._optimizer, self._finish, self._clip = optimizer, finish, clip
        groups = optimizer.param_groups
        rates = [group["lr"] for group in groups]
        device = self.parameters[0].device
        self._updates([torch.tensor(rates, dtype=torch.float32).to(device)], tuple(self._used))
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _update(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        for group, rate in zip(self._optimizer.param_groups, inputs[0].unbind(), strict=True):
            group["lr"] = rate
            if "capturable" in group:  # AdamW asks for this word while it is recorded, and warns of it otherwise
                group["capturable"] = inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()
        self._clip()
        self._optimizer.step()
        self._finish()
        return ()


def _random_state(inputs: Sequence[Tensor]) -> Tensor:
    device = inputs[0].device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(inputs: Sequence[Tensor], state: Tensor) -> None:
    device = inputs[0].device
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
