"""`weft task cancel` and `weft task delete`: end a task, and erase one that has ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from runtime_core.cli.output import Json, print_json
from runtime_core.cli.task.arguments import Id

if TYPE_CHECKING:
    from runtime_core.bus.event_bus import EventBus
    from runtime_core.config.settings import Settings

RECORDER_SECONDS = 5.0
"""How long a deletion waits for steps that are still on their way to the trajectory store."""


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
    from runtime_core.cli.connection import run

    run(_cancel(task_id, reason, as_json))


async def _cancel(task_id: str, reason: str, as_json: bool) -> None:
    from runtime_core.bus.durability import repeat_after_reconnect
    from runtime_core.cli.connection import broker
    from runtime_core.errors import InvalidInput

    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        # Asked first: the broker would remember the id, and refuse the first submit that uses it.
        if not await bus.transport.call("EXISTS", bus.keys.task(task_id)):
            raise InvalidInput("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are")
        answer = await repeat_after_reconnect(lambda: bus.cancel(task_id, reason))
    if answer[0] == "unknown":
        raise InvalidInput("task_id", f"no task {task_id!r} is known (any more)")
    if answer[0] == "ended" and answer[1] != "cancelled":
        raise InvalidInput("task_id", f"the task {task_id!r} has ended already ({answer[1]})")
    if as_json:
        print_json({"task_id": task_id, "status": "cancelled"})
    else:
        print(f"task {task_id} is cancelled")


def delete(
    task_id: Id,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Erase an ended task for ever.

    From the broker, with its trajectory, output, dead letters and large results. Asks first where it is typed by hand.

    \b
    Example:
      weft task delete t-1 --yes
    """
    from runtime_core.cli.connection import run

    if not yes and sys.stdin.isatty():
        typer.confirm(f"Erase task {task_id} with its trajectory, output and dead letters?", abort=True, err=True)
    run(_delete(task_id, as_json))


async def _delete(task_id: str, as_json: bool) -> None:
    import asyncio

    from runtime_core.bus.claims import forget_place
    from runtime_core.cli.connection import broker, trajectories
    from runtime_core.errors import InvalidInput
    from runtime_core.maintenance.dead_letters import DeadLetters, Selection
    from runtime_core.wire.results import ENDED

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
        blobs = await asyncio.to_thread(_erase_blobs, opened.settings, task_id)
        await forget_place(opened.buses, task_id)
    if found == "unknown" and not dropped and not rows and not blobs:
        raise InvalidInput("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are")
    if as_json:
        print_json({"task_id": task_id, "deleted": True, "trajectory_rows": rows, "blobs": blobs})
    else:
        print(f"task {task_id} is deleted, with {rows} rows of its trajectory")


def _erase_blobs(settings: Settings, task_id: str) -> int:
    """Erase the task's large results; how many there were. Raises WeftError where that is not possible."""
    from runtime_core.blobs.store import folder_of, open_blobs
    from runtime_core.errors import WeftError
    from runtime_core.ids import is_task_id

    if not is_task_id(task_id):
        return 0
    # As of a `weft up` on this data folder, which tells its services where that is.
    url = settings.blob_url or (settings.data_dir / "blobs").as_uri()
    try:
        return open_blobs(url).erase(folder_of(settings.namespace, task_id))
    except OSError as error:
        raise WeftError(
            f"the task's large results in {url} were not erased: {error}; run the same command again"
        ) from None


async def _until_recorded(bus: EventBus) -> None:
    """Wait until all that is on the record now is in the store: what comes there later would stay there.

    Raises WeftError where the recorder does not get that far.
    """
    import asyncio
    import time

    from runtime_core.bus.delivery import pairs
    from runtime_core.bus.keys import TRAJECTORY_RECORDER
    from runtime_core.bus.reply import position
    from runtime_core.cli.backlog import groups_of
    from runtime_core.errors import WeftError

    last = pairs(await bus.transport.call("XREVRANGE", bus.keys.record, "+", "-", "COUNT", 1))
    if not last:
        return
    wanted = position(last[0][0].decode())
    end_at = time.monotonic() + RECORDER_SECONDS
    while True:
        for group in await groups_of(bus, bus.keys.record):
            if group.name == TRAJECTORY_RECORDER and position(group.position) >= wanted:
                return
        if time.monotonic() > end_at:
            raise WeftError(
                "the trajectory-recorder has not recorded all steps yet, and would write those of this task later: "
                "nothing was deleted; is it running? `weft lag` shows how far it is"
            )
        await asyncio.sleep(0.05)
