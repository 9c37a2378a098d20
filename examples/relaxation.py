"""Relax a molecule to the minimum of its energy.

python examples/relaxation.py                    # acetic acid, with preset mini
python examples/relaxation.py my.safetensors     # with a model of yours
"""

from __future__ import annotations

import sys

from ase.build import molecule
from ase.optimize import BFGS

import mlff


def main() -> None:
    """Relax acetic acid until no force exceeds 0.01 eV/Å."""
    model = sys.argv[1] if len(sys.argv) > 1 else "mini"
    atoms = molecule("CH3COOH")
    atoms.calc = mlff.Calculator(model)
    print(f"start    {atoms.get_potential_energy():.4f} eV, largest force {abs(atoms.get_forces()).max():.3f} eV/Å")
    optimizer = BFGS(atoms, logfile=None)
    done = optimizer.run(fmax=0.01, steps=300)
    print(f"minimum  {atoms.get_potential_energy():.4f} eV, largest force {abs(atoms.get_forces()).max():.3f} eV/Å")
    state = "converged" if done else "not converged"
    print(f"{state} after {optimizer.nsteps} steps; C=O {atoms.get_distance(0, 1):.3f} Å")


if __name__ == "__main__":
    main()
