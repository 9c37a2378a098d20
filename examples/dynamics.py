"""Molecular dynamics: a thermostat brings ethanol to 300 K, then its energy is conserved without one.

python examples/dynamics.py                      # with preset mini
python examples/dynamics.py my.safetensors       # with a model of yours
"""

from __future__ import annotations

import sys

import numpy as np
from ase import units
from ase.build import molecule
from ase.md.langevin import Langevin
from ase.md.verlet import VelocityVerlet

import mlff

TIMESTEP = 0.5 * units.fs  # a twentieth of the period of an O-H stretch


def main() -> None:
    """Run 800 steps of Langevin and 200 steps of constant energy, and say how well the energy is conserved."""
    model = sys.argv[1] if len(sys.argv) > 1 else "mini"
    atoms = molecule("CH3CH2OH")
    atoms.calc = mlff.Calculator(model)
    random = np.random.RandomState(0)

    thermostat = Langevin(atoms, TIMESTEP, temperature_K=300, friction=0.05 / units.fs, rng=random, fixcm=False)
    temperatures = []
    thermostat.attach(lambda: temperatures.append(atoms.get_temperature()))
    thermostat.run(800)
    mean = np.mean(temperatures[400:])  # nine atoms: it fluctuates by 80 K around its mean
    print(f"Langevin dynamics: {mean:.0f} K on average, total energy now {atoms.get_total_energy():.4f} eV")

    free = VelocityVerlet(atoms, TIMESTEP)
    energies = []
    free.attach(lambda: energies.append(atoms.get_total_energy()))
    free.run(200)
    spread = (max(energies) - min(energies)) / len(atoms)
    print(f"constant energy: the same within {1000 * spread:.3f} meV/atom over 200 steps")


if __name__ == "__main__":
    main()
