"""The handle of a task: waits for its answer, reads its stream, answers its questions, cancels it.

All readers of a client that follow one task share a connection, and what it reads (`Tails`).
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, cast

import msgspec

from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.partition import repeat_after_reconnect
from runtime_core.bus.replies import Answer, Replies
from runtime_core.client.task_view import MAX_SCANNED, Row, read_task
from runtime_core.errors import BusError, BusLost, InvalidInput, JournalMoved
from runtime_core.state_manager.admission import answer_question
from runtime_core.wire import codec
from runtime_core.wire.codec import wrong_cursor
from runtime_core.wire.events import (
    Answerer,
    StreamEvent,
    StreamingMode,
    TaskResponse,
    describe_task,
    response_of,
    stream_event,
)
from runtime_core.wire.ids import checked_key, checked_message, fingerprint
from runtime_core.wire.step import ENDED

PAGE_ENTRIES = 100
"""The most entries of one read."""
PAGE_BYTES = 256 * 1024
"""About the most bytes of one read, and what a slow reader keeps of it."""
PAGES_AT_ONCE = 4
"""How many readers of a client may read older entries at the same time: the broker holds their replies."""
WINDOW_EVENTS = 1_000
"""How many of the latest events are kept for readers that are a little slower than the others."""
WINDOW_BYTES = 1024 * 1024
"""The most bytes of these events."""
TASKS_PAGE = 500
"""How many open tasks one read searches for questions."""
IDLE_MS = 1_000
"""How often a tail without new entries checks whether the task has ended in another way."""

EntryId = tuple[int, int]


def parsed_id(entry_id: str) -> EntryId:
    """Return an entry id as two numbers, which can be compared. Raises InvalidInput (`after`)."""
    first, _, second = entry_id.partition("-")
    try:
        return int(first), int(second or 0)
    except ValueError:
        raise InvalidInput("after", f"{entry_id!r} is not the `entry_id` of an event") from None


class _PageSize:
    """How many entries the next read takes: about `PAGE_BYTES`, if they are as large as those of the last one."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries = 1

    def saw(self, sizes: Sequence[int]) -> None:
        fitting = PAGE_BYTES * len(sizes) // max(1, sum(sizes))
        self.entries = max(1, min(PAGE_ENTRIES, 4 * self.entries, fitting))


