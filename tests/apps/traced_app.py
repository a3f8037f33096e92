"""An app in a process that has configured OpenTelemetry's SDK: it runs one task and prints its spans as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runtime_core.runs.model_step import ModelCall
from runtime_core.telemetry import gen_ai
from weft import AgentContext, App, SubmitOptions
from weft.testing import LocalApp

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

app = App("traced")


@app.tool
def look(q: str) -> str:
    return f"found {q}"


@app.agent("guide")
async def guide(ctx: AgentContext, input: str) -> str:
    async def answer(request: object, call: ModelCall) -> str:
        with gen_ai.model_span("gpt-x", gen_ai.request_attributes(provider="openai", model="gpt-x")):
            return "an answer"

    await ctx.model("gpt-x", {}, answer)
    await ctx.tool(look, q=input)
    # In the next turn, of the same run in memory.
    await ctx.model("gpt-x", {}, answer)
    if input == "fail":
        raise RuntimeError("cannot go on")
    return "done"


async def main() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    async with LocalApp(app) as client:
        task = await client.submit(
            "guide", sys.argv[1], session_id="s-1", options=SubmitOptions(traceparent=TRACEPARENT)
        )
        await task.result(timeout=30)
    json.dump([json.loads(made.to_json()) for made in exporter.get_finished_spans()], sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
