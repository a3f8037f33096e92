"""A redriven dead letter runs once, through the mailbox, with a new count of attempts, if its task still wants it."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import DIGEST, LEASE_MS, Broker, answer, ask, bury, complete, fail, nap, now, suspend


async def letter(broker: Broker) -> str:
    (entry,) = await broker.entries("dead")
    return entry["id"]


async def dead_call(broker: Broker, bus: EventBus) -> str:
    """A task that failed because its only call was given up at its third attempt; the letter."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", data=b'{"q":"old"}'))
    for _ in range(2):
        assert await bus.retry(await broker.take(bus, "tool"), 0, b"")
        await broker.pass_time(10)
        await bus.promote()
    call = await broker.take(bus, "tool")
    assert call.attempt == 3
    assert await bury(bus, call)
    assert await fail(bus, await broker.take(bus))
    assert await broker.status("t") == "failed"
    return await letter(broker)


async def test_redrive_of_an_ended_task_is_refused(broker: Broker, bus: EventBus) -> None:
    """An external effect that serves nobody."""
    found = await dead_call(broker, bus)
    before = await broker.snapshot()
    assert await bus.redrive(found, reopen=False) == ["ended", "t", "failed"]
    assert await broker.snapshot() == before


async def test_redrive_reopens_a_task_on_request(broker: Broker, bus: EventBus) -> None:
    """The same run (so the same idempotency key) starts with its first attempt; then the task continues."""
    found = await dead_call(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    fields = await broker.task("t")
    assert fields["status"] == "running"
    assert "out" not in fields
    call = await broker.take(bus, "tool")
    assert (call.task, call.run, call.name, call.attempt) == ("t", "r/1", "search", 1)
    assert call.data == b'{"q":"old"}'
    assert await answer(bus, call, b'"at last"')
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert loaded.journal["1"].endswith(b'"at last"')
    assert await complete(bus, turn)
    assert (await broker.final("t"))["status"] == "completed"
    await broker.idle()


async def dead_call_of_an_instance(broker: Broker, bus: EventBus) -> str:
    """A task of `writer/k` that failed because its call was given up; the letter."""
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    return await letter(broker)


async def test_a_reopened_run_of_an_instance_joins_its_mailbox(broker: Broker, bus: EventBus) -> None:
    """Without its instance it would write state beside another turn, or never continue."""
    found = await dead_call_of_an_instance(broker, bus)
    await broker.submit(bus, "other", key="k")
    running = await broker.take(bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"), b'"at last"')
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["t|r"]
    assert await complete(bus, running, state=b'{"n":1}')
    turn = await broker.take(bus)
    assert (turn.task, turn.run) == ("t", "r")
    assert (await broker.hash("inst:writer/k"))["busy"] == "t|r"
    loaded = await bus.load(turn)
    assert loaded is not None
    assert (loaded.state, loaded.journal["1"][22:]) == (b'{"n":1}', b'"at last"')
    assert await complete(bus, turn, state=b'{"n":2}')
    assert (await broker.hash("inst:writer/k"))["state"] == '{"n":2}'
    await broker.idle()


async def test_the_completed_run_of_an_instance_is_not_reopened(broker: Broker, bus: EventBus) -> None:
    """It has caught the error of its call and has written its state, which a second run would write again."""
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus), state=b'{"n":1}')
    before = await broker.snapshot()
    assert await bus.redrive(await letter(broker), reopen=True) == ["gone", "t"]
    assert await broker.snapshot() == before


