"""The client: submits tasks, publishes to topics, manages schedules.

It survives a restart of the broker: after a reconnect it repeats calls under the same id, and reads answers that the
reply stream lost from the task's hash.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from msgspec.structs import replace

from runtime_core.base.periodic import TimeLimit
from runtime_core.bus.connection import Transport
from runtime_core.bus.connector import MEMORY
from runtime_core.bus.embedded import find_endpoint
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.bus.partition import repeat_after_reconnect
from runtime_core.bus.replies import Replies
from runtime_core.bus.spans import TASKS, TOPICS, send_span
from runtime_core.bus.tasks import NotYet, Submitted
from runtime_core.bus.topics import Topics, published
from runtime_core.client.task import Tails, TaskHandle
from runtime_core.declare.declaration import agent_name
from runtime_core.errors import ConfigurationError, InvalidInput, NotDurable, Rejected, WeftError
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.schedules import Overlap, Schedule, Schedules, checked_id, parse_set
from runtime_core.telemetry.spans import tracing
from runtime_core.wire import codec
from runtime_core.wire.commands import (
    NO_OPTIONS,
    Submission,
    SubmitOptions,
    as_object,
    check_options,
    data_of_submit,
    new_submission,
)
from runtime_core.wire.envelope import ANONYMOUS, rfc3339
from runtime_core.wire.events import StreamEvent, StreamingMode, TaskFailed, TaskResponse
from runtime_core.wire.ids import new_task_id

if TYPE_CHECKING:
    from runtime_core.declare.declaration import Agent
    from runtime_core.runs.context import AgentContext
    from runtime_core.trajectory.store import TrajectoryStore

Input = TypeVar("Input")

log = logging.getLogger(__name__)

HINT_SECONDS = 5.0
"""After this time the log says why a submit waits."""
REPEATED_SECONDS = 300.0
"""A submit that is repeated for at most this long needs no place in the dedupe window, if its id is random."""


class Client:
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
        self._tails = Tails(self)

    @classmethod
    def connect(
        cls, url: str | None = None, *, namespace: str | None = None, partitions: int | None = None, source: str = ""
    ) -> Client:
        """Return a client; `async with` connects it.

        Args:
            url: The broker. Default: WEFT_REDIS_URL, or the server of `weft up` in this folder.
            namespace: Default: WEFT_NAMESPACE, or `weft`.
            partitions: The number of partitions if the namespace does not exist yet. Default: WEFT_PARTITIONS, or 1.
            source: A part of the ids of submits. With your own event ids, it identifies repeats across processes.
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
        """Connect. Raises ConfigurationError if there is no broker, or if it does not support WEFT_DURABILITY."""
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        url = self._url or os.environ.get("WEFT_REDIS_URL") or _embedded_url()
        durability = _durability()
        if url.startswith(MEMORY) and durability != "fast":
            raise ConfigurationError(
                f"WEFT_DURABILITY={durability}: memory:// stores nothing on disk; use a Redis or Valkey server"
            )
        first = await self._open_transport(url)
        partitions = self._wanted_partitions or await _stored_partitions(first, self._namespace)
        buses = []
        for keys in await open_namespace(first, self._namespace, partitions):
            # One per partition: in a Cluster, partitions may be on different servers.
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
        """Disconnect. Tasks continue; pending `result` calls are cancelled."""
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
        input: Any = None,  # Any: JSON
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
            agent: The agent's name, or the function or class that this process has declared as the agent.
            input: The agent's input, as JSON at most 1 MiB.
            key: The instance of the agent. An instance keeps state and handles one task at a time.
            task_id: Your own id. A repeat with the same id and content returns the same task.
            session_id: The session of the task.
            stream: True stores the final event on the task's stream even if the agent emits nothing. A
                `StreamingMode`, or its text, selects further events.
            timeout: The longest wait for an unavailable broker and the first agent-handler, in seconds; None: no limit.
            options: Limits, priority, tenant, hooks, metadata and engines; see `SubmitOptions`.

        Raises:
            InvalidInput: An argument is wrong; `field` names it as on the wire (`data.conf.max_steps`).
            Rejected: The broker rejects the task. With `retry_after_seconds` it may accept it later.
        """
        if options is not NO_OPTIONS:
            check_options(options)
        _check_timeout(timeout)
        new = new_submission(
            agent if isinstance(agent, str) else agent_name(agent, "data.agent"),
            input,
            source=self._source or ANONYMOUS,
            event_id=options.event_id or task_id or new_task_id(),
            key=key or None,
            task_id=task_id or None,
            session_id=session_id or None,
            stream=stream,
            options=options,
        )
        if not task_id and not options.event_id and timeout is not None and timeout <= REPEATED_SECONDS:
            new.epoch = "-"
        if _traces():
            return await self.start(new, timeout=timeout)
        return await self._start(new, timeout)

    async def start(self, new: Submission, *, timeout: float | None = 60.0, expects_answer: bool = True) -> TaskHandle:
        """Start the task of a prepared submission; `timeout` is as in `submit`.

        Without `expects_answer` the broker sends this client no answer; `result` and `stream` read it from the task.
        """
        if not _traces():
            return await self._start(new, timeout, expects_answer)
        with send_span(TASKS, message=new.event_id, task=new.task_id, traceparent=new.traceparent) as span:
            traced = replace(new, traceparent=span.traceparent or new.traceparent)
            return await self._start(traced, timeout, expects_answer)

    async def _start(self, new: Submission, timeout: float | None, expects_answer: bool = True) -> TaskHandle:
        admission = self._ready()
        if not expects_answer:
            submitted = await self._admit(admission, new, timeout)
            return TaskHandle(self._tails, submitted.task, self._partitions[submitted.partition])
        replies = self._partitions[admission.partition_for(new)]
        new.client, new.replyto = self._name, replies.stream
        expected = replies.expect(new.task_id)  # before the submit: the answer may come first
        try:
            submitted = await self._admit(admission, new, timeout)
        except BaseException:
            replies.forget(new.task_id, expected)
            raise
        if submitted.task == new.task_id and submitted.partition == replies.bus.keys.partition:
            replies.mark_requested((new.task_id,))
            return TaskHandle(self._tails, new.task_id, replies, expected)
        replies.forget(new.task_id, expected)
        return TaskHandle(self._tails, submitted.task, self._partitions[submitted.partition])

    async def _admit(self, admission: Admission, new: Submission, timeout: float | None) -> Submitted:
        began = time.monotonic()
        deadline, hint = None if timeout is None else began + timeout, began + HINT_SECONDS
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            try:
                with TimeLimit(left):
                    return await admission.admit(new)
            except NotDurable as error:
                if error.retry_after_seconds:
                    raise
            except NotYet as error:
                if left is not None and left < 0.2:
                    raise Rejected(error.field, error.message, None, new.task_id) from None
                if time.monotonic() >= hint:
                    hint = math.inf
                    waits = "" if timeout is None else f" at most {timeout:g} s"
                    log.warning(
                        "task %s waits%s in namespace %r: %s", new.task_id, waits, self.namespace, error.message
                    )
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
        input: Any = ...,  # Any: JSON
        task_id: str | None = None,
        session_id: str | None = None,
        store: TrajectoryStore | None = None,
        stream: bool | StreamingMode | str = False,
        timeout: float | None = 60.0,
        options: SubmitOptions = NO_OPTIONS,
    ) -> TaskHandle:
        """Start a new task with the results that task `origin` had before step `at`; the later steps run again.

        Results come from the broker while it has them, else from `store`. The new task inherits session and hooks
        unless they are given, and tenant and metadata if the origin has not ended, but no limits.

        Args:
            origin: The id of the task to fork.
            at: A step, such as `3.0.1` (see `weft trajectory show`). `3/2` is step 2 of the run of the agent that step
                3 called. Steps of parallel branches precede it if their path is smaller. Runs of agents that have not
                ended before it continue from their own results. If the origin has not reached it, all results are used.
            input: Replaces the result of step `at`, or without `at` the task's input.
            task_id: The new task's id. Default: a random one.
            store: The trajectory store, for an origin that the broker no longer has.

        Raises:
            InvalidInput: The task or step is unknown; also as `submit`.
            Rejected: As `submit`.
        """
        from runtime_core.client.fork import plan_fork

        check_options(options)
        _check_timeout(timeout)
        bus = (await self.task(origin)).bus
        plan = await plan_fork(bus, self._namespace, origin, at=at, input=input, store=store)
        new = plan.submission(
            task_id=task_id or f"fork-{secrets.token_hex(8)}", session_id=session_id, stream=stream, options=options
        )
        return await self.start(new, timeout=timeout)

    async def task(self, task_id: str) -> TaskHandle:
        """Return a handle of any submitted task."""
        if not isinstance(task_id, str):
            raise InvalidInput("task_id", f"{codec.quoted(task_id)} is not text")
        bus = await self._ready().find(task_id)
        return TaskHandle(self._tails, task_id, self._partitions[bus.keys.partition])

    def _ready(self) -> Admission:
        if self._admission is None:
            raise WeftError("the client is not connected: use `async with Client.connect(…) as client`")
        return self._admission

    # -- topics ------------------------------------------------------------------------------------------------

    async def publish(
        self,
        topic: str,
        data: Any = None,  # Any: JSON
        *,
        source: str = "",
        message_id: str | None = None,
        traceparent: str = "",
    ) -> int:
        """Publish a message to all agents that subscribe to the topic, and return their number.

        Args:
            topic: 1 to 256 letters, digits or `_ - . : = /`.
            data: The message, as JSON at most 1 MiB.
            source: The key of the instance of each agent that gets the message; empty: a new instance.
            message_id: Your own id. A repeat with the same id has no effect.
            traceparent: The trace that the message belongs to (W3C Trace Context).

        Raises:
            InvalidInput: The topic or the data is invalid.
            Rejected: The broker is full.
        """
        self._ready()
        assert self._topics is not None
        body = codec.encode(data)
        if len(body) > codec.MAX_DATA_BYTES:
            raise InvalidInput(
                "data", f"is {len(body)} bytes, over the limit of {codec.MAX_DATA_BYTES}: send a reference"
            )
        message = message_id or secrets.token_hex(16)
        if not _traces():
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
        """The topic subscriptions of the namespace."""
        self._ready()
        assert self._topics is not None
        return self._topics

    @property
    def replies(self) -> Sequence[Replies]:
        """The reply stream of each partition."""
        return self._partitions

    @property
    def namespace(self) -> str:
        """The namespace whose tasks this client starts and finds."""
        return self._namespace

    @property
    def url(self) -> str:
        """The broker's URL."""
        return self._url or _environment_url()

    @property
    def buses(self) -> Sequence[EventBus]:
        """The partitions of the namespace."""
        return [partition.bus for partition in self._partitions]

    async def open_reader(self, bus: EventBus) -> Transport:
        """Open a connection for blocking reads of this partition; the client's `close` also closes it."""
        return await self._open_transport(self._url or _environment_url())

    async def close_reader(self, reader: Transport) -> None:
        """Close a connection from `open_reader`."""
        if reader in self._transports and all(reader is not partition.bus.transport for partition in self._partitions):
            self._transports.remove(reader)
            await reader.close()

    # -- schedules ---------------------------------------------------------------------------------------------

    @overload
    async def schedule(
        self, schedule_id: str, agent: Callable[[AgentContext, Input], Coroutine[Any, Any, object]], input: Input, *,
        every: float | timedelta | None = ..., cron: str | None = ..., at: datetime | float | None = ...,
        delay: float | timedelta | None = ..., timezone: str = ..., overlap: Overlap = ..., catch_up: bool = ...,
        key: str = ..., session_id: str = ..., options: SubmitOptions = ...,
    ) -> Schedule: ...  # fmt: skip
    @overload
    async def schedule(
        self, schedule_id: str, agent: Callable[[AgentContext], Coroutine[Any, Any, object]], *,
        every: float | timedelta | None = ..., cron: str | None = ..., at: datetime | float | None = ...,
        delay: float | timedelta | None = ..., timezone: str = ..., overlap: Overlap = ..., catch_up: bool = ...,
        key: str = ..., session_id: str = ..., options: SubmitOptions = ...,
    ) -> Schedule: ...  # fmt: skip
    @overload
    async def schedule(
        self, schedule_id: str, agent: str | type[Agent], input: object = ..., *,
        every: float | timedelta | None = ..., cron: str | None = ..., at: datetime | float | None = ...,
        delay: float | timedelta | None = ..., timezone: str = ..., overlap: Overlap = ..., catch_up: bool = ...,
        key: str = ..., session_id: str = ..., options: SubmitOptions = ...,
    ) -> Schedule: ...  # fmt: skip
    async def schedule(
        self,
        schedule_id: str,
        agent: object,
        input: Any = None,  # Any: JSON
        *,
        every: float | timedelta | None = None,
        cron: str | None = None,
        at: datetime | float | None = None,
        delay: float | timedelta | None = None,
        timezone: str = "UTC",
        overlap: Overlap = "skip",
        catch_up: bool = True,
        key: str = "",
        session_id: str = "",
        options: SubmitOptions = NO_OPTIONS,
    ) -> Schedule:
        """Create or replace a schedule. Each of its times starts exactly one task, `<schedule_id>-<epoch ms>`.

        Args:
            schedule_id: The schedule's id.
            agent: As in `submit`; so are `input`, `key`, `session_id` and `options`.
            every: The interval, in seconds. Give exactly one of `every`, `cron`, `at` and `delay`.
            cron: The times as minute, hour, day, month and weekday, such as `0 9 * * mon-fri`.
            at: One time, a datetime with a time zone or seconds since 1970.
            delay: One time, in seconds from now.
            timezone: The time zone of `cron`.
            overlap: `skip` skips a time if the previous task has not ended; `start` starts it anyway.
            catch_up: Whether to start one task after missed times (no state-manager for more than a minute).

        Raises:
            InvalidInput: An argument is wrong; `field` names it.
        """
        check_options(options)
        if options.event_id or options.traceparent:
            field = "event_id" if options.event_id else "traceparent"
            raise InvalidInput(field, "belongs to one task, and a schedule starts many: remove it")
        now = await self.buses[0].time_ms()
        wanted: dict[str, object] = {
            "every_seconds": _seconds(every),
            "cron": cron,
            "at": None if at is None else _rfc3339(at),
            "delay_seconds": _seconds(delay),
            "overlap": overlap,
            "catch_up": catch_up,
            "timezone": timezone,
        }
        name = agent_name(agent, "data.agent")
        task = data_of_submit(name, input, key=key, session_id=session_id, options=options)
        when = {name: value for name, value in wanted.items() if value is not None}
        plain = as_object("data", codec.decode(codec.encode({**task, **when})))
        return await self._schedules().set(parse_set({"schedule_id": schedule_id, **plain}, now, options.tenant))

    async def schedules(self) -> list[Schedule]:
        """Return all schedules of the namespace, by id."""
        return await self._schedules().all()

    async def unschedule(self, schedule_id: str) -> bool:
        """Remove a schedule; return False if there is none. Tasks that it has started continue."""
        return await self._schedules().delete(checked_id(schedule_id))

    async def run_schedule(self, schedule_id: str) -> TaskHandle:
        """Start a task of a schedule now, in addition to its times. Raises InvalidInput if there is none."""
        return await self.task((await self._schedules().run_now(checked_id(schedule_id))).task)

    def _schedules(self) -> Schedules:
        return Schedules(self.buses[0], self._ready())

    # -- connections -------------------------------------------------------------------------------------------

    async def _open_transport(self, url: str) -> Transport:
        transport = await connect(url)
        self._transports.append(transport)
        return transport


