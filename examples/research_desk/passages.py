"""Splits a document into passages: paragraphs, each with the heading above it and the numbers of its lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LINES_MAX = 12
"""The most lines of a passage. A longer block (a table, a listing) is split."""
LINE_MAX = 800
"""The most characters of a line. A longer line (a paragraph without breaks) is split into passages."""
PASSAGE_MAX = 1_200
"""The number of characters from which a passage gets no further line."""

_HEADING = re.compile(r"#{1,6}\s+(?P<title>.*\S)\s*#*\s*")
_UNDERLINE = re.compile(r"(=|-|~|\^|\*|\+)\1{2,}\s*")


@dataclass
class Passage:
    """Consecutive lines of a document."""

    heading: str
    """The heading above it; empty if there is none."""
    first: int
    """The number of its first line, from 1."""
    lines: list[str] = field(default_factory=list)


def split(lines: Sequence[str]) -> Iterator[Passage]:
    """Return the passages of a document in order. A heading begins the passage below it."""
    passage = Passage("", 1)
    in_heading = False
    for number, line in enumerate(lines, start=1):
        if len(line) > LINE_MAX:
            if passage.lines:
                yield passage
            for piece in textwrap.wrap(line, LINE_MAX):
                yield Passage(passage.heading, number, [piece])
            passage, in_heading = Passage(passage.heading, number + 1), False
            continue
        title = _title(line, lines[number] if number < len(lines) else "")
        if title:
            if passage.lines:
                yield passage
            passage, in_heading = Passage(title, number, [line]), True
        elif not line.strip():
            # An empty line does not separate a heading from its paragraph.
            if passage.lines and not in_heading:
                yield passage
                passage = Passage(passage.heading, number + 1)
            elif passage.lines:
                passage.lines.append(line)
        else:
            if len(passage.lines) == LINES_MAX or sum(map(len, passage.lines)) > PASSAGE_MAX:
                yield passage
                passage = Passage(passage.heading, number)
            if not passage.lines:
                passage.first = number
            passage.lines.append(line)
            in_heading = in_heading and _UNDERLINE.fullmatch(line) is not None
    if any(line.strip() for line in passage.lines):
        yield passage


def _title(line: str, following: str) -> str:
    """Return the heading in this line, marked by `#` or by the rule below it; else an empty text."""
    match = _HEADING.fullmatch(line)
    if match is not None:
        return match["title"]
    underlined = _UNDERLINE.fullmatch(following) is not None and len(following.strip()) >= len(line.strip()) > 0
    return line.strip() if underlined and _UNDERLINE.fullmatch(line) is None else ""
