"""Spans and attributes of model calls, tools, agents and engine steps, by OpenTelemetry's GenAI conventions.

The trajectory's row of a model call has the attributes too, even without tracing. Spans hold the content of messages
only if the user opts in (`OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`), and never secrets (`redaction.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime_core.telemetry import spans
from runtime_core.telemetry.redaction import Attribute, redactor
from runtime_core.telemetry.spans import (
    AGENT_NAME,
    CACHE_CREATION_TOKENS,
    CACHE_READ_TOKENS,
    CONVERSATION,
    ENGINE,
    ENGINE_FUNCTION,
    ERROR_TYPE,
    FINISH_REASONS,
    INPUT_MESSAGES,
    INPUT_TOKENS,
    OPERATION,
    OUTPUT_MESSAGES,
    OUTPUT_TOKENS,
    OUTPUT_TYPE,
    PROVIDER,
    REASONING_TOKENS,
    REQUEST_FREQUENCY_PENALTY,
    REQUEST_MAX_TOKENS,
    REQUEST_MODEL,
    REQUEST_PRESENCE_PENALTY,
    REQUEST_SEED,
    REQUEST_STOP_SEQUENCES,
    REQUEST_STREAM,
    REQUEST_TEMPERATURE,
    REQUEST_TOP_K,
    REQUEST_TOP_P,
    RESPONSE_ID,
    RESPONSE_MODEL,
    RUN,
    SERVER_ADDRESS,
    SERVER_PORT,
    SYSTEM_INSTRUCTIONS,
    TIME_TO_FIRST_CHUNK,
    TOOL_CALL_ARGUMENTS,
    TOOL_CALL_ID,
    TOOL_CALL_RESULT,
    TOOL_DEFINITIONS,
    TOOL_NAME,
    TOOL_TYPE,
)
from runtime_core.telemetry.trace_context import Ids

CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The variable that puts messages, arguments and results into spans: `true`, `span_only` or `span_and_event`."""
CHAT = "chat"
EXECUTE_TOOL = "execute_tool"
INVOKE_AGENT = "invoke_agent"
_SETTINGS = {
    "max_tokens": REQUEST_MAX_TOKENS,
    "temperature": REQUEST_TEMPERATURE,
    "top_p": REQUEST_TOP_P,
    "top_k": REQUEST_TOP_K,
    "seed": REQUEST_SEED,
    "frequency_penalty": REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": REQUEST_PRESENCE_PENALTY,
    "stop_sequences": REQUEST_STOP_SEQUENCES,
}
_USAGE = {
    "input_tokens": INPUT_TOKENS,
    "output_tokens": OUTPUT_TOKENS,
    "cached_tokens": CACHE_READ_TOKENS,
    "cached_input_tokens": CACHE_READ_TOKENS,
    "cache_read_tokens": CACHE_READ_TOKENS,
    "cache_write_tokens": CACHE_CREATION_TOKENS,
    "reasoning_tokens": REASONING_TOKENS,
    "output_reasoning_tokens": REASONING_TOKENS,
}
_PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gemini",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "grok": "x_ai",
    "mistral": "mistral_ai",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "xai": "x_ai",
}
"""pydantic-ai's names of providers → the conventions' names, where they differ."""
Settings = Mapping[str, Any]  # Any: JSON in the provider's format
Result = Mapping[str, Any]  # Any: JSON, the journaled result of a model call
Part = dict[str, Any]  # Any: JSON in the conventions' format
Message = Mapping[str, Any]  # Any: a ModelMessage of pydantic-ai, as JSON
_ROLES = {"system-prompt": "system", "tool-return": "tool", "builtin-tool-return": "tool"}


def provider_name(provider: str) -> str:
    """Return the conventions' name of a pydantic-ai provider."""
    return _PROVIDERS.get(provider, provider)


