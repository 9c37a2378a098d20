"""The feed-forward network of an atom: linear maps by degree around an equivariant nonlinearity."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from mlff.sezm.grid import GridNet, rotation_grid, sphere_grid
from mlff.sezm.linear import DegreeLinear, GatedActivation
from mlff.sezm.options import Options, automatic_width


class FeedForward(nn.Module):
    """[A, M, C] to the same, through a hidden width.

    kind "gated": scalars activate, and gate the other degrees. "glu": the same with separate values (first half) and
    gates (second half). "grid": a product on the sphere or the rotation group.
    """

    def __init__(
        self,
        options: Options,
        degree: int,
        hidden: int,
        kind: str,
        so3: bool = False,
        mlp: bool = False,
        branches: int = 0,
    ) -> None:
        super().__init__()
        channels, bias = options.channels, options.mlp_bias
        self.kind, self.hidden = kind, hidden
        if kind == "grid":
            grid = (
                rotation_grid(degree, options.kmax) if so3 else sphere_grid(degree, None, options.lebedev_quadrature[1])
            )
            width_in, width_out = 2 * grid.frames * hidden, grid.frames * hidden
            self.act: nn.Module = GridNet(grid, hidden, 1, "self", mlp=mlp, branches=branches, bias=bias)
        else:
            width_in, width_out = (2 * hidden if kind == "glu" else hidden), hidden
            self.act = GatedActivation(degree, hidden, 1, options.activation_function, bias)
        self.first = DegreeLinear(degree, channels, width_in, bias)
        self.second = DegreeLinear(degree, width_out, channels, bias, zero=True)

    def forward(self, x: Float[Tensor, "A M C"]) -> Float[Tensor, "A M C"]:
        """Return the increment of the features."""
        hidden = self.first(x).unsqueeze(2)  # [A, M, 1, width], one focus stream
        if self.kind == "glu":
            values, gates = hidden.chunk(2, -1)
            hidden = self.act(values, gates[:, 0])
        else:
            hidden = self.act(hidden)
        return self.second(hidden.squeeze(2))


def block_feedforward(options: Options, degree: int) -> FeedForward:
    """Return the feed-forward network of an interaction block."""
    grid = options.ffn_so3_grid or options.s2_activation[1]
    hidden = options.ffn_neurons or automatic_width(options.channels, options.glu_activation or grid)
    kind = "grid" if grid else "glu" if options.glu_activation else "gated"
    return FeedForward(
        options,
        degree,
        hidden,
        kind,
        so3=options.ffn_so3_grid,
        mlp=grid and options.grid_mlp[2],
        branches=options.grid_branch[2] if grid else 0,
    )
