"""Spans with predetermined ids, in SDKs that use an id generator, and the names of their attributes.

The names follow OpenTelemetry's semantic conventions 1.44, whose parts for messaging and GenAI are in development.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeVar

from runtime_core.telemetry import trace_context
from runtime_core.telemetry.redaction import Attribute, redactor
from runtime_core.telemetry.trace_context import SAMPLED, Ids

# ---- GenAI -----------------------------------------------------------------------------------------------------

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
CONVERSATION = "gen_ai.conversation.id"
AGENT_NAME = "gen_ai.agent.name"
OUTPUT_TYPE = "gen_ai.output.type"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_STOP_SEQUENCES = "gen_ai.request.stop_sequences"
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

# ---- messaging -------------------------------------------------------------------------------------------------

MESSAGING_SYSTEM = "messaging.system"
MESSAGING_OPERATION = "messaging.operation.name"
MESSAGING_OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
DESTINATION_PARTITION = "messaging.destination.partition.id"
CONSUMER_GROUP = "messaging.consumer.group.name"
CLIENT_ID = "messaging.client.id"
MESSAGE_ID = "messaging.message.id"
MESSAGE_CONVERSATION = "messaging.message.conversation_id"
BATCH_MESSAGES = "messaging.batch.message_count"

# ---- any span, and its process --------------------------------------------------------------------------------

ERROR_TYPE = "error.type"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE = "service.instance.id"

# ---- our own ---------------------------------------------------------------------------------------------------

ATTEMPT = "weft.attempt"
DELIVERIES = "weft.deliveries"
RUN = "weft.run"
STEPS = "weft.steps"
STATUS = "weft.status"
DUPLICATE = "weft.duplicate"
ENGINE = "weft.engine"
ENGINE_FUNCTION = "weft.engine.function"


WANTED: ContextVar[Ids | None] = ContextVar("weft_wanted_span_ids", default=None)
"""The ids of the span that is being created in this context; None: any."""


class KnownIds:
    """Wraps an SDK's id generator, which generates the ids of all other spans. Any: the SDK's type."""

    def __init__(self, others: Any) -> None:
        self._others = others

    def generate_span_id(self) -> int:
        ids = WANTED.get()
        return int(self._others.generate_span_id()) if ids is None else ids.span

    def generate_trace_id(self) -> int:
        ids = WANTED.get()
        return ids.trace if ids is not None and ids.trace else int(self._others.generate_trace_id())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._others, name)


def use_known_ids(tracer: Any) -> None:
    """Let a tracer create spans with predetermined ids, if its SDK (such as OpenTelemetry's) allows it."""
    generator = getattr(tracer, "id_generator", None)
    if hasattr(generator, "generate_span_id") and not isinstance(generator, KnownIds):
        tracer.id_generator = KnownIds(generator)


Otel = Any
"""A type of OpenTelemetry, which only the code that configures it imports."""


class Span:
    """A current span. Without tracing it wraps None, and every method returns at once."""

    __slots__ = ("_held_ns", "_span")

    def __init__(self, span: Otel = None) -> None:
        self._span = span
        self._held_ns = 0

    @property
    def recording(self) -> bool:
        return self._span is not None and bool(self._span.is_recording())

    @property
    def traceparent(self) -> str:
        """The traceparent for child spans; empty without tracing."""
        if self._span is None:
            return ""
        context = self._span.get_span_context()
        return trace_context.written(context.trace_id, context.span_id, int(context.trace_flags))

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Set attributes, with their secrets removed."""
        if self.recording:
            self._span.set_attributes(redactor().attributes(attributes))

    def failed(self, type: str, message: str = "") -> None:
        """Mark the operation as failed; `type` is the error's class."""
        if self.recording:
            trace = sys.modules["opentelemetry.trace"]
            self._span.set_attribute(ERROR_TYPE, type)
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, redactor().text(message) or type))

    def release(self) -> None:
        """Send a held span (see `span`) with its original end. Otherwise it is never sent."""
        if self._held_ns:
            self._span.end(self._held_ns)
            self._held_ns = 0


NO_SPAN = Span()
AnySpan = TypeVar("AnySpan", bound=Span)


class Parent:
    """Holds the parent of a run's spans: a run's asyncio tasks live for many turns, and each turn has a span."""

    __slots__ = ("span",)

    def __init__(self) -> None:
        self.span: Span = NO_SPAN


_PARENT: ContextVar[Parent | None] = ContextVar("weft_parent_span", default=None)


@contextmanager
def under(parent: Parent) -> Iterator[None]:
    """Make spans of this asyncio task, and of tasks that it starts, children of the current span of `parent`."""
    token = _PARENT.set(parent)
    try:
        yield
    finally:
        _PARENT.reset(token)


_PROVIDER_BY_NAME = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ
"""Whether the API creates a provider at its first use."""


