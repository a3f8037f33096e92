"""A request to another partition is answered even if a partition loses its last writes; otherwise it fails in time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import combinations
from typing import Any

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.tasks import Submitted
from runtime_core.errors import ServerError
from runtime_core.state_manager import relay
from runtime_core.wire.commands import Submission
from tests.contracts.broker import Broker, ask, complete, suspend
from tests.contracts.two_partitions import Pair, Side, two_partitions

THERE = "a" * 32
"""The task that answers, as `runs/commit.py` names it: by asker, run and step."""


@pytest.fixture
async def pair(broker: Broker) -> AsyncIterator[Pair]:
    async with two_partitions(broker) as pair:
        yield pair


async def submit(pair: Pair) -> None:
    await pair.here.broker.submit(pair.here.bus, "t")


async def ask_there(pair: Pair, limit: str = "", *, wait: str = "!") -> None:
    """A task in this partition calls an instance in the other one and waits."""
    await commit_ask(pair, await pair.here.broker.take(pair.here.bus), limit, wait=wait)


async def commit_ask(pair: Pair, turn: Delivery, limit: str = "", *, wait: str = "!") -> None:
    part = ask("1", "editor", stream=f"@1:{THERE}{limit}", key="e", wait=wait, data=b'"question"')
    assert await suspend(pair.here.bus, turn, part)


async def carry(pair: Pair) -> None:
    await pair.carry()


async def work(pair: Pair) -> None:
    turn = await pair.there.broker.take(pair.there.bus)
    assert (turn.task, turn.data) == (THERE, b'"question"')
    assert await complete(pair.there.bus, turn, output=b'"yes"')


async def go_on(pair: Pair) -> None:
    turn = await pair.here.broker.take(pair.here.bus)
    assert await complete(pair.here.bus, turn, output=turn.data[22:])


async def asked(pair: Pair, limit: str = "") -> None:
    await submit(pair)
    await ask_there(pair, limit)


async def running(pair: Pair, limit: str = "") -> None:
    await asked(pair, limit)
    await pair.carry()


async def deliveries(side: Side) -> list[Delivery]:
    taken, malformed = await side.bus.read(["agent"], 10, 5)
    assert not malformed
    return taken


async def finish(pair: Pair) -> None:
    """Let both sides work until nothing happens any more."""
    for _ in range(4):
        for turn in await deliveries(pair.here):
            if turn.kind == "start":
                await commit_ask(pair, turn)
            else:
                await complete(pair.here.bus, turn, output=turn.data[22:])
        await pair.carry()
        for turn in await deliveries(pair.there):
            await complete(pair.there.bus, turn, output=b'"yes"')
        await pair.carry()
        await pair.look(61_000)


async def assert_nothing_left(pair: Pair) -> None:
    """Check that nothing waits, nothing is polled any more, and nothing is stored for a request that has ended."""
    for _ in range(3):
        await pair.look(61_000)
    for side in pair.sides:
        await side.broker.idle()
        assert await side.broker.entries("asks") == []
        assert await side.broker.call("ZCARD", side.bus.keys.requests) == 0
    assert not [name for name in await pair.here.broker.task("t") if name.startswith("r:")]


# -- a partition loses its tail ------------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Pair], Awaitable[None]]] = {
    "submitted": submit,
    "asked": ask_there,
    "started": carry,
    "worked": work,
    "answered": carry,
    "ended": go_on,
}


@pytest.mark.parametrize("loser", ["here", "there"])
@pytest.mark.parametrize(("back_to", "at"), [*combinations(STEPS, 2)])
async def test_a_request_survives_a_partition_that_loses_its_last_writes(
    pair: Pair, loser: str, back_to: str, at: str
) -> None:
    """Whatever either side loses, the task ends with the answer and nothing is left."""
    side: Side = getattr(pair, loser)
    saved = {}
    for name, step in STEPS.items():
        await step(pair)
        saved[name] = await side.save()
        if name == at:
            break
    await side.lose_tail(saved[back_to])
    if await side.broker.call("EXISTS", side.bus.keys.stream("agent")):
        await side.broker.lose_group()  # entries in flight are delivered again
    await finish(pair)
    end = await pair.here.broker.final("t")
    assert (end["status"], end["output"]) == ("completed", "yes")
    await assert_nothing_left(pair)


async def test_an_answer_past_its_retention_is_an_error(pair: Pair) -> None:
    """The other side knows the submit but has lost its result: the caller gets this error, and nothing starts again."""
    await running(pair)
    saved = await pair.here.save()
    await work(pair)
    await pair.carry()
    await pair.here.lose_tail(saved)
    await pair.there.broker.call("DEL", pair.there.bus.keys.task(THERE))
    await pair.look()
    await pair.there.broker.nothing(pair.there.bus)
    turn = await pair.here.broker.take(pair.here.bus)
    assert json.loads(turn.data[22:])["type"] == "ResultExpired"
    assert b"WEFT_RETENTION_SECONDS" in turn.data
    assert await complete(pair.here.bus, turn)


async def test_a_task_that_vanished_without_an_end_restarts(pair: Pair) -> None:
    """The dedupe entry says only that it was submitted."""
    await running(pair)
    await pair.there.broker.call("DEL", pair.there.bus.keys.task(THERE))
    await pair.there.broker.call("DEL", pair.there.bus.keys.instance("editor", "e"))
    await complete(pair.there.bus, await pair.there.broker.take(pair.there.bus))
    await finish(pair)
    assert (await pair.here.broker.final("t"))["output"] == "yes"


async def test_a_running_relay_checks_open_requests(pair: Pair) -> None:
    """The other partition has forgotten the request, so the relay sends it again."""
    await asked(pair)
    await pair.carry()
    await pair.there.broker.take(pair.there.bus)
    await pair.there.broker.call("DEL", pair.there.bus.keys.task(THERE), pair.there.bus.keys.base + "seen")
    await pair.here.broker.pass_time(11_000)
    running = asyncio.create_task(pair.here.relay.run())
    try:
        async with asyncio.timeout(60):
            while not await pair.there.broker.task(THERE):
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.wait((running,))


# -- looks cost little ---------------------------------------------------------------------------------------------


async def test_a_request_that_runs_is_not_repeated(pair: Pair) -> None:
    """It is polled less and less often, and no data travels."""
    await running(pair)
    before = await pair.there.broker.snapshot()
    looks = 0
    for _ in range(40):
        await pair.here.broker.pass_time(10_000)
        looks += await pair.here.relay.follow_requests()
        assert await pair.here.broker.entries("asks") == []
    assert 5 <= looks <= 10
    for name in ("agent", "task:" + THERE):
        key = pair.there.bus.keys.base + name
        assert (await pair.there.broker.snapshot())[key] == before[key]


async def test_a_request_that_the_relay_still_has_is_not_repeated(pair: Pair) -> None:
    """A relay that falls behind finds each request once."""
    await asked(pair)
    for _ in range(3):
        await pair.here.broker.pass_time(61_000)
        await pair.here.relay.follow_requests()
    assert len(await pair.here.broker.entries("asks")) == 1


async def test_a_repeated_request_waits_for_the_relay_too(pair: Pair) -> None:
    await asked(pair)
    await pair.here.broker.call("XTRIM", pair.here.bus.keys.base + "asks", "MAXLEN", 0)
    for outcome in ("OK", "QUEUED", "QUEUED"):
        await pair.here.broker.pass_time(61_000)
        _, (request,) = await pair.here.bus.due_requests(10)
        assert await pair.here.bus.repeat_request(request) == outcome
    assert len(await pair.here.broker.entries("asks")) == 1
    await pair.here.bus.cancel("t", "enough")
    assert await pair.here.bus.repeat_request(request) == "DONE"


async def test_a_check_of_open_requests_is_bounded(pair: Pair) -> None:
    for number in range(5):
        await pair.here.broker.submit(pair.here.bus, f"t{number}")
        turn = await pair.here.broker.take(pair.here.bus)
        assert await suspend(pair.here.bus, turn, ask("1", "editor", stream=f"@1:there{number}", key="e"))
    await pair.here.broker.pass_time(11_000)
    assert [(await pair.here.bus.due_requests(2))[0] for _ in range(4)] == [2, 2, 1, 0]


async def test_a_damaged_task_does_not_block_other_requests(pair: Pair) -> None:
    await running(pair)
    await pair.here.broker.submit(pair.here.bus, "damaged")
    part = ask("1", "editor", stream="@1:other", key="e")
    assert await suspend(pair.here.bus, await pair.here.broker.take(pair.here.bus), part)
    await pair.here.broker.call("DEL", pair.here.bus.keys.task("damaged"))
    await pair.here.broker.call("SET", pair.here.bus.keys.task("damaged"), "of the wrong type")
    await pair.here.broker.pass_time(11_000)
    due, found = await pair.here.bus.due_requests(10)
    assert (due, [request.member for request in found]) == (2, ["t|r|1"])
    assert (await pair.here.bus.due_requests(10))[0] == 0


async def test_requests_of_an_older_release_work_as_before(pair: Pair) -> None:
    """They are not in the index; their answers and cancels still arrive."""
    await running(pair)
    await pair.here.broker.call("DEL", pair.here.bus.keys.requests)
    await pair.here.broker.call("HDEL", pair.here.bus.keys.task("t"), "r:1")
    await work(pair)
    await pair.carry()
    await go_on(pair)
    await assert_nothing_left(pair)


async def test_an_answered_request_is_no_longer_checked(pair: Pair) -> None:
    """Its input is not kept for the rest of the run."""
    await running(pair)
    await work(pair)
    await pair.carry()
    assert await pair.here.broker.call("ZCARD", pair.here.bus.keys.requests) == 0
    assert not [name for name in await pair.here.broker.task("t") if name[:2] in ("r:", "k:")]


@pytest.mark.parametrize("gone", ["run", "step", "status"])
async def test_abandoned_requests_leave_the_index(pair: Pair, gone: str) -> None:
    """A request that its own end did not remove: that of a run inside a task, or of a task kept for a letter."""
    await running(pair)
    key = pair.here.bus.keys.task("t")
    if gone == "run":
        await pair.here.broker.call("DEL", key)
    elif gone == "step":
        await pair.here.broker.call("HDEL", key, "m:1")
    else:
        await pair.here.broker.call("HSET", key, "status", "failed")
    await pair.here.broker.pass_time(11_000)
    assert await pair.here.bus.due_requests(10) == (1, [])
    assert await pair.here.broker.call("ZCARD", pair.here.bus.keys.requests) == 0


# -- cancels -------------------------------------------------------------------------------------------------------


async def test_a_cancel_that_is_lost_is_repeated(pair: Pair) -> None:
    """The other partition comes back in its state before the cancel."""
    await running(pair)
    saved = await pair.there.save()
    await pair.here.bus.cancel("t", "enough")
    assert await pair.here.broker.call("ZRANGE", pair.here.bus.keys.requests, 0, -1) == [f"@1:{THERE}|t".encode()]
    await pair.carry()
    assert await pair.there.broker.status(THERE) == "cancelled"
    await pair.there.lose_tail(saved)
    assert await pair.there.broker.status(THERE) == "accepted"
    await pair.look()
    assert await pair.there.broker.status(THERE) == "cancelled"
    assert await pair.here.broker.call("ZCARD", pair.here.bus.keys.requests) == 1, "once more, whether it lasts"
    assert await pair.here.bus.due_requests(10) == (0, []), "but not at once"
    await complete(pair.there.bus, await pair.there.broker.take(pair.there.bus))
    await assert_nothing_left(pair)


# -- time limits ---------------------------------------------------------------------------------------------------


async def error_of(pair: Pair) -> dict[str, Any]:
    turn = await pair.here.broker.take(pair.here.bus)
    assert (turn.kind, turn.step, turn.data[8:9]) == ("resume", "1", b"E")
    found: dict[str, Any] = json.loads(turn.data[22:])
    assert await complete(pair.here.bus, turn)
    return found


@pytest.mark.parametrize(
    ("limit", "stored", "seconds"),
    [("", None, 3600), ("", 90_000, 90), (":5000", 90_000, 5), (":7200000", None, 7200)],
)
async def test_a_request_ends_at_its_time_limit(pair: Pair, limit: str, stored: int | None, seconds: int) -> None:
    """By default, by the namespace's setting, or by its own limit, whichever is longer."""
    if stored:
        await pair.here.broker.call("HSET", pair.here.bus.keys.meta, "request_timeout_ms", stored)
    await running(pair, limit)
    await pair.look(seconds * 1000 - 1000)
    await pair.here.broker.nothing(pair.here.bus)
    await pair.look(1000)
    assert await pair.here.broker.call("ZRANGE", pair.here.bus.keys.requests, 0, -1) == [f"@1:{THERE}|t".encode()]
    task = await pair.here.broker.task("t")
    assert not [name for name in task if name[:2] in ("r:", "k:")]
    assert task["steps"] == "1"
    error = await error_of(pair)
    assert error["type"] == "RequestTimeout"
    for part in ("editor/e", "partition 1", f"within {seconds} s", THERE, "WEFT_REQUEST_TIMEOUT_SECONDS"):
        assert part in error["message"]
    assert await pair.there.broker.status(THERE) == "cancelled"
    rows = [row for entry in await pair.here.broker.entries("record") for row in json.loads(entry["d"])]
    assert [(row["kind"], row["name"], row["status"], row["cause"]) for row in rows if "cause" in row] == [
        ("agent", "editor", "failed", THERE)
    ]
    await complete(pair.there.bus, await pair.there.broker.take(pair.there.bus))
    await assert_nothing_left(pair)


