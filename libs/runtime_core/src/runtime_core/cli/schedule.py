"""`weft schedule`: tasks that start at a time, or again and again."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime_core.cli.output import Json, moment, print_json, print_table, typed

if TYPE_CHECKING:
    from runtime_core.ingress.schedules import Schedule


class Overlap(enum.StrEnum):
    """What becomes of a time at which the task of the time before is not done."""

    SKIP = "skip"
    START = "start"


Id = Annotated[str, typer.Argument(metavar="ID", help="The schedule's id.")]


def group() -> typer.Typer:
    app = typer.Typer(
        help="Start tasks at a time, or again and again.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("set")(set_schedule)
    app.command("list")(list_schedules)
    app.command("delete")(delete)
    app.command("run")(run_now)
    return app


def set_schedule(
    schedule_id: Id,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="The agent to ask.")],
    input: Annotated[str | None, typer.Argument(metavar="INPUT", help="Its input, as with `weft submit`.")] = None,
    every: Annotated[
        float | None, typer.Option("--every", metavar="SECONDS", help="Again and again, so many seconds apart.")
    ] = None,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron", metavar="EXPRESSION", help='By minute, hour, day, month, weekday, as in "0 9 * * mon-fri".'
        ),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="Once, as in 2030-01-01T09:00:00+01:00.")
    ] = None,
    delay: Annotated[
        float | None, typer.Option("--delay", metavar="SECONDS", help="Once, so many seconds from now.")
    ] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="Whose clock --cron is read by, as in Europe/Berlin.")
    ] = "UTC",
    overlap: Annotated[
        Overlap, typer.Option("--overlap", help="At a time when the task before is not done: leave it out, or start.")
    ] = Overlap.SKIP,
    catch_up: Annotated[
        bool, typer.Option("--catch-up/--no-catch-up", help="Make up for missed times, by one task for all of them.")
    ] = True,
    key: Annotated[str, typer.Option("--key", metavar="KEY", help="Ask this instance of the agent.")] = "",
    session: Annotated[str, typer.Option("--session", metavar="ID", help="The session that its tasks belong to.")] = "",
    as_json: Json = False,
) -> None:
    """Set a schedule, or replace the one with this id.

    Each of its times starts one task, whose id is the schedule's with the time behind it.

    \b
    Examples:
      weft schedule set digest writer '{"topic": "news"}' --cron "0 9 * * mon-fri" --timezone Europe/Berlin
      weft schedule set sweep cleaner --every 300 --overlap start
      weft schedule set reminder mailer "call back" --delay 3600
    """
    times = {"every_seconds": every, "cron": cron, "at": at, "delay_seconds": delay}
    given = {name: value for name, value in times.items() if value is not None}
    if len(given) != 1:
        raise typer.BadParameter("say when: give one of --every, --cron, --at and --delay")
    data: dict[str, Any] = {  # Any: JSON
        "schedule_id": schedule_id,
        "agent": agent,
        "input": None if input is None else typed(input),
        "timezone": timezone,
        "overlap": overlap.value,
        "catch_up": catch_up,
        **given,
    }
    data |= {name: value for name, value in (("key", key), ("session_id", session)) if value}
    from runtime_core.cli.connection import run

    run(_set(data, as_json))


def list_schedules(as_json: Json = False) -> None:
    """List schedules: when they come next, and what became of them.

    \b
    Example:
      weft schedule list
    """
    from runtime_core.cli.connection import run

    run(_list(as_json))


def delete(schedule_id: Id) -> None:
    """Remove a schedule. Tasks that it has started go on.

    \b
    Example:
      weft schedule delete digest
    """
    from runtime_core.cli.connection import run

    run(_delete(schedule_id))


def run_now(schedule_id: Id, as_json: Json = False) -> None:
    """Start a task of a schedule now, besides its times, and print the task's id.

    \b
    Example:
      weft schedule run digest
    """
    from runtime_core.cli.connection import run

    run(_run_now(schedule_id, as_json))


async def _set(data: dict[str, Any], as_json: bool) -> None:  # Any: JSON
    from runtime_core.cli.connection import broker
    from runtime_core.ingress.schedules import Schedules, parse_set

    async with broker() as found:
        schedule = await Schedules(found.buses[0], found.admission).set(parse_set(data, await found.now_ms()))
    if as_json:
        print_json(_shown(schedule))
    else:
        print(f"{schedule.schedule_id}  next {moment(schedule.next_ms)}")


async def _list(as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.ingress.schedules import Schedules

    async with broker() as found:
        schedules = await Schedules(found.buses[0], found.admission).all()
    if as_json:
        print_json([_shown(schedule) for schedule in schedules])
        return
    rows = [
        (
            schedule.schedule_id,
            schedule.agent,
            _when(schedule),
            moment(schedule.next_ms),
            str(schedule.started),
            str(schedule.skipped),
            schedule.error or schedule.last_task,
        )
        for schedule in schedules
    ]
    print_table(("SCHEDULE", "AGENT", "WHEN", "NEXT", "STARTED", "LEFT OUT", "LAST"), rows)


async def _delete(schedule_id: str) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.errors import InvalidInput
    from runtime_core.ingress.schedules import Schedules

    async with broker() as found:
        if not await Schedules(found.buses[0], found.admission).delete(schedule_id):
            raise InvalidInput("schedule_id", f"there is no schedule {schedule_id!r}; see weft schedule list")


async def _run_now(schedule_id: str, as_json: bool) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.ingress.schedules import Schedules

    async with broker() as found:
        task = (await Schedules(found.buses[0], found.admission).run_now(schedule_id)).task
    if as_json:
        print_json({"task_id": task})
    else:
        print(task)


def _when(schedule: Schedule) -> str:
    if schedule.every_ms:
        return f"every {schedule.every_ms / 1000:g} s"
    return f"{schedule.cron} {schedule.timezone}" if schedule.cron else "once"


def _shown(schedule: Schedule) -> dict[str, Any]:  # Any: JSON
    """A schedule for programs."""
    return {
        "schedule_id": schedule.schedule_id,
        **schedule.task,
        "every_seconds": schedule.every_ms / 1000 or None,
        "cron": schedule.cron or None,
        "timezone": schedule.timezone,
        "overlap": schedule.overlap,
        "catch_up": schedule.catch_up,
        "next": schedule.next_ms,
        "last": schedule.last_ms,
        "last_task_id": schedule.last_task or None,
        "started": schedule.started,
        "skipped": schedule.skipped,
        "error": schedule.error or None,
    }
