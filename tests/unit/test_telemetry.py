"""Metrics, log lines and the HTTP endpoint."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.telemetry import endpoint as endpoint_module
from runtime_core.telemetry import logs, names
from runtime_core.telemetry.endpoint import Answer, Endpoint, plain
from runtime_core.telemetry.metrics import Metrics
from runtime_core.telemetry.names import MetricName


def test_every_named_metric_is_exposed_with_its_labels() -> None:
    metrics = Metrics(CollectorRegistry(), "agent-handler")
    metrics.events_handled["completed"].inc()
    metrics.dead_letters["attempts"].inc()
    metrics.tasks_ended["completed"].inc()
    metrics.hook_failures["before_tool_call"].inc()
    metrics.timers_due["0"].set(1)
    metrics.mcp_server_up["files"].set(1)
    metrics.mcp_restarts["files"].inc()
    metrics.mcp_calls["files", "completed"].inc()
    metrics.model_calls["openai", "gpt-x", "answered"].inc()
    metrics.model_call_seconds["openai", "gpt-x"].observe(1)
    metrics.model_tokens["gpt-x", "input"].inc(3)
    metrics.model_cost["gpt-x"].inc(0.25)
    metrics.engine_steps["ray", "completed"].inc()
    metrics.engine_step_seconds["ray"].observe(1)
    metrics.engine_running["ray"].set(1)
    metrics.engine_connected["ray"].set(1)
    metrics.engine_driver_starts["ray"].inc()
    metrics.engine_driver_memory["ray"].set(1)
    for gauge in (metrics.stream_lag, metrics.stream_pending, metrics.stream_oldest_pending):
        gauge["weft:{0}:agent", "agent-handler"].set(1)
    shown = metrics.exposition().decode()
    declared = [value for value in vars(names).values() if isinstance(value, MetricName)]
    assert len(declared) == 32
    for name in declared:
        series = [line for line in shown.splitlines() if line.startswith(name.name)]
        assert series, f"{name.name} has no series"
        assert all(f'{label}="' in line for label in name.labels for line in series)
    assert "_created" not in shown
    assert 'weft_stream_lag_events{group="agent-handler",stream="weft:{0}:agent"} 1.0' in shown


def test_a_child_is_made_once() -> None:
    metrics = Metrics(CollectorRegistry(), "agent-handler")
    assert metrics.events_handled["completed"] is metrics.events_handled["completed"]


def test_two_sets_of_metrics_share_nothing() -> None:
    first, second = (Metrics(CollectorRegistry(), "tool-handler") for _ in range(2))
    first.retries.inc()
    assert b'weft_retries_total{service="tool-handler"} 0.0' in second.exposition()


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


def test_libraries_that_tell_of_each_request_do_so_for_debug_only(log: logging.Logger) -> None:
    for level, shown in (("info", False), ("debug", True), ("warning", False)):
        stream = io.StringIO()
        logs.configure("tool-handler", level, "text", stream)
        logging.getLogger("httpx2").info("a request")
        assert ("a request" in stream.getvalue()) is shown
        logging.getLogger("httpx2").warning("trouble")
        assert "trouble" in stream.getvalue()


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
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line.pop("odd") == str(object)
    assert line == {
        "level": "error",
        "service": "agent-handler",
        "logger": "weft.test",
        "message": "broken",
        "task": "t-1",
    }


def broken() -> Answer:
    raise ValueError("no")


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    routes = {"/ok": lambda: plain(HTTPStatus.OK, "fine"), "/broken": broken}
    endpoint = Endpoint("127.0.0.1", 0, routes)
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
        (b"GET /other HTTP/1.1", "404 Not Found", "nothing here; there are /ok, /broken\n"),
        (b"POST /ok HTTP/1.1", "405 Method Not Allowed", "only GET and HEAD\n"),
        (b"GET /broken HTTP/1.1", "500 Internal Server Error", "the answer could not be made; see the log\n"),
        (b"GET  HTTP/1.1", "400 Bad Request", "not a request of HTTP/1.1\n"),
        (b"\x16\x03\x01\xff\xfe", "400 Bad Request", "not a request of HTTP/1.1\n"),
        (b"", "400 Bad Request", "not a request of HTTP/1.1\n"),
    ],
)
async def test_requests_and_answers(endpoint: Endpoint, request_line: bytes, status: str, body: str) -> None:
    head, _, got = (await ask(endpoint.port, request_line + b"\r\nHost: x\r\n\r\n")).partition("\r\n\r\n")
    assert head.splitlines()[0] == f"HTTP/1.1 {status}"
    assert "Connection: close" in head
    assert got == body


async def test_bad_clients_do_not_break_it(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "REQUEST_SECONDS", 0.05)
    too_large = await ask(endpoint.port, b"GET /ok HTTP/1.1\r\nX: " + b"x" * 20_000)
    assert too_large.startswith("HTTP/1.1 431 ")
    assert await ask(endpoint.port, b"GET /ok HT") == "", "a slow client is cut"
    _, gone = await asyncio.open_connection("127.0.0.1", endpoint.port)
    gone.transport.abort()
    assert (await ask(endpoint.port, b"GET /ok HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 200 ")


async def test_stop_does_not_wait_for_clients(endpoint: Endpoint) -> None:
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
