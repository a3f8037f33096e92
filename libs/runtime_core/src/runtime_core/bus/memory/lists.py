"""List commands of the in-process broker."""

from __future__ import annotations

from itertools import islice

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import integer
from runtime_core.bus.memory.keyspace import Keyspace, List
from runtime_core.bus.memory.replies import NO_LIMIT, OK, Args, Command
from runtime_core.errors import ServerError


def span(start: int, stop: int, length: int) -> tuple[int, int]:
    """A range of positions, both included and negative ones counted from the end, as first and one after."""
    first = max(0, start + length if start < 0 else start)
    last = stop + length if stop < 0 else min(stop, length - 1)
    return first, max(first, last + 1)


class ListCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"RPUSH": Command(self.rpush, 2, NO_LIMIT, True),
            b"LPUSH": Command(self.lpush, 2, NO_LIMIT, True),
            b"LPOP": Command(self.lpop, 1, 2, True),
            b"RPOP": Command(self.rpop, 1, 2, True),
            b"LLEN": Command(self.llen, 1, 1, False),
            b"LRANGE": Command(self.lrange, 3, 3, False),
            b"LREM": Command(self.lrem, 3, 3, True),
            b"LTRIM": Command(self.ltrim, 3, 3, True),
            b"LINDEX": Command(self.lindex, 2, 2, False),
        }

    def rpush(self, args: Args) -> Reply:
        items = self._keys.get_or_create(args[0], List)
        items.extend(args[1:])
        return len(items)

    def lpush(self, args: Args) -> Reply:
        items = self._keys.get_or_create(args[0], List)
        items.extendleft(args[1:])
        return len(items)

    def lpop(self, args: Args) -> Reply:
        return self._pop(args, left=True)

    def rpop(self, args: Args) -> Reply:
        return self._pop(args, left=False)

    def _pop(self, args: Args, left: bool) -> Reply:
        count = None
        if len(args) > 1:
            count = integer(args[1], "ERR value is out of range, must be positive")
            if count < 0:
                raise ServerError("ERR value is out of range, must be positive")
        items = self._keys.get(args[0], List)
        if items is None:
            return None
        take = items.popleft if left else items.pop
        if count is None:
            only = take()
            self._keys.remove_if_empty(args[0], items)
            return only
        taken: list[Reply] = [take() for _ in range(min(count, len(items)))]
        self._keys.remove_if_empty(args[0], items)
        return taken

    def llen(self, args: Args) -> Reply:
        return len(self._keys.get(args[0], List) or ())

    def lrange(self, args: Args) -> Reply:
        start, stop = integer(args[1]), integer(args[2])
        items = self._keys.get(args[0], List)
        if items is None:
            return []
        return list(islice(items, *span(start, stop, len(items))))

    def lrem(self, args: Args) -> Reply:
        count, item = integer(args[1]), args[2]
        items = self._keys.get(args[0], List)
        if items is None:
            return 0
        limit = abs(count) or len(items)
        kept: list[bytes] = []
        gone = 0
        for current in reversed(items) if count < 0 else items:
            if current == item and gone < limit:
                gone += 1
            else:
                kept.append(current)
        if gone:
            items.clear()
            items.extend(reversed(kept) if count < 0 else kept)
            self._keys.remove_if_empty(args[0], items)
        return gone

    def ltrim(self, args: Args) -> Reply:
        start, stop = integer(args[1]), integer(args[2])
        items = self._keys.get(args[0], List)
        if items is not None:
            kept = list(islice(items, *span(start, stop, len(items))))
            items.clear()
            items.extend(kept)
            self._keys.remove_if_empty(args[0], items)
        return OK

    def lindex(self, args: Args) -> Reply:
        position = integer(args[1])
        items = self._keys.get(args[0], List)
        if items is None or not -len(items) <= position < len(items):
            return None
        return items[position]
