"""Questions to a human: the first answer, or the deadline, counts, and one resume follows."""

from __future__ import annotations

import asyncio
import json
from typing import cast

import pytest

from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.state_manager.admission import answer_question
from tests.contracts.broker import Broker, again, ask, complete, question, suspend

DEADLINE_MS = 60_000


async def asked(broker: Broker, bus: EventBus, *parts: list[bytes | str | int | float]) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), *parts)


async def results(broker: Broker) -> dict[str, str]:
    """The journal's results by step, without digest and time."""
    return {name[2:]: value[8] + value[22:] for name, value in (await broker.task("t")).items() if name[:2] == "j:"}


async def test_a_question_is_shown_and_answered(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus, question("1"))
    assert [entry["type"] for entry in await broker.entries("out:t")] == ["weft.human.requested"]
    assert await bus.signal("t", "r:1", b"true") == ["ok"]
    turn = await broker.take(bus)
    assert (turn.kind, turn.step) == ("resume", "1")
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_waiting_task_keeps_no_room_for_more_output(broker: Broker, bus: EventBus) -> None:
    """A server reserves 4 KiB for the next entries of a stream, and very many tasks may wait for people."""
    await asked(broker, bus, question("1"))
    size = await broker.call("MEMORY", "USAGE", broker.keys.base + "out:t")
    assert cast(int, size) < 1024


async def test_a_reader_of_the_output_stays_on_a_stream_that_is_stored_again(broker: Broker, bus: EventBus) -> None:
    """It waits before the first question, and gets both: nothing is skipped, and nothing comes twice."""
    await broker.submit(bus, "t")
    transport = await broker.connect()
    broker.transports.append(transport)
    key, read = broker.keys.base + "out:t", list[str]()

    async def read_questions() -> None:
        while len(read) < 2:
            last = read[-1] if read else "0"
            reply = await transport.blocking("XREAD", "BLOCK", 10_000, "STREAMS", key, last)
            read.extend(entry.decode() for entry, _ in pairs(cast(list[list[object]], reply)[0][1]))

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(read_questions())
        assert await suspend(bus, await broker.take(bus), question("1"))
        assert await bus.signal("t", "r:1", b"true") == ["ok"]
        assert await suspend(bus, await broker.take(bus), question("2"))
    assert read == [entry["id"] for entry in await broker.entries("out:t")]


async def test_a_large_output_is_not_stored_again(broker: Broker, bus: EventBus) -> None:
    """To copy it would keep the server from other work."""
    await broker.submit(bus, "t")
    await broker.call("XADD", broker.keys.base + "out:t", "*", "data", "x" * 20_000)
    assert await suspend(bus, await broker.take(bus), question("1"))
    size = await broker.call("MEMORY", "USAGE", broker.keys.base + "out:t", "SAMPLES", 0)
    assert cast(int, size) > 20_000 + 4096


@pytest.mark.parametrize("command", ["memory", "dump", "restore"])
async def test_a_question_is_asked_on_a_server_that_forbids_a_command(
    broker: Broker, bus: EventBus, command: str
) -> None:
    """The task only takes more memory."""
    user = f"user-of-{broker.keys.namespace}"
    await broker.call("ACL", "SETUSER", user, "on", "nopass", "~*", "+@all", f"-{command}")
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    transport = await broker.connect()
    broker.transports.append(transport)
    await transport.call("AUTH", user, "any")
    assert await suspend(EventBus(transport, broker.keys, bus.owner), turn, question("1"))
    assert [entry["type"] for entry in await broker.entries("out:t")] == ["weft.human.requested"]
    await broker.call("ACL", "DELUSER", user)


