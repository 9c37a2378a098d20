"""Errors of a model on labelled structures: a table, summary.csv, structures.csv, parity.png.

    python scripts/evaluate.py weights=runs/x/model.safetensors data.test=test.xyz

The same as `mlff evaluate`; --help lists the keys.
"""

import sys

from mlff.cli import evaluate

if __name__ == "__main__":
    sys.exit(evaluate(sys.argv[1:]))
