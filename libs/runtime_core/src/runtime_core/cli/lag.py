"""`weft lag`: shows the waiting work on the broker: streams, groups, mailboxes, timers."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, cast

from typer import Option

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import STATE_MANAGER, group_of, ingress
from runtime_core.cli.connection import Broker, Commands, broker
from runtime_core.cli.output import Columns, Row, print_json, print_rows
from runtime_core.errors import ServerError
from runtime_core.ingress.publishers import Publishers, waiting_tasks
from runtime_core.maintenance.measures import Lag, groups_of, lag_of_timers, lag_of_work, work_streams
from runtime_core.maintenance.stuck import mailboxes
from runtime_core.text import duration

TENANTS_SHOWN = 20

app = Commands()


@app.verb("lag")
async def lag(as_json: Annotated[bool, Option("--json", help="Print JSON; ages are in milliseconds.")] = False) -> None:
    """Show how much work is waiting, and where.

    BACKLOG counts the entries of a stream that no consumer has read. PENDING counts those that a
    consumer is processing. The second table shows how far each group has read the record.

    \b
    Example:
      weft lag
    """
    async with broker() as opened:
        found = await _measure(opened)
    if as_json:
        print_json(found)
    else:
        _print(found)


async def _measure(opened: Broker) -> dict[str, Any]:  # Any: JSON
    """Return `streams` (per stream and group), `record` and totals. Ages are in milliseconds."""
    now = await opened.now_ms()
    home = opened.buses[0]
    streams = [await _stream(home, None, "tasks", ingress(home.keys.namespace), STATE_MANAGER, now)]
    for publisher in await Publishers(home).all():
        stream = ingress(home.keys.namespace, publisher.name)
        streams.append(await _stream(home, None, f"tasks:{publisher.name}", stream, "", now))
    totals: Counter[str] = Counter(
        dict.fromkeys(("mailboxes", "mailbox_events", "timers", "timers_due", "dead_letters", "replies", "asks"), 0)
    )
    waiting: Counter[str] = Counter()
    record: list[Row] = []
    for bus in opened.buses:
        keys, call = bus.keys, bus.transport.call
        for name in await work_streams(bus):
            row = await _stream(bus, keys.partition, name, keys.stream(name), group_of(name), now)
            # Every namespace has agents and tools; an unused engine has no stream.
            if row["backlog"] or row["consumers"] or name in ("agent", "tool"):
                streams.append(row)
        for counts in (await waiting_tasks(bus)).values():
            waiting += counts
        record += await _record(bus, now)
        async for instances in mailboxes(bus):
            lengths = [call("LLEN", f"{keys.base}mail:{instance}") for instance in instances]
            totals["mailboxes"] += len(instances)
            totals["mailbox_events"] += sum([cast(int, await length) for length in lengths])
        timers = await lag_of_timers(bus, now)
        totals["timers"] += timers.waiting
        totals["timers_due"] += timers.due
        for total, command in (
            ("dead_letters", ("XLEN", keys.dead)),
            ("replies", ("XLEN", keys.replies)),
            ("asks", ("XLEN", keys.asks)),
        ):
            totals[total] += cast(int, await call(*command))
    return {"namespace": home.keys.namespace, "streams": streams, "record": record, "waiting": dict(waiting), **totals}


async def _stream(bus: EventBus, partition: int | None, name: str, key: str, group: str, now: int) -> Row:
    """Measure one stream as the metrics do; without a group, all of its entries wait."""
    try:
        found = await lag_of_work(bus.transport.call, key, group, now) or Lag(0)
    except ServerError:  # not a stream, which weft doctor reports
        found = Lag(0)
    return {
        "stream": name,
        "partition": partition,
        "group": (None if found.consumers is None else group) if group else STATE_MANAGER,
        "backlog": found.waiting,
        "pending": found.pending,
        "oldest_pending_ms": round(found.oldest_pending * 1000) if found.pending else None,
        "consumers": found.consumers or 0,
    }


async def _record(bus: EventBus, now: int) -> list[Row]:
    """Return how far each group has read the record, and the age of its first unread entry."""
    key = bus.keys.record
    length = cast(int, await bus.transport.call("XLEN", key))
    rows = []
    for name, group in (await groups_of(bus.transport.call, key) or {}).items():
        ahead = pairs(await bus.transport.call("XRANGE", key, f"({group.read}", "+", "COUNT", 1))
        rows.append(
            {
                "partition": bus.keys.partition,
                "group": name,
                "position": group.read,
                "behind_ms": _age(ahead[0][0].decode(), now) if ahead else 0,
                "length": length,
            }
        )
    return rows


def _age(entry: str, now: int) -> int:
    return max(0, now - int(entry.partition("-")[0]))


_STREAM: Columns = {
    "STREAM": lambda row: row["stream"] if row["partition"] is None else f"{{{row['partition']}}}:{row['stream']}",
    "GROUP": lambda row: row["group"] or "none yet",
    "BACKLOG": "backlog",
    "PENDING": "pending",
    "OLDEST": lambda row: None if row["oldest_pending_ms"] is None else duration(row["oldest_pending_ms"]),
    "CONSUMERS": "consumers",
}
_RECORD: Columns = {
    "RECORD": "partition",
    "GROUP": "group",
    "POSITION": "position",
    "BEHIND": lambda row: duration(row["behind_ms"]),
    "ENTRIES": "length",
}


def _print(found: dict[str, Any]) -> None:  # Any: JSON
    print_rows(found["streams"], _STREAM)
    print()
    print_rows(found["record"], _RECORD)
    print()
    if found["waiting"]:
        most = sorted(found["waiting"].items(), key=lambda one: -one[1])[:TENANTS_SHOWN]
        rows = [{"tenant": tenant or "(no name)", "waiting": count} for tenant, count in most]
        print_rows(rows, {"TENANT": "tenant", "WAITING TASKS": "waiting"})
        print()
    print(f"mailboxes     {found['mailbox_events']} events in {found['mailboxes']} mailboxes")
    print(f"timers        {found['timers_due']} due, {found['timers']} in total")
    print(f"answers       {found['replies']} being relayed to a replyto")
    print(f"asks          {found['asks']} being relayed to instances in other partitions")
    print(f"dead letters  {found['dead_letters']}" + ("; see weft dead list" if found["dead_letters"] else ""))
