"""While a work stream is long, new tasks wait in queues of their tenants and start in turn; none starves."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Submitted
from runtime_core.client.task_view import TaskFilter, list_tasks
from runtime_core.errors import Rejected
from runtime_core.state_manager.keeper import Keeper
from runtime_core.state_manager.publishers import waiting_tasks
from runtime_core.state_manager.stuck import find_stuck
from runtime_core.wire.commands import ForkJournal
from tests.contracts.broker import Broker, again, answer, ask, bury, complete, now, send, suspend, withdraw

PAST = 8
"""How many tasks that moved onto a long stream may be unread."""
READY = 3
"""How many unread entries the stream may hold in these tests."""


@pytest.fixture(autouse=True)
async def short_stream(broker: Broker) -> None:
    await broker.call("HSET", broker.keys.meta, "ready_max", READY)


async def submit(broker: Broker, bus: EventBus, task: str, tenant: str = "", **more: Any) -> Submitted:
    return await broker.submit(bus, task, tenant=tenant, in_turn=True, **more)


async def flood(broker: Broker, bus: EventBus, tenant: str, count: int) -> None:
    for number in range(count):
        await submit(broker, bus, f"{tenant}-{number}", tenant)


async def set_tenant(broker: Broker, tenant: str, *, weight: int = 1, open: int = 0, rate: float = 0) -> None:
    await broker.call("HSET", broker.keys.tenants, tenant, f"{weight} {open} {rate:g}")


async def on_stream(broker: Broker) -> list[str]:
    return [entry["h"].split("\n")[2] for entry in await broker.entries("agent")]


async def take_all(broker: Broker, bus: EventBus) -> list[Delivery]:
    found: list[Delivery] = []
    while True:
        taken, malformed = await bus.read(["agent"], 10, 5)
        assert not malformed
        if not taken:
            return found
        found += taken


async def drain(broker: Broker, bus: EventBus, at_once: int = 1) -> list[str]:
    """Complete everything that waits, as a handler with `at_once` slots does. Return the tasks in that order."""
    order: list[str] = []
    while True:
        waiting = await bus.refill(at_once, ["agent"])
        taken = await take_all(broker, bus)
        for turn in taken:
            order.append(turn.task)
            assert await complete(bus, turn)
        if not taken and not waiting:
            return order


async def straight(broker: Broker, bus: EventBus, count: int) -> None:
    """Start tasks that wait for no turn, however long the stream is."""
    for number in range(count):
        await broker.submit(bus, f"straight-{number}")


WIDE = 100
"""How many calls a wide turn makes."""
AT_ONCE = 32
"""How many calls of a tenant's running tasks move in one turn."""


def calls(kind: str, count: int = WIDE) -> list[list[Argument]]:
    """Return the parts of a turn that calls a tool, an agent, or agents with a key each, or sends messages."""
    if kind == "sends":
        return [*(send(f"note-{number}", step=str(number)) for number in range(count)), ask("x")]
    if kind == "tool":
        return [ask(str(number)) for number in range(count)]
    return [
        ask(str(number), "editor", stream="agent", key=f"k{number}" if kind == "keys" else "", wait="g1")
        for number in range(count)
    ]


async def wide_turn(broker: Broker, bus: EventBus, kind: str, task: str = "wide", tenant: str = "flood") -> None:
    await submit(broker, bus, task, tenant)
    assert await suspend(bus, await broker.take(bus), *calls(kind))


async def work_off(broker: Broker, bus: EventBus, stream: str, at_once: int = 1) -> list[str]:
    """Do everything on a stream and in its queues, as a handler with few slots does. Return the tasks in that order."""
    order: list[str] = []
    while True:
        await bus.refill(at_once, [stream])
        taken, malformed = await bus.read([stream], 10, 5)
        assert not malformed
        for each in taken:
            order.append(each.task)
            assert await (answer(bus, each) if stream == "tool" else complete(bus, each))
        if not taken and stream not in await waiting_tasks(bus):
            return order


