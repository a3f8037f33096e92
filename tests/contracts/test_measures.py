"""The leader's measurements of a partition are correct, even if XINFO reports no lag."""

from __future__ import annotations

import json
from typing import cast

import pytest

from runtime_core.bus.connection import Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, TRAJECTORY_RECORDER, ingress
from runtime_core.errors import ServerError
from runtime_core.state_manager.measures import COUNT_PAGE, COUNT_PAGES_MAX, Measures
from runtime_core.state_manager.publishers import Publisher, Publishers
from runtime_core.telemetry import names
from runtime_core.telemetry.metrics import PartitionMetrics
from runtime_core.telemetry.names import MetricName, Sample
from tests.contracts.broker import Broker, bury, complete, nap, suspend
from tests.servers.matrix import VALKEY_9

LONG_AGO = 1_000_000_000_000
FIFTY_YEARS = 50 * 365 * 86_400.0


def measures(bus: EventBus, measured: PartitionMetrics | None = None) -> Measures:
    return Measures(bus, measured or PartitionMetrics(), lambda: True, bus.transport)


class Look:
    """One measurement of a partition."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def value(self, metric: MetricName, *labels: str) -> float:
        """Return the value of one series. Fails if there is none, or more than one."""
        [found] = [item.value for item in self._samples if item.metric is metric and item.labels == labels]
        return found

    def group(self, stream: str, group: str) -> tuple[float, float]:
        """Lag and pending."""
        return self.value(names.STREAM_LAG, stream, group), self.value(names.STREAM_PENDING, stream, group)


async def look(bus: EventBus) -> Look:
    return Look(await measures(bus).take())


async def server_lag(broker: Broker, key: str, group: str) -> Reply:
    """Return what the server reports of a group."""
    for flat in cast(list[list[Reply]], await broker.call("XINFO", "GROUPS", key)):
        named = dict(zip(flat[::2], flat[1::2], strict=True))
        if named[b"name"] == group.encode():
            return named.get(b"lag")
    raise AssertionError(f"no group {group}")


async def filled(broker: Broker, key: str, count: int, first_ms: int = LONG_AGO) -> list[str]:
    """Append old entries and return their ids."""
    ids = [f"{first_ms + number}-1" for number in range(count)]
    for entry in ids:
        await broker.call("XADD", key, entry, "t", "x", "d", "")
    return ids


async def test_the_lag_of_work_is_right_where_the_server_knows_none(broker: Broker, bus: EventBus) -> None:
    for number in range(6):
        await broker.submit(bus, f"t{number}")
    await broker.take(bus)
    done = await broker.take(bus)
    assert await complete(bus, done)
    key = broker.keys.stream("agent")
    waiting = await broker.entries("agent")
    await broker.call("XDEL", key, waiting[3]["id"])  # ahead of the group
    assert await server_lag(broker, key, "agent-handler") is None
    assert (await look(bus)).group("agent", "agent-handler") == (3, 1)

    # What was trimmed away while it was pending must not hide what waits.
    await broker.call("XTRIM", key, "MAXLEN", "=", 1)
    assert (await look(bus)).group("agent", "agent-handler") == (1, 1)


async def test_work_without_a_group_counts_as_waiting(broker: Broker, bus: EventBus) -> None:
    key = broker.keys.stream("tool")
    await broker.call("XGROUP", "DESTROY", key, "tool-handler")
    ids = await filled(broker, key, 5)
    seen = await look(bus)
    assert seen.group("tool", "tool-handler") == (5, 0)
    assert seen.value(names.STREAM_READERS, "tool", "tool-handler") == 0
    assert FIFTY_YEARS / 3 < seen.value(names.STREAM_OLDEST_WAITING, "tool", "tool-handler") < FIFTY_YEARS
    # Made at an arbitrary id: what lies before it is work that nobody will read.
    for entry in (ids[2], ids[-1]):
        await broker.call("XGROUP", "DESTROY", key, "tool-handler")
        await broker.call("XGROUP", "CREATE", key, "tool-handler", entry)
        seen = await look(bus)
        assert seen.group("tool", "tool-handler") == (5, 0)
        assert seen.value(names.STREAM_OLDEST_WAITING, "tool", "tool-handler") > FIFTY_YEARS / 3


async def test_the_lag_of_the_record_follows_each_cursor(broker: Broker, bus: EventBus) -> None:
    record = broker.keys.record
    ids = await filled(broker, record, 3 * COUNT_PAGE)
    await bus.publish_cursor(STATE_MANAGER, ids[-3])
    await bus.publish_cursor(TRAJECTORY_RECORDER, ids[1])
    assert await server_lag(broker, record, TRAJECTORY_RECORDER) is None

    async def lags() -> tuple[float, float]:
        seen = await look(bus)
        return seen.value(names.STREAM_LAG, "record", STATE_MANAGER), seen.value(
            names.STREAM_LAG, "record", TRAJECTORY_RECORDER
        )

    assert await lags() == (2, 3 * COUNT_PAGE - 2)
    await broker.call("XDEL", record, ids[-1], ids[0], ids[50])
    assert await lags() == (1, 3 * COUNT_PAGE - 4)
    await bus.trim_record()
    assert await lags() == (1, 3 * COUNT_PAGE - 4)
    await bus.publish_cursor(TRAJECTORY_RECORDER, "5-0")  # where no entry ever was
    assert await lags() == (1, 3 * COUNT_PAGE - 4)
    await bus.publish_cursor(STATE_MANAGER, ids[COUNT_PAGE + 20])  # far from both ends
    assert (await lags())[0] == 2 * COUNT_PAGE - 22
    await broker.call("XGROUP", "DESTROY", record, TRAJECTORY_RECORDER)
    assert (await lags())[1] == 3 * COUNT_PAGE - 4
    await bus.publish_cursor(STATE_MANAGER, ids[-1])
    assert (await lags())[0] == 0
    assert (await look(bus)).value(names.STREAM_OLDEST_WAITING, "record", STATE_MANAGER) == 0


async def test_a_check_of_a_long_record_is_bounded_and_never_reports_too_little(broker: Broker, bus: EventBus) -> None:
    if broker.kind != VALKEY_9:
        pytest.skip("one broker is enough: what is counted is calls")
    beyond = COUNT_PAGE * COUNT_PAGES_MAX + 50
    ids = await filled(broker, broker.keys.record, 2 * beyond)
    await bus.publish_cursor(STATE_MANAGER, ids[beyond])
    waiting = (await look(bus)).value(names.STREAM_LAG, "record", STATE_MANAGER)
    assert beyond - 1 <= waiting <= beyond + 50


async def test_readers_are_consumers_whose_owners_live(broker: Broker, bus: EventBus, other: EventBus) -> None:
    for owner in (bus, other):
        await owner.join("agent")
    assert (await look(bus)).value(names.STREAM_READERS, "agent", "agent-handler") == 2
    await broker.silence(other)
    assert (await look(bus)).value(names.STREAM_READERS, "agent", "agent-handler") == 1
    seen = await look(bus)
    assert seen.value(names.STREAM_READERS, "record", TRAJECTORY_RECORDER) == 0
    assert seen.value(names.STREAM_READERS, "tasks", STATE_MANAGER) == 0
    assert await bus.lead("record")
    assert await bus.lead("admit")
    seen = await look(bus)
    assert seen.value(names.STREAM_READERS, "record", TRAJECTORY_RECORDER) == 1
    assert seen.value(names.STREAM_READERS, "record", STATE_MANAGER) == 1
    assert seen.value(names.STREAM_READERS, "tasks", STATE_MANAGER) == 1


async def test_the_ingress_stream_is_measured_before_anybody_reads_it(broker: Broker, bus: EventBus) -> None:
    assert (await look(bus)).group("tasks", STATE_MANAGER) == (0, 0)
    await filled(broker, ingress(broker.keys.namespace), 3)
    seen = await look(bus)
    assert seen.group("tasks", STATE_MANAGER) == (3, 0)
    assert seen.value(names.STREAM_OLDEST_WAITING, "tasks", STATE_MANAGER) > FIFTY_YEARS / 3


async def test_tasks_mail_timers_and_letters_are_counted(broker: Broker, bus: EventBus) -> None:
    for number in range(4):
        await broker.submit(bus, f"k{number}", key="k")
    for number in range(2):
        await broker.submit(bus, f"l{number}", key="l")
    await broker.submit(bus, "k0", key="k")  # again: nothing is started
    seen = await look(bus)
    assert (seen.value(names.TASKS_ADMITTED), seen.value(names.TASKS_OPEN)) == (6, 6)
    assert (seen.value(names.MAILBOX_WAITING), seen.value(names.MAILBOX_DEEPEST)) == (4, 3)
    assert seen.value(names.TIMERS_LATE) == 0

    assert await complete(bus, await broker.take(bus))
    assert await bury(bus, await broker.take(bus))
    await suspend(bus, await broker.take(bus), nap("1", 1000))
    await broker.pass_time(31_000)
    # As the functions count, before a look puts anything right.
    assert await broker.call("ZCARD", broker.keys.open_tasks) == 4
    flat = cast(list[bytes], await broker.call("ZRANGE", broker.keys.mailboxes, 0, -1, "WITHSCORES"))
    assert {name: float(depth) for name, depth in zip(flat[::2], flat[1::2], strict=True)} == {b"writer/k": 2}
    seen = await look(bus)
    assert (seen.value(names.TASKS_ADMITTED), seen.value(names.TASKS_OPEN)) == (6, 4)
    assert (seen.value(names.MAILBOX_WAITING), seen.value(names.MAILBOX_DEEPEST)) == (2, 2)
    assert seen.value(names.DEAD_LETTERS_KEPT) == 1
    assert (seen.value(names.TIMERS_WAITING), seen.value(names.TIMERS_DUE)) == (1, 1)
    assert 30 <= seen.value(names.TIMERS_LATE) < 600

    # A mailbox to go on with at once has no time that it could be late for.
    await broker.call("ZADD", broker.keys.timers, 0, "i|writer/none")
    assert (await look(bus)).value(names.TIMERS_LATE) < 600
    await broker.call("ZREM", broker.keys.timers, "i|writer/none")

    [letter] = await broker.entries("dead")
    assert (await bus.redrive(letter["id"], reopen=True))[0] == "ok"
    assert (await look(bus)).value(names.TASKS_OPEN) == 5
    for task in ("k3", "k2", "l1", "l0", "k1", "k0"):  # those that wait first: their mailbox is cleared of them
        await bus.cancel(task, "no more")
    assert await broker.call("ZSCORE", broker.keys.mailboxes, "writer/k") is None
    seen = await look(bus)
    assert (seen.value(names.TASKS_OPEN), seen.value(names.TIMERS_WAITING)) == (0, 0)


async def test_deep_mailboxes_are_added_up(broker: Broker, bus: EventBus) -> None:
    depths = {"writer/a": 1, "writer/b": 50, "writer/c": 51, "writer/d": 130}
    for instance, depth in depths.items():
        await broker.call("RPUSH", f"{broker.keys.base}mail:{instance}", *["t|r"] * depth)
        await broker.call("ZADD", broker.keys.mailboxes, depth, instance)
    seen = await look(bus)
    assert (seen.value(names.MAILBOX_WAITING), seen.value(names.MAILBOX_DEEPEST)) == (sum(depths.values()), 130)


async def test_a_broker_that_cannot_be_measured_stops_no_other_chore(
    broker: Broker, bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    measured = PartitionMetrics()
    await broker.call("SET", broker.keys.timers, "of another type")
    await measures(bus, measured).refresh()
    assert list(measured.collect()) == []
    assert "cannot measure partition 0: WRONGTYPE" in caplog.text
    await broker.call("DEL", broker.keys.timers)
    await measures(bus, measured).refresh()
    assert {family.name for family in measured.collect()} >= {"weft_timers_due", "weft_tasks_open"}


async def test_the_broker_reports_its_own_metrics(broker: Broker, bus: EventBus) -> None:
    seen = await look(bus)
    assert seen.value(names.BROKER_MEMORY_LIMIT) == 0
    assert seen.value(names.BROKER_PING) > 0
    assert seen.value(names.BROKER_MEMORY) > 0
    assert seen.value(names.BROKER_CLIENTS) >= 1
    assert seen.value(names.BROKER_UPTIME) >= 0
    assert seen.value(names.BROKER_EVICTED_KEYS) == 0
    flag = cast(list[bytes], await broker.call("CONFIG", "GET", "appendonly"))[1]
    assert seen.value(names.BROKER_APPEND_ONLY_OK) == (flag == b"yes")


async def test_without_the_right_to_info_the_rest_is_measured(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = bus.transport.call

    async def refused(*args: object) -> Reply:
        if args[0] == "INFO":
            raise ServerError("NOPERM this user has no permissions to run the 'info' command")
        return await call(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bus.transport, "call", refused)
    taken = await measures(bus).take()
    kinds = {sample.metric for sample in taken}
    assert names.BROKER_MEMORY not in kinds
    assert names.BROKER_APPEND_ONLY_OK not in kinds
    assert names.TASKS_OPEN in kinds
    assert json.dumps([sample.value for sample in taken])


async def test_dead_letters_are_measured_by_stream(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus))
    seen = await look(bus)
    assert seen.value(names.DEAD_LETTER_BYTES, "agent") > 100
    for cause in names.TRIM_CAUSES:
        assert seen.value(names.DEAD_LETTERS_TRIMMED, "agent", cause) == 0, "the first one trimmed is an increase"
    assert (await bus.trim_letters(10**9, -60_000)).old == 1
    seen = await look(bus)
    assert seen.value(names.DEAD_LETTERS_TRIMMED, "agent", "age") == 1
    assert seen.value(names.DEAD_LETTER_BYTES, "agent") == 0


async def test_tasks_that_wait_are_counted_by_tenant(broker: Broker, bus: EventBus) -> None:
    """Only the 20 largest tenants have series: a publisher that names a tenant per task cannot create more."""
    assert (await look(bus)).value(names.TASKS_QUEUED, "*") == 0
    await broker.call("HSET", broker.keys.meta, "ready_max", 1)
    await broker.submit(bus, "first", in_turn=True)
    tenants = ["", "", "", "acme", "acme", *(f"tenant-{number:02}" for number in range(30))]
    for number, tenant in enumerate(tenants):
        await broker.submit(bus, f"t{number}", tenant=tenant, in_turn=True)
    samples = [sample for sample in await measures(bus).take() if sample.metric is names.TASKS_QUEUED]
    shown = {sample.labels[0]: sample.value for sample in samples}
    assert (len(samples), shown["-"], shown["acme"], shown["*"]) == (21, 3, 2, 12)
    assert sum(shown.values()) == len(tenants)


async def test_bytes_of_schedules_are_shown_by_tenant(broker: Broker, bus: EventBus) -> None:
    await Publishers(bus).set(Publisher(name="shop", tenant="acme"))
    for schedule_id, size in (("acme.a", 100), ("acme.b", 50), ("globex.a", 7), ("mine", 1)):
        await broker.call("HSET", bus.keys.schedules, schedule_id, "x" * size)
    counting = measures(bus)
    seen = Look(await counting.take())
    assert (seen.value(names.SCHEDULE_BYTES, "acme"), seen.value(names.SCHEDULE_BYTES, "*")) == (150, 8)
    await broker.call("HSET", bus.keys.schedules, "acme.c", "x" * 1000)
    assert Look(await counting.take()).value(names.SCHEDULE_BYTES, "acme") == 150, "counted once a minute"
    assert (await look(bus)).value(names.SCHEDULE_BYTES, "acme") == 1150
