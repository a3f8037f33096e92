"""Contexts and their branches as JSON: versioned, and with a checksum, so that a damaged one is an error."""

from __future__ import annotations

import hashlib
from typing import Any, Final, TypeVar

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput

VERSION: Final = 1

# The user's own values are Any, here and below.
# Whole numbers stay whole: a copy writes the same bytes.
Number = int | float
Slots = dict[str, dict[str, list[Number]]]
Merged = dict[str, tuple[int, str]]


class StateSnapshot(msgspec.Struct):
    """A ContextState."""

    own: dict[str, Any]
    base: dict[str, Any]
    above: dict[str, Any]
    """What the levels above had."""


class Snapshot(msgspec.Struct):
    """A whole context."""

    id: str
    session_id: str
    task_id: str
    agent: str
    info: StateSnapshot
    agents: StateSnapshot
    token_totals: dict[str, Number]
    tokens: Slots
    counter_totals: dict[str, Number]
    counters: Slots
    forks: int
    revision: int
    merged: Merged
    conflicts: list[list[Any]]
    known_conflicts: int


class Branch(msgspec.Struct):
    """What one context has changed."""

    id: str
    revision: int
    info: dict[str, tuple[Any, Any]]
    """(before, now) by key."""
    agents: dict[str, tuple[Any, Any]]
    tokens: Slots
    counters: Slots
    merged: Merged
    conflicts: list[list[Any]]


class _Envelope(msgspec.Struct):
    version: int = msgspec.field(name="weft.context")
    kind: str
    digest: str
    body: msgspec.Raw


Body = TypeVar("Body", Snapshot, Branch)

_envelope = msgspec.json.Decoder(_Envelope).decode


def write(snapshot: Snapshot) -> bytes:
    """JSON of a context. InvalidInput for a value that JSON cannot hold, or where all of them are too large."""
    return _written("snapshot", snapshot)


def read(data: bytes) -> Snapshot:
    """Read what `write` has written; InvalidInput, field `snapshot`."""
    return _read("snapshot", Snapshot, data)


def write_branch(branch: Branch) -> bytes:
    """JSON of what a context has changed. Raises as `write`."""
    return _written("branch", branch)


def read_branch(data: bytes) -> Branch:
    """Read what `write_branch` has written; InvalidInput, field `branch`."""
    return _read("branch", Branch, data)


def _written(kind: str, body: Snapshot | Branch) -> bytes:
    what = f"values of the context ({kind})"
    try:
        plain = msgspec.to_builtins(body)
    except (TypeError, RecursionError) as error:
        # What was put was looked at; a list or object may have been changed since.
        raise InvalidInput(what, f"cannot be written as JSON ({error}): keep JSON values and sets only") from None
    raw = encode(plain, what)
    return msgspec.json.encode(_Envelope(VERSION, kind, _digest(raw), msgspec.Raw(raw)))


def _read(kind: str, shape: type[Body], data: bytes) -> Body:
    remedy = "give what a context has written, unchanged"
    try:
        envelope = _envelope(data)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(kind, f"is damaged or none at all ({error}): {remedy}") from None
    if envelope.version > VERSION:
        raise InvalidInput(kind, f"has version {envelope.version}, this release reads {VERSION}: upgrade it")
    if envelope.kind != kind:
        raise InvalidInput(kind, f"is a {envelope.kind} of a context: {remedy}")
    if _digest(bytes(envelope.body)) != envelope.digest:
        raise InvalidInput(kind, f"is damaged, its checksum is another: {remedy}")
    try:
        return msgspec.json.decode(envelope.body, type=shape)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidInput(kind, f"cannot be read ({error}): {remedy}") from None


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
