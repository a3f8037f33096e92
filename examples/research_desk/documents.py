"""Which files of a folder are documents: regular files with text, in an order that is always the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FILES_MAX = 2_000
"""Documents that are searched at most; the first of the folder, in order."""
ALL_BYTES_MAX = 50_000_000
"""Searching more would keep two cores busy for longer than anyone watches an example."""
BYTES_MAX = 2_000_000
"""A larger file is not a document that somebody wrote."""
LOOK_BYTES = 8_192
NOT_DOCUMENTS = frozenset({"__pycache__", "node_modules", "dist", "build", "venv", "site-packages"})

# What a terminal would obey.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Documents:
    """What a folder holds."""

    paths: list[str]
    """Relative to the folder, with `/`, in order."""
    skipped: int
    """Files that are binary, empty, too large, or cannot be read."""
    more: bool
    """Whether there are more than FILES_MAX, or more than ALL_BYTES_MAX in them."""
    folder: str = ""
    """Which folder that is, absolute: others who read there may have been started elsewhere."""


def find_documents(folder: Path, suffixes: Sequence[str] = ()) -> Documents:
    """The documents below `folder`, hidden files and folders left out; with `suffixes`, only such files."""
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
    """The document's lines, without their ends and control characters; none where it cannot be read any more."""
    try:
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError:
        return []
    # Not splitlines: it also splits at form feeds and the like, and editors would count other lines.
    return [_CONTROL.sub("�", line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_DOCUMENTS)
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(place, name)


def _text_bytes(path: Path) -> int:
    """The size of a text file; 0 for what is no document."""
    try:
        # A name that is no UTF-8 cannot be written as JSON, nor shown.
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
        # The cut may go through the middle of a character.
        return error.start > len(start) - 4 and len(start) == LOOK_BYTES
    return True
