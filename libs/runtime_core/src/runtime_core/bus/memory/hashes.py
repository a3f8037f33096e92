"""Hash commands of the in-process broker."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation, localcontext

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import fits_integer, glob, integer, option_value
from runtime_core.bus.memory.keyspace import Hash, Keyspace
from runtime_core.bus.memory.replies import NO_LIMIT, Args, Command, syntax_error, wrong_arity
from runtime_core.errors import ServerError

_DECIMALS = Decimal("1e-17")


class HashCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"HSET": Command(self.hset, 3, NO_LIMIT, True),
            b"HSETNX": Command(self.hsetnx, 3, 3, True),
            b"HGET": Command(self.hget, 2, 2, False),
            b"HMGET": Command(self.hmget, 2, NO_LIMIT, False),
            b"HGETALL": Command(self.hgetall, 1, 1, False),
            b"HDEL": Command(self.hdel, 2, NO_LIMIT, True),
            b"HEXISTS": Command(self.hexists, 2, 2, False),
            b"HINCRBY": Command(self.hincrby, 3, 3, True),
            b"HINCRBYFLOAT": Command(self.hincrbyfloat, 3, 3, True),
            b"HLEN": Command(self.hlen, 1, 1, False),
            b"HKEYS": Command(self.hkeys, 1, 1, False),
            b"HVALS": Command(self.hvals, 1, 1, False),
            b"HSCAN": Command(self.hscan, 2, NO_LIMIT, False),
        }

    def hset(self, args: Args) -> Reply:
        if len(args) % 2 == 0:
            raise wrong_arity("hset")
        fields = self._keys.get_or_create(args[0], Hash)
        before = len(fields)
        if len(args) == 3:
            fields[args[1]] = args[2]
        else:
            fields.update(zip(args[1::2], args[2::2], strict=True))
        return len(fields) - before

    def hsetnx(self, args: Args) -> Reply:
        key, field, value = args
        fields = self._keys.get_or_create(key, Hash)
        if field in fields:
            return 0
        fields[field] = value
        return 1

    def hget(self, args: Args) -> Reply:
        fields = self._keys.get(args[0], Hash)
        return None if fields is None else fields.get(args[1])

    def hmget(self, args: Args) -> Reply:
        fields = self._keys.get(args[0], Hash)
        if fields is None:
            return [None] * (len(args) - 1)
        return [fields.get(field) for field in args[1:]]

    def hgetall(self, args: Args) -> Reply:
        found: list[Reply] = []
        for pair in (self._keys.get(args[0], Hash) or {}).items():
            found += pair
        return found

    def hdel(self, args: Args) -> Reply:
        fields = self._keys.get(args[0], Hash)
        if fields is None:
            return 0
        before = len(fields)
        for field in args[1:]:
            fields.pop(field, None)
        gone = before - len(fields)
        self._keys.remove_if_empty(args[0], fields)
        return gone

    def hexists(self, args: Args) -> Reply:
        fields = self._keys.get(args[0], Hash)
        return int(fields is not None and args[1] in fields)

    def hincrby(self, args: Args) -> Reply:
        key, field, amount = args
        by = integer(amount)
        old = self._old(key, field)
        total = integer(old, "ERR hash value is not an integer") + by
        if not fits_integer(total):
            raise ServerError("ERR increment or decrement would overflow")
        self._keys.get_or_create(key, Hash)[field] = b"%d" % total
        return total

    def hincrbyfloat(self, args: Args) -> Reply:
        key, field, amount = args
        by = _decimal(amount, "ERR value is not a valid float")
        old = self._old(key, field)
        with localcontext(prec=400):
            total = (_decimal(old, "ERR hash value is not a float") + by).quantize(_DECIMALS)
        shown = f"{total:f}".rstrip("0").rstrip(".")
        value = b"0" if shown == "-0" else shown.encode()
        self._keys.get_or_create(key, Hash)[field] = value
        return value

    def _old(self, key: bytes, field: bytes) -> bytes:
        fields = self._keys.get(key, Hash)
        return b"0" if fields is None else fields.get(field, b"0")

    def hlen(self, args: Args) -> Reply:
        return len(self._keys.get(args[0], Hash) or ())

    def hkeys(self, args: Args) -> Reply:
        return list(self._keys.get(args[0], Hash) or ())

    def hvals(self, args: Args) -> Reply:
        return list((self._keys.get(args[0], Hash) or {}).values())

    def hscan(self, args: Args) -> Reply:
        integer(args[1], "ERR invalid cursor")
        pattern = None
        for position in range(2, len(args), 2):
            value = option_value(args, position)
            match args[position].upper():
                case b"MATCH":
                    pattern = glob(value)
                case b"COUNT":
                    if integer(value) < 1:
                        raise syntax_error()
                case _:
                    raise syntax_error()
        found: list[Reply] = []
        for field, value in (self._keys.get(args[0], Hash) or {}).items():
            if pattern is None or pattern.fullmatch(field):
                found += (field, value)
        return [b"0", found]


def _decimal(word: bytes, error: str) -> Decimal:
    # Servers add with more digits than a double has; decimals do not lose any either.
    try:
        value = Decimal(word.decode("ascii"))
    except (InvalidOperation, UnicodeDecodeError):
        raise ServerError(error) from None
    if not value.is_finite():
        raise ServerError("ERR value is NaN or Infinity")
    if b"_" in word or word != word.strip() or abs(value.adjusted()) > 300:
        raise ServerError(error)
    return value