async def test_an_answer_that_comes_after_the_time_limit_is_dropped(pair: Pair) -> None:
    await running(pair, ":5000")
    await work(pair)
    await pair.here.broker.pass_time(6000)
    await pair.here.relay.follow_requests()
    await pair.carry()
    assert (await error_of(pair))["type"] == "RequestTimeout"
    await assert_nothing_left(pair)


async def test_a_group_continues_when_one_of_its_requests_times_out(pair: Pair) -> None:
    await submit(pair)
    await ask_there(pair, ":5000", wait="g1")
    await pair.carry()
    await pair.look(6000)
    assert (await error_of(pair))["type"] == "RequestTimeout"


@pytest.mark.parametrize("wrong", ["record", "asks", "agent", "out:t"])
async def test_a_timed_out_request_that_cannot_be_ended_changes_nothing(pair: Pair, wrong: str) -> None:
    """It is retried later."""
    await pair.here.broker.submit(pair.here.bus, "t", streamed=2)
    await ask_there(pair, ":5000")
    await pair.carry()
    key = pair.here.bus.keys.base + wrong
    await pair.here.broker.call("DEL", key)
    await pair.here.broker.call("SET", key, "of the wrong type")
    await pair.here.broker.pass_time(6000)
    before = await pair.here.broker.snapshot()
    assert await pair.here.bus.due_requests(10) == (1, [])
    after = await pair.here.broker.snapshot()
    assert [name for name in after if after[name] != before.get(name)] == [pair.here.bus.keys.requests]
    await pair.here.broker.call("DEL", key)
    await pair.here.bus.make_groups(["agent"])
    await pair.look(61_000)
    assert (await error_of(pair))["type"] == "RequestTimeout"


