"""`weft dead`: lists, redrives and drops dead letters."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar, cast

from typer import Argument, BadParameter, Option, confirm

from runtime_core.base.text import counted, in_bytes
from runtime_core.cli.connection import Commands, broker
from runtime_core.cli.output import (
    Columns,
    Json,
    error_line,
    json_of,
    moment,
    preview,
    print_facts,
    print_json,
    print_rows,
    progress,
    shown,
)
from runtime_core.errors import InvalidInput, Rejected, WeftError
from runtime_core.state_manager.dead_letters import By, DeadLetter, DeadLetters, LetterFilter
from runtime_core.wire.step import ENDED

app = Commands("Inspect, redrive or drop dead letters.")

Reason = Annotated[str, Option(metavar="REASON", help="Only letters with this reason.")]
Name = Annotated[str, Option(metavar="NAME", help="Only letters of this agent or tool.")]
Task = Annotated[str, Option(metavar="ID", help="Only letters of this task.")]
Ids = Annotated[list[str] | None, Argument(metavar="ID", help="Ids from `weft dead list`.")]
All = Annotated[bool, Option("--all", help="All letters, or all that match the filters.")]
NONE = "no dead letters"
Done = TypeVar("Done")


@app.verb("list")
async def list_letters(
    group_by: Annotated[By | None, Option(help="Count letters per group.")] = None,
    reason: Reason = "",
    name: Name = "",
    task: Task = "",
    limit: Annotated[int, Option(metavar="N", min=1, help="List at most N letters or groups.")] = 50,
    as_json: Json = False,
) -> None:
    """List dead letters, the newest first.

    With --group-by, count them and their bytes by error, name, reason or original stream.

    \b
    Examples:
      weft dead list
      weft dead list --group-by error
    """
    selection = LetterFilter(reason, name, task)
    async with broker() as opened:
        letters = DeadLetters(opened.buses)
        if group_by is not None:
            rows = [
                {group_by: group.key, "count": group.count, "bytes": group.size, "newest": group.newest.letter_id}
                for group in (await letters.counted(group_by, selection))[:limit]
            ]
        else:
            rows = [letter.summary() for letter in await letters.newest(limit, selection)]
    if group_by is not None:
        columns: Columns = {"COUNT": "count", "SIZE": lambda row: in_bytes(row["bytes"]), "NEWEST": "newest"}
        print_rows(rows, {**columns, group_by.upper(): lambda row: preview(row[group_by], 200)}, as_json, empty=NONE)
        return
    print_rows(
        rows,
        {
            "ID": "letter_id",
            "TIME": lambda row: moment(row["time"]),
            "REASON": "reason",
            "NAME": "name",
            "TASK": lambda row: row["task_id"] or "-",
            "SIZE": lambda row: in_bytes(row["bytes"]),
            "ERROR": lambda row: error_line(row["error"]),
        },
        as_json,
        empty=NONE,
    )


@app.verb("show")
async def show(
    letter_id: Annotated[str, Argument(metavar="ID", help="An id from `weft dead list`.")], as_json: Json = False
) -> None:
    """Show a dead letter.

    Begins with the last error and its traceback. Includes the event and the earlier errors.

    \b
    Example:
      weft dead show 1731240000000-0
    """
    async with broker() as opened:
        letter = (await DeadLetters(opened.buses).get(letter_id)).without_secrets()
        bus = opened.buses[letter.partition]
        status = await bus.transport.call("HGET", bus.keys.task(letter.task), "status") if letter.task else b""
    if as_json:
        print_json(letter.details())
    else:
        _print_letter(letter, has_ended=cast(bytes, status or b"").decode() in ENDED)


@app.verb("redrive", seconds=None)
async def redrive(
    ids: Ids = None,
    everything: All = False,
    reopen: Annotated[bool, Option("--reopen", help="Reopen tasks that have ended.")] = False,
    data: Annotated[str | None, Option(metavar="JSON", help="Replace the event's data.")] = None,
    reason: Reason = "",
    name: Name = "",
    task: Task = "",
    as_json: Json = False,
) -> None:
    """Send dead letters to their consumer again.

    The count of attempts starts over. A task that has ended continues only with --reopen.

    \b
    Examples:
      weft dead redrive 1731240000000-0 --data '{"query": "streams"}'
      weft dead redrive --all --name search --reopen
    """
    if data is not None and (everything or len(ids or ()) != 1):
        raise BadParameter("--data replaces the data of one letter: give exactly one ID")
    replacement = b"" if data is None else json_of(data, "--data")

    async def redrive_one(letters: DeadLetters, letter_id: str) -> dict[str, str]:
        return {"letter_id": letter_id, "task_id": await letters.redrive(letter_id, reopen=reopen, data=replacement)}

    done, failed = await _each(ids, everything, LetterFilter(reason, name, task), redrive_one)
    if as_json:
        print_json({"redriven": done, "failed": failed})
    elif not done and not failed:
        print(NONE)
    else:
        for one in done:
            print(f"redriven {one['letter_id']}{', task ' * bool(one['task_id'])}{one['task_id']}")
    _fail("redriven", len(done), failed)


@app.verb("drop", seconds=None)
async def drop(
    ids: Ids = None,
    everything: All = False,
    reason: Reason = "",
    name: Name = "",
    task: Task = "",
    yes: Annotated[bool, Option("--yes", "-y", help="With --all: do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Delete dead letters permanently.

    With --all, asks for confirmation on a terminal.

    \b
    Examples:
      weft dead drop 1731240000000-0
      weft dead drop --all --reason rejected
    """

    async def drop_one(letters: DeadLetters, letter_id: str) -> str:
        await letters.drop(letter_id)
        return letter_id

    def ask(count: int) -> None:
        if count and everything and not yes and sys.stdin.isatty():
            confirm(f"Delete {counted(count, 'dead letter')} permanently?", abort=True, err=True)

    done, failed = await _each(ids, everything, LetterFilter(reason, name, task), drop_one, ask)
    if as_json:
        print_json({"dropped": done, "failed": failed})
    elif done or not failed:
        print(f"dropped {counted(len(done), 'dead letter')}")
    _fail("dropped", len(done), failed)


