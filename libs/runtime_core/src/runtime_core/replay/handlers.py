"""Replays recorded messages to handlers, whose questions the record answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from runtime_core.app.app import App
from runtime_core.aworld.events.manager import EventManager, HandlerTable
from runtime_core.aworld.events.message import Message
from runtime_core.client.fork import RecordedRun, runs_of
from runtime_core.consumer.effects import Failed
from runtime_core.errors import WeftError
from runtime_core.ids import ROOT_RUN
from runtime_core.replay.run import ReplayRun
from runtime_core.runs.ports import Meta
from runtime_core.trajectory.reading import TaskTrajectory

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


Sleep: TypeAlias = Callable[[float], Awaitable[object]]


class Pace:
    """Keeps the time between messages, divided by `speed`."""

    def __init__(self, speed: float | None, sleep: Sleep) -> None:
        self._speed = speed
        self._sleep = sleep
        self._last: float | None = None

    async def before(self, message: Message) -> None:
        last, self._last = self._last, message.timestamp
        if self._speed is not None and last is not None and message.timestamp > last:
            await self._sleep((message.timestamp - last) / self._speed)


class _ReplayManager(EventManager):
    """Takes what handlers emit, and hands it to nobody: what followed then is on the record."""

    def __init__(self, ctx: AgentContext, table: HandlerTable) -> None:
        super().__init__(ctx, table)
        self.following: list[Message] = []

    async def emit_message(self, message: Message) -> Message:
        self.following.append(message)
        return message


class _Handlers:
    """The code of a run that gives recorded messages to handlers."""

    name = "replay"
    timeout_seconds = 86_400.0 * 365

    def __init__(self, table: HandlerTable, messages: Sequence[Message], pace: Pace) -> None:
        self._table = table
        self._messages = messages
        self._pace = pace
        self.following: list[Message] = []

    def decode_input(self, data: bytes, /) -> object:
        return None

    def encode_output(self, value: Any, /) -> bytes:  # Any: the protocol's
        return b"null"

    def start(self, ctx: AgentContext, value: Any, /) -> Coroutine[Any, Any, object]:  # Any: the protocol's
        return self._run(ctx)

    async def _run(self, ctx: AgentContext) -> None:
        manager = _ReplayManager(ctx, self._table)
        for message in self._messages:
            await self._pace.before(message)
            if message.category in self._table:
                await manager.dispatch(message)
        self.following = manager.following


async def replay_handlers(
    trajectory: TaskTrajectory, table: HandlerTable, messages: Sequence[Message], pace: Pace
) -> Sequence[Message]:
    """What the handlers yield. Raises WeftError where one asks for what is not recorded, or fails."""
    recorded = runs_of(trajectory).get(ROOT_RUN, RecordedRun(ROOT_RUN))
    code = _Handlers(table, messages, pace)
    run = ReplayRun(
        recorded, code, App("replay").functions, task_id=trajectory.task, meta=Meta(metadata={}), by_place=False
    )
    try:
        result = await run.advance()
    finally:
        await run.aclose()
    if isinstance(result, Failed):
        raise WeftError(f"the replay of task {trajectory.task} ended in a handler: {result.type}: {result.message}")
    return code.following
