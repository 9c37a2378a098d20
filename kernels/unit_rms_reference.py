"""Features at unit root mean square in plain torch: their definition, and its first and second backward.

    z = x without the mean over channels of row 0, where that is asked for
    v = Σ_r b_r Σ_c z_rc²        i = (v + eps)^(-1/2)        y = i z

for each node and stream, b the balance of rows (without one, v is the mean of all squares). With P what makes z from x,
which is its own transpose, g the gradient of y, and D = Σ g z:

    grad_x = P (i g - i³ D b z)

and with k = P h, h the gradient of grad_x, A = Σ k g and K = Σ b z k:

    of g:    i k - i³ K z
    of x:    P (3 i⁵ D K b z - i³ (A b z + K g + D b k))

Half-precision operands are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from mlff.kernels.silu_reference import exact

Rows = Float[Tensor, "N R F C"]
Balance = Float[Tensor, "R"] | None


def forward(x: Rows, balance: Balance, eps: float, centred: bool) -> Tensor:
    """Return the features at unit root mean square."""
    z, _, inverse = _parts(x, balance, eps, centred)
    return (z * inverse).to(x.dtype)


def backward(grad: Rows, x: Rows, balance: Balance, eps: float, centred: bool) -> Tensor:
    """Return the gradient of x, given that of y."""
    z, b, i = _parts(x, balance, eps, centred)
    g = exact(grad)
    return _centre(i * g - i**3 * _sum(g * z) * (b * z), centred).to(x.dtype)


def double_backward(
    grad_grad: Rows, grad: Rows, x: Rows, balance: Balance, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of grad and x, given that of the result of `backward`."""
    z, b, i = _parts(x, balance, eps, centred)
    g, k = exact(grad), _centre(exact(grad_grad), centred)
    a, d, turned = _sum(k * g), _sum(g * z), _sum(b * z * k)
    of_x = 3 * i**5 * d * turned * (b * z) - i**3 * (a * (b * z) + turned * g + d * (b * k))
    return (i * k - i**3 * turned * z).to(grad.dtype), _centre(of_x, centred).to(x.dtype)


def _parts(x: Rows, balance: Balance, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """z, b and i."""
    z = _centre(exact(x), centred)
    rows, width = x.shape[1], x.shape[3]
    b = z.new_full((rows,), 1 / (rows * width)) if balance is None else balance.to(z.dtype)
    b = b[:, None, None]
    return z, b, (_sum(b * z.square()) + eps).rsqrt()


def _centre(x: Rows, centred: bool) -> Tensor:
    if not centred:
        return x
    scalars, rest = x.split([1, x.shape[1] - 1], 1)
    return torch.cat((scalars - scalars.mean(-1, keepdim=True), rest), 1)


def _sum(x: Rows) -> Tensor:
    return x.sum((1, 3), keepdim=True)
