"""The stream of the in-process broker: entries, consumer groups and their pending entries.

An entry id is one integer here, milliseconds · 2^64 + sequence, so that ids compare as they sort.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TypeAlias

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.replies import Args
from runtime_core.errors import ServerError

SEQUENCE = (1 << 64) - 1
LAST_ID = (1 << 128) - 1
# Servers keep about this many entries in one node, and trimming with `~` drops whole nodes only.
NODE = 100
_COMPACT = 1024

Entry: TypeAlias = tuple[bytes, Args]
"""The id as text, and fields and values in turn."""


def invalid_id() -> ServerError:
    """The reply to a word that is no entry id."""
    return ServerError("ERR Invalid stream ID specified as stream command argument")


def print_id(entry_id: int) -> bytes:
    """The id as `milliseconds-sequence`."""
    return b"%d-%d" % (entry_id >> 64, entry_id & SEQUENCE)


def parse_id(word: bytes, missing_sequence: int = 0) -> int:
    """An id in full, or milliseconds alone with `missing_sequence` behind them."""
    millis, dash, sequence = word.partition(b"-")
    if not millis.isdigit() or (dash and not sequence.isdigit()):
        raise invalid_id()
    high = int(millis)
    low = int(sequence) if dash else missing_sequence
    if high > SEQUENCE or low > SEQUENCE:
        raise invalid_id()
    return high << 64 | low


class Consumer:
    """A named reader of a group. Times are milliseconds since the epoch."""

    __slots__ = ("name", "pending", "seen_ms")

    def __init__(self, name: bytes, now_ms: int) -> None:
        self.name = name
        self.seen_ms = now_ms
        self.pending: dict[int, Pending] = {}


class Pending:
    """An entry that was delivered and not acknowledged."""

    __slots__ = ("consumer", "count", "delivered_ms")

    def __init__(self, consumer: Consumer, delivered_ms: int, count: int) -> None:
        self.consumer = consumer
        self.delivered_ms = delivered_ms
        self.count = count


class Group:
    """A consumer group. `entries_read` is None where a server could not know it."""

    __slots__ = ("consumers", "entries_read", "last_id", "name", "pending")

    def __init__(self, name: bytes, last_id: int, entries_read: int | None) -> None:
        self.name = name
        self.last_id = last_id
        self.entries_read = entries_read
        self.consumers: dict[bytes, Consumer] = {}
        self.pending: dict[int, Pending] = {}

    def consumer(self, name: bytes, now_ms: int) -> Consumer:
        """The consumer of this name, made if it is new (7.0 waits for its first entry); it was seen now."""
        consumer = self.consumers.get(name)
        if consumer is None:
            consumer = self.consumers[name] = Consumer(name, now_ms)
        consumer.seen_ms = now_ms
        return consumer

    def give(self, entry_id: int, consumer: Consumer, delivered_ms: int, count: int) -> None:
        """Make an entry pending under a consumer, whoever had it."""
        pending = self.pending.get(entry_id)
        if pending is None:
            pending = self.pending[entry_id] = Pending(consumer, delivered_ms, count)
        else:
            del pending.consumer.pending[entry_id]
            pending.consumer = consumer
            pending.delivered_ms = delivered_ms
            pending.count = count
        consumer.pending[entry_id] = pending

    def settle(self, entry_id: int) -> bool:
        """Forget a pending entry; whether it was pending."""
        pending = self.pending.pop(entry_id, None)
        if pending is None:
            return False
        del pending.consumer.pending[entry_id]
        return True

    def drop_consumer(self, name: bytes) -> int:
        """Remove a consumer with its pending entries; how many there were."""
        consumer = self.consumers.pop(name, None)
        if consumer is None:
            return 0
        for entry_id in consumer.pending:
            del self.pending[entry_id]
        return len(consumer.pending)


class Stream:
    """Entries in the order of their ids, which only grow."""

    __slots__ = ("_head", "_ids", "added", "entries", "groups", "last_id", "max_deleted_id")

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.groups: dict[bytes, Group] = {}
        self.last_id = 0
        self.max_deleted_id = 0
        self.added = 0
        # Ids before `_head` are gone: work streams lose entries at the front, which must not move the rest.
        self._ids: list[int] = []
        self._head = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        return True  # an empty stream still is a key

    @property
    def first_id(self) -> int:
        """The lowest id, or 0 in an empty stream."""
        return self._ids[self._head] if self.entries else 0

    def append(self, entry_id: int, fields: Args) -> bytes:
        """Add an entry whose id is above `last_id`; its id as text."""
        text = print_id(entry_id)
        self._ids.append(entry_id)
        self.entries[entry_id] = (text, fields)
        self.last_id = entry_id
        self.added += 1
        return text

    def discard(self, entry_id: int) -> bool:
        """Remove an entry; whether it was there. The caller notes `max_deleted_id` where it matters."""
        if self.entries.pop(entry_id, None) is None:
            return False
        ids = self._ids
        if ids[self._head] == entry_id:
            self._head += 1
            if not self.entries:
                ids.clear()
                self._head = 0
            elif self._head > _COMPACT and self._head * 2 > len(ids):
                del ids[: self._head]
                self._head = 0
        else:
            del ids[bisect_left(ids, entry_id, self._head)]
        return True

    def ids(self, start: int, end: int, count: int | None = None, reverse: bool = False) -> list[int]:
        """Ids from `start` to `end`, both included; the first `count` from the side that is read first."""
        first = bisect_left(self._ids, start, self._head)
        after = bisect_right(self._ids, end, first)
        if reverse:
            if count is not None:
                first = max(first, after - count)
            return self._ids[first:after][::-1]
        if count is not None:
            after = min(after, first + count)
        return self._ids[first:after]

    def shown(self, entry_id: int) -> list[Reply]:
        """An entry of the stream as a reply."""
        text, fields = self.entries[entry_id]
        return [text, list(fields)]

    def trim_to_length(self, length: int, approximate: bool, limit: int) -> int:
        """Remove the oldest entries beyond a length; how many."""
        return self._trim(len(self.entries) - length, approximate, limit)

    def trim_below(self, entry_id: int, approximate: bool, limit: int) -> int:
        """Remove the entries with lower ids; how many."""
        below = bisect_left(self._ids, entry_id, self._head) - self._head
        return self._trim(below, approximate, limit)

    def _trim(self, surplus: int, approximate: bool, limit: int) -> int:
        if approximate:
            if limit:
                surplus = min(surplus, limit)
            # All of a stream may go at once even where its last node is not full.
            if surplus < len(self.entries):
                surplus -= surplus % NODE
        if surplus <= 0:
            return 0
        for entry_id in self._ids[self._head : self._head + surplus]:
            self.discard(entry_id)
        return surplus

    def has_gap_from(self, entry_id: int) -> bool:
        """Whether an entry at or above this id was deleted from the middle, so that counting is not possible."""
        if not self.entries or not self.max_deleted_id or self.first_id > self.max_deleted_id:
            return False
        return entry_id <= self.max_deleted_id

    def position(self, entry_id: int) -> int | None:
        """How many entries were ever added up to this id, where that can be told without counting."""
        if not self.added:
            return 0
        if not self.entries and entry_id <= self.last_id:
            return self.added
        if entry_id and entry_id < self.max_deleted_id:
            return None
        if entry_id >= self.last_id:
            return self.added if entry_id == self.last_id else None
        if self.max_deleted_id == 0 or self.max_deleted_id < self.first_id:
            if entry_id < self.first_id:
                return self.added - len(self.entries)
            if entry_id == self.first_id:
                return self.added - len(self.entries) + 1
        return None

    def lag(self, group: Group) -> int | None:
        """How many entries the group has not read yet, where that is known."""
        if not self.added:
            return 0
        if group.entries_read is not None and not self.has_gap_from(group.last_id):
            return self.added - group.entries_read
        position = self.position(group.last_id)
        return None if position is None else self.added - position
