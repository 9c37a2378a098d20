"""The SO(2) convolution: messages are turned into the edge's frame, mixed there, turned back, and gathered.

In the frame of its edge a message needs only matrices that commute with rolls about the edge, one for each |m|,
which is what makes high degrees affordable (Passaro and Zitnick, ICML 2023, arXiv:2302.03655).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mlff.kernels.degree_mixer import mix_degrees
from mlff.kernels.edge_frames import into_frames, out_of_frames
from mlff.kernels.gated_reference import reduced_rows
from mlff.kernels.host import plain
from mlff.sezm.attention import DepthAttention, EnvelopeAttention
from mlff.sezm.cartesian import EdgeCartesian, NodeCartesian
from mlff.sezm.edges import Edges, Rotations
from mlff.sezm.grid import Grid, GridNet, rotation_grid, sphere_grid
from mlff.sezm.harmonics import packed_degrees, reduced_layout
from mlff.sezm.linear import (
    DegreeLinear,
    GatedActivation,
    normal,
    one_matrix,
    routed,
    truncated_normal,
    uniform,
)
from mlff.sezm.norm import EquivariantRMSNorm, RMSNorm
from mlff.sezm.options import Options
from mlff.sezm.tables import Tables


class SO2Linear(nn.Module):
    """One complex matrix for each |m| over degrees and channels, on [E, R, F, C] in the reduced layout.

    y_-m = x_-m U - x_+m V,  y_+m = x_-m V + x_+m U; for m = 0 one real matrix. Stored (rows C_in, F, rows C_out), with
    U and V side by side.
    """

    def __init__(self, degree: int, order: int, width_in: int, width_out: int, focus: int, bias: bool) -> None:
        super().__init__()
        self.degree, self.order, self.width_out = degree, order, width_out
        rows = degree + 1
        self.weight_m0 = one_matrix(_by_focus(rows * width_in, focus, rows * width_out))
        self.weight_m = nn.ParameterList(
            one_matrix(_by_focus((rows - m) * width_in, focus, 2 * (rows - m) * width_out) / math.sqrt(2))
            for m in range(1, order + 1)
        )
        self.bias = routed(torch.zeros(focus, width_out), "adam") if bias else None

    def forward(
        self, x: Float[Tensor, "E R F C"], bias_strength: Float[Tensor, "E F O"] | None = None
    ) -> Float[Tensor, "E R F O"]:
        """Return the mixed rows; `bias_strength` multiplies the bias of l = 0."""
        y = torch.cat(self.parts(x), 2).permute(1, 2, 0, 3)
        if self.bias is None:
            return y
        bias = self.bias if bias_strength is None else self.bias * bias_strength
        return torch.cat((y[:, :1] + bias.unsqueeze(-3), y[:, 1:]), 1)

    def parts(self, x: Float[Tensor, "E R F C"]) -> list[Float[Tensor, "F E r O"]]:
        """Return the mixed rows of each |m| without the bias, each in a tensor of its own that has its streams first.

        For speed x has them first in memory, too: then no product needs a copy.
        """
        spans = [(self.degree + 1 - m) * (1 if m == 0 else 2) for m in range(self.order + 1)]
        pieces = []
        # Parts by a split, whose derivative is one concatenation; that of a slice is a tensor of zeros for each.
        for m, (span, part) in enumerate(zip(spans, x.movedim(2, 0).split(spans, 2), strict=True)):
            if m == 0:
                weight = self.weight_m0.movedim(1, 0)
            else:
                u, v = self.weight_m[m - 1].movedim(1, 0).chunk(2, -1)
                weight = torch.cat((torch.cat((u, v), 2), torch.cat((-v, u), 2)), 1)
            pieces.append((part.flatten(2) @ weight).unflatten(-1, (span, self.width_out)))
        return pieces


def _by_focus(width_in: int, focus: int, width_out: int) -> Tensor:
    std = 1 / math.sqrt(width_in + width_out)
    return torch.stack([truncated_normal(width_in, width_out, std=std) for _ in range(focus)], 1)


class DegreeMixer(nn.Module):
    """Mixes degrees of equal m by a kernel that depends on the edge's radial and element features.

    Z'[l', ±m, c] = Σ_r B[r, c] Σ_l K_r[m; l, l'] Z[l, ±m, c], the kernel a linear map of the m = 0 features.
    rank 0 gives each channel its own kernel; mode "degree" one kernel for all, without B.
    """

    def __init__(self, degree: int, order: int, width: int, mode: str, rank: int) -> None:
        super().__init__()
        self.degree, self.order = degree, order
        self.entries = sum((degree + 1 - m) ** 2 for m in range(order + 1))
        self.per_entry = 1 if mode == "degree" else rank or width
        self.by_channel = mode == "degree_channel" and rank == 0
        fan_in, fan_out = (degree + 1) * width, self.entries * self.per_entry
        self.weight = nn.Parameter(truncated_normal(fan_in, fan_out, std=1 / math.sqrt(fan_in + fan_out)))
        has_basis = mode == "degree_channel" and rank > 0
        std = 1 / math.sqrt(rank + width)
        self.channel_basis = nn.Parameter(truncated_normal(rank, width, std=std)) if has_basis else None

    def by_stream(self, x: Float[Tensor, "E R F C"], features: Float[Tensor, "E L W"]) -> Float[Tensor, "E R F C"]:
        """Return the same of rows in streams, by one kernel where there is a basis."""
        if self.channel_basis is None:
            return self(x.flatten(2), features).unflatten(2, x.shape[2:])
        kernel = (features.flatten(1) @ self.weight).unflatten(-1, (self.entries, self.per_entry))
        return mix_degrees(kernel, self.channel_basis, x, self.degree, self.order)

    def forward(self, x: Float[Tensor, "E R C"], features: Float[Tensor, "E L C"]) -> Float[Tensor, "E R C"]:
        """Return the mixed rows; `features` are the degrees' radial features."""
        kernel = (features.flatten(1) @ self.weight).unflatten(-1, (self.entries, self.per_entry))
        sizes = [self.degree + 1 - m for m in range(self.order + 1)]
        parts = kernel.split([n * n for n in sizes], 1)
        rows = x.split([n for m, n in enumerate(sizes) for _ in range(1 if m == 0 else 2)], 1)
        pieces = []
        for place, piece in enumerate(rows):  # m = 0, -1, +1, -2, …: the same kernel serves -m and +m
            m = (place + 1) // 2
            part = parts[m].unflatten(1, (sizes[m], sizes[m]))  # [E, in, out, r]
            if self.by_channel:
                mixed = (part * piece.unsqueeze(2)).sum(1)
            else:
                turned = part.permute(0, 3, 2, 1).flatten(1, 2)  # [E, r out, in]
                mixed = torch.bmm(turned, piece)
                if self.per_entry > 1:
                    mixed = mixed.unflatten(1, (self.per_entry, sizes[m]))  # [E, r, out, C]
                    if self.channel_basis is not None:
                        mixed = mixed * self.channel_basis[:, None, :]
                    mixed = mixed.sum(1)
            pieces.append(mixed)
        mixed = torch.cat(pieces, 1)
        return mixed * self.channel_basis if self.channel_basis is not None and self.per_entry == 1 else mixed


class SO2Stack(nn.Module):
    """Layers Z ← Z + s act(SO2Linear(norm(Z))) in the edge frame; the last without activation."""

    def __init__(self, options: Options, degree: int, order: int) -> None:
        super().__init__()
        focus, width, layers = options.n_focus, options.focus_width, options.mixing_layers
        on_grid = options.s2_activation[0]
        wide = [2 * width if on_grid and k < layers - 1 else width for k in range(layers)]
        self.linears = nn.ModuleList(SO2Linear(degree, order, width, out, focus, options.mlp_bias) for out in wide)
        if on_grid:
            grid = sphere_grid(degree, order, options.lebedev_quadrature[0], isotropic=False)
            acts = [GridNet(grid, width, focus, "self", bias=options.mlp_bias) for _ in range(layers - 1)]
        else:
            acts = [
                GatedActivation(degree, width, focus, options.activation_function, options.mlp_bias, order)
                for _ in range(layers - 1)
            ]
        self.activations = nn.ModuleList(acts)
        self.norms = (
            nn.ModuleList(EquivariantRMSNorm(degree, focus, width, order=order) for _ in range(layers - 1))
            if options.so2_norm
            else None
        )
        self.scales = (
            nn.ParameterList(routed(torch.full((focus, width), 1e-3), "adam") for _ in range(layers))
            if options.layer_scale
            else None
        )
        self.depth = (
            nn.ModuleList(
                DepthAttention(focus * width, options.so2_attn_res == "dependent", options.mlp_bias, options.eps)
                for _ in range(layers)
            )
            if options.so2_attn_res != "none"
            else None
        )

    def forward(self, z: Float[Tensor, "E R F C"], bias_strength: Tensor) -> Float[Tensor, "E R F C"]:
        """Return the mixed rows; `bias_strength` [E, F, C] makes the first bias vanish with the envelope."""
        if z.shape[2] > 1:
            z = z.movedim(2, 0).contiguous().movedim(0, 2)
        history = [z]
        plain = self.depth is None and self.scales is None  # the increment itself is not asked for
        for k, linear in enumerate(self.linears):
            assert isinstance(linear, SO2Linear)
            if self.depth is not None:
                z = self.depth[k](history, z, lambda state: state[:, 0].flatten(1))
            increment = z
            if self.norms is not None and k < len(self.norms):
                increment = self.norms[k](increment)
            activation = self.activations[k] if k < len(self.activations) else None
            if plain and linear.bias is None and isinstance(activation, GatedActivation) and activation.fused:
                zero, *others = linear.parts(increment)
                rest = torch.cat(others, 2) if len(others) > 1 else others[0] if others else zero[:, :, :0]
                z = activation.of_parts(zero, rest, z)
                continue
            strength = None
            if k == 0 and linear.bias is not None:
                strength = torch.cat((bias_strength,) * (linear.width_out // bias_strength.shape[-1]), -1)
            increment = linear(increment, strength)
            if activation is not None:
                increment = activation(increment)
            if self.scales is not None:
                increment = increment * self.scales[k]
            z = z + increment
            history.append(increment)
        return z


class FocusCompetition(nn.Module):
    """Weights of the focus streams of each edge: a softmax of its scalars, two per cent of it uniform."""

    def __init__(self, focus: int, channels: int, norm: bool, bias: bool, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(focus, channels, eps=eps) if norm else None
        self.weight = routed(normal(channels, focus, std=0.01), "adamw")
        self.bias = routed(torch.zeros(focus), "adam") if bias else None

    def forward(self, scalars: Float[Tensor, "E F C"]) -> Float[Tensor, "E F"]:
        """Return the weight of each stream; they sum to 1."""
        normed = scalars if self.norm is None else self.norm(scalars)
        logits = (normed * self.weight.T).sum(-1)  # one column a stream: no matrix product that a GPU is fast at
        if self.bias is not None:
            logits = logits + self.bias
        return 0.98 * torch.softmax(logits, -1) + 0.02 / logits.shape[-1]


class SO2Convolution(Tables):
    """Messages from the neighbours of each atom: [A, (L+1)², C] to the same."""

    def __init__(self, options: Options, degree: int, order: int) -> None:
        super().__init__()
        channels, focus, width = options.channels, options.n_focus, options.focus_width
        wide = focus * width
        self.degree, self.order, self.focus, self.width = degree, order, focus, width
        self.pre_mix = DegreeLinear(degree, channels, wide, options.mlp_bias)
        self.post_mix = DegreeLinear(degree, wide, channels, options.mlp_bias, zero=True)
        self.radial_proj = (
            nn.Parameter(uniform(channels, wide, bound=1 / math.sqrt(channels))) if wide != channels else None
        )
        self.competition = (
            FocusCompetition(focus, width, options.edge_norm, options.mlp_bias, options.eps) if focus > 1 else None
        )
        node_wise = options.node_wise_s2 or options.node_wise_so3
        plain = options.mixing_layers == 0 and options.radial_so2_mode == "none" and not node_wise
        self.in_frame = not (plain or options.edge_cartesian)
        degrees = reduced_layout(degree, order)[1] if self.in_frame else packed_degrees(degree)
        self.table("row_degrees", degrees)
        if options.edge_cartesian:
            self.cartesian = EdgeCartesian(options, degree)
        if self.in_frame:
            if options.radial_so2_mode != "none":
                mode, rank = options.radial_so2_mode, options.radial_so2_rank
                self.mixer = DegreeMixer(degree, order, wide, mode, rank)
            if node_wise:
                self.node_wise = _cross_net(options, degree, order, 0)
            if options.mixing_layers:
                self.stack = SO2Stack(options, degree, order)
            packed = packed_degrees(degree).to(torch.float64)
            lost = ((2 * packed + 1) / (2 * order + 1)).sqrt()
            # Orders above the largest one are lost on the way; the rest of their degree stands in for them.
            self.table("restore", torch.where(packed > order, lost, 1.0)[:, None])
        if options.message_node_s2 or options.message_node_so3:
            self.message_node = _cross_net(options, degree, None, 1)
        self.attention, self.focus_mix, self.value_proj, self.out_proj = None, None, None, None
        if options.n_atten_head:
            streams = (1, wide) if options.atten_f_mix else (focus, width)
            self.attention = EnvelopeAttention(streams[1], streams[0], options.n_atten_head, options.eps)
            if options.atten_f_mix:
                self.focus_mix = DegreeLinear(degree, wide, wide, row_degrees=degrees)
            if options.atten_v_proj:
                self.value_proj = DegreeLinear(degree, wide, wide, row_degrees=degrees)
            if options.atten_o_proj:
                self.out_proj = DegreeLinear(degree, wide, wide)
        mixed = node_wise or self.focus_mix is not None or self.value_proj is not None
        self.fusible = self.in_frame and self.attention is not None and not mixed
        if options.node_cartesian != "none":
            self.node_cartesian = NodeCartesian(options, degree)

    def forward(
        self, x: Float[Tensor, "A M C"], features: Float[Tensor, "E L C"], rotation: Rotations | None, edges: Edges
    ) -> Float[Tensor, "A M C"]:
        """Return the gathered messages.

        `features` are the radial and element features of each edge and degree, `rotation` the matrices into its frame.
        """
        x = self.pre_mix(x)
        radial = features[:, : self.degree + 1]
        if self.radial_proj is not None:
            radial = radial @ self.radial_proj
        numbers = 0 if rotation is None else edges.senders.shape[0] * rotation.shape[0] * x.shape[2]
        if self.fusible and rotation is not None and not plain(x, numbers):
            gathered = self._fused(x, radial, rotation, edges)
        else:
            messages, share = self._messages(x, radial, rotation, edges)
            gathered = self._gather(messages, share, x, radial[:, 0], rotation, edges)
        if hasattr(self, "message_node"):
            query, context = (tensor.unflatten(-1, (self.focus, self.width)) for tensor in (gathered, x))
            gathered = gathered + self.message_node(query, context).flatten(-2)
        if hasattr(self, "node_cartesian"):
            gathered = self.node_cartesian(gathered, x)
        return self.post_mix(gathered)

    def _fused(self, x: Tensor, radial: Tensor, rotation: Rotations, edges: Edges) -> Tensor:
        """Return the gathered messages by kernels that make no table of neighbours; streams stand first in memory."""
        z = into_frames(rotation.numbers, x, edges.sender_ends, self.degree, self.order, self.focus)
        if hasattr(self, "mixer"):
            z = self.mixer.by_stream(z, radial)
        else:
            factors = reduced_rows(radial, self.degree, self.order, 1).unflatten(-1, (self.focus, self.width))
            z = z * factors.to(z.dtype)
        messages, share = self._stacked(z, radial, edges)
        weights, gates = self._attention(x, radial[:, 0], share, edges)
        heads = weights.flatten(1)
        messages = messages.unflatten(-1, (-1, self.focus * self.width // heads.shape[1])).flatten(2, 3)
        gathered = out_of_frames(rotation.numbers, messages, edges.receiver_ends, self.degree, self.order, heads)
        return self._gated(gathered * self.get_buffer("restore"), gates)

    def _stacked(self, z: Float[Tensor, "E R F C"], radial: Tensor, edges: Edges) -> tuple[Tensor, Tensor | None]:
        """Return the message of each edge in its frame, and its streams' weights."""
        scalars = z[:, 0]
        if hasattr(self, "stack"):
            strength = (radial[:, 0] * edges.weight).unflatten(-1, (self.focus, self.width))
            z = self.stack(z, strength)
        return z, None if self.competition is None else self.competition(scalars)

    def _messages(
        self, x: Tensor, radial: Tensor, rotation: Rotations | None, edges: Edges
    ) -> tuple[Float[Tensor, "E R W"], Float[Tensor, "E F"] | None]:
        """Return the message of each edge, in its frame if that is where it is made, and its streams' weights."""
        streams = (self.focus, self.width)
        sent = x.index_select(0, edges.senders)
        if not self.in_frame:
            scalars = (sent[:, 0] * radial[:, 0]).unflatten(-1, streams)
            if hasattr(self, "cartesian"):
                message = self.cartesian(sent, radial, edges.directions)
            else:
                message = sent * radial.index_select(1, self.get_buffer("row_degrees"))
            return message, None if self.competition is None else self.competition(scalars)
        assert rotation is not None
        z = rotation.dense @ sent
        has_mixer = hasattr(self, "mixer")
        z = self.mixer(z, radial) if has_mixer else z * reduced_rows(radial, self.degree, self.order, 1)
        z = z.unflatten(-1, streams)
        if hasattr(self, "node_wise"):
            context = (rotation.dense @ x.index_select(0, edges.receivers)).unflatten(-1, streams)
            z = z + self.node_wise(z, context)
        z, share = self._stacked(z, radial, edges)
        return z.flatten(-2), share

    def _gather(
        self,
        messages: Tensor,
        share: Tensor | None,
        x: Tensor,
        radial_scalars: Tensor,
        rotation: Rotations | None,
        edges: Edges,
    ) -> Tensor:
        """Return the weighted sum of the messages of each atom, in the global frame."""
        mixed = self.focus_mix is not None or self.value_proj is not None
        if share is not None and (mixed or self.attention is None):
            messages = _by_head(messages, share.unsqueeze(-1))
            share = None
        if self.attention is None:
            # η sits outside the sum, w and the gate inside.
            gathered = self._turn_back(messages * edges.gated(edges.weight).unsqueeze(-1), rotation, edges)
            return gathered * edges.inverse_sqrt_degree.unsqueeze(-1)
        if self.focus_mix is not None:
            messages = self.focus_mix(messages)
        if self.value_proj is not None:
            messages = self.value_proj(messages)
        weights, gates = self._attention(x, radial_scalars, share, edges)
        return self._gated(self._turn_back(_by_head(messages, weights), rotation, edges), gates)

    def _attention(
        self, x: Tensor, radial_scalars: Tensor, share: Tensor | None, edges: Edges
    ) -> tuple[Float[Tensor, "E F H"], Float[Tensor, "A F H"]]:
        """Return the weights of messages, times those of their streams, and the gates of their sums."""
        assert self.attention is not None
        streams = (self.attention.norm.scale.shape[0], -1)
        scalars = x[:, 0].unflatten(-1, streams)
        weights = self.attention(scalars, radial_scalars.unflatten(-1, streams), edges)
        if share is not None:  # nothing came between: one product for both
            weights = weights * share.unsqueeze(-1)
        return weights, self.attention.gate(scalars)

    def _gated(self, gathered: Tensor, gates: Tensor) -> Tensor:
        gathered = _by_head(gathered, gates)
        return gathered if self.out_proj is None else self.out_proj(gathered)

    def _turn_back(self, messages: Tensor, rotation: Rotations | None, edges: Edges) -> Tensor:
        if not self.in_frame:
            return edges.sum(messages)
        assert rotation is not None
        return edges.sum(rotation.dense.transpose(1, 2) @ messages) * self.get_buffer("restore")


def _by_head(x: Float[Tensor, "N R W"], weights: Float[Tensor, "N F H"]) -> Float[Tensor, "N R W"]:
    """Multiply the channels of each focus and head by its weight."""
    heads = weights.flatten(1)
    return (x.unflatten(-1, (heads.shape[-1], -1)) * heads[:, None, :, None]).flatten(-2)


def _cross_net(options: Options, degree: int, order: int | None, place: int) -> GridNet:
    """The grid product of two inputs, on edges (place 0, reduced rows) or on atoms (place 1, packed rows)."""
    so3 = (options.node_wise_so3, options.message_node_so3)[place]
    grid: Grid
    if so3:
        grid = rotation_grid(degree, options.kmax, order)
    else:
        lebedev = options.lebedev_quadrature[0 if order is not None else 1]
        grid = sphere_grid(degree, order, lebedev, isotropic=order is None)
    return GridNet(
        grid,
        options.focus_width,
        options.n_focus,
        "cross",
        mlp=options.grid_mlp[place],
        branches=options.grid_branch[place],
        bias=options.mlp_bias,
        residual_scale=True,
    )
