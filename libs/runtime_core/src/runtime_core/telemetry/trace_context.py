"""Trace context as text, in the context of an event; and the trace of a task without one.

    traceparent   00-<trace id, 32 digits>-<span id, 16 digits>-<flags, 2 digits>

This module does not need OpenTelemetry.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

import msgspec

SAMPLED = 1
"""The flag of a sampled trace."""

_MARK = b'"traceparent":'
# Version `ff` and ids of zeros are invalid. Later versions may append fields.
_VALID = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Ids(msgspec.Struct, frozen=True):
    """The parts of a traceparent."""

    trace: int
    span: int
    flags: int


class _TraceMembers(msgspec.Struct):
    traceparent: str = ""
    tracestate: str = ""


_trace_members = msgspec.json.Decoder(_TraceMembers)


def read(traceparent: str) -> Ids | None:
    """Parse a traceparent. Return None for an invalid one."""
    found = _VALID.fullmatch(traceparent)
    if found is None or (found["version"] == "00" and found["more"]):
        return None
    return Ids(int(found["trace"], 16), int(found["span"], 16), int(found["flags"], 16))


def written(trace: int, span: int, flags: int) -> str:
    """Format a traceparent."""
    return f"00-{trace:032x}-{span:016x}-{flags:02x}"


def stated(context: bytes) -> tuple[str, str]:
    """Return `traceparent` and `tracestate` of an event's context (JSON); empty if there is no valid one."""
    if _MARK not in context:
        return "", ""
    try:
        found = _trace_members.decode(context)
    except msgspec.DecodeError:
        return "", ""
    return (found.traceparent, found.tracestate) if read(found.traceparent) is not None else ("", "")


def restated(context: bytes, traceparent: str) -> bytes:
    """Return an event's context with `traceparent` set; unchanged if that is empty."""
    if not traceparent:
        return context
    return msgspec.json.encode({**(_members(context) if context else {}), "traceparent": traceparent})


@lru_cache(maxsize=1024)
def of_task(namespace: str, task: str) -> Ids:
    """Return trace and root span of a task whose publisher gave no trace.

    They derive from its id, so that all processes compute the same ones.
    """
    digest = hashlib.sha256(f"weft task\n{namespace}\n{task}".encode()).digest()
    return Ids(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big"), SAMPLED)


def span_of_entry(stream: str, entry: str) -> int:
    """Return the span id of a turn, derived from its entry, so that a retry has the same. `stream` is the full key."""
    return int.from_bytes(hashlib.sha256(f"weft turn\n{stream}\n{entry}".encode()).digest()[:8], "big")