def _check_timeout(timeout: object) -> None:
    """Raise InvalidInput unless it is None or a number of seconds of 0 or more."""
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
    ):  # fmt: skip
        raise InvalidInput("timeout", f"{timeout!r} is not a number of seconds of 0 or more, or None for no limit")


def _traces() -> bool:
    # Without OpenTelemetry's API nothing can be traced, and most programs do not import it.
    return "opentelemetry.trace" in sys.modules and tracing()


def _environment_url() -> str:
    return os.environ.get("WEFT_REDIS_URL") or _embedded_url()


def _embedded_url() -> str:
    folder = Path(os.environ.get("WEFT_DATA_DIR") or ".weft").expanduser()
    found = find_endpoint(folder)
    if found is None:
        raise ConfigurationError(
            f"no broker: start one with `weft up`, or set WEFT_REDIS_URL. No server runs for the data folder "
            f"{folder.absolute()}; to use that of another `weft up`, set WEFT_DATA_DIR or run in its folder"
        )
    return found


def _durability() -> str:
    """Return WEFT_DURABILITY. Raises ConfigurationError for an unknown value."""
    if not os.environ.get("WEFT_DURABILITY"):
        return "fast"
    from runtime_core.settings import read_setting  # here: most clients do not set it

    return cast(str, read_setting("durability", os.environ))


async def _stored_partitions(transport: Transport, namespace: str) -> int:
    stored = await transport.call("HGET", f"{namespace}:settings", "partitions")
    return int(cast(bytes, stored)) if stored is not None else int(os.environ.get("WEFT_PARTITIONS") or 1)


def _seconds(delay: float | timedelta | None) -> float | None:
    return delay.total_seconds() if isinstance(delay, timedelta) else delay


def _rfc3339(moment: datetime | float) -> str:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidInput("at", f"{moment.isoformat()} has no time zone: add one, as in datetime.now(UTC)")
        moment = moment.timestamp()
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        raise InvalidInput(
            "at", f"{codec.quoted(moment)} is not a time: give a datetime with a time zone, or seconds since 1970"
        )
    return rfc3339(moment * 1000)


__all__ = ["Client", "StreamEvent", "TaskFailed", "TaskHandle", "TaskResponse"]
