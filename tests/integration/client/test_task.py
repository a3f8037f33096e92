"""Usage, limits and streams of tasks as a program sees them, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime_core.bus.connection import Argument, Reply, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.client import client as client_module
from runtime_core.client.client import TaskHandle
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.host.local import LocalApp
from runtime_core.runs.model_step import ModelCall
from tests.servers.process import Server
from weft import AgentContext, App, Client, Reject, StreamEvent, StreamingMode, SubmitOptions, ToolContext
from weft.errors import InvalidInput, Rejected

app = App("meter")


@app.tool(retry=RetryPolicy(attempts=2, base_seconds=0.001))
async def translate(ctx: ToolContext, text: str) -> str:
    ctx.spend(tokens=10, model="small")
    ctx.progress("translating")
    await asyncio.sleep(0)  # the report leaves with the loop's next tick
    if text == "twice" and ctx.attempt == 1:
        raise ValueError("not at the first attempt")
    if text == "never":
        raise Reject("no such language")
    return text


@app.agent("child")
async def child(ctx: AgentContext, tokens: int) -> int:
    await ctx.spend(tokens=tokens, requests=1, cost=0.25, model="large")
    await ctx.sleep(0.001)
    return tokens


@app.agent("worker")
async def worker(ctx: AgentContext, texts: list[str]) -> dict[str, float]:
    await ctx.emit("half")
    await ctx.gather(ctx.agent(child, 100), *(ctx.tool(translate, text=text) for text in texts), return_exceptions=True)
    await ctx.spend(tokens=1)
    used = await ctx.usage()
    await ctx.sleep(0.001)
    await ctx.emit({"done": True})
    return used.amounts


@app.agent("shows")
async def shows(ctx: AgentContext) -> None:
    """Causes each kind of event."""

    async def answer(request: object, call: ModelCall) -> str:
        call.stream("mod")
        return "model"

    await ctx.model("m", "hi", answer)
    await ctx.emit("pie", chunk=True)
    await ctx.emit("whole")
    await ctx.tool(translate, text="once")
    await ctx.human("go on?")


@app.agent("waits")
async def waits(ctx: AgentContext) -> None:
    await ctx.human("go on?")


@app.agent("speaks-last")
async def speaks_last(ctx: AgentContext) -> None:
    await ctx.human("go on?")
    await ctx.emit("last words")


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with LocalApp(app) as connected:
        yield connected


async def forget(task: TaskHandle) -> None:
    """The broker has lost the task with its last writes."""
    await task.bus.transport.call("DEL", task.bus.keys.task(task.task_id))


@pytest.mark.parametrize("submitted", [True, False], ids=["submitted here", "found by its id"])
async def test_nobody_waits_for_the_result_of_a_task_that_the_broker_has_lost(client: Client, submitted: bool) -> None:
    task = await client.submit("waits")
    if not submitted:
        assert task._future is not None
        task._partition.forget(task.task_id, task._future)
        task = await client.task(task.task_id)
    waiting = asyncio.create_task(task.result())
    async with asyncio.timeout(20):
        while task._partition._asked != {task.task_id}:
            await asyncio.sleep(0)
        await task._partition._look_up()
        assert not waiting.done()
        await forget(task)
        with pytest.raises(InvalidInput, match="there is no task"):
            await waiting


async def events_of(task: TaskHandle, mode: StreamingMode | None = None, after: str = "0-0") -> list[StreamEvent]:
    async with asyncio.timeout(60):
        return [event async for event in task.stream(after, mode=mode)]


async def test_a_tree_of_runs_and_calls_is_summed(client: Client) -> None:
    """Attempts of calls that failed are counted as well: their tokens are gone."""
    response = await (await client.submit("worker", ["once", "twice", "never"])).result(timeout=60)
    assert response.usage == {"tokens": 141, "requests": 1, "cost": 0.25}
    assert response.models == {"small": {"tokens": 40}, "large": {"tokens": 100, "requests": 1, "cost": 0.25}}
    assert response.value() == response.usage, "the agent has seen the same sums"


async def test_rows_of_the_trajectory_have_the_usage() -> None:
    local = LocalApp(app, trajectory=True)
    async with local as client:
        task = await client.submit("worker", ["once"])
        await task.result(timeout=60)
        steps = (await local.recorded(task.task_id)).steps
    assert sum(step.usage.get("tokens", 0) for step in steps) == 111


@pytest.mark.parametrize(("limit", "status"), [(111, "completed"), (110, "failed")])
async def test_the_limit_is_for_the_whole_tree(client: Client, limit: int, status: str) -> None:
    response = await (await client.submit("worker", ["once"], options=SubmitOptions(max_tokens=limit))).result(
        timeout=60
    )
    assert response.status == status
    assert response.usage["tokens"] == 111
    if response.error:
        assert response.error == {
            "type": "LimitExceeded",
            "message": "the task has used 111 tokens, over its max_tokens=110",
        }


async def test_a_child_over_the_limit_ends_its_whole_task(client: Client) -> None:
    response = await (await client.submit("worker", [], options=SubmitOptions(max_cost=0.2))).result(timeout=60)
    assert response.error is not None
    assert response.error["type"] == "LimitExceeded"
    assert "0.25 cost, over its max_cost=0.2" in response.error["message"]


async def test_steps_of_a_child_count_for_the_whole_task(client: Client) -> None:
    """The child requests one step too many: that ends its task, whatever its caller does about errors."""
    response = await (await client.submit("worker", [], options=SubmitOptions(max_steps=2))).result(timeout=60)
    assert response.error is not None
    assert (response.error["type"], "max_steps=2" in response.error["message"]) == ("LimitExceeded", True)


async def test_limits_and_usage_of_a_running_task_are_shown(client: Client) -> None:
    task = await client.submit("waits", options=SubmitOptions(max_tokens=5))
    assert (await task.show())["limits"] == {"max_tokens": 5}


@pytest.mark.parametrize("conf", [{"max_tokens": 0}, {"max_cost": -1.0}])
async def test_an_invalid_limit_is_refused(client: Client, conf: dict[str, float]) -> None:
    with pytest.raises((Rejected, InvalidInput), match=next(iter(conf))):
        await client.submit("waits", options=SubmitOptions(**conf))  # type: ignore[arg-type]  # what a program may do wrong


async def test_an_invalid_amount_is_refused() -> None:
    context = ToolContext(task_id="t", run_id="r/1")
    for amounts in ({}, {"tokens": -1}, {"tokens": float("nan")}, {"tokens": True}, {"models": 1}):
        with pytest.raises(InvalidInput, match="spend"):
            context.spend(**amounts)
    assert not context.used()


SHOWN = {
    "a committed step": "weft.step.recorded",
    "a piece of a model's answer": "mod",
    "`ctx.emit(piece, chunk=True)`": "pie",
    "`ctx.emit(value)`": "whole",
    "progress of a call": "translating",
    "a question to a human": "weft.human.requested",
    "the final event": "weft.task.completed",
}
"""Rows of the table in docs/runners.md, and how the events of the agent `shows` are recognized."""


def cells() -> list[tuple[str, str, bool]]:
    """The table in docs/runners.md: an event's row, a mode, and whether the mode shows the event."""
    lines = Path("docs/runners.md").read_text().partition("## Streaming modes")[2].partition("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    head, _, *rows = table
    return [
        (row[0], mode.strip("`"), shown == "yes") for row in rows for mode, shown in zip(head[1:], row[1:], strict=True)
    ]


@pytest.fixture(scope="module")
def seen() -> dict[str, list[StreamEvent]]:
    """What a reader in each mode gets, from a task of its own."""

    async def read() -> dict[str, list[StreamEvent]]:
        found: dict[str, list[StreamEvent]] = {}
        async with LocalApp(app) as client, asyncio.timeout(60):
            for mode in StreamingMode:
                task = await client.submit("shows", stream=mode)
                found[mode.name] = events = []
                async for event in task.stream(mode=mode):
                    events.append(event)
                    if event.type == "weft.human.requested":
                        await task.signal(event.data["request_id"], "yes")
        return found

    return asyncio.run(read())


def test_the_table_of_modes_is_complete() -> None:
    assert {row for row, _, _ in cells()} == set(SHOWN)
    assert {mode for _, mode, _ in cells()} == {mode.name for mode in StreamingMode}
    shown = {mode.name: frozenset(row for row, at, yes in cells() if yes and at == mode.name) for mode in StreamingMode}
    assert len(set(shown.values())) == 5, "no two modes are the same"


@pytest.mark.parametrize(("row", "mode", "shown"), cells())
def test_each_mode_shows_the_documented_events(
    seen: dict[str, list[StreamEvent]], row: str, mode: str, shown: bool
) -> None:
    events = [event for event in seen[mode] if SHOWN[row] in (event.text, event.type)]
    assert bool(events) is shown
    assert seen[mode][-1].response is not None


@pytest.mark.parametrize("mode", [StreamingMode.CORE, StreamingMode.ALL])
async def test_steps_of_all_kinds_are_shown(client: Client, mode: StreamingMode) -> None:
    events = await events_of(await client.submit("worker", ["once"], stream=mode), mode)
    recorded = [event for event in events if event.type == "weft.step.recorded"]
    kinds = [row["kind"] for event in recorded for row in event.data["steps"]]
    assert kinds.count("agent") == 2
    assert {"tool", "timer", "emit", "usage"} <= set(kinds)


async def test_another_client_continues_from_an_entry(client: Client) -> None:
    task = await client.submit("worker", ["once"], stream=StreamingMode.ALL)
    events = await events_of(task)
    middle = len(events) // 2
    again = await client.task(task.task_id)
    assert await events_of(again, after=events[middle].entry_id) == events[middle + 1 :]


@pytest.mark.parametrize("streaming_mode", [None, StreamingMode.ALL])
@pytest.mark.parametrize("end", ["time limit", "cancel", "failure at once"])
async def test_a_stream_ends_however_the_task_does(
    client: Client, end: str, streaming_mode: StreamingMode | None
) -> None:
    """This holds for readers from the start, and for those that come after the end."""
    agent = "worker" if end == "failure at once" else "waits"
    limit = 0.05 if end == "time limit" else None
    value = ["once"] if agent == "worker" else None
    most = 1 if agent == "worker" else None
    task = await client.submit(
        agent, value, stream=streaming_mode or False, options=SubmitOptions(timeout_seconds=limit, max_tokens=most)
    )
    reading = asyncio.create_task(events_of(task, StreamingMode.ALL))
    if end == "cancel":
        await task.cancel()
    last = (await reading)[-1].type
    assert last == ("weft.task.cancelled" if end == "cancel" else "weft.task.failed")
    assert (await events_of(task, StreamingMode.OUTPUT))[-1].type == last


async def test_output_written_after_an_empty_read_is_read_before_the_end(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task ends between a read that found nothing and the reader's look at the task's status."""
    task = await client.submit("speaks-last", stream=StreamingMode.CHUNK)
    reader = await client.open_reader(client.buses[0])
    read = reader.blocking
    reads = 0

    async def too_early(*arguments: Argument) -> Reply:
        nonlocal reads
        reads += 1
        if reads != 2:
            return await read(*arguments)
        (question,) = (await task.show())["questions"]
        await task.signal(question["request_id"], "yes")
        await task.result(timeout=60)
        return None

    async def opened(_bus: EventBus) -> Transport:
        return reader

    monkeypatch.setattr(reader, "blocking", too_early)
    monkeypatch.setattr(client, "open_reader", opened)
    events = await events_of(task)
    assert [event.text or event.type for event in events] == [
        "weft.human.requested",
        "last words",
        "weft.task.completed",
    ]


async def test_a_submit_that_waits_for_the_first_handler_is_in_the_log_and_ends(
    valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "HINT_SECONDS", 0.0)
    why = "no agent-handler has published its agents yet: start one, as `weft up` does"
    async with Client.connect(valkey.url, namespace=namespace) as connected:
        with pytest.raises(Rejected, match=f"^data.agent: {why}"):
            await connected.submit("echo", "x", task_id="t-1", timeout=0.5)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"task t-1 waits at most 0.5 s in namespace {namespace!r}: {why}"]
