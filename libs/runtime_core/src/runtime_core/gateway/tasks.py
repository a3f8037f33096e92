"""The routes of tasks: submit (also as CloudEvents), list, show, cancel, answer, and the events of a task.

A reader of events (server-sent events) resumes after any of them with `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
from cloudevents.core.bindings.http import CE_PREFIX, HTTPMessage, from_binary
from cloudevents.core.exceptions import BaseCloudEventException, CloudEventValidationError
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime_core.base.periodic import cancel_and_wait
from runtime_core.client.task import TaskHandle
from runtime_core.client.task_view import Row, TaskFilter
from runtime_core.errors import BusError, InvalidInput, Rejected
from runtime_core.gateway.access import Access
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import (
    BATCH_MAX_BYTES,
    BODY,
    CONFLICT,
    FIELD,
    MEDIA,
    PARAMETER,
    Limits,
    Parameters,
    Problem,
    check_entry,
    header,
    json_reply,
    list_of_objects,
    media_type,
    problem_of,
    read_body,
    read_object,
)
from runtime_core.wire.codec import JSON, MAX_DATA_BYTES, MAX_DEPTH, MSGPACK, decode_object, encode, quoted
from runtime_core.wire.commands import SUBMIT_FIELDS, Submission, checked_text, parse_submit, refuse_unknown
from runtime_core.wire.envelope import ATTRIBUTES, MAX_STRUCTURED_BYTES, parse
from runtime_core.wire.events import StreamEvent, StreamingMode
from runtime_core.wire.ids import has_control
from runtime_core.wire.step import ENDED, OPEN

if TYPE_CHECKING:
    from cloudevents.core.base import BaseCloudEvent

Item = TypeVar("Item")

BATCH_MAX = 1000
"""Tasks of one batch."""
_TOGETHER = 32
"""Submits of one batch that run concurrently."""
PAGE_MAX = 500
PAGE = 50
STATUSES = (*OPEN, *ENDED)
LIST_PARAMETERS = ("status", "agent", "key", "session_id", "tenant", "since", "until", "text", "limit", "cursor")
ITEM_FIELDS = (*SUBMIT_FIELDS, "idempotency_key")


class TaskRoutes:
    """What the routes of tasks do. Each gets the caller, whose key may bind it to a tenant."""

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._limits = limits

    async def submit(self, request: Request, caller: Caller) -> Response:
        event_id = header(request, "Idempotency-Key") or os.urandom(16).hex()
        trace = header(request, "traceparent")
        body = await read_object(request, self._limits, SUBMIT_FIELDS)
        task = await self._access.submit(caller, body, event_id, trace)
        return json_reply({"task_id": task.task_id}, 202, Location=f"/v1/tasks/{task.task_id}")

    async def submit_batch(self, request: Request, caller: Caller) -> Response:
        """Submit the tasks individually: one that is refused does not stop the others."""
        event_id = header(request, "Idempotency-Key") or os.urandom(16).hex()
        trace = header(request, "traceparent")
        body = await read_object(request, self._limits, ("tasks",), BATCH_MAX_BYTES)
        items = list_of_objects("tasks", body.get("tasks"), BATCH_MAX)
        self._limits.count_request(caller.name, len(items) - 1)  # the batch itself is counted

        async def start(place: int, item: dict[str, object]) -> TaskHandle:
            refuse_unknown("", item, ITEM_FIELDS)
            own = item.pop("idempotency_key", None)
            name = f"{event_id}/{place}" if own is None else checked_text("idempotency_key", own)
            return await self._access.submit(caller, item, name, trace)

        return await _individually(items, start)

    async def show(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        return json_reply(await self._access.show(caller, request.path_params["task_id"]))

    async def list(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, LIST_PARAMETERS)
        wanted = TaskFilter(
            status=given.choice("status", STATUSES),
            agent=given.text("agent"),
            key=given.text("key"),
            session=given.text("session_id"),
            tenant=given.text("tenant"),
            since_ms=given.moment("since", 0.0),
            until_ms=given.moment("until", math.inf),
            text=given.text("text"),
        )
        limit, cursor = given.whole("limit", PAGE, PAGE_MAX), given.text("cursor")
        try:
            page = await self._access.tasks(caller, wanted, limit, cursor)
        except InvalidInput as error:
            raise Problem(PARAMETER, error.message, error.field) from None
        return json_reply({"tasks": page.tasks, "next_cursor": page.cursor or None})

    async def cancel(self, request: Request, caller: Caller) -> Response:
        body = await read_object(request, self._limits, ("reason",), required=False)
        reason = body.get("reason")
        if reason is not None and (not isinstance(reason, str) or not 1 <= len(reason) <= 1000 or has_control(reason)):
            raise InvalidInput("reason", f"{quoted(reason)} is not one line of 1 to 1000 characters")
        task_id = request.path_params["task_id"]
        status = await self._access.cancel(caller, task_id, reason or "cancelled over HTTP")
        return json_reply({"task_id": caller.bound_task(task_id), "status": status})

    async def answer(self, request: Request, caller: Caller) -> Response:
        body = await read_object(request, self._limits, ("request_id", "value"))
        request_id = checked_text("request_id", body.get("request_id"))
        if "value" not in body:
            raise InvalidInput("value", "is missing; send `null` for an empty answer")
        task_id = request.path_params["task_id"]
        await self._access.answer(caller, task_id, request_id, body["value"])
        return json_reply({"task_id": caller.bound_task(task_id), "request_id": request_id})

    async def send(self, request: Request, caller: Caller) -> Response:
        event_id = header(request, "Idempotency-Key")
        body = await read_object(request, self._limits, ("name", "value"))
        name = checked_text("name", body.get("name"))
        if "value" not in body:
            raise InvalidInput("value", "is missing; send `null` for an empty message")
        task_id = request.path_params["task_id"]
        await self._access.send(caller, task_id, name, body["value"], event_id)
        return json_reply({"task_id": caller.bound_task(task_id), "name": name})

    async def agents(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        return json_reply({"agents": await self._access.agents(caller)})

    async def questions(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, ("limit", "cursor"))
        limit, cursor = given.whole("limit", PAGE, PAGE_MAX), given.text("cursor")
        try:
            rows, after = await self._access.question_page(caller, limit, cursor)
        except InvalidInput as error:
            raise Problem(PARAMETER, error.message, error.field) from None
        return json_reply({"questions": rows, "next_cursor": after or None})


async def _individually(items: Sequence[Item], start: Callable[[int, Item], Awaitable[TaskHandle]]) -> Response:
    """Start a task for each item, and return the results in their order. One that is refused stops no other."""
    together = asyncio.Semaphore(_TOGETHER)

    async def one(place: int, item: Item) -> Row:
        async with together:
            try:
                return {"task_id": (await start(place, item)).task_id}
            except Exception as error:
                problem = problem_of(error)
                if problem is None:
                    raise
                return {"problem": problem.document()}

    return json_reply({"results": await asyncio.gather(*(one(place, item) for place, item in enumerate(items)))})


STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
EVENT_SOURCE = "weft/events"
"""Begins the source of submits that come as CloudEvents. No publisher's source begins with `weft`."""


