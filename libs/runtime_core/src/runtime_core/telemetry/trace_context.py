"""Trace context as text: in the context of an event, and of a task whose publisher has named none.

    traceparent   00-<trace id, 32 digits>-<span id, 16 digits>-<flags, 2 digits>

Nothing here needs OpenTelemetry.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

SAMPLED = 1
"""The flag of a trace that is kept."""

_MARK = b'"traceparent":'
# Version `ff` and ids of zeros are invalid; a later version may say more behind the flags.
_VALID = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Ids(msgspec.Struct, frozen=True):
    """A traceparent in its parts."""

    trace: int
    span: int
    flags: int


class _Said(msgspec.Struct):
    traceparent: str = ""
    tracestate: str = ""


_said = msgspec.json.Decoder(_Said)


def read(traceparent: str) -> Ids | None:
    """Its parts; None for a text that is no traceparent, which is as good as none."""
    found = _VALID.fullmatch(traceparent)
    if found is None or (found["version"] == "00" and found["more"]):
        return None
    return Ids(int(found["trace"], 16), int(found["span"], 16), int(found["flags"], 16))


def written(trace: int, span: int, flags: int) -> str:
    """A traceparent from its parts."""
    return f"00-{trace:032x}-{span:016x}-{flags:02x}"


def stated(context: bytes) -> tuple[str, str]:
    """`traceparent` and `tracestate` in the context of an event (JSON); empty where it says nothing valid."""
    if _MARK not in context:
        return "", ""
    try:
        said = _said.decode(context)
    except msgspec.DecodeError:
        return "", ""
    return (said.traceparent, said.tracestate) if read(said.traceparent) is not None else ("", "")


def restated(context: bytes, traceparent: str) -> bytes:
    """The context of an event, with `traceparent` in it; empty: as it is."""
    if not traceparent:
        return context
    return msgspec.json.encode({**(_members(context) if context else {}), "traceparent": traceparent})


def of_task(namespace: str, task: str) -> Ids:
    """Trace and root span of a task whose publisher has named no trace.

    They derive from its id, so that each process that handles something of it finds the same without being told.
    """
    digest = hashlib.sha256(f"weft task\n{namespace}\n{task}".encode()).digest()
    return Ids(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big"), SAMPLED)


def span_of_entry(stream: str, entry: str) -> int:
    """The id of the span of a turn, by its entry (`stream` is the whole key): the same for whoever handles it again."""
    return int.from_bytes(hashlib.sha256(f"weft turn\n{stream}\n{entry}".encode()).digest()[:8], "big")
