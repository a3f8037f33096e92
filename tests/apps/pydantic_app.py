"""An app with unchanged pydantic-ai agents, for tests that kill its processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext

from runtime_core.app.app import App
from runtime_core.llm.pydantic_ai.definition import tool_call
from tests.apps.fleet_app import note

app = App("pydantic")


@dataclass
class Deps:
    path: str
    """Where effects are noted."""
    seconds: float = 0.0


class Report(BaseModel):
    city: str
    words: int


researcher = Agent("openai-chat:gpt-test", name="researcher", deps_type=Deps, instructions="Find out.")


@researcher.tool
async def look(ctx: RunContext[Deps], place: str) -> str:
    """Look at a place."""
    note(ctx.deps.path, f"look {place} {tool_call().idempotency_key}")
    await asyncio.sleep(ctx.deps.seconds)
    return f"seen {place}"


@researcher.tool(metadata={"weft": {"repeatable": False, "timeout_seconds": 20.0}})
def weigh(ctx: RunContext[Deps], place: str, grams: int) -> int:
    if grams < 0:
        raise ModelRetry("grams are not negative")
    note(ctx.deps.path, f"weigh {place} {ctx.retry}")
    return grams * 2


@researcher.tool(requires_approval=True)
def pay(ctx: RunContext[Deps], amount: int) -> str:
    note(ctx.deps.path, f"pay {amount}")
    return f"paid {amount}"


@researcher.tool(metadata={"weft": {"repeatable": False}})
async def once(ctx: RunContext[Deps], name: str) -> str:
    note(ctx.deps.path, f"once {name}")
    await asyncio.sleep(ctx.deps.seconds)
    return name


plain = Agent("openai-chat:gpt-test", name="plain")
reporter = Agent("openai-chat:gpt-test", name="reporter", output_type=Report, retries=3)


@reporter.output_validator
def checked(report: Report) -> Report:
    if report.words < 1:
        raise ModelRetry("say how many words")
    return report


app.add_pydantic_agent("researcher", researcher)
app.add_pydantic_agent("reporter", reporter)
app.add_pydantic_agent("plain", plain)
