"""The events of a history as lines of text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.history import History


def story(history: History) -> list[str]:
    """Return the history's events, one per line, without heartbeats and polls that did nothing."""
    lines = []
    for now, who, what, reply in history.scheduler.log:
        if isinstance(what, str):
            lines.append(f"{now:8.3f} -- {what}")
            continue
        told = _command(what)
        answer = _short(reply)
        if told.startswith(("beat", "promote", "adopt", "XPENDING", "XGROUP", "TIME")) and _nothing(told, answer):
            continue
        lines.append(f"{now:8.3f} {who:>10} {told} => {answer}")
    return lines


def _nothing(told: str, answer: str) -> bool:
    if told.startswith("promote"):
        return answer.startswith("[0")
    if told.startswith("adopt"):
        return answer in ("[OK 0]", "[OK]")
    if told.startswith("beat"):
        return answer.startswith("[OK") and answer.endswith(" 0]")
    return not answer.startswith("[[")


def _command(args: tuple[Any, ...]) -> str:
    if args[0] == b"FCALL":
        name = args[1].decode().partition("_")[2].partition("_")[2]
        return f"{name} {' '.join(_short(arg) for arg in args[4:])}"[:260]
    return " ".join(_short(arg) for arg in args)[:200]


def _short(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return "[" + " ".join(_short(item) for item in value)[:200] + "]"
    text = str(value).replace("\n", "·")
    text = re.sub(r"\b1900\d{6}(\d{3})\b", r"…\1", text)
    return text if len(text) <= 90 else text[:80] + "…"
