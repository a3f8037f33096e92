"""A model call in mid-turn reserves its usage within the task's limits and journals its actual usage."""

from __future__ import annotations

import json

import pytest

from runtime_core.bus.commits import CallBegun
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced, LimitExceeded, Reserved
from tests.contracts.broker import DIGEST, Broker, ask, bury, complete, fail, now, suspend

ANSWER = DIGEST.encode() + b'K1700000000000"answer"'


def tokens(least: float, most: float) -> bytes:
    return json.dumps({"tokens": [least, most]}).encode()


async def begun(bus: EventBus, turn: Delivery, step: str, reserve: bytes = b"") -> CallBegun:
    call = await bus.begin_call(turn, step, reserve)
    assert call is not None
    return call


async def sums(broker: Broker, task: str) -> object:
    return json.loads((await broker.task(task))["us"])


async def test_attempts_of_a_call_are_counted_across_deaths(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert await begun(bus, turn, "1") == CallBegun(1, {})
    assert await begun(bus, turn, "1") == CallBegun(2, {})
    assert await begun(bus, turn, "2") == CallBegun(1, {})


async def test_an_answer_and_its_usage_are_stored_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await begun(bus, turn, "1")
    assert await bus.settle_call(turn, "1", ANSWER, b'{"tokens":3,"models":{"m":{"tokens":3}}}') == (ANSWER, "")
    other = DIGEST.encode() + b'K1700000000000"other"'
    assert await bus.settle_call(turn, "1", other, b'{"tokens":5}') == (ANSWER, ""), "the first one holds"
    assert await sums(broker, "t") == {"tokens": 3, "models": {"m": {"tokens": 3}}}
    fields = await broker.task("t")
    usage = '{"tokens":3,"models":{"m":{"tokens":3}}}'
    assert fields["w"] == f"1\tmodel\t\t{usage}\n", "its row is still to be written, with its usage"
    assert "b:1" not in fields
    assert await complete(bus, turn)
    assert (await broker.final("t"))["usage"] == {"tokens": 3, "models": {"m": {"tokens": 3}}}
    await broker.idle()


async def test_concurrent_calls_cannot_exceed_a_limit_together(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    turn = await broker.take(bus)
    assert (await begun(bus, turn, "1", tokens(1, 6))).granted == {"tokens": 6}
    assert (await begun(bus, turn, "2", tokens(1, 6))).granted["tokens"] == pytest.approx(4), "what is left"
    with pytest.raises(Reserved, match="have reserved 10 tokens"):
        await begun(bus, turn, "3", tokens(1, 6))
    assert await bus.settle_call(turn, "1", ANSWER, b'{"tokens":2}') == (ANSWER, "")
    assert (await begun(bus, turn, "3", tokens(1, 6))).granted["tokens"] == pytest.approx(4)
    with pytest.raises(LimitExceeded, match=r"needs at least 9 tokens, and of the task's max_tokens=10 it has used 2$"):
        await begun(bus, turn, "4", tokens(9, 9))


async def test_a_repeated_call_replaces_its_own_reservation(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    turn = await broker.take(bus)
    await begun(bus, turn, "1", tokens(6, 6))
    assert await begun(bus, turn, "1", tokens(6, 6)) == CallBegun(2, {"tokens": 6})


async def test_without_a_limit_nothing_is_reserved(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"cost":1}')
    turn = await broker.take(bus)
    assert (await begun(bus, turn, "1", tokens(6, 60))).granted == {}
    assert "rs" not in await broker.task("t")


async def test_a_run_that_ends_releases_the_reservations_of_its_calls(broker: Broker, bus: EventBus) -> None:
    """A child that fails in the middle of a call frees what it reserved; its sibling keeps its own reservation."""
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    parts = (ask("1", "editor", stream="agent", wait="0"), ask("11", "desk", stream="agent"))
    assert await suspend(bus, await broker.take(bus), *parts)
    editor, desk = await broker.take(bus), await broker.take(bus)
    await begun(bus, editor, "1", tokens(6, 6))
    await begun(bus, desk, "1", tokens(1, 1))
    assert await fail(bus, editor)
    assert json.loads((await broker.task("t"))["rs"]) == {"r/11|1": {"tokens": 1}}
    assert (await begun(bus, desk, "2", tokens(9, 9))).granted["tokens"] == pytest.approx(9)
    assert await bus.settle_call(desk, "1", ANSWER) == (ANSWER, "")
    assert await bus.settle_call(desk, "2", ANSWER) == (ANSWER, "")
    assert "rs" not in await broker.task("t")


async def test_an_answer_over_the_limit_is_kept_and_marked(broker: Broker, bus: EventBus) -> None:
    """The reservation was too small: the actual usage counts, and the next call ends the task."""
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    turn = await broker.take(bus)
    await begun(bus, turn, "1", tokens(1, 1))
    over = "the task has used 11 tokens, over its max_tokens=10"
    assert await bus.settle_call(turn, "1", ANSWER, b'{"tokens":11}') == (ANSWER, over)
    assert await sums(broker, "t") == {"tokens": 11}
    error = b'{"type":"LimitExceeded","message":"over"}'
    assert await bus.commit_turn(turn, "x", now(), b"[]", 1, error, b"", [], 0)
    assert (await broker.final("t"))["usage"] == {"tokens": 11}


async def test_pieces_of_an_answer_name_the_call_and_its_attempt(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    assert not await bus.stream(turn, "1", 1, [b"chunk", b'"early"']), "it was not begun"
    await begun(bus, turn, "1")
    assert await bus.stream(turn, "1", 1, [b"chunk", b'"Red"'])
    await begun(bus, turn, "1")
    assert not await bus.stream(turn, "1", 1, [b"chunk", b'"is"']), "it was begun again"
    assert await bus.stream(turn, "1", 2, [b"chunk", b'"Redis"'])
    await bus.settle_call(turn, "1", ANSWER)
    assert not await bus.stream(turn, "1", 2, [b"chunk", b'"late"'])
    said = [json.loads(entry["data"]) for entry in await broker.entries("out:t")]
    assert said == [
        {"task_id": "t", "run_id": "r/1", "attempt": 1, "seq": 1, "chunk": True, "text": "Red"},
        {"task_id": "t", "run_id": "r/1", "attempt": 2, "seq": 2, "chunk": True, "text": "Redis"},
    ]


async def test_a_process_that_lost_the_turn_neither_begins_nor_ends_a_call(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await begun(bus, turn, "1")
    other = await broker.owner()
    await broker.silence(bus)
    before = await broker.snapshot()
    used = b'{"tokens":1}'
    for write in (
        bus.begin_call(turn, "1"),
        bus.settle_call(turn, "1", ANSWER, used),
        bus.stream(turn, "1", 1, [b"chunk", b'"x"']),
    ):
        with pytest.raises(Fenced):
            await write
    assert await broker.snapshot() == before
    await broker.submit(other, "u")
    await other.cancel("t", "no more")
    turn.task, turn.run = "t", "r"
    assert await other.begin_call(turn, "1") is None, "the task is over"
    assert await other.settle_call(turn, "1", ANSWER) is None


async def test_a_retried_turn_does_not_share_its_calls(broker: Broker, bus: EventBus) -> None:
    """Of two deliveries of one turn, only the newer one begins, streams and settles calls."""
    await broker.submit(bus, "t")
    old = await broker.take(bus)
    await begun(bus, old, "1")
    assert await bus.retry(old, 0, b"")
    await bus.promote()
    new = await broker.take(bus)
    before = await broker.snapshot()
    assert await bus.begin_call(old, "1") is None
    assert await bus.settle_call(old, "1", ANSWER, b'{"tokens":1}') is None
    assert not await bus.stream(old, "1", 1, [b"chunk", b'"late"'])
    assert await broker.snapshot() == before
    assert await begun(bus, new, "1") == CallBegun(2, {})


async def test_an_ended_task_begins_and_keeps_no_calls(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    parts = ask("1", "editor", stream="agent")
    assert await suspend(bus, await broker.take(bus), parts)
    editor = await broker.take(bus)
    await begun(bus, editor, "1")
    await bus.cancel("t", "no more")
    # The child's fields are gone with the task; made again, as a late write would find them.
    await broker.call("HSET", broker.keys.base + "run:t/r/1", "cur", editor.entry, "b:1", 1)
    assert await bus.begin_call(editor, "1") is None
    assert await bus.settle_call(editor, "1", ANSWER, b'{"tokens":1}') is None
    assert not await bus.stream(editor, "1", 1, [b"chunk", b'"late"'])


async def test_a_full_journal_refuses_an_answer(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await begun(bus, turn, "1")
    fill = [part for number in range(10_000) for part in (f"j:x{number}", "1")]
    await broker.call("HSET", f"{broker.keys.base}task:t", *fill)
    with pytest.raises(LimitExceeded, match="journal holds its limit of 10000 steps"):
        await bus.settle_call(turn, "1", ANSWER)


async def test_a_reader_of_pieces_gets_the_final_event(broker: Broker, bus: EventBus) -> None:
    """Nobody requested a stream beforehand: the first piece creates one, and the final event closes it."""
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await begun(bus, turn, "1")
    await bus.stream(turn, "1", 1, [b"chunk", b'"Redis"'])
    assert await complete(bus, turn)
    assert [entry["type"] for entry in await broker.entries("out:t")] == ["weft.output.delta", "weft.task.completed"]


async def test_only_the_settled_call_gives_back(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    turn = await broker.take(bus)
    for step in ("1", "10"):
        await begun(bus, turn, step, tokens(2, 2))
    await bus.settle_call(turn, "1", ANSWER)
    assert json.loads((await broker.task("t"))["rs"]) == {"r|10": {"tokens": 2}}


async def test_a_reservation_over_the_limit_only_by_rounding_is_granted(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"cost":0.3}')
    turn = await broker.take(bus)
    for step in ("1", "2"):
        await begun(bus, turn, step)
        await bus.settle_call(turn, step, ANSWER, b'{"cost":0.1}')
    assert (await begun(bus, turn, "3", b'{"cost":[0.1,1]}')).granted["cost"] >= 0.1


async def test_a_redriven_task_has_its_whole_limit(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", limits=b'{"tokens":10}')
    turn = await broker.take(bus)
    await begun(bus, turn, "1", tokens(6, 6))
    await bury(bus, turn)
    assert "rs" not in await broker.task("t")
