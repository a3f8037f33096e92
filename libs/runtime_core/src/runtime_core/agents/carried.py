"""How a context travels between runs: with the question, and with the answer.

A question carries a snapshot of the asking branch's context in its event's context `x`, member `context`. The answer
of a run that has changed its context carries the changes beside the result; the run that takes it unwraps them.
"""

from __future__ import annotations

import msgspec

_RESULT = b'{"weft.context.branch":'
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_MEMBER = "context"
_MARK = b'"context":'


class _Result(msgspec.Struct):
    branch: msgspec.Raw = msgspec.field(name="weft.context.branch")
    value: msgspec.Raw


_result = msgspec.json.Decoder(_Result).decode


def with_snapshot(x: bytes, snapshot: bytes) -> bytes:
    """The context of an event, with a snapshot in it."""
    members = _members(x) if x else {}
    members[_MEMBER] = msgspec.Raw(snapshot)
    return msgspec.json.encode(members)


def without_snapshot(x: bytes) -> bytes:
    """The context of an event, for those who have no use for a snapshot."""
    if _MARK not in x:
        return x
    members = _members(x)
    members.pop(_MEMBER, None)
    return msgspec.json.encode(members) if members else b""


def snapshot_in(x: bytes) -> bytes:
    """The snapshot in the context of an event; empty where there is none."""
    if _MARK not in x:
        return b""
    return bytes(_members(x).get(_MEMBER, b""))


def wrapped(output: bytes, branch: bytes) -> bytes:
    """A result with the changes of the context that was made on the way to it."""
    return b'%b%b,"value":%b}' % (_RESULT, branch, output)


def unwrapped(payload: bytes) -> tuple[bytes, bytes]:
    """The result, and the changes; these are empty for most."""
    if not payload.startswith(_RESULT):
        return payload, b""
    found = _result(payload)
    return bytes(found.value), bytes(found.branch)
