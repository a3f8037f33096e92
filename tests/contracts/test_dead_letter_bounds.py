"""Dead letters are bounded by size, total bytes and age, with a fair share for each stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import cast

import pytest

from runtime_core.bus.commits import (
    CUT_VALUE_BYTES,
    MAX_FIELD_NAME_BYTES,
    MAX_LETTER_BYTES,
    MAX_LETTER_FIELDS,
    MAX_STRUCTURED_BYTES,
    MAX_VALUE_BYTES,
    bounded,
)
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.dead_letters import OVERHEAD_BYTES, DeadLetters, letter_bytes, trimmed_letters
from runtime_core.state_manager.keeper import LetterSweeper
from runtime_core.wire.codec import MAX_DATA_BYTES
from runtime_core.wire.envelope import MAX_STRUCTURED_BYTES as MAX_EVENT_BYTES
from tests.contracts.broker import Broker, ask, bury, complete, suspend

FOREVER_MS = 10**12
ENOUGH = 10**9
"""A bound that nothing here comes near."""
RECOUNT_PAGE = 10
"""How many letters one call recounts."""


def event(stream: str = "tasks", data: bytes = b"{}", more: Mapping[str, bytes] | None = None) -> list[str | bytes]:
    """A refused command."""
    fields: list[str | bytes] = ["reason", "rejected", "stream", stream, "error", "{}", "errors", "[]"]
    for name, value in (("type", b"weft.task.submit"), ("data", data), *(more or {}).items()):
        fields += [f"event:{name}", value]
    return fields


def weight(letter: dict[str, str]) -> int:
    return OVERHEAD_BYTES + sum(len(name.encode() + value.encode()) for name, value in letter.items() if name != "id")


async def limit(broker: Broker, most: int) -> None:
    await broker.call("HSET", broker.keys.meta, "dead_max", most)


async def ids(broker: Broker, stream: str = "") -> list[str]:
    return [letter["id"] for letter in await broker.entries("dead") if stream in ("", letter["stream"])]


def millisecond(letter: str) -> int:
    return int(letter.partition("-")[0])


async def counts_agree(broker: Broker, bus: EventBus) -> dict[str, int]:
    """Check that the counted bytes are those of the letters. Return them."""
    real: dict[str, int] = {}
    for letter in await broker.entries("dead"):
        share = {"diverged": "parked", "undeliverable": "replyto"}.get(letter["reason"], letter["stream"])
        real[share] = real.get(share, 0) + weight(letter)
        if share != "parked":
            real[""] = real.get("", 0) + weight(letter)
    assert await letter_bytes(bus) == real
    return real


# -- one letter ------------------------------------------------------------------------------------------------------


async def test_an_oversized_event_keeps_a_head_and_a_digest(broker: Broker, bus: EventBus) -> None:
    data = b'{"task_id":"t","input":"' + b"x" * (8 * 1024 * 1024) + b'"}'
    letter_id = await bus.keep_letter(event(data=data))
    [letter] = await broker.entries("dead")
    assert letter["event:data"].encode() == data[:CUT_VALUE_BYTES]
    cut = json.loads(letter["cut"])
    assert cut["fields"] == {"event:data": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    assert cut["bytes"] > len(data)
    assert weight(letter) < 2 * CUT_VALUE_BYTES
    letters = DeadLetters([bus])
    assert (await letters.get(letter_id)).cut == cut
    with pytest.raises(InvalidInput, match="was cut because it was too large, so it cannot be redriven"):
        await letters.redrive(letter_id)
    assert await bus.redrive(letter_id, True) == ["cut", ""]
    await letters.drop(letter_id)
    assert await letter_bytes(bus) == {}


@pytest.mark.parametrize(("size", "whole"), [(MAX_DATA_BYTES, True), (MAX_DATA_BYTES + 1, False)])
async def test_the_limit_of_an_event_is_the_limit_of_its_letter(
    broker: Broker, bus: EventBus, size: int, whole: bool
) -> None:
    await bus.keep_letter(event(data=b"x" * size))
    [letter] = await broker.entries("dead")
    assert ("cut" not in letter, len(letter["event:data"]) == size) == (whole, whole)


async def test_a_structured_event_has_its_own_limit(broker: Broker, bus: EventBus) -> None:
    assert MAX_STRUCTURED_BYTES == MAX_EVENT_BYTES
    for size in (MAX_STRUCTURED_BYTES, MAX_STRUCTURED_BYTES + 1):
        await bus.keep_letter(["reason", "rejected", "stream", "tasks", "event:data", b"x" * size])
    whole, cut = await broker.entries("dead")
    assert (len(whole["event:data"]), "cut" in whole) == (MAX_STRUCTURED_BYTES, False)
    assert (len(cut["event:data"]), "cut" in cut) == (CUT_VALUE_BYTES, True)


async def test_many_fields_and_long_names_are_left_out(broker: Broker, bus: EventBus) -> None:
    many = {f"x{number}": b"1" for number in range(5000)}
    fields = ["event:" + "n" * 5000, "1", *event(more=many)]
    assert len(bounded(fields)) == 2 * (MAX_LETTER_FIELDS + 1), "they are not sent to the broker"
    await bus.keep_letter(fields)
    [letter] = await broker.entries("dead")
    assert len(letter) == MAX_LETTER_FIELDS + 2  # its id and `cut`
    assert json.loads(letter["cut"])["left_out"] == 5000 + 6 + 1 - MAX_LETTER_FIELDS
    assert max(map(len, letter)) <= MAX_FIELD_NAME_BYTES


async def test_all_fields_together_are_bounded(broker: Broker, bus: EventBus) -> None:
    values = {f"x{number}": bytes([97 + number]) * (MAX_DATA_BYTES - number) for number in range(8)}
    await bus.keep_letter(event(more=values))
    [letter] = await broker.entries("dead")
    cut = json.loads(letter["cut"])["fields"]
    assert sorted(cut) == [f"event:x{number}" for number in range(6)], "the largest are cut"
    assert cut["event:x1"]["sha256"] == hashlib.sha256(values["x1"]).hexdigest()
    assert weight(letter) <= MAX_LETTER_BYTES


async def test_an_entry_that_is_cut_on_the_broker_keeps_a_digest_too(broker: Broker, bus: EventBus) -> None:
    """Entries of work streams become letters on the broker, whose Lua has only SHA-1."""
    data = b"x" * (MAX_VALUE_BYTES + 1)
    fields: list[str | bytes] = []
    for number in range(5000):
        fields += [f"x{number}", "1"]
    await broker.call("XADD", broker.keys.stream("agent"), "*", "d", data, "n" * 5000, "1", *fields)
    _, malformed = await bus.read(["agent"], 1, 5)
    [(stream, entry, _)] = malformed
    assert await bus.dead_letter(stream, entry, "malformed", b"[]", 1, b"{}")
    [letter] = await broker.entries("dead")
    assert letter["d"].encode() == data[:CUT_VALUE_BYTES]
    cut = json.loads(letter["cut"])
    assert cut["fields"] == {"d": {"bytes": len(data), "sha1": hashlib.sha1(data).hexdigest()}}
    assert cut["left_out"] > 4000
    assert max(map(len, letter)) <= MAX_FIELD_NAME_BYTES
    assert len(letter) == MAX_LETTER_FIELDS + 2
    await broker.idle()


async def test_all_fields_of_an_entry_are_bounded_on_the_broker(broker: Broker, bus: EventBus) -> None:
    values = [item for number in range(8) for item in (f"x{number}", "y" * (MAX_DATA_BYTES - number))]
    await broker.call("XADD", broker.keys.stream("agent"), "*", *values)
    _, [(stream, entry, _)] = await bus.read(["agent"], 1, 5)
    assert await bus.dead_letter(stream, entry, "malformed", b"[]", 1, b"{}")
    [letter] = await broker.entries("dead")
    assert weight(letter) <= MAX_LETTER_BYTES
    assert sorted(json.loads(letter["cut"])["fields"]) == [f"x{number}" for number in range(6)]


async def test_the_largest_work_of_the_bus_is_kept_whole(broker: Broker, bus: EventBus) -> None:
    await broker.submit(
        bus, "t", input_json=b'"' + b"x" * (MAX_DATA_BYTES - 2) + b'"', context=b'{"a":"' + b"y" * 900_000 + b'"}'
    )
    assert await bury(bus, await broker.take(bus))
    [letter] = await broker.entries("dead")
    assert "cut" not in letter
    assert await bus.redrive(letter["id"], True) == ["ok", "t"]
    assert await letter_bytes(bus) == {}
    await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_errors_of_many_attempts_are_bounded(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    for number in range(60):
        turn = await broker.take(bus)
        error = json.dumps({"type": f"E{number}", "traceback": "x" * 16_000}).encode()
        if number == 59:
            assert await bus.dead_letter(turn.stream, turn.entry, "attempts", b"[" + error + b"]", 1, b"{}")
            break
        assert await bus.retry(turn, 0, error)
        await broker.pass_time(1)
        await bus.promote()
        [entry] = await broker.entries("agent")
        assert len(entry["e"]) < 400_000
    [letter] = await broker.entries("dead")
    errors = json.loads(letter["errors"])
    assert len(letter["errors"]) < 400_000
    assert errors[-1]["type"] == "E59"
    assert errors[0]["type"] == "LeftOut"
    assert "cut" not in letter, "it can be redriven"


async def test_long_errors_that_are_not_json_are_omitted(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await bus.dead_letter(turn.stream, turn.entry, "attempts", b"[" + b"x" * 500_000, 1, b"{}")
    [letter] = await broker.entries("dead")
    assert letter["errors"] == "[]"


# -- all letters -----------------------------------------------------------------------------------------------------


async def test_a_flood_trims_its_own_letters(broker: Broker, bus: EventBus) -> None:
    """The oldest letters of the largest share are deleted and counted. Those of one millisecond have no order."""
    quiet = [await bus.keep_letter(event("tasks:quiet", b"q" * 1000)) for _ in range(5)]
    await limit(broker, 60_000)
    flood = [await bus.keep_letter(event("tasks:loud", b"f" * 1000)) for _ in range(200)]
    sizes = await counts_agree(broker, bus)
    assert sizes[""] <= 60_000
    assert await ids(broker, "tasks:quiet") == quiet
    left = await ids(broker, "tasks:loud")
    trimmed = set(flood) - set(left)
    assert left == [letter for letter in flood if letter not in trimmed]
    assert max(map(millisecond, trimmed)) <= min(map(millisecond, left))
    assert await trimmed_letters(bus) == {("bytes", "tasks:loud"): 200 - len(left)}
    sizes_now = await DeadLetters([bus]).sizes()
    assert (sizes_now.bound, sizes_now.trimmed) == (60_000, 200 - len(left))
    assert list(sizes_now.shares) == ["tasks:loud", "tasks:quiet"]


async def test_two_floods_lose_the_same(broker: Broker, bus: EventBus) -> None:
    """The largest share loses letters until another one is the largest."""
    for stream, count in (("tasks:a", 60), ("tasks:b", 50)):
        for _ in range(count):
            await bus.keep_letter(event(stream, b"x" * 500))
    one = weight((await broker.entries("dead"))[0])
    assert (await bus.trim_letters(40 * one, FOREVER_MS)).large == 70
    assert [len(await ids(broker, stream)) for stream in ("tasks:a", "tasks:b")] == [20, 20]
    await counts_agree(broker, bus)


async def test_a_letter_is_not_trimmed_by_its_own_write(broker: Broker, bus: EventBus) -> None:
    await limit(broker, 1)
    first = await bus.keep_letter(event("a"))
    assert await ids(broker) == [first]
    second = await bus.keep_letter(event("b"))
    assert await ids(broker) == [second]
    await counts_agree(broker, bus)


async def test_letters_of_handlers_share_the_bound(broker: Broker, bus: EventBus) -> None:
    await limit(broker, 20_000)
    for number in range(40):
        await broker.submit(bus, f"t{number}", input_json=b'"' + b"x" * 1000 + b'"')
        assert await bury(bus, await broker.take(bus))
    assert (await counts_agree(broker, bus))["agent"] <= 20_000
    assert (await broker.entries("dead"))[-1]["taskid"] == "t39"


async def test_a_trimmed_letter_lets_its_task_expire(broker: Broker, bus: EventBus) -> None:
    for task in ("t", "u"):
        await broker.submit(bus, task)
        assert await bury(bus, await broker.take(bus))
    assert await broker.call("TTL", broker.keys.task("t")) == -1
    room_for_one = weight((await broker.entries("dead"))[0]) + 100
    assert (await bus.trim_letters(room_for_one, FOREVER_MS)).large == 1
    assert cast(int, await broker.call("TTL", broker.keys.task("t"))) > 0
    assert await broker.call("TTL", broker.keys.task("u")) == -1, "its letter is still there"
    assert [letter["taskid"] for letter in await broker.entries("dead")] == ["u"]
    assert await broker.call("ZCARD", broker.keys.base + "letters") == 1


async def test_old_letters_are_trimmed(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus))
    await bus.keep_letter(event("tasks:a"))
    done = await bus.trim_letters(ENOUGH, FOREVER_MS)
    assert (done.old, done.large, done.stored, done.counted) == (0, 0, 2, 2)
    done = await bus.trim_letters(ENOUGH, -60_000)
    assert (done.old, done.large, done.stored, done.counted) == (2, 0, 0, 0)
    assert await letter_bytes(bus) == {}
    assert await trimmed_letters(bus) == {("age", "agent"): 1, ("age", "tasks:a"): 1}
    assert cast(int, await broker.call("TTL", broker.keys.task("t"))) > 0


async def test_a_trimmed_letter_does_not_end_the_data_of_a_running_task(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert (await bus.trim_letters(ENOUGH, -60_000)).stored == 0
    assert await broker.call("TTL", broker.keys.task("t")) == -1
    assert await complete(bus, await broker.take(bus))


async def test_a_trimmed_letter_leaves_its_task_to_the_others(broker: Broker, bus: EventBus) -> None:
    """A redrive of any of them can reopen it."""
    await broker.submit(bus, "t")
    large = b'"' + b"x" * 20_000 + b'"'
    assert await suspend(bus, await broker.take(bus), ask("1", data=large), ask("2"))
    for _ in range(2):
        assert await bury(bus, await broker.take(bus, "tool"))
    assert await bury(bus, await broker.take(bus))
    stored = sum((await letter_bytes(bus)).values())
    await bus.trim_letters(10_000, FOREVER_MS)
    assert 0 < sum((await letter_bytes(bus)).values()) < stored
    assert len(await ids(broker)) == 2
    assert await broker.call("TTL", broker.keys.task("t")) == -1
    await bus.trim_letters(ENOUGH, -60_000)
    assert cast(int, await broker.call("TTL", broker.keys.task("t"))) > 0


async def test_a_parked_run_keeps_its_letter(broker: Broker, bus: EventBus) -> None:
    """Only a redrive of its letter can continue it. Once its task has ended, nothing waits for the letter."""
    await broker.submit(bus, "t", input_json=b'"' + b"x" * 5000 + b'"')
    assert await bury(bus, await broker.take(bus), "diverged")
    await limit(broker, 1)
    await bus.keep_letter(event("a"))
    await bus.keep_letter(event("b"))
    assert (await bus.trim_letters(1, -60_000)).stored == 1
    [letter] = await broker.entries("dead")
    assert letter["reason"] == "diverged"
    await counts_agree(broker, bus)
    assert await bus.redrive(letter["id"], False) == ["ok", "t"]
    assert await bury(bus, await broker.take(bus), "diverged")
    await bus.cancel("t", "no more")
    assert (await bus.trim_letters(ENOUGH, -60_000)).stored == 0
    assert await letter_bytes(bus) == {}


async def test_the_letter_of_a_parked_run_needs_no_room(broker: Broker, bus: EventBus) -> None:
    """It is bounded by its task, not by the bytes of others: neither these nor those of parked runs are trimmed."""
    await bus.keep_letter(event("a"))
    await limit(broker, (await letter_bytes(bus))[""])
    for task in ("t1", "t2"):
        await broker.submit(bus, task, input_json=b'"' + b"x" * 5000 + b'"')
        assert await bury(bus, await broker.take(bus), "diverged")
    assert [letter["reason"] for letter in await broker.entries("dead")][1:] == ["diverged"] * 2
    await counts_agree(broker, bus)


async def test_dropped_and_redriven_letters_are_not_counted(broker: Broker, bus: EventBus) -> None:
    for task in ("dropped", "redriven", "erased"):
        await broker.submit(bus, task)
        assert await bury(bus, await broker.take(bus))
    await counts_agree(broker, bus)
    dropped, redriven, _ = await ids(broker)
    assert await bus.drop_letter(dropped)
    await counts_agree(broker, bus)
    assert await bus.redrive(redriven, True) == ["ok", "redriven"]
    await counts_agree(broker, bus)
    assert await bus.erase("erased") == "OK"
    assert await letter_bytes(bus) == {}
    assert await broker.call("KEYS", broker.keys.base + "letters:*") == []


async def test_a_letter_that_only_names_a_task_does_not_release_it(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus))
    dropped, trimmed = [await bus.keep_letter([*event(data=b"x" * 500), "taskid", "t"]) for _ in range(2)]
    assert await bus.drop_letter(dropped)
    await bus.trim_letters(weight((await broker.entries("dead"))[0]), FOREVER_MS)
    assert trimmed not in await ids(broker)
    assert (await broker.task("t"))["lt"] == "1"
    assert await broker.call("TTL", broker.keys.task("t")) == -1


async def test_an_address_that_a_publisher_chose_is_not_a_share(broker: Broker, bus: EventBus) -> None:
    for number in range(3):
        await bus.keep_letter(["reason", "undeliverable", "stream", f"shop:answers:{number}", "d", b"{}"])
    assert set(await counts_agree(broker, bus)) == {"", "replyto"}


async def test_letters_written_past_weft_are_counted_by_the_keeper(broker: Broker, bus: EventBus) -> None:
    """People add and delete entries by hand."""
    for _ in range(45):
        await broker.call("XADD", broker.keys.dead, "*", *event("tasks:a", b"x" * 100))
    gone = await bus.keep_letter(event("tasks:b"))
    await broker.call("XDEL", broker.keys.dead, gone)
    await bus.keep_letter(event("tasks:b"))
    await LetterSweeper(bus).trim()
    assert set(await counts_agree(broker, bus)) == {"", "tasks:a", "tasks:b"}
    await LetterSweeper(bus, most_bytes=2000).trim()
    assert (await counts_agree(broker, bus))[""] <= 2000


async def test_an_entry_deleted_by_hand_does_not_count_as_trimmed(broker: Broker, bus: EventBus) -> None:
    gone = await bus.keep_letter(event("a", b"x" * 500))
    kept = await bus.keep_letter(event("a", b"x" * 500))
    await broker.call("XDEL", broker.keys.dead, gone)
    assert (await bus.trim_letters(1000, FOREVER_MS)).large == 0
    assert await ids(broker) == [kept]
    assert await trimmed_letters(bus) == {}
    await counts_agree(broker, bus)


async def test_removing_an_uncounted_letter_frees_no_space(broker: Broker, bus: EventBus) -> None:
    await bus.keep_letter(event())
    before = await letter_bytes(bus)
    past = cast(bytes, await broker.call("XADD", broker.keys.dead, "*", *event()))
    assert await bus.drop_letter(past.decode())
    assert await letter_bytes(bus) == before


async def test_a_letter_written_during_a_recount_is_counted_once(broker: Broker, bus: EventBus) -> None:
    for _ in range(RECOUNT_PAGE):
        await broker.call("XADD", broker.keys.dead, "*", *event())
    cursor = await bus.call("recount_letters", "-")
    await bus.keep_letter(event())
    assert await bus.call("recount_letters", cast(bytes, cursor)) == b""
    await counts_agree(broker, bus)


async def test_a_recount_forgets_the_letters_that_people_deleted(broker: Broker, bus: EventBus) -> None:
    gone = await bus.keep_letter(event("a"))
    await bus.keep_letter(event("b"))
    await broker.call("XDEL", broker.keys.dead, gone)
    await bus.recount_letters()
    await counts_agree(broker, bus)
    assert await broker.call("EXISTS", broker.keys.base + "letters:of:a") == 0


async def test_a_recount_restores_lost_sums(broker: Broker, bus: EventBus) -> None:
    await bus.keep_letter(event("a"))
    await broker.call("DEL", broker.keys.base + "letters:bytes")
    await bus.recount_letters()
    assert set(await counts_agree(broker, bus)) == {"", "a"}


async def test_a_parked_letter_deleted_by_hand_is_forgotten(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus), "diverged")
    [letter] = await ids(broker)
    await broker.call("XDEL", broker.keys.dead, letter)
    assert (await bus.trim_letters(ENOUGH, -60_000)).stored == 0
    assert await letter_bytes(bus) == {}


async def test_a_parked_letter_without_a_run_is_trimmed_by_age(broker: Broker, bus: EventBus) -> None:
    """Only another program writes one."""
    await bus.keep_letter(["reason", "diverged", "stream", "agent", "error", "{}"])
    assert (await bus.trim_letters(ENOUGH, -60_000)).stored == 0
    assert await ids(broker) == []


async def test_letters_are_kept_where_their_counts_are_damaged(broker: Broker, bus: EventBus) -> None:
    for name in ("letters:bytes", "letters:of:a", "letters:trimmed"):
        await broker.call("SET", broker.keys.base + name, "of the wrong type")
    letter = await bus.keep_letter(event("a"))
    assert await ids(broker) == [letter]
    assert await bus.drop_letter(letter)


async def test_the_keeper_logs_what_was_trimmed(
    broker: Broker, bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = LetterSweeper(bus, most_bytes=2000)
    await keeper.trim()
    for _ in range(10):
        await bus.keep_letter(event("tasks:loud", b"x" * 500))
    await keeper.trim()
    [said] = [record.getMessage() for record in caplog.records if "trimmed" in record.getMessage()]
    assert "trimmed 8 dead letters: over the limit of 2000 bytes (WEFT_DEAD_MAX_BYTES)" in said
    assert "tasks:loud had the most" in said
    caplog.clear()
    await keeper.trim()
    assert not caplog.records