def request_attributes(
    *,
    provider: str,
    model: str,
    settings: Settings | None = None,
    base_url: str | None = None,
    agent: str = "",
    session: str = "",
    stream: bool = False,
    output_type: str = "",
) -> dict[str, Attribute]:
    """Return the attributes of a model request. `output_type` is `text` or `json`. Empty values are omitted."""
    made: dict[str, Attribute] = {
        OPERATION: CHAT,
        PROVIDER: provider_name(provider),
        REQUEST_MODEL: model,
        **{name: value for name, value in ((AGENT_NAME, agent), (CONVERSATION, session)) if value},
    }
    for name, attribute in _SETTINGS.items():
        value = (settings or {}).get(name)
        if isinstance(value, list | tuple):
            made[attribute] = [str(each) for each in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            made[attribute] = value
    if stream:
        made[REQUEST_STREAM] = True
    if output_type:
        made[OUTPUT_TYPE] = output_type
    return made | server_attributes(base_url)


def server_attributes(base_url: str | None) -> dict[str, Attribute]:
    """Return a server's address and port from its URL; empty for an invalid URL."""
    try:
        parts = urlsplit(base_url or "")
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return {}
    made: dict[str, Attribute] = {}
    if parts.hostname:
        made[SERVER_ADDRESS] = parts.hostname
        if port:
            made[SERVER_PORT] = port
    return made


def response_attributes(result: Result) -> dict[str, Attribute]:
    """Return the attributes of a result: model, id, finish reason, usage; of a deferred call, the error type."""
    made: dict[str, Attribute] = {}
    error = result.get("error")
    if isinstance(error, Mapping):
        made[ERROR_TYPE] = str(error.get("type") or "error")
        return made
    message = result.get("message")
    message = message if isinstance(message, Mapping) else {}
    texts = {
        RESPONSE_MODEL: result.get("model") or message.get("model_name"),
        RESPONSE_ID: message.get("provider_response_id"),
    }
    made |= {attribute: text for attribute, text in texts.items() if isinstance(text, str) and text}
    reason = result.get("finish_reason") or message.get("finish_reason")
    if isinstance(reason, str):
        made[FINISH_REASONS] = [reason]
    first = result.get("first_seconds")
    if isinstance(first, int | float):
        made[TIME_TO_FIRST_CHUNK] = first
    usage = result.get("usage")
    for name, attribute in _USAGE.items():
        value = usage.get(name) if isinstance(usage, Mapping) else None
        # Input and output tokens even if 0; others only if there were any.
        if isinstance(value, int | float) and (value or name in ("input_tokens", "output_tokens")):
            made[attribute] = int(value)
    return made


# ---- spans -----------------------------------------------------------------------------------------------------


class GenAISpan(spans.Span):
    """A span of an agent, a tool or a model call."""

    __slots__ = ()

    def asked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record the model's input (messages as JSON of pydantic-ai), if the user opted in."""
        if self.recording and captures_content():
            self._content(SYSTEM_INSTRUCTIONS, instructions(messages))
            self._content(INPUT_MESSAGES, input_messages(messages))
            self._content(TOOL_DEFINITIONS, tool_definitions(tools))

    def answered(self, result: Result) -> None:
        """Record the attributes of a result, and its content if the user opted in."""
        if not self.recording:
            return
        self.set(response_attributes(result))
        error, message = result.get("error"), result.get("message")
        if isinstance(error, Mapping):
            self.failed(str(error.get("type") or "error"), str(error.get("message") or ""))
        elif isinstance(message, Mapping) and captures_content():
            reason = result.get("finish_reason")
            self._content(OUTPUT_MESSAGES, [output_message(message, reason)])

    def used(self, arguments: bytes = b"", result: bytes = b"") -> None:
        """Record a tool's arguments and result (JSON), if the user opted in."""
        if self.recording and captures_content():
            for name, data in ((TOOL_CALL_ARGUMENTS, arguments), (TOOL_CALL_RESULT, result)):
                if data:
                    self._span.set_attribute(name, redactor().data(data).decode(errors="replace"))

    def _content(self, name: str, value: Sequence[object]) -> None:
        if value:
            data = msgspec.json.encode(value, enc_hook=str)
            self._span.set_attribute(name, redactor().data(data).decode())


@contextmanager
def model_span(model: str, attributes: Mapping[str, Attribute], *, traceparent: str = "") -> Iterator[GenAISpan]:
    """Trace one request to a model as `chat <model>`. An exception sets the span's error to its class."""
    with _span(f"{CHAT} {model}", "CLIENT", attributes, traceparent) as span:
        yield span


def tool_span(tool: str, *, call: str = "", traceparent: str = "") -> AbstractContextManager[GenAISpan]:
    """Trace one tool call as `execute_tool <tool>`; `call` is its id."""
    return _tool_span(tool, call, traceparent) if spans.keeps(traceparent) else _NO_SPAN


_NO_SPAN = nullcontext(GenAISpan())


@contextmanager
def _tool_span(tool: str, call: str, traceparent: str) -> Iterator[GenAISpan]:
    attributes: dict[str, Attribute] = {OPERATION: EXECUTE_TOOL, TOOL_NAME: tool, TOOL_TYPE: "function"}
    if call:
        attributes[TOOL_CALL_ID] = call
    with _span(f"{EXECUTE_TOOL} {tool}", "INTERNAL", attributes, traceparent) as span:
        yield span


@contextmanager
def engine_span(engine: str, function: str, *, call: str = "", traceparent: str = "") -> Iterator[GenAISpan]:
    """Trace one attempt of an engine step as `engine <engine> <function>`; `call` is the run id of the step."""
    attributes: dict[str, Attribute] = {ENGINE: engine, ENGINE_FUNCTION: function}
    if call:
        attributes[RUN] = call
    with _span(f"engine {engine} {function}", "CLIENT", attributes, traceparent) as span:
        yield span


@contextmanager
def agent_span(
    agent: str, *, session: str = "", traceparent: str = "", ids: Ids | None = None, held: bool = False
) -> Iterator[GenAISpan]:
    """Trace one turn of an agent as `invoke_agent <agent>`, the parent of the spans of the agent's code.

    `ids`, `held`: see `spans.span`.
    """
    attributes: dict[str, Attribute] = {OPERATION: INVOKE_AGENT, AGENT_NAME: agent}
    if session:
        attributes[CONVERSATION] = session
    with _span(f"{INVOKE_AGENT} {agent}", "INTERNAL", attributes, traceparent, ids, held) as span:
        yield span


def captures_content() -> bool:
    """Return whether spans may hold the content of messages."""
    return os.environ.get(CAPTURE_CONTENT, "").strip().lower() in ("true", "1", "span_only", "span_and_event")


@contextmanager
def _span(
    name: str,
    kind: str,
    attributes: Mapping[str, Attribute],
    traceparent: str,
    ids: Ids | None = None,
    held: bool = False,
) -> Iterator[GenAISpan]:
    if not spans.keeps(traceparent):
        yield GenAISpan()
        return
    name = redactor().text(name)
    known = redactor().attributes(attributes)
    with spans.span(name, kind, known, parent=traceparent, ids=ids, held=held, make=GenAISpan) as made:
        yield made


# ---- messages --------------------------------------------------------------------------------------------------


def input_messages(messages: Sequence[Message]) -> list[Part]:
    """Return the model's input: `[{"role": "user", "parts": [{"type": "text", "content": …}]}, …]`."""
    made: list[Part] = []
    for message in messages:
        if message.get("kind") == "response":
            made.append(output_message(message))
            continue
        for part in _parts(message):
            role = _role(part)
            # Group adjacent parts of one role, as the model saw them.
            if not made or made[-1]["role"] != role or role == "assistant":
                made.append({"role": role, "parts": []})
            made[-1]["parts"] += _input_parts(part)
    return made


def output_message(message: Message, finish_reason: str | None = None) -> Part:
    """Return the model's answer, a message of role `assistant`."""
    made: Part = {"role": "assistant", "parts": [_output_part(part) for part in _parts(message)]}
    if (reason := finish_reason or message.get("finish_reason")) is not None:
        made["finish_reason"] = reason
    return made


def instructions(messages: Sequence[Message]) -> list[Part]:
    """Return the instructions of the last request, which are those that the model gets."""
    for message in reversed(messages):
        if message.get("kind") == "request" and (text := message.get("instructions")):
            return [{"type": "text", "content": text}]
    return []


def tool_definitions(tools: Sequence[Mapping[str, Any]]) -> list[Part]:  # Any: JSON
    """Return the tools that the model may call, each with name, description and schema of arguments."""
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


def _input_parts(part: Mapping[str, Any]) -> list[Part]:
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


def _output_part(part: Mapping[str, Any]) -> Part:
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
