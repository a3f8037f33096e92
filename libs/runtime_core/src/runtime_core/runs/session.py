"""What all tasks of a session know: a context that an agent keeps for them, one instance per session.

app.add_sessions()                       # declares the agent `weft.session`

async with ctx.session() as session:     # a fork of the session's context
    session.put("topic", topic)          # merged when the block ends, beside what other tasks have merged
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from runtime_core.errors import AgentError, ConfigurationError, InvalidInput
from runtime_core.sharing.context import Context
from runtime_core.sharing.merging import Conflict

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

SESSION_AGENT = "weft.session"
CONFLICTS_KEPT = 100
"""How many of a session's conflicts its context remembers, the newest."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What the agent of sessions is asked."""

    merge: str = ""
    """A branch (JSON, `Context.to_branch`) to merge; empty: only read."""


async def keep_session(ctx: AgentContext, request: SessionRequest) -> str:
    """The agent: gives the session's context (JSON, `Context.snapshot`). One request at a time, so no merge is lost."""
    stored = ctx.state.get("snapshot")
    context = Context.restore(stored.encode()) if stored else Context(ctx.key, id=f"session {ctx.key}")
    if request.merge:
        context.bring_in(request.merge.encode(), fold=True)
        del context.conflicts[:-CONFLICTS_KEPT]
        ctx.state["snapshot"] = context.snapshot().decode()
    return context.snapshot().decode()


class Session:
    """`async with` gives a fork of the session's context, whose changes are merged when it ends without error."""

    def __init__(self, ctx: AgentContext) -> None:
        if not ctx.session_id:
            raise InvalidInput("session_id", "this task belongs to no session: submit it with a session_id")
        self._ctx = ctx
        self._fork: Context | None = None
        self.conflicts: list[Conflict] = []
        """What other tasks have changed meanwhile in ways that could not both hold; filled at the end."""

    async def __aenter__(self) -> Context:
        context = await self._ask(SessionRequest())
        self._fork = context.fork(task_id=self._ctx.task_id, agent=self._ctx.agent_name, name=str(self._ctx.uuid()))
        return self._fork

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fork = self._fork
        if kind is None and fork is not None and fork.changed:
            context = await self._ask(SessionRequest(merge=fork.to_branch().decode()))
            self.conflicts = [conflict for conflict in context.conflicts if conflict.branch == fork.id]

    async def _ask(self, request: SessionRequest) -> Context:
        try:
            snapshot: str = await self._ctx.agent(SESSION_AGENT, request, key=self._ctx.session_id)
        except AgentError as error:
            if error.type != "UnknownName":
                raise
            raise ConfigurationError("no app keeps sessions here: call app.add_sessions() in one of them") from None
        return Context.restore(snapshot.encode())
