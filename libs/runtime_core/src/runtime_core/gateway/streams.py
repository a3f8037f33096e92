"""The events of a task as server-sent events. A reader continues behind any event with `Last-Event-ID`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from runtime_core.client.task import TaskHandle
from runtime_core.errors import BusError, InvalidInput
from runtime_core.gateway.requests import Limits, Parameters, check_entry, header
from runtime_core.gateway.tasks import TaskRoutes
from runtime_core.periodic import cancel_and_wait
from runtime_core.wire.events import ENDED, StreamEvent, StreamingMode

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

    async def events(self, request: Request, caller: str) -> Response:
        given = Parameters(request, ("mode",))
        chosen = given.choice("mode", MODES)
        mode = StreamingMode(chosen) if chosen else None
        after, end, _ = header(request, "Last-Event-ID").partition(END)
        if after:
            check_entry("Last-Event-ID", after)
        handle = await self._tasks.known(request)
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
