"""Smaller, exact projectors for grids on the rotation group with frames k = 0, -1, +1.

Such a grid is a set of points on the sphere times equally spaced rolls about each. Three facts make its projectors
small:

- Along the rolls γ every column is 1, cos γ or sin γ times a constant of the point. With A, C, S those constants,

      T l = A l₀ + (C l₊ + S l₋) cos γ + (S l₊ - C l₋) sin γ = u₀ + √2 (u_c cos γ + u_s sin γ)

  and the product of two such functions, projected back on the same three, is closed: no rolls are needed.
- The points come in antipodes, at which a column is that at the point times (-1)^l, or for k = ±1 a reflection of the
  pair (cos, sin), under which the product is invariant. With even and odd parts at one point, the value there is
  (even + odd), that at the antipode (even - odd): half of the points suffice. l₋ belongs to the opposite parity.
- The way back is the way there, transposed, times a weight of the point and a scale of the slot. The product is
  trilinear, so that the real cube root of the weight goes into each of its three factors.

What remains are matrices over half of the points, and the same graded product for all classes:

    z = A₀ l₀,   c = C (l₊, l₋),   s = S (l₊, l₋)      each in two classes, even and odd
    z = z z' + c c' + s s',   c = z c' + c z',   s = z s' + s z'      where classes multiply as signs do
    out = scale · (A₀ᵀ z, Cᵀ c + Sᵀ s)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Agreement of the small projectors with the large ones, relative to the largest entry; found: 1e-14.
TOLERANCE = 1e-10
# In bfloat16 up to this degree, large projectors are faster than small ones: their tiles are whole ones of the tensor
# cores, of which bfloat16 has enough. Measured on an H200 by scripts/benchmark_kernels.py: by 1.3 to 2 at degree 3 and
# 1.5 at degree 5; at degree 6 small ones are twice as fast.
LAST_DEGREE_OF_LARGE = 5


@dataclass(frozen=True)
class Factors:
    """The small projectors as the kernels take them; points, n and w as in `Reduced`.

    Attributes:
        halves: (points, 4 n + 8 w): the bits of h and l, float16, with matrix = h + l / 2048.
        rounded: (points, 2 n + 4 w): the bits of the matrix in bfloat16.
        slots: (2 n + 2 w), int32: the slot (row · 3 + frame) of each column of data; padding is -1.
        scale: (2 n + 2 w), float32: the scale of each of these on the way back; padding is zero.
        large: (2, G, V) or (2, 0, V): the bits of the large projectors in bfloat16, there and back, V a power of two;
            none where the small ones are faster in bfloat16 too.

    Bits are held as int16, so that a module can keep them whatever dtype it is moved to.
    """

    halves: Int[Tensor, "G 2W"]
    rounded: Int[Tensor, "G W"]
    slots: Int[Tensor, "V"]
    scale: Float[Tensor, "V"]
    large: Int[Tensor, "2 G V"]

    def matrix_for(self, dtype: torch.dtype) -> Tensor | None:
        """Return the matrix as kernels take it with operands of a dtype; None where they take the large projectors."""
        if dtype == torch.float32:
            return self.halves.view(torch.float16)
        if dtype == torch.bfloat16 and not self.large.shape[1]:
            return self.rounded.view(torch.bfloat16)
        return None

    def large_for(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return both large projectors as kernels take them with operands of a dtype, if they do and these are here."""
        if dtype != torch.bfloat16 or not self.large.shape[1]:
            return None
        there, back = self.large.view(torch.bfloat16).unbind()
        return there, back


@dataclass(frozen=True)
class Reduced:
    """The small projectors in float64, with n the padded width of a class of k = 0 and w that of a class of k = ±1.

    Attributes:
        matrix: (points, 2 n + 4 w): A₀ even, A₀ odd, C even, S even, C odd, S odd; padding is zero.
        slots: as in `Factors`.
        scale: as in `Factors`.
    """

    matrix: Float[Tensor, "G W"]
    slots: Int[Tensor, "V"]
    scale: Float[Tensor, "V"]


def widths(slots: int, columns: int) -> tuple[int, int]:
    """Return n and w of small projectors with so many slots and matrix columns."""
    w = (columns - slots) // 2
    return (slots - 2 * w) // 2, w


