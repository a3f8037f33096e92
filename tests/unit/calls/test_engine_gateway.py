"""A step that was lost with its engine is sent again once the engine serves again, not while it goes down."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.base.text import LONGEST_MESSAGE, LONGEST_TYPE
from runtime_core.bus.connection import Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect
from runtime_core.calls import engine_gateway as module
from runtime_core.calls.engine_gateway import RAY, SPARK, EngineGateway, ServedEngine, StepHandler
from runtime_core.engines.protocol import ConnectionState, Error, Outcome, Value, Work
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, ask, suspend

app = App("lost")
LOST = Error("lost", "EngineLost", "the server has gone")


@app.engine_function
def double(number: int) -> int:
    return 2 * number


class Driver:
    """Ends each call as the test says."""

    def __init__(self) -> None:
        self.state = ConnectionState(True)
        self.connected_since = time.time() - 60
        self.ends: list[Outcome] = []
        self.began = 0

    def begin(self, work: Work, on_progress: Any = None) -> Any:  # Any: what a real one gives and takes
        self.began += 1
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        ended.set_result(self.ends.pop(0))
        return SimpleNamespace(ended=ended)

    def forget(self, key: str) -> None:
        """Nothing is kept."""


class Lossy:
    """A gateway over such a driver, on `memory://`, with one requested step."""

    def __init__(self, broker: Broker, bus: EventBus, engine: ServedEngine) -> None:
        self.broker = broker
        self.bus = bus
        self.engine = engine
        self.driver = Driver()
        gateway = SimpleNamespace(
            engine=engine,
            functions=app.functions,
            driver=self.driver,
            reference="m:app",
            folder=".",
            connected_at=time.time(),
        )
        metrics = Metrics(CollectorRegistry(), f"{engine.name}-gateway")
        self.handler = StepHandler(bus, cast(EngineGateway, gateway), metrics)

    async def attempt(self) -> int:
        """Handle the step's next delivery. Return how many calls the engine has had since the start."""
        await self.broker.pass_time(2000)
        await self.bus.promote()
        delivery = await self.broker.take(self.bus, self.engine.name)
        assert delivery.deliveries == 1
        await self.handler.handle(delivery)
        return self.driver.began

    async def outcome(self) -> str:
        return (await self.broker.task("t")).get("j:1", "")[8:9]


@asynccontextmanager
async def lossy(engine: ServedEngine) -> AsyncIterator[Lossy]:
    async def another() -> Transport:
        return await connect("memory://")

    admin = await another()
    broker = Broker("memory", Keys(f"lost-{secrets.token_hex(4)}", 0), another, admin, transports=[admin])
    await broker.prepare()
    bus = await broker.owner()
    await bus.make_groups([engine.name])
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1", "double", stream=engine.name, data=b'{"number":1}'))
    yield Lossy(broker, bus, engine)
    for transport in broker.transports:
        await transport.close()


@pytest.fixture
async def spark() -> AsyncIterator[Lossy]:
    async with lossy(SPARK) as spark:
        yield spark


async def test_the_redrive_waits_for_the_next_connection(spark: Lossy) -> None:
    spark.driver.ends = [LOST, Value(b"2")]
    assert await spark.attempt() == 1
    for _ in range(3):
        assert await spark.attempt() == 1, "the server still listens, and goes down"
    spark.driver.state = ConnectionState(False, "nobody listens")
    assert await spark.attempt() == 1
    spark.driver.state, spark.driver.connected_since = ConnectionState(True), time.time()
    assert await spark.attempt() == 2
    assert await spark.outcome() == "K"


async def test_a_second_loss_is_the_end_of_the_step(spark: Lossy) -> None:
    spark.driver.ends = [LOST, LOST]
    assert await spark.attempt() == 1
    spark.driver.connected_since = time.time()
    assert await spark.attempt() == 2
    assert await spark.outcome() == "E"


async def test_a_resumed_server_receives_requests_again(spark: Lossy, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost one session; its connection still works."""
    monkeypatch.setattr(module, "STEADY_SECONDS", 0.0)
    spark.driver.ends = [LOST, Value(b"2")]
    assert await spark.attempt() == 1
    assert await spark.attempt() == 2
    assert await spark.outcome() == "K"


async def test_an_engine_whose_work_continues_is_asked_at_once() -> None:
    """The key finds the work again: asking costs nothing."""
    async with lossy(RAY) as ray:
        ray.driver.ends = [LOST, LOST, Value(b"2")]
        assert [await ray.attempt() for _ in range(3)] == [1, 2, 3]
        assert await ray.outcome() == "K"


async def test_the_error_of_a_driver_is_kept_in_bounded_texts(spark: Lossy) -> None:
    long = "x" * 5_000_000
    spark.driver.ends = [Error("invalid", long, long, long, retryable=False)]
    assert await spark.attempt() == 1
    journaled = (await spark.broker.task("t"))["j:1"]
    assert journaled[8:9] == "E"
    assert LONGEST_MESSAGE < len(journaled) < LONGEST_MESSAGE + LONGEST_TYPE + 100
