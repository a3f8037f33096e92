"""Text for one line of a terminal or of a message."""

from __future__ import annotations

# Limits on the texts of errors, in characters: every error is kept with its delivery.
LONGEST_TRACEBACK = 8_000
LONGEST_MESSAGE = 2_000
LONGEST_TYPE = 200


def plain(text: str) -> str:
    """Return the text on one line, without the control characters that could drive a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "�" for char in text)


def text_of_error(error: BaseException) -> str:
    """Return the error's own text, or why it cannot be read."""
    try:
        return str(error)
    except Exception as unreadable:
        return f"(its text cannot be read: {type(unreadable).__name__})"


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if some are left out."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


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


def in_bytes(size: int) -> str:
    """Return a size in a suitable unit, as in `1.5 MiB`."""
    for unit, least in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
