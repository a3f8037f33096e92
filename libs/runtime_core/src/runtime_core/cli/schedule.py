"""`weft schedule`: manages schedules, which start tasks at set times."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Literal

from typer import Argument, BadParameter, Option

from runtime_core.cli.connection import Commands, broker
from runtime_core.cli.output import Columns, Json, Row, moment, print_result, print_rows
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.schedules import Schedules, parse_set
from runtime_core.wire import codec

app = Commands("Start tasks at a set time, or repeatedly.")

Id = Annotated[str, Argument(metavar="ID", help="The schedule's id.")]


@app.verb("set")
async def set_schedule(
    schedule_id: Id,
    agent: Annotated[str, Argument(metavar="AGENT", help="The agent's name.")],
    input: Annotated[str | None, Argument(metavar="INPUT", help="The input, as for `weft submit`.")] = None,
    every: Annotated[float | None, Option(metavar="SECONDS", help="Repeat at this interval.")] = None,
    cron: Annotated[
        str | None,
        Option(metavar="EXPRESSION", help='Repeat by minute, hour, day, month and weekday, as in "0 9 * * mon-fri".'),
    ] = None,
    at: Annotated[
        str | None, Option(metavar="TIME", help="Start once at this time, as in 2030-01-01T09:00:00+01:00.")
    ] = None,
    delay: Annotated[float | None, Option(metavar="SECONDS", help="Start once after this delay.")] = None,
    timezone: Annotated[str, Option(metavar="ZONE", help="The time zone of --cron, as in Europe/Berlin.")] = "UTC",
    overlap: Annotated[
        Literal["skip", "start"], Option(help="If the previous task is still running: skip this time, or start anyway.")
    ] = "skip",
    catch_up: Annotated[bool, Option(help="After missed times, start one task for all of them.")] = True,
    key: Annotated[str, Option(metavar="KEY", help="The instance of the agent to ask.")] = "",
    session: Annotated[str, Option(metavar="ID", help="The session of its tasks.")] = "",
    as_json: Json = False,
) -> None:
    """Create or replace a schedule.

    Each time starts one task, whose id is the schedule's id followed by the time.

    \b
    Examples:
      weft schedule set digest writer '{"topic": "news"}' --cron "0 9 * * mon-fri" --timezone Europe/Berlin
      weft schedule set sweep cleaner --every 300 --overlap start
      weft schedule set reminder mailer "call back" --delay 3600
    """
    times = {"every_seconds": every, "cron": cron, "at": at, "delay_seconds": delay}
    given = {name: value for name, value in times.items() if value is not None}
    if len(given) != 1:
        raise BadParameter("give exactly one of --every, --cron, --at and --delay")
    data: Row = {
        "schedule_id": schedule_id,
        "agent": agent,
        "input": None if input is None else codec.typed(input, field="input"),
        "timezone": timezone,
        "overlap": overlap,
        "catch_up": catch_up,
        **given,
    }
    data |= {name: value for name, value in (("key", key), ("session_id", session)) if value}
    async with broker() as opened:
        requested = parse_set(data, await opened.now_ms())
        schedule = await Schedules(opened.buses[0], opened.admission).set(requested)
    print_result(schedule.describe(), f"{schedule.schedule_id}  next {moment(schedule.next_ms)}", as_json)


@app.verb("list")
async def list_schedules(as_json: Json = False) -> None:
    """List schedules with their next times and last results.

    \b
    Example:
      weft schedule list
    """
    async with _schedules() as schedules:
        rows = [schedule.describe() for schedule in await schedules.all()]
    columns: Columns = {
        "SCHEDULE": "schedule_id",
        "AGENT": "agent",
        "WHEN": _when,
        "NEXT": lambda row: moment(row["next"]),
        "STARTED": "started",
        "SKIPPED": "skipped",
        "LAST": lambda row: row["error"] or row["last_task_id"] or "",
    }
    print_rows(rows, columns, as_json)


@app.verb("delete")
async def delete(schedule_id: Id) -> None:
    """Remove a schedule. Tasks that it has started continue.

    \b
    Example:
      weft schedule delete digest
    """
    async with _schedules() as schedules:
        if not await schedules.delete(schedule_id):
            raise InvalidInput("schedule_id", f"there is no schedule {schedule_id!r}; see `weft schedule list`")
    print(f"deleted schedule {schedule_id}")


@app.verb("run")
async def run_now(schedule_id: Id, as_json: Json = False) -> None:
    """Start a task of a schedule now, and print its id.

    The times of the schedule stay as they are.

    \b
    Example:
      weft schedule run digest
    """
    async with _schedules() as schedules:
        task = (await schedules.run_now(schedule_id)).task
    print_result({"task_id": task}, task, as_json)


@asynccontextmanager
async def _schedules() -> AsyncIterator[Schedules]:
    async with broker() as opened:
        yield Schedules(opened.buses[0], opened.admission)


def _when(row: Row) -> str:
    if row["every_seconds"]:
        return f"every {row['every_seconds']:g} s"
    return f"{row['cron']} {row['timezone']}" if row["cron"] else "once"
