"""Starts what schedules have due: one task for each time, whoever leads and however often it is tried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.codec import encode
from runtime_core.errors import BusUnavailable, InvalidInput, Rejected, ServerError, is_temporary
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.schedules import Schedule, Schedules
from runtime_core.wire.commands import SUBMIT
from runtime_core.wire.results import ENDED

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""The longest time between two looks: a schedule that was just set may be due before all others."""
BATCH = 100
UNREADABLE_MS = 60_000
REMEMBER_MS = 24 * 3600 * 1000
"""How long a schedule that came once is kept: setting it again meanwhile starts nothing."""

Clock = Callable[[], Awaitable[int]]


class Scheduler:
    """Run by one process of a namespace. A second one beside it starts nothing twice.

    A time's task has an id of its own (`<schedule>-<epoch ms>`), and the schedule goes on to its next time only where
    the broker still holds what was read: a process that dies in between leaves the time due, and the next one finds
    the task started.
    """

    def __init__(self, bus: EventBus, admission: Admission, *, clock: Clock | None = None) -> None:
        """`bus` is the first partition; `clock` gives epoch milliseconds, by default the broker's."""
        self._bus = bus
        self._admission = admission
        self._schedules = Schedules(bus, admission)
        self._clock = clock or bus.time_ms

    async def run(self, epoch: str = "") -> None:
        """Start what is due until cancelled. `epoch` is the leader's; raises Fenced where another leads by now."""
        waiting = False
        while True:
            try:
                left = await self.start_due(epoch)
            except BusUnavailable:
                left = LOOK_SECONDS
            except ServerError as error:
                if not is_temporary(error):
                    raise
                if not waiting:
                    logger.warning("schedules wait: %s", error)
                waiting, left = True, LOOK_SECONDS
            else:
                waiting = False
            await asyncio.sleep(min(left, LOOK_SECONDS))

    async def start_due(self, epoch: str = "") -> float:
        """Start what is due now; returns the seconds until the next time."""
        now = await self._clock()
        for schedule_id, stored in await self._schedules.due(now, BATCH):
            try:
                schedule = Schedule.from_json(stored)
            except msgspec.MsgspecError as error:
                # A newer release's: its own leader will start it. It must not hold up the others.
                logger.error("schedule %s cannot be read: %s", schedule_id, error)
                await self._schedules.postpone(schedule_id, now + UNREADABLE_MS)
            else:
                await self._start(schedule, stored, now, epoch)
        due = await self._schedules.next_due()
        # What could not be started yet is due still: it is tried again, but not without a pause.
        return LOOK_SECONDS if due is None else max(0.02, (due - now) / 1000)

    async def _start(self, schedule: Schedule, stored: bytes, now: int, epoch: str) -> None:
        due = schedule.next_ms
        if due is None:
            await self._schedules.remove(schedule, stored)
            return
        time_ms = schedule.newest(due, now)
        if not schedule.starts(time_ms, now):
            schedule.skipped += 1
            logger.warning("schedule %s: nobody was there at %d, and it does not catch up", schedule.schedule_id, due)
        elif schedule.overlap == "skip" and await self._runs(schedule.last_task):
            schedule.skipped += 1
            logger.info("schedule %s: %s is not done, a time is left out", schedule.schedule_id, schedule.last_task)
        elif not await self._submit(schedule, time_ms, epoch):
            return
        schedule.next_ms = schedule.after(max(time_ms, now))
        await self._schedules.replace(schedule, stored, forget_ms=now + REMEMBER_MS)

    async def _submit(self, schedule: Schedule, time_ms: int, epoch: str) -> bool:
        """Start the task of one time; False where that has to be tried again later."""
        try:
            submission = schedule.submission(time_ms)
            submission.epoch = epoch
            task = (await self._admission.admit(submission)).task
        except InvalidInput as error:
            if isinstance(error, Rejected) and error.retry_after_seconds is not None:
                return False
            schedule.error = str(error)
            schedule.skipped += 1
            await self._keep(schedule, time_ms, error)
            return True
        schedule.last_ms, schedule.last_task, schedule.error = time_ms, task, ""
        schedule.started += 1
        return True

    async def _runs(self, task: str) -> bool:
        if not task:
            return False
        bus = await self._admission.find(task)
        status = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(task), "status"))
        return status is not None and status.decode() not in ENDED

    async def _keep(self, schedule: Schedule, time_ms: int, error: InvalidInput) -> None:
        """Keep a refused submit as a dead letter, from which it can be mended and submitted again."""
        task = schedule.task_id(time_ms)
        logger.warning("schedule %s: %s is rejected: %s", schedule.schedule_id, task, error)
        now = await self._clock()
        reason = {"type": "Rejected", "message": str(error)}
        await self._bus.keep_letter((
            "reason", "rejected", "stream", "tasks", "group", STATE_MANAGER,
            "entry", f"{time_ms}-0", "time", now, "field", error.field, "error", msgspec.json.encode(reason),
            "errors", msgspec.json.encode([{**reason, "at": float(now)}]), "taskid", task,
            "event:type", SUBMIT, "event:id", task, "event:source", f"schedule/{schedule.schedule_id}",
            *(("event:tenant", schedule.tenant) if schedule.tenant else ()),
            "event:data", encode({**schedule.task, "task_id": task}),
        ))  # fmt: skip
