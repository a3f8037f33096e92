"""An app whose tasks are event-driven: messages, handlers, a group, a human."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from runtime_core.integrations.aworld.events.handlers import DefaultToolHandler
from weft import AgentContext, App
from weft.aworld import (
    AgentMessage,
    EventManager,
    GroupMessage,
    Handler,
    HandlerTable,
    HumanMessage,
    MemoryEventMessage,
    Message,
    TaskMessage,
    ToolMessage,
    TopicType,
    run_events,
)

app = App("events")


def _note(what: str) -> None:
    """Count an external effect if a test requests it."""
    if folder := os.environ.get("EVENTS_APP_CALLS"):
        with (Path(folder) / "calls").open("a") as file:
            file.write(what + "\n")


@app.tool
def double(number: int) -> int:
    _note(f"double {number}")
    return number * 2


@app.tool
def slow_double(number: int) -> int:
    """Waits until the test releases it."""
    _note(f"slow_double {number}")
    go = Path(os.environ["EVENTS_APP_CALLS"]) / "go"
    while not go.exists():
        time.sleep(0.01)
    return number * 2


@app.agent("adder")
async def adder(ctx: AgentContext, numbers: list[int]) -> int:
    _note(f"adder {numbers}")
    return sum(numbers)


@app.agent("broken")
async def broken(ctx: AgentContext, input: object) -> object:
    raise LookupError("nothing here")


@app.agent("dispatcher")
async def dispatcher(ctx: AgentContext, task: dict[str, Any]) -> object:
    """Runs the first messages of `{"messages": […], "handlers"?: {…}, "max_steps"?}`."""
    table = HandlerTable.of(ctx, task.get("handlers"))
    first = [Message.from_dict(message) for message in task["messages"]]
    outcome = await run_events(ctx, first, table, max_steps=task.get("max_steps", 100))
    answer = outcome.value()
    return answer


@app.agent("pipeline")
async def pipeline(ctx: AgentContext, numbers: list[int]) -> object:
    """Doubles each number with a tool, asks a human whether to continue, and lets the adder add them."""
    manager = EventManager(ctx)

    async def doubled(message: Message) -> AsyncIterator[Message]:
        manager.context.setdefault("doubled", []).append(message.payload)
        if len(manager.context["doubled"]) == len(numbers):
            yield HumanMessage(payload={"prompt": "add them?", "timeout": 60}, sender="asker")

    async def answered(message: Message) -> Message:
        if message.payload is not True:
            return TaskMessage(topic=TopicType.CANCEL, payload="a human said no")
        return AgentMessage(receiver="adder", payload=manager.context["doubled"])

    await manager.register("agent", "collector", doubled)
    await manager.register("agent", "asker", answered)
    first = [ToolMessage(receiver="double", payload={"number": number}, sender="collector") for number in numbers]
    outcome = await run_events(ctx, first, manager=manager)
    return outcome.value()


class Audited(DefaultToolHandler):
    """Logs what the default handler yields."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        yield Message(category="audit", payload=message.payload, sender="audited")
        async for following in super().handle(message):
            yield following


class Audit(Handler):
    """Collects messages."""

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        self.events.context.setdefault("audit", []).append(message.payload)
        yield MemoryEventMessage(payload=message.payload, agent="auditor")


app.handlers["audit"] = Audit
app.handlers["audited_tools"] = Audited

GROUP = GroupMessage(
    payload=[
        ToolMessage(receiver="double", payload={"number": 4}).to_dict(),
        AgentMessage(receiver="adder", payload=[1, 2]).to_dict(),
    ]
)
"""A tool and an agent at once."""


@app.agent("patient")
async def patient(ctx: AgentContext, numbers: list[int]) -> object:
    """Doubles numbers twice with a tool that waits for the test, then lets the adder add them."""
    manager = EventManager(ctx)

    async def first_round(message: Message) -> AsyncIterator[Message]:
        doubled = [{"tool": "double", "arguments": {"number": number}} for number in message.payload]
        yield ToolMessage(payload=doubled, sender="adder")

    await manager.register("agent", "collector", first_round)
    waiting = [{"tool": "slow_double", "arguments": {"number": number}} for number in numbers]
    outcome = await run_events(ctx, [ToolMessage(payload=waiting, sender="collector")], manager=manager)
    return outcome.value()
