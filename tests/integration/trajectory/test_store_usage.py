"""The sums of usage equal those of the stored reports, whatever is written again, or late."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from runtime_core.telemetry.spans import RESPONSE_MODEL
from runtime_core.trajectory.reading import UsageSum
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.trajectory.tables import tenant_of
from runtime_core.wire.step import Step
from tests.integration.trajectory.stores import ENDED_MS, Database, end, entry, step

DAY = datetime.fromtimestamp(ENDED_MS / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
WEEK = DAY - timedelta(days=3), DAY + timedelta(days=4)
DAY_MS = 86_400_000.0
GROUPINGS = (("agent",), ("model",), ("tenant", "day"), ("agent", "model", "tenant", "day"), ())


def call(path: str, model: str = "m", **usage: float) -> Step:
    return step(path=path, kind="model", name="asked", usage=usage, attributes={RESPONSE_MODEL: model})


def spend(path: str, **usage: float) -> Step:
    return step(path=path, kind="usage", name="usage", usage=usage)


async def sums(store: TrajectoryStore, *by: str, tenant: str = "") -> list[UsageSum]:
    found, complete = await store.usage_sums("weft", by, *WEEK, tenant=tenant, most=0)
    assert complete
    return found


async def reported(store: TrajectoryStore, by: Sequence[str], tenant: str = "") -> list[UsageSum]:
    """Return what `sums` must be, from the stored reports."""
    amounts: dict[tuple[str, ...], Counter[str]] = {}
    tasks: dict[tuple[str, ...], set[str]] = {}
    async for report in store.usage("weft", *WEEK, f"{tenant}." if tenant else ""):
        day = datetime.fromtimestamp(report.ended_ms / 1000, UTC).date().isoformat()
        values = {"agent": report.agent, "model": report.model, "tenant": tenant_of(report.task), "day": day}
        group = tuple(values[each] for each in by)
        amounts.setdefault(group, Counter()).update(cast(Mapping[str, int], report.amounts))
        tasks.setdefault(group, set()).add(report.task)
    return [UsageSum(group, len(tasks[group]), dict(amounts[group])) for group in sorted(amounts)]


async def check(store: TrajectoryStore) -> list[UsageSum]:
    """Compare the sums with the stored reports. Return those of all tasks by model."""
    for by in GROUPINGS:
        for tenant in ("", "acme"):
            found, expected = await sums(store, *by, tenant=tenant), await reported(store, by, tenant)
            assert [(each.group, each.tasks) for each in found] == [(each.group, each.tasks) for each in expected]
            for one, other in zip(found, expected, strict=True):
                kept = {
                    name: amount for name, amount in one.amounts.items() if abs(amount) > 1e-9 or name in other.amounts
                }
                assert kept == pytest.approx(other.amounts)
    return await sums(store, "model")


async def test_usage_counts_once_its_task_has_ended(store: TrajectoryStore) -> None:
    await store.write("weft", 0, 1, [entry("1-0", "t", call("1", tokens=3), spend("2", cost=0.5))])
    assert await check(store) == []
    await store.write("weft", 0, 1, [entry("2-0", "t", call("3", "large", tokens=4), ends=end("t"))])
    assert await check(store) == [
        UsageSum(("",), 1, {"cost": 0.5}), UsageSum(("large",), 1, {"tokens": 4}), UsageSum(("m",), 1, {"tokens": 3}),
    ]  # fmt: skip
    assert await sums(store, "agent") == [UsageSum(("researcher",), 1, {"cost": 0.5, "tokens": 7})]
    late = entry("3-0", "t", call("4", tokens=5))
    await store.write("weft", 0, 1, [late])
    assert (await check(store))[-1] == UsageSum(("m",), 1, {"tokens": 8})


async def test_usage_that_is_written_again_counts_once(store: TrajectoryStore, database: Database) -> None:
    ended = end("acme.t")
    batch = [entry("1-0", "acme.t", *(call(str(n), cost=n / 10, tokens=n) for n in range(1, 8)), ends=ended)]
    await store.write("weft", 0, 1, batch)
    before = await sums(store, "agent", "day")
    for size in (1, 1, 2):
        await store.write("weft", 0, 1, batch * size)
        assert await sums(store, "agent", "day") == before
    await check(store)
    # A row that replaces one without usage, with another, and one that takes it back.
    for changed in (call("3", tokens=50), step(path="3"), call("3", tokens=2)):
        await store.write("weft", 0, 1, [entry("2-0", "acme.t", changed)])
        await check(store)


async def test_a_task_that_ends_again_counts_at_its_last_end(store: TrajectoryStore) -> None:
    """A redriven one."""
    await store.write("weft", 0, 1, [entry("1-0", "t", call("1", tokens=3), ends=end("t", status="failed"))])
    again = end("t", agent="second", ended=ENDED_MS + DAY_MS)
    await store.write("weft", 0, 1, [entry("2-0", "t", call("2", tokens=4), ends=again)])
    day = (DAY + timedelta(days=1)).date().isoformat()
    await check(store)
    found = await sums(store, "agent", "day")
    assert found == [UsageSum(("second", day), 1, {"tokens": 7})]


async def test_sums_equal_the_reports_after_any_writes(store: TrajectoryStore) -> None:
    chance = random.Random(19)
    for batch in range(1, 40):
        entries: list[RecordEntry] = []
        for number in range(chance.randrange(1, 6)):
            task = chance.choice(("acme.", "b.", "")) + f"t-{chance.randrange(12)}"
            rows = [
                chance.choice((call, call, spend))(str(chance.randrange(4)), **{chance.choice("abc"): chance.random()})  # type: ignore[arg-type]  # no model
                if chance.random() < 0.8
                else step(path=str(chance.randrange(4)))
                for _ in range(chance.randrange(3))
            ]
            agent, ended = chance.choice(("x", "y")), ENDED_MS + chance.randrange(-2, 3) * DAY_MS
            ends = end(task, agent=agent, ended=ended) if chance.random() < 0.4 else None
            entries.append(entry(f"{batch}-{number}", task, *rows, ends=ends))
        await store.write("weft", 0, 1, entries)
        if batch % 13 == 0:
            await check(store)


async def test_partitions_that_write_at_once_add_to_the_same_sums(database: Database) -> None:
    stores = [await TrajectoryStore.open(database.url) for _ in range(4)]
    try:
        for round in range(1, 6):
            await asyncio.gather(
                *(
                    each.write("weft", partition, 1, [
                        entry(f"{round}-{n}", f"t-{partition}-{round}-{n}", call("1", f"m-{n % 5}", tokens=1),
                              ends=end(f"t-{partition}-{round}-{n}"))
                        for n in range(20)
                    ])
                    for partition, each in enumerate(stores)
                )
            )  # fmt: skip
        await check(stores[0])
        assert await sums(stores[0]) == [UsageSum((), 400, {"tokens": 400})]
    finally:
        await asyncio.gather(*(each.close() for each in stores))


async def test_sums_outlive_an_erased_task(store: TrajectoryStore, database: Database) -> None:
    await store.write("weft", 0, 1, [entry("1-0", "t", call("1", tokens=3), ends=end("t"))])
    before = await sums(store, "model")
    await store.delete("weft", "t")
    assert await sums(store, "model") == before
    assert await database.number("SELECT count(*) FROM weft_usage") == 3


async def test_parts_of_days_are_read_report_by_report(store: TrajectoryStore) -> None:
    days = [ENDED_MS + (number + 0.5) * DAY_MS for number in range(-2, 3)]
    await store.write(
        "weft", 0, 1,
        [entry(f"1-{n}", f"t-{n}", call("1", tokens=1), ends=end(f"t-{n}", ended=at)) for n, at in enumerate(days)],
    )  # fmt: skip
    moments = [datetime.fromtimestamp(at / 1000 + change, UTC) for at in days for change in (-0.001, 0, 0.001)]
    moments += [DAY, DAY + timedelta(days=1), datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
    for since in moments:
        for until in moments:
            expected = sum(since.timestamp() * 1000 <= at < until.timestamp() * 1000 for at in days)
            found, complete = await store.usage_sums("weft", ["agent"], since, until, most=2)
            assert complete
            assert sum(each.tasks for each in found) == expected
    part = DAY + timedelta(milliseconds=1), DAY + timedelta(hours=23)
    for most, is_complete in ((0, False), (1, True)):
        found, complete = await store.usage_sums("weft", [], *part, most=most)
        assert complete is is_complete
        assert len(found) == most


async def test_a_usage_name_too_long_for_an_index_stops_nothing(store: TrajectoryStore) -> None:
    rows = [
        call("1", "m" * 5_000 + "\0", **{"n" * 5_000: 1.0, "\0": 2.0, "large": 1.7e308}),
        call("2", "ü" * 5_000, **{"ü" * 5_000: 1.0, "large": 1.7e308}),
    ]
    ends = [end("ü" * 120 + ".t", agent="é" * 5_000), end("t", ended=1e20), end("u", ended=-1e20)]
    await store.write("weft", 0, 1, [entry(f"1-{n}", each.task, *rows, ends=each) for n, each in enumerate(ends)])
    assert [each.task for each in await store.tasks("weft")] == ["t", "ü" * 120 + ".t", "u"]
    assert await store.unreadable("weft") == []
    assert len(await sums(store, "agent", "model")) == 2
    # The same amounts again: their sum is larger than any number.
    await store.write("weft", 0, 1, [entry("2-0", "v", *rows, ends=end("v", agent="é" * 5_000, ended=1e20))])
    await store.write("weft", 0, 1, [entry("2-1", "w", *rows, ends=end("w", agent="é" * 5_000, ended=1e20))])
    assert len(await store.tasks("weft")) == 5
