"""The routes of forks, trajectories, usage, dead letters and schedules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from datetime import time as time_of_day
from typing import TYPE_CHECKING, Any, cast, get_args

from starlette.requests import Request
from starlette.responses import Response

from runtime_core.errors import InvalidInput
from runtime_core.gateway.access import Access, UsageBy
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import (
    PARAMETER,
    Limits,
    Lines,
    Parameters,
    Problem,
    header,
    json_reply,
    read_object,
)
from runtime_core.state_manager.dead_letters import REASONS, By, LetterFilter
from runtime_core.state_manager.schedules import FIELDS
from runtime_core.trajectory.reading import first_difference
from runtime_core.wire.commands import checked_text
from runtime_core.wire.step import ENCODER, ENDED

if TYPE_CHECKING:
    from runtime_core.trajectory.store import Filters
    from runtime_core.wire.step import Step

PAGE = 50
PAGE_MAX = 500
LETTER_FILTERS = ("reason", "name", "task_id", "error")
GROUPS: tuple[By, ...] = get_args(By)
USAGE_BY: tuple[UsageBy, ...] = get_args(UsageBy)
USAGE_DAYS = 7
"""The span of a usage summary without `since`."""
EXPORT_BATCH = 100
SCHEDULE_FIELDS = tuple(name for name in FIELDS if name != "schedule_id")
FORK_FIELDS = ("at", "input", "task_id", "session_id")


class TrajectoryRoutes:
    """The routes of forks, recorded steps and usage."""

    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._limits = limits

    async def fork(self, request: Request, caller: Caller) -> Response:
        event_id = header(request, "Idempotency-Key")
        body = await read_object(request, self._limits, FORK_FIELDS, required=False)
        text = {name: None if body.get(name) is None else checked_text(name, body[name]) for name in ("at", "task_id")}
        session = body.get("session_id")
        task = await self._access.fork(
            caller,
            request.path_params["task_id"],
            at=text["at"],
            input=body.get("input", ...),
            new_id=text["task_id"],
            session_id=None if session is None else checked_text("session_id", session),
            event_id=event_id,
        )
        return json_reply({"task_id": task.task_id}, 202, Location=f"/v1/tasks/{task.task_id}")

    async def replay(self, request: Request, caller: Caller) -> Response:
        await read_object(request, self._limits, (), required=False)
        return json_reply(await self._access.replay(caller, request.path_params["task_id"]))

    async def show(self, request: Request, caller: Caller) -> Response:
        from runtime_core.trajectory.tree import to_tree

        Parameters(request, ())
        return json_reply(to_tree(await self._access.trajectory(caller, request.path_params["task_id"])))

    async def difference(self, request: Request, caller: Caller) -> Response:
        """Compare a task with another one."""
        given = Parameters(request, ("with",))
        other_id = given.text("with")
        if not other_id:
            raise Problem(PARAMETER, "is missing: give the id of the other task", "with")
        one = await self._access.trajectory(caller, request.path_params["task_id"])
        try:
            other = await self._access.trajectory(caller, other_id)
        except Problem as problem:
            raise Problem(problem.kind, problem.detail, "with") from None
        found = first_difference(one, other)
        if found is None:
            return json_reply({"difference": None})
        return json_reply(
            {
                "difference": {
                    "run": found.run, "step": found.step, "members": found.members,
                    "one": _step(found.one), "other": _step(found.other),
                }
            }
        )  # fmt: skip

    async def export(self, request: Request, caller: Caller) -> Response:
        """Send the recorded steps of tasks as JSON lines."""
        given = Parameters(request, ("task_id", "status", "agent", "session_id", "since"))
        since = given.moment("since", 0.0)
        task_id = given.text("task_id")
        if task_id:
            try:
                caller.bound_task(task_id)
            except InvalidInput as error:
                raise Problem(PARAMETER, error.message, "task_id") from None
        filters: Filters = {
            "tasks": [task_id] if task_id else None,
            "status": given.choice("status", ENDED) or None,
            "agent": given.text("agent") or None,
            "session": given.text("session_id") or None,
            "since": datetime.fromtimestamp(since / 1000, UTC) if since else None,
        }
        await self._access.store()  # an error now is a problem; later it can only end the lines
        self._limits.open_stream(caller.holder)
        return Lines(self._lines(caller, filters), self._limits, caller.holder)

    async def _lines(self, caller: Caller, filters: Filters) -> AsyncIterator[bytes]:
        lines: list[bytes] = []
        async for step in self._access.steps(caller, filters):
            lines.append(ENCODER.encode(step) + b"\n")
            if len(lines) >= EXPORT_BATCH:
                yield b"".join(lines)
                lines.clear()
        yield b"".join(lines)

    async def usage(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, ("by", "since", "until", "tenant"))
        by = [each for each in (given.text("by") or "agent").split(",") if each]
        for each in by:
            if each not in USAGE_BY or by.count(each) > 1:
                raise Problem(PARAMETER, f"{each[:50]!r} is not one of {', '.join(USAGE_BY)}, each once", "by")
        until = _moment(given, "until", datetime.now(UTC))
        since = _moment(given, "since", datetime.combine(until, time_of_day.min, UTC) - timedelta(days=USAGE_DAYS))
        rows, complete = await self._access.usage(caller, cast(list[UsageBy], by), since, until, given.text("tenant"))
        return json_reply({"since": since, "until": until, "rows": rows, "complete": complete})


def _moment(given: Parameters, name: str, default: datetime) -> datetime:
    try:
        return datetime.fromtimestamp(given.moment(name, default.timestamp() * 1000) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise Problem(PARAMETER, "is out of range", name) from None


def _step(step: Step | None) -> dict[str, Any] | None:  # Any: JSON
    if step is None:
        return None
    from runtime_core.trajectory.tree import decoded

    return {
        "run": step.run, "step": step.step, "kind": step.kind, "name": step.name, "key": step.key,
        "status": step.status, "attempt": step.attempt, "input": decoded(step.input), "output": decoded(step.output),
        "error": None if step.error is None else {"type": step.error.type, "message": step.error.message},
    }  # fmt: skip


class LetterRoutes:
    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._limits = limits

    async def list(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, (*LETTER_FILTERS, "limit", "cursor"))
        limit, cursor = given.whole("limit", PAGE, PAGE_MAX), given.text("cursor")
        try:
            rows, after = await self._access.letters(caller, _letters(given), limit, cursor)
        except InvalidInput as error:
            raise Problem(PARAMETER, error.message, error.field) from None
        return json_reply({"dead_letters": rows, "next_cursor": after or None})

    async def groups(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, (*LETTER_FILTERS, "by", "limit"))
        by = cast(By, given.choice("by", GROUPS) or "error")
        rows = await self._access.letter_groups(caller, by, _letters(given), given.whole("limit", PAGE, PAGE_MAX))
        return json_reply({"groups": rows})

    async def show(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        return json_reply(await self._access.letter(caller, request.path_params["letter_id"]))

    async def redrive(self, request: Request, caller: Caller) -> Response:
        body = await read_object(request, self._limits, ("reopen", "data"), required=False)
        task = await self._access.redrive(
            caller, request.path_params["letter_id"], reopen=_flag(body, "reopen"), data=body.get("data", ...)
        )
        return json_reply({"letter_id": request.path_params["letter_id"], "task_id": task or None})

    async def drop(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        await self._access.drop(caller, request.path_params["letter_id"])
        return Response(status_code=204)


def _letters(given: Parameters) -> LetterFilter:
    return LetterFilter(given.choice("reason", REASONS), given.text("name"), given.text("task_id"), given.text("error"))


def _flag(body: Mapping[str, object], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidInput(name, "is neither true nor false")
    return bool(value)


class ScheduleRoutes:
    def __init__(self, access: Access, limits: Limits) -> None:
        self._access = access
        self._limits = limits

    async def list(self, request: Request, caller: Caller) -> Response:
        given = Parameters(request, ("limit", "cursor"))
        limit = given.whole("limit", PAGE, PAGE_MAX)
        rows = await self._access.schedules(caller, limit + 1, given.text("cursor"))
        after = rows[limit - 1]["schedule_id"] if len(rows) > limit else None
        return json_reply({"schedules": rows[:limit], "next_cursor": after})

    async def show(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        return json_reply(await self._access.schedule(caller, request.path_params["schedule_id"]))

    async def set(self, request: Request, caller: Caller) -> Response:
        body = await read_object(request, self._limits, SCHEDULE_FIELDS)
        return json_reply(await self._access.set_schedule(caller, request.path_params["schedule_id"], body))

    async def delete(self, request: Request, caller: Caller) -> Response:
        Parameters(request, ())
        await self._access.delete_schedule(caller, request.path_params["schedule_id"])
        return Response(status_code=204)

    async def run(self, request: Request, caller: Caller) -> Response:
        await read_object(request, self._limits, (), required=False)
        task = await self._access.run_schedule(caller, request.path_params["schedule_id"])
        return json_reply({"task_id": task}, 202, Location=f"/v1/tasks/{task}")
