"""The model as a calculator of ASE: relaxation, molecular dynamics, phonons, whatever ASE drives.

    atoms.calc = mlff.Calculator("mini")
    atoms.get_potential_energy()        # eV
    atoms.get_forces()                  # eV/Å
    atoms.get_stress()                  # eV/Å³, xx yy zz yz xz xy, positive when the cell pulls inwards

Structures are read by `mlff.atoms`, as for training, and differentiated by `mlff.derivatives`, as for training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import CalculationFailed, PropertyNotImplementedError, all_changes
from ase.calculators.calculator import Calculator as AseCalculator
from torch import nn

from mlff.atoms import graph_from_atoms
from mlff.compiled import CompiledEvaluation
from mlff.derivatives import evaluate
from mlff.graph import BatchPrediction, Graph
from mlff.prediction import device_of, plain, prepared
from mlff.recorded import RecordedEvaluation, cuda_record

_CONDITIONS_INFO = ("charge", "spin")
_CONDITIONS_ARRAYS = ("spins",)


class Calculator(AseCalculator):
    """Energy, energies of atoms, forces and stress of a SeZM model for ASE.

    One call of the model gives all properties; they are kept until positions, cell, numbers, periodicity,
    `atoms.info["charge"]`, `atoms.info["spin"]` or `atoms.arrays["spins"]` change. Charge, spin multiplicity and spin
    vectors matter only to models that are conditioned on them.

    `free_energy` equals `energy`. Stress exists where at least one axis is periodic and the lattice vectors span a
    volume; elsewhere `get_stress` raises ASE's PropertyNotImplementedError. The cell of a structure without periodic
    axes is ignored. Results are Python and numpy numbers.

    Nothing of the process changes: default dtype, precision of matrix products, gradient mode and random numbers stay
    as they are. Where the user has switched on TF32, a float32 model on a GPU uses it.
    """

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]  # noqa: RUF012  ASE's form
    nolabel = True

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module = "mini",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
        compile: bool | Literal["auto"] = "auto",
    ) -> None:
        """Load a model, or copy one.

        Args:
            model: the name of a preset with weights, the path of a weights file, or a module. A module is copied: it
                keeps its mode and its gradients, and training it further does not change this calculator.
            device: "auto" is the GPU where there is one; a module stays where it is.
            dtype: float32 or float64; by default float32, or what the module has. Energies are summed in float64.
            compile: "auto" records calculations on a GPU as CUDA graphs, one for each of a few sizes, when a size comes
                for the second time: several times faster for small systems. False runs each operation by itself. True
                compiles energy and derivatives for any size with torch.compile: the first calculation takes minutes.

        Raises:
            ValueError: the preset has no weights, the file is not a model, or dtype or compile is another.
            FileNotFoundError: there is no such file.
        """
        super().__init__()
        if compile not in ("auto", True, False):
            raise ValueError(f'compile must be "auto", True or False; got {compile!r}')
        self.potential = prepared(model, device, dtype)
        self.device = device_of(self.potential)
        self.compile = compile
        self._evaluate = self._made()

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Compute all properties of a structure, whichever were asked for, into `results`.

        Raises:
            ValueError: the model does not know an element (the message names it and the atom), or the structure cannot
                be read, as with two atoms at the same place.
            CalculationFailed: the model's energy or forces are not finite.
            CannotCompile: `compile` is True, and the compiler gave up.
        """
        super().calculate(atoms, list(properties), list(system_changes))
        self.results = {}
        assert self.atoms is not None
        cutoff, elements = float(self.potential.cutoff), self.potential.elements  # type: ignore[arg-type]
        graph = graph_from_atoms(self.atoms, cutoff, elements=elements)  # type: ignore[arg-type]
        (prediction,) = plain(self._evaluate(graph.to(self.device)), graph)
        if not (np.isfinite(prediction.energy) and np.isfinite(prediction.forces).all()):
            raise CalculationFailed(
                f"the model gives no finite energy and forces for this structure (energy {prediction.energy} eV); "
                "check it for atoms far too close to each other, or a simulation for too long a time step"
            )
        self.results = {
            "energy": prediction.energy,
            "free_energy": prediction.energy,
            "energies": prediction.energies,
            "forces": prediction.forces,
        }
        if prediction.stress is not None:
            self.results["stress"] = prediction.stress

    def get_property(self, name: str, atoms: Atoms | None = None, allow_calculation: bool = True) -> Any:
        """Return one property, from the last calculation where the structure is the same.

        Raises:
            PropertyNotImplementedError: it is none of `implemented_properties`, or a stress without a volume.
        """
        structure = self.atoms if atoms is None else atoms
        if name == "stress" and allow_calculation and structure is not None and not _has_volume(structure):
            raise PropertyNotImplementedError(
                "stress needs a volume: at least one periodic axis and three lattice vectors that span a cell; this "
                f"structure has pbc {structure.pbc.tolist()} and a cell of {abs(structure.cell.volume):g} Å³"
            )
        return super().get_property(name, atoms, allow_calculation)

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Return what has changed since the last calculation, with "info" for charge and spin."""
        changes = list(super().check_state(atoms, tol=tol))
        if self.atoms is not None and not _same_conditions(atoms, self.atoms):
            changes.append("info")
        return changes

    def _get_name(self) -> str:
        return "mlff"

    def _made(self) -> Callable[[Graph], BatchPrediction]:
        if self.compile == "auto" and self.device.type == "cuda":
            return RecordedEvaluation(self.potential, float(self.potential.cutoff), cuda_record)  # type: ignore[arg-type]
        if self.compile is True:
            return CompiledEvaluation(self.potential)
        return functools.partial(evaluate, self.potential)

    def __getstate__(self) -> dict[str, Any]:
        """Leave compiled code and recordings out of pickles and copies; it is made again where it is needed."""
        return {name: value for name, value in self.__dict__.items() if name != "_evaluate"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self._evaluate = self._made()


def _has_volume(atoms: Atoms) -> bool:
    return bool(np.any(atoms.pbc) and abs(atoms.cell.volume) > 0.0)


def _same_conditions(one: Atoms, other: Atoms) -> bool:
    pairs = [(one.info.get(name), other.info.get(name)) for name in _CONDITIONS_INFO]
    pairs += [(one.arrays.get(name), other.arrays.get(name)) for name in _CONDITIONS_ARRAYS]
    return all(np.array_equal(np.asarray(a, dtype=object), np.asarray(b, dtype=object)) for a, b in pairs)
