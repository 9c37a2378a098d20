"""The optimisers: HybridMuon, its routes, learning-rate schedules, gradient clipping and averaged weights.

A potential of this kind is mostly matrices, with a few vectors and tables in between. HybridMuon treats each as it is:

    muon    matrices: the momentum is replaced by its nearest semi-orthogonal matrix before the step
    adamw   Adam with decoupled weight decay
    adam    Adam without decay: vectors, scales, biases, tables of elements

With G the gradient of an (m, n) matrix W, learning rate η, decay λ, momentum β, one step of the muon route is

    W ← (1 - ηλ) W
    M ← β M + (1 - β) G,     U ← β M + (1 - β) G
    W ← W - η · 0.18 √max(m, n) · μ · orth(U)

where μ = 0.1 + 0.9 s and s ← 0.9 s + 0.1 · squash(cos(M, G)) follows how well momentum and gradient agree ("Magma").
A parameter with more than two axes is a stack of matrices, each with its own step, unless it says (`optimizer_rows`)
that it is one matrix whose columns stand on several axes.

Nothing here makes the host wait for the device: norms, flags and factors stay tensors until somebody asks.

Sources: Jordan et al., "Muon" (2024), for the iteration; Liu et al., arXiv:2502.16982, for the scale that matches
AdamW's update; Amsel et al., arXiv:2505.16932 ("Polar Express"), for the coefficients of the rectangular route.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* are private in name only: they are what torch's own optimisers are made of.

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.optim.adamw import adamw

from mlff import ranks
from mlff.config import TrainingConfig
from mlff.sezm.linear import OPTIMIZER_ATTRIBUTES

Route = Literal["adam", "adamw", "muon"]
K = TypeVar("K")

# Makes the root mean square of an orthogonal update that of an AdamW update, so that one learning rate serves all
# routes.
MATCH_RMS = 0.18
# Initial Magma score: an update starts at μ = 0.1 + 0.9 · 0.5 = 0.55.
FIRST_SCORE = 0.5

_SQUARE_STEPS = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2
_POLAR_EXPRESS = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)
# Each triple is that of the polynomial in x/1.05: a little room, so that round-off cannot push a singular value past
# the interval on which the polynomial converges.
_RECTANGULAR_STEPS = tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in _POLAR_EXPRESS)
_RESTART_BEFORE = (
    2  # before the third step Q is applied and the Gram matrix computed anew, which keeps half precision safe
)
_SMALLEST_NORM = 1e-7


def route(parameter: Tensor) -> Route:
    """Return the route of a parameter: its `optimizer_route`, else muon for matrices and adam for the rest."""
    chosen = getattr(parameter, "optimizer_route", None)
    if chosen is not None:
        if chosen not in ("adam", "adamw", "muon"):
            raise ValueError(f"optimizer_route must be adam, adamw or muon; got {chosen!r}")
        if chosen == "muon" and parameter.ndim < 2:
            raise ValueError(f"optimizer_route muon needs a matrix; got a parameter of shape {tuple(parameter.shape)}")
        return chosen
    return "muon" if min(matrix_shape(parameter)[1:]) > 1 else "adam"


def matrix_shape(parameter: Tensor) -> tuple[int, int, int]:
    """Return how many matrices a parameter holds, and their rows and columns.

    Axes of length one do not count. The last two of the others are the matrix, those before them make a stack; a
    parameter with `optimizer_rows` is one matrix, so many leading axes its rows and all others its columns.
    """
    rows = getattr(parameter, "optimizer_rows", None)
    if rows is not None:
        return 1, math.prod(parameter.shape[:rows]), math.prod(parameter.shape[rows:])
    axes = [1, 1, *(size for size in parameter.shape if size > 1)]
    return math.prod(axes[:-2]), axes[-2], axes[-1]


def rate(parameter: Tensor) -> float:
    """Return the factor on the learning rate of a parameter: its `optimizer_rate`, else 1."""
    return getattr(parameter, "optimizer_rate", 1.0)


def set_rates(module: nn.Module, rates: Mapping[str, float]) -> None:
    """Give the parameters of some rooms a learning rate of their own, as a factor on that of the run.

    Args:
        module: the model.
        rates: factor by room, a module of the model; the innermost room that is named decides.

    Raises:
        ValueError: there is no such room, or a factor is negative.
    """
    rooms = {name for name, _ in module.named_modules() if name}
    for room, factor in rates.items():
        if room not in rooms:
            known = ", ".join(name for name, child in module.named_children() if any(True for _ in child.parameters()))
            raise ValueError(f"training.rates: the model has no room {room!r}; it has {known} and what is in them.")
        if not 0 <= factor < math.inf:
            raise ValueError(f"training.rates: the factor of {room} must be 0 or more; got {factor}.")
    for name, parameter in module.named_parameters():
        inside = [room for room in rates if name.startswith(f"{room}.")]
        if inside:
            parameter.optimizer_rate = rates[max(inside, key=len)]  # type: ignore[attr-defined]


def describe_like(parameter: Tensor, other: Tensor) -> None:
    """Give a parameter what another one says to the optimiser: its route, its rows, its rate."""
    for name in OPTIMIZER_ATTRIBUTES:
        if hasattr(other, name):
            setattr(parameter, name, getattr(other, name))


def route_table(module: nn.Module, optimizer: str = "hybridmuon") -> str:
    """Return a printable table of the parameters by route: how many tensors, how many numbers, what is done to them.

    Parameters with a learning rate of their own have lines of their own. Under `adamw` matrices go with the other
    parameters that decay.
    """
    rows: dict[tuple[str, float], list[Tensor]] = {}
    if optimizer == "hybridmuon":
        rows.update({(name, 1.0): [] for name in ("muon", "adamw", "adam")})
    for parameter in module.parameters():
        if parameter.requires_grad:
            name = route(parameter)
            name = "adamw" if name == "muon" and optimizer == "adamw" else name
            rows.setdefault((name, rate(parameter)), []).append(parameter)
    frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    lines = [f"{'route':8s}{'tensors':>9s}{'parameters':>13s}  treatment"]
    treatments = {"muon": "orthogonal steps, weight decay", "adamw": "Adam, weight decay", "adam": "Adam, no decay"}
    for name, factor in sorted(rows, key=lambda row: (list(treatments).index(row[0]), -row[1])):
        parameters = rows[name, factor]
        count = sum(parameter.numel() for parameter in parameters)
        own = "" if factor == 1.0 else f", learning rate x {factor:g}"
        lines.append(f"{name:8s}{len(parameters):9d}{count:13,d}  {treatments[name]}{own}")
    if frozen:
        lines.append(f"{'frozen':8s}{'':9s}{frozen:13,d}  not trained")
    return "\n".join(lines)


def build_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimiser that `training.optimizer` names, over the parameters that are trainable."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if config.optimizer == "hybridmuon":
        return HybridMuon(
            trainable,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            betas=config.betas,
            magma=config.magma,
        )
    groups = [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0, "rate": factor}
        for (decays, factor), members in _sorted_by(trainable, lambda p: (route(p) != "adam", rate(p)), (True, False))
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=1e-8, fused=True)


def _sorted_by(
    parameters: Iterable[nn.Parameter], key: Callable[[nn.Parameter], tuple[K, float]], order: Sequence[K]
) -> list[tuple[tuple[K, float], list[nn.Parameter]]]:
    """Return parameters by (kind, rate): kinds in the given order, rates from high to low, parameters as they come."""
    found: dict[tuple[K, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(key(parameter), []).append(parameter)
    return sorted(found.items(), key=lambda item: (order.index(item[0][0]), -item[0][1]))


class HybridMuon(torch.optim.Optimizer):
    """Orthogonal steps for matrices, Adam for the rest; see the head of this file for the formulas.

    Matrices are stepped in batches: all that can share a batched product, padded with zeros along their long side where
    that costs little. Padding is exact, since added zero columns change neither X Xᵀ nor any norm.

    Args:
        params: parameters; each goes to the group of its `route` and `rate`.
        lr: learning rate of all groups until `set_learning_rate` is called.
        weight_decay: decoupled decay of the muon and adamw routes.
        momentum: β of the muon route.
        betas: decay of the first and second moment on the Adam routes.
        eps: added to the root of the second moment.
        magma: scale each orthogonal update by its agreement with the gradient.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-20,
        magma: bool = True,
    ) -> None:
        groups = []
        for (name, factor), members in _sorted_by(params, lambda p: (route(p), rate(p)), ("muon", "adamw", "adam")):
            decay = 0.0 if name == "adam" else weight_decay
            groups.append({"params": members, "route": name, "weight_decay": decay, "rate": factor})
        defaults = {"lr": lr, "momentum": momentum, "betas": tuple(betas), "eps": eps, "magma": magma}
        self._stacks: dict[int, list[_Stack]] = {}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for place, group in enumerate(self.param_groups):
            if group["route"] == "muon":
                for stack in self._stacks_of(place):
                    stack.step(group)
            else:
                self._step_adam(group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter; momenta have the shape of their parameter, whatever batch they are in."""
        for place, group in enumerate(self.param_groups):
            if group["route"] == "muon":
                for stack in self._stacks_of(place):
                    for parameter, momentum, score in stack.states():
                        self.state[parameter] = {"momentum": momentum, "score": score}
        state = super().state_dict()
        for group in self.param_groups:
            if group["route"] == "muon":
                for parameter in group["params"]:
                    del self.state[parameter]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; matrices take theirs back into the batches they are stepped in."""
        super().load_state_dict(copy.copy(state_dict))
        for place, group in enumerate(self.param_groups):
            if group["route"] == "muon":
                for stack in self._stacks_of(place):
                    stack.load(self.state)
                for parameter in group["params"]:
                    self.state.pop(parameter, None)

    def _stacks_of(self, place: int) -> list[_Stack]:
        """The batches of a group, made on first use: only then are the parameters on their device."""
        parameters = self.param_groups[place]["params"]
        stacks = self._stacks.get(place)
        if stacks is None or any(not stack.fits() for stack in stacks):
            old = {parameter: (m, s) for stack in stacks or [] for parameter, m, s in stack.states()}
            stacks = self._stacks[place] = _stack(parameters)
            for stack in stacks:
                stack.load({parameter: {"momentum": m, "score": s} for parameter, (m, s) in old.items()})
        return stacks

    def _step_adam(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["updates"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["first"] = torch.zeros_like(parameter, dtype=_moment_dtype(parameter))
                state["second"] = torch.zeros_like(parameter, dtype=_moment_dtype(parameter))
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["first"] for state in states],
            [state["second"] for state in states],
            [],
            [state["updates"] for state in states],
            fused=all(parameter.device.type in ("cpu", "cuda") for parameter in parameters),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class _Stack:
    """Matrices that are stepped together: one short side, all square or none, long sides padded to the longest."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        first = parameters[0]
        self.parameters: list[nn.Parameter] = list(parameters)
        self.shapes = [matrix_shape(parameter) for parameter in parameters]
        self.short, side = sorted(self.shapes[0][1:])
        self.square = self.short == side
        self.long = max(max(shape[1:]) for shape in self.shapes)
        counts = [count for count, *_ in self.shapes]
        self.rows = [(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts))]
        matrices = self.rows[-1][1]
        like = {"device": first.device, "dtype": first.dtype}
        self.gradient = torch.zeros(matrices, self.short, self.long, **like)
        self.momentum = torch.zeros_like(self.gradient)
        self.score = torch.full((matrices,), FIRST_SCORE, device=first.device, dtype=_moment_dtype(first))
        sides = torch.tensor([max(shape[1:]) for shape in self.shapes for _ in range(shape[0])])
        self.scale = (MATCH_RMS * sides.double().sqrt()).to(**like)  # 0.18 √max(m, n), by matrix
        self.views = [self.view(self.gradient, place) for place in range(len(parameters))]
        self._places: dict[tuple[int, ...], Tensor] = {}

    def _rows_of(self, present: tuple[int, ...]) -> Int[Tensor, "R"]:
        """The matrices of some parameters, on the device; kept, since a recorded step must not bring them there."""
        if present not in self._places:
            rows = torch.cat([torch.arange(*self.rows[place]) for place in present])
            self._places[present] = rows.to(self.score.device)
        return self._places[present]

    def fits(self) -> bool:
        """Whether the parameters are still where this batch is."""
        return all(p.device == self.momentum.device and p.dtype == self.momentum.dtype for p in self.parameters)

    def view(self, batch: Float[Tensor, "B m n"], place: int) -> Tensor:
        """Return the part of a batch that belongs to a parameter, in the parameter's own shape."""
        _, rows, columns = self.shapes[place]
        start, stop = self.rows[place]
        part = batch[start:stop, :, : max(rows, columns)]
        if rows > columns:
            part = part.mT
        return part.view(self.parameters[place].shape)  # axes are only split, so that this never copies

    def step(self, group: dict[str, Any]) -> None:
        """Update the parameters that have a gradient."""
        present = [place for place, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not present:
            return
        parameters: list[Tensor] = [self.parameters[place] for place in present]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_copy_([self.views[place] for place in present], gradients)
        if len(present) == len(self.parameters):
            update = self._update(self.gradient, self.momentum, self.score, group)
        else:  # a matrix without a gradient keeps its momentum and score, as it keeps its value
            rows = self._rows_of(tuple(present))
            momentum, score = self.momentum[rows], self.score[rows]
            update = torch.zeros_like(self.gradient)
            update[rows] = self._update(self.gradient[rows], momentum, score, group)
            self.momentum[rows], self.score[rows] = momentum, score
        update = update * (group["lr"] * self.scale)[:, None, None]
        kept = 1.0 - group["lr"] * group["weight_decay"]  # a tensor where the step is recorded
        torch._foreach_mul_(parameters, kept.to(update.dtype) if isinstance(kept, Tensor) else kept)
        torch._foreach_sub_(parameters, [self.view(update, place) for place in present])

    def _update(self, gradient: Tensor, momentum: Tensor, score: Tensor, group: dict[str, Any]) -> Tensor:
        """Advance momentum and score in place; return the orthogonal update times its Magma factor."""
        momentum.lerp_(gradient, 1.0 - group["momentum"])
        update = orthogonal(momentum.lerp(gradient, 1.0 - group["momentum"]), self.square)
        if group["magma"]:
            score.lerp_(agreement(momentum, gradient).to(score.dtype), 0.1)
            update = update * (0.1 + 0.9 * score).to(update.dtype)[:, None, None]
        return update

    def states(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """Yield each parameter with a copy of its momentum and of the scores of its matrices."""
        for place, parameter in enumerate(self.parameters):
            start, stop = self.rows[place]
            momentum = self.view(self.momentum, place).clone(memory_format=torch.contiguous_format)
            yield parameter, momentum, self.score[start:stop].clone()

    def load(self, state: Any) -> None:
        """Take momenta and scores from a state by parameter; a parameter that is absent there starts anew."""
        for place, parameter in enumerate(self.parameters):
            if state.get(parameter):
                start, stop = self.rows[place]
                self.view(self.momentum, place).copy_(state[parameter]["momentum"])
                self.score[start:stop].copy_(state[parameter]["score"])


def _stack(parameters: Sequence[nn.Parameter]) -> list[_Stack]:
    """Sort matrices into batches: squares by size; others by short side, as long as padding costs little."""
    squares: dict[Any, list[nn.Parameter]] = {}
    others: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        short, long = sorted(matrix_shape(parameter)[1:])
        home = squares if short == long else others
        home.setdefault((short, parameter.device, parameter.dtype), []).append(parameter)
    stacks = [_Stack(members) for members in squares.values()]
    for members in others.values():
        batch: list[nn.Parameter] = []
        for parameter in sorted(members, key=lambda parameter: max(matrix_shape(parameter)[1:])):
            if batch and _padded_cost([*batch, parameter]) > 2.0:
                stacks.append(_Stack(batch))
                batch = []
            batch.append(parameter)
        stacks.append(_Stack(batch))
    return stacks


def _padded_cost(parameters: Sequence[nn.Parameter]) -> float:
    """Elements of a padded batch over those of its matrices; a batch below 2^20 elements counts as free."""
    long = max(max(matrix_shape(parameter)[1:]) for parameter in parameters)
    padded = sum(parameter.numel() // max(matrix_shape(parameter)[1:]) * long for parameter in parameters)
    return 1.0 if padded < 2**20 else padded / sum(parameter.numel() for parameter in parameters)


def agreement(momentum: Float[Tensor, "B m n"], gradient: Float[Tensor, "B m n"]) -> Float[Tensor, "B"]:
    """Return how well momentum and gradient agree, from 0 (opposite) to 1 (parallel); 0.5 where they are orthogonal.

    (σ(κ/2) - σ(-1/2)) / (σ(1/2) - σ(-1/2)) with κ the cosine between the two matrices and σ the logistic function.
    """
    products = (momentum * gradient).sum((-2, -1), dtype=_moment_dtype(gradient))
    lengths = torch.linalg.matrix_norm(momentum) * torch.linalg.matrix_norm(gradient)
    cosine = products / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
    low, high = 1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(-0.5))
    return (torch.sigmoid(cosine.clamp(-1, 1) / 2) - low) / (high - low)


def orthogonal(matrices: Float[Tensor, "B m n"], square: bool) -> Float[Tensor, "B m n"]:
    """Return nearly the semi-orthogonal matrix nearest to each matrix (m <= n): singular values go to about one.

    Half precision on a GPU, the matrices' own precision on a CPU, which is slow at half precision. A matrix of zeros
    gives zeros.
    """
    return _orthogonal_square(matrices) if square else _orthogonal_rectangular(matrices)


def _orthogonal_square(matrices: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm(matrices, keepdim=True).clamp_min(_SMALLEST_NORM)
    x = (matrices / norm).to(_working_dtype(matrices, torch.bfloat16))
    for a, b, c in _SQUARE_STEPS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a X + (b A + c A²) X
    return x.to(matrices.dtype)


def _orthogonal_rectangular(matrices: Tensor) -> Tensor:
    """The same iteration on the small Gram matrix R = X Xᵀ; Q collects the factors by which X is multiplied."""
    norm = torch.linalg.matrix_norm(matrices, keepdim=True).clamp_min(_SMALLEST_NORM)
    x = (matrices / norm).to(_working_dtype(matrices, torch.float16))
    unit = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    r, q = x @ x.mT, None
    for number, (a, b, c) in enumerate(_RECTANGULAR_STEPS):
        if number == _RESTART_BEFORE:
            x = q @ x
            r, q = x @ x.mT, None
        factor = torch.baddbmm(r, r, r, beta=b, alpha=c) + a * unit  # a I + b R + c R²
        q = factor if q is None else q @ factor
        if number + 1 not in (_RESTART_BEFORE, len(_RECTANGULAR_STEPS)):
            r = factor @ r @ factor
    return (q @ x).to(matrices.dtype)


def _working_dtype(matrices: Tensor, half: torch.dtype) -> torch.dtype:
    return half if matrices.is_cuda and matrices.dtype == torch.float32 else matrices.dtype


def _moment_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of the update that takes the weights from `step` to `step + 1`.

    Linear warm-up over `warmup` steps, from `warmup_start` times the peak. Then, with T steps in all,

        wsd       the peak until (1 - decay_fraction) T, from there a cosine down to the final rate
        cosine    a cosine from the end of the warm-up to the final rate
        constant  the peak
    """
    peak, final, total = config.learning_rate, config.final_learning_rate, config.steps
    warmup = warmup_steps(config)
    if step < warmup:
        return peak * (config.warmup_start + (1 - config.warmup_start) * step / warmup)
    if config.schedule == "constant":
        return peak
    start = warmup if config.schedule == "cosine" else max(warmup, total - math.floor(config.decay_fraction * total))
    if step <= start:
        return peak
    share = min(1.0, (step - start) / max(1, total - start))
    return final + 0.5 * (peak - final) * (1 + math.cos(math.pi * share))


def warmup_steps(config: TrainingConfig) -> int:
    """Return the length of the warm-up: `training.warmup` in steps, or as a share of all steps if it is below 1."""
    return round(config.warmup * config.steps) if config.warmup < 1 else round(config.warmup)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainingConfig) -> None:
    """Give all groups the `learning_rate` of a step, times the factor of the group where it has one.

    Being a function of the step alone, it needs no state of its own, and a run that is continued with another recipe
    follows the new one at once.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config) * group.get("rate", 1.0)


@dataclass
class GradientGuard:
    """Clips gradients to a global norm, and remembers on the device whether one was ever not finite.

    Args:
        limit: largest L2 norm of all gradients together; 0 leaves them as they are and only watches.
    """

    limit: float
    _broken: Bool[Tensor, "P"] | None = None

    def clip(self, parameters: Sequence[nn.Parameter]) -> Float[Tensor, ""]:
        """Scale gradients in place to at most `limit`; return their norm before that, float64 on the device.

        Squares are summed in float64, so that gradients near the largest float32 do not overflow. Of gradients that are
        spread over the ranks, each rank sees its part; then all ranks must call this.
        """
        present = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not present:
            return torch.zeros((), dtype=torch.float64)
        gradients = [local(gradient) for gradient in present]
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients, 2, dtype=torch.float64)])
        if any(part is not whole for part, whole in zip(gradients, present, strict=True)):
            norms = ranks.total(norms.square()).sqrt()
        total = torch.linalg.vector_norm(norms)
        if self._broken is None:
            self._broken = torch.zeros(len(parameters), dtype=torch.bool, device=total.device)
        broken = ~norms.isfinite()
        if len(gradients) < len(parameters):
            found, none = iter(broken.unbind()), torch.zeros((), dtype=torch.bool, device=total.device)
            broken = torch.stack([none if parameter.grad is None else next(found) for parameter in parameters])
        # In place, since a recorded step always looks at the same tensor; only the first accident is kept.
        self._broken.copy_(torch.where(self._broken.any(), self._broken, broken))
        if self.limit > 0:
            factor = (self.limit / total.clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
            for dtype in {gradient.dtype for gradient in gradients}:
                torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
        return total

    def check(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Stop if a gradient was not finite; this waits for the device.

        Args:
            named_parameters: the parameters given to `clip`, in the same order.

        Raises:
            FloatingPointError: names the parameters whose gradient was the first to be NaN or infinite.
        """
        if self._broken is None or not bool(self._broken.any()):
            return
        names = [name for (name, _), broken in zip(named_parameters, self._broken.tolist(), strict=True) if broken]
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise FloatingPointError(
            f"the gradient of {listed} became NaN or infinite, so training stops; the last checkpoint is older. "
            "Lower training.learning_rate, or look for atoms that nearly coincide and for labels out of all proportion."
        )


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds, where it is spread over the ranks; else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


class WeightAverage:
    """An exponential average of a module's parameters, kept in a second module of the same kind.

        average ← decay · average + (1 - decay) · weights        after every update; no warm-up, no bias correction

    Keeping a whole module means that it can be validated and written at any moment, and that the raw weights are never
    touched for it.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.module = copy.deepcopy(module).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Move the average towards the module's parameters, in float32 at least."""
        average = [local(shadow) for shadow in self.module.parameters()]
        weights = [local(weight) for weight in module.parameters()]
        for dtype in {weight.dtype for weight in weights}:
            shadows: list[Tensor] = [
                shadow for shadow, weight in zip(average, weights, strict=True) if weight.dtype == dtype
            ]
            torch._foreach_lerp_(
                shadows, [weight.detach() for weight in weights if weight.dtype == dtype], 1.0 - self.decay
            )
