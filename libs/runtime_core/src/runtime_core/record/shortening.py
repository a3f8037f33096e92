"""Shortens rows of model calls on the record stream: messages that an earlier row contains are not sent again.

A conversation passes all its messages to each model call, so its rows would grow with the square of its turns: at 2 KB
a turn, 1,000 turns put 1.2 GB through the broker. Here a row whose messages begin with a list that this process has
sent before names that list by its digest (`Step.input_after`, a digest as in `contents.py`) and contains the rest. The
recorder knows the list by then, since rows of a partition are in order.

Each list is sent in full again when it has grown to twice the length of its last full row. That keeps the sum linear,
and limits the effect of a lost or erased beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from runtime_core.record.contents import MESSAGES, following, message_digest
from runtime_core.record.step import ENCODER, STEPS, Step

SHORT_BYTES = 2_048
"""A record under this size is left as it is."""

REMEMBERED = 10_000
"""Lists that a process remembers for each partition, 100 bytes each."""

_MESSAGES_IN = b'"messages"'
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_step = msgspec.json.Decoder(Step).decode


@dataclass(frozen=True, slots=True)
class _Told:
    """A list that is on the record."""

    digest: bytes
    """The digest that the recorder computes, of the messages without their secrets."""
    whole: int
    """The number of messages in its last full row."""


Told = dict[bytes, _Told]
"""By the digest of the original messages."""


class ToldLists:
    """The lists that one process has sent on the record stream of one partition."""

    def __init__(self) -> None:
        self._told: OrderedDict[bytes, _Told] = OrderedDict()

    def shortened(self, record: bytes, redact: Callable[[bytes], bytes]) -> tuple[bytes, Told]:
        """Return rows (a JSON array) for the record, without secrets, and the lists that they contain once they are on
        it.

        Unreadable rows stay as they are.
        """
        if len(record) < SHORT_BYTES or _MESSAGES_IN not in record:
            return redact(record), {}
        new: Told = {}
        try:
            rows = [self._row(step, redact, new) for step in STEPS.decode(record)]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return redact(record), {}
        return b"[%b]" % b",".join(rows), new

    def remember(self, new: Told) -> None:
        """These rows are on the record now."""
        for given, told in new.items():
            self._told[given] = told
            self._told.move_to_end(given)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)

    def forget(self) -> None:
        """The record may have lost rows: an unreachable broker may have lost its last writes."""
        self._told.clear()

    def _row(self, step: Step, redact: Callable[[bytes], bytes], new: Told) -> bytes:
        data = bytes(step.input)
        members = _members(data) if data[:1] == b"{" and _MESSAGES_IN in data else {}
        value = bytes(members.get(MESSAGES, b""))
        if value[:1] != b"[":
            return redact(ENCODER.encode(step))
        messages = _elements(value)
        given: list[bytes] = []
        for message in messages:
            given.append(following(given[-1] if given else None, message_digest(bytes(message))))
        if not given:
            return redact(ENCODER.encode(step))
        known, before = self._longest(given, new)
        whole = len(given)
        if before is not None and whole < 2 * before.whole:
            whole = before.whole
            members[MESSAGES] = msgspec.Raw(b"[%b]" % b",".join(map(bytes, messages[known:])))
            step.input = msgspec.Raw(ENCODER.encode(members))
            step.input_after = before.digest.hex()
        row = redact(ENCODER.encode(step))
        # Counted as the recorder will: by what stands in the row.
        head = before.digest if step.input_after and before is not None else None
        for message in _elements(_members(bytes(_step(row).input))[MESSAGES]):
            head = following(head, message_digest(bytes(message)))
        if head is not None:
            new[given[-1]] = _Told(head, whole)
        return row

    def _longest(self, given: list[bytes], new: Told) -> tuple[int, _Told | None]:
        """The longest beginning of a list that was sent: its length, and the entry."""
        for length in range(len(given), 0, -1):
            told = new.get(given[length - 1]) or self._told.get(given[length - 1])
            if told is not None:
                return length, told
        return 0, None
