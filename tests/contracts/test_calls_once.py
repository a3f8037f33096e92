"""A tool that must not be repeated is marked before it runs; the mark is removed when the call ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.app.app import App
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.calls.tool_handler import CallHandler
from runtime_core.declare.tool import AbandonedThreads, ToolContext
from runtime_core.errors import NotReady
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import Broker, answer, ask, bury, fail, now, suspend

app = App("calls")


charged: list[str] = []


@app.tool(repeatable=False)
async def charge(ctx: ToolContext, fails: bool) -> str:
    charged.append(ctx.idempotency_key)
    if fails:
        raise ValueError("the card was refused")
    return "charged"


@app.tool(repeatable=False)
async def refund(ctx: ToolContext) -> str:
    if not charged:
        charged.append(ctx.idempotency_key)
        raise NotReady("the terminal is offline")
    return "refunded"


@pytest.fixture(autouse=True)
def nothing_charged() -> None:
    charged.clear()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def handler(bus: EventBus, threads: ThreadPoolExecutor) -> CallHandler:
    return CallHandler(bus, app.tools, threads, AbandonedThreads(), Metrics(CollectorRegistry(), "tool-handler"))


async def ask_to_charge(broker: Broker, bus: EventBus, data: bytes) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "charge", data=data))


async def test_a_mark_is_removed_with_the_result(broker: Broker, bus: EventBus, threads: ThreadPoolExecutor) -> None:
    await ask_to_charge(broker, bus, b'{"fails":false}')
    await handler(bus, threads).handle(await broker.take(bus, "tool"))
    assert await broker.hash("started") == {}
    assert "charged" in (await broker.task("t"))["j:1"]


async def test_a_failed_call_can_be_redriven(
    broker: Broker, bus: EventBus, other: EventBus, threads: ThreadPoolExecutor
) -> None:
    """Whoever redrives the letter asserts that the call had no effect."""
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


async def the_task_ends(broker: Broker, bus: EventBus, call: Delivery) -> None:
    assert await bus.cancel("t", "no more") == ["cancelled"]


async def it_has_its_result(broker: Broker, bus: EventBus, call: Delivery) -> None:
    assert await answer(bus, call)


async def it_was_given_up(broker: Broker, bus: EventBus, call: Delivery) -> None:
    assert await bury(bus, call)


async def it_goes_on_under_another_entry(broker: Broker, bus: EventBus, call: Delivery) -> None:
    """Its step is still missing. A first attempt has failed, and the mark is another attempt's."""
    assert await bus.retry(call, 0, b'{"type":"ValueError","message":"later"}')
    await broker.pass_time(1)
    await bus.promote()
    assert await bus.mark_started(await broker.take(bus, "tool"))


Event = Callable[[Broker, EventBus, Delivery], Awaitable[None]]


@pytest.mark.parametrize("event", [the_task_ends, it_has_its_result, it_was_given_up, it_goes_on_under_another_entry])
async def test_a_call_that_is_no_longer_needed_does_not_run(
    broker: Broker, bus: EventBus, threads: ThreadPoolExecutor, event: Event
) -> None:
    """It waited in a queue, or a read's reply was late. Its outcome is known: it never began here."""
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    await event(broker, bus, call)
    before = await broker.task("t")
    marks = await broker.hash("started")
    assert await bus.mark_started(call) is None
    await handler(bus, threads).handle(call)
    assert charged == []
    assert await broker.task("t") == before
    assert await broker.hash("started") == marks
    assert all(entry["id"] != call.entry.decode() for entry in await broker.entries("tool")), "it is acknowledged"


async def test_a_second_entry_of_an_answered_call_does_not_run(
    broker: Broker, bus: EventBus, threads: ThreadPoolExecutor
) -> None:
    """An attempt that counted as failed has committed its result after all."""
    await ask_to_charge(broker, bus, b'{"fails":false}')
    first = await broker.take(bus, "tool")
    assert await bus.retry(first, 0, b"{}")
    await broker.pass_time(1)
    await bus.promote()
    assert await answer(bus, first)
    second = await broker.take(bus, "tool")
    assert await bus.mark_started(second) is None
    await handler(bus, threads).handle(second)
    assert charged == []