async def test_a_circle_of_waits_across_partitions_ends(pair: Pair) -> None:
    """Two tasks each hold the instance that the other one calls: both requests end with an error, and both tasks
    continue."""
    names = (("t", "writer", "k", "@1:" + "b" * 32), ("u", "editor", "e", "@0:" + "c" * 32))
    for side, (task, agent, key, _) in zip(pair.sides, names, strict=True):
        await side.broker.submit(side.bus, task, agent, key)
    for side, (_, _, _, place), (_, agent, key, _) in zip(pair.sides, names, reversed(names), strict=True):
        part = ask("1", agent, stream=place, key=key)
        assert await suspend(side.bus, await side.broker.take(side.bus), part)
    await pair.carry()
    assert (await pair.here.broker.mailbox("writer/k"), await pair.there.broker.mailbox("editor/e")) == (
        ["c" * 32 + "|r"],
        ["b" * 32 + "|r"],
    )
    await pair.look(3_600_000)
    for side in pair.sides:
        turn = await side.broker.take(side.bus)
        assert json.loads(turn.data[22:])["type"] == "RequestTimeout"
        assert await complete(side.bus, turn)
    await pair.carry()
    await assert_nothing_left(pair)


async def test_a_request_that_is_refused_is_answered_with_an_error(pair: Pair) -> None:
    await submit(pair)
    part = ask("1", "nobody", stream=f"@1:{THERE}", key="e")
    assert await suspend(pair.here.bus, await pair.here.broker.take(pair.here.bus), part)
    await pair.carry()
    turn = await pair.here.broker.take(pair.here.bus)
    assert b"no agent is named nobody" in turn.data
    assert await complete(pair.here.bus, turn)
    await assert_nothing_left(pair)


async def test_a_request_to_a_full_partition_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "OVERLOADED_SECONDS", 0.01)
    broker, start, tried = pair.there.broker, pair.there.bus.submit, []

    async def full_at_first(new: Submission) -> Submitted:
        tried.append(new.task_id)
        if len(tried) == 3:
            await broker.call("HDEL", broker.keys.meta, "overload")
        return await start(new)

    monkeypatch.setattr(pair.there.bus, "submit", full_at_first)
    await broker.call("HSET", broker.keys.meta, "overload", "full")
    await running(pair)
    assert tried == [THERE] * 3
    await work(pair)
    await pair.carry()
    await go_on(pair)
    await assert_nothing_left(pair)


async def test_a_request_that_can_never_be_relayed_is_answered_with_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_: Submission) -> Submitted:
        raise ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")

    monkeypatch.setattr(relay, "GIVE_UP_SECONDS", 0.0)
    monkeypatch.setattr(pair.there.bus, "submit", broken)
    await running(pair)
    turn = await pair.here.broker.take(pair.here.bus)
    assert b"WRONGTYPE" in turn.data
    assert await complete(pair.here.bus, turn)
    await assert_nothing_left(pair)
