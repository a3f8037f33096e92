"""Lists tasks on the broker and in the trajectory store, and the questions that tasks ask."""

from __future__ import annotations

import base64
import binascii
import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.client.task_view import Row, of_end, read_task
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.ids import is_task_id
from runtime_core.wire.events import ENDED, describe_task

if TYPE_CHECKING:
    from runtime_core.trajectory.store import TrajectoryStore

MAX_SCANNED = 20_000
"""The most tasks of a partition that one list scans."""
_READ_TOGETHER = 500
_FIELDS = ("status", "h", "ended", "steps")
_TENANT_LINE = 10
"""The line of a task's header that names its tenant."""
_CURSOR = re.compile(r"(\d{1,15}) (\S{1,200})")

Place = tuple[int, str]
"""A task's place in the list: its creation in epoch milliseconds, then its id. A list descends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFilter:
    """Which tasks to list. Empty fields select all."""

    status: str = ""
    agent: str = ""
    session: str = ""
    key: str = ""
    tenant: str = ""
    since_ms: float = 0.0
    """Only tasks created at or after this time, in epoch milliseconds."""
    until_ms: float = math.inf
    """Only tasks created before this time, in epoch milliseconds."""

    def matches(self, row: Row) -> bool:
        """Whether a task, as described by `describe_task`, is selected."""
        return (
            (not self.status or row["status"] == self.status)
            and (not self.agent or row["agent"] == self.agent)
            and (not self.session or row.get("session_id") == self.session)
            and (not self.key or row.get("key") == self.key)
            and (not self.tenant or row.get("tenant") == self.tenant)
            and self.since_ms <= row["created"] < self.until_ms
        )


EVERY_TASK = TaskFilter()


@dataclass(frozen=True, slots=True)
class TaskPage:
    """A part of a list."""

    tasks: list[Row]
    """As `describe_task` returns them, without inputs and outputs, and with `tenant` if the task has one."""
    cursor: str
    """Continues behind this page; empty at the end of the list. A page may have fewer tasks than asked for."""


async def list_tasks(buses: Sequence[EventBus], wanted: TaskFilter, limit: int, cursor: str = "") -> TaskPage:
    """Return tasks in the order of their creation, the newest first.

    A cursor names a place in this order, not a number of tasks: new tasks and deleted ones move no other task to
    another page. Raises InvalidInput (`cursor`) for a text that is no cursor.
    """
    after = _place_in(cursor) if cursor else None
    scans = [await _Scan(bus, wanted, after).run(limit) for bus in buses]
    # Behind the place where a scan has stopped, its partition may have newer tasks than another one.
    horizon = max((scan.stopped for scan in scans if scan.stopped is not None), default=None)
    merged = heapq.merge(*(scan.found for scan in scans), key=lambda item: item[0], reverse=True)
    found = [item for item in merged if horizon is None or item[0] >= horizon]
    page = found[:limit]
    if len(found) > limit:
        return TaskPage([row for _, row in page], _cursor_at(page[-1][0]))
    return TaskPage([row for _, row in page], "" if horizon is None else _cursor_at(horizon))


@dataclass(slots=True)
class _Scan:
    """The search in one partition."""

    bus: EventBus
    wanted: TaskFilter
    after: Place | None
    found: list[tuple[Place, Row]] = field(default_factory=list)
    stopped: Place | None = None
    """The last place that it has looked at; None if there are no more."""

    async def run(self, limit: int) -> _Scan:
        scanned, together = 0, _READ_TOGETHER if self.wanted != EVERY_TASK else min(limit + 1, _READ_TOGETHER)
        last = self.after
        latest = "+inf" if self.wanted.until_ms == math.inf else f"({self.wanted.until_ms:.0f}"
        if last is not None and last[0] < self.wanted.until_ms:
            latest = str(last[0])
        while scanned < MAX_SCANNED and len(self.found) < limit:
            # From the millisecond of the last task, not by a number of tasks: those may go while this reads.
            flat = cast(
                list[bytes],
                await self.bus.transport.call(
                    "ZRANGE", self.bus.keys.index, latest, f"{self.wanted.since_ms:.0f}",
                    "BYSCORE", "REV", "LIMIT", 0, together, "WITHSCORES",
                ),
            )  # fmt: skip
            read = [(int(float(flat[at + 1])), flat[at].decode()) for at in range(0, len(flat), 2)]
            new = [place for place in read if last is None or place < last]
            scanned += len(new)
            await self._take(new)
            if len(read) < together:
                return self
            if new:
                last = new[-1]
                latest = str(last[0])
            else:
                together *= 2  # one millisecond has more tasks than a read
        self.stopped = last
        return self

    async def _take(self, places: Sequence[Place]) -> None:
        call, keys = self.bus.transport.call, self.bus.keys
        replies = [call("HMGET", keys.task(task), *_FIELDS) for _, task in places]
        for place, reply in zip(places, replies, strict=True):
            values = cast(list[bytes | None], await reply)
            if values[0] is None:
                continue  # past its retention time
            fields = {name.encode(): value for name, value in zip(_FIELDS, values, strict=True) if value is not None}
            lines = fields.get(b"h", b"").decode().split("\n")
            tenant = lines[_TENANT_LINE] if len(lines) > _TENANT_LINE else ""
            row = describe_task(place[1], fields)
            if tenant:
                row["tenant"] = tenant
            if self.wanted.matches(row):
                self.found.append((place, row))


async def tasks_in_store(store: TrajectoryStore, namespace: str, wanted: TaskFilter, limit: int) -> list[Row]:
    """Return ended tasks, the newest first. The store does not know the keys of tasks."""
    found: list[Row] = []
    before: str | None = None
    page = limit if not (wanted.since_ms or wanted.until_ms < math.inf) else 500
    for _ in range(0, 0 if wanted.key else MAX_SCANNED, page):
        ends = await store.tasks(
            namespace, status=wanted.status or None, agent=wanted.agent or None, session=wanted.session or None,
            limit=page, before=before,
        )  # fmt: skip
        rows = [{"task_id": end.task, **of_end(end)} for end in ends]
        found += [row for row in rows if wanted.matches(row)]
        if len(ends) < page or len(found) >= limit:
            break
        before = ends[-1].task
    return found[:limit]


async def open_questions(bus: EventBus, limit: int) -> list[Row]:
    """Return the open questions of a partition's oldest tasks, each with the task's agent and creation time."""
    found: list[Row] = []
    call, keys, page = bus.transport.call, bus.keys, 500
    for start in range(0, MAX_SCANNED, page):
        tasks = [task.decode() for task in cast(list[bytes], await call("ZRANGE", keys.index, start, start + page - 1))]
        replies = [call("HMGET", keys.task(task), "status", "fl") for task in tasks]
        for task, reply in zip(tasks, replies, strict=True):
            status, flags = cast(list[bytes | None], await reply)
            # Without the flag `o`, a task has written nothing to its stream, so it has asked nothing.
            if status is None or status.decode() in ENDED or b"o" not in (flags or b""):
                continue
            view = await read_task(bus, task)
            if view is not None:
                about = {"agent": view["agent"], "created": view["created"]}
                found += [{**question, **about} for question in view.get("questions", ())]
        if len(tasks) < page or len(found) >= limit:
            break
    return found


def _cursor_at(place: Place) -> str:
    return base64.urlsafe_b64encode(f"{place[0]} {place[1]}".encode()).decode().rstrip("=")


def _place_in(cursor: str) -> Place:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    parts = _CURSOR.fullmatch(text) if len(cursor) <= 400 else None
    if parts is None or not is_task_id(parts[2]):
        raise InvalidInput("cursor", f"{quoted(cursor)} is not a cursor: send one from `next_cursor`, or none")
    return int(parts[1]), parts[2]
