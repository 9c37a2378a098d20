"""Pretrain a preset from scratch, and put its weights beside its configuration.

    python scripts/make_dataset.py what=pretraining output=pretraining
    python scripts/pretrain.py preset=mini                                 # on pretraining/, with the preset's recipe
    python scripts/pretrain.py preset=nano training.steps=50000 output=runs/nano

All keys are those of `mlff train`. The weights go to presets/<name>.safetensors of this checkout.
"""

import shutil
import sys
from pathlib import Path

from mlff import cli

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
        shutil.copyfile(model, target)
        print(f"Copied to {target}.")

    return cli.train(words, keep)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
