"""Consumer-group commands of the in-process broker: reading, acknowledging, claiming, pending entries."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import integer, option_value
from runtime_core.bus.memory.keyspace import Keyspace
from runtime_core.bus.memory.replies import NO_LIMIT, OK, Args, Command, shown, syntax_error, wrong_arity
from runtime_core.bus.memory.stream_commands import interval
from runtime_core.bus.memory.streams import LAST_ID, Group, Stream, parse_id, print_id
from runtime_core.errors import ServerError

_NEW = -1  # the id `>`: what no consumer of the group has got yet


@dataclass(slots=True)
class Read:
    """An XREAD or XREADGROUP with its words understood and `$` resolved, so that it can be tried again."""

    keys: Args
    after: list[int]
    count: int | None
    block_ms: int | None
    """None: answer at once; 0: wait without end."""
    group: bytes | None = None
    consumer: bytes = b""
    no_ack: bool = False


class GroupCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, keyspace: Keyspace) -> None:
        self._keys = keyspace

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"XREAD": Command(self.xread, 3, NO_LIMIT, False),
            b"XREADGROUP": Command(self.xreadgroup, 6, NO_LIMIT, True),
            b"XACK": Command(self.xack, 3, NO_LIMIT, True),
            b"XCLAIM": Command(self.xclaim, 5, NO_LIMIT, True),
            b"XAUTOCLAIM": Command(self.xautoclaim, 5, NO_LIMIT, True),
            b"XPENDING": Command(self.xpending, 2, NO_LIMIT, False),
            b"XGROUP": Command(self.xgroup, 1, NO_LIMIT, True),
        }

    # Reading

    def xread(self, args: Args) -> Reply:
        return self.read(self.understand(args, grouped=False))

    def xreadgroup(self, args: Args) -> Reply:
        return self.read(self.understand(args, grouped=True))

    def understand(self, args: Args, grouped: bool) -> Read:
        """Read the words of XREADGROUP (`grouped`) or XREAD; raises ServerError where a group is missing."""
        command = "XREADGROUP" if grouped else "XREAD"
        count = block_ms = None
        group: bytes | None = None
        consumer = b""
        no_ack = False
        position = 0
        while True:
            if position >= len(args):
                raise syntax_error()
            option = args[position].upper()
            more = len(args) - 1 - position
            if option == b"STREAMS" and more:
                words = args[position + 1 :]
                break
            if option == b"COUNT" and more:
                count = integer(args[position + 1])
                position += 2
            elif option == b"BLOCK" and more:
                block_ms = integer(args[position + 1], "ERR timeout is not an integer or out of range")
                if block_ms < 0:
                    raise ServerError("ERR timeout is negative")
                position += 2
            elif option in (b"GROUP", b"NOACK") and not grouped:
                raise ServerError(
                    f"ERR The {option.decode()} option is only supported by XREADGROUP. You called XREAD instead."
                )
            elif option == b"GROUP" and more >= 2:
                group, consumer = args[position + 1], args[position + 2]
                position += 3
            elif option == b"NOACK":
                no_ack = True
                position += 1
            else:
                raise syntax_error()
        if len(words) % 2:
            raise ServerError(
                f"ERR Unbalanced '{command.lower()}' list of streams: "
                f"for each stream key an ID or '{'>' if grouped else '$'}' must be specified."
            )
        if grouped and group is None:
            raise ServerError("ERR Missing GROUP option for XREADGROUP")
        keys = words[: len(words) // 2]
        after = [self._start(key, word, group) for key, word in zip(keys, words[len(keys) :], strict=True)]
        # A count of zero or less is none.
        return Read(keys, after, count if count and count > 0 else None, block_ms, group, consumer, no_ack)

    def _start(self, key: bytes, word: bytes, group: bytes | None) -> int:
        stream = self._keys.get(key, Stream)
        if group is not None:
            _reading_group(stream, key, group)
            if word == b">":
                return _NEW
            if word == b"$":
                raise ServerError(
                    "ERR The $ ID is meaningless in the context of XREADGROUP: you want to read the history "
                    "of this consumer by specifying a proper ID, or use the > ID to get new messages. "
                    "The $ ID would just return an empty result set."
                )
        elif word == b"$":
            return 0 if stream is None else stream.last_id
        elif word == b">":
            raise ServerError(
                "ERR The > ID can be specified only when calling XREADGROUP using the GROUP <group> <consumer> option."
            )
        return parse_id(word)

    def read(self, request: Read) -> Reply:
        """Answer a read with what is there; None where there is nothing."""
        found: list[Reply] = []
        for key, after in zip(request.keys, request.after, strict=True):
            stream = self._keys.get(key, Stream)
            if request.group is not None:
                group = _reading_group(stream, key, request.group)
                assert stream is not None  # it has a group
                entries = self._read_group(stream, group, request, after)
            elif stream is None:
                continue
            else:
                ids = stream.ids(after + 1, LAST_ID, request.count)
                entries = [stream.shown(entry_id) for entry_id in ids] or None
            if entries is not None:
                found.append([key, entries])
        return found or None

    def _read_group(self, stream: Stream, group: Group, request: Read, after: int) -> list[Reply] | None:
        now = self._keys.now_ms
        consumer = group.consumer(request.consumer, now)
        entries: list[Reply] = []
        if after != _NEW:
            wanted = sorted(entry_id for entry_id in consumer.pending if entry_id > after)
            for entry_id in wanted[: request.count]:
                if entry_id not in stream.entries:
                    entries.append([print_id(entry_id), None])
                    continue
                pending = consumer.pending[entry_id]
                pending.delivered_ms = now
                pending.count += 1
                entries.append(stream.shown(entry_id))
            return entries
        ids = stream.ids(group.last_id + 1, LAST_ID, request.count)
        for entry_id in ids:
            if group.entries_read is not None and not stream.has_gap_from(entry_id):
                group.entries_read += 1
            elif stream.added:
                group.entries_read = stream.position(entry_id)
            if not request.no_ack:
                group.give(entry_id, consumer, now, 1)
            entries.append(stream.shown(entry_id))
        if ids:
            group.last_id = ids[-1]
        return entries or None

    # Settling and claiming

    def xack(self, args: Args) -> Reply:
        stream = self._keys.get(args[0], Stream)
        group = None if stream is None else stream.groups.get(args[1])
        if group is None:
            return 0
        if len(args) == 3:
            return int(group.settle(parse_id(args[2])))
        return sum([group.settle(entry_id) for entry_id in [parse_id(word) for word in args[2:]]])

    def xclaim(self, args: Args) -> Reply:
        stream, group = self._group(args[0], args[1])
        now = self._keys.now_ms
        min_idle = max(0, integer(args[3], "ERR Invalid min-idle-time argument for XCLAIM"))
        position = 4
        ids: list[int] = []
        while position < len(args):
            try:
                ids.append(parse_id(args[position]))
            except ServerError:
                break  # the options begin here
            position += 1
        delivered_ms = now
        attempts: int | None = None
        last_id = 0
        force = just_id = False
        while position < len(args):
            option = args[position].upper()
            more = position + 1 < len(args)
            if option == b"FORCE":
                force = True
            elif option == b"JUSTID":
                just_id = True
            elif option in (b"IDLE", b"TIME", b"RETRYCOUNT") and more:
                position += 1
                number = integer(args[position], f"ERR Invalid {option.decode()} option argument for XCLAIM")
                if option == b"IDLE":
                    delivered_ms = now - number
                elif option == b"TIME":
                    delivered_ms = number
                else:
                    attempts = number if number >= 0 else None
            elif option == b"LASTID" and more:
                position += 1
                last_id = parse_id(args[position])
            else:
                raise ServerError(f"ERR Unrecognized XCLAIM option '{shown(args[position])}'")
            position += 1
        group.last_id = max(group.last_id, last_id)
        if not 0 <= delivered_ms <= now:
            delivered_ms = now
        consumer = group.consumer(args[2], now)
        claimed: list[Reply] = []
        for entry_id in ids:
            pending = group.pending.get(entry_id)
            if entry_id not in stream.entries:
                group.settle(entry_id)
                continue
            if pending is None and not force:
                continue
            if pending is not None and min_idle and now - pending.delivered_ms < min_idle:
                continue
            count = 1 if pending is None else pending.count
            if attempts is not None:
                count = attempts
            elif not just_id:
                count += 1
            group.give(entry_id, consumer, delivered_ms, count)
            claimed.append(print_id(entry_id) if just_id else stream.shown(entry_id))
        return claimed

    def xautoclaim(self, args: Args) -> Reply:
        min_idle = max(0, integer(args[3], "ERR Invalid min-idle-time argument for XAUTOCLAIM"))
        start, _ = interval(args[4], b"+")
        count = 100
        just_id = False
        position = 5
        while position < len(args):
            option = args[position].upper()
            if option == b"COUNT" and position + 1 < len(args):
                position += 1
                count = integer(args[position], "ERR COUNT must be > 0")
                if count < 1:
                    raise ServerError("ERR COUNT must be > 0")
            elif option == b"JUSTID":
                just_id = True
            else:
                raise syntax_error()
            position += 1
        stream, group = self._group(args[0], args[1])
        now = self._keys.now_ms
        consumer = group.consumer(args[2], now)
        waiting = sorted(entry_id for entry_id in group.pending if entry_id >= start)
        claimed: list[Reply] = []
        gone: list[Reply] = []
        looked_at = 0
        for entry_id in waiting[: count * 10]:
            if len(claimed) + len(gone) == count:
                break
            looked_at += 1
            pending = group.pending[entry_id]
            if entry_id not in stream.entries:
                group.settle(entry_id)
                gone.append(print_id(entry_id))
                continue
            if min_idle and now - pending.delivered_ms < min_idle:
                continue
            group.give(entry_id, consumer, now, pending.count + (not just_id))
            claimed.append(print_id(entry_id) if just_id else stream.shown(entry_id))
        following = waiting[looked_at] if looked_at < len(waiting) else 0
        return [print_id(following), claimed, gone]

    def xpending(self, args: Args) -> Reply:
        if len(args) == 2:
            return self._pending_summary(self._group(args[0], args[1])[1])
        if len(args) < 5 or len(args) > 8:
            raise syntax_error()
        min_idle = 0
        words = args[2:]
        if words[0].upper() == b"IDLE":
            min_idle = integer(words[1])
            words = words[2:]
            if len(words) < 3:
                raise syntax_error()
        count = integer(words[2])
        low, high = interval(words[0], words[1])
        _, group = self._group(args[0], args[1])
        pending = group.pending
        if len(words) > 3:
            consumer = group.consumers.get(words[3])
            if consumer is None:
                return []
            pending = consumer.pending
        now = self._keys.now_ms
        if low == high:
            ids = [low] if low in pending else []
        else:
            ids = sorted(entry_id for entry_id in pending if low <= entry_id <= high)
        found: list[Reply] = []
        for entry_id in ids:
            if len(found) >= count:
                break
            entry = pending[entry_id]
            idle = now - entry.delivered_ms
            if not min_idle or idle >= min_idle:
                found.append([print_id(entry_id), entry.consumer.name, max(0, idle), entry.count])
        return found

    def _pending_summary(self, group: Group) -> list[Reply]:
        if not group.pending:
            return [0, None, None, None]
        consumers: list[Reply] = [
            [name, b"%d" % len(consumer.pending)]
            for name, consumer in sorted(group.consumers.items())
            if consumer.pending
        ]
        return [len(group.pending), print_id(min(group.pending)), print_id(max(group.pending)), consumers]

    # Groups

    def xgroup(self, args: Args) -> Reply:
        what = args[0].upper()
        lengths = {
            b"CREATE": (4, 7),
            b"SETID": (4, 6),
            b"DESTROY": (3, 3),
            b"CREATECONSUMER": (4, 4),
            b"DELCONSUMER": (4, 4),
        }
        if what not in lengths:
            raise ServerError(f"ERR unknown subcommand '{shown(args[0])}'. Try XGROUP HELP.")
        least, most = lengths[what]
        if not least <= len(args) <= most:
            raise wrong_arity(f"xgroup|{what.decode().lower()}")
        make_stream = False
        entries_read: int | None = None
        position = 4
        while position < len(args) and what in (b"CREATE", b"SETID"):
            option = args[position].upper()
            if option == b"MKSTREAM" and what == b"CREATE":
                make_stream = True
            elif option == b"ENTRIESREAD":
                position += 1
                number = integer(option_value(args, position - 1))
                if number < -1:
                    raise ServerError("ERR value for ENTRIESREAD must be positive or -1")
                entries_read = None if number == -1 else number
            else:
                raise syntax_error()
            position += 1
        key, name = args[1], args[2]
        stream = self._keys.get(key, Stream)
        if stream is None and not make_stream:
            raise ServerError(
                "ERR The XGROUP subcommand requires the key to exist. Note that for CREATE you may want to "
                "use the MKSTREAM option to create an empty stream automatically."
            )
        if what == b"CREATE":
            last_id = _group_start(stream, args[3])
            if stream is None:
                stream = self._keys.get_or_create(key, Stream)
            if name in stream.groups:
                raise ServerError("BUSYGROUP Consumer Group name already exists")
            stream.groups[name] = Group(name, last_id, entries_read)
            return OK
        assert stream is not None  # only CREATE makes one
        if what == b"DESTROY":
            if stream.groups.pop(name, None) is None:
                return 0
            self._keys.wake(key)  # blocked readers learn that their group is gone
            return 1
        group = stream.groups.get(name)
        if group is None:
            raise ServerError(f"NOGROUP No such consumer group '{shown(name)}' for key name '{shown(key)}'")
        if what == b"SETID":
            group.last_id = _group_start(stream, args[3])
            group.entries_read = entries_read
            return OK
        if what == b"DELCONSUMER":
            return group.drop_consumer(args[3])
        if args[3] in group.consumers:
            return 0
        group.consumer(args[3], self._keys.now_ms)
        return 1

    def _group(self, key: bytes, name: bytes) -> tuple[Stream, Group]:
        stream = self._keys.get(key, Stream)
        group = None if stream is None else stream.groups.get(name)
        if stream is None or group is None:
            raise ServerError(f"NOGROUP No such key '{shown(key)}' or consumer group '{shown(name)}'")
        return stream, group


def _reading_group(stream: Stream | None, key: bytes, name: bytes) -> Group:
    group = None if stream is None else stream.groups.get(name)
    if group is None:
        raise ServerError(
            f"NOGROUP No such key '{shown(key)}' or consumer group '{shown(name)}' in XREADGROUP with GROUP option"
        )
    return group


def _group_start(stream: Stream | None, word: bytes) -> int:
    if word == b"$":
        return 0 if stream is None else stream.last_id
    return parse_id(word)
