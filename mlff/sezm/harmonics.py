"""Real spherical harmonics, edge frames, and the matrices that turn coefficients into an edge's own frame.

Conventions (those of DPA4 checkpoints). For a unit vector u with polar angle θ from +z and azimuth φ, and the complex
harmonics C_lm of Racah's normalisation (Condon–Shortley phase included), the real ones are

    S_l0 = C_l0,   S_l,+m = √2 Re C_lm,   S_l,-m = -√2 Im C_lm          so that Σ_m S_lm² = 1 and S_1 = (y, z, -x).

Coefficients are *packed* as idx(l, m) = l² + l + m, or *reduced* (m-major: all m = 0, then for each m the degrees of -m
and then those of +m, up to a largest order). D(R) is the orthogonal matrix with S(R u) = D(R) S(u).

D of degree l follows from degree l - 1 by the stretched Clebsch–Gordan coefficient (Varshalovich et al., Quantum Theory
of Angular Momentum, 1988, §4.6.2): polynomials only, so that every derivative exists everywhere, and rows above
the order that a model keeps are never computed.
"""

from __future__ import annotations

import functools
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mlff.sezm.tables import Tables


def packed_degrees(degree: int) -> Int[Tensor, "M"]:
    """Return the degree l of each packed coefficient up to `degree`."""
    return torch.repeat_interleave(torch.arange(degree + 1), 2 * torch.arange(degree + 1) + 1)


def reduced_layout(degree: int, order: int) -> tuple[Int[Tensor, "R"], Int[Tensor, "R"]]:
    """Return packed index and degree of each coefficient in the reduced layout with |m| <= order."""
    index, degrees = [], []
    for m in range(order + 1):
        for sign in (-1, 1) if m else (1,):
            for l in range(m, degree + 1):
                index.append(l * l + l + sign * m)
                degrees.append(l)
    return torch.tensor(index), torch.tensor(degrees)


@functools.cache
def stretched_coupling(degree: int) -> Float[Tensor, "m a b"]:
    """Return Q with S_l = (1/c) Q[:, a, b] S_{l-1,a} S_{1,b}, rows orthonormal: the real coupling (l-1) ⊗ 1 → l.

    float64, shape (2l+1, 2l-1, 3). From <l-1 m-μ; 1 μ | l m> of the reference above, turned to the real basis.
    """
    l = degree
    complex_coupling = torch.zeros(2 * l + 1, 2 * l - 1, 3, dtype=torch.complex128)
    for m in range(-l, l + 1):
        coefficients = {
            -1: math.sqrt((l - m - 1) * (l - m) / ((2 * l - 1) * 2 * l)),
            0: math.sqrt((l - m) * (l + m) / ((2 * l - 1) * l)),
            1: math.sqrt((l + m - 1) * (l + m) / ((2 * l - 1) * 2 * l)),
        }
        for mu, coefficient in coefficients.items():
            if abs(m - mu) < l:
                complex_coupling[m + l, m - mu + l - 1, mu + 1] = coefficient
    turn = [_real_from_complex(k) for k in (l, l - 1, 1)]
    real = torch.einsum("Mm,mab,Aa,Bb->MAB", turn[0], complex_coupling, turn[1].conj(), turn[2].conj())
    assert real.imag.abs().max() < 1e-14
    return real.real.contiguous()


def _real_from_complex(degree: int) -> Tensor:
    """Return U with S = U C for one degree, from the definition at the head of this file."""
    matrix = torch.zeros(2 * degree + 1, 2 * degree + 1, dtype=torch.complex128)
    matrix[degree, degree] = 1
    half = torch.tensor([1, 1j], dtype=torch.complex128) / math.sqrt(2)
    for m in range(1, degree + 1):
        plus, minus, sign = degree + m, degree - m, (-1) ** m  # C_l,-m = (-1)^m conj C_lm
        matrix[plus, plus], matrix[plus, minus] = half[0], sign * half[0]
        matrix[minus, plus], matrix[minus, minus] = half[1], -sign * half[1]
    return matrix


