"""A task's usage is summed over all its runs and calls, once per step, and ends it over a limit."""

from __future__ import annotations

import json
from typing import cast

import pytest

from runtime_core.bus.connection import Argument
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import LimitExceeded, ServerError
from tests.contracts.broker import DIGEST, Broker, ask, complete, now, suspend

Sums = dict[str, object]


def spend(step: str, usage: bytes) -> list[Argument]:
    return ["u", step, DIGEST, usage]


async def used(broker: Broker, task: str) -> Sums:
    return cast(Sums, (await broker.final(task))["usage"])


async def end_of(broker: Broker, task: str) -> tuple[object, str, str]:
    final = await broker.final(task)
    error = cast(dict[str, str], final["error"])
    return final["status"], error["type"], error["message"]


async def test_usage_of_runs_and_calls_is_summed_by_name_and_model(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    parts = (spend("1", b'{"tokens":3,"models":{"small":{"tokens":3}}}'), ask("2", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), *parts, ask("3"))
    assert await complete(bus, await broker.take(bus), spend("1", b'{"tokens":4,"models":{"large":{"tokens":4}}}'))
    call = await broker.take(bus, "tool")
    usage = b'{"cost":0.5,"models":{"small":{"cost":0.5}}}'
    assert await bus.commit_call(call, b"K", now(), b"1", b"[]", 1, usage)
    assert (await broker.task("t"))["j:1"][8] == "K", "the journal knows the report"
    assert await complete(bus, await broker.take(bus), spend("4", b'{"tokens":1}'))
    assert await used(broker, "t") == {
        "tokens": 8,
        "cost": 0.5,
        "models": {"small": {"tokens": 3, "cost": 0.5}, "large": {"tokens": 4}},
    }
    await broker.idle()


async def test_a_repeated_commit_counts_nothing_twice(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, spend("1", b'{"tokens":3}'), ask("2"))
    assert not await suspend(bus, turn, spend("1", b'{"tokens":3}'), ask("2"))
    call = await broker.take(bus, "tool")
    assert await bus.commit_call(call, b"K", now(), b"1", b"[]", 1, b'{"tokens":2}')
    assert not await bus.commit_call(call, b"K", now(), b"1", b"[]", 1, b'{"tokens":2}')
    assert await complete(bus, await broker.take(bus))
    assert await used(broker, "t") == {"tokens": 5}


async def test_at_the_limit_is_within_it(broker: Broker, bus: EventBus) -> None:
    """Fractions are summed exactly: three times 0.1 is not more than 0.3."""
    await broker.submit(bus, "t", limits=b'{"tokens":3,"cost":0.3}')
    tenths = [spend(str(number), b'{"tokens":1,"cost":0.1}') for number in range(3)]
    assert await complete(bus, await broker.take(bus), *tenths)
    assert (await broker.final("t"))["status"] == "completed"


@pytest.mark.parametrize("mode", ["waits", "completes"])
async def test_a_turn_over_the_limit_is_refused_whole_and_then_ends_the_task(
    broker: Broker, bus: EventBus, mode: str
) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}', key="k")
    turn = await broker.take(bus)
    before = await broker.snapshot()
    report = spend("1", b'{"tokens":11}')
    commit = suspend(bus, turn, report, ask("2")) if mode == "waits" else complete(bus, turn, report)
    with pytest.raises(LimitExceeded, match=r"has used 11 tokens, over its max_tokens=10"):
        await commit
    assert await broker.snapshot() == before
    error = b'{"type":"LimitExceeded","message":"over"}'
    assert await bus.commit_turn(turn, "x", now(), b"[]", 1, error, b"", spend("1", b'{"tokens":11}'), 1)
    assert await end_of(broker, "t") == ("failed", "LimitExceeded", "over")
    assert await used(broker, "t") == {"tokens": 11}
    await broker.idle()


async def test_a_child_over_the_limit_ends_the_whole_task_and_frees_it(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}', key="k")
    parts = (ask("1", "editor", stream="agent", key="e"), ask("2", "desk", stream="agent", key="d"))
    assert await suspend(bus, await broker.take(bus), *parts)
    first, second = [await broker.take(bus), await broker.take(bus)]
    assert await suspend(bus, second, ask("1"))
    call = await broker.take(bus, "tool")
    error = b'{"type":"LimitExceeded","message":"over"}'
    assert await bus.commit_turn(first, "x", now(), b"[]", 1, error, b"", spend("1", b'{"tokens":11}'), 1)
    assert await end_of(broker, "t") == ("failed", "LimitExceeded", "over")
    assert not await bus.commit_call(call, b"K", now(), b"1", b"[]", 1)
    await broker.idle()


async def test_a_call_over_the_limit_ends_the_task(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"cost":0.5}', key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    assert await bus.commit_call(call, b"K", now(), b"1", b"[]", 1, b'{"cost":0.75}')
    assert await end_of(broker, "t") == (
        "failed", "LimitExceeded", "the task has used 0.75 cost, over its max_cost=0.5",
    )  # fmt: skip
    assert await used(broker, "t") == {"cost": 0.75}
    await broker.idle()


async def test_attempts_that_failed_are_counted(broker: Broker, bus: EventBus) -> None:
    """A call's attempts report their usage, whether they are retried or given up."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bus.retry(await broker.take(bus, "tool"), 0, b"", usage=b'{"tokens":1}')
    await bus.promote()
    error = b'{"type":"Broken","message":"broken"}'
    call = await broker.take(bus, "tool")
    assert await bus.dead_letter(
        call.stream, call.entry, "attempts", b"[]", now(), error, b"[]", 1, usage=b'{"tokens":2}'
    )
    assert await complete(bus, await broker.take(bus))
    assert await used(broker, "t") == {"tokens": 3}


async def test_a_task_in_another_partition_reports_its_usage_at_its_end(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="e"), ask("2"))
    assert await bus.answer_request("t", "r", "1", b"K", b"1", "editor", "there", b'{"tokens":4}')
    assert not await bus.answer_request("t", "r", "1", b"K", b"1", "editor", "there", b'{"tokens":4}')
    assert json.loads((await broker.task("t"))["us"]) == {"tokens": 4}


async def test_a_task_in_another_partition_may_end_its_callers_task(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}', key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="@1:there", key="e"))
    assert await bus.answer_request("t", "r", "1", b"K", b"1", "editor", "there", b'{"tokens":11}')
    assert (await end_of(broker, "t"))[:2] == ("failed", "LimitExceeded")
    await broker.idle()


async def test_an_invalid_usage_report_writes_nothing(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    before = await broker.snapshot()
    for wrong in (b"nonsense", b'{"tokens":"many"}'):
        with pytest.raises(ServerError):
            await suspend(bus, turn, spend("1", wrong), ask("2"))
    assert await broker.snapshot() == before
