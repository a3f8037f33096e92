"""`weft trajectory`: shows and exports the recorded steps of tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

from typer import Argument, BadParameter, Option

from runtime_core.app.loading import load_app
from runtime_core.base.text import counted
from runtime_core.cli.connection import Commands, existing_trajectories, read_settings
from runtime_core.cli.output import Json, counter, past_moment, print_json
from runtime_core.declare.loading import load_object
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.settings import Settings

if TYPE_CHECKING:
    from runtime_core.trajectory.items import RewardFunction, TrajectoryStrategy
    from runtime_core.trajectory.store import Filters

app = Commands("Show and export the recorded steps of tasks.")

Format = Literal["jsonl", "parquet", "sar", "sar-parquet"]


@app.verb("show")
async def show(task_id: Annotated[str, Argument(metavar="ID", help="The task's id.")], as_json: Json = False) -> None:
    """Show the steps of a task as a tree.

    Includes times, inputs, outputs and errors. Does not need the broker.

    \b
    Example:
      weft trajectory show t-1
    """
    from runtime_core.trajectory.tree import render, to_tree

    settings = read_settings()
    async with existing_trajectories(settings) as store:
        recorded = await store.task(settings.namespace, task_id)
    if recorded is None:
        raise InvalidInput("task_id", f"no steps of task {task_id!r} are recorded yet; see `weft task show {task_id}`")
    if as_json:
        print_json(to_tree(recorded))
    else:
        print(render(recorded))


@app.verb("export", seconds=None)
async def export(
    file_format: Annotated[
        Format, Option("--format", help="One row per step (jsonl, parquet) or per training item (sar).")
    ] = "jsonl",
    output: Annotated[
        str, Option("--output", "-o", metavar="FILE", help="The output file; - is standard output (not for Parquet).")
    ] = "-",
    task: Annotated[list[str] | None, Option(metavar="ID", help="Only this task. Repeatable.")] = None,
    status: Annotated[
        Literal["completed", "failed", "cancelled"] | None, Option(help="Only tasks with this status.")
    ] = None,
    agent: Annotated[str, Option(metavar="NAME", help="Only tasks of this agent.")] = "",
    session: Annotated[str, Option(metavar="ID", help="Only tasks of this session.")] = "",
    since: Annotated[
        str,
        Option(metavar="TIME", help="Only tasks that ended since: 7d, 12h, or a time as in 2026-11-01T08:00Z."),
    ] = "",
    strategy: Annotated[
        str,
        Option(
            metavar="NAME",
            help="For items: default, memory (builds messages from the conversation), or your own module:Class.",
        ),
    ] = "default",
    reward: Annotated[
        bool, Option("--reward", help="For items: score them with the @app.reward function of WEFT_APP.")
    ] = False,
    min_reward: Annotated[
        float | None, Option(metavar="X", help="For items: only those with at least this score. Implies --reward.")
    ] = None,
) -> None:
    """Export steps or training items.

    Writes one row per step, ordered by task; or one per item, with the state that an agent saw, its action and token
    counts, and the reward. Does not need the broker.

    \b
    Examples:
      weft trajectory export --status completed --since 2026-11-01 --output steps.jsonl
      weft trajectory export --format parquet --output steps.parquet
      weft trajectory export --format sar --session s-1 --min-reward 0.5 --output items.jsonl
    """
    parquet, of_items = file_format.endswith("parquet"), file_format.startswith("sar")
    if parquet and output == "-":
        raise BadParameter("Parquet cannot be written to standard output: name a file with --output")
    if not of_items and (reward or min_reward is not None or strategy != "default"):
        raise BadParameter("--strategy, --reward and --min-reward need --format sar or sar-parquet")
    filters: Filters = {
        "tasks": task,
        "status": status,
        "agent": agent or None,
        "session": session or None,
        "since": past_moment(since, "--since"),
    }
    from runtime_core.trajectory import export as write

    settings = read_settings()
    async with existing_trajectories(settings) as store:
        with counter(f"{'items' if of_items else 'steps'} exported") as shown:
            # Not between the rows on a terminal.
            show = None if output == "-" and sys.stdout.isatty() else shown
            if not of_items:
                if parquet:
                    count = await write.export_parquet(store, settings.namespace, output, progress=show, **filters)
                else:
                    with _opened(output) as out:
                        count = await write.export_jsonl(store, settings.namespace, out, progress=show, **filters)
            else:
                items = write.trajectory_items(
                    store,
                    settings.namespace,
                    strategy=_strategy(strategy),
                    reward=_reward(settings) if reward or min_reward is not None else None,
                    min_reward=min_reward,
                    **filters,
                )
                if parquet:
                    count = await write.export_items_parquet(output, items, show)
                else:
                    with _opened(output) as out:
                        count = await write.export_items_jsonl(out, items, show)
    if output != "-":
        print(f"{counted(count, 'item' if of_items else 'step')} in {output}")


@contextmanager
def _opened(output: str) -> Iterator[BinaryIO]:
    if output != "-":
        try:
            with Path(output).open("wb") as file:
                yield file
        except OSError as error:
            if error.filename is None:  # the write of a chunk, as on a full disk
                error.filename = output
            raise
        return
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def _strategy(name: str) -> TrajectoryStrategy:
    from runtime_core.trajectory.items import DefaultTrajectoryStrategy, MemoryTrajectoryStrategy, TrajectoryStrategy

    if name in ("default", "memory"):
        return DefaultTrajectoryStrategy() if name == "default" else MemoryTrajectoryStrategy()
    if ":" not in name:
        raise BadParameter(f"--strategy {name!r} is unknown: use default, memory or module:Class")
    found = load_object("strategy", name)
    if isinstance(found, type) and issubclass(found, TrajectoryStrategy):
        return found()
    if isinstance(found, TrajectoryStrategy):
        return found
    raise ConfigurationError(f"strategy {name!r} is not a TrajectoryStrategy: name a subclass or an instance of one")


def _reward(settings: Settings) -> RewardFunction:
    if settings.app is None:
        raise ConfigurationError("--reward needs the app's reward function: set WEFT_APP to package.module:app")
    app = load_app(settings.app)
    if app.reward_function is None:
        raise ConfigurationError(f"the app {settings.app!r} has no reward function: decorate one with @app.reward")
    return app.reward_function
