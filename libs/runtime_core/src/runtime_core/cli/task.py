"""`weft task`: lists, shows, forks, cancels, answers and deletes tasks."""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, cast

from typer import Argument, BadParameter, Exit, Option, confirm

from runtime_core.base.text import counted, duration, own_frames, plain
from runtime_core.bus.connection import position
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import TRAJECTORY_RECORDER
from runtime_core.bus.partition import repeat_after_reconnect
from runtime_core.bus.tasks import forget_place
from runtime_core.cli.connection import Broker, Commands, broker, broker_url, read_settings, trajectories
from runtime_core.cli.output import (
    Json,
    Row,
    answers_to,
    changes_of,
    error_line,
    instance_of,
    moment,
    past_moment,
    preview,
    print_json,
    print_result,
    print_rows,
    print_task,
    progress,
    shown,
    without_secrets,
)
from runtime_core.cli.submit import ADMISSION_SECONDS, MaxSteps, Timeout, Wait, follow
from runtime_core.client.client import Client
from runtime_core.client.doctor import parked_runs
from runtime_core.client.task import check_answered, check_sent, open_questions
from runtime_core.client.task_view import (
    EVERY_TASK,
    MAX_SCANNED,
    TaskFilter,
    list_tasks,
    read_task,
    task_in_store,
    tasks_in_store,
)
from runtime_core.errors import InvalidInput, WeftError
from runtime_core.settings import Settings, without_password
from runtime_core.state_manager.admission import answer_question
from runtime_core.state_manager.dead_letters import DeadLetters, LetterFilter
from runtime_core.state_manager.measures import groups_of
from runtime_core.wire import codec
from runtime_core.wire.blobs import folder_of, open_blobs
from runtime_core.wire.commands import SubmitOptions
from runtime_core.wire.ids import checked_key, checked_message, is_task_id
from runtime_core.wire.step import ENDED, Status

if TYPE_CHECKING:
    from runtime_core.trajectory.reading import TaskTrajectory

WATCH_SECONDS = 0.5
RECORDER_SECONDS = 5.0
"""How long a deletion waits for the trajectory-recorder, in seconds."""
app = Commands("List, show, fork, cancel, answer and delete tasks.")

Written = TypeVar("Written")
Id = Annotated[str, Argument(metavar="ID", help="The task's id.")]
Limit = Annotated[int, Option(metavar="N", min=1, max=10_000, help="List at most N items.")]
AnyStatus = Literal["accepted", "running", "waiting", "completed", "failed", "cancelled"]
OfStatus = Annotated[AnyStatus | None, Option("--status", help="Only tasks with this status.")]
OfAgent = Annotated[str, Option("--agent", metavar="NAME", help="Only tasks of this agent.")]
OfSession = Annotated[str, Option("--session", metavar="ID", help="Only tasks of this session.")]
OfKey = Annotated[str, Option("--key", metavar="KEY", help="Only tasks of the agent's instance with this key.")]
OfVersion = Annotated[
    str, Option("--version", metavar="V", help="Only open tasks that this version of the app, App(version=…), began.")
]
Since = Annotated[
    str, Option("--since", metavar="TIME", help="Only tasks created since: 7d, 12h, or a time as in 2026-11-01T08:00Z.")
]
Until = Annotated[str, Option("--until", metavar="TIME", help="Only tasks created before: a time, as with --since.")]


# -- listing ----------------------------------------------------------------------------------------------------


@app.verb("list")
async def list_command(
    status: OfStatus = None,
    agent: OfAgent = "",
    session: OfSession = "",
    key: OfKey = "",
    version: OfVersion = "",
    since: Since = "",
    until: Until = "",
    limit: Limit = 20,
    as_json: Json = False,
) -> None:
    """List tasks, the newest first.

    Includes tasks that only the trajectory store still has, except with --key and --version.

    \b
    Examples:
      weft task list --status failed --limit 5
      weft task list --session s-1 --since 2h
      weft task list --version 2026.1
    """
    wanted = replace(_filter(status, agent, session, key, since, until), version=version)
    async with broker() as opened:
        page = await list_tasks(opened.buses, wanted, limit)
        rows = {row["task_id"]: row for row in page.tasks}
        if not status or status in ENDED:
            async with trajectories(opened.settings) as store:
                namespace = opened.settings.namespace
                ended = await tasks_in_store(store, namespace, wanted, limit) if store is not None else []
            for row in ended:
                known = rows.get(row["task_id"])
                if known is None:
                    if not status or await _is_still(opened, row["task_id"], status):
                        rows[row["task_id"]] = row
                elif known["status"] == row["status"]:  # else it was reopened since
                    rows[row["task_id"]] = {**row, **known}
    print_rows(
        sorted(rows.values(), key=lambda row: cast(float, row["created"]), reverse=True)[:limit],
        {
            "TASK": "task_id",
            "STATUS": lambda row: "parked" if row.get("parked") else row["status"],
            "AGENT": instance_of,
            "CREATED": lambda row: moment(row["created"]),
            "TOOK": lambda row: duration(row["ended"] - row["created"]) if row.get("ended") else None,
            "ERROR": lambda row: error_line(row.get("error")),
        },
        as_json,
        empty="no matching tasks" if wanted != EVERY_TASK else "no tasks; submit one: weft submit AGENT INPUT",
    )


