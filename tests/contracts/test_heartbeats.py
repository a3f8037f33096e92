"""The broker counts missed heartbeats. A dead owner may write nothing and never comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.heartbeat import Owner
from runtime_core.errors import Fenced
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import DIGEST, LEASE_MS, Broker, answer, ask, bury, complete, emit_pieces, suspend
from tests.servers.process import Server

HOUR_MS = 3_600_000
VALUE = f"{DIGEST}K1700000000000true".encode()
Write = Callable[[EventBus, Delivery, Delivery], Awaitable[object]]


async def last_beat_was(broker: Broker, ms_ago: int) -> None:
    await broker.call("HSET", broker.keys.meta, "beat_at", int(time.time() * 1000) - ms_ago)


async def beat_clock(broker: Broker) -> int:
    return int((await broker.hash("meta"))["beat_clock"])


async def test_a_broker_pause_declares_no_owner_dead(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """After an hour without any heartbeat, the first owner to return is alone only for a moment."""
    await last_beat_was(broker, HOUR_MS)
    _, _, declared_dead = await bus.beat(LEASE_MS, False, "")
    assert declared_dead == 0
    assert await broker.alive(other)
    await other.beat(LEASE_MS, False, "")


async def test_many_pauses_declare_no_beating_owner_dead(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The server's clock repeatedly jumps an hour ahead."""
    for _ in range(20):
        for owner in (bus, other):
            await last_beat_was(broker, HOUR_MS)
            assert (await owner.beat(LEASE_MS, False, ""))[2] == 0


async def test_a_clock_that_goes_back_does_not_lower_the_count(broker: Broker, bus: EventBus) -> None:
    """Otherwise a silent owner would be forgiven its silence."""
    before = await beat_clock(broker)
    await last_beat_was(broker, -HOUR_MS)
    await bus.beat(LEASE_MS, False, "")
    assert await beat_clock(broker) >= before


