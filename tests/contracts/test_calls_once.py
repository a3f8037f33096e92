"""A tool that may not be repeated is marked before it runs, and the mark goes with the call's end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.telemetry.metrics import Metrics
from runtime_core.tools.call import AbandonedThreads
from runtime_core.tools.call_handler import CallHandler
from tests.contracts.broker import Broker, ask, fail, suspend

app = App("calls")


@app.tool(repeatable=False)
async def charge(fails: bool) -> str:
    if fails:
        raise ValueError("the card was refused")
    return "charged"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def handler(bus: EventBus, threads: ThreadPoolExecutor) -> CallHandler:
    return CallHandler(bus, app, threads, AbandonedThreads(), Metrics(CollectorRegistry(), "tool-handler"))


async def ask_to_charge(broker: Broker, bus: EventBus, data: bytes) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "charge", data=data))


async def test_a_mark_goes_with_the_result(broker: Broker, bus: EventBus, threads: ThreadPoolExecutor) -> None:
    await ask_to_charge(broker, bus, b'{"fails":false}')
    await handler(bus, threads).handle(await broker.take(bus, "tool"))
    assert await broker.hash("started") == {}
    assert "charged" in (await broker.task("t"))["j:1"]


async def test_a_call_that_failed_may_be_driven_again(
    broker: Broker, bus: EventBus, other: EventBus, threads: ThreadPoolExecutor
) -> None:
    """Whoever redrives the letter has found out that it did not take effect."""
    await ask_to_charge(broker, bus, b'{"fails":true}')
    await handler(bus, threads).handle(await broker.take(bus, "tool"))
    assert await broker.hash("started") == {}
    assert await fail(bus, await broker.take(bus))
    (letter,) = await broker.entries("dead")
    assert await bus.redrive(letter["id"], True, b'{"fails":false}') == ["ok", "t"]
    await handler(other, threads).handle(await broker.take(other, "tool"))
    assert "charged" in (await broker.task("t"))["j:1"]


async def test_an_unknown_outcome_leaves_no_mark(
    broker: Broker, bus: EventBus, other: EventBus, threads: ThreadPoolExecutor
) -> None:
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    await broker.silence(bus)
    [adopted] = (await other.adopt("tool", 10, False)).deliveries
    await handler(other, threads).handle(adopted)
    assert "UnknownOutcome" in (await broker.task("t"))["j:1"]
    assert await broker.hash("started") == {}
