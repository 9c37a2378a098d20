"""Weights and optimiser states that are shared out over the ranks of a run.

    zero1   every rank has all weights and gradients; each tensor's optimiser state is at one rank, its owner, which
            steps it and tells the others
    fsdp    weights, gradients and averages lie in slices, one a rank; for a step the gradient of a tensor comes
            together at its owner, which steps a whole copy, and the slices of the result go back

In both, a tensor is stepped whole by one rank, because a step of HybridMuon needs whole matrices; and in both, a
checkpoint holds whole tensors under the names and in the order of a run on one rank, so that any run goes on from it,
on any number of ranks.

Sources: Rajbhandari et al., SC20, arXiv:1910.02054 (ZeRO); Zhao et al., VLDB 2023, arXiv:2304.11277 (FSDP).
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* are private in name only: they are what torch's own optimisers are made of.

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from mlff import ranks
from mlff.optim import describe_like, local


def owners(parameters: Sequence[Tensor], count: int) -> list[int]:
    """Return which of `count` ranks owns each parameter, so that all have about as much to do.

    The work on a matrix grows as its elements times its shorter side. Costliest first, each to the rank with the least.
    """
    costs = [p.numel() * min((size for size in p.shape if size > 1), default=1) for p in parameters]
    work, owner = [0] * count, [0] * len(parameters)
    for place in sorted(range(len(parameters)), key=lambda place: -costs[place]):
        owner[place] = min(range(count), key=lambda rank: work[rank])
        work[owner[place]] += costs[place]
    return owner


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimiser whose state is shared out: each rank steps the parameters it owns, and tells the others.

    The state of a checkpoint is that of `build(parameters)` itself, by the same numbers.

    Args:
        parameters: all that are trained, in the same order on every rank; whole everywhere, or in slices (DTensor,
            along the first axis).
        build: makes the optimiser of some parameters; its groups must follow from each parameter alone, in an order
            that does not depend on which are there.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self.parameters = list(parameters)
        self.owner = owners(self.parameters, ranks.count())
        self.owned = [place for place, owner in enumerate(self.owner) if owner == ranks.rank()]
        self.sliced = any(local(parameter) is not parameter for parameter in self.parameters)
        whole = build(self.parameters)  # gives the groups; its state is never made
        super().__init__(whole.param_groups, whole.defaults)
        values = self._whole_values() if self.sliced else [self.parameters[place] for place in self.owned]
        self.values: dict[int, nn.Parameter] = dict(zip(self.owned, values, strict=True))
        self.inner = build(values) if values else None
        self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        self._place_of = {id(value): place for place, value in self.values.items()}
        self._consolidated: dict[int, Any] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; return what the closure returns. All ranks must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.sliced:
            self._bring_gradients_together()
        if self.inner is not None:
            for group in self.inner.param_groups:
                ours = self._group_of[id(self.parameters[self._place_of[id(group["params"][0])]])]
                group.update({name: value for name, value in ours.items() if name != "params"})
            self.inner.step()
        if self.sliced:
            self._hand_values_out()
        else:
            self._tell_values()
        return loss

    def consolidate_state_dict(self) -> None:
        """Bring the state together on the first rank, for `state_dict` there. All ranks must call this."""
        mine: dict[int, Any] = {}
        if self.inner is not None:
            state = self.inner.state_dict()["state"]
            order = [value for group in self.inner.param_groups for value in group["params"]]
            mine = {self._place_of[id(order[number])]: _on_host(state[number]) for number in state}
        parts = ranks.collect(mine)
        self._consolidated = {place: state for part in parts for place, state in part.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, as one rank alone would have it.

        Raises:
            RuntimeError: `consolidate_state_dict` has not been called on all ranks, or this is not the first.
        """
        if self._consolidated is None or ranks.rank():
            raise RuntimeError("the state is spread over the ranks: call consolidate_state_dict() on all of them first")
        found, numbers = self._consolidated, self._numbers()
        self._consolidated = None
        state = {number: found[place] for number, place in enumerate(numbers) if place in found}
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of a state, which may come from another number of ranks.

        Raises:
            ValueError: the state is that of other parameters.
        """
        stored = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in stored] != sizes:
            raise ValueError(
                f"the checkpoint's optimiser has groups of {[len(group['params']) for group in stored]} parameters; "
                f"this run has {sizes}. Continue with optimiser, rates and frozen rooms of that run, or start afresh."
            )
        for group, old in zip(self.param_groups, stored, strict=True):
            group.update({name: value for name, value in old.items() if name != "params"})
        if self.inner is None:
            return
        number_of = {place: number for number, place in enumerate(self._numbers())}
        order = [self._place_of[id(value)] for group in self.inner.param_groups for value in group["params"]]
        states = {
            number: state_dict["state"][number_of[place]]
            for number, place in enumerate(order)
            if number_of[place] in state_dict["state"]
        }
        self.inner.load_state_dict({"state": states, "param_groups": self.inner.state_dict()["param_groups"]})

    def _numbers(self) -> list[int]:
        """The place of each parameter in `parameters`, in the order in which a state numbers them."""
        place_of = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        return [place_of[id(parameter)] for group in self.param_groups for parameter in group["params"]]

    def _tell_values(self) -> None:
        """Every owner broadcasts the new values of its parameters, in one piece for each dtype."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            pending = []
            for owner in range(ranks.count()):
                theirs = [
                    p for p, o in zip(self.parameters, self.owner, strict=True) if o == owner and p.dtype == dtype
                ]
                if theirs:
                    flat = torch.cat([parameter.detach().flatten() for parameter in theirs])
                    pending.append((owner, theirs, flat, distributed.broadcast(flat, owner, async_op=True)))
            for owner, theirs, flat, work in pending:
                work.wait()  # type: ignore[union-attr]
                if owner != ranks.rank():
                    parts = flat.split([parameter.numel() for parameter in theirs])
                    torch._foreach_copy_(
                        [parameter.detach() for parameter in theirs],
                        [part.view_as(parameter) for part, parameter in zip(parts, theirs, strict=True)],
                    )

    # Slices. Along the first axis each rank has the next ceil(n/R) rows, the last ones fewer or none.

    def _slice_sizes(self, parameter: Tensor) -> list[int]:
        rows, count = parameter.shape[0], ranks.count()
        each = math.ceil(rows / count)
        kept = [max(0, min(rows, (rank + 1) * each) - rank * each) for rank in range(count)]
        return [n * (parameter.numel() // rows) for n in kept]

    def _places(self, owner: int) -> list[int]:
        return [place for place, o in enumerate(self.owner) if o == owner]

    def _brought_together(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Give every owner all slices of its tensors; return this rank's own tensors, whole."""
        count, me = ranks.count(), ranks.rank()
        sent = [
            torch.cat([_flat(slices[place]) for place in self._places(owner)] or [_nothing(slices)])
            for owner in range(count)
        ]
        sizes = {place: self._slice_sizes(self.parameters[place]) for place in self.owned}
        counts = [sum(sizes[place][rank] for place in self.owned) for rank in range(count)]
        received = sent[me].new_empty(sum(counts))
        distributed.all_to_all_single(received, torch.cat(sent), counts, [len(part) for part in sent])
        pieces = [
            part.split([sizes[place][rank] for place in self.owned]) for rank, part in enumerate(received.split(counts))
        ]
        return [
            torch.cat([pieces[rank][k] for rank in range(count)]).view(self.parameters[place].shape)
            for k, place in enumerate(self.owned)
        ]

    def _whole_values(self) -> list[nn.Parameter]:
        values = self._brought_together([local(parameter.detach()) for parameter in self.parameters])
        whole = [nn.Parameter(value) for value in values]
        for place, value in zip(self.owned, whole, strict=True):
            describe_like(value, self.parameters[place])
        return whole

    def _bring_gradients_together(self) -> None:
        slices = []
        for parameter in self.parameters:
            gradient = parameter.grad
            slices.append(torch.zeros_like(local(parameter.detach())) if gradient is None else local(gradient))
        for place, gradient in zip(self.owned, self._brought_together(slices), strict=True):
            self.values[place].grad = gradient

    def _hand_values_out(self) -> None:
        """Give every rank its slice of every new value."""
        count, me = ranks.count(), ranks.rank()
        parts: list[list[Tensor]] = [[] for _ in range(count)]
        for place in self.owned:
            flat = self.values[place].detach().flatten()
            for rank, piece in enumerate(flat.split(self._slice_sizes(self.parameters[place]))):
                parts[rank].append(piece)
        mine = [local(parameter.detach()) for parameter in self.parameters]
        sent = [torch.cat(part or [_nothing(mine)]) for part in parts]
        sizes = [[mine[place].numel() for place in self._places(owner)] for owner in range(count)]
        received = sent[me].new_empty(sum(map(sum, sizes)))
        distributed.all_to_all_single(received, torch.cat(sent), [sum(size) for size in sizes], [len(p) for p in sent])
        for owner, part in enumerate(received.split([sum(size) for size in sizes])):
            for place, piece in zip(self._places(owner), part.split(sizes[owner]), strict=True):
                mine[place].copy_(piece.view_as(mine[place]))


def _flat(values: Tensor) -> Float[Tensor, "n"]:
    return values.detach().reshape(-1)


def _nothing(like: Sequence[Tensor]) -> Float[Tensor, "0"]:
    return like[0].new_empty(0)


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()}


def shard(module: nn.Module, function: Callable[..., Tensor] | None = None) -> Callable[..., Any]:
    """Cut the parameters of a module into slices, one a rank; return the function that may use them whole.

    The module is one unit: its parameters are gathered before `function` and stay whole until the backward pass of
    what it returns has reduced their gradients. Smaller units would be gathered and let go layer by layer, but the
    hooks that do so act on the first backward pass they see. Forces are such a pass, inside the step: after it the
    weights would be gone which the second one, through the forces, still needs. So whatever differentiates inside
    belongs into `function`, which must call `module.forward`, not `module`, lest the hooks of the module itself act in
    between.

    Args:
        module: its parameters become DTensors under the same names.
        function: of the whole step; None where the module is only called to be differentiated once.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    before = dict(module.named_parameters())
    device = next(iter(before.values())).device.type
    held: Any = module
    if function is not None:

        def whole_step(self: nn.Module, *arguments: Any) -> Tensor:
            return _Touched.apply(function(*arguments), *(p for p in self.parameters() if p.requires_grad))

        held.whole_step = types.MethodType(whole_step, module)
    fully_shard(module, mesh=init_device_mesh(device, (ranks.count(),)), reshard_after_forward=False)
    for name, parameter in module.named_parameters():
        describe_like(parameter, before[name])
    if function is None:
        return module
    register_fsdp_forward_method(module, "whole_step")
    return held.whole_step


class _Touched(torch.autograd.Function):
    """The identity, through which every parameter gets a gradient, be it of zeros.

    Gradients are reduced in one piece, which must be of the same length on every rank, also on one whose structures do
    not use some parameter.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with every tensor whole, on the CPU if it was in slices. All ranks must call this."""
    return {
        name: value.full_tensor().cpu() if hasattr(value, "full_tensor") else value for name, value in tensors.items()
    }


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the CPU, to be filled with whole tensors once the module itself is in slices."""
    return copy.deepcopy(module).cpu()
