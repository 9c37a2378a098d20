"""Labels of crystals from a teacher: SevenNet-0, an interatomic potential of others whose weights are free.

SevenNet-0 (11 July 2024; Park et al., J. Chem. Theory Comput. 2024, doi:10.1021/acs.jctc.4c00190) was trained on MPtrj:
PBE and PBE+U relaxations of the Materials Project. Code and weights are under the MIT licence and come with
`pip install "mlff[crystals]"`. What learns from its labels is distilled, and knows nothing that it does not.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from typing import Any

import numpy as np
from ase import Atoms

METHOD = "SevenNet-0 (11 July 2024), a potential trained on MPtrj (PBE, PBE+U): distilled labels, no DFT"
NAME = "7net-0"

Label = tuple[float, np.ndarray, np.ndarray]  # energy eV, forces (N, 3) eV/Å, stress (6,) eV/Å³ in ASE's order and sign


def check() -> None:
    """Raise ModuleNotFoundError unless the teacher is installed."""
    if importlib.util.find_spec("sevenn") is None:
        raise ModuleNotFoundError(
            'crystals are labelled by SevenNet, which is not installed. Install it with: pip install "mlff[crystals]"'
        )


@functools.cache
def _calculator() -> Any:
    check()
    from sevenn.calculator import SevenNetCalculator  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SevenNetCalculator(NAME, device="cpu")


def label(atoms: Atoms) -> Label:
    """Return energy, forces and stress of a periodic structure.

    Raises:
        ModuleNotFoundError: SevenNet is not installed.
    """
    calculator = _calculator()
    calculator.calculate(atoms, ["energy", "forces", "stress"])
    results = calculator.results
    return float(results["energy"]), np.asarray(results["forces"], dtype=float), np.asarray(results["stress"], float)
