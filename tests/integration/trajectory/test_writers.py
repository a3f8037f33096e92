"""Writers of the trajectory store: each batch is written completely or not at all, and only by the newest writer."""

from __future__ import annotations

import asyncio

import pytest

from runtime_core.errors import Fenced, InvalidInput, StoreUnavailable
from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.wire.step import Step, StepFailure
from tests.integration.trajectory.stores import Database, end, entry, step


async def steps_of(store: TrajectoryStore, task: str) -> list[Step]:
    found = await store.task("weft", task)
    return found.steps if found is not None else []


async def test_writing_a_batch_again_changes_nothing(store: TrajectoryStore) -> None:
    batch = [entry("1-0", "t", step(), step(path="1")), entry("1-1", "t", step(path="2"), ends=end("t", 3))]
    await store.write("weft", 0, 1, batch)
    once = await store.task("weft", "t")
    await store.write("weft", 0, 1, batch)
    assert await store.task("weft", "t") == once
    assert once is not None
    assert len(once.steps) == 3


async def test_the_later_row_of_a_key_replaces_the_earlier_one(store: TrajectoryStore) -> None:
    await store.write("weft", 0, 1, [entry("1-0", "t", step(name="old"), step(name="new"))])
    assert [s.name for s in await steps_of(store, "t")] == ["new"]
    await store.write("weft", 0, 1, [entry("1-1", "t", step(name="newest"), step(attempt=2))])
    assert [(s.name, s.attempt) for s in await steps_of(store, "t")] == [("newest", 1), ("search", 2)]


async def test_the_later_row_of_a_key_takes_back_the_error_of_the_earlier_one(store: TrajectoryStore) -> None:
    failed, plain = step(error=StepFailure("ValueError", "no")), step()
    await store.write("weft", 0, 1, [entry("1-0", "t", failed, plain), entry("1-1", "u", plain, failed)])
    assert [s.error for s in await steps_of(store, "t")] == [None]
    assert [s.error for s in await steps_of(store, "u")] == [failed.error]
    await store.write("weft", 0, 1, [entry("1-2", "u", plain)])
    assert [s.error for s in await steps_of(store, "u")] == [None]


async def test_a_write_that_fails_leaves_neither_rows_nor_cursor(store: TrajectoryStore, database: Database) -> None:
    await store.write("weft", 0, 1, [entry("1-0", "before", step())])
    if database.path is not None:
        await database.execute(
            "CREATE TRIGGER crash BEFORE INSERT ON weft_tasks BEGIN SELECT RAISE(ABORT, 'crash'); END"
        )
    else:
        await database.execute(
            "CREATE FUNCTION crash() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'crash'; END $$",
            "CREATE TRIGGER crash BEFORE INSERT ON weft_tasks FOR EACH ROW EXECUTE FUNCTION crash()",
        )
    batch = [entry("2-0", "t", step(), ends=end("t"))]
    with pytest.raises(StoreUnavailable, match="crash"):
        await store.write("weft", 0, 5, batch)
    assert await store.task("weft", "t") is None
    assert await store.cursor("weft", 0) == "1-0"
    await store.write("weft", 0, 1, [])  # the epoch was not taken either
    await database.execute("DROP TRIGGER crash" + ("" if database.path else " ON weft_tasks"))
    await store.write("weft", 0, 5, batch)
    assert await store.cursor("weft", 0) == "2-0"
    assert await steps_of(store, "t") == [step(committed=2.0)]


async def test_a_lower_epoch_is_fenced_and_writes_nothing(store: TrajectoryStore) -> None:
    await store.write("weft", 0, 2, [entry("1-0", "t", step(name="mine"))])
    with pytest.raises(Fenced, match="epoch 2"):
        await store.write("weft", 0, 1, [entry("2-0", "t", step(name="zombie")), entry("2-1", "u", step())])
    assert [s.name for s in await steps_of(store, "t")] == ["mine"]
    assert await store.task("weft", "u") is None
    assert await store.cursor("weft", 0) == "1-0"
    await store.write("weft", 1, 1, [entry("2-0", "u", step())])  # another partition has its own fence
    await store.write("other", 0, 1, [])


async def test_an_empty_batch_takes_the_fence(store: TrajectoryStore) -> None:
    await store.write("weft", 0, 3, [])
    assert await store.cursor("weft", 0) == "0-0"
    with pytest.raises(Fenced):
        await store.write("weft", 0, 2, [entry("1-0", "t", step())])


async def test_the_cursor_never_moves_back(store: TrajectoryStore) -> None:
    for entry_id, cursor in [("5-9", "5-9"), ("5-10", "5-10"), ("5-2", "5-10"), ("10-0", "10-0"), ("9-99", "10-0")]:
        await store.write("weft", 0, 1, [entry(entry_id, f"t-{entry_id}", step())])
        assert await store.cursor("weft", 0) == cursor
    assert len([stored async for stored in store.steps("weft")]) == 5, "rows of old entries are written all the same"
    with pytest.raises(InvalidInput, match="entry_id"):
        await store.write("weft", 0, 1, [entry("new", "t", step())])


async def test_writers_of_several_partitions_share_one_store(database: Database) -> None:
    stores = await asyncio.gather(*(TrajectoryStore.open(database.url) for _ in range(4)))
    try:

        async def record(store: TrajectoryStore, partition: int) -> None:
            for number in range(1, 21):
                task = f"t-{partition}-{number}"
                await store.write("weft", partition, 1, [entry(f"{number}-0", task, step(), ends=end(task))])

        await asyncio.gather(*(record(store, partition) for partition, store in enumerate(stores)))
        assert len([stored async for stored in stores[0].steps("weft")]) == 80
        assert [await stores[0].cursor("weft", partition) for partition in range(4)] == ["20-0"] * 4
    finally:
        await asyncio.gather(*(store.close() for store in stores))


async def test_the_older_of_two_writers_of_a_partition_is_stopped(database: Database) -> None:
    old, new = await asyncio.gather(TrajectoryStore.open(database.url), TrajectoryStore.open(database.url))
    try:
        taken_over = asyncio.Event()

        async def older() -> int:
            for number in range(1, 1_000):
                try:
                    await old.write("weft", 0, 1, [entry(f"{number}-0", f"t-{number}", step(owner="old"))])
                except Fenced:
                    return number - 1
                if number == 10:
                    taken_over.set()
            raise AssertionError("the older writer was never fenced")

        async def newer() -> str:
            await taken_over.wait()
            await new.write("weft", 0, 2, [])
            return await new.cursor("weft", 0)

        written, cursor = await asyncio.gather(older(), newer())
        assert cursor == f"{written}-0", "nothing of the older writer came after the fence"
        assert len([stored async for stored in new.steps("weft")]) == written
    finally:
        await asyncio.gather(old.close(), new.close())
