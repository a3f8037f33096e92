"""Generates a large collection of documents: the same text for the same number of passages."""

from __future__ import annotations

import random
import shutil
from itertools import accumulate, product
from pathlib import Path

PASSAGES_PER_FILE = 100
WORDS_PER_PASSAGE = 70
PASSAGES_MAX = 100_000
"""The most documents that the desk searches in a folder."""
DONE = "complete"
"""The file that is written last."""

_SUBJECTS = (
    "the consumer",
    "a broker",
    "each delivery",
    "the stream",
    "a lease",
    "the gateway",
    "some shard",
    "a task",
)
_VERBS = ("dies", "adopts", "acknowledges", "waits for", "retries", "hands back", "records", "forgets")
_OBJECTS = ("its deliveries", "the entry", "an owner", "what it held", "the result", "another attempt", "its heartbeat")


def make_corpus(folder: Path, passages: int) -> Path:
    """Return the folder of a collection of this many passages, below `folder`. Create it if it is missing."""
    made = folder / f"corpus-{passages}"
    if (made / DONE).exists():
        return made
    shutil.rmtree(made, ignore_errors=True)  # an unfinished one
    made.mkdir(parents=True)
    dice = random.Random(passages)
    words, weights = _vocabulary()
    for first in range(0, passages, PASSAGES_PER_FILE):
        number = first // PASSAGES_PER_FILE
        count = min(PASSAGES_PER_FILE, passages - first)
        text = f"# Notes {number}\n\n" + "".join(_passage(dice, words, weights) for _ in range(count))
        (made / f"notes-{number:04d}.md").write_text(text, encoding="utf-8")
    (made / DONE).touch()
    return made


def _vocabulary() -> tuple[list[str], list[float]]:
    """Return words and their cumulative frequencies. As in any language, a few words are very common."""
    syllables = [a + b for a, b in product("bdfgklmnprstv", "aeiou")]
    words = ["".join(parts) for parts in product(syllables[::3], syllables[1::2])]
    return words, list(accumulate(1.0 / rank for rank in range(1, len(words) + 1)))


def _passage(dice: random.Random, words: list[str], weights: list[float]) -> str:
    said = dice.choices(words, cum_weights=weights, k=WORDS_PER_PASSAGE)
    if dice.random() < 0.2:
        sentence = (dice.choice(_SUBJECTS), dice.choice(_VERBS), dice.choice(_OBJECTS))
        at = dice.randrange(len(said))
        said[at:at] = sentence
    lines = (" ".join(said[first : first + 12]) for first in range(0, len(said), 12))
    return "\n".join(lines).capitalize() + ".\n\n"