class EventRoutes:
    """What the route of CloudEvents does: each `weft.task.submit` starts a task, as on the wire."""

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._limits = limits

    async def receive(self, request: Request, caller: Caller) -> Response:
        """Take an event in binary or structured mode, or a batch of events, which are accepted individually."""
        kind = media_type(request)
        if kind == BATCHED:
            return await self._receive_batch(request, caller)
        if kind == STRUCTURED:
            event = _structured(await read_body(request, self._limits, MAX_STRUCTURED_BYTES))
        else:
            return await self._receive_binary(request, caller)
        return self._started(await self._start(caller, event, header(request, "traceparent")))

    async def _receive_binary(self, request: Request, caller: Caller) -> Response:
        """Take an event whose attributes are headers. Errors name the header."""
        try:
            event = _binary(request, await read_body(request, self._limits, MAX_DATA_BYTES))
            return self._started(await self._start(caller, event, header(request, "traceparent")))
        except InvalidInput as error:
            if error.field not in ATTRIBUTES or (isinstance(error, Rejected) and error.retry_after_seconds is not None):
                raise
            raise Problem(FIELD, error.message, f"{CE_PREFIX}{error.field}") from None

    def _started(self, task: TaskHandle) -> Response:
        return json_reply({"task_id": task.task_id}, 202, Location=f"/v1/tasks/{task.task_id}")

    async def _receive_batch(self, request: Request, caller: Caller) -> Response:
        trace = header(request, "traceparent")
        data = await read_body(request, self._limits, BATCH_MAX_BYTES)
        try:
            events = msgspec.json.decode(data, type=list[msgspec.Raw])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise Problem(BODY, "is not a JSON array of events") from None
        if len(events) > BATCH_MAX:
            raise Problem(BODY, f"has {len(events)} events, over the limit of {BATCH_MAX}")
        self._limits.count_request(caller.name, max(0, len(events) - 1))  # the batch itself is counted

        async def start(_: int, event: msgspec.Raw) -> TaskHandle:
            return await self._start(caller, _structured(bytes(event)), trace)

        return await _individually(events, start)

    async def _start(self, caller: Caller, event: BaseCloudEvent, trace: str) -> TaskHandle:
        try:
            return await self._access.start(caller, self._submission(caller, event, trace))
        except Rejected as error:
            if error.field == "id" and error.retry_after_seconds is None:
                raise Problem(CONFLICT, "was used before with different content", "id") from None
            raise

    def _submission(self, caller: Caller, event: BaseCloudEvent, trace: str) -> Submission:
        """Return the submit in an event. Raises InvalidInput (an attribute, or a member of the data)."""
        fields = [part for name, value in _attributes(event).items() for part in (name.encode(), value.encode())]
        data = event.get_data()
        if data is not None:
            fields += [b"data", data if isinstance(data, bytes) else encode(data)]
        envelope = parse("", fields, self._access.client.namespace)
        if envelope.replyto:
            raise InvalidInput(
                "replyto", "cannot be used over HTTP; follow the task with GET /v1/tasks/{task_id}/events"
            )
        if caller.tenant and envelope.tenant not in ("", caller.tenant):
            raise InvalidInput("tenant", f"{quoted(envelope.tenant)} is not the tenant of this key; leave it out")
        bound = msgspec.structs.replace(
            envelope,
            tenant=caller.tenant or envelope.tenant,
            source=f"{EVENT_SOURCE}/{caller.tenant}/{envelope.source}",  # each tenant has its own ids
            traceparent=envelope.traceparent or trace,
        )
        return parse_submit(bound)


