"""`weft trajectory`: the recorded steps of tasks."""

from __future__ import annotations

import enum
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime_core.command.output import print_json

if TYPE_CHECKING:
    from runtime_core.settings import Settings


class Format(enum.StrEnum):
    """Files that trajectories can be exported to."""

    JSONL = "jsonl"
    PARQUET = "parquet"


def group() -> typer.Typer:
    app = typer.Typer(
        help="What tasks did, step by step.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("show")(show)
    app.command("export")(export)
    return app


def show(
    task_id: Annotated[str, typer.Argument(metavar="ID", help="The task's id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the tree as JSON, with whole inputs and outputs.")] = (
        False
    ),
) -> None:
    """Show the steps of a task as a tree.

    With their times, inputs, outputs and errors. Works without the broker.

    \b
    Example:
      weft trajectory show t-1
    """
    from runtime_core.command.connection import run

    run(_show(task_id, as_json))


def export(
    file_format: Annotated[Format, typer.Option("--format", help="One JSON object per line, or Parquet.")] = (
        Format.JSONL
    ),
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is standard output.")] = (
        "-"
    ),
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="ID", help="Only this task; may be given several times.")
    ] = None,
    status: Annotated[str, typer.Option("--status", metavar="STATUS", help="Only tasks that ended so.")] = "",
    agent: Annotated[str, typer.Option("--agent", metavar="NAME", help="Only tasks of this agent.")] = "",
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="TIME", help="Only tasks that ended since then, as in 2026-11-01 or 2026-11-01T08:00Z."
        ),
    ] = "",
) -> None:
    """Export steps for audit and training.

    One row per step with its task, ordered by task. Works without the broker.

    \b
    Examples:
      weft trajectory export --status completed --since 2026-11-01 --output steps.jsonl
      weft trajectory export --format parquet --output steps.parquet
    """
    from runtime_core.command.connection import run

    if file_format is Format.PARQUET and output == "-":
        raise typer.BadParameter("Parquet cannot go to standard output: name a file with --output")
    moment = _since(since)
    run(_export(file_format, output, task, status or None, agent or None, moment), None)


def _since(text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"--since {text!r} is no time; write it as 2026-11-01 or 2026-11-01T08:00Z") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


async def _show(task_id: str, as_json: bool) -> None:
    from runtime_core.command.connection import read_settings, trajectories
    from runtime_core.errors import InvalidInput
    from runtime_core.trajectory.tree import render, to_tree

    settings = read_settings()
    async with trajectories(settings) as store:
        if store is None:
            raise _no_store(settings)
        recorded = await store.task(settings.namespace, task_id)
    if recorded is None:
        raise InvalidInput(
            "task_id", f"nothing is recorded of a task {task_id!r} (yet); see `weft task show {task_id}`"
        )
    if as_json:
        print_json(to_tree(recorded))
    else:
        print(render(recorded))


async def _export(
    file_format: Format,
    output: str,
    tasks: list[str] | None,
    status: str | None,
    agent: str | None,
    since: datetime | None,
) -> None:
    from runtime_core.command.connection import read_settings, trajectories
    from runtime_core.trajectory.export import export_jsonl, export_parquet

    settings = read_settings()
    async with trajectories(settings) as store:
        if store is None:
            raise _no_store(settings)
        filters = {"status": status, "agent": agent}
        if file_format is Format.PARQUET:
            count = await export_parquet(store, settings.namespace, output, tasks=tasks, since=since, **filters)
        elif output == "-":
            sys.stdout.flush()
            await export_jsonl(store, settings.namespace, sys.stdout.buffer, tasks=tasks, since=since, **filters)
            sys.stdout.buffer.flush()
            return
        else:
            with Path(output).open("wb") as file:  # noqa: ASYNC230  # nothing else runs in this process
                count = await export_jsonl(store, settings.namespace, file, tasks=tasks, since=since, **filters)
    print(f"{count} steps in {output}")


def _no_store(settings: Settings) -> Exception:
    from runtime_core.errors import ConfigurationError
    from runtime_core.settings import without_password

    return ConfigurationError(
        f"there is no trajectory store at {without_password(settings.trajectory_url)}: set WEFT_TRAJECTORY_URL (or "
        "WEFT_DATA_DIR) as the trajectory-recorder has it"
    )
