"""SwiGLU in plain torch: silu(gate) · up, and its first and second backward.

    out       = silu(gate) up
    grad_gate = grad up silu'(gate)              grad_up = grad silu(gate)

and with cotangents a of grad_gate and b of grad_up, from a grad_gate + b grad_up:

    of grad:    a up silu'(gate) + b silu(gate)
    of gate:    grad (a up silu''(gate) + b silu'(gate))
    of up:      grad a silu'(gate)

Half-precision operands are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mlff.kernels.silu_reference import exact, first, second

Values = Float[Tensor, "*shape"]


def forward(gate: Values, up: Values, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return silu(gate) · up, in the operands' dtype or another."""
    return (functional.silu(exact(gate)) * exact(up)).to(out_dtype or gate.dtype)


def backward(grad: Values, gate: Values, up: Values) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, given that of the product."""
    g, y = exact(grad), exact(gate)
    return (g * exact(up) * first(y)).to(gate.dtype), (g * functional.silu(y)).to(up.dtype)


def double_backward(
    grad_grad_gate: Values, grad_grad_up: Values, grad: Values, gate: Values, up: Values
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of grad, gate and up, given those of both results of `backward`."""
    a, b, g, y = exact(grad_grad_gate), exact(grad_grad_up), exact(grad), exact(gate)
    au, slope = a * exact(up), first(y)
    return (
        (au * slope + b * functional.silu(y)).to(grad.dtype),
        (g * (au * second(y) + b * slope)).to(gate.dtype),
        (g * a * slope).to(up.dtype),
    )


def packed_forward(x: Values, gate_first: bool, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return silu(gate) · up of the halves of the last axis of x."""
    return forward(*halves(x, gate_first), out_dtype)


def packed_backward(grad: Values, x: Values, gate_first: bool) -> Tensor:
    """Return the gradient of x, given that of the product."""
    return joined(*backward(grad, *halves(x, gate_first)), gate_first)


def packed_double_backward(grad_grad: Values, grad: Values, x: Values, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of grad and x, given that of the result of `packed_backward`."""
    a, b = halves(grad_grad, gate_first)
    of_grad, *both = double_backward(a, b, grad, *halves(x, gate_first))
    return of_grad, joined(both[0], both[1], gate_first)


def halves(x: Values, gate_first: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up of the halves of the last axis."""
    one, other = x.chunk(2, -1)
    return (one, other) if gate_first else (other, one)


def joined(gate: Values, up: Values, gate_first: bool) -> Tensor:
    """Return both in one tensor."""
    return torch.cat((gate, up) if gate_first else (up, gate), -1)
