"""Messages to a running agent, from Python: in order, each once, with limits, and with one error for each mistake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtime_core.host.local import LocalApp
from weft import AgentContext, App, Client
from weft.errors import InvalidInput, ReceiveTimeout

app = App("messages")


@app.agent("collects")
async def collects(ctx: AgentContext, count: int) -> list[object]:
    return [await ctx.receive("item") for _ in range(count)]


@app.agent("steered")
async def steered(ctx: AgentContext, _: None) -> str:
    """Works until it is told to stop; the budget may change meanwhile."""
    budget = 1
    while not await ctx.receive("stop", timeout=0.001, default=False):
        budget = await ctx.receive("budget", timeout=0.001, default=budget)
    return f"stopped with {budget}"


@app.agent("impatient")
async def impatient(ctx: AgentContext, _: None) -> str:
    try:
        await ctx.receive("never", timeout=0.01)
    except ReceiveTimeout as error:
        return error.message
    return ""


@app.agent("parent")
async def parent(ctx: AgentContext, _: None) -> list[object]:
    return [await ctx.agent("collects", 1), *await ctx.gather(ctx.receive("left"), ctx.receive("right"))]


@app.agent("wrong")
async def wrong(ctx: AgentContext, how: str) -> None:
    if how == "name":
        await ctx.receive("a name")
    else:
        await ctx.receive("name", timeout=0)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with asyncio.timeout(60), LocalApp(app) as connected:
        yield connected


async def test_messages_are_received_in_order(client: Client) -> None:
    task = await client.submit("collects", 3)
    for value in ("one", {"two": 2}, None):
        await task.send("item", value)
    assert (await task.result()).value() == ["one", {"two": 2}, None]


async def test_a_message_with_the_same_id_is_dropped(client: Client) -> None:
    task = await client.submit("collects", 2)
    for value in (1, 1, 2):
        await task.send("item", value, id=f"item-{value}")
    with pytest.raises(InvalidInput, match="id: a message 'item' with this id and a different value was sent before"):
        await task.send("item", 3, id="item-1")
    assert (await task.result()).value() == [1, 2]


async def test_a_loop_is_steered(client: Client) -> None:
    task = await client.submit("steered")
    await task.send("budget", 20)
    while (await task.show())["steps"] < 5:  # it works meanwhile
        await asyncio.sleep(0.01)
    await task.send("stop", True)
    assert (await task.result()).value() == "stopped with 20"


async def test_a_wait_ends_at_its_timeout(client: Client) -> None:
    assert (await (await client.submit("impatient")).result()).value() == "no message never came in time"


async def test_called_agents_and_branches_receive_messages_of_their_task(client: Client) -> None:
    task = await client.submit("parent")
    for name in ("right", "left", "item"):
        await task.send(name, name)
    assert (await task.result()).value() == [["item"], "left", "right"]


async def test_what_a_task_waits_for_is_shown_without_waking_it(client: Client) -> None:
    task = await client.submit("collects", 1)
    while "waits_for" not in (await task.show()):  # until it has begun
        await asyncio.sleep(0.01)
    assert (await task.show())["waits_for"] == [{"step": "1", "kind": "receive"}]
    await task.cancel()


async def test_mistakes_are_named(client: Client) -> None:
    task = await client.submit("collects", 1)
    with pytest.raises(InvalidInput, match="name: 'a name' is not a name: use 1 to 100 letters"):
        await task.send("a name", 1)
    await task.send("item", 1)
    await task.result()
    with pytest.raises(InvalidInput, match=r"has ended \(completed\), so it receives no message 'item'"):
        await task.send("item", 2)
    unknown = await client.submit("collects", 0)
    await unknown.result()
    await unknown.delete()
    with pytest.raises(InvalidInput, match="task_id: there is no task"):
        await unknown.send("item", 2)
    for how, message in (("name", "name of ctx.receive"), ("timeout", "timeout of ctx.receive: 0 must be above 0")):
        end = await (await client.submit("wrong", how)).result()
        assert end.error is not None
        assert message in end.error["message"]
