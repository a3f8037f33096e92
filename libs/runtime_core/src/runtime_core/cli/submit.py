"""`weft submit`: starts a task and follows it to its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime_core.cli.output import error_line, preview, print_json, print_value, shown, typed
from runtime_core.text import plain

if TYPE_CHECKING:
    from runtime_core.client.client import StreamEvent, TaskHandle

ADMISSION_SECONDS = 30.0
"""How long to wait for the first agent-handler of a namespace that has just been started."""


def register(app: typer.Typer) -> None:
    app.command("submit")(submit)


def submit(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent to ask.")],
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="Its input: JSON where it is an object, an array, a number or a quoted string, else text. "
            "- reads standard input.",
        ),
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input-file", metavar="FILE", help="Read the input from a file instead.")
    ] = None,
    key: Annotated[
        str, typer.Option("--key", metavar="KEY", help="Ask this instance of the agent, which keeps its state.")
    ] = "",
    task_id: Annotated[
        str | None,
        typer.Option("--task-id", metavar="ID", help="Your own id: submitted again, it names the same task."),
    ] = None,
    session: Annotated[str, typer.Option("--session", metavar="ID", help="The session that the task belongs to.")] = "",
    hooks: Annotated[
        list[str] | None,
        typer.Option("--hook", metavar="POINT=NAME", help="Run this hook of the app at this point; may be repeated."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", metavar="N", min=1, help="The task fails over so many steps.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", min=1, help="The task fails when all its runs use more tokens."),
    ] = None,
    max_cost: Annotated[
        float | None,
        typer.Option("--max-cost", metavar="X", min=0.0, help="The task fails when all its runs cost more."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", min=0.001, help="The task fails when it takes longer."),
    ] = None,
    engine_wait: Annotated[
        float | None,
        typer.Option(
            "--engine-wait", metavar="SECONDS", min=0.0, help="How long steps wait for an engine that is away (60)."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="NAME", help="Where compute steps run that name none: local, ray or spark."),
    ] = None,
    tenant: Annotated[
        str,
        typer.Option("--tenant", metavar="NAME", help="On whose behalf; tenants take turns while handlers are busy."),
    ] = "",
    priority: Annotated[
        int | None,
        typer.Option("--priority", metavar="N", min=1, max=9, help="9 starts first among the tenant's tasks (5)."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer, or only print the id.")] = True,
    stream: Annotated[bool, typer.Option("--stream", help="Print output as it comes, then the answer.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the end as JSON; with --stream every event, one per line.")
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
    if input is not None and input_file is not None:
        raise typer.BadParameter("give INPUT or --input-file, not both")
    if stream and not wait:
        raise typer.BadParameter("--stream waits for the output: it cannot go with --no-wait")
    value = _input(input, input_file)

    from runtime_core.cli.connection import run
    from runtime_core.wire.commands import SubmitOptions

    options = SubmitOptions(
        max_steps=max_steps,
        timeout_seconds=timeout,
        max_tokens=max_tokens,
        max_cost=max_cost,
        engine=engine,
        engine_wait_seconds=engine_wait,
        tenant=tenant,
        priority=priority,
        hooks=_hooks(hooks or []),
    )
    ids = {"key": key, "task_id": task_id, "session_id": session}
    run(_submit(agent, value, {**ids, "options": options}, wait, stream, as_json), None)


def _hooks(given: list[str]) -> dict[str, list[str]]:
    hooks: dict[str, list[str]] = {}
    for pair in given:
        point, equals, name = pair.partition("=")
        if not (point and equals and name):
            raise typer.BadParameter(f"--hook {pair!r} is not written as POINT=NAME, as in before_tool_call=check")
        hooks.setdefault(point, []).append(name)
    return hooks


def _input(text: str | None, file: Path | None) -> object:
    if file is not None:
        return typed(file.read_text("utf-8", "replace"))
    if text == "-":
        return typed(sys.stdin.read())
    return None if text is None else typed(text)


async def _submit(
    agent: str,
    value: object,
    keywords: dict[str, Any],  # Any: of `Client.submit`
    wait: bool,
    stream: bool,
    as_json: bool,
) -> None:
    from runtime_core.cli.connection import broker_url, read_settings
    from runtime_core.client.client import Client

    settings = read_settings()
    async with Client.connect(broker_url(settings), namespace=settings.namespace) as client:
        task = await client.submit(agent, value, stream=wait, timeout=ADMISSION_SECONDS, **keywords)
        if not wait:
            if as_json:
                print_json({"task_id": task.task_id})
            else:
                print(task.task_id)
            return
        await follow(task, stream, as_json)


async def follow(task: TaskHandle, stream: bool, as_json: bool) -> None:
    """Print what was asked for until the task ends. Raises typer.Exit(1) where it did not complete."""
    try:
        await _follow(task, stream, as_json)
    except BaseException as end:
        if not isinstance(end, typer.Exit | BrokenPipeError):
            print(f"the task goes on: weft task show {task.task_id}", file=sys.stderr)
        raise


async def _follow(task: TaskHandle, stream: bool, as_json: bool) -> None:
    open_line = False
    async for event in task.stream():
        ended = event.type.startswith("weft.task.")
        if as_json and (stream or ended):
            document = {"entry_id": event.entry_id, "type": event.type, "data": event.data}
            print_json(document if stream else event.data)
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


def _print_question(request: dict[str, Any], open_line: bool) -> None:  # Any: JSON
    from runtime_core.cli.task.view import answers_to

    start = "\n" if open_line else ""
    data = f"  {preview(request['data'])}" if request.get("data") is not None else ""
    answers = "\n".join(f"  answer it: {command}" for command in answers_to(request))
    print(f"{start}? {plain(str(request['prompt']))}{data}\n{answers}", file=sys.stderr, flush=True)


def _end(final: dict[str, Any], as_json: bool) -> None:  # Any: JSON
    if final["status"] == "completed":
        if not as_json:
            print_value(final.get("output"))
        return
    task = final["task_id"]
    print(
        f"weft submit: task {task} {final['status']}: {error_line(final.get('error'))}; see weft task show {task}",
        file=sys.stderr,
        flush=True,
    )
    raise typer.Exit(1)