async def test_a_reopened_run_waits_for_its_redriven_call(broker: Broker, bus: EventBus) -> None:
    """Its turn comes before the result does: it waits for the same call and requests nothing twice."""
    found = await dead_call_of_an_instance(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert (loaded.journal, list(loaded.pending)) == ({}, ["1"])
    assert await suspend(bus, turn, ["a", "1", "!"])
    assert await answer(bus, await broker.take(bus, "tool"))
    await broker.nothing(bus, "tool")
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_reopened_run_requests_the_steps_again_that_its_end_dropped(broker: Broker, bus: EventBus) -> None:
    """The end freed child runs, timers and calls: nothing would ever answer these steps."""
    await broker.submit(bus, "t")
    child = ask("2", "editor", stream="agent", key="e", wait="g0")
    assert await suspend(bus, await broker.take(bus), ask("1"), child, nap("3", 60_000))
    child_turn = await broker.take(bus)
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert await complete(bus, child_turn) is False
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    loaded = await bus.load(await broker.take(bus))
    assert loaded is not None
    assert list(loaded.pending) == ["1"]


async def test_a_result_after_the_end_is_not_computed_again(broker: Broker, bus: EventBus) -> None:
    """The call may not be repeated, and was running when its task ended."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    running = await broker.take(bus, "tool")
    assert await bus.mark_started(running)
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert not await answer(bus, running, b'"late"')
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    loaded = await bus.load(await broker.take(bus))
    assert loaded is not None
    assert loaded.journal["1"].endswith(b'"late"')
    assert list(loaded.pending) == ["2"]


@pytest.mark.parametrize("end", ["stopped", "failed"])
async def test_a_call_interrupted_by_the_end_of_its_task_does_not_start_again(
    broker: Broker, bus: EventBus, end: str
) -> None:
    """The call may not be repeated. Its process stopped it, or it failed, after its task had ended."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
    running = await broker.take(bus, "tool")
    assert await bus.mark_started(running)
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    if end == "stopped":
        assert not await bus.retry(running, 0, b"", counts=False)
    else:
        assert not await bury(bus, running)
    assert await broker.call("EXISTS", broker.keys.started) == 0
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    loaded = await bus.load(await broker.take(bus))
    assert loaded is not None
    assert (b"UnknownOutcome" if end == "stopped" else b"E") in loaded.journal["1"]
    assert list(loaded.pending) == ["2"]


async def test_a_reopened_run_does_not_bring_back_an_older_state(broker: Broker, bus: EventBus) -> None:
    """A reentrant call had changed the state before the run failed; others have written it since."""
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    assert await complete(bus, await broker.take(bus), state=b'{"n":1}')
    assert await suspend(bus, await broker.take(bus), ask("2"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    await broker.submit(bus, "other", key="k")
    assert await complete(bus, await broker.take(bus), state=b'{"n":7}')
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    loaded = await bus.load(await broker.take(bus))
    assert loaded is not None
    assert (loaded.state, loaded.overrides) == (b'{"n":7}', {})


async def test_a_reopened_task_counts_each_row_once(broker: Broker, bus: EventBus) -> None:
    """A cancelled task had no row of its own run; nor had a call that was dead-lettered unrun."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert (await bus.cancel("t", "no more")) == ["cancelled"]
    assert (await broker.final("t"))["steps"] == 0
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = [await broker.take(bus), await broker.take(bus)][-1]
    assert await complete(bus, turn)
    assert (await broker.final("t"))["steps"] == 2


async def test_a_redrive_removes_the_letter(broker: Broker, bus: EventBus) -> None:
    """A second redrive, at once or later, finds nothing."""
    found = await dead_call(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await broker.entries("dead") == []
    assert await broker.call("ZCARD", broker.keys.base + "letters") == 0
    before = await broker.snapshot()
    assert await bus.redrive(found, reopen=True) == ["missing"]
    assert await broker.snapshot() == before


async def test_a_redriven_call_gets_the_given_data(broker: Broker, bus: EventBus) -> None:
    found = await dead_call(broker, bus)
    assert await bus.redrive(found, reopen=True, data=b'{"q":"new"}') == ["ok", "t"]
    call = await broker.take(bus, "tool")
    assert (call.data, call.step) == (b'{"q":"new"}', DIGEST), "its row says what the code requested"


async def test_a_letter_pins_its_journal(broker: Broker, bus: EventBus) -> None:
    """It can be redriven after the retention time; once it is dropped, the task may expire."""
    found = await dead_call(broker, bus)
    assert await broker.call("TTL", broker.keys.task("t")) == -1
    assert await bus.drop_letter(found)
    ttl = await broker.call("TTL", broker.keys.task("t"))
    assert isinstance(ttl, int)
    assert ttl > 0
    assert await broker.entries("dead") == []
    assert not await bus.drop_letter(found)


async def test_redrive_without_the_journal_is_refused(broker: Broker, bus: EventBus) -> None:
    """To reopen, the run's work must still be stored; the letter stays."""
    found = await dead_call(broker, bus)
    await broker.call("DEL", broker.keys.task("t"))
    before = await broker.snapshot()
    assert await bus.redrive(found, reopen=True) == ["gone", "t"]
    assert await broker.snapshot() == before


async def test_redrive_of_a_call_whose_error_the_broker_lost_is_refused(broker: Broker, bus: EventBus) -> None:
    """A server that lost its last writes: the run below may act on anything."""
    found = await dead_call(broker, bus)
    await broker.call("HDEL", broker.keys.task("t"), "j:1")
    before = await broker.snapshot()
    assert await bus.redrive(found, reopen=True) == ["gone", "t"]
    assert await broker.snapshot() == before


async def test_redrive_of_a_call_that_has_a_result_is_refused(broker: Broker, bus: EventBus) -> None:
    """An earlier redrive of a copy has answered its run since."""
    found = await dead_call(broker, bus)
    fields = (await broker.entries("dead"))[0]
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    flat = [item for name, value in fields.items() if name != "id" for item in (name, value)]
    copy = await broker.call("XADD", broker.keys.dead, "*", *flat)
    assert isinstance(copy, bytes)
    before = await broker.snapshot()
    assert await bus.redrive(copy.decode(), reopen=True) == ["gone", "t"]
    assert await broker.snapshot() == before


async def test_a_redrive_of_an_ended_child_run_is_refused(broker: Broker, bus: EventBus) -> None:
    """Its parent got the error and has acted on it."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await bury(bus, await broker.take(bus))
    found = await letter(broker)
    assert (await bus.redrive(found, reopen=False))[0] == "gone"
    assert await complete(bus, await broker.take(bus))
    assert (await bus.redrive(found, reopen=True))[0] == "gone"
    assert await broker.status("t") == "completed"


async def test_redrive_of_a_turn_joins_the_mailbox(broker: Broker, bus: EventBus) -> None:
    """The instance has other work by now, so the reopened run waits for its turn."""
    await broker.submit(bus, "t", key="k")
    assert await bury(bus, await broker.take(bus))
    await broker.submit(bus, "other", key="k")
    running = await broker.take(bus)
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["t|r"]
    assert await complete(bus, running)
    turn = await broker.take(bus)
    assert (turn.task, turn.attempt) == ("t", 1)
    assert await complete(bus, turn)
    assert (await broker.final("t"))["status"] == "completed"
    await broker.idle()


async def test_a_turn_without_a_key_can_be_redriven(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus))
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    turn = await broker.take(bus)
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_letter_without_work_cannot_be_redriven(broker: Broker, bus: EventBus) -> None:
    """It has no task."""
    await broker.call("XADD", broker.keys.stream("agent"), "*", "some", "thing")
    _, malformed = await bus.read(["agent"], 1, 5)
    ((stream, entry, _),) = malformed
    assert await bus.dead_letter(stream, entry, "malformed", b"[]", 1, b'{"type":"Malformed","message":"x"}')
    before = await broker.snapshot()
    assert (await bus.redrive(await letter(broker), reopen=True))[0] == "gone"
    assert await broker.snapshot() == before


async def test_a_diverged_run_is_parked(broker: Broker, bus: EventBus) -> None:
    """The task does not fail and the run keeps its instance; after a fix it continues where it was."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert await bury(bus, turn, reason="diverged")
    fields = await broker.task("t")
    assert fields["status"] not in ("failed", "completed", "cancelled")
    assert fields["cur"] == "park"
    assert "j:1" in fields
    await broker.nothing(bus)
    assert not await complete(bus, turn)
    assert (await broker.task("t"))["cur"] == "park"
    assert await bus.redrive(await letter(broker), reopen=False) == ["ok", "t"]
    again = await broker.take(bus)
    assert (again.kind, again.step, again.attempt) == ("resume", "1", 1)
    loaded = await bus.load(again)
    assert loaded is not None
    assert list(loaded.journal) == ["1"]
    assert await complete(bus, again)
    assert (await broker.final("t"))["status"] == "completed"
    assert (await broker.take(bus)).task == "next"


async def test_a_parked_run_is_redriven_once(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus), reason="diverged")
    found = await letter(broker)
    assert await bus.redrive(found, reopen=False) == ["ok", "t"]
    assert await bus.redrive(found, reopen=False) == ["missing"]
    await broker.take(bus)
    await broker.nothing(bus)


async def test_cancel_of_a_parked_run_frees_its_instance(broker: Broker, bus: EventBus) -> None:
    """Nobody fixes it, and the others continue."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "next", key="k")
    assert await bury(bus, await broker.take(bus), reason="diverged")
    assert await bus.cancel("t", "not wanted") == ["cancelled"]
    assert (await broker.take(bus)).task == "next"
    assert await bus.redrive(await letter(broker), reopen=False) == ["ended", "t", "cancelled"]


async def test_cancel_of_a_parked_child_run_frees_its_instance(broker: Broker, bus: EventBus) -> None:
    """The instance belongs to the task's child run."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent", key="k"))
    await broker.submit(bus, "next", "editor", "k")
    assert await bury(bus, await broker.take(bus), reason="diverged")
    await broker.nothing(bus)
    assert await bus.cancel("t", "not wanted") == ["cancelled"]
    assert (await broker.take(bus)).task == "next"


async def test_a_parked_child_run_continues(broker: Broker, bus: EventBus) -> None:
    """Its parent keeps waiting, and gets the answer in the end."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await bury(bus, await broker.take(bus), reason="diverged")
    assert await broker.status("t") == "waiting"
    assert await bus.redrive(await letter(broker), reopen=False) == ["ok", "t"]
    assert await complete(bus, await broker.take(bus), output=b'"child"')
    turn = await broker.take(bus)
    assert turn.data.endswith(b'"child"')
    assert await complete(bus, turn)
    assert (await broker.final("t"))["status"] == "completed"


async def test_a_run_whose_journal_was_dropped_cannot_be_reopened(broker: Broker, bus: EventBus) -> None:
    """A cancelled parked run has nothing to continue from; the refusal changes nothing."""
    await broker.submit(bus, "t", key="k")
    assert await bury(bus, await broker.take(bus), reason="diverged")
    await bus.cancel("t", "not wanted")
    before = await broker.snapshot()
    assert await bus.redrive(await letter(broker), reopen=True) == ["gone", "t"]
    assert await broker.snapshot() == before


async def expires(broker: Broker, task: str) -> bool:
    return await broker.call("TTL", broker.keys.task(task)) != -1


async def test_a_task_that_continued_expires(broker: Broker, bus: EventBus) -> None:
    """Its letter is gone, so nothing pins it any more."""
    found = await dead_call(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    assert await expires(broker, "t")
    ends = [entry.get("g", "") for entry in await broker.entries("record") if "e" in entry]
    assert ends == ["", "1"], "the record tells a second end from the first"


async def test_a_task_is_pinned_by_its_last_letter(broker: Broker, bus: EventBus) -> None:
    """They are dropped one after the other, while the task runs and after its end."""
    await broker.submit(bus, "t")
    parts = [ask(step, wait="g1") for step in ("1", "2", "3")]
    assert await suspend(bus, await broker.take(bus), *parts)
    for _ in parts:
        assert await bury(bus, await broker.take(bus, "tool"))
    first, second, third = [entry["id"] for entry in await broker.entries("dead")]
    assert await bus.drop_letter(first)
    assert await complete(bus, await broker.take(bus))
    assert not await expires(broker, "t")
    assert await bus.drop_letter(second)
    assert not await expires(broker, "t")
    assert await bus.drop_letter(third)
    assert await expires(broker, "t")


async def test_a_running_task_without_letters_is_not_pinned(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await bus.drop_letter(await letter(broker))
    assert not await expires(broker, "t"), "it is still open"
    assert await complete(bus, await broker.take(bus))
    assert await expires(broker, "t")


async def test_the_heartbeat_does_not_stop_a_reopened_task(broker: Broker, bus: EventBus) -> None:
    """It was reported as failed already; people who work on it again need no second report."""
    since, _, _ = await bus.beat(LEASE_MS, False, "")
    await broker.pass_time(1000)
    assert await bus.redrive(await dead_call(broker, bus), reopen=True) == ["ok", "t"]
    assert (await bus.beat(LEASE_MS, False, str(int(since) - 1000)))[1] == []


async def test_a_call_of_a_run_that_continues_is_not_redriven(broker: Broker, bus: EventBus) -> None:
    """Its error is in the journal, and the run may act on it as soon as the other call has its result."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", wait="g1"), ask("2", wait="g1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    before = await broker.snapshot()
    assert await bus.redrive(await letter(broker), True) == ["gone", "t"]
    assert await broker.snapshot() == before


@pytest.mark.parametrize("asks_in_turn", [True, False])
async def test_a_reopened_task_forgets_what_its_first_life_waited_for(
    broker: Broker, bus: EventBus, asks_in_turn: bool
) -> None:
    """Covers child runs, groups, a question in the middle of a turn, and the state that a nested run left."""
    await broker.submit(bus, "t", key="k")
    first = await broker.take(bus)
    if asks_in_turn:
        assert await bus.ask(first, now(), "client", b"", ask("9"), 1) == {}
    editor = ask("1", "editor", stream="agent")
    assert await suspend(bus, first, editor, ask("2", wait="g1"), ask("3", wait="g1"))
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", key="k"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus), state=b'{"n":5}')
    fields = await broker.task("t")
    # The state belongs to the open question, if there is one.
    assert {"a" if asks_in_turn else "ov", "g1", "k:r/1", "m:1", "m:3"} <= fields.keys()
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    left = {name for name in await broker.task("t") if name in ("a", "ov", "out", "ended", "row") or name[:1] in "gkm"}
    assert left == {"m:9" if asks_in_turn else "m:2"}, "only the call that is driven again"


async def test_a_result_that_a_reopened_run_does_not_wait_for_wakes_no_run(broker: Broker, bus: EventBus) -> None:
    """The call is redriven before the reopened run has requested it."""
    found = await dead_call_of_an_instance(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await suspend(bus, await broker.take(bus), nap("5", 60_000))
    assert await answer(bus, await broker.take(bus, "tool"))
    await broker.nothing(bus)
    assert "j:1" in await broker.task("t")


async def test_a_redriven_call_wakes_its_parked_run(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    found = await letter(broker)
    assert await bury(bus, await broker.take(bus), reason="diverged")
    assert await bus.redrive(found, reopen=False) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    assert (turn.kind, turn.step) == ("resume", "1")
    assert await complete(bus, turn)


async def test_a_reopened_task_does_not_count_the_row_of_its_failed_run_twice(broker: Broker, bus: EventBus) -> None:
    found = await dead_call(broker, bus)
    assert (await broker.final("t"))["steps"] == 1
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    assert (await broker.final("t"))["steps"] == 2


async def test_a_run_redriven_with_new_data_keeps_it(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await bury(bus, await broker.take(bus))
    assert await bus.redrive(await letter(broker), reopen=True, data=b'"new"') == ["ok", "t"]
    turn = await broker.take(bus)
    loaded = await bus.load(turn)
    assert loaded is not None
    assert (turn.data, loaded.data) == (b'"new"', b'"new"')


async def test_a_call_that_has_its_result_by_another_letter_is_not_driven(broker: Broker, bus: EventBus) -> None:
    """The task has ended, so that nothing else refuses it."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", wait="0"), ask("2", wait="0"))
    assert await bury(bus, await broker.take(bus, "tool"))
    fields = (await broker.entries("dead"))[0]
    assert await bury(bus, await broker.take(bus, "tool"))
    await bus.cancel("t", "no more")
    assert await bus.redrive(fields["id"], reopen=True) == ["ok", "t"]
    assert await answer(bus, await broker.take(bus, "tool"))
    await bus.cancel("t", "no more")
    flat = [item for name, value in fields.items() if name != "id" for item in (name, value)]
    copy = await broker.call("XADD", broker.keys.dead, "*", *flat)
    assert isinstance(copy, bytes)
    before = await broker.snapshot()
    assert await bus.redrive(copy.decode(), reopen=True) == ["gone", "t"]
    assert await broker.snapshot() == before
