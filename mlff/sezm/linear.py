"""Linear maps that respect the degrees, and the pointwise activations.

Every matrix is stored (in, out): y = x W. `optimizer_route` on a parameter names the rule that trains it, where the
shape alone does not decide: "adam" without decay for scales and biases, "adamw" for small attention vectors. Streams
that stand side by side in a parameter are one matrix to it, (in, F out); matrices by degree are a stack, (L+1, in,
out).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from mlff.kernels.gated import gated_rows
from mlff.kernels.gated_reference import reduced_rows
from mlff.kernels.silu import silu
from mlff.kernels.swiglu import swiglu, swiglu_packed
from mlff.sezm.harmonics import packed_degrees
from mlff.sezm.tables import Tables

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "linear": lambda x: x,
}


def gated(gate: Float[Tensor, "*n C"], up: Float[Tensor, "*n C"], activation: str) -> Float[Tensor, "*n C"]:
    """Return act(gate) · up."""
    return swiglu(gate, up) if activation == "silu" else ACTIVATION[activation](gate) * up


def gated_halves(x: Float[Tensor, "*n C2"], order: str, activation: str) -> Float[Tensor, "*n C"]:
    """Return act(gate) · up of the halves of the last axis, in the order "gate_up" or "up_gate"."""
    if activation == "silu":
        return swiglu_packed(x, order)
    one, other = x.chunk(2, -1)
    return gated(one, other, activation) if order == "gate_up" else gated(other, one, activation)


def routed(values: Tensor, route: str) -> nn.Parameter:
    """Return a parameter that the optimizer treats by the named rule, whatever its shape."""
    parameter = nn.Parameter(values)
    parameter.optimizer_route = route  # type: ignore[attr-defined]
    return parameter


def one_matrix(values: Float[Tensor, "i ..."]) -> nn.Parameter:
    """Return a parameter that is one matrix to the optimizer: the first axis its rows, all others its columns."""
    parameter = nn.Parameter(values)
    parameter.optimizer_rows = 1  # type: ignore[attr-defined]
    return parameter


OPTIMIZER_ATTRIBUTES = ("optimizer_route", "optimizer_rows", "optimizer_rate")
"""What a parameter may say to the optimizer; `copy.deepcopy` of a parameter forgets it."""


def normal(*shape: int, std: float) -> Tensor:
    """Return float32 numbers from N(0, std²)."""
    return torch.randn(*shape, dtype=torch.float32) * std


def uniform(*shape: int, bound: float) -> Tensor:
    """Return float32 numbers from U(-bound, bound)."""
    return (torch.rand(*shape, dtype=torch.float32) * 2 - 1) * bound


def truncated_normal(*shape: int, std: float) -> Tensor:
    """Return float32 numbers from N(0, std²) cut at three standard deviations."""
    return nn.init.trunc_normal_(torch.empty(*shape, dtype=torch.float32), std=std, a=-3 * std, b=3 * std)


class Dense(nn.Module):
    """x W + b, initialised with variance 1 / (in + out)."""

    def __init__(self, width_in: int, width_out: int, bias: bool = False, zero: bool = False) -> None:
        super().__init__()
        std = 0.0 if zero else 1 / math.sqrt(width_in + width_out)
        self.weight = nn.Parameter(normal(width_in, width_out, std=std))
        self.bias = routed(normal(width_out, std=0.0 if zero else 1.0), "adam") if bias else None

    def forward(self, x: Float[Tensor, "*n i"]) -> Float[Tensor, "*n o"]:
        """Return the map of the last axis."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class FocusLinear(nn.Module):
    """One matrix for each focus stream, on [*n, F, in]. Stored (in, F, out)."""

    def __init__(self, width_in: int, width_out: int, focus: int, bias: bool = False, std: float | None = None) -> None:
        super().__init__()
        shape = (width_in, focus, width_out)
        self.weight = one_matrix(
            uniform(*shape, bound=1 / math.sqrt(width_in)) if std is None else normal(*shape, std=std)
        )
        self.bias = routed(torch.zeros(focus, width_out), "adam") if bias else None

    def forward(self, x: Float[Tensor, "*n F i"]) -> Float[Tensor, "*n F o"]:
        """Return the map of the last axis, stream by stream."""
        weight = self.weight
        y = x @ weight[:, 0] if weight.shape[1] == 1 else torch.einsum("...fi,ifo->...fo", x, weight)
        return y if self.bias is None else y + self.bias

    def by_stream(self, x: Float[Tensor, "F N i"]) -> Float[Tensor, "F N o"]:
        """Return the same of features that have their streams first."""
        y = torch.bmm(x, self.weight.movedim(1, 0))
        return y if self.bias is None else y + self.bias.unsqueeze(1)


