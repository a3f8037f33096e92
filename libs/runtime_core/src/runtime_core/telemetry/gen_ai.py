"""Spans and attributes of model calls, tools, agents and engine steps, as OpenTelemetry's GenAI conventions name them.

The attributes stand in the trajectory's row of a model call too, whether or not anything is traced. What was said is in
spans only where the user asks for it (`OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`), and never with its secrets
(`redaction.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime_core.telemetry import gen_ai_messages, spans
from runtime_core.telemetry.attributes import (
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
from runtime_core.telemetry.redaction import Attribute, redactor
from runtime_core.telemetry.trace_context import Ids

CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Variable: `true` (or `span_only`, `span_and_event`) puts messages, arguments and results into spans."""

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
"""Names of pydantic-ai that differ from those of the conventions."""

Settings = Mapping[str, Any]  # Any: JSON of the provider's own
Result = Mapping[str, Any]  # Any: JSON, the result of a model call as it is journaled


def provider_name(provider: str) -> str:
    """The conventions' name of a provider that pydantic-ai names."""
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
    """What is known of a model call before its answer. `output_type` is `text` or `json`; empty values are left out."""
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
    """Address and port of a server by its URL; nothing for a URL that cannot be read."""
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
    """What the result of a model call says: model, id, finish reason, usage; for one put off, its error's type."""
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
        # Input and output always, since a call with none of them says something; of the others what there was.
        if isinstance(value, int | float) and (value or name in ("input_tokens", "output_tokens")):
            made[attribute] = int(value)
    return made


# ---- spans -----------------------------------------------------------------------------------------------------


class Span(spans.Span):
    """A span of an agent, a tool or a model call."""

    __slots__ = ()

    def asked(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Keep what the model is given (messages as JSON of pydantic-ai), where the user wants that in spans."""
        if self.recording and captures_content():
            self._content(SYSTEM_INSTRUCTIONS, gen_ai_messages.instructions(messages))
            self._content(INPUT_MESSAGES, gen_ai_messages.input_messages(messages))
            self._content(TOOL_DEFINITIONS, gen_ai_messages.tool_definitions(tools))

    def answered(self, result: Result) -> None:
        """Keep what came of a model call: the attributes of its result, and where wanted what the model said."""
        if not self.recording:
            return
        self.set(response_attributes(result))
        error, message = result.get("error"), result.get("message")
        if isinstance(error, Mapping):
            self.failed(str(error.get("type") or "error"), str(error.get("message") or ""))
        elif isinstance(message, Mapping) and captures_content():
            reason = result.get("finish_reason")
            self._content(OUTPUT_MESSAGES, [gen_ai_messages.output_message(message, reason)])

    def used(self, arguments: bytes = b"", result: bytes = b"") -> None:
        """Keep arguments and result of a tool (JSON), where the user wants content in spans."""
        if self.recording and captures_content():
            for name, data in ((TOOL_CALL_ARGUMENTS, arguments), (TOOL_CALL_RESULT, result)):
                if data:
                    self._span.set_attribute(name, redactor().data(data).decode(errors="replace"))

    def _content(self, name: str, value: Sequence[object]) -> None:
        if value:
            data = msgspec.json.encode(value, enc_hook=str)
            self._span.set_attribute(name, redactor().data(data).decode())


@contextmanager
def model_span(model: str, attributes: Mapping[str, Attribute], *, traceparent: str = "") -> Iterator[Span]:
    """Around one request to a model: `chat <model>`. An exception that leaves it is the span's error, by its class."""
    with _span(f"{CHAT} {model}", "CLIENT", attributes, traceparent) as span:
        yield span


def tool_span(tool: str, *, call: str = "", traceparent: str = "") -> AbstractContextManager[Span]:
    """Around one call of a tool: `execute_tool <tool>`; `call` is the id of the call."""
    return _tool_span(tool, call, traceparent) if spans.keeps(traceparent) else _NO_SPAN


_NO_SPAN = nullcontext(Span())


@contextmanager
def _tool_span(tool: str, call: str, traceparent: str) -> Iterator[Span]:
    attributes: dict[str, Attribute] = {OPERATION: EXECUTE_TOOL, TOOL_NAME: tool, TOOL_TYPE: "function"}
    if call:
        attributes[TOOL_CALL_ID] = call
    with _span(f"{EXECUTE_TOOL} {tool}", "INTERNAL", attributes, traceparent) as span:
        yield span


@contextmanager
def engine_span(engine: str, function: str, *, call: str = "", traceparent: str = "") -> Iterator[Span]:
    """Around one attempt of an engine step: `engine <engine> <function>`; `call` is the id of the step's run."""
    attributes: dict[str, Attribute] = {ENGINE: engine, ENGINE_FUNCTION: function}
    if call:
        attributes[RUN] = call
    with _span(f"engine {engine} {function}", "CLIENT", attributes, traceparent) as span:
        yield span


@contextmanager
def agent_span(
    agent: str, *, session: str = "", traceparent: str = "", ids: Ids | None = None, held: bool = False
) -> Iterator[Span]:
    """Around one turn of an agent: `invoke_agent <agent>`. Spans of the agent's code are under it.

    `ids`, `held`: see `spans.span`.
    """
    attributes: dict[str, Attribute] = {OPERATION: INVOKE_AGENT, AGENT_NAME: agent}
    if session:
        attributes[CONVERSATION] = session
    with _span(f"{INVOKE_AGENT} {agent}", "INTERNAL", attributes, traceparent, ids, held) as span:
        yield span


def captures_content() -> bool:
    """Whether the user wants what was said in spans."""
    return os.environ.get(CAPTURE_CONTENT, "").strip().lower() in ("true", "1", "span_only", "span_and_event")


@contextmanager
def _span(
    name: str,
    kind: str,
    attributes: Mapping[str, Attribute],
    traceparent: str,
    ids: Ids | None = None,
    held: bool = False,
) -> Iterator[Span]:
    if not spans.keeps(traceparent):
        yield Span()
        return
    name = redactor().text(name)
    known = redactor().attributes(attributes)
    with spans.span(name, kind, known, parent=traceparent, ids=ids, held=held, make=Span) as made:
        yield made
