"""`weft submit`: starts a task and waits for its answer."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import msgspec
from typer import Argument, BadParameter, Exit, Option

from runtime_core.base.text import plain
from runtime_core.cli.connection import Commands, broker_url, read_settings
from runtime_core.cli.output import (
    Row,
    answers_to,
    error_line,
    preview,
    print_json,
    print_result,
    print_value,
    shown,
)
from runtime_core.client.client import Client, StreamEvent, TaskHandle
from runtime_core.wire import codec
from runtime_core.wire.commands import SubmitOptions
from runtime_core.wire.events import OUTPUT_DELTA, TaskOutput
from runtime_core.wire.step import Status

ADMISSION_SECONDS = 30.0
"""How long a submit waits for the first agent-handler of a new namespace, in seconds."""

app = Commands()

MaxSteps = Annotated[int | None, Option(metavar="N", min=1, help="Fail the task after N steps.")]
Timeout = Annotated[float | None, Option(metavar="SECONDS", min=0.001, help="Fail the task after this time.")]
Wait = Annotated[bool, Option(help="Wait for the answer, or only print the task's id.")]


@app.verb("submit", seconds=None)
async def submit(
    agent: Annotated[str, Argument(metavar="AGENT", help="The agent's name.")],
    input: Annotated[
        str | None,
        Argument(
            metavar="INPUT",
            help="The input. An object, array, number or quoted string is read as JSON; anything else is text. "
            "- reads standard input.",
        ),
    ] = None,
    key: Annotated[str, Option(metavar="KEY", help="The instance of the agent to ask; it keeps its own state.")] = "",
    task_id: Annotated[
        str | None, Option(metavar="ID", help="Your own task id. A repeated submit with it returns the same task.")
    ] = None,
    session: Annotated[str, Option(metavar="ID", help="The session that the task belongs to.")] = "",
    hook: Annotated[
        list[str] | None, Option(metavar="POINT=NAME", help="Run this hook of the app at this point. Repeatable.")
    ] = None,
    max_steps: MaxSteps = None,
    max_tokens: Annotated[
        int | None, Option(metavar="N", min=1, help="Fail the task once its runs have used more than N tokens.")
    ] = None,
    max_cost: Annotated[
        float | None, Option(metavar="X", min=0.0, help="Fail the task once its runs have cost more than X.")
    ] = None,
    timeout: Timeout = None,
    engine: Annotated[
        str | None, Option(metavar="NAME", help="The default engine for compute steps: local, ray or spark.")
    ] = None,
    engine_wait: Annotated[
        float | None, Option(metavar="SECONDS", min=0.0, help="How long a step waits for an unavailable engine (60).")
    ] = None,
    tenant: Annotated[
        str, Option(metavar="NAME", help="The task's tenant. Tenants take turns while handlers are busy.")
    ] = "",
    priority: Annotated[
        int | None, Option(metavar="N", min=1, max=9, help="The priority among the tenant's tasks; 9 starts first (5).")
    ] = None,
    wait: Wait = True,
    stream: Annotated[
        bool, Option("--stream", help="Print output as it arrives, then the answer, unless it is the same text.")
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print the final event as JSON; with --stream every event, one per line.")
    ] = False,
) -> None:
    """Start a task and wait for its answer.

    The exit status is 1 if the task fails. After Ctrl-C the task continues.

    \b
    Examples:
      weft submit researcher "Redis Streams" --stream
      weft submit ranker '{"top": 3}' --key team-7 --timeout 60
      cat notes.txt | weft submit summarizer -
    """
    if stream and not wait:
        raise BadParameter("give one of them: --stream prints output while the command waits, --no-wait does not wait")
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
            None if text is None else codec.typed(text, field="input"),
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
            raise BadParameter(f"--hook {pair!r} is not POINT=NAME, such as before_tool_call=check")
        hooks.setdefault(point, []).append(name)
    return hooks


async def follow(task: TaskHandle, wait: bool, stream: bool, as_json: bool) -> None:
    """Print output or the answer until the task ends; without `wait`, print only its id.

    Raises Exit(1) if the task does not complete.
    """
    if not wait:
        print_result({"task_id": task.task_id}, task.task_id, as_json)
        return
    try:
        await _follow(task, stream, as_json)
    except BaseException as end:
        if not isinstance(end, Exit | BrokenPipeError):
            print(f"the task is still running; see weft task show {task.task_id}", file=sys.stderr)
        raise


async def _follow(task: TaskHandle, stream: bool, as_json: bool) -> None:
    output = PrintedOutput()
    async for event in task.stream():
        ended = event.type.startswith("weft.task.")
        if as_json and stream:
            print_json({"entry_id": event.entry_id, "type": event.type, "data": event.data})
        elif as_json and ended:
            print_json(event.data)
        if event.type == OUTPUT_DELTA and stream and not as_json:
            output.add(event)
        elif event.type == "weft.human.requested":
            output.end_line()
            _print_question(event.data)
        elif ended:
            output.end_line()
            _end(event.data, as_json or output.has_shown(event.data.get("output")))
            return


class PrintedOutput:
    """Prints a task's output as it arrives. Output of a lost attempt is replaced by that of the next one."""

    def __init__(self) -> None:
        self._output = TaskOutput()
        self._attempts: dict[str, int] = {}
        """The latest attempt by run."""
        self._printed: list[str] = []
        """The text on the terminal after the last line of another kind."""

    def add(self, event: StreamEvent) -> None:
        """Print what the event adds, or all again if it begins a new attempt of a run."""
        run, attempt = str(event.data.get("run_id")), int(event.data.get("attempt", 1))
        is_repeated = attempt > self._attempts.get(run, attempt)
        self._attempts[run] = max(attempt, self._attempts.get(run, attempt))
        if not self._output.add(event):
            return
        if is_repeated:
            self._erase(attempt)
            for piece in self._output.pieces:
                self._print(piece)
        else:
            self._print(event.data["text"] if "text" in event.data else event.data["value"])

    def end_line(self) -> None:
        """Go to a new line, and leave the lines before it as they are."""
        if self._printed and not self._printed[-1].endswith("\n"):
            print(flush=True)
        self._printed.clear()

    def has_shown(self, answer: object) -> bool:
        """Return whether the answer is the text that was printed."""
        return isinstance(answer, str) and bool(answer.strip()) and answer.strip() == self._output.text.strip()

    def _print(self, piece: object) -> None:
        """Print text without a line break, and other values on their own lines."""
        text = shown(piece) if isinstance(piece, str) else msgspec.json.encode(piece).decode() + "\n"
        print(text, end="", flush=True)
        self._printed.append(text)

    def _erase(self, attempt: int) -> None:
        size = shutil.get_terminal_size()
        lines = "".join(self._printed).split("\n")
        rows = sum(max(1, -(-len(line) // size.columns)) for line in lines)
        if sys.stdout.isatty() and rows < size.lines:
            print("\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J", end="")
            self._printed.clear()
            return
        self.end_line()  # what another program has read cannot be taken back
        print(f"an attempt was lost: attempt {attempt} replaces its output", file=sys.stderr, flush=True)


def _print_question(request: Row) -> None:
    data = f"  {preview(request['data'])}" if request.get("data") is not None else ""
    answers = "\n".join(f"  answer with: {command}" for command in answers_to(request))
    print(f"? {plain(str(request['prompt']))}{data}\n{answers}", file=sys.stderr, flush=True)


def _end(final: Row, is_shown: bool) -> None:
    if final["status"] == Status.COMPLETED:
        if not is_shown:
            print_value(final.get("output"))
        return
    task = final["task_id"]
    reason = f"{final['status']}: {error_line(final.get('error'))}"
    print(f"weft submit: task {task} {reason}; see weft task show {task}", file=sys.stderr, flush=True)
    raise Exit(1)
