"""A run that gives up its key while it waits: `ctx.released`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtime_core.host.local import LocalApp
from weft import AgentContext, App, Client, TaskHandle
from weft.testing import AppTest

app = App("shop")


@app.agent("orders")
async def orders(ctx: AgentContext, order: str) -> list[str]:
    ctx.state.setdefault("seen", []).append(order)
    if order.startswith("large"):
        async with ctx.released():
            await ctx.human("approve?")
        ctx.state["seen"].append(f"{order} approved")
    return list(ctx.state["seen"])


@app.agent("wrong")
async def wrong(ctx: AgentContext, how: str) -> None:
    seen = ctx.state.setdefault("seen", [])
    if how == "branch":

        async def inside() -> None:
            async with ctx.released():
                pass

        await ctx.gather(inside(), ctx.sleep(0))
    async with ctx.released():
        if how == "read":
            ctx.state.clear()
        elif how == "change":
            seen.append(1)
        elif how == "twice":
            async with ctx.released():
                pass
        await ctx.sleep(0)


@app.agent("raises")
async def raises(ctx: AgentContext, _: None) -> str:
    try:
        async with ctx.released():
            await ctx.sleep(0)
            raise ValueError("inside")
    except ValueError as error:
        ctx.state["error"] = str(error)
    return str(ctx.state["error"])


@app.agent("itself")
async def itself(ctx: AgentContext, depth: int) -> list[int]:
    """Its own key's next event is a call of its own."""
    if depth:
        async with ctx.released():
            await ctx.agent("itself", depth - 1, key=ctx.key)
    ctx.state.setdefault("depths", []).append(depth)
    return list(ctx.state["depths"])


@app.tool
async def ship(order: str) -> str:
    return order


@app.agent("ships")
async def ships(ctx: AgentContext, order: str) -> list[str]:
    ctx.state.setdefault("seen", []).append(order)
    async with ctx.released():
        await ctx.sleep(0.02)
        shipped = await ctx.tool(ship, order=order)
    ctx.state["seen"].append(f"{shipped} shipped")
    return list(ctx.state["seen"])


@app.agent("buys")
async def buys(ctx: AgentContext, _: None) -> list[str]:
    """Two runs of one key at once: which of them ends last is not determined."""
    one, two = await ctx.gather(*(ctx.agent(ships, order, key="ann") for order in ("one", "two")))
    return sorted({*one, *two})


@app.agent("nested")
async def nested(ctx: AgentContext, below: bool) -> list[str]:
    ctx.state.setdefault("log", []).append("begin" if below else "nested")
    if below:
        await ctx.agent("nested", False, key=ctx.key)
    else:
        async with ctx.released():
            await ctx.sleep(0.01)
    if below:
        ctx.state["log"].append("end")
    return list(ctx.state["log"])


@app.agent("deeper")
async def deeper(ctx: AgentContext, depth: int) -> list[int]:
    """Below the first one, each keeps the key in its block, since the run that waits for it holds it, too."""
    ctx.state.setdefault("depths", []).append(depth)
    if depth == 3:
        await ctx.agent("deeper", 2, key=ctx.key)
    elif depth:
        async with ctx.released():
            await ctx.agent("deeper", depth - 1, key=ctx.key)
    ctx.state["depths"].append(-depth)
    return list(ctx.state["depths"])


failed: set[str] = set()
"""The tasks of `retried` whose first attempt has failed inside the block."""


@app.agent("retried")
async def retried(ctx: AgentContext, below: bool) -> list[str]:
    """Its second attempt has the key back from the first one, so its call of itself is nested."""
    seen = ctx.state.setdefault("seen", [])
    if not below:
        seen.append("nested")
        return list(seen)
    seen.append("begin")
    async with ctx.released():
        if ctx.task_id not in failed:
            failed.add(ctx.task_id)
            raise RuntimeError("the first attempt fails")
        await ctx.agent("retried", False, key=ctx.key)
    ctx.state["seen"].append("end")
    return list(ctx.state["seen"])


async def question(task: TaskHandle) -> str:
    async for event in task.stream():
        if event.type == "weft.human.requested":
            return str(event.data["request_id"])
    raise AssertionError("it asked nothing")


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with asyncio.timeout(60), LocalApp(app) as connected:
        yield connected


