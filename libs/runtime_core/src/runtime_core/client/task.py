"""One task, as its client sees it: wait for its end, read its stream, answer its questions, cancel it."""

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
from runtime_core.errors import BusError, InvalidInput
from runtime_core.wire.results import ENDED, StreamEvent, StreamingMode, TaskResponse, response_of, shown, stream_event


class Readers(Protocol):
    """Opens connections for blocking reads: a client."""

    async def open_reader(self, bus: EventBus) -> Transport: ...

    async def close_reader(self, reader: Transport) -> None: ...


class TaskHandle:
    """One task, as its client sees it."""

    def __init__(
        self, readers: Readers, task_id: str, partition: Replies, expected: asyncio.Future[Answer] | None = None
    ) -> None:
        """`expected` is a future of the end, where one was made before the submit."""
        self._readers = readers
        self.task_id = task_id
        self._partition = partition
        self._future = expected
        self._final: bytes | None = None

    def __repr__(self) -> str:
        return f"<TaskHandle {self.task_id}>"

    @property
    def bus(self) -> EventBus:
        """The task's partition, for tools that look at the broker itself."""
        return self._partition.bus

    async def result(self, timeout: float | None = None) -> TaskResponse:
        """Wait for the end. Raises TimeoutError after `timeout` seconds; the task goes on.

        Raises InvalidInput (`task_id`) for a task that the broker does not know (any more).
        """
        if self._final is not None:
            return response_of(self._final)
        future, self._future = self._future, None
        if future is None:
            future = self._partition.expect(self.task_id)
            if not await self._look():
                self._partition.forget(self.task_id, future)
                raise InvalidInput("task_id", f"no task {self.task_id!r} is known; it may be past its retention time")
        # A reply that was lost is found by the reader, which looks at the tasks themselves now and then.
        try:
            async with asyncio.timeout(timeout):
                self._final = (await future).value
        except TimeoutError:
            raise TimeoutError(f"task {self.task_id} has not ended within {timeout:g} s; it goes on") from None
        finally:
            if self._final is None:
                self._partition.forget(self.task_id, future)
        return response_of(self._final)

    async def _look(self) -> bool:
        """Take the answer from the task's own hash; False where there is no such task."""
        bus = self._partition.bus
        found = cast(list[Reply], await bus.transport.call("HMGET", bus.keys.task(self.task_id), "status", "out"))
        if found[1] is not None:
            self._partition.hand_out(self.task_id, Answer(cast(bytes, found[1])))
        return found[0] is not None

    async def stream(self, after: str = "0-0", *, mode: StreamingMode | None = None) -> AsyncGenerator[StreamEvent]:
        """The task's events from `after` on, the final one last. A later call goes on from any `entry_id`.

        `mode` chooses among them; None: all that is there. A task that was submitted without steps on its stream shows
        them from this call on, where the mode wants them. However the task ends, and however late this is called
        within the retention time, the last event is the final one.
        Output of an attempt that was repeated is marked by a higher `attempt` in the data.
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
                    event = stream_event(entry, fields)
                    cursor = event.entry_id
                    if mode is None or mode.shows(event.type, event.data):
                        yield event
                    if event.type.removeprefix("weft.task.") in ENDED:
                        return
        finally:
            await self._readers.close_reader(reader)

    async def _within_stream(self, cursor: str) -> str:
        """The cursor, or the start where the stream never came that far: a broker that lost its last writes."""
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
        """The final event of a task whose stream does not have it: it began after the end, or it expired.

        None where the stream goes on behind the cursor: the task may have ended after the read that found nothing.
        """
        bus = self._partition.bus
        found = cast(list[Reply], await bus.transport.call("HMGET", bus.keys.task(self.task_id), "status", "out"))
        if found[0] is None:
            raise InvalidInput("task_id", f"no task {self.task_id!r} is known; it may be past its retention time")
        if found[1] is None:
            return None
        if await bus.transport.call("XRANGE", bus.keys.out(self.task_id), f"({cursor}", "+", "COUNT", 1):
            return None
        data = msgspec.json.decode(cast(bytes, found[1]))
        return StreamEvent(cursor, f"weft.task.{data['status']}", data)

    async def show(self) -> dict[str, Any]:  # Any: JSON
        """What the broker knows of the task: status, agent, times, open steps. Raises InvalidInput where nothing."""
        bus = self._partition.bus
        raw = cast(list[bytes], await bus.transport.call("HGETALL", bus.keys.task(self.task_id)))
        if not raw:
            raise InvalidInput("task_id", f"no task {self.task_id!r} is known; it may be past its retention time")
        return shown(self.task_id, dict(zip(raw[::2], raw[1::2], strict=True)))

    async def cancel(self, reason: str = "cancelled by its user") -> str:
        """Cancel it; returns the status that it has now (`unknown`: a later submit of this id is refused)."""
        bus = self._partition.bus
        answer = await repeat_after_reconnect(lambda: bus.cancel(self.task_id, reason))
        return answer[1] if answer[0] == "ended" else answer[0]

    async def signal(self, request_id: str, value: Any) -> None:  # Any: JSON
        """Answer a question. Raises InvalidInput where it is not open (any more)."""
        if not isinstance(request_id, str):
            raise InvalidInput("request_id", f"{request_id!r} is no text; see `weft task show`")
        bus, data = self._partition.bus, codec.encode(value)
        # One id for all tries: an answer that counted is recognised, and not refused as a second one.
        event = f"client\n{secrets.token_hex(8)}"
        answer = await repeat_after_reconnect(lambda: bus.signal(self.task_id, request_id, data, event))
        check_answered(answer, self.task_id, request_id)

    async def delete(self) -> None:
        """Erase an ended task from the broker. Raises InvalidInput where it has not ended or is not known."""
        found = await self._partition.bus.erase(self.task_id)
        if found == "unknown":
            raise InvalidInput("task_id", f"no task {self.task_id!r} is known")
        if found != "OK":
            raise InvalidInput("task_id", f"the task is {found}: cancel it before you delete it")


def check_answered(answer: Sequence[str], task_id: str, request_id: str) -> None:
    """Raise InvalidInput where the broker has refused to take an answer to a question."""
    problems = {
        "unknown": ("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are"),
        "ended": ("task_id", f"the task {task_id!r} has ended ({answer[-1]})"),
        "answered": ("request_id", f"{request_id!r} was already answered, by somebody or by its deadline"),
        "no_request": ("request_id", f"the task has no open question {request_id!r}; see `weft task show {task_id}`"),
        "invalid": ("value", answer[-1]),
    }
    if answer[0] in problems:
        raise InvalidInput(*problems[answer[0]])