def _filter(status: AnyStatus | None, agent: str, session: str, key: str, since: str, until: str) -> TaskFilter:
    after, before = past_moment(since, "--since"), past_moment(until, "--until")
    return TaskFilter(
        status=status or "",
        agent=agent,
        session=session,
        key=key,
        since_ms=after.timestamp() * 1000 if after else 0.0,
        until_ms=before.timestamp() * 1000 if before else math.inf,
    )


async def _is_still(opened: Broker, task_id: str, status: str) -> bool:
    """Return whether the broker has the same status or has deleted the task: a recorded task may have been reopened."""
    found = await _status_of(await opened.admission.find(task_id), task_id)
    return found in ("", status)


async def _status_of(bus: EventBus, task_id: str) -> str:
    """Return the task's status; empty if the broker does not know it."""
    return (cast(bytes | None, await bus.transport.call("HGET", bus.keys.task(task_id), "status")) or b"").decode()


def _unknown(task_id: str) -> InvalidInput:
    return InvalidInput("task_id", f"there is no task {task_id!r}; see `weft task list`")


# -- details ----------------------------------------------------------------------------------------------------


@app.verb("show")
async def show(task_id: Id, as_json: Json = False) -> None:
    """Show a task.

    Includes what it is waiting for, its questions with the commands that answer them, its error, and its runs.

    \b
    Example:
      weft task show t-1
    """
    from runtime_core.trajectory.tree import to_tree

    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        view = await read_task(bus, task_id)
        async with trajectories(opened.settings) as store:
            recorded = await store.task(opened.settings.namespace, task_id) if store is not None else None
            if view is not None and view["status"] not in ENDED and "dead_letters" in view:
                view["parked"] = await parked_runs(opened.buses, opened.settings.namespace, task_id, store)
        now = await opened.now_ms()
    if view is None:
        if recorded is None:
            raise _unknown(task_id)
        view = task_in_store(recorded)
    if len(opened.buses) > 1 and "dead_letters" in view:
        view["dead_letters"] = [f"{bus.keys.partition}/{entry}" for entry in view["dead_letters"]]
    if recorded is not None and recorded.fork is not None:
        view["forked_from"] = {"task": recorded.fork.task, "step": recorded.fork.step}
    # The broker stores inputs unredacted; the record is already redacted.
    view = without_secrets(view)
    if as_json:
        print_json({**view, "trajectory": to_tree(recorded) if recorded is not None else None})
        return
    print_task(view, now)
    _print_runs(recorded, view, store is not None)


def _print_runs(recorded: TaskTrajectory | None, view: Row, has_store: bool) -> None:
    from runtime_core.trajectory.tree import last_failure, render

    print()
    if recorded is not None:
        if recorded.end is not None and "ended" not in view:
            print("reopened since; recorded before:")
        # The task's own line is already printed.
        print("\n".join(render(recorded).splitlines()[1:]))
        if (failure := last_failure(recorded)) is not None:
            step, error = failure
            frames = own_frames(error.traceback) or error.traceback
            print(f"\nthe last traceback, of {plain(step.kind)} {plain(step.name)}:\n{shown(frames.rstrip())}")
    elif not has_store:
        print(
            f"trajectory: there is no store at {without_password(read_settings().trajectory_url)}. Run this command "
            "where the trajectory-recorder runs (kubectl -n weft exec trajectory-recorder-0 -- weft task show …), or "
            "set WEFT_TRAJECTORY_URL to its database"
        )
    elif "ended" in view:
        print("trajectory: no steps of this task are recorded; check that the trajectory-recorder is running")
    else:
        print("trajectory: nothing is recorded yet; steps are recorded when a turn ends or a call is answered")


