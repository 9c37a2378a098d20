"""The direction of imports: which file may know of which, and which library."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for folder in ("mlff", "kernels", "presets") for p in (ROOT / folder).rglob("*.py"))

# A library may be imported by these files alone.
LIBRARIES = {
    "lightning": {"mlff/training.py", "mlff/distributed.py", "mlff/data/module.py"},
    "triton": {path.relative_to(ROOT).as_posix() for path in FILES if path.name.endswith("_triton.py")}
    | {"kernels/launch.py"},
    "tblite": {"mlff/data/generate.py"},
    "rdkit": {"mlff/data/generate.py", "mlff/data/molecules.py"},
}
# Nothing but scripts, tests, the command line and the lazy names of the package imports these.
LEAVES = {"mlff.training", "mlff.calculator", "mlff.cli", "mlff.benchmark"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere, by its full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_arrows(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    found = imports(path)
    roots = {module.split(".")[0] for module in found}
    for library, allowed in LIBRARIES.items():
        assert library not in roots or name in allowed, f"{name} must not import {library}"
    ours = {module for module in found if module.split(".")[0] == "mlff"}
    if name.startswith("kernels/"):
        assert all(module == "mlff" or module.startswith("mlff.kernels") for module in ours)
    if name.startswith("presets/"):
        assert not ours
        assert roots <= sys.stdlib_module_names
    if name.startswith("mlff/sezm/"):
        allowed = ("mlff.sezm", "mlff.kernels", "mlff.graph", "mlff.elements", "mlff.presets")
        assert all(module == "mlff" or module.startswith(allowed) for module in ours), ours
        assert "ase" not in roots
    if name not in ("mlff/cli.py", "mlff/__init__.py", "mlff/benchmark.py"):
        assert not ours & (LEAVES - {f"mlff.{path.stem}"}), f"{name} must not import {ours & LEAVES}"


def test_importing_the_package_is_light() -> None:
    """`import mlff`, its model and its calculator's name load neither Lightning nor Triton nor a plotting library."""
    program = (
        "import sys, mlff, mlff.kernels, mlff.presets, mlff.sezm.potential, mlff.derivatives, mlff.checkpoint\n"
        "heavy = {'lightning', 'pytorch_lightning', 'matplotlib', 'ase', 'rdkit', 'tblite'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert 'triton' not in {name for name in sys.modules if 'mlff' in name}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
