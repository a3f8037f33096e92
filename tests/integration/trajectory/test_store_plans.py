"""The plans of the store's queries: with any number of tasks, an index finds the rows and gives their order."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event

from runtime_core.trajectory.store import TrajectoryStore
from tests.integration.trajectory.stores import ENDED_MS, Database

TASKS = 5_000
_SERIES = f"WITH RECURSIVE series(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM series WHERE n < {TASKS})"
_FILL = (
    "INSERT INTO weft_tasks (namespace, task, status, agent, steps, created, ended, session) "
    f"{_SERIES} SELECT 'weft', 'acme.t-' || n, CASE WHEN n % 500 = 0 THEN 'failed' ELSE 'completed' END, "
    f"'agent-' || (n % 100), 1, 0, {ENDED_MS} + n, 'session-' || (n % 100) FROM series",
    "INSERT INTO weft_steps (namespace, task, place, attempt, run, step, kind, name, status, started, ended, key, "
    f"usage, cause, owner) {_SERIES} SELECT 'weft', 'acme.t-' || n, 'r', 1, 'r', '', 'agent', 'a', 'completed', 0, 1, "
    "'', '{\"input_tokens\":1}', '', '' FROM series",
)
LATE = datetime.fromtimestamp((ENDED_MS + TASKS - 50) / 1000, UTC)
"""Fifty tasks have ended after this."""
DAY = LATE.replace(hour=0, minute=0, second=0, microsecond=0)

Read = tuple[str, frozenset[str]]
"""An index, and its columns that bound what is read of it."""
Queries = Callable[[TrajectoryStore], AsyncIterator[Any] | Awaitable[Any]]
STEPS_OF_TASKS = ("steps", {"namespace", "task"})
TASKS_BY_ID = ("tasks", {"namespace", "task"})


def by(index: str, *columns: str) -> tuple[str, set[str]]:
    return f"tasks_by_{index}", {"namespace", *columns}


@pytest.fixture
async def full(database: Database) -> AsyncIterator[TrajectoryStore]:
    """A store with ended tasks of a tenant: fifty of each agent and of each session, ten failed ones."""
    opened = await TrajectoryStore.open(database.url)
    await database.execute(*_FILL, *([] if database.path is not None else ["ANALYZE weft_tasks", "ANALYZE weft_steps"]))
    yield opened
    await opened.close()


async def plans(store: TrajectoryStore, queries: Queries) -> list[list[Read]]:
    """Return what each query reads, in the plan that the database makes for it."""
    made: list[tuple[str, Any]] = []
    engine = store._engine

    def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
        made.append((statement, parameters))

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        asked = queries(store)
        if isinstance(asked, AsyncIterator):
            _ = [each async for each in asked]
        else:
            await asked
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)
    found = []
    async with engine.connect() as connection:
        for statement, parameters in made:
            if engine.dialect.name == "sqlite":
                explained = await connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
                lines = [row["detail"] for row in explained.mappings()]
                found.append([_of_sqlite(line) for line in lines if line.startswith(("SEARCH", "SCAN"))])
            else:
                # In tables of this size, reading all rows is cheap. The question is whether an index serves.
                await connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
                explained = await connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {statement}", parameters)
                plan = explained.scalar_one()
                found.append(_of_postgres((json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]))
    return found


def _of_sqlite(line: str) -> Read:
    using = r"(?:(?:COVERING )?INDEX (?P<index>\w+)|PRIMARY KEY)"
    parts = re.match(rf"SEARCH (?P<table>\w+) USING {using} \((?P<bounds>.*)\)", line)
    assert parts is not None, f"the plan reads a whole table: {line}"
    index = re.sub(r"^(?:sqlite_autoindex_)?weft_(.*?)(?:_1)?$", r"\1", parts["index"] or parts["table"])
    return index, frozenset(re.findall(r"[a-z]+(?=[=<>,)])", parts["bounds"]))


def _of_postgres(node: dict[str, Any]) -> list[Read]:
    assert node["Node Type"] != "Seq Scan", f"the plan reads a whole table: {node}"
    found = [read for part in node.get("Plans", ()) for read in _of_postgres(part)]
    if "Index Name" in node:
        index = re.sub(r"^weft_(.*?)(?:_pkey)?$", r"\1", node["Index Name"])
        bounds = re.sub(r"'[^']*'::\w+|weft_\w+\.", "", node.get("Index Cond", ""))
        found.append((index, frozenset(re.findall(r"\b[a-z]+\b(?= [=<>]|,|\) [<>])", bounds))))
    return found


@pytest.mark.parametrize(
    ("queries", "expected"),
    [
        # An export: first the tasks, if they are few, then their steps.
        (lambda s: s.steps("weft", agent="agent-7"), [by("agent", "agent"), STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", session="session-7"), [by("session", "session"), STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", since=LATE), [by("end", "ended"), STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", agent="agent-77", since=LATE), [by("agent", "agent", "ended"), STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", agent="agent-7", prefix="acme."), [by("agent", "agent"), STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", status="failed"), [by("status", "status"), STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", prefix="acme.t-77"), [STEPS_OF_TASKS]),
        (lambda s: s.steps("weft", tasks=["acme.t-7", "acme.t-8"]), [STEPS_OF_TASKS]),
        (lambda s: s.tasks("weft"), [by("end")]),
        (lambda s: s.tasks("weft", status="failed"), [by("status", "status")]),
        (lambda s: s.tasks("weft", status="completed"), [by("end")]),
        (lambda s: s.tasks("weft", since_ms=LATE.timestamp() * 1000), [by("end", "ended")]),
        (lambda s: s.tasks("weft", agent="agent-7"), [by("agent", "agent")]),
        (lambda s: s.tasks("weft", session="session-7"), [by("session", "session")]),
        (lambda s: s.tasks("weft", before="acme.t-4000"), [TASKS_BY_ID, by("end", "ended", "task")]),
        (
            lambda s: s.tasks("weft", agent="agent-7", before="acme.t-4007"),
            [TASKS_BY_ID, by("agent", "agent", "ended", "task")],
        ),
        (lambda s: s.usage("weft", LATE, datetime.now(UTC)), [by("end", "ended")]),
        (
            lambda s: s.usage_sums("weft", ["agent"], DAY, datetime.now(UTC), most=0),
            [("usage", {"namespace", "day"})],
        ),
        (lambda s: s.usage("weft", LATE, datetime.now(UTC), "acme."), [by("end", "ended")]),
        (lambda s: s.task("weft", "acme.t-7"), [TASKS_BY_ID, STEPS_OF_TASKS, ("forks", {"namespace", "task"})]),
        (lambda s: s.inputs("weft", ["acme.t-7"]), [("steps", {"namespace", "task", "place"})]),
    ],
)
async def test_an_index_finds_what_a_query_asks_for(
    full: TrajectoryStore, queries: Queries, expected: list[tuple[str, set[str]]]
) -> None:
    found = await plans(full, queries)
    assert len(found) == len(expected)
    for reads, (index, bounds) in zip(found, expected, strict=True):
        assert any(index in (name, "") and bounds <= columns for name, columns in reads), reads
        for name, columns in reads:
            assert name != "steps" or {"namespace", "task"} <= columns, f"it reads the steps of all tasks: {reads}"
