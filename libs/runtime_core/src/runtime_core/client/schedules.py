"""What a client may do with schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from runtime_core import codec
from runtime_core.declare.declaration import agent_name
from runtime_core.errors import InvalidInput
from runtime_core.ingress.schedules import Overlap, Schedule, Schedules, checked_id, parse_set
from runtime_core.wire.commands import NO_OPTIONS, SubmitOptions, as_object, check_options, data_of_submit
from runtime_core.wire.envelope import rfc3339

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.client.task import TaskHandle
    from runtime_core.ingress.admission import Admission


class ScheduleVerbs(ABC):
    """The part of a client that sets, lists, removes and runs schedules."""

    @property
    @abstractmethod
    def buses(self) -> Sequence[EventBus]: ...

    @abstractmethod
    async def task(self, task_id: str) -> TaskHandle: ...

    @abstractmethod
    def _ready(self) -> Admission: ...

    async def schedule(
        self,
        schedule_id: str,
        agent: str | Callable[..., object],
        input: Any = None,  # Any: whatever JSON can hold
        *,
        every: float | timedelta | None = None,
        cron: str | None = None,
        at: datetime | float | None = None,
        delay: float | timedelta | None = None,
        timezone: str = "UTC",
        overlap: Overlap = "skip",
        catch_up: bool = True,
        key: str = "",
        session_id: str = "",
        options: SubmitOptions = NO_OPTIONS,
    ) -> Schedule:
        """Start a task again and again (`every` so many seconds, or by `cron` in a `timezone`), or once (`at` a time,
        or after a `delay` in seconds). Each time starts exactly one task, with the id `<schedule_id>-<epoch ms>`.

        A schedule with the same id is replaced; an equal one changes nothing. `overlap="skip"` leaves out a time at
        which the task before is not done. Of times that were missed (no state-manager for more than a minute) the last
        one is made up for with `catch_up`, else none. `agent` and `options` are as in `submit`; each task gets an event
        id and a trace of its own. Raises InvalidInput with the field that is wrong.
        """
        check_options(options)
        if options.event_id or options.traceparent:
            field = "event_id" if options.event_id else "traceparent"
            raise InvalidInput(field, "is one task's, and a schedule starts many: leave it out")
        now = await self.buses[0].time_ms()
        wanted: dict[str, object] = {
            "every_seconds": _seconds(every),
            "cron": cron,
            "at": None if at is None else _rfc3339(at),
            "delay_seconds": _seconds(delay),
            "overlap": overlap,
            "catch_up": catch_up,
            "timezone": timezone,
        }
        name = agent_name(agent, "data.agent")
        task = data_of_submit(name, input, key=key, session_id=session_id, options=options)
        when = {name: value for name, value in wanted.items() if value is not None}
        plain = as_object("data", codec.decode(codec.encode({**task, **when})))
        return await self._schedules().set(parse_set({"schedule_id": schedule_id, **plain}, now, options.tenant))

    async def schedules(self) -> list[Schedule]:
        """All schedules of the namespace, by id."""
        return await self._schedules().all()

    async def unschedule(self, schedule_id: str) -> bool:
        """Remove a schedule; False where there is none. Tasks that it has started go on."""
        return await self._schedules().delete(checked_id(schedule_id))

    async def run_schedule(self, schedule_id: str) -> TaskHandle:
        """Start a task of a schedule now, besides its times. Raises InvalidInput where there is none."""
        return await self.task((await self._schedules().run_now(checked_id(schedule_id))).task)

    def _schedules(self) -> Schedules:
        return Schedules(self.buses[0], self._ready())


def _seconds(delay: float | timedelta | None) -> float | None:
    return delay.total_seconds() if isinstance(delay, timedelta) else delay


def _rfc3339(moment: datetime | float) -> str:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise InvalidInput("at", f"{moment.isoformat()} has no time zone: give one, as in datetime.now(UTC)")
        moment = moment.timestamp()
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        raise InvalidInput(
            "at", f"{codec.quoted(moment)} is no time: give a datetime with a time zone, or epoch seconds"
        )
    return rfc3339(moment * 1000)
