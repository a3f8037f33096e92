"""An app whose agent makes one model call, and what tests of model calls say in one line."""

from __future__ import annotations

from typing import Any

from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.llm.agent import ModelSettings, OutputSpec, ToolSpec
from runtime_core.llm.model_call import Answer, ask_model
from runtime_core.llm.window import said
from tests.openai_server.driver import OpenAIServer
from weft import AgentContext, App, Client, StreamEvent

QUICK = RetryPolicy(attempts=4, base_seconds=0.01, max_seconds=0.05, jitter=0.5)
WAIT = 120.0


def settings(server: OpenAIServer, model: object = "openai-chat:gpt-test", **more: Any) -> ModelSettings:
    given: dict[str, Any] = {"base_url": server.url, "api_key": server.key, "retry": QUICK, **more}
    return ModelSettings(model=model, **given)


def app_of(
    agent: ModelSettings, *, tools: tuple[ToolSpec, ...] = (), output: OutputSpec | None = None, **more: Any
) -> App:
    """Its agent `asker` takes a text, or messages, and gives what the model has answered."""
    app = App("asking")

    @app.agent("asker")
    async def asker(ctx: AgentContext, prompt: str | list[dict[str, Any]]) -> dict[str, Any]:
        messages = [said(prompt)] if isinstance(prompt, str) else prompt
        return told(await ask_model(ctx, agent, messages, tools=tools, output=output, number=1, **more))

    return app


def told(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "calls": [[call.name, call.arguments] for call in answer.tool_calls],
        "finish": answer.finish_reason,
        "usage": answer.usage,
        "model": answer.model,
        "provider": answer.provider,
        "decided": answer.decided,
    }


async def asked(client: Client, prompt: object = "Say something", **more: Any) -> dict[str, Any]:
    """The answer of `asker`."""
    task = await client.submit("asker", prompt, **more)
    output: dict[str, Any] = (await task.result(timeout=WAIT)).value()
    return output


async def failure(client: Client, prompt: object = "Say something", **more: Any) -> tuple[str, str]:
    """Type and message of the error with which the task ends."""
    task = await client.submit("asker", prompt, **more)
    response = await task.result(timeout=WAIT)
    assert response.error is not None
    return response.error["type"], response.error["message"]


def shown(events: list[StreamEvent]) -> str:
    """What a client shows at the end: a higher attempt of a run id replaces what lower ones said."""
    texts: dict[str, tuple[int, str]] = {}
    for event in events:
        if event.type != "weft.output.delta":
            continue
        run, attempt = event.data["run_id"], event.data["attempt"]
        known, text = texts.get(run, (0, ""))
        texts[run] = (attempt, event.data["text"]) if attempt > known else (attempt, text + event.data["text"])
    return "".join(text for _, text in texts.values())
