"""The shared context of runs: a fork for each branch, the copies in calls and answers, and a session's context."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from runtime_core.errors import AgentError, ConfigurationError, InvalidInput
from runtime_core.runs.context_values import Conflict
from runtime_core.runs.shared_context import Context

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch

SESSION_AGENT = "weft.session"
CONFLICTS_KEPT = 100
"""How many of a session's newest conflicts its context keeps."""
_RESULT = b'{"weft.context.branch":'
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_MEMBER = "context"
_MARK = b'"context":'


class _Result(msgspec.Struct):
    branch: msgspec.Raw = msgspec.field(name="weft.context.branch")
    value: msgspec.Raw


_result = msgspec.json.Decoder(_Result).decode


def with_snapshot(x: bytes, snapshot: bytes) -> bytes:
    """Return the event's context with a snapshot in it."""
    members = _members(x) if x else {}
    members[_MEMBER] = msgspec.Raw(snapshot)
    return msgspec.json.encode(members)


def without_snapshot(x: bytes) -> bytes:
    """Return the event's context without a snapshot."""
    if _MARK not in x:
        return x
    members = _members(x)
    members.pop(_MEMBER, None)
    return msgspec.json.encode(members) if members else b""


def with_member(x: bytes, name: str, value: object) -> bytes:
    """Return the event's context with this member (JSON)."""
    members = _members(x) if x else {}
    members[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(members)


def snapshot_in(x: bytes) -> bytes:
    """Return the snapshot in the event's context; empty if there is none."""
    if _MARK not in x:
        return b""
    return bytes(_members(x).get(_MEMBER, b""))


def wrapped(output: bytes, branch: bytes) -> bytes:
    """Return a result together with the changes of the context."""
    return b'%b%b,"value":%b}' % (_RESULT, branch, output)


def unwrapped(payload: bytes) -> tuple[bytes, bytes]:
    """Return the result and the changes of the context; most results have none."""
    if not payload.startswith(_RESULT):
        return payload, b""
    found = _result(payload)
    return bytes(found.value), bytes(found.branch)


def context_of(run: Run, branch: Branch) -> Context:
    """Return the context of a branch, created at its first use.

    The context of the run's first branch is a fork of the calling run's, or empty. That of a branch of `ctx.gather` is
    a fork of its waiting branch's.
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
    """Return the snapshot to send with a call of this branch; empty if the code has not used the context."""
    return context_of(run, branch).snapshot() if in_use(branch) else b""


def in_use(branch: Branch) -> bool:
    """Whether the code has used the context of this branch or of one above."""
    above: Branch | None = branch
    while above is not None:
        if above.context is not None:
            return True
        above = above.parent
    return False


def merge_changes(run: Run, branch: Branch, changes: bytes) -> None:
    """Merge the changes of a called run, when the code gets its result."""
    context_of(run, branch).merge_changes(changes)


def join(run: Run, branch: Branch, helper: Branch) -> None:
    """Merge the context of an ended branch into that of the branch that waited for it."""
    if helper.context is not None:
        context_of(run, branch).merge(helper.context)


def answer_of(run: Run, branch: Branch, output: bytes) -> bytes | None:
    """Return the output with the changes of the context, for the calling run; None if nothing has changed."""
    context = branch.context
    if context is None or "/" not in run.run_id or not context.changed:
        return None
    return wrapped(output, context.export_changes())


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request to the agent that keeps sessions."""

    merge: str = ""
    """Changes to merge (JSON of `Context.export_changes`); empty: only read."""


async def keep_session(ctx: AgentContext, request: SessionRequest) -> str:
    """Return the session's context (JSON of `Context.snapshot`). Requests are serial, so no merge is lost."""
    stored = ctx.state.get("snapshot")
    context = Context.restore(stored.encode()) if stored else Context(ctx.key, id=f"session {ctx.key}")
    if request.merge:
        context.merge_changes(request.merge.encode(), fold=True)
        del context.conflicts[:-CONFLICTS_KEPT]
        ctx.state["snapshot"] = context.snapshot().decode()
    return context.snapshot().decode()


class Session:
    """The context that all tasks of a session share. The agent `weft.session` keeps it, one instance per session.

    `app.add_sessions()` declares that agent. `async with` forks the context. If the block ends without an error, it
    merges the fork's changes, after the changes that other tasks have merged meanwhile:

        async with ctx.session() as session:
            session.put("topic", topic)
    """

    def __init__(self, ctx: AgentContext) -> None:
        if not ctx.session_id:
            raise InvalidInput("session_id", "this task has no session: submit it with a session_id")
        self._ctx = ctx
        self._fork: Context | None = None
        self.conflicts: list[Conflict] = []
        """Conflicts with changes of other tasks; filled at the end of the block."""

    async def __aenter__(self) -> Context:
        context = await self._ask(SessionRequest())
        self._fork = context.fork(task_id=self._ctx.task_id, agent=self._ctx.agent_name, name=str(self._ctx.uuid()))
        return self._fork

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fork = self._fork
        if kind is None and fork is not None and fork.changed:
            context = await self._ask(SessionRequest(merge=fork.export_changes().decode()))
            self.conflicts = [conflict for conflict in context.conflicts if conflict.branch == fork.id]

    async def _ask(self, request: SessionRequest) -> Context:
        try:
            snapshot: str = await self._ctx.agent(SESSION_AGENT, request, key=self._ctx.session_id)
        except AgentError as error:
            if error.type != "UnknownName":
                raise
            raise ConfigurationError(
                "no app in this namespace keeps sessions: call app.add_sessions() in one of them"
            ) from None
        return Context.restore(snapshot.encode())
