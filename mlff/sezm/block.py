"""An interaction block: a convolution over neighbours, then feed-forward networks, each with norms and a shortcut."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from mlff.sezm.attention import DepthAttention
from mlff.sezm.edges import Edges, Rotations
from mlff.sezm.feedforward import block_feedforward
from mlff.sezm.linear import routed
from mlff.sezm.norm import EquivariantRMSNorm
from mlff.sezm.options import Options
from mlff.sezm.so2 import SO2Convolution


class Block(nn.Module):
    """Two kinds of unit, the convolution and the feed-forward networks; `Trunk` decides how they are joined."""

    def __init__(self, options: Options, degree: int, order: int) -> None:
        super().__init__()
        channels = options.channels
        self.degree, self.order = degree, order
        self.node_degree = degree + options.extra_node_l
        pre_so2, post_so2, pre_ffn, post_ffn = options.sandwich_norm
        self.pre_so2 = EquivariantRMSNorm(degree, channels) if pre_so2 else None
        self.convolution = SO2Convolution(options, degree, order)
        # Without edge norms a floor of one keeps the norm of a vanishing message smooth at the cutoff.
        floor = 1e-5 if options.edge_norm else 1.0
        self.post_so2 = EquivariantRMSNorm(degree, channels, eps=floor) if post_so2 else None
        count = options.ffn_blocks
        node = self.node_degree
        self.pre_ffn = nn.ModuleList(EquivariantRMSNorm(node, channels) for _ in range(count)) if pre_ffn else None
        self.feedforwards = nn.ModuleList(block_feedforward(options, node) for _ in range(count))
        self.post_ffn = nn.ModuleList(EquivariantRMSNorm(node, channels) for _ in range(count)) if post_ffn else None
        self.scales = (
            nn.ParameterList(routed(torch.full((channels,), 1e-3), "adam") for _ in range(count))
            if options.layer_scale
            else None
        )

    def convolve(
        self, x: Float[Tensor, "A M C"], features: Tensor, rotation: Rotations | None, edges: Edges
    ) -> Float[Tensor, "A M C"]:
        """Return the messages of the neighbours; rows above the message degree are zero."""
        rows = (self.degree + 1) ** 2
        message = x[:, :rows]
        if self.pre_so2 is not None:
            message = self.pre_so2(message)
        message = self.convolution(message, features, rotation, edges)
        if self.post_so2 is not None:
            message = self.post_so2(message)
        return functional.pad(message, (0, 0, 0, x.shape[1] - rows)) if x.shape[1] > rows else message

    def feed(self, k: int, x: Float[Tensor, "A M C"]) -> Float[Tensor, "A M C"]:
        """Return the increment of feed-forward network k."""
        y = x if self.pre_ffn is None else self.pre_ffn[k](x)
        y = self.feedforwards[k](y)
        if self.post_ffn is not None:
            y = self.post_ffn[k](y)
        return y if self.scales is None else y * self.scales[k]


class Trunk(nn.Module):
    """All blocks, joined by plain shortcuts or by attention over depth.

    Source of the latter: the attention-residual scheme of the DPA4 model; `full` looks back on every unit, `block`
    on the sums of whole blocks.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(options, degree, order) for degree, order in zip(options.degrees, options.orders, strict=True)
        )
        self.mode = (
            "full" if options.full_attn_res != "none" else "block" if options.block_attn_res != "none" else "none"
        )
        if self.mode != "none":
            kind = options.full_attn_res if self.mode == "full" else options.block_attn_res

            def attention() -> DepthAttention:
                return DepthAttention(options.channels, kind == "dependent", options.mlp_bias, options.eps)

            self.depth_so2 = nn.ModuleList(attention() for _ in self.blocks)
            self.depth_ffn = nn.ModuleList(
                nn.ModuleList(attention() for _ in range(options.ffn_blocks)) for _ in self.blocks
            )
            self.depth_last = attention()

    def frame_shapes(self) -> list[tuple[int, int]]:
        """Return degree and order of each block that works in the frames of its edges."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return [(block.degree, block.order) for block in blocks if block.convolution.in_frame]

    def forward(
        self,
        x: Float[Tensor, "A M C"],
        features: Float[Tensor, "E L C"],
        rotations: dict[tuple[int, int], Rotations],
        edges: Edges,
    ) -> Float[Tensor, "A m C"]:
        """Return the features after the last block, at its node degree."""
        history = [x]
        for b, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            rows = (block.node_degree + 1) ** 2
            rotation = rotations.get((block.degree, block.order))
            x = x[:, :rows]
            if self.mode == "none":
                x = x + block.convolve(x, features, rotation, edges)
                for k in range(len(block.feedforwards)):
                    x = x + block.feed(k, x)
                continue
            seen = [state[:, :rows] for state in history]
            x = block.convolve(self.depth_so2[b](seen, x, _scalars), features, rotation, edges)
            units = [x]
            for k, attend in enumerate(self.depth_ffn[b]):  # type: ignore[arg-type]
                past = units if self.mode == "full" else [torch.stack(units).sum(0)]
                x = block.feed(k, attend(seen + past, x, _scalars))
                units.append(x)
            history += units if self.mode == "full" else [torch.stack(units).sum(0)]
        if self.mode != "none":
            rows = x.shape[1]
            x = self.depth_last([state[:, :rows] for state in history], x, _scalars)
        return x


def _scalars(state: Tensor) -> Tensor:
    return state[:, 0]
