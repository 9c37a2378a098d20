"""Energies, forces and virials as compiled code that a loss on forces can be differentiated through.

A compiler takes a function as it finds it, and no compiler of PyTorch looks into a derivative with `create_graph`. So
the derivative is written out first:

    trace     one call, with symbols for sizes, gives a graph of plain operations: the energy and its first derivative
    mend      the trace detaches what the first derivative keeps of the forward pass, which would cut the second one
              off, silently; these nodes are taken out
    compile   the graph is compiled for any size; its own backward pass is the second derivative
    compare   values, and the gradient of every parameter, against uncompiled code on a small batch

Parameters stay outside as they are: optimisers, averages, checkpoints and data-parallel hooks see nothing of this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from mlff.derivatives import Derivatives, derivatives, evaluate, with_stress
from mlff.graph import BatchPrediction, Graph
from mlff.padding import Sizes, pad, unpad

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest difference of a gradient between compiled and uncompiled code, relative to its norm. Measured: 4e-15 and
3e-6, on models of a few blocks."""
TOLERANCE_HALF = 0.1
"""The same with the blocks in bfloat16, where the compiler rounds fewer intermediate results. Measured: up to 0.02."""
FLOOR = 1e-3
"""Norm of a gradient, relative to that of the mean gradient, below which differences are relative to this instead."""

BACKEND: str | Callable[..., Any] = "inductor"
"""The compiler, as `torch.compile` knows it."""
NOISE = 0.05
"""Standard deviation of what is added to each weight for the comparison."""


class GradientMismatch(RuntimeError):
    """Compiled code has other values or gradients than uncompiled code."""


class CannotCompile(RuntimeError):
    """This installation cannot compile the model; training may go on without."""


@dataclass(frozen=True)
class Comparison:
    """Compiled against uncompiled code on one batch, relative to the values of the latter."""

    values: float  # largest difference of energies, forces and virials
    gradients: float  # largest difference of a parameter's gradient, relative to its norm


class CompiledEvaluation:
    """`mlff.derivatives.evaluate(potential, graph, create_graph=True)`, compiled on first use.

    Batches may have any size, without being compiled again. No module: the parameters stay those of the potential.

    Args:
        potential: the model, on its device and in the mode (training or evaluation) in which it will be called; it must
            know its `cutoff`.
    """

    def __init__(self, potential: nn.Module) -> None:
        self.potential = potential
        self._functions: dict[tuple[str, ...], Callable[..., Any]] = {}

    def __call__(self, graph: Graph) -> BatchPrediction:
        """Return energies, forces, virials and stresses, differentiable in the parameters.

        Raises:
            CannotCompile: the compiler gave up.
        """
        own = Sizes.of(graph)
        if min(dataclasses.astuple(own)) > 1:
            return self._padded(graph)
        sizes = Sizes(own.atoms + 2, own.edges + 2, own.structures + 1)
        return unpad(self._padded(pad(graph, sizes, self._cutoff)), own)

    def compare(self, graph: Graph) -> Comparison:
        """Compile, and compare values and gradients with uncompiled code on a batch; the weights do not change.

        Raises:
            CannotCompile: the compiler gave up.
            GradientMismatch: they differ; the message has a table.
        """
        graph = pad(graph, self._distinct(Sizes.of(graph)), self._cutoff)
        names, parameters = zip(*((n, p) for n, p in self.potential.named_parameters() if p.requires_grad), strict=True)
        devices = [graph.positions.device] if graph.positions.is_cuda else []
        with _moved(parameters), torch.random.fork_rng(devices):
            found, gradients = _values_and_gradients(self._padded, graph, parameters)
            expected, references = _values_and_gradients(
                lambda g: evaluate(self.potential.forward, g, create_graph=True), graph, parameters
            )
        half = getattr(self.potential, "block_dtype", None) is not None
        tolerance = TOLERANCE_HALF if half else TOLERANCES[parameters[0].dtype]
        values = max(float((x - y).norm() / y.norm().clamp_min(1e-30)) for x, y in zip(found, expected, strict=True))
        rows = _relative(names, gradients, references)
        worst = max(row[-1] for row in rows)
        if not (values <= tolerance and worst <= tolerance):
            raise GradientMismatch(_table(values, rows, tolerance))
        return Comparison(values, worst)

    @property
    def _cutoff(self) -> float:
        return float(self.potential.cutoff)  # type: ignore[arg-type]

    def _padded(self, graph: Graph) -> BatchPrediction:
        given = {item.name: getattr(graph, item.name) for item in dataclasses.fields(Graph)}
        given = {name: value for name, value in given.items() if value is not None}
        function = self._functions.get(tuple(given))
        if function is None:
            function = self._functions[tuple(given)] = self._compiled(given)
        with _compiling():
            found = function(list(given.values()))
        return with_stress(Derivatives(*found, *((None,) if len(found) == 4 else ())), graph)

    def _compiled(self, given: dict[str, Tensor]) -> Callable[..., Any]:
        example = Graph(**given)
        traced = trace(self.potential, pad(example, self._distinct(Sizes.of(example)), self._cutoff))
        # Random numbers are those of uncompiled code: the roll of each edge's frame, from the same generator.
        options: dict[str, Any] | None = {"fallback_random": True} if BACKEND == "inductor" else None
        return torch.compile(traced, fullgraph=True, dynamic=True, backend=BACKEND, options=options)

    def _distinct(self, own: Sizes) -> Sizes:
        """Sizes above those of a graph that no compiler takes for each other or for a width of the model."""
        taken = {size for tensor in self.potential.state_dict().values() for size in tensor.shape}

        def prime(above: int) -> int:
            size = max(5, above)
            while size in taken or any(size % k == 0 for k in range(2, math.isqrt(size) + 1)):
                size += 1
            taken.add(size)
            return size

        return Sizes(prime(own.atoms + 1), prime(own.edges + 2), prime(own.structures + 1))


