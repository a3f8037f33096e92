"""`weft task list`: tasks on the broker, and those that only the trajectory store still has."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from runtime_core.cli.output import Json, error_line, moment, print_json, print_table
from runtime_core.cli.task.arguments import LOOKED_AT_MAX

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.cli.connection import Broker
    from runtime_core.trajectory.store import TrajectoryStore


class Status(enum.StrEnum):
    """The states of a task."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


def list_tasks(
    status: Annotated[Status | None, typer.Option("--status", help="Only tasks in this state.")] = None,
    agent: Annotated[str, typer.Option("--agent", metavar="NAME", help="Only tasks of this agent.")] = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="How many to list.")] = 20,
    as_json: Json = False,
) -> None:
    """List tasks, the newest first.

    Those on the broker, and those that only the trajectory store still has.

    \b
    Example:
      weft task list --status failed --limit 5
    """
    from runtime_core.cli.connection import run

    run(_list(status.value if status else "", agent, limit, as_json))


async def _list(status: str, agent: str, limit: int, as_json: bool) -> None:
    from runtime_core.cli.connection import broker, trajectories
    from runtime_core.wire.results import ENDED

    rows: dict[str, dict[str, Any]] = {}  # Any: JSON
    async with broker() as opened:
        for bus in opened.buses:
            for row in await _on_broker(bus, status, agent, limit):
                rows[row["task_id"]] = row
        if not status or status in ENDED:
            async with trajectories(opened.settings) as store:
                for row in await _in_store(store, opened.settings.namespace, status, agent, limit):
                    known = rows.get(row["task_id"])
                    if known is None:
                        if not status or await _is_still(opened, row["task_id"], status):
                            rows[row["task_id"]] = row
                    elif known["status"] == row["status"]:  # else it was opened again since
                        rows[row["task_id"]] = {**row, **known}
    newest = sorted(rows.values(), key=lambda row: cast(float, row["created"]), reverse=True)[:limit]
    if as_json:
        print_json(newest)
    elif not newest:
        print("no tasks" + (" like that" if status or agent else "; submit one: weft submit AGENT INPUT"))
    else:
        _print_tasks(newest)


def _print_tasks(rows: list[dict[str, Any]]) -> None:  # Any: JSON
    from runtime_core.trajectory.tree import duration

    print_table(
        ("TASK", "STATUS", "AGENT", "CREATED", "TOOK", "ERROR"),
        [
            (
                row["task_id"],
                row["status"],
                row["agent"] + (f"/{row['key']}" if row.get("key") else ""),
                moment(row["created"]),
                duration(row["ended"] - row["created"]) if row.get("ended") else "-",
                error_line(row["error"]) if row.get("error") else "",
            )
            for row in rows
        ],
    )


async def _on_broker(bus: EventBus, status: str, agent: str, limit: int) -> list[dict[str, Any]]:  # Any: JSON
    """Tasks by the partition's index, the newest first."""
    call, keys = bus.transport.call, bus.keys
    page = limit if not status and not agent else 500
    found: list[dict[str, Any]] = []
    for start in range(0, LOOKED_AT_MAX, page):
        tasks = cast(list[bytes], await call("ZREVRANGE", keys.index, start, start + page - 1))
        calls = [call("HMGET", keys.task(task.decode()), "status", "h", "ended", "steps") for task in tasks]
        for task, asked in zip(tasks, calls, strict=True):
            state, header, ended, steps = cast(list[bytes | None], await asked)
            if state is None:
                continue  # past its retention time
            head = (header or b"").decode().split("\n") + [""] * 10
            row: dict[str, Any] = {
                "task_id": task.decode(),
                "status": state.decode(),
                "agent": head[1],
                "created": int(head[4] or 0),
            }
            extra = {"key": head[2], "session_id": head[9], "ended": int(ended or 0), "steps": int(steps or 0)}
            row |= {name: value for name, value in extra.items() if value}
            if (not status or row["status"] == status) and (not agent or row["agent"] == agent):
                found.append(row)
        if len(tasks) < page or len(found) >= limit:
            break
    return found[:limit]


async def _is_still(opened: Broker, task_id: str, status: str) -> bool:
    """Whether the broker, where it still knows a recorded task, says the same of it: it may have been opened again."""
    bus = await opened.admission.find(task_id)
    found = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(task_id), "status"))
    return found is None or found.decode() == status


async def _in_store(
    store: TrajectoryStore | None, namespace: str, status: str, agent: str, limit: int
) -> list[dict[str, Any]]:  # Any: JSON
    if store is None:
        return []
    rows = []
    for end in await store.tasks(namespace, status=status or None, agent=agent or None, limit=limit):
        row: dict[str, Any] = {
            "task_id": end.task,
            "status": end.status,
            "agent": end.agent,
            "created": end.created,
            "ended": end.ended,
            "steps": end.steps,
        }
        if end.session:
            row["session_id"] = end.session
        if end.error is not None:
            row["error"] = {"type": end.error.type, "message": end.error.message}
        rows.append(row)
    return rows
