"""Replays of recorded tasks: nothing is called again, and a divergence names both sides."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace as changed
from itertools import count
from typing import Any

import pytest

from runtime_core.errors import InvalidInput, LocalStepError, WeftError
from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.events.handlers import NOTHING, DefaultToolHandler
from runtime_core.integrations.aworld.events.message import TopicType
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.tree import decoded
from weft import AgentContext, App
from weft.aworld import (
    EventManager,
    Handler,
    HandlerTable,
    Message,
    TaskMessage,
    ToolMessage,
    run_events,
)


def desk(calls: Counter[str], *, order: str = "search first") -> App:
    """An app that counts its real calls; `order` changes its program."""
    app = App("desk")

    @app.tool
    def search(query: str) -> str:
        calls["search"] += 1
        return f"found {query}"

    @app.agent("writer")
    async def writer(ctx: AgentContext, text: str) -> str:
        calls["writer"] += 1
        ctx.state["written"] = text
        return str(await ctx.step(str.upper, text))

    @app.agent("research")
    async def research(ctx: AgentContext, topic: str) -> list[object]:
        ctx.state["topic"] = topic
        query = topic if order == "search first" else f"{topic}?"
        found = await ctx.gather(ctx.tool(search, query=query), ctx.tool(search, query="more"))
        ctx.state["found"] = found
        await ctx.emit(found[0])
        await ctx.sleep(0)
        answer = await ctx.human("go on?", timeout=0.01, default="yes")
        return [await ctx.agent("writer", found[0]), answer, str(ctx.uuid()), ctx.now().isoformat()]

    @app.agent("failing")
    async def failing(ctx: AgentContext, input: object) -> None:
        await ctx.tool(search, query="x")
        await ctx.agent("writer", 7)

    @app.agent("lost")
    async def lost(ctx: AgentContext, input: object) -> object:
        first = await ctx.gather(ctx.tool("no_such_tool", x=1), ctx.agent("nobody", "hi"), return_exceptions=True)
        return [[error.type for error in first], await ctx.tool(search, query="x")]

    @app.agent("events")
    async def events(ctx: AgentContext, queries: list[str]) -> object:
        manager = EventManager(ctx)

        async def collect(message: Message) -> AsyncIterator[Message]:
            found = manager.context.setdefault("found", [])
            found.append(message.payload)
            if len(found) == len(queries):
                yield TaskMessage(topic=TopicType.FINISHED, payload=found)

        await manager.register("agent", "collector", collect)
        first = [ToolMessage(receiver="search", payload={"query": query}, sender="collector") for query in queries]
        return (await run_events(ctx, first, manager=manager)).value()

    return app


async def recorded(app: App, agent: str, input: object) -> TaskTrajectory:
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit(agent, input, task_id="t-1", session_id="s-1")
        await task.result(timeout=60)
        return await local.recorded("t-1")


async def test_the_code_of_a_task_runs_again_on_its_results_and_calls_nothing() -> None:
    calls: Counter[str] = Counter()
    app = desk(calls)
    trajectory = await recorded(app, "research", "redis")
    calls.clear()
    found = await replay(trajectory, "t-1", app)
    assert found.run.status == "completed"
    assert found.run.same
    assert found.run.emitted == ["found redis"]
    assert found.run.state == {"topic": "redis", "found": ["found redis", "found more"]}
    assert {run.run: run.same for run in found.runs.values()} == {"r": True, "r/5": True}
    assert found.divergences == []
    # The body of a run is called, what it asks for is not: the writer's code ran, the search did not.
    assert calls == Counter({"writer": 1})


async def test_a_replay_sees_the_times_that_the_run_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if every reading of the clock differs: a message has the time of its emission."""
    clock, looks = time.time_ns, count(1)
    monkeypatch.setattr(time, "time_ns", lambda: clock() + next(looks) * 3_000_000)
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9)
    app = App("clock")

    @app.agent("clock")
    async def look(ctx: AgentContext, input: object) -> list[str]:
        seen = []
        await ctx.step(str, 1)
        seen.append(ctx.now().isoformat())
        with contextlib.suppress(LocalStepError):
            await ctx.step(int, "no number")
        seen.append(ctx.now().isoformat())
        await ctx.model("m", {"messages": []}, dict)
        return [*seen, ctx.now().isoformat()]

    replayed = await replay(await recorded(app, "clock", None), "t-1", app)
    assert replayed.run.same, (replayed.run.output, replayed.divergences)


