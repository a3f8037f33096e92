"""Metrics, log lines and the HTTP endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.host import service as endpoint_module
from runtime_core.host.service import HttpEndpoint, Response, plain
from runtime_core.host.state_manager import StateManagerReplica
from runtime_core.runs.model_step import count_model_calls
from runtime_core.settings import Settings
from runtime_core.telemetry import logs, names
from runtime_core.telemetry.metrics import (
    FRESH_SECONDS,
    MOST_TOOLS,
    Metrics,
    PartitionMetrics,
    Series,
)
from runtime_core.telemetry.names import MetricType, Sample
from runtime_core.telemetry.spans import PROVIDER, REQUEST_MODEL, TIME_TO_FIRST_CHUNK
from runtime_core.trajectory.recorder import Recorder
from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.wire.step import Step
from tests.observability.every_metric import every_metric


def test_every_metric_is_exposed_as_it_is_named() -> None:
    metrics = every_metric("agent-handler")
    series: dict[str, set[str]] = {}
    shown = metrics.exposition().decode()
    for parsed in text_string_to_metric_families(shown):
        for sample in parsed.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    for name in names.ALL:
        suffix = "_count" if name.kind is MetricType.HISTOGRAM else ""
        assert series.get(name.name + suffix) == set(name.labels), name.name
        family = name.name.removesuffix("_total") if name.kind is MetricType.COUNTER else name.name
        assert f"# TYPE {family}{'_total' if name.kind is MetricType.COUNTER else ''} {name.kind}" in shown
    assert {name.split("_bucket")[0] for name in series if name.startswith("weft_")} - {
        name.name + suffix for name in names.ALL for suffix in ("", "_count", "_sum")
    } == set()
    assert "_created" not in shown


def test_a_measurement_is_shown_while_it_is_fresh_and_the_partition_is_led() -> None:
    now, leads = 0.0, True
    measured = PartitionMetrics(lambda: now)
    metrics = CollectorRegistry()
    metrics.register(measured)
    for partition in (0, 1):
        measured.put(partition, [Sample(names.STREAM_LAG, 3, ("agent", "agent-handler"))], lambda: leads)

    def shown(partition: int = 0) -> float | None:
        labels = {"partition": str(partition), "stream": "agent", "group": "agent-handler"}
        return metrics.get_sample_value(names.STREAM_LAG.name, labels)

    assert shown() == shown(1) == 3
    measured.drop(1)
    assert (shown(), shown(1)) == (3, None)
    leads = False
    assert shown() is None
    leads, now = True, FRESH_SECONDS + 1
    assert shown() is None


def test_a_child_is_created_once() -> None:
    metrics = Metrics(CollectorRegistry(), "agent-handler")
    assert metrics.events_handled["completed"] is metrics.events_handled["completed"]


def test_two_sets_of_metrics_share_nothing() -> None:
    first, second = (Metrics(CollectorRegistry(), "tool-handler") for _ in range(2))
    first.retries.inc()
    assert b'weft_retries_total{service="tool-handler"} 0.0' in second.exposition()


async def test_leading_roles_show_their_heartbeat_and_stalls(tmp_path: Path, namespace: str) -> None:
    transport = await connect("memory://")
    bus = EventBus(transport, (await open_namespace(transport, namespace, 1))[0])
    settings = Settings.from_environment({"WEFT_LEASE_SECONDS": "1"})
    store = await TrajectoryStore.open(f"sqlite:///{tmp_path / 'trajectory.db'}")
    of_manager = Metrics(CollectorRegistry(), "state-manager")
    of_recorder = Metrics(CollectorRegistry(), "trajectory-recorder")
    manager = StateManagerReplica([bus], transport, settings, of_manager)
    recorder = Recorder([bus], store, of_recorder, namespace=namespace, lease_seconds=1)
    for metrics, role in ((of_manager, manager), (of_recorder, recorder)):
        labels = {"service": metrics.service}
        assert metrics.registry.get_sample_value(names.STALLED.name, labels) == 0
        role._watch.waiting(True)
        assert (metrics.registry.get_sample_value(names.STALLED.name, labels) or 0) > 0
        assert (metrics.registry.get_sample_value(names.HEARTBEAT_AGE.name, labels) or 0) > 0
    await store.close()
    await transport.close()


def test_the_first_piece_of_a_streamed_answer_is_timed() -> None:
    metrics = Metrics(CollectorRegistry(), "agent-handler")
    streamed, whole = (Step("r/1", "model", "m", "completed", 0, 1000) for _ in range(2))
    streamed.attributes = {PROVIDER: "openai", REQUEST_MODEL: "gpt-x", TIME_TO_FIRST_CHUNK: 0.25}
    whole.attributes = {PROVIDER: "openai", REQUEST_MODEL: "gpt-x"}
    count_model_calls(metrics, (streamed, whole))
    labels = {"provider": "openai", "model": "gpt-x"}
    name = names.MODEL_FIRST_CHUNK_SECONDS.name
    assert metrics.registry.get_sample_value(f"{name}_sum", labels) == 0.25
    assert metrics.registry.get_sample_value(f"{name}_count", labels) == 1


def test_own_series_look_like_those_of_the_library() -> None:
    Metrics(CollectorRegistry(), "any")  # turns off the library's series of when each was created
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    count, times = Series(names.EVENTS_HANDLED), Series(names.HANDLER_SECONDS)
    for series in (count, times):
        ours.register(series)
    handled, seconds = names.EVENTS_HANDLED, names.HANDLER_SECONDS
    library_count = Counter(handled.name, handled.help, handled.labels, registry=theirs)
    library_times = Histogram(
        seconds.name, seconds.help, seconds.labels, registry=theirs, buckets=names.SECONDS_BUCKETS
    )
    labels = ("tool-handler", 'a "quoted" outcome')
    for counter in (count.count(*labels), library_count.labels(*labels)):
        counter.inc()
        counter.inc(2.5)
    for histogram in (times.times("tool-handler"), library_times.labels("tool-handler")):
        for value in (0.0, 0.0005, 0.00051, 0.3, 86_400.0, 100_000.0):
            histogram.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_tools_beyond_the_limit_are_counted_together() -> None:
    metrics = Metrics(CollectorRegistry(), "tool-handler")
    labels = {metrics.tool_label(f"tool-{number}") for number in range(MOST_TOOLS + 100)}
    assert len(labels) == MOST_TOOLS + 1
    assert metrics.tool_label("tool-0") == "tool-0"
    assert metrics.tool_label("tool-7000") == "other"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield logging.getLogger("weft.test")
    root.handlers[:], _ = before
    root.setLevel(before[1])


def test_text_lines_are_readable_and_stay_one_line(log: logging.Logger) -> None:
    stream = io.StringIO()
    logs.configure("agent-handler", "info", "text", stream)
    logs.configure("agent-handler", "info", "text", stream)
    log.debug("not shown")
    log.info("took %s\nforged", "a task", extra={"fields": {"task": "t-1\n", "n": 2}})
    log.warning("late")
    lines = stream.getvalue().splitlines()
    assert [line[8:] for line in lines] == [
        " agent-handler  ✓ took a task\\nforged  task=t-1\\n n=2",
        " agent-handler  ! late",
    ]
    assert lines[0][2] == lines[0][5] == ":"


def test_chatty_libraries_log_at_debug_only(log: logging.Logger) -> None:
    for level, shown in (("info", False), ("debug", True), ("warning", False)):
        stream = io.StringIO()
        logs.configure("tool-handler", level, "text", stream)
        logging.getLogger("httpx2").info("a request")
        assert ("a request" in stream.getvalue()) is shown
        logging.getLogger("httpx2").warning("trouble")
        assert "trouble" in stream.getvalue()


def test_handlers_of_the_app_stay(log: logging.Logger) -> None:
    root, own = logging.getLogger(), logging.NullHandler()
    root.addHandler(own)
    try:
        before = len(root.handlers)
        for _ in range(2):
            logs.configure("agent-handler", "info", "text", io.StringIO())
        assert own in root.handlers
        assert len(root.handlers) <= before + 1, "one of ours replaces the other"
    finally:
        root.removeHandler(own)


def test_a_traceback_follows_its_line_indented(log: logging.Logger) -> None:
    stream = io.StringIO()
    logs.configure("agent-handler", "info", "text", stream)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("broken")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("✗ broken")
    assert rest[-1] == "    ValueError: no"
    assert all(line.startswith("    ") for line in rest)


def test_json_lines_carry_the_fields(log: logging.Logger) -> None:
    stream = io.StringIO()
    logs.configure("agent-handler", "info", "json", stream)
    log.error("broken", extra={"fields": {"task": "t-1", "message": "does not replace ours", "odd": object}})
    log.info("mended", exc_info=ValueError("no"))
    text, mended = stream.getvalue().splitlines()
    assert json.loads(mended)["traceback"].endswith("ValueError: no")
    line = json.loads(text)
    assert line.pop("time").endswith("Z")
    assert line.pop("odd") == str(object)
    assert line == {
        "level": "error",
        "service": "agent-handler",
        "logger": "weft.test",
        "message": "broken",
        "task": "t-1",
    }


def broken() -> Response:
    raise ValueError("no")


@pytest.fixture
async def endpoint() -> AsyncIterator[HttpEndpoint]:
    routes = {"/ok": lambda: plain(HTTPStatus.OK, "fine"), "/broken": broken}
    endpoint = HttpEndpoint("127.0.0.1", 0, routes)
    await endpoint.start()
    yield endpoint
    await endpoint.stop()


async def ask(port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.decode()


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /ok HTTP/1.1", "200 OK", "fine\n"),
        (b"GET /ok?x=1 HTTP/1.0", "200 OK", "fine\n"),
        (b"HEAD /ok HTTP/1.1", "200 OK", ""),
        (b"GET /other HTTP/1.1", "404 Not Found", "no such path; paths are /ok, /broken\n"),
        (b"POST /ok HTTP/1.1", "405 Method Not Allowed", "only GET and HEAD\n"),
        (b"GET /broken HTTP/1.1", "500 Internal Server Error", "internal error; see the log\n"),
        (b"GET  HTTP/1.1", "400 Bad Request", "not an HTTP/1.1 request\n"),
        (b"\x16\x03\x01\xff\xfe", "400 Bad Request", "not an HTTP/1.1 request\n"),
        (b"", "400 Bad Request", "not an HTTP/1.1 request\n"),
    ],
)
async def test_each_request_gets_its_status_and_text(
    endpoint: HttpEndpoint, request_line: bytes, status: str, body: str
) -> None:
    head, _, got = (await ask(endpoint.port, request_line + b"\r\nHost: x\r\n\r\n")).partition("\r\n\r\n")
    assert head.splitlines()[0] == f"HTTP/1.1 {status}"
    assert "Connection: close" in head
    assert got == body


async def test_bad_clients_do_not_break_it(endpoint: HttpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "REQUEST_SECONDS", 0.05)
    too_large = await ask(endpoint.port, b"GET /ok HTTP/1.1\r\nX: " + b"x" * 20_000)
    assert too_large.startswith("HTTP/1.1 431 ")
    assert await ask(endpoint.port, b"GET /ok HT") == "", "a slow client is cut"
    _, gone = await asyncio.open_connection("127.0.0.1", endpoint.port)
    gone.transport.abort()
    assert (await ask(endpoint.port, b"GET /ok HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 200 ")


async def test_stop_does_not_wait_for_clients(endpoint: HttpEndpoint) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    async with asyncio.timeout(endpoint_module.REQUEST_SECONDS / 2):
        assert (await ask(endpoint.port, b"GET /ok HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 200 ")
        await endpoint.stop()
        assert await reader.read() == b"", "the client was not told"
    writer.close()


def test_logs_go_to_standard_error_by_default(log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("agent-handler", "info", "text", sys.stderr)
    log.info("here")
    assert capsys.readouterr().err.endswith("✓ here\n")


def test_a_series_needs_all_labels_of_its_metric() -> None:
    metrics = Metrics(CollectorRegistry(), "agent-handler")
    for labels in (("a",), ("a", "b", "c")):
        with pytest.raises(ValueError, match="has the labels"):
            metrics.agent_turns[labels]  # type: ignore[index]  # a mistake
