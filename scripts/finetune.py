"""Fine-tune a preset on your own structures.

    python scripts/finetune.py preset=pro                                   # on the embedded data set
    python scripts/finetune.py preset=mini data.train=mine.xyz training.steps=5000

The same as `mlff finetune`; --help lists the keys.
"""

import sys

from mlff.cli import finetune

if __name__ == "__main__":
    sys.exit(finetune(sys.argv[1:]))
