"""From replies of a broker to values."""

from __future__ import annotations

from typing import cast

from runtime_core.bus.connection import Reply


def text(item: Reply) -> str:
    """A text or a number, as text."""
    return item.decode() if isinstance(item, bytes) else str(item)


def texts(reply: Reply) -> list[str]:
    """Each item of a list, as `text` gives it."""
    return [text(item) for item in cast(list[Reply], reply)]


def fields(reply: Reply) -> dict[str, bytes]:
    """A hash, or any list of names and values, by name."""
    flat = cast(list[bytes], reply)
    return {flat[at].decode(): flat[at + 1] for at in range(0, len(flat), 2)}


def position(entry: str) -> tuple[int, int]:
    """What ids of a stream's entries compare by: milliseconds, then sequence number (0 where it is left out)."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)
