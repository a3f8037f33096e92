"""A consumer that was declared dead, or must give up its deliveries, stops its work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.deliveries import Adopted, Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys, namespace_settings
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.in_flight import DEFECT_ATTEMPTS
from runtime_core.errors import BusUnavailable, ConfigurationError, Fenced, ServerError
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, complete

LEASE_SECONDS = 0.6
SECONDS = 60.0
PASSES = 3


class WatchedBus(EventBus):
    """Logs the consumer's calls, and can delay a new owner name."""

    def __init__(self, transport: Transport, keys: Keys) -> None:
        super().__init__(transport, keys)
        self.may_enter = asyncio.Event()
        self.may_enter.set()
        self.reads_begun = 0
        self.reads_ended = 0
        self.passes = asyncio.Semaphore(0)
        self.adopted_alone = asyncio.Event()
        self.emptying = asyncio.Event()
        self.refusal: Exception | None = None
        self.still_busy = False

    async def beat(self, lease_ms: int, first: bool, since_ms: str) -> tuple[str, list[str], int]:
        if first:
            await self.may_enter.wait()
        return await super().beat(lease_ms, first, since_ms)

    async def read(
        self, streams: Sequence[str], count: int, block_ms: int
    ) -> tuple[list[Delivery], list[tuple[str, bytes, str]]]:
        self.reads_begun += 1
        try:
            return await super().read(streams, count, block_ms)
        finally:
            self.reads_ended += 1

    async def insist(self, function: str, *args: Argument) -> Reply:
        if self.refusal is not None:
            raise self.refusal
        return await super().insist(function, *args)

    async def own_pending(self, stream: str) -> dict[bytes, int]:
        self.passes.release()
        return await super().own_pending(stream)

    async def adopt(self, stream: str, count: int, idle: bool) -> Adopted:
        if idle:
            self.adopted_alone.set()
        if self.still_busy:
            return Adopted([], [], [], must_be_idle=True)
        adopted = await super().adopt(stream, count, idle)
        if adopted.must_be_idle and not idle:
            self.emptying.set()
        return adopted


