"""Set commands of the in-process broker."""

from __future__ import annotations

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import integer
from runtime_core.bus.memory.keyspace import Keyspace, Members
from runtime_core.bus.memory.replies import NO_LIMIT, Args, Command
from runtime_core.errors import ServerError


class SetCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"SADD": Command(self.sadd, 2, NO_LIMIT, True),
            b"SREM": Command(self.srem, 2, NO_LIMIT, True),
            b"SISMEMBER": Command(self.sismember, 2, 2, False),
            b"SMEMBERS": Command(self.smembers, 1, 1, False),
            b"SCARD": Command(self.scard, 1, 1, False),
            b"SPOP": Command(self.spop, 1, 2, True),
        }

    def sadd(self, args: Args) -> Reply:
        members = self._keys.get_or_create(args[0], Members)
        before = len(members)
        members.update(dict.fromkeys(args[1:]))
        return len(members) - before

    def srem(self, args: Args) -> Reply:
        members = self._keys.get(args[0], Members)
        if members is None:
            return 0
        before = len(members)
        for member in args[1:]:
            members.pop(member, None)
        gone = before - len(members)
        self._keys.remove_if_empty(args[0], members)
        return gone

    def sismember(self, args: Args) -> Reply:
        members = self._keys.get(args[0], Members)
        return int(members is not None and args[1] in members)

    def smembers(self, args: Args) -> Reply:
        return list(self._keys.get(args[0], Members) or ())

    def scard(self, args: Args) -> Reply:
        return len(self._keys.get(args[0], Members) or ())

    def spop(self, args: Args) -> Reply:
        """Servers pick at random; here the oldest goes, so that a seeded run repeats itself."""
        count = None
        if len(args) > 1:
            count = integer(args[1], "ERR value is out of range, must be positive")
            if count < 0:
                raise ServerError("ERR value is out of range, must be positive")
        members = self._keys.get(args[0], Members)
        if members is None:
            return None if count is None else []
        wanted = 1 if count is None else min(count, len(members))
        taken: list[Reply] = []
        for member in list(members)[:wanted]:
            del members[member]
            taken.append(member)
        self._keys.remove_if_empty(args[0], members)
        return taken[0] if count is None else taken
