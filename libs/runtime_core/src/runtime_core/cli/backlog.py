"""How much work lies on the broker, and who takes it: streams, groups, mailboxes, timers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from runtime_core.bus.connection import Reply
from runtime_core.bus.delivery import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import GROUPS, STATE_MANAGER, group_of, ingress
from runtime_core.cli.connection import Broker, pages
from runtime_core.errors import ServerError
from runtime_core.ingress.publishers import Publishers
from runtime_core.ingress.tenants import waiting_tasks


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group."""

    name: str
    position: str
    """The entry id up to which it has read."""
    pending: int
    consumers: int


async def groups_of(bus: EventBus, key: str) -> list[Group]:
    """The groups of a stream; none where there is no such stream."""
    try:
        reply = cast(list[list[Reply]], await bus.transport.call("XINFO", "GROUPS", key))
    except ServerError as error:
        if "no such key" not in str(error):
            raise
        return []
    groups = []
    for flat in reply:
        named = dict(zip(flat[::2], flat[1::2], strict=True))
        groups.append(
            Group(
                cast(bytes, named[b"name"]).decode(),
                cast(bytes, named[b"last-delivered-id"]).decode(),
                cast(int, named[b"pending"]),
                cast(int, named[b"consumers"]),
            )
        )
    return groups


async def work_streams(bus: EventBus) -> list[str]:
    """The work streams that this partition may have: the default ones, and those of pools that apps have named."""
    call, keys = bus.transport.call, bus.keys
    named = {item.decode() for key in (keys.agents, keys.tools) for item in cast(list[bytes], await call("HVALS", key))}
    return sorted(named | set(await engine_streams(bus)) | set(GROUPS))


async def engine_streams(bus: EventBus) -> list[str]:
    """Streams of engines that gateways have served or steps have waited on."""
    found = cast(list[bytes], await bus.transport.call("HKEYS", bus.keys.engines))
    return sorted(name.decode() for name in found)


async def measure(opened: Broker) -> dict[str, Any]:  # Any: JSON
    """`streams` (per stream and group), then totals. Ages are milliseconds."""
    now = await opened.now_ms()
    home = opened.buses[0]
    streams = await _stream(home, None, "tasks", ingress(home.keys.namespace), [STATE_MANAGER], now)
    for publisher in await Publishers(home).all():
        streams.append(await _of_publisher(home, publisher.name))
    totals = {
        "mailboxes": 0,
        "mailbox_events": 0,
        "timers": 0,
        "timers_due": 0,
        "dead_letters": 0,
        "replies": 0,
        "asks": 0,
    }
    waiting: dict[str, int] = {}
    records = []
    for bus in opened.buses:
        keys, call = bus.keys, bus.transport.call
        for name in await work_streams(bus):
            group = group_of(name)
            found = await _stream(bus, keys.partition, name, keys.stream(name), [group], now)
            # Engines that nobody uses have no stream; the two that every namespace has are always shown.
            streams += [one for one in found if one["backlog"] or one["consumers"] or name in ("agent", "tool")]
        for counts in (await waiting_tasks(bus)).values():
            for tenant, count in counts.items():
                waiting[tenant] = waiting.get(tenant, 0) + count
        records += await _record(bus, now)
        async for mailboxes in pages(bus.transport, f"{keys.base}mail:*", "list"):
            lengths = [call("LLEN", mailbox) for mailbox in mailboxes]
            totals["mailboxes"] += len(mailboxes)
            totals["mailbox_events"] += sum([cast(int, await length) for length in lengths])
        totals["timers"] += cast(int, await call("ZCARD", keys.timers))
        totals["timers_due"] += cast(int, await call("ZCOUNT", keys.timers, "-inf", now))
        totals["dead_letters"] += cast(int, await call("XLEN", keys.dead))
        totals["replies"] += cast(int, await call("XLEN", keys.replies))
        totals["asks"] += cast(int, await call("XLEN", keys.asks))
    return {"namespace": home.keys.namespace, "streams": streams, "record": records, "waiting": waiting, **totals}


async def _stream(
    bus: EventBus, partition: int | None, name: str, key: str, wanted: list[str], now: int
) -> list[dict[str, Any]]:  # Any: JSON
    """One row per group. All that is on these streams is work to do: what is done is deleted."""
    length = cast(int, await bus.transport.call("XLEN", key))
    found = {group.name: group for group in await groups_of(bus, key)}
    rows = []
    for group in wanted:
        there = found.get(group)
        oldest = None
        if there is not None and there.pending:
            summary = cast(list[Reply], await bus.transport.call("XPENDING", key, group))
            if summary[1] is not None:
                oldest = max(0, now - int(cast(bytes, summary[1]).split(b"-")[0]))
        rows.append(
            {
                "stream": name,
                "partition": partition,
                "group": group if there is not None else None,
                "backlog": max(0, length - (there.pending if there is not None else 0)),
                "pending": there.pending if there is not None else 0,
                "oldest_pending_ms": oldest,
                "consumers": there.consumers if there is not None else 0,
            }
        )
    return rows


async def _of_publisher(bus: EventBus, publisher: str) -> dict[str, Any]:  # Any: JSON
    """The row of a publisher's stream, which has no group: all that is on it waits."""
    try:
        length = cast(int, await bus.transport.call("XLEN", ingress(bus.keys.namespace, publisher)))
    except ServerError:  # no stream: weft doctor says so
        length = 0
    return {
        "stream": f"tasks:{publisher}",
        "partition": None,
        "group": STATE_MANAGER,
        "backlog": length,
        "pending": 0,
        "oldest_pending_ms": None,
        "consumers": 0,
    }


async def _record(bus: EventBus, now: int) -> list[dict[str, Any]]:  # Any: JSON
    """How far each group of the record has come, and how old the first entry is that it has not got to."""
    key = bus.keys.record
    length = cast(int, await bus.transport.call("XLEN", key))
    rows = []
    for group in await groups_of(bus, key):
        ahead = pairs(await bus.transport.call("XRANGE", key, f"({group.position}", "+", "COUNT", 1))
        behind = max(0, now - int(ahead[0][0].split(b"-")[0])) if ahead else 0
        rows.append(
            {
                "partition": bus.keys.partition,
                "group": group.name,
                "position": group.position,
                "behind_ms": behind,
                "length": length,
            }
        )
    return rows
