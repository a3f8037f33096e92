"""`weft task`: tasks that were submitted, by whomever."""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from runtime_core.command.output import error_line, moment, plain, preview, print_json, print_table

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.command.connection import Broker
    from runtime_core.trajectory.recorded import TaskTrajectory
    from runtime_core.trajectory.store import TrajectoryStore

LOOKED_AT_MAX = 20_000
"""Tasks on the broker that a list with filters looks through."""
RECORDER_SECONDS = 5.0
"""How long a deletion waits for steps that are still on their way to the trajectory store."""


class Status(enum.StrEnum):
    """The states of a task."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    WAITING = "waiting"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The task's id.")]


def group() -> typer.Typer:
    app = typer.Typer(help="List tasks, look, cancel, answer, delete.", no_args_is_help=True, rich_markup_mode=None)
    app.command("list")(list_tasks)
    app.command("show")(show)
    app.command("cancel")(cancel)
    app.command("signal")(signal)
    app.command("delete")(delete)
    return app


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
    from runtime_core.command.connection import run

    run(_list(status.value if status else "", agent, limit, as_json))


def show(task_id: Id, as_json: Json = False) -> None:
    """Show all that is known of a task.

    What it waits for, its questions and how to answer them, its error, and its runs with their times.

    \b
    Example:
      weft task show t-1
    """
    from runtime_core.command.connection import run

    run(_show(task_id, as_json))


def cancel(
    task_id: Id,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Kept as the task's error.")
    ] = "cancelled by its user",
    as_json: Json = False,
) -> None:
    """Cancel a task.

    It ends now; what it has running hears of it within a second or so.

    \b
    Example:
      weft task cancel t-1 --reason "asked the wrong question"
    """
    from runtime_core.command.connection import run

    run(_cancel(task_id, reason, as_json))


def signal(
    task_id: Id,
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="Which question: see `weft task show`.")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="The answer: JSON (true, 3, {...}) where it is that, else text.")
    ],
    as_json: Json = False,
) -> None:
    """Answer a question of a task.

    Of several answers the first one counts.

    \b
    Example:
      weft task signal t-1 r:2 true
    """
    from runtime_core.command.connection import run

    run(_signal(task_id, request_id, value, as_json))


def delete(
    task_id: Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Erase an ended task for ever.

    From the broker, with its trajectory, output and dead letters. Asks first where it is typed by hand.

    \b
    Example:
      weft task delete t-1 --yes
    """
    from runtime_core.command.connection import run

    if not yes and sys.stdin.isatty():
        typer.confirm(f"Erase task {task_id} with its trajectory, output and dead letters?", abort=True, err=True)
    run(_delete(task_id, as_json))


# -- list ----------------------------------------------------------------------------------------------------------


async def _list(status: str, agent: str, limit: int, as_json: bool) -> None:
    from runtime_core.command.connection import broker, trajectories
    from runtime_core.told import ENDED

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


# -- show ----------------------------------------------------------------------------------------------------------


async def _show(task_id: str, as_json: bool) -> None:
    from runtime_core.command.connection import broker, trajectories
    from runtime_core.command.task_view import read_task
    from runtime_core.errors import InvalidInput
    from runtime_core.trajectory.tree import to_tree

    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        view = await read_task(bus, task_id)
        async with trajectories(opened.settings) as store:
            recorded = await store.task(opened.settings.namespace, task_id) if store is not None else None
        now = await opened.now_ms()
    if view is None and recorded is None:
        raise InvalidInput("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are")
    if len(opened.buses) > 1 and view is not None and "dead_letters" in view:
        view["dead_letters"] = [f"{bus.keys.partition}/{entry}" for entry in view["dead_letters"]]
    if view is None and recorded is not None:
        view = _from_store(recorded)
    assert view is not None
    if as_json:
        print_json({**view, "trajectory": to_tree(recorded) if recorded is not None else None})
        return
    _print_task(view, now)
    _print_runs(recorded, view)


