"""The trajectory store: reads, writes and erases the recorded steps of tasks, in SQLite or PostgreSQL."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self, TypedDict, cast

from sqlalchemy import ColumnElement, Select, and_, func, literal_column, or_, select, text, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from runtime_core.errors import InvalidInput
from runtime_core.trajectory import tables
from runtime_core.trajectory.database import (
    SqliteAddress,
    chains,
    contents_of,
    fork_of,
    in_parts,
    inherited_by,
    open_postgres,
    open_sqlite,
    parse,
    translated,
)
from runtime_core.trajectory.reading import StoredStep, TaskTrajectory, Unreadable, UsageReport, UsageSum
from runtime_core.trajectory.tables import RecordEntry, end_of, step_of
from runtime_core.trajectory.writers import (
    CONTENTS_LOCK,
    NO_ENTRY,
    Batch,
    PostgresWriter,
    SqliteWriter,
    Writer,
)
from runtime_core.wire.contents import without_nul
from runtime_core.wire.ids import ROOT_RUN, child_run
from runtime_core.wire.step import Status, TaskEnd, as_call, place

__all__ = ["Filters", "RecordEntry", "StoredStep", "TaskTrajectory", "TrajectoryStore", "Unreadable"]
_PAGE_ROWS_MAX = 1_000
_PAGE_BYTES = 4_000_000
_TASKS_PER_QUERY = 200
_TASKS_FOUND_FIRST = 2_000
"""The most tasks that a filter of ends may select for their steps to be read one task after the other."""
_NOW = timedelta(minutes=1)
"""Usage until a moment that is no longer ago is that until now."""
_LAST_DAY = datetime.max.replace(tzinfo=UTC) - timedelta(days=1)


async def erase(connection: AsyncConnection, namespace: str, task: str) -> int:
    """Erase a task's records in the transaction of `connection`. Return the number of deleted rows."""
    if connection.dialect.name == "postgresql":
        # A concurrent writer that reuses a stored content must record its use before the content can be erased.
        await connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": CONTENTS_LOCK})
    erased = 0
    # Delete first: in SQLite the first delete takes the write lock, before any read.
    for table in (tables.STEPS, tables.TASKS, tables.UNREADABLE, tables.FORKS):
        chosen = (table.c.namespace == namespace) & (table.c.task == task)
        erased += (await connection.execute(table.delete().where(chosen))).rowcount
    uses = tables.USES.c
    mine = (uses.namespace == namespace) & (uses.task == task)
    used = set((await connection.execute(select(uses.digest).where(mine))).scalars())
    if used:
        await connection.execute(tables.USES.delete().where(mine))
        await _erase_unused(connection, namespace, used)
    return erased


async def _erase_unused(connection: AsyncConnection, namespace: str, used: set[bytes]) -> None:
    parents: dict[bytes, bytes | None] = {}
    contents = set(used)
    for part in in_parts(used):
        for digest, parent, message, _ in await chains(connection, namespace, part):
            parents[digest] = parent
            contents.add(message)
    lists, uses = tables.LISTS, tables.USES
    kept = await _still_used(connection, namespace, parents)
    for part in in_parts(parents):
        read = select(lists.c.digest, lists.c.parent).where(lists.c.namespace == namespace, lists.c.parent.in_(part))
        kept.update(parent for child, parent in (await connection.execute(read)).all() if child not in parents)
    for head in list(kept):
        # Keep all prefixes of a list that is kept.
        at = parents.get(head)
        while at is not None and at not in kept:
            kept.add(at)
            at = parents.get(at)
    for part in in_parts(digest for digest in parents if digest not in kept):
        await connection.execute(lists.delete().where(lists.c.namespace == namespace, lists.c.digest.in_(part)))
    stored = tables.CONTENTS
    for part in in_parts(contents - parents.keys()):
        in_use = select(uses.c.digest).where(uses.c.namespace == namespace, uses.c.digest.in_(part))
        in_lists = select(lists.c.message).where(lists.c.namespace == namespace, lists.c.message.in_(part))
        unused = stored.c.digest.in_(part) & stored.c.digest.not_in(in_use) & stored.c.digest.not_in(in_lists)
        await connection.execute(stored.delete().where(stored.c.namespace == namespace, unused))


async def _still_used(connection: AsyncConnection, namespace: str, digests: Iterable[bytes]) -> set[bytes]:
    uses = tables.USES.c
    found: set[bytes] = set()
    for part in in_parts(digests):
        read = select(uses.digest).where(uses.namespace == namespace, uses.digest.in_(part)).distinct()
        found.update((await connection.execute(read)).scalars())
    return found