class Handler:
    """Completes turns, each when the test releases it."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.dropped: asyncio.Queue[str] = asyncio.Queue()
        self.forgotten = asyncio.Event()
        self.go_on = asyncio.Event()
        self.error: Exception | None = None
        self.drained = 0

    async def handle(self, delivery: Delivery) -> None:
        self.began.put_nowait(delivery.task)
        if self.error is not None:
            raise self.error
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.dropped.put_nowait(delivery.task)
            raise
        await complete(self._bus, delivery)

    def forget(self) -> None:
        self.forgotten.set()

    def drain(self) -> None:
        self.drained += 1

    def stop_task(self, task: str) -> None:
        """Nothing here ends early."""


@asynccontextmanager
async def consumer_of(
    broker: Broker, lease_seconds: float = LEASE_SECONDS
) -> AsyncIterator[tuple[Consumer, WatchedBus, Handler]]:
    """A consumer that has started but does not read yet."""
    transport = await broker.connect()
    broker.transports.append(transport)
    bus = WatchedBus(transport, broker.keys)
    handler = Handler(bus)
    metrics = Metrics(CollectorRegistry(), "test")
    consumer = Consumer(bus, ["agent"], handler, metrics, service="test", lease_seconds=lease_seconds, in_flight=2)
    await consumer.start()
    try:
        yield consumer, bus, handler
    finally:
        handler.go_on.set()
        bus.may_enter.set()
        await consumer.stop()


@asynccontextmanager
async def consuming(broker: Broker, lease_seconds: float = LEASE_SECONDS) -> AsyncIterator[tuple[WatchedBus, Handler]]:
    async with consumer_of(broker, lease_seconds) as (consumer, bus, handler):
        running = asyncio.create_task(consumer.run())
        try:
            yield bus, handler
        finally:
            handler.go_on.set()
            bus.may_enter.set()
            await consumer.stop()
            await running


async def next_of(queue: asyncio.Queue[str]) -> str:
    return await asyncio.wait_for(queue.get(), SECONDS)


async def test_an_owner_that_was_declared_dead_drops_its_work(broker: Broker) -> None:
    """Others have them by now. Whatever this process still does is done twice."""
    async with consuming(broker) as (bus, handler):
        await broker.submit(bus, "t")
        assert await next_of(handler.began) == "t"
        await broker.call("ZREM", broker.keys.alive, bus.owner)
        assert await next_of(handler.dropped) == "t"
        handler.go_on.set()
        assert await next_of(handler.began) == "t", "it comes back under a new name"


async def test_an_owner_declared_dead_reads_nothing(broker: Broker) -> None:
    """Its entries would be pending under a dead name, and count as deliveries that ended their process."""
    async with consuming(broker) as (bus, handler):
        bus.may_enter.clear()
        await broker.call("ZREM", broker.keys.alive, bus.owner)
        await asyncio.wait_for(handler.forgotten.wait(), SECONDS)
        begun = bus.reads_begun
        async with asyncio.timeout(SECONDS):
            while bus.reads_ended < begun:  # the read that is under way
                await asyncio.sleep(0.01)
        for _ in range(PASSES):
            await broker.call("ZCARD", broker.keys.alive)
        assert bus.reads_begun == begun, "another read has begun"
        bus.may_enter.set()
        await broker.submit(bus, "t")
        assert await next_of(handler.began) == "t"


async def test_a_busy_consumer_takes_no_quarantined_entry(broker: Broker) -> None:
    async with consuming(broker) as (bus, handler):
        await broker.submit(bus, "busy")
        assert await next_of(handler.began) == "busy"
        # An entry that three owners died of, in the hands of the last of them.
        key = broker.keys.stream("agent")
        dead = await broker.owner()
        await broker.call("XGROUP", "SETID", key, "agent-handler", "9999999999999-0")
        await broker.submit(bus, "poison")
        entry = (await broker.entries("agent"))[-1]["id"]
        await broker.call("XCLAIM", key, "agent-handler", dead.owner, 0, entry, "FORCE", "RETRYCOUNT", 3, "JUSTID")
        await broker.call("ZREM", broker.keys.alive, dead.owner)
        await asyncio.wait_for(bus.emptying.wait(), SECONDS)
        while not bus.passes.locked():
            await bus.passes.acquire()
        for _ in range(PASSES):
            await asyncio.wait_for(bus.passes.acquire(), SECONDS)
        assert not bus.adopted_alone.is_set(), "the consumer holds another delivery"
        assert handler.began.empty()
        handler.go_on.set()
        assert await next_of(handler.began) == "poison"
        await broker.call("XGROUP", "SETID", key, "agent-handler", "$")
        await broker.submit(bus, "next")
        assert await next_of(handler.began) == "next", "it reads again afterwards"


async def test_quarantined_entries_follow_each_other_at_once(broker: Broker) -> None:
    """All other work waits for them: a pause before each would hold it up for minutes."""
    tasks = {f"t{number}" for number in range(8)}
    await quarantined_ones(broker, *tasks)
    async with consuming(broker, lease_seconds=4 * SECONDS) as (bus, handler):
        async with asyncio.timeout(SECONDS / 2):  # less than the consumer's pause between its looks
            began = [await handler.began.get()]
            await broker.submit(bus, "next")
            assert handler.began.empty(), "one at a time"
            handler.go_on.set()
            while "next" not in began:
                began.append(await handler.began.get())
    assert set(began[:-1]) == tasks


async def test_a_delivery_that_is_held_is_not_handled_twice(broker: Broker) -> None:
    """Both a read and the check after a lost reply may return it."""
    async with consumer_of(broker) as (consumer, bus, handler):
        await broker.submit(bus, "t")
        delivery = await broker.take(bus)
        consumer._in_flight.take([delivery])
        consumer._in_flight.take([delivery])
        await broker.submit(bus, "next")
        consumer._in_flight.take([await broker.take(bus)])
        assert [await next_of(handler.began), await next_of(handler.began)] == ["t", "next"]
        assert consumer.held == 2


async def test_a_delivery_that_arrives_during_a_stop_does_not_start(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        await broker.submit(bus, "t")
        delivery = await broker.take(bus)
        await consumer.stop()
        consumer._in_flight.take([delivery])
        assert consumer.held == 0
        assert handler.began.empty()


async def ended(consumer: Consumer) -> None:
    """Wait until every held delivery has ended."""
    await asyncio.gather(*consumer._in_flight.running.values(), return_exceptions=True)


async def dead_ones(broker: Broker, bus: EventBus, *tasks: str) -> None:
    """Tasks whose first turns are in the hands of a dead owner."""
    dead = await broker.owner()
    for task in tasks:
        await broker.submit(bus, task)
        await broker.take(dead)
    await broker.call("ZREM", broker.keys.alive, dead.owner)


async def test_a_defect_of_a_handler_delays_its_delivery(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        handler.error = RuntimeError("a defect")
        await broker.submit(bus, "t")
        consumer._in_flight.take([await broker.take(bus)])
        await ended(consumer)
        await broker.pass_time(60_000)
        await bus.promote()
        delivery = await broker.take(bus)
        assert (delivery.task, delivery.attempt) == ("t", 2)
        handler.error = None
        handler.go_on.set()
        consumer._in_flight.take([delivery])
        await ended(consumer)
    await broker.idle()


async def test_a_server_that_refuses_writes_for_a_while_uses_up_no_attempt(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        handler.error = ServerError("MISCONF Errors writing to the AOF file: No space left on device")
        await broker.submit(bus, "t")
        for _ in range(DEFECT_ATTEMPTS + 1):
            delivery = await broker.take(bus)
            assert (delivery.task, delivery.attempt) == ("t", 1)
            consumer._in_flight.take([delivery])
            await ended(consumer)
            await broker.nothing(bus)
            await broker.pass_time(60_000)
            await bus.promote()
        handler.error = None
        handler.go_on.set()
        consumer._in_flight.take([await broker.take(bus)])
        await ended(consumer)
    assert await broker.status("t") == "completed"


async def test_a_delivery_whose_handler_always_fails_becomes_a_dead_letter(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        handler.error = RuntimeError("a defect")
        await broker.submit(bus, "t")
        delivery = await broker.take(bus)
        delivery.attempt = DEFECT_ATTEMPTS
        consumer._in_flight.take([delivery])
        await ended(consumer)
        assert [letter["reason"] for letter in await broker.entries("dead")] == ["defect"]
        assert await broker.status("t") == "failed"
    await broker.idle()


@pytest.mark.parametrize("refusal", [BusUnavailable("away"), Fenced("dead")], ids=["unavailable", "fenced"])
async def test_a_delivery_stays_pending_if_its_defect_cannot_be_stored(broker: Broker, refusal: Exception) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        handler.error, bus.refusal = RuntimeError("a defect"), refusal
        await broker.submit(bus, "t")
        consumer._in_flight.take([await broker.take(bus)])
        consumer._in_flight.unreconciled = False
        [handling] = consumer._in_flight.running.values()
        await ended(consumer)
        assert handling.exception() is None
        assert consumer._in_flight.unreconciled
        handler.error = bus.refusal = None
        handler.go_on.set()
        await consumer._reconcile()
        assert [await next_of(handler.began) for _ in range(2)] == ["t", "t"]
        await ended(consumer)
    await broker.idle()


async def test_a_delivery_whose_outcome_cannot_be_stored_is_found_again(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        handler.error = BusUnavailable("away")
        await broker.submit(bus, "t")
        consumer._in_flight.take([await broker.take(bus)])
        consumer._in_flight.unreconciled = False
        await ended(consumer)
        assert consumer._in_flight.unreconciled
        assert await bus.own_pending("agent")


async def test_a_fenced_handler_ends_the_work_of_its_owner(broker: Broker) -> None:
    """It may learn it before the heartbeat does."""
    async with consumer_of(broker) as (consumer, bus, handler):
        for task in ("works", "fenced"):
            await broker.submit(bus, task)
        consumer._in_flight.take([await broker.take(bus)])
        assert await next_of(handler.began) == "works"
        handler.error = Fenced("declared dead")
        name = bus.owner
        consumer._in_flight.take([await broker.take(bus)])
        assert await next_of(handler.dropped) == "works"
        async with asyncio.timeout(SECONDS):
            while consumer._rejoining:
                await asyncio.sleep(0.01)
        assert bus.owner != name
        assert handler.forgotten.is_set()


async def test_an_entry_of_a_newer_release_is_left_to_it(broker: Broker) -> None:
    """This process ends, with an error that says why."""
    settings = namespace_settings(broker.keys.namespace)
    async with consumer_of(broker) as (consumer, bus, _):
        await broker.call("XADD", broker.keys.stream("agent"), "*", "h", "2\nnewer", "d", "{}")
        taken, malformed = await bus.read(["agent"], 10, 5)
        await broker.submit(bus, "t")
        poison = await broker.take(bus)
        await broker.call("HSET", settings, "format", 2)
        try:
            consumer._in_flight.take(taken, malformed)
            with pytest.raises(ConfigurationError, match="update this service"):
                await asyncio.wait_for(consumer.run(), SECONDS)
            assert await broker.entries("dead") == []
            await consumer._condemn(poison)
            assert [letter["reason"] for letter in await broker.entries("dead")] == ["poison"]
        finally:
            await broker.call("DEL", settings)


async def test_a_malformed_entry_whose_dead_letter_is_refused_is_logged_and_retried(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    async with consumer_of(broker) as (consumer, bus, _):
        await broker.call("XADD", broker.keys.stream("agent"), "*", "h", "1\nnonsense", "d", "{}")
        bus.refusal = BusUnavailable("no disk")
        consumer._in_flight.take(*await bus.read(["agent"], 10, 5))
        [burying] = consumer._in_flight.burying
        await asyncio.wait((burying,))
        assert "could not write a dead letter: no disk" in caplog.text
        assert await broker.entries("dead") == []
        bus.refusal = None
        await consumer._reconcile()
        await asyncio.wait(consumer._in_flight.burying)
        assert [letter["reason"] for letter in await broker.entries("dead")] == ["malformed"]


async def test_a_consumer_adopts_no_more_than_it_may_hold(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        await dead_ones(broker, bus, "a", "b", "c")
        await consumer._adopt("agent")
        assert consumer.held == 2
        handler.go_on.set()
        await ended(consumer)
        await consumer._adopt("agent")
        assert [await next_of(handler.began) for _ in range(3)] == ["a", "b", "c"]
        await ended(consumer)


async def test_a_consumer_that_stops_adopts_nothing(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, _):
        await dead_ones(broker, bus, "t")
        await consumer.stop()
        await consumer._adopt("agent")
        assert await bus.own_pending("agent") == {}


async def test_a_consumer_that_waits_to_be_idle_ignores_other_streams(broker: Broker) -> None:
    """There is nothing in quarantine there, and it would stop waiting."""
    async with consumer_of(broker) as (consumer, _, _):
        consumer._alone = "agent"
        await consumer._adopt("agent:big")
        assert consumer._alone == "agent"
        await consumer._adopt("agent")
        assert consumer._alone is None


async def quarantined_ones(broker: Broker, *tasks: str) -> None:
    """Entries of a dead owner that were delivered too often, behind the group's position."""
    key, dead = broker.keys.stream("agent"), await broker.owner()
    for task in tasks:
        await broker.submit(dead, task)
    for entry in await broker.entries("agent"):
        await broker.call(
            "XCLAIM", key, "agent-handler", dead.owner, 0, entry["id"], "FORCE", "RETRYCOUNT", 3, "JUSTID"
        )
    await broker.call("XGROUP", "SETID", key, "agent-handler", "$")
    await broker.call("ZREM", broker.keys.alive, dead.owner)


