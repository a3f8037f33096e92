"""The context of a run: a fork for each branch, and the copies that travel with questions and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from runtime_core.sharing.context import Context

if TYPE_CHECKING:
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch


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


def context_of(run: Run, branch: Branch) -> Context:
    """The context of a branch, made at its first use.

    That of the run's first branch is a fork of the asking run's, or begins empty; that of a branch of `ctx.gather` is a
    fork of the branch that waits for it, which stands still until then.
    """
    if branch.context is None:
        if branch.parent is not None:
            branch.context = context_of(run, branch.parent).fork(name=f"~{branch.prefix}")
        else:
            branch.context = _first(run)
    return branch.context


def _first(run: Run) -> Context:
    agent = run.definition.name
    snapshot = snapshot_in(run.carried)
    if not snapshot:
        return Context(run.meta.get("session_id", ""), run.task_id, agent, id=f"{run.task_id}/{run.run_id}")
    return Context.restore(snapshot).fork(task_id=run.task_id, agent=agent, name=run.run_id)


def snapshot_of(run: Run, branch: Branch) -> bytes:
    """What a question of this branch carries; empty where nobody has used the context yet, and `x` says enough."""
    return context_of(run, branch).snapshot() if _in_use(branch) else b""


def _in_use(branch: Branch) -> bool:
    above: Branch | None = branch
    while above is not None:
        if above.context is not None:
            return True
        above = above.parent
    return False


def bring_in(run: Run, branch: Branch, changes: bytes) -> None:
    """Merge what a run that was asked has changed, when its result is taken."""
    context_of(run, branch).bring_in(changes)


def join(run: Run, branch: Branch, helper: Branch) -> None:
    """Merge the context of a branch that has ended into that of the branch that waited for it."""
    if helper.context is not None:
        context_of(run, branch).merge(helper.context)


def answer_of(run: Run, branch: Branch, output: bytes) -> bytes | None:
    """What the asking run's step gets, where that is more than the output."""
    context = branch.context
    if context is None or "/" not in run.run_id or not context.changed:
        return None
    return wrapped(output, context.to_branch())
