"""The routes of tasks: submit one or many, show, list, cancel, answer a question."""

from __future__ import annotations

import asyncio
import math
import os

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from runtime_core import codec
from runtime_core.client.client import Client
from runtime_core.client.task import TaskHandle
from runtime_core.client.task_view import Row, TaskFilter, list_tasks, read_task
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.gateway.problems import CONFLICT, PARAMETER, Problem, no_task, problem_of
from runtime_core.gateway.requests import (
    BATCH_MAX_BYTES,
    Limits,
    Parameters,
    header,
    list_of_objects,
    read_object,
    refuse_unknown,
)
from runtime_core.ids import has_control, is_task_id
from runtime_core.wire.commands import SUBMIT_FIELDS, checked_text, submission_of

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
    """What the routes of tasks do. `caller` is who sends a request, for its rate."""

    def __init__(self, client: Client, limits: Limits) -> None:
        self._client = client
        self._limits = limits

    async def submit(self, request: Request, caller: str) -> Response:
        event_id = header(request, "Idempotency-Key") or os.urandom(16).hex()
        trace = header(request, "traceparent")
        body = await read_object(request, self._limits, SUBMIT_FIELDS)
        task = await self._start(body, event_id, trace)
        return json_reply({"task_id": task.task_id}, 202, Location=f"/v1/tasks/{task.task_id}")

    async def submit_batch(self, request: Request, caller: str) -> Response:
        """Submit each task by itself: one that is refused does not stop the others."""
        event_id = header(request, "Idempotency-Key") or os.urandom(16).hex()
        trace = header(request, "traceparent")
        body = await read_object(request, self._limits, ("tasks",), BATCH_MAX_BYTES)
        items = list_of_objects("tasks", body.get("tasks"), BATCH_MAX)
        self._limits.count_request(caller, len(items) - 1)  # the batch itself is counted
        together = asyncio.Semaphore(_TOGETHER)

        async def one(place: int, item: dict[str, object]) -> Row:
            async with together:
                try:
                    refuse_unknown("", item, ITEM_FIELDS)
                    own = item.pop("idempotency_key", None)
                    name = f"{event_id}/{place}" if own is None else checked_text("idempotency_key", own)
                    return {"task_id": (await self._start(item, name, trace)).task_id}
                except Exception as error:
                    problem = problem_of(error)
                    if problem is None:
                        raise
                    return {"problem": problem.document()}

        return json_reply({"results": await asyncio.gather(*(one(place, item) for place, item in enumerate(items)))})

    async def _start(self, data: dict[str, object], event_id: str, trace: str) -> TaskHandle:
        new = submission_of(data, source=SOURCE, event_id=event_id, traceparent=trace)
        return await self._client.start(new, timeout=SUBMIT_SECONDS, expects_answer=False)

    async def show(self, request: Request, caller: str) -> Response:
        Parameters(request, ())
        handle = await self.handle(request)
        view = await read_task(handle.bus, handle.task_id, letters=False)
        if view is None:
            raise no_task(handle.task_id)
        return json_reply(view)

    async def list(self, request: Request, caller: str) -> Response:
        given = Parameters(request, LIST_PARAMETERS)
        wanted = TaskFilter(
            status=given.choice("status", STATUSES),
            agent=given.text("agent"),
            key=given.text("key"),
            session=given.text("session_id"),
            tenant=given.text("tenant"),
            since_ms=given.moment("since", 0.0),
            until_ms=given.moment("until", math.inf),
        )
        limit, cursor = given.whole("limit", PAGE, PAGE_MAX), given.text("cursor")
        try:
            page = await list_tasks(self._client.buses, wanted, limit, cursor)
        except InvalidInput as error:
            raise Problem(PARAMETER, error.message, error.field) from None
        return json_reply({"tasks": page.tasks, "next_cursor": page.cursor or None})

    async def cancel(self, request: Request, caller: str) -> Response:
        body = await read_object(request, self._limits, ("reason",))
        reason = body.get("reason")
        if reason is not None and (not isinstance(reason, str) or not 1 <= len(reason) <= 1000 or has_control(reason)):
            raise InvalidInput("reason", f"{quoted(reason)} is not one line of 1 to 1000 characters")
        handle = await self.known(request)
        status = await handle.cancel(reason or "cancelled over HTTP")
        if status == "unknown":
            raise no_task(handle.task_id)
        return json_reply({"task_id": handle.task_id, "status": status})

    async def answer(self, request: Request, caller: str) -> Response:
        body = await read_object(request, self._limits, ("request_id", "value"))
        request_id = checked_text("request_id", body.get("request_id"))
        if "value" not in body:
            raise InvalidInput("value", "is missing; send `null` for an empty answer")
        handle = await self.known(request)
        try:
            await handle.signal(request_id, body["value"])
        except InvalidInput as error:
            if error.field == "value":
                raise
            raise Problem(CONFLICT, error.message, error.field) from None
        return json_reply({"task_id": handle.task_id, "request_id": request_id})

    # -- tasks that a request names ----------------------------------------------------------------------------

    async def handle(self, request: Request) -> TaskHandle:
        """Return a handle of the task in the path, which may not exist. Raises Problem if there can be none."""
        task_id = request.path_params["task_id"]
        if not is_task_id(task_id):
            raise no_task(task_id[:200])
        return await self._client.task(task_id)

    async def known(self, request: Request) -> TaskHandle:
        """Return a handle of the task in the path. Raises Problem if there is none."""
        handle = await self.handle(request)
        if not await handle.exists():
            raise no_task(handle.task_id)
        return handle
