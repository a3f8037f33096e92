"""`weft trajectory`: the recorded steps of tasks."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from runtime_core.cli.output import print_json

if TYPE_CHECKING:
    from runtime_core.config.settings import Settings
    from runtime_core.trajectory.items import RewardFunction, TrajectoryStrategy
    from runtime_core.trajectory.store import Filters, TrajectoryStore


class Format(enum.StrEnum):
    """Files that trajectories can be exported to: a row per step, or per item of state, action and reward."""

    JSONL = "jsonl"
    PARQUET = "parquet"
    SAR = "sar"
    SAR_PARQUET = "sar-parquet"

    @property
    def is_parquet(self) -> bool:
        return self in (Format.PARQUET, Format.SAR_PARQUET)

    @property
    def has_items(self) -> bool:
        return self in (Format.SAR, Format.SAR_PARQUET)


@dataclass(frozen=True, slots=True)
class _Items:
    """How items are made of steps."""

    strategy: str
    reward: bool
    min_reward: float | None


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
    from runtime_core.cli.connection import run

    run(_show(task_id, as_json))


def export(
    file_format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="One JSON object per line, or Parquet; sar and sar-parquet have a row per item for training.",
        ),
    ] = Format.JSONL,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is standard output.")] = (
        "-"
    ),
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="ID", help="Only this task; may be given several times.")
    ] = None,
    status: Annotated[str, typer.Option("--status", metavar="STATUS", help="Only tasks that ended so.")] = "",
    agent: Annotated[str, typer.Option("--agent", metavar="NAME", help="Only tasks of this agent.")] = "",
    session: Annotated[str, typer.Option("--session", metavar="ID", help="Only tasks of this session.")] = "",
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="TIME", help="Only tasks that ended since then, as in 2026-11-01 or 2026-11-01T08:00Z."
        ),
    ] = "",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="Of items: default, memory (messages from what was heard and said), or module:Class of your own.",
        ),
    ] = "default",
    reward: Annotated[
        bool, typer.Option("--reward", help="Of items: score them by the @app.reward function of WEFT_APP.")
    ] = False,
    min_reward: Annotated[
        float | None,
        typer.Option("--min-reward", metavar="X", help="Of items: only those with this score or more. Means --reward."),
    ] = None,
) -> None:
    """Export steps, or items for training.

    One row per step with its task, ordered by task; or one per item: the state that an agent saw, its action with the
    tokens that it took, and the reward. Works without the broker.

    \b
    Examples:
      weft trajectory export --status completed --since 2026-11-01 --output steps.jsonl
      weft trajectory export --format parquet --output steps.parquet
      weft trajectory export --format sar --session s-1 --min-reward 0.5 --output items.jsonl
    """
    from runtime_core.cli.connection import run

    if file_format.is_parquet and output == "-":
        raise typer.BadParameter("Parquet cannot go to standard output: name a file with --output")
    if not file_format.has_items and (reward or min_reward is not None or strategy != "default"):
        raise typer.BadParameter("--strategy, --reward and --min-reward are about items: use them with --format sar")
    filters: Filters = {
        "tasks": task,
        "status": status or None,
        "agent": agent or None,
        "session": session or None,
        "since": _since(since),
    }
    items = _Items(strategy, reward or min_reward is not None, min_reward)
    run(_export(file_format, output, items, filters), None)


def _since(text: str) -> datetime | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"--since {text!r} is no time; write it as 2026-11-01 or 2026-11-01T08:00Z") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


async def _show(task_id: str, as_json: bool) -> None:
    from runtime_core.cli.connection import read_settings, trajectories
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


async def _export(file_format: Format, output: str, items: _Items, filters: Filters) -> None:
    from runtime_core.cli.connection import read_settings, trajectories

    settings = read_settings()
    write = _export_items if file_format.has_items else _export_steps
    async with trajectories(settings) as store:
        if store is None:
            raise _no_store(settings)
        count = await write(store, settings, file_format, output, items, filters)
    if output != "-":
        print(f"{count} {'items' if file_format.has_items else 'steps'} in {output}")


async def _export_steps(
    store: TrajectoryStore, settings: Settings, file_format: Format, output: str, _: _Items, filters: Filters
) -> int:
    from runtime_core.trajectory.export import export_jsonl, export_parquet

    if file_format.is_parquet:
        return await export_parquet(store, settings.namespace, output, **filters)
    with _opened(output) as out:
        return await export_jsonl(store, settings.namespace, out, **filters)


async def _export_items(
    store: TrajectoryStore, settings: Settings, file_format: Format, output: str, items: _Items, filters: Filters
) -> int:
    from runtime_core.trajectory.export import export_items_jsonl, export_items_parquet, trajectory_items

    made = trajectory_items(
        store,
        settings.namespace,
        strategy=_strategy(items.strategy),
        reward=_reward(settings) if items.reward else None,
        min_reward=items.min_reward,
        **filters,
    )
    if file_format.is_parquet:
        return await export_items_parquet(output, made)
    with _opened(output) as out:
        return await export_items_jsonl(out, made)


@contextmanager
def _opened(output: str) -> Iterator[BinaryIO]:
    if output != "-":
        with Path(output).open("wb") as file:
            yield file
        return
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


def _strategy(name: str) -> TrajectoryStrategy:
    from runtime_core.app.loading import load_object
    from runtime_core.errors import ConfigurationError
    from runtime_core.trajectory.items import DefaultTrajectoryStrategy, MemoryTrajectoryStrategy, TrajectoryStrategy

    if name == "default":
        return DefaultTrajectoryStrategy()
    if name == "memory":
        return MemoryTrajectoryStrategy()
    if ":" not in name:
        raise typer.BadParameter(f"--strategy {name!r} is not known: use default, memory or module:Class")
    found = load_object("strategy", name)
    if isinstance(found, type) and issubclass(found, TrajectoryStrategy):
        return found()
    if isinstance(found, TrajectoryStrategy):
        return found
    raise ConfigurationError(f"strategy {name!r} is no TrajectoryStrategy: name a subclass or an instance of one")


def _reward(settings: Settings) -> RewardFunction:
    from runtime_core.app.loading import load_app
    from runtime_core.errors import ConfigurationError

    if settings.app is None:
        raise ConfigurationError("--reward asks the app for its reward function: set WEFT_APP to package.module:app")
    app = load_app(settings.app)
    if app.reward_function is None:
        raise ConfigurationError(f"the app {settings.app!r} scores nothing: decorate a function with @app.reward")
    return app.reward_function


def _no_store(settings: Settings) -> Exception:
    from runtime_core.config.values import without_password
    from runtime_core.errors import ConfigurationError

    return ConfigurationError(
        f"there is no trajectory store at {without_password(settings.trajectory_url)}: set WEFT_TRAJECTORY_URL (or "
        "WEFT_DATA_DIR) as the trajectory-recorder has it"
    )
