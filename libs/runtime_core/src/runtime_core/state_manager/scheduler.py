"""Starts the tasks of due schedules: at most one task per scheduled time, across retries and changes of leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.errors import BusUnavailable, InvalidInput, Rejected, ServerError, is_temporary
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.schedules import Schedule, Schedules
from runtime_core.wire.codec import encode
from runtime_core.wire.commands import SUBMIT
from runtime_core.wire.step import ENDED

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
"""The longest pause between two checks: a new schedule may be due before all others."""
DUE_BATCH = 100
UNREADABLE_POSTPONE_MS = 60_000
ONE_SHOT_RETENTION_MS = 24 * 3600 * 1000
"""How long a one-shot schedule is kept after it has run: setting it again in that time starts nothing."""

Clock = Callable[[], Awaitable[int]]


class Scheduler:
    """Starts due schedules; one process per namespace runs it. A second one would start nothing twice.

    The task of a scheduled time has its own id (`<schedule>-<epoch ms>`). The schedule moves to its next time by a
    compare-and-set. If a process dies in between, the time stays due, and the next process finds the task started.
    """

    def __init__(self, bus: EventBus, admission: Admission, *, clock: Clock | None = None) -> None:
        """`bus` is the first partition. `clock` returns epoch milliseconds; the default is the broker's clock."""
        self._bus = bus
        self._admission = admission
        self._schedules = Schedules(bus, admission)
        self._clock = clock or bus.time_ms

    async def run(self, epoch: str = "") -> None:
        """Start due tasks until cancelled. `epoch` is the leader's; raises Fenced if another process leads."""
        waiting = False
        while True:
            try:
                left = await self.start_due(epoch)
            except BusUnavailable:
                left = POLL_SECONDS
            except ServerError as error:
                if not is_temporary(error):
                    raise
                if not waiting:
                    logger.warning("schedules wait for the broker: %s", error)
                waiting, left = True, POLL_SECONDS
            else:
                waiting = False
            await asyncio.sleep(min(left, POLL_SECONDS))

    async def start_due(self, epoch: str = "") -> float:
        """Start what is due now. Return the seconds until the next scheduled time."""
        now = await self._clock()
        for schedule_id, stored in await self._schedules.due(now, DUE_BATCH):
            try:
                schedule = Schedule.from_json(stored)
            except msgspec.MsgspecError as error:
                # Written by a newer release, whose leader will start it. It must not block the others.
                logger.error("schedule %s cannot be read: %s", schedule_id, error)
                await self._schedules.postpone(schedule_id, now + UNREADABLE_POSTPONE_MS)
            else:
                await self._start(schedule, stored, now, epoch)
        due = await self._schedules.next_due()
        # A task that could not be started is still due: retry it after a pause.
        return POLL_SECONDS if due is None else max(0.02, (due - now) / 1000)

    async def _start(self, schedule: Schedule, stored: bytes, now: int, epoch: str) -> None:
        due = schedule.next_ms
        if due is None:
            looked_at = await self._schedules.look_ms(schedule.schedule_id)
            # If its only time was started just now, by another process, it is kept for a day.
            if looked_at is not None and looked_at <= now:
                await self._schedules.remove(schedule, stored)
            return
        if due > now:
            return  # another process has moved or replaced it since its time was read
        time_ms = schedule.newest(due, now)
        if time_ms != due:
            if await self._status(schedule.task_id(due)) is not None:
                # A leader has started the task and died before it noted that.
                schedule.last_ms, schedule.last_task = due, schedule.task_id(due)
                schedule.started += 1
            # Note which time starts now: if this process dies after the start, its successor looks for that task.
            schedule.next_ms = time_ms
            if not await self._schedules.replace(schedule, stored, epoch=epoch):
                return
            stored = schedule.to_json()
        if not schedule.starts(time_ms, now):
            schedule.skipped += 1
            logger.warning("schedule %s: skipped the missed time %d (catch_up is false)", schedule.schedule_id, due)
        elif schedule.overlap == "skip" and await self._runs(schedule.last_task):
            schedule.skipped += 1
            logger.info("schedule %s: task %s still runs, skipping this time", schedule.schedule_id, schedule.last_task)
        elif not await self._submit(schedule, time_ms, epoch):
            return
        schedule.next_ms = schedule.after(max(time_ms, now))
        await self._schedules.replace(schedule, stored, forget_ms=now + ONE_SHOT_RETENTION_MS, epoch=epoch)

    async def _submit(self, schedule: Schedule, time_ms: int, epoch: str) -> bool:
        """Start the task of one scheduled time. Return False if it must be retried later."""
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
        status = await self._status(task) if task else None
        return status is not None and status not in ENDED

    async def _status(self, task: str) -> str | None:
        bus = await self._admission.find(task)
        status = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(task), "status"))
        return None if status is None else status.decode()

    async def _keep(self, schedule: Schedule, time_ms: int, error: InvalidInput) -> None:
        """Keep a refused submit as a dead letter, which can be corrected and redriven."""
        task = schedule.task_id(time_ms)
        logger.warning("schedule %s: task %s was rejected: %s", schedule.schedule_id, task, error)
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
