"""Messages of a model call in the form that OpenTelemetry's GenAI conventions give them: roles with parts.

They come as pydantic-ai writes its messages to JSON. A kind of part that is new is passed on with its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Part = dict[str, Any]  # Any: JSON, as the conventions define it
Message = Mapping[str, Any]  # Any: a ModelMessage of pydantic-ai, as JSON

_ROLES = {"system-prompt": "system", "tool-return": "tool", "builtin-tool-return": "tool"}


def input_messages(messages: Sequence[Message]) -> list[Part]:
    """What the model was given: `[{"role": "user", "parts": [{"type": "text", "content": …}]}, …]`."""
    made: list[Part] = []
    for message in messages:
        if message.get("kind") == "response":
            made.append(output_message(message))
            continue
        for part in _parts(message):
            role = _role(part)
            # Parts of one role stand together, as the model saw them.
            if not made or made[-1]["role"] != role or role == "assistant":
                made.append({"role": role, "parts": []})
            made[-1]["parts"] += _given(part)
    return made


def output_message(message: Message, finish_reason: str | None = None) -> Part:
    """What the model has said, a message of role `assistant`."""
    made: Part = {"role": "assistant", "parts": [_said(part) for part in _parts(message)]}
    if (reason := finish_reason or message.get("finish_reason")) is not None:
        made["finish_reason"] = reason
    return made


def instructions(messages: Sequence[Message]) -> list[Part]:
    """The instructions beside the messages: those of the last request, which is what the model gets."""
    for message in reversed(messages):
        if message.get("kind") == "request" and (text := message.get("instructions")):
            return [{"type": "text", "content": text}]
    return []


def tool_definitions(tools: Sequence[Mapping[str, Any]]) -> list[Part]:  # Any: JSON
    """The tools that the model was told of, each with its name, description and schema of arguments."""
    made = []
    for tool in tools:
        one: Part = {"type": "function", "name": tool.get("name", "")}
        for name, given in (("description", "description"), ("parameters", "arguments"), ("parameters", "parameters")):
            if given in tool:
                one[name] = tool[given]
        made.append(one)
    return made


def _parts(message: Message) -> list[Mapping[str, Any]]:
    parts = message.get("parts")
    return [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []


def _role(part: Mapping[str, Any]) -> str:
    kind = part.get("part_kind", "")
    if kind == "retry-prompt":
        return "tool" if part.get("tool_name") else "user"
    return _ROLES.get(kind, "user")


def _given(part: Mapping[str, Any]) -> list[Part]:
    content = part.get("content")
    if _role(part) == "tool":
        return [{"type": "tool_call_response", "id": part.get("tool_call_id"), "response": content}]
    pieces = content if isinstance(content, list) else [content]
    return [_piece(piece) for piece in pieces if piece is not None]


def _piece(piece: object) -> Part:
    match piece:
        case {"kind": "binary", "data": data, "media_type": str(media)}:
            return {"type": "blob", "modality": _modality(media), "mime_type": media, "content": data}
        case {"url": url, "kind": str(kind)}:
            return {"type": "uri", "modality": kind.removesuffix("-url"), "uri": url}
        case {"content": content, "kind": "text"}:
            return {"type": "text", "content": content}
        case str():
            return {"type": "text", "content": piece}
        case _:
            return {"type": "json", "content": piece}


def _modality(media: str) -> str:
    return media.partition("/")[0] or "application"


def _said(part: Mapping[str, Any]) -> Part:
    kind = part.get("part_kind", "")
    if kind == "text":
        return {"type": "text", "content": part.get("content", "")}
    if kind == "thinking":
        return {"type": "reasoning", "content": part.get("content", "")}
    if kind in ("tool-call", "builtin-tool-call"):
        return {
            "type": "tool_call",
            "id": part.get("tool_call_id"),
            "name": part.get("tool_name", ""),
            "arguments": part.get("args"),
        }
    if kind == "builtin-tool-return":
        return {"type": "tool_call_response", "id": part.get("tool_call_id"), "response": part.get("content")}
    return {"type": str(kind) or "unknown", "content": part.get("content")}
