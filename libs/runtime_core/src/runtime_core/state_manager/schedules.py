"""Schedules: their times (cron expressions too), the tasks that they start, and their store on the broker."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Submitted
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.state_manager.admission import Admission
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import Submission, digest, refuse_unknown, submission_of
from runtime_core.wire.envelope import epoch_ms

MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
# The next 29th of February may be eight years away.
SEARCH_DAYS = 366 * 9
_MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_ITEM = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?")
SET = "weft.schedule.set"
DELETE = "weft.schedule.delete"
LEAST_EVERY_SECONDS = 1.0
MOST_SECONDS = 10 * 366 * 86_400
GRACE_MS = 60_000
"""A time counts as missed only after this delay, which a change of leader or a busy broker may cause."""
SCHEDULE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+=-]{0,179}")
SCHEDULE_ID_RULE = "1 to 180 letters, digits and . _ @ + = -, a letter or digit first"
_WHEN = ("every_seconds", "cron", "at", "delay_seconds")
_WHAT = ("agent", "input", "key", "session_id", "conf", "hooks", "metadata")
FIELDS = ("schedule_id", *_WHAT, *_WHEN, "timezone", "overlap", "catch_up")
_WHEN_LIST = "every_seconds, cron, at or delay_seconds"
Overlap = Literal["skip", "start"]
MAX_SCHEDULES = 100_000
SIZES_BATCH = 100
RECOUNT_SECONDS = 10.0
"""How often the schedules of a tenant at its limit are counted again: others than the leader also remove some."""


_MONTHS = {name: number for number, name in enumerate(_MONTH_NAMES, 1)}
_DAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 7, _DAYS),
)


@dataclass(frozen=True, slots=True)
class Cron:
    """Minute, hour, day of month, month, day of week, as in `*/5 9-17 * * mon-fri`.

    As with cron, if both day fields are restricted, a day matches if either field does.

    When the clock moves forward, a skipped time moves by the same amount (02:30 becomes 03:30). When the clock moves
    back, a repeated time counts once, at its first occurrence. An expression for every hour follows elapsed hours: it
    skips none and matches in both repeated hours.
    """

    expression: str
    zone: ZoneInfo
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    """Both day fields are restricted: a day matches either."""

    @classmethod
    def parse(cls, expression: str, zone: ZoneInfo, field: str = "cron") -> Cron:
        """Parse an expression. Raises InvalidInput (`field`), even for one that never matches."""
        parts = MACROS.get(expression.strip().lower(), expression).split()
        if len(parts) != len(_FIELDS):
            known = ", ".join(MACROS)
            raise InvalidInput(
                field,
                f"{quoted(expression)} is not a cron expression: give minute, hour, day of month, month and day of "
                f"week, as in `*/5 * * * *`, or one of {known}",
            )
        values = [_values(part, *about, field) for part, about in zip(parts, _FIELDS, strict=True)]
        cron = cls(
            expression=expression,
            zone=zone,
            minutes=tuple(sorted(values[0])),
            hours=tuple(sorted(values[1])),
            days=frozenset(values[2]),
            months=frozenset(values[3]),
            weekdays=frozenset(day % 7 for day in values[4]),
            either_day=not parts[2].startswith("*") and not parts[4].startswith("*"),
        )
        if cron.after(datetime(2000, 1, 1, tzinfo=UTC)) is None:
            raise InvalidInput(field, f"{quoted(expression)} never matches: no month has such a day")
        return cron

    def after(self, moment: datetime) -> datetime | None:
        """Return the first time after `moment` (both UTC, whole minutes); None if there is none within nine years."""
        local = moment.astimezone(self.zone)
        # An hour earlier, since a skipped time moves to a later hour.
        day, from_hour = local.date(), local.hour - 1
        for _ in range(SEARCH_DAYS):
            if self._has(day):
                for instant in self._of_day(day, from_hour):
                    if instant > moment:
                        return instant
            day, from_hour = day + timedelta(days=1), 0
        return None

    def before_or_at(self, moment: datetime, since: datetime) -> datetime:
        """Return the last time up to `moment`. `since` is an earlier scheduled time."""
        latest = since
        # Short spans first: most expressions match often.
        for span in (timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=367)):
            start = moment - span
            if start <= since:
                break
            found = self.after(start)
            if found is not None and found <= moment:
                latest = found
                break
        while (found := self.after(latest)) is not None and found <= moment:
            latest = found
        return latest

    def _has(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (of_month or of_week) if self.either_day else (of_month and of_week)

    def _of_day(self, day: date, from_hour: int) -> Iterator[datetime]:
        """Yield the times of a day in order, lazily: most callers need one."""
        every_hour = len(self.hours) == 24
        for hour in self.hours:
            if hour < from_hour:
                continue
            instants = set()
            for minute in self.minutes:
                local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=self.zone)
                first, second = local.astimezone(UTC), local.replace(fold=1).astimezone(UTC)
                skipped = first.astimezone(self.zone).replace(tzinfo=None) != local.replace(tzinfo=None)
                if every_hour and skipped:
                    continue
                instants.add(first)
                if every_hour and second > first:
                    instants.add(second)
            yield from sorted(instants)


def _values(text: str, name: str, lowest: int, highest: int, names: dict[str, int], field: str) -> set[int]:
    found: set[int] = set()
    for item in text.lower().split(","):
        match = _ITEM.fullmatch(item)
        if match is None or (match["first"] == "*" and match["last"]):
            raise InvalidInput(field, f"{quoted(item)} is not a {name}")
        step = int(match["step"] or 1)
        if step == 0:
            raise InvalidInput(field, f"{quoted(item)} has a step of 0 in {name}")
        if match["first"] == "*":
            first, last = lowest, highest
        else:
            first = _number(match["first"], name, lowest, highest, names, field)
            # `5/10` runs from 5 to the end, as in cron.
            last = highest if match["step"] else first
            if match["last"]:
                last = _number(match["last"], name, lowest, highest, names, field)
                if names is _DAYS and last == 0:
                    last = 7  # Sunday is 0 or 7
        if last < first:
            raise InvalidInput(field, f"{quoted(item)} goes backwards in {name}")
        found.update(range(first, last + 1, step))
    return found


def _number(text: str, name: str, lowest: int, highest: int, names: dict[str, int], field: str) -> int:
    number = names.get(text)
    if number is None and text.isascii() and text.isdecimal() and len(text) < 4:
        number = int(text)
    if number is None or not lowest <= number <= highest:
        raise InvalidInput(field, f"{quoted(text)} is not a {name} from {lowest} to {highest}")
    return number


class Schedule(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A schedule as the broker stores it. Times are epoch milliseconds."""

    schedule_id: str
    task: dict[str, Any]  # Any: JSON, the data of its submits
    tenant: str = ""
    """The tenant of its tasks."""
    digest: str
    """Digest of the request: setting an equal schedule again changes nothing."""
    every_ms: int = 0
    cron: str = ""
    timezone: str = "UTC"
    overlap: Overlap = "skip"
    """If the previous task still runs: `skip` the time, or `start` another task."""
    catch_up: bool = True
    """Whether one task makes up for all missed times."""
    set_ms: int = 0
    """When it was set; `every_ms` counts from here."""
    next_ms: int | None = None
    """None: there is no next time."""
    last_ms: int | None = None
    """The scheduled time of the newest task."""
    last_task: str = ""
    started: int = 0
    skipped: int = 0
    """Times without a task: the previous one still ran, the time was missed, or the submit was refused."""
    error: str = ""
    """Why the last submit was refused; empty if it was not."""

    @property
    def once(self) -> bool:
        """Whether it starts one task, at `at` or after `delay`."""
        return not self.every_ms and not self.cron

    @property
    def agent(self) -> str:
        """The name of the agent whose tasks it starts."""
        agent: str = self.task["agent"]
        return agent

    @property
    def next_at(self) -> datetime | None:
        """UTC."""
        return None if self.next_ms is None else datetime.fromtimestamp(self.next_ms / 1000, UTC)

    @property
    def next_task_id(self) -> str:
        """The id of the next task; empty if there is no next time."""
        return "" if self.next_ms is None else self.task_id(self.next_ms)

    def task_id(self, due_ms: int) -> str:
        """Return the id of a time's task: the same for every process that starts it."""
        return f"{self.schedule_id}-{due_ms}"

    def after(self, moment_ms: int) -> int | None:
        """Return the first time after a moment; None if there is none."""
        if self.every_ms:
            return self.set_ms + ((moment_ms - self.set_ms) // self.every_ms + 1) * self.every_ms
        if not self.cron:
            return None
        found = self._times().after(_moment(moment_ms))
        return None if found is None else int(found.timestamp() * 1000)

    def newest(self, due_ms: int, now_ms: int) -> int:
        """Return the last time up to now. `due_ms` is an earlier scheduled time."""
        if self.every_ms:
            return max(due_ms, self.set_ms + (now_ms - self.set_ms) // self.every_ms * self.every_ms)
        if not self.cron:
            return due_ms
        return int(self._times().before_or_at(_moment(now_ms), _moment(due_ms)).timestamp() * 1000)

    def starts(self, time_ms: int, now_ms: int) -> bool:
        """Return whether to start a time now. A one-shot schedule starts however late it is."""
        return self.once or self.catch_up or now_ms - time_ms <= GRACE_MS

    def submission(self, due_ms: int) -> Submission:
        """Return the submit of one time. Raises InvalidInput."""
        task_id = self.task_id(due_ms)
        data = {**self.task, "task_id": task_id}
        return submission_of(data, source=f"schedule/{self.schedule_id}", event_id=task_id, tenant=self.tenant)

    def describe(self) -> dict[str, Any]:  # Any: JSON
        """Return the schedule as JSON for people."""
        return {
            "schedule_id": self.schedule_id, **self.task, "every_seconds": self.every_ms / 1000 or None,
            "cron": self.cron or None, "timezone": self.timezone, "overlap": self.overlap, "catch_up": self.catch_up,
            "next": self.next_ms, "last": self.last_ms, "last_task_id": self.last_task or None,
            "started": self.started, "skipped": self.skipped, "error": self.error or None,
        }  # fmt: skip

    def _times(self) -> Cron:
        return Cron.parse(self.cron, ZoneInfo(self.timezone))

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Schedule:
        return msgspec.json.decode(data, type=cls)


def parse_set(data: Mapping[str, object], at_ms: int, tenant: str = "") -> Schedule:
    """Parse the data of a `weft.schedule.set` sent at `at_ms`. Raises InvalidInput."""
    refuse_unknown("data", data, FIELDS)
    schedule_id = checked_id(data.get("schedule_id"))
    task = {name: data[name] for name in _WHAT if name in data}
    overlap = data.get("overlap")
    catch_up = data.get("catch_up")
    schedule = Schedule(
        schedule_id=schedule_id,
        task=task,
        tenant=tenant,
        digest=digest(SET, {**data, "tenant": tenant} if tenant else dict(data)),
        timezone=_timezone(data.get("timezone")),
        overlap=_overlap(overlap),
        catch_up=_flag("catch_up", catch_up, True),
        set_ms=at_ms,
    )
    _set_when(schedule, data, at_ms)
    schedule.submission(at_ms)  # check now what every submit would raise
    return schedule


def parse_delete(data: Mapping[str, object]) -> str:
    """Return the id in the data of a `weft.schedule.delete`. Raises InvalidInput."""
    refuse_unknown("data", data, ("schedule_id",))
    return checked_id(data.get("schedule_id"))


def checked_id(value: object) -> str:
    """Return a valid id of a schedule. Raises InvalidInput (`data.schedule_id`)."""
    if not isinstance(value, str) or not SCHEDULE_ID.fullmatch(value):
        raise InvalidInput("data.schedule_id", f"{quoted(value)} is not a schedule id: use {SCHEDULE_ID_RULE}")
    return value


def _set_when(schedule: Schedule, data: Mapping[str, object], at_ms: int) -> None:
    given = [name for name in _WHEN if data.get(name) is not None]
    if len(given) != 1:
        field, why = (given[1], f"cannot be combined with {given[0]}") if given else ("every_seconds", "is missing")
        raise InvalidInput(f"data.{field}", f"{why}: give one of {_WHEN_LIST}")
    match given[0]:
        case "every_seconds":
            seconds = _seconds("every_seconds", data["every_seconds"], LEAST_EVERY_SECONDS)
            schedule.every_ms = round(seconds * 1000)
            schedule.next_ms = at_ms + schedule.every_ms
        case "cron":
            if not isinstance(data["cron"], str):
                raise InvalidInput("data.cron", f"{quoted(data['cron'])} is not text")
            schedule.cron = data["cron"]
            Cron.parse(schedule.cron, ZoneInfo(schedule.timezone), "data.cron")
            schedule.next_ms = schedule.after(at_ms)
        case "delay_seconds":
            schedule.next_ms = at_ms + round(_seconds("delay_seconds", data["delay_seconds"], 0.0) * 1000)
        case _:
            if not isinstance(data["at"], str):
                raise InvalidInput("data.at", f"{quoted(data['at'])} is not a time as in 2030-01-01T09:00:00Z")
            schedule.next_ms = int(epoch_ms("data.at", data["at"]))


def _seconds(name: str, value: object, least: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= MOST_SECONDS:  # type: ignore[operator]  # checked above
        raise InvalidInput(f"data.{name}", f"{quoted(value)} is not a number from {least:g} to {MOST_SECONDS}")
    return float(value)  # type: ignore[arg-type]  # as above


def _overlap(value: object) -> Overlap:
    if value is None or value == "skip":
        return "skip"
    if value == "start":
        return "start"
    raise InvalidInput("data.overlap", f"{quoted(value)} is neither skip nor start")


def _flag(name: str, value: object, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidInput(f"data.{name}", f"{quoted(value)} is neither true nor false")
    return value


def _timezone(value: object) -> str:
    if value is None:
        return "UTC"
    try:
        if isinstance(value, str) and value:
            return ZoneInfo(value).key
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise InvalidInput(
        "data.timezone",
        f"{quoted(value)} is not a time zone that this system knows, such as Europe/Berlin; if it knows none, install "
        "its tzdata package",
    )


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class Schedules:
    """The schedules of a namespace. `bus` is its first partition; `admission` checks and starts their tasks."""

    def __init__(self, bus: EventBus, admission: Admission) -> None:
        self.bus = bus
        self._admission = admission

    async def set(self, schedule: Schedule, epoch: str = "") -> Schedule:
        """Store a schedule, replacing one with the same id. Return the stored schedule.

        Setting an equal one again changes nothing. `epoch` is the leader's, if a leader carries out the command; raises
        Fenced if another process leads now. Raises Rejected for an undeclared agent, InvalidInput for an invalid input,
        NotDurable as a submit does.
        """
        await self._admission.check(schedule.submission(schedule.set_ms))
        while True:
            connection = self.bus.transport.reconnects
            stored = await self._stored(schedule.schedule_id)
            if stored is not None and (there := Schedule.from_json(stored)).digest == schedule.digest:
                await self.bus.make_durable(connection, wrote=False)
                return there
            if await self.replace(schedule, stored or b"", epoch=epoch):
                await self.bus.make_durable(connection, wrote=True)
                return schedule

    async def get(self, schedule_id: str) -> Schedule:
        """Return a schedule. Raises InvalidInput (`schedule_id`) if it does not exist."""
        stored = await self._stored(schedule_id)
        if stored is None:
            raise InvalidInput("schedule_id", f"there is no schedule {schedule_id!r}; see `weft schedule list`")
        return Schedule.from_json(stored)

    async def all(self, prefix: str = "", after: str = "", limit: int = MAX_SCHEDULES) -> list[Schedule]:
        """Return the schedules whose ids begin with `prefix` and follow the id `after`, sorted by id."""
        call, key = self.bus.transport.call, self.bus.keys.schedules
        every = (id.decode() for id in cast(list[bytes], await call("HKEYS", key)))
        ids = sorted(id for id in every if id.startswith(prefix) and id > after)[:limit]
        found = cast(list[bytes | None], await call("HMGET", key, *ids)) if ids else []
        return [Schedule.from_json(stored) for stored in found if stored is not None]

    async def delete(self, schedule_id: str, epoch: str = "") -> bool:
        """Remove a schedule. Return False if it does not exist. Its running tasks continue. For `epoch` see `set`."""
        connection = self.bus.transport.reconnects
        deleted = await self.bus.schedule(schedule_id, "*", b"", None, epoch=epoch) == 1
        await self.bus.make_durable(connection, wrote=deleted)
        return deleted

    async def run_now(self, schedule_id: str) -> Submitted:
        """Start a task of the schedule now; its times do not change. Raises InvalidInput if it does not exist."""
        schedule = await self.get(schedule_id)
        return await self._admission.admit(schedule.submission(time.time_ns() // 1_000_000))

    async def due(self, now_ms: int, count: int) -> list[tuple[str, bytes]]:
        """Return due schedules (id, JSON), the longest due first."""
        call, keys = self.bus.transport.call, self.bus.keys
        ids = cast(list[bytes], await call("ZRANGEBYSCORE", keys.scheduled, "-inf", now_ms, "LIMIT", 0, count))
        if not ids:
            return []
        found = cast(list[bytes | None], await call("HMGET", keys.schedules, *ids))
        return [(id.decode(), stored) for id, stored in zip(ids, found, strict=True) if stored is not None]

    async def postpone(self, schedule_id: str, look_ms: int) -> None:
        """Check a schedule later, unchanged."""
        await self.bus.transport.call("ZADD", self.bus.keys.scheduled, "XX", look_ms, schedule_id)

    async def next_due(self) -> int | None:
        """Return when the next schedule is due (epoch milliseconds); None if there is none."""
        found = cast(list[bytes], await self.bus.transport.call("ZRANGE", self.bus.keys.scheduled, 0, 0, "WITHSCORES"))
        return int(float(found[1])) if found else None

    async def look_ms(self, schedule_id: str) -> int | None:
        """Return the time of a schedule's next check (epoch ms), or None."""
        found = cast(bytes | None, await self.bus.transport.call("ZSCORE", self.bus.keys.scheduled, schedule_id))
        return None if found is None else int(float(found))

    async def replace(self, schedule: Schedule, seen: bytes, *, forget_ms: int | None = None, epoch: str = "") -> bool:
        """Replace a schedule if the broker still stores `seen`; otherwise return False.

        `forget_ms`: when to remove a schedule without a next time. For `epoch` see `set`.
        """
        due = schedule.next_ms if schedule.next_ms is not None else forget_ms
        done = await self.bus.schedule(schedule.schedule_id, seen, schedule.to_json(), due, MAX_SCHEDULES, epoch=epoch)
        if done < 0:
            raise Rejected(
                "overloaded", f"the namespace already holds {MAX_SCHEDULES} schedules, the maximum; delete one first"
            )
        return done == 1

    async def remove(self, schedule: Schedule, seen: bytes) -> bool:
        """Remove a schedule if the broker still stores `seen`."""
        return await self.bus.schedule(schedule.schedule_id, seen, b"", None) == 1

    async def size(self, schedule_id: str) -> int:
        """Return how many bytes a schedule takes; 0 if it does not exist."""
        return len(await self._stored(schedule_id) or b"")

    async def _stored(self, schedule_id: str) -> bytes | None:
        return cast(bytes | None, await self.bus.transport.call("HGET", self.bus.keys.schedules, schedule_id))


async def schedule_sizes(bus: EventBus) -> AsyncIterator[tuple[str, int]]:
    """Yield the id of each schedule and its bytes, in no order. One that changes meanwhile may come twice."""
    cursor = b"0"
    while True:
        page = await bus.transport.call("HSCAN", bus.keys.schedules, cursor, "COUNT", SIZES_BATCH)
        cursor, flat = cast(tuple[bytes, list[bytes]], page)
        for schedule_id, stored in zip(flat[::2], flat[1::2], strict=True):
            yield schedule_id.decode(), len(stored)
        if cursor == b"0":
            return


async def schedules_by_tenant(bus: EventBus, tenants: Set[str]) -> tuple[Counter[str], Counter[str]]:
    """Return the number and the bytes of each tenant's schedules, whose ids begin with it; all others under ""."""
    counts, sizes = Counter[str](), Counter[str]()
    async for schedule_id, size in schedule_sizes(bus):
        tenant = schedule_id.partition(".")[0]
        tenant = tenant if tenant in tenants else ""
        counts[tenant] += 1
        sizes[tenant] += size
    return counts, sizes


@dataclass(frozen=True, slots=True)
class ScheduleBounds:
    """How many schedules a tenant may have, and how many bytes they may take together."""

    most: int = 10_000
    most_bytes: int = 16_777_216


class TenantSchedules:
    """Limits the schedules of each tenant. Only the leader sets those of publishers, so it counts them.

    The ids of a tenant's schedules begin with its name and a dot.
    """

    def __init__(self, schedules: Schedules, bounds: ScheduleBounds) -> None:
        self._schedules = schedules
        self._bounds = bounds
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._epoch: str | None = None
        self._counted = 0.0

    async def set(self, schedule: Schedule, epoch: str) -> None:
        """Store a tenant's schedule, as `Schedules.set`. Raises InvalidInput for a new one over the limit."""
        tenant = schedule.schedule_id.partition(".")[0]
        before, after = await self._schedules.size(schedule.schedule_id), len(schedule.to_json())
        stale = time.monotonic() - self._counted > RECOUNT_SECONDS
        if epoch != self._epoch or (self._refusal(tenant, before, after) is not None and stale):
            self._counts, self._bytes = Counter(), Counter()
            async for schedule_id, size in schedule_sizes(self._schedules.bus):
                self._counts[schedule_id.partition(".")[0]] += 1
                self._bytes[schedule_id.partition(".")[0]] += size
            self._epoch, self._counted = epoch, time.monotonic()
        refusal = self._refusal(tenant, before, after)
        if refusal is not None:
            raise refusal
        await self._schedules.set(schedule, epoch)
        self._counts[tenant] += not before
        self._bytes[tenant] += after - before

    async def delete(self, schedule_id: str, epoch: str) -> None:
        """Remove a tenant's schedule, as `Schedules.delete`."""
        before = await self._schedules.size(schedule_id)
        if await self._schedules.delete(schedule_id, epoch):
            self._counts[schedule_id.partition(".")[0]] -= 1
            self._bytes[schedule_id.partition(".")[0]] -= before

    def _refusal(self, tenant: str, before: int, after: int) -> InvalidInput | None:
        """Return why a schedule of `after` bytes may not replace one of `before` bytes (0: there is none)."""
        most, most_bytes = self._bounds.most, self._bounds.most_bytes
        if not before and self._counts[tenant] >= most:
            return InvalidInput(
                "data.schedule_id",
                f"tenant {tenant!r} has {most} schedules, the maximum (WEFT_TENANT_SCHEDULES_MAX): delete one first",
            )
        if after > before and self._bytes[tenant] + after - before > most_bytes:
            return InvalidInput(
                "data",
                f"the schedules of tenant {tenant!r} would take more than {most_bytes} bytes, the maximum "
                "(WEFT_TENANT_SCHEDULES_MAX_BYTES): delete one first, or send a reference as the input",
            )
        return None
