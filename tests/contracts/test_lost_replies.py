"""The server executes a command, and its reply is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from copy import copy

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Transport
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.heartbeat import incarnation
from runtime_core.errors import Rejected
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import DIGEST, Broker, answer, ask, complete, emit_pieces, suspend


async def lose_read(broker: Broker, bus: EventBus, count: int = 10, stream: str = "agent") -> None:
    """A read by this owner whose reply is lost."""
    group = {"agent": "agent-handler", "tool": "tool-handler"}[stream]
    await broker.call(
        "XREADGROUP", "GROUP", group, bus.owner, "COUNT", count, "STREAMS", broker.keys.stream(stream), ">"
    )


async def test_an_owner_finds_what_it_holds_without_knowing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """It lives, so nobody adopts its entries; only it can find them."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "u")
    await lose_read(broker, bus)
    await broker.nothing(bus)
    assert (await other.adopt("agent", 10, False)).deliveries == []
    pending = await bus.own_pending("agent")
    assert list(pending.values()) == [1, 1]
    assert await other.own_pending("agent") == {}
    taken, malformed = await bus.reopen("agent", pending)
    assert ([turn.task for turn in taken], malformed) == (["t", "u"], [])
    for turn in taken:
        assert await complete(bus, turn)
    assert await bus.own_pending("agent") == {}
    await broker.idle()


async def test_a_long_list_is_found_whole(broker: Broker, bus: EventBus) -> None:
    """There is more than one page, and some entries are gone or are no work."""
    for number in range(1105):
        await broker.call("XADD", broker.keys.stream("agent"), f"{number + 1}-0", "foreign", "1")
    await lose_read(broker, bus, 2000)
    pending = await bus.own_pending("agent")
    assert len(pending) == 1105
    await broker.call("XDEL", broker.keys.stream("agent"), "1-0")
    taken, malformed = await bus.reopen("agent", dict.fromkeys(list(pending)[:3], 1))
    assert taken == []
    assert [entry for _, entry, _ in malformed] == [b"2-0", b"3-0"]
    assert len(await bus.own_pending("agent")) == 1104, "what is gone is acknowledged"


class Worker:
    """A handler that completes every turn, and answers every call."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self.handled: asyncio.Queue[str] = asyncio.Queue()

    async def handle(self, delivery: Delivery) -> None:
        assert await (answer if delivery.kind == "call" else complete)(self._bus, delivery)
        self.handled.put_nowait(delivery.task)

    def forget(self) -> None:
        """Nothing is kept."""

    def drain(self) -> None:
        """A call is one step: it has begun."""

    def stop_task(self, task: str) -> None:
        raise AssertionError("nobody cancels")


@asynccontextmanager
async def running(bus: EventBus, worker: Worker, metrics: Metrics | None = None) -> AsyncIterator[Consumer]:
    """Run a consumer of the agents' stream, and stop it."""
    metrics = metrics or Metrics(CollectorRegistry(), "test")
    consumer = Consumer(bus, ["agent"], worker, metrics, service="test", lease_seconds=0.6)
    await consumer.start()
    task = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        await consumer.stop()
        await task


async def test_a_consumer_checks_its_pending_entries_once_per_lease(broker: Broker) -> None:
    """The consumer finds it by itself: nothing reports a lost reply."""
    transport = await broker.connect()
    broker.transports.append(transport)
    bus = EventBus(transport, broker.keys)
    worker = Worker(bus)
    async with running(bus, worker):
        await broker.submit(bus, "first")
        assert await asyncio.wait_for(worker.handled.get(), 60) == "first"
        # The owner's read may be on the server by now: what is appended would go there. So it is put into its hands
        # without a read, as a claim whose reply was lost does.
        await broker.call("XGROUP", "SETID", broker.keys.stream("agent"), "agent-handler", "9999999999999-0")
        await broker.submit(bus, "lost")
        entry = (await broker.entries("agent"))[0]["id"]
        await broker.call("XCLAIM", broker.keys.stream("agent"), "agent-handler", bus.owner, 0, entry, "FORCE")
        assert await asyncio.wait_for(worker.handled.get(), 60) == "lost"
    await broker.idle()


class LookedBus(EventBus):
    """Counts how often its pending entries were read."""

    looks = 0

    async def own_pending(self, stream: str) -> dict[bytes, int]:
        found = await super().own_pending(stream)
        self.looks += 1
        return found