@app.verb("watch", seconds=None)
async def watch(task_id: Id) -> None:
    """Follow a task until it ends, and show each change.

    On a terminal, redraws the view of `weft task show`; otherwise prints a line for each change. The exit status is 1
    if the task does not complete.

    \b
    Example:
      weft task watch t-1
    """
    last: list[str] = []
    async with broker() as opened, trajectories(opened.settings) as store:
        bus = await opened.admission.find(task_id)
        while True:
            view = await read_task(bus, task_id)
            if view is None:
                raise _unknown(task_id)
            view, now = without_secrets(view), await opened.now_ms()
            if sys.stdout.isatty():
                recorded = await store.task(opened.settings.namespace, task_id) if store is not None else None
                print("\x1b[H\x1b[2J", end="")
                print_task(view, now)
                _print_runs(recorded, view, store is not None)
            elif (lines := changes_of(view)) != last:
                last = lines
                print(f"{moment(now)}  {'; '.join(lines)}", flush=True)
            if view["status"] in ENDED:
                break
            await asyncio.sleep(WATCH_SECONDS)
    if view["status"] != Status.COMPLETED:
        raise Exit(1)


# -- forking ----------------------------------------------------------------------------------------------------


@app.verb("fork", seconds=None)
async def fork(
    task_id: Annotated[str, Argument(metavar="ID", help="The task to fork. It may be running or ended.")],
    input: Annotated[
        str | None,
        Argument(
            metavar="INPUT",
            help="With --at the replacement for that step's result, else the new task's input: JSON, or else text.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        Option(
            metavar="STEP",
            help="Copy the results before this step, such as 3.0.1, or 3/2 in the run of step 3.",
        ),
    ] = None,
    new_id: Annotated[str | None, Option("--task-id", metavar="ID", help="The new task's id.")] = None,
    session: Annotated[
        str | None, Option(metavar="ID", help="The new task's session. Default: that of the original.")
    ] = None,
    max_steps: MaxSteps = None,
    timeout: Timeout = None,
    wait: Wait = True,
    as_json: Json = False,
) -> None:
    """Start a new task from a step of another one.

    The new task reuses the results before the step instead of running those steps again.

    \b
    Examples:
      weft task fork t-1 --at 3
      weft task fork t-1 --at 2 '{"title": "a better one"}'
      weft task fork t-1 "another topic"
    """
    changed: Row = {} if input is None else {"input": codec.typed(input, field="input")}
    settings = read_settings()
    async with Client.connect(broker_url(settings), namespace=settings.namespace) as client:
        async with trajectories(settings) as store:
            task = await client.fork(
                task_id,
                **changed,
                at=at,
                task_id=new_id,
                session_id=session,
                options=SubmitOptions(max_steps=max_steps, timeout_seconds=timeout),
                store=store,
                stream=wait,
                timeout=ADMISSION_SECONDS,
            )
        await follow(task, wait, False, as_json)


# -- questions ---------------------------------------------------------------------------------------------------


@app.verb("questions")
async def questions(limit: Limit = 20, as_json: Json = False) -> None:
    """List the open questions that tasks ask humans.

    The oldest come first, each with its deadline and the commands that answer it.

    \b
    Example:
      weft task questions
    """
    found: list[Row] = []
    async with broker() as opened:
        for bus in opened.buses:
            found += (await open_questions([bus], limit))[0]
        now = await opened.now_ms()
    found = sorted(found, key=lambda question: cast(float, question["created"]))[:limit]
    if as_json:
        print_json(found)
    elif not found:
        print("no open questions")
    else:
        for question in found:
            _print_question(question, now)


def _print_question(question: Row, now_ms: int) -> None:
    print(f"{question['task_id']} ({plain(question['agent'])}): {plain(str(question['prompt']))}")
    if question.get("data") is not None:
        print(f"  {preview(question['data'], 300)}")
    if "schema" in question:
        print(f"  the answer has the schema {preview(question['schema'], 600)}")
    if "deadline" in question:
        left = duration(max(0, question["deadline"] - now_ms))
        otherwise = f"the answer is {preview(question['default'])}" if "default" in question else "it fails"
        print(f"  until {moment(question['deadline'])} (in {left}), then {otherwise}")
    for command in answers_to(question):
        print(f"  {command}")


