"""Configures OpenTelemetry's SDK by its own variables."""

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
from runtime_core.telemetry.attributes import SERVICE_INSTANCE, SERVICE_NAME, SERVICE_VERSION
from runtime_core.telemetry.spans import tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORTERS = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
DISABLED = "OTEL_SDK_DISABLED"
DELAY = "OTEL_BSP_SCHEDULE_DELAY"
HTTP, GRPC = "http/protobuf", "grpc"

EXPORT_DELAY_MS = 1000.0
"""How long a span waits to be sent, unless OTEL_BSP_SCHEDULE_DELAY says otherwise: traces lack what a killed process
had not sent."""
CLOSING_SECONDS = 3.0
"""How long the end of a service waits for a collector that does not answer."""
COMPLAIN_SECONDS = 60.0
"""How often a collector that takes nothing is told of."""

logger = logging.getLogger(__name__)


class Traces:
    """The SDK of this process, configured; `close` sends what is left."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider

    def close(self, timeout_seconds: float = CLOSING_SECONDS) -> None:
        """Send what is left, for at most so long. Blocks."""
        # A thread, since the SDK itself waits longer for a collector that is gone. A daemon: it keeps nobody alive.
        closing = threading.Thread(target=self._provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(timeout_seconds)
        if closing.is_alive():
            logger.warning("traces: the last spans were not sent within %g s", timeout_seconds)


def wanted(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The exporters that the variables ask for: of `otlp` and `console`, none where nothing is to be traced.

    Raises ConfigurationError for others.
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
    """Configure the SDK where the variables ask for it; None where they do not, or the app has configured one itself.

    `lost` is told of spans that could not be sent, in another thread. Raises ConfigurationError, in one line.
    """
    exporters = wanted(environ)
    if not exporters or tracing():
        return None
    check(exporters, environ)
    from opentelemetry import trace
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    own = {SERVICE_NAME: service, SERVICE_INSTANCE: instance, SERVICE_VERSION: version}
    # The variables' own words go before ours.
    resource = Resource.create(own).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
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
    """Raise ConfigurationError where one of these exporters cannot be made: not installed, or a place that is none."""
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
    """Where spans go, without a password."""
    found = next((environ[name] for name in ENDPOINTS if environ.get(name)), "")
    if not found:
        return "the collector on this machine"
    return urlsplit(found).netloc.rpartition("@")[2] or found


def _otlp(protocol: str) -> SpanExporter:
    exporter: SpanExporter = importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    return exporter


def _reporting(exporter: SpanExporter, lost: Callable[[int], None]) -> SpanExporter:
    """The exporter, with one line now and then where the collector takes nothing, in place of many."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    reason = _Reason()
    # What gRPC's exporter says of a failure is said by the module of its base.
    for part in set(type(exporter).__mro__).difference(SpanExporter.__mro__):
        logging.getLogger(part.__module__).addFilter(reason)

    class Reporting(SpanExporter):
        def __init__(self) -> None:
            self._told_at = -COMPLAIN_SECONDS
            self._lost = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            if result is not SpanExportResult.SUCCESS:
                self._lost += len(spans)
                lost(len(spans))
                if time.monotonic() - self._told_at >= COMPLAIN_SECONDS:
                    self._told_at = time.monotonic()
                    logger.warning("traces: %d spans are lost, the collector did not take them%s", self._lost, reason)
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Reporting()


class _Reason(logging.Filter):
    """Keeps what an exporter logs of a failure to itself, and the last of it for our own line."""

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
