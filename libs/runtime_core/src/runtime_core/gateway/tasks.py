"""The routes of tasks: submit, list, show, cancel, answer, and the events of a task as server-sent events.

A reader continues behind any event with `Last-Event-ID`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime_core import codec
from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.client.task_view import Row, TaskFilter, list_tasks, read_task
from runtime_core.codec import quoted
from runtime_core.errors import BusError, InvalidInput, Rejected
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import (
    BATCH_MAX_BYTES,
    CONFLICT,
    PARAMETER,
    Limits,
    Parameters,
    Problem,
    check_entry,
    header,
    list_of_objects,
    no_task,
    problem_of,
    read_object,
    refuse_unknown,
)
from runtime_core.ids import has_control, is_task_id
from runtime_core.periodic import cancel_and_wait
from runtime_core.wire.commands import SUBMIT_FIELDS, checked_text, submission_of
from runtime_core.wire.events import ENDED, StreamEvent, StreamingMode

SOURCE = "weft/http"
"""The source of submits. No publisher's source begins with `weft`."""
BATCH_MAX = 1000
"""Tasks of one batch."""
_TOGETHER = 32
"""Submits of one batch that are under way at once."""
SUBMIT_SECONDS = 10.0
"""How long a submit waits for a broker that is unavailable, and for the first agent-handler."""
PAGE_MAX = 500
PAGE = 50
STATUSES = ("accepted", "running", "waiting", "completed", "failed", "cancelled")
LIST_PARAMETERS = ("status", "agent", "key", "session_id", "tenant", "since", "until", "limit", "cursor")
ITEM_FIELDS = (*SUBMIT_FIELDS, "idempotency_key")


def json_reply(document: object, status: int = 200, **headers: str) -> Response:
    """Return a response with a JSON document."""
    return Response(msgspec.json.encode(document), status, headers, codec.JSON)