async def no_queues(broker: Broker) -> None:
    await broker.idle()
    assert not await broker.call("HEXISTS", broker.keys.meta, "queued")
    assert set(await broker.hash("queues")) <= {"seq", "agent|at", "agent|past", "tool|at", "tool|past"}
    for pattern in ("queue:*", "turns:*", "open:*"):
        assert await broker.call("KEYS", broker.keys.base + pattern) == [], pattern


async def test_a_short_stream_makes_no_task_wait(broker: Broker, bus: EventBus) -> None:
    for number in range(READY):
        await submit(broker, bus, f"t{number}")
    assert await on_stream(broker) == ["t0", "t1", "t2"]
    assert not await broker.call("EXISTS", broker.keys.base + "queues")
    # What handlers hold does not count: only unread entries do.
    assert len(await take_all(broker, bus)) == READY
    await submit(broker, bus, "t3")
    assert (await broker.task("t3"))["cur"] != "queue"


async def test_tasks_wait_behind_a_long_stream(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "", READY + 2)
    assert len(await on_stream(broker)) == READY
    assert (await broker.status("-3"), (await broker.task("-3"))["cur"]) == ("accepted", "queue")
    await bus.promote()
    assert bus.queued
    assert await drain(broker, bus) == [f"-{number}" for number in range(READY + 2)]
    assert bus.queued == 0
    await no_queues(broker)


async def test_no_task_is_queued_before_a_state_manager_has_started(broker: Broker, bus: EventBus) -> None:
    """A client of this release that starts before any service of it must not queue tasks that nobody refills."""
    await broker.call("HDEL", broker.keys.meta, "ready_max")
    await flood(broker, bus, "flood", READY + 2)
    assert len(await on_stream(broker)) == READY + 2
    assert await suspend(bus, await broker.take(bus), *calls("tool"))
    assert len(await broker.entries("tool")) == WIDE


async def test_a_new_task_does_not_overtake_one_that_waits(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "", READY + 1)
    for turn in await take_all(broker, bus):
        assert await complete(bus, turn)
    await submit(broker, bus, "later")
    assert await drain(broker, bus) == ["-3", "later"]


async def test_a_lone_task_is_next(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "flood", 50)
    await submit(broker, bus, "lone", "other")
    order = await drain(broker, bus)
    assert order.index("lone") <= READY + 1
    assert len(order) == 51
    await no_queues(broker)


async def test_weights_share_turns(broker: Broker, bus: EventBus) -> None:
    await set_tenant(broker, "heavy", weight=3)
    await flood(broker, bus, "first", READY)
    await flood(broker, bus, "heavy", 30)
    await flood(broker, bus, "light", 30)
    order = await drain(broker, bus)
    shares = Counter(task.partition("-")[0] for task in order[READY : READY + 20])
    assert 14 <= shares["heavy"] <= 16, shares


async def test_an_idle_tenant_saves_up_no_turns(broker: Broker, bus: EventBus) -> None:
    """A tenant that was idle gets no more turns than the others when it returns."""
    await flood(broker, bus, "busy", 20)
    for _ in range(12):
        await bus.refill(1, ["agent"])
        await take_all(broker, bus)
    await flood(broker, bus, "rare", 6)
    order: list[str] = []
    for _ in range(6):
        await bus.refill(1, ["agent"])
        order += [turn.task.partition("-")[0] for turn in await take_all(broker, bus)]
    assert Counter(order) == {"busy": 3, "rare": 3}, order


async def test_a_tenant_gains_nothing_by_queueing_one_task_at_a_time(broker: Broker, bus: EventBus) -> None:
    """Its turn is remembered after its queue is empty. Otherwise weights would not apply to short queues."""
    await set_tenant(broker, "heavy", weight=4)
    await flood(broker, bus, "heavy", 30)
    order: list[str] = []
    for number in range(20):
        if not order or order[-1] == "drip" or number == 1:
            await submit(broker, bus, f"drip-{number}", "drip")
        await bus.refill(1, ["agent"])
        order += [turn.task.partition("-")[0] for turn in await take_all(broker, bus)]
    assert Counter(order[READY:])["drip"] <= 5, order