class Tail:
    """The end of one task's stream, as one connection reads it. Belongs to one event loop."""

    def __init__(
        self, bus: EventBus, task_id: str, answerer: Answerer, start: EntryId, paging: asyncio.Semaphore
    ) -> None:
        """Read the entries after `start`; `answerer` answers the task's questions.

        `paging` bounds the reads of older entries.
        """
        self.readers = 0
        """How many follow it."""
        self.error: Exception | None = None
        """Why it has ended."""
        self._bus = bus
        self._task_id = task_id
        self._key = bus.keys.out(task_id)
        self._answerer = answerer
        self._paging = paging
        self._size = _PageSize()
        self._ids: list[EntryId] = []
        self._events: list[StreamEvent] = []
        self._sizes: list[int] = []
        self._bytes = 0
        self._before = start
        """The entry before the first one that is kept."""
        self._waiting: list[asyncio.Future[None]] = []
        self._looks = 0
        """How often it has read the task and the whole stream."""
        self._newest: EntryId | None = None
        """The newest entry of the stream at the last check; None: it has none, or the tail has read more since."""
        self._final: dict[str, Any] | None = None  # Any: JSON
        """The data of the final event, if the task has ended and its stream lacks the event."""
        self.reading: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        if self.reading is not None:
            self.reading.cancel()
            await asyncio.wait((self.reading,))

    async def events(self, after: EntryId) -> AsyncGenerator[StreamEvent]:
        """Yield the events after an entry, up to the final event. Raises BusError and InvalidInput."""
        cursor, looks, size = after, self._looks, _PageSize()
        while True:
            behind = cursor < self._before
            found = await self._page(cursor, size) if behind else self._kept(cursor)
            for event in found:
                cursor = parsed_id(event.entry_id)
                yield event
                if event.type.removeprefix("weft.task.") in ENDED:
                    return
            if found:
                continue
            if behind:
                cursor = max(cursor, self._before)  # these entries are gone
            elif self.error is not None:
                raise self.error
            elif self._newest is not None and cursor > self._newest and looks < self._looks:
                cursor = (0, 0)  # the broker has lost its last writes
            elif self._final is not None:
                yield StreamEvent(_text(cursor), f"weft.task.{self._final['status']}", self._final)
                return
            else:
                await self._change()

    def _kept(self, cursor: EntryId) -> list[StreamEvent]:
        at = bisect_right(self._ids, cursor)
        return self._events[at : at + PAGE_ENTRIES]

    async def _page(self, cursor: EntryId, size: _PageSize) -> list[StreamEvent]:
        """Return entries that are no longer kept, or were never read here: at least one, and few of large ones."""
        async with self._paging:
            page = await self._bus.transport.call(
                "XRANGE", self._key, f"({_text(cursor)}", _text(self._before), "COUNT", size.entries
            )
        found, sizes = cast(list[list[Any]], page), [0]
        for at, (_, fields) in enumerate(found):
            sizes.append(sum(map(len, fields)))
            if sum(sizes) > PAGE_BYTES:
                del found[at + 1 :]  # its reader may never come to the rest
        size.saw(sizes[1:])
        return [stream_event(entry, fields, self._answerer) for entry, fields in found]

    async def _change(self) -> None:
        """Wait until the tail has read entries, or has checked the task."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def read(self, reader: Transport) -> None:
        """Read until this is cancelled. Raises BusLost, and InvalidInput if the broker does not know the task."""
        cursor = self._before
        while True:
            try:
                cursor = await self._read_once(reader, cursor)
            except BusLost:
                raise
            except BusError:
                await asyncio.sleep(0.1)
            self._wake()

    def fail(self, error: Exception) -> None:
        """Let every reader raise this error."""
        self.error = error
        self._wake()

    async def _read_once(self, reader: Transport, cursor: EntryId) -> EntryId:
        """Read once. Return the last entry that was read."""
        reply = await reader.blocking(
            "XREAD", "COUNT", self._size.entries, "BLOCK", IDLE_MS, "STREAMS", self._key, _text(cursor)
        )
        if reply is None:
            return await self._look(cursor)
        page = cast(list[list[list[Any]]], reply)[0][1]  # Any: RESP2 shapes
        sizes = [sum(map(len, fields)) for _, fields in page]
        for (entry, fields), size in zip(page, sizes, strict=True):
            cursor = self._add(stream_event(entry, fields, self._answerer), size)
        self._size.saw(sizes)
        return cursor

    def _add(self, event: StreamEvent, size: int) -> EntryId:
        entry = parsed_id(event.entry_id)
        self._newest = None
        self._ids.append(entry)
        self._events.append(event)
        self._sizes.append(size)
        self._bytes += size
        dropped = 0
        while len(self._ids) - dropped > WINDOW_EVENTS or (self._bytes > WINDOW_BYTES and dropped < len(self._ids)):
            self._bytes -= self._sizes[dropped]
            self._before = self._ids[dropped]
            dropped += 1
        if dropped:
            del self._ids[:dropped], self._events[:dropped], self._sizes[:dropped]
        return entry

    async def _look(self, cursor: EntryId) -> EntryId:
        """Check whether the task has ended, and whether the stream ends before the cursor. Return where it continues.

        The stream lacks the final event if it began after the end, or has expired.
        """
        transport = self._bus.transport
        found = cast(list[Reply], await transport.call("HMGET", self._bus.keys.task(self._task_id), "status", "out"))
        if found[0] is None:
            raise unknown_task(self._task_id)
        last = cast(list[Any], await transport.call("XREVRANGE", self._key, "+", "-", "COUNT", 1))
        newest = parsed_id(last[0][0].decode()) if last else None
        self._newest = newest
        self._looks += 1
        if newest is not None and cursor > newest:
            self._ids, self._events, self._sizes, self._bytes = [], [], [], 0
            cursor = self._before = newest
        elif found[1] is not None and (newest is None or newest <= cursor):
            self._final = msgspec.json.decode(cast(bytes, found[1]))
        return cursor


def _text(entry: EntryId) -> str:
    return f"{entry[0]}-{entry[1]}"


def unknown_task(task_id: str) -> InvalidInput:
    """Return the error for a task that the broker does not know."""
    return InvalidInput("task_id", f"there is no task {task_id!r}; its retention time may be over")


class _QuestionPlace(msgspec.Struct, array_like=True, frozen=True, order=True):
    """The place of an open question in a list."""

    partition: int
    opened_ms: int = 0
    """When its task was opened."""
    task: str = ""
    request: str = ""
    """The id of the question, or of a long one a digest: a cursor must fit into a parameter."""


async def open_questions(
    buses: Sequence[EventBus], limit: int, tenant: str = "", cursor: str = ""
) -> tuple[list[Row], str]:
    """Return open questions of each partition's oldest tasks, and the cursor of the next page (empty: the end).

    Each has its task's agent and creation time. With `tenant`, only those of its tasks whose ids begin with its name.
    Raises InvalidInput (`cursor`).
    """
    after = _place_in(cursor) if cursor else _QuestionPlace(0)
    found: list[tuple[_QuestionPlace, Row]] = []
    for partition, bus in enumerate(buses):
        if partition >= after.partition and len(found) <= limit:
            start = max(after, _QuestionPlace(partition))
            found += await _questions_after(bus, start, limit + 1 - len(found), tenant)
    rows = [row for _, row in found[:limit]]
    if len(found) <= limit:
        return rows, ""
    return rows, base64.urlsafe_b64encode(msgspec.json.encode(found[limit - 1][0])).decode()


async def _questions_after(
    bus: EventBus, after: _QuestionPlace, limit: int, tenant: str
) -> list[tuple[_QuestionPlace, Row]]:
    """Return questions of a partition after a place: at least `limit` of them, if there are that many."""
    found: list[tuple[_QuestionPlace, Row]] = []
    call, keys = bus.transport.call, bus.keys
    index, prefix = (keys.open_tasks_of(tenant), f"{tenant}.") if tenant else (keys.open_tasks, "")
    for start in range(0, MAX_SCANNED, TASKS_PAGE):
        read = await call("ZRANGE", index, after.opened_ms, "+inf", "BYSCORE", "LIMIT", start, TASKS_PAGE, "WITHSCORES")
        flat = [item.decode() for item in cast(list[bytes], read)]
        opened = [(task, int(float(at))) for task, at in zip(flat[::2], flat[1::2], strict=True)]
        own = [each for each in opened if each[0].startswith(prefix)]
        replies = [call("HMGET", keys.task(task), "status", "fl") for task, _ in own]
        for (task, at), reply in zip(own, replies, strict=True):
            status, flags = cast(list[bytes | None], await reply)
            # Without the flag `o`, a task has written nothing to its stream, so it has asked nothing.
            if status is None or status.decode() in ENDED or b"o" not in (flags or b""):
                continue
            view = await read_task(bus, task, letters=False, calls=False) or {}
            for question in view.get("questions", ()):
                request = str(question["request_id"])
                request = request if len(request) <= 64 else fingerprint(request)
                where = _QuestionPlace(after.partition, at, task, request)
                if where > after:
                    found.append((where, {**question, "agent": view["agent"], "created": view["created"]}))
        if len(opened) < TASKS_PAGE or len(found) >= limit:
            break
    return sorted(found, key=lambda each: each[0])


def _place_in(cursor: str) -> _QuestionPlace:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor.encode("ascii")), type=_QuestionPlace)
    except (msgspec.MsgspecError, ValueError):
        raise wrong_cursor(cursor) from None


class Readers(Protocol):
    """Opens connections for blocking reads, as a client does."""

    async def open_reader(self, bus: EventBus) -> Transport: ...

    async def close_reader(self, reader: Transport) -> None: ...


class Tails:
    """The streams that a client follows."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._paging = asyncio.Semaphore(PAGES_AT_ONCE)
        self._tails: dict[str, Tail] = {}

    async def follow(self, bus: EventBus, task_id: str, answerer: Answerer, after: str) -> AsyncGenerator[StreamEvent]:
        """Yield the events of a task's stream after the entry `after`, up to the final event.

        The first reader of a task opens a connection, and the last one closes it. Raises BusError, and InvalidInput if
        the broker does not know the task.
        """
        start, key = parsed_id(after), bus.keys.out(task_id)
        tail = self._tails.get(key)
        if tail is None or tail.error is not None:
            tail = self._tails[key] = Tail(bus, task_id, answerer, start, self._paging)
            tail.reading = asyncio.create_task(self._read(bus, tail), name=f"stream of {task_id}")
        tail.readers += 1
        events = tail.events(start)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()
            tail.readers -= 1
            if not tail.readers:
                if self._tails.get(key) is tail:
                    del self._tails[key]
                await tail.stop()

    async def _read(self, bus: EventBus, tail: Tail) -> None:
        try:
            reader = await self._readers.open_reader(bus)
            try:
                await tail.read(reader)
            finally:
                await self._readers.close_reader(reader)
        except Exception as error:
            tail.fail(error)