def _begins_with(task: ColumnElement[str], prefix: str) -> ColumnElement[bool]:
    # A range, so that the key serves it: ids sort by bytes.
    return and_(task >= prefix, task < prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _has_status(status: str) -> list[ColumnElement[bool]]:
    ends = tables.TASKS.c
    wanted: list[ColumnElement[bool]] = [ends.status == status]
    if status != Status.COMPLETED:
        wanted.append(ends.status != literal_column("'completed'"))  # as in the condition of the index
    return wanted


def _start_of_day(moment: datetime, *, up: bool) -> datetime:
    """Return the beginning (UTC) of a moment's day, or with `up` of the first day that begins then or later."""
    start = moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if not up or start == moment:
        return start
    return start + timedelta(days=1) if start < _LAST_DAY else datetime.max.replace(tzinfo=UTC)


class Filters(TypedDict, total=False):
    """Filters of `TrajectoryStore.steps`."""

    tasks: Sequence[str] | None
    status: str | None
    agent: str | None
    session: str | None
    since: datetime | None
    prefix: str | None
    """The beginning of the tasks' ids."""


class TrajectoryStore:
    """Steps and ends of tasks, by namespace. Safe to use from many tasks of one event loop."""

    def __init__(self, engine: AsyncEngine, writer: Writer) -> None:
        self._engine = engine
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> Self:
        """Open `sqlite:///path` or `postgresql://user:password@host/database`, and create its tables.

        Several processes may open one store at once. Raises ConfigurationError for a wrong URL, a missing driver or a
        newer version of the tables, StoreUnavailable if the database cannot be reached.
        """
        address = parse(url)
        if isinstance(address, SqliteAddress):
            return cls(await open_sqlite(address), SqliteWriter(address.path))
        engine = await open_postgres(address)
        return cls(engine, PostgresWriter(engine))

    @classmethod
    async def open_existing(cls, url: str) -> Self | None:
        """As `open`; None for a SQLite file that does not exist, which `open` would create."""
        path = url.removeprefix("sqlite:///")
        return await cls.open(url) if path == url or await asyncio.to_thread(Path(path).exists) else None

    async def cursor(self, namespace: str, partition: int) -> str:
        """Return the id of the last written record entry; initially `0-0`."""
        cursors = tables.CURSORS.c
        query = select(cursors.entry).where(cursors.namespace == namespace, cursors.partition == partition)
        with translated("the cursor was not read"):
            async with self._engine.connect() as connection:
                return (await connection.execute(query)).scalar_one_or_none() or NO_ENTRY

    async def epoch(self, namespace: str, partition: int) -> int:
        """Return the highest epoch that has written this partition; initially 0."""
        cursors = tables.CURSORS.c
        query = select(cursors.epoch).where(cursors.namespace == namespace, cursors.partition == partition)
        with translated("the epoch was not read"):
            async with self._engine.connect() as connection:
                return (await connection.execute(query)).scalar_one_or_none() or 0

    async def write(self, namespace: str, partition: int, epoch: int, entries: Sequence[RecordEntry]) -> None:
        """Write entries, oldest first, and move the cursor to the last of them, in one transaction.

        Rows are upserts: writing a batch again changes nothing. The cursor never moves back. Raises Fenced, and writes
        nothing, if a higher epoch has written this partition. An empty batch takes the fence for `epoch`. An entry with
        undecodable steps is stored intact (see `unreadable`) and does not block later ones.
        """
        await self._writer.write(Batch(namespace, partition, epoch, entries))

    async def task(self, namespace: str, task: str) -> TaskTrajectory | None:
        """Return the recorded steps and end of a task; None if nothing is recorded."""
        task = without_nul(task)
        steps, tasks = tables.STEPS.c, tables.TASKS.c
        read_steps = (
            select(tables.STEPS)
            .where(steps.namespace == namespace, steps.task == task)
            .order_by(steps.place, steps.ended, steps.attempt)
        )
        read_end = select(tables.TASKS).where(tasks.namespace == namespace, tasks.task == task)
        with translated("the task was not read"):
            async with self._engine.connect() as connection:
                # Read the end first: a commit between the two reads can then only add steps.
                end = (await connection.execute(read_end)).one_or_none()
                rows = (await connection.execute(read_steps)).all()
                contents = await contents_of(connection, namespace, rows)
                fork = await fork_of(connection, namespace, task)
                inherited = await inherited_by(connection, namespace, fork) if fork is not None else []
        if end is None and not rows:
            return None
        return TaskTrajectory(
            namespace,
            task,
            end_of(end) if end is not None else None,
            [step_of(row, contents) for row in rows],
            fork,
            inherited,
        )

    async def inputs(self, namespace: str, names: Sequence[str]) -> dict[str, bytes]:
        """Return the recorded inputs of tasks (JSON) by id. A few at a time: an input may have 1 MiB."""
        steps = tables.STEPS.c
        query = select(tables.STEPS).where(
            steps.namespace == namespace, steps.task.in_([without_nul(name) for name in names]),
            steps.place == place(ROOT_RUN, ""),
        )  # fmt: skip
        with translated("the inputs were not read"):
            async with self._engine.connect() as connection:
                rows = (await connection.execute(query)).all()
                contents = await contents_of(connection, namespace, rows)
        return {row.task: bytes(step_of(row, contents).input) for row in rows}

    async def tasks(
        self,
        namespace: str,
        *,
        status: str | None = None,
        agent: str | None = None,
        session: str | None = None,
        since_ms: float = 0.0,
        until_ms: float = math.inf,
        limit: int = 50,
        before: str | None = None,
    ) -> list[TaskEnd]:
        """Return ended tasks, the latest end first. `since_ms` and `until_ms` bound when they were created.

        `before` is the id of the last task of the previous page: only tasks that ended earlier are returned.
        """
        tasks = tables.TASKS.c
        query = select(tables.TASKS).where(tasks.namespace == namespace)
        if status is not None:
            query = query.where(*_has_status(status))
        if agent is not None:
            query = query.where(tasks.agent == agent)
        if session is not None:
            query = query.where(tasks.session == without_nul(session))
        if since_ms > 0:
            # An index has the end, which comes after.
            query = query.where(tasks.created >= since_ms, tasks.ended >= since_ms)
        if until_ms < math.inf:
            query = query.where(tasks.created < until_ms)
        query = query.order_by(tasks.ended.desc(), tasks.task.desc()).limit(limit)
        with translated("the tasks were not read"):
            async with self._engine.connect() as connection:
                if before is not None:
                    read = select(tasks.ended, tasks.task).where(
                        tasks.namespace == namespace, tasks.task == without_nul(before)
                    )
                    last = (await connection.execute(read)).one_or_none()
                    if last is None:
                        raise InvalidInput("before", f"there is no ended task {before!r}; start again without `before`")
                    query = query.where(tuple_(tasks.ended, tasks.task) < tuple_(last.ended, last.task))
                return [end_of(row) for row in (await connection.execute(query)).all()]

    async def steps(
        self,
        namespace: str,
        *,
        tasks: Sequence[str] | None = None,
        status: str | None = None,
        agent: str | None = None,
        session: str | None = None,
        since: datetime | None = None,
        prefix: str | None = None,
        kind: str | None = None,
    ) -> AsyncIterator[StoredStep]:
        """Yield steps by task, each task's in order. `kind` selects one kind of steps, `prefix` ids of tasks.

        `status`, `agent`, `session` and `since` (when the task ended, with a time zone) exclude tasks that have not
        ended. Each page is a separate query: memory stays flat, no transaction stays open, and concurrent writes may
        or may not be seen.
        """
        ends = tables.TASKS.c
        wanted: list[ColumnElement[bool]] = []
        of_ends: list[ColumnElement[bool]] = []
        if kind is not None:
            wanted.append(tables.STEPS.c.kind == kind)
        if prefix:
            wanted.append(_begins_with(tables.STEPS.c.task, prefix))
        if status is not None:
            of_ends += _has_status(status)
        if agent is not None:
            of_ends.append(ends.agent == agent)
        if session is not None:
            of_ends.append(ends.session == without_nul(session))
        if since is not None:
            if since.tzinfo is None:
                raise InvalidInput("since", "has no time zone: add one, as in 2026-11-01T00:00:00+00:00")
            of_ends.append(ends.ended >= since.timestamp() * 1_000)
        few: list[str] | None = None
        if of_ends and tasks is None:
            # If they are few, read their steps by name; a join in the order of the steps would read all steps.
            few = await self._few(select(ends.task).where(ends.namespace == namespace, *of_ends))
        if few is None:
            wanted += of_ends
        else:
            tasks = few
        if tasks is None:
            async for stored in self._pages(namespace, wanted):
                yield stored
            return
        names = sorted({without_nul(task) for task in tasks})
        for first in range(0, len(names), _TASKS_PER_QUERY):
            named = tables.STEPS.c.task.in_(names[first : first + _TASKS_PER_QUERY])
            async for stored in self._pages(namespace, [named, *wanted]):
                yield stored

    async def _few(self, query: Select[str]) -> list[str] | None:
        """Return the ids of tasks, or None if they are more than may be read one after the other."""
        with translated("the tasks were not read"):
            async with self._engine.connect() as connection:
                found = list((await connection.execute(query.limit(_TASKS_FOUND_FIRST + 1))).scalars())
        return found if len(found) <= _TASKS_FOUND_FIRST else None

    async def call_of(self, namespace: str, task: str, run: str, step: str) -> str:
        """Return a step as the call that made it, as in `ctx.tool("search")`; empty if it is not recorded."""
        rows = tables.STEPS.c
        own = and_(rows.run == without_nul(run), rows.step == without_nul(step))
        called = and_(rows.run == without_nul(child_run(run, step)), rows.step == "")
        wanted: list[ColumnElement[bool]] = [rows.task == without_nul(task), or_(own, called)]
        found = ""
        async for stored in self._pages(namespace, wanted):
            row = stored.step
            data = row.output if row.kind == "emit" else row.input
            found = as_call(row.kind, row.name, row.key, bytes(data))
        return found

    async def _pages(self, namespace: str, wanted: Sequence[ColumnElement[bool]]) -> AsyncIterator[StoredStep]:
        steps, ends = tables.STEPS.c, tables.TASKS.c
        joined = tables.STEPS.outerjoin(tables.TASKS, and_(ends.namespace == steps.namespace, ends.task == steps.task))
        # Labels keep the steps' columns readable by name, since both tables have columns of the same names.
        end_columns = [column.label(f"end_{column.name}") for column in ends]
        query = (
            select(tables.STEPS, *end_columns)
            .select_from(joined)
            .where(steps.namespace == namespace, *wanted)
            .order_by(steps.task, steps.place, steps.ended, steps.attempt)
        )
        position = tuple_(steps.task, steps.place, steps.ended, steps.attempt)
        rows_wanted = _PAGE_ROWS_MAX // 10
        page = query
        while True:
            with translated("the steps were not read"):
                async with self._engine.connect() as connection:
                    rows = (await connection.execute(page.limit(rows_wanted))).all()
                    contents = await contents_of(connection, namespace, rows)
            size = 1
            for row in rows:
                step = step_of(row, contents)
                size += len(bytes(step.input)) + len(bytes(step.output))
                end = end_of(row[-len(end_columns) :]) if row.end_task is not None else None
                yield StoredStep(row.task, end, step)
            if len(rows) < rows_wanted:
                return
            last = rows[-1]
            page = query.where(position > tuple_(last.task, last.place, last.ended, last.attempt))
            rows_wanted = max(10, min(_PAGE_ROWS_MAX, len(rows) * _PAGE_BYTES // size))

    async def usage(
        self, namespace: str, since: datetime, until: datetime, prefix: str = ""
    ) -> AsyncIterator[UsageReport]:
        """Yield the usage in steps of tasks that have ended in a span of time, in the order of the ends.

        `prefix` selects tasks by the beginning of their ids. Each page is a separate query, as in `steps`.
        """
        steps, ends = tables.STEPS.c, tables.TASKS.c
        position = tuple_(ends.ended, ends.task, steps.place, steps.attempt)
        wanted = [ends.namespace == namespace, ends.ended >= since.timestamp() * 1_000]
        wanted += [ends.ended < until.timestamp() * 1_000, steps.usage.is_not(None)]
        if prefix:
            # Not by the key: SQLite would read all steps of the prefix, and sort them again for each page.
            wanted.append(_begins_with(ends.task.concat(""), prefix))
        query = (
            select(
                ends.ended, ends.task, ends.agent, steps.place, steps.attempt, steps.kind, steps.name, steps.usage,
                steps.attributes,
            )
            .select_from(
                tables.TASKS.join(tables.STEPS, and_(steps.namespace == ends.namespace, steps.task == ends.task))
            )
            .where(*wanted)
            .order_by(ends.ended, ends.task, steps.place, steps.attempt)
            .limit(_PAGE_ROWS_MAX)
        )  # fmt: skip
        page = query
        while True:
            with translated("the usage was not read"):
                async with self._engine.connect() as connection:
                    rows = (await connection.execute(page)).all()
            for row in rows:
                step = tables.usage_report(row.kind, row.name, row.usage, row.attributes)
                yield UsageReport(row.task, row.agent, row.ended, *step)
            if len(rows) < _PAGE_ROWS_MAX:
                return
            last = rows[-1]
            page = query.where(position > tuple_(last.ended, last.task, last.place, last.attempt))

    async def usage_sums(
        self,
        namespace: str,
        by: Collection[str],
        since: datetime,
        until: datetime,
        *,
        tenant: str = "",
        most: int,
    ) -> tuple[list[UsageSum], bool]:
        """Return the usage of tasks that ended in a span of time, by `agent`, `model`, `tenant` and `day` (UTC).

        Also returns whether it is complete. The store keeps sums of whole days. Reports of a day of which the span has
        a part are read one by one, at most `most` for each of the two ends; a span until now has no such end.
        """
        sums: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        tasks: Counter[tuple[str, ...]] = Counter()
        first, last = _start_of_day(since, up=True), _start_of_day(until, up=until >= datetime.now(UTC) - _NOW)
        parts = [(since, min(first, until)), (max(last, since), until)] if first <= last else [(since, until)]
        if first < last:
            await self._add_days(namespace, by, first, last, tenant, sums, tasks)
        complete = True
        for begin, end in parts:
            complete &= begin >= end or await self._add_reports(namespace, by, begin, end, tenant, sums, tasks, most)
        return [UsageSum(group, tasks[group], dict(sums[group])) for group in sorted(sums) if tasks[group]], complete

    async def _add_days(
        self,
        namespace: str,
        by: Collection[str],
        since: datetime,
        until: datetime,
        tenant: str,
        sums: dict[tuple[str, ...], Counter[str]],
        tasks: Counter[tuple[str, ...]],
    ) -> None:
        usage = tables.USAGE.c
        columns = [usage[name] for name in by]
        wanted = [usage.namespace == namespace, usage.day >= since.date().isoformat()]
        wanted += [usage.day < until.date().isoformat()]
        # The sum over models of how many tasks used each is not how many tasks there were.
        wanted.append(usage.kind.in_(["amount", "model_tasks" if "model" in by else "tasks"]))
        if tenant:
            wanted.append(usage.tenant == tenant)
        query = select(*columns, usage.kind, usage.name, func.sum(usage.amount)).where(*wanted)
        with translated("the usage was not read"):
            async with self._engine.connect() as connection:
                rows = (await connection.execute(query.group_by(*columns, usage.kind, usage.name))).all()
        for *group, kind, name, amount in rows:
            if kind == "amount":
                sums[tuple(group)][name] += amount
            else:
                tasks[tuple(group)] += round(amount)

    async def _add_reports(
        self,
        namespace: str,
        by: Collection[str],
        since: datetime,
        until: datetime,
        tenant: str,
        sums: dict[tuple[str, ...], Counter[str]],
        tasks: Counter[tuple[str, ...]],
        most: int,
    ) -> bool:
        """Add reports one by one. Return whether there were at most `most`."""
        seen: set[tuple[str, tuple[str, ...]]] = set()
        read = 0
        async for report in self.usage(namespace, since, until, f"{tenant}." if tenant else ""):
            if read == most:
                return False
            read += 1
            values = {
                "agent": report.agent, "model": report.model, "tenant": tables.tenant_of(report.task),
                "day": tables.day_of(report.ended_ms),
            }  # fmt: skip
            group = tuple(values[each] for each in by)
            sums[group].update(cast(Mapping[str, int], report.amounts))
            seen.add((report.task, group))
        tasks.update(group for _, group in seen)
        return True

    async def unreadable(self, namespace: str, *, limit: int = 50) -> list[Unreadable]:
        """Return entries with undecodable steps, by partition, oldest first."""
        table = tables.UNREADABLE
        query = (
            select(table.c.partition, table.c.entry, table.c.task, table.c.reason, table.c.steps)
            .where(table.c.namespace == namespace)
            .order_by(table.c.partition, table.c.entry)
            .limit(limit)
        )
        with translated("the unreadable entries were not read"):
            async with self._engine.connect() as connection:
                return [Unreadable(*row) for row in (await connection.execute(query)).all()]

    async def delete(self, namespace: str, task: str) -> int:
        """Erase a task's records. Return the number of deleted rows."""
        with translated("the task was not deleted"):
            async with self._engine.begin() as connection:
                return await erase(connection, namespace, without_nul(task))

    async def close(self) -> None:
        """Finish a write in progress and close the database. Idempotent."""
        await self._writer.close()
        await self._engine.dispose()
