"""The output of a run: the broker has each piece once, and a reader that follows the attempts sees one execution."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.deliveries import BranchOutput, Delivery, StoredOutput
from runtime_core.bus.event_bus import EventBus
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.events import OUTPUT_DELTA, StreamEvent
from tests.contracts.broker import Broker, answer, ask, bury, complete, emit_pieces, suspend
from weft import AgentContext, App, TaskOutput

WAIT_SECONDS = 60.0


def handler(bus: EventBus, app: App) -> TurnHandler:
    return TurnHandler(bus, app, Metrics(CollectorRegistry(), "agent-handler"))


async def deltas(broker: Broker) -> list[tuple[int, int, object]]:
    """The attempt, number and value of each piece on the stream."""
    found = [json.loads(entry["data"]) for entry in await broker.entries("out:t") if entry["type"] == OUTPUT_DELTA]
    return [(each["attempt"], each["seq"], each.get("text", each.get("value"))) for each in found]


async def read(broker: Broker) -> TaskOutput:
    output = TaskOutput()
    for entry in await broker.entries("out:t"):
        output.add(StreamEvent(entry["id"], entry["type"], json.loads(entry["data"])))
    return output


async def rows_of_output(broker: Broker) -> list[tuple[str, object, object]]:
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"])]
    return [
        (row["step"], row.get("output"), row.get("attributes", {}).get("weft.pieces", 1))
        for row in rows
        if row["kind"] == "emit"
    ]


async def test_several_pieces_take_one_write(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await emit_pieces(bus, turn, b'"a"', b'{"n":1}', b'"b"')
    assert await emit_pieces(bus, turn, b'"c"', first=4)
    assert await deltas(broker) == [(1, 1, "a"), (1, 2, {"n": 1}), (1, 3, "b"), (1, 4, "c")]


@pytest.mark.parametrize("first", [1, 2, 3])
async def test_pieces_that_the_stream_has_are_skipped(broker: Broker, bus: EventBus, first: int) -> None:
    """A reply was lost, or another process replays the run."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    values = (b'"a"', b'"b"', b'"c"', b'"d"')
    assert await emit_pieces(bus, turn, *values[:2])
    assert await emit_pieces(bus, turn, *values[first - 1 :], first=first)
    before = await broker.snapshot()
    assert not await emit_pieces(bus, turn, *values)
    assert await broker.snapshot() == before
    assert [text for *_, text in await deltas(broker)] == ["a", "b", "c", "d"]