class _Format(JSONFormat):
    """The SDK's JSON format, within the bounds of the wire."""

    def read(self, event_factory: Any, data: str | bytes) -> BaseCloudEvent:  # Any: of the base class
        decode_object(cast(bytes, data), MAX_DEPTH + 1)
        return super().read(event_factory, data)

    def read_data(self, body: bytes, datacontenttype: str | None) -> bytes:
        """Return the data as it is: `parse_submit` decodes it."""
        return body


_FORMAT = _Format()


def _structured(data: bytes) -> BaseCloudEvent:
    """Return the event in JSON. Raises InvalidInput."""
    return _checked(lambda: _FORMAT.read(_event, data))


def _binary(request: Request, body: bytes) -> BaseCloudEvent:
    """Return the event in headers and body. Raises Problem or InvalidInput."""
    kind = media_type(request)
    headers = {name: value for name, value in request.headers.items() if name.startswith(CE_PREFIX)}
    if not headers and kind in (JSON, MSGPACK):
        raise Problem(FIELD, f"is missing: with {kind} the attributes of the event are headers", f"{CE_PREFIX}id")
    if not headers or kind not in (JSON, MSGPACK):
        shown = f"Content-Type {quoted(kind)}" if kind else "no Content-Type"
        why = f"{shown}: send {STRUCTURED}, {BATCHED}, or headers such as ce-id with {JSON}"
        raise Problem(MEDIA, why, "Content-Type")
    twice = [name for name in headers if len(request.headers.getlist(name)) > 1]
    if twice:
        raise Problem(PARAMETER, "is there more than once", twice[0][:100])
    return _checked(lambda: from_binary(HTTPMessage({**headers, "content-type": kind}, body), _FORMAT, _event))


def _event(attributes: dict[str, Any], data: dict[str, Any] | str | bytes | None) -> CloudEvent:  # Any: JSON
    for name in ("id", "specversion"):  # the SDK would choose them, so that no repeat is known as one
        if name not in attributes:
            raise InvalidInput(name, "is missing")
    return CloudEvent(attributes, data)


