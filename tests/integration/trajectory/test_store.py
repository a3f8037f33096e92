"""The trajectory store makes the same promises on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import msgspec
import pytest

from runtime_core.errors import ConfigurationError, InvalidInput, StoreUnavailable
from runtime_core.trajectory.export import export_jsonl
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.wire.step import ENCODER, Step, StepFailure
from tests.integration.trajectory.stores import ENDED_MS, Database, end, entry, step


async def steps_of(store: TrajectoryStore, task: str) -> list[Step]:
    found = await store.task("weft", task)
    return found.steps if found is not None else []


async def test_nothing_is_known_of_a_task_that_was_never_written(store: TrajectoryStore) -> None:
    assert await store.task("weft", "t") is None
    assert await store.cursor("weft", 0) == "0-0"
    assert await store.tasks("weft") == []


async def test_every_field_reads_back_unchanged(store: TrajectoryStore) -> None:
    first = step(
        "r/2.0.1",
        "3",
        kind="agent",
        name="writer",
        attempt=3,
        key="k",
        status="failed",
        input=msgspec.Raw(b'{ "a" : [1.0, 1e999, 123456789012345678901] }'),
        output=msgspec.Raw(b"null"),
        error=StepFailure("ValueError", "no\nsuch", "trace", 4.5),
        errors=[StepFailure("OSError", "first", at=1.0)],
        usage={"input_tokens": 12.0},
        cause="e-1",
        owner="tool-handler-1",
    )
    ended = end("t", error=StepFailure("ValueError", "no"), session="s")
    await store.write("weft", 0, 1, [entry("1-0", "t", first, ends=ended)])
    found = await store.task("weft", "t")
    assert found is not None
    assert found.steps == [msgspec.structs.replace(first, committed=1.0)], "the time is that of the entry"
    assert bytes(found.steps[0].input) == bytes(first.input)
    assert found.end == ended


async def test_the_row_of_a_redriven_step_comes_last(store: TrajectoryStore) -> None:
    """A redrive counts the attempts from one again."""
    failed = step(attempt=3, status="failed", ended=100.0)
    await store.write("weft", 0, 1, [entry("1-0", "t", failed), entry("1-1", "t", step(attempt=1, ended=200.0))])
    assert [(s.status, s.attempt) for s in await steps_of(store, "t")] == [("failed", 3), ("completed", 1)]
    assert [stored.step.attempt async for stored in store.steps("weft")] == [3, 1]


async def test_steps_are_ordered_by_their_paths_as_numbers(store: TrajectoryStore) -> None:
    ordered = [
        ("r", "", 1),
        ("r", "", 2),
        ("r", "2", 1),
        ("r", "2.0", 1),
        ("r", "2.0.10", 1),
        ("r", "2.1", 1),
        ("r", "10", 1),
        ("r/2", "", 1),
        ("r/2", "1", 1),
        ("r/2/1", "", 1),
        ("r/2.0.1", "", 1),
        ("r/2.0.1/7", "3", 1),
        ("r/10", "", 1),
    ]
    shuffled = ordered[::-2] + ordered[-2::-2]
    await store.write("weft", 0, 1, [entry("1-0", "t", *(step(r, p, attempt=a) for r, p, a in shuffled))])
    assert [(s.run, s.step, s.attempt) for s in await steps_of(store, "t")] == ordered


async def test_a_task_is_complete_when_it_holds_as_many_steps_as_its_end_counts(store: TrajectoryStore) -> None:
    async def complete() -> bool:
        found = await store.task("weft", "t")
        assert found is not None
        return found.complete

    await store.write("weft", 0, 1, [entry("1-0", "t", step())])
    assert not await complete(), "it has not ended"
    await store.write("weft", 0, 1, [entry("1-1", "t", ends=end("t", 2))])
    assert not await complete(), "one step is missing"
    await store.write("weft", 0, 1, [entry("1-2", "t", step(path="1"))])
    assert await complete()


async def test_any_text_is_kept(store: TrajectoryStore) -> None:
    large = b'"' + b"x" * 300_000 + b'"'
    odd = step(name="nul \0 é 猫 🐈", owner="\0", input=msgspec.Raw(b'"\\u0000"'), output=msgspec.Raw(large))
    ended = end("t \0", agent="a\0", error=StepFailure("E", "nul \0"), session="'; DROP TABLE weft_steps --")
    await store.write("weft", 0, 1, [entry("1-0", "t \0", odd, ends=ended)])
    found = await store.task("weft", "t \0")
    assert found is not None
    assert (found.steps[0].name, found.steps[0].owner) == ("nul ␀ é 猫 🐈", "␀")
    assert bytes(found.steps[0].input) == b'"\\u0000"'
    assert bytes(found.steps[0].output) == large
    assert found.end is not None
    assert found.end.agent == "a␀"
    assert found.end.error == StepFailure("E", "nul \0")
    assert await store.delete("weft", "t \0") == 2


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (b"not json", "malformed"),
        (b'[{"run":"r"}]', "kind"),
        (b'[{"run":"r","kind":"\xff","name":"","status":"","started":1,"ended":1}]', "utf-8"),
        (ENCODER.encode([step(attempt=2**40)]), "attempt"),
        (ENCODER.encode([step("r" + "/1" * 2_000)]), "nest less"),
    ],
)
async def test_an_entry_that_cannot_be_read_is_kept_and_stops_nothing(
    store: TrajectoryStore, steps: bytes, reason: str
) -> None:
    batch = [RecordEntry("1-0", "bad", steps, end("bad")), entry("1-1", "good", step(), ends=end("good"))]
    await store.write("weft", 0, 1, batch)
    await store.write("weft", 0, 1, batch)
    (kept,) = await store.unreadable("weft")
    assert (kept.partition, kept.entry_id, kept.task, kept.steps) == (0, "1-0", "bad", steps)
    assert reason in kept.reason
    bad, good = await store.task("weft", "bad"), await store.task("weft", "good")
    assert bad is not None
    assert bad.end is not None
    assert not bad.complete
    assert good is not None
    assert good.complete
    assert await store.cursor("weft", 0) == "1-1"
    assert await store.delete("weft", "bad") == 2
    assert await store.unreadable("weft") == []


async def test_a_task_id_too_long_for_an_index_stops_nothing(store: TrajectoryStore) -> None:
    task = secrets.token_hex(5_000)
    await store.write("weft", 0, 1, [entry("1-0", task, step(), ends=end(task)), entry("1-1", "good", step())])
    (kept,) = await store.unreadable("weft")
    assert "shorter" in kept.reason
    assert task.startswith(kept.task)
    assert await steps_of(store, "good") == [step(committed=1.0)]


async def test_tasks_are_listed_from_the_latest_end_on_in_pages(store: TrajectoryStore) -> None:
    ends = [end(f"t-{n}", ended=ENDED_MS + n // 2, status=("failed", "completed")[n % 2]) for n in range(7)]
    ends.append(end("w", agent="writer", ended=ENDED_MS - 1))
    await store.write("weft", 0, 1, [entry(f"1-{n}", e.task, ends=e) for n, e in enumerate(ends)])
    await store.write("other", 0, 1, [entry("1-0", "elsewhere", ends=end("elsewhere"))])
    latest = [e.task for e in await store.tasks("weft")]
    assert latest == ["t-6", "t-5", "t-4", "t-3", "t-2", "t-1", "t-0", "w"]
    paged: list[str] = []
    while page := await store.tasks("weft", limit=3, before=paged[-1] if paged else None):
        paged += [e.task for e in page]
    assert paged == latest
    assert [e.task for e in await store.tasks("weft", status="failed")] == ["t-6", "t-4", "t-2", "t-0"]
    assert await store.tasks("weft", agent="writer") == [ends[-1]]
    created = sorted(each.created for each in ends)
    for since in (0.0, *created):
        for until in (*created, float("inf")):
            spanned = await store.tasks("weft", since_ms=since, until_ms=until)
            assert [each.task for each in spanned] == [
                name for name in latest if since <= next(each.created for each in ends if each.task == name) < until
            ]
    with pytest.raises(InvalidInput, match="before"):
        await store.tasks("weft", before="gone")


@pytest.mark.parametrize("few", [0, 2_000])
async def test_steps_of_many_tasks_stream_in_order_through_all_filters(
    store: TrajectoryStore, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tasks a filter selects, which decides how their steps are read."""
    monkeypatch.setattr("runtime_core.trajectory.store._TASKS_FOUND_FIRST", few)
    names = [f"t-{n:04}" for n in range(450)]
    batch = [
        entry(
            f"1-{n}",
            name,
            *(step(path=path) for path in ("", "10", "9")),
            ends=end(name, 3, status=("completed", "failed")[n % 2], ended=ENDED_MS + n) if n != 7 else None,
        )
        for n, name in enumerate(names)
    ]
    await store.write("weft", 0, 1, batch)
    found = [(s.task, s.step.step) async for s in store.steps("weft")]
    assert found == [(name, path) for name in names for path in ("", "9", "10")]
    unfinished = [s async for s in store.steps("weft", tasks=["t-0007"])]
    assert [s.end for s in unfinished] == [None] * 3
    failed = [s async for s in store.steps("weft", status="failed")]
    assert len(failed) == 224 * 3
    assert {s.end.status for s in failed if s.end is not None} == {"failed"}
    wanted = names[20:440]
    chosen = [
        s.task async for s in store.steps("weft", tasks=[*reversed(wanted), wanted[0], "gone"], agent="researcher")
    ]
    assert chosen == [name for name in wanted for _ in range(3)]
    since = datetime.fromtimestamp((ENDED_MS + 440) / 1_000, UTC)
    assert len([s async for s in store.steps("weft", since=since)]) == 10 * 3
    with pytest.raises(InvalidInput, match="since"):
        await anext(store.steps("weft", since=since.replace(tzinfo=None)))