def _from_store(recorded: TaskTrajectory) -> dict[str, Any]:  # Any: JSON
    """A task that the broker has forgotten."""
    from runtime_core.trajectory.tree import decoded

    end = recorded.end
    first = next((step for step in recorded.steps if step.run == "r" and not step.step), None)
    view: dict[str, Any] = {"task_id": recorded.task, "status": end.status if end else "unknown", "agent": ""}
    if end is not None:
        view |= {"agent": end.agent, "created": end.created, "ended": end.ended, "steps": end.steps}
        if end.session:
            view["session_id"] = end.session
        if end.error is not None:
            view["error"] = {"type": end.error.type, "message": end.error.message}
    if first is not None:
        if first.input:
            view["input"] = decoded(first.input)
        if first.output:
            view["output"] = decoded(first.output)
    return view


def _print_task(view: dict[str, Any], now_ms: int) -> None:  # Any: JSON
    from runtime_core.command.task_view import describe_wait
    from runtime_core.trajectory.tree import duration

    created, ended = view.get("created"), view.get("ended")
    lines = [
        ("task", view["task_id"]),
        ("status", view["status"]),
        ("agent", view["agent"] + (f"/{view['key']}" if view.get("key") else "")),
        ("session", view.get("session_id", "")),
        ("created", f"{moment(created)} ({duration(now_ms - created)} ago)" if created else ""),
        ("ended", f"{moment(ended)} (after {duration(ended - created)})" if ended and created else ""),
        ("limit", f"{view['max_steps']} steps" if "max_steps" in view else ""),
        ("limit", f"until {moment(view['time_limit_at'])}" if "time_limit_at" in view else ""),
        ("input", preview(view["input"], 500) if "input" in view else ""),
        ("output", preview(view["output"], 500) if "output" in view else ""),
        ("error", error_line(view["error"]) if view.get("error") else ""),
    ]
    for name, text in lines:
        if text:
            print(f"{name:<9}{plain(str(text))}")
    for wait in view.get("waits_for", ()):
        if wait["kind"] == "human":
            continue  # the question stands below
        errors = wait.get("errors") or [None]
        last = f"; the last error: {error_line(errors[-1])}" if errors[-1] else ""
        print(f"waits    {plain(describe_wait(wait, now_ms))}{last}")
    for question in view.get("questions", ()):
        data = f"  {preview(question['data'], 300)}" if question.get("data") is not None else ""
        print(f"question {plain(str(question['prompt']))}{data}")
        if "deadline" in question:
            otherwise = f", then it is {preview(question['default'])}" if "default" in question else ""
            print(f"         until {moment(question['deadline'])}{otherwise}")
        print(f"         answer it: weft task signal {view['task_id']} {question['request_id']} VALUE")
    for letter in view.get("dead_letters", ()):
        print(f"dead     {letter}  look: weft dead show {letter}")


def _print_runs(recorded: TaskTrajectory | None, view: dict[str, Any]) -> None:  # Any: JSON
    from runtime_core.trajectory.tree import render

    print()
    if recorded is None:
        ended = "ended" in view
        print(
            "trajectory: nothing is recorded of this task: is the trajectory-recorder running?"
            if ended
            else "trajectory: nothing is recorded yet; steps are when a turn ends or a call is answered"
        )
        return
    if recorded.end is not None and "ended" not in view:
        print("opened again since; what was recorded before:")
    # The task's own line stands above already.
    print("\n".join(render(recorded).splitlines()[1:]))


# -- cancel, signal, delete ----------------------------------------------------------------------------------------


async def _cancel(task_id: str, reason: str, as_json: bool) -> None:
    from runtime_core.command.connection import broker
    from runtime_core.errors import InvalidInput

    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        # Asked first: the broker would remember the id, and refuse the first submit that uses it.
        if not await bus.transport.call("EXISTS", bus.keys.task(task_id)):
            raise InvalidInput("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are")
        answer = await bus.cancel(task_id, reason)
    if answer[0] == "unknown":
        raise InvalidInput("task_id", f"no task {task_id!r} is known (any more)")
    if answer[0] == "ended" and answer[1] != "cancelled":
        raise InvalidInput("task_id", f"the task {task_id!r} has ended already ({answer[1]})")
    if as_json:
        print_json({"task_id": task_id, "status": "cancelled"})
    else:
        print(f"task {task_id} is cancelled")


