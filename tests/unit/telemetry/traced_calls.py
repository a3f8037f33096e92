"""A process with an OpenTelemetry SDK, which cannot be removed, creates spans and prints them as JSON."""

from __future__ import annotations

import json
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runtime_core.bus import spans as messaging
from runtime_core.telemetry import gen_ai, spans
from runtime_core.telemetry.redaction import Redactor, use
from runtime_core.telemetry.trace_context import Ids

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MESSAGES = [
    {
        "kind": "request",
        "instructions": "be brief",
        "parts": [{"part_kind": "user-prompt", "content": "use my secret word"}],
    }
]
ANSWER = {
    "message": {
        "kind": "response",
        "parts": [{"part_kind": "text", "content": "done, secret word"}],
        "provider_response_id": "r-1",
    },
    "finish_reason": "stop",
    "usage": {"input_tokens": 7, "output_tokens": 3, "cached_tokens": 2},
    "provider": "openai",
    "model": "gpt-x-1",
    "seconds": 0.5,
    "first_seconds": 0.25,
}


class Broken(Exception):
    """An error that a client might raise."""


def main() -> None:
    exporter = InMemorySpanExporter()
    assert not spans.tracing()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    assert spans.tracing()
    asked = gen_ai.request_attributes(provider="openai-chat", model="gpt-x", settings={"max_tokens": 5})
    with use(Redactor(["secret word"])):
        with gen_ai.model_span("gpt-x", asked, traceparent=TRACEPARENT) as span:
            span.asked(MESSAGES, [{"name": "look", "description": "finds secret word", "arguments": {}}])
            span.answered(ANSWER)
        with gen_ai.model_span("gpt-x", asked) as span:
            span.answered({"retry_after": 2.0, "error": {"type": "RateLimited", "message": "secret word"}})
        try:
            with gen_ai.model_span("gpt-x", asked):
                raise Broken("secret word")
        except Broken:
            pass
        with gen_ai.agent_span("known", traceparent=TRACEPARENT, ids=Ids(0, 5, 0), held=True) as span:
            pass
        assert [made.name for made in exporter.get_finished_spans()] == ["chat gpt-x"] * 3, "it is held"
        span.release()
        messaging.task_span(
            "weft", "t-1", traceparent="", agent="known", status="completed", steps=1, created_ms=1.0, ended_ms=2.0
        )
        messaging.task_span(
            "weft", "t-1", traceparent="", agent="known", status="completed", steps=1, created_ms=1.0, ended_ms=2.0,
            again=True,
        )  # fmt: skip
        parent = spans.Parent()
        with gen_ai.agent_span("writer", session="s-1", traceparent=TRACEPARENT) as parent.span:
            pass
        with spans.under(parent), gen_ai.tool_span("look", call="c-1", traceparent=TRACEPARENT) as span:
            span.used(b'{"q":"secret word"}', b"[1]")
        with gen_ai.agent_span("writer") as parent.span, gen_ai.model_span("gpt-x", asked, traceparent=TRACEPARENT):
            pass
    json.dump([json.loads(made.to_json()) for made in exporter.get_finished_spans()], sys.stdout)


if __name__ == "__main__":
    main()