def factorise(
    to_grid: Float[Tensor, "G P"], from_grid: Float[Tensor, "G P"], row_degrees: Int[Tensor, "R"], rolls: int
) -> Factors | None:
    """Return the small projectors that stand for two large ones, or None where there are none.

    Args:
        to_grid: projector to the grid, slots (row, frame) with frames 0, -1, +1; points slow, rolls fast. float64.
        from_grid: the way back, transposed.
        row_degrees: degree l of each row.
        rolls: equally spaced rolls about each point.
    """
    small = reduced(to_grid, from_grid, row_degrees, rolls)
    # Six products of two values at a point, each at most the sum of a row's entries for data of at most one.
    if small is None or 6 * small.matrix.abs().sum(1).amax() ** 2 > torch.finfo(torch.float16).max:
        return None
    high = small.matrix.to(torch.float16)
    low = ((small.matrix - high.double()) * 2048).to(torch.float16)
    large = _wide(torch.stack((to_grid, from_grid)).to(torch.bfloat16), _padded(to_grid.shape[1]))
    if row_degrees.max() > LAST_DEGREE_OF_LARGE:
        large = large[:, :0]
    return Factors(
        halves=torch.cat((high, low), 1).view(torch.int16),
        rounded=small.matrix.to(torch.bfloat16).view(torch.int16),
        slots=small.slots.int(),
        scale=small.scale.float(),
        large=large.view(torch.int16),
    )


def reduced(to_grid: Tensor, from_grid: Tensor, row_degrees: Tensor, rolls: int) -> Reduced | None:
    """Return what `factorise` makes tables of."""
    rows = len(row_degrees)
    if to_grid.shape[1] != 3 * rows or to_grid.shape[0] % rolls or rolls < 4:
        return None
    there = _amplitudes(to_grid, rows, rolls)
    weights = _separated(to_grid, from_grid)
    if there is None or weights is None:
        return None
    zero, cosine, sine = there  # (points, rows) each
    point_weight, slot_scale = weights[0].view(-1, rolls).sum(1), weights[1]
    parity = 1 - 2 * (row_degrees.double() % 2)
    pairs = _antipodes(zero, point_weight, parity)
    if pairs is None:
        return None
    root = _cube_root(2 * point_weight[pairs])[:, None]
    zero, cosine, sine = zero[pairs] * root, cosine[pairs] * root / 2**0.5, sine[pairs] * root / 2**0.5

    even, odd = (torch.nonzero(row_degrees % 2 == k).flatten() for k in (0, 1))
    # Data of k = ±1 in the even class: l₊ of even rows, l₋ of odd ones; in the odd class the other way round.
    n, w = (_padded(size) for size in (max(len(even), len(odd)), rows))
    blocks = [_wide(zero[:, even], n), _wide(zero[:, odd], n)]
    for plus, minus in ((even, odd), (odd, even)):
        blocks.append(_wide(torch.cat((cosine[:, plus], sine[:, minus]), 1), w))
        blocks.append(_wide(torch.cat((sine[:, plus], -cosine[:, minus]), 1), w))
    slots = [_wide(3 * even, n, -1), _wide(3 * odd, n, -1)]
    slots += [_wide(torch.cat((3 * plus + 2, 3 * minus + 1)), w, -1) for plus, minus in ((even, odd), (odd, even))]
    slots = torch.cat(slots)
    scale = torch.where(slots < 0, 0.0, slot_scale[slots.clamp_min(0)])
    small = Reduced(torch.cat(blocks, 1), slots, scale)
    return small if _stands_for(small, to_grid, from_grid) else None


