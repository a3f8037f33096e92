"""A reentrant call through another partition is delivered as a nested turn, by the call chain in its context."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, ask, complete, suspend


async def held(broker: Broker, bus: EventBus) -> None:
    """writer/k waits for an answer from another partition."""
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="e"))


async def test_a_reentrant_call_is_nested(broker: Broker, bus: EventBus) -> None:
    await held(broker, bus)
    await broker.submit(bus, "back", key="k", context=b'{"~chain":"1:x|r 0:t|r"}')
    nested = await broker.take(bus)
    assert (nested.task, nested.instance) == ("back", "writer/k")
    assert await complete(bus, nested, state=b'{"n":1}')
    assert (await broker.hash("inst:writer/k"))["busy"] == "t|r"
    assert await bus.answer_request("t", "r", "1", b"K", b'"yes"', "editor", "there")
    assert await complete(bus, await broker.take(bus))


async def test_a_child_of_the_holder_counts_as_the_holder(broker: Broker, bus: EventBus) -> None:
    await held(broker, bus)
    await broker.submit(bus, "back", key="k", context=b'{"~chain":"0:t|r/4/1"}')
    assert (await broker.take(bus)).task == "back"


async def test_the_state_reaches_only_the_run_that_waits_for_it(broker: Broker, bus: EventBus) -> None:
    """That run may fail: its own caller keeps the state that it called it with."""
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"), state=b'{"n":1}')
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="e"))
    await broker.submit(bus, "back", key="k", context=b'{"~chain":"0:t|r/1"}')
    nested = await broker.take(bus)
    assert (await broker.hash("inst:writer/k"))["busy"] == "t|r\nt|r/1\nback|r"
    assert await complete(bus, nested, state=b'{"n":2}')
    left = [await broker.call("HGET", broker.keys.run("t", run), "ov") for run in ("r/1", "r")]
    assert left == [b'{"n":2}', None]


@pytest.mark.parametrize(
    "context",
    [b"", b'{"~chain":"1:t|r"}', b'{"~chain":"0:other|r"}', b'{"~chain":"0:t|r1"}', b'{"metadata":{"chain":"0:t|r"}}'],
)
async def test_others_wait_in_the_mailbox(broker: Broker, bus: EventBus, context: bytes) -> None:
    await held(broker, bus)
    await broker.submit(bus, "back", key="k", context=context)
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["back|r"]
