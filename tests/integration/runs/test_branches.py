"""Background work of a run and messages that outlive it; a cancel reaches everything of its task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from runtime_core.client.client import TaskHandle
from runtime_core.declare.declaration import Agent
from runtime_core.host.local import LocalApp
from runtime_core.runs import turn
from runtime_core.runs.definition import handles
from runtime_core.state_manager.dead_letters import DeadLetters
from weft import AgentContext, App, Client, SubmitOptions, ToolContext
from weft.aworld import Swarm
from weft.errors import StepError

app = App("background")


class Signals:
    """Events of the work under test, for the test to wait on."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.stopped: asyncio.Queue[str] = asyncio.Queue()


signals: Signals


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    global signals
    signals = Signals()
    async with asyncio.timeout(60), LocalApp(app) as connected:
        yield connected


async def endless(name: str) -> None:
    signals.begun.put_nowait(name)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        signals.stopped.put_nowait(name)
        raise


@app.tool
async def forever(ctx: ToolContext, name: str) -> None:
    await endless(name)


@app.tool
async def shout(text: str) -> str:
    return text.upper()


@app.agent("child")
async def child(ctx: AgentContext, name: str) -> None:
    await ctx.step(endless, name)


class Keyed(Agent):
    """Has one instance for each key."""

    @handles(str)
    async def on_text(self, text: str, ctx: AgentContext) -> str:
        if text == "forever":
            await ctx.tool(forever, name="tool of a keyed child")
        return text


app.add_agent("keyed", Keyed)


@app.agent("joins")
async def joins(ctx: AgentContext, text: str) -> list[Any]:
    job = ctx.background(ctx.tool(shout, text=text))
    asked = ctx.background(ctx.agent("keyed", text, key="k"))
    await ctx.sleep(0.001)
    return [await job, await asked]


@app.agent("leaves")
async def leaves(ctx: AgentContext, text: str) -> str:
    async def work() -> None:
        await ctx.emit(await ctx.tool(shout, text=text))

    ctx.background(work())
    return "at once"


@app.agent("sends")
async def sends(ctx: AgentContext, text: str) -> str:
    return await ctx.send("joins", text)


@app.agent("everything")
async def everything(ctx: AgentContext, _: None) -> None:
    async def work() -> None:
        await ctx.sleep(0.001)
        await ctx.tool(forever, name="job")

    ctx.background(work())
    ctx.background(ctx.tool(forever, name="tool of a job"))
    ctx.background(ctx.agent("child", "child of a job"))
    ctx.background(ctx.agent("keyed", "forever", key="k"))
    await ctx.tool(forever, name="tool")


async def test_a_job_returns_its_result_later(client: Client) -> None:
    task = await client.submit("joins", "hi")
    assert (await task.result()).value() == ["HI", "hi"]


async def test_a_task_ends_after_its_jobs(client: Client) -> None:
    task = await client.submit("leaves", "hi", stream=True)
    events = [event async for event in task.stream()]
    assert [event.text for event in events[:-1]] == ["HI"]
    assert (await task.result()).value() == "at once"


async def test_a_message_outlives_the_run_and_is_found_by_its_id(client: Client) -> None:
    sent = (await (await client.submit("sends", "hi")).result()).value()
    assert (await (await client.task(sent)).result()).value() == ["HI", "hi"]


async def test_a_cancel_reaches_jobs_tools_and_children(client: Client) -> None:
    task = await client.submit("everything")
    names = {await signals.begun.get() for _ in range(5)}
    assert names == {"job", "tool of a job", "child of a job", "tool of a keyed child", "tool"}
    assert await task.cancel() == "cancelled"
    assert {await signals.stopped.get() for _ in range(5)} == names
    await _free(client, "k")


@app.agent("cancels")
async def cancels(ctx: AgentContext, awaits: bool) -> str:
    async def work() -> None:
        await ctx.gather(
            ctx.tool(forever, name="tool of a job"),
            ctx.agent("child", "child of a job"),
            ctx.agent("keyed", "forever", key="k"),
        )

    job, given = ctx.background(work()), ctx.background(ctx.tool(forever, name="tool"))
    await ctx.human("cancel them?")
    if awaits:
        assert await job.cancel()
        assert await given.cancel()
    else:
        job.cancel()
        given.cancel()
    return str(await ctx.human("end?"))


@pytest.mark.parametrize("awaits", [True, False])
async def test_a_cancelled_job_stops_its_running_calls(client: Client, awaits: bool) -> None:
    """Its task goes on."""
    task = await client.submit("cancels", awaits, stream=True)
    questions = (event async for event in task.stream() if event.type == "weft.human.requested")
    names = {await signals.begun.get() for _ in range(4)}
    assert names == {"tool of a job", "child of a job", "tool of a keyed child", "tool"}
    await (await anext(questions)).answer(True)
    last = await anext(questions)
    assert {await signals.stopped.get() for _ in range(4)} == names
    await _free(client, "k")
    await last.answer("well")
    assert (await task.result()).value() == "well"