def _checked(read: Callable[[], BaseCloudEvent]) -> BaseCloudEvent:
    """Return an event, and raise the errors of the SDK as InvalidInput."""
    try:
        return read()
    except InvalidInput:
        raise
    except CloudEventValidationError as error:
        name, errors = next(iter(error.errors.items()))
        raise InvalidInput(quoted(name)[1:-1][:100], str(errors[0])[:300]) from None
    except (BaseCloudEventException, ValueError, TypeError, AttributeError) as error:
        raise InvalidInput("data", f"is not a CloudEvent: {quoted(str(error))[1:-1][:200]}") from None


def _attributes(event: BaseCloudEvent) -> Mapping[str, str]:
    """Return the attributes as text, without `time`, which a submit does not keep. Raises InvalidInput."""
    found: dict[str, str] = {}
    for name, value in event.get_attributes().items():
        if isinstance(value, bool):
            found[name] = "true" if value else "false"
        elif isinstance(value, (str, int)):
            found[name] = str(value)
        elif value is not None and name != "time":
            raise InvalidInput(name, f"{quoted(value)} is not an attribute; send text")
    return found


MEDIA_TYPE = "text/event-stream"
HEARTBEAT_SECONDS = 15.0
"""The longest silence of a stream. Proxies close silent connections after about a minute."""
RETRY_MS = 1000
"""How long an EventSource waits before it connects again."""
END = "-end"
"""Ends the id of a final event that has no entry, because the task has no stream. The last event's id precedes it."""
MODES = tuple(mode.value for mode in StreamingMode)


class StreamRoutes:
    """The route of events. `stopping` ends all streams, and readers resume at another replica."""

    def __init__(self, access: Access, limits: Limits, stopping: asyncio.Event) -> None:
        self._access = access
        self._limits = limits
        self._stopping = stopping

    async def events(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, ("mode",))
        chosen = given.choice("mode", MODES)
        mode = StreamingMode(chosen) if chosen else None
        after, end, _ = header(request, "Last-Event-ID").partition(END)
        if after:
            check_entry("Last-Event-ID", after)
        handle = await self._access.known(caller, request.path_params["task_id"])
        # An EventSource connects again whenever a stream ends; 204 tells it that this one has nothing left.
        if after and await handle.has_ended_at(after, without_entry=bool(end)):
            return Response(status_code=204)
        self._limits.open_stream(caller.holder)
        return _EventStream(self._limits, caller.holder, self._texts(handle, after or "0-0", mode))

    async def _texts(self, handle: TaskHandle, after: str, mode: StreamingMode | None) -> AsyncGenerator[bytes]:
        """Yield the task's events as text, and a comment after each silence, until the task or this gateway ends."""
        yield b"retry: %d\n\n" % RETRY_MS
        events = handle.stream(after, mode=mode)
        stopping = asyncio.ensure_future(self._stopping.wait())
        following: asyncio.Task[StreamEvent] | None = None
        cursor = after
        try:
            while not self._stopping.is_set():
                following = following or asyncio.create_task(_next(events))
                await asyncio.wait(
                    (following, stopping), timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not following.done():
                    yield b": heartbeat\n\n"
                    continue
                done, following = following, None
                event = done.result()
                own = event.entry_id != cursor
                cursor = event.entry_id
                yield _text(event, cursor if own else cursor + END)
                if event.type.removeprefix("weft.task.") in ENDED:
                    return
        except (InvalidInput, BusError):
            return  # the task's retention time is over, or the reader continues when the broker is back
        finally:
            await cancel_and_wait(stopping, *([following] if following is not None else []))
            await events.aclose()


async def _next(events: AsyncGenerator[StreamEvent]) -> StreamEvent:
    return await anext(events)


def _text(event: StreamEvent, id: str) -> bytes:
    data = msgspec.json.encode(event.data)  # JSON has no line breaks
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (id.encode(), event.type.encode(), data)


class _EventStream(StreamingResponse):
    """Counts as open until it has been sent, or its reader has gone."""

    def __init__(self, limits: Limits, holder: str, texts: AsyncGenerator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(texts, headers=headers, media_type=MEDIA_TYPE)
        self._limits = limits
        self._holder = holder
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._limits.close_stream(self._holder)
            with contextlib.suppress(RuntimeError):
                await self._texts.aclose()
