"""`weft lag`, `weft top` and `weft doctor`: show the work on the broker, once or live, and check the installation."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Annotated, Any, cast

from typer import Exit, Option

from runtime_core.base.text import duration, in_bytes, plain
from runtime_core.bus.namespace import server_info
from runtime_core.cli.connection import Broker, Commands, broker
from runtime_core.cli.output import (
    Columns,
    Json,
    Row,
    instance_of,
    print_json,
    print_rows,
    status_line,
    without_secrets,
)
from runtime_core.client.doctor import Changes, Finding, Installation, findings
from runtime_core.client.task_view import describe_wait, read_task
from runtime_core.errors import ConfigurationError
from runtime_core.state_manager.backlog import waiting_work

TENANTS_SHOWN = 20

lag_commands = Commands()
top_commands = Commands()
doctor_commands = Commands()


@lag_commands.verb("lag")
async def lag(as_json: Annotated[bool, Option("--json", help="Print JSON; ages are in milliseconds.")] = False) -> None:
    """Show how much work is waiting, and where.

    BACKLOG counts the entries of a stream that no consumer has read. PENDING counts those that a
    consumer is processing. The second table shows how far each group has read the record.

    \b
    Example:
      weft lag
    """
    async with broker() as opened:
        found = await waiting_work(opened.buses)
    if as_json:
        print_json(found)
    else:
        _print(found)


STREAM_COLUMNS: Columns = {
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
_LIMITS: Columns = {"LIMITS OF": "name", "SLOTS HELD": "held", "WAITING": "waiting"}


def _limits(found: dict[str, Any]) -> list[Row]:  # Any: JSON
    return [{"name": name, **counts} for name, counts in found["limits"].items()]


def _print(found: dict[str, Any]) -> None:  # Any: JSON
    print_rows(found["streams"], STREAM_COLUMNS)
    print()
    print_rows(found["record"], _RECORD)
    print()
    if found["waiting"]:
        most = sorted(found["waiting"].items(), key=lambda one: -one[1])[:TENANTS_SHOWN]
        rows = [{"tenant": tenant or "(no name)", "waiting": count} for tenant, count in most]
        print_rows(rows, {"TENANT": "tenant", "WAITING TASKS": "waiting"})
        print()
    if found["limits"]:
        print_rows(_limits(found), _LIMITS)
        print()
    print(f"mailboxes     {found['mailbox_events']} events in {found['mailboxes']} mailboxes")
    print(f"timers        {found['timers_due']} due, {found['timers']} in total")
    print(f"answers       {found['replies']} being relayed to a replyto")
    print(f"asks          {found['asks']} being relayed to instances in other partitions")
    print(f"dead letters  {found['dead_letters']}" + ("; see weft dead list" if found["dead_letters"] else ""))


# -- weft top ----------------------------------------------------------------------------------------------------

_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Use the terminal's alternate screen and hide the cursor; restore both at the end."""