async def test_priorities_are_within_a_tenant(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY)
    for task, tenant, priority in (
        ("a-low", "a", 1), ("a-usual", "a", 5), ("a-usual-2", "a", 5), ("a-high", "a", 9), ("b", "b", 1),
    ):  # fmt: skip
        await submit(broker, bus, task, tenant, priority=priority)
    order = (await drain(broker, bus))[READY:]
    assert [task for task in order if task != "b"] == ["a-high", "a-usual", "a-usual-2", "a-low"]
    assert order.index("b") <= 1


async def test_resumed_runs_do_not_wait_and_delay_no_one(broker: Broker, bus: EventBus) -> None:
    """Results go straight to the stream; new tasks still move past them."""
    await flood(broker, bus, "a", READY + 1)
    await straight(broker, bus, 10)
    turns = await take_all(broker, bus)
    for turn in turns:
        assert await suspend(bus, turn, ask("x"))
    assert len(await work_off(broker, bus, "tool")) == len(turns)
    assert len(await on_stream(broker)) == len(turns)
    await submit(broker, bus, "lone", "b")
    for _ in range(2):
        await broker.pass_time(1000)
        await bus.promote()
    assert {"a-3", "lone"} <= set(await on_stream(broker))
    for left in await take_all(broker, bus):
        assert await complete(bus, left)
    await no_queues(broker)


async def test_onto_a_long_stream_one_task_moves_at_a_time(broker: Broker, bus: EventBus) -> None:
    """However many processes look: else the line of each tenant would soon be on the stream, without turns."""
    await flood(broker, bus, "a", READY)
    await straight(broker, bus, 10)
    await flood(broker, bus, "b", 4)
    for left in (3, 2):
        await broker.pass_time(1000)
        for _ in range(3):
            await bus.promote()
        assert bus.queued == left


async def test_an_unread_stream_stays_short(broker: Broker, bus: EventBus) -> None:
    """Otherwise a flood would wait at its handlers when they start, with all others behind it."""
    for number in range(40):  # also where they come so slowly that none waits for long
        await submit(broker, bus, f"a-{number}", "a")
        await broker.pass_time(1000)
        await bus.promote()
    assert len(await on_stream(broker)) == READY + PAST
    assert len(await take_all(broker, bus)) == READY + PAST
    for _ in range(30):
        await broker.pass_time(1000)
        await bus.promote()
    assert len(await on_stream(broker)) == 2 * (READY + PAST)
    assert bus.queued == 40 - 2 * (READY + PAST)


async def test_instances_keep_their_order(broker: Broker, bus: EventBus) -> None:
    """It waits in the queue first, then in the mailbox."""
    for number in range(READY + 4):
        await submit(broker, bus, f"t{number}", "a", key="k")
    assert await broker.mailbox("writer/k") == [f"t{number}|r" for number in range(1, READY + 4)]
    for number in range(READY):
        await submit(broker, bus, f"fill-{number}", "a")
    await submit(broker, bus, "u0", "a", key="other")
    await submit(broker, bus, "u1", "a", key="k")
    assert (await broker.task("u1"))["cur"] == "queue"
    order = await drain(broker, bus, 5)
    assert [task for task in order if task in {"t6", "u1"}] == ["t6", "u1"]
    await no_queues(broker)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_task_ends_while_it_waits(broker: Broker, bus: EventBus, how: str) -> None:
    await flood(broker, bus, "a", READY)
    await submit(broker, bus, "stays", "b")
    await submit(broker, bus, "ends", "b", key="k", timeout_ms=1000)
    if how == "cancel":
        assert await bus.cancel("ends", "no more") == ["cancelled"]
    else:
        await broker.pass_time(2000)
        await bus.promote()
    assert await broker.status("ends") == ("cancelled" if how == "cancel" else "failed")
    # With the time limit, the same promotion has moved the other one.
    assert await broker.call("HGET", broker.keys.meta, "queued") == (b"1" if how == "cancel" else None)
    order = await drain(broker, bus)
    assert order == ["a-0", "a-1", "a-2", "stays"]
    await no_queues(broker)


async def test_an_end_by_an_older_release_leaves_no_trace(broker: Broker, bus: EventBus) -> None:
    """It does not know queues: a refill drops ended tasks without using up a turn."""
    await flood(broker, bus, "a", READY)
    await submit(broker, bus, "ended", "b")
    await submit(broker, bus, "next", "b")
    await broker.call("HSET", broker.keys.task("ended"), "status", "cancelled")
    order = await drain(broker, bus)
    assert "ended" not in order
    assert "next" in order
    await broker.call("ZREM", broker.keys.base + "open:b", "ended")
    await no_queues(broker)


async def test_a_task_that_cannot_start_delays_no_other(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY)
    await submit(broker, bus, "damaged", "b", key="k")
    await submit(broker, bus, "fine", "b")
    await broker.call("SET", broker.keys.instance("writer", "k"), "something else")
    assert await bus.refill(1, ["agent"]) == 2, "onto a stream that is long, too"
    started: list[str] = []
    for _ in range(6):
        for turn in await take_all(broker, bus):
            started.append(turn.task)
            assert await complete(bus, turn)
        assert await bus.refill(1, ["agent"])
    assert "fine" in started
    assert (await broker.task("damaged"))["cur"] == "queue"
    await broker.call("DEL", broker.keys.instance("writer", "k"))
    assert await drain(broker, bus) == ["damaged"]
    await no_queues(broker)


async def test_a_fork_waits_and_keeps_its_journal(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY)
    begun = ForkJournal("t", "2", {"1": b"d1a2b3c4K1700000000000" + b'"x"'}, started_ms=1_700_000_000_000)
    await submit(broker, bus, "fork", "b", begun=begun)
    assert (await broker.task("fork"))["cur"] == "queue"
    await bus.refill(READY + 1, ["agent"])
    turn = next(turn for turn in await take_all(broker, bus) if turn.task == "fork")
    assert turn.turn == -1, "its reader loads the journal"
    fields = await bus.load(turn)
    assert fields is not None
    assert list(fields.journal) == ["1"]


async def test_waiting_work_survives_a_lost_group(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY + 3)
    await take_all(broker, bus)
    await broker.lose_group()
    assert sorted(set(await drain(broker, bus))) == [f"a-{number}" for number in range(READY + 3)]


async def test_a_repeat_finds_the_task_that_waits(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY + 1)
    again = await submit(broker, bus, f"a-{READY}", "a")
    assert (again.started, again.status) == (False, "accepted")
    assert len(await drain(broker, bus)) == READY + 1


async def test_waiting_runs_count_as_work(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY + 2)
    assert (await bus.idle())[0] == READY + 2
    await broker.call("HSET", broker.keys.meta, "stream_max", READY + 2)
    with pytest.raises(Rejected, match="holds as much open work"):
        await submit(broker, bus, "late", "b")


async def test_open_tasks_are_capped(broker: Broker, bus: EventBus) -> None:
    await set_tenant(broker, "a", open=READY + 1)
    await flood(broker, bus, "a", READY + 1)
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="has 4 open tasks") as error:
        await submit(broker, bus, "late", "a")
    assert (error.value.field, error.value.retry_after_seconds) == ("overloaded", 1.0)
    assert await broker.snapshot() == before
    assert (await submit(broker, bus, "other", "b")).started
    assert not (await submit(broker, bus, "a-0", "a")).started, "a repeat is no more work"
    turns = await take_all(broker, bus)
    assert await complete(bus, turns[0])
    assert (await submit(broker, bus, "late", "a")).started


async def test_a_reopened_task_is_open_again(broker: Broker, bus: EventBus) -> None:
    await submit(broker, bus, "t", "a")
    turn = (await take_all(broker, bus))[0]
    assert await bury(bus, turn)
    opened = broker.keys.base + "open:a"
    assert await broker.call("ZCARD", opened) == 0
    letter = (await broker.entries("dead"))[0]["id"]
    assert await bus.call("redrive", letter, "1", "") == [b"ok", b"t"]
    assert await broker.call("ZRANGE", opened, 0, -1) == [b"t"]
    assert await complete(bus, (await take_all(broker, bus))[0])
    await no_queues(broker)


async def test_a_rate_is_kept(broker: Broker, bus: EventBus) -> None:
    await set_tenant(broker, "a", rate=2)
    for number in range(2):
        await submit(broker, bus, f"t{number}", "a")
    with pytest.raises(Rejected, match="more than 2 tasks a second") as error:
        await submit(broker, bus, "late", "a")
    assert error.value.field == "overloaded"
    assert error.value.retry_after_seconds is not None
    assert 0 < error.value.retry_after_seconds <= 0.5
    await broker.pass_time(500)
    assert (await submit(broker, bus, "late", "a")).started
    assert (await submit(broker, bus, "other", "b")).started


async def test_a_clock_that_goes_back_refuses_no_tenant_for_long(broker: Broker, bus: EventBus) -> None:
    await set_tenant(broker, "a", rate=2)
    await broker.pass_time(3_600_000)
    await submit(broker, bus, "t0", "a")
    await broker.pass_time(-3_600_000)
    with pytest.raises(Rejected) as error:
        await submit(broker, bus, "t1", "a")
    assert error.value.retry_after_seconds is not None
    assert error.value.retry_after_seconds <= 1


async def test_default_settings_apply_to_tenants_without_their_own(broker: Broker, bus: EventBus) -> None:
    await set_tenant(broker, "*", open=1)
    await set_tenant(broker, "a", open=2)
    await flood(broker, bus, "a", 2)
    await flood(broker, bus, "b", 1)
    with pytest.raises(Rejected, match="the tenant b has 1 open"):
        await submit(broker, bus, "late", "b")
    for number in range(3):
        await submit(broker, bus, f"t{number}")


async def test_work_for_running_tasks_never_waits(broker: Broker, bus: EventBus) -> None:
    """A request from another partition is a submit, too: it does not wait in turn, and no tenant's limit stops it."""
    await set_tenant(broker, "a", open=1)
    await flood(broker, bus, "a", 1)
    await flood(broker, bus, "b", READY + 2)
    await broker.submit(bus, "asked", tenant="a", replyto="@1:t|r|1")
    assert "asked" in await on_stream(broker)


async def test_repair_starts_a_task_that_no_refill_reaches(broker: Broker, bus: EventBus) -> None:
    await flood(broker, bus, "a", READY + 1)
    task = f"a-{READY}"
    repair = ("run", task, "r", "queue", 1_700_000_000_000, b'{"type":"LostEntry","message":"x"}')
    assert await bus.call("repair", *repair) == b"NO"
    await broker.call("DEL", broker.keys.base + "turns:agent")
    assert await bus.call("repair", *repair) == b"OK"
    assert task in await on_stream(broker)
    assert (await broker.task(task))["cur"] != "queue"
    assert "queued" not in await broker.hash("meta")


@pytest.mark.parametrize("damaged", ["agent", "agent:pool"])
async def test_damaged_queues_of_a_stream_keep_no_others_waiting(broker: Broker, bus: EventBus, damaged: str) -> None:
    other = "agent" if damaged == "agent:pool" else "agent:pool"
    await broker.call("HSET", broker.keys.agents, "pooled", "agent:pool")
    await broker.call("XGROUP", "CREATE", broker.keys.stream("agent:pool"), "agent-handler", "0", "MKSTREAM")
    for number in range(READY + 1):
        await submit(broker, bus, f"t{number}")
        await submit(broker, bus, f"p{number}", agent="pooled")
    await broker.call("DEL", broker.keys.turns(damaged))
    await broker.call("SET", broker.keys.turns(damaged), "something else")
    assert len((await bus.read([other], 10, 5))[0]) == READY
    assert await bus.refill(READY) == 1
    assert len((await bus.read([other], 10, 5))[0]) == 1


async def test_housekeeping_moves_waiting_tasks_while_no_handler_does(broker: Broker, bus: EventBus) -> None:
    """Handlers of an older release read their stream without refilling it."""
    await flood(broker, bus, "acme", 20)
    taken = len(await take_all(broker, bus))
    assert taken < 20
    await Keeper(bus, retention_seconds=3600.0).tidy()
    assert await take_all(broker, bus), "the queue stands still"


