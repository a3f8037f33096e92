"""An app whose agents ask a model that the environment names, for tests of the services."""

from __future__ import annotations

from runtime_core.agents.context import AgentContext
from runtime_core.app import App
from runtime_core.llm.call import ask_model
from runtime_core.llm.settings import ModelSettings
from runtime_core.llm.window import said
from runtime_core.policy import RetryPolicy

app = App("asking")

CHAT = ModelSettings("openai-chat:gpt-test", retry=RetryPolicy(attempts=3, base_seconds=0.05))


@app.agent("asker")
async def asker(ctx: AgentContext, prompt: str) -> str:
    return (await ask_model(ctx, CHAT, [said(prompt)], number=1)).text