async def test_a_question_reaches_the_stream_that_the_user_named(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", replyto="answers")
    assert await suspend(bus, await broker.take(bus), question("1"))
    [entry] = await broker.entries("replies")
    assert (entry["to"], entry["type"], entry["t"]) == ("answers", "weft.human.requested", "t")


async def test_the_second_of_two_answers_is_refused(broker: Broker, bus: EventBus) -> None:
    """It changes nothing and wakes nobody."""
    await asked(broker, bus, question("1", wait="0"), question("2"))
    assert await bus.signal("t", "r:1", b'"yes"') == ["ok"]
    before = await broker.snapshot()
    assert await bus.signal("t", "r:1", b'"no"') == ["answered"]
    assert await broker.snapshot() == before
    assert await results(broker) == {"1": 'K"yes"'}


async def test_an_answer_removes_the_timer_of_its_question(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus, question("1", timeout_ms=DEADLINE_MS), question("2", timeout_ms=DEADLINE_MS))
    assert await bus.signal("t", "r:1", b"true") == ["ok"]
    assert await broker.call("ZRANGE", broker.keys.timers, 0, -1) == [b"s|t|r|2"]
    assert list(await broker.hash("delayed")) == ["s|t|r|2"]
    assert [name for name in await broker.task("t") if name[:2] == "z:"] == ["z:s|t|r|2"]


async def test_only_one_of_two_concurrent_answers_is_accepted(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await asked(broker, bus, question("1", timeout_ms=DEADLINE_MS))
    answers = await asyncio.gather(bus.signal("t", "r:1", b"1"), other.signal("t", "r:1", b"2"))
    assert sorted(answer[0] for answer in answers) == ["answered", "ok"]
    await broker.take(bus)
    await broker.nothing(bus)


async def test_an_answer_before_the_deadline_removes_it(broker: Broker, bus: EventBus) -> None:
    """The timer is gone; even if it had stayed, it would find the step answered."""
    await asked(broker, bus, question("1", timeout_ms=DEADLINE_MS, default=b'"no"'))
    assert await bus.signal("t", "r:1", b'"yes"') == ["ok"]
    assert await broker.call("ZCARD", broker.keys.timers) == 0
    await broker.call("ZADD", broker.keys.timers, 0, "s|t|r|1")
    await broker.call("HSET", broker.keys.base + "delayed", "s|t|r|1", 'K"no"')
    await bus.promote()
    assert await results(broker) == {"1": 'K"yes"'}
    await broker.take(bus)
    await broker.nothing(bus)


@pytest.mark.parametrize(("default", "result"), [(b'"no"', 'K"no"'), (b"", "E")])
async def test_an_answer_after_the_deadline_is_refused(
    broker: Broker, bus: EventBus, default: bytes, result: str
) -> None:
    """The default, or the error, is the result."""
    await asked(broker, bus, question("1", timeout_ms=DEADLINE_MS, default=default))
    await broker.pass_time(DEADLINE_MS)
    await bus.promote()
    before = await broker.snapshot()
    assert await bus.signal("t", "r:1", b'"yes"') == ["answered"]
    assert await broker.snapshot() == before
    assert (await results(broker))["1"].startswith(result)
    if not default:
        error = json.loads((await results(broker))["1"][1:])
        assert error["type"] == "HumanTimeout"


async def test_an_answer_at_the_deadline_gives_one_result(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Whichever comes first, there is one result and one resume."""
    await asked(broker, bus, question("1", timeout_ms=DEADLINE_MS))
    await broker.pass_time(DEADLINE_MS)
    await asyncio.gather(other.promote(), bus.signal("t", "r:1", b"1"), other.promote())
    assert len(await results(broker)) == 1
    await broker.take(bus)
    await broker.nothing(bus)


async def test_an_answer_during_the_turn_is_not_missed(broker: Broker, bus: EventBus) -> None:
    """The run is in flight for another step; its commit sees the answer."""
    await asked(broker, bus, question("1"), ask("2"))
    assert await bus.commit_call(await broker.take(bus, "tool"), b"K", 1_700_000_000_000, b"1", b"[]", 1)
    turn = await broker.take(bus)
    assert await bus.signal("t", "r:1", b"true") == ["ok"]
    await broker.nothing(bus)
    assert await suspend(bus, turn, again("1"))
    assert (await broker.take(bus)).step == "1"


async def test_answers_without_a_question_are_refused(broker: Broker, bus: EventBus) -> None:
    """An unknown task, a step that is no question, a text that is no request, a task that is over."""
    await asked(broker, bus, ask("1"), question("2"))
    before = await broker.snapshot()
    assert await bus.signal("nobody", "r:1", b"1") == ["unknown"]
    assert await bus.signal("t", "r:1", b"1") == ["no_request"]
    assert await bus.signal("t", "r:9", b"1") == ["no_request"]
    assert await bus.signal("t", "what", b"1") == ["no_request"]
    assert await broker.snapshot() == before
    await bus.cancel("t", "not wanted")
    before = await broker.snapshot()
    assert (await bus.signal("t", "r:2", b"1"))[0] == "ended"
    assert await broker.snapshot() == before


async def test_a_question_of_a_child_run(broker: Broker, bus: EventBus) -> None:
    """The request names the run, so that two runs may ask at the same place."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), question("1"))
    assert await bus.signal("t", "r:1", b"1") == ["no_request"]
    assert await bus.signal("t", "r/1:1", b"1") == ["ok"]
    assert await complete(bus, await broker.take(bus))
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


VERDICT = b'{"expects":"verdict","prompt":"may I?"}'


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b'"yes"', "is not a verdict"),
        (b"1", "is not a verdict"),
        (b"null", "is not a verdict"),
        (b"[true]", "is not a verdict"),
        (b"{}", "is not a verdict"),
        (b'{"verdict":"maybe"}', "is not a verdict"),
        (b'{"verdict":["approve"]}', "is not a verdict"),
        (b'{"verdict":"edit"}', "no value"),
        (b'{"verdict":"deny","reason":3}', "a reason that is not text"),
        (b'{"verdict":"deny","resaon":"no"}', "the unknown field resaon"),
    ],
)
async def test_an_invalid_verdict_is_refused_and_the_question_stays_open(
    broker: Broker, bus: EventBus, value: bytes, problem: str
) -> None:
    await asked(broker, bus, question("1", shown=VERDICT, timeout_ms=DEADLINE_MS))
    before = await broker.snapshot()
    answer = await bus.signal("t", "r:1", value)
    assert (answer[0], answer[2]) == ("invalid", "value")
    assert problem in answer[1]
    assert await broker.snapshot() == before
    assert await bus.signal("t", "r:1", b"true") == ["ok"]
    assert await results(broker) == {"1": "Ktrue"}


