"""Configures OpenTelemetry's SDK by its standard variables."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry.spans import SERVICE_INSTANCE, SERVICE_NAME, SERVICE_VERSION, tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORTERS = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DISABLED = "OTEL_SDK_DISABLED"
DELAY = "OTEL_BSP_SCHEDULE_DELAY"
LENGTH_LIMITS = ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT")
HTTP, GRPC = "http/protobuf", "grpc"

EXPORT_DELAY_MS = 1000.0
"""The export delay of spans, unless OTEL_BSP_SCHEDULE_DELAY sets it. A killed process loses the spans of this time."""
LONGEST_ATTRIBUTE = 65_536
"""The most characters of a span's attribute, unless the variables of OpenTelemetry set another limit."""
CLOSING_SECONDS = 3.0
"""How long the stop of a service waits for an unresponsive collector."""
WARN_SECONDS = 60.0
"""The shortest time between two log lines about a failing collector."""

logger = logging.getLogger(__name__)


class Traces:
    """The configured SDK of this process; `close` sends the remaining spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def close(self, timeout_seconds: float = CLOSING_SECONDS) -> None:
        """Send the remaining spans, with a time limit. Blocks."""
        # In a thread: the SDK waits longer for a lost collector. A daemon thread does not delay the exit.
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(timeout_seconds)
        if closing.is_alive():
            logger.warning("traces: could not send the last spans within %g s", timeout_seconds)


def wanted(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the exporters that the variables select: `otlp`, `console`, or none.

    Raises ConfigurationError for other exporters.
    """
    if environ.get(DISABLED, "").strip().lower() == "true":
        return ()
    names = [name.strip().lower() for name in environ.get(EXPORTERS, "").split(",") if name.strip()]
    if not names:
        return ("otlp",) if any(environ.get(name) for name in ENDPOINTS) else ()
    for name in names:
        if name not in ("otlp", "console", "none"):
            raise ConfigurationError(f"{EXPORTERS}={name}: use otlp, console, or none")
    return () if "none" in names else tuple(dict.fromkeys(names))


def configure(
    service: str, instance: str, version: str, environ: Mapping[str, str], lost: Callable[[int], None] = lambda _: None
) -> Traces | None:
    """Configure the SDK if the variables select an exporter. Return None if not, or if the app has configured one.

    `lost` is called in another thread with the number of spans that could not be sent. Raises ConfigurationError.
    """
    exporters = wanted(environ)
    if not exporters or tracing():
        return None
    check(exporters, environ)
    from opentelemetry import trace
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    own = {SERVICE_NAME: service, SERVICE_INSTANCE: instance, SERVICE_VERSION: version}
    # Values of the variables take precedence.
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    # Limit the length: a model, a tool or a page may have written the value. None: the SDK reads it from the variables.
    longest = None if any(environ.get(name) for name in LENGTH_LIMITS) else LONGEST_ATTRIBUTE
    limits = SpanLimits(max_attribute_length=longest)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=limits)
    delay = None if environ.get(DELAY) else EXPORT_DELAY_MS
    for name in exporters:
        exporter = (
            _reporting(_otlp(_protocol(environ)), lost)
            if name == "otlp"
            else ConsoleSpanExporter(out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n")
        )
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay))
    trace.set_tracer_provider(provider)
    logger.info("spans go to %s", ", ".join(_place(environ) if name == "otlp" else name for name in exporters))
    return Traces(provider)


def check(exporters: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if an exporter is not installed or its endpoint is invalid."""
    if "otlp" in exporters:
        protocol = _protocol(environ)
        for name in ENDPOINTS:
            if environ.get(name) and protocol == HTTP and not _is_url(environ[name]):
                raise ConfigurationError(f"{name}={environ[name]}: give a URL, as in http://collector:4318")
        package = _EXPORTERS[protocol]
    else:
        package = "opentelemetry.sdk.trace"
    try:
        importlib.import_module(package)
    except ImportError:
        if "otlp" in exporters and protocol == GRPC:
            raise ConfigurationError(
                f"{PROTOCOLS[1]}=grpc: its exporter is not installed: "
                f"pip install opentelemetry-exporter-otlp-proto-grpc, or use {HTTP}"
            ) from None
        asks = next(name for name in (EXPORTERS, *ENDPOINTS) if environ.get(name))
        raise ConfigurationError(
            f"{asks} is set, but OpenTelemetry is not installed: pip install 'weft[otel]', or unset it"
        ) from None


_EXPORTERS = {
    HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    GRPC: "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}


def _protocol(environ: Mapping[str, str]) -> str:
    for name in PROTOCOLS:
        if environ.get(name):
            if environ[name] not in _EXPORTERS:
                raise ConfigurationError(f"{name}={environ[name]}: use {HTTP} or {GRPC}")
            return environ[name]
    return HTTP


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _place(environ: Mapping[str, str]) -> str:
    """Return the spans' destination, without a password."""
    found = next((environ[name] for name in ENDPOINTS if environ.get(name)), "")
    if not found:
        return "the collector on this machine"
    return urlsplit(found).netloc.rpartition("@")[2] or found


def _otlp(protocol: str) -> SpanExporter:
    exporter: SpanExporter = importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    return exporter


def _reporting(exporter: SpanExporter, lost: Callable[[int], None]) -> SpanExporter:
    """Wrap an exporter, so that a failing collector causes one log line a minute instead of many."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    reason = _Reason()
    # gRPC's exporter logs failures in the module of its base class.
    for part in set(type(exporter).__mro__).difference(SpanExporter.__mro__):
        logging.getLogger(part.__module__).addFilter(reason)

    class Reporting(SpanExporter):
        def __init__(self) -> None:
            self._logged_at = -WARN_SECONDS
            self._lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            if result is not SpanExportResult.SUCCESS:
                self._lost += len(spans)
                lost(len(spans))
                if time.monotonic() - self._logged_at >= WARN_SECONDS:
                    self._logged_at = time.monotonic()
                    logger.warning("traces: %d spans are lost: the collector did not accept them%s", self._lost, reason)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Reporting()


class _Reason(logging.Filter):
    """Suppresses an exporter's own log lines of failures, and keeps the last one for ours."""

    def __init__(self) -> None:
        super().__init__()
        self._last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        self._last = record.getMessage()
        return False

    def __str__(self) -> str:
        return f" ({self._last})" if self._last else ""
