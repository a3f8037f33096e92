"""Commands of the in-process broker that concern keys of any type, and the server itself."""

from __future__ import annotations

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import glob, integer, option_value
from runtime_core.bus.memory.keyspace import TYPE_NAMES, Keyspace
from runtime_core.bus.memory.replies import NO_LIMIT, OK, Args, Command, Status, shown, syntax_error
from runtime_core.errors import ServerError

# No limit is set on this process, so there is nothing to compare a measured figure with.
_INFO = {
    b"server": b"# Server\r\nredis_version:7.0.0\r\nredis_mode:standalone\r\n",
    b"memory": b"# Memory\r\nused_memory:0\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n",
}
_CONFIG = {b"dir": b"", b"maxmemory": b"0", b"maxmemory-policy": b"noeviction"}


class KeyCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"PING": Command(self.ping, 0, 1, False),
            b"TIME": Command(self.time, 0, 0, False),
            b"INFO": Command(self.info, 0, NO_LIMIT, False),
            b"CONFIG": Command(self.config, 1, NO_LIMIT, False),
            b"DBSIZE": Command(self.dbsize, 0, 0, False),
            b"FLUSHALL": Command(self.flushall, 0, 1, True),
            b"KEYS": Command(self.keys, 1, 1, False),
            b"SCAN": Command(self.scan, 1, NO_LIMIT, False),
            b"TYPE": Command(self.type, 1, 1, False),
            b"DEL": Command(self.delete, 1, NO_LIMIT, True),
            b"UNLINK": Command(self.delete, 1, NO_LIMIT, True),
            b"EXISTS": Command(self.exists, 1, NO_LIMIT, False),
            b"EXPIRE": Command(self.expire, 2, 4, True),
            b"PEXPIRE": Command(self.pexpire, 2, 4, True),
            b"EXPIREAT": Command(self.expireat, 2, 4, True),
            b"PEXPIREAT": Command(self.pexpireat, 2, 4, True),
            b"PERSIST": Command(self.persist, 1, 1, True),
            b"TTL": Command(self.ttl, 1, 1, False),
            b"PTTL": Command(self.pttl, 1, 1, False),
        }

    def ping(self, args: Args) -> Reply:
        return args[0] if args else Status(b"PONG")

    def time(self, args: Args) -> Reply:
        now = self._keys.now_ms
        return [b"%d" % (now // 1000), b"%d" % (now % 1000 * 1000)]

    def info(self, args: Args) -> Reply:
        wanted = {word.lower() for word in args}
        if not wanted or wanted & {b"all", b"default", b"everything"}:
            wanted = set(_INFO)
        return b"\r\n".join(text for section, text in _INFO.items() if section in wanted)

    def config(self, args: Args) -> Reply:
        if args[0].upper() != b"GET" or len(args) < 2:
            raise ServerError("ERR this broker lives in the process: only CONFIG GET is known")
        found: list[Reply] = []
        for name, value in _CONFIG.items():
            if any(glob(pattern.lower()).fullmatch(name) for pattern in args[1:]):
                found += (name, value)
        return found

    def dbsize(self, args: Args) -> Reply:
        return sum(1 for _ in self._keys.live())

    def flushall(self, args: Args) -> Reply:
        if args and args[0].upper() not in (b"SYNC", b"ASYNC"):
            raise syntax_error()
        self._keys.clear()
        return OK

    def keys(self, args: Args) -> Reply:
        pattern = glob(args[0])
        return [key for key in self._keys.live() if pattern.fullmatch(key)]

    def scan(self, args: Args) -> Reply:
        integer(args[0], "ERR invalid cursor")
        found = list(self._keys.live())
        for position in range(1, len(args), 2):
            value = option_value(args, position)
            match args[position].upper():
                case b"MATCH":
                    pattern = glob(value)
                    found = [key for key in found if pattern.fullmatch(key)]
                case b"TYPE":
                    found = [key for key in found if self._type_name(key) == value.lower()]
                case b"COUNT":
                    if integer(value) < 1:
                        raise syntax_error()
                case _:
                    raise syntax_error()
        return [b"0", list(found)]

    def _type_name(self, key: bytes) -> bytes:
        value = self._keys.find(key)
        return b"none" if value is None else TYPE_NAMES[type(value)]

    def type(self, args: Args) -> Reply:
        return Status(self._type_name(args[0]))

    def delete(self, args: Args) -> Reply:
        gone = 0
        for key in args:
            if self._keys.find(key) is not None:
                self._keys.remove(key)
                gone += 1
        return gone

    def exists(self, args: Args) -> Reply:
        return sum(1 for key in args if self._keys.find(key) is not None)

    def expire(self, args: Args) -> Reply:
        return self._expire(args, self._keys.now_ms + integer(args[1]) * 1000)

    def pexpire(self, args: Args) -> Reply:
        return self._expire(args, self._keys.now_ms + integer(args[1]))

    def expireat(self, args: Args) -> Reply:
        return self._expire(args, integer(args[1]) * 1000)

    def pexpireat(self, args: Args) -> Reply:
        return self._expire(args, integer(args[1]))

    def _expire(self, args: Args, at_ms: int) -> Reply:
        conditions = {word.upper() for word in args[2:]}
        if unknown := conditions - {b"NX", b"XX", b"GT", b"LT"}:
            raise ServerError(f"ERR Unsupported option {shown(min(unknown))}")
        if b"NX" in conditions and len(conditions) > 1:
            raise ServerError("ERR NX and XX, GT or LT options at the same time are not compatible")
        if {b"GT", b"LT"} <= conditions:
            raise ServerError("ERR GT and LT options at the same time are not compatible")
        key = args[0]
        if self._keys.find(key) is None:
            return 0
        current = self._keys.expiry(key)
        refused = (
            (b"NX" in conditions and current is not None)
            or (b"XX" in conditions and current is None)
            or (b"GT" in conditions and (current is None or at_ms <= current))
            or (b"LT" in conditions and current is not None and at_ms >= current)
        )
        if refused:
            return 0
        self._keys.set_expiry(key, at_ms)
        return 1

    def persist(self, args: Args) -> Reply:
        if self._keys.find(args[0]) is None or self._keys.expiry(args[0]) is None:
            return 0
        self._keys.set_expiry(args[0], None)
        return 1

    def ttl(self, args: Args) -> Reply:
        left = self._left_ms(args[0])
        return left if left < 0 else (left + 500) // 1000

    def pttl(self, args: Args) -> Reply:
        return self._left_ms(args[0])

    def _left_ms(self, key: bytes) -> int:
        if self._keys.find(key) is None:
            return -2
        at_ms = self._keys.expiry(key)
        return -1 if at_ms is None else at_ms - self._keys.now_ms
