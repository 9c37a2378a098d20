"""Training and running the SeZM (DPA4) machine-learned interatomic potential."""

__version__ = "0.1.0"
