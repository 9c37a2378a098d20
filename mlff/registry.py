"""Public checkpoints of the DPA4 family by name: where each is, how it is known to be whole, and its licence.

None is part of this package. A file is taken from the local folder if it is there, else fetched from the Hugging Face
hub (`pip install mlff[hub]`), and is used only if its SHA-256 is right. Where the publisher's checksum is not known to
us, that of the first fetch is written beside the file and holds from then on.

    $MLFF_CHECKPOINTS, else $XDG_CACHE_HOME/mlff/checkpoints, else ~/.cache/mlff/checkpoints
"""

from __future__ import annotations

import difflib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NON_COMMERCIAL = "cc-by-nc"


@dataclass(frozen=True)
class Entry:
    """A published checkpoint."""

    name: str
    repository: str  # on huggingface.co
    sha256: str | None  # of the whole file; None where no published value is known
    size: int | None  # bytes; None where it is not known
    licence: str
    about: str

    @property
    def filename(self) -> str:
        """The name of the file, in the repository and here."""
        return f"{self.name}.pt"

    @property
    def address(self) -> str:
        """Where the file can be had."""
        return f"https://huggingface.co/{self.repository}/resolve/main/{self.filename}"


Download = Callable[[Entry, Path], Path]
"""Puts the file of an entry somewhere into a folder that is empty, and returns where."""

_OMAT24 = {
    # Checksums: deepmd-kit's own table of pretrained models. Size of Neo: an independent record of a download.
    "Nano": ("ded047546c2b44a50e2c850680d77279e2bf3e107c10f1c2fe39a5c344e693f6", None),
    "Mini": ("13edeea63448c0f8a0b38e08fd8ba196fb1e2fad5f12486b1cd23320829da268", None),
    "Neo": ("fd7f34ae28f921201e4a0328ddf56179892752084f8363e7796038201471c989", 4_583_819),
    "Air": ("7ac5fb696fc057229ceebc33f31f7a96b2f3616ac5b63a512acd1848f2d41a09", None),
    "Plus": ("6820a320dc241a4002e6c257ad21983950df178b1f80271a6e6af199adb18567", None),
}
_LICENCE = "CC-BY-NC-4.0"

ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        *(
            Entry(
                f"DPA4-{grade}-OMat24-v20260805",
                "deepmodelingcommunity/DPA4-OMat24",
                sha256,
                size,
                _LICENCE,
                "materials, PBE(+U) of OMat24",
            )
            for grade, (sha256, size) in _OMAT24.items()
        ),
        *(
            Entry(
                f"DPA4-{grade}-OMol25-100M-v20260820",
                "deepmodelingcommunity/DPA4-OMol",
                None,
                None,
                _LICENCE,
                "molecules with charge and spin, ωB97M-V of OMol25",
            )
            for grade in _OMAT24
        ),
    )
}
"""All entries by name."""


def names() -> tuple[str, ...]:
    """Return the names of all entries."""
    return tuple(ENTRIES)


def entry(name: str) -> Entry:
    """Return an entry; the name may end in .pt, and upper and lower case are alike.

    Raises:
        ValueError: there is none of that name; the nearest is named.
    """
    plain = {known.lower(): known for known in ENTRIES}
    wanted = name.lower().removesuffix(".pt")
    if wanted not in plain:
        near = difflib.get_close_matches(wanted, plain, n=1)
        hint = f" Did you mean {plain[near[0]]!r}?" if near else ""
        raise ValueError(f"there is no public checkpoint {name!r}; known are {', '.join(ENTRIES)}.{hint}")
    return ENTRIES[plain[wanted]]


def knows(name: str) -> bool:
    """Return whether a name is that of an entry."""
    return name.lower().removesuffix(".pt") in {known.lower() for known in ENTRIES}


def folder() -> Path:
    """Return the local folder of checkpoints; it need not exist."""
    if own := os.environ.get("MLFF_CHECKPOINTS"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlff" / "checkpoints"


def fetch(name: str, accept_license: str | None = None, download: Download | None = None) -> Path:
    """Return the local path of a public checkpoint, fetched if it is not there yet.

    Processes that fetch the same file at once each write their own and put it in place whole, so that any of them
    may be stopped.

    Args:
        name: of an entry.
        accept_license: "cc-by-nc" says that you may use weights whose licence excludes commercial use.
        download: what brings the file; by default the Hugging Face hub.

    Raises:
        ValueError: there is no such entry, its licence is not accepted, or the file is not the published one.
        FileNotFoundError: the file is not here and cannot be fetched; the message has its address and the path at
            which it was looked for.
    """
    found = entry(name)
    if "-NC" in found.licence and accept_license != NON_COMMERCIAL:
        raise ValueError(
            f"{found.name} is published under {found.licence}, which excludes commercial use (see "
            f"https://huggingface.co/{found.repository}). If that suits your use, say accept_license={NON_COMMERCIAL}."
        )
    path = folder() / found.filename
    if path.is_file():
        check(found, path)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft_folder = tempfile.TemporaryDirectory(prefix=".fetching-", dir=path.parent)
    except OSError as error:
        raise FileNotFoundError(f"{_absent(found, path)} That folder cannot be written: {error}.") from error
    with draft_folder as name_:
        try:
            draft = (download or _from_hub)(found, Path(name_))
        except Exception as error:  # of whatever library brings it
            raise FileNotFoundError(f"{_absent(found, path)} ({type(error).__name__}: {error})") from error
        check(found, draft)
        if found.sha256 is None and not _record(path).exists():
            note = Path(name_, "sha256")
            note.write_text(digest(draft))
            os.replace(note, _record(path))
        check(found, draft, path)
        os.replace(draft, path)
    return path


def check(found: Entry, path: Path, home: Path | None = None) -> None:
    """Raise ValueError unless a file is the published one; `home` is where it will lie, by default where it is."""
    expected = found.sha256
    record = _record(home or path)
    if expected is None and record.is_file():
        expected = record.read_text().strip()
    if expected is None:
        return
    have = digest(path)
    if have != expected:
        size = f" of {found.size:,}" if found.size else ""
        raise ValueError(
            f"{path} is not {found.name}: its SHA-256 is {have}, expected {expected} ({path.stat().st_size:,}{size} "
            f"bytes). It may be cut short. Remove it to fetch it again from {found.address}."
        )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _absent(found: Entry, path: Path) -> str:
    return (
        f"{found.name} is not at {path} and could not be fetched. With a network: pip install mlff[hub]. Without: "
        f"bring {found.address} to that path, or give the path of your copy instead of the name."
    )


def _from_hub(found: Entry, place: Path) -> Path:
    from huggingface_hub import hf_hub_download  # pyright: ignore[reportMissingImports]  the extra `hub`

    return Path(hf_hub_download(found.repository, found.filename, local_dir=place))
