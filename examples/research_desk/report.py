"""Writes the report: quotes from the best passages, each with its file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from examples.research_desk.ranking import Ranked, Ranking, places, topic_words

QUOTE_MAX = 280
IN_SHORT = 3

_SENTENCE_END = re.compile("(?<=[.!?])\\s+(?=[^\\sa-z])|(?<=[\N{IDEOGRAPHIC FULL STOP}])")
_OWN_BLOCK = re.compile(r" {4}|\t|\s*([-*+>|]|#{1,6}\s|\d+[.)]\s|```|~~~|$)")
_FENCE = re.compile(r"\s*(```|~~~)")
_MARKER = re.compile(r"\s*([-*+>]\s+|#{1,6}\s+|\d+[.)]\s+|\|\s*)*")


@dataclass(frozen=True)
class Citation:
    """A quote and its place. The line contains at least one word of the topic."""

    number: int
    file: str
    line: int
    quote: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Report:
    """The desk's answer: the text (Markdown), and its citations as data."""

    topic: str
    text: str
    citations: list[Citation]


def cite(topic: str, ranking: Ranking) -> list[Citation]:
    """Return the best sentence of each of the best passages, numbered by file, the best first."""
    weights = dict(zip(topic_words(topic), ranking.weights, strict=True))
    chosen = [(passage.file, *_best_sentence(passage, weights)) for passage in ranking.best]
    files = list(dict.fromkeys(file for file, _, _ in chosen))
    chosen.sort(key=lambda one: files.index(one[0]))
    return [Citation(number, *one) for number, one in enumerate(chosen, start=1)]


def sections(topic: str, ranking: Ranking, citations: Sequence[Citation], looked_for: str = "") -> Iterator[str]:
    """Yield the parts of the report in order. `looked_for` has the searched words; empty: those of the topic."""
    searched = f"{_count(ranking.passages, 'passage')} of {_count(ranking.documents, 'document')}"
    if not citations:
        yield f"# {topic}\n\nNothing found: {searched} were searched; none mentions it.\n"
        return
    files = list(dict.fromkeys(one.file for one in citations))
    yield (
        f"# {topic}\n\n{searched} were searched. "
        f"Quoted are the {len(citations)} best of {_count(ranking.matching, 'match', 'matches')}, "
        f"from {_count(len(files), 'document')}.{_absent(looked_for or topic, ranking)}\n"
    )
    by_file = {file: [one for one in citations if one.file == file] for file in files}
    yield "\n## In short\n\n" + _quotes([cited[0] for cited in by_file.values()][:IN_SHORT])
    for file, cited in by_file.items():
        yield f"\n## {file}\n\n{_quotes(cited)}"
    yield _sources(citations)


def sections_around(topic: str, ranking: Ranking, citations: Sequence[Citation], looked_for: str) -> tuple[str, str]:
    """Return the heading and the sources, which surround a text by another writer."""
    first = next(sections(topic, ranking, citations, looked_for))
    return f"{first}\n", f"\n{_sources(citations)}"


def _sources(citations: Sequence[Citation]) -> str:
    return "\n## Sources\n\n" + "".join(f"[{one.number}] {one.place}\n" for one in citations)


def _quotes(citations: Sequence[Citation]) -> str:
    return "".join(f"- {one.quote} [{one.number}]\n" for one in citations)


def _absent(topic: str, ranking: Ranking) -> str:
    absent = [word for word, count in zip(topic_words(topic), ranking.holding, strict=True) if not count]
    return f" No passage has: {', '.join(absent)}." if absent else ""


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _best_sentence(passage: Ranked, weights: dict[str, float]) -> tuple[int, str]:
    """Return the line and the text of the best sentence; one in the heading only if no other contains a word."""
    best = (0.0, passage.first, passage.lines[0])
    heading = (0.0, passage.first, passage.lines[0])
    for text, starts in _sentences(passage):
        at_line: dict[int, set[str]] = {}
        for stem, start in places(text):
            if stem in weights:
                line = max((begin, number) for begin, number in starts if begin <= start)[1]
                at_line.setdefault(line, set()).add(stem)
        if not at_line:
            continue
        said = set().union(*at_line.values())
        worth = sum(weights[stem] for stem in said)
        # The line with the largest part of the sentence.
        line = min(at_line, key=lambda number: (-sum(weights[stem] for stem in at_line[number]), number))
        found = (worth, line, _cut(text, next(begin for begin, number in starts if number == line)))
        if _is_heading(passage, line):
            heading = max(heading, found, key=lambda one: one[0])
        else:
            best = max(best, found, key=lambda one: one[0])
    _, line, quote = best if best[0] else heading
    return line, quote


def _sentences(passage: Ranked) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield each sentence on one line, with the offsets and numbers of the document's lines in it."""
    for block in _blocks(passage):
        text, starts = "", []
        for number, line in block:
            text += " " if text else ""
            starts.append((len(text), number))
            text += _MARKER.sub("", line, count=1).strip().rstrip("|").rstrip()
        begin = 0
        for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
            sentence = text[begin:end].strip(" |")
            if sentence:
                offset = text.index(sentence, begin)
                # The line where the sentence begins, and the lines that begin in it.
                first = max(one for one in starts if one[0] <= offset)[1]
                yield sentence, [(0, first), *((at - offset, line) for at, line in starts if offset < at < end)]
            begin = end


def _blocks(passage: Ranked) -> Iterator[list[tuple[int, str]]]:
    """Yield blocks of numbered lines; list items, table rows and headings are separate blocks."""
    block: list[tuple[int, str]] = []
    for number, line in enumerate(passage.lines, start=passage.first):
        if block and (_OWN_BLOCK.match(line) or _is_heading(passage, number - 1)):
            yield block
            block = []
        if line.strip() and not _FENCE.match(line):
            block.append((number, line))
    if block:
        yield block


def _is_heading(passage: Ranked, line: int) -> bool:
    if line != passage.first or not passage.heading:
        return False
    return passage.lines[0].strip("# \t") == passage.heading.strip("# \t")


def _cut(text: str, line_start: int) -> str:
    """Shorten a quote to QUOTE_MAX characters around the cited line."""
    if len(text) <= QUOTE_MAX:
        return text
    begin = 0 if line_start < QUOTE_MAX // 2 else line_start
    part = text[begin : begin + QUOTE_MAX].rstrip()
    return ("…" if begin else "") + part + ("…" if begin + QUOTE_MAX < len(text) else "")