def trace(potential: nn.Module, graph: Graph) -> fx.GraphModule:
    """Return energies and derivatives of a model as a graph of plain operations, for any sizes.

    The graph is a function of a list of tensors, those of `graph` that are not None in their order, and returns those
    of `mlff.derivatives.Derivatives` that are not None. Its parameters are the potential's own.

    Args:
        potential: the model, in the mode in which the graph is to run.
        graph: an example, padded, whose sizes differ from each other and from all widths of the model.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    given = {item.name: getattr(graph, item.name) for item in dataclasses.fields(Graph)}
    names = [name for name, value in given.items() if value is not None]

    def function(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            found = derivatives(potential.forward, Graph(**dict(zip(names, tensors, strict=True))), create_graph=True)
        return tuple(value for value in found if value is not None)

    with _sizes_stay_open():
        traced = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)([given[n] for n in names])
    for node in list(traced.graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            # The model itself detaches nothing but its inputs, which ask for no gradient here.
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
        elif node.target is torch.ops.aten.sym_numel.default:
            node.replace_all_uses_with(_product_of_sizes(node))
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _product_of_sizes(node: fx.Node) -> fx.Node | int:
    """The number of elements of a tensor by operations that every version of Dynamo takes: 2.11 refuses sym_numel."""
    (tensor,) = node.args
    assert isinstance(tensor, fx.Node)
    with node.graph.inserting_before(node):
        sizes = [
            node.graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis))
            for axis in range(tensor.meta["val"].dim())
        ]
        return functools.reduce(lambda x, y: node.graph.call_function(operator.mul, (x, y)), sizes) if sizes else 1


def _sizes_stay_open() -> Any:
    """Where code is traced: opt_einsum, if installed, would order sums of three factors by sizes, and so fix these."""
    return torch.backends.opt_einsum.flags(enabled=False)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Where compiled code is called: the compiler's failures have a type of ours, and settings are those we need.

    Settings hold in here alone. Within a data-parallel step the compiler would else cut the graph into pieces.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import TorchDynamoException

    try:
        with config.patch(optimize_ddp=False), _sizes_stay_open(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._(inductor|dynamo)\..*")
            yield
    except TorchDynamoException as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CannotCompile(" ".join(lines[:2]) or type(error).__name__) from error


@contextlib.contextmanager
def _moved(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters a little way off, for a while: of an untrained model most gradients are zero in any code."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in parameters:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter), alpha=NOISE)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)


def _values_and_gradients(
    function: Callable[[Graph], BatchPrediction], graph: Graph, parameters: Sequence[nn.Parameter]
) -> tuple[list[Tensor], list[Tensor]]:
    """Energies, forces and virials, and gradients of a sum of all of them with random signs."""
    torch.manual_seed(0)
    prediction = function(graph)
    values = [prediction.energy, prediction.forces, prediction.virial]
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64, device=graph.positions.device)
    for value in values:
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        total = total + (signs * value).sum()
    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    return [value.detach() for value in values], list(gradients)


def _relative(
    names: Iterable[str], gradients: Iterable[Tensor], references: Iterable[Tensor]
) -> list[tuple[str, float, float, float]]:
    """Rows of name, norm of the reference, norm of the gradient, relative difference."""
    rows = [
        (name, float(reference.norm()), float(gradient.norm()), float((gradient - reference).norm()))
        for name, gradient, reference in zip(names, gradients, references, strict=True)
    ]
    floor = FLOOR * sum(row[1] for row in rows) / len(rows)
    return [(name, norm, other, difference / max(norm, floor, 1e-30)) for name, norm, other, difference in rows]


def _table(values: float, rows: list[tuple[str, float, float, float]], tolerance: float) -> str:
    worst = sorted(rows, key=lambda row: -row[-1])[:10]
    wrong = sum(not row[-1] <= tolerance for row in rows)
    width = max(len(row[0]) for row in worst)
    lines = [
        f"The compiled training step is not the uncompiled one: {wrong} of {len(rows)} gradients differ by more than "
        f"{tolerance:g} of their norm; values by {values:.1e}. Train without training.compile, and tell us of torch "
        f"{torch.__version__}.",
        f"{'parameter':{width}s}  {'uncompiled':>10s}  {'compiled':>10s}  {'difference':>10s}",
    ]
    lines += [f"{name:{width}s}  {norm:10.3e}  {other:10.3e}  {ratio:10.1e}" for name, norm, other, ratio in worst]
    return "\n".join(lines)
