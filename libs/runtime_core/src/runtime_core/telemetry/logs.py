"""Log lines as text or JSON, each with the delivery that is being handled."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Protocol, TextIO

import msgspec

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry import trace_context
from runtime_core.telemetry.redaction import Redactor, redactor, use
from runtime_core.telemetry.spans import current_ids


class Handled(Protocol):
    """A delivery, as far as a log line is concerned."""

    task: str
    run: str
    context: bytes


HANDLED: ContextVar[Handled | None] = ContextVar("weft_handled", default=None)


def log_ids() -> dict[str, str]:
    """`task_id` and `run_id` of what is being handled here; `trace_id` and, of a span under way, `span_id`."""
    handled = HANDLED.get()
    found = {} if handled is None else {"task_id": handled.task, "run_id": handled.run}
    trace, span = current_ids()
    if trace:
        return {**found, "trace_id": trace, "span_id": span}
    if handled is not None and (ids := trace_context.read(trace_context.stated(handled.context)[0])) is not None:
        found["trace_id"] = f"{ids.trace:032x}"
    return found


GLYPHS = {
    logging.DEBUG: "·",
    logging.INFO: "✓",
    logging.WARNING: "!",
    logging.ERROR: "✗",
    logging.CRITICAL: "✗",
}

CHATTY = ("httpx", "httpx2", "mcp")
"""Libraries with a line for each request, which is too much for `info`."""


def configure(service: str, level: str, format: str, stream: TextIO | None = None) -> None:
    """Sends all logging to `stream` (standard error by default), in place of an earlier configuration.

    `level` is `debug`, `info`, `warning` or `error`; `format` is `text` or `json`.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service) if format == "json" else TextFormatter(service))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING if level == "info" else logging.NOTSET)


def last_line(service: str, format: str, message: str) -> str:
    """Why a process ends, for what may not have been configured yet: one line, in the format of the log."""
    try:
        known = redactor()
    except ConfigurationError:  # `WEFT_REDACT` itself is what is wrong
        known = Redactor.from_environment(os.environ)
    with use(known):
        if format != "json":
            return redactor().text(f"weft {service}: {one_line(message)}")
        record = logging.LogRecord("weft", logging.ERROR, "", 0, message, None, None)
        return JsonFormatter(service).format(record)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `configure` installs, and the only one that it replaces."""


class TextFormatter(logging.Formatter):
    """`12:03:04 agent-handler  ✓ message  key=value`, local time; a traceback follows, indented.

    While a delivery is handled, the last of the values is its task.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {self._service}  {GLYPHS.get(record.levelno, '·')} {one_line(record.getMessage())}"
        fields = _fields(record)
        task = log_ids().get("task_id")
        if task is not None and "task" not in fields:
            fields = {**fields, "task": task}
        if fields:
            line += "  " + " ".join(f"{name}={one_line(str(value))}" for name, value in fields.items())
        line += "".join(f"\n    {part}" for part in _traceback(self, record).splitlines())
        return redactor().text(line)


class JsonFormatter(logging.Formatter):
    """One object per line: `time` (RFC 3339), `level`, `service`, `logger`, `message`, then the fields.

    While a delivery is handled, also `task_id` and `run_id`, and of a traced one `trace_id` and `span_id`.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value)
        for name, id in log_ids().items():
            line.setdefault(name, id)
        traceback = _traceback(self, record)
        if traceback:
            line["traceback"] = traceback
        return redactor().data(msgspec.json.encode(line, enc_hook=str)).decode()


def one_line(text: str) -> str:
    """The text with its line breaks shown: what others wrote must not look like a line of ours."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    return formatter.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