@app.verb("signal")
async def signal(
    task_id: Id,
    request_id: Annotated[str, Argument(metavar="REQUEST_ID", help="The question's id; see `weft task show`.")],
    value: Annotated[str, Argument(metavar="VALUE", help="The answer: JSON (true, 3, {...}), or else text.")],
    as_json: Json = False,
) -> None:
    """Answer a task's question.

    Only the first answer counts.

    \b
    Example:
      weft task signal t-1 r:2-9b1deb4d3b7d4bad true
    """
    given = codec.typed(value, words=True, field="value")
    event = f"weft task signal\n{secrets.token_hex(8)}"
    data = codec.encode(given)
    answer = await _write(task_id, lambda bus: answer_question(bus, task_id, request_id, data, event))
    check_answered(answer, task_id, request_id)
    print_result(
        {"task_id": task_id, "request_id": request_id, "value": given},
        f"answered {request_id} of task {task_id} with {preview(given)}",
        as_json,
    )


@app.verb("send")
async def send(
    task_id: Id,
    name: Annotated[str, Argument(metavar="NAME", help="The name that the agent gives to `ctx.receive`.")],
    value: Annotated[str, Argument(metavar="VALUE", help="The message: JSON (true, 3, {...}), or else text.")],
    id: Annotated[str, Option(metavar="ID", help="A second message with the same id is dropped.")] = "",
    as_json: Json = False,
) -> None:
    """Send a message to a running task.

    The task receives it with `ctx.receive`. Until then it is kept.

    \b
    Example:
      weft task send t-1 budget 20 --id budget-1
    """
    given, name = codec.typed(value, words=True, field="value"), checked_message("name", name)
    event = f"weft task send\n{checked_key('id', id) or secrets.token_hex(8)}"
    answer = await _write(task_id, lambda bus: bus.send_message(task_id, name, codec.encode(given), event))
    check_sent(answer, task_id, name)
    print_result(
        {"task_id": task_id, "name": name, "value": given}, f"sent {name} to task {task_id}: {preview(given)}", as_json
    )


async def _write(task_id: str, write: Callable[[EventBus], Awaitable[Written]]) -> Written:
    """Write to a task's partition, again if the connection breaks: the event's id makes a repeat harmless."""
    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        return await repeat_after_reconnect(lambda: write(bus))


# -- ending ------------------------------------------------------------------------------------------------------


