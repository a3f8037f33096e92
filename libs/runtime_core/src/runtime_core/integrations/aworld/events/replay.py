"""Replays a recorded task: its code with the recorded results, or its messages to handlers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, cast

from runtime_core.app.app import App
from runtime_core.client.client import Client
from runtime_core.client.fork import ForkPlan, RecordedRun, from_record, runs_of
from runtime_core.client.replay import Replayed, ReplayRun, RunReplay, replay_code
from runtime_core.consumer.effects import Failed
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.integrations.aworld.events.handlers import HandlerTable
from runtime_core.integrations.aworld.events.manager import EventManager
from runtime_core.integrations.aworld.events.message import Message, events_of, message_id
from runtime_core.runs.ports import Meta
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import ForkJournal
from runtime_core.wire.ids import ROOT_RUN

if TYPE_CHECKING:
    from runtime_core.host.local import LocalApp
    from runtime_core.runs.context import AgentContext
    from runtime_core.trajectory.store import TrajectoryStore

Sleep: TypeAlias = Callable[[float], Awaitable[object]]
Source: TypeAlias = "TaskTrajectory | TrajectoryStore | Client"
Into: TypeAlias = "App | LocalApp | HandlerTable | Sink | Callable[[Message], Awaitable[object] | object]"


class Pace:
    """Keeps the recorded time between messages, divided by `speed`."""

    def __init__(self, speed: float | None, sleep: Sleep) -> None:
        self._speed = speed
        self._sleep = sleep
        self._last: float | None = None

    async def before(self, message: Message) -> None:
        last, self._last = self._last, message.timestamp
        if self._speed is not None and last is not None and message.timestamp > last:
            await self._sleep((message.timestamp - last) / self._speed)


class _ReplayManager(EventManager):
    """Collects what handlers emit and delivers nothing: the record already has what followed."""

    def __init__(self, ctx: AgentContext, table: HandlerTable) -> None:
        super().__init__(ctx, table)
        self.following: list[Message] = []

    async def emit_message(self, message: Message) -> Message:
        self.following.append(message)
        return message


class _Handlers:
    """The code of a run that passes recorded messages to handlers."""

    name = "replay"
    timeout_seconds = 86_400.0 * 365
    own_tools: Sequence[object] = ()

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
    """Return what the handlers yield. Raises WeftError if one fails or requests an unrecorded step."""
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
        raise WeftError(f"the replay of task {trajectory.task} failed in a handler: {result.type}: {result.message}")
    return code.following


def with_messages(replayed: Replayed) -> Replayed:
    """Return a replay of code with the messages that it emitted."""
    runs = {name: replace(run, messages=_messages(replayed.task_id, run)) for name, run in replayed.runs.items()}
    return replace(replayed, runs=runs, messages=runs[ROOT_RUN].messages if ROOT_RUN in runs else ())


def _messages(task: str, run: RunReplay) -> list[Message]:
    found = []
    for step, data in run.notes:
        if Message.is_message(data):
            assert isinstance(data, dict)  # is_message has checked it
            message = Message.from_dict(data)
            found.append(message.replace(id=message.id or message_id(task, run.run, step)))
    return found


async def replay_whole(trajectory: TaskTrajectory, local: LocalApp, until: str | None) -> Replayed:
    """Replay the code. If it behaves as recorded, also run the whole task in the LocalApp."""
    replayed = with_messages(await replay_code(trajectory, local.app, until))
    if until is not None or not replayed.run.same:
        return replayed
    run = runs_of(trajectory)[ROOT_RUN]
    # The journal has all results, so nothing runs again. Keep the id: some values derive from it.
    begun = ForkJournal(trajectory.task, "", run.journal(), started_ms=run.started_ms)
    session = trajectory.end.session if trajectory.end is not None else ""
    plan = ForkPlan(run, run.input, {"session_id": session}, begun)
    task = await local.client.start(plan.submission(task_id=trajectory.task))
    return replace(replayed, response=await task.result())


class Sink(Protocol):
    """Receives messages, like an EventManager."""

    async def emit_message(self, message: Message) -> object: ...


async def replay(
    source: Source,
    task_id: str,
    into: Into,
    *,
    namespace: str = "weft",
    speed: float | None = None,
    until: str | None = None,
    sleep: Sleep = asyncio.sleep,
) -> Replayed:
    """Replay a task as far as it is recorded. Tools and models are not called again.

    Args:
        source: A trajectory, a store with its `namespace`, or a client (while the record is still on the broker).
        into: Receives the replay.
            An App: the code of its agents runs in this process with the recorded results, run by run.
            A running LocalApp: the same. If the code behaves as recorded, the whole task then runs in the LocalApp,
            under its id and with its journal filled.
            A HandlerTable: its handlers get the recorded messages, and their requests get the recorded results.
            A function of a message, or an object with `emit_message`: it gets the messages in their original order.
            If the task emitted none, they are built from its steps.
        speed: Keeps the original time between messages: 1 as recorded, 2 twice as fast; None: no pauses.
        until: Stop before this message or step: the id of a message, a step of the first run (`3.0.1`), or a step of
            another run (`r/2:1`).
        sleep: Awaited for the pauses.

    Raises:
        InvalidInput: Nothing is recorded of the task, or `until` is not recorded.
    """
    if speed is not None and not (isinstance(speed, (int, float)) and speed > 0):
        raise InvalidInput("speed", f"{quoted(speed)} is not a number above 0; None replays without pauses")
    trajectory = await _trajectory(source, task_id, namespace)
    if isinstance(into, App):
        return with_messages(await replay_code(trajectory, into, until))
    if _is_local(into):
        return await replay_whole(trajectory, into, until)
    pace = Pace(speed, sleep)
    messages, stopped = _until(events_of(trajectory), until)
    if isinstance(into, HandlerTable):
        following = await replay_handlers(trajectory, into, messages, pace)
        return Replayed(task_id=task_id, messages=messages, following=following, stopped_at=stopped)
    give = _give(into)
    for message in messages:
        await pace.before(message)
        given = give(message)
        if inspect.isawaitable(given):
            await given
    return Replayed(task_id=task_id, messages=messages, stopped_at=stopped)


async def _trajectory(source: Source, task_id: str, namespace: str) -> TaskTrajectory:
    if isinstance(source, TaskTrajectory):
        found: TaskTrajectory | None = source
    elif isinstance(source, Client):
        found = await from_record((await source.task(task_id)).bus, source.namespace, task_id)
    else:
        found = await source.task(namespace, task_id)
    if found is None:
        raise InvalidInput("task_id", f"nothing is recorded of task {task_id!r}")
    return found


def _is_local(into: object) -> TypeGuard[LocalApp]:
    from runtime_core.host.local import LocalApp  # imported here: most replays do not need it

    return isinstance(into, LocalApp)


def _give(into: object) -> Callable[[Message], object]:
    emit = getattr(into, "emit_message", into)
    if not callable(emit):
        raise InvalidInput("into", f"{quoted(into)} cannot receive messages: pass an App, a HandlerTable or a function")
    return cast("Callable[[Message], object]", emit)


def _until(messages: list[Message], until: str | None) -> tuple[list[Message], str | None]:
    """Return the messages before the one with this id or step. Raises InvalidInput if there is no such message."""
    if until is None:
        return messages, None
    for at, message in enumerate(messages):
        if until in (message.id, message.id.rpartition("/")[2]):
            return messages[:at], message.id
    raise InvalidInput("until", f"{until!r} is neither the id nor the step of a message of this task")