class TaskRoutes:
    """What the routes of tasks do. Each gets the caller, whose key may bind it to a tenant."""

    def __init__(self, client: Client, limits: Limits, blobs: str = "") -> None:
        """`blobs` is the URL of the namespace's blobs, if it has any."""
        self._client = client
        self._blobs = blobs
        self._limits = limits

    async def submit(self, request: Request, caller: Caller) -> Response:
        event_id = header(request, "Idempotency-Key") or os.urandom(16).hex()
        trace = header(request, "traceparent")
        body = await read_object(request, self._limits, SUBMIT_FIELDS)
        task = await self._start(caller, body, event_id, trace)
        return json_reply({"task_id": task.task_id}, 202, Location=f"/v1/tasks/{task.task_id}")

    async def submit_batch(self, request: Request, caller: Caller) -> Response:
        """Submit the tasks individually: one that is refused does not stop the others."""
        event_id = header(request, "Idempotency-Key") or os.urandom(16).hex()
        trace = header(request, "traceparent")
        body = await read_object(request, self._limits, ("tasks",), BATCH_MAX_BYTES)
        items = list_of_objects("tasks", body.get("tasks"), BATCH_MAX)
        self._limits.count_request(caller.name, len(items) - 1)  # the batch itself is counted
        together = asyncio.Semaphore(_TOGETHER)

        async def one(place: int, item: dict[str, object]) -> Row:
            async with together:
                try:
                    refuse_unknown("", item, ITEM_FIELDS)
                    own = item.pop("idempotency_key", None)
                    name = f"{event_id}/{place}" if own is None else checked_text("idempotency_key", own)
                    return {"task_id": (await self._start(caller, item, name, trace)).task_id}
                except Exception as error:
                    problem = problem_of(error)
                    if problem is None:
                        raise
                    return {"problem": problem.document()}

        return json_reply({"results": await asyncio.gather(*(one(place, item) for place, item in enumerate(items)))})

    async def _start(self, caller: Caller, data: dict[str, object], event_id: str, trace: str) -> TaskHandle:
        # Each tenant has its own Idempotency-Keys.
        source = f"{SOURCE}/{caller.tenant}" if caller.tenant else SOURCE
        new = submission_of(data, source=source, event_id=event_id, tenant=caller.tenant, traceparent=trace)
        bound = caller.bind(new, self._blobs)
        try:
            return await self._client.start(bound, timeout=SUBMIT_SECONDS, expects_answer=False)
        except Rejected as error:
            if caller.scope is not None and error.field == "data.agent":
                raise caller.scope.unknown_agent(new.agent) from None  # the error may name other tenants' agents
            raise

    async def show(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        handle = await self.handle(request, caller)
        view = await read_task(handle.bus, handle.task_id, letters=False)
        if view is None:
            raise no_task(handle.task_id)
        return json_reply(view)

    async def list(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, LIST_PARAMETERS)
        tenant = given.text("tenant")
        if caller.tenant and tenant not in ("", caller.tenant):
            raise Problem(PARAMETER, f"{quoted(tenant)} is not the tenant of this key; leave it out", "tenant")
        wanted = TaskFilter(
            status=given.choice("status", STATUSES),
            agent=given.text("agent"),
            key=given.text("key"),
            session=given.text("session_id"),
            tenant=caller.tenant or tenant,
            since_ms=given.moment("since", 0.0),
            until_ms=given.moment("until", math.inf),
        )
        limit, cursor = given.whole("limit", PAGE, PAGE_MAX), given.text("cursor")
        try:
            page = await list_tasks(self._client.buses, wanted, limit, cursor)
        except InvalidInput as error:
            raise Problem(PARAMETER, error.message, error.field) from None
        reached = [row for row in page.tasks if caller.reaches(str(row["task_id"]))]
        return json_reply({"tasks": reached, "next_cursor": page.cursor or None})

    async def cancel(self, request: Request, caller: Caller) -> Response:
        body = await read_object(request, self._limits, ("reason",))
        reason = body.get("reason")
        if reason is not None and (not isinstance(reason, str) or not 1 <= len(reason) <= 1000 or has_control(reason)):
            raise InvalidInput("reason", f"{quoted(reason)} is not one line of 1 to 1000 characters")
        handle = await self.known(request, caller)
        status = await handle.cancel(reason or "cancelled over HTTP")
        if status == "unknown":
            raise no_task(handle.task_id)
        return json_reply({"task_id": handle.task_id, "status": status})

    async def answer(self, request: Request, caller: Caller) -> Response:
        body = await read_object(request, self._limits, ("request_id", "value"))
        request_id = checked_text("request_id", body.get("request_id"))
        if "value" not in body:
            raise InvalidInput("value", "is missing; send `null` for an empty answer")
        handle = await self.known(request, caller)
        caller.check_answer(handle.task_id, request_id, codec.encode(body["value"]), self._blobs)
        try:
            await handle.signal(request_id, body["value"])
        except InvalidInput as error:
            if error.field == "value":
                raise
            raise Problem(CONFLICT, error.message, error.field) from None
        return json_reply({"task_id": handle.task_id, "request_id": request_id})

    # -- tasks that a request names ----------------------------------------------------------------------------

    async def handle(self, request: Request, caller: Caller) -> TaskHandle:
        """Return a handle of the task in the path, which may not exist. Raises Problem if there can be none.

        A tenant's key reaches that tenant's tasks only: every other id gets the tenant's prefix.
        """
        task_id = request.path_params["task_id"]
        if not is_task_id(task_id):
            raise no_task(task_id[:200])
        try:
            return await self._client.task(caller.bound_task(task_id))
        except InvalidInput:
            raise no_task(task_id) from None

    async def known(self, request: Request, caller: Caller) -> TaskHandle:
        """Return a handle of the task in the path. Raises Problem if there is none."""
        handle = await self.handle(request, caller)
        if not await handle.exists():
            raise no_task(handle.task_id)
        return handle


MEDIA_TYPE = "text/event-stream"
HEARTBEAT_SECONDS = 15.0
"""The longest silence of a stream. Proxies close silent connections after about a minute."""
RETRY_MS = 1000
"""How long an EventSource waits before it connects again."""
END = "-end"
"""Follows the id of the last event in that of a final event without an entry: the task has no stream of its own."""
MODES = tuple(mode.value for mode in StreamingMode)


class StreamRoutes:
    """What the route of events does. `stopping` ends all streams: readers continue at another replica."""

    def __init__(self, tasks: TaskRoutes, limits: Limits, stopping: asyncio.Event) -> None:
        self._tasks = tasks
        self._limits = limits
        self._stopping = stopping

    async def events(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, ("mode",))
        chosen = given.choice("mode", MODES)
        mode = StreamingMode(chosen) if chosen else None
        after, end, _ = header(request, "Last-Event-ID").partition(END)
        if after:
            check_entry("Last-Event-ID", after)
        handle = await self._tasks.known(request, caller)
        # An EventSource connects again whenever a stream ends; 204 tells it that this one has nothing left.
        if after and await handle.has_ended_at(after, without_entry=bool(end)):
            return Response(status_code=204)
        self._limits.open_stream()
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return _EventStream(self._limits, self._texts(handle, after or "0-0", mode), headers=headers)

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

    def __init__(self, limits: Limits, texts: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        super().__init__(texts, headers=headers, media_type=MEDIA_TYPE)
        self._limits = limits
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._limits.close_stream()
            with contextlib.suppress(RuntimeError):
                await self._texts.aclose()