async def test_a_call_of_a_task_that_ended_and_is_kept_does_not_run(
    broker: Broker, bus: EventBus, threads: ThreadPoolExecutor
) -> None:
    """A dead letter pins the ended task with all its fields, so that its steps are still missing."""
    await broker.submit(bus, "t")
    calls = [ask(str(number), "charge", wait="0", data=b'{"fails":false}') for number in range(2)]
    assert await suspend(bus, await broker.take(bus), *calls)
    assert await bury(bus, await broker.take(bus, "tool"))
    await bus.cancel("t", "no more")
    assert "m:1" in await broker.task("t")
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call) is None
    await handler(bus, threads).handle(call)
    assert charged == []
    assert await broker.entries("tool") == []


async def test_the_mark_of_a_stopped_call_is_removed(broker: Broker, bus: EventBus) -> None:
    """It was running when its task was cancelled, and its consumer settles it."""
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    await bus.cancel("t", "no more")
    assert not await bus.retry(call, 0, b"", counts=False)
    assert await broker.hash("started") == {}
    await broker.idle()


async def test_the_end_of_a_task_removes_the_mark_of_its_call(broker: Broker, bus: EventBus) -> None:
    """The process may stop right after its commit: nothing else would ever remove the mark."""
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    await bus.cancel("t", "no more")
    assert not await answer(bus, call)
    assert await broker.hash("started") == {}


async def test_the_mark_of_a_stopped_call_is_removed_after_a_lost_group(broker: Broker, bus: EventBus) -> None:
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    await bus.cancel("t", "no more")
    await broker.lose_group("tool")
    assert not await answer(bus, call)
    assert await broker.hash("started") == {}
    await broker.nothing(bus, "tool")


async def test_the_commit_of_a_call_removes_its_mark(broker: Broker, bus: EventBus) -> None:
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    assert await answer(bus, call)
    assert await broker.hash("started") == {}


async def test_a_dead_call_removes_its_mark(broker: Broker, bus: EventBus) -> None:
    await ask_to_charge(broker, bus, b'{"fails":false}')
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    assert await bury(bus, call)
    assert await broker.hash("started") == {}


async def test_a_copy_of_a_settled_entry_leaves_the_mark_of_the_call_that_runs(broker: Broker, bus: EventBus) -> None:
    """Only the entry under which the call runs can end it."""
    await ask_to_charge(broker, bus, b'{"fails":false}')
    copy = await broker.take(bus, "tool")
    assert await bus.retry(copy, 0, b"{}")
    await broker.pass_time(1)
    await bus.promote()
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    await bus.cancel("t", "no more")
    assert not await answer(bus, copy)
    assert list(await broker.hash("started")) == ["t/r/1"]
    assert not await answer(bus, call)
    assert await broker.hash("started") == {}


async def test_a_call_that_ends_its_task_by_a_limit_removes_its_mark(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":1}')
    assert await suspend(bus, await broker.take(bus), ask("1", "charge"))
    call = await broker.take(bus, "tool")
    assert await bus.mark_started(call)
    assert await bus.commit_call(call, b"K", now(), b"1", b"[]", 1, b'{"tokens":2}')
    assert await broker.status("t") == "failed"
    assert await broker.hash("started") == {}


async def test_a_call_that_was_not_ready_may_run_later(
    broker: Broker, bus: EventBus, threads: ThreadPoolExecutor
) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "refund"))
    await handler(bus, threads).handle(await broker.take(bus, "tool"))
    assert await broker.hash("started") == {}
    await broker.pass_time(60_000)
    await bus.promote()
    await handler(bus, threads).handle(await broker.take(bus, "tool"))
    assert "refunded" in (await broker.task("t"))["j:1"]
