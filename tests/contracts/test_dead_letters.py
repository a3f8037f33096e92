"""A dead letter stores the whole delivery. The same step has the effects of a failing commit."""

from __future__ import annotations

import json

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import namespace_settings
from runtime_core.errors import InvalidInput
from runtime_core.state_manager.dead_letters import DeadLetters, LetterFilter
from tests.contracts.broker import Broker, answer, ask, bury, complete, emit_pieces, fail, suspend
from tests.contracts.two_partitions import two_partitions


async def test_the_letter_keeps_everything(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k", context=b'{"tenant":"x"}')
    await bus.retry(await broker.take(bus), 0, b'{"type":"First"}')
    await broker.pass_time(1)
    await bus.promote()
    turn = await broker.take(bus)
    assert await bury(bus, turn, "attempts", "second")
    letter = (await broker.entries("dead"))[0]
    assert json.loads(letter["error"]) == {"type": "Broken", "message": "second"}
    assert [error["type"] for error in json.loads(letter["errors"])] == ["First", "Broken"]
    shown = {
        name: letter[name] for name in ("reason", "stream", "group", "entry", "taskid", "runid", "name", "attempt")
    }
    assert shown == {
        "reason": "attempts", "stream": "agent", "group": "agent-handler", "entry": turn.entry.decode(), "taskid": "t",
        "runid": "r", "name": "writer", "attempt": "2",
    }  # fmt: skip
    assert (letter["d"], letter["x"], letter["h"].split("\n")[6]) == ('"hi"', '{"tenant":"x"}', "2")


async def test_the_task_ends_and_its_instance_is_free(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """The owner never ran the handler."""
    reply = broker.keys.reply("c")
    await broker.call("XADD", reply, "*", "seen", "1")
    await broker.submit(bus, "t", key="k", replyto=reply, streamed=True)
    await broker.submit(bus, "next", key="k")
    await broker.take(bus)
    await broker.silence(bus)
    assert await bury(other, (await other.adopt("agent", 1, False)).deliveries[0])
    final = await broker.final("t")
    assert (final["status"], final["error"]) == ("failed", {"type": "Broken", "message": "broken"})
    assert [entry["t"] for entry in (await broker.entries("reply:c"))[1:]] == ["t"]
    assert [entry["type"] for entry in await broker.entries("out:t")] == ["weft.task.failed"]
    assert [entry["e"].split("\n")[0] for entry in await broker.entries("record")] == ["failed"]
    turn = await broker.take(other)
    assert turn.task == "next"
    await complete(other, turn)
    await broker.idle()


async def test_a_dead_call_answers_its_waiting_step(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", wait="g1"), ask("2", wait="g1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    await broker.nothing(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.journal["1"][8:9] == b"E"
    assert loaded.journal["1"][22:] == b'{"type": "Broken", "message": "broken"}'
    assert loaded.journal["2"][8:9] == b"K"
    assert await complete(bus, turn)
    assert len(await broker.entries("dead")) == 1
    await broker.idle()


async def test_a_dead_child_answers_its_parent_and_frees_its_instance(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", stream="agent", name="writer", key="k"))
    await broker.submit(bus, "next", key="k")
    assert await bury(bus, await broker.take(bus))
    turns = {turn.task: turn for turn in (await broker.take(bus), await broker.take(bus))}
    assert turns["t"].kind == "resume"
    assert turns["t"].data[8:9] == b"E"
    for turn in turns.values():
        await complete(bus, turn)
    await broker.idle()


async def test_a_dead_letter_repeated_keeps_one(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    assert await bury(bus, turn)
    before = await broker.snapshot()
    assert not await bury(bus, turn)
    assert await broker.snapshot() == before


async def test_work_of_an_ended_task_leaves_no_letter(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    await bus.cancel("t", "no more")
    assert not await bury(bus, call)
    assert await broker.entries("dead") == []
    await broker.idle()


FORGED_TURN = "1\nstart\nt\nr\nwriter\nk\n1\n0"
FORGED_CALL = "1\ncall\nt\nr/1\nsearch\n\n1\n0"


async def retry(bus: EventBus, delivery: Delivery) -> bool:
    return await bus.retry(delivery, 0, b"{}")


async def journal(bus: EventBus, delivery: Delivery) -> bool:
    return await bus.record(delivery, "1", b"d1a2b3c4K1700000000000null") is not None


async def emit(bus: EventBus, delivery: Delivery) -> bool:
    return await emit_pieces(bus, delivery, b'"text"', first=1)


FOREIGN: dict[str, tuple[list[str | bytes], str]] = {
    "no header": (["type", "job"], "only the bus's functions"),
    "another format": (["h", "0\nstart\nt\nr\nwriter\n\n1\n0"], "has format '0', this release reads 1"),
    "a newer format": (["h", "2\nstart\nt\nr\nwriter\n\n1\n0\nmore"], "has format '2', this release reads 1"),
    "a short header": (["h", "1\nstart"], "not a header of the bus"),
    "a header of no numbers": (["h", "1\nstart\nt\nr\nwriter\n\nx\n0"], "not a header of the bus"),
    "a call": (["h", "1\ncall\nt\nr\nsearch\n\n1\n0"], "'call' of 'r' on agent"),
    "no text": (["h", b"\xff\xfe"], "not a header of the bus"),
}


@pytest.mark.parametrize("kind", FOREIGN)
async def test_a_foreign_entry_is_kept_and_stops_nothing(broker: Broker, bus: EventBus, kind: str) -> None:
    """Work streams are written by the bus's functions only."""
    fields, why = FOREIGN[kind]
    await broker.call("XADD", broker.keys.stream("agent"), "*", *fields, "more", "kept")
    await broker.submit(bus, "t")
    taken, malformed = await bus.read(["agent"], 10, 5)
    assert [turn.task for turn in taken] == ["t"]
    stream, entry, said = malformed[0]
    assert why in said
    assert await bus.dead_letter(stream, entry, "malformed", b"[]", 1, b'{"type":"Malformed"}')
    raw = await broker.call("XRANGE", broker.keys.dead, "-", "+")
    assert isinstance(raw, list)
    assert b"kept" in str(raw).encode()
    await complete(bus, taken[0])
    await broker.idle()


async def test_a_newer_release_in_the_namespace_is_seen(broker: Broker, bus: EventBus) -> None:
    """Entries that a newer replica has written are not foreign: the namespace says whether there is one."""
    settings = namespace_settings(bus.keys.namespace)
    assert not await bus.namespace_is_newer()
    await broker.call("HSET", settings, "format", 2)
    try:
        assert await bus.namespace_is_newer()
    finally:
        await broker.call("DEL", settings)


async def test_a_foreign_call_is_kept_and_stops_nothing(broker: Broker, bus: EventBus) -> None:
    """A call that names no waiting run, of a task that exists."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("XADD", broker.keys.stream("tool"), "*", "h", "1\ncall\nt\nr\nsearch\n\n1\n0", "d", "{}")
    taken, malformed = await bus.read(["tool"], 10, 5)
    assert taken == []
    stream, entry, _ = malformed[0]
    assert await bus.dead_letter(stream, entry, "malformed", b"[]", 1, b"{}")
    assert [letter["entry"] for letter in await broker.entries("dead")] == [entry.decode()]
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_forged_turn_takes_no_effect(broker: Broker, bus: EventBus) -> None:
    """The state fences an entry that looks like the bus's own, as it does any other."""
    await broker.submit(bus, "t", key="k")
    first = await broker.take(bus)
    before = await broker.snapshot()
    for act in (complete, suspend, fail, bury, retry, journal, emit):
        await broker.call("XADD", broker.keys.stream("agent"), "*", "h", FORGED_TURN, "d", b'"forged"')
        forged = await broker.take(bus)
        assert not await act(bus, forged), act.__name__
        await broker.call("XACK", broker.keys.stream("agent"), "agent-handler", forged.entry)
        await broker.call("XDEL", broker.keys.stream("agent"), forged.entry)
        assert await broker.snapshot() == before, act.__name__
    assert await complete(bus, first)
    assert (await broker.final("t"))["output"] == "done"
    await broker.idle()


async def test_a_forged_call_takes_no_effect(broker: Broker, bus: EventBus) -> None:
    """A call of a step that has its result."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    await answer(bus, await broker.take(bus, "tool"))
    before = await broker.snapshot()
    for act in (answer, bury, retry):
        await broker.call("XADD", broker.keys.stream("tool"), "*", "h", FORGED_CALL, "d", "{}")
        assert not await act(bus, await broker.take(bus, "tool")), act.__name__
        assert await broker.snapshot() == before, act.__name__


async def test_a_late_result_of_a_dead_task_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """The letter pins the journal with its missing steps, but nobody waits for them any more."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    await answer(bus, await broker.take(bus, "tool"))
    late = await broker.take(bus, "tool")
    await bury(bus, await broker.take(bus))
    before = await broker.task("t")
    assert "m:2" in before
    assert not await answer(bus, late)
    assert await broker.task("t") == before
    await broker.idle()


async def test_an_entry_cut_from_the_stream_can_still_be_committed(broker: Broker, bus: EventBus) -> None:
    """This holds as long as the owner lives: the state fences, not the entry."""
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await broker.call("XTRIM", broker.keys.stream("agent"), "MAXLEN", 0)
    assert await complete(bus, turn)
    assert await broker.status("t") == "completed"
    await broker.idle()


async def test_adopting_a_cut_entry_forgets_it(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Nobody gets the delivery, and it does not stay pending forever."""
    await broker.submit(bus, "t")
    await broker.submit(bus, "u")
    await broker.take(bus)
    await broker.take(bus)
    entries = await broker.entries("agent")
    await broker.call("XDEL", broker.keys.stream("agent"), entries[0]["id"])
    await broker.silence(bus)
    adopted = await other.adopt("agent", 10, False)
    assert [delivery.task for delivery in adopted.deliveries] == ["u"]
    assert await other.own_pending("agent") == {adopted.deliveries[0].entry: 2}
    await complete(other, adopted.deliveries[0])
    pending = await broker.call("XPENDING", broker.keys.stream("agent"), "agent-handler")
    assert isinstance(pending, list)
    assert pending[0] == 0


@pytest.mark.parametrize("outcome", ["given up", "tried again"])
async def test_a_failed_turn_whose_entry_was_cut_is_forgotten(broker: Broker, bus: EventBus, outcome: str) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await broker.call("XDEL", broker.keys.stream("agent"), turn.entry)
    assert not (await bury(bus, turn) if outcome == "given up" else await bus.retry(turn, 0, b""))
    assert await bus.own_pending("agent") == {}


async def test_pages_have_every_letter_once_and_in_order(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a partition was not read to its end, and if letters of two partitions have one entry id."""
    monkeypatch.setattr("runtime_core.state_manager.dead_letters.SCANNED_MAX", 3)
    async with two_partitions(broker) as pair:
        letters = DeadLetters([side.bus for side in pair.sides])
        placed = [(0, n) for n in (1, 5, 6, 7, 8, 9, 10, 12, 14, 16)] + [(1, n) for n in (2, 3, 4, 5, 11)]
        for partition, n in placed:
            name = "wanted" if n % 2 else "other"
            bus = pair.sides[partition].bus
            await bus.transport.call("XADD", bus.keys.dead, f"{n}-0", "reason", "attempts", "name", name)
        wanted = [f"{partition}/{n}-0" for n, partition in sorted(((n, p) for p, n in placed), reverse=True)]
        odd = [letter for letter in wanted if int(letter[2:].partition("-")[0]) % 2]
        for selection, expected in ((LetterFilter(), wanted), (LetterFilter(name="wanted"), odd)):
            found, cursor = [], None
            while cursor != "":
                page = await letters.page(2, selection, cursor or "")
                assert len(page.letters) <= 2
                found += [letter.letter_id for letter in page.letters]
                cursor = page.cursor
            assert found == expected
        for wrong in ("x", "1-1", "1-1.", "9" * 20 + "-0.0", "1-1.0.0"):
            with pytest.raises(InvalidInput, match="is not a cursor"):
                await letters.page(2, cursor=wrong)
        for n, (partition, name) in enumerate(((0, "a"), (1, "b"), (0, "c"))):
            bus = pair.sides[partition].bus
            await bus.transport.call("XADD", bus.keys.dead, f"{20 + n}-0", "reason", "attempts", "name", name)
        groups = await letters.counted("name")
        assert [group.key for group in groups] == ["other", "wanted", "c", "b", "a"], "of equal ones the newest first"
