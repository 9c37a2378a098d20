"""Compare a model with the labels of a file: errors of energy and forces.

    python examples/evaluation.py mini test.xyz
    python examples/evaluation.py runs/x/model.safetensors test.xyz

`mlff evaluate` does this with tables by group and element, and pictures; here is what it takes by hand.
"""

from __future__ import annotations

import sys

import numpy as np
from ase.io import read

import mlff


def main() -> None:
    """Print mean absolute errors per atom and per force component."""
    model, path = sys.argv[1:3]
    structures = read(path, ":")
    assert isinstance(structures, list)
    results = mlff.predict(model, structures)
    energy_errors, force_errors = [], []
    for atoms, found in zip(structures, results, strict=True):
        energy_errors.append((found.energy - atoms.get_potential_energy()) / len(atoms))
        force_errors.append((found.forces - atoms.get_forces()).ravel())
    print(f"{len(structures)} structures")
    print(f"energy MAE  {1000 * np.abs(energy_errors).mean():8.2f} meV/atom")
    print(f"forces MAE  {1000 * np.abs(np.concatenate(force_errors)).mean():8.2f} meV/Å")


if __name__ == "__main__":
    main()
