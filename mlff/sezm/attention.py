"""How messages are gathered: attention with an envelope and a null state, and attention over depth."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mlff.sezm.edges import Edges
from mlff.sezm.linear import Dense, FocusLinear, normal, routed
from mlff.sezm.norm import RMSNorm


class EnvelopeAttention(nn.Module):
    """Weights of the edges of each receiver, and a gate of the sum, from scalars of both ends.

    α_e = w_e² exp(l_e) / (softplus(z) + eps + Σ_e' w_e'² exp(l_e')): the null state z in the denominator lets weights
    vanish as w² at the cutoff, whatever else is there.
    """

    def __init__(self, channels: int, focus: int, heads: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.norm = RMSNorm(focus, channels, eps=eps)
        self.query = FocusLinear(channels, channels, focus)
        self.key = FocusLinear(channels, channels, focus)
        self.logit_weight = routed(normal(channels, focus, heads, std=0.01), "adamw")
        # softplus(0.5413) = 1: the null state starts with the weight of one neutral neighbour.
        self.null = routed(torch.full((focus, heads), 0.5413), "adam")
        self.gate_norm = RMSNorm(focus, channels, eps=eps)
        self.gate_weight = routed(normal(channels, focus, heads, std=0.01), "adamw")

    def forward(
        self, scalars: Float[Tensor, "A F C"], radial: Float[Tensor, "E F C"], edges: Edges
    ) -> Float[Tensor, "E F H"]:
        """Return the attention weights, from the scalars of the atoms and the l = 0 radial features of the edges."""
        normed = self.norm(scalars)
        query, key = self.query(normed), self.key(normed)
        products = query.index_select(0, edges.receivers) * key.index_select(0, edges.senders)
        by_head = products.unflatten(-1, (self.heads, -1)).sum(-1)  # [E, F, H]
        logits = by_head / math.sqrt(products.shape[-1] / self.heads)
        logits = logits + (radial.unsqueeze(-2) * self.logit_weight.permute(1, 2, 0)).sum(-1)
        null = functional.softplus(self.null) + self.eps
        logits = logits.to(null.dtype)  # matrix products may have been taken in bfloat16; exponentials are not
        weight = edges.gated(edges.weight.square()).unsqueeze(-1)  # [E, 1, 1]
        with torch.no_grad():  # any common shift gives the same weights
            shown = torch.where(weight > 0, logits, -math.inf)
            index = edges.receivers[:, None, None].expand_as(shown)
            highest = null.log().expand(edges.n_atoms, -1, -1).scatter_reduce(0, index, shown, "amax")
        # An edge of zero weight may stand far above the rest; it must not overflow.
        shifted = (logits - highest.index_select(0, edges.receivers)).clamp_max(0)
        shares = weight * torch.exp(shifted)
        total = null * torch.exp(-highest) + edges.sum(shares)
        return shares / total.index_select(0, edges.receivers)

    def gate(self, scalars: Float[Tensor, "A F C"]) -> Float[Tensor, "A F H"]:
        """Return the gate of each atom's gathered message."""
        return torch.sigmoid(torch.einsum("nfc,cfh->nfh", self.gate_norm(scalars), self.gate_weight))


class DepthAttention(nn.Module):
    """A softmax-weighted sum of earlier states, by a query from the current scalars or a learned one."""

    def __init__(self, channels: int, dependent: bool, bias: bool, eps: float) -> None:
        super().__init__()
        self.key_norm = RMSNorm(channels, eps=eps)
        self.query_proj = Dense(channels, channels, bias, zero=True) if dependent else None
        self.query = None if dependent else routed(torch.zeros(channels), "adamw")

    def forward(self, sources: list[Tensor], current: Tensor, scalars_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mixture; `scalars_of` takes a state to its [N, C] invariant features."""
        if len(sources) == 1:
            return sources[0]
        query = self.query if self.query_proj is None else self.query_proj(scalars_of(current))
        keys = self.key_norm(torch.stack([scalars_of(source) for source in sources], 1))  # [N, n, C]
        assert query is not None
        share = torch.softmax((keys * query.unsqueeze(-2)).sum(-1), -1)  # [N, n]
        weights = share.unflatten(0, (-1, *(1,) * (current.dim() - 1)))
        return torch.stack([source * weights[..., k] for k, source in enumerate(sources)]).sum(0)
