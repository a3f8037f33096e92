"""Replays a recorded task: its code on the recorded results, or its messages to what it sends them to."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard, cast

from runtime_core.app.app import App
from runtime_core.aworld.events.history import events_of
from runtime_core.aworld.events.manager import HandlerTable
from runtime_core.aworld.events.message import Message
from runtime_core.client.client import Client
from runtime_core.client.recorded_runs import from_record
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.replay.code import replay_code, replay_whole
from runtime_core.replay.handlers import Pace, Sleep, replay_handlers
from runtime_core.replay.replayed import Replayed
from runtime_core.trajectory.reading import TaskTrajectory

if TYPE_CHECKING:
    from runtime_core.host.local import LocalApp
    from runtime_core.trajectory.store import TrajectoryStore


class Sink(Protocol):
    """Takes messages, as an EventManager does."""

    async def emit_message(self, message: Message) -> object: ...


Source: TypeAlias = "TaskTrajectory | TrajectoryStore | Client"
Into: TypeAlias = "App | LocalApp | HandlerTable | Sink | Callable[[Message], Awaitable[object] | object]"


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
    """Replay a task that has ended or goes on, as far as it is recorded. Nothing is called again.

    `into` an App: its agents' code runs on the recorded results, in this process, each run by itself. `until` is a
    step of the first run (`3.0.1`) or of another (`r/2:1`), or the id of a message. A LocalApp that runs: the same;
    where all is as it was, the whole task runs in it then, under its id and with its journal filled.

    `into` a HandlerTable: its handlers get the recorded messages, and what they ask for is answered from the record. A
    function of a message, or an object with `emit_message`: it gets the messages, in their original order; those of a
    task that emitted none are made from its steps. `until` is then the id of a message or its step.

    `speed` keeps the original spacing of messages: 1 as it was, 2 twice as fast; None: at once. `source` is a
    trajectory, a store with its `namespace`, or a client (while the record is still on the broker). Raises
    InvalidInput for a task of which nothing is recorded.
    """
    if speed is not None and not (isinstance(speed, (int, float)) and speed > 0):
        raise InvalidInput("speed", f"{quoted(speed)} is not a number above 0; None replays at once")
    trajectory = await _trajectory(source, task_id, namespace)
    if isinstance(into, App):
        return await replay_code(trajectory, into, until)
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
    from runtime_core.host.local import LocalApp  # here, since most replays need none of what it stands on

    return isinstance(into, LocalApp)


def _give(into: object) -> Callable[[Message], object]:
    emit = getattr(into, "emit_message", into)
    if not callable(emit):
        raise InvalidInput("into", f"{quoted(into)} takes no messages: give an App, a HandlerTable or a function")
    return cast("Callable[[Message], object]", emit)


def _until(messages: list[Message], until: str | None) -> tuple[list[Message], str | None]:
    """The messages before that of this id or step. Raises InvalidInput where there is no such message."""
    if until is None:
        return messages, None
    for at, message in enumerate(messages):
        if until in (message.id, message.id.rpartition("/")[2]):
            return messages[:at], message.id
    raise InvalidInput("until", f"{until!r} is no message of this task: neither an id nor the step of one")
