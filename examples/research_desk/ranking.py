"""Ranks passages by the words of a topic: BM25 over all passages, with a bonus for words that are close together."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from examples.research_desk.passages import Passage

BEST_PER_SHARD = 20
BEST = 12
BEST_PER_FILE = 3
WORDS_MAX = 16
SATURATION, LENGTH_WEIGHT = 1.2, 0.75
"""BM25's k1 (saturation of repeated words) and b (penalty of long passages)."""
HEADING_WEIGHT, NEAR_WEIGHT = 0.6, 0.8

_STOP_WORDS = (
    "a about after all an and any are as at be because been before but by can could did do does each for from had has "
    "have how if in into is it its like may more most no not of on one only or other our out over own she should so "
    "some such than that the their them then there these they this to too under until up very was we were what when "
    "where which while who why will with would you your"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
# In scripts without spaces, each character counts as a word.
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")
_ENDINGS = ("ations", "ation", "ings", "edly", "ing", "ers", "ies", "ied", "ed", "er", "es", "ly", "s", "e", "y")
_STEM_MIN = 3


@dataclass(frozen=True)
class Candidate:
    """A passage with at least one of the words."""

    file: str
    first: int
    heading: str
    lines: list[str]
    counts: list[int]
    """The count of each word of the topic."""
    in_heading: list[bool]
    length: int
    """The number of words without stop words."""
    span: int
    """The length in words of the shortest span with all its words of the topic."""


@dataclass(frozen=True)
class Finding:
    """The result of searching some documents: the best candidates, and statistics for ranking all of them."""

    documents: int
    passages: int
    matching: int
    """The number of passages with at least one word of the topic."""
    length: int
    """The number of words in all passages."""
    holding: list[int]
    """The number of passages that contain each word of the topic."""
    candidates: list[Candidate]


@dataclass(frozen=True)
class Ranked:
    """A passage with its score."""

    score: float
    file: str
    first: int
    heading: str
    lines: list[str]


@dataclass(frozen=True)
class Ranking:
    """The best passages, the best first."""

    documents: int
    passages: int
    matching: int
    """The number of passages with at least one word of the topic."""
    holding: list[int]
    """The number of passages that contain each word of the topic."""
    weights: list[float]
    """The weight of each word of the topic: rarer words weigh more."""
    best: list[Ranked]


def topic_words(topic: str) -> list[str]:
    """Return the stems to search for, without stop words unless there are no others; none if there is no word."""
    found = [word for word in _raw_words(topic) if word not in STOP_WORDS] or _raw_words(topic)
    return list(dict.fromkeys(_stem(word) for word in found))[:WORDS_MAX]


def stems(text: str) -> list[str]:
    """Return the stems of a text in order, with stop words, since they count as distance."""
    return [_stem(word) for word in _raw_words(text)]


def places(text: str) -> Iterator[tuple[str, int]]:
    """Return the stems of a text with their positions."""
    # Positions in the original text: the folded one may be longer. `casefold` of a single word is the same.
    for match in _WORD.finditer(text):
        yield _stem(match[0].casefold()), match.start()


def find(words: Sequence[str], documents: Iterable[tuple[str, Iterable[Passage]]]) -> Finding:
    """Search the passages of some documents and return the best candidates."""
    place = {word: at for at, word in enumerate(words)}
    holding = [0] * len(words)
    candidates: list[Candidate] = []
    files = passages = length = 0
    for file, parts in documents:
        files += 1
        for passage in parts:
            found = stems("\n".join(passage.lines))
            passages += 1
            length += len(found)
            counted = Counter(word for word in found if word in place)
            if not counted:
                continue
            for word in counted:
                holding[place[word]] += 1
            above = set(stems(passage.heading))
            candidates.append(
                Candidate(
                    file,
                    passage.first,
                    passage.heading,
                    passage.lines,
                    [counted[word] for word in words],
                    [word in above for word in words],
                    len(found),
                    _span(found, place),
                )
            )
    here = Finding(files, passages, len(candidates), length, holding, [])
    weights = _weights(passages, holding)
    # From these documents only: good enough to choose candidates for the final ranking.
    order = sorted(candidates, key=lambda one: (-_score(one, weights, _mean(here)), one.file, one.first))
    return replace(here, candidates=order[:BEST_PER_SHARD])


def rank(words: Sequence[str], findings: Sequence[Finding]) -> Ranking:
    """Order the candidates of all shards by the weights of the words over all passages."""
    whole = Finding(
        sum(one.documents for one in findings),
        sum(one.passages for one in findings),
        sum(one.matching for one in findings),
        sum(one.length for one in findings),
        [sum(one.holding[at] for one in findings) for at in range(len(words))],
        [candidate for one in findings for candidate in one.candidates],
    )
    weights, mean = _weights(whole.passages, whole.holding), _mean(whole)
    scored = [(round(_score(one, weights, mean), 6), one) for one in whole.candidates]
    scored.sort(key=lambda pair: (-pair[0], pair[1].file, pair[1].first))
    best: list[Ranked] = []
    per_file: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    for score, one in scored:
        same = tuple(stems("\n".join(one.lines)))
        if per_file[one.file] == BEST_PER_FILE or same in seen:
            continue
        per_file[one.file] += 1
        seen.add(same)
        best.append(Ranked(score, one.file, one.first, one.heading, one.lines))
        if len(best) == BEST:
            break
    rounded = [round(weight, 6) for weight in weights]
    return Ranking(whole.documents, whole.passages, whole.matching, whole.holding, rounded, best)


def _raw_words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _stem(word: str) -> str:
    """Cut one ending, so that `retries`, `retried` and `retry` are one word."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _STEM_MIN:
            return word[: -len(ending)]
    return word


def _weights(passages: int, holding: Sequence[int]) -> list[float]:
    """Return BM25's idf: a common word weighs little."""
    return [math.log(1 + (passages - count + 0.5) / (count + 0.5)) for count in holding]


def _mean(finding: Finding) -> float:
    return finding.length / finding.passages if finding.passages else 1.0


def _score(one: Candidate, weights: Sequence[float], mean: float) -> float:
    damping = SATURATION * (1 - LENGTH_WEIGHT + LENGTH_WEIGHT * one.length / max(mean, 1.0))
    score = 0.0
    for count, above, weight in zip(one.counts, one.in_heading, weights, strict=True):
        score += weight * count * (SATURATION + 1) / (count + damping)
        score += weight * HEADING_WEIGHT * above
    distinct = sum(count > 0 for count in one.counts)
    share = distinct / len(one.counts)
    near = (distinct - 1) / max(one.span - 1, 1)
    return score * share * (1 + NEAR_WEIGHT * near)


def _span(found: Sequence[str], wanted: dict[str, int]) -> int:
    """Return the length of the shortest span with every wanted word in `found`."""
    places = [(at, word) for at, word in enumerate(found) if word in wanted]
    missing = len({word for _, word in places})
    inside: Counter[str] = Counter()
    shortest = len(found)
    left = 0
    for at, word in places:
        missing -= inside[word] == 0
        inside[word] += 1
        while missing == 0:
            start, first = places[left]
            shortest = min(shortest, at - start + 1)
            inside[first] -= 1
            missing += inside[first] == 0
            left += 1
    return shortest
