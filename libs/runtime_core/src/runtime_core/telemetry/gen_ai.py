"""Spans and attributes of model calls, tools and agents, named by OpenTelemetry's GenAI conventions.

The attributes stand in the trajectory's row of a model call too, whether or not anything is traced. Spans are made by
OpenTelemetry's API, and only where the process has configured an SDK: this module imports nothing of it, and without
an SDK a span costs a look into a dict. What was said is in spans only where the user asks for it
(`OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`), and never with its secrets (`redaction.py`).

Names: semantic conventions 1.44, whose GenAI part is still in development.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime_core.telemetry import gen_ai_messages
from runtime_core.telemetry.redaction import Attribute, redactor

CAPTURE_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Variable: `true` (or `span_only`, `span_and_event`) puts messages, arguments and results into spans."""

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
AGENT_NAME = "gen_ai.agent.name"
OUTPUT_TYPE = "gen_ai.output.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_CREATION_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
SYSTEM_INSTRUCTIONS = "gen_ai.system_instructions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_DEFINITIONS = "gen_ai.tool.definitions"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
# Of our own: the conventions have none for these.
ENGINE = "weft.engine"
ENGINE_FUNCTION = "weft.engine.function"
ENGINE_RUN = "weft.run"

CHAT = "chat"
EXECUTE_TOOL = "execute_tool"
INVOKE_AGENT = "invoke_agent"

_SETTINGS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop_sequences": "gen_ai.request.stop_sequences",
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


class Span:
    """A span under way, or none where nothing is traced: then every method returns at once."""

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:  # Any: OpenTelemetry's, which is imported by who configures it
        self._span = span

    @property
    def recording(self) -> bool:
        """Whether what is set here is kept anywhere."""
        return self._span is not None and bool(self._span.is_recording())

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Set attributes, without their secrets."""
        if self.recording:
            self._span.set_attributes(redactor().attributes(attributes))

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

    def failed(self, type: str, message: str = "") -> None:
        """The operation has failed; `type` is the error's class."""
        if self.recording:
            trace = sys.modules["opentelemetry.trace"]
            self._span.set_attribute(ERROR_TYPE, type)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, redactor().text(message) or type))

    def _content(self, name: str, value: Sequence[object]) -> None:
        if value:
            data = msgspec.json.encode(value, enc_hook=str)
            self._span.set_attribute(name, redactor().data(data).decode())


_NO_SPAN = Span()


@contextmanager
def model_span(model: str, attributes: Mapping[str, Attribute], *, traceparent: str = "") -> Iterator[Span]:
    """Around one request to a model: `chat <model>`. An exception that leaves it is the span's error, by its class."""
    with _span(f"{CHAT} {model}", "CLIENT", attributes, traceparent) as span:
        yield span


@contextmanager
def tool_span(tool: str, *, call: str = "", traceparent: str = "") -> Iterator[Span]:
    """Around one call of a tool: `execute_tool <tool>`; `call` is the id of the call."""
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
        attributes[ENGINE_RUN] = call
    with _span(f"engine {engine} {function}", "CLIENT", attributes, traceparent) as span:
        yield span


@contextmanager
def agent_span(agent: str, *, session: str = "", traceparent: str = "") -> Iterator[Span]:
    """Around one turn of an agent: `invoke_agent <agent>`. Spans of the agent's code are under it."""
    attributes: dict[str, Attribute] = {OPERATION: INVOKE_AGENT, AGENT_NAME: agent}
    if session:
        attributes[CONVERSATION] = session
    with _span(f"{INVOKE_AGENT} {agent}", "INTERNAL", attributes, traceparent) as span:
        yield span


def tracing() -> bool:
    """Whether this process has configured an SDK of OpenTelemetry."""
    return _tracer() is not None


def captures_content() -> bool:
    """Whether the user wants what was said in spans."""
    return os.environ.get(CAPTURE_CONTENT, "").strip().lower() in ("true", "1", "span_only", "span_and_event")


@contextmanager
def under(parent: Parent) -> Iterator[None]:
    """Spans of this task, and of those that it starts, are under what `parent` holds at their time."""
    token = _PARENT.set(parent)
    try:
        yield
    finally:
        _PARENT.reset(token)


class Parent:
    """The span under which a run's spans are. A run goes on over many turns in the same tasks, each turn has a span."""

    __slots__ = ("span",)

    def __init__(self) -> None:
        self.span: Span = _NO_SPAN


_PARENT: ContextVar[Parent | None] = ContextVar("weft_parent_span", default=None)


def _tracer() -> Any:  # Any: OpenTelemetry's Tracer; see Span
    # Whoever configures an SDK has imported the API.
    trace: ModuleType | None = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_tracer_provider"):  # half imported by another thread
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("weft")


@contextmanager
def _span(name: str, kind: str, attributes: Mapping[str, Attribute], traceparent: str) -> Iterator[Span]:
    tracer = _tracer()
    if tracer is None:
        yield _NO_SPAN
        return
    trace = sys.modules["opentelemetry.trace"]
    with tracer.start_as_current_span(
        redactor().text(name),
        context=_context(trace, traceparent),
        kind=trace.SpanKind[kind],
        attributes=redactor().attributes(attributes),
        record_exception=False,  # its text and traceback are in the trajectory, redacted
        set_status_on_exception=False,
    ) as made:
        span = Span(made)
        try:
            yield span
        except BaseException as error:
            span.failed(type(error).__qualname__, str(error))
            raise


def _context(trace: ModuleType, traceparent: str) -> Any:  # Any: OpenTelemetry's Context; None: the current one
    if trace.get_current_span().is_recording():
        return None
    parent = _PARENT.get()
    if parent is not None and parent.span.recording:
        return trace.set_span_in_context(parent.span._span)
    if traceparent:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
    return None
