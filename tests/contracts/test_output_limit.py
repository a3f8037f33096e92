"""The limit of the output of one task."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import LimitExceeded
from tests.contracts.broker import DIGEST, Broker, ask, suspend

VALUE = f"{DIGEST}K1700000000000null".encode()
HALF = b'"' + b"x" * 500_000 + b'"'


async def test_a_task_emits_up_to_its_limit(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("HSET", broker.keys.meta, "output_max", 2_000_000)
    for step in "123":
        assert await bus.emit(turn, step, VALUE, HALF)
    with pytest.raises(LimitExceeded, match=r"2,000,000 bytes \(WEFT_OUTPUT_MAX_BYTES\)"):
        await bus.emit(turn, "4", VALUE, HALF)
    assert not await bus.emit(turn, "3", VALUE, HALF), "a repeat of what was emitted is no new output"
    await bus.begin_call(turn, "5")
    with pytest.raises(LimitExceeded):
        await bus.stream(turn, "5", 1, HALF)
    assert await bus.emit(turn, "6", VALUE, b'"short"'), "what fits is still emitted"


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
    sent = [await bus.stream(turn, "1", 1, HALF, progress=True) for _ in range(4)]
    assert sent == [True, True, False, False]