async def test_a_replay_may_stop_at_a_message_and_refuses_an_unknown_step() -> None:
    calls: Counter[str] = Counter()
    app = desk(calls)
    trajectory = await recorded(app, "events", ["a"])
    message = (await replay(trajectory, "t-1", app)).messages[-1]
    stopped = await replay(trajectory, "t-1", app, until=message.id)
    assert message.id.endswith(f"r/{stopped.run.stopped_at}")
    assert stopped.run.status == "stopped"
    for wrong in ("99", "nonsense", "r/9:1", "t-1/r/99", ""):
        with pytest.raises(InvalidInput, match=r"until: .* is not a recorded step"):
            await replay(trajectory, "t-1", app, until=wrong)
    with pytest.raises(InvalidInput, match="speed: "):
        await replay(trajectory, "t-1", app, speed="fast")  # type: ignore[arg-type]  # what a user may give


async def test_a_whole_task_runs_again_in_an_app_of_one_process_and_calls_nothing() -> None:
    calls: Counter[str] = Counter()
    trajectory = await recorded(desk(calls), "research", "redis")
    root = trajectory.steps[0]
    calls.clear()
    local = LocalApp(desk(calls), trajectory=True)
    async with local:
        found = await replay(trajectory, "t-1", local)
        again = await local.recorded("t-1")
    assert found.response is not None
    assert (found.response.task_id, found.response.status) == ("t-1", "completed")
    # With the uuid and the times that it had: they derive from the task's id and its recorded results.
    assert found.response.output == decoded(root.output)
    assert [step.kind for step in again.steps] == ["agent", "fork"], "no step was done again"
    assert calls == Counter({"writer": 1}), "of the replay of the writer's own code"

    other = LocalApp(desk(calls, order="otherwise"))
    async with other as client:
        found = await replay(trajectory, "t-1", other)
        assert (found.run.status, found.response) == ("diverged", None)
        with pytest.raises(InvalidInput, match="no task"):
            await (await client.task("t-1")).show()


async def test_a_replay_stops_before_a_step_and_shows_the_state_then() -> None:
    app = desk(Counter())
    trajectory = await recorded(app, "research", "redis")
    found = await replay(trajectory, "t-1", app, until="1")
    assert (found.run.status, found.run.stopped_at, found.run.state) == ("stopped", "1", {"topic": "redis"})
    found = await replay(trajectory, "t-1", app, until="3")
    assert found.stopped_at == "3"
    assert found.run.emitted == ["found redis"]
    assert found.run.state["found"] == ["found redis", "found more"]
    found = await replay(trajectory, "t-1", app, until="r/5:1")
    assert found.run.status == "completed"
    assert found.runs["r/5"].status == "stopped"


async def test_a_diverging_replay_reports_both_steps() -> None:
    trajectory = await recorded(desk(Counter()), "research", "redis")
    calls: Counter[str] = Counter()
    found = await replay(trajectory, "t-1", desk(calls, order="otherwise"))
    assert found.run.status == "diverged"
    (diverged,) = found.divergences
    assert diverged.line.endswith(" in research")
    assert str(diverged) == (
        f'step 1 of run r ({diverged.line}): the record has ctx.tool("search", query="redis"), '
        'but the code requests ctx.tool("search", query="redis?")'
    )
    assert (diverged.run, diverged.step) == ("r", "1")
    assert "redis" in diverged.recorded
    assert "redis?" in diverged.asked
    assert calls["search"] == 0


async def test_a_failed_task_fails_again_with_the_same_error() -> None:
    calls: Counter[str] = Counter()
    app = desk(calls)
    trajectory = await recorded(app, "failing", None)
    assert trajectory.end is not None
    assert trajectory.end.status == "failed"
    calls.clear()
    found = await replay(trajectory, "t-1", app)
    assert found.run.status == "failed"
    assert found.run.same
    assert calls == Counter()


