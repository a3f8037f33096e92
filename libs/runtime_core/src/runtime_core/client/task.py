"""The handle of a task: waits for its answer, reads its stream, answers its questions, cancels it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, cast

import msgspec

from runtime_core import codec
from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.durability import repeat_after_reconnect
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.replies import Answer, Replies
from runtime_core.errors import BusError, BusLost, InvalidInput
from runtime_core.wire.events import (
    ENDED,
    StreamEvent,
    StreamingMode,
    TaskResponse,
    describe_task,
    response_of,
    stream_event,
)


class Readers(Protocol):
    """Opens connections for blocking reads, as a client does."""

    async def open_reader(self, bus: EventBus) -> Transport: ...

    async def close_reader(self, reader: Transport) -> None: ...


def _time_out(future: asyncio.Future[Answer]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


class TaskHandle:
    """A submitted task."""

    def __init__(
        self, readers: Readers, task_id: str, partition: Replies, expected: asyncio.Future[Answer] | None = None
    ) -> None:
        """`expected` is a future of the answer that was created before the submit."""
        self._readers = readers
        self.task_id = task_id
        self._partition = partition
        self._future = expected
        self._final: bytes | None = None

    def __repr__(self) -> str:
        return f"<TaskHandle {self.task_id}>"

    @property
    def bus(self) -> EventBus:
        """The task's partition."""
        return self._partition.bus

    async def result(self, timeout: float | None = None) -> TaskResponse:
        """Wait until the task has ended, and return its response.

        Raises:
            TimeoutError: The task has not ended within `timeout` seconds. It continues.
            InvalidInput: The broker does not know the task, or no longer.
        """
        if self._final is not None:
            return response_of(self._final)
        future, self._future = self._future, None
        if future is None:
            future = self._partition.expect(self.task_id)
            if not await self._look():
                self._partition.forget(self.task_id, future)
                raise unknown_task(self.task_id)
        limit = None if timeout is None else future.get_loop().call_later(timeout, _time_out, future)
        # If the reply is lost, the reader finds the answer: it polls the tasks themselves.
        try:
            self._final = (await future).value
        except TimeoutError:
            raise TimeoutError(f"task {self.task_id} has not ended within {timeout:g} s; it continues") from None
        finally:
            if limit is not None:
                limit.cancel()
            if self._final is None:
                self._partition.forget(self.task_id, future)
        return response_of(self._final)

    async def _look(self) -> bool:
        """Read the answer from the task's hash. Return False if there is no such task."""
        bus = self._partition.bus
        found = cast(list[Reply], await bus.transport.call("HMGET", bus.keys.task(self.task_id), "status", "out"))
        if found[1] is not None:
            self._partition.hand_out(self.task_id, Answer(cast(bytes, found[1])))
        return found[0] is not None

    async def stream(self, after: str = "0-0", *, mode: StreamingMode | None = None) -> AsyncGenerator[StreamEvent]:
        """Yield the task's events after the entry `after`; the last one is the final event.

        `after` is the `entry_id` of an earlier event. `mode` selects events; None: all. If it selects steps, a task
        that was submitted without them adds them from now on. The final event is yielded however the task ends, and
        however late within its retention time. The output of a repeated attempt has a higher `attempt` in its data.
        """
        bus = self._partition.bus
        reader = await self._readers.open_reader(bus)
        await self._partition.bus.call("watch", self.task_id, "1" if mode is not None and mode.steps else "0")
        cursor = after
        try:
            while True:
                try:
                    reply = await reader.blocking(
                        "XREAD", "COUNT", 100, "BLOCK", 1000, "STREAMS", bus.keys.out(self.task_id), cursor
                    )
                except BusLost:
                    raise
                except BusError:
                    await asyncio.sleep(0.1)
                    continue
                if reply is None:
                    cursor = await self._within_stream(cursor)
                    ended = await self._ended_without_stream(cursor)
                    if ended is not None:
                        yield ended
                        return
                    continue
                for entry, fields in cast(list[list[list[Any]]], reply)[0][1]:  # Any: RESP2 shapes
                    event = stream_event(entry, fields, self.signal)
                    cursor = event.entry_id
                    if mode is None or mode.shows(event.type, event.data):
                        yield event
                    if event.type.removeprefix("weft.task.") in ENDED:
                        return
        finally:
            await self._readers.close_reader(reader)

    async def _within_stream(self, cursor: str) -> str:
        """Return the cursor; the start if the stream ends before it, because the broker lost its last writes."""
        bus = self._partition.bus
        newest = cast(
            list[Any], await bus.transport.call("XREVRANGE", bus.keys.out(self.task_id), "+", "-", "COUNT", 1)
        )
        if not newest:
            return cursor
        last = newest[0][0].decode()
        ahead = tuple(map(int, cursor.split("-"))) > tuple(map(int, last.split("-")))
        return "0-0" if ahead else cursor

    async def _ended_without_stream(self, cursor: str) -> StreamEvent | None:
        """Return the final event if the task has ended and its stream lacks it: it began later, or has expired.

        None if the stream has entries after the cursor: the task may have ended since the last read.
        """
        bus = self._partition.bus
        found = cast(list[Reply], await bus.transport.call("HMGET", bus.keys.task(self.task_id), "status", "out"))
        if found[0] is None:
            raise unknown_task(self.task_id)
        if found[1] is None:
            return None
        if await bus.transport.call("XRANGE", bus.keys.out(self.task_id), f"({cursor}", "+", "COUNT", 1):
            return None
        data = msgspec.json.decode(cast(bytes, found[1]))
        return StreamEvent(cursor, f"weft.task.{data['status']}", data)

    async def show(self) -> dict[str, Any]:  # Any: JSON
        """Return the task's status, agent, times and open steps. Raises InvalidInput if the broker does not know it."""
        bus = self._partition.bus
        raw = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.task(self.task_id)))
        if not raw:
            raise unknown_task(self.task_id)
        return describe_task(self.task_id, dict(zip(raw[::2], raw[1::2], strict=True)))

    async def cancel(self, reason: str = "cancelled by its user") -> str:
        """Cancel the task and return its status; `unknown` means that a later submit with this id is rejected."""
        bus = self._partition.bus
        answer = await repeat_after_reconnect(lambda: bus.cancel(self.task_id, reason))
        return answer[1] if answer[0] == "ended" else answer[0]

    async def signal(self, request_id: str, value: Any) -> None:  # Any: JSON
        """Answer a question. Raises InvalidInput if it is not open."""
        if not isinstance(request_id, str):
            raise InvalidInput("request_id", f"{request_id!r} is not text; see `weft task show`")
        bus, data = self._partition.bus, codec.encode(value)
        # One id for all tries, so that the broker recognizes a repeat of an accepted answer.
        event = f"client\n{secrets.token_hex(8)}"
        answer = await repeat_after_reconnect(lambda: bus.signal(self.task_id, request_id, data, event))
        check_answered(answer, self.task_id, request_id)

    async def delete(self) -> None:
        """Delete an ended task from the broker. Raises InvalidInput if it has not ended or is unknown."""
        found = await self._partition.bus.erase(self.task_id)
        if found == "unknown":
            raise unknown_task(self.task_id)
        if found != "OK":
            raise InvalidInput("task_id", f"the task is {found}: cancel it before you delete it")


def unknown_task(task_id: str) -> InvalidInput:
    """Return the error for a task that the broker does not know."""
    return InvalidInput("task_id", f"there is no task {task_id!r}; its retention time may be over")


def check_answered(answer: Sequence[str], task_id: str, request_id: str) -> None:
    """Raise InvalidInput if the broker rejected an answer to a question."""
    problems = {
        "unknown": ("task_id", f"there is no task {task_id!r}; see `weft task list`"),
        "ended": ("task_id", f"task {task_id!r} has ended ({answer[-1]})"),
        "answered": ("request_id", f"{request_id!r} was already answered, or its deadline has passed"),
        "no_request": ("request_id", f"the task has no open question {request_id!r}; see `weft task show {task_id}`"),
        "invalid": ("value", answer[-1]),
    }
    if answer[0] in problems:
        raise InvalidInput(*problems[answer[0]])
