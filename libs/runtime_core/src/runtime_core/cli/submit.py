"""`weft submit`: starts a task and follows it to its end."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Argument, BadParameter, Exit, Option

from runtime_core.cli.connection import Commands, broker_url, read_settings
from runtime_core.cli.output import (
    Row,
    error_line,
    preview,
    print_json,
    print_value,
    shown,
    typed,
)
from runtime_core.cli.task_view import answers_to
from runtime_core.client.client import Client, StreamEvent, TaskHandle
from runtime_core.text import plain
from runtime_core.wire.commands import SubmitOptions

ADMISSION_SECONDS = 30.0
"""How long to wait for the first agent-handler of a namespace that has just been started."""

app = Commands()

MaxSteps = Annotated[int | None, Option(metavar="N", min=1, help="The task fails over so many steps.")]
Timeout = Annotated[float | None, Option(metavar="SECONDS", min=0.001, help="The task fails when it takes longer.")]
Wait = Annotated[bool, Option(help="Wait for the answer, or only print the id.")]


@app.verb("submit", seconds=None)
async def submit(
    agent: Annotated[str, Argument(metavar="AGENT", help="The agent to ask.")],
    input: Annotated[
        str | None,
        Argument(
            metavar="INPUT",
            help="Its input: JSON where it is an object, an array, a number or a quoted string, else text. "
            "- reads standard input.",
        ),
    ] = None,
    key: Annotated[str, Option(metavar="KEY", help="Ask this instance of the agent, which keeps its state.")] = "",
    task_id: Annotated[
        str | None, Option(metavar="ID", help="Your own id: submitted again, it names the same task.")
    ] = None,
    session: Annotated[str, Option(metavar="ID", help="The session that the task belongs to.")] = "",
    hook: Annotated[
        list[str] | None, Option(metavar="POINT=NAME", help="Run this hook of the app there; may be repeated.")
    ] = None,
    max_steps: MaxSteps = None,
    max_tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="The task fails when all its runs use more tokens.")
    ] = None,
    max_cost: Annotated[
        float | None, Option(metavar="X", min=0.0, help="The task fails when all its runs cost more.")
    ] = None,
    timeout: Timeout = None,
    engine: Annotated[
        str | None, Option(metavar="NAME", help="Where compute steps run that name none: local, ray or spark.")
    ] = None,
    engine_wait: Annotated[
        float | None, Option(metavar="SECONDS", min=0.0, help="How long steps wait for an absent engine (60).")
    ] = None,
    tenant: Annotated[
        str, Option(metavar="NAME", help="On whose behalf; tenants take turns while handlers are busy.")
    ] = "",
    priority: Annotated[
        int | None, Option(metavar="N", min=1, max=9, help="9 starts first among the tenant's tasks (5).")
    ] = None,
    wait: Wait = True,
    stream: Annotated[bool, Option("--stream", help="Print output as it comes, then the answer.")] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print the end as JSON; with --stream every event, one per line.")
    ] = False,
) -> None:
    """Start a task and wait for its answer.

    The status is 1 where the task fails. Ctrl-C leaves it running.

    \b
    Examples:
      weft submit researcher "Redis Streams" --stream
      weft submit ranker '{"top": 3}' --key team-7 --timeout 60
      cat notes.txt | weft submit summarizer -
    """
    if stream and not wait:
        raise BadParameter("--stream waits for the output: it cannot go with --no-wait")
    options = SubmitOptions(
        max_steps=max_steps,
        timeout_seconds=timeout,
        max_tokens=max_tokens,
        max_cost=max_cost,
        engine=engine,
        engine_wait_seconds=engine_wait,
        tenant=tenant,
        priority=priority,
        hooks=_hooks(hook or []),
    )
    text = sys.stdin.read() if input == "-" else input
    settings = read_settings()
    async with Client.connect(broker_url(settings), namespace=settings.namespace) as client:
        task = await client.submit(
            agent,
            None if text is None else typed(text),
            key=key,
            task_id=task_id,
            session_id=session,
            options=options,
            stream=wait,
            timeout=ADMISSION_SECONDS,
        )
        await follow(task, wait, stream, as_json)


def _hooks(given: list[str]) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    for pair in given:
        point, equals, name = pair.partition("=")
        if not (point and equals and name):
            raise BadParameter(f"--hook {pair!r} is not written as POINT=NAME, as in before_tool_call=check")
        hooks.setdefault(point, []).append(name)
    return hooks


async def follow(task: TaskHandle, wait: bool, stream: bool, as_json: bool) -> None:
    """Print what was asked for until the task ends. Raises Exit(1) where it did not complete.

    Without `wait`, print the task's id.
    """
    if not wait:
        if as_json:
            print_json({"task_id": task.task_id})
        else:
            print(task.task_id)
        return
    try:
        await _follow(task, stream, as_json)
    except BaseException as end:
        if not isinstance(end, Exit | BrokenPipeError):
            print(f"the task goes on: weft task show {task.task_id}", file=sys.stderr)
        raise


async def _follow(task: TaskHandle, stream: bool, as_json: bool) -> None:
    open_line = False
    async for event in task.stream():
        ended = event.type.startswith("weft.task.")
        if as_json and stream:
            print_json({"entry_id": event.entry_id, "type": event.type, "data": event.data})
        elif as_json and ended:
            print_json(event.data)
        if event.type == "weft.output.delta" and stream and not as_json:
            open_line = _print_delta(event)
        elif event.type == "weft.human.requested":
            _print_question(event.data, open_line)
            open_line = False
        elif ended:
            if open_line:
                print()
            _end(event.data, as_json)
            return


def _print_delta(event: StreamEvent) -> bool:
    """Text goes on where the last one ended; other values take lines. True where the line is not ended."""
    if "text" in event.data:
        text = shown(event.text)
        print(text, end="", flush=True)
        return not text.endswith("\n")
    print_json(event.data.get("value"))
    return False


def _print_question(request: Row, open_line: bool) -> None:
    start = "\n" if open_line else ""
    data = f"  {preview(request['data'])}" if request.get("data") is not None else ""
    answers = "\n".join(f"  answer it: {command}" for command in answers_to(request))
    print(f"{start}? {plain(str(request['prompt']))}{data}\n{answers}", file=sys.stderr, flush=True)


def _end(final: Row, as_json: bool) -> None:
    if final["status"] == "completed":
        if not as_json:
            print_value(final.get("output"))
        return
    task = final["task_id"]
    why = f"{final['status']}: {error_line(final.get('error'))}"
    print(f"weft submit: task {task} {why}; see weft task show {task}", file=sys.stderr, flush=True)
    raise Exit(1)
