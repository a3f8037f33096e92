"""Limits of agents and tools by key, in one process: `Limit`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from runtime_core.client.task_view import describe_wait, read_task
from runtime_core.host.local import LocalApp
from weft import AgentContext, App, Client, Limit, RetryPolicy, SubmitOptions, TaskHandle, ToolContext

QUICK = RetryPolicy(attempts=3, base_seconds=0.01)
app = App("limits")
ORDER: list[str] = []


class Gauge:
    """How much runs now, and the most that ran at the same time, by key."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    @contextmanager
    def count(self, key: str) -> Iterator[None]:
        self.now[key] += 1
        self.most[key] = max(self.most[key], self.now[key])
        try:
            yield
        finally:
            self.now[key] -= 1


RUNNING = Gauge()


@pytest.fixture(autouse=True)
def fresh() -> None:
    RUNNING.now.clear()
    RUNNING.most.clear()
    ORDER.clear()


@app.agent("sync", limit=Limit(per="tenant", running=2))
async def sync(ctx: AgentContext, name: str) -> str:
    with RUNNING.count(name[0]):
        await ctx.sleep(0.03)
    return name


@app.agent("alone", limit=Limit(running=1))
async def alone(ctx: AgentContext, name: str) -> str:
    ORDER.append(name)
    if name == "asks":
        await ctx.human("well?")
    if name == "itself":
        return str(await ctx.agent("alone", "inner"))
    return name


@app.agent("secret", limit=Limit(per="input.token", running=1))
async def secret(ctx: AgentContext, account: dict[str, str]) -> None:
    await ctx.human("well?")


@app.agent("index", limit=Limit(per="input.document", debounce=0.2))
async def index(ctx: AgentContext, change: dict[str, str]) -> str:
    ORDER.append(change["text"])
    return change["text"]


@app.agent("preview", limit=Limit(per="key", running=1, replaces="waiting"))
async def preview(ctx: AgentContext, text: str) -> str:
    ORDER.append(text)
    if text == "first":
        await ctx.human("well?")
    return text


@app.agent("only", limit=Limit(running=1, replaces="running"))
async def only(ctx: AgentContext, wait: bool) -> str:
    if wait:
        await ctx.human("well?")
    return "done"


@app.tool(retry=QUICK, limit=Limit(per="input.account.key", running=1))
async def fetch(account: dict[str, str], fails: int) -> str:
    with RUNNING.count(account["key"]):
        await asyncio.sleep(0.01)
    if fails and RUNNING.most["attempts"] < fails:
        RUNNING.most["attempts"] += 1
        raise RuntimeError("not yet")
    return account["key"]


@app.agent("newest", interleave=True, limit=Limit(per="key", running=1, replaces="running"))
async def newest(ctx: AgentContext, text: str) -> str:
    if text != "last":
        await ctx.human("well?")
    return text


@app.agent("away", limit=Limit(per="tenant", running=1))
async def away(ctx: AgentContext, text: str) -> str:
    async with ctx.released():
        await ctx.receive("go")
    if text == "first":
        text = str(await ctx.agent("away", "second", key="l"))
    return text


@app.tool(limit=[Limit(per="input.api_key", rate=30, seconds=60), Limit(running=100)])
async def search(ctx: ToolContext, query: str, api_key: str) -> list[str]:
    return [query]


@app.agent("searches")
async def searches(ctx: AgentContext, keys: list[str]) -> None:
    await ctx.gather(*(ctx.tool(search, str(number), api_key=key) for number, key in enumerate(keys)))


@app.tool(limit=Limit(rate=2, seconds=0.5))
def stamp() -> float:
    return time.monotonic()


@app.agent("caller")
async def caller(ctx: AgentContext, keys: list[str]) -> list[object]:
    return list(await ctx.gather(*(ctx.tool(fetch, account={"key": key}, fails=int(key == "f")) for key in keys)))


@app.agent("stamps")
async def stamps(ctx: AgentContext, count: int) -> list[float]:
    return sorted(await ctx.gather(*(ctx.tool(stamp) for _ in range(count))))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with asyncio.timeout(60), LocalApp(app) as connected:
        yield connected


async def question(task: TaskHandle) -> str:
    async for event in task.stream():
        if event.type == "weft.human.requested":
            return str(event.data["request_id"])
    raise AssertionError("it asked nothing")


async def test_an_agent_runs_for_each_tenant_as_often_as_it_may(client: Client) -> None:
    tasks = [
        await client.submit("sync", f"{tenant}{number}", options=SubmitOptions(tenant=tenant))
        for number in range(6)
        for tenant in ("a", "b")
    ]
    assert len({(await task.result()).output for task in tasks}) == 12
    assert RUNNING.most == {"a": 2, "b": 2}


async def test_calls_of_a_tool_are_limited_by_an_argument(client: Client) -> None:
    task = await client.submit("caller", ["x", "y", "f"] * 4)
    assert (await task.result()).output == ["x", "y", "f"] * 4
    assert {key: RUNNING.most[key] for key in "xyf"} == {"x": 1, "y": 1, "f": 1}


async def test_no_more_calls_start_in_a_window_than_the_rate(client: Client) -> None:
    times = (await (await client.submit("stamps", 5)).result()).output
    # A call that a busy machine delays after its start makes the gap to the next one shorter.
    assert times[2] - times[0] > 0.3
    assert times[4] - times[2] > 0.3


async def test_a_run_that_calls_its_own_agent_does_not_wait_for_itself(client: Client) -> None:
    assert (await (await client.submit("alone", "itself")).result()).output == "inner"


async def waits(task: TaskHandle) -> dict[str, object]:
    """Return the first thing that a task waits for."""
    async with asyncio.timeout(10):
        while True:
            view = await read_task(task.bus, task.task_id) or {}
            if found := view.get("waits_for"):
                return dict(found[0])
            await asyncio.sleep(0.01)


