"""Programs whose process has configured an SDK of OpenTelemetry, or one library of it: each prints its spans as JSON.

python -m tests.integration.telemetry.traced_libraries pydantic | instrumented | runtime | own
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel

from runtime_core.runs.turn import TurnHandler
from weft import App
from weft.runtime import AgentId, MessageContext, RoutedAgent, Runtime, TopicId, TypeSubscription, message_handler
from weft.testing import LocalApp

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("library")


# -- pydantic-ai -------------------------------------------------------------------------------------------------


async def model(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
    if len(messages) > 1:
        yield "seen"
    else:
        yield {0: DeltaToolCall("look", '{"place": "a"}', tool_call_id="c-1")}


async def ask_pydantic(instrumented: bool) -> None:
    researcher = Agent(FunctionModel(stream_function=model, model_name="gpt-x"), name="researcher")
    researcher.instrument = instrumented

    @researcher.tool_plain
    def look(place: str) -> str:
        return f"seen {place}"

    app = App("pydantic")
    app.add_pydantic_agent("researcher", researcher)
    # No run stays in memory: the second turn replays the first.
    defaults = TurnHandler.__init__.__kwdefaults__
    assert defaults is not None
    defaults["warm_runs"] = 0
    async with LocalApp(app) as client:
        task = await client.submit("researcher", "What is there?", session_id="s-1")
        assert (await task.result(timeout=60)).value() == "seen"


# -- the runtime of messages ---------------------------------------------------------------------------------------


@dataclass
class Asked:
    text: str


@dataclass
class Said:
    text: str


class Worker(RoutedAgent):
    """Creates spans, as a called library would."""

    def __init__(self) -> None:
        super().__init__("a worker")

    @message_handler
    async def on_asked(self, message: Asked, ctx: MessageContext) -> Asked:
        with tracer.start_as_current_span("answers"):
            await self.publish_message(Said(message.text), TopicId("news", "s"))
        return message

    @message_handler
    async def on_said(self, message: Said, ctx: MessageContext) -> None:
        with tracer.start_as_current_span("hears"):
            pass


async def send_messages() -> None:
    runtime = Runtime("memory://")
    await Worker.register(runtime, "worker", Worker)
    await runtime.add_subscription(TypeSubscription("news", "worker"))
    runtime.start()
    with tracer.start_as_current_span("the program"):
        await runtime.send_message(Asked("x"), AgentId("worker", "w"))
        await runtime.publish_message(Said("y"), TopicId("news", "s"))
    await asyncio.wait_for(runtime.stop_when_idle(), 60)
    await runtime.close()


async def main(what: str) -> None:
    if what != "own":
        trace.set_tracer_provider(provider)
    await (send_messages() if what in ("runtime", "own") else ask_pydantic(what == "instrumented"))
    json.dump([json.loads(made.to_json()) for made in exporter.get_finished_spans()], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
