"""From the last features of the atoms to their energies."""

from __future__ import annotations

import itertools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mlff.sezm.feedforward import FeedForward
from mlff.sezm.linear import ACTIVATION, Dense, gated_halves, normal, routed
from mlff.sezm.options import Options, automatic_width


class Readout(nn.Module):
    """From the last features to the invariant descriptor of each atom."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.scalar = options.so3_readout == "none"
        degree = 0 if self.scalar else options.last_degree
        kind = "grid" if not self.scalar else "glu" if options.glu_activation else "gated"
        hidden = options.ffn_neurons or automatic_width(options.channels, kind != "gated")
        self.layers = nn.ModuleList(
            FeedForward(options, degree, hidden, kind, so3=True, mlp=options.so3_readout == "mlp")
            for _ in range(options.readout_layers)
        )

    def forward(self, x: Float[Tensor, "A M C"]) -> Float[Tensor, "A C"]:
        """Return the l = 0 features after the residual layers."""
        if self.scalar:
            x = x[:, :1]
        for layer in self.layers:
            x = x + layer(x)
        return x[:, 0]


class EnergyHead(nn.Module):
    """From the descriptor to the energy of each atom: hidden layers value · act(gate), then one output.

    Conditions of the structure and of the atom, where the model has them, stand behind the descriptor; a one-hot case
    vector either stands there too or modulates the layers (FiLM).
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.activation = options.fitting_activation
        self.n_frame, self.n_atom, self.channels = options.numb_fparam, options.numb_aparam, options.channels
        film = options.case_film_embd
        width = options.channels + options.numb_fparam + options.numb_aparam
        width += 0 if film else options.dim_case_embd
        widths = [width, *(neuron or automatic_width(width, True) for neuron in options.fitting_neuron)]
        self.hidden = nn.ModuleList(Dense(a, 2 * b, bias=True) for a, b in itertools.pairwise(widths))
        self.out = Dense(widths[-1], 1, bias=options.bias_out)
        self.register_buffer("frame_mean", torch.zeros(options.numb_fparam))
        self.register_buffer("frame_inverse_std", torch.ones(options.numb_fparam))
        self.register_buffer("atom_mean", torch.zeros(options.numb_aparam))
        self.register_buffer("atom_inverse_std", torch.ones(options.numb_aparam))
        self.register_buffer("case", torch.zeros(options.dim_case_embd))
        self.film = CaseFilm(options.dim_case_embd, [options.channels, *widths[1:]], self.activation) if film else None

    def forward(
        self,
        descriptor: Float[Tensor, "A C"],
        frame_parameters: Float[Tensor, "A P"] | None = None,
        atom_parameters: Float[Tensor, "A Q"] | None = None,
    ) -> Float[Tensor, "A"]:
        """Return energies in eV, before reference energies.

        Raises:
            ValueError: the model reads conditions that were not given.
        """
        case = self.get_buffer("case")
        x = descriptor if self.film is None else self.film(0, descriptor, case)
        parts = [x]
        for name, count, values in (
            ("frame", self.n_frame, frame_parameters),
            ("atom", self.n_atom, atom_parameters),
        ):
            if not count:
                continue
            if values is None or values.shape[-1] != count:
                found = "none" if values is None else str(values.shape[-1])
                raise ValueError(f"this model reads {count} {name} parameters; got {found}")
            mean, inverse_std = self.get_buffer(f"{name}_mean"), self.get_buffer(f"{name}_inverse_std")
            parts.append((values.to(x) - mean) * inverse_std)
        if self.film is None and len(case):
            parts.append(case.expand(len(x), -1))
        x = torch.cat(parts, -1) if len(parts) > 1 else x
        for k, layer in enumerate(self.hidden):
            x = gated_halves(layer(x), "up_gate", self.activation)
            if self.film is not None:
                x = self.film(k + 1, x, case)
        return self.out(x).squeeze(-1)


class CaseFilm(nn.Module):
    """Scale and shift of each layer of the head by the one-hot case (the branch of a multi-task model)."""

    def __init__(self, cases: int, widths: list[int], activation: str) -> None:
        super().__init__()
        inner = 32 * math.ceil(4 * cases / 32)
        code = 4 * widths[0]
        self.first, self.second = Dense(cases, inner), Dense(inner, code)
        self.projections = nn.ParameterList(
            nn.Parameter(normal(code, 2 * width, std=1 / math.sqrt(code + 2 * width))) for width in widths
        )
        self.scale_strength = routed(torch.full((len(widths),), math.log(0.01)), "adam")
        self.shift_strength = routed(torch.full((len(widths),), math.log(0.01)), "adam")
        self.activation = activation

    def forward(self, target: int, x: Float[Tensor, "A W"], case: Float[Tensor, "K"]) -> Float[Tensor, "A W"]:
        """Return the features of layer `target` (0: the descriptor), modulated."""
        code = self.second(ACTIVATION[self.activation](self.first(case)))
        scale, shift = (code @ self.projections[target]).chunk(2, -1)
        scale = self.scale_strength[target].exp() * torch.tanh(scale)
        return x * (1 + scale) + self.shift_strength[target].exp() * torch.tanh(shift)
