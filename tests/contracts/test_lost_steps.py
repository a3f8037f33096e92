"""A server that loses its last writes while a turn runs: no step is journaled without the ones before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import JournalLost
from runtime_core.runs.commit import TurnPort
from runtime_core.runs.guest import Guest, host
from runtime_core.runs.model_step import ModelCall
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import DIGEST, Broker
from weft import AgentContext, App

FIRST = f'{DIGEST}K1700000000000"first"'.encode()
SECOND = f'{DIGEST}K1700000000001"second"'.encode()
WAIT_SECONDS = 60.0
Lose = Callable[[], AbstractAsyncContextManager[None]]


@pytest.fixture
def lose(broker: Broker) -> Lose:
    """The server loses what it writes to the task within the block."""

    @asynccontextmanager
    async def losing() -> AsyncIterator[None]:
        key = broker.keys.task("t")
        kept = await broker.call("DUMP", key)
        yield
        assert isinstance(kept, bytes)
        await broker.call("RESTORE", key, 0, kept, "REPLACE")

    return losing


def handler(bus: EventBus, app: App) -> TurnHandler:
    return TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"))


async def taken(broker: Broker, bus: EventBus) -> Delivery:
    await broker.submit(bus, "t")
    return await broker.take(bus)


async def results(broker: Broker) -> dict[str, str]:
    """The journal's results by step, without digest and time."""
    return {name[2:]: value[22:] for name, value in (await broker.task("t")).items() if name[:2] == "j:"}


async def drop_at(bus: EventBus, app: App, turn: Delivery, stays: asyncio.Event) -> None:
    """Handle a turn until its code sets `stays`, and let its owner leave it there."""
    handling = asyncio.create_task(handler(bus, app).handle(turn))
    async with asyncio.timeout(WAIT_SECONDS):
        await stays.wait()
    handling.cancel()
    await asyncio.wait((handling,))
    await bus.leave([turn])


async def adopted(bus: EventBus) -> Delivery:
    (found,) = (await bus.adopt("agent", 10, False)).deliveries
    return found


async def test_a_step_after_a_lost_one_is_not_journaled(broker: Broker, bus: EventBus, lose: Lose) -> None:
    turn = await taken(broker, bus)
    async with lose():
        assert await bus.record(turn, "1", FIRST) == FIRST
    before = await broker.snapshot()
    with pytest.raises(JournalLost, match="step 1"):
        await bus.record(turn, "2", SECOND, after="1")
    with pytest.raises(JournalLost, match="step 1"):
        await bus.settle_call(turn, "2", SECOND, after="1")
    assert await broker.snapshot() == before
    assert await bus.record(turn, "1", FIRST) == FIRST
    assert await bus.settle_call(turn, "2", SECOND, after="1") == (SECOND, "")


async def test_a_turn_journals_its_lost_steps_again_first(broker: Broker, bus: EventBus, lose: Lose) -> None:
    """They have no second effect, and the usage of a model call counts once."""
    app, done, journals = App("lost"), list[str](), list[dict[str, str]]()

    async def model(request: object, call: ModelCall) -> str:
        call.spend(tokens=3, model="m")
        return "answer"

    async def look() -> None:
        journals.append(await results(broker))

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        async with lose():
            await ctx.step(lambda: done.append("paid"), name="pay")
            await ctx.model("m", "question", model)
        await ctx.step(look, name="look 1")
        await ctx.step(look, name="look 2")

    turn = await taken(broker, bus)
    await handler(bus, app).handle(turn)
    assert done == ["paid"]
    assert journals == [{}, {"1": "null", "2": '"answer"', "3": "null"}]
    assert (await broker.final("t"))["usage"] == {"tokens": 3, "models": {"m": {"tokens": 3}}}


async def test_a_model_call_journals_the_lost_step_before_it(broker: Broker, bus: EventBus, lose: Lose) -> None:
    app, done, journals = App("lost"), list[str](), list[dict[str, str]]()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        async with lose():
            await ctx.step(lambda: done.append("paid"), name="pay")
        await ctx.model("m", "question", lambda request: "answer")
        journals.append(await results(broker))

    await handler(bus, app).handle(await taken(broker, bus))
    assert (done, journals) == (["paid"], [{"1": "null", "2": '"answer"'}])


