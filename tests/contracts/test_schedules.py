"""Each time of a schedule starts one task, even if leaders change, die or are late."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import BusUnavailable, Fenced, InvalidInput, Rejected
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.scheduler import ONE_SHOT_RETENTION_MS, Scheduler
from runtime_core.state_manager.schedules import GRACE_MS, Schedule, Schedules, parse_set
from tests.contracts.broker import Broker, PassingTransport, complete

BEGAN = 1_700_000_000_000
MINUTE = 60_000
HOUR = 60 * MINUTE


class Meanwhile(PassingTransport):
    """A connection on which something happens right before one call: the `nth` that begins with these arguments."""

    def __init__(
        self, transport: Transport, happens: Callable[[], Awaitable[object]], *before: Argument, nth: int = 1
    ) -> None:
        super().__init__(transport)
        self._happens = happens
        self._before = before
        self._left = nth

    async def call(self, *args: Argument) -> Reply:
        if args[: len(self._before)] == self._before:
            self._left -= 1
            if not self._left:
                await self._happens()
        return await super().call(*args)


class World:
    """A clock that tests move, schedulers that read it, and the tasks that they start."""

    def __init__(self, broker: Broker, bus: EventBus) -> None:
        self.broker, self.bus = broker, bus
        self.now = BEGAN
        self.schedules = Schedules(bus, Admission([bus]))

    async def clock(self) -> int:
        return self.now

    def scheduler(self, bus: EventBus | None = None) -> Scheduler:
        bus = bus or self.bus
        return Scheduler(bus, Admission([bus]), clock=self.clock)

    def reading_while(self, happens: Callable[[], Awaitable[object]]) -> Scheduler:
        """A scheduler that has found what is due, and has not read it yet, when something happens."""
        return self.scheduler(EventBus(Meanwhile(self.bus.transport, happens, "HMGET"), self.bus.keys))

    async def set(self, **data: Any) -> Schedule:  # Any: JSON
        wanted = {"schedule_id": "s", "agent": "writer", "input": "hi", **data}
        return await self.schedules.set(parse_set(wanted, self.now))

    async def pass_time(self, ms: int) -> list[str]:
        """Let time pass, run the schedulers once and return the tasks that exist."""
        self.now += ms
        await self.scheduler().start_due()
        return await self.tasks()

    async def tasks(self) -> list[str]:
        return [entry["h"].split("\n")[2] for entry in await self.broker.entries("agent")]


@pytest.fixture
async def world(broker: Broker, bus: EventBus) -> World:
    return World(broker, bus)


def due(*offsets: int) -> list[str]:
    return [f"s-{BEGAN + offset}" for offset in offsets]


async def test_an_interval_starts_a_task_for_each_of_its_times(world: World) -> None:
    schedule = await world.set(every_seconds=60, overlap="start")
    assert schedule.next_task_id == due(MINUTE)[0]
    assert await world.pass_time(MINUTE - 1) == []
    assert await world.pass_time(1) == due(MINUTE)
    assert await world.pass_time(0) == due(MINUTE), "a second look starts nothing"
    assert await world.pass_time(MINUTE + 7) == due(MINUTE, 2 * MINUTE)
    assert await world.pass_time(MINUTE) == due(MINUTE, 2 * MINUTE, 3 * MINUTE), "late looks do not move the times"
    there = await world.schedules.get("s")
    assert (there.started, there.skipped, there.next_ms) == (3, 0, BEGAN + 4 * MINUTE)


async def test_an_expression_follows_its_time_zone(world: World) -> None:
    """2023-11-14 22:13:20 UTC: 09:00 in Tokyo is 00:00 UTC."""
    schedule = await world.set(cron="0 9 * * *", timezone="Asia/Tokyo")
    assert schedule.next_at is not None
    assert schedule.next_at.isoformat() == "2023-11-15T00:00:00+00:00"
    assert await world.pass_time(2 * HOUR) == [f"s-{int(schedule.next_at.timestamp() * 1000)}"]


@pytest.mark.parametrize("when", [{"delay_seconds": 90}, {"at": "2023-11-14T22:14:50Z"}])
async def test_a_delayed_task_starts_once(world: World, when: dict[str, object]) -> None:
    """This holds if it is set again after its time, however late it is."""
    await world.set(**when, catch_up=False)
    assert await world.pass_time(89_999) == []
    assert await world.pass_time(5 * HOUR) == due(90_000)
    assert (await world.set(**when, catch_up=False)).started == 1
    assert await world.pass_time(HOUR) == due(90_000)
    await world.pass_time(ONE_SHOT_RETENTION_MS)
    assert await world.schedules.all() == [], "and it is forgotten a day later"


async def test_two_leaders_at_once_start_one_task(world: World, other: EventBus) -> None:
    await world.set(every_seconds=60)
    world.now += MINUTE
    one, two = world.scheduler(), world.scheduler(other)
    await one.start_due()
    await two.start_due()
    assert await world.tasks() == due(MINUTE)


async def test_a_leader_that_dies_before_it_moves_on_is_followed_by_one_that_finds_the_task(world: World) -> None:
    """The task has started and the schedule is still due; by then the task may have ended too."""
    schedule = await world.set(every_seconds=60)
    world.now += MINUTE
    submission = schedule.submission(world.now)
    assert (await Admission([world.bus]).admit(submission)).started
    assert await complete(world.bus, await world.broker.take(world.bus))
    assert await world.pass_time(0) == []
    assert (await world.schedules.get("s")).next_ms == BEGAN + 2 * MINUTE


async def test_a_leader_that_was_replaced_starts_nothing(world: World) -> None:
    await world.set(every_seconds=60)
    world.now += MINUTE
    epoch = await world.bus.lead("admit")
    await world.bus.lead("admit", epoch)
    await world.broker.call("HSET", world.broker.keys.base + "leader:admit", "epoch", epoch + 1)
    with pytest.raises(Fenced):
        await world.scheduler().start_due(str(epoch))
    assert await world.tasks() == []


async def test_a_time_started_by_another_leader_moves_no_later_one_forward(world: World) -> None:
    await world.set(every_seconds=60, overlap="start")
    world.now += MINUTE
    await world.reading_while(world.scheduler().start_due).start_due()
    assert await world.tasks() == due(MINUTE)
    assert await world.pass_time(MINUTE) == due(MINUTE, 2 * MINUTE)


async def test_a_replaced_schedule_waits_for_its_new_time(world: World) -> None:
    await world.set(every_seconds=60)
    world.now += MINUTE
    await world.reading_while(lambda: world.set(delay_seconds=3600)).start_due()
    assert await world.tasks() == []
    assert await world.pass_time(HOUR) == due(MINUTE + HOUR)


async def test_a_schedule_that_came_once_just_now_is_kept(world: World) -> None:
    """Two processes find it due. The second one reads it after the first has started its only time."""
    await world.set(delay_seconds=0)
    await world.reading_while(world.scheduler().start_due).start_due()
    assert (await world.set(delay_seconds=0)).started == 1
    assert await world.pass_time(HOUR) == due(0)


async def test_a_task_whose_leader_died_overlaps_with_no_later_one(world: World) -> None:
    schedule = await world.set(every_seconds=60)
    world.now += MINUTE
    assert (await Admission([world.bus]).admit(schedule.submission(world.now))).started
    assert await world.pass_time(MINUTE) == due(MINUTE), "the next leader comes a minute late"
    assert await world.pass_time(MINUTE) == due(MINUTE), "it knows whom it waits for"
    assert await complete(world.bus, await world.broker.take(world.bus))
    assert await world.pass_time(MINUTE) == due(4 * MINUTE)
    assert (await world.schedules.get("s")).started == 2


async def test_a_missed_time_whose_leader_died_overlaps_with_no_later_one(world: World) -> None:
    """The leader starts the newest of the missed times, and dies before it stores that."""
    await world.set(every_seconds=60)
    world.now += 3 * MINUTE + 7

    async def dies() -> None:
        raise BusUnavailable("the leader dies")

    note = b"FCALL", world.bus._functions["schedule"]
    dying = EventBus(Meanwhile(world.bus.transport, dies, *note, nth=2), world.bus.keys)
    with pytest.raises(BusUnavailable):
        await world.scheduler(dying).start_due()
    assert await world.tasks() == due(3 * MINUTE)
    assert await world.pass_time(2 * MINUTE) == due(3 * MINUTE)
    assert (await world.schedules.get("s")).last_task == due(3 * MINUTE)[0]


async def test_a_leader_that_was_replaced_changes_no_schedule(world: World) -> None:
    """Its successor has already set or deleted it; later commands came after that."""
    schedule = await world.set(every_seconds=60)
    epoch = await world.bus.lead("admit")
    await world.broker.call("HSET", world.broker.keys.base + "leader:admit", "epoch", epoch + 1)
    with pytest.raises(Fenced):
        await world.schedules.delete("s", str(epoch))
    assert (await world.schedules.get("s")).next_ms == schedule.next_ms
    await world.schedules.delete("s", str(epoch + 1))
    with pytest.raises(Fenced):
        await world.schedules.set(schedule, str(epoch))
    assert await world.schedules.all() == []


@pytest.mark.parametrize(("catch_up", "started"), [(True, [3 * HOUR]), (False, [])])
async def test_missed_times_start_one_task_or_none(world: World, catch_up: bool, started: list[int]) -> None:
    """Nobody looked for three and a half hours: one task for all of it, or none. Then the times continue as before."""
    await world.set(every_seconds=3600, catch_up=catch_up, overlap="start")
    assert await world.pass_time(3 * HOUR + 30 * MINUTE) == due(*started)
    assert await world.pass_time(30 * MINUTE) == due(*started, 4 * HOUR)


async def test_a_time_that_is_a_little_late_was_not_missed(world: World) -> None:
    await world.set(every_seconds=3600, catch_up=False)
    assert await world.pass_time(HOUR + GRACE_MS) == due(HOUR)


async def test_a_time_is_skipped_while_the_previous_task_runs(world: World) -> None:
    await world.set(every_seconds=60)
    assert await world.pass_time(MINUTE) == due(MINUTE)
    assert await world.pass_time(MINUTE) == due(MINUTE)
    assert (await world.schedules.get("s")).skipped == 1
    assert await complete(world.bus, await world.broker.take(world.bus))
    assert await world.pass_time(MINUTE) == due(3 * MINUTE)


async def test_a_removed_schedule_starts_nothing(world: World) -> None:
    await world.set(every_seconds=60)
    assert await world.schedules.delete("s")
    assert not await world.schedules.delete("s")
    assert await world.pass_time(MINUTE) == []
    with pytest.raises(InvalidInput, match="no schedule 's'"):
        await world.schedules.get("s")
    assert await world.broker.call("ZCARD", world.broker.keys.base + "scheduled") == 0


async def test_setting_an_equal_one_changes_nothing_and_another_one_replaces_it(world: World) -> None:
    await world.set(every_seconds=60)
    world.now += 1000
    assert (await world.set(every_seconds=60)).next_ms == BEGAN + MINUTE
    assert (await world.set(every_seconds=30)).next_ms == BEGAN + 31_000
    assert await world.pass_time(30_000) == due(31_000)
    assert len(await world.schedules.all()) == 1


async def test_a_concurrent_change_is_not_lost(world: World) -> None:
    """A leader that has read the old schedule cannot write it back."""
    await world.set(every_seconds=60)
    read = dict(await world.schedules.due(world.now + MINUTE, 10))["s"]
    await world.set(every_seconds=30)
    assert not await world.schedules.replace(Schedule.from_json(read), read)
    assert (await world.schedules.get("s")).every_ms == 30_000


async def test_a_rejected_start_is_kept_and_the_schedule_continues(world: World) -> None:
    await world.set(every_seconds=60)
    await world.broker.call("HDEL", world.broker.keys.agents, "writer")
    assert await world.pass_time(MINUTE) == []
    schedule = await world.schedules.get("s")
    assert "no agent is named writer" in schedule.error
    assert schedule.next_ms == BEGAN + 2 * MINUTE
    (letter,) = await world.broker.entries("dead")
    assert (letter["reason"], letter["taskid"], letter["event:type"]) == ("rejected", *due(MINUTE), "weft.task.submit")
    assert json.loads(letter["event:data"])["agent"] == "writer"


async def test_a_start_that_is_rejected_as_overloaded_is_repeated(world: World) -> None:
    await world.set(every_seconds=3600)
    await world.broker.call("HSET", world.broker.keys.meta, "overload", "full")
    assert await world.pass_time(HOUR) == []
    await world.broker.call("HSET", world.broker.keys.meta, "overload", "")
    assert await world.pass_time(2 * MINUTE) == due(HOUR)


async def test_an_unreadable_schedule_does_not_block_the_others(world: World) -> None:
    await world.set(every_seconds=60)
    await world.bus.schedule("alien", "", b"not json", BEGAN, 10)
    assert await world.pass_time(MINUTE) == due(MINUTE)


async def test_there_is_a_limit_to_how_many_there_may_be(world: World) -> None:
    assert await world.bus.schedule("one", "", b"{}", BEGAN, 1) == 1
    assert await world.bus.schedule("two", "", b"{}", BEGAN, 1) == -1
    assert await world.bus.schedule("one", "*", b"{}", BEGAN, 1) == 1


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({}, "data.every_seconds"),
        ({"every_seconds": 60, "cron": "* * * * *"}, "data.cron"),
        ({"every_seconds": 0.5}, "data.every_seconds"),
        ({"every_seconds": True}, "data.every_seconds"),
        ({"delay_seconds": -1}, "data.delay_seconds"),
        ({"cron": "* * *"}, "data.cron"),
        ({"cron": 5}, "data.cron"),
        ({"at": "tomorrow"}, "data.at"),
        ({"every_seconds": 60, "timezone": "Mars/Base"}, "data.timezone"),
        ({"every_seconds": 60, "timezone": "../passwd"}, "data.timezone"),
        ({"every_seconds": 60, "overlap": "queue"}, "data.overlap"),
        ({"every_seconds": 60, "catch_up": 1}, "data.catch_up"),
        ({"every_seconds": 60, "schedule_id": "a b"}, "data.schedule_id"),
        ({"every_seconds": 60, "conf": {"max_steps": 0}}, "data.conf.max_steps"),
        ({"every_seconds": 60, "when": 1}, "data.when"),
        ({"every_seconds": 60, "agent": None}, "data.agent"),
        ({"every_seconds": 60, "agent": "nobody"}, "data.agent"),
    ],
)
async def test_a_mistake_is_named(world: World, data: dict[str, object], field: str) -> None:
    with pytest.raises((InvalidInput, Rejected)) as error:
        await world.set(**data)
    assert error.value.field == field
    assert await world.schedules.all() == []