def edge_frames(directions: Float[Tensor, "E 3"], roll: Float[Tensor, "E"] | None = None) -> Float[Tensor, "E 3 3"]:
    """Return degree-1 matrices of rotations that turn each direction onto +z; rows and columns m = -1, 0, +1.

    Two charts, one for each half space, meet at z = 0 with a jump in the roll about the edge, to which the model is
    blind; each is smooth where it is used. `roll` (radians) turns the frames further about their edges.

    Source: Duff et al., Building an orthonormal basis, revisited, J. Comput. Graph. Tech. 6, 1 (2017), eq. 2.
    """
    x, y, z = directions.unbind(-1)
    sign = torch.where(z < 0, -1.0, 1.0).to(directions.dtype)
    a = -1.0 / (sign + z)
    b = x * y * a
    first = torch.stack((1.0 + sign * x * x * a, sign * b, -sign * x), -1)
    second = torch.stack((b, sign + y * y * a, -y), -1)
    if roll is not None:
        cos, sin = roll.cos().unsqueeze(-1), roll.sin().unsqueeze(-1)
        first, second = cos * first - sin * second, sin * first + cos * second
    rows = torch.stack((second, directions, -first), -2)
    # Columns from (x, y, z) to S_1 = (y, z, -x); the rows carry the same change of basis.
    return torch.stack((rows[..., 1], rows[..., 2], -rows[..., 0]), -1)


class WignerRows(Tables):
    """The rows |m'| <= min(order, l) of D^l for l = 0 … degree, from the degree-1 matrices of edge frames."""

    def __init__(self, degree: int, order: int) -> None:
        super().__init__()
        self.degree, self.order = degree, order
        for l in range(2, degree + 1):
            coupling = stretched_coupling(l)
            m = torch.arange(-min(order, l - 1), min(order, l - 1) + 1, dtype=torch.float64)
            # e_m' ⊗ e_0 has only the m' component in degree l, and this is its inverse length there.
            self.table(f"scale_{l}", ((l - m) * (l + m) / (l * (2 * l - 1))).rsqrt()[:, None, None])
            self.table(f"coupling_{l}", coupling.flatten(1).T.contiguous())
            self.table(f"ends_{l}", coupling[[0, -1]].contiguous())

    def forward(self, frames: Float[Tensor, "E 3 3"]) -> list[Float[Tensor, "E r m"]]:
        """Return for each l a matrix of shape (E, 2 min(order, l) + 1, 2l + 1), rows from the lowest m' up."""
        blocks = [frames.new_ones(frames.shape[0], 1, 1)]
        if self.degree >= 1:
            blocks.append(frames if self.order >= 1 else frames[:, 1:2])
        for l in range(2, self.degree + 1):
            previous, coupling = blocks[-1], self.get_buffer(f"coupling_{l}")
            # Row m' of D^l needs row m' of D^(l-1) and row 0 of D^1 only, while |m'| < l.
            product = (previous.unsqueeze(-1) * frames[:, None, 1:2, :]) * self.get_buffer(f"scale_{l}")
            rows = product.flatten(-2) @ coupling
            if self.order >= l:
                ends = torch.einsum("rab,eai,ebj->erij", self.get_buffer(f"ends_{l}"), previous, frames)
                ends = ends.flatten(-2) @ coupling
                rows = torch.cat((ends[:, :1], rows, ends[:, 1:]), 1)
            blocks.append(rows)
        return blocks


class SphericalHarmonics(Tables):
    """S_lm of unit vectors up to a degree, packed. Polynomials: smooth for any vector, homogeneous of degree l."""

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.degree = degree
        for l in range(2, degree + 1):
            # The m = 0 row at u = z is 1 in every degree, which fixes the scale: Q[0, 0, 0] = sqrt(l / (2l - 1)).
            self.table(f"coupling_{l}", (stretched_coupling(l).flatten(1).T / math.sqrt(l / (2 * l - 1))).contiguous())

    def forward(self, directions: Float[Tensor, "*n 3"]) -> Float[Tensor, "*n M"]:
        """Return the (degree + 1)² harmonics of each vector."""
        x, y, z = directions.unbind(-1)
        first = torch.stack((y, z, -x), -1)
        blocks = [torch.ones_like(first[..., :1])]
        if self.degree >= 1:
            blocks.append(first)
        for l in range(2, self.degree + 1):
            product = blocks[-1].unsqueeze(-1) * first.unsqueeze(-2)
            blocks.append(product.flatten(-2) @ self.get_buffer(f"coupling_{l}"))
        return torch.cat(blocks, -1)


def spherical_harmonics(directions: Float[Tensor, "*n 3"], degree: int) -> Float[Tensor, "*n M"]:
    """Return S_lm of unit vectors, packed; `SphericalHarmonics` keeps its tables from call to call."""
    return SphericalHarmonics(degree).to(directions)(directions)
