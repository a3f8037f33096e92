"""A call by function returns the function's return type, even behind hooks; a call by name returns JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel, computed_field

from runtime_core.host.local import LocalApp
from weft import Agent, AgentContext, App, Client, SubmitOptions, ToolContext, handles
from weft.hooks import Change, HookEvent

app = App("typed-results")


@dataclass
class Order:
    item: str
    at: datetime
    tags: tuple[str, ...] = ()


class Invoice(BaseModel, extra="forbid"):
    net: float

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation writes it
    @property
    def gross(self) -> float:
        return self.net * 1.2


NOON = datetime(2025, 1, 2, 12, tzinfo=UTC)


@app.tool
async def order(ctx: ToolContext, item: str, tags: list[str] | None = None) -> Order:
    return Order(item, NOON, tuple(tags or ()))


@app.tool
def invoice(net: float) -> Invoice:
    return Invoice(net=net)


@app.tool
def plain(word: str) -> dict[str, Any]:
    return {word: [1, None]}


@app.tool
def miscounts(word: str) -> int:
    return word  # type: ignore[return-value]  # wrong on purpose


@app.agent("miscounter")
async def miscounter(ctx: AgentContext, word: str) -> int:
    return word if word == "own" else await ctx.tool("miscounts", word=word)  # type: ignore[return-value]  # as above


@app.agent("bad-buyer")
async def bad_buyer(ctx: AgentContext, item: str) -> Order:
    return {"item": item, "at": "soon"}  # type: ignore[return-value]  # wrong on purpose


class Desk(Agent):
    """Answers with another type for one message."""

    @handles(str)
    async def text(self, word: str, ctx: AgentContext) -> Order:
        return Order(word, NOON)

    @handles(int)
    async def number(self, number: int, ctx: AgentContext) -> Order:
        return Order(number, NOON)  # type: ignore[arg-type]  # wrong on purpose


app.add_agent("desk", Desk)


@app.agent("buyer")
async def buyer(ctx: AgentContext, item: str) -> Order:
    return await ctx.tool(order, item, tags=["a", "b"])


@app.agent("by-function")
async def by_function(ctx: AgentContext) -> list[object]:
    first = await ctx.tool(order, "tea", ["a"])
    # The results of the first turn are now replayed or kept, and the next ones are live.
    second, third = await ctx.gather(ctx.agent(buyer, "milk"), ctx.tool(plain, "x"))
    assert isinstance(first, Order)
    assert isinstance(second, Order)
    return [first.at == second.at == NOON, first.tags, second.tags, third]


@app.agent("by-name")
async def by_name(ctx: AgentContext, names: list[str]) -> object:
    tool, agent = names  # from JSON: equal to the declared names, but other objects
    found = await ctx.gather(ctx.tool(tool, item="tea"), ctx.agent(agent, "milk"))
    assert [type(each) for each in found] == [dict, dict]
    return found[0]


@app.agent("of-another-type")
async def of_another_type(ctx: AgentContext) -> object:
    return await ctx.tool(invoice, net=10)


@app.agent("twice")
async def twice(ctx: AgentContext) -> object:
    return await ctx.tool(order, "tea", item="milk")  # type: ignore[misc]  # the mistake under test


@app.agent("too-many")
async def too_many(ctx: AgentContext) -> object:
    return await ctx.tool(order, "tea", [], 3)  # type: ignore[call-overload]  # the mistake under test


@app.agent("by-position-to-a-name")
async def by_position_to_a_name(ctx: AgentContext) -> object:
    return await ctx.tool("elsewhere", 3)  # type: ignore[call-overload]  # the mistake under test


@app.hook("after_tool_call", name="dated")
def dated(event: HookEvent) -> Change | None:
    if event.name != "order":
        return None
    return Change({**event.payload, "item": "coffee"})


@app.agent("behind-a-hook")
async def behind_a_hook(ctx: AgentContext) -> object:
    found = await ctx.tool(order, item="tea")
    assert isinstance(found, Order)
    return found.item


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with asyncio.timeout(60), LocalApp(app) as connected:
        yield connected


async def test_results_of_calls_by_function_have_the_functions_return_type(client: Client) -> None:
    response = await (await client.submit(by_function)).result()
    assert response.value() == [True, ["a"], ["a", "b"], {"x": [1, None]}]


async def test_the_result_of_a_call_by_name_is_json(client: Client) -> None:
    response = await (await client.submit(by_name, ["order", "buyer"])).result()
    assert response.value() == {"item": "tea", "at": "2025-01-02T12:00:00Z", "tags": []}


async def test_a_result_that_a_hook_changed_has_the_type_too(client: Client) -> None:
    options = SubmitOptions(hooks={"after_tool_call": ["dated"]})
    response = await (await client.submit(behind_a_hook, options=options)).result()
    assert response.value() == "coffee"


@pytest.mark.parametrize(
    ("agent", "error", "parts"),
    [
        ("of-another-type", "InvalidResult", ["result.gross", "return type of tool 'invoice'", "call it by name"]),
        ("twice", "InvalidInput", ["arguments.item", "tool 'order'", "give it once"]),
        ("too-many", "InvalidInput", ["arguments", "tool 'order' takes 2 arguments, not 3"]),
        ("by-position-to-a-name", "InvalidInput", ["'elsewhere'", "give its arguments by name"]),
    ],
)
async def test_a_wrong_call_or_result_is_named(client: Client, agent: str, error: str, parts: list[str]) -> None:
    response = await (await client.submit(agent)).result()
    assert response.error is not None
    assert response.error["type"] == error
    assert not [part for part in parts if part not in response.error["message"]], response.error


async def test_a_result_of_another_type_than_declared_fails_at_its_function(client: Client) -> None:
    own = await (await client.submit("miscounter", "own")).result()
    assert own.error is not None
    assert own.error["type"] == "InvalidResult"
    assert "it does not fit the return type of agent 'miscounter': correct the result or" in own.error["message"]
    of_tool = await (await client.submit("miscounter", "tool")).result()
    assert of_tool.error is not None
    assert "result: Input should be a valid integer" in of_tool.error["message"]
    assert "it does not fit the return type of tool 'miscounts'" in of_tool.error["message"]


@pytest.mark.parametrize(
    ("agent", "input", "named"),
    [
        ("bad-buyer", "tea", "output.at: "),
        ("desk", {"type": "int", "data": 3}, "output.item: Input should be a valid string, got 3"),
    ],
)
async def test_a_result_of_a_class_is_checked_too(client: Client, agent: str, input: object, named: str) -> None:
    response = await (await client.submit(agent, input)).result()
    assert response.error is not None
    assert response.error["type"] == "InvalidResult"
    assert named in response.error["message"]
    assert f"it does not fit the return type of agent '{agent}'" in response.error["message"]


async def test_a_class_based_agent_may_return_what_it_declares(client: Client) -> None:
    response = await (await client.submit("desk", {"type": "str", "data": "tea"})).result()
    assert response.value() == {"item": "tea", "at": "2025-01-02T12:00:00Z", "tags": []}
