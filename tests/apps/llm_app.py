"""An app whose agent asks a model that the environment names, for tests of the services."""

from __future__ import annotations

from runtime_core.declare.declaration import RetryPolicy
from weft import App, LLMAgent

app = App("asking")
app.add_agent("asker", LLMAgent("openai-chat:gpt-test", retry=RetryPolicy(attempts=3, base_seconds=0.05)))
