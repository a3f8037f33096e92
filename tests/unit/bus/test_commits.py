"""A dead letter is cut to its bounds before it is sent to the broker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from runtime_core.bus.commits import (
    CUT_VALUE_BYTES,
    MAX_FIELD_NAME_BYTES,
    MAX_LETTER_BYTES,
    MAX_LETTER_FIELDS,
    MAX_STRUCTURED_BYTES,
    MAX_VALUE_BYTES,
    bounded,
)
from runtime_core.wire.codec import MAX_DATA_BYTES


def as_dict(words: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(words[::2], words[1::2], strict=True))


def test_a_value_over_its_limit_keeps_a_head_and_a_digest() -> None:
    for fields, limit in (
        (["event:type", "x"], MAX_DATA_BYTES),
        (["reason", "x"], MAX_STRUCTURED_BYTES),
    ):
        assert as_dict(bounded([*fields, "event:data", b"d" * limit]))[b"event:data"] == b"d" * limit
        data = b"d" * (limit + 1)
        letter = as_dict(bounded([*fields, "event:data", data]))
        assert letter[b"event:data"] == data[:CUT_VALUE_BYTES]
        cut = json.loads(letter[b"cut"])
        assert cut["fields"] == {"event:data": {"bytes": limit + 1, "sha256": hashlib.sha256(data).hexdigest()}}
        assert cut["bytes"] == len("".join(fields) + "event:data") + len(data)
    other = as_dict(bounded(["d", b"d" * (MAX_VALUE_BYTES + 1)]))
    assert len(other[b"d"]) == CUT_VALUE_BYTES


def test_the_largest_values_are_cut_first() -> None:
    sizes = {f"x{number}": MAX_VALUE_BYTES - number for number in range(8)}
    letter = as_dict(bounded([word for name, size in sizes.items() for word in (name, b"v" * size)]))
    cut = json.loads(letter.pop(b"cut"))
    assert sum(len(name) + len(value) for name, value in letter.items()) <= MAX_LETTER_BYTES
    kept = [name for name in sizes if name not in cut["fields"]]
    assert kept == list(sizes)[-len(kept) :]
    assert kept


def test_fields_without_room_are_counted() -> None:
    fields = ["n" * (MAX_FIELD_NAME_BYTES + 1), "1"]
    for number in range(MAX_LETTER_FIELDS + 3):
        fields += [f"x{number}", "1"]
    letter = as_dict(bounded(fields))
    assert json.loads(letter.pop(b"cut"))["left_out"] == 4
    assert list(letter) == [f"x{number}".encode() for number in range(MAX_LETTER_FIELDS)]


def test_text_that_utf_8_cannot_hold_is_kept_in_part() -> None:
    assert bounded(["a", "x\ud800y", "b", 1.5]) == [b"a", b"x?y", b"b", b"1.5"]


def event(stream: str = "tasks", data: bytes = b"{}", more: Mapping[str, bytes] | None = None) -> list[str | bytes]:
    """A refused command."""
    fields: list[str | bytes] = ["reason", "rejected", "stream", stream, "error", "{}", "errors", "[]"]
    for name, value in (("type", b"weft.task.submit"), ("data", data), *(more or {}).items()):
        fields += [f"event:{name}", value]
    return fields


def test_a_letter_within_its_bounds_stays_unchanged() -> None:
    fields = event(data=b"{}")
    assert bounded(fields) == [item.encode() if isinstance(item, str) else item for item in fields]
