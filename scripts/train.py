"""Train a preset's architecture from scratch.

    python scripts/train.py preset=neo data.train=mine.xyz

The same as `mlff train`; --help lists the keys. The model knows the elements of its data, or `model.elements`.
"""

import sys

from mlff.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