@pytest.mark.parametrize(("kind", "stream"), [("tool", "tool"), ("agents", "agent"), ("keys", "agent")])
async def test_calls_of_a_wide_turn_wait_for_their_tenants_turn(
    broker: Broker, bus: EventBus, kind: str, stream: str
) -> None:
    await wide_turn(broker, bus, kind)
    assert len(await broker.entries(stream)) == READY, "the work stream stays short"
    assert (await waiting_tasks(bus)) == {stream: {"flood": WIDE - READY}}
    await submit(broker, bus, "lone", "other")
    if stream == "tool":
        assert await suspend(bus, await broker.take(bus), ask("x"))
    order = await work_off(broker, bus, stream)
    assert order.index("lone") <= READY + AT_ONCE
    assert order.count("wide") >= WIDE
    for left in await take_all(broker, bus):
        assert await complete(bus, left)
    await no_queues(broker)


@pytest.mark.parametrize(("kind", "stream"), [("tool", "tool"), ("agents", "agent"), ("sends", "agent")])
async def test_calls_of_tasks_without_a_tenant_do_not_wait(
    broker: Broker, bus: EventBus, kind: str, stream: str
) -> None:
    await wide_turn(broker, bus, kind, tenant="")
    assert len(await broker.entries(stream)) >= WIDE
    assert await waiting_tasks(bus) == {}


async def test_a_call_without_a_tenant_passes_those_that_wait(broker: Broker, bus: EventBus) -> None:
    await wide_turn(broker, bus, "tool")
    await broker.submit(bus, "third")
    assert await suspend(bus, await broker.take(bus), ask("x"))
    assert [entry["h"].split("\n")[2] for entry in await broker.entries("tool")] == ["wide"] * READY + ["third"]


async def test_messages_of_a_wide_turn_wait_for_their_tenants_turn(broker: Broker, bus: EventBus) -> None:
    await wide_turn(broker, bus, "sends")
    assert len(await on_stream(broker)) == READY
    assert "z" in (await broker.task(f"note-{READY}"))["fl"], "its end removes its timer"
    await submit(broker, bus, "lone", "other")
    order = await work_off(broker, bus, "agent")
    assert order.index("lone") <= READY + AT_ONCE
    assert len(order) == WIDE + 1
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    await no_queues(broker)


async def test_requests_in_mid_turn_wait_for_their_tenants_turn(broker: Broker, bus: EventBus) -> None:
    await submit(broker, bus, "wide", "flood")
    turn, parts = await broker.take(bus), [part for call in calls("tool") for part in call]
    await bus.ask(turn, now(), "reply:c", b"", parts, WIDE)
    assert len(await broker.entries("tool")) == READY
    # A repeat after a lost reply starts nothing twice.
    await bus.ask(turn, now(), "reply:c", b"", parts, WIDE)
    assert len(await work_off(broker, bus, "tool")) == WIDE


async def test_the_end_of_a_task_removes_its_requests_in_mid_turn(broker: Broker, bus: EventBus) -> None:
    await submit(broker, bus, "wide", "flood")
    parts = [part for call in calls("tool") for part in call]
    await bus.ask(await broker.take(bus), now(), "reply:c", b"", parts, WIDE)
    await bus.cancel("wide", "enough")
    assert await broker.hash("delayed") == {}


async def test_a_call_that_is_withdrawn_while_it_waits_does_not_start(broker: Broker, bus: EventBus) -> None:
    await wide_turn(broker, bus, "tool")
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await suspend(bus, await broker.take(bus), withdraw(str(WIDE - 1)), again("1"))
    assert len(await work_off(broker, bus, "tool")) == WIDE - 2


async def test_messages_of_a_last_turn_wait_for_their_tenants_turn(broker: Broker, bus: EventBus) -> None:
    await submit(broker, bus, "wide", "flood")
    assert await complete(bus, await broker.take(bus), *calls("sends")[:-1])
    assert len(await on_stream(broker)) == READY
    assert len(await work_off(broker, bus, "agent")) == WIDE
    await no_queues(broker)