async def test_unaccepted_calls_are_recorded_and_fail_again_in_a_replay() -> None:
    app = desk(Counter())
    trajectory = await recorded(app, "lost", None)
    assert trajectory.complete
    failed = [(step.run, step.kind, step.name) for step in trajectory.steps if step.status == "failed"]
    assert failed == [("r/1", "tool", "no_such_tool"), ("r/2", "agent", "nobody")]
    found = await replay(trajectory, "t-1", app)
    assert found.run.output == [["UnknownName", "UnknownName"], "found x"]
    assert found.run.same


async def test_messages_are_replayed_in_order_at_the_requested_speed() -> None:
    trajectory = await recorded(desk(Counter()), "events", ["a", "b"])
    spread = [step if step.kind != "message" else _later(step, number) for number, step in enumerate(trajectory.steps)]
    given: list[Message] = []
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    found = await replay(changed(trajectory, steps=spread), "t-1", given.append, speed=2.0, sleep=sleep)
    assert [message.category for message in given] == ["tool", "tool", "agent", "agent", "task"]
    assert [message.payload for message in given][2:] == ["found a", "found b", ["found a", "found b"]]
    assert given == list(found.messages)
    assert waits == [5.0] * 4
    waits.clear()
    await replay(trajectory, "t-1", given.append, sleep=sleep)
    assert waits == []


def _later(step: Any, number: int) -> Any:  # Any: a msgspec Struct, copied
    import msgspec

    told = msgspec.json.decode(bytes(step.input))
    raw = msgspec.Raw(msgspec.json.encode({**told, "timestamp": 1000.0 + 10 * number}))
    return msgspec.structs.replace(step, input=raw)


async def test_messages_end_before_the_one_that_was_named() -> None:
    trajectory = await recorded(desk(Counter()), "events", ["a", "b"])
    given: list[Message] = []
    found = await replay(trajectory, "t-1", given.append)
    last = found.messages[-1]
    given.clear()
    found = await replay(trajectory, "t-1", given.append, until=last.id)
    assert (len(given), found.stopped_at) == (4, last.id)
    with pytest.raises(InvalidInput, match="a message of this task"):
        await replay(trajectory, "t-1", given.append, until="99")


async def test_a_task_without_messages_gives_its_steps_as_messages() -> None:
    trajectory = await recorded(desk(Counter()), "research", "redis")
    given: list[Message] = []
    await replay(trajectory, "t-1", given.append)
    assert Counter(message.category for message in given) == {"tool": 2, "agent": 1, "human": 1, "chunk": 1}
    agent = next(message for message in given if message.category == "agent")
    assert (agent.receiver, agent.payload, agent.headers["result"]) == ("writer", "found redis", "FOUND REDIS")


class Shouting(DefaultToolHandler):
    """Different code that calls the same tools."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        result = await self.call(message.receiver, message.payload)
        await self.ctx.emit("a new side effect, which goes nowhere")
        yield Message(category="shouted", payload=str(result).upper())


class Asking(Handler):
    """Calls a tool that was not recorded."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        await self.ctx.tool("search", query="undelivered of")
        yield message


async def test_handlers_get_the_messages_again_and_recorded_results_for_what_they_ask() -> None:
    calls: Counter[str] = Counter()
    trajectory = await recorded(desk(calls), "events", ["a", "b"])
    calls.clear()
    found = await replay(trajectory, "t-1", HandlerTable({"tool": Shouting, "agent": _Nothing, "task": _Nothing}))
    assert [message.payload for message in found.following] == ["FOUND A", "FOUND B"]
    assert calls == Counter()
    with pytest.raises(WeftError, match="no recorded result"):
        await replay(trajectory, "t-1", HandlerTable({"tool": Asking}))


class _Nothing(Handler):
    async def handle(self, message: Message) -> AsyncIterator[Message]:
        for following in NOTHING:
            yield following


async def test_a_store_or_a_client_may_be_the_source() -> None:
    app = desk(Counter())
    local = LocalApp(app, trajectory=True)
    async with local as client:
        await (await client.submit("events", ["a"], task_id="t-1")).result(timeout=60)
        await local.recorded("t-1")
        assert (await replay(local.trajectories, "t-1", app, namespace="local")).run.same
        assert (await replay(client, "t-1", app)).run.same
        with pytest.raises(InvalidInput, match="nothing is recorded"):
            await replay(client, "t-2", app)
        with pytest.raises(InvalidInput, match="speed"):
            await replay(client, "t-1", app, speed=0)
