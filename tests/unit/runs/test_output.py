"""The output of a run: its pieces are no steps, a replay emits none again, and they share rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.errors import OutputChanged
from runtime_core.runs import execution as execution_module
from runtime_core.runs import output as output_module
from runtime_core.runs.context import AgentContext
from runtime_core.wire.step import BYTES, PIECES, Step
from tests.unit.runs.run_world import Program, World


def shown(row: Step) -> tuple[str, str, object, object]:
    output = json.loads(bytes(row.output))
    return row.step, row.name, output, row.attributes.get(PIECES)


async def rows_of(world: World, code: Any) -> list[tuple[str, str, object, object]]:
    result = await world.new_run(Program(code)).advance()
    return [shown(row) for row in result.steps if row.kind == "emit"]


async def test_pieces_of_output_are_not_steps() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        for number in range(25_000):
            await ctx.emit(number)
        return await ctx.tool("t")

    world = World()
    assert isinstance(await world.play(code), Completed)
    assert [value for _, value in world.emitted] == list(range(25_000))
    assert list(world.journal) == ["1"], "pieces take no places"
    assert [row for row in world.rows if row[0] == "emit"] == [("emit", "0e1", "emit", "completed")]


async def test_pieces_without_a_step_between_them_share_a_row() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        for text in ("a", 'b"', "c\\n", "ü"):
            await ctx.emit(text, chunk=True)
        await ctx.step(int, "7")
        await ctx.emit("one")
        await ctx.emit({"n": 2})
        await ctx.send("audit")
        await ctx.emit("alone")
        return None

    assert await rows_of(World(), code) == [
        ("0e1", "chunk", 'ab"c\\nü', 4),
        ("1e5", "emit", ["one", {"n": 2}], 2),
        ("2e7", "emit", "alone", None),
    ]


async def test_each_branch_has_its_own_rows() -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        async def branch(name: str) -> None:
            for number in range(3):
                await ctx.emit(f"{name}{number}")

        await ctx.gather(branch("a"), branch("b"), ctx.emit("c"), ctx.emit("d"))
        return None

    world = World()
    assert sorted(await rows_of(world, code)) == [
        ("0e1", "emit", "cd", 2),
        ("1.0.0e1", "emit", "a0a1a2", 3),
        ("1.1.0e1", "emit", "b0b1b2", 3),
    ]
    assert {branch: at.count for branch, at in world.output.items()} == {"e": 2, "1.0.e": 3, "1.1.e": 3}


async def test_a_row_holds_the_first_pieces_of_much_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "RECORDED_BYTES", 10)

    async def code(ctx: AgentContext, _: object) -> object:
        for _ in range(5):
            await ctx.emit("1234")
        await ctx.send("audit")
        await ctx.emit("x" * 200)
        return None

    result = await World().new_run(Program(code)).advance()
    first, second = (row for row in result.steps if row.kind == "emit")
    assert shown(first) == ("0e1", "emit", "1234", 5)
    assert first.attributes[BYTES] == 30
    assert "202 bytes" in json.loads(bytes(second.output))


async def two_turns(ctx: AgentContext, _: object) -> object:
    await ctx.emit("a")
    await ctx.emit("b")
    await ctx.tool("t")
    await ctx.emit("c")
    return None


async def test_a_replay_emits_nothing_again_and_records_nothing_again() -> None:
    world = World(cold=True)
    assert isinstance(await world.play(two_turns), Completed)
    assert [value for _, value in world.emitted] == ["a", "b", "c"]
    assert [row[1] for row in world.rows if row[0] == "emit"] == ["0e1", "1e3"]


async def test_the_next_process_records_what_the_dead_one_has_emitted() -> None:
    world = World()
    await world.new_run(Program(two_turns)).advance()  # its commit never comes
    assert await rows_of(world, two_turns) == [("0e1", "emit", "ab", 2)]
    assert [value for _, value in world.emitted] == ["a", "b"]


async def test_different_output_starts_over() -> None:
    """Its source is not a step, so it says something else each time: readers replace the earlier attempt."""
    said = iter([["a", "b"], ["a", "B", "c"], ["A"]])

    async def code(ctx: AgentContext, _: object) -> object:
        for word in next(said):
            await ctx.emit(word)
        return await ctx.tool("t")

    world = World()
    first = world.new_run(Program(code))
    await first.advance()
    await first.aclose()
    assert isinstance(await world.play(code), Completed)
    assert world.output_attempt == 2
    assert [value for _, value in world.emitted] == ["a", "b", "A"]


@pytest.mark.parametrize("first", [3, 1])
async def test_shorter_output_starts_over_at_the_end(first: int) -> None:
    async def code(ctx: AgentContext, _: object) -> object:
        for number in range(first if ctx.attempt == 1 else first - 1):
            await ctx.emit(number)
        if ctx.attempt == 1:
            raise RuntimeError("the first attempt fails")
        return None

    world = World()
    assert isinstance(await world.new_run(Program(code)).advance(), Failed)
    with pytest.raises(OutputChanged, match=f"there are {first - 1} pieces, not {first}"):
        await world.new_run(Program(code), attempt=2).advance()


async def test_a_cancelled_job_keeps_its_output() -> None:
    """A replay does not start it: how far it came depended on the time."""

    async def code(ctx: AgentContext, _: object) -> object:
        async def job() -> None:
            await ctx.emit("begun")
            await ctx.tool("never")

        running = ctx.background(job())
        await ctx.tool("t")
        await running.cancel()
        return await ctx.tool("u")

    world = World(cold=True, unanswered=frozenset({"1.2"}))
    assert isinstance(await world.play(code), Completed)
    assert [value for _, value in world.emitted] == ["begun"]


@pytest.mark.parametrize("again", [0, 1, 2, 5])
async def test_a_replay_may_emit_any_number_of_pieces(again: int) -> None:
    """As code that streams what it reads. Finished work stays finished, and its places are the same."""
    ran: list[str] = []

    def body(name: str) -> str:
        ran.append(name)
        return name

    def code_with(pieces: int) -> Any:
        async def code(ctx: AgentContext, _: object) -> object:
            for number in range(pieces):
                await ctx.emit(number)
            found = [await ctx.tool("pay"), str(ctx.uuid()), await ctx.step(body, "alone")]
            await ctx.emit("between")
            return [*found, *await ctx.gather(ctx.step(body, "beside"), ctx.tool("mail")), await ctx.tool("last")]

        return code

    undisturbed = await World(cold=True).play(code_with(2))
    ran.clear()
    world = World(cold=True)
    while not world.asked or world.asked[-1][2] != "last":
        while world.waits and not world.awake():
            world.answer_one()
        assert isinstance(await world.turn(Program(code_with(2))), Suspended)
        assert world.run is not None
        await world.run.aclose()
        world.run = None
    asked, done = list(world.asked), list(ran)
    world.answer_one()
    result = await world.play(code_with(again))
    assert isinstance(result, Completed)
    assert isinstance(undisturbed, Completed)
    assert result.output == undisturbed.output
    assert (world.asked, ran) == (asked, done)
    assert world.output_attempt == (1 if again == 2 else 2)


async def test_emits_that_are_not_awaited_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution_module, "JOURNAL_LIMIT", 20)

    async def code(ctx: AgentContext, _: object) -> object:
        while True:
            ctx.emit("x")

    world = World()
    result = await world.play(code)
    assert isinstance(result, Failed)
    assert (result.type, result.message) == ("LimitExceeded", "more than 20 emits are not awaited: await each one")
    assert world.emitted == []
