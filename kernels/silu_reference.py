"""SiLU in plain torch: x σ(x) with σ(x) = 1 / (1 + exp(-x)), and what its first and second backward need.

    silu   = x s                        s = σ(x)
    silu'  = s (1 + x t)                t = σ(-x) = 1 - s, not computed as that difference, which cancels
    silu'' = s t (2 + x (t - s))

Half-precision operands are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

Values = Float[Tensor, "*shape"]


def forward(x: Values) -> Tensor:
    """Return silu(x)."""
    return functional.silu(exact(x)).to(x.dtype)


def backward(grad: Values, x: Values) -> Tensor:
    """Return the gradient of x, given that of silu(x)."""
    return (exact(grad) * first(exact(x))).to(x.dtype)


def double_backward(grad_grad: Values, grad: Values, x: Values) -> tuple[Tensor, Tensor]:
    """Return the gradients of grad and x, given that of the result of `backward`."""
    a, y = exact(grad_grad), exact(x)
    return (a * first(y)).to(grad.dtype), (a * exact(grad) * second(y)).to(x.dtype)


def exact(x: Values) -> Tensor:
    """Return half-precision numbers in float32, others as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.to(torch.float32)


def first(x: Values) -> Tensor:
    """Return silu'(x)."""
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def second(x: Values) -> Tensor:
    """Return silu''(x)."""
    s, t = torch.sigmoid(x), torch.sigmoid(-x)
    return s * t * (2 + x * (t - s))