def tracing() -> bool:
    """Return whether this process has configured an OpenTelemetry SDK."""
    # Configuring an SDK requires importing the API.
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return False
    provider = getattr(trace, "_TRACER_PROVIDER", trace)
    if provider is None:  # the API would read the environment at each call
        return _PROVIDER_BY_NAME and _tracer() is not None
    return (_tracer() if provider is trace else _tracer_of(provider)) is not None


@contextmanager
def span(
    name: str,
    kind: str,
    attributes: Mapping[str, Attribute],
    *,
    parent: str = "",
    state: str = "",
    inner: bool = True,
    links: Sequence[str] = (),
    ids: Ids | None = None,
    held: bool = False,
    make: type[AnySpan],
) -> Iterator[AnySpan]:
    """Create a span and make it the current one. An exception sets its error to the exception's class.

    Args:
        parent: A traceparent (with its tracestate in `state`), used if there is no current span; always if `inner` is
            False.
        links: Traceparents.
        ids: The span's own ids, if the SDK allows it.
        held: Send the span only when `release` is called.

    Name and attributes must not hold secrets. An unsampled trace has no span, whatever this process samples.
    """
    tracer = _tracer()
    if tracer is None:
        yield make()
        return
    trace = sys.modules["opentelemetry.trace"]
    if _dropped(trace, parent, inner):
        with within(parent):
            yield make()
        return
    context = _context(trace, parent, state) if inner else _remote(trace, parent, state)
    token = WANTED.set(ids)
    try:
        made = tracer.start_span(
            name,
            context=context,
            kind=trace.SpanKind[kind],
            attributes=attributes,
            links=_links(trace, links),
        )
    finally:
        WANTED.reset(token)
    # The trajectory has the message and traceback of an exception, redacted.
    with trace.use_span(made, end_on_exit=not held, record_exception=False, set_status_on_exception=False):
        span = make(made)
        try:
            yield span
        except BaseException as error:
            span.failed(type(error).__qualname__, str(error))
            raise
        finally:
            if held:
                span._held_ns = time.time_ns()


def ended_span(
    name: str,
    kind: str,
    attributes: Mapping[str, Attribute],
    *,
    began_ns: int,
    ended_ns: int,
    parent: str = "",
    links: Sequence[str] = (),
    ids: Ids | None = None,
    error: str = "",
) -> Span:
    """Create a span of a past operation. Times are nanoseconds since 1970; `error` is a type. See `span`."""
    tracer = _tracer()
    if tracer is None:
        return NO_SPAN
    trace = sys.modules["opentelemetry.trace"]
    token = WANTED.set(ids)
    try:
        made = tracer.start_span(
            name,
            context=_remote(trace, parent, ""),
            kind=trace.SpanKind[kind],
            attributes=attributes,
            links=_links(trace, links),
            start_time=began_ns,
        )
    finally:
        WANTED.reset(token)
    span = Span(made)
    if error:
        span.failed(error)
    made.end(max(began_ns, ended_ns))
    return span


def keeps(parent: str = "") -> bool:
    """Return whether a new span would be recorded, with `parent` if there is no current span."""
    return tracing() and not _dropped(sys.modules["opentelemetry.trace"], parent, inner=True)


def task_ids(namespace: str, task: str, traceparent: str) -> Ids:
    """Return the trace of a task: its publisher's, or else one derived from the task id.

    A derived trace is sampled by this process's sampler. Ask this before anything is made for a span: a busy
    installation keeps one trace in a hundred.
    """
    stated = trace_context.read(traceparent) if traceparent else None
    if stated is not None:
        return stated
    trace = sys.modules["opentelemetry.trace"]
    return _derived_ids(getattr(trace, "_TRACER_PROVIDER", None) or trace.get_tracer_provider(), namespace, task)


@lru_cache(maxsize=1024)
def _derived_ids(provider: Otel, namespace: str, task: str) -> Ids:
    ids = trace_context.of_task(namespace, task)
    return ids if _sampler_of(provider)(ids.trace, f"task {task}") else Ids(ids.trace, ids.span, 0)


def task_traceparent(namespace: str, task: str, traceparent: str) -> str:
    """Return the traceparent of `task_ids`; a valid `traceparent` stays as it is."""
    if traceparent and trace_context.read(traceparent) is not None:
        return traceparent
    ids = task_ids(namespace, task, "")
    return trace_context.written(ids.trace, ids.span, ids.flags)