async def test_a_consumer_that_stops_takes_no_quarantined_entry(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, _):
        await quarantined_ones(broker, "t", "u")
        consumer._alone = "agent"
        await consumer.stop()
        await consumer._adopt("agent")
        assert await bus.own_pending("agent") == {}


async def test_a_quarantined_entry_whose_owner_could_not_settle_it_runs_before_the_next_one(broker: Broker) -> None:
    """Reconciliation returns it: it is still this owner's. The next one would run beside it."""
    async with consumer_of(broker) as (consumer, bus, handler):
        await quarantined_ones(broker, "t", "u")
        consumer._alone = "agent"
        handler.error = BusUnavailable("the reply was lost")
        await consumer._adopt("agent")
        assert handler.began.qsize() == 1
        assert len(await bus.own_pending("agent")) == 1


async def test_a_consumer_waits_until_the_broker_takes_it_for_idle(broker: Broker) -> None:
    """By the broker's word it may hold an entry that it does not know yet."""
    async with consumer_of(broker) as (consumer, bus, _):
        bus.still_busy = True
        consumer._alone = "agent"
        await consumer._adopt("agent")
        assert consumer._alone == "agent"


async def test_a_consumer_that_stops_reads_no_more(broker: Broker) -> None:
    """An entry that it still read would be pending under a name that has left."""
    async with consumer_of(broker) as (consumer, bus, _):
        running = asyncio.create_task(consumer.run())
        async with asyncio.timeout(SECONDS):
            while not bus.reads_begun:
                await asyncio.sleep(0.01)
        await consumer.stop()
        await running
        assert bus.reads_ended == bus.reads_begun


