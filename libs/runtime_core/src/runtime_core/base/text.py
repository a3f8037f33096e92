"""Text for one line of a terminal or of a message."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime

# Limits on the texts of errors, in characters: every error is kept with its delivery.
LONGEST_TRACEBACK = 8_000
LONGEST_MESSAGE = 2_000
LONGEST_TYPE = 200
_FRAME = re.compile(r'(?m)^(?=  File ")')


def plain(text: str) -> str:
    """Return the text on one line, without the control characters that could drive a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "�" for char in text)


TURNS = re.compile(r"[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction of the text after them, and so can hide what it says."""


def visible(text: str) -> str:
    """Return a text with the numbers of its characters that turn its direction."""
    return TURNS.sub(lambda found: f"⟨U+{ord(found[0]):X}⟩", text)


def text_of_error(error: BaseException) -> str:
    """Return the error's own text, or why it cannot be read."""
    try:
        return str(error)
    except Exception as unreadable:
        return f"(its text cannot be read: {type(unreadable).__name__})"


def own_frames(traceback: str) -> str:
    """Return a traceback without Weft's own frames; empty if it has no others, or none of Weft."""
    frames = _FRAME.split(traceback)
    own = [frame for frame in frames[1:] if "/runtime_core/" not in frame.partition("\n")[0]]
    if not own or len(own) == len(frames) - 1:
        return ""
    if "/runtime_core/" in frames[-1].partition("\n")[0]:  # the error's text follows the last frame
        own.append("\n".join(line for line in frames[-1].split("\n")[1:] if not line.startswith(" ")))
    return frames[0] + "".join(own)


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if some are left out."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def counted(count: int, noun: str) -> str:
    """Return how many there are, as in `1 task` and `2 tasks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def choices(names: Collection[str]) -> str:
    """Return what an error offers instead of an unknown name, as in `choose from a, b`."""
    return f"choose from {', '.join(names)}" if names else "there are none"


def duration(milliseconds: float) -> str:
    """Return a time span for people, as in `12.3 ms`, `3.42 s`, `2 min 05 s`, `3 h 02 min`."""
    # Below these limits, rounding never shows 1000.0 ms or 60.00 s. If a clock was set back, the span is zero.
    if milliseconds < 999.95:
        return f"{max(milliseconds, 0.0):.1f} ms"
    seconds = milliseconds / 1_000
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def about(milliseconds: float) -> str:
    """Return a time span that still grows, without decimals: `371 ms`, `54 s`, `2 min 05 s`."""
    if milliseconds < 999.5:
        return f"{max(milliseconds, 0.0):.0f} ms"
    return f"{milliseconds / 1_000:.0f} s" if milliseconds < 59_500 else duration(max(milliseconds, 60_000))


def iso(ms: float) -> str:
    """Return a time for `<time datetime>`."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""


def utc(ms: float) -> str:
    """Return a time for people, in UTC."""
    return iso(ms)[:19].replace("T", " ") + " UTC"


def in_bytes(size: int) -> str:
    """Return a size in a suitable unit, as in `1.5 MiB`."""
    for unit, least in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"


def span(ms: float) -> str:
    """Return a time span for people: 0.4 ms, 624 ms, 1.25 s, 3 min 02 s, 2 h 10 min, 3.2 d."""
    if ms < 0.05:
        return "0 ms"
    if 10 <= ms < 999.5:
        return f"{ms:.0f} ms"
    return f"{ms / 86_400_000:.1f} d" if ms >= 172_800_000 else duration(ms)


def brief(ms: float) -> str:
    """Return a time span for little room, with two digits or three: 47 ms, 3.2 s, 5.1 min, 18 h."""
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= size:
            return f"{ms / size:.1f} {unit}" if ms < 10 * size else f"{ms / size:.0f} {unit}"
    return f"{ms:.0f} ms"


def whole(ms: float) -> str:
    """Return a time span without parts that are zero, as in `45 s`, `1 min`, `1 h 30 min`."""
    units = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))
    parts, rest = [], round(ms)
    for unit, size in units:
        count, rest = divmod(rest, size)
        parts += [f"{count} {unit}"] if count else []
    return " ".join(parts) or "0 ms"


def amount(value: float) -> str:
    """Return a count for people: 1,240, 45.2 k, 3.1 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.1f} {unit}"
    return f"{value:,.0f}"


def money(value: float) -> str:
    """Return a cost in the currency that the agents report."""
    if value == 0:
        return "0"
    return f"{value:.4f}" if value < 1 else f"{value:,.2f}"