async def test_a_turn_journals_a_lost_timer_of_a_guest_again_first(broker: Broker, bus: EventBus) -> None:
    """The timer ends in mid-turn, since another task of the code works on. What follows depends on it."""
    app, journals = App("lost"), list[dict[str, str]]()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        async def inside(guest: Guest) -> None:
            slept = asyncio.Event()

            async def work() -> None:
                await slept.wait()
                await lose_journal(broker)

            async def step(name: str, body: Callable[[], Awaitable[None]]) -> None:
                async def perform() -> None:
                    await ctx.step(body, name=name)

                await guest.perform(name, lambda branch: perform())

            async def look() -> None:
                journals.append(await results(broker))

            working = asyncio.create_task(step("work", work))
            await asyncio.sleep(0.01)
            slept.set()
            await working
            await step("look", look)

        await host(ctx, inside)

    turn = await taken(broker, bus)
    async with asyncio.timeout(WAIT_SECONDS):
        await handler(bus, app).handle(turn)
    assert [list(each.values()) for each in journals] == [["null", "null"]], "the timer, and the work after it"


async def lose_journal(broker: Broker) -> None:
    """The server comes back without the task's journal."""
    names = [name for name in await broker.task("t") if name[:2] == "j:"]
    await broker.call("HDEL", broker.keys.task("t"), "w", *names)


async def test_a_turn_journals_a_lost_step_of_a_dead_process_again(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """The turn has replayed it, so what follows depends on it."""
    app, done, journals = App("lost"), list[str](), list[dict[str, str]]()
    stays = asyncio.Event()

    async def stay() -> None:
        if stays.is_set():
            await lose_journal(broker)
        else:
            stays.set()
            await asyncio.Event().wait()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lambda: done.append("paid"), name="pay")
        await ctx.step(stay, name="stay")
        journals.append(await results(broker))

    await drop_at(other, app, await taken(broker, other), stays)
    await handler(bus, app).handle(await adopted(bus))
    assert (done, journals) == (["paid"], [{"1": "null", "2": "null"}])


async def test_a_turn_starts_over_without_a_lost_step_that_its_code_has_not_reached(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A dead process had finished a branch. Its result is lost before this process has replayed the branch."""
    app, paid, lost = App("lost"), list[str](), list[str]()
    stays, may_pay = asyncio.Event(), asyncio.Event()
    may_pay.set()

    async def slow() -> None:
        if not lost:
            lost.append("the journal")
            await lose_journal(broker)

    async def stay() -> None:
        if not stays.is_set():
            stays.set()
            await asyncio.Event().wait()

    async def first(ctx: AgentContext) -> None:
        if stays.is_set():
            await ctx.step(slow)
            may_pay.set()

    async def second(ctx: AgentContext) -> None:
        await may_pay.wait()
        await ctx.step(lambda: paid.append("paid"), name="pay")
        await ctx.step(stay)

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.gather(first(ctx), second(ctx))

    await drop_at(other, app, await taken(broker, other), stays)
    may_pay.clear()
    await handler(bus, app).handle(await adopted(bus))
    assert paid == ["paid", "paid"], "its result was lost before this process had it"
    assert await broker.status("t") == "completed"


async def test_the_next_turn_does_not_look_for_the_steps_of_the_last(broker: Broker, bus: EventBus) -> None:
    """The commit had them. If the server has lost that, the run is no longer at this turn."""
    turn = await taken(broker, bus)
    port = TurnPort(bus, turn, App("lost"))
    await port.confirm({})
    await port.record("1", DIGEST, b"K", b'"first"')
    await lose_journal(broker)
    with pytest.raises(JournalLost):
        await port.record("2", DIGEST, b"K", b'"second"')
    port.resume(turn)
    await port.confirm({})
    await port.record("2", DIGEST, b"K", b'"second"')
    assert await results(broker) == {"2": '"second"'}