@app.verb("cancel", seconds=None)
async def cancel(
    task_ids: Annotated[list[str] | None, Argument(metavar="ID", help="The tasks' ids.")] = None,
    every: Annotated[bool, Option("--all", help="All open tasks that the filters select.")] = False,
    status: Annotated[
        Literal["accepted", "running", "waiting"] | None, Option(help="With --all: only tasks with this status.")
    ] = None,
    agent: OfAgent = "",
    session: OfSession = "",
    key: OfKey = "",
    since: Since = "",
    until: Until = "",
    reason: Annotated[str, Option(metavar="TEXT", help="Stored as the task's error.")] = "cancelled by its user",
    yes: Annotated[bool, Option("--yes", "-y", help="With --all: do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Cancel tasks.

    A task ends immediately; its running code is cancelled within about a second. With several ids, the first one that
    cannot be cancelled ends the command.

    \b
    Examples:
      weft task cancel t-1 --reason "asked the wrong question"
      weft task cancel --all --agent writer --since 1h
    """
    wanted = _filter(status, agent, session, key, since, until)
    if bool(task_ids) == every or (not every and wanted != EVERY_TASK):
        raise BadParameter("give either ids, or --all with any filters")
    async with broker() as opened:
        if not every:
            cancelled = [await _cancel_known(opened, task_id, reason) for task_id in task_ids or ()]
        else:
            cancelled = await _cancel_all(opened, wanted, reason, yes or not sys.stdin.isatty())
    rows = [{"task_id": task_id, "status": Status.CANCELLED} for task_id in cancelled]
    if as_json:
        print_json(rows[0] if len(task_ids or ()) == 1 else rows)
    elif every:
        print(f"cancelled {counted(len(rows), 'task')}")
    else:
        for row in rows:
            print(f"cancelled task {row['task_id']}")


async def _cancel_known(opened: Broker, task_id: str, reason: str) -> str:
    """Cancel a task and return its id. Raises InvalidInput if it is unknown or has ended otherwise."""
    bus = await opened.admission.find(task_id)
    # Check first: after a cancel of an unknown id, the broker would reject the next submit with that id.
    if not await _status_of(bus, task_id):
        raise _unknown(task_id)
    answer = await repeat_after_reconnect(lambda: bus.cancel(task_id, reason))
    if answer[0] == "unknown":
        raise _unknown(task_id)
    if answer[0] == "ended" and answer[1] != "cancelled":
        raise InvalidInput("task_id", f"task {task_id!r} has already ended ({answer[1]})")
    return task_id


async def _cancel_all(opened: Broker, wanted: TaskFilter, reason: str, sure: bool) -> list[str]:
    """Cancel the open tasks that the filter selects, and return their ids. One that ends meanwhile is left alone."""
    found: list[tuple[EventBus, str]] = []
    for bus in opened.buses:
        page = await list_tasks([bus], wanted, MAX_SCANNED)
        found += [(bus, row["task_id"]) for row in page.tasks if row["status"] not in ENDED]
    if found and not sure:
        confirm(f"Cancel {counted(len(found), 'task')}?", abort=True, err=True)
    cancelled = []
    for bus, task_id in progress(found, Status.CANCELLED):
        answer = await repeat_after_reconnect(partial(bus.cancel, task_id, reason))
        if answer[0] not in ("unknown", "ended"):
            cancelled.append(task_id)
    return cancelled


@app.verb("delete", seconds=None)
async def delete(
    task_id: Id,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete an ended task permanently.

    Also deletes its trajectory, output, dead letters and large results. Asks for confirmation on a terminal.

    \b
    Example:
      weft task delete t-1 --yes
    """
    if not yes and sys.stdin.isatty():
        confirm(f"Delete task {task_id} with its trajectory, output and dead letters?", abort=True, err=True)
    async with broker() as opened, trajectories(opened.settings) as store:
        bus = await opened.admission.find(task_id)
        _check_ended(task_id, await _status_of(bus, task_id), ("", *ENDED))
        await _until_recorded(bus)
        found = await bus.erase(task_id)
        _check_ended(task_id, found, ("OK", "unknown"))  # it may have been reopened meanwhile
        letters = DeadLetters(opened.buses)
        own = [letter.letter_id async for letter in letters.all(LetterFilter(task=task_id))]
        for letter_id in own:
            await letters.drop(letter_id)
        rows = await store.delete(opened.settings.namespace, task_id) if store is not None else 0
        blobs = await asyncio.to_thread(_erase_blobs, opened.settings, task_id)
        await forget_place(opened.buses, task_id)
    if found == "unknown" and not own and not rows and not blobs:
        raise _unknown(task_id)
    print_result(
        {"task_id": task_id, "deleted": True, "trajectory_rows": rows, "blobs": blobs},
        f"deleted task {task_id} and {counted(rows, 'row')} of its trajectory",
        as_json,
    )


def _check_ended(task_id: str, status: str, fine: Sequence[str]) -> None:
    if status not in fine:
        raise InvalidInput("task_id", f"the task is {status}: cancel it first with weft task cancel {task_id}")


def _erase_blobs(settings: Settings, task_id: str) -> int:
    """Delete the task's large results and return their number. Raises WeftError if that fails."""
    if not is_task_id(task_id):
        return 0
    # The default is the folder that `weft up` gives to its services.
    url = settings.blob_url or (settings.data_dir / "blobs").as_uri()
    try:
        return open_blobs(url).erase(folder_of(settings.namespace, task_id))
    except OSError as error:
        raise WeftError(f"the task's large results in {url} were not deleted: {error}; run the command again") from None


async def _until_recorded(bus: EventBus) -> None:
    """Wait until the store has all current entries of the record: one written after the deletion would stay there.

    Raises WeftError if the recorder does not catch up in time.
    """
    last = pairs(await bus.transport.call("XREVRANGE", bus.keys.record, "+", "-", "COUNT", 1))
    end_at = time.monotonic() + RECORDER_SECONDS
    while last:
        recorder = (await groups_of(bus.transport.call, bus.keys.record) or {}).get(TRAJECTORY_RECORDER)
        if recorder is not None and position(recorder.read) >= position(last[0][0].decode()):
            return
        if time.monotonic() > end_at:
            raise WeftError(
                "the trajectory-recorder has not recorded all steps yet and could write those of this task after the "
                "deletion, so nothing was deleted: check that it is running (`weft lag` shows its progress)"
            )
        await asyncio.sleep(0.05)
