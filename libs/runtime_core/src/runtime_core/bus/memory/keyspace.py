"""The keys of the in-process broker: typed lookups, lazy expiry, and the list of keys that became readable."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from runtime_core.bus.memory.replies import wrong_type
from runtime_core.bus.memory.sorted_set import SortedSet
from runtime_core.bus.memory.streams import Stream


class Hash(dict[bytes, bytes]):
    """Fields in the order of their first write."""

    __slots__ = ()


class List(deque[bytes]):
    """A list, cheap at both ends."""

    __slots__ = ()


class Members(dict[bytes, None]):
    """A set that keeps the order of insertion, so that a seeded run repeats itself."""

    __slots__ = ()


Value: TypeAlias = bytes | Hash | List | Members | SortedSet | Stream
V = TypeVar("V", bytes, Hash, List, Members, SortedSet, Stream)

TYPE_NAMES: dict[type[Value], bytes] = {
    bytes: b"string",
    Hash: b"hash",
    List: b"list",
    Members: b"set",
    SortedSet: b"zset",
    Stream: b"stream",
}


class Keyspace:
    """All keys with their values and expiry times.

    `now_ms` (milliseconds since the epoch) is set by the server before each command, so that one command,
    and all calls of one script, see one time.
    """

    def __init__(self) -> None:
        self.now_ms = 0
        self.ready: list[bytes] = []
        """Keys of `watched` that were written since the server looked last."""
        self.watched: set[bytes] = set()
        """Keys that blocked readers wait for."""
        self._values: dict[bytes, Value] = {}
        self._expiries: dict[bytes, int] = {}

    def find(self, key: bytes) -> Value | None:
        """The value of any type, or None; an expired key is removed here."""
        value = self._values.get(key)
        if value is not None and key in self._expiries and self._expiries[key] <= self.now_ms:
            self.remove(key)
            return None
        return value

    def get(self, key: bytes, kind: type[V]) -> V | None:
        """The value of this type, or None. Raises ServerError `WRONGTYPE …` for another type."""
        value = self._values.get(key)
        if value is None:
            return None
        if key in self._expiries and self._expiries[key] <= self.now_ms:
            self.remove(key)
            return None
        if not isinstance(value, kind):
            raise wrong_type()
        return value

    def get_or_create(self, key: bytes, kind: type[V]) -> V:
        """As `get`, with an empty value put in place of none."""
        value = self.get(key, kind)
        if value is None:
            value = kind()
            self._values[key] = value
        return value

    def put(self, key: bytes, value: Value, keep_expiry: bool = False) -> None:
        """Set a key, whatever it held."""
        self._values[key] = value
        if not keep_expiry:
            self._expiries.pop(key, None)
        if key in self.watched:
            self.ready.append(key)

    def remove(self, key: bytes) -> None:
        """Drop a key that may be there. Blocked readers look again, to learn that their group is gone."""
        self._values.pop(key, None)
        self._expiries.pop(key, None)
        if key in self.watched:
            self.ready.append(key)

    def remove_if_empty(self, key: bytes, value: Hash | List | Members | SortedSet) -> None:
        """Collections vanish with their last element."""
        if not value:
            self.remove(key)

    def wake(self, key: bytes) -> None:
        """Note that a stream has something new for those who wait for it."""
        if key in self.watched:
            self.ready.append(key)

    def expiry(self, key: bytes) -> int | None:
        """When the key ends (milliseconds since the epoch), or None."""
        return self._expiries.get(key)

    def set_expiry(self, key: bytes, at_ms: int | None) -> None:
        """Let an existing key end at a time, or never."""
        if at_ms is None:
            self._expiries.pop(key, None)
        elif at_ms <= self.now_ms:
            self.remove(key)
        else:
            self._expiries[key] = at_ms

    def live(self) -> Iterator[bytes]:
        """All keys that have not expired, in the order of their creation."""
        for key in list(self._values):
            if self.find(key) is not None:
                yield key

    def clear(self) -> None:
        """Drop every key."""
        self._values.clear()
        self._expiries.clear()
        self.ready.extend(self.watched)