async def test_a_deleted_task_leaves_nothing_and_affects_no_other(store: TrajectoryStore, database: Database) -> None:
    for namespace, task in [("weft", "t"), ("weft", "t2"), ("other", "t")]:
        secret = step(input=msgspec.Raw(b'"a secret of the deleted task"')) if task == "t" else step()
        await store.write(namespace, 0, 1, [entry("1-0", task, secret, step(path="1"), ends=end(task, 2))])
    assert await store.delete("weft", "t") == 3
    assert await store.delete("weft", "t") == 0
    assert await store.task("weft", "t") is None
    assert len(await steps_of(store, "t2")) == 2
    assert await store.delete("other", "t") == 3
    if database.path is not None:
        await store.close()  # the last connection folds the log into the file
        assert b"a secret" not in database.path.read_bytes()


async def test_many_may_open_a_new_store_at_once(database: Database) -> None:
    stores = await asyncio.gather(*(TrajectoryStore.open(database.url) for _ in range(12)))
    try:
        await asyncio.gather(*(s.write("weft", n, 1, [entry("1-0", f"t-{n}", step())]) for n, s in enumerate(stores)))
        assert len([stored async for stored in stores[-1].steps("weft")]) == 12
    finally:
        await asyncio.gather(*(store.close() for store in stores))


