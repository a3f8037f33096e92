"""Bounds one dead letter before it travels to the broker; `letters.lua` does so again for what is there already."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from runtime_core.bus.transport import Argument
from runtime_core.codec import MAX_DATA_BYTES

HEAD_BYTES = 4096
"""What is kept of a value that is too large."""
MAX_VALUE_BYTES = MAX_DATA_BYTES + 64 * 1024
"""The largest value that the bus itself writes: data and what it adds to them."""
MAX_STRUCTURED_BYTES = 2 * MAX_DATA_BYTES
"""The largest `data` of a structured event, as `envelope.py` has it."""
MAX_LETTER_BYTES = MAX_STRUCTURED_BYTES + 512 * 1024
"""All names and values together."""
MAX_FIELDS = 200
"""More than an event may have attributes."""
MAX_NAME_BYTES = 512

_EVENT_DATA = b"event:data"


def bounded(fields: Sequence[Argument]) -> list[bytes]:
    """The fields (name, value, name, …) within the bounds of a letter.

    Where something had to go, `cut` is added: JSON with `bytes` (all names and values as they came), `fields` (of each
    value of which only a head was kept its `bytes` and `sha256`), and `left_out` (how many fields were dropped).
    """
    words = [_encoded(word) for word in fields]
    data_limit = MAX_DATA_BYTES if b"event:type" in words[::2] else MAX_STRUCTURED_BYTES
    kept: list[tuple[bytes, bytes]] = []
    cut: dict[str, dict[str, object]] = {}
    left_out = 0
    for name, value in zip(words[::2], words[1::2], strict=True):
        if len(name) > MAX_NAME_BYTES or len(kept) >= MAX_FIELDS:
            left_out += 1
            continue
        if len(value) > (data_limit if name == _EVENT_DATA else MAX_VALUE_BYTES):
            value = _head(name, value, cut)
        kept.append((name, value))
    while sum(len(name) + len(value) for name, value in kept) > MAX_LETTER_BYTES:
        at = max(range(len(kept)), key=lambda place: len(kept[place][1]))
        kept[at] = (kept[at][0], _head(*kept[at], cut))
    if cut or left_out:
        about = {"bytes": sum(map(len, words)), "fields": cut, "left_out": left_out}
        kept.append((b"cut", msgspec.json.encode(about)))
    return [word for pair in kept for word in pair]


def _head(name: bytes, value: bytes, cut: dict[str, dict[str, object]]) -> bytes:
    """The head of a value, which is noted in `cut`."""
    digest = hashlib.sha256(value).hexdigest()
    cut[name.decode("utf-8", "replace")] = {"bytes": len(value), "sha256": digest}
    return value[:HEAD_BYTES]


def _encoded(word: Argument) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode(errors="replace")
