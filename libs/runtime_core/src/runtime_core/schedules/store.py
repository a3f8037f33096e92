"""Schedules on the broker: set, list, remove, run now. They live in the first partition of a namespace."""

from __future__ import annotations

import time
from typing import cast

from runtime_core.admission import Admission
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.values import Submitted
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.schedules.definition import Schedule

MAX_SCHEDULES = 100_000


class Schedules:
    """`bus` is the first partition; `admission` starts what is due, and checks what will be."""

    def __init__(self, bus: EventBus, admission: Admission) -> None:
        self._bus = bus
        self._admission = admission

    async def set(self, schedule: Schedule) -> Schedule:
        """Keep a schedule, in the place of one with the same id; returns what is kept now.

        Setting an equal one again changes nothing. Raises Rejected for an agent that nobody has declared, InvalidInput
        for an input that its agent refuses, NotDurable as a submit does.
        """
        await self._admission.check(schedule.submission(schedule.set_ms))
        while True:
            connection = self._bus.transport.reconnects
            stored = await self._stored(schedule.schedule_id)
            if stored is not None and (there := Schedule.from_json(stored)).digest == schedule.digest:
                await self._bus.make_durable(connection, wrote=False)
                return there
            if await self.replace(schedule, stored or b""):
                await self._bus.make_durable(connection, wrote=True)
                return schedule

    async def get(self, schedule_id: str) -> Schedule:
        """Raises InvalidInput (`schedule_id`) where there is none."""
        stored = await self._stored(schedule_id)
        if stored is None:
            raise InvalidInput("schedule_id", f"there is no schedule {schedule_id!r}")
        return Schedule.from_json(stored)

    async def all(self) -> list[Schedule]:
        """All schedules, by id."""
        found = cast(list[bytes], await self._bus.transport.call("HVALS", self._bus.keys.schedules))
        return sorted(map(Schedule.from_json, found), key=lambda schedule: schedule.schedule_id)

    async def delete(self, schedule_id: str) -> bool:
        """Remove a schedule; False where there is none. Tasks that it has started go on."""
        connection = self._bus.transport.reconnects
        deleted = await self._bus.schedule(schedule_id, "*", b"", None) == 1
        await self._bus.make_durable(connection, wrote=deleted)
        return deleted

    async def run_now(self, schedule_id: str) -> Submitted:
        """Start a task of the schedule now, besides its times. Raises InvalidInput where there is none."""
        schedule = await self.get(schedule_id)
        return await self._admission.admit(schedule.submission(time.time_ns() // 1_000_000))

    async def due(self, now_ms: int, count: int) -> list[tuple[str, bytes]]:
        """Schedules (id, JSON) whose time has come, the longest due first."""
        call, keys = self._bus.transport.call, self._bus.keys
        ids = cast(list[bytes], await call("ZRANGEBYSCORE", keys.scheduled, "-inf", now_ms, "LIMIT", 0, count))
        if not ids:
            return []
        found = cast(list[bytes | None], await call("HMGET", keys.schedules, *ids))
        return [(id.decode(), stored) for id, stored in zip(ids, found, strict=True) if stored is not None]

    async def postpone(self, schedule_id: str, look_ms: int) -> None:
        """Look at a schedule later, and leave it as it is."""
        await self._bus.transport.call("ZADD", self._bus.keys.scheduled, "XX", look_ms, schedule_id)

    async def next_due(self) -> int | None:
        """When the next one is due (epoch ms)."""
        found = cast(
            list[bytes], await self._bus.transport.call("ZRANGE", self._bus.keys.scheduled, 0, 0, "WITHSCORES")
        )
        return int(float(found[1])) if found else None

    async def replace(self, schedule: Schedule, seen: bytes, *, forget_ms: int | None = None) -> bool:
        """Keep a schedule where the broker still holds what was seen; False where it does not.

        `forget_ms`: one that comes no more is looked at again then.
        """
        due = schedule.next_ms if schedule.next_ms is not None else forget_ms
        done = await self._bus.schedule(schedule.schedule_id, seen, schedule.to_json(), due, MAX_SCHEDULES)
        if done < 0:
            raise Rejected("overloaded", f"the namespace holds {MAX_SCHEDULES} schedules, as many as it may")
        return done == 1

    async def remove(self, schedule: Schedule, seen: bytes) -> bool:
        """Remove a schedule where the broker still holds what was seen."""
        return await self._bus.schedule(schedule.schedule_id, seen, b"", None) == 1

    async def _stored(self, schedule_id: str) -> bytes | None:
        return cast(bytes | None, await self._bus.transport.call("HGET", self._bus.keys.schedules, schedule_id))
