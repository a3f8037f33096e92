"""Repeated contents are stored once: long conversations, large values, forks."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.wire.contents import LARGE_BYTES
from runtime_core.wire.step import ENCODER, Fork, Step
from tests.integration.trajectory.stores import Database, end, entry, step
from tests.servers.matrix import is_full

TURNS = 1_000 if is_full() else 300
"""Each turn writes the whole conversation again, so 1,000 take eleven times as long as 300."""
TABLES = ("weft_steps", "weft_contents", "weft_lists", "weft_uses")


def json_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(ENCODER.encode(value))


def message(number: int) -> dict[str, object]:
    return {"role": ("user", "assistant")[number % 2], "content": f"message {number} " + "x" * 80}


def turn(number: int, history: list[dict[str, object]]) -> Step:
    """A model call with all messages so far."""
    given = {"model": "m", "messages": history, "temperature": 0.5}
    return step(path=str(number), kind="step", name="call", input=json_of(given), output=json_of(history[-1]))


async def counts(database: Database) -> dict[str, int]:
    return {table: await database.number(f"SELECT count(*) FROM {table}") for table in TABLES}


async def stored_bytes(database: Database) -> int:
    columns = "coalesce(length(input), 0) + coalesce(length(output), 0) + coalesce(length(input_refs), 0)"
    return await database.number(f"SELECT sum({columns}) FROM weft_steps") + await database.number(
        "SELECT sum(length(content)) FROM weft_contents"
    )


async def converse(store: TrajectoryStore, history: list[dict[str, object]], turns: int) -> None:
    """Continue a conversation for some turns, each a model call of one task."""
    first = len(history) // 2 + 1
    for number in range(first, first + turns):
        history += [message(2 * number), message(2 * number + 1)]
        await store.write("weft", 0, 1, [entry(f"{number}-0", "t", turn(number, history))])


async def test_a_stored_conversation_reads_back_unchanged(store: TrajectoryStore) -> None:
    history: list[dict[str, object]] = []
    await converse(store, history, 40)
    found = await store.task("weft", "t")
    assert found is not None
    for number, each in enumerate(found.steps, 1):
        assert json.loads(bytes(each.input)) == {
            "model": "m",
            "messages": history[: 2 * number],
            "temperature": 0.5,
        }
        assert list(json.loads(bytes(each.input))) == ["model", "messages", "temperature"], "and in its order"


async def test_a_long_conversation_grows_by_its_new_messages(store: TrajectoryStore, database: Database) -> None:
    history: list[dict[str, object]] = []
    await converse(store, history, TURNS // 2)
    half, half_bytes = await counts(database), await stored_bytes(database)
    await converse(store, history, TURNS // 2)
    whole, whole_bytes = await counts(database), await stored_bytes(database)
    assert whole == {"weft_steps": TURNS, "weft_contents": 2 * TURNS, "weft_lists": 2 * TURNS, "weft_uses": TURNS}
    assert half == {table: number // 2 for table, number in whole.items()}
    assert whole_bytes < 2.05 * half_bytes
    # Each turn's list as it is given would be 130 MB together for 1,000 turns.
    assert whole_bytes < 800 * TURNS
    await store.write("weft", 0, 1, [entry(f"{2 * TURNS}-0", "other", turn(1, history))])
    assert await counts(database) == {**whole, "weft_steps": TURNS + 1, "weft_uses": TURNS + 1}
    found = await store.task("weft", "other")
    assert found is not None
    assert json.loads(bytes(found.steps[0].input))["messages"] == history


async def test_tasks_of_one_session_share_their_messages(store: TrajectoryStore, database: Database) -> None:
    history: list[dict[str, object]] = []
    for number in range(1, 51):
        history += [message(2 * number), message(2 * number + 1)]
        await store.write("weft", 0, 1, [entry(f"{number}-0", f"t-{number}", turn(number, history))])
    assert await counts(database) == {"weft_steps": 50, "weft_contents": 100, "weft_lists": 100, "weft_uses": 50}


async def test_a_window_over_the_messages_stores_each_message_once(store: TrajectoryStore, database: Database) -> None:
    history = [message(number) for number in range(60)]
    steps = [turn(number, history[max(0, number - 10) : number]) for number in range(1, 61)]
    await store.write("weft", 0, 1, [entry("1-0", "t", *steps)])
    assert (await counts(database))["weft_contents"] == 60
    found = await store.task("weft", "t")
    assert found is not None
    assert json.loads(bytes(found.steps[-1].input))["messages"] == history[50:60]


async def test_a_large_value_is_stored_once_at_any_place(store: TrajectoryStore, database: Database) -> None:
    document = "é" * LARGE_BYTES
    whole, member = json_of(document), json_of({"query": "q", "document": document})
    await store.write(
        "weft",
        0,
        1,
        [
            entry("1-0", "t", step(output=whole), step(path="1", input=member)),
            entry("1-1", "u", step(input=whole, output=member)),
        ],
    )
    assert (await counts(database))["weft_contents"] == 1
    found = await store.task("weft", "t")
    assert found is not None
    assert (found.steps[0].output, found.steps[1].input) == (whole, member)


@pytest.mark.parametrize(
    "given",
    [
        '{"messages":[]}',
        '{"messages":"none"}',
        '{"messages":null,"a":1}',
        '{"messages":[1,"two",[3],{"four":null}]}',
        '{"messages":[ {"a" : 1} ]}',
        '["messages"]',
        '{"messages":["\\u0000"]}',
    ],
)
async def test_any_member_named_messages_reads_back(store: TrajectoryStore, given: str) -> None:
    await store.write("weft", 0, 1, [entry("1-0", "t", step(input=msgspec.Raw(given.encode())))])
    found = await store.task("weft", "t")
    assert found is not None
    assert json.loads(bytes(found.steps[0].input)) == json.loads(given)


async def test_an_erased_task_removes_contents_that_only_it_used(store: TrajectoryStore, database: Database) -> None:
    history = [message(number) for number in range(30)]
    aside: dict[str, object] = {"role": "user", "content": "where another conversation went"}
    secret: dict[str, object] = {"role": "user", "content": "a secret of the erased task"}
    large = json_of("a large value " * LARGE_BYTES)
    await store.write(
        "weft",
        0,
        1,
        [
            entry("1-0", "kept", turn(1, history[:10]), step(path="2", output=large)),
            entry("1-1", "gone", turn(1, [*history[:20], secret, *history[20:]]), step(path="2", output=large)),
            entry("1-2", "other", turn(1, [*history[:12], aside])),
        ],
    )
    assert await store.delete("weft", "gone") == 2
    for task, messages in (("kept", history[:10]), ("other", [*history[:12], aside])):
        found = await store.task("weft", task)
        assert found is not None
        assert json.loads(bytes(found.steps[0].input))["messages"] == messages
    assert await counts(database) == {"weft_steps": 3, "weft_contents": 14, "weft_lists": 13, "weft_uses": 3}
    await store.write("weft", 0, 1, [entry("2-0", "again", turn(1, history))])
    found = await store.task("weft", "again")
    assert found is not None
    assert len(json.loads(bytes(found.steps[0].input))["messages"]) == 30
    for task in ("kept", "other", "again"):
        await store.delete("weft", task)
    assert await counts(database) == dict.fromkeys(TABLES, 0)


async def test_a_deletion_removes_nothing_that_a_concurrent_writer_needs(database: Database) -> None:
    stores = await asyncio.gather(*(TrajectoryStore.open(database.url) for _ in range(3)))
    history = [message(number) for number in range(40)]

    async def write(partition: int) -> None:
        for number in range(20):
            made = entry(f"{number + 1}-0", f"t-{partition}-{number}", turn(1, history[: 2 * number + 2]))
            await stores[partition].write("weft", partition, 1, [made])

    async def erase() -> None:
        for number in range(20):
            await stores[2].delete("weft", f"t-0-{number}")

    try:
        await asyncio.gather(write(0), write(1), erase())
        for number in range(20):
            found = await stores[0].task("weft", f"t-1-{number}")
            assert found is not None
            assert json.loads(bytes(found.steps[0].input))["messages"] == history[: 2 * number + 2]
    finally:
        await asyncio.gather(*(store.close() for store in stores))


async def test_a_fork_has_the_steps_before_it_without_storing_them(store: TrajectoryStore, database: Database) -> None:
    def steps(*paths: str, name: str) -> list[Step]:
        return [step(path=path, name=name) for path in paths]

    child = step("r/2", name="first")
    later = step("r/3", name="first")
    first = [step(name="first"), *steps("1", "2", "2.0.1", "3", "10", name="first"), child, later]
    second = [step(name="second", fork=Fork("first", "3")), *steps("3", "4", name="second")]
    third = [step(name="third", fork=Fork("second", "4")), *steps("4", name="third")]
    fourth = [step(name="fourth", fork=Fork("third", "2")), *steps("2", name="fourth")]
    again = [step(name="again", fork=Fork("first"))]
    for number, (task, made) in enumerate(
        {"first": first, "second": second, "third": third, "fourth": fourth, "again": again}.items(), 1
    ):
        await store.write("weft", 0, 1, [entry(f"{number}-0", task, *made, ends=end(task, len(made)))])

    async def inherited(task: str) -> list[tuple[str, str, str]]:
        found = await store.task("weft", task)
        assert found is not None
        assert found.complete
        return [(each.name, each.run, each.step) for each in found.inherited]

    before_three = [("first", "r", "1"), ("first", "r", "2"), ("first", "r", "2.0.1"), ("first", "r/2", "")]
    assert await inherited("first") == []
    assert await inherited("second") == before_three
    assert await inherited("third") == [*before_three[:3], ("second", "r", "3"), before_three[3]]
    assert await inherited("fourth") == [("first", "r", "1")]
    assert await inherited("again") == []
    assert await database.number("SELECT count(*) FROM weft_steps") == 8 + 3 + 2 + 2 + 1
    found = await store.task("weft", "second")
    assert found is not None
    assert found.fork == Fork("first", "3")
    await store.delete("weft", "second")
    assert await database.number("SELECT count(*) FROM weft_forks") == 3