class SlowWorker(Worker):
    """Handles a delivery only on request."""

    def __init__(self, bus: EventBus) -> None:
        super().__init__(bus)
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.go_on = asyncio.Event()

    async def handle(self, delivery: Delivery) -> None:
        self.begun.put_nowait(delivery.task)
        await self.go_on.wait()
        await super().handle(delivery)


async def test_deliveries_that_arrive_during_a_stop_are_handed_back_unstarted(broker: Broker, bus: EventBus) -> None:
    """The read that waited when the stop began may have returned an entry. Its handler must not begin just to be cut
    off."""
    transport = await broker.connect()
    broker.transports.append(transport)
    own = LookedBus(transport, broker.keys)
    worker = SlowWorker(own)
    consumer = Consumer(own, ["agent"], worker, Metrics(CollectorRegistry(), "test"), service="test", lease_seconds=0.6)
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    await broker.submit(bus, "first")
    assert await asyncio.wait_for(worker.begun.get(), 60) == "first"
    stopping = asyncio.create_task(consumer.stop())
    try:
        await running
        await broker.submit(bus, "late")
        late = (await broker.entries("agent"))[-1]["id"]
        key = broker.keys.stream("agent")
        await broker.call("XCLAIM", key, "agent-handler", own.owner, 0, late, "FORCE", "RETRYCOUNT", 1, "JUSTID")
        looks = own.looks
        async with asyncio.timeout(60):
            while own.looks < looks + 5:
                await asyncio.sleep(0.01)
    finally:
        worker.go_on.set()
        await stopping
    assert worker.begun.empty()
    assert await worker.handled.get() == "first"
    next_owner = await broker.owner()
    [turn] = (await next_owner.adopt("agent", 10, False)).deliveries
    assert (turn.task, turn.deliveries) == ("late", 1)
    assert await complete(next_owner, turn)
    await broker.idle()