async def test_a_consumer_that_was_stopped_before_it_ran_begins_nothing(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, _):
        running = asyncio.create_task(consumer.run())
        await consumer.stop()
        await running
        assert bus.reads_begun == 0


async def test_a_delivery_that_its_owner_drops_stays_pending(broker: Broker) -> None:
    """Its next owner has it by now, or gets it soon: to put it back would take it from that one."""
    async with consumer_of(broker) as (consumer, bus, handler):
        await broker.submit(bus, "t")
        delivery = await broker.take(bus)
        consumer._in_flight.take([delivery])
        assert await next_of(handler.began) == "t"
        [place] = consumer._in_flight.running
        consumer._in_flight.cancel(place)
        await ended(consumer)
        assert list(await bus.own_pending("agent")) == [delivery.entry]


async def test_an_entry_that_ran_alone_leaves_quarantine_with_its_end(broker: Broker) -> None:
    """Until then no other owner may run the next one."""
    async with consumer_of(broker) as (consumer, bus, handler):
        await broker.submit(bus, "t")
        delivery = await broker.take(bus)
        place = f"agent|{delivery.entry.decode()}"
        await broker.call("HSET", broker.keys.quarantine, place, "1", "~agent", bus.owner)
        delivery.quarantined = True
        handler.go_on.set()
        consumer._in_flight.take([delivery])
        await ended(consumer)
        assert await broker.hash("quarantine") == {}


async def test_a_stop_whose_work_ends_in_time_interrupts_nothing(broker: Broker) -> None:
    async with consumer_of(broker) as (consumer, bus, handler):
        consumer._finish_seconds = SECONDS
        await broker.submit(bus, "t")
        consumer._in_flight.take([await broker.take(bus)])
        assert await next_of(handler.began) == "t"
        handler.go_on.set()
        await consumer.stop()
        assert handler.drained == 0
        assert handler.dropped.empty()
        assert await broker.status("t") == "completed"
