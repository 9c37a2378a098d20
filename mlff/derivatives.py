"""Forces, virial and stress as derivatives of the energy.

The model knows only energies. This module makes the edge vectors a leaf, asks for the energy, and differentiates it
once; everything else is a sum of g_e = ∂E/∂v_e over edges. Training and the calculator both come through here, so that
there is one sign convention:

    forces = -dE/dr                F_k = Σ_{e: receiver k} g_e - Σ_{e: sender k} g_e      eV/Å
    virial = -dE/d(strain)         = -Σ_e g_e ⊗ v_e                                        eV
    stress = -sym(virial) / V      positive when the structure pulls inwards, as in ASE    eV/Å³

The virial is symmetric because the energy does not change under rotations; only fixed spin vectors break that.

Source: Fan et al., Phys. Rev. B 92, 094301 (2015), for the virial of many-body potentials by pair vectors.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from mlff.graph import BatchPrediction, Graph
from mlff.sezm.potential import edge_vectors


@runtime_checkable
class Potential(Protocol):
    """Anything that gives the energies of atoms from a graph and its edge vectors."""

    def __call__(self, graph: Graph, vectors: Tensor | None = None) -> Float[Tensor, "A"]:
        """Return the energy of each atom in eV."""
        ...


def evaluate(potential: Potential, graph: Graph, create_graph: bool = False) -> BatchPrediction:
    """Return energies, forces, virials and stresses of the structures of a graph.

    With `create_graph` the results can be differentiated with respect to the model's parameters, as a loss on forces
    needs; otherwise they are detached. Works inside `torch.no_grad` and `torch.inference_mode` too. Spin vectors,
    where the graph has them, give magnetic forces.
    """
    with torch.inference_mode(False), torch.enable_grad():
        graph = _ordinary(graph)
        prediction = with_stress(derivatives(potential, graph, create_graph), graph)
    return prediction if create_graph else _detached(prediction)


class Derivatives(NamedTuple):
    """Energies and their derivatives, in the units of `BatchPrediction`; stress alone is not among them."""

    energy: Float[Tensor, "S"]
    energies: Float[Tensor, "A"]
    forces: Float[Tensor, "A 3"]
    virial: Float[Tensor, "S 3 3"]
    magnetic_forces: Float[Tensor, "A 3"] | None


def derivatives(potential: Potential, graph: Graph, create_graph: bool) -> Derivatives:
    """Return energies, forces and virials: the part of `evaluate` that can be traced. Gradients must be enabled."""
    vectors = edge_vectors(graph).detach().requires_grad_()
    leaves = [vectors]
    if graph.spins is not None:
        graph = dataclasses.replace(graph, spins=graph.spins.detach().requires_grad_())
        leaves.append(graph.spins)  # type: ignore[arg-type]
    energies = potential(graph, vectors)
    gradients = torch.autograd.grad(
        energies.sum(), leaves, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    slope = gradients[0]  # ∂E/∂v, [E, 3] in eV/Å
    forces = torch.zeros_like(graph.positions).index_add(0, graph.receivers, slope)
    forces = forces.index_add(0, graph.senders, -slope)
    pair_virial = -slope.unsqueeze(-1) * vectors.detach().unsqueeze(-2)
    structure = graph.structure.index_select(0, graph.receivers)
    virial = vectors.new_zeros(graph.n_structures, 3, 3).index_add(0, structure, pair_virial)
    energy = energies.new_zeros(graph.n_structures).index_add(0, graph.structure, energies)
    return Derivatives(energy, energies, forces, virial, -gradients[1] if len(gradients) > 1 else None)


def with_stress(found: Derivatives, graph: Graph) -> BatchPrediction:
    """Return what `derivatives` gave with the stress that follows from it: NaN where there is no volume."""
    energy, energies, forces, virial, magnetic = found
    volume = graph.volumes
    known = (graph.pbc.any(-1) & (volume > 0))[:, None, None]
    # NaN comes last: divided by, it would be in the gradient of all structures of the batch.
    stress = -0.5 * (virial + virial.transpose(1, 2)) / torch.where(known, volume[:, None, None], 1.0)
    return BatchPrediction(energy, energies, forces, virial, torch.where(known, stress, torch.nan), magnetic)


def _ordinary(graph: Graph) -> Graph:
    """Return the graph with tensors that autograd can save, also when it was made in inference mode."""
    tensors = {f.name: getattr(graph, f.name) for f in dataclasses.fields(graph)}
    if not any(isinstance(value, Tensor) and value.is_inference() for value in tensors.values()):
        return graph
    return Graph(**{name: value.clone() if isinstance(value, Tensor) else value for name, value in tensors.items()})


def _detached(prediction: BatchPrediction) -> BatchPrediction:
    tensors: dict[str, Tensor] = {
        field.name: value.detach()
        for field in dataclasses.fields(prediction)
        if isinstance(value := getattr(prediction, field.name), Tensor)
    }
    return BatchPrediction(**tensors)
