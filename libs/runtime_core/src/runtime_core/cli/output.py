"""How commands print (JSON for programs, aligned lines for people), their shared options, and typed values."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from runtime_core.errors import InvalidInput
from runtime_core.telemetry.redaction import redactor
from runtime_core.text import plain, shortened

PREVIEW = 80


def print_json(document: object) -> None:
    """One document on one line."""
    print(msgspec.json.encode(document, enc_hook=str).decode(), flush=True)


def without_secrets(value: Any) -> Any:  # Any: JSON
    """A value as it may be shown to whoever looks after the service."""
    return msgspec.json.decode(redactor().data(msgspec.json.encode(value, enc_hook=str)))


def print_value(value: object) -> None:
    """An answer: text as it is, everything else as JSON with indentation."""
    text = value if isinstance(value, str) else msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    print(shown(text), flush=True)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be; the last one has no limit."""
    lines = [tuple(headers), *(tuple(plain(cell) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def moment(milliseconds: float | None) -> str:
    """A point in time, as this machine's clock shows it."""
    if not milliseconds:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(milliseconds / 1000))


def in_bytes(size: int) -> str:
    """A size in the unit that suits it, as in `1.5 MiB`."""
    if size < 1024:
        return f"{size} B"
    return f"{size / 1024:.1f} KiB" if size < 1024**2 else f"{size / 1024**2:.1f} MiB"


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
    """An error object (`type`, `message`) on one line."""
    if not isinstance(error, dict):
        return preview(error)
    kind, message = str(error.get("type", "")), str(error.get("message", ""))
    return preview(": ".join(part for part in (kind, message) if part), limit)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_JSON_BEGINS = frozenset('{["-0123456789')


def typed(text: str, *, words: bool = False) -> object:
    """JSON where the text is an object, an array, a number or a quoted string; else the text itself.

    With `words` also `true`, `false` and `null` are JSON: answers to questions are mostly those.
    """
    stripped = text.strip()
    if stripped[:1] not in _JSON_BEGINS and not (words and stripped in ("true", "false", "null")):
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
