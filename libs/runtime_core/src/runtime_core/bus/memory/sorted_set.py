"""The sorted set of the in-process broker: scores by member, and members in the order of (score, member)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort


def _score(pair: tuple[float, bytes]) -> float:
    return pair[0]


class SortedSet:
    """Members with scores; positions count from the lowest score."""

    __slots__ = ("_order", "_scores")

    def __init__(self) -> None:
        self._scores: dict[bytes, float] = {}
        self._order: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._scores)

    def score(self, member: bytes) -> float | None:
        """The member's score, or None."""
        return self._scores.get(member)

    def put(self, member: bytes, score: float) -> None:
        """Add a member, or move it to another score."""
        old = self._scores.get(member)
        if old is not None:
            if old == score:
                return
            del self._order[bisect_left(self._order, (old, member))]
        self._scores[member] = score
        insort(self._order, (score, member))

    def discard(self, member: bytes) -> bool:
        """Remove a member; whether it was there."""
        score = self._scores.pop(member, None)
        if score is None:
            return False
        del self._order[bisect_left(self._order, (score, member))]
        return True

    def rank(self, member: bytes) -> int | None:
        """The member's position, or None."""
        score = self._scores.get(member)
        return None if score is None else bisect_left(self._order, (score, member))

    def between(self, low: tuple[float, bool], high: tuple[float, bool]) -> tuple[int, int]:
        """First position, and the one after the last, of the scores in a range (value, excluded)."""
        first = (bisect_right if low[1] else bisect_left)(self._order, low[0], key=_score)
        after = (bisect_left if high[1] else bisect_right)(self._order, high[0], key=_score)
        return first, max(first, after)

    def pairs(self, first: int, after: int) -> list[tuple[float, bytes]]:
        """(score, member) at the positions from `first` to before `after`."""
        return self._order[first:after]

    def remove_positions(self, first: int, after: int) -> int:
        """Remove the members at these positions; how many."""
        gone = self._order[first:after]
        for _, member in gone:
            del self._scores[member]
        del self._order[first:after]
        return len(gone)