async def test_an_owner_without_heartbeats_is_declared_dead_once(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """Only the beat with which the lease ends reports that."""
    deaths = 0
    for _ in range(20):
        await last_beat_was(broker, LEASE_MS // 10)
        deaths += (await bus.beat(LEASE_MS, False, ""))[2]
    assert deaths == 1
    assert not await broker.alive(other)
    assert await broker.alive(bus)


async def test_constantly_killed_owners_still_declare_others_dead(broker: Broker, other: EventBus) -> None:
    """No process lives for a whole lease, and yet the first one's silence counts."""
    for _ in range(20):
        await last_beat_was(broker, LEASE_MS // 10)
        await broker.owner()
    assert not await broker.alive(other)


async def test_a_dead_owner_cannot_return_with_a_heartbeat(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A paused process must learn that it was declared dead, and its name stays dead."""
    await broker.silence(other)
    with pytest.raises(Fenced, match="declared dead"):
        await other.beat(LEASE_MS, False, "")
    assert not await broker.alive(other)


async def test_the_name_of_an_owner_is_never_reused(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A process that returns is another owner, and does not hold what the first one held."""
    await broker.submit(bus, "t")
    turn = await broker.take(other)
    await broker.silence(other)
    first = other.owner
    await Owner(other, "handler", LEASE_MS / 1000).enter()
    assert other.owner != first
    assert await broker.alive(other)
    assert await other.own_pending("agent") == {}
    adopted = await bus.adopt("agent", 10, False)
    assert [delivery.entry for delivery in adopted.deliveries] == [turn.entry]


async def test_names_of_one_process_differ(broker: Broker) -> None:
    """The name contains the boot time and a random part, so a restarted pod is not its predecessor."""
    names = {(await broker.owner()).owner for _ in range(5)}
    assert len(names) == 5


async def test_a_heartbeat_reports_tasks_cancelled_since_the_last_one(broker: Broker, bus: EventBus) -> None:
    """Running work learns from the heartbeat that it is cancelled."""
    await broker.submit(bus, "t")
    since, stopped, _ = await bus.beat(LEASE_MS, False, "")
    assert stopped == []
    await broker.call("HINCRBY", broker.keys.meta, "offset", 1000)
    await bus.cancel("t", "not wanted")
    _, stopped, _ = await bus.beat(LEASE_MS, False, since)
    assert stopped == ["t"]


async def test_an_owner_learns_of_a_task_that_ended_before_its_second_heartbeat(broker: Broker, bus: EventBus) -> None:
    owner = Owner(bus, "handler", LEASE_MS / 1000)
    await broker.submit(bus, "t")
    await owner.enter()
    await bus.cancel("t", "not wanted")
    assert await owner.beat() == ["t"]
    assert await owner.beat() == [], "once"


async def test_a_returning_owner_learns_of_tasks_that_ended_meanwhile(broker: Broker, bus: EventBus) -> None:
    owner = Owner(bus, "handler", LEASE_MS / 1000)
    await broker.submit(bus, "t")
    await owner.enter()
    await broker.call("ZREM", broker.keys.alive, bus.owner)
    await bus.cancel("t", "not wanted")
    # An hour ago, as was the first beat: the broker reports those of the current millisecond in any case.
    await broker.call("ZADD", broker.keys.base + "stopped", owner.at_ms - HOUR_MS, "t")
    owner._since = str(owner.at_ms - HOUR_MS)
    with pytest.raises(Fenced):
        await owner.beat()
    await owner.enter()
    assert await owner.beat() == ["t"]


async def test_being_declared_dead_counts_as_a_reply_of_the_broker(broker: Broker, bus: EventBus) -> None:
    """Its probes must not take a late heartbeat for a broker that is away."""
    owner = Owner(bus, "handler", LEASE_MS / 1000)
    await owner.enter()
    await broker.call("ZREM", broker.keys.alive, bus.owner)
    owner._heard -= 1000
    with pytest.raises(Fenced):
        await owner.beat()
    assert owner.silent_seconds < 1000


WRITES: dict[str, Write] = {
    "commit_turn, ends": lambda bus, turn, call: complete(bus, turn),
    "commit_turn, waits": lambda bus, turn, call: suspend(bus, turn, ask("1")),
    "commit_call": lambda bus, turn, call: answer(bus, call),
    "record": lambda bus, turn, call: bus.record(turn, "1", VALUE),
    "emit": lambda bus, turn, call: emit_pieces(bus, turn, b'"x"', first=1),
    "progress": lambda bus, turn, call: bus.progress(call, b'{"done":1}'),
    "retry of a turn": lambda bus, turn, call: bus.retry(turn, 10, b""),
    "retry of a call": lambda bus, turn, call: bus.retry(call, 10, b""),
    "dead_letter of a turn": lambda bus, turn, call: bury(bus, turn),
    "dead_letter of a call": lambda bus, turn, call: bury(bus, call),
    "mark_started": lambda bus, turn, call: bus.mark_started(call),
    "adopt": lambda bus, turn, call: bus.adopt("agent", 10, False),
}


@pytest.mark.parametrize("what", WRITES)
async def test_a_dead_owner_writes_nothing(broker: Broker, bus: EventBus, other: EventBus, what: str) -> None:
    """Declaring an owner dead fences all that it holds at once, before anything is adopted."""
    await broker.submit(bus, "waits")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(other, "tool")
    await broker.submit(bus, "runs")
    turn = await broker.take(other)
    await broker.silence(other)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await WRITES[what](other, turn, call)
    assert await broker.snapshot() == before


async def test_a_dead_owner_leads_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    epoch = await other.lead("admit")
    assert epoch
    assert await bus.lead("admit") == 0
    await broker.silence(other)
    assert await bus.lead("admit") > epoch
    assert await other.lead("admit") == 0
    assert await other.lead("a role that nobody has") == 0


class HungLoop:
    """A handler that blocks its event loop, as synchronous code does."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        self.released = threading.Event()

    async def handle(self, delivery: Delivery) -> None:
        self.hangs.set()
        self.released.wait(30)

    def forget(self) -> None:
        pass

    def drain(self) -> None:
        """A call is one step: it has begun."""

    def stop_task(self, task: str) -> None:
        pass


async def test_an_owner_whose_event_loop_hangs_sends_no_heartbeats(valkey: Server, namespace: str) -> None:
    """The heartbeat runs on the handlers' event loop, so a blocked loop counts as dead."""
    lease = 0.3
    keys = Keys(namespace, 0)
    transport = RespTransport(parse_address(valkey.url))
    await transport.connect(10)
    witness = EventBus(transport, keys)
    await Owner(witness, "witness", lease).enter()
    await transport.call("HSET", keys.agents, "writer", "agent")
    handler, stop, names = HungLoop(), threading.Event(), list[str]()

    async def work() -> None:
        own = RespTransport(parse_address(valkey.url))
        bus = EventBus(own, keys)
        metrics = Metrics(CollectorRegistry(), "test")
        consumer = Consumer(bus, ["agent"], handler, metrics, service="hangs", lease_seconds=lease)
        await consumer.start()
        names.append(bus.owner)
        running = asyncio.create_task(consumer.run())
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await consumer.stop()
        running.cancel()
        await own.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        await witness.make_groups(["agent"])
        await Broker("server", keys, None, transport).submit(witness, "t")  # type: ignore[arg-type]  # makes no clients
        deadline = time.monotonic() + 60
        dead = 0
        while not dead:
            assert time.monotonic() < deadline, "the hung owner is still alive"
            dead = (await witness.beat(int(lease * 1000), False, ""))[2]
            await asyncio.sleep(0.02)
        assert handler.hangs.is_set()
        assert await transport.call("ZSCORE", keys.alive, names[0]) is None
        assert len((await witness.adopt("agent", 10, False)).deliveries) == 1
    finally:
        handler.released.set()
        stop.set()
        await asyncio.to_thread(thread.join, 20)
        await transport.close()
