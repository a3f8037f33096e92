"""The client: submits tasks, waits for their ends, reads their streams.

It outlives a restart of the broker: calls are repeated under the same id after a reconnect, and an answer that the
reply stream has lost is found in the task's hash.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from msgspec.structs import replace

from runtime_core import codec
from runtime_core.bus.connection import Transport
from runtime_core.bus.connector import MEMORY
from runtime_core.bus.durability import repeat_after_reconnect
from runtime_core.bus.embedded import find_endpoint
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.bus.replies import Replies
from runtime_core.bus.spans import TASKS, TOPICS, send_span
from runtime_core.bus.topics import Topics, published
from runtime_core.bus.values import NotDurable, NotYet, Submitted
from runtime_core.client.schedules import ScheduleVerbs
from runtime_core.client.task import TaskHandle
from runtime_core.declare.declaration import agent_name
from runtime_core.errors import ConfigurationError, InvalidInput, Rejected, WeftError
from runtime_core.ingress.admission import Admission
from runtime_core.telemetry.spans import tracing
from runtime_core.wire.commands import NO_OPTIONS, Submission, SubmitOptions, check_options, new_submission
from runtime_core.wire.results import StreamEvent, StreamingMode, TaskFailed, TaskResponse

if TYPE_CHECKING:
    from runtime_core.runs.agent import Agent
    from runtime_core.runs.context import AgentContext
    from runtime_core.trajectory.store import TrajectoryStore

Input = TypeVar("Input")


class Client(ScheduleVerbs):
    """A connection to a namespace: `async with Client.connect("redis://…") as client`."""

    def __init__(self, url: str | None, namespace: str, partitions: int | None, source: str) -> None:
        self._url = url
        self._namespace = namespace
        self._wanted_partitions = partitions
        self._source = source
        self._name = secrets.token_hex(6)
        self._partitions: list[Replies] = []
        self._transports: list[Transport] = []
        self._admission: Admission | None = None
        self._topics: Topics | None = None

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
        """Connect. Raises ConfigurationError where no broker answers, or it cannot promise WEFT_DURABILITY."""
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        url = self._url or os.environ.get("WEFT_REDIS_URL") or _embedded_url()
        durability = _durability()
        if url.startswith(MEMORY) and durability != "fast":
            raise ConfigurationError(f"WEFT_DURABILITY={durability}: memory:// keeps nothing; name a Redis or Valkey")
        first = await self._open_transport(url)
        partitions = self._wanted_partitions or await _stored_partitions(first, self._namespace)
        buses = []
        for keys in await open_namespace(first, self._namespace, partitions):
            # One for each partition: in a Cluster each may live on another server.
            transport = first if partitions == 1 else await self._open_transport(url)
            bus = EventBus(transport, keys, durability=durability)
            await bus.check_durability()
            buses.append(bus)
            self._partitions.append(Replies(bus, self._name, await self._open_transport(url)))
        self._admission = Admission(buses)
        self._topics = Topics(buses)
        for partition in self._partitions:
            partition.start()

    async def close(self) -> None:
        """Stop waiting and let go of the connections. Tasks go on."""
        for partition in self._partitions:
            await partition.close()
        for transport in self._transports:
            await transport.close()
        self._partitions, self._transports = [], []

    # -- tasks -------------------------------------------------------------------------------------------------

    @overload
    async def submit(
        self,
        agent: Callable[[AgentContext, Input], Coroutine[Any, Any, object]],
        input: Input,
        *,
        key: str = ...,
        task_id: str | None = ...,
        session_id: str = ...,
        stream: bool | StreamingMode | str = ...,
        timeout: float | None = ...,
        options: SubmitOptions = ...,
    ) -> TaskHandle: ...

    @overload
    async def submit(
        self,
        agent: Callable[[AgentContext], Coroutine[Any, Any, object]],
        *,
        key: str = ...,
        task_id: str | None = ...,
        session_id: str = ...,
        stream: bool | StreamingMode | str = ...,
        timeout: float | None = ...,
        options: SubmitOptions = ...,
    ) -> TaskHandle: ...

    @overload
    async def submit(
        self,
        agent: str | type[Agent],
        input: Any = ...,
        *,
        key: str = ...,
        task_id: str | None = ...,
        session_id: str = ...,
        stream: bool | StreamingMode | str = ...,
        timeout: float | None = ...,
        options: SubmitOptions = ...,
    ) -> TaskHandle: ...

    async def submit(
        self,
        agent: object,
        input: Any = None,  # Any: whatever JSON can hold
        *,
        key: str = "",
        task_id: str | None = None,
        session_id: str = "",
        stream: bool | StreamingMode | str = False,
        timeout: float | None = 60.0,
        options: SubmitOptions = NO_OPTIONS,
    ) -> TaskHandle:
        """Start a task and return its handle, which waits for the answer.

        Args:
            agent: The agent's name, or the function or class that this process has declared as that agent.
            input: Whatever the agent takes and JSON can hold, at most 1 MiB.
            key: The instance of the agent that gets the task; it keeps state and handles one task at a time.
            task_id: Your own id. A repeat with the same id and content returns the same task.
            session_id: The session that the task belongs to.
            stream: True keeps the final event on the task's stream even where the agent emits nothing. A
                `StreamingMode`, or its text, says what else is kept there.
            timeout: How many seconds to wait for a broker that is away and for the first agent-handler; None: no limit.
            options: Limits, priority, tenant, hooks, metadata, engines: see `SubmitOptions`.

        Raises:
            InvalidInput: An argument is wrong; `field` names it as on the wire (`data.conf.max_steps`).
            Rejected: The broker does not accept the task. With `retry_after_seconds` it may do so later.
        """
        check_options(options)
        new = new_submission(
            agent if isinstance(agent, str) else agent_name(agent, "data.agent"),
            input,
            source=self._source or ("anonymous" if task_id or options.event_id else f"client/{self._name}"),
            event_id=options.event_id or task_id or secrets.token_hex(8),
            key=key or None,
            task_id=task_id or None,
            session_id=session_id or None,
            stream=stream,
            options=options,
        )
        return await self.start(new, timeout=timeout)

    async def start(self, new: Submission, *, timeout: float | None = 60.0) -> TaskHandle:
        """Start the task of a submission that has been made before."""
        if not tracing():
            return await self._start(new, timeout)
        with send_span(TASKS, message=new.event_id, task=new.task_id, traceparent=new.traceparent) as span:
            return await self._start(replace(new, traceparent=span.traceparent or new.traceparent), timeout)

    async def _start(self, new: Submission, timeout: float | None) -> TaskHandle:
        admission = self._ready()
        replies = self._partitions[admission.partition_for(new)]
        new.client, new.replyto = self._name, replies.stream
        expected = replies.expect(new.task_id)  # before the submit, so that no answer is missed
        try:
            submitted = await self._admit(admission, new, timeout)
        except BaseException:
            replies.forget(new.task_id, expected)
            raise
        if submitted.task == new.task_id and submitted.partition == replies.bus.keys.partition:
            return TaskHandle(self, new.task_id, replies, expected)
        replies.forget(new.task_id, expected)
        return TaskHandle(self, submitted.task, self._partitions[submitted.partition])

    async def _admit(self, admission: Admission, new: Submission, timeout: float | None) -> Submitted:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    return await admission.admit(new)
            except NotDurable as error:
                if error.retry_after_seconds:
                    raise
            except NotYet as error:
                if left is not None and left < 0.2:
                    raise Rejected(error.field, error.message, None, new.task_id) from None
                await asyncio.sleep(0.1)
            except TimeoutError:
                raise Rejected(
                    "timeout", "the broker did not answer in time; submit again with the same task_id",
                    1.0, new.task_id,
                ) from None  # fmt: skip

    async def fork(
        self,
        origin: str,
        /,
        *,
        at: str | None = None,
        input: Any = ...,  # Any: whatever JSON can hold
        task_id: str | None = None,
        session_id: str | None = None,
        store: TrajectoryStore | None = None,
        stream: bool | StreamingMode | str = False,
        timeout: float | None = 60.0,
        options: SubmitOptions = NO_OPTIONS,
    ) -> TaskHandle:
        """Start a new task with the results that task `origin` had before step `at`; from there it goes on live.

        `at` is a step of the task's first run, as `3.0.1` (see `weft trajectory show`). `input` replaces the recorded
        result of that step, or without `at` the task's input. A task that has not come to `at` gives all its results.
        Steps of parallel branches count as before `at` where their path is the smaller one. Results come from the
        broker while it has them, else from `store`. Session and hooks that are not given are the origin's, and so are
        tenant and metadata of an origin that has not ended; limits are not. Raises InvalidInput for a task or step of
        which nothing is known, and as `submit` does.
        """
        from runtime_core.client.fork import plan_fork

        check_options(options)
        bus = (await self.task(origin)).bus
        plan = await plan_fork(bus, self._namespace, origin, at=at, input=input, store=store)
        new = plan.submission(
            task_id=task_id or f"fork-{secrets.token_hex(8)}", session_id=session_id, stream=stream, options=options
        )
        return await self.start(new, timeout=timeout)

    async def task(self, task_id: str) -> TaskHandle:
        """A handle of a task that was submitted before, by whomever."""
        if not isinstance(task_id, str):
            raise InvalidInput("task_id", f"{codec.quoted(task_id)} is not text")
        bus = await self._ready().find(task_id)
        return TaskHandle(self, task_id, self._partitions[bus.keys.partition])

    def _ready(self) -> Admission:
        if self._admission is None:
            raise WeftError("the client is not connected: use `async with Client.connect(…) as client`")
        return self._admission

    # -- topics ------------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        data: Any = None,  # Any: whatever JSON can hold
        *,
        source: str = "",
        message_id: str | None = None,
        traceparent: str = "",
    ) -> int:
        """Publish a message to every agent that has subscribed to the topic; returns how many there are.

        `source` names the instance of each that gets it; empty: one of its own for this message. A repeat with the
        same `message_id` starts nothing again. Raises InvalidInput for a topic that is none, `Rejected` where the
        broker is full.
        """
        self._ready()
        assert self._topics is not None
        body = codec.encode(data)
        if len(body) > codec.MAX_DATA_BYTES:
            raise InvalidInput("data", f"is {len(body)} bytes, over the limit of {codec.MAX_DATA_BYTES}")
        message = message_id or secrets.token_hex(16)
        if not tracing():
            context = published(b"", topic, traceparent=traceparent)
            return await self._publish(message, topic, source, body, context)
        with send_span(TOPICS, message=message, traceparent=traceparent) as span:
            context = published(b"", topic, traceparent=span.traceparent or traceparent)
            return await self._publish(message, topic, source, body, context)

    async def _publish(self, message: str, topic: str, source: str, body: bytes, context: bytes) -> int:
        assert self._topics is not None
        topics = self._topics
        return await repeat_after_reconnect(lambda: topics.publish(message, topic, source, body, context=context))

    @property
    def topics(self) -> Topics:
        """Subscriptions of the namespace."""
        self._ready()
        assert self._topics is not None
        return self._topics

    @property
    def replies(self) -> Sequence[Replies]:
        """The reply stream of each partition, for who asks in mid-turn."""
        return self._partitions

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def url(self) -> str:
        """The broker's."""
        return self._url or _environment_url()

    @property
    def buses(self) -> Sequence[EventBus]:
        """The partitions, for tools that look at the broker itself."""
        return [partition.bus for partition in self._partitions]

    async def open_reader(self, bus: EventBus) -> Transport:
        """A connection of its own for blocking reads of this partition. `close` of the client closes it too."""
        return await self._open_transport(self._url or _environment_url())

    async def close_reader(self, reader: Transport) -> None:
        """Let go of a connection that `open_reader` has given."""
        if reader in self._transports and all(reader is not partition.bus.transport for partition in self._partitions):
            self._transports.remove(reader)
            await reader.close()

    # -- connections -------------------------------------------------------------------------------------------

    async def _open_transport(self, url: str) -> Transport:
        transport = await connect(url)
        self._transports.append(transport)
        return transport


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


def _durability() -> str:
    """What submits wait for. Raises ConfigurationError for an unknown word."""
    if not os.environ.get("WEFT_DURABILITY"):
        return "fast"
    from runtime_core.config.settings import DURABILITIES
    from runtime_core.config.values import SettingValues  # here, since most clients set none

    return SettingValues(os.environ).choice("WEFT_DURABILITY", DURABILITIES, "fast")


async def _stored_partitions(transport: Transport, namespace: str) -> int:
    stored = await transport.call("HGET", f"{namespace}:settings", "partitions")
    return int(cast(bytes, stored)) if stored is not None else int(os.environ.get("WEFT_PARTITIONS") or 1)


__all__ = ["Client", "StreamEvent", "TaskFailed", "TaskHandle", "TaskResponse"]
