"""Log lines as text or JSON; the delivery that is being handled, and the frames of its code."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import CodeType, FrameType, FunctionType
from typing import Protocol, TextIO, TypeVar, cast

import msgspec

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry import trace_context
from runtime_core.telemetry.redaction import Redactor, kept, redactor, use
from runtime_core.telemetry.spans import current_ids


class Handled(Protocol):
    """The delivery that log lines name."""

    task: str
    run: str
    context: bytes


HANDLED: ContextVar[Handled | None] = ContextVar("weft_handled", default=None)
_GUARDS: set[CodeType] = set()
_ENDS: set[CodeType] = set()

Function = TypeVar("Function", bound=Callable[..., object])


def guards_users_code(function: Function) -> Function:
    """Mark a function around users' code whose local `handled` is its delivery. The loop's watch reads its frame."""
    _GUARDS.add(cast("FunctionType", function).__code__)
    return function


def ends_users_code(function: Function) -> Function:
    """Mark a function that is called where users' code returns."""
    _ENDS.add(cast("FunctionType", function).__code__)
    return function


def is_guard(frame: FrameType) -> bool:
    """Whether the frame is of a function that `guards_users_code` marks."""
    return frame.f_code in _GUARDS


def has_ended(frame: FrameType) -> bool:
    """Whether users' code has just returned to the frame, or is about to be called."""
    return frame.f_code in _ENDS or (frame.f_code in _GUARDS and "handled" in frame.f_locals)


def log_ids() -> dict[str, str]:
    """Return `task_id` and `run_id` of the current delivery, and `trace_id` and `span_id` of the current span."""
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

LONGEST = 16_000
"""The most characters of a message, a field or a traceback on one line. A longer traceback keeps its end."""
LONGEST_LINE = 262_144
"""The most bytes of a JSON line before its fields are shortened one by one."""
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

CHATTY = ("httpx", "httpx2", "mcp")
"""Libraries that log a line per request, which is too much for `info`."""


def configure(service: str, level: str, format: str, stream: TextIO | None = None) -> None:
    """Send all logging to `stream` (standard error by default), and replace an earlier configuration.

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
    """Return why a process ends, as one line in the format of the log, which may not be configured yet."""
    try:
        known = redactor()
    except ConfigurationError:  # `WEFT_REDACT` itself is invalid
        known = Redactor.from_environment(os.environ)
    with use(known):
        if format != "json":
            return one_line(redactor().text(f"weft {service}: {kept(message, LONGEST)}"))
        record = logging.LogRecord("weft", logging.ERROR, "", 0, message, None, None)
        return JsonFormatter(service).format(record)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `configure` installs; it replaces only this one."""

    def handleError(self, record: logging.LogRecord) -> None:
        # The default would print the line's arguments, with their secrets.
        reason = type(sys.exc_info()[1]).__name__
        with contextlib.suppress(OSError, ValueError):
            print(f"weft: a log line of {record.name!r} could not be written: {reason}", file=sys.stderr)


class TextFormatter(logging.Formatter):
    """Formats `12:03:04 agent-handler  ✓ message  key=value` in local time; an indented traceback follows.

    While a delivery is handled, the last value is its task.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(_fields(record))
        frames = _text(fields.pop("traceback", ""))
        task = log_ids().get("task_id")
        if task is not None and "task" not in fields:
            fields = {**fields, "task": task}
        text = _message(record)
        if fields:
            text += "  " + " ".join(f"{name}={kept(_text(value), LONGEST)}" for name, value in fields.items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        # Redact first: after the letter of an escaped line break, a key looks like the rest of a word.
        line = f"{clock} {self._service}  {GLYPHS.get(record.levelno, '·')} {one_line(redactor().text(text))}"
        traceback = redactor().text(_traceback(self, record) or kept(frames, LONGEST, end=True))
        return line + "".join(f"\n    {one_line(part)}" for part in traceback.splitlines())


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: `time` (RFC 3339), `level`, `service`, `logger`, `message`, then the fields.

    While a delivery is handled, also `task_id` and `run_id`, and with tracing `trace_id` and `span_id`.
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
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value)
        for name, id in log_ids().items():
            line.setdefault(name, id)
        traceback = _traceback(self, record)
        if traceback:
            line["traceback"] = traceback
        return redactor().data(_encoded(line)).decode()


def one_line(text: str) -> str:
    """Escape line breaks and control characters: others' text must not forge lines or drive a terminal."""
    return text if text.isprintable() else _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception as error:  # the arguments do not fit the format, or one of them has no text
        text = f"{_text(record.msg)} (its arguments cannot be shown: {type(error).__name__})"
    return kept(text, LONGEST)


def _encoded(line: dict[str, object]) -> bytes:
    """Return the line as JSON. If a field is too large or JSON cannot hold it, fields become shortened texts."""
    with contextlib.suppress(Exception):  # a field may be an object of any kind
        data = msgspec.json.encode(line, enc_hook=str)
        if len(data) <= LONGEST_LINE:
            return data
    return msgspec.json.encode(
        {kept(_text(name), LONGEST): kept(_text(value), LONGEST) for name, value in line.items()}
    )


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"(a {type(value).__name__} without a text: {type(error).__name__})"


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if not record.exc_info or not record.exc_info[0]:
        return ""
    return kept(formatter.formatException(record.exc_info), LONGEST, end=True)
