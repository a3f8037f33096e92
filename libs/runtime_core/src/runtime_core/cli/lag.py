"""`weft lag`: how far consumers are behind."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runtime_core.cli.output import print_json, print_table

TENANTS_SHOWN = 20


def register(app: typer.Typer) -> None:
    app.command("lag")(lag)


def lag(as_json: Annotated[bool, typer.Option("--json", help="Print JSON; ages are milliseconds.")] = False) -> None:
    """Show how much work waits, and where.

    For each stream who reads it, and how far the record is. BACKLOG is what nobody
    has taken yet, PENDING what a consumer has in hand.

    \b
    Example:
      weft lag
    """
    from runtime_core.cli.connection import run

    run(_lag(as_json))


async def _lag(as_json: bool) -> None:
    from runtime_core.cli.backlog import measure
    from runtime_core.cli.connection import broker

    async with broker() as opened:
        found = await measure(opened)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:  # Any: JSON
    from runtime_core.trajectory.tree import duration

    print_table(
        ("STREAM", "GROUP", "BACKLOG", "PENDING", "OLDEST", "CONSUMERS"),
        [
            (
                _named(row),
                row["group"] or "none yet",
                str(row["backlog"]),
                str(row["pending"]),
                "-" if row["oldest_pending_ms"] is None else duration(row["oldest_pending_ms"]),
                str(row["consumers"]),
            )
            for row in found["streams"]
        ],
    )
    print()
    print_table(
        ("RECORD", "GROUP", "POSITION", "BEHIND", "ENTRIES"),
        [
            (str(row["partition"]), row["group"], row["position"], duration(row["behind_ms"]), str(row["length"]))
            for row in found["record"]
        ],
    )
    print()
    if found["waiting"]:
        most = sorted(found["waiting"].items(), key=lambda one: -one[1])
        print_table(
            ("TENANT", "TASKS THAT WAIT FOR THEIR TURNS"),
            [(tenant or "(no name)", str(count)) for tenant, count in most[:TENANTS_SHOWN]],
        )
        print()
    print(f"mailboxes     {found['mailbox_events']} events wait in {found['mailboxes']} mailboxes")
    print(f"timers        {found['timers_due']} due, {found['timers']} in all")
    print(f"answers       {found['replies']} on their way to a replyto")
    print(f"asks          {found['asks']} on their way to instances in other partitions")
    print(f"dead letters  {found['dead_letters']}" + ("; look: weft dead list" if found["dead_letters"] else ""))


def _named(row: dict[str, Any]) -> str:  # Any: JSON
    return row["stream"] if row["partition"] is None else f"{{{row['partition']}}}:{row['stream']}"
