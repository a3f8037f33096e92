"""Reads where a task was forked, and the steps that it has from there: they are recorded once, with who did them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from runtime_core.trajectory import tables
from runtime_core.trajectory.place import before, place
from runtime_core.trajectory.reading import contents_of
from runtime_core.trajectory.rows import step_of
from runtime_core.trajectory.steps import Fork, Step


async def fork_of(connection: AsyncConnection, namespace: str, task: str) -> Fork | None:
    """Return where a task was forked; None where it began by itself."""
    forks = tables.FORKS.c
    read = select(forks.fork_of_task, forks.fork_of_step).where(forks.namespace == namespace, forks.task == task)
    found = (await connection.execute(read)).one_or_none()
    return Fork(found.fork_of_task, found.fork_of_step) if found is not None else None


async def inherited_by(connection: AsyncConnection, namespace: str, fork: Fork) -> list[Step]:
    """Return the steps before a fork, ordered by their place; of a fork of a fork, those of all its origins."""
    inherited: list[Step] = []
    origin: Fork | None = fork
    seen: set[str] = set()
    while origin is not None and origin.step and origin.task not in seen:
        seen.add(origin.task)
        inherited += await _steps_before(connection, namespace, origin)
        further = await fork_of(connection, namespace, origin.task)
        # What the origin has inherited itself counts up to this fork at most.
        if further is not None and place("r", origin.step) < place("r", further.step):
            further = Fork(further.task, origin.step)
        origin = further
    inherited.sort(key=lambda step: (place(step.run, step.step), step.attempt))
    return inherited


async def _steps_before(connection: AsyncConnection, namespace: str, fork: Fork) -> list[Step]:
    steps = tables.STEPS.c
    read = (
        select(tables.STEPS)
        .where(steps.namespace == namespace, steps.task == fork.task)
        .order_by(steps.place, steps.attempt)
    )
    rows = [row for row in (await connection.execute(read)).all() if before(row.run, row.step, fork.step)]
    contents = await contents_of(connection, namespace, rows)
    return [step_of(row, contents) for row in rows]
