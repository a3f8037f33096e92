"""Configuration by OpenTelemetry's variables, and the trace of the current delivery in log lines."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.engines.protocol import StepInfo
from runtime_core.errors import ConfigurationError
from runtime_core.telemetry import logs, tracing
from runtime_core.telemetry.logs import HANDLED

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
COLLECTOR = {ENDPOINT: "http://collector:4318"}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("environ", "exporters"),
    [
        ({}, ()),
        ({ENDPOINT: ""}, ()),
        (COLLECTOR, ("otlp",)),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ("console", "otlp")),
        ({**COLLECTOR, "OTEL_TRACES_EXPORTER": "none"}, ()),
        ({**COLLECTOR, "OTEL_SDK_DISABLED": "true"}, ()),
        ({**COLLECTOR, "OTEL_SDK_DISABLED": "false"}, ("otlp",)),
    ],
)
def test_the_variables_decide_whether_anything_is_traced(environ: dict[str, str], exporters: tuple[str, ...]) -> None:
    assert tracing.wanted(environ) == exporters


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER=zipkin: use otlp, console, or none"),
        ({ENDPOINT: "collector:4318"}, f"{ENDPOINT}=collector:4318: give a URL, as in http://collector:4318"),
        ({ENDPOINT: "http://c:x"}, f"{ENDPOINT}=http://c:x: give a URL, as in http://collector:4318"),
        ({ENDPOINT: "http://c:0"}, f"{ENDPOINT}=http://c:0: give a URL, as in http://collector:4318"),
        ({ENDPOINT: "ftp://c"}, f"{ENDPOINT}=ftp://c: give a URL, as in http://collector:4318"),
        ({ENDPOINT: "http://"}, f"{ENDPOINT}=http://: give a URL, as in http://collector:4318"),
        (
            {**COLLECTOR, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/json: use http/protobuf or grpc",
        ),
        (
            # For gRPC it may be no URL.
            {ENDPOINT: "collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: its exporter is not installed: "
            "pip install opentelemetry-exporter-otlp-proto-grpc, or use http/protobuf",
        ),
    ],
)
def test_an_unusable_setting_is_reported_in_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tracing.configure("agent-handler", "a-1", "1", environ)
    assert str(caught.value) == message


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set.*'weft\[otel\]'"):
        tracing.configure("agent-handler", "a-1", "1", COLLECTOR)


def test_without_the_sdk_the_extra_is_named_for_the_console_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigurationError, match=r"OTEL_TRACES_EXPORTER is set.*'weft\[otel\]'"):
        tracing.check(("console",), {"OTEL_TRACES_EXPORTER": "console"})


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, "the collector on this machine"),
        ({ENDPOINT: "http://user:secret@c:4318/v1"}, "c:4318"),
        ({ENDPOINT: "http://all:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:1"}, "traces:1"),
        ({ENDPOINT: "collector:4317"}, "collector:4317"),
    ],
)
def test_the_log_says_where_spans_go_without_a_password(environ: dict[str, str], place: str) -> None:
    assert tracing._place(environ) == place


def test_an_unreachable_collector_is_logged_repeatedly_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Sender:
        """A base class in another module that logs failures, as in gRPC."""

        __module__ = "tests.unit.sender"

    class Refused(SpanExporter, Sender):
        def export(self, spans: object) -> SpanExportResult:
            logging.getLogger("tests.unit.sender").error("status 503")
            return SpanExportResult.FAILURE if spans else SpanExportResult.SUCCESS

    monkeypatch.setattr(tracing, "WARN_SECONDS", 1e9)
    counted: list[int] = []
    exporter = tracing._reporting(Refused(), counted.append)
    span: Any = object()
    try:
        for spans in ([], [span], [span, span]):
            exporter.export(spans)
        monkeypatch.setattr(tracing, "WARN_SECONDS", 0.0)  # the time is over
        exporter.export([span])
    finally:
        for name in (__name__, "tests.unit.sender"):
            logging.getLogger(name).filters.clear()
    assert counted == [1, 2, 1]
    assert [record.getMessage() for record in caplog.records] == [
        "traces: 1 spans are lost: the collector did not accept them (status 503)",
        "traces: 4 spans are lost: the collector did not accept them (status 503)",
    ]


# What an SDK holds stays for good: each of these runs in a separate process.
OWN_SDK = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from runtime_core.telemetry import tracing
own = TracerProvider()
trace.set_tracer_provider(own)
assert tracing.configure("s", "i", "1", {"OTEL_TRACES_EXPORTER": "console"}) is None
assert trace.get_tracer_provider() is own
"""

CONSOLE = """
import os
from runtime_core.telemetry import spans, tracing
traces = tracing.configure("agent-handler", "a-1", "1.2", os.environ)
UNDER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
with spans.span("one", "INTERNAL", {}, make=spans.Span) as outer:
    with spans.within(UNDER), spans.span("two", "INTERNAL", {}, make=spans.Span):
        pass
traces.close()
"""


