"""Predictions without training: structures in, plain numbers out.

    mlff.predict("mini", [atoms, …])  ->  one Prediction for each structure, in their order

Structures are read by the same conversion as for training and differentiated by the same routine; here are only the
batches, the model's preparation, and the way from tensors to numpy. The ASE calculator uses the last two as well.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from mlff import checkpoint
from mlff.atoms import graph_from_atoms
from mlff.data.batch import collate
from mlff.derivatives import evaluate
from mlff.graph import BatchPrediction, Graph, Prediction

if TYPE_CHECKING:
    from ase import Atoms

VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
"""Places of the six numbers xx, yy, zz, yz, xz, xy in a symmetric tensor, in ASE's order."""


def predict(
    model: str | os.PathLike[str] | nn.Module,
    structures: Iterable[Atoms],
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    batch_atoms: int = 256,
    batch_edges: int = 8_000,
) -> list[Prediction]:
    """Return energies, forces and stresses of structures, one `Prediction` for each, in their order.

    Neighbouring structures are evaluated together while they fit into both budgets; a structure beyond a budget is
    evaluated by itself. Results do not depend on the budgets beyond rounding; memory does.

    Args:
        model: the name of a preset with weights, the path of a weights file, or a module.
        structures: ase.Atoms, in Å; energies are in eV, forces in eV/Å, stresses in eV/Å³.
        device: "auto" is the GPU where there is one; a module stays where it is.
        dtype: float32 or float64; by default float32, or what the module has.
        batch_atoms: atoms evaluated together, at most.
        batch_edges: directed edges evaluated together, at most. An edge takes about 0.03 MB with mini, 0.7 MB with pro.

    Raises:
        ValueError: the model has no weights or does not know an element (the message names structure and atom), a
            structure cannot be read, or `structures` is a single structure.
        FileNotFoundError: there is no such weights file.
    """
    if hasattr(structures, "positions"):
        raise ValueError("predict expects a list of structures, but got a single one; give [atoms]")
    if batch_atoms < 1 or batch_edges < 1:
        raise ValueError(f"batch_atoms and batch_edges must be positive; got {batch_atoms} and {batch_edges}")
    potential = prepared(model, device, dtype)
    place = device_of(potential)
    cutoff, elements = float(potential.cutoff), potential.elements  # type: ignore[arg-type]
    graphs = (
        graph_from_atoms(atoms, cutoff, elements=elements, where=f"structure {index}")  # type: ignore[arg-type]
        for index, atoms in enumerate(structures)
    )
    results: list[Prediction] = []
    for batch in _batches(graphs, batch_atoms, batch_edges):
        graph = collate(batch)
        results += plain(evaluate(potential, graph.to(place)), graph)
    return results


def prepared(
    model: str | os.PathLike[str] | nn.Module,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
) -> nn.Module:
    """Return a model for predictions alone: in evaluation mode and with frozen parameters.

    Frozen parameters keep nothing for a gradient that nobody asks for. A module is copied first: the caller's keeps its
    mode, its gradients and its place, and what is done to it later does not reach the copy.

    Args:
        model: the name of a preset with weights, the path of a weights file, or a module.
        device: "auto" is the GPU where there is one; a module stays where it is.
        dtype: float32 or float64; by default float32, or what the module has.

    Raises:
        ValueError: the preset has no weights, the file is not a model, or the dtype is another.
        FileNotFoundError: there is no such file.
    """
    # Tensors made in inference mode could never be differentiated through, even with respect to positions.
    with torch.inference_mode(False):
        if not isinstance(model, nn.Module):
            return checkpoint.load(model, device, "float32" if dtype is None else dtype).requires_grad_(False)
        potential = copy.deepcopy(model)
        if dtype is not None:
            if dtype not in (*checkpoint.DTYPES, *checkpoint.DTYPES.values()):
                raise ValueError(f"dtype must be {' or '.join(checkpoint.DTYPES)}; got {dtype!r}")
            potential = potential.to(checkpoint.DTYPES.get(str(dtype), dtype))  # type: ignore[arg-type]
        if device != "auto":
            potential = potential.to(device)
        return potential.eval().requires_grad_(False)


def device_of(potential: nn.Module) -> torch.device:
    """Return where a model's parameters are; the CPU for a model without any."""
    return next((parameter.device for parameter in potential.parameters()), torch.device("cpu"))


def plain(prediction: BatchPrediction, graph: Graph) -> list[Prediction]:
    """Return the predictions of a batch structure by structure, as Python and numpy numbers in float64.

    Stress becomes six numbers in ASE's order, or None where the structure has no volume.
    """
    counts = np.bincount(graph.structure.cpu().numpy(), minlength=graph.n_structures)
    ends = np.cumsum(counts)
    energy, energies, forces, stress, virial = (
        tensor.detach().cpu().to(torch.float64).numpy()
        for tensor in (
            prediction.energy,
            prediction.energies,
            prediction.forces,
            prediction.stress,
            prediction.virial,
        )
    )
    results = []
    for s, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True)):
        atoms = slice(end - count, end)
        six = np.array([stress[s][place] for place in VOIGT]) + 0.0  # no negative zeros
        results.append(
            Prediction(
                energy=float(energy[s]),
                energies=energies[atoms].copy(),
                forces=forces[atoms].copy(),
                stress=None if np.isnan(six).all() else six,
                virial=virial[s].copy(),
            )
        )
    return results


def _batches(graphs: Iterable[Graph], batch_atoms: int, batch_edges: int) -> Iterator[list[Graph]]:
    """Put neighbouring graphs together while both budgets hold. Reads no further ahead than one graph."""
    batch: list[Graph] = []
    atoms = edges = 0
    for graph in graphs:
        if batch and (atoms + graph.n_atoms > batch_atoms or edges + graph.n_edges > batch_edges):
            yield batch
            batch, atoms, edges = [], 0, 0
        batch.append(graph)
        atoms += graph.n_atoms
        edges += graph.n_edges
    if batch:
        yield batch
