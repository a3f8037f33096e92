"""Sorted-set commands of the in-process broker."""

from __future__ import annotations

import math

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import integer, option_value, print_real, real, score_bound
from runtime_core.bus.memory.keyspace import Keyspace
from runtime_core.bus.memory.lists import span
from runtime_core.bus.memory.replies import NO_LIMIT, Args, Command, syntax_error
from runtime_core.bus.memory.sorted_set import SortedSet
from runtime_core.errors import ServerError

_CONDITIONS = (b"NX", b"XX", b"GT", b"LT")


class SortedSetCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"ZADD": Command(self.zadd, 3, NO_LIMIT, True),
            b"ZINCRBY": Command(self.zincrby, 3, 3, True),
            b"ZREM": Command(self.zrem, 2, NO_LIMIT, True),
            b"ZSCORE": Command(self.zscore, 2, 2, False),
            b"ZMSCORE": Command(self.zmscore, 2, NO_LIMIT, False),
            b"ZCARD": Command(self.zcard, 1, 1, False),
            b"ZCOUNT": Command(self.zcount, 3, 3, False),
            b"ZRANK": Command(self.zrank, 2, 2, False),
            b"ZRANGE": Command(self.zrange, 3, NO_LIMIT, False),
            b"ZRANGEBYSCORE": Command(self.zrangebyscore, 3, NO_LIMIT, False),
            b"ZREMRANGEBYSCORE": Command(self.zremrangebyscore, 3, 3, True),
            b"ZREMRANGEBYRANK": Command(self.zremrangebyrank, 3, 3, True),
            b"ZPOPMIN": Command(self.zpopmin, 1, 2, True),
        }

    def zadd(self, args: Args) -> Reply:
        options: set[bytes] = set()
        position = 1
        while position < len(args) and (option := args[position].upper()) in (*_CONDITIONS, b"CH", b"INCR"):
            options.add(option)
            position += 1
        words = args[position:]
        if not words or len(words) % 2:
            raise syntax_error()
        if b"NX" in options and b"XX" in options:
            raise ServerError("ERR XX and NX options at the same time are not compatible")
        if len(options & {b"GT", b"LT", b"NX"}) > 1:
            raise ServerError("ERR GT, LT, and/or NX options at the same time are not compatible")
        if b"INCR" in options and len(words) > 2:
            raise ServerError("ERR INCR option supports a single increment-element pair")
        # All scores are read before the first write, so that a bad one leaves nothing behind.
        pairs = [(real(words[at]), words[at + 1]) for at in range(0, len(words), 2)]
        members = self._keys.get(args[0], SortedSet)
        if members is None:
            if b"XX" in options:
                return None if b"INCR" in options else 0
            members = self._keys.get_or_create(args[0], SortedSet)
        if b"INCR" in options:
            score, member = pairs[0]
            result = self._write(members, member, score, options)
            self._keys.remove_if_empty(args[0], members)
            return None if result is None else print_real(result[0])
        added = changed = 0
        for score, member in pairs:
            result = self._write(members, member, score, options)
            if result is not None:
                added += result[1] is None
                changed += result[1] != result[0]
        self._keys.remove_if_empty(args[0], members)
        return changed if b"CH" in options else added

    def _write(
        self, members: SortedSet, member: bytes, score: float, options: set[bytes]
    ) -> tuple[float, float | None] | None:
        """New and old score, or None where a condition forbids the write."""
        old = members.score(member)
        if (b"NX" in options and old is not None) or (b"XX" in options and old is None):
            return None
        if b"INCR" in options and old is not None:
            score += old
            if math.isnan(score):
                raise ServerError("ERR resulting score is not a number (NaN)")
        if old is not None and ((b"GT" in options and score <= old) or (b"LT" in options and score >= old)):
            return None
        members.put(member, score)
        return score, old

    def zincrby(self, args: Args) -> Reply:
        return self.zadd((args[0], b"INCR", args[1], args[2]))

    def zrem(self, args: Args) -> Reply:
        members = self._keys.get(args[0], SortedSet)
        if members is None:
            return 0
        gone = sum([members.discard(member) for member in args[1:]])
        self._keys.remove_if_empty(args[0], members)
        return gone

    def zscore(self, args: Args) -> Reply:
        members = self._keys.get(args[0], SortedSet)
        score = None if members is None else members.score(args[1])
        return None if score is None else print_real(score)

    def zmscore(self, args: Args) -> Reply:
        members = self._keys.get(args[0], SortedSet)
        scores = [None if members is None else members.score(member) for member in args[1:]]
        return [None if score is None else print_real(score) for score in scores]

    def zcard(self, args: Args) -> Reply:
        return len(self._keys.get(args[0], SortedSet) or ())

    def zcount(self, args: Args) -> Reply:
        low, high = score_bound(args[1]), score_bound(args[2])
        members = self._keys.get(args[0], SortedSet)
        if members is None:
            return 0
        first, after = members.between(low, high)
        return after - first

    def zrank(self, args: Args) -> Reply:
        members = self._keys.get(args[0], SortedSet)
        return None if members is None else members.rank(args[1])

    def zrange(self, args: Args) -> Reply:
        given, limit = _options(args, (b"BYSCORE", b"REV", b"WITHSCORES"))
        by_score, reverse, with_scores = b"BYSCORE" in given, b"REV" in given, b"WITHSCORES" in given
        if limit is not None and not by_score:
            raise ServerError("ERR syntax error, LIMIT is only supported in combination with either BYSCORE or BYLEX")
        if by_score:
            low, high = (args[2], args[1]) if reverse else (args[1], args[2])
            return self._by_score(args[0], low, high, reverse, limit, with_scores)
        start, stop = integer(args[1]), integer(args[2])
        members = self._keys.get(args[0], SortedSet)
        if members is None:
            return []
        first, after = span(start, stop, len(members))
        if reverse:
            first, after = len(members) - min(after, len(members)), len(members) - min(first, len(members))
        pairs = members.pairs(first, after)
        return _shown(pairs[::-1] if reverse else pairs, with_scores)

    def zrangebyscore(self, args: Args) -> Reply:
        given, limit = _options(args, (b"WITHSCORES",))
        return self._by_score(args[0], args[1], args[2], False, limit, b"WITHSCORES" in given)

    def _by_score(
        self,
        key: bytes,
        low: bytes,
        high: bytes,
        reverse: bool,
        limit: tuple[int, int] | None,
        with_scores: bool,
    ) -> Reply:
        low_bound, high_bound = score_bound(low), score_bound(high)
        members = self._keys.get(key, SortedSet)
        if members is None:
            return []
        first, after = members.between(low_bound, high_bound)
        if limit is not None:
            offset, count = limit
            if offset < 0:
                return []
            if reverse:
                after = max(first, after - offset)
                first = first if count < 0 else max(first, after - count)
            else:
                first = min(after, first + offset)
                after = after if count < 0 else min(after, first + count)
        pairs = members.pairs(first, after)
        return _shown(pairs[::-1] if reverse else pairs, with_scores)

    def zremrangebyscore(self, args: Args) -> Reply:
        low, high = score_bound(args[1]), score_bound(args[2])
        members = self._keys.get(args[0], SortedSet)
        return 0 if members is None else self._cut(args[0], members, *members.between(low, high))

    def zremrangebyrank(self, args: Args) -> Reply:
        start, stop = integer(args[1]), integer(args[2])
        members = self._keys.get(args[0], SortedSet)
        return 0 if members is None else self._cut(args[0], members, *span(start, stop, len(members)))

    def _cut(self, key: bytes, members: SortedSet, first: int, after: int) -> int:
        gone = members.remove_positions(first, after)
        self._keys.remove_if_empty(key, members)
        return gone

    def zpopmin(self, args: Args) -> Reply:
        count = 1
        if len(args) > 1:
            count = integer(args[1], "ERR value is out of range, must be positive")
            if count < 0:
                raise ServerError("ERR value is out of range, must be positive")
        members = self._keys.get(args[0], SortedSet)
        if members is None:
            return []
        taken = _shown(members.pairs(0, count), with_scores=True)
        self._cut(args[0], members, 0, count)
        return taken


def _options(args: Args, known: tuple[bytes, ...]) -> tuple[set[bytes], tuple[int, int] | None]:
    """The words that follow key and range, and `LIMIT` as offset and count."""
    given: set[bytes] = set()
    limit: tuple[int, int] | None = None
    position = 3
    while position < len(args):
        word = args[position].upper()
        if word == b"LIMIT":
            limit = integer(option_value(args, position)), integer(option_value(args, position + 1))
            position += 2
        elif word in known:
            given.add(word)
        else:
            raise syntax_error()
        position += 1
    return given, limit


def _shown(pairs: list[tuple[float, bytes]], with_scores: bool) -> list[Reply]:
    if not with_scores:
        return [member for _, member in pairs]
    found: list[Reply] = []
    for score, member in pairs:
        found += (member, print_real(score))
    return found