@pytest.mark.parametrize(
    "value",
    [
        b"true",
        b"false",
        b'{"verdict":"approve"}',
        b'{"verdict":"deny","reason":"no"}',
        b'{"verdict":"edit","value":null}',
        b'{"verdict":"edit","value":{"deep":[1]},"reason":"better"}',
    ],
)
async def test_verdicts_are_passed_unchanged(broker: Broker, bus: EventBus, value: bytes) -> None:
    await asked(broker, bus, question("1", shown=VERDICT))
    assert await bus.signal("t", "r:1", value) == ["ok"]
    assert await results(broker) == {"1": "K" + value.decode()}


async def test_only_the_question_itself_says_that_it_expects_a_verdict(broker: Broker, bus: EventBus) -> None:
    """Data that looks the same somewhere inside does not."""
    await asked(broker, bus, question("1", shown=b'{"prompt":"?","data":{"expects":"verdict","x":1}}'))
    assert await bus.signal("t", "r:1", b'"anything"') == ["ok"]


# -- repeats of an answer ------------------------------------------------------------------------------------------


async def test_the_answer_that_counted_may_be_repeated(broker: Broker, bus: EventBus) -> None:
    """The sender may have died, or lost its connection, before it got the reply."""
    await asked(broker, bus, question("1", wait="0"), question("2"))
    assert await bus.signal("t", "r:1", b'"yes"', "shop\ne1") == ["ok"]
    before = await broker.snapshot()
    assert await bus.signal("t", "r:1", b'"yes"', "shop\ne1") == ["ok"]
    assert await bus.signal("t", "r:1", b'"no"', "shop\ne1") == ["answered"], "the same id with another answer"
    assert await bus.signal("t", "r:1", b'"yes"', "shop\ne2") == ["answered"], "the same answer of somebody else"
    assert await bus.signal("t", "r:1", b'"yes"') == ["answered"], "an answer without an id"
    assert await bus.signal("t", "r:9", b'"yes"', "shop\ne1") == ["no_request"], "a question that was never asked"
    assert await broker.snapshot() == before
    assert await bus.signal("t", "r:2", b'"yes"', "shop\ne1") == ["ok"], "another question"


