"""String commands of the in-process broker."""

from __future__ import annotations

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import fits_integer, integer, option_value
from runtime_core.bus.memory.keyspace import Keyspace
from runtime_core.bus.memory.replies import NO_LIMIT, OK, Args, Command, syntax_error
from runtime_core.errors import ServerError


class StringCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"GET": Command(self.get, 1, 1, False),
            b"SET": Command(self.set, 2, NO_LIMIT, True),
            b"SETNX": Command(self.setnx, 2, 2, True),
            b"GETDEL": Command(self.getdel, 1, 1, True),
            b"MGET": Command(self.mget, 1, NO_LIMIT, False),
            b"STRLEN": Command(self.strlen, 1, 1, False),
            b"INCR": Command(self.incr, 1, 1, True),
            b"INCRBY": Command(self.incrby, 2, 2, True),
        }

    def get(self, args: Args) -> Reply:
        return self._keys.get(args[0], bytes)

    def set(self, args: Args) -> Reply:
        key, value = args[:2]
        condition = expiry = b""
        keep = answer_old = False
        at_ms: int | None = None
        position = 2
        while position < len(args):
            option = args[position].upper()
            if option in (b"NX", b"XX") and not condition:
                condition = option
            elif option == b"GET":
                answer_old = True
            elif option == b"KEEPTTL" and not expiry:
                keep = True
                expiry = option
            elif option in (b"EX", b"PX", b"EXAT", b"PXAT") and not expiry:
                expiry = option
                amount = integer(option_value(args, position))
                if amount <= 0:
                    raise ServerError("ERR invalid expire time in 'set' command")
                at_ms = amount * (1000 if option in (b"EX", b"EXAT") else 1)
                if option in (b"EX", b"PX"):
                    at_ms += self._keys.now_ms
                position += 1
            else:
                raise syntax_error()
            position += 1
        old = self._keys.get(key, bytes) if answer_old else None
        exists = self._keys.find(key) is not None
        if (condition == b"NX" and exists) or (condition == b"XX" and not exists):
            return old
        self._keys.put(key, value, keep_expiry=keep)
        if at_ms is not None:
            self._keys.set_expiry(key, at_ms)
        return old if answer_old else OK

    def setnx(self, args: Args) -> Reply:
        if self._keys.find(args[0]) is not None:
            return 0
        self._keys.put(args[0], args[1])
        return 1

    def getdel(self, args: Args) -> Reply:
        value = self._keys.get(args[0], bytes)
        if value is not None:
            self._keys.remove(args[0])
        return value

    def mget(self, args: Args) -> Reply:
        found = [self._keys.find(key) for key in args]
        return [value if isinstance(value, bytes) else None for value in found]

    def strlen(self, args: Args) -> Reply:
        return len(self._keys.get(args[0], bytes) or b"")

    def incr(self, args: Args) -> Reply:
        return self._add(args[0], 1)

    def incrby(self, args: Args) -> Reply:
        return self._add(args[0], integer(args[1]))

    def _add(self, key: bytes, amount: int) -> int:
        value = self._keys.get(key, bytes)
        total = (integer(value) if value is not None else 0) + amount
        if not fits_integer(total):
            raise ServerError("ERR increment or decrement would overflow")
        self._keys.put(key, b"%d" % total, keep_expiry=True)
        return total
