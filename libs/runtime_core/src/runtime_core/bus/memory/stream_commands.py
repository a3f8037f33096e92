"""Stream commands of the in-process broker that need no consumer group."""

from __future__ import annotations

from typing import NamedTuple

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import integer, option_value
from runtime_core.bus.memory.keyspace import Keyspace
from runtime_core.bus.memory.replies import NO_LIMIT, OK, Args, Command, shown, syntax_error, wrong_arity
from runtime_core.bus.memory.streams import (
    LAST_ID,
    NODE,
    SEQUENCE,
    Stream,
    invalid_id,
    parse_id,
    print_id,
)
from runtime_core.errors import ServerError


class _Trim(NamedTuple):
    by_id: bool
    bound: int
    approximate: bool
    limit: int


def interval(start: bytes, end: bytes) -> tuple[int, int]:
    """The lowest and highest id of a range as written: `-`, `+`, ids with or without sequence, `(` excludes."""
    low = _bound(start, 0)
    if start[:1] == b"(":
        if low == LAST_ID:
            raise ServerError("ERR invalid start ID for the interval")
        low += 1
    high = _bound(end, SEQUENCE)
    if end[:1] == b"(":
        if high == 0:
            raise ServerError("ERR invalid end ID for the interval")
        high -= 1
    return low, high


def _bound(word: bytes, missing_sequence: int) -> int:
    if word == b"-":
        return 0
    if word == b"+":
        return LAST_ID
    return parse_id(word[1:] if word[:1] == b"(" else word, missing_sequence)


class StreamCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"XADD": Command(self.xadd, 4, NO_LIMIT, True),
            b"XDEL": Command(self.xdel, 2, NO_LIMIT, True),
            b"XLEN": Command(self.xlen, 1, 1, False),
            b"XRANGE": Command(self.xrange, 3, NO_LIMIT, False),
            b"XREVRANGE": Command(self.xrevrange, 3, NO_LIMIT, False),
            b"XTRIM": Command(self.xtrim, 3, NO_LIMIT, True),
            b"XSETID": Command(self.xsetid, 2, 6, True),
            b"XINFO": Command(self.xinfo, 1, NO_LIMIT, False),
        }

    def xadd(self, args: Args) -> Reply:
        key = args[0]
        trim = None
        create = True
        position = 1
        if args[1] != b"*":
            trim, create, position = _trim_options(args, adds=True)
        fields = args[position + 1 :]
        if not fields or len(fields) % 2:
            raise wrong_arity("xadd")
        wanted = args[position]
        if wanted in (b"0-0", b"0"):
            raise ServerError("ERR The ID specified in XADD must be greater than 0-0")
        stream = self._keys.get(key, Stream)
        if stream is None:
            if not create:
                return None
            stream = self._keys.get_or_create(key, Stream)
        if stream.last_id == LAST_ID:
            raise ServerError("ERR The stream has exhausted the last possible ID, unable to add more items")
        if wanted == b"*":
            entry_id = self._keys.now_ms << 64
            if entry_id <= stream.last_id:
                entry_id = stream.last_id + 1
        elif wanted.endswith(b"-*"):
            entry_id = parse_id(wanted[:-2]) if b"-" not in wanted[:-2] else -1
            if entry_id < 0:
                raise invalid_id()
            if entry_id >> 64 == stream.last_id >> 64:
                entry_id = stream.last_id + 1 if stream.last_id & SEQUENCE != SEQUENCE else 0
        else:
            entry_id = parse_id(wanted)
        if entry_id <= stream.last_id:
            raise ServerError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        added = stream.append(entry_id, fields)
        if trim is not None:
            _apply(stream, trim)
        self._keys.wake(key)
        return added

    def xdel(self, args: Args) -> Reply:
        stream = self._keys.get(args[0], Stream)
        if stream is None:
            return 0
        gone = 0
        for entry_id in [parse_id(word) for word in args[1:]]:
            if stream.discard(entry_id):
                gone += 1
                if entry_id > stream.max_deleted_id:
                    stream.max_deleted_id = entry_id
        return gone

    def xlen(self, args: Args) -> Reply:
        stream = self._keys.get(args[0], Stream)
        return 0 if stream is None else len(stream)

    def xrange(self, args: Args) -> Reply:
        return self._range(args, args[1], args[2], reverse=False)

    def xrevrange(self, args: Args) -> Reply:
        return self._range(args, args[2], args[1], reverse=True)

    def _range(self, args: Args, start: bytes, end: bytes, reverse: bool) -> Reply:
        low, high = interval(start, end)
        count: int | None = None
        for position in range(3, len(args), 2):
            if args[position].upper() != b"COUNT":
                raise syntax_error()
            count = max(0, integer(option_value(args, position)))
        stream = self._keys.get(args[0], Stream)
        if stream is None:
            return []
        if count == 0:
            return None
        return [stream.shown(entry_id) for entry_id in stream.ids(low, high, count, reverse)]

    def xtrim(self, args: Args) -> Reply:
        trim, _, _ = _trim_options(args, adds=False)
        stream = self._keys.get(args[0], Stream)
        if stream is None or trim is None:
            return 0
        return _apply(stream, trim)

    def xsetid(self, args: Args) -> Reply:
        last_id = parse_id(args[1])
        added: int | None = None
        deleted = 0
        for position in range(2, len(args), 2):
            value = option_value(args, position)
            match args[position].upper():
                case b"ENTRIESADDED":
                    added = integer(value)
                    if added < 0:
                        raise ServerError("ERR entries_added must be positive")
                case b"MAXDELETEDID":
                    deleted = parse_id(value)
                    if last_id < deleted:
                        raise ServerError(
                            "ERR The ID specified in XSETID is smaller than the provided max_deleted_entry_id"
                        )
                case _:
                    raise syntax_error()
        stream = self._keys.get(args[0], Stream)
        if stream is None:
            raise ServerError("ERR no such key")
        if last_id < stream.max_deleted_id:
            raise ServerError("ERR The ID specified in XSETID is smaller than current max_deleted_entry_id")
        if len(stream):
            if last_id < stream.ids(0, LAST_ID, 1, reverse=True)[0]:
                raise ServerError("ERR The ID specified in XSETID is smaller than the target stream top item")
            if added is not None and added < len(stream):
                raise ServerError("ERR The entries_added specified in XSETID is smaller than the target stream length")
        stream.last_id = last_id
        stream.added = stream.added if added is None else added
        stream.max_deleted_id = deleted or stream.max_deleted_id
        return OK

    def xinfo(self, args: Args) -> Reply:
        what = args[0].upper()
        if what not in (b"STREAM", b"GROUPS", b"CONSUMERS"):
            raise ServerError(f"ERR unknown subcommand '{shown(args[0])}'. Try XINFO HELP.")
        if len(args) != (3 if what == b"CONSUMERS" else 2):
            raise wrong_arity(f"xinfo|{what.decode().lower()}")
        stream = self._keys.get(args[1], Stream)
        if stream is None:
            raise ServerError("ERR no such key")
        if what == b"STREAM":
            return self._stream_info(stream)
        if what == b"GROUPS":
            return self._groups_info(stream)
        return self._consumers_info(stream, args[1], args[2])

    def _stream_info(self, stream: Stream) -> list[Reply]:
        # Nodes are how a server stores entries; here the figure only says how many it would need.
        nodes = -(-len(stream) // NODE)
        return [
            b"length",
            len(stream),
            b"radix-tree-keys",
            nodes,
            b"radix-tree-nodes",
            nodes + 1,
            b"last-generated-id",
            print_id(stream.last_id),
            b"max-deleted-entry-id",
            print_id(stream.max_deleted_id),
            b"entries-added",
            stream.added,
            b"recorded-first-entry-id",
            print_id(stream.first_id),
            b"groups",
            len(stream.groups),
            b"first-entry",
            next((stream.shown(entry_id) for entry_id in stream.ids(0, LAST_ID, 1)), None),
            b"last-entry",
            next((stream.shown(entry_id) for entry_id in stream.ids(0, LAST_ID, 1, reverse=True)), None),
        ]

    def _groups_info(self, stream: Stream) -> list[Reply]:
        return [
            [
                b"name",
                group.name,
                b"consumers",
                len(group.consumers),
                b"pending",
                len(group.pending),
                b"last-delivered-id",
                print_id(group.last_id),
                b"entries-read",
                group.entries_read,
                b"lag",
                stream.lag(group),
            ]
            for _, group in sorted(stream.groups.items())
        ]

    def _consumers_info(self, stream: Stream, key: bytes, name: bytes) -> list[Reply]:
        group = stream.groups.get(name)
        if group is None:
            raise ServerError(f"NOGROUP No such consumer group '{shown(name)}' for key name '{shown(key)}'")
        return [
            [
                b"name",
                consumer.name,
                b"pending",
                len(consumer.pending),
                b"idle",
                max(0, self._keys.now_ms - consumer.seen_ms),
            ]
            for _, consumer in sorted(group.consumers.items())
        ]


def _apply(stream: Stream, trim: _Trim) -> int:
    if trim.by_id:
        return stream.trim_below(trim.bound, trim.approximate, trim.limit)
    return stream.trim_to_length(trim.bound, trim.approximate, trim.limit)


def _trim_options(args: Args, adds: bool) -> tuple[_Trim | None, bool, int]:
    """How to trim, whether a missing stream is made, and where the entry id of an XADD stands."""
    bound: int | None = None
    by_id = approximate = False
    limit: int | None = None
    create = True
    position = 1
    while position < len(args):
        option = args[position].upper()
        more = len(args) - 1 - position
        if option in (b"MAXLEN", b"MINID") and more:
            if bound is not None:
                raise ServerError("ERR syntax error, MAXLEN and MINID options at the same time are not compatible")
            by_id = option == b"MINID"
            if more >= 2 and args[position + 1] in (b"~", b"="):
                approximate = args[position + 1] == b"~"
                position += 1
            word = args[position + 1]
            bound = parse_id(word) if by_id else integer(word)
            if bound < 0:
                raise ServerError("ERR The MAXLEN argument must be >= 0.")
            position += 2
        elif option == b"LIMIT" and more:
            limit = integer(args[position + 1])
            if limit < 0:
                raise ServerError("ERR The LIMIT argument must be >= 0.")
            position += 2
        elif adds and option == b"NOMKSTREAM":
            create = False
            position += 1
        elif adds:
            break
        else:
            raise syntax_error()
    if adds and position < len(args) and args[position] != b"*":
        word = args[position]
        parse_id(word[:-2] if word.endswith(b"-*") else word)
    if limit and bound is None:
        raise ServerError("ERR syntax error, LIMIT cannot be used without specifying a trimming strategy")
    if not adds and bound is None:
        raise ServerError("ERR syntax error, XTRIM must be called with a trimming strategy")
    if limit is not None and not approximate:
        raise ServerError("ERR syntax error, LIMIT cannot be used without the special ~ option")
    if bound is None:
        return None, create, position
    if limit is None:
        limit = 100 * NODE if approximate else 0
    return _Trim(by_id, bound, approximate, limit), create, position
