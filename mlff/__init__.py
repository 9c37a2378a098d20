"""Training and running the SeZM (DPA4) machine-learned interatomic potential.

    import mlff
    atoms.calc = mlff.Calculator("mini")

Names are loaded when they are first used, so that importing the package is quick and needs neither ASE nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mlff.calculator import Calculator
    from mlff.checkpoint import load, save
    from mlff.graph import Prediction
    from mlff.prediction import predict
    from mlff.presets import names
    from mlff.sezm.potential import SeZM
    from mlff.training import finetune

_HOMES = {
    "Calculator": "mlff.calculator",
    "Prediction": "mlff.graph",
    "SeZM": "mlff.sezm.potential",
    "finetune": "mlff.training",
    "load": "mlff.checkpoint",
    "names": "mlff.presets",
    "predict": "mlff.prediction",
    "save": "mlff.checkpoint",
}

__all__ = ["Calculator", "Prediction", "SeZM", "__version__", "finetune", "load", "names", "predict", "save"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mlff' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
