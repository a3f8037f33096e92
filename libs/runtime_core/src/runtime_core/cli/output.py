"""How commands print (JSON for programs, aligned lines for people), and typed values."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from runtime_core.errors import InvalidInput
from runtime_core.telemetry.redaction import redactor
from runtime_core.text import plain, shortened

PREVIEW = 80

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Row = dict[str, Any]
"""What a command shows of one thing, as its JSON has it. (Any: JSON.)"""
Columns = Mapping[str, str | Callable[[Row], object]]
"""By their headings: a member of the row each, or what is made of the row."""


def print_json(document: object) -> None:
    """One document on one line."""
    print(msgspec.json.encode(document, enc_hook=str).decode(), flush=True)


def print_rows(rows: Sequence[Row], columns: Columns, as_json: bool = False, *, empty: str = "") -> None:
    """The rows as JSON or as a table; `empty` is said where there are none."""
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
    """What is known of one thing, a line each; what is empty is left out."""
    for name, value in facts:
        if value:
            print(f"{name:<9}{plain(str(value))}")


def print_value(value: object) -> None:
    """An answer: text as it is, everything else as JSON with indentation."""
    text = value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    print(shown(text), flush=True)


def without_secrets(value: Any) -> Any:  # Any: JSON
    """A value as it may be shown to whoever looks after the service."""
    return msgspec.json.decode(redactor().data(msgspec.json.encode(value, enc_hook=str)))


def moment(milliseconds: float | None) -> str:
    """A point in time, as this machine's clock shows it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000)) if milliseconds else "-"


def in_bytes(size: int) -> str:
    """A size in the unit that suits it, as in `1.5 MiB`."""
    for unit, least in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


def preview(value: object, limit: int = PREVIEW) -> str:
    """A value on one line."""
    text = plain(value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode())
    return shortened(text, limit)


def shown(text: str) -> str:
    """As it came; for a terminal without control characters other than line breaks and tabs."""
    if not sys.stdout.isatty():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def error_line(error: object, limit: int = 200) -> str:
    """An error object (`type`, `message`) on one line; empty where there is none."""
    if not isinstance(error, dict):
        return preview(error) if error else ""
    kind, message = str(error.get("type", "")), str(error.get("message", ""))
    return preview(": ".join(part for part in (kind, message) if part), limit)


def typed(text: str, *, words: bool = False) -> object:
    """JSON where the text is an object, an array, a number or a quoted string; else the text itself.

    With `words` also `true`, `false` and `null` are JSON: answers to questions are mostly those.
    """
    stripped = text.strip()
    if stripped[:1] not in tuple('{["-0123456789') and not (words and stripped in ("true", "false", "null")):
        return text
    try:
        value: object = msgspec.json.decode(stripped)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value


def json_of(text: str, option: str) -> bytes:
    """JSON as it was typed, checked. Raises InvalidInput that names the option."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(option, f"is not JSON ({error}); quote texts, as in '\"text\"'") from None
    return text.encode()
