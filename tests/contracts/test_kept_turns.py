"""The memory of a process counts only if the broker agrees: steps, warm runs and deltas."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.deliveries import Delivery, Journaled
from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.effects import JournaledStep
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.errors import JournalMoved, ServerError
from runtime_core.runs.commit import TurnGone, TurnPort
from runtime_core.runs.model_step import ModelCall
from runtime_core.runs.turn import SETTLE_SECONDS, TurnHandler
from runtime_core.telemetry.metrics import Metrics
from tests.contracts.broker import DIGEST, Broker, answer, ask, bury, complete, now
from weft import AgentContext, App, Reject

WAIT_SECONDS = 60.0


def handler(bus: EventBus, app: App) -> TurnHandler:
    return TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"))


async def reconnect(broker: Broker, bus: EventBus) -> None:
    client = await bus.transport.call("CLIENT", "ID")
    assert isinstance(client, int)
    await broker.call("CLIENT", "KILL", "ID", client)
    await bus.transport.call("PING")


async def drop_at(runs: TurnHandler, turn: Delivery, stays: asyncio.Event) -> None:
    """Handle a turn until its code sets `stays`, and drop it there."""
    handling = asyncio.create_task(runs.handle(turn))
    async with asyncio.timeout(WAIT_SECONDS):
        await stays.wait()
    handling.cancel()
    await asyncio.wait((handling,))


async def reclaim(bus: EventBus, left_by: EventBus, turn: Delivery) -> Delivery:
    """Let the owner of a turn leave, and return the turn as the other one adopts it."""
    await left_by.leave([turn])
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    return adopted


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_turn_finished_by_another_process_runs_no_step(
    broker: Broker, bus: EventBus, other: EventBus, key: str
) -> None:
    """A lost group delivers the entry to a second living owner, which begins only after the first has committed."""
    app, done = App("once"), []

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lambda: done.append("paid"), name="pay")

    await broker.submit(bus, "t", key=key)
    first = await broker.take(bus)
    await broker.lose_group()
    second = await broker.take(other)
    await handler(bus, app).handle(first)
    await handler(other, app).handle(second)
    assert done == ["paid"]


async def test_a_run_in_memory_sees_the_steps_of_another_process(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """It checked the journal in its last turn; another process has been in this turn since."""
    app, done = App("kept"), []
    stays, go_on = asyncio.Event(), asyncio.Event()

    @app.tool
    def search() -> str:
        return "found"

    async def stay() -> None:
        stays.set()
        await go_on.wait()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lambda: done.append("first"), name="first")
        await ctx.tool(search)
        await ctx.step(lambda: done.append("second"), name="second")
        await ctx.step(stay)

    keeps = handler(bus, app)
    await broker.submit(bus, "t")
    await keeps.handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(other)
    await drop_at(handler(other, app), turn, stays)
    adopted = await reclaim(bus, other, turn)
    go_on.set()
    await keeps.handle(adopted)
    assert done == ["first", "second"]
    assert await broker.status("t") == "completed"


async def test_a_turn_whose_delta_could_not_be_written_is_not_committed(
    broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App("deltas")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        await ctx.emit("working")
        return "done"

    async def broken(*_: object, **__: object) -> bool:
        raise ServerError("ERR no such luck")

    monkeypatch.setattr(bus, "emit", broken)
    await broker.submit(bus, "t")
    with pytest.raises(ServerError):
        await handler(bus, app).handle(await broker.take(bus))
    assert await broker.status("t") == "accepted"


@pytest.mark.parametrize("replayed", [False, True])
async def test_a_step_that_the_broker_lost_is_stored_again(
    broker: Broker, bus: EventBus, other: EventBus, replayed: bool
) -> None:
    """The server came back without its last writes, and the turn continued: a later replay must do the same."""
    app, charged = App("lost"), []
    stays = asyncio.Event()

    @app.tool
    def search(n: int) -> str:
        return "found"

    def charge() -> int:
        charged.append("card")
        return len(charged)

    async def lose() -> None:
        if replayed and not stays.is_set():
            stays.set()
            await asyncio.Event().wait()
        await broker.call("HDEL", broker.keys.task("t"), "j:1", "w")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        n = await ctx.step(charge)
        await ctx.step(lose)
        found: str = await ctx.tool(search, n=n)
        return found

    await broker.submit(bus, "t")
    turn = await broker.take(other)
    if replayed:
        await drop_at(handler(other, app), turn, stays)
    await handler(bus, app).handle(await reclaim(bus, other, turn))
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(bus, app).handle(await broker.take(bus))
    assert (await broker.status("t"), charged) == ("completed", ["card"])


@pytest.mark.parametrize("lives", [False, True])
async def test_a_step_that_another_process_repeated_after_a_loss_counts(
    broker: Broker, bus: EventBus, other: EventBus, lives: bool
) -> None:
    """The server lost the step and the delivery, and another process restarted the turn, with another result."""
    app, charged = App("repeated"), []

    @app.tool
    def search(n: int) -> int:
        return n

    def charge() -> int:
        charged.append("card")
        return len(charged)

    async def lose() -> str:
        task = broker.keys.task("t")
        value = await broker.call("HGET", task, "j:1")
        assert isinstance(value, bytes)
        await broker.call("HDEL", task, "j:1", "w", "by")
        await broker.lose_group()
        copy = await broker.take(other)
        assert await other.begin_turn(copy) is not None
        theirs = value[:22] + b"7"
        assert await other.record(copy, "1", theirs) == theirs
        if not lives:
            await broker.silence(other)
        return "lost"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> int:
        n = await ctx.step(charge)
        await ctx.step(lose)
        found: int = await ctx.tool(search, n=n)
        return found

    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    if lives:
        with pytest.raises(asyncio.CancelledError, match="another process works on the turn"):
            await handler(bus, app).handle(turn)
        assert await broker.entries("tool") == []
    else:
        await handler(bus, app).handle(turn)
        (call,) = await broker.entries("tool")
        assert (call["d"], charged) == ('{"n":7}', ["card"])


async def test_a_turn_checks_who_is_in_it_after_a_reconnect(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The server may have lost the turn with its last writes, and another process may have restarted it."""
    app, done = App("again"), list[str]()

    async def lose() -> None:
        await broker.call("HDEL", broker.keys.task("t"), "w", "by")
        await broker.lose_group()
        assert await other.begin_turn(await broker.take(other)) is not None
        await reconnect(broker, bus)

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lose)
        await ctx.step(lambda: done.append("paid"), name="pay")

    bus.alive_until = math.inf
    await broker.submit(bus, "t")
    with pytest.raises(asyncio.CancelledError, match="another process works on the turn"):
        await handler(bus, app).handle(await broker.take(bus))
    assert done == []