async def test_calls_of_a_tenant_share_by_its_weight(broker: Broker, bus: EventBus) -> None:
    await set_tenant(broker, "heavy", weight=3)
    await wide_turn(broker, bus, "tool", "first", "heavy")
    await wide_turn(broker, bus, "tool", "second", "light")
    order = await work_off(broker, bus, "tool", 8)
    # About ten calls move at a time, three times as often for the heavy one. Without weights it would be 48.
    assert 64 <= Counter(order[READY : READY + 96])["first"] <= 80


async def test_an_idle_tenant_saves_up_no_turns_for_its_calls(broker: Broker, bus: EventBus) -> None:
    async def work(rounds: int) -> list[str]:
        order: list[str] = []
        for _ in range(rounds):
            await bus.refill(1, ["tool"])
            taken, _ = await bus.read(["tool"], 10, 5)
            order += [each.task for each in taken]
            for each in taken:
                assert await answer(bus, each)
        return order

    await wide_turn(broker, bus, "tool", "early", "early")
    assert len(await work(20)) > 50
    await submit(broker, bus, "late", "late")
    turns = {each.task: each for each in await take_all(broker, bus)}  # the first result has woken the other one
    assert await suspend(bus, turns["late"], *calls("tool"))
    order = await work(4)
    assert 3 <= order.count("late") <= len(order) - 3


async def test_a_call_does_not_overtake_those_that_wait(broker: Broker, bus: EventBus) -> None:
    """Otherwise calls that come one at a time would keep a short stream full, and those that wait out."""
    await wide_turn(broker, bus, "tool")
    for _ in range(READY):
        assert await answer(bus, await broker.take(bus, "tool"))
    await submit(broker, bus, "later", "flood")
    for turn in await take_all(broker, bus):
        if turn.task == "later":
            assert await suspend(bus, turn, ask("x"))
    assert await broker.entries("tool") == []
    assert (await work_off(broker, bus, "tool"))[-1] == "later"


async def test_new_tasks_and_calls_of_one_tenant_take_turns(broker: Broker, bus: EventBus) -> None:
    """Neither keeps the other waiting forever."""
    await wide_turn(broker, bus, "agents")
    await flood(broker, bus, "flood", 5)
    order = await work_off(broker, bus, "agent")
    assert order.index("flood-4") < READY + 5 * (AT_ONCE + 1)


@pytest.mark.parametrize("kind", ["tool", "agents", "keys"])
async def test_the_end_of_a_task_removes_its_calls_that_wait(broker: Broker, bus: EventBus, kind: str) -> None:
    await wide_turn(broker, bus, kind)
    await bus.cancel("wide", "enough")
    assert await broker.hash("delayed") == {}
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    stream = "tool" if kind == "tool" else "agent"
    await submit(broker, bus, "lone", "other")
    # Thousands that are over take no places on the stream, and the turns of no others.
    await bus.refill(READY + 1, [stream])
    taken, _ = await bus.read([stream], 100, 5)
    assert len([each for each in taken if each.task == "wide"]) == READY
    assert stream == "tool" or "lone" in [each.task for each in taken]
    for each in [*taken, *await take_all(broker, bus)]:
        assert each.task != "wide" or await bus.retry(each, 0, b"") is False
        assert each.task == "wide" or await complete(bus, each)
    for _ in range(WIDE):
        await bus.refill(READY, [stream])
    await no_queues(broker)


@pytest.mark.parametrize("lost", ["turns", "queue"])
async def test_a_timer_moves_a_call_that_no_refill_reaches(broker: Broker, bus: EventBus, lost: str) -> None:
    """A release without such queues removes what it does not know from them."""
    await wide_turn(broker, bus, "tool")
    found = await find_stuck(bus)
    assert found == []
    await broker.pass_time(31_000)
    await bus.promote()
    assert len(await broker.entries("tool")) == READY + 1, "a refill will move the others"
    key = broker.keys.turns("tool") if lost == "turns" else broker.keys.queue("tool", "\nflood")
    await broker.call("DEL", key)
    await broker.pass_time(31_000)
    await bus.promote()
    assert len(await broker.entries("tool")) == WIDE
    assert len(await work_off(broker, bus, "tool")) == WIDE
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


