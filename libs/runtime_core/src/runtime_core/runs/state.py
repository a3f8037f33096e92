"""Durable state as one run sees it: of its instance, and the context that all tasks of a session share."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from runtime_core.declare.schema import encode
from runtime_core.errors import AgentError, ConfigurationError, InvalidInput, WeftError
from runtime_core.runs.step import from_json
from runtime_core.sharing.context import Context
from runtime_core.sharing.values import Conflict

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


class State:
    """A dict of JSON values that is decoded at its first use and written only where it has changed."""

    __slots__ = ("_at_start", "_put", "_reported", "_value", "snapshot")

    def __init__(self, snapshot: bytes) -> None:
        self.snapshot = snapshot
        """As it was when the run began (JSON; empty: none)."""
        self._put: bytes | None = None
        self._value: dict[str, Any] | None = None  # Any: JSON values of the user's choice
        self._at_start = b""
        self._reported = b""

    def value(self) -> dict[str, Any]:
        """The working copy. Every run and every replay starts from the snapshot."""
        if self._value is None:
            decoded = from_json(self.snapshot)
            if decoded is None:
                decoded = {}
            if not isinstance(decoded, dict):
                raise WeftError(
                    f"the stored state is a JSON {type(decoded).__name__}, not an object; "
                    "delete the instance's state or repair it"
                )
            # Encoded again: the snapshot may be written with other spacing.
            self._value = decoded
            self._at_start = self._reported = encode(decoded, "state")
        return self._value

    def replace(self, state: bytes) -> None:
        """Take over what a nested run has made of the state. The dict stays the same object: code may hold it."""
        value = self.value()
        decoded = from_json(state)
        value.clear()
        if isinstance(decoded, dict):
            value.update(decoded)

    def put(self, state: bytes) -> None:
        """Write this state (JSON) with the commit that ends the run."""
        self._put = state

    def changed(self) -> bytes | None:
        """JSON of the state where it differs from the run's start. Raises InvalidInput, field `state`."""
        if self._value is None:
            return self._put
        now = encode(self._value, "state")
        return None if now == self._at_start else now

    def working_change(self) -> bytes | None:
        """As `changed`, compared with what this run has last reported."""
        if self._value is None:
            return None
        now = encode(self._value, "state")
        if now == self._reported:
            return None
        self._reported = now
        return now


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
    """The context that all tasks of a session share. The agent `weft.session` keeps it, one instance per session.

    `app.add_sessions()` declares that agent. `async with` gives a fork of the context, and merges its changes when the
    block ends without an error, after those that other tasks have merged meanwhile:

        async with ctx.session() as session:
            session.put("topic", topic)
    """

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
