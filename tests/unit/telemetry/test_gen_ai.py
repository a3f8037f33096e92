"""Spans and attributes of model calls, tools and agents."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime_core.telemetry import gen_ai, spans, trace_context

PROGRAM = Path(__file__).with_name("traced_calls.py")
TRACE, PARENT = "0x0af7651916cd43dd8448eb211c80319c", "0xb7ad6b7169203331"


def spans_of(**environ: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    spans: list[dict[str, Any]] = json.loads(done.stdout)
    return spans


def test_a_model_call_is_a_client_span_under_the_task_with_the_attributes_of_the_conventions() -> None:
    chat, put_off, broken, *_ = spans_of()
    assert chat["name"] == "chat gpt-x"
    assert chat["kind"] == "SpanKind.CLIENT"
    assert (chat["context"]["trace_id"], chat["parent_id"]) == (TRACE, PARENT)
    assert chat["attributes"] == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-x",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.model": "gpt-x-1",
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
    }
    assert chat["status"]["status_code"] == "UNSET"
    assert put_off["attributes"]["error.type"] == "RateLimited"
    assert put_off["status"] == {"status_code": "ERROR", "description": "***"}
    assert broken["attributes"]["error.type"] == "Broken"
    assert broken["status"] == {"status_code": "ERROR", "description": "***"}
    assert broken["events"] == []


def test_an_apps_own_sdk_creates_spans_with_derived_ids() -> None:
    *_, known, root, again = spans_of()[:6]
    assert (known["context"]["span_id"], known["parent_id"]) == ("0x0000000000000005", PARENT)
    ids = trace_context.of_task("weft", "t-1")
    assert root["context"]["trace_id"] == again["context"]["trace_id"] == f"0x{ids.trace:032x}"
    assert (root["context"]["span_id"], root["parent_id"]) == (f"0x{ids.span:016x}", None)
    assert again["context"]["span_id"] != again["parent_id"] == root["context"]["span_id"]


def test_tools_are_under_the_turn_of_their_agent_while_it_continues_and_else_under_the_task() -> None:
    *_, ended, tool, inner, outer = spans_of()
    assert (ended["name"], ended["parent_id"], ended["kind"]) == ("invoke_agent writer", PARENT, "SpanKind.INTERNAL")
    assert ended["attributes"] == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "writer",
        "gen_ai.conversation.id": "s-1",
    }
    assert (tool["name"], tool["parent_id"]) == ("execute_tool look", PARENT)
    assert tool["attributes"] == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "c-1",
    }
    assert inner["parent_id"] == outer["context"]["span_id"]


def test_messages_are_in_spans_on_request_and_redacted() -> None:
    chat, *rest = spans_of(**{gen_ai.CAPTURE_CONTENT: "true"})
    attributes = chat["attributes"]
    assert json.loads(attributes["gen_ai.system_instructions"]) == [{"type": "text", "content": "be brief"}]
    assert json.loads(attributes["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "use my ***"}]}
    ]
    assert json.loads(attributes["gen_ai.output.messages"]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": "done, ***"}], "finish_reason": "stop"}
    ]
    assert json.loads(attributes["gen_ai.tool.definitions"])[0]["description"] == "finds ***"
    tool = next(span for span in rest if span["name"] == "execute_tool look")
    assert tool["attributes"]["gen_ai.tool.call.arguments"] == '{"q":"***"}'
    assert tool["attributes"]["gen_ai.tool.call.result"] == "[1]"


def test_without_an_sdk_nothing_is_imported_and_spans_do_nothing() -> None:
    program = """
import sys
from runtime_core.telemetry import gen_ai, spans
for make in (gen_ai.model_span("m", {}), gen_ai.tool_span("t"), gen_ai.agent_span("a"), gen_ai.engine_span("e", "f")):
    with make as span:
        span.set({"a": 1}), span.asked([]), span.answered({}), span.used(b"1", b"2"), span.failed("x")
        assert not span.recording