def product(left: Float[Tensor, "N P"], right: Float[Tensor, "N P"], small: Reduced) -> Float[Tensor, "N P"]:
    """Return the product by the small projectors, in plain torch: the definition of what the fast kernels do."""
    n, w = widths(len(small.slots), small.matrix.shape[1])
    parts = small.matrix.split([n, n, w, w, w, w], 1)

    def project(x: Tensor) -> list[Tensor]:
        data = torch.where(small.slots < 0, 0.0, x[:, small.slots.clamp_min(0)])
        columns = data.split([n, n, w, w], 1)
        return [columns[k] @ part.T for k, part in zip((0, 1, 2, 2, 3, 3), parts, strict=True)]

    (ze, zo, ce, se, co, so), (ye, yo, de, te, do, to) = project(left), project(right)
    back = (
        ze * ye + zo * yo + ce * de + co * do + se * te + so * to,
        ze * yo + zo * ye + ce * do + co * de + se * to + so * te,
        ze * de + zo * do + ce * ye + co * yo,
        ze * te + zo * to + se * ye + so * yo,
        ze * do + zo * de + ce * yo + co * ye,
        ze * to + zo * te + se * yo + so * ye,
    )
    images = [image @ part for image, part in zip(back, parts, strict=True)]
    columns = torch.cat((images[0], images[1], images[2] + images[3], images[4] + images[5]), 1) * small.scale
    there = small.slots >= 0
    out = torch.zeros_like(left)
    out[:, small.slots[there]] = columns[:, there]
    return out


def _amplitudes(to_grid: Tensor, rows: int, rolls: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Amplitudes A, C, S of the points over the rolls, or None where the columns are not of that form."""
    angle = torch.arange(rolls, dtype=torch.float64) * (2 * torch.pi / rolls)
    values = to_grid.view(-1, rolls, rows, 3)
    zero = values[..., 0].mean(1)
    cosine = (2 / rolls) * torch.einsum("g,pgr->pr", angle.cos(), values[..., 2])
    sine = (2 / rolls) * torch.einsum("g,pgr->pr", angle.sin(), values[..., 2])
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    rebuilt = torch.stack(
        (
            zero[:, None].expand(-1, rolls, -1),
            sine[:, None] * cos - cosine[:, None] * sin,
            cosine[:, None] * cos + sine[:, None] * sin,
        ),
        -1,
    )
    close = (rebuilt - values).abs().amax() <= TOLERANCE * to_grid.abs().amax()
    return (zero, cosine, sine) if bool(close) else None


def _separated(to_grid: Tensor, from_grid: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weights (G) and scales (P) with from_grid = weight · to_grid · scale, or None."""
    # The first column is a constant other than zero; it fixes the split between the two.
    if bool((to_grid[:, 0].abs() < TOLERANCE).any()):
        return None
    weight = from_grid[:, 0] / to_grid[:, 0]
    weighted = weight[:, None] * to_grid
    norm = weighted.square().sum(0)
    scale = torch.where(norm > 0, (weighted * from_grid).sum(0) / norm.clamp_min(1e-300), 0.0)
    close = (weighted * scale - from_grid).abs().amax() <= TOLERANCE * from_grid.abs().amax()
    return (weight, scale) if bool(close) else None


def _antipodes(zero: Tensor, weight: Tensor, parity: Tensor) -> Tensor | None:
    """One point of each pair of antipodes, or None where some point has none of the same weight."""
    distance = torch.cdist(zero, zero * parity, compute_mode="donot_use_mm_for_euclid_dist")
    other = distance.argmin(1)
    here = torch.arange(len(zero))
    limit = TOLERANCE * zero.abs().amax()
    paired = (distance[here, other] <= 1e3 * limit) & (other != here) & (other[other] == here)
    same = (weight - weight[other]).abs() <= TOLERANCE * weight.abs().amax()
    return here[here < other] if bool((paired & same).all()) else None


def _stands_for(small: Reduced, to_grid: Tensor, from_grid: Tensor) -> bool:
    """Whether the small projectors give the product of the large ones; they are compared on random numbers."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(4, to_grid.shape[1], dtype=torch.float64, generator=generator) for _ in range(2))
    expected = ((left @ to_grid.T) * (right @ to_grid.T)) @ from_grid
    return bool((product(left, right, small) - expected).abs().amax() <= TOLERANCE * expected.abs().amax())


def _cube_root(x: Tensor) -> Tensor:
    return x.sign() * x.abs() ** (1 / 3)  # some quadratures have a negative weight


def _padded(size: int) -> int:
    """A power of two, at least 16: what a tile of a matrix product can be."""
    return max(16, 1 << (size - 1).bit_length())


def _wide(x: Tensor, width: int, fill: float = 0) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=fill)
