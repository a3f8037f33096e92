"""Responses: `POST /v1/responses`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tests.openai_server.answering import Said, parts_of
from tests.openai_server.asked import Asked, Reading
from tests.openai_server.script import Usage

OF_THE_MODEL = ("reasoning", "function_call")


def read(body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
    """Read the body. Raises KeyError, TypeError or AttributeError if it does not have this format."""
    if body.get("previous_response_id"):
        raise TypeError("previous_response_id: this server keeps no responses; send the whole input")
    reading = Reading()
    instructions = body.get("instructions")
    if instructions:
        reading.said_system(instructions)
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    model_speaks = False
    for item in items:
        kind, role = item.get("type", "message"), item.get("role")
        of_the_model = kind in OF_THE_MODEL or role == "assistant"
        if of_the_model and not model_speaks:
            # What the model said at once are several items here.
            reading.said_model()
        model_speaks = of_the_model
        if kind == "function_call":
            reading.tools_by_call[item["call_id"]] = item["name"]
        elif kind == "function_call_output":
            reading.said_tool(item["call_id"], item["output"])
        elif role in ("system", "developer"):
            reading.said_system(item["content"])
        elif role == "user":
            reading.said_user(item["content"])
    return reading.asked(
        "responses",
        body,
        headers,
        [instructions, items],
        count=len(items),
        tools=tuple(tool["name"] for tool in body.get("tools") or () if tool.get("type") == "function"),
        wants_json=((body.get("text") or {}).get("format") or {}).get("type") in ("json_schema", "json_object"),
        usage=True,
    )


def whole(said: Said, asked: Asked) -> dict[str, Any]:
    return response(said, asked, outputs(said), status_of(said))


def stream(said: Said, asked: Asked, pieces: int) -> Iterator[bytes]:
    """The stream's events, to the last."""
    for number, (name, data) in enumerate(events(said, asked, pieces)):
        encoded = msgspec.json.encode({"type": name, "sequence_number": number, **data})
        yield b"event: %s\ndata: %s\n\n" % (name.encode(), encoded)


def error_event(message: str, number: int) -> bytes:
    """Return a stream's error, as its event of this number."""
    error = {"type": "error", "sequence_number": number, "code": "server_error", "message": message, "param": None}
    return b"event: error\ndata: %s\n\n" % msgspec.json.encode(error)


def events(said: Said, asked: Asked, pieces: int) -> Iterator[tuple[str, dict[str, Any]]]:
    begun = response(said, asked, [], "in_progress")
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(outputs(said)):
        yield from item_events(item, index, pieces)
    status = status_of(said)
    yield f"response.{status}", {"response": response(said, asked, outputs(said), status)}


def item_events(item: dict[str, Any], index: int, pieces: int) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"item_id": item["id"], "output_index": index}
    empty = {**item, **{"message": {"content": []}, "reasoning": {"summary": []}}.get(item["type"], {"arguments": ""})}
    yield "response.output_item.added", {"output_index": index, "item": {**empty, "status": "in_progress"}}
    if item["type"] == "function_call":
        for part in parts_of(item["arguments"], 2):
            yield "response.function_call_arguments.delta", {**at, "delta": part}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, **done}
    elif item["type"] == "reasoning":
        for number, part in enumerate(item["summary"]):
            yield from text_events("response.reasoning_summary", part, {**at, "summary_index": number}, pieces)
    else:
        for number, part in enumerate(item["content"]):
            yield from text_events("response.content", part, {**at, "content_index": number}, pieces)
    yield "response.output_item.done", {"output_index": index, "item": item}


def text_events(
    prefix: str, part: dict[str, Any], at: dict[str, Any], pieces: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    field = "refusal" if part["type"] == "refusal" else "text"
    # Its deltas are named after what is in the part, its frame after where the part stands.
    name = {"output_text": "output_text", "refusal": "refusal", "summary_text": "reasoning_summary_text"}[part["type"]]
    more: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
    yield f"{prefix}_part.added", {**at, "part": {**part, field: ""}}
    for delta in parts_of(part[field], pieces):
        yield f"response.{name}.delta", {**at, "delta": delta, **more}
    yield f"response.{name}.done", {**at, field: part[field], **more}
    yield f"{prefix}_part.done", {**at, "part": part}


def outputs(said: Said) -> list[dict[str, Any]]:
    """Return the items that the model has sent."""
    numbers = itertools.count()
    items: list[dict[str, Any]] = []
    if said.reasoning is not None:
        summary = [{"type": "summary_text", "text": said.reasoning}]
        items.append({"id": f"rs_{said.id}_{next(numbers)}", "type": "reasoning", "summary": summary})
    content: list[dict[str, Any]] = []
    if said.text is not None:
        content.append({"type": "output_text", "text": said.text, "annotations": [], "logprobs": []})
    if said.refusal is not None:
        content.append({"type": "refusal", "refusal": said.refusal})
    if content:
        message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
        items.append({"id": f"msg_{said.id}_{next(numbers)}", **message})
    items += [
        {
            "id": f"fc_{said.id}_{next(numbers)}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in said.calls
    ]
    return items


def status_of(said: Said) -> str:
    return "incomplete" if said.finish_reason in INCOMPLETE else "completed"


INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reason, as chat completions name it → why a response is incomplete."""


def response(said: Said, asked: Asked, items: list[dict[str, Any]], status: str) -> dict[str, Any]:
    incomplete = {"reason": INCOMPLETE[said.finish_reason]} if status == "incomplete" else None
    return {
        "id": f"resp_{said.id}-{said.number}",
        "object": "response",
        "created_at": time.time(),
        "status": status,
        "model": asked.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": incomplete,
        "instructions": None,
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
        "usage": None if status == "in_progress" else usage_of(said.usage),
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }
