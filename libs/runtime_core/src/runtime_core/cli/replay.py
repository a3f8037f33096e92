"""`weft replay`: runs the code of an app on recorded tasks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from typer import BadParameter, Exit, Option

from runtime_core.app.loading import load_app
from runtime_core.cli.connection import Commands, existing_trajectories, read_settings
from runtime_core.cli.output import Json, past_moment, print_json
from runtime_core.errors import ConfigurationError
from runtime_core.text import plain

app = Commands("Check new code against recorded tasks.")


@app.callback()
def group() -> None:
    """Keep `check` a subcommand, although it is the only one."""


@app.verb("check", seconds=None)
async def check_recorded(
    app_name: Annotated[
        str, Option("--app", metavar="MODULE:APP", help="The app with the new code. Default: WEFT_APP.")
    ] = "",
    since: Annotated[
        str, Option(metavar="TIME", help="Only tasks that ended since: 7d, 12h, or a time as in 2026-11-01T08:00Z.")
    ] = "7d",
    agent: Annotated[str, Option(metavar="NAME", help="Only tasks of this agent.")] = "",
    limit: Annotated[int | None, Option(metavar="N", min=1, help="The most tasks to check.")] = None,
    as_json: Json = False,
) -> None:
    """Run the code of an app on recorded tasks.

    Names the first difference of each task: a running task like it would be parked. Calls no tool, agent or model, and
    does not need the broker. The exit status is 1 if a task differs.

    \b
    Example:
      weft replay check --app desk:app --since 7d
    """
    settings = read_settings()
    named = app_name or settings.app
    if not named:
        raise ConfigurationError("no app: name it with --app package.module:app, or set WEFT_APP")
    after = past_moment(since, "--since")
    if after is None:
        raise BadParameter("--since is empty: give a span, as in 7d, or a time, as in 2026-11-01")
    loaded = load_app(named)
    from runtime_core.replay.replay import check

    async with existing_trajectories(settings) as store:
        found = await check(store, loaded, namespace=settings.namespace, since=after, agent=agent or None, limit=limit)
    if as_json:
        differences = [asdict(difference) for difference in found.differences]
        print_json({"ok": found.ok, "tasks": found.tasks, "runs": found.runs, "differences": differences,
                    "skipped": dict(found.skipped)})  # fmt: skip
    else:
        for line in str(found).splitlines():
            print(plain(line))
    if not found.ok:
        raise Exit(1)