async def _signal(task_id: str, request_id: str, text: str, as_json: bool) -> None:
    from runtime_core import codec
    from runtime_core.command.connection import broker
    from runtime_core.command.values import typed
    from runtime_core.errors import InvalidInput

    value = typed(text, words=True)
    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        answer = await bus.signal(task_id, request_id, codec.encode(value))
    problems = {
        "unknown": ("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are"),
        "ended": ("task_id", f"the task {task_id!r} has ended ({answer[-1]})"),
        "answered": ("request_id", f"{request_id!r} was answered already, by somebody or by its deadline"),
        "no_request": (
            "request_id",
            f"the task has no open question {request_id!r}; `weft task show {task_id}` shows what it asks",
        ),
    }
    if answer[0] in problems:
        raise InvalidInput(*problems[answer[0]])
    if as_json:
        print_json({"task_id": task_id, "request_id": request_id, "value": value})
    else:
        print(f"answered {request_id} of task {task_id} with {preview(value)}")


async def _delete(task_id: str, as_json: bool) -> None:
    from runtime_core.command.connection import broker, trajectories
    from runtime_core.dead_letters import DeadLetters, Selection
    from runtime_core.errors import InvalidInput
    from runtime_core.told import ENDED

    async with broker() as opened, trajectories(opened.settings) as store:
        bus = await opened.admission.find(task_id)
        status = cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(task_id), "status"))
        if status is not None and status.decode() not in ENDED:
            raise InvalidInput("task_id", f"the task is {status.decode()}: end it first, weft task cancel {task_id}")
        await _until_recorded(bus)
        found = await bus.erase(task_id)
        if found not in ("OK", "unknown"):  # it was opened again meanwhile
            raise InvalidInput("task_id", f"the task is {found}: end it first, weft task cancel {task_id}")
        letters = DeadLetters(opened.buses)
        dropped = 0
        async for letter in letters.all(Selection(task=task_id)):
            await letters.drop(letter.letter_id)
            dropped += 1
        rows = await store.delete(opened.settings.namespace, task_id) if store is not None else 0
        await _forget_place(opened, task_id)
    if found == "unknown" and not dropped and not rows:
        raise InvalidInput("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are")
    if as_json:
        print_json({"task_id": task_id, "deleted": True, "trajectory_rows": rows})
    else:
        print(f"task {task_id} is deleted, with {rows} rows of its trajectory")


async def _until_recorded(bus: EventBus) -> None:
    """Wait until all that is on the record now is in the store: what comes there later would stay there.

    Raises WeftError where the recorder does not get that far.
    """
    import asyncio
    import time

    from runtime_core.bus.delivery import pairs
    from runtime_core.bus.keys import TRAJECTORY_RECORDER
    from runtime_core.command.backlog import groups_of
    from runtime_core.errors import WeftError

    last = pairs(await bus.transport.call("XREVRANGE", bus.keys.record, "+", "-", "COUNT", 1))
    if not last:
        return
    wanted = _entry(last[0][0].decode())
    end_at = time.monotonic() + RECORDER_SECONDS
    while True:
        for group in await groups_of(bus, bus.keys.record):
            if group.name == TRAJECTORY_RECORDER and _entry(group.position) >= wanted:
                return
        if time.monotonic() > end_at:
            raise WeftError(
                "the trajectory-recorder has not recorded all steps yet, and would write those of this task later: "
                "nothing was deleted; is it running? `weft lag` shows how far it is"
            )
        await asyncio.sleep(0.05)


def _entry(entry: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


async def _forget_place(opened: Broker, task_id: str) -> None:
    """In which partition a task was that is not where its id says."""
    from runtime_core.bus.keys import partition_of_task

    if len(opened.buses) > 1:
        home = opened.buses[partition_of_task(task_id, len(opened.buses))]
        await home.transport.call("HDEL", home.keys.places, task_id)