async def _each(
    ids: list[str] | None,
    everything: bool,
    selection: LetterFilter,
    work: Callable[[DeadLetters, str], Awaitable[Done]],
    ask: Callable[[int], None] = lambda count: None,
) -> tuple[list[Done], list[dict[str, str]]]:
    """Apply `work` to each selected letter. Return the results, and the letters for which it failed.

    `ask` gets the number of letters first, and may abort.
    """
    if bool(ids) == everything:
        raise BadParameter("give either ids or --all")
    if ids and selection != LetterFilter():
        raise BadParameter("--reason, --name and --task filter --all: remove the ids")
    done: list[Done] = []
    failed: list[dict[str, str]] = []
    async with broker() as opened:
        letters = DeadLetters(opened.buses)
        # Read the ids first: a letter that fails again meanwhile is not redriven twice.
        selected = ids or [letter.letter_id async for letter in letters.all(selection)]
        ask(len(selected))
        for letter_id in progress(selected, "handled"):
            try:
                done.append(await work(letters, letter_id))
            except InvalidInput as error:
                message = str(error) if isinstance(error, Rejected) else error.message
                failed.append({"letter_id": letter_id, "message": message})
    return done, failed


def _fail(verb: str, done: int, failed: list[dict[str, str]]) -> None:
    """Raise WeftError with one line about the failures, if there are any."""
    if failed:
        first = failed[0]["message"]
        count = len(failed)
        raise WeftError(first if count == 1 else f"{count} of {count + done} were not {verb}; the first: {first}")


def _print_letter(letter: DeadLetter, *, has_ended: bool) -> None:
    # The last error first: it is what the reader came for.
    groups = _equal_errors(letter.errors)
    for first, last, error in groups[-1:]:
        _print_error(first, last, error, len(letter.errors))
        print()
    print_facts(
        [
            ("letter", letter.letter_id),
            ("time", moment(letter.at_ms)),
            ("reason", letter.reason),
            ("from", f"{letter.stream} (group {letter.group})"),
            ("name", letter.name),
            ("task", f"{letter.task} run {letter.run}" if letter.run else letter.task),
            ("attempt", letter.attempt),
            ("data", preview(letter.data, 2000) if letter.data is not None else ""),
            *((f"  {name}", preview(value, 2000)) for name, value in letter.event.items() if name != "data"),
            ("cut", preview(_describe_cut(letter), 2000)),
            ("error", error_line(letter.error, 2000)),
        ]
    )
    for first, last, error in reversed(groups[:-1]):
        print()
        _print_error(first, last, error, len(letter.errors))
    drop = f"drop it: weft dead drop {letter.letter_id}"
    if letter.cut:
        print(f"\nit was too large to be stored whole, so it cannot be redriven; {drop}")
    else:
        reopen = " --reopen" * has_ended  # its task has ended
        print(f"\nredrive it: weft dead redrive {letter.letter_id}{reopen}    {drop}")


def _describe_cut(letter: DeadLetter) -> str:
    """Return what was cut off, with digests that identify the original; empty for a whole letter."""
    parts = []
    fields = letter.cut.get("fields")
    for name, about in (fields if isinstance(fields, dict) else {}).items():
        digests = [f"{kind.upper()} {about[kind]}" for kind in ("sha256", "sha1") if kind in about]
        parts.append(f"only the start of {name} is stored ({about.get('bytes', '?')} bytes, {', '.join(digests)})")
    if left_out := letter.cut.get("left_out"):
        parts.append(f"{left_out} fields are omitted")
    return "; ".join(parts)


def _equal_errors(errors: Sequence[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:  # Any: JSON
    """Return errors as (first attempt, last attempt, last error), with equal ones in a row as one."""
    groups: list[tuple[int, int, dict[str, Any]]] = []  # Any: JSON
    no_times = {"at": None, "started": None}
    for number, error in enumerate(errors, 1):
        first = number
        if groups and {**groups[-1][2], **no_times} == {**error, **no_times}:
            first = groups.pop()[0]
        groups.append((first, number, error))
    return groups


def _print_error(first: int, last: int, error: dict[str, Any], count: int) -> None:  # Any: JSON
    numbers = f"error {last}" if first == last else f"errors {first} to {last}"
    print(f"{numbers} of {count}, {moment(error.get('at'))}: {error_line(error)}")
    if error.get("traceback"):
        print(shown(str(error["traceback"]).rstrip()))