async def test_a_waiting_task_names_its_limit_and_starts_by_priority(client: Client) -> None:
    first = await client.submit("alone", "asks")
    asked = await question(first)
    low = await client.submit("alone", "low", options=SubmitOptions(priority=1))
    high = await client.submit("alone", "high", options=SubmitOptions(priority=9))
    for task in (low, high):
        wait = await waits(task)
        assert (wait["limit"], wait["name"], wait["run"]) == ("agent:alone||", "alone", "r")
        now = float(str(wait["since"])) + 1500
        assert describe_wait(wait, now) == "agent alone, for 2 s, for a slot of its limit for all"
    await first.signal(asked, "yes")
    await asyncio.gather(low.result(), high.result())
    assert ORDER[-2:] == ["high", "low"]


async def test_the_last_change_of_a_document_is_indexed_after_a_quiet_time(client: Client) -> None:
    tasks = [await client.submit("index", {"document": "a", "text": str(number)}) for number in range(4)]
    other = await client.submit("index", {"document": "b", "text": "other"})
    ends = [await task.result() for task in tasks]
    assert [end.status for end in ends] == ["cancelled", "cancelled", "cancelled", "completed"]
    assert ends[0].error is not None
    assert ends[0].error["type"] == "Superseded"
    assert (await other.result()).output == "other"
    assert sorted(ORDER) == ["3", "other"]


async def test_thirty_calls_a_minute_for_each_api_key(client: Client) -> None:
    others = await client.submit("searches", ["other"] * 30)
    task = await client.submit("searches", ["own"] * 31)
    assert (await others.result()).status == "completed"
    async with asyncio.timeout(30):
        while True:
            view = await read_task(task.bus, task.task_id) or {}
            if len(view["waits_for"]) == 1:
                break
            await asyncio.sleep(0.01)
    assert view["waits_for"][0]["limit"].startswith("tool:search|input.api_key/60s|#")
    await task.cancel()


async def test_the_newest_event_of_an_instance_may_end_the_one_that_runs(client: Client) -> None:
    tasks = [await client.submit("newest", text, key="k") for text in ("first", "second", "last")]
    other = await client.submit("newest", "last", key="other")
    assert [(await task.result()).status for task in (*tasks, other)] == [
        "cancelled", "cancelled", "completed", "completed",
    ]  # fmt: skip


async def test_runs_that_give_up_their_key_do_not_wait_for_each_other_s_slot(client: Client) -> None:
    """The next events of both instances wait for the slot of the first run, which needs both keys."""
    options = SubmitOptions(tenant="a")
    first = await client.submit("away", "first", key="k", options=options)
    others = [await client.submit("away", "other", key=key, options=options) for key in ("k", "l")]
    for other in others:
        async with asyncio.timeout(30):
            while not any("limit" in wait for wait in (await read_task(other.bus, other.task_id) or {})["waits_for"]):
                await asyncio.sleep(0.01)
    for task in (first, first, *others):
        await task.send("go")
    assert [(await task.result()).output for task in (first, *others)] == ["second", "other", "other"]


async def test_the_newest_event_of_an_instance_wins(client: Client) -> None:
    first = await client.submit("preview", "first", key="k")
    asked = await question(first)
    tasks = [await client.submit("preview", text, key="k") for text in ("second", "third", "fourth")]
    await first.signal(asked, "yes")
    assert [(await task.result()).status for task in (first, *tasks)] == [
        "completed", "cancelled", "cancelled", "completed",
    ]  # fmt: skip
    assert ORDER == ["first", "first", "fourth"] or ORDER == ["first", "fourth"]


async def test_the_newest_run_ends_the_one_that_runs(client: Client) -> None:
    first = await client.submit("only", True)
    await question(first)
    assert (await (await client.submit("only", False)).result()).output == "done"
    end = await first.result()
    assert (end.status, end.error and end.error["type"]) == ("cancelled", "Superseded")


async def test_the_value_of_an_input_is_not_part_of_a_key(client: Client) -> None:
    first = await client.submit("secret", {"token": "hunter2"})
    await question(first)
    second = await client.submit("secret", {"token": "hunter2"})
    limit = str((await waits(second))["limit"])
    assert limit.startswith("agent:secret|input.token|#")
    assert "hunter2" not in limit
    await question(await client.submit("secret", {"token": "another"}))


async def test_a_fork_of_a_limited_run_takes_a_slot(client: Client) -> None:
    origin = await client.submit("alone", "asks", task_id="origin")
    await origin.signal(await question(origin), "yes")
    await origin.result()
    holder = await client.submit("alone", "asks")
    asked = await question(holder)
    fork = await client.fork("origin")
    assert (await waits(fork))["limit"] == "agent:alone||"
    await fork.cancel()
    assert (await fork.result()).status == "cancelled"
    again = await client.fork("origin", at="1")
    assert (await waits(again))["limit"] == "agent:alone||"
    await holder.signal(asked, "yes")
    await again.signal(await question(again), "yes")
    assert (await again.result()).output == "asks"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("agent:sync|tenant|acme", "its limit per tenant acme"),
        ("agent:sync|tenant|", "its limit per tenant (none)"),
        ("tool:fetch|input.account.key/60s|#0123456789abcdef", "its limit per input.account.key/60s #0123456789abcdef"),
        ("tool:fetch|/60s|", "its limit for all/60s"),
    ],
)
def test_a_wait_names_its_limit(limit: str, text: str) -> None:
    wait = {"kind": "tool", "name": "fetch", "step": "1", "run": "r", "limit": limit, "since": 0}
    assert describe_wait(wait, 100.0) == f"tool fetch, for 100 ms, for a slot of {text}"
