"""The loss, and the errors by which a model is judged.

With Δ the difference between prediction and label, N the atoms of a structure, V its virial (-volume · stress, in eV),

    loss = w_energy · mean |ΔE|/N  +  w_forces · mean ‖ΔF‖  +  w_stress · mean |ΔV|/N

The means are over labelled structures, labelled atoms, and the nine components of labelled structures. The virial per
atom, rather than the stress, stands in the last term, so that it has the unit of the first (eV/atom) and its weight
means the same for dense and for dilute matter; the weights 20, 20, 5 of the published recipe belong to this form. With
`kind="mse"` each absolute value or norm is squared; with `kind="huber"` it is replaced by Huber's function of it.

A label that is missing, NaN or infinite adds neither to a sum nor to its count. It is left out before anything is
computed from it: 0 · NaN is NaN, in the gradient too. If one component of a force or of a stress is missing, that
atom's force or that structure's stress is. Everything here is float64.

Source: the terms are those with which DPA4 models are published (deepmd-kit's `ener` loss, kind `mae`, force norm).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mlff import ranks
from mlff.config import LossConfig
from mlff.graph import BatchPrediction, Graph, Targets


@dataclass(frozen=True)
class Differences:
    """Prediction minus label where there is a label, zero where there is none."""

    energy: Float[Tensor, "S"]  # eV/atom
    forces: Float[Tensor, "A 3"]  # eV/Å
    stress: Float[Tensor, "S 3 3"]  # eV/Å³
    virial: Float[Tensor, "S 3 3"]  # eV/atom
    has_energy: Bool[Tensor, "S"]
    has_forces: Bool[Tensor, "A"]
    has_stress: Bool[Tensor, "S"]
    structure_weight: Float[Tensor, "S"]
    atom_weight: Float[Tensor, "A"]  # the weight of the atom's structure


def differences(prediction: BatchPrediction, targets: Targets, graph: Graph) -> Differences:
    """Compare a prediction with its labels; a stress label counts only where all three axes repeat."""
    atoms = torch.zeros(graph.n_structures, dtype=torch.float64, device=graph.positions.device)
    atoms = atoms.index_add(0, graph.structure, torch.ones_like(graph.positions[:, 0], dtype=torch.float64)).clamp_min(
        1
    )
    has_energy, has_forces, has_stress = _known(targets, graph)
    virial = -graph.volumes[:, None, None] * targets.stress
    weight = targets.weight.double()
    return Differences(
        energy=_difference(prediction.energy, targets.energy, has_energy) / atoms,
        forces=_difference(prediction.forces, targets.forces, has_forces[:, None]),
        stress=_difference(prediction.stress, targets.stress, has_stress[:, None, None]),
        virial=_difference(prediction.virial, virial, has_stress[:, None, None]) / atoms[:, None, None],
        has_energy=has_energy,
        has_forces=has_forces,
        has_stress=has_stress,
        structure_weight=weight,
        atom_weight=weight[graph.structure],
    )


def _difference(prediction: Tensor, label: Tensor, known: Tensor) -> Tensor:
    # Zeros go in before the subtraction, on both sides, so that no NaN ever meets a gradient.
    zero = torch.zeros((), dtype=torch.float64, device=label.device)
    return torch.where(known, prediction.double(), zero) - torch.where(known, label.double(), zero)


def loss_terms(differences: Differences, config: LossConfig) -> Float[Tensor, "3 2"]:
    """Return the weighted sum and the sum of weights of the energy, force and stress term, in this order."""
    size = _SIZES[config.kind]
    d, delta = differences, config.huber_delta
    energy = size(d.energy.abs(), delta)
    forces = size(torch.linalg.vector_norm(d.forces, dim=-1), delta)
    stress = size(d.virial.abs(), delta).mean((-2, -1))
    rows = []
    for values, known, weight in (
        (energy, d.has_energy, d.structure_weight),
        (forces, d.has_forces, d.atom_weight),
        (stress, d.has_stress, d.structure_weight),
    ):
        counted = weight * known
        rows.append(torch.stack([(counted * values).sum(), counted.sum()]))
    return torch.stack(rows)


def loss(
    terms: Float[Tensor, "3 2"], config: LossConfig, counts: Float[Tensor, "3"] | None = None
) -> Float[Tensor, ""]:
    """Return the weighted sum of the means of `loss_terms`; a term without any label is absent.

    `counts`, where given, are the sums of weights by which the means are taken: those of a whole batch of which `terms`
    are a part, so that the parts' losses add up to the loss of the whole.
    """
    sums, own = terms.unbind(-1)
    counts = own if counts is None else counts
    energy, forces, stress = (sums / torch.where(counts > 0, counts, 1.0)).unbind()
    return config.energy * energy + config.forces * forces + config.stress * stress


def label_counts(targets: Targets, graph: Graph) -> Float[Tensor, "3"]:
    """Return the sums of weights of `loss_terms`, which do not depend on the prediction."""
    known = _known(targets, graph)
    weight = targets.weight.double()
    atoms = weight.index_select(0, graph.structure)
    return torch.stack([(weight * known[0]).sum(), (atoms * known[1]).sum(), (weight * known[2]).sum()])


def _known(targets: Targets, graph: Graph) -> tuple[Bool[Tensor, "S"], Bool[Tensor, "A"], Bool[Tensor, "S"]]:
    """Which structures have an energy, which atoms forces, which structures a stress."""
    stress = targets.stress.isfinite().flatten(1).all(-1) & graph.pbc.all(-1) & (graph.volumes > 0)
    return targets.energy.isfinite(), targets.forces.isfinite().all(-1), stress


def _huber(x: Tensor, delta: float) -> Tensor:
    return torch.where(x <= delta, 0.5 * x.square(), delta * (x - 0.5 * delta))


_SIZES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mae": lambda x, delta: x,
    "mse": lambda x, delta: x.square(),
    "huber": _huber,
}

ERROR_NAMES: tuple[str, ...] = (
    "energy_mae_per_atom",
    "energy_rmse_per_atom",
    "forces_mae",
    "forces_rmse",
    "forces_norm_mae",
    "stress_mae",
    "stress_rmse",
)
"""The errors, in the order of tables: eV/atom, eV/Å by component, eV/Å by atom, eV/Å³ by component."""


class ErrorSums:
    """Sums from which the errors of a whole set follow, whatever batches or processes it was cut into.

    All is kept in one float64 tensor on the device of the batches; nothing waits for the device before `compute`.
    Weights of structures count in the loss, not in the errors.
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self._sums: Float[Tensor, "N"] | None = None

    def update(self, differences: Differences, terms: Float[Tensor, "3 2"] | None = None) -> None:
        """Add a batch; `terms` are those of `loss_terms`, when they are at hand."""
        self.add(error_sums(differences, loss_terms(differences, self.config) if terms is None else terms))

    def add(self, sums: Float[Tensor, "16"]) -> None:
        """Add the `error_sums` of a batch."""
        self._sums = sums.clone() if self._sums is None else self._sums + sums

    def compute(self, alone: bool = False) -> dict[str, float]:
        """Return `loss` and the errors of ERROR_NAMES over all batches and ranks; NaN where there is no label.

        In a run on several ranks every one must call this at the same time, and all get the same numbers; unless
        `alone`, which counts the batches of this rank only.
        """
        sums = torch.zeros(16, dtype=torch.float64) if self._sums is None else self._sums
        if not alone:
            sums = ranks.total(sums)
        e, e2, n_e, f, f2, norm, n_f, s, s2, n_s = sums[:10].tolist()
        values = (
            _ratio(e, n_e),
            _ratio(e2, n_e) ** 0.5,
            _ratio(f, 3 * n_f),
            _ratio(f2, 3 * n_f) ** 0.5,
            _ratio(norm, n_f),
            _ratio(s, 9 * n_s),
            _ratio(s2, 9 * n_s) ** 0.5,
        )
        total = float(loss(sums[10:].reshape(3, 2), self.config))
        return {"loss": total, **dict(zip(ERROR_NAMES, values, strict=True))}

    def any(self) -> bool:
        """Whether a batch was added since the last reset."""
        return self._sums is not None

    def reset(self) -> None:
        """Forget all batches."""
        self._sums = None


@torch.no_grad()
def error_sums(differences: Differences, terms: Float[Tensor, "3 2"]) -> Float[Tensor, "16"]:
    """Return what `ErrorSums` keeps of a batch: sums and counts of each error, then the terms of the loss."""
    d = differences
    sums = torch.stack(
        [
            d.energy.abs().sum(),
            d.energy.square().sum(),
            d.has_energy.sum().double(),
            d.forces.abs().sum(),
            d.forces.square().sum(),
            torch.linalg.vector_norm(d.forces, dim=-1).sum(),
            d.has_forces.sum().double(),
            d.stress.abs().sum(),
            d.stress.square().sum(),
            d.has_stress.sum().double(),
        ]
    )
    return torch.cat([sums, terms.detach().flatten()]).detach()


def _ratio(total: float, count: float) -> float:
    return total / count if count > 0 else float("nan")