assert not any(name.startswith("opentelemetry") for name in sys.modules)
from opentelemetry import trace
assert not spans.tracing()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_names_are_those_of_the_conventions_package() -> None:
    from opentelemetry.semconv._incubating.attributes import (
        error_attributes,
        gen_ai_attributes,
        messaging_attributes,
        server_attributes,
        service_attributes,
    )

    modules = (gen_ai_attributes, messaging_attributes, error_attributes, server_attributes, service_attributes)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    ours = {value for name, value in vars(spans).items() if name.isupper() and isinstance(value, str)}
    assert len(ours) > 50
    assert {name for name in ours if not name.startswith("weft.")} <= known


def test_a_request_has_its_settings_and_endpoint_as_attributes() -> None:
    attributes = gen_ai.request_attributes(
        provider="google-vertex",
        model="g",
        settings={"temperature": 0, "stop_sequences": ["a"], "top_p": True, "unknown": 1, "max_tokens": None},
        base_url="https://user:word@models.example/v1",
        agent="writer",
        session="s",
        stream=True,
        output_type="json",
    )
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "gcp.vertex_ai",
        "gen_ai.request.model": "g",
        "gen_ai.agent.name": "writer",
        "gen_ai.conversation.id": "s",
        "gen_ai.request.temperature": 0,
        "gen_ai.request.stop_sequences": ["a"],
        "gen_ai.request.stream": True,
        "gen_ai.output.type": "json",
        "server.address": "models.example",
        "server.port": 443,
    }


@pytest.mark.parametrize(("url", "found"), [("", {}), ("nonsense", {}), ("http://[::1", {}), ("http://h:99999", {})])
def test_an_unreadable_url_reveals_nothing(url: str, found: dict[str, object]) -> None:
    assert gen_ai.server_attributes(url) == found


@pytest.mark.parametrize(
    ("result", "made"),
    [
        ({}, {}),
        ({"message": None, "usage": None, "finish_reason": 3, "model": ""}, {}),
        ({"retry_after": 1, "error": {}}, {"error.type": "error"}),
        ({"usage": {"input_tokens": 0, "reasoning_tokens": 0}}, {"gen_ai.usage.input_tokens": 0}),
    ],
)
def test_a_sparse_result_has_few_attributes(result: dict[str, Any], made: dict[str, object]) -> None:
    assert gen_ai.response_attributes(result) == made


def test_messages_of_all_kinds_become_roles_with_parts() -> None:
    from pydantic_ai import messages as ai

    history: list[ai.ModelMessage] = [
        ai.ModelRequest(
            [
                ai.SystemPromptPart("be good"),
                ai.UserPromptPart("hi"),
                ai.UserPromptPart(
                    ["see", ai.ImageUrl("https://x/y.png"), ai.BinaryContent(b"a", media_type="audio/wav")]
                ),
            ]
        ),
        ai.ModelResponse([ai.ThinkingPart("hm"), ai.TextPart("I look"), ai.ToolCallPart("look", {"q": 1}, "c1")]),
        ai.ModelRequest([ai.ToolReturnPart("look", {"a": 1}, "c1")], instructions="be quick"),
    ]
    dumped = json.loads(ai.ModelMessagesTypeAdapter.dump_json(history))
    assert gen_ai.input_messages(dumped) == [
        {"role": "system", "parts": [{"type": "text", "content": "be good"}]},
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "hi"},
                {"type": "text", "content": "see"},
                {"type": "uri", "modality": "image", "uri": "https://x/y.png"},
                {"type": "blob", "modality": "audio", "mime_type": "audio/wav", "content": "YQ=="},
            ],
        },
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "text", "content": "I look"},
                {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"q": 1}},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": {"a": 1}}]},
    ]
    assert gen_ai.instructions(dumped) == [{"type": "text", "content": "be quick"}]