async def test_a_turn_left_by_a_lost_commit_is_taken_over(
    broker: Broker, bus: EventBus, other: EventBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker still names that process, which lives, and would keep all others out forever."""
    app, done, later = App("left"), list[str](), [0.0]

    @app.agent("writer", timeout_seconds=30)
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lambda: done.append("paid"), name="pay")

    await broker.submit(bus, "t")
    assert await other.begin_turn(await broker.take(other)) is not None
    await broker.lose_group()
    turn, handles, clock = await broker.take(bus), handler(bus, app), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + later[0])
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError, match="another process works on the turn"):
            await handles.handle(turn)
    later[0] = 30 + SETTLE_SECONDS
    await handles.handle(turn)
    assert (await broker.status("t"), done) == ("completed", ["paid"])


async def test_steps_of_a_failed_attempt_are_stored_again_after_a_reconnect(broker: Broker, bus: EventBus) -> None:
    """The server lost them with its last writes: the next attempt must not do them again."""
    app, charged = App("failed"), list[str]()

    async def lose() -> None:
        await broker.call("HDEL", broker.keys.task("t"), "j:1", "w", "by")
        await reconnect(broker, bus)

    @app.agent("writer", retry=RetryPolicy(attempts=2, base_seconds=0.001))
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lambda: charged.append("card"), name="charge")
        if ctx.attempt == 1:
            await lose()
            raise RuntimeError("an attempt fails")

    await broker.submit(bus, "t")
    await handler(bus, app).handle(await broker.take(bus))
    await broker.pass_time(60_000)
    await bus.promote(10)
    await handler(bus, app).handle(await broker.take(bus))
    assert (await broker.status("t"), charged) == ("completed", ["card"])


@pytest.mark.parametrize("reconnects", [False, True])
async def test_a_delta_that_the_broker_has_lost_is_sent_again_and_has_one_row(
    broker: Broker, bus: EventBus, reconnects: bool
) -> None:
    """The connection may break while the commit is on its way, so that nothing but the commit notices the loss."""
    app, lost = App("deltas"), list[str]()

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.emit("working")
        if not lost:
            async with asyncio.timeout(WAIT_SECONDS):
                while "e:e" not in await broker.task("t"):
                    await asyncio.sleep(0)
            await broker.call("HDEL", broker.keys.task("t"), "e:e", "w", "by")
            await broker.call("DEL", broker.keys.base + "out:t")
            lost.append("once")
            if reconnects:
                await reconnect(broker, bus)
        await ctx.tool(search)

    await broker.submit(bus, "t")
    await handler(bus, app).handle(await broker.take(bus))
    assert [json.loads(entry["data"])["text"] for entry in await broker.entries("out:t")] == ["working"]
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(bus, app).handle(await broker.take(bus))
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"])]
    assert [row["kind"] for row in rows] == ["emit", "agent"]


@pytest.mark.parametrize("ends", ["completed", "waiting", "failed"])
@pytest.mark.parametrize("replayed", [False, True])
async def test_usage_of_a_model_call_that_the_broker_has_lost_is_counted_again(
    broker: Broker, bus: EventBus, other: EventBus, ends: str, replayed: bool
) -> None:
    app, asked, stays, lost = App("models"), list[object](), asyncio.Event(), list[str]()

    @app.tool
    def search() -> str:
        return "found"

    async def reply(request: object, call: ModelCall) -> str:
        asked.append(request)
        call.spend(model="m", tokens=3, cost=0.5)
        return "answer"

    async def lose() -> None:
        if replayed and not stays.is_set():
            stays.set()
            await asyncio.Event().wait()
        if lost:
            return
        lost.append((await broker.task("t"))["us"])
        await broker.call("HDEL", broker.keys.task("t"), "j:1", "w", "us", "by")
        await reconnect(broker, bus)

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        said: str = await ctx.model("m", {"messages": []}, reply)
        await lose()
        match ends:
            case "waiting":
                await ctx.tool(search)
            case "failed":
                raise Reject("no more")
        return said

    await broker.submit(bus, "t")
    turn = await broker.take(other)
    if replayed:
        await drop_at(handler(other, app), turn, stays)
    await handler(bus, app).handle(await reclaim(bus, other, turn))
    if ends == "waiting":
        assert await answer(bus, await broker.take(bus, "tool"))
        await handler(bus, app).handle(await broker.take(bus))
    final = await broker.final("t")
    assert final["usage"] == {"tokens": 3, "cost": 0.5, "models": {"m": {"tokens": 3, "cost": 0.5}}}
    assert len(asked) == 1
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"])]
    [row] = [row for row in rows if row["kind"] == "model"]
    assert row["usage"] == {"tokens": 3, "cost": 0.5}


async def test_a_reopened_run_does_not_repeat_its_finished_steps(broker: Broker, bus: EventBus) -> None:
    app, done = App("reopened"), []

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(lambda: done.append("paid"), name="pay")
        await ctx.tool(search)

    await broker.submit(bus, "t")
    await handler(bus, app).handle(await broker.take(bus))
    assert await bury(bus, await broker.take(bus, "tool"))
    await handler(bus, app).handle(await broker.take(bus))
    assert await broker.status("t") == "failed"
    [letter] = await broker.entries("dead")
    assert await bus.redrive(letter["id"], True) == ["ok", "t"]
    await handler(bus, app).handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(bus, app).handle(await broker.take(bus))
    assert await broker.status("t") == "completed"
    assert done == ["paid"]


async def test_a_kept_run_that_missed_a_turn_is_replayed(broker: Broker, bus: EventBus, other: EventBus) -> None:
    app = App("missed")

    @app.tool
    def search(number: int) -> int:
        return number

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> int:
        found = [await ctx.tool(search, number=number) for number in (1, 2)]
        return len(found)

    keeps = handler(bus, app)
    await broker.submit(bus, "t")
    for owner in (keeps, handler(other, app), keeps):
        await owner.handle(await broker.take(bus if owner is keeps else other))
        for _ in await broker.entries("tool"):
            assert await answer(bus, await broker.take(bus, "tool"), b"1")
    assert (await broker.final("t"))["output"] == 2


async def test_a_copy_of_a_finished_turn_does_not_run(broker: Broker, bus: EventBus, other: EventBus) -> None:
    app, begun = App("copied"), list[str]()

    @app.tool
    def search() -> int:
        return 1

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        begun.append(ctx.task_id)
        await ctx.tool(search)

    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    for owner in (bus, other):
        await handler(owner, app).handle(turn)
    assert begun == ["t"]


async def test_a_kept_run_is_replayed_after_a_reconnect(broker: Broker, bus: EventBus) -> None:
    """The server may have lost its last writes, and another process may have run the same turn with other results."""
    app, begun = App("reconnected"), list[int]()

    @app.tool
    def search() -> int:
        return 1

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        begun.append(len(begun))
        for _ in range(3):
            await ctx.tool(search)

    handles = handler(bus, app)
    await broker.submit(bus, "t")
    for reconnect in (False, True, False):
        await handles.handle(await broker.take(bus))
        if reconnect:
            client = await bus.transport.call("CLIENT", "ID")
            assert isinstance(client, int)
            await broker.call("CLIENT", "KILL", "ID", client)
        assert await answer(bus, await broker.take(bus, "tool"))
    await handles.handle(await broker.take(bus))
    assert await broker.status("t") == "completed"
    assert begun == [0, 1]


@pytest.mark.parametrize("key", ["", "k"])
async def test_a_copy_of_an_earlier_turn_runs_no_later_step(
    broker: Broker, bus: EventBus, other: EventBus, key: str
) -> None:
    """The run has continued: its journal would take the copy further than its own entry."""
    app, done = App("copies"), []

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.tool(search)
        await ctx.step(lambda: done.append("paid"), name="pay")

    await broker.submit(bus, "t", key=key)
    first = await broker.take(bus)
    await broker.lose_group()
    copy = await broker.take(other)
    await handler(bus, app).handle(first)
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(other, app).handle(copy)
    assert done == []
    await handler(bus, app).handle(await broker.take(bus))
    assert done == ["paid"]


async def test_a_turn_in_which_another_process_has_asked_is_replayed(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """Its request is no journaled step yet, and must not be sent again."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    port = TurnPort(bus, turn, App("asked"))
    assert await other.ask(turn, now(), "client", b"", ask("1"), 1) == {}
    with pytest.raises(JournalMoved):
        await port.confirm(())
    await TurnPort(bus, turn, App("asked"), loaded=True).confirm(())


async def test_a_turn_that_two_processes_run_reads_the_journal_again(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A step that another process stored first is a sign that the next one may be done already."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    bus.alive_until = math.inf
    port = TurnPort(bus, turn, App("two"))
    await port.confirm(())
    theirs = b"d1a2b3c4K1700000000000" + b'"theirs"'
    assert await other.record(turn, "1", theirs) == theirs
    assert await port.record("1", "d1a2b3c4", b"K", b'"ours"') == theirs
    assert await other.record(turn, "2", theirs) == theirs
    with pytest.raises(JournalMoved):
        await port.confirm(("1",))


async def test_a_first_turn_that_a_result_wakes_keeps_its_input(broker: Broker, bus: EventBus) -> None:
    """Its first turn had called in mid-turn, and was parked. The event that wakes it has the result as its data."""
    app, begun = App("parked"), list[object]()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        begun.append(value)

    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await bus.ask(turn, now(), "client", b"", ask("1"), 1) == {}
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await bury(bus, turn, "diverged")
    [letter] = [each for each in await broker.entries("dead") if each["stream"] == "tool"]
    assert await bus.redrive(letter["id"], False) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    woken = await broker.take(bus)
    assert (woken.kind, woken.turn, woken.attempt) == ("resume", 0, 1)
    await handler(bus, app).handle(woken)
    assert begun == ["hi"]


async def test_a_run_whose_answer_is_no_longer_wanted_does_not_start(broker: Broker, bus: EventBus) -> None:
    app, begun = App("withdrawn"), list[str]()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        begun.append(ctx.task_id)

    await broker.submit(bus, "t", key="k")
    assert await bus.withdraw_request("t")
    await handler(bus, app).handle(await broker.take(bus))
    assert json.loads((await broker.task("t"))["out"])["error"]["type"] == "Cancelled"
    assert begun == []


async def test_a_kept_run_knows_the_attempt_of_its_turn(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Another process has failed in the turn: this one replays the run, whose code may go another way now."""
    app, attempts = App("attempts"), list[int]()

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer", retry=RetryPolicy(attempts=2, base_seconds=0.001))
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.tool(search)
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            raise RuntimeError("not yet")

    keeps = handler(bus, app)
    await broker.submit(bus, "t")
    await keeps.handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    await handler(other, app).handle(await broker.take(other))
    await broker.pass_time(3_600_000)
    await bus.promote()
    await keeps.handle(await broker.take(bus))
    assert attempts == [1, 2]
    assert await broker.status("t") == "completed"


async def test_a_failed_run_whose_answer_is_no_longer_wanted_is_not_retried(broker: Broker, bus: EventBus) -> None:
    """The heartbeat has told only those who ran it at that time: the next attempt reads it from the broker."""
    app, attempts = App("withdrawn"), list[int]()

    @app.agent("writer", retry=RetryPolicy(attempts=3, base_seconds=0.001))
    async def writer(ctx: AgentContext, value: object) -> None:
        attempts.append(ctx.attempt)
        raise RuntimeError("not yet")

    await broker.submit(bus, "t")
    await handler(bus, app).handle(await broker.take(bus))
    assert await bus.withdraw_request("t")
    await broker.pass_time(60_000)
    await bus.promote()
    await handler(bus, app).handle(await broker.take(bus))
    assert json.loads((await broker.task("t"))["out"])["error"]["type"] == "Cancelled"
    assert attempts == [1]


WRITES: dict[str, Callable[[TurnPort], Awaitable[object]]] = {
    "a step": lambda port: port.record("1", DIGEST, b"K", b"1"),
    "the begin of a model call": lambda port: port.begin_call("1", b"{}"),
    "a model call": lambda port: port.settle_call("1", DIGEST, b"K", b"1", b'{"tokens":1}'),
}


@pytest.mark.parametrize("write", WRITES)
async def test_a_write_ends_a_turn_that_is_over(broker: Broker, bus: EventBus, write: str) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    port = TurnPort(bus, turn, App("over"))
    await port.confirm(())
    assert await complete(bus, turn)
    with pytest.raises(TurnGone):
        await WRITES[write](port)


@pytest.mark.parametrize("limit", [1, 2])
async def test_runs_in_memory_are_bounded(broker: Broker, bus: EventBus, limit: int) -> None:
    """The one that has waited longest is replayed."""
    app, begun = App("bounded"), list[str]()

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        begun.append(ctx.task_id)
        await ctx.tool(search)

    keeps = TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"), warm_runs=limit)
    for task in ("a", "b"):
        await broker.submit(bus, task)
        await keeps.handle(await broker.take(bus))
    for _ in range(2):
        assert await answer(bus, await broker.take(bus, "tool"))
        await keeps.handle(await broker.take(bus))
    assert begun == (["a", "b", "a"] if limit == 1 else ["a", "b"])


async def test_the_end_of_a_task_leaves_the_runs_of_others_in_memory(broker: Broker, bus: EventBus) -> None:
    app, begun = App("two"), list[str]()

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        begun.append(ctx.task_id)
        await ctx.tool(search)

    keeps = handler(bus, app)
    for task in ("a", "b"):
        await broker.submit(bus, task)
        await keeps.handle(await broker.take(bus))
    keeps.stop_task("a")
    for _ in range(2):
        assert await answer(bus, await broker.take(bus, "tool"))
        await keeps.handle(await broker.take(bus))
    assert begun == ["a", "b", "a"]


async def test_the_end_of_a_task_cancels_no_run_of_another(broker: Broker, bus: EventBus) -> None:
    app, begun, go_on = App("two"), asyncio.Queue[str](), asyncio.Event()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> str:
        async def work() -> None:
            begun.put_nowait(ctx.task_id)
            await go_on.wait()

        await ctx.step(work)
        return "done"

    runs = handler(bus, app)
    handling: list[asyncio.Task[None]] = []
    for task in ("a", "b"):
        await broker.submit(bus, task)
        handling.append(asyncio.create_task(runs.handle(await broker.take(bus))))
        assert await asyncio.wait_for(begun.get(), WAIT_SECONDS) == task
    runs.stop_task("a")
    await asyncio.wait(handling[:1], timeout=WAIT_SECONDS)
    go_on.set()
    await asyncio.wait(handling, timeout=WAIT_SECONDS)
    assert (await broker.final("b"))["output"] == "done"
    assert await broker.status("a") != "completed"


MARK = f"{DIGEST}K1700000000000null".encode()


async def test_an_ended_turn_begins_no_step_after_its_mark(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    port = TurnPort(bus, await broker.take(bus), App("marks"))
    await port.begin(())
    assert await bus.cancel("t", "no more") == ["cancelled"]
    port.mark(JournaledStep("1~new", MARK, "patch", "new"), ())
    with pytest.raises(TurnGone):
        await port.confirm(())


async def test_a_turn_that_ends_while_its_steps_are_stored_again_stops(broker: Broker, bus: EventBus) -> None:
    class Ending(EventBus):
        async def begin_turn(self, delivery: Delivery, *, anyway: bool = False) -> Journaled | None:
            begun = await super().begin_turn(delivery, anyway=anyway)
            assert await bus.cancel("t", "no more") == ["cancelled"]
            return begun

    await broker.submit(bus, "t")
    port = TurnPort(Ending(bus.transport, bus.keys, bus.owner), await broker.take(bus), App("steps"))
    with pytest.raises(TurnGone):
        await port.store_again([JournaledStep("1", MARK, "step", "charge")], ())
