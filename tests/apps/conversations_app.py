"""The app of the chaos tests of conversations: agents that a model drives, and a tool that logs each effect."""

from __future__ import annotations

import os

# Takes seconds on a busy machine, else in the middle of a turn: a turn that dies too often is given up as poison.
import pydantic_ai.models.openai  # noqa: F401

from tests.apps.fleet_app import note
from weft import App, LLMAgent, ToolContext

app = App("conversations")

# So that the model's ledger tells which process has asked.
ASKED_BY = {"extra_headers": {"x-asked-by": str(os.getpid())}}


@app.tool
def mark(ctx: ToolContext, path: str, name: str) -> str:
    """An external effect, identified by its idempotency key."""
    note(path, f"{name} {ctx.idempotency_key}")
    return name


app.add_agent("talker", LLMAgent("openai-chat:gpt-test", tools=[mark], settings=ASKED_BY))
