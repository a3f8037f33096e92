"""The journal of a run: what its finished steps gave, and which steps were asked for before."""

from __future__ import annotations

import time
from collections.abc import Mapping

from runtime_core.consumer.effects import COMPLETED, JOURNAL_PREFIX

MAX_STEPS = 10_000
"""How many steps one run may take."""
MAX_JOURNAL_BYTES = 16 * 1024 * 1024
"""How many bytes the results of one run may have together."""

DIGEST_BYTES = 8
_STATUS = slice(8, 9)
_TIME = slice(9, JOURNAL_PREFIX)


def pack(digest: str, status: bytes, epoch_ms: int, payload: bytes) -> bytes:
    """A journal value: `digest (8) · status (1) · epoch ms (13 digits) · payload`."""
    return b"%b%b%013d%b" % (digest.encode(), status, epoch_ms, payload)


def packed_now(digest: str, status: bytes = COMPLETED, payload: bytes = b"null") -> bytes:
    """Pack the journal value of a step that ends now, by default of one without a result."""
    return pack(digest, status, time.time_ns() // 1_000_000, payload)


def status_of(value: bytes) -> bytes:
    """`K` for a result, `E` for an error (JSON `{"type", "message"}`)."""
    return value[_STATUS]


def time_of(value: bytes) -> int:
    """When the broker stored it, in epoch milliseconds."""
    return int(value[_TIME])


def payload_of(value: bytes) -> bytes:
    """The JSON of the result or of the error."""
    return value[JOURNAL_PREFIX:]


class Journal:
    """Results by step id, and the digests of steps that were asked for and have no result yet."""

    __slots__ = ("pending", "size", "values")

    def __init__(self, values: Mapping[str, bytes], pending: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.pending = dict(pending)
        self.size = sum(map(len, self.values.values()))
        """Bytes of all values."""

    def add(self, step: str, value: bytes) -> bool:
        """Put if absent, as the broker does; False: the step had a value."""
        if step in self.values:
            return False
        self.values[step] = value
        self.size += len(value)
        self.pending.pop(step, None)
        return True

    def digest(self, step: str) -> str:
        """The digest that the journal holds for a step; empty: it does not know the step."""
        if (value := self.values.get(step)) is not None:
            return value[:DIGEST_BYTES].decode("ascii", "replace")
        return self.pending.get(step, "")
