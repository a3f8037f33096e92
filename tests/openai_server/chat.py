"""Chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tests.openai_server.answering import Said, parts_of
from tests.openai_server.asked import Asked, Reading
from tests.openai_server.script import Usage


def read(body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
    """Read the body. Raises KeyError, TypeError or AttributeError if it does not have this format."""
    reading = Reading()
    messages = body["messages"]
    for message in messages:
        role, content = message["role"], message.get("content")
        if role in ("system", "developer"):
            reading.said_system(content)
        elif role == "user":
            reading.said_user(content)
        elif role == "assistant":
            reading.said_model()
            for call in message.get("tool_calls") or ():
                reading.tools_by_call[call["id"]] = call["function"]["name"]
        elif role == "tool":
            reading.said_tool(message["tool_call_id"], content)
    return reading.asked(
        "chat",
        body,
        headers,
        messages,
        count=len(messages),
        tools=tuple(tool["function"]["name"] for tool in body.get("tools") or () if "function" in tool),
        wants_json=(body.get("response_format") or {}).get("type") in ("json_schema", "json_object"),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def whole(said: Said, asked: Asked) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": said.refusal, "annotations": []}
    if said.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said.calls
        ]
    return {
        "id": f"chatcmpl-{said.id}-{said.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": said.finish_reason}],
        "usage": usage_of(said.usage),
        "service_tier": "default",
        "system_fingerprint": "fp_test",
    }


def stream(said: Said, asked: Asked, pieces: int) -> Iterator[bytes]:
    """The stream's events, to the last."""
    for chunk in chunks(said, asked, pieces):
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def error_event(message: str, number: int) -> bytes:
    """Return a stream's error."""
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def chunks(said: Said, asked: Asked, pieces: int) -> Iterator[dict[str, Any]]:
    head = {
        "id": f"chatcmpl-{said.id}-{said.number}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": asked.model,
        "service_tier": "default",
        "system_fingerprint": "fp_test",
    }
    # With include_usage, each chunk but the last says that its usage is null.
    tail: dict[str, Any] = {"usage": None} if asked.usage else {}

    def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**head, "choices": [choice], **tail}

    yield chunk({"role": "assistant", "content": None if said.text is None else "", "refusal": None})
    for part in parts_of(said.text or "", pieces):
        yield chunk({"content": part})
    for part in parts_of(said.refusal or "", pieces):
        yield chunk({"refusal": part})
    for index, call in enumerate(said.calls):
        function = {"name": call.name, "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, "id": call.id, "type": "function", "function": function}]})
        for part in parts_of(call.arguments, 2):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    yield chunk({}, said.finish_reason)
    if asked.usage:
        yield {**head, "choices": [], "usage": usage_of(said.usage)}


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input,
        "completion_tokens": usage.output,
        "total_tokens": usage.input + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning, "audio_tokens": 0},
    }
