"""`weft dead`: look at dead letters, give them again, forget them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from runtime_core.cli.output import Json, error_line, in_bytes, moment, preview, print_json, print_table, shown

if TYPE_CHECKING:
    from runtime_core.maintenance.dead_letters import By, DeadLetter, DeadLetters, Selection


class GroupBy(enum.StrEnum):
    """What `weft dead list` counts by."""

    ERROR = "error"
    NAME = "name"
    REASON = "reason"
    STREAM = "stream"


Reason = Annotated[str, typer.Option("--reason", metavar="REASON", help="Only letters with this reason.")]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Only letters of this agent or tool.")]
Task = Annotated[str, typer.Option("--task", metavar="ID", help="Only letters of this task.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids that `weft dead list` shows.")]


def group() -> typer.Typer:
    app = typer.Typer(
        help="Look after what failed for good.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("list")(list_letters)
    app.command("show")(show)
    app.command("redrive")(redrive)
    app.command("drop")(drop)
    return app


def list_letters(
    group_by: Annotated[
        GroupBy | None, typer.Option("--group-by", help="Count them by what they have in common.")
    ] = None,
    reason: Reason = "",
    name: Name = "",
    task: Task = "",
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many to list.")] = 50,
    as_json: Json = False,
) -> None:
    """List dead letters, the newest first.

    Or count them by error, name, reason or the stream that they came from, with the bytes that they take.

    \b
    Examples:
      weft dead list
      weft dead list --group-by error
    """
    from runtime_core.cli.connection import run
    from runtime_core.maintenance.dead_letters import Selection

    selection = Selection(reason, name, task)
    if group_by is None:
        run(_list(selection, limit, as_json))
    else:
        run(_counted(group_by.value, selection, limit, as_json))


def show(
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="An id that `weft dead list` shows.")],
    as_json: Json = False,
) -> None:
    """Show all that is kept of a dead letter.

    The event, and every error with its traceback.

    \b
    Example:
      weft dead show 1731240000000-0
    """
    from runtime_core.cli.connection import run

    run(_show(letter_id, as_json))


def redrive(
    ids: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="All letters, or all that the filters choose.")] = False,
    reopen: Annotated[bool, typer.Option("--reopen", help="Let tasks that have ended go on.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", metavar="JSON", help="Send this instead of what was sent.")
    ] = None,
    reason: Reason = "",
    name: Name = "",
    task: Task = "",
    as_json: Json = False,
) -> None:
    """Give dead letters to their consumer again.

    Attempts are counted again. A task that has ended goes on with --reopen only.

    \b
    Examples:
      weft dead redrive 1731240000000-0 --data '{"query": "streams"}'
      weft dead redrive --all --name search --reopen
    """
    from runtime_core.cli.connection import run
    from runtime_core.cli.output import json_of
    from runtime_core.maintenance.dead_letters import Selection

    _check(ids, everything, bool(reason or name or task))
    if data is not None and (everything or len(ids or ()) != 1):
        raise typer.BadParameter("--data replaces what one letter sent: give one ID")
    sent = b"" if data is None else json_of(data, "--data")
    run(_redrive(ids or [], Selection(reason, name, task), reopen, sent, as_json), None)


def drop(
    ids: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="All letters, or all that the filters choose.")] = False,
    reason: Reason = "",
    name: Name = "",
    task: Task = "",
    as_json: Json = False,
) -> None:
    """Forget dead letters for ever.

    \b
    Example:
      weft dead drop --all --reason rejected
    """
    from runtime_core.cli.connection import run
    from runtime_core.maintenance.dead_letters import Selection

    _check(ids, everything, bool(reason or name or task))
    run(_drop(ids or [], Selection(reason, name, task), as_json), None)


def _check(ids: list[str] | None, everything: bool, filtered: bool) -> None:
    if bool(ids) == everything:
        raise typer.BadParameter("give the ids of letters, or --all")
    if ids and filtered:
        raise typer.BadParameter("--reason, --name and --task choose among --all: leave out the ids")


async def _list(selection: Selection, limit: int, as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.maintenance.dead_letters import DeadLetters

    async with broker() as opened:
        letters = await DeadLetters(opened.buses).newest(limit, selection)
    if as_json:
        print_json([letter.summary() for letter in letters])
    elif not letters:
        print("no dead letters")
    else:
        print_table(
            ("ID", "TIME", "REASON", "NAME", "TASK", "SIZE", "ERROR"),
            [
                (
                    one.letter_id,
                    moment(one.at_ms),
                    one.reason,
                    one.name,
                    one.task or "-",
                    in_bytes(one.size),
                    error_line(one.error),
                )
                for one in letters
            ],
        )


async def _counted(by: By, selection: Selection, limit: int, as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.maintenance.dead_letters import DeadLetters

    async with broker() as opened:
        groups = (await DeadLetters(opened.buses).counted(by, selection))[:limit]
    if as_json:
        print_json(
            [
                {by: group.key, "count": group.count, "bytes": group.size, "newest": group.newest.letter_id}
                for group in groups
            ]
        )
    elif not groups:
        print("no dead letters")
    else:
        print_table(
            ("COUNT", "SIZE", "NEWEST", by.upper()),
            [
                (str(group.count), in_bytes(group.size), group.newest.letter_id, preview(group.key, 200))
                for group in groups
            ],
        )


async def _show(letter_id: str, as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.maintenance.dead_letters import DeadLetters

    async with broker() as opened:
        letter = (await DeadLetters(opened.buses).get(letter_id)).without_secrets()
    if as_json:
        print_json(letter.details())
        return
    _print_letter(letter)


def _print_letter(letter: DeadLetter) -> None:
    facts = [
        ("letter", letter.letter_id),
        ("time", moment(letter.at_ms)),
        ("reason", letter.reason),
        ("from", f"{letter.stream} (group {letter.group})"),
        ("name", letter.name),
        ("task", f"{letter.task} run {letter.run}" if letter.run else letter.task),
        ("attempt", str(letter.attempt or "")),
        ("data", preview(letter.data, 2000) if letter.data is not None else ""),
        *((f"  {name}", preview(value, 2000)) for name, value in letter.event.items() if name != "data"),
        ("cut", _said_of_cut(letter)),
        ("error", error_line(letter.error)),
    ]
    for name, value in facts:
        if value:
            print(f"{name:<8} {preview(value, 2000)}")
    for number, error in enumerate(letter.errors, 1):
        print(f"\nerror {number} of {len(letter.errors)}, {moment(error.get('at'))}: {error_line(error)}")
        if error.get("traceback"):
            print(shown(str(error["traceback"]).rstrip()))
    if letter.cut:
        print(
            f"\nit was too large to be kept whole and cannot be redriven; forget it: weft dead drop {letter.letter_id}"
        )
        return
    print(f"\ngive it again: weft dead redrive {letter.letter_id}    forget it: weft dead drop {letter.letter_id}")


def _said_of_cut(letter: DeadLetter) -> str:
    """What was too large to keep, with digests that identify the original; empty for a whole letter."""
    parts = []
    fields = letter.cut.get("fields")
    for name, about in (fields if isinstance(fields, dict) else {}).items():
        digests = [f"{kind.upper()} {about[kind]}" for kind in ("sha256", "sha1") if kind in about]
        parts.append(f"only the head of {name} is kept ({about.get('bytes', '?')} bytes, {', '.join(digests)})")
    if left_out := letter.cut.get("left_out"):
        parts.append(f"{left_out} fields are left out")
    return "; ".join(parts)


async def _redrive(ids: list[str], selection: Selection, reopen: bool, data: bytes, as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.errors import InvalidInput
    from runtime_core.maintenance.dead_letters import DeadLetters

    async with broker() as opened:
        letters = DeadLetters(opened.buses)
        done: list[dict[str, str]] = []
        failed: list[tuple[str, str]] = []
        for letter_id in ids or await _chosen(letters, selection):
            try:
                task = await letters.redrive(letter_id, reopen=reopen, data=data)
            except InvalidInput as error:
                failed.append((letter_id, error.message))
            else:
                done.append({"letter_id": letter_id, "task_id": task})
    if as_json:
        print_json({"redriven": done, "failed": [{"letter_id": one, "message": why} for one, why in failed]})
    else:
        for one in done:
            print(
                f"{one['letter_id']} goes to its consumer again{', task ' + one['task_id'] if one['task_id'] else ''}"
            )
        if not done and not failed:
            print("no dead letters")
    _fail("redriven", len(done), failed)


async def _drop(ids: list[str], selection: Selection, as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.errors import InvalidInput
    from runtime_core.maintenance.dead_letters import DeadLetters

    async with broker() as opened:
        letters = DeadLetters(opened.buses)
        done: list[str] = []
        failed: list[tuple[str, str]] = []
        for letter_id in ids or await _chosen(letters, selection):
            try:
                await letters.drop(letter_id)
            except InvalidInput as error:
                failed.append((letter_id, error.message))
            else:
                done.append(letter_id)
    if as_json:
        print_json({"dropped": done, "failed": [{"letter_id": one, "message": why} for one, why in failed]})
    else:
        print(f"dropped {len(done)}")
    _fail("dropped", len(done), failed)


async def _chosen(letters: DeadLetters, selection: Selection) -> list[str]:
    """Those that are there now: one that fails again while this goes on is not taken again."""
    return [letter.letter_id async for letter in letters.all(selection)]


def _fail(verb: str, done: int, failed: list[tuple[str, str]]) -> None:
    """One line for what could not be done. Raises WeftError."""
    from runtime_core.errors import WeftError

    if len(failed) == 1:
        raise WeftError(failed[0][1])
    if failed:
        raise WeftError(f"{len(failed)} of {len(failed) + done} were not {verb}; the first: {failed[0][1]}")
