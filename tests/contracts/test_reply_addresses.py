"""Answers to `replyto` streams are written at least once; an unwritable one affects only its own task."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.relay import Relay
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.envelope import parse, reply_address
from tests.contracts.broker import Broker, complete


async def relay_until_empty(broker: Broker, bus: EventBus) -> None:
    relaying = asyncio.create_task(Relay(bus, [bus], bus.transport, Metrics(CollectorRegistry(), "test")).run())
    deadline = time.monotonic() + 60
    while await broker.call("XLEN", broker.keys.replies):
        assert time.monotonic() < deadline, "answers are not relayed"
        assert not relaying.done(), relaying.exception()
        await asyncio.sleep(0.005)
    relaying.cancel()
    await asyncio.wait([relaying])


async def ended(broker: Broker, bus: EventBus, task: str, reply: str) -> None:
    await broker.submit(bus, task, replyto=reply)
    assert await complete(bus, await broker.take(bus))


async def answers(broker: Broker, key: str) -> list[dict[str, object]]:
    found = await broker.call("XRANGE", key, "-", "+")
    assert isinstance(found, list)
    events = []
    for entry in found:
        assert isinstance(entry, list)
        fields = entry[1]
        assert isinstance(fields, list)
        named = dict(zip(fields[::2], fields[1::2], strict=True))
        data = named[b"data"]
        assert isinstance(data, bytes)
        events.append({"id": named[b"id"], "data": json.loads(data)})
    return events


async def test_a_key_of_another_type_blocks_no_one(broker: Broker, bus: EventBus) -> None:
    """Its answer becomes a dead letter; the answers after it are written."""
    wrong, right = f"{broker.keys.namespace}-wrong", f"{broker.keys.namespace}-right"
    await broker.call("SET", wrong, "a string")
    await ended(broker, bus, "a", wrong)
    await ended(broker, bus, "b", right)
    await relay_until_empty(broker, bus)
    assert await broker.call("GET", wrong) == b"a string"
    (answer,) = await answers(broker, right)
    data = answer["data"]
    assert isinstance(data, dict)
    assert (data["task_id"], data["status"], data["output"]) == ("b", "completed", "done")
    (letter,) = await broker.entries("dead")
    assert (letter["reason"], letter["stream"], letter["taskid"]) == ("undeliverable", wrong, "a")
    assert "WRONGTYPE" in letter["error"]
    assert json.loads(letter["d"])["status"] == "completed"
    await broker.call("DEL", wrong, right)


async def test_an_answer_that_is_written_twice_has_one_id(broker: Broker, bus: EventBus) -> None:
    """Answers come at least once, so a reader must be able to recognise a repeat."""
    to = f"{broker.keys.namespace}-answers"
    await ended(broker, bus, "t", to)
    (kept,) = await broker.entries("replies")
    await relay_until_empty(broker, bus)
    # The relay stopped after it had written and before it had removed: the entry is there again.
    flat = [item for pair in kept.items() for item in pair]
    await broker.call("XADD", broker.keys.replies, "*", *flat)
    await relay_until_empty(broker, bus)
    first, second = await answers(broker, to)
    assert first["id"] == second["id"]
    await broker.call("DEL", to)


@pytest.mark.parametrize("inside", ["tasks", "{0}:agent", "{0}:task:t", "{0}:reply:x"])
def test_names_inside_the_namespace_are_refused(inside: str) -> None:
    """Otherwise an answer could be a submit, and a task could write to the bus's own keys."""
    fields = [b"type", b"weft.task.submit", b"data", b"{}", b"replyto", f"weft:{inside}".encode()]
    with pytest.raises(InvalidInput, match="replyto"):
        parse("1-0", fields, "weft")
    assert reply_address(fields, "weft") == ""


def test_names_outside_the_namespace_are_taken() -> None:
    fields = [b"type", b"weft.task.submit", b"data", b"{}", b"replyto", b"my:answers"]
    assert parse("1-0", fields, "weft").replyto == "my:answers"
    assert reply_address(fields, "weft") == "my:answers"
