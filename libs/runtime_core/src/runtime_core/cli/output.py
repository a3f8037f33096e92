"""Printing of JSON and tables, and parsing of values typed on the command line."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from runtime_core.errors import InvalidInput
from runtime_core.telemetry.redaction import redactor
from runtime_core.text import plain, shortened

PREVIEW = 80
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


def in_bytes(size: int) -> str:
    """Return a size in a suitable unit, as in `1.5 MiB`."""
    for unit, least in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


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