class DegreeLinear(Tables):
    """One matrix for each degree l, the same for all its orders, on [N, rows, *, in]. Stored (L+1, in, out)."""

    def __init__(
        self,
        degree: int,
        width_in: int,
        width_out: int,
        bias: bool = False,
        zero: bool = False,
        bound: float | None = None,
        row_degrees: Int[Tensor, "R"] | None = None,
    ) -> None:
        super().__init__()
        shape = (degree + 1, width_in, width_out)
        if zero:
            weight = torch.zeros(shape)
        elif bound is not None:
            weight = uniform(*shape, bound=bound)
        else:
            weight = truncated_normal(*shape, std=1 / math.sqrt(width_in + width_out))
        self.weight = nn.Parameter(weight)
        self.bias = routed(torch.zeros(width_out), "adam") if bias else None
        self.table("row_degrees", packed_degrees(degree) if row_degrees is None else row_degrees)

    def forward(self, x: Float[Tensor, "N R *f i"]) -> Float[Tensor, "N R *f o"]:
        """Return the map of the last axis; the bias goes to the first row (l = 0) only."""
        weight = self.weight.index_select(0, self.get_buffer("row_degrees"))  # [R, i, o]
        rows = x.shape[1]
        y = torch.bmm(x.movedim(1, 0).reshape(rows, -1, x.shape[-1]), weight)  # [R, N f, o]
        y = y.view(rows, x.shape[0], *x.shape[2:-1], weight.shape[-1]).movedim(0, 1)
        if self.bias is not None:
            y = torch.cat((y[:, :1] + self.bias, y[:, 1:]), 1)
        return y


class GatedActivation(Tables):
    """y_0 = act(x_0), y_l = x_l sigmoid(x_0 W)_l: the gate of a degree is shared by all its orders.

    On [N, rows, F, C]; the first row is l = 0. With an order, rows are in the reduced layout, else packed.
    """

    def __init__(
        self, degree: int, channels: int, focus: int, activation: str, bias: bool, order: int | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.degree, self.channels, self.order = degree, channels, order
        self.gate_linear = FocusLinear(channels, degree * channels, focus, bias, std=0.01) if degree else None
        if order is None:
            self.table("gate_of_row", packed_degrees(degree)[1:] - 1)

    @property
    def fused(self) -> bool:
        """Whether `of_parts` is there."""
        return self.activation == "silu" and self.order is not None and self.gate_linear is not None

    def of_parts(
        self,
        zero: Float[Tensor, "F N L1 C"],
        others: Float[Tensor, "F N R1 C"],
        residual: Float[Tensor, "N R F C"],
    ) -> Float[Tensor, "N R F C"]:
        """Return the activated rows of m = 0 and of all others, plus a residual, in one pass over memory."""
        assert self.gate_linear is not None and self.order is not None
        gates = self.gate_linear.by_stream(zero[:, :, 0]).unflatten(-1, (self.degree, self.channels))
        y = gated_rows(zero, others, gates, self.degree, self.order, residual.movedim(2, 0))
        return y.movedim(0, 2)

    def forward(
        self, x: Float[Tensor, "N R F C"], gate_input: Float[Tensor, "N F C"] | None = None
    ) -> Float[Tensor, "N R F C"]:
        """Return the activated rows. With `gate_input` (a GLU) the scalars are x_0 act(gate_input) instead."""
        # Streams first, as the matrix products around this one want them in memory.
        scalars, rest = x.movedim(2, 0).split([1, x.shape[1] - 1], 2)
        scalars = scalars.squeeze(2)  # [F, N, C]
        if gate_input is None:
            first = ACTIVATION[self.activation](scalars)
            gates = scalars
        else:
            gates = gate_input.movedim(1, 0)
            first = gated(gates, scalars, self.activation)
        if self.gate_linear is None:
            return first.unsqueeze(2).movedim(0, 2)
        gates = torch.sigmoid(self.gate_linear.by_stream(gates)).unflatten(-1, (self.degree, self.channels))
        if self.order is None:
            gates = gates.index_select(2, self.get_buffer("gate_of_row"))
        else:
            gates = reduced_rows(gates, self.degree, self.order, 2, lowest=1)
        return torch.cat((first.unsqueeze(2), rest * gates), 2).movedim(0, 2)
