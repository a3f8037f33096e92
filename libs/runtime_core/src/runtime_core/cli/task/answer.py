"""`weft task questions` and `weft task signal`: what tasks ask humans, and answering it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from runtime_core.cli.output import Json, moment, preview, print_json
from runtime_core.cli.task.arguments import LOOKED_AT_MAX, Id
from runtime_core.text import plain

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus


def questions(
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="How many to list.")] = 20,
    as_json: Json = False,
) -> None:
    """List what tasks ask humans and nobody has answered.

    The oldest first, each with its deadline and the commands that answer it.

    \b
    Example:
      weft task questions
    """
    from runtime_core.cli.connection import run

    run(_questions(limit, as_json))


async def _questions(limit: int, as_json: bool) -> None:
    from runtime_core.cli.connection import broker

    found: list[dict[str, Any]] = []  # Any: JSON
    async with broker() as opened:
        for bus in opened.buses:
            found += await _questions_of(bus, limit)
        now = await opened.now_ms()
    found = sorted(found, key=lambda question: cast(float, question["created"]))[:limit]
    if as_json:
        print_json(found)
    elif not found:
        print("no task asks anything")
    else:
        for question in found:
            _print_question(question, now)


async def _questions_of(bus: EventBus, limit: int) -> list[dict[str, Any]]:  # Any: JSON
    """Open questions of one partition: those of the oldest tasks, each with its task's agent and age."""
    from runtime_core.cli.task.view import read_task
    from runtime_core.wire.results import ENDED

    found: list[dict[str, Any]] = []  # Any: JSON
    call, keys, page = bus.transport.call, bus.keys, 500
    for start in range(0, LOOKED_AT_MAX, page):
        tasks = [task.decode() for task in cast(list[bytes], await call("ZRANGE", keys.index, start, start + page - 1))]
        asked = [call("HMGET", keys.task(task), "status", "fl") for task in tasks]
        for task, reply in zip(tasks, asked, strict=True):
            status, flags = cast(list[bytes | None], await reply)
            # `o`: it has said something on its stream; a task that has not has asked nothing.
            if status is None or status.decode() in ENDED or b"o" not in (flags or b""):
                continue
            view = await read_task(bus, task)
            if view is not None:
                about = {"agent": view["agent"], "created": view["created"]}
                found += [{**question, **about} for question in view.get("questions", ())]
        if len(tasks) < page or len(found) >= limit:
            break
    return found


def _print_question(question: dict[str, Any], now_ms: int) -> None:  # Any: JSON
    from runtime_core.cli.task.view import answers_to
    from runtime_core.trajectory.tree import duration

    print(f"{question['task_id']} ({plain(question['agent'])}): {plain(str(question['prompt']))}")
    if question.get("data") is not None:
        print(f"  {preview(question['data'], 300)}")
    if "deadline" in question:
        left = question["deadline"] - now_ms
        otherwise = f", then it is {preview(question['default'])}" if "default" in question else ", then it fails"
        print(f"  until {moment(question['deadline'])} (in {duration(max(0, left))}){otherwise}")
    for command in answers_to(question):
        print(f"  {command}")


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
      weft task signal t-1 r:2-9b1deb4d3b7d4bad true
    """
    from runtime_core.cli.connection import run

    run(_signal(task_id, request_id, value, as_json))


async def _signal(task_id: str, request_id: str, text: str, as_json: bool) -> None:
    from runtime_core import codec
    from runtime_core.bus.durability import repeat_after_reconnect
    from runtime_core.cli.connection import broker
    from runtime_core.cli.output import typed
    from runtime_core.errors import InvalidInput

    value = typed(text, words=True)
    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        data, event = codec.encode(value), f"weft task signal\n{secrets.token_hex(8)}"
        answer = await repeat_after_reconnect(lambda: bus.signal(task_id, request_id, data, event))
    problems = {
        "unknown": ("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are"),
        "ended": ("task_id", f"the task {task_id!r} has ended ({answer[-1]})"),
        "answered": ("request_id", f"{request_id!r} was answered already, by somebody or by its deadline"),
        "no_request": (
            "request_id",
            f"the task has no open question {request_id!r}; `weft task show {task_id}` shows what it asks",
        ),
        "invalid": ("value", answer[-1]),
    }
    if answer[0] in problems:
        raise InvalidInput(*problems[answer[0]])
    if as_json:
        print_json({"task_id": task_id, "request_id": request_id, "value": value})
    else:
        print(f"answered {request_id} of task {task_id} with {preview(value)}")
