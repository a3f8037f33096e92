"""How far a group is behind on its stream, by what the stream holds.

The server's own lag (XINFO) is NULL after a deletion, a trim or a cursor that was set, which is always so here: what
is done is deleted, and cursors of the record are set by whoever reads it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from runtime_core.bus.delivery import pairs
from runtime_core.bus.reply import position
from runtime_core.bus.transport import Reply
from runtime_core.errors import ServerError

PAGE = 100
PAGES = 50
"""One look counts no more than so many pages of entries from each end of a stream."""

Call = Callable[..., Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Lag:
    """Where a group stands. Ages are seconds by the broker's clock, 0 where there is no such entry."""

    waiting: int
    """Entries that it has not read."""
    pending: int = 0
    """Entries that it has read and not settled."""
    oldest_waiting: float = 0.0
    oldest_pending: float = 0.0


@dataclass(frozen=True, slots=True)
class _Group:
    read: str
    """The id of the last entry that was delivered to it, or that its reader has come to."""
    pending: int


async def lag_of_work(call: Call, key: str, group: str, now_ms: int) -> Lag | None:
    """Of a stream on which all is work to do: what is done is deleted. None: there is no such stream.

    What is not pending waits, also behind the group's position: nobody will do it, and that must be seen.
    """
    length, first = cast(int, await call("XLEN", key)), await _first(call, key, "-")
    found = await _groups(call, key)
    if found is None:
        return None
    own = found.get(group)
    if own is None:
        return Lag(length, 0, _age(first, now_ms))
    oldest_pending = await _oldest_pending(call, key, group) if own.pending else None
    ahead = await _first(call, key, f"({own.read}")
    waiting = max(0, length - own.pending)
    if ahead is not None and (not waiting or _before(oldest_pending, first)):
        # Some that count as pending were deleted: they must not hide what waits.
        counted, _ = await _counted(call, key, f"({own.read}", "+")
        waiting = max(waiting, counted)
    passed_over = waiting > 0 and first is not None and (oldest_pending is None or _before(first, oldest_pending))
    return Lag(
        waiting,
        own.pending,
        _age(first if passed_over else ahead, now_ms) if waiting else 0.0,
        _age(oldest_pending, now_ms),
    )


async def lags_of_cursors(call: Call, key: str, groups: tuple[str, ...], now_ms: int) -> dict[str, Lag]:
    """Of a stream whose groups hold only how far each reader has come; empty where there is no such stream."""
    length = cast(int, await call("XLEN", key))
    found = await _groups(call, key)
    if found is None:
        return {}
    lags = {}
    for group in groups:
        own = found.get(group)
        read = own.read if own is not None else "0-0"
        ahead = await _first(call, key, f"({read}")
        lags[group] = Lag(
            0 if ahead is None else await _ahead(call, key, read, length),
            own.pending if own is not None else 0,
            _age(ahead, now_ms),
        )
    return lags


async def _ahead(call: Call, key: str, read: str, length: int) -> int:
    """How many entries come after `read`: counted from the nearer end, since a reader is mostly close to one of them.

    Where both are far, never less than there are: what is known to lie behind is taken off the whole.
    """
    behind, all_counted = await _counted(call, key, "-", read, PAGE)
    if not all_counted:
        ahead, all_counted = await _counted(call, key, f"({read}", "+")
        if all_counted:
            return ahead
        behind, _ = await _counted(call, key, "-", read)
    return max(1, length - behind)


async def _counted(call: Call, key: str, start: str, end: str, limit: int = PAGE * PAGES) -> tuple[int, bool]:
    """How many entries there are, up to `limit`, and whether these are all."""
    count = 0
    while count < limit:
        entries = pairs(await call("XRANGE", key, start, end, "COUNT", PAGE))
        count += len(entries)
        if len(entries) < PAGE:
            return count, True
        start = f"({entries[-1][0].decode()}"
    return count, False


async def _first(call: Call, key: str, start: str) -> str | None:
    entries = pairs(await call("XRANGE", key, start, "+", "COUNT", 1))
    return entries[0][0].decode() if entries else None


async def _groups(call: Call, key: str) -> dict[str, _Group] | None:
    try:
        reply = cast(list[list[Reply]], await call("XINFO", "GROUPS", key))
    except ServerError as error:
        if "no such key" not in str(error):
            raise
        return None
    groups = {}
    for flat in reply:
        named = dict(zip(flat[::2], flat[1::2], strict=True))
        name = cast(bytes, named[b"name"]).decode()
        groups[name] = _Group(cast(bytes, named[b"last-delivered-id"]).decode(), cast(int, named[b"pending"]))
    return groups


async def _oldest_pending(call: Call, key: str, group: str) -> str | None:
    try:
        summary = cast(list[Reply], await call("XPENDING", key, group))
    except ServerError as error:
        if not str(error).startswith("NOGROUP"):
            raise
        return None  # destroyed since we looked
    return None if summary[1] is None else cast(bytes, summary[1]).decode()


def _before(one: str | None, other: str | None) -> bool:
    return one is not None and (other is None or position(one) < position(other))


def _age(entry: str | None, now_ms: int) -> float:
    return 0.0 if entry is None else max(0.0, (now_ms - int(entry.partition("-")[0])) / 1000)