def _time_out(future: asyncio.Future[Answer]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


class TaskHandle:
    """A submitted task: wait for it, follow its output, answer its questions, cancel it. Times are in seconds.

    `Client.submit` and `Client.task` return it. Any number of handles may exist for one task, in any process. Dropping
    one does not affect the task. What asks the broker raises InvalidInput, field `task_id`, once the broker has
    forgotten the task.
    """

    def __init__(
        self, tails: Tails, task_id: str, partition: Replies, expected: asyncio.Future[Answer] | None = None
    ) -> None:
        """`expected` is a future of the answer that was created before the submit."""
        self._tails = tails
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
            self._partition.mark_requested((self.task_id,))
        limit = None if timeout is None else future.get_loop().call_later(timeout, _time_out, future)
        # If the reply is lost, the reader finds the answer: it polls the tasks themselves.
        try:
            self._final = (await future).value
        except TimeoutError:
            raise TimeoutError(f"task {self.task_id} has not ended within {timeout:g} s; it continues") from None
        except JournalMoved:
            raise unknown_task(self.task_id) from None
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
        however late within its retention time. `TaskOutput` collects the output of the latest attempts.

        All readers of this client that follow the task share a connection, and the data of the events: do not change
        it. Raises InvalidInput if the broker does not know the task, or no longer.
        """
        bus = self._partition.bus
        await bus.call("watch", self.task_id, "1" if mode is not None and mode.steps else "0")
        events = self._tails.follow(bus, self.task_id, self.signal, after)
        try:
            async for event in events:
                if mode is None or mode.shows(event.type, event.data):
                    yield event
        finally:
            await events.aclose()

    async def exists(self) -> bool:
        """Return whether the broker knows the task."""
        bus = self._partition.bus
        return bool(await bus.transport.call("EXISTS", bus.keys.task(self.task_id)))

    async def has_ended_at(self, entry_id: str, *, without_entry: bool = False) -> bool:
        """Return whether the task has ended and this entry of its stream is its final event.

        With `without_entry` the final event followed this entry and has no entry itself.
        """
        bus = self._partition.bus
        status = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(self.task_id), "status"))
        if (status or b"").decode() not in ENDED:
            return False
        later = cast(
            list[Any], await bus.transport.call("XRANGE", bus.keys.out(self.task_id), entry_id, "+", "COUNT", 2)
        )
        if without_entry:
            return all(entry[0].decode() == entry_id for entry in later)
        return len(later) == 1 and (
            later[0][0].decode() == entry_id and stream_event(*later[0]).type.removeprefix("weft.task.") in ENDED
        )

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
        """Answer a question. Raises InvalidInput if it is not open, or expects a different value, as in
        `value.topic`."""
        if not isinstance(request_id, str):
            raise InvalidInput("request_id", f"{request_id!r} is not text; see `weft task show`")
        bus, data = self._partition.bus, codec.encode(value)
        # One id for all tries, so that the broker recognizes a repeat of an accepted answer.
        event = f"client\n{secrets.token_hex(8)}"
        answer = await repeat_after_reconnect(lambda: answer_question(bus, self.task_id, request_id, data, event))
        check_answered(answer, self.task_id, request_id)

    async def send(self, name: str, value: Any = None, *, id: str = "") -> None:  # Any: JSON
        """Send a message to the running task, which receives it with `ctx.receive(name)`, now or later.

        A second message with the same `id` (text; empty: a new one) is dropped. Up to 100 messages and 256 KiB wait for
        a task. Raises InvalidInput if the task is unknown (`task_id`), has ended, or keeps too many messages, and if
        the id was used for a different value (`id`).
        """
        name, bus, data = checked_message("name", name), self._partition.bus, codec.encode(value)
        event = f"client\n{checked_key('id', id) or secrets.token_hex(8)}"
        answer = await repeat_after_reconnect(lambda: bus.send_message(self.task_id, name, data, event))
        check_sent(answer, self.task_id, name)

    async def delete(self) -> None:
        """Delete an ended task from the broker. Raises InvalidInput if it has not ended or is unknown."""
        found = await self._partition.bus.erase(self.task_id)
        if found == "unknown":
            raise unknown_task(self.task_id)
        if found != "OK":
            raise InvalidInput("task_id", f"the task is {found}: cancel it before you delete it")


def check_sent(answer: Sequence[str], task_id: str, name: str) -> None:
    """Raise InvalidInput if the broker rejected a message to a task."""
    problems = {
        "unknown": ("task_id", f"there is no task {task_id!r}; see `weft task list`"),
        "ended": ("task_id", f"task {task_id!r} has ended ({answer[-1]}), so it receives no message {name!r}"),
        "full": ("task_id", f"task {task_id!r} {answer[-1]}: wait until it has received some with ctx.receive"),
        "reused": ("id", f"a message {name!r} with this id and a different value was sent before: use a new id"),
    }
    if answer[0] in problems:
        raise InvalidInput(*problems[answer[0]])


def check_answered(answer: Sequence[str], task_id: str, request_id: str) -> None:
    """Raise InvalidInput if the broker rejected an answer to a question."""
    problems = {
        "unknown": ("task_id", f"there is no task {task_id!r}; see `weft task list`"),
        "ended": ("task_id", f"task {task_id!r} has ended ({answer[-1]})"),
        "answered": ("request_id", f"{request_id!r} was already answered, or its deadline has passed"),
        "no_request": ("request_id", f"the task has no open question {request_id!r}; see `weft task show {task_id}`"),
    }
    if answer[0] == "invalid":
        raise InvalidInput(answer[2], answer[1])
    if answer[0] in problems:
        raise InvalidInput(*problems[answer[0]])
