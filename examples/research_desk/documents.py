"""Finds the documents of a folder: regular text files, always in the same order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILES_MAX = 2_000
"""The most documents that are searched; the first ones of the folder."""
ALL_BYTES_MAX = 50_000_000
"""The most bytes that are searched; more would take too long for an example."""
BYTES_MAX = 2_000_000
"""Larger files are skipped: they are not hand-written documents."""
LOOK_BYTES = 8_192
NOT_DOCUMENTS = frozenset({"__pycache__", "node_modules", "dist", "build", "venv", "site-packages"})

# Control characters, which a terminal would interpret.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Documents:
    """The documents of a folder."""

    paths: list[str]
    """Paths relative to the folder, with `/`, in order."""
    skipped: int
    """The number of files that are binary, empty, too large or unreadable."""
    more: bool
    """Whether the folder exceeds FILES_MAX or ALL_BYTES_MAX."""
    folder: str = ""
    """The folder's absolute path, since other processes may have another working directory."""


def find_documents(folder: Path, suffixes: Sequence[str] = ()) -> Documents:
    """Return the documents below `folder`, without hidden files and folders; with `suffixes`, only such files."""
    paths: list[str] = []
    skipped = total = 0
    for path in _files(folder):
        if suffixes and path.suffix.lower() not in suffixes:
            continue
        size = _text_bytes(path)
        if not size:
            skipped += 1
            continue
        total += size
        if len(paths) == FILES_MAX or total > ALL_BYTES_MAX:
            return Documents(paths, skipped, True)
        paths.append(path.relative_to(folder).as_posix())
    return Documents(paths, skipped, False)


def read_document(path: Path) -> list[str]:
    """Return the document's lines without line ends and control characters; none if it is no longer readable."""
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError:
        return []
    # Not splitlines: it also splits at form feeds, which editors do not count as line ends.
    return [_CONTROL.sub("�", line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_DOCUMENTS)
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(place, name)


def _text_bytes(path: Path) -> int:
    """Return the size of a text file; 0 if it is not a document."""
    try:
        # A name that is not UTF-8 can be neither encoded as JSON nor printed.
        str(path).encode()
        size = path.stat().st_size if path.is_file() else 0
        if not 0 < size <= BYTES_MAX:
            return 0
        with path.open("rb") as file:
            start = file.read(LOOK_BYTES)
    except (OSError, UnicodeEncodeError):
        return 0
    return size if _is_text(start) else 0


def _is_text(start: bytes) -> bool:
    if b"\0" in start:
        return False
    try:
        start.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The cut may split a character.
        return error.start > len(start) - 4 and len(start) == LOOK_BYTES
    return True
