"""The limit of the output of one task."""

from __future__ import annotations

import json

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import LimitExceeded
from tests.contracts.broker import Broker, ask, emit_pieces, suspend

HALF = b'"' + b"x" * 500_000 + b'"'


async def test_a_task_emits_up_to_its_limit(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("HSET", broker.keys.meta, "output_max", 2_000_000)
    for number in (1, 2, 3):
        assert await emit_pieces(bus, turn, HALF, first=number)
    with pytest.raises(LimitExceeded, match=r"2,000,000 bytes \(WEFT_OUTPUT_MAX_BYTES\)"):
        await emit_pieces(bus, turn, HALF, first=4)
    assert not await emit_pieces(bus, turn, HALF, first=3), "a repeat of what was emitted is no new output"
    await bus.begin_call(turn, "5")
    with pytest.raises(LimitExceeded):
        await bus.stream(turn, "5", 1, [b"chunk", HALF])
    assert await emit_pieces(bus, turn, b'"short"', first=4), "what fits is still emitted"
    with pytest.raises(LimitExceeded):
        await emit_pieces(bus, turn, b"5", HALF, first=5)
    assert not await emit_pieces(bus, turn, b"5", first=5), "of several pieces, the first ones that fit are"
    texts = [json.loads(entry["data"]) for entry in await broker.entries("out:t")]
    assert [delta["seq"] for delta in texts] == [1, 2, 3, 4, 5]


async def test_progress_fills_half_of_the_output(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await suspend(bus, turn, ask("1"))
    await broker.call("HSET", broker.keys.meta, "output_max", 2_400_000)
    call = await broker.take(bus, "tool")
    assert [await bus.progress(call, HALF) for _ in range(4)] == [True, True, False, False]
    assert [entry["type"] for entry in await broker.entries("out:t")] == ["weft.output.delta"] * 2


async def test_progress_of_a_step_fills_half_of_the_output(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("HSET", broker.keys.meta, "output_max", 2_400_000)
    sent = [await bus.stream(turn, "1", 1, [b"progress", HALF]) for _ in range(4)]
    assert sent == [True, True, False, False]
