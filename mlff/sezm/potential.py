"""SeZM, the Smooth Equivariant Zone-bridging Model (DPA4): from a graph to the energy of each atom.

    edges    = radial features and rotations of every edge
    atoms    = element features, modulated and extended by a first look at the neighbours
    atoms    = blocks of (SO(2) convolution, feed-forward network)
    energies = head(read-out(atoms)) + reference energy of the element (+ ZBL repulsion)

Source: the DPA4 model, arXiv:2606.02419, as its checkpoints define it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mlff import elements as chemistry
from mlff import presets
from mlff.graph import Graph
from mlff.kernels import host
from mlff.sezm import bridging
from mlff.sezm.block import Trunk
from mlff.sezm.edges import EdgeRotations, Edges
from mlff.sezm.embedding import ChargeSpinEmbedding, EnvironmentSeed, GeometricEmbedding, SpinEmbedding, TypeEmbedding
from mlff.sezm.harmonics import SphericalHarmonics, edge_frames
from mlff.sezm.linear import OPTIMIZER_ATTRIBUTES
from mlff.sezm.options import Options
from mlff.sezm.radial import RadialBasis, RadialNetwork, envelope
from mlff.sezm.readout import EnergyHead, Readout

DEGREE_FLOOR = 0.25  # δ of the smooth degree: an isolated atom has 1 / sqrt(δ) = 2


def edge_vectors(graph: Graph) -> Float[Tensor, "E 3"]:
    """Return the vector from each receiver to its sender, through periodic images, in Å and float64.

    r = x[sender] + shift @ cell - x[receiver]. Differentiable in positions and cell.
    """
    positions = graph.positions.to(torch.float64)
    vectors = positions.index_select(0, graph.senders) - positions.index_select(0, graph.receivers)
    cells = graph.cell.to(torch.float64).index_select(0, graph.structure.index_select(0, graph.receivers))
    return vectors + torch.einsum("ei,eij->ej", graph.shifts.to(torch.float64), cells)


class SeZM(nn.Module):
    """Energies of atoms from their neighbourhoods: Graph -> [A] in eV, reference energies included.

    Attributes:
        block_dtype: the type in which the matrix products of the blocks are taken; None = that of the weights.
            Geometry, radial functions, read-out and sums are never taken in less than the weights' own.
    """

    def __init__(
        self, options: Options, elements: Iterable[str | int], seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.options = options
        self.elements: tuple[int, ...] = chemistry.atomic_numbers(elements)
        self.cutoff: float = options.rcut
        self.block_dtype: torch.dtype | None = None
        if not self.elements:
            raise ValueError("a model needs at least one element; got an empty list")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would reseed GPUs too
            self._build(options, len(self.elements))
        row_of = torch.full((len(chemistry.SYMBOLS),), -1)
        row_of[list(self.elements)] = torch.arange(len(self.elements))
        self.register_buffer("row_of_number", row_of, persistent=False)
        symbols = [chemistry.SYMBOLS[number] for number in self.elements]
        self._register_masks(options, symbols)
        self.register_buffer("reference_energies", torch.zeros(len(self.elements), dtype=torch.float64))
        self.to(dtype)

    def _build(self, options: Options, n_elements: int) -> None:
        channels, act = options.channels, options.activation_function
        degree = options.first_degree
        native_spin = bool(options.use_spin)
        self.types = TypeEmbedding(n_elements, channels)
        self.charge_spin = ChargeSpinEmbedding(channels, act) if options.add_chg_spin_ebd else None
        self.spin = SpinEmbedding(n_elements, channels, act) if native_spin else None
        self.basis = RadialBasis(options.basis_type, options.n_radial, options.rcut, options.env_exp[0])
        hidden = tuple(width or channels for width in options.radial_mlp)
        self.radial = RadialNetwork(
            options.n_radial, hidden, (degree + 1) * channels, act, options.edge_norm, options.eps
        )
        self.environment = (
            EnvironmentSeed(
                n_elements,
                channels,
                options.n_radial,
                act,
                options.edge_norm,
                options.mlp_bias,
                options.eps,
                native_spin,
            )
            if options.use_env_seed
            else None
        )
        self.geometry = GeometricEmbedding(degree) if options.use_env_seed and degree else None
        self.trunk = Trunk(options)
        self.readout = Readout(options)
        self.head = EnergyHead(options)
        self.harmonics = SphericalHarmonics(degree)
        self.rotations = EdgeRotations(self.trunk.frame_shapes())

    def _register_masks(self, options: Options, symbols: list[str]) -> None:
        """Constants that depend on the element list: excluded pairs and elements, and who carries a spin."""
        place = {symbol: k for k, symbol in enumerate(symbols)}
        allowed = torch.ones(len(symbols), len(symbols), dtype=torch.bool)
        for first, second in options.exclude_types:
            if first in place and second in place:
                allowed[place[first], place[second]] = allowed[place[second], place[first]] = False
        counted = torch.tensor([symbol not in options.atom_exclude_types for symbol in symbols])
        magnetic = torch.tensor([symbol in options.use_spin for symbol in symbols])
        self.register_buffer("allowed_pairs", None if allowed.all() else allowed, persistent=False)
        self.register_buffer("counted_elements", None if counted.all() else counted, persistent=False)
        self.register_buffer("magnetic_elements", magnetic if magnetic.any() else None, persistent=False)

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any] | Options,
        elements: Iterable[str | int],
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> SeZM:
        """Build an untrained model from plain options; see `mlff.sezm.options.Options` for names and defaults.

        Raises:
            ValueError: an option is unknown or contradicts another, or an element is unknown.
        """
        if not isinstance(options, Options):
            options = Options.from_mapping(options)
        return cls(options, elements, seed, dtype)

    @classmethod
    def from_preset(
        cls,
        name: str,
        elements: Iterable[str | int] | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> SeZM:
        """Build an untrained model with the hyper-parameters of a preset; elements default to H-Og.

        `mlff.load(name)` gives the trained one.

        Raises:
            ValueError: there is no preset of that name, or an element is unknown.
        """
        from omegaconf import OmegaConf  # only a preset needs a reader of YAML

        with presets.open_yaml(name) as file:
            section = OmegaConf.to_container(OmegaConf.load(file).model)
        assert isinstance(section, dict)
        section = {str(key): value for key, value in section.items() if key != "elements"}
        return cls.from_options(section, chemistry.ALL_ELEMENTS if elements is None else elements, seed, dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the network; energies are summed in float64 whatever it is."""
        return self.types.weight.dtype

    def forward(self, graph: Graph, vectors: Float[Tensor, "E 3"] | None = None) -> Float[Tensor, "A"]:
        """Return the energy of each atom in eV, float64.

        `vectors` are the edge vectors in Å (float64); given by a caller who differentiates with respect to them,
        otherwise computed from the graph.

        Raises:
            ValueError: the graph holds an element that the model does not know (checked on the CPU only; elsewhere and
                in compiled code the energy of such an atom is NaN), or lacks a condition that the model reads.
        """
        row_of_number = self.get_buffer("row_of_number")
        species = row_of_number.index_select(0, graph.numbers)
        known = species >= 0
        if not (graph.numbers.is_cuda or host.traced()) and not bool(known.all()):
            strange = sorted(set(graph.numbers[~known].tolist()))
            raise ValueError(
                f"this model knows {chemistry.names(self.elements)}; the structure also has {chemistry.names(strange)}."
            )
        species = species.clamp_min(0)
        vectors = edge_vectors(graph) if vectors is None else vectors
        senders, receivers, vectors = self._allowed(graph, species, vectors)
        features, harmonics_and_frames, edges = self._edges(senders, receivers, vectors, graph.n_atoms)
        network = self._network(graph, species, features, harmonics_and_frames, edges)
        energies = network.to(torch.float64) + self.get_buffer("reference_energies").index_select(0, species)
        if self.options.bridging_method == "zbl":
            numbers = graph.numbers.to(torch.float64)
            pairs = bridging.zbl_energy(vectors, numbers.index_select(0, senders), numbers.index_select(0, receivers))
            energies = energies.index_add(0, receivers, 0.5 * pairs)
        if self._buffers["counted_elements"] is not None:
            counted = self.get_buffer("counted_elements").index_select(0, species)
            energies = torch.where(counted, energies, torch.zeros_like(energies))
        return torch.where(known, energies, torch.nan)

    def _allowed(self, graph: Graph, species: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return senders, receivers and vectors without the pairs of elements that the model excludes."""
        senders, receivers = graph.senders, graph.receivers
        if self._buffers["allowed_pairs"] is None:
            return senders, receivers, vectors
        allowed = self.get_buffer("allowed_pairs")
        kept = allowed[species.index_select(0, senders), species.index_select(0, receivers)].nonzero().squeeze(-1)
        return senders.index_select(0, kept), receivers.index_select(0, kept), vectors.index_select(0, kept)

    def _edges(
        self, senders: Tensor, receivers: Tensor, vectors: Tensor, n_atoms: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Edges]:
        """Return radial features ρ [E, L+1, C], (harmonics, frames), and the geometry of the edges."""
        options = self.options
        vectors = vectors.to(self.dtype)
        lengths = (vectors.square().sum(-1, keepdim=True) + options.eps**2).sqrt()
        gate = None
        if options.bridging_method == "zbl":
            inner, outer = options.bridging_r_inner, options.bridging_r_outer
            clamped = bridging.clamp_lengths(lengths, inner, outer)
            vectors = vectors * (clamped / lengths)
            lengths = clamped
            gate = bridging.sender_gate(lengths, senders, n_atoms, inner, outer)
        inverse_lengths = (vectors.square().sum(-1, keepdim=True) + options.eps**2).rsqrt()
        directions = vectors * inverse_lengths
        weight = envelope(lengths, options.rcut, options.env_exp[1])
        degree = weight.new_zeros(n_atoms, 1).index_add(0, receivers, weight.square())
        edges = Edges(
            n_atoms=n_atoms,
            senders=senders,
            receivers=receivers,
            directions=directions,
            lengths=lengths,
            inverse_lengths=inverse_lengths,
            weight=weight,
            gate=gate,
            inverse_sqrt_degree=(degree + DEGREE_FLOOR).rsqrt(),
            basis=self.basis(lengths),
        )
        radial = weight * self.radial(edges.basis)
        radial = radial.unflatten(-1, (options.first_degree + 1, options.channels))
        roll = None
        if self.training and options.random_gamma:
            roll = torch.rand_like(lengths.squeeze(-1)) * (2 * torch.pi)
        frames = edge_frames(directions, roll)
        return radial, (self.harmonics(directions), frames), edges

    def _network(
        self,
        graph: Graph,
        species: Tensor,
        radial: Tensor,
        harmonics_and_frames: tuple[Tensor, Tensor],
        edges: Edges,
    ) -> Float[Tensor, "A"]:
        """Return the energies of the network alone, in the model's own precision."""
        harmonics, frames = harmonics_and_frames
        types = self.types(species)
        if self.charge_spin is not None:
            charge, spin = self._conditions(graph)
            types = types + self.charge_spin(charge, spin).index_select(0, graph.structure)
        spins = self._spins(graph, species)
        if self.spin is not None and spins is not None:
            magnetic = self.get_buffer("magnetic_elements").index_select(0, species).to(types.dtype).unsqueeze(-1)
            types = types + magnetic * self.spin.scalars(spins)
        scalars = types if self.environment is None else self.environment(types, species, edges, spins)
        rows = (self.options.first_degree + 1) ** 2 - 1
        if self.geometry is not None:
            rest = self.geometry(harmonics, radial, edges)
        else:
            rest = scalars.new_zeros(graph.n_atoms, rows, scalars.shape[-1])
        if self.spin is not None and spins is not None and rows:
            rest = torch.cat((rest[:, :3] + self.spin.vectors(spins, species, edges), rest[:, 3:]), 1)
        x = torch.cat((scalars.unsqueeze(1), rest), 1)
        pair_types = types.index_select(0, edges.senders) + types.index_select(0, edges.receivers)
        features = radial + pair_types.unsqueeze(1)
        rotations = self.rotations(frames)
        with self._block_precision(x.device):
            x = self.trunk(x, features, rotations, edges)
        x = x.to(self.dtype)
        frame_parameters = graph.frame_parameters
        if frame_parameters is not None:
            frame_parameters = frame_parameters.index_select(0, graph.structure)
        return self.head(self.readout(x), frame_parameters, graph.atom_parameters)

    def _block_precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.block_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.block_dtype)

    def _conditions(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """Return charge and spin of each structure; a spin of 0 (not given) takes the model's default pair."""
        default = self.options.default_chg_spin
        if default is None:
            return graph.charge, graph.spin
        given = graph.spin != 0
        charge = torch.where(given, graph.charge, torch.full_like(graph.charge, default[0]))
        return charge, torch.where(given, graph.spin, torch.full_like(graph.spin, default[1]))

    def _spins(self, graph: Graph, species: Tensor) -> Tensor | None:
        """Return the spin vectors of the magnetic elements, zero elsewhere; None for a model without native spin."""
        if self.spin is None:
            return None
        if graph.spins is None:
            raise ValueError("this model reads the spin vector of each atom; give an array 'spins' of shape (N, 3)")
        magnetic = self.get_buffer("magnetic_elements").index_select(0, species)
        return graph.spins.to(self.dtype) * magnetic.to(self.dtype).unsqueeze(-1)

    def __deepcopy__(self, memo: dict[int, Any]) -> SeZM:
        """Copy the model with what its parameters say to the optimizer, which a plain copy forgets."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for old, new in zip(self.parameters(), copied.parameters(), strict=True):
            for name in OPTIMIZER_ATTRIBUTES:
                if hasattr(old, name):
                    setattr(new, name, getattr(old, name))
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the network; reference energies stay float64, since total energies reach 10⁴ eV an atom."""
        kept = self._buffers.get("reference_energies")
        super()._apply(fn, recurse)
        if kept is not None:
            device = self._buffers["reference_energies"].device  # type: ignore[union-attr]
            self._buffers["reference_energies"] = kept if device.type == "meta" else kept.to(device)
        return self
