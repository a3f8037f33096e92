"""The question, and the only right answer: both of about 300 bytes, and no two alike."""

from __future__ import annotations

FILLER = "Streams keep what was said until somebody has acted on it, and say who is about to. " * 4
LENGTH = 300
FOUND = "found: "


def question(number: int) -> str:
    return f"{number:09d} {FILLER}"[:LENGTH]


def found(text: str) -> str:
    """The tool's answer, in every benchmarked system."""
    return FOUND + text


def answer(number: int) -> str:
    return found(question(number))
