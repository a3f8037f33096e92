"""Answers to a registered publisher are bounded by bytes and age, and those of other programs are left alone."""

from __future__ import annotations

import logging
import secrets
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import ServerError
from runtime_core.state_manager.publishers import Publisher, Publishers
from runtime_core.state_manager.relay import ANSWER_OVERHEAD, TRIM_BATCH, AnswerBounds, Answers
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire import events as facts
from tests.contracts.broker import Broker

SIZE = 10_000


class Written:
    """A partition's answers to one publisher and to others, as a leader writes them."""

    def __init__(self, broker: Broker, bus: EventBus, shop: str, bounds: AnswerBounds) -> None:
        self._shop = shop
        self._broker = broker
        self._bus = bus
        self._bounds = bounds
        self.metrics = Metrics(CollectorRegistry(), "test")
        self.edge = Edge(bus)
        self.lead()

    def lead(self) -> None:
        """Forget everything, as another leader."""
        self._answers = Answers(self.edge, self._bus, self.metrics, self._bus, self._bounds)

    async def write(self, *streams: str) -> None:
        for stream in streams:
            await self._answers.write(stream, facts.final("t", "completed", b"x" * SIZE, at_ms=1))

    async def left(self, stream: str) -> int:
        return cast(int, await self._broker.call("XLEN", stream))

    @property
    def trimmed(self) -> int:
        return int(self.metrics.answers_trimmed[self._shop].value)

    async def listed(self) -> int:
        return cast(int, await self._broker.call("XLEN", self._broker.keys.answers(self._shop)))


class Edge:
    """A connection that may refuse to bound anything."""

    def __init__(self, bus: EventBus) -> None:
        self._transport = bus.transport
        self.refuses = ""

    async def call(self, *args: Argument) -> Reply:
        if self.refuses and args[0] != "XADD":
            raise ServerError(self.refuses)
        return await self._transport.call(*args)

    async def blocking(self, *args: Argument) -> Reply:
        return await self._transport.blocking(*args)

    @property
    def reconnects(self) -> int:
        return self._transport.reconnects

    async def close(self) -> None:
        """The broker fixture closes the transport."""


@pytest.fixture
async def shop(bus: EventBus) -> str:
    """A registered publisher. All tests on a server share the streams outside of namespaces."""
    name = f"shop-{secrets.token_hex(4)}"
    await Publishers(bus).set(Publisher(name=name, tenant="acme"))
    return name


@pytest.fixture
async def written(broker: Broker, bus: EventBus, shop: str) -> Written:
    return Written(broker, bus, shop, AnswerBounds(most_bytes=20 * (SIZE + 2 * ANSWER_OVERHEAD)))


async def test_the_newest_answers_stay_and_older_ones_go(written: Written, shop: str) -> None:
    """In one stream and in many, whoever leads, and however many there are."""
    await written.write(*[f"{shop}:answers:1"] * 30)
    kept = await written.left(f"{shop}:answers:1")
    assert 15 <= kept <= 20
    assert written.trimmed == 30 - kept
    written.lead()
    await written.write(*[f"{shop}:answers:{n}" for n in range(2, 52)])
    assert await written.left(f"{shop}:answers:1") == 0
    there = [await written.left(f"{shop}:answers:{n}") for n in range(2, 52)]
    assert there == sorted(there), "the oldest went first"
    assert 15 <= sum(there) == await written.listed() <= 20
    assert written.trimmed == 80 - sum(there)


async def test_many_answers_are_trimmed_in_pages(written: Written, broker: Broker, bus: EventBus, shop: str) -> None:
    roomy = Written(broker, bus, shop, AnswerBounds())
    await roomy.write(*[f"{shop}:answers"] * (TRIM_BATCH + 40))
    assert await roomy.left(f"{shop}:answers") == TRIM_BATCH + 40
    await written.write(f"{shop}:answers")
    assert 15 <= await written.left(f"{shop}:answers") <= 20


async def test_an_answer_that_the_publisher_has_deleted_is_not_counted(
    written: Written, broker: Broker, shop: str
) -> None:
    for _ in range(60):
        await written.write(f"{shop}:answers:1")
        await broker.call("DEL", f"{shop}:answers:1")
    assert written.trimmed == 0
    assert await written.listed() <= 20


async def test_answers_expire_after_the_retention_time(broker: Broker, bus: EventBus, shop: str) -> None:
    """A quiet stream goes by itself, and an old answer goes from one that still gets answers."""
    written = Written(broker, bus, shop, AnswerBounds(retention_seconds=100))
    await written.write(f"{shop}:answers")
    assert 90 < cast(int, await broker.call("TTL", f"{shop}:answers")) <= 100
    [[_, fields]] = cast(list[list[list[bytes]]], await broker.call("XRANGE", broker.keys.answers(shop), "-", "+"))
    await broker.call("DEL", broker.keys.answers(shop))
    await broker.call("XADD", broker.keys.answers(shop), "1-1", *fields)
    written.lead()
    await written.write(f"{shop}:answers")
    assert await written.left(f"{shop}:answers") == await written.listed() == 1
    assert written.trimmed == 1


async def test_streams_of_programs_that_are_not_registered_stay_as_they_are(
    written: Written, broker: Broker, shop: str
) -> None:
    for stream in (f"{shop}2:answers", shop, f"my-{shop}:answers"):
        await written.write(*[stream] * 30)
        assert await written.left(stream) == 30
        assert await broker.call("TTL", stream) == -1


async def test_a_wrong_key_in_place_of_an_answer_stream_stops_nothing(
    written: Written, broker: Broker, shop: str
) -> None:
    await written.write(f"{shop}:answers:1")
    await broker.call("DEL", f"{shop}:answers:1")
    await broker.call("SET", f"{shop}:answers:1", "a string")
    await written.write(*[f"{shop}:answers:2"] * 30)
    assert 15 <= await written.left(f"{shop}:answers:2") <= 20


async def test_an_answer_is_written_even_if_it_cannot_be_bounded(
    written: Written, shop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As with the rights of an earlier release."""
    written.edge.refuses = "NOPERM this user has no permissions to run the 'expire' command"
    with caplog.at_level(logging.WARNING):
        await written.write(*[f"{shop}:answers"] * 30)
    assert await written.left(f"{shop}:answers") == 30
    assert [record.getMessage() for record in caplog.records] == [
        f"cannot bound the answers in '{shop}:answers': {written.edge.refuses}"
    ]
