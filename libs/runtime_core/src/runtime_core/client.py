"""The client: submits tasks, waits for their ends, reads their streams.

It outlives a restart of the broker: calls are repeated under the same id after a reconnect, and an answer that the
reply stream has lost is found in the task's hash.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import msgspec

from runtime_core import codec
from runtime_core.admission import Admission
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.bus.transport import Reply, Transport
from runtime_core.bus.values import NotYet
from runtime_core.embedded import find_endpoint
from runtime_core.envelope import Envelope
from runtime_core.errors import BusError, ConfigurationError, InvalidInput, Rejected, WeftError
from runtime_core.identifiers import task_id_of
from runtime_core.submission import SUBMIT, Submission, digest, parse_submit
from runtime_core.told import ENDED, StreamEvent, TaskFailed, TaskResponse, response_of, shown, stream_event

LOOK_SECONDS = 10.0
LOOK_AT_ONCE = 1000
REPLY_SECONDS = 600
"""How long the broker keeps a reply stream that its client has stopped reading."""
TRIM_EVERY = 1000
"""How many replies are read before those on the broker are removed."""


@dataclass(slots=True)
class _Partition:
    """One partition's reply stream and who waits on it."""

    bus: EventBus
    stream: str
    reader: Transport
    cursor: str = "0-0"
    waiting: dict[str, list[asyncio.Future[bytes]]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Client:
    """A connection to a namespace: `async with Client.connect("redis://…") as client`."""

    def __init__(self, url: str | None, namespace: str, partitions: int | None, source: str) -> None:
        self._url = url
        self._namespace = namespace
        self._wanted_partitions = partitions
        self._source = source
        self._name = secrets.token_hex(6)
        self._partitions: list[_Partition] = []
        self._transports: list[Transport] = []
        self._admission: Admission | None = None

    @classmethod
    def connect(
        cls, url: str | None = None, *, namespace: str | None = None, partitions: int | None = None, source: str = ""
    ) -> Client:
        """A client of the broker at `url`; without one, WEFT_REDIS_URL or the server that `weft up` has started here.

        `source` goes into the ids of submits: give one, with your own event ids, to make repeats across processes
        recognisable. Nothing is connected before `async with`.
        """
        return cls(url, namespace or os.environ.get("WEFT_NAMESPACE") or "weft", partitions, source)

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. Raises ConfigurationError where no broker answers."""
        url = self._url or os.environ.get("WEFT_REDIS_URL") or _embedded_url()
        first = await self._open_transport(url)
        partitions = self._wanted_partitions or await _stored_partitions(first, self._namespace)
        buses = []
        for keys in await open_namespace(first, self._namespace, partitions):
            # One for each partition: in a Cluster each may live on another server.
            transport = first if partitions == 1 else await self._open_transport(url, like=first)
            bus = EventBus(transport, keys, durability=os.environ.get("WEFT_DURABILITY") or "fast")
            buses.append(bus)
            self._partitions.append(
                _Partition(bus, keys.reply(self._name), await self._open_transport(url, like=transport))
            )
        self._admission = Admission(buses)
        for partition in self._partitions:
            partition.task = asyncio.create_task(self._read_replies(partition), name="replies")

    async def close(self) -> None:
        """Stop waiting and let go of the connections. Tasks go on."""
        for partition in self._partitions:
            if partition.task is not None:
                partition.task.cancel()
                await asyncio.wait((partition.task,))
            for futures in partition.waiting.values():
                for future in futures:
                    future.cancel()
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(0.5):
                    await partition.bus.transport.call("DEL", partition.stream)
        for transport in self._transports:
            await transport.close()
        self._partitions, self._transports = [], []

    # -- tasks -------------------------------------------------------------------------------------------------

    async def submit(
        self,
        agent: str,
        input: Any = None,  # Any: whatever JSON can hold
        *,
        key: str = "",
        task_id: str | None = None,
        session_id: str = "",
        max_steps: int | None = None,
        timeout_seconds: float | None = None,
        metadata: dict[str, Any] | None = None,  # Any: JSON
        event_id: str | None = None,
        stream: bool = False,
        traceparent: str = "",
        timeout: float | None = 60.0,
    ) -> TaskHandle:
        """Start a task; the handle waits for it.

        `key` names the agent's instance. `task_id` makes a repeat return the same task. `stream=True` keeps the final
        event on the task's stream even where the agent streams nothing. Waits up to `timeout` seconds for a broker
        that is away and for the first agent-handler; raises `Rejected` with the field that is wrong.
        """
        event = event_id or task_id or secrets.token_hex(8)
        source = self._source or ("anonymous" if task_id or event_id else f"client/{self._name}")
        body: dict[str, object] = {"agent": agent, "input": input}
        if key:
            body["key"] = key
        if task_id:
            body["task_id"] = task_id
        if session_id:
            body["session_id"] = session_id
        conf = {
            name: value
            for name, value in (("max_steps", max_steps), ("timeout_seconds", timeout_seconds))
            if value is not None
        }
        if conf:
            body["conf"] = conf
        if metadata:
            body["metadata"] = metadata
        if len(body) > 2 or event_id:
            envelope = Envelope(id=event, source=source, type=SUBMIT, traceparent=traceparent, data=codec.encode(body))
            submission = parse_submit(envelope)
            task = submission.task_id
        else:
            # The same without the detour: most submits are of this kind, and there is nothing in it to refuse.
            task = task_id_of(source, event)
            if len(data := codec.encode(input)) > codec.MAX_DATA_BYTES:
                raise InvalidInput(
                    "data.input", f"is {len(data)} bytes, over the limit of {codec.MAX_DATA_BYTES}; send a reference"
                )
            submission = Submission(
                task_id=task,
                agent=agent,
                input_json=data,
                source=source,
                event_id=event,
                digest=digest(SUBMIT, body),
                traceparent=traceparent,
                partition_key=task,
            )
        admission = self._ready()
        partition = self._partitions[admission.partition_for(submission)]
        handle = TaskHandle(self, task, partition)
        expected = handle._expect()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            submitted = await self._admit(admission, submission, partition.stream, stream, deadline)
        except BaseException:
            handle._forget(expected)
            raise
        if submitted != task:
            handle._forget(expected)
            handle = TaskHandle(self, submitted, partition)
        return handle

    async def _admit(
        self, admission: Admission, submission: Submission, reply: str, stream: bool, deadline: float | None
    ) -> str:
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    return (await admission.admit(submission, reply=reply, streamed=stream)).task
            except NotYet as error:
                if left is not None and left < 0.2:
                    raise Rejected(error.field, error.message, None, submission.task_id) from None
                await asyncio.sleep(0.1)
            except TimeoutError:
                raise Rejected(
                    "timeout", "the broker did not answer in time; submit again with the same task_id",
                    1.0, submission.task_id,
                ) from None  # fmt: skip

    async def task(self, task_id: str) -> TaskHandle:
        """A handle of a task that was submitted before, by whomever."""
        bus = await self._ready().find(task_id)
        return TaskHandle(self, task_id, self._partitions[bus.keys.partition])

    def _ready(self) -> Admission:
        if self._admission is None:
            raise WeftError("the client is not connected: use `async with Client.connect(…) as client`")
        return self._admission

    @property
    def buses(self) -> Sequence[EventBus]:
        """The partitions, for tools that look at the broker itself."""
        return [partition.bus for partition in self._partitions]

    # -- connections -------------------------------------------------------------------------------------------

    async def _open_transport(self, url: str, like: Transport | None = None) -> Transport:
        if like is not None and url.startswith("memory://"):
            return like
        transport = await connect(url)
        self._transports.append(transport)
        return transport

    async def _read_replies(self, partition: _Partition) -> None:
        """Hand out the ends of tasks as they come; after a silence or a reconnect, look at the tasks themselves."""
        keep_at, look_at, read = 0.0, time.monotonic() + LOOK_SECONDS, 0
        while True:
            try:
                if time.monotonic() > keep_at or read >= TRIM_EVERY:
                    await self._keep_stream(partition)
                    keep_at, read = time.monotonic() + REPLY_SECONDS / 10, 0
                reply = await partition.reader.blocking(
                    "XREAD", "COUNT", 1000, "BLOCK", 2000, "STREAMS", partition.stream, partition.cursor
                )
            except BusError:
                keep_at = 0.0
                await asyncio.sleep(0.1)
                await self._look(partition)
                continue
            if reply is None:
                await self._look(partition)
                continue
            entries = cast(list[list[list[Any]]], reply)[0][1]  # Any: RESP2 shapes
            read += len(entries)
            for entry, fields in entries:
                partition.cursor = entry.decode()
                self._hand_out(partition, fields[1].decode(), fields[3])
            if time.monotonic() > look_at:
                await self._look(partition)
                look_at = time.monotonic() + LOOK_SECONDS

    async def _keep_stream(self, partition: _Partition) -> None:
        """The stream exists while its client lives: the bus writes only to a stream that is there."""
        call = partition.bus.transport.call
        async with asyncio.timeout(10):
            await partition.bus.make_group(partition.stream, "client")
            await call("EXPIRE", partition.stream, REPLY_SECONDS)
            await call("XTRIM", partition.stream, "MINID", partition.cursor)

    async def _look(self, partition: _Partition) -> None:
        """Look at the tasks that are waited for: the answer of one may have been lost with a connection."""
        bus = partition.bus
        tasks = list(partition.waiting)[:LOOK_AT_ONCE]
        looks = [bus.transport.call("HGET", bus.keys.task(task), "out") for task in tasks]
        try:
            async with asyncio.timeout(5):
                for task, look in zip(tasks, looks, strict=True):
                    final = await look
                    if final is not None:
                        self._hand_out(partition, task, cast(bytes, final))
        except (BusError, TimeoutError):
            return

    def _hand_out(self, partition: _Partition, task: str, final: bytes) -> None:
        for future in partition.waiting.pop(task, ()):
            if not future.done():
                future.set_result(final)


class TaskHandle:
    """One task, as its client sees it."""

    def __init__(self, client: Client, task_id: str, partition: _Partition) -> None:
        self._client = client
        self.task_id = task_id
        self._partition = partition
        self._future: asyncio.Future[bytes] | None = None
        self._final: bytes | None = None

    def __repr__(self) -> str:
        return f"<TaskHandle {self.task_id}>"

    def _expect(self) -> asyncio.Future[bytes]:
        """A future of the end, which one caller may await and cancel."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._partition.waiting.setdefault(self.task_id, []).append(future)
        self._future = future
        return future

    def _forget(self, future: asyncio.Future[bytes]) -> None:
        futures = self._partition.waiting.get(self.task_id, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                self._partition.waiting.pop(self.task_id, None)

    async def result(self, timeout: float | None = None) -> TaskResponse:
        """Wait for the end. Raises TimeoutError after `timeout` seconds; the task goes on.

        Raises InvalidInput (`task_id`) for a task that the broker does not know (any more).
        """
        if self._final is not None:
            return response_of(self._final)
        future, self._future = self._future, None
        if future is None:
            future = self._expect()
            self._future = None
            if not await self._look():
                self._forget(future)
                raise InvalidInput("task_id", f"no task {self.task_id!r} is known; it may be past its retention time")
        # A reply that was lost is found by the reader, which looks at the tasks themselves now and then.
        try:
            async with asyncio.timeout(timeout):
                self._final = await future
        except TimeoutError:
            raise TimeoutError(f"task {self.task_id} has not ended within {timeout:g} s; it goes on") from None
        finally:
            if self._final is None:
                self._forget(future)
        return response_of(self._final)

    async def _look(self) -> bool:
        """Take the answer from the task's own hash; False where there is no such task."""
        bus = self._partition.bus
        found = cast(list[Reply], await bus.transport.call("HMGET", bus.keys.task(self.task_id), "status", "out"))
        if found[1] is not None:
            self._client._hand_out(self._partition, self.task_id, cast(bytes, found[1]))
        return found[0] is not None

    async def stream(self, after: str = "0-0") -> AsyncIterator[StreamEvent]:
        """The task's events from `after` on, the final one last. A later call goes on from any `entry_id`.

        Output of an attempt that was repeated is marked by a higher `attempt` in the data.
        """
        bus = self._partition.bus
        url_like = await self._client._open_transport(self._client._url or _environment_url(), like=bus.transport)
        await self._want_stream()
        cursor = after
        try:
            while True:
                try:
                    reply = await url_like.blocking(
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
                    yield event
                    if event.type.removeprefix("weft.task.") in ENDED:
                        return
        finally:
            if url_like is not bus.transport:
                await url_like.close()
                with contextlib.suppress(ValueError):
                    self._client._transports.remove(url_like)

    async def _want_stream(self) -> None:
        await self._partition.bus.call("watch", self.task_id)

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
        """The final event of a task whose stream is not there: nobody asked for it before the end, or it expired."""
        bus = self._partition.bus
        found = cast(list[Reply], await bus.transport.call("HMGET", bus.keys.task(self.task_id), "status", "out"))
        if found[0] is None:
            raise InvalidInput("task_id", f"no task {self.task_id!r} is known; it may be past its retention time")
        if found[1] is None:
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
        answer = await self._partition.bus.cancel(self.task_id, reason)
        return answer[1] if answer[0] == "ended" else answer[0]

    async def signal(self, request_id: str, value: Any) -> None:  # Any: JSON
        """Answer a question. Raises InvalidInput where it is not open (any more)."""
        answer = await self._partition.bus.signal(self.task_id, request_id, codec.encode(value))
        problems = {
            "unknown": ("task_id", f"no task {self.task_id!r} is known"),
            "ended": ("task_id", f"the task has ended ({answer[-1]})"),
            "answered": ("request_id", f"{request_id!r} was already answered, by somebody or by its deadline"),
            "no_request": ("request_id", f"the task has no open question {request_id!r}; see `weft task show`"),
        }
        if answer[0] in problems:
            raise InvalidInput(*problems[answer[0]])

    async def delete(self) -> None:
        """Erase an ended task from the broker. Raises InvalidInput where it has not ended or is not known."""
        found = await self._partition.bus.erase(self.task_id)
        if found == "unknown":
            raise InvalidInput("task_id", f"no task {self.task_id!r} is known")
        if found != "OK":
            raise InvalidInput("task_id", f"the task is {found}: cancel it before you delete it")


def _environment_url() -> str:
    return os.environ.get("WEFT_REDIS_URL") or _embedded_url()


def _embedded_url() -> str:
    folder = Path(os.environ.get("WEFT_DATA_DIR") or ".weft").expanduser()
    found = find_endpoint(folder)
    if found is None:
        raise ConfigurationError(
            f"no broker: set WEFT_REDIS_URL, or start one with `weft up` (looked for its endpoint in {folder})"
        )
    return found


async def _stored_partitions(transport: Transport, namespace: str) -> int:
    stored = await transport.call("HGET", f"{namespace}:settings", "partitions")
    return int(cast(bytes, stored)) if stored is not None else int(os.environ.get("WEFT_PARTITIONS") or 1)


__all__ = ["Client", "StreamEvent", "TaskFailed", "TaskHandle", "TaskResponse"]
