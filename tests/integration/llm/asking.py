"""An app whose agent makes one model call, and what tests of model calls say in one line."""

from __future__ import annotations

from typing import Any

from runtime_core.declare.declaration import RetryPolicy
from tests.openai_server.driver import OpenAIServer
from weft import App, Client, LLMAgent, StreamEvent

QUICK = RetryPolicy(attempts=4, base_seconds=0.01, max_seconds=0.05, jitter=0.5)
WAIT = 120.0


def asker(server: OpenAIServer, model: object = "openai-chat:gpt-test", **more: Any) -> LLMAgent:
    """An agent that asks the test server."""
    return LLMAgent(model, **{"base_url": server.url, "api_key": server.key, "retry": QUICK, **more})


def app_of(agent: LLMAgent) -> App:
    app = App("asking")
    app.add_agent("asker", agent)
    return app


async def asked(client: Client, prompt: object = "Say something", **more: Any) -> dict[str, Any]:
    """What `asker` has answered, and what it has used."""
    task = await client.submit("asker", prompt, **more)
    response = await task.result(timeout=WAIT)
    return {"text": response.value(), "usage": response.usage, "model": next(iter(response.models), "")}


async def failure(client: Client, prompt: object = "Say something", **more: Any) -> tuple[str, str]:
    """Return type and message of the error with which the task ends."""
    task = await client.submit("asker", prompt, **more)
    response = await task.result(timeout=WAIT)
    assert response.error is not None
    return response.error["type"], response.error["message"]


def shown(events: list[StreamEvent]) -> str:
    """Return what a client shows at the end: a higher attempt of a run id replaces what lower ones emitted."""
    texts: dict[str, tuple[int, str]] = {}
    for event in events:
        if event.type != "weft.output.delta":
            continue
        run, attempt = event.data["run_id"], event.data["attempt"]
        known, text = texts.get(run, (0, ""))
        texts[run] = (attempt, event.data["text"]) if attempt > known else (attempt, text + event.data["text"])
    return "".join(text for _, text in texts.values())