@top_commands.verb("top", seconds=None)
async def top(
    every: Annotated[float, Option(metavar="SECONDS", min=0.2, max=3600, help="The time between two updates.")] = 2.0,
    tasks: Annotated[int, Option(metavar="N", min=0, max=1000, help="The number of open tasks to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Show the work in progress: rates, streams, waits for limits, and the oldest open tasks.

    Redraws on a terminal until Ctrl-C. Otherwise, and with --json, prints once.

    \b
    Examples:
      weft top
      weft top --every 10 --tasks 30
    """
    async with broker() as opened:
        found = await _look(opened, tasks)
        if as_json:
            print_json({name: value for name, value in found.items() if name != "at"})
            return
        if not sys.stdout.isatty():
            print("\n".join(_lines(found, None)))
            return
        print(_ENTER, end="")
        try:
            before = None
            while True:
                print(_CLEAR + _fitting(_lines(found, before)), end="", flush=True)
                await asyncio.sleep(every)
                before, found = found, await _look(opened, tasks)
        finally:
            print(_LEAVE, end="", flush=True)


async def _look(opened: Broker, tasks: int) -> Row:
    """Return one snapshot; `at` is the time of this process's clock, in seconds."""
    found: Row = {**await waiting_work(opened.buses), "at": time.monotonic(), "now": await opened.now_ms()}
    counts = {"open": 0, "started": 0}
    oldest: list[tuple[Any, str]] = []  # Any: a bus, whose order does not matter
    for bus in opened.buses:
        call, keys = bus.transport.call, bus.keys
        swept = cast(bytes | None, await call("HGET", keys.meta, "swept"))
        counts["started"] += int(swept or 0) + cast(int, await call("ZCARD", keys.index))
        counts["open"] += cast(int, await call("ZCARD", f"{keys.base}open"))
        if tasks:
            first = cast(list[bytes], await call("ZRANGE", f"{keys.base}open", 0, tasks - 1))
            oldest += [(bus, task.decode()) for task in first]
    views = [view for bus, task in oldest if (view := await read_task(bus, task)) is not None]
    views = sorted(views, key=lambda view: cast(float, view.get("created") or 0))[:tasks]
    info = await server_info(opened.transport, "memory")
    memory = {
        name: int(info[field]) for name, field in (("used", "used_memory"), ("max", "maxmemory")) if field in info
    }
    return {**found, **counts, "memory": memory, "tasks": without_secrets(views)}


def _lines(found: Row, before: Row | None) -> list[str]:
    """Return the lines to show; rates are those since the previous snapshot."""
    rates = ""
    if before is not None and (passed := found["at"] - before["at"]) > 0:
        started = found["started"] - before["started"]
        ended = started - (found["open"] - before["open"])
        rates = f"   {max(0, started) / passed:.1f} started/s, {max(0, ended) / passed:.1f} ended/s"
    memory, now = found["memory"], found["now"]
    used = in_bytes(memory["used"]) if "used" in memory else "unknown"
    used += f" of {in_bytes(memory['max'])}" if memory.get("max") else ""
    lines = [
        f"weft top   namespace {found['namespace']}   broker memory {used}",
        f"tasks      {found['open']} open, {found['started']} started{rates}",
        f"timers     {found['timers_due']} due, {found['timers']} in total",
        f"mailboxes  {found['mailbox_events']} events in {found['mailboxes']}",
        f"dead       {found['dead_letters']} letters" + ("; see weft dead list" if found["dead_letters"] else ""),
        "",
        *_table(found["streams"], STREAM_COLUMNS),
    ]
    if found["limits"]:
        lines += ["", *_table(_limits(found), _LIMITS)]
    if found["tasks"]:
        lines += ["", *_table(
            found["tasks"],
            {
                "OLDEST OPEN TASKS": "task_id",
                "AGENT": instance_of,
                "AGE": lambda view: duration(now - view["created"]) if view.get("created") else None,
                "STATUS": lambda view: status_line(view, now),
                "WAITS": lambda view: _wait_of(view, now),
            },
        )]  # fmt: skip
    return lines


def _wait_of(view: Row, now_ms: int) -> str:
    waits = view.get("waits_for") or []
    more = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
    return describe_wait(waits[0], now_ms) + more if waits else ""


def _table(rows: list[Row], columns: Any) -> list[str]:  # Any: as `print_rows` takes them
    with redirect_stdout(StringIO()) as out:
        print_rows(rows, columns)
    return out.getvalue().splitlines()


def _fitting(lines: list[str]) -> str:
    """Return the lines cut to the terminal."""
    width, height = shutil.get_terminal_size()
    return "\n".join(line[:width] for line in lines[: max(1, height - 1)])


# -- weft doctor -------------------------------------------------------------------------------------------------


@doctor_commands.verb("doctor", seconds=None)  # large namespaces take long
async def doctor(
    repair: Annotated[
        bool, Option("--repair", help="Release stuck work: lost work becomes dead letters, and instances continue.")
    ] = False,
    clean: Annotated[bool, Option("--clean", help="Remove the functions of other releases from the broker.")] = False,
    as_json: Json = False,
) -> None:
    """Check the installation.

    Checks the broker, the services and the trajectory store, and prints a remedy for each problem. The exit status is
    1 if a check fails.

    \b
    Example:
      weft doctor
    """
    found: list[Finding] = []
    async for finding in _findings(Changes(repair, clean)):
        found.append(finding)
        if not as_json:
            _print_finding(finding)
    failed = [finding for finding in found if not finding.ok]
    if as_json:
        print_json({"ok": not failed, "checks": [finding.to_json() for finding in found]})
    else:
        print(f"\n{len(failed)} of {len(found)} checks failed" if failed else "\nall checks passed")
    if failed:
        raise Exit(1)


async def _findings(changes: Changes) -> AsyncIterator[Finding]:
    try:
        async with broker(unchecked=True) as opened:
            installation = Installation(opened.settings, opened.url, opened.transport, opened.buses)
            async for finding in findings(installation, changes):
                yield finding
    except ConfigurationError as error:
        yield Finding("server", False, str(error))


def _print_finding(finding: Finding) -> None:
    print(f"{'✓' if finding.ok else '✗'} {finding.check}: {plain(finding.message)}", flush=True)
    if finding.remedy:
        print(f"    → {plain(finding.remedy)}", flush=True)
