"""The wheel holds what the checkout holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked(folder: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of files to compare with")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in sorted(
        set().union(*map(tracked, ("mlff", "kernels", "presets", "pyproject.toml", "README.md", "LICENSE")))
    ):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        ".",
    ]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


@pytest.mark.parametrize(
    ("folder", "package"), [("mlff", "mlff"), ("kernels", "mlff/kernels"), ("presets", "mlff/presets")]
)
def test_every_file_is_in_the_wheel(wheel: set[str], folder: str, package: str) -> None:
    expected = {package + name.removeprefix(folder) for name in tracked(folder)}
    assert expected
    assert not expected - wheel, f"missing from the wheel: {sorted(expected - wheel)}"