async def test_a_pending_approval_does_not_block_the_next_order(client: Client) -> None:
    large = await client.submit("orders", "large-1", key="ann")
    asked = await question(large)
    assert (await (await client.submit("orders", "small-2", key="ann")).result()).output == ["large-1", "small-2"]
    other = await client.submit("orders", "large-3", key="ann")
    later = await question(other)
    await large.signal(asked, True)
    assert (await large.result()).output == ["large-1", "small-2", "large-3", "large-1 approved"]
    await other.signal(later, True)
    assert (await other.result()).output[-2:] == ["large-1 approved", "large-3 approved"]


@pytest.mark.parametrize("at", ["2", "3"])
async def test_a_fork_of_a_run_that_gave_up_its_key_loses_no_change(client: Client, at: str) -> None:
    """Its origin got the key back with a state that others have changed since."""
    origin = await client.submit("orders", "large-1", key="ann", task_id="origin")
    await origin.signal(await question(origin), True)
    await origin.result()
    assert (await (await client.submit("orders", "small-2", key="ann")).result()).status == "completed"
    fork = await client.fork("origin", at=at)
    if at == "2":  # it asks again
        await fork.signal(await question(fork), True)
    expected = ["large-1", "large-1 approved", "small-2", "large-1", "large-1 approved"]
    assert (await fork.result()).output == expected
    assert (await (await client.submit("orders", "small-3", key="ann")).result()).output == [*expected, "small-3"]


async def test_a_fork_inside_the_block_loses_no_change_if_the_record_lacks_the_release(client: Client) -> None:
    """Then only the journal of the waiting origin says that it has given up its key."""
    origin = await client.submit("orders", "large-1", key="ann", task_id="origin")
    await question(origin)
    bus = origin.bus
    await bus.transport.call("XTRIM", bus.keys.record, "MAXLEN", 0)
    fork = await client.fork("origin", at="2")
    await fork.signal(await question(fork), True)
    assert (await fork.result()).output == ["large-1", "large-1", "large-1 approved"]


async def test_a_run_without_a_key_releases_nothing(client: Client) -> None:
    task = await client.submit("orders", "large-1")
    await task.signal(await question(task), True)
    assert (await task.result()).output == ["large-1", "large-1 approved"]


async def test_an_error_inside_the_block_takes_the_key_back(client: Client) -> None:
    assert (await (await client.submit("raises", None, key="k")).result()).output == "inside"


async def test_it_may_wait_for_another_run_of_its_key(client: Client) -> None:
    assert (await (await client.submit("itself", 3, key="k")).result()).output == [0, 1, 2, 3]


async def test_a_nested_call_that_keeps_the_key_hands_its_state_on(client: Client) -> None:
    assert (await (await client.submit("deeper", 3, key="k")).result()).output == [3, 2, 1, 0, 0, -1, -2, -3]


async def test_a_nested_call_leaves_the_key_to_its_caller(client: Client) -> None:
    expected = ["begin", "nested", "end"]
    assert (await (await client.submit("nested", True, key="k")).result()).output == expected


async def test_an_attempt_that_has_the_key_back_sees_what_its_nested_run_changed(client: Client) -> None:
    expected = ["begin", "nested", "end"]
    assert (await (await client.submit("retried", True, key="k")).result()).output == expected
    assert (await (await client.submit("retried", False, key="k")).result()).output == [*expected, "nested"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("read", "ctx.state was used inside ctx.released"), ("change", "ctx.state was used inside ctx.released"),
        ("twice", "inside ctx.released"), ("branch", "in a coroutine of ctx.gather"),
    ],
)  # fmt: skip
async def test_misuse_is_named(client: Client, how: str, message: str) -> None:
    response = await (await client.submit("wrong", how, key=how)).result()
    assert response.error is not None
    assert message in response.error["message"]


@pytest.mark.slow
async def test_a_kill_at_each_commit_changes_nothing() -> None:
    async with AppTest(app) as tested:
        report = await tested.kill_and_recover("buys")
    assert report.whole.output == ["one", "one shipped", "two", "two shipped"]