async def test_an_answer_is_recognised_after_the_end(broker: Broker, bus: EventBus) -> None:
    """The answer names its task, and the child run that asked."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), question("1"))
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne1") == ["ok"]
    assert await complete(bus, await broker.take(bus))
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne1") == ["ok"]
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne2") == ["no_request"]
    assert await complete(bus, await broker.take(bus))
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne1") == ["ok"]
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne2") == ["ended", "completed"]
    assert await bus.erase("t") == "OK"
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne1") == ["ok"]
    assert await bus.signal("t", "r/1:1", b"1", "shop\ne2") == ["unknown"]


async def test_an_answer_that_did_not_count_is_refused_again(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus, question("1", timeout_ms=DEADLINE_MS, default=b"0"), question("2"))
    await broker.pass_time(DEADLINE_MS)
    await bus.promote()
    for _ in range(2):
        assert await bus.signal("t", "r:1", b"1", "shop\ne1") == ["answered"]


async def test_answers_that_are_remembered_are_bounded(broker: Broker, bus: EventBus) -> None:
    """They share the dedupe window with submits."""
    await broker.call("HSET", broker.keys.meta, "dedupe_max", 3)
    await asked(broker, bus, *(question(str(step), wait="0") for step in range(1, 9)), question("9"))
    for step in range(1, 9):
        assert await bus.signal("t", f"r:{step}", b"1", f"shop\ne{step}") == ["ok"]
    assert await broker.call("HLEN", broker.keys.submits) == await broker.call("LLEN", broker.keys.submits_in_order)
    assert len(await broker.hash("seen")) <= 3
    assert await bus.signal("t", "r:8", b"1", "shop\ne8") == ["ok"]
    assert await bus.signal("t", "r:1", b"1", "shop\ne1") == ["answered"]


async def test_a_question_is_answered_under_the_id_that_was_shown_alone(broker: Broker, bus: EventBus) -> None:
    """The place of a question can be guessed, and so can its data."""
    shown = b'{"task_id":"t","request_id":"r:1-00ff","prompt":"well?","data":{"request_id":"r:1-beef"}}'
    await asked(broker, bus, question("1", shown=shown))
    for guessed in ("r:1", "r:1-", "r:1-beef", "r:1-00ff-00ff", "r:1-00FF"):
        assert await bus.signal("t", guessed, b"1") == ["no_request"]
    assert await bus.signal("t", "r:1-00ff", b"1", "shop\ne1") == ["ok"]
    assert await bus.signal("t", "r:1-00ff", b"1", "shop\ne1") == ["ok"], "sent again"
    assert await bus.signal("t", "r:1-00ff", b"1") == ["answered"]


async def test_a_question_of_an_older_release_is_answered_by_its_place(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus, question("1", shown=b'{"task_id":"t","request_id":"r:1","prompt":"well?"}'))
    assert await bus.signal("t", "r:1-00ff", b"1") == ["no_request"]
    assert await bus.signal("t", "r:1", b"1") == ["ok"]


# -- answers of a type ---------------------------------------------------------------------------------------------

TYPED = (
    b'{"schema":{"type":"object","properties":{"day":{"type":"string","format":"date"},"seats":{"type":"integer"}},'
    b'"required":["day"]},"task_id":"t","request_id":"r:1","prompt":"when?"}'
)


@pytest.mark.parametrize(
    ("value", "field", "problem"),
    [
        (b'{"day":"2030-01-04","seats":"two"}', "value.seats", "is not of type"),
        (b'{"day":"tomorrow"}', "value.day", 'is not a "date"'),
        (b"{}", "value.day", "is missing"),
        (b"null", "value", "is not of type"),
    ],
)
async def test_an_answer_that_does_not_fit_is_refused_and_the_question_stays_open(
    broker: Broker, bus: EventBus, value: bytes, field: str, problem: str
) -> None:
    await asked(broker, bus, question("1", shown=TYPED, timeout_ms=DEADLINE_MS))
    before = await broker.snapshot()
    kind, message, part = await answer_question(bus, "t", "r:1", value, "shop\ne1")
    assert (kind, part) == ("invalid", field)
    assert problem in message
    assert await broker.snapshot() == before
    assert await answer_question(bus, "t", "r:1", b'{"day":"2030-01-04"}', "shop\ne1") == ["ok"]
    assert await answer_question(bus, "t", "r:1", b'{"day":"2030-01-04"}', "shop\ne1") == ["ok"], "sent again"
    assert await results(broker) == {"1": 'K{"day":"2030-01-04"}'}


async def test_an_unchecked_answer_is_not_delivered(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus, question("1", shown=TYPED, timeout_ms=DEADLINE_MS))
    before = await broker.snapshot()
    assert await bus.signal("t", "r:1", b"null") == ["schema", TYPED.decode()]
    assert await broker.snapshot() == before


async def test_only_the_question_itself_has_the_schema(broker: Broker, bus: EventBus) -> None:
    """Data that looks the same somewhere inside is none, and needs no second call."""
    await asked(broker, bus, question("1", shown=b'{"prompt":"?","data":{"schema":{"type":"integer"}}}'))
    assert await bus.call("signal", "t", "r:1", b'"anything"', "", "") == [b"ok"]
