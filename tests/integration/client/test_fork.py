"""Forks: a new task that starts with another's results, in one process."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from runtime_core.bus.deliveries import pairs
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.runs.hooks.declared import Change, Deny, HookEvent
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.trajectory.tree import render
from runtime_core.wire.commands import SUBMIT, parse_submit
from runtime_core.wire.envelope import Envelope
from weft import AgentContext, App, Client, SubmitOptions, TaskHandle


def desk(calls: Counter[str]) -> App:
    """An app that counts its real effects."""
    app = App("desk")

    @app.tool
    def search(query: str) -> str:
        calls[f"search {query}"] += 1
        return f"found {query}"

    @app.tool
    def rank(found: list[str]) -> str:
        calls["rank"] += 1
        return " > ".join(found)

    @app.agent("writer")
    async def writer(ctx: AgentContext, text: str) -> str:
        calls[f"write {text}"] += 1
        return f"written {text}"

    @app.agent("research")
    async def research(ctx: AgentContext, topic: str) -> str:
        async def one(part: str) -> str:
            found = await ctx.tool(search, query=f"{topic}/{part}")
            await ctx.step(calls.update, [f"noted {part}"], name="note")
            return str(found)

        parts = await ctx.gather(one("a"), one("b"))
        best = await ctx.tool(rank, found=parts)
        await ctx.emit(best)
        return str(await ctx.agent("writer", best))

    @app.agent("asking")
    async def asking(ctx: AgentContext, input: object) -> object:
        first = await ctx.tool(search, query="x")
        answer = await ctx.human("which?")
        return [first, answer, dict(ctx.metadata), ctx.session_id, ctx.tenant]

    return app


async def ended(local: LocalApp, client: Client, agent: str, input: object, task_id: str) -> None:
    task = await client.submit(agent, input, task_id=task_id)
    await task.result(timeout=60)
    await local.recorded(task_id)


async def test_a_fork_reuses_results_before_its_step_and_continues_live() -> None:
    calls: Counter[str] = Counter()
    local = LocalApp(desk(calls), trajectory=True)
    async with local as client:
        await ended(local, client, "research", "redis", "t-1")
        done = calls.copy()
        fork = await client.fork("t-1", at="2", input="a better order", task_id="f-1", store=local.trajectories)
        assert (await fork.result(timeout=60)).value() == "written a better order"
        assert calls - done == Counter({"write a better order": 1})
        recorded = await local.recorded("f-1")
    assert recorded.complete
    row = recorded.steps[1]
    told = {"task": "t-1", "step": "2", "result": "a better order"}
    assert (row.kind, row.name, json.loads(bytes(row.input))) == ("fork", "t-1", told)
    # What was taken over is not copied: only what the fork did itself is on its record.
    assert Counter(step.kind for step in recorded.steps) == {"agent": 2, "fork": 1, "emit": 1}
    assert "fork of t-1 at 2" in render(recorded)
    # The steps before are the origin's.
    assert Counter(step.kind for step in recorded.inherited) == {"tool": 2, "step": 2}


async def test_a_fork_can_be_replayed_and_forked_again() -> None:
    calls: Counter[str] = Counter()
    app = desk(calls)
    local = LocalApp(app, trajectory=True)
    async with local as client:
        await ended(local, client, "research", "redis", "t-1")
        fork = await client.fork("t-1", at="2", input="short", task_id="f-1", store=local.trajectories)
        await fork.result(timeout=60)
        await local.recorded("f-1")
        done = calls.copy()
        replayed = await replay(local.trajectories, "f-1", app, namespace="local")
        assert (replayed.run.status, replayed.run.output, replayed.run.same) == ("completed", "written short", True)
        again = await client.fork("f-1", at="3", input="shorter", store=local.trajectories)
        assert (await again.result(timeout=60)).value() == "shorter"
    assert calls - done == Counter({"write short": 1}), "of the replay: the writer's own code"


async def test_a_fork_inside_a_parallel_branch_runs_the_later_branches_again() -> None:
    calls: Counter[str] = Counter()
    local = LocalApp(desk(calls), trajectory=True)
    async with local as client:
        await ended(local, client, "research", "redis", "t-1")
        done = calls.copy()
        fork = await client.fork("t-1", at="1.1.1", input="other b", store=local.trajectories)
        response = await fork.result(timeout=60)
        assert response.value() == "written found redis/a > other b"
        assert calls - done == Counter({"noted b": 1, "rank": 1, "write found redis/a > other b": 1})


def nested(calls: Counter[str], broken: list[str]) -> App:
    """An app whose agents call each other, and count what they do."""
    app = App("nested")

    @app.tool(retry=RetryPolicy(attempts=1))
    def work(name: str) -> str:
        calls[name] += 1
        if name in broken:
            raise ValueError(name)
        return name.upper()

    @app.agent("inner", retry=RetryPolicy(attempts=1))
    async def inner(ctx: AgentContext, text: str) -> list[str]:
        first = await ctx.tool(work, name=f"{text} 1")
        return [first, await ctx.tool(work, name=f"{text} 2")]

    @app.agent("middle", retry=RetryPolicy(attempts=1))
    async def middle(ctx: AgentContext, text: str) -> list[str]:
        before = await ctx.tool(work, name="middle")
        if text == "asks":
            await ctx.human("well?")
        found: list[str] = await ctx.agent("inner", text)
        return [before, *found]

    @app.agent("outer", retry=RetryPolicy(attempts=1))
    async def outer(ctx: AgentContext, text: str) -> list[str]:
        await ctx.tool(work, name="outer")
        found: list[list[str]] = await ctx.gather(ctx.agent("middle", text), ctx.tool(work, name="beside"))
        return [*found[0], await ctx.tool(work, name="last")]

    return app


async def test_a_fork_inside_an_agent_that_failed_repeats_none_of_its_steps() -> None:
    calls: Counter[str] = Counter()
    broken = ["x 2"]
    local = LocalApp(nested(calls, broken), trajectory=True)
    async with local as client:
        await ended(local, client, "outer", "x", "t-1")
        broken.clear()
        # The second step of the agent that the agent of step 2 called at its step 2.
        fork = await client.fork("t-1", at="2/2/2", store=local.trajectories)
        response = await fork.result(timeout=60)
        assert response.output == ["MIDDLE", "X 1", "X 2", "LAST"]
        recorded = await local.recorded(fork.task_id)
        again = await client.fork(fork.task_id, at="2/2/2", store=local.trajectories)
        assert (await again.result(timeout=60)).output == response.output
        replaced = await client.fork("t-1", at="2/2/2", input="given", store=local.trajectories)
        assert (await replaced.result(timeout=60)).output == ["MIDDLE", "X 1", "given", "LAST"]
        for wrong in ("1/1", "2/9", "2/2/9", "2/", "a/1"):
            with pytest.raises(InvalidInput, match=r"^at: "):
                await client.fork("t-1", at=wrong, store=local.trajectories)
    assert (calls["outer"], calls["middle"], calls["x 1"], calls["x 2"]) == (1, 1, 1, 3)
    assert {(row.run, row.step) for row in recorded.inherited} >= {("r/1", ""), ("r/2/1", ""), ("r/2/2/1", "")}


async def test_a_fork_after_an_agent_that_has_not_ended_repeats_none_of_its_steps() -> None:
    calls: Counter[str] = Counter()
    local = LocalApp(nested(calls, []), trajectory=True)
    async with local as client:
        origin = await client.submit("outer", "asks", task_id="t-1", stream=True)
        async for event in origin.stream():
            if event.type == "weft.human.requested":
                break
        fork = await client.fork("t-1", at="4", stream=True)
        async for event in fork.stream():
            if event.type == "weft.human.requested":
                await event.answer("yes")
        await origin.cancel()
        assert (await fork.result(timeout=60)).output == ["MIDDLE", "ASKS 1", "ASKS 2", "LAST"]
    assert (calls["outer"], calls["middle"], calls["asks 1"]) == (1, 1, 1)


async def test_a_fork_without_a_step_starts_over_with_another_input() -> None:
    calls: Counter[str] = Counter()
    local = LocalApp(desk(calls), trajectory=True)
    async with local as client:
        await ended(local, client, "research", "redis", "t-1")
        fork = await client.fork("t-1", input="valkey", store=local.trajectories)
        assert (await fork.result(timeout=60)).value() == "written found valkey/a > found valkey/b"
    assert calls["search valkey/a"] == 1


async def test_a_fork_of_an_ended_task_finds_its_results_on_the_record_stream_without_a_store() -> None:
    calls: Counter[str] = Counter()
    async with LocalApp(desk(calls)) as client:
        await (await client.submit("research", "redis", task_id="t-1")).result(timeout=60)
        fork = await client.fork("t-1", at="2", input="short")
        assert (await fork.result(timeout=60)).value() == "written short"
    assert calls["rank"] == 1


class _Behind(TrajectoryStore):
    """A store that the recorder has not reached yet; the task ends while it is read."""

    def __init__(self, task: TaskHandle) -> None:
        self._task = task
        self._answered = False

    async def task(self, namespace: str, task: str, /) -> TaskTrajectory | None:
        if not self._answered:
            self._answered = True
            async for event in self._task.stream():
                if event.type == "weft.human.requested":
                    await self._task.signal(event.data["request_id"], "right")
        return TaskTrajectory(namespace, task, None, [])


async def test_a_fork_takes_the_last_results_from_the_broker_if_the_store_lacks_them() -> None:
    calls: Counter[str] = Counter()
    async with LocalApp(desk(calls)) as client:
        task = await client.submit("asking", None, task_id="t-1", stream=True)
        fork = await client.fork("t-1", at="3", store=_Behind(task))
        assert (await fork.result(timeout=60)).value()[:2] == ["found x", "right"]
    assert calls["search x"] == 1


class _CatchesUp(_Behind):
    """A store that the recorder reaches while the fork is planned."""

    def __init__(self, task: TaskHandle, local: LocalApp) -> None:
        super().__init__(task)
        self._local = local

    async def task(self, namespace: str, task: str, /) -> TaskTrajectory | None:
        if self._answered:
            return await self._local.trajectories.task(namespace, task)
        found = await super().task(namespace, task)
        await self._local.recorded(task)
        bus = self._task.bus
        await bus.transport.call("XTRIM", bus.keys.record, "MAXLEN", 0)
        return found


async def test_a_fork_finds_rows_that_move_to_the_store_meanwhile() -> None:
    calls: Counter[str] = Counter()
    local = LocalApp(desk(calls), trajectory=True)
    async with local as client:
        task = await client.submit("asking", None, task_id="t-1", stream=True)
        fork = await client.fork("t-1", at="3", store=_CatchesUp(task, local))
        assert (await fork.result(timeout=60)).value()[:2] == ["found x", "right"]
    assert calls["search x"] == 1


async def test_a_fork_of_a_waiting_task_copies_its_journal_and_metadata() -> None:
    calls: Counter[str] = Counter()
    async with LocalApp(desk(calls)) as client:
        data = b'{"agent":"asking","input":null,"session_id":"s-1","metadata":{"n":1}}'
        task = await client.start(parse_submit(Envelope(id="t-1", type=SUBMIT, tenant="acme", data=data)))
        async for event in task.stream():
            if event.type == "weft.human.requested":
                asked = event.data["request_id"]
                break
        fork = await client.fork("t-1", at="2", task_id="f-1")
        async for event in fork.stream():
            if event.type == "weft.human.requested":
                assert (await fork.show())["forked_from"] == {"task": "t-1", "step": "2"}
                await fork.signal(event.data["request_id"], "left")
        await task.signal(asked, "right")
        assert (await fork.result(timeout=60)).value() == ["found x", "left", {"n": 1}, "s-1", "acme"]
        assert (await task.result(timeout=60)).value() == ["found x", "right", {"n": 1}, "s-1", "acme"]
    assert calls["search x"] == 1


async def test_a_result_that_no_longer_fits_is_a_divergence() -> None:
    """The program has changed since: it performs a step of its own where it called a tool."""
    changed = False
    app = App("changing")

    @app.tool
    def search(query: str) -> str:
        return query

    @app.agent("changing")
    async def changing(ctx: AgentContext, query: str) -> object:
        if not changed:
            return await ctx.tool(search, query=query)
        return await ctx.step(lambda: "another", name="another")

    local = LocalApp(app, trajectory=True)
    async with local as client:
        await ended(local, client, "changing", "x", "t-1")
        changed = True
        await client.fork("t-1", at="2", task_id="f-1", store=local.trajectories)
        letter = await dead_letter(client)
        assert letter["reason"] == "diverged"
        assert "step 1 of run r" in letter["error"]


async def dead_letter(client: Client) -> dict[str, str]:
    """The first dead letter, once there is one."""
    bus = client.buses[0]
    async with asyncio.timeout(60):
        while not (found := pairs(await bus.transport.call("XRANGE", bus.keys.dead, "-", "+"))):
            await asyncio.sleep(0.01)
    fields = [field.decode() for field in found[0][1]]
    return dict(zip(fields[::2], fields[1::2], strict=True))


async def test_a_repeated_fork_starts_nothing_and_another_under_its_id_is_refused() -> None:
    calls: Counter[str] = Counter()
    local = LocalApp(desk(calls), trajectory=True)
    async with local as client:
        await ended(local, client, "research", "redis", "t-1")
        for _ in range(2):
            fork = await client.fork("t-1", at="2", input="short", task_id="f-1", store=local.trajectories)
            assert (await fork.result(timeout=60)).value() == "written short"
        assert calls["write short"] == 1
        with pytest.raises(Rejected, match="different content"):
            await client.fork("t-1", at="2", input="long", task_id="f-1", store=local.trajectories)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"at": "two"}, "at"),
        ({"at": "r/"}, "at"),
        ({"at": "r/r/2"}, "at"),
        ({"at": "9", "input": 1}, "at"),
        ({"at": "99"}, "at"),
        ({"task_id": "no/id"}, "data.task_id"),
    ],
)
async def test_an_impossible_fork_is_refused_by_its_field(more: dict[str, Any], field: str) -> None:
    async with LocalApp(desk(Counter())) as client:
        await (await client.submit("research", "redis", task_id="t-1")).result(timeout=60)
        with pytest.raises(InvalidInput) as error:
            await client.fork("t-1", **more)
        assert error.value.field == field
        with pytest.raises(InvalidInput) as error:
            await client.fork("t-unknown")
        assert error.value.field == "task_id"


def guarded(calls: Counter[str]) -> App:
    """An app with a hook that the task names and one that guards all tools."""
    app = App("guarded")

    @app.tool
    def search(query: str) -> str:
        calls[f"search {query}"] += 1
        return f"found {query}"

    @app.hook("before_tool_call", always=True, guard=True)
    async def no_secrets(event: HookEvent) -> object:
        calls["guard"] += 1
        return Deny("secret") if event.payload["query"] == "secret" else None

    @app.hook("after_tool_call")
    async def loud(event: HookEvent) -> object:
        calls["loud"] += 1
        return Change(str(event.payload).upper())

    @app.agent("looking")
    async def looking(ctx: AgentContext, queries: list[str]) -> list[object]:
        return [await ctx.tool(search, query=query) for query in queries]

    return app


async def test_a_fork_and_a_replay_have_the_hooks_of_the_origin() -> None:
    calls: Counter[str] = Counter()
    app = guarded(calls)
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit(
            "looking", ["a", "b"], task_id="t-1", options=SubmitOptions(hooks={"after_tool_call": ["loud"]})
        )
        assert (await task.result(timeout=60)).value() == ["FOUND A", "FOUND B"]
        await local.recorded("t-1")
        done = calls.copy()
        replayed = await replay(local.trajectories, "t-1", app, namespace="local")
        assert (replayed.run.same, calls) == (True, done)
        fork = await client.fork("t-1", at="2.0.1", store=local.trajectories)
        assert (await fork.result(timeout=60)).value() == ["FOUND A", "FOUND B"]
        assert calls - done == Counter({"search b": 1, "guard": 1, "loud": 1}), "the second call, and what is around it"


async def test_a_fork_keeps_to_the_path_that_the_origin_took_before_its_step() -> None:
    """The marks of patches before the step are copied, so that the copied steps are where the code looks for them."""
    calls: Counter[str] = Counter()
    app = desk(calls)

    @app.agent("changing")
    async def changing(ctx: AgentContext, topic: str) -> list[object]:
        taken = ctx.patched("more")
        if taken:
            await ctx.tool("search", query="more")
        first = await ctx.tool("search", query=topic)
        late = ctx.patched("late")
        return [taken, late, await ctx.tool("rank", found=[first])]

    local = LocalApp(app, trajectory=True)
    async with local as client:
        await ended(local, client, "changing", "redis", "t-1")
        fork = await client.fork("t-1", at="3", task_id="t-2", store=local.trajectories)
        assert (await fork.result(timeout=60)).output == [True, True, "found redis"]
        assert calls == Counter({"search more": 1, "search redis": 1, "rank": 2})
        journal = (await local.recorded("t-2")).steps
    assert [step.step for step in journal if step.kind == "patch"] == []


async def test_a_fork_emits_only_what_follows_its_step() -> None:
    app = App("streams")

    @app.tool
    def search() -> str:
        return "found"

    @app.agent("writer")
    async def writer(ctx: AgentContext, input: object) -> None:
        async def part(name: str) -> None:
            await ctx.emit(f"{name}0 ")
            await ctx.emit(f"{name}1 ")

        for number in range(3):
            await ctx.emit(f"{number} ")
        await ctx.gather(part("a"), part("b"))
        await ctx.tool(search)
        for number in range(3, 6):
            await ctx.emit(f"{number} ")

    local = LocalApp(app, trajectory=True)
    async with local as client:
        await ended(local, client, "writer", None, "t-1")

        async def output_of(at: str) -> list[str]:
            fork = await client.fork("t-1", at=at, store=local.trajectories, stream=True)
            return [event.text async for event in fork.stream() if event.type == "weft.output.delta"]

        assert await output_of("2") == ["3 ", "4 ", "5 "]
        assert await output_of("3") == []
        assert await output_of("1.1") == ["b0 ", "b1 ", "3 ", "4 ", "5 "]
        assert await output_of("1.1.1") == ["3 ", "4 ", "5 "]
        with pytest.raises(InvalidInput, match="Output, such as 3e1, is not a step"):
            await client.fork("t-1", at="2e4", input="other", store=local.trajectories)