async def test_written_rows_survive_reopening(database: Database) -> None:
    for number in (1, 2):
        store = await TrajectoryStore.open(database.url)
        await store.write("weft", 0, number, [entry(f"{number}-0", f"t-{number}", step())])
        assert len([stored async for stored in store.steps("weft")]) == number
        await store.close()
        await store.close()


async def test_an_older_store_gets_the_indexes_of_this_release(database: Database) -> None:
    await (await TrajectoryStore.open(database.url)).close()
    await database.execute("DROP INDEX weft_tasks_by_agent")
    await (await TrajectoryStore.open(database.url)).close()
    catalog = "sqlite_master WHERE name" if database.path is not None else "pg_indexes WHERE indexname"
    assert await database.number(f"SELECT count(*) FROM {catalog} = 'weft_tasks_by_agent'") == 1


async def test_a_filter_that_finds_many_tasks_yields_all_their_steps(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime_core.trajectory.store._TASKS_FOUND_FIRST", 3)
    ends = [end(f"t-{n}", agent="rare" if n % 3 == 0 else "writer") for n in range(12)]
    await store.write("weft", 0, 1, [entry(f"1-{n}", e.task, step(), ends=e) for n, e in enumerate(ends)])
    for agent in ("rare", "writer"):
        found = [stored.task async for stored in store.steps("weft", agent=agent)]
        assert found == sorted(e.task for e in ends if e.agent == agent)


async def test_a_store_of_another_format_is_refused(store: TrajectoryStore, database: Database) -> None:
    await database.execute("INSERT INTO weft_format VALUES (99)")
    with pytest.raises(ConfigurationError, match="format 99"):
        await TrajectoryStore.open(database.url)


async def test_keys_sort_by_bytes_whatever_the_locale_of_the_database(postgres_database: Database) -> None:
    store = await TrajectoryStore.open(postgres_database.url)
    session = await asyncpg.connect(postgres_database.url)
    try:
        keys = await session.fetch(
            "SELECT table_name, column_name, collation_name FROM information_schema.key_column_usage"
            " JOIN information_schema.columns USING (table_name, column_name)"
            " WHERE table_name LIKE 'weft%' AND data_type = 'text'"
        )
        assert len(keys) == 21
        assert [key for key in keys if key["collation_name"] != "C"] == []
    finally:
        await session.close()
        await store.close()


async def test_a_store_outlives_the_server_s_end_of_its_sessions(
    postgres_database: Database, postgres_url: str
) -> None:
    store = await TrajectoryStore.open(postgres_database.url)
    try:
        await store.write("weft", 0, 1, [entry("1-0", "t", step())])
        await Database(postgres_url).execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'test_%'"
        )
        await store.write("weft", 0, 1, [entry("2-0", "t", step(path="1"))])
        assert len(await steps_of(store, "t")) == 2
    finally:
        await store.close()


