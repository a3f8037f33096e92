"""An app for tests of traces: one agent calls a tool, another agent and an engine; one waits for a file."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from runtime_core.declare.declaration import Agent
from runtime_core.declare.tool import ToolContext
from runtime_core.runs.definition import handles
from weft import AgentContext, App, LLMAgent, RetryPolicy
from weft.hooks import HookEvent

app = App("traces")
logger = logging.getLogger("traces_app")


@app.tool
def look(context: ToolContext, q: str) -> str:
    logger.info("looking for %s", q)
    return f"{q} under {context.traceparent}"


@app.engine_function
def count(text: str) -> int:
    return len(text)


app.add_agent("asker", LLMAgent("openai-chat:gpt-test"))


@app.agent("desk")
async def desk(ctx: AgentContext, prompt: str) -> dict[str, object]:
    logger.info("asked about %s", prompt)
    one, two = await ctx.gather(ctx.tool(look, q="a"), ctx.tool(look, q="b"))
    answer = await ctx.agent("asker", prompt)
    return {"found": [one, two], "answer": answer, "length": await ctx.engine().call(count, text=prompt)}


def own_span(name: str) -> None:
    """Makes a span as the code of an app does, with OpenTelemetry's API alone."""
    from opentelemetry import trace  # here: another test checks that nothing loads it without tracing

    with trace.get_tracer("the app's own").start_as_current_span(name):
        pass


@app.tool
def look_closer(q: str) -> str:
    own_span("looks")
    return q


@app.agent("tracer")
async def tracer(ctx: AgentContext, prompt: str) -> str:
    own_span("asks")
    found = str(await ctx.tool(look_closer, q=prompt))
    own_span("has found")
    return found


@app.agent("held")
async def held(ctx: AgentContext, file: str) -> str:
    """Gets a result from a tool, then waits for a file in the middle of its turn."""
    found = await ctx.tool(look, q="a")

    async def wait() -> str:
        with Path(file).with_suffix(".waits").open("a") as waits:
            waits.write(os.environ["WEFT_INSTANCE"] + "\n")
        while not Path(file).exists():  # another process makes it
            await asyncio.sleep(0.02)
        return str(found)

    return str(await ctx.step(wait))


class Clerk(Agent):
    """Its key decides its partition."""

    @handles(str)
    async def on_question(self, question: str, ctx: AgentContext) -> str:
        return str(await ctx.tool(look, q=question))


app.add_agent("clerk", Clerk)


@app.agent("manager")
async def manager(ctx: AgentContext, keys: list[str]) -> list[str]:
    """Calls clerks, sends a message to one of them, and sleeps in between."""
    found = await ctx.gather(*(ctx.agent("clerk", "a", key=key) for key in keys))
    await ctx.send("clerk", "b", key=keys[0])
    await ctx.sleep(0.01)
    return [str(each) for each in found]


@app.tool(retry=RetryPolicy(attempts=2, base_seconds=0.01))
def read(file: str) -> str:
    return Path(file).read_text()


@app.hook("error")
def alert(event: HookEvent) -> None:
    """Runs in a separate task after a task has failed."""


@app.agent("reader")
async def reader(ctx: AgentContext, file: str) -> str:
    return str(await ctx.tool(read, file=file))
