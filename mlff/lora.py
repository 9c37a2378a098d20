"""Low-rank adapters (LoRA): fine-tuning that moves few numbers, beside the trained matrices instead of in them.

A matrix W of a trained model, rows x columns, is used as

    W + (α/R) A B        A (rows, R) begins as N(0, 1/R), B (R, columns) as zeros

and only A and B train. The sum has the shape of W and goes through the same forward pass, so that whatever W may do to
features A B may do too: a matrix by degree has a pair for each degree, one of the SO(2) convolution a pair for each
|m|, and energies stay invariant. At the start B = 0, and the model is the one it came from.

With α = R a step that moves each number of B by some amount moves those of A B by about as much, since a row of A has a
length of about one: learning rates for W itself serve for A and B.

Adapters are parametrizations of torch: weight `w` of a room becomes `parametrizations.w.original`, `….w.0.left` and
`….w.0.right` in a checkpoint of training, from which a run goes on. Models that are written are merged: plain weights.

Averaged weights are those of the averages of A and of B, whose product is not the average of A B; the two differ by the
correlation of A and B within the time of the average, second order in how far they move in it. The averaged model is
validated as what it is and written as what was validated.

Source: Hu et al., ICLR 2022, arXiv:2106.09685, equation 3 and section 4.1 for α.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, register_parametrization

from mlff import optim
from mlff.sezm.linear import normal, routed
from mlff.sezm.potential import SeZM

CHANNELS_PER_RANK = 16
"""Channels of a model for each unit of the default rank. Then less than a fifteenth of all numbers trains in every
preset; a fixed rank would be a quarter of a narrow model, or nearly nothing of a wide one."""


def default_rank(channels: int) -> int:
    """Return the rank of adapters for a model of some width, at least 2."""
    return max(2, channels // CHANNELS_PER_RANK)


class Adapter(nn.Module):
    """W -> W + (α/R) A B, for a matrix or a stack of them, in whatever shape it is kept.

    Args:
        weight: W; what it says to the optimiser decides which axes are rows and columns (`mlff.optim.matrix_shape`).
        rank: R.
        alpha: α.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        count, rows, columns = optim.matrix_shape(weight)
        stack = (count,) if count > 1 else ()
        # A single column has no nearest orthogonal matrix but itself; Adam takes each of its numbers on its own.
        route = "muon" if rank > 1 else "adamw"
        self.left = routed(normal(*stack, rows, rank, std=1 / math.sqrt(rank)).to(weight), route)
        self.right = routed(torch.zeros(*stack, rank, columns).to(weight), route)
        self.scale = alpha / rank

    def forward(self, weight: Float[Tensor, "*w"]) -> Float[Tensor, "*w"]:
        """Return the adapted weight. Where products are taken in bfloat16 so is A B, but not the sum."""
        return weight + self.scale * (self.left @ self.right).view(weight.shape)


def insert(potential: nn.Module, rank: int, alpha: float, seed: int = 0) -> None:
    """Freeze a model, and give an adapter to each of its matrices for which that takes fewer numbers than the matrix.

    Matrices are the parameters on the `muon` route: all but scales, biases, tables of elements and single vectors.

    Args:
        potential: the model, changed in place; its energies stay what they are.
        rank: R of all adapters.
        alpha: α of all adapters.
        seed: of the first values of A.

    Raises:
        ValueError: the rank is too high for any of the matrices.
    """
    potential.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in list(potential.modules()):
            for name, weight in list(module.named_parameters(recurse=False)):
                _, rows, columns = optim.matrix_shape(weight)
                if optim.route(weight) == "muon" and rank * (rows + columns) < rows * columns:
                    register_parametrization(module, name, Adapter(weight, rank, alpha))
    if not any(parameter.requires_grad for parameter in potential.parameters()):
        raise ValueError(f"finetune.rank={rank} is no smaller than any matrix of this model; give a lower one.")


@torch.no_grad()
def merged(potential: SeZM) -> SeZM:
    """Return a plain model with the adapters of another added into its matrices; the model itself if it has none.

    The model with adapters stays as it is.
    """
    lists = {room: module for room, module in potential.named_modules() if isinstance(module, ParametrizationList)}
    if not lists:
        return potential
    state = {name: value for name, value in potential.state_dict().items() if ".parametrizations." not in name}
    state |= {room.replace(".parametrizations.", "."): module() for room, module in lists.items()}
    # Not torch's own removal on a copy: a copy shares the class on which torch keeps what makes the sums.
    plain = SeZM(potential.options, potential.elements, dtype=potential.dtype)
    plain.load_state_dict(state)
    return plain.to(state["reference_energies"].device).train(potential.training)


def describe(potential: nn.Module) -> str:
    """Return a line that says how many adapters there are, of which rank, and how many numbers they have."""
    adapters = [module for module in potential.modules() if isinstance(module, Adapter)]
    trained = sum(parameter.numel() for adapter in adapters for parameter in adapter.parameters())
    whole = sum(parameter.numel() for parameter in potential.parameters()) - trained
    return (
        f"LoRA: {len(adapters)} matrices have an adapter of rank {adapters[0].left.shape[-1]}; {trained:,} numbers "
        f"train beside {whole:,} that do not."
    )