@pytest.mark.parametrize("damaged", ["turns:tool", "queue:tool|\nflood", "queues"])
async def test_calls_do_not_wait_in_damaged_queues(broker: Broker, bus: EventBus, damaged: str) -> None:
    await submit(broker, bus, "wide", "flood")
    turn = await broker.take(bus)
    await broker.call("DEL", broker.keys.base + damaged)
    await broker.call("SET", broker.keys.base + damaged, "something else")
    assert await suspend(bus, turn, *calls("tool"))
    assert len(await broker.entries("tool")) == WIDE


async def test_a_call_that_cannot_move_delays_no_other(broker: Broker, bus: EventBus) -> None:
    await wide_turn(broker, bus, "agents")
    await broker.call("SET", broker.keys.base + f"run:wide/r/{READY}", "something else")
    order = await work_off_once(broker, bus, WIDE + 5)
    assert len(order) == WIDE - 1
    await broker.call("DEL", broker.keys.base + f"run:wide/r/{READY}")
    assert await bus.refill(READY, ["agent"]) == 0


async def work_off_once(broker: Broker, bus: EventBus, rounds: int) -> list[str]:
    order = []
    for _ in range(rounds):
        await bus.refill(1, ["agent"])
        order += [each.task for each in await take_all(broker, bus)]
    return order


async def test_calls_that_wait_refuse_no_submits_for_other_streams(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.meta, "stream_max", 10)
    await wide_turn(broker, bus, "tool")
    await submit(broker, bus, "lone", "other")
    assert await broker.status("lone") == "accepted"


async def test_an_ended_task_still_names_its_tenant(broker: Broker, bus: EventBus) -> None:
    """Lists select by it until the retention time is over."""
    await submit(broker, bus, "mine", "acme")
    await submit(broker, bus, "nobodys")
    for _ in range(2):
        await complete(bus, await broker.take(bus))
    for task in ("mine", "nobodys"):
        await broker.call("ZADD", broker.keys.index, 0, task)
    page = await list_tasks([bus], TaskFilter(tenant="acme", status="completed"), 10)
    assert [(row["task_id"], row["tenant"]) for row in page.tasks] == [("mine", "acme")]


async def list_everything(bus: EventBus, wanted: TaskFilter, seconds: float) -> tuple[list[str], int]:
    """Return the ids of all pages, and the number of pages."""
    found, cursor, pages = [], "", 0
    while cursor or not pages:
        page = await list_tasks([bus], wanted, 50, cursor, seconds=seconds)
        found += [row["task_id"] for row in page.tasks]
        cursor, pages = page.cursor, pages + 1
    return found, pages


async def test_a_list_passes_the_tasks_of_other_tenants_and_each_page_ends_in_time(
    broker: Broker, bus: EventBus
) -> None:
    tasks = [f"acme.t-{n}" if n % 400 == 0 else f"t-{n}" for n in range(3000)]
    await asyncio.gather(
        broker.call("ZADD", broker.keys.index, *(part for n, task in enumerate(tasks) for part in (n // 3, task))),
        *(
            broker.call("HSET", broker.keys.task(task), "status", "waiting", "h", f"agent\nwriter\n\n\n{n // 3}\n0")
            for n, task in enumerate(tasks)
        ),
    )
    own = [task for task in reversed(tasks) if task.startswith("acme.")]
    # Without time each page is one read.
    assert await list_everything(bus, TaskFilter(prefix="acme."), 0.0) == (own, 7)
    assert await list_everything(bus, TaskFilter(prefix="acme."), math.inf) == (own, 1)
    every, pages = await list_everything(bus, TaskFilter(agent="writer"), 0.0)
    assert (sorted(every), pages) == (sorted(tasks), 60)
    assert await list_everything(bus, TaskFilter(agent="nobody"), 0.0) == ([], 7)
