"""An app whose agents ask a model that the environment names, for tests of the services."""

from __future__ import annotations

from runtime_core.app.app import App
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.model_call import ask_model
from runtime_core.llm.window import said
from runtime_core.runs.context import AgentContext

app = App("asking")

CHAT = ModelSettings("openai-chat:gpt-test", retry=RetryPolicy(attempts=3, base_seconds=0.05))


@app.agent("asker")
async def asker(ctx: AgentContext, prompt: str) -> str:
    return (await ask_model(ctx, CHAT, [said(prompt)], number=1)).text
