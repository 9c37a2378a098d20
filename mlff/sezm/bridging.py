"""Short-range bridging: below a few tenths of an Å the network sees a frozen distance and ZBL repulsion takes over.

Sources: Ziegler, Biersack, Littmark, The Stopping and Range of Ions in Solids (1985), for the repulsion; the septic
blend is the lowest polynomial whose first three derivatives vanish at both ends.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

COULOMB = 14.3996  # e² / (4 π ε0) in eV Å, as in the published parametrisation
BOHR = 0.5291772109  # Å
EXPONENTS = ((0.18175, 3.1998), (0.50986, 0.94229), (0.28022, 0.4029), (0.028171, 0.20162))


def clamp_lengths(lengths: Float[Tensor, "E 1"], inner: float, outer: float) -> Float[Tensor, "E 1"]:
    """Return lengths that never fall below `inner` and are unchanged from `outer` on, three times differentiable."""
    t = ((lengths - inner) / (outer - inner)).clamp(0, 1)
    blend = t.square().square() * (20 + t * (-45 + t * (36 - 10 * t)))
    return torch.where(lengths < outer, inner + (outer - inner) * blend, lengths)


def sender_gate(
    lengths: Float[Tensor, "E 1"], senders: Int[Tensor, "E"], n_atoms: int, inner: float, outer: float
) -> Float[Tensor, "E 1"]:
    """Return for each edge the product, over the edges of its sender, of a switch from 0 at `inner` to 1 at `outer`.

    `lengths` are the clamped ones. The product is taken in logarithms; one switch at exactly zero makes it exactly
    zero, without an infinite gradient.
    """
    t = ((lengths - inner) / (outer - inner)).clamp(0, 1)
    switch = (t.square().square() * (35 + t * (-84 + t * (70 - 20 * t)))).squeeze(-1)
    closed = switch <= 0
    logarithms = torch.where(closed, torch.ones_like(switch), switch).log()
    totals = logarithms.new_zeros(n_atoms).index_add(0, senders, logarithms)
    n_closed = logarithms.new_zeros(n_atoms).index_add(0, senders, closed.to(logarithms.dtype))
    gate = torch.where(n_closed > 0, torch.zeros_like(totals), totals.exp())
    return gate.index_select(0, senders).unsqueeze(-1)


def zbl_energy(
    vectors: Float[Tensor, "E 3"], z_sender: Float[Tensor, "E"], z_receiver: Float[Tensor, "E"]
) -> Float[Tensor, "E"]:
    """Return the universal screened nuclear repulsion of each edge in eV, from edge vectors in Å, in float64."""
    z_sender, z_receiver = z_sender.to(torch.float64), z_receiver.to(torch.float64)
    # 1e-20 Å² keeps the gradient finite for coincident atoms.
    lengths = vectors.to(torch.float64).square().sum(-1).clamp_min(1e-20).sqrt()
    screening = 0.88534 * BOHR / (z_sender.pow(0.23) + z_receiver.pow(0.23))
    x = lengths / screening
    phi = torch.zeros_like(x)
    for share, exponent in EXPONENTS:
        phi = phi + share * torch.exp(-exponent * x)
    return COULOMB * z_sender * z_receiver * phi / lengths
