"""`weft task fork`: a new task that begins with another's results."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runtime_core.cli.output import Json, print_json, typed


def fork(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task to fork: one that goes on, or has ended.")],
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="With --at what that step shall have given, else the task's new input: JSON where it is that, "
            "else text.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            "--at", metavar="STEP", help="Take over what came before this step, as 3.0.1: see `weft trajectory show`."
        ),
    ] = None,
    new_id: Annotated[str | None, typer.Option("--task-id", metavar="ID", help="The id of the new task.")] = None,
    session: Annotated[
        str | None, typer.Option("--session", metavar="ID", help="Its session, where it is another one.")
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", metavar="N", min=1, help="The fork fails over so many steps.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0.001, help="It fails when it takes longer.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the answer, or only print the id.")] = True,
    as_json: Json = False,
) -> None:
    """Start a task with another's results.

    What the task did before the step is taken over and not done again; from there the fork goes on by itself.

    \b
    Examples:
      weft task fork t-1 --at 3
      weft task fork t-1 --at 2 '{"title": "a better one"}'
      weft task fork t-1 "another topic"
    """
    from runtime_core.cli.connection import run
    from runtime_core.wire.commands import SubmitOptions

    keywords: dict[str, Any] = {"at": at, "task_id": new_id, "session_id": session}
    keywords["options"] = SubmitOptions(max_steps=max_steps, timeout_seconds=timeout)
    if input is not None:
        keywords["input"] = typed(input)
    run(_fork(task_id, keywords, wait, as_json), None)


async def _fork(task_id: str, keywords: dict[str, Any], wait: bool, as_json: bool) -> None:  # Any: see Client.fork
    from runtime_core.cli.connection import broker_url, read_settings, trajectories
    from runtime_core.cli.submit import ADMISSION_SECONDS, follow
    from runtime_core.client.client import Client

    settings = read_settings()
    async with Client.connect(broker_url(settings), namespace=settings.namespace) as client:
        async with trajectories(settings) as store:
            task = await client.fork(task_id, store=store, stream=wait, timeout=ADMISSION_SECONDS, **keywords)
        if wait:
            await follow(task, False, as_json)
        elif as_json:
            print_json({"task_id": task.task_id})
        else:
            print(task.task_id)