def run(program: str, **environ: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_an_sdk_that_the_app_has_configured_is_left_alone() -> None:
    assert run(OWN_SDK) == []


def test_spans_go_to_the_console_with_the_names_of_the_process() -> None:
    two, one = run(CONSOLE, OTEL_TRACES_EXPORTER="console", OTEL_SERVICE_NAME="desk")
    assert (one["name"], one["parent_id"]) == ("one", None)
    assert (two["name"], two["parent_id"]) == ("two", "0xb7ad6b7169203331")
    attributes = one["resource"]["attributes"]  # type: ignore[index]  # JSON of the SDK's own
    assert {name: attributes[name] for name in ("service.name", "service.instance.id", "service.version")} == {
        "service.name": "desk",
        "service.instance.id": "a-1",
        "service.version": "1.2",
    }


LONG = """
import os
from runtime_core.telemetry import spans, tracing
traces = tracing.configure("agent-handler", "a-1", "1.2", os.environ)
with spans.span("one", "INTERNAL", {"said": "x" * 1_000_000}, make=spans.Span):
    pass
traces.close()
"""


@pytest.mark.parametrize(
    ("environ", "longest"),
    [({}, tracing.LONGEST_ATTRIBUTE), *(({name: "100"}, 100) for name in tracing.LENGTH_LIMITS)],
)
def test_a_long_attribute_is_shortened(environ: dict[str, str], longest: int) -> None:
    [span] = run(LONG, OTEL_TRACES_EXPORTER="console", **environ)
    assert span["attributes"] == {"said": "x" * longest}


def test_a_sampler_that_keeps_nothing_costs_no_task_its_trace() -> None:
    assert run(CONSOLE, OTEL_TRACES_EXPORTER="console", OTEL_TRACES_SAMPLER="always_off") == []


def test_a_trace_unsampled_by_its_caller_is_unsampled_everywhere() -> None:
    unkept = CONSOLE.replace('"INTERNAL", {}, make', '"INTERNAL", {}, parent="00-%032x-%016x-00" % (1, 2), make')
    assert run(unkept, OTEL_TRACES_EXPORTER="console", OTEL_TRACES_SAMPLER="always_on") == []


def test_an_end_does_not_wait_for_a_collector_that_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()

    class Waiting:
        def shutdown(self) -> None:
            answers.wait()

    # It returns at all: nobody answers meanwhile.
    tracing.Traces(Waiting()).close(timeout_seconds=0.05)  # type: ignore[arg-type]  # what it needs of a provider
    assert "could not send the last spans within 0.05 s" in caplog.text
    caplog.clear()
    answers.set()
    tracing.Traces(Waiting()).close(timeout_seconds=60)  # type: ignore[arg-type]  # as above
    assert caplog.text == ""


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Send the log here, as JSON."""
    root, written = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("tool-handler", "info", "json", written)
    yield written
    root.handlers, root.level = handlers, level


def test_a_log_line_names_its_delivery_also_in_a_thread(lines: io.StringIO) -> None:
    import contextvars

    delivery = Delivery(0, "tool", b"1-0")
    delivery.task, delivery.run, delivery.context = "t-1", "r/1", b'{"traceparent":"%b"}' % TRACEPARENT.encode()

    def handle() -> None:
        HANDLED.set(delivery)
        logging.getLogger("mine").info("looking")
        delivery.context = b""
        thread = threading.Thread(target=contextvars.copy_context().run, args=(logging.getLogger("mine").info, "there"))
        thread.start()
        thread.join()

    contextvars.copy_context().run(handle)
    logging.getLogger("mine").info("outside")
    here, there, outside = (json.loads(line) for line in lines.getvalue().splitlines())
    assert (here["task_id"], here["run_id"], here["trace_id"]) == ("t-1", "r/1", "0af7651916cd43dd8448eb211c80319c")
    assert (there["task_id"], there["run_id"]) == ("t-1", "r/1")
    assert {"span_id", "trace_id"} & there.keys() == set()
    assert {"task_id", "run_id", "trace_id"} & outside.keys() == set()


def test_a_line_of_text_ends_with_its_task() -> None:
    record = logging.makeLogRecord({"msg": "looking", "levelno": logging.INFO})
    delivery = Delivery(0, "tool", b"1-0")
    delivery.task = "t-1"
    token = HANDLED.set(delivery)
    try:
        assert logs.TextFormatter("tool-handler").format(record).endswith("looking  task=t-1")
        known = logging.makeLogRecord({"msg": "looking", "levelno": logging.INFO, "fields": {"task": "t-2"}})
        assert logs.TextFormatter("tool-handler").format(known).endswith("looking  task=t-2")
    finally:
        HANDLED.reset(token)


def test_an_engine_function_gets_the_span_of_its_step() -> None:
    from runtime_core.engines.function import EngineContext

    assert EngineContext.of(StepInfo(task="t", run="r/1", traceparent=TRACEPARENT)).traceparent == TRACEPARENT
