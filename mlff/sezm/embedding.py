"""Initial features of the atoms: their element, charge and spin, and a first look at the surroundings."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mlff.sezm.edges import Edges
from mlff.sezm.harmonics import packed_degrees
from mlff.sezm.linear import ACTIVATION, Dense, normal, routed
from mlff.sezm.norm import RMSNorm
from mlff.sezm.tables import Tables

CHARGES, SPINS = 200, 100  # rows of the condition tables: charges -100 … 99, spins 0 … 99


class TypeEmbedding(nn.Module):
    """A vector for each element of the model."""

    def __init__(self, n_elements: int, width: int) -> None:
        super().__init__()
        self.weight = routed(normal(n_elements, width, std=1 / math.sqrt(n_elements + width)), "adam")

    def forward(self, species: Int[Tensor, "*n"]) -> Float[Tensor, "*n C"]:
        """Return the rows of the table; `species` counts the model's elements."""
        return self.weight.index_select(0, species)


class ChargeSpinEmbedding(nn.Module):
    """A vector for the total charge and spin of a structure, the same for all its atoms."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__()
        self.charge = TypeEmbedding(CHARGES, channels)
        self.spin = TypeEmbedding(SPINS, channels)
        self.mix = Dense(2 * channels, channels, bias=True)
        self.activation = activation

    def forward(self, charge: Float[Tensor, "S"], spin: Float[Tensor, "S"]) -> Float[Tensor, "S C"]:
        """Return the condition of each structure; charge and spin are whole numbers."""
        both = (self.charge(charge.to(torch.int64) + CHARGES // 2), self.spin(spin.to(torch.int64)))
        return ACTIVATION[self.activation](self.mix(torch.cat(both, -1)))


class SpinEmbedding(nn.Module):
    """Native spin: what the spin vectors of atoms add to their scalars and vectors."""

    def __init__(self, n_elements: int, channels: int, activation: str) -> None:
        super().__init__()
        self.first, self.second = Dense(1, channels), Dense(channels, channels)
        std = 1 / math.sqrt(n_elements + channels)
        self.own = routed(normal(n_elements, channels, std=std), "adam")
        self.neighbour = routed(normal(n_elements, channels, std=std), "adam")
        self.activation = activation

    def scalars(self, spins: Float[Tensor, "A 3"]) -> Float[Tensor, "A C"]:
        """Return features of the squared length of each spin."""
        return self.second(ACTIVATION[self.activation](self.first(spins.square().sum(-1, keepdim=True))))

    def vectors(self, spins: Float[Tensor, "A 3"], species: Int[Tensor, "A"], edges: Edges) -> Float[Tensor, "A 3 C"]:
        """Return degree-1 features from the atom's own spin and from those of its neighbours."""
        x, y, z = spins.unbind(-1)
        turned = math.sqrt(2) * torch.stack((-y, -z, x), -1)  # an axial vector in the basis of S_1
        own = turned.unsqueeze(-1) * self.own.index_select(0, species).unsqueeze(1)
        sent = turned.unsqueeze(-1) * self.neighbour.index_select(0, species).unsqueeze(1)
        weight = edges.gated(edges.weight).unsqueeze(-1)
        received = edges.sum(weight * sent.index_select(0, edges.senders))
        return own + edges.inverse_sqrt_degree.unsqueeze(-1) * received


class EnvironmentSeed(nn.Module):
    """FiLM of the scalars by rotation-invariant products of a weighted environment matrix.

    M_i = η_i Σ_e R_e ⊗ g_e with R = w/r [1, r̂] and learned g_e; M^T M is invariant. Widths follow from the channels.
    """

    def __init__(
        self,
        n_elements: int,
        channels: int,
        n_radial: int,
        activation: str,
        norm: bool,
        bias: bool,
        eps: float,
        native_spin: bool,
    ) -> None:
        super().__init__()
        self.width = min(channels, 128)
        self.axes = min(4 if self.width < 64 else 8, max(1, self.width - 1))
        type_width = min(max(channels // 4, 8), 32)
        radial_width = max(32, self.width - 2 * type_width)
        hidden = min(256, max(2 * self.width, radial_width + 2 * type_width))
        self.activation = activation
        self.types = TypeEmbedding(n_elements, type_width)
        self.radial_first = Dense(n_radial, radial_width, bias)
        self.radial_second = Dense(radial_width, radial_width, bias)
        self.first = Dense(radial_width + 2 * type_width, hidden, bias)
        self.second = Dense(hidden, self.width, bias)
        self.out = Dense(self.width * self.axes, 2 * channels, zero=True)
        self.scale_norm = RMSNorm(channels, eps=eps) if norm else None
        self.shift_norm = RMSNorm(channels, eps=eps) if norm else None
        self.scale_strength = routed(torch.full((1,), math.log(0.01)), "adam")
        self.shift_strength = routed(torch.full((1,), math.log(0.01)), "adam")
        self.spin_scale = routed(torch.ones(1), "adam") if native_spin else None

    def forward(
        self,
        features: Float[Tensor, "A C"],
        species: Int[Tensor, "A"],
        edges: Edges,
        spins: Float[Tensor, "A 3"] | None,
    ) -> Float[Tensor, "A C"]:
        """Return the modulated scalars."""
        act = ACTIVATION[self.activation]
        types = self.types(species)
        radial = self.radial_second(act(self.radial_first(edges.basis)))
        both = (radial, types.index_select(0, edges.senders), types.index_select(0, edges.receivers))
        learned = self.second(act(self.first(torch.cat(both, -1))))  # [E, d]
        strength = edges.gated(edges.weight * edges.inverse_lengths)
        rows = torch.cat((strength, strength * edges.directions), -1)  # [E, 4]
        if spins is not None:
            rows = torch.cat((rows, edges.weight * spins.index_select(0, edges.senders)), -1)
        matrix = edges.inverse_sqrt_degree.unsqueeze(-1) * edges.sum(rows.unsqueeze(-1) * learned.unsqueeze(-2))
        invariants = matrix[:, :4].transpose(1, 2) @ matrix[:, :4, : self.axes]  # [A, d, a]
        if self.spin_scale is not None and spins is not None:
            spin_rows = matrix[:, 4:]
            invariants = invariants + self.spin_scale * (spin_rows.transpose(1, 2) @ spin_rows[:, :, : self.axes])
        scale, shift = self.out(invariants.flatten(1)).chunk(2, -1)
        if self.scale_norm is not None and self.shift_norm is not None:
            scale, shift = self.scale_norm(scale), self.shift_norm(shift)
        scale = self.scale_strength.exp() * torch.tanh(scale)
        return features * (1 + scale) + self.shift_strength.exp() * torch.tanh(shift)


class GeometricEmbedding(Tables):
    """The first l > 0 features: x_lm = η_i Σ_e S_lm(u_e) ρ_e,l. No parameters."""

    def __init__(self, degree: int) -> None:
        super().__init__()
        self.table("row_degrees", packed_degrees(degree)[1:])

    def forward(
        self, harmonics: Float[Tensor, "E M"], radial: Float[Tensor, "E L C"], edges: Edges
    ) -> Float[Tensor, "A m C"]:
        """Return rows l >= 1, (L+1)² - 1 of them."""
        harmonics = edges.gated(harmonics[:, 1:])
        messages = harmonics.unsqueeze(-1) * radial.index_select(1, self.get_buffer("row_degrees"))
        return edges.inverse_sqrt_degree.unsqueeze(-1) * edges.sum(messages)