async def test_each_branch_counts_its_own_pieces(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    for branch in ("", "1.0.", "1.1."):
        assert await emit_pieces(bus, turn, b'"a"', branch=branch)
        assert not await emit_pieces(bus, turn, b'"a"', branch=branch)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.output == StoredOutput(1, {name: BranchOutput(1, 0, 0) for name in ("", "1.0.", "1.1.")})


async def test_the_output_is_not_journaled(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    for first in range(1, 2_001, 500):
        assert await emit_pieces(bus, turn, *[b"1"] * 500, first=first)
    fields = await broker.task("t")
    assert sorted(name for name in fields if name[:2] in ("j:", "e:")) == ["e:"]
    assert fields["w"] == "1\temit\t@\n"


async def test_output_starts_over_with_a_mark(broker: Broker, bus: EventBus) -> None:
    """Readers replace the earlier attempt at once, even if the new one has no pieces."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"old"', b'"older"')
    assert await bus.restart_output(turn, 2)
    before = await broker.snapshot()
    assert await bus.restart_output(turn, 2), "a repeat"
    assert not await emit_pieces(bus, turn, b'"late"', first=3), "of the earlier attempt"
    assert await broker.snapshot() == before
    assert (await read(broker)).pieces == []
    assert await emit_pieces(bus, turn, b'"new"', attempt=2)
    assert await deltas(broker) == [(1, 1, "old"), (1, 2, "older"), (2, 3, ""), (2, 4, "new")]
    assert (await read(broker)).text == "new"


async def test_an_ended_turn_does_not_restart_its_output(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"a"')
    assert await suspend(bus, turn, ask("2"))
    before = await broker.snapshot()
    assert not await bus.restart_output(turn, 2)
    assert await broker.snapshot() == before


async def test_rows_of_a_committed_turn_are_not_written_again(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"a"', b'"b"')
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.output == StoredOutput(1, {"": BranchOutput(2, 0, 0)})
    assert await suspend(bus, turn, ask("3"), record=b"[]")
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.output == StoredOutput(1, {"": BranchOutput(2, 2, 0)})
    await emit_pieces(bus, turn, b'"c"', first=3, step="4")
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.output == StoredOutput(1, {"": BranchOutput(3, 2, 0)})


async def test_output_that_started_over_has_no_second_row(broker: Broker, bus: EventBus) -> None:
    """A commit has recorded the row of its pieces before."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"a"', b'"b"')
    assert await suspend(bus, turn, ask("3"), record=b"[]")
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert await bus.restart_output(turn, 2)
    await emit_pieces(bus, turn, b'"c"', b'"d"', attempt=2)
    await bus.cancel("t", "no more")
    assert await rows_of_output(broker) == []


async def test_output_that_starts_over_after_its_newest_pieces_has_no_row(broker: Broker, bus: EventBus) -> None:
    """The turn has emitted more than the rows say, then starts its output over and does not get as far."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"a"', b'"b"')
    assert await suspend(bus, turn, ask("3"), record=b"[]")
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"c"', first=3, step="4")
    assert await bus.restart_output(turn, 2)
    await emit_pieces(bus, turn, b'"d"', attempt=2)
    await bus.cancel("t", "no more")
    assert await rows_of_output(broker) == []


async def test_more_output_than_before_has_its_own_row(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"a"', b'"b"')
    assert await suspend(bus, turn, ask("3"), record=b"[]")
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert await bus.restart_output(turn, 2)
    await emit_pieces(bus, turn, b'"c"', b'"d"', attempt=2)
    await emit_pieces(bus, turn, b'"e"', attempt=2, first=3, step="4")
    await bus.cancel("t", "no more")
    assert await rows_of_output(broker) == [("4", None, 1)]


async def test_output_of_a_turn_that_never_commits_has_one_row(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await emit_pieces(bus, turn, b'"a"', b'"b"')
    await emit_pieces(bus, turn, b'"c"', branch="3.0.")
    await bus.cancel("t", "no more")
    assert sorted(await rows_of_output(broker)) == [("1", None, 2), ("3.0.1", None, 1)]
    assert (await broker.final("t"))["steps"] == 2


class Killed:
    """An app whose agent stops in the middle of its output, where its process dies."""

    def __init__(self, said: Callable[[int], list[object]]) -> None:
        self.app = App("streams")
        self.lives = 0
        self.stays, self.go_on = asyncio.Event(), asyncio.Event()

        @self.app.tool
        def search() -> str:
            return "found"

        @self.app.agent("writer", retry=RetryPolicy(base_seconds=0.01))
        async def writer(ctx: AgentContext, value: object) -> None:
            self.lives += 1
            life = self.lives
            await ctx.emit("begun ")
            await ctx.tool(search)
            for piece in said(life):
                if piece is None and life == 2:  # the second life is in the middle; the first one ended at the tool
                    self.stays.set()
                    await self.go_on.wait()
                elif piece is not None:
                    await ctx.emit(piece, chunk=True)


async def kill(runs: TurnHandler, turn: Delivery, app: Killed, written: Callable[[], Awaitable[bool]]) -> None:
    """Handle a turn until its output so far is on the stream, and drop everything."""
    handling = asyncio.create_task(runs.handle(turn))
    async with asyncio.timeout(WAIT_SECONDS):
        await app.stays.wait()
        while not await written():
            await asyncio.sleep(0)
    handling.cancel()
    await asyncio.wait((handling,))


async def through_a_kill(broker: Broker, bus: EventBus, other: EventBus, app: Killed, before: int) -> None:
    """Run the task, and kill the process of its second turn when `before` pieces are on the stream."""
    await broker.submit(bus, "t")
    await handler(other, app.app).handle(await broker.take(other))
    assert await answer(bus, await broker.take(bus, "tool"))

    async def written() -> bool:
        return len(await deltas(broker)) == before

    await kill(handler(other, app.app), await broker.take(other), app, written)
    await broker.silence(other)
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    await handler(bus, app.app).handle(adopted)


async def test_a_process_that_dies_in_the_middle_of_its_output_repeats_and_loses_nothing(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    app = Killed(lambda life: [*(f"{number} " for number in range(300)), None, "last"])
    await through_a_kill(broker, bus, other, app, 301)
    assert await broker.status("t") == "completed"
    expected = ["begun ", *(f"{number} " for number in range(300)), "last"]
    assert [text for *_, text in await deltas(broker)] == expected, "nothing is on the stream twice"
    assert (await read(broker)).pieces == expected
    assert await rows_of_output(broker) == [("0e1", "begun ", 1), ("1e2", "".join(map(str, expected[1:])), 301)]


async def test_output_that_differs_after_a_kill_replaces_the_earlier_one(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """Its source is outside of the run, such as a sensor: a reader sees one execution, not a mixture."""
    app = Killed(lambda life: [f"{life}-{number} " for number in range(3)] + [None, f"{life}-last"])
    await through_a_kill(broker, bus, other, app, 4)
    assert await broker.status("t") == "completed"
    assert app.lives == 4, "the third life found other output, and the fourth emitted all of it again"
    assert (await read(broker)).text == "begun 4-0 4-1 4-2 4-last"
    assert [attempt for attempt, *_ in await deltas(broker)] == [1] * 4 + [2] * 6


async def test_a_second_process_leaves_the_output_of_a_live_one_alone(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """A group that was lost delivers the turn again; the second process emits something else."""
    app = Killed(lambda life: [f"{life}-{number} " for number in range(3)] + [None, f"{life}-last"])
    await broker.submit(bus, "t")
    await handler(other, app.app).handle(await broker.take(other))
    assert await answer(bus, await broker.take(bus, "tool"))
    handling = asyncio.create_task(handler(other, app.app).handle(await broker.take(other)))
    async with asyncio.timeout(WAIT_SECONDS):
        await app.stays.wait()
        while len(await deltas(broker)) < 4:
            await asyncio.sleep(0)
    await broker.call("XGROUP", "DESTROY", broker.keys.stream("agent"), "agent-handler")
    await bus.make_group(broker.keys.stream("agent"), "agent-handler")
    with pytest.raises(asyncio.CancelledError):
        await handler(bus, app.app).handle(await broker.take(bus))
    assert app.lives == 3
    app.go_on.set()
    await handling
    assert await broker.status("t") == "completed"
    assert (await read(broker)).text == "begun 2-0 2-1 2-2 2-last"


async def test_a_run_in_memory_does_not_commit_after_its_output_started_over(
    broker: Broker, bus: EventBus, other: EventBus
) -> None:
    """Another process replayed the turn, started the output over, and handed the turn back."""
    app, lives = App("kept"), list[int]()
    stays = asyncio.Event()

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        lives.append(1)
        life = len(lives)
        await ctx.emit(f"{life}-begun ")
        if life == 3:  # the one that started the output over
            stays.set()
            await asyncio.Event().wait()
        await ctx.emit(f"{life}-more")
        await ctx.tool(search)

    keeps = handler(bus, app)
    await broker.submit(bus, "t")
    await keeps.handle(await broker.take(bus))
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(other)
    handling = asyncio.create_task(handler(other, app).handle(turn))
    async with asyncio.timeout(WAIT_SECONDS):
        await stays.wait()
        while (await read(broker)).text != "3-begun ":
            await asyncio.sleep(0)
    handling.cancel()
    await asyncio.wait((handling,))
    await other.leave([turn])
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    await keeps.handle(adopted)
    assert await broker.status("t") == "completed"
    life = len(lives)
    assert (await read(broker)).text == f"{life}-begun {life}-more"


async def test_a_first_turn_finds_the_output_of_a_dead_process(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """It reads nothing from the broker before its first piece."""
    app, lives = App("first"), list[int]()
    stays = asyncio.Event()

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        lives.append(1)
        await ctx.emit(f"said in life {len(lives)}")
        if len(lives) == 1:
            stays.set()
            await asyncio.Event().wait()

    await broker.submit(bus, "t")
    handling = asyncio.create_task(handler(other, app).handle(await broker.take(other)))
    async with asyncio.timeout(WAIT_SECONDS):
        await stays.wait()
        while not await deltas(broker):
            await asyncio.sleep(0)
    handling.cancel()
    await asyncio.wait((handling,))
    await broker.silence(other)
    (adopted,) = (await bus.adopt("agent", 10, False)).deliveries
    await handler(bus, app).handle(adopted)
    assert (await read(broker)).text == f"said in life {len(lives)}"
    assert len(await rows_of_output(broker)) == 1


async def test_a_retried_attempt_continues_its_output(broker: Broker, bus: EventBus) -> None:
    """The wire promises that a higher attempt replaces all output of the run, so it stays the same one."""
    app = App("retries")

    @app.agent("writer", retry=RetryPolicy(base_seconds=0.01))
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.emit("a")
        if ctx.attempt < 3:
            raise RuntimeError("fails")
        await ctx.emit("b")

    await broker.submit(bus, "t")
    for _ in range(3):
        await handler(bus, app).handle(await broker.take(bus))
        await broker.pass_time(1_000)
        await bus.promote()
    assert await broker.status("t") == "completed"
    assert [(attempt, text) for attempt, _, text in await deltas(broker)] == [(1, "a"), (1, "b")]
    assert await rows_of_output(broker) == [("0e1", "ab", 2)]


async def test_a_reopened_task_continues_its_output(broker: Broker, bus: EventBus) -> None:
    """Also that of a child run whose journal is empty."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    await emit_pieces(bus, child, b'"a"')
    await bury(bus, child)
    assert await bury(bus, await broker.take(bus))
    letters = [entry["id"] for entry in await broker.entries("dead")]
    assert (await bus.redrive(letters[0], True))[0] == "ok"
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    assert not await emit_pieces(bus, child, b'"a"')
    assert await complete(bus, child)


async def test_a_message_of_a_run_with_too_much_output_is_not_sent_or_recorded(broker: Broker, bus: EventBus) -> None:
    app = App("talks")

    @app.agent("writer")
    async def writer(ctx: AgentContext, value: object) -> None:
        await ctx.step(len, "a")
        await ctx.send("editor", 1)
        for _ in range(3):
            await ctx.emit("x" * 500_000)

    await broker.call("HSET", broker.keys.meta, "output_max", 1_000_000)
    await broker.submit(bus, "t")
    await handler(bus, app).handle(await broker.take(bus))
    assert await broker.status("t") == "failed"
    rows = [row for entry in await broker.entries("record") if entry["d"] for row in json.loads(entry["d"])]
    assert [(row["kind"], row["status"]) for row in rows if row["kind"] != "emit"] == [
        ("agent", "failed"), ("step", "completed"),
    ]  # fmt: skip
    await broker.nothing(bus)
