"""Pretrain a preset from scratch, and put its weights beside its configuration.

    python scripts/make_dataset.py what=pretraining output=pretraining
    python scripts/pretrain.py preset=mini                                 # on pretraining/, with the preset's recipe
    python scripts/pretrain.py preset=nano training.steps=50000 output=runs/nano

All keys are those of `mlff train`. The weights go to presets/<name>.safetensors of this checkout; matrices of large
presets are rounded to bfloat16 there.
"""

import sys
from pathlib import Path

import torch

from mlff import checkpoint, cli

LARGE = 4_000_000  # parameters
PRESETS = Path(__file__).resolve().parents[1] / "presets"
DATA = {
    "data.train": "pretraining/train-*.h5",
    "data.valid": "pretraining/valid.h5",
    "data.test": "pretraining/test.h5",
}


def main(arguments: list[str]) -> int:
    """Train, then copy the best model; return the exit code."""
    given = {word.partition("=")[0] for word in arguments}
    words = [*arguments, *(f"{key}={value}" for key, value in DATA.items() if key not in given)]
    name = next((word.removeprefix("preset=") for word in arguments if word.startswith("preset=")), None)

    def keep(model: Path) -> None:
        target = PRESETS / f"{name}.safetensors"
        header, potential = checkpoint.read_header(model), checkpoint.load(model, "cpu", dtype=None)
        large = sum(parameter.numel() for parameter in potential.parameters()) > LARGE
        said = {name: text for name, text in header.items() if name not in checkpoint.HEADER}
        checkpoint.save(potential, target, matrices=torch.bfloat16 if large else None, **said)
        print(f"Copied to {target}.")

    return cli.train(words, keep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
