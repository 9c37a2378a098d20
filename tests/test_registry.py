"""Public checkpoints by name: licence, checksum, no network, several processes at once."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from mlff import checkpoint, registry
from mlff.cli import main

CONTENT = bytes(range(256)) * 64
NAME = "DPA4-Neo-OMat24-v20260805"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of checkpoints, and an entry whose file is CONTENT."""
    monkeypatch.setenv("MLFF_CHECKPOINTS", str(tmp_path / "checkpoints"))
    known = dataclasses.replace(registry.ENTRIES[NAME], sha256=hashlib.sha256(CONTENT).hexdigest(), size=len(CONTENT))
    monkeypatch.setitem(registry.ENTRIES, NAME, known)
    return tmp_path / "checkpoints" / f"{NAME}.pt"


def brings(content: bytes = CONTENT) -> registry.Download:
    """A double of the hub that has one file."""

    def download(entry: registry.Entry, folder: Path) -> Path:
        path = folder / entry.filename
        path.write_bytes(content)
        return path

    return download


def refuses(entry: registry.Entry, folder: Path) -> Path:
    raise ConnectionError("no route to host")


def test_entries_are_complete() -> None:
    """Every entry has an address and a licence; a checksum, where one is known, is one."""
    assert NAME in registry.names()
    for name, entry in registry.ENTRIES.items():
        assert entry.name == name
        assert entry.address == f"https://huggingface.co/{entry.repository}/resolve/main/{name}.pt"
        assert entry.licence == "CC-BY-NC-4.0"
        assert entry.sha256 is None or (len(entry.sha256) == 64 and int(entry.sha256, 16) > 0)
    known = [entry.sha256 for entry in registry.ENTRIES.values() if entry.sha256]
    assert len(set(known)) == len(known) == 5


def test_rp8_fetched_once_then_read_from_the_folder(place: Path) -> None:
    for name in (NAME, NAME.lower(), f"{NAME}.pt"):
        assert registry.fetch(name, "cc-by-nc", brings()) == place
    assert place.read_bytes() == CONTENT
    assert registry.fetch(NAME, "cc-by-nc", refuses) == place  # no network needed any more
    assert os.listdir(place.parent) == [place.name]


def test_a_licence_without_commercial_use_must_be_accepted(place: Path) -> None:
    for answer in (None, "yes"):
        with pytest.raises(ValueError, match=r"CC-BY-NC-4\.0, which excludes commercial use.*accept_license=cc-by-nc"):
            registry.fetch(NAME, answer, brings())
    assert not place.exists()


def test_rp8_without_a_network_address_and_path_are_named(place: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        registry.fetch(NAME, "cc-by-nc", refuses)
    words = str(caught.value)
    assert registry.entry(NAME).address in words
    assert str(place) in words
    assert "no route to host" in words
    assert os.listdir(place.parent) == []


def test_rp8_a_truncated_file_in_the_folder_is_refused(place: Path) -> None:
    place.parent.mkdir()
    place.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match=r"SHA-256 is \w+, expected \w+ \(16,383 of 16,384 bytes\).*Remove it"):
        registry.fetch(NAME, "cc-by-nc", brings())


def test_rp8_what_was_fetched_wrongly_is_not_kept(place: Path) -> None:
    with pytest.raises(ValueError, match="is not DPA4-Neo"):
        registry.fetch(NAME, "cc-by-nc", brings(CONTENT[:-1]))
    assert os.listdir(place.parent) == []


def test_without_a_published_checksum_the_first_one_holds(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENTRIES, NAME, dataclasses.replace(registry.entry(NAME), sha256=None))
    assert registry.fetch(NAME, "cc-by-nc", brings()) == place
    assert registry.fetch(NAME, "cc-by-nc", refuses) == place
    place.write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="is not DPA4-Neo"):
        registry.fetch(NAME, "cc-by-nc", refuses)
    place.unlink()
    with pytest.raises(ValueError, match="is not DPA4-Neo"):  # also when it is fetched again
        registry.fetch(NAME, "cc-by-nc", brings(CONTENT[::-1]))


def test_unknown_names_get_the_nearest(place: Path) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{NAME}'"):
        registry.fetch("DPA4-Neo-OMat24", "cc-by-nc", brings())
    with pytest.raises(ValueError, match=f"no public checkpoint 'DPA4-Neo'; known are .*{NAME}"):
        checkpoint.locate("DPA4-Neo")


def _fetch_slowly(begin: Event, results: multiprocessing.Queue) -> None:
    def download(entry: registry.Entry, folder: Path) -> Path:
        path = folder / entry.filename
        with path.open("wb") as file:
            for start in range(0, len(CONTENT), 1024):
                file.write(CONTENT[start : start + 1024])
                file.flush()
                time.sleep(0.005)
                final = registry.folder() / entry.filename
                # Whatever another process does: what stands there is whole.
                assert not final.exists() or final.read_bytes() == CONTENT
        return path

    known = dataclasses.replace(registry.ENTRIES[NAME], sha256=hashlib.sha256(CONTENT).hexdigest())
    registry.ENTRIES[NAME] = known
    begin.wait(60)
    try:
        results.put(registry.fetch(NAME, "cc-by-nc", download).read_bytes() == CONTENT)
    except BaseException as error:
        results.put(repr(error))


def test_rp8_two_processes_fetch_at_once(place: Path) -> None:
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    workers = [context.Process(target=_fetch_slowly, args=(begin, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    begin.set()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert found == [True, True]
    assert place.read_bytes() == CONTENT
    assert os.listdir(place.parent) == [place.name]


def test_weights_may_be_a_public_name(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mlff.load`, `mlff import` and a run's key `weights` come here; a file of that name in the way goes first."""
    place.parent.mkdir()
    place.write_bytes(CONTENT)
    assert checkpoint.locate(NAME, "cc-by-nc") == place
    with pytest.raises(ValueError, match="accept_license=cc-by-nc"):
        checkpoint.load(NAME)
    assert main(["import", NAME]) == 2
    assert "accept_license=cc-by-nc" in capsys.readouterr().err
    monkeypatch.chdir(place.parent)
    assert checkpoint.locate(f"{NAME}.pt") == Path(f"{NAME}.pt")


def test_rp8_a_process_without_the_hub_library_says_what_to_do(tmp_path: Path) -> None:
    program = f"""
import sys
sys.modules["huggingface_hub"] = None
from mlff import registry
try:
    registry.fetch({NAME!r}, "cc-by-nc")
except FileNotFoundError as error:
    print(error)
"""
    environment = {**os.environ, "MLFF_CHECKPOINTS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    assert "pip install mlff[hub]" in done.stdout
    assert str(tmp_path / f"{NAME}.pt") in done.stdout