@contextmanager
def within(traceparent: str) -> Iterator[None]:
    """Make all spans created inside children of a span of another process.

    This also works if the SDK is configured only inside, by code that has imported the API before.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if not traceparent or trace is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(_remote(trace, traceparent, ""))
    try:
        yield
    finally:
        context.detach(token)


class Unsampled:
    """`with Unsampled(ids):` does what `within` does for an unsampled trace, at a third of its cost."""

    __slots__ = ("_ids", "_token")

    def __init__(self, ids: Ids) -> None:
        self._ids = ids

    def __enter__(self) -> None:
        attach, context_of = _attaching()
        self._token = attach(context_of(self._ids))

    def __exit__(self, *_: object) -> None:
        sys.modules["opentelemetry.context"].detach(self._token)


@lru_cache(maxsize=1)
def _attaching() -> tuple[Callable[[Otel], Otel], Callable[[Ids], Otel]]:
    """Return OpenTelemetry's `attach`, and what makes the Context of an unsampled span from its ids."""
    from opentelemetry.context import Context, attach
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    class Distant(NonRecordingSpan):
        """Creates its SpanContext on demand: most code neither creates spans nor calls others."""

        is_unsampled = True

        def __init__(self, ids: Ids) -> None:
            self._ids = ids

        def get_span_context(self) -> SpanContext:
            return SpanContext(self._ids.trace, self._ids.span, True, TraceFlags(self._ids.flags))

    (key,) = set_span_in_context(NonRecordingSpan(SpanContext(0, 0, True)), Context())
    return attach, lambda ids: Context({key: Distant(ids)})


def current_traceparent() -> str:
    """Return the traceparent of the current span, of any SDK; empty if there is none."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_current_span"):  # half imported by another thread
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return trace_context.written(context.trace_id, context.span_id, int(context.trace_flags))


def current_ids() -> tuple[str, str]:
    """Return trace id and span id of the current span in hexadecimal; empty without tracing."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_current_span"):  # half imported by another thread
        return "", ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        parent = _PARENT.get()
        if parent is None or not parent.span.recording:
            return "", ""
        context = parent.span._span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def _tracer() -> Otel:
    trace: ModuleType | None = sys.modules.get("opentelemetry.trace")
    if trace is None or not hasattr(trace, "get_tracer_provider"):  # half imported by another thread
        return None
    return _tracer_of(trace.get_tracer_provider())


@lru_cache(maxsize=1)
def _tracer_of(provider: Otel) -> Otel:
    trace = sys.modules["opentelemetry.trace"]
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    tracer = provider.get_tracer("weft")
    use_known_ids(tracer)
    return tracer


@lru_cache(maxsize=1)
def _sampler_of(provider: Otel) -> Callable[[int, str], bool]:
    """Return whether this process would sample a new trace, by its id and the name of its first span."""
    sampler = getattr(provider, "sampler", None)
    if sampler is None:  # an unknown SDK: its spans decide themselves
        return lambda trace_id, name: True
    from opentelemetry.context import Context

    bound = _bound_of(sampler)
    if bound is not None:
        return lambda trace_id, name: trace_id & _RATIO_BITS < bound
    empty = Context()
    return lambda trace_id, name: bool(sampler.should_sample(empty, trace_id, name).decision.is_sampled())


_RATIO_BITS = 2**64 - 1


def _bound_of(sampler: Otel) -> int | None:
    """Return the number below which the SDK's sampler by ratio samples the low bits of a trace id; None for others.

    Asking the sampler itself takes ten times as long.
    """
    found = sys.modules.get("opentelemetry.sdk.trace.sampling")
    if found is None:
        return None
    if type(sampler) in (found.ParentBased, found.ParentBasedTraceIdRatio):
        sampler = getattr(sampler, "_root", None)
    return int(sampler.bound) if type(sampler) is found.TraceIdRatioBased else None


def _dropped(trace: ModuleType, parent: str, inner: bool) -> bool:
    """Return whether a new span would belong to an unsampled trace."""
    if inner:
        current = trace.get_current_span()
        if not parent and hasattr(current, "is_unsampled"):
            return True
        holder = _PARENT.get()
        if current.is_recording() or (holder is not None and holder.span.recording):
            return False
        if not parent:
            context = current.get_span_context()
            return bool(context.is_valid) and not context.trace_flags & SAMPLED
    ids = trace_context.read(parent)
    return ids is not None and not ids.flags & SAMPLED


def _context(trace: ModuleType, parent: str, state: str) -> Otel:
    """Return the Context for a new span; None: the current one."""
    if trace.get_current_span().is_recording():
        return None
    holder = _PARENT.get()
    if holder is not None and holder.span.recording:
        return trace.set_span_in_context(holder.span._span)
    return _remote(trace, parent, state) if parent else None


def _remote(trace: ModuleType, parent: str, state: str) -> Otel:
    """Return a Context with only the span `parent` of another process; empty if `parent` is invalid."""
    from opentelemetry.context import Context

    ids = trace_context.read(parent)
    if ids is None:
        return Context()
    states = trace.TraceState.from_header([state]) if state else None
    return trace.set_span_in_context(trace.NonRecordingSpan(_span_context(trace, ids, states)), Context())


def _links(trace: ModuleType, traceparents: Sequence[str]) -> list[Otel]:
    found = (trace_context.read(each) for each in traceparents)
    return [trace.Link(_span_context(trace, ids)) for ids in found if ids is not None]


def _span_context(trace: ModuleType, ids: Ids, state: Otel = None) -> Otel:
    return trace.SpanContext(ids.trace, ids.span, True, trace.TraceFlags(ids.flags), state)
