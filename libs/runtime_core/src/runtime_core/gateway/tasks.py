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

from runtime_core.base.periodic import cancel_and_wait
from runtime_core.client.task import TaskHandle
from runtime_core.client.task_view import Row, TaskFilter
from runtime_core.errors import BusError, InvalidInput
from runtime_core.gateway.access import Access
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import (
    BATCH_MAX_BYTES,
    PARAMETER,
    Limits,
    Parameters,
    Problem,
    check_entry,
    header,
    json_reply,
    list_of_objects,
    problem_of,
    read_object,
    refuse_unknown,
)
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import SUBMIT_FIELDS, checked_text
from runtime_core.wire.events import ENDED, StreamEvent, StreamingMode
from runtime_core.wire.ids import has_control

BATCH_MAX = 1000
"""Tasks of one batch."""
_TOGETHER = 32
"""Submits of one batch that are under way at once."""
PAGE_MAX = 500
PAGE = 50
STATUSES = ("accepted", "running", "waiting", "completed", "failed", "cancelled")
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
        together = asyncio.Semaphore(_TOGETHER)

        async def one(place: int, item: dict[str, object]) -> Row:
            async with together:
                try:
                    refuse_unknown("", item, ITEM_FIELDS)
                    own = item.pop("idempotency_key", None)
                    name = f"{event_id}/{place}" if own is None else checked_text("idempotency_key", own)
                    return {"task_id": (await self._access.submit(caller, item, name, trace)).task_id}
                except Exception as error:
                    problem = problem_of(error)
                    if problem is None:
                        raise
                    return {"problem": problem.document()}

        return json_reply({"results": await asyncio.gather(*(one(place, item) for place, item in enumerate(items)))})

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
        body = await read_object(request, self._limits, ("reason",))
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


MEDIA_TYPE = "base/text/event-stream"
HEARTBEAT_SECONDS = 15.0
"""The longest silence of a stream. Proxies close silent connections after about a minute."""
RETRY_MS = 1000
"""How long an EventSource waits before it connects again."""
END = "-end"
"""Follows the id of the last event in that of a final event without an entry: the task has no stream of its own."""
MODES = tuple(mode.value for mode in StreamingMode)


class StreamRoutes:
    """What the route of events does. `stopping` ends all streams: readers continue at another replica."""

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
