"""Printing of JSON, tables and tasks, and parsing of values typed on the command line."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from runtime_core.base.text import duration, plain, shortened
from runtime_core.client.task_view import describe_wait, wait_name
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.stuck import describe_lack
from runtime_core.telemetry.redaction import redactor
from runtime_core.wire.step import ENDED

PREVIEW = 80
COUNTER_SECONDS = 0.1
Item = TypeVar("Item")
_SPAN = re.compile(r"(\d{1,6})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Row = dict[str, Any]
"""One item of a command's output, as in its JSON. (Any: JSON.)"""
Columns = Mapping[str, str | Callable[[Row], object]]
"""Heading → the name of a member of the row, or a function of the row."""


def print_json(document: object) -> None:
    """Print a document on one line."""
    print(msgspec.json.encode(document, enc_hook=str).decode(), flush=True)


def print_result(document: object, line: str, as_json: bool) -> None:
    """Print what a command has done: as JSON, or in words."""
    if as_json:
        print_json(document)
    else:
        print(line)


def print_rows(rows: Sequence[Row], columns: Columns, as_json: bool = False, *, empty: str = "") -> None:
    """Print rows as JSON or as a table; if there are none, print `empty`."""
    if as_json:
        print_json(rows)
    elif not rows and empty:
        print(empty)
    else:
        cells = [
            [_cell(row[each] if isinstance(each, str) else each(row)) for each in columns.values()] for row in rows
        ]
        lines = [list(columns), *cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _cell(value: object) -> str:
    return "-" if value is None else plain(f"{value:g}" if isinstance(value, float) else str(value))


def print_facts(facts: Sequence[tuple[str, object]]) -> None:
    """Print names and values, one pair per line, without empty values."""
    for name, value in facts:
        if value:
            print(f"{name:<9}{plain(str(value))}")


def print_value(value: object) -> None:
    """Print an answer: text as is, anything else as indented JSON."""
    text = value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    print(shown(text), flush=True)


def without_secrets(value: Any) -> Any:  # Any: JSON
    """Return the value with its secrets redacted."""
    return msgspec.json.decode(redactor().data(msgspec.json.encode(value, enc_hook=str)))


def moment(milliseconds: float | None) -> str:
    """Return a time (milliseconds since 1970) in the local time zone; `-` for None and 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000)) if milliseconds else "-"


def past_moment(text: str, option: str) -> datetime | None:
    """Return a time given as a span before now, as in 7d, or as a date or time; None for an empty text.

    Raises BadParameter that names the option.
    """
    if not text:
        return None
    if span := _SPAN.fullmatch(text):
        return datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: int(span[1])})
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{option} {text!r} is neither a span, as in 7d or 12h, nor a time, as in 2026-11-01 or 2026-11-01T08:00Z"
        ) from None
    return given if given.tzinfo is not None else given.replace(tzinfo=UTC)


def progress(items: Sequence[Item], done: str) -> Iterator[Item]:
    """Yield the items, and show on a terminal's standard error how many are `done`."""
    shows = sys.stderr.isatty() and len(items) > 1
    for number, item in enumerate(items, 1):
        yield item
        if shows:
            print(f"\r{done} {number} of {len(items)}", end="", file=sys.stderr, flush=True)
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextmanager
def counter(done: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows a growing count on a terminal, as in `1200 steps exported`, on standard error."""
    shown_at = -math.inf

    def show(count: int) -> None:
        nonlocal shown_at
        if sys.stderr.isatty() and time.monotonic() >= shown_at + COUNTER_SECONDS:
            shown_at = time.monotonic()
            print(f"\r{count} {done}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if shown_at > -math.inf:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def preview(value: object, limit: int = PREVIEW) -> str:
    """Return a value on one line, shortened to `limit` characters."""
    text = plain(value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode())
    return shortened(text, limit)


def shown(text: str) -> str:
    """Return the text; for a terminal, replace control characters except line breaks and tabs."""
    if not sys.stdout.isatty():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def error_line(error: object, limit: int = 200) -> str:
    """Return an error object (`type`, `message`) on one line; empty if there is none."""
    if not isinstance(error, dict):
        return preview(error) if error else ""
    kind, message = str(error.get("type", "")), str(error.get("message", ""))
    return preview(": ".join(part for part in (kind, message) if part), limit)


def json_of(text: str, option: str) -> bytes:
    """Return JSON as typed. Raises InvalidInput(option) if it is not valid."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(option, f"is not JSON ({error}); quote text, as in '\"text\"'") from None
    return text.encode()


_AMOUNTS = ("tokens", "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "requests", "cost")


def status_line(view: Row, now_ms: float) -> str:
    """Return the task's status, and for a waiting one what it waits for: a waiting task is healthy."""
    waits = view.get("waits_for") or []
    kinds = {wait["kind"] for wait in waits}
    if any(wait.get("place") == "park" for wait in waits):
        return f"{view['status']} (parked)"
    if view["status"] in ENDED or len(kinds) != 1:
        return str(view["status"])
    since = min((wait["since"] for wait in waits if "since" in wait), default=None)
    passed = "" if since is None else f" for {duration(now_ms - since)}"
    if kinds == {"human"}:
        return f"waiting for a human{passed}"
    if kinds == {"timer"}:
        return f"sleeping{passed}"
    return str(view["status"])


def question_line(question: Row) -> str:
    """Return the text of a question, with its data, on one line."""
    data = f"  {preview(question['data'], 300)}" if question.get("data") is not None else ""
    return f"{question['prompt']}{data}"


def answers_to(question: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """Return the commands that answer a question."""
    signal = f"weft task signal {question['task_id']} {question['request_id']}"
    if question.get("expects") != "verdict":
        return [f"{signal} VALUE"]
    return [f"{signal} true", f"{signal} false", signal + """ '{"verdict": "edit", "value": …}'"""]


def changes_of(view: Row) -> list[str]:
    """Return what `weft task watch` prints of a task: its status, its error and the steps for which it waits."""
    waits = [f"{'parked ' * (wait.get('place') == 'park')}{wait_name(wait)}" for wait in view.get("waits_for", ())]
    if any(wait.get("place") == "park" for wait in view.get("waits_for", ())):
        waits.append(f"see weft task show {view['task_id']}")
    return [view["status"], *filter(None, [error_line(view.get("error"), 600)]), *waits[:5]]


def instance_of(row: Row) -> str:
    """Return the agent of a row, as `agent/key` if it has a key."""
    return f"{row['agent']}/{row['key']}" if row.get("key") else str(row["agent"])


def print_task(view: Row, now_ms: int) -> None:
    """Print what `read_task` returns, one fact a line."""
    created, ended = view.get("created"), view.get("ended")
    usage, fork = view.get("usage") or {}, view.get("forked_from")
    limits = [f"{view['max_steps']} steps"] if "max_steps" in view else []
    limits += [f"{limit:g} {name.removeprefix('max_')}" for name, limit in view.get("limits", {}).items()]
    facts: list[tuple[str, object]] = [
        ("task", view["task_id"]),
        ("status", status_line(view, now_ms)),
        ("agent", instance_of(view)),
        ("version", view.get("version")),
        ("session", view.get("session_id")),
        ("fork of", fork and f"{fork['task']}, from {'step ' + fork['step'] if fork['step'] else 'its start'}"),
        ("created", created and f"{moment(created)} ({duration(now_ms - created)} ago)"),
        ("ended", created and ended and f"{moment(ended)} (after {duration(ended - created)})"),
        ("limit", ", ".join(limits)),
        ("usage", _amounts(usage)),
        *(("", f"{model}: {_amounts(amounts)}") for model, amounts in usage.get("models", {}).items()),
        ("limit", "time_limit_at" in view and f"until {moment(view['time_limit_at'])}"),
        ("input", "input" in view and preview(view["input"], 500)),
        ("output", "output" in view and preview(view["output"], 500)),
        ("error", error_line(view.get("error"), 600)),
    ]
    facts += [("handler", ": ".join(describe_lack(each))) for each in view.get("without_handler", ())]
    for parked in view.get("parked", ()):
        facts.append(
            ("parked", f"step {parked['step']} of run {parked['run']}, at {parked['line'] or 'an unknown line'}")
        )
        facts += [("", f"{what}: {parked[what]}") for what in ("code", "recorded", "now") if parked[what]]
    for wait in view.get("waits_for", ()):
        if wait["kind"] != "human":  # its question is printed below
            error = error_line((wait.get("errors") or [None])[-1])
            facts.append(("waits", describe_wait(wait, now_ms) + (f"; the last error: {error}" if error else "")))
    for question in view.get("questions", ()):
        facts.append(("question", question_line(question)))
        if "deadline" in question:
            otherwise = f", then the answer is {preview(question['default'])}" if "default" in question else ""
            facts.append(("", f"until {moment(question['deadline'])}{otherwise}"))
        facts += [("", f"answer with: {command}") for command in answers_to(question)]
    facts += [("dead", f"{letter}  see weft dead show {letter}") for letter in view.get("dead_letters", ())]
    print_facts(facts)


def _amounts(usage: Row) -> str:
    # The broker does not keep the order.
    names = sorted(usage, key=lambda name: (_AMOUNTS.index(name) if name in _AMOUNTS else len(_AMOUNTS), name))
    return ", ".join(f"{usage[name]:.10g} {name}" for name in names if name != "models")
