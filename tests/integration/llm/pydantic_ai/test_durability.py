"""pydantic-ai's agents in one process: all kinds of tools, hooks around them, forks."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic_ai import Agent, FunctionToolset, ModelRetry, RunContext
from pydantic_ai.exceptions import CallDeferred
from pydantic_ai.messages import ModelMessage, RetryPromptPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.toolsets import AbstractToolset

from runtime_core.host.local import LocalApp
from runtime_core.llm.tokens import said
from weft import App
from weft.hooks import Change, Deny, HookEvent

asked: list[int] = []
seen: list[str] = []
threads: set[str] = set()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    asked.clear()
    seen.clear()
    threads.clear()


CALLS = {
    "of_this_step": {"number": 3},
    "validated": {"number": 1},
    "denied": {},
    "changed": {"number": 2},
    "elsewhere": {"question": "how many?"},
    "inline": {},
}


def contents(messages: list[ModelMessage]) -> list[object]:
    parts = [part for message in messages for part in message.parts]
    return [part.content for part in parts if isinstance(part, ToolReturnPart | RetryPromptPart)]


async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
    asked.append(len(messages))
    if len(messages) > 1:
        yield json.dumps(contents(messages))
        return
    for place, (name, arguments) in enumerate(CALLS.items()):
        yield {place: DeltaToolCall(name=name, json_args=json.dumps(arguments), tool_call_id=name)}


def sample() -> App:
    agent = Agent(FunctionModel(stream_function=model), name="any", instructions="Call all.")

    @agent.instructions
    def plain() -> str:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return "Then say so."

    @agent.toolset(id="dynamic")
    def made(ctx: RunContext[object]) -> AbstractToolset[object]:
        toolset: FunctionToolset[object] = FunctionToolset(id="inner")

        @toolset.tool_plain
        async def of_this_step(number: int) -> int:
            return number * 7

        return toolset

    async def not_one(ctx: RunContext[object], number: int) -> None:
        if number == 1:
            raise ModelRetry("not one")

    @agent.tool(args_validator=not_one)
    async def validated(ctx: RunContext[object], number: int) -> int:
        return number

    @agent.tool_plain
    async def denied() -> None:
        seen.append("denied")

    @agent.tool
    async def changed(ctx: RunContext[object], number: int) -> str:
        return f"{number} {ctx.tool_call_id} {ctx.retry} {ctx.metadata} {ctx.usage.requests}"

    @agent.tool_plain
    async def elsewhere(question: str) -> None:
        raise CallDeferred

    @agent.tool_plain(metadata={"weft": False})
    async def inline() -> str:
        return "inline"

    app = App("kinds")
    app.add_pydantic_agent("any", agent)

    @app.hook("before_tool_call", always=True)
    def guard(event: HookEvent) -> object:
        seen.append(event.name)
        if event.name == "any.denied":
            return Deny("not this one")
        if event.name == "any.changed":
            return Change({**event.payload, "number": 20})
        return None

    return app


FOUND = [21, "not one", "hook 'guard' at before_tool_call: not this one", "20 changed 0 None 1", {"many": 42}, "inline"]


async def test_every_kind_of_tool_works_with_hooks_around_it() -> None:
    async with (local := LocalApp(sample(), trajectory=True)) as client:
        task = await client.submit("any", "Go on.")
        async for event in task.stream():
            if event.type == "weft.human.requested":
                assert event.data["data"] == {"tool": "elsewhere", "arguments": {"question": "how many?"}}
                await task.signal(event.data["request_id"], {"many": 42})
        response = await task.result(timeout=60)
        recorded = await local.recorded(task.task_id)
    assert response.status == "completed", response
    assert json.loads(response.value()) == FOUND
    assert asked == [1, 3]
    assert threads == {"code of any"}, "threads that nobody counts may end too late for the turn"
    assert sorted(seen) == ["any.changed", "any.denied", "any.dynamic", "any.elsewhere"]
    tools = [step.name for step in recorded.steps if step.kind == "tool"]
    assert sorted(tools) == ["any.changed", "any.dynamic", "any.elsewhere"]


async def test_a_fork_reuses_the_model_answers_before_its_step() -> None:
    async with (local := LocalApp(sample(), trajectory=True)) as client:
        task = await client.submit("any", "Go on.")
        async for event in task.stream():
            if event.type == "weft.human.requested":
                await task.signal(event.data["request_id"], {"many": 42})
        await task.result(timeout=60)
        recorded = await local.recorded(task.task_id)
        last = [step.step for step in recorded.steps if step.kind == "model"][-1]
        asked.clear()
        fork = await client.fork(task.task_id, at=last)
        response = await fork.result(timeout=60)
    assert response.status == "completed", response
    assert json.loads(response.value()) == FOUND
    assert asked == [3], "the first request is not made again"


async def test_a_hook_may_change_a_model_request() -> None:
    async def echo(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str]:
        yield str(messages[-1].parts[-1].content)  # type: ignore[union-attr]  # a prompt

    app = App("hooked")
    app.add_pydantic_agent("echo", Agent(FunctionModel(stream_function=echo), name="echo"))

    @app.hook("before_llm_call", always=True)
    def change(event: HookEvent) -> Change:
        return Change({**event.payload, "messages": [said("something else")]})

    async with LocalApp(app) as client:
        task = await client.submit("echo", "this")
        assert (await task.result(timeout=60)).value() == "something else"


async def test_a_repeated_call_ends_the_run() -> None:
    async def stubborn(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        asked.append(len(messages))
        yield {0: DeltaToolCall(name="look", json_args='{"place": 1}', tool_call_id=f"look-{len(messages)}")}

    agent = Agent(FunctionModel(stream_function=stubborn), name="stubborn")

    @agent.tool_plain
    async def look(place: int) -> str:
        return "nothing"

    app = App("stubborn")
    app.add_pydantic_agent("stubborn", agent)
    async with LocalApp(app) as client:
        response = await (await client.submit("stubborn", "Look.")).result(timeout=60)
    assert response.error is not None
    assert response.error["type"] == "RepeatedCall"
    assert len(asked) == 6