@app.agent("limits")
async def limits(ctx: AgentContext, seconds: float) -> list[str]:
    async def work() -> object:
        await ctx.sleep(0.001)
        return await ctx.gather(ctx.tool(forever, name="tool"), ctx.agent("child", "child"))

    try:
        await ctx.wait_for(work(), seconds)
    except TimeoutError as error:
        # A step that needs no limit follows, within one.
        return [str(error), await ctx.wait_for(ctx.tool(shout, text="in time"), 60)]
    return []


async def test_a_wait_with_a_limit_stops_its_calls(client: Client) -> None:
    task = await client.submit("limits", 0.3)
    names = {await signals.begun.get() for _ in range(2)}
    assert {await signals.stopped.get() for _ in range(2)} == names == {"tool", "child"}
    assert (await task.result()).value() == ["limits.<locals>.work took longer than 0.3 s", "IN TIME"]


attempts: list[str] = []


@app.agent("groups")
async def groups(ctx: AgentContext, how: str) -> None:
    await ctx.tool(shout, text="before")
    attempts.append(how)
    if how == "TaskGroup":
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.tool(shout, text="inside"))  # type: ignore[arg-type]  # the mistake that is meant
    elif how == "gather":
        await asyncio.gather(ctx.tool(shout, text="one"), ctx.tool(shout, text="two"))
    elif how == "wait_for":
        await asyncio.wait_for(ctx.sleep(0.3), 0.05)
    else:
        async with asyncio.timeout(0.05):
            await ctx.sleep(0.3)


@pytest.mark.parametrize("how", ["TaskGroup", "gather", "wait_for", "timeout"])
async def test_tasks_and_limits_of_asyncio_are_refused_at_once(client: Client, how: str) -> None:
    attempts.clear()
    end = await (await client.submit("groups", how)).result()
    assert end.error is not None
    assert (end.status, end.error["type"]) == ("failed", "WeftError")
    assert "ctx.wait_for" in end.error["message"]
    assert attempts == [how]


@app.agent("leaves_a_job")
async def leaves_a_job(ctx: AgentContext, _: None) -> None:
    ctx.background(ctx.tool(forever, name="tool"), at_end="cancel")
    await ctx.human("end?")


@app.agent("calls")
async def calls(ctx: AgentContext, name: str) -> str:
    await ctx.agent(name)
    return str(await ctx.human("end?"))


async def test_a_job_that_ends_with_its_run_stops_its_running_call(client: Client) -> None:
    for name in ("leaves_a_job", "calls"):
        task = await client.submit(name, None if name != "calls" else "leaves_a_job", stream=True)
        questions = (event async for event in task.stream() if event.type == "weft.human.requested")
        assert await signals.begun.get() == "tool"
        await (await anext(questions)).answer(True)
        assert await signals.stopped.get() == "tool"
        await task.cancel()


async def test_a_time_limit_stops_jobs_tools_and_children(client: Client) -> None:
    task: TaskHandle = await client.submit("everything", options=SubmitOptions(timeout_seconds=0.5))
    response = await task.result()
    assert response.error is not None
    assert response.error["type"] == "TimeLimit"
    begun = {signals.begun.get_nowait() for _ in range(signals.begun.qsize())}
    assert {await signals.stopped.get() for _ in range(len(begun))} == begun
    await _free(client, "k")


async def _free(client: Client, key: str) -> None:
    """The instance that worked for the task takes the next event."""
    assert (await (await client.submit("keyed", "next", key=key)).result()).value() == "next"


@pytest.mark.parametrize("agent", ["asks-itself", "asks-swarm"])
async def test_agents_that_call_one_another_endlessly_end_their_task(
    agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "NESTED_LIMIT", 20)
    app, deepest = App("endless"), 0

    @app.agent("asks-itself")
    async def asks_itself(ctx: AgentContext, depth: int) -> int:
        nonlocal deepest
        deepest = depth
        try:
            return int(await ctx.agent("asks-itself", depth + 1))
        except StepError:
            return depth  # whoever catches it gets no result either: the task has ended

    @app.agent("asks-swarm")
    async def asks_swarm(ctx: AgentContext, depth: int) -> int:
        nonlocal deepest
        deepest = depth
        return int(await ctx.agent("swarm", depth + 1))

    app.add_swarm("swarm", Swarm("asks-swarm"))
    async with LocalApp(app) as client:
        task = await client.submit(agent, 0)
        response = await task.result(timeout=60)
        assert await DeadLetters(client.buses).count() == 0
        again = await (await client.submit(agent, 0)).result(timeout=60)
    assert response.error is not None
    assert response.error["type"] == "LimitExceeded"
    assert response.error["message"].startswith("more than 20 agents wait inside one another, the last one for '")
    assert again.error == response.error
    assert deepest == (19 if agent == "asks-itself" else 9)