class RenamedBus(EventBus):
    """Its first read with a result returns when the owner has taken a new name meanwhile."""

    renamed = False

    async def read(
        self, streams: Sequence[str], count: int, block_ms: int
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        taken = await super().read(streams, count, block_ms)
        if taken[0] and not self.renamed:
            self.renamed = True
            self.owner = incarnation("test")
            await self.beat(600, True, "")
        return taken


class CountingWorker(Worker):
    """Logs how often each of its deliveries was delivered."""

    async def handle(self, delivery: Delivery) -> None:
        self.deliveries = delivery.deliveries
        await super().handle(delivery)


async def test_entries_read_under_an_old_name_are_left_to_their_adopter(broker: Broker) -> None:
    """It is pending under a dead or dying name, and would run twice."""
    transport = await broker.connect()
    broker.transports.append(transport)
    bus = RenamedBus(transport, broker.keys)
    worker = CountingWorker(bus)
    async with running(bus, worker):
        await broker.submit(bus, "t")
        assert await asyncio.wait_for(worker.handled.get(), 60) == "t"
        assert worker.deliveries == 2, "by adoption, not by the read"


class LateBus(EventBus):
    """The reply of its first read with a result comes when the test releases it."""

    def __init__(self, transport: Transport, keys: Keys) -> None:
        super().__init__(transport, keys)
        self.late: list[Delivery] = []
        self.arrives = asyncio.Event()

    async def read(
        self, streams: Sequence[str], count: int, block_ms: int
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        taken, malformed = await super().read(streams, count, block_ms)
        if (taken or malformed) and not self.late:
            self.late = taken
            await self.arrives.wait()
        return taken, malformed


async def test_a_late_reply_hands_out_nothing_twice(broker: Broker, bus: EventBus) -> None:
    """Its entries were found and handled by then; one that is no work is kept as one dead letter."""
    for task in ("a", "b"):
        await broker.submit(bus, task)
    await broker.call("XADD", broker.keys.stream("agent"), "*", "foreign", "1")
    transport = await broker.connect()
    broker.transports.append(transport)
    own = LateBus(transport, broker.keys)
    worker = SlowWorker(own)
    worker.go_on.set()
    metrics = Metrics(CollectorRegistry(), "test")
    async with running(own, worker, metrics) as consumer:
        assert [await asyncio.wait_for(worker.handled.get(), 60) for _ in "ab"] == ["a", "b"]
        assert [turn.task for turn in own.late] == ["a", "b"]
        async with asyncio.timeout(60):
            while await broker.entries("agent"):
                await asyncio.sleep(0.01)
        own.arrives.set()
        await broker.submit(bus, "next")
        assert await asyncio.wait_for(worker.handled.get(), 60) == "next"
        assert [worker.begun.get_nowait() for _ in range(worker.begun.qsize())] == ["a", "b", "next"]
        assert metrics.dead_letters["malformed"].value == 1
        async with asyncio.timeout(60):
            while consumer._reconciled:  # forgotten with the read
                await asyncio.sleep(0.01)
    await broker.idle()


class RacingBus(LookedBus):
    """Runs the test's code after the server has answered, and before the reply arrives."""

    def __init__(self, transport: Transport, keys: Keys) -> None:
        super().__init__(transport, keys)
        self.after_look: dict[int, Callable[[], Awaitable[None]]] = {}
        self.after_reopen: Callable[[], Awaitable[None]] | None = None

    async def own_pending(self, stream: str) -> dict[bytes, int]:
        found = await super().own_pending(stream)
        if self.looks in self.after_look:
            await self.after_look[self.looks]()
        return found

    async def reopen(
        self, stream: str, entries: dict[bytes, int]
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        found = await super().reopen(stream, entries)
        if self.after_reopen is not None:
            await self.after_reopen()
        return found


class Racing:
    """A consumer whose loops do not run: the test takes and reconciles."""

    def __init__(self, broker: Broker, transport: Transport, stream: str = "agent") -> None:
        self.bus = RacingBus(transport, broker.keys)
        self.worker = SlowWorker(self.bus)
        metrics = Metrics(CollectorRegistry(), "test")
        self.consumer = Consumer(self.bus, [stream], self.worker, metrics, service="test")

    async def read(self) -> list[Delivery]:
        return (await self.bus.read(["agent"], 10, 1000))[0]

    async def settle(self) -> None:
        """Let everything that is held end."""
        self.worker.go_on.set()
        await asyncio.wait(list(self.consumer._in_flight.running.values()))
        self.worker.go_on.clear()

    def begun(self) -> list[str]:
        return [self.worker.begun.get_nowait() for _ in range(self.worker.begun.qsize())]


@pytest.fixture
async def racing(broker: Broker) -> AsyncIterator[Racing]:
    transport = await broker.connect()
    broker.transports.append(transport)
    racing = Racing(broker, transport)
    await racing.consumer.start()
    yield racing
    racing.bus.after_reopen = None
    racing.worker.go_on.set()
    await racing.consumer.stop()


async def test_an_entry_that_ends_during_a_search_needs_no_second_search(
    broker: Broker, bus: EventBus, racing: Racing
) -> None:
    """Each second look waits for replies, and a busy owner would wait at each of its looks."""
    await broker.submit(bus, "t")
    racing.consumer._in_flight.take(await racing.read())
    racing.bus.after_look[1] = racing.settle
    await racing.consumer._reconcile()
    assert racing.bus.looks == 1
    assert racing.begun() == ["t"]
    await broker.idle()


async def test_an_entry_taken_during_a_search_needs_no_second_search(
    broker: Broker, bus: EventBus, racing: Racing
) -> None:
    await broker.submit(bus, "t")
    taken = await racing.read()

    async def arrives() -> None:
        racing.consumer._in_flight.take(taken)

    racing.bus.after_look[1] = arrives
    await racing.consumer._reconcile()
    assert racing.bus.looks == 1
    assert racing.consumer.held == 1


async def test_an_entry_read_between_two_searches_is_left_to_its_read(
    broker: Broker, bus: EventBus, racing: Racing
) -> None:
    """The reply is on its way. An entry of an earlier read, which both looks have found, is taken."""
    await broker.submit(bus, "lost")
    await lose_read(broker, racing.bus)

    async def read() -> None:
        await broker.submit(bus, "fresh")
        await lose_read(broker, racing.bus)

    racing.bus.after_look[1] = read
    await racing.consumer._reconcile()
    assert racing.bus.looks == 2
    assert [delivery.task for delivery in racing.consumer._in_flight.held.values()] == ["lost"]


async def test_an_entry_that_arrives_between_two_searches_runs_once(
    broker: Broker, bus: EventBus, racing: Racing
) -> None:
    """It may even end before the owner could take it a second time."""
    await broker.submit(bus, "t")
    taken = await racing.read()

    async def arrives() -> None:
        racing.consumer._in_flight.take(taken)

    racing.bus.after_look[2] = arrives
    racing.bus.after_reopen = racing.settle
    await racing.consumer._reconcile()
    await racing.settle()
    assert racing.begun() == ["t"]
    await broker.idle()


@pytest.mark.parametrize("found", ["reconciled", "adopted"])
async def test_an_earlier_attempt_that_is_pending_again_waits_for_the_next_one(
    broker: Broker, bus: EventBus, found: str
) -> None:
    """A server that has lost its last writes lists it, while this process runs the attempt that the server has lost."""
    transport = await broker.connect()
    broker.transports.append(transport)
    racing = Racing(broker, transport, stream="tool")
    await racing.consumer.start()
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    first = await broker.take(racing.bus if found == "reconciled" else bus, "tool")
    second = copy(first)
    second.entry, second.attempt = first.entry + b"9", 2
    racing.consumer._in_flight.take([second])
    assert await racing.worker.begun.get() == "t"
    if found == "adopted":
        await broker.call("ZREM", broker.keys.alive, bus.owner)
        await racing.consumer._adopt("tool")
    await racing.consumer._reconcile()
    assert racing.consumer._in_flight.held == {("tool", second.entry): second}
    await racing.settle()
    await racing.consumer._reconcile()
    assert list(racing.consumer._in_flight.held) == [("tool", first.entry)]
    await racing.settle()
    assert racing.begun() == [], "the call has its result"
    await racing.consumer.stop()
    assert await broker.entries("tool") == []


async def test_a_submit_repeated_starts_one_task(broker: Broker, bus: EventBus) -> None:
    """Its ids are chosen before the first attempt."""
    assert (await broker.submit(bus, "t", key="k")).started
    before = await broker.snapshot()
    repeated = await broker.submit(bus, "t", key="k")
    assert (repeated.task, repeated.status, repeated.started) == ("t", "accepted", False)
    assert await broker.snapshot() == before
    await complete(bus, await broker.take(bus))
    assert (await broker.submit(bus, "t", key="k")).status == "completed"
    await broker.nothing(bus)


async def test_a_submit_repeated_under_another_task_id_starts_nothing(broker: Broker, bus: EventBus) -> None:
    """A submit is identified by its source and id: a client without a task id may have generated another one."""
    await broker.submit(bus, "t")
    before = await broker.snapshot()
    repeated = await broker.submit(bus, "u", event_id="event-t", digest="digest-t")
    assert (repeated.task, repeated.started) == ("t", False)
    with pytest.raises(Rejected, match="id: the id event-t of source test was used before with different content"):
        await broker.submit(bus, "u", event_id="event-t", digest="other")
    assert await broker.snapshot() == before


async def test_a_mid_turn_record_repeated_answers_the_same(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    value = DIGEST.encode() + b"K1700000000000null"
    assert await bus.record(turn, "1", value) == value
    before = await broker.snapshot()
    assert await bus.record(turn, "1", value) == value
    assert await broker.snapshot() == before


async def test_a_delta_repeated_is_written_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await emit_pieces(bus, turn, b'"text"', first=1)
    before = await broker.snapshot()
    assert not await emit_pieces(bus, turn, b'"text"', first=1)
    assert await broker.snapshot() == before


async def test_a_call_marked_started_is_still_the_same_owners(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    assert await bus.mark_started(call), "its own mark, whose reply was lost"
    assert not await other.mark_started(call), "another's: whether it ran is not known"


async def test_leaving_twice_counts_once(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await bus.leave([turn])
    await bus.leave([turn])
    adopted = await other.adopt("agent", 10, False)
    assert [delivery.deliveries for delivery in adopted.deliveries] == [1]
    assert await complete(other, adopted.deliveries[0])


async def test_a_repeated_signal_reports_that_it_was_answered(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ["q", "1", DIGEST, "!", b"{}", "", b""])
    assert await bus.signal("t", "r:1", b"1") == ["ok"]
    before = await broker.snapshot()
    assert await bus.signal("t", "r:1", b"2") == ["answered"]
    assert await broker.snapshot() == before