async def test_a_database_that_does_not_exist_is_named(postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        await TrajectoryStore.open(postgres_url.replace("/postgres?", "/nowhere?"))


async def test_a_missing_server_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await TrajectoryStore.open(f"postgresql://u:a-secret@/d?host={tmp_path}")


async def test_an_export_of_a_hundred_megabytes_needs_no_more_memory_than_a_small_one(
    database: Database, tmp_path: Path
) -> None:
    # In a separate process: the peak of this one may be higher already.
    measured = subprocess.run(
        [sys.executable, "-c", EXPORT, database.url, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert measured.returncode == 0, measured.stderr
    result = json.loads(measured.stdout)
    assert result["counts"] == [6_000, 6_000, 26_000, 26_000]
    # Held in memory, the larger export's texts alone would be 80 MB more; allocators vary by 30.
    assert result["growth_mib"] < 50, result


EXPORT = """
import asyncio, json, resource, sys
import msgspec
from runtime_core.trajectory.export import export_jsonl, export_parquet
from runtime_core.wire.step import ENCODER, Step, TaskEnd
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

async def main(url, path):
    store = await TrajectoryStore.open(url)
    output = msgspec.Raw(b'"' + b"x" * 4000 + b'"')
    steps = ENCODER.encode([
        Step(run="r", step=str(n), kind="step", name="s", status="completed", started=1, ended=2, output=output)
        for n in range(100)
    ])
    number = 0
    counts = []
    for upto in (60, 260):
        while number < upto:
            entries = []
            for _ in range(20):
                number += 1
                task = f"t-{number}"
                entries.append(RecordEntry(f"{number}-0", task, steps, TaskEnd(task, "completed", "a", 100, 1, 2)))
            await store.write("weft", 0, 1, entries)
        before = peak()
        with open(path + ".jsonl", "wb") as out:
            counts.append(await export_jsonl(store, "weft", out))
        counts.append(await export_parquet(store, "weft", path + ".parquet"))
    print(json.dumps({"counts": counts, "growth_mib": peak() - before, "peak_mib": peak()}))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_export_during_writes_sees_whole_steps(store: TrajectoryStore) -> None:
    async def record() -> None:
        for number in range(1, 200):
            task = f"t-{number:04}"
            await store.write("weft", 0, 1, [entry(f"{number}-0", task, step(), step(path="1"), ends=end(task, 2))])

    async def export() -> None:
        while not writing.done():
            out = io.BytesIO()
            count = await export_jsonl(store, "weft", out)
            lines = [json.loads(line) for line in out.getvalue().splitlines()]
            assert len(lines) == count
            assert all(line["task_steps"] == 2 for line in lines if "task_steps" in line)
            keys = [(line["task"], line["step"]) for line in lines]
            assert keys == sorted(set(keys))

    writing = asyncio.ensure_future(record())
    await asyncio.gather(writing, export())
