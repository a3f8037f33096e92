"""Sources of a history's choices: a seed, a recorded list, or hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")

MOST = 127
"""The most ways of one choice: up to here hypothesis stores a choice as one number."""


class ChoiceSource(Protocol):
    """Makes the choices of a history. 0 is always the plainest: oldest first, no fault."""

    made: list[int]
    """All choices so far; where there is only one way, nothing is chosen."""

    def choose(self, ways: int) -> int:
        """A number from 0 to `ways - 1`."""
        ...


class Seeded:
    """Choices from a seed. They are recorded, so that the history can be shrunk."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random
        self.made: list[int] = []

    def choose(self, ways: int) -> int:
        if ways == 1:
            return 0
        chosen = int(self._random() * ways)
        self.made.append(chosen)
        return chosen


class Replayed:
    """Choices from a list; 0 after its end."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = iter(choices)
        self.made: list[int] = []

    def choose(self, ways: int) -> int:
        if ways == 1:
            return 0
        chosen = min(next(self._choices, 0), ways - 1)
        self.made.append(chosen)
        return chosen


class Drawn:
    """Choices that hypothesis draws: `draw(ways)` gives one of them.

    `stopped` is what hypothesis raised to end the attempt: raise it after the history, whose code might catch it.
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self.made: list[int] = []
        self.stopped: BaseException | None = None

    def choose(self, ways: int) -> int:
        if ways == 1:
            return 0
        if self.stopped is not None:
            return 0
        try:
            chosen = self._draw(ways)
        except BaseException as stop:
            self.stopped = stop
            return 0
        self.made.append(chosen)
        return chosen


def pick(choice_source: ChoiceSource, items: Sequence[Item]) -> Item:
    """Return one of the items; the first one is the plainest."""
    return items[choice_source.choose(len(items))]


def weighted(choice_source: ChoiceSource, items: Sequence[tuple[int, Item]]) -> Item:
    """Return one of the items, each with its weight; the weights add up to at most `MOST`."""
    chosen = choice_source.choose(sum(weight for weight, _ in items))
    for weight, item in items:
        if chosen < weight:
            return item
        chosen -= weight
    raise AssertionError("unreachable")
