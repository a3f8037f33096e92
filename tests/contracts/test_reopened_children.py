"""Child runs that were open when their task ended, or that failed it: a reopened task continues them."""

from __future__ import annotations

import pytest

from runtime_core.bus.deliveries import Delivery, RunFields
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import DIGEST, Broker, answer, ask, bury, complete, fail, nap, now, suspend

RUN = "run:t/r/1"


async def letter(broker: Broker) -> str:
    (entry,) = await broker.entries("dead")
    return entry["id"]


async def loaded(bus: EventBus, turn: Delivery) -> RunFields:
    fields = await bus.load(turn)
    assert fields is not None
    return fields


async def open_child(broker: Broker, bus: EventBus, key: str = "") -> Delivery:
    """Let task `t` call the child run 1, which has one finished call, and make the call 2. Return the call 2."""
    await broker.submit(bus, "t")
    child = ask("1", "editor", stream="agent", key=key, wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ask("2"))
    assert await suspend(bus, await broker.take(bus), ask("1"))
    doomed, call = await broker.take(bus, "tool"), await broker.take(bus, "tool")
    assert (doomed.run, call.run) == ("r/2", "r/1/1")
    assert await answer(bus, call, b'"paid"')
    return doomed


async def fail_with_open_child(broker: Broker, bus: EventBus, key: str = "") -> str:
    """Fail task `t` by its call 2, while its child run 1 waits for a second call. Return the letter."""
    doomed = await open_child(broker, bus, key)
    assert await suspend(bus, await broker.take(bus), ask("2"))
    waiting = await broker.take(bus, "tool")
    assert await bury(bus, doomed)
    assert await fail(bus, await broker.take(bus))
    assert not await answer(bus, waiting)
    return await letter(broker)


async def ask_again(broker: Broker, bus: EventBus, *, digest: str = DIGEST, key: str = "") -> Delivery:
    """Let the reopened task request its child run again, and answer its call. Return the start of the child run."""
    child = ask("1", "editor", stream="agent", digest=digest, key=key, wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ["a", "2", "g1"])
    call = await broker.take(bus, "tool")
    assert call.run == "r/2"
    assert await answer(bus, call)
    assert "c:r/1" not in await broker.task("t"), "its journal is kept no longer"
    return await broker.take(bus)


@pytest.mark.parametrize("key", ["", "e"])
async def test_an_open_child_run_continues(broker: Broker, bus: EventBus, key: str) -> None:
    found = await fail_with_open_child(broker, bus, key)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    child = await ask_again(broker, bus, key=key)
    assert (child.run, child.kind, child.attempt) == ("r/1", "start", 1)
    assert child.key or child.turn == -1, "a run without a key must load its journal"
    fields = await loaded(bus, child)
    assert {step: value[22:] for step, value in fields.journal.items()} == {"1": b'"paid"'}
    assert fields.pending == {}
    assert await complete(bus, child)
    assert await complete(bus, await broker.take(bus))
    assert (await broker.final("t"))["status"] == "completed"
    await broker.idle()


async def test_an_open_child_run_continues_after_a_cancel(broker: Broker, bus: EventBus) -> None:
    """Its turn was in flight; the late commit changes nothing."""
    assert await bury(bus, await open_child(broker, bus))
    turn = await broker.take(bus)
    assert turn.run == "r/1"
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert not await complete(bus, turn)
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert not await complete(bus, turn)
    assert not await complete(bus, await broker.take(bus)), "the root's resume of its first life"
    assert list((await loaded(bus, await ask_again(broker, bus))).journal) == ["1"]


async def test_runs_below_an_open_child_run_continue(broker: Broker, bus: EventBus) -> None:
    """A step that one of them finished in the middle of a turn does not run again, and has one row."""
    await broker.submit(bus, "t")
    child = ask("1", "editor", stream="agent", wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ask("2"))
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent"))
    inner = await broker.take(bus)
    done = b"%bK%d1" % (DIGEST.encode(), now())
    assert await bus.record(inner, "1", done, "step", "charge") == done
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert not await complete(bus, inner)
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    again = await ask_again(broker, bus)
    assert (await loaded(bus, again)).journal == {}
    assert await suspend(bus, again, ask("1", "writer", stream="agent"))
    inner = await broker.take(bus)
    fields = await loaded(bus, inner)
    assert (inner.run, fields.journal, fields.unrecorded) == ("r/1/1", {"1": done}, {})


async def test_a_kept_child_run_forgets_what_its_first_life_waited_for(broker: Broker, bus: EventBus) -> None:
    """Covers calls, groups, timers, a begun model call, a question in the middle of a turn, and the state of calls
    back."""
    await broker.submit(bus, "t")
    child = ask("1", "editor", stream="agent", key="e", wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ask("2"))
    turn = await broker.take(bus)
    assert await bus.ask(turn, now(), "client", b"", ask("9"), 1) == {}
    waits = ask("2", wait="g1"), nap("3", 60_000, wait="g1")
    assert await suspend(bus, turn, ask("1", "editor", stream="agent", key="e"), *waits)
    assert await complete(bus, await broker.take(bus), state=b'{"n":5}')
    await broker.call("HSET", broker.keys.base + RUN, "b:4", 1, "s0", "{}")
    assert {"a", "o:1", "g1", "m:2", "m:3", "m:9", "j:1", "b:4"} <= (await broker.hash(RUN)).keys()
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert (await broker.hash(RUN)).keys() == {"h", "d", "x", "u", "j:1"}


async def test_another_request_starts_another_child_run(broker: Broker, bus: EventBus) -> None:
    """The code has changed since, so the journal belongs to something else."""
    found = await fail_with_open_child(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert (await loaded(bus, await ask_again(broker, bus, digest="00000000"))).journal == {}


async def test_a_child_run_continues_for_a_turn_that_asks_in_mid_turn(broker: Broker, bus: EventBus) -> None:
    found = await fail_with_open_child(broker, bus)
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    assert await bus.ask(await broker.take(bus), now(), "client", b"", ask("1", "editor", stream="agent"), 1) == {}
    assert list((await loaded(bus, await broker.take(bus))).journal) == ["1"]


async def test_a_child_run_that_ended_again_continues_again(broker: Broker, bus: EventBus) -> None:
    """The task is reopened twice. The second time nobody requests the child run."""
    assert await bus.redrive(await fail_with_open_child(broker, bus), reopen=True) == ["ok", "t"]
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ["a", "2", "!"])
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert list((await loaded(bus, await ask_again(broker, bus))).journal) == ["1"]


# -- calls that may not be repeated ------------------------------------------------------------------------------


async def fail_with_running_call(broker: Broker, bus: EventBus, *, below_child: bool) -> Delivery:
    """Fail task `t` by its call 2 and reopen it, while a call runs that may not be repeated. Return that call."""
    if below_child:
        doomed = await open_child(broker, bus)
        assert await suspend(bus, await broker.take(bus), ask("2"))
        running = await broker.take(bus, "tool")
    else:
        await broker.submit(bus, "t")
        assert await suspend(bus, await broker.take(bus), ask("1", wait="g1"), ask("2"))
        running, doomed = await broker.take(bus, "tool"), await broker.take(bus, "tool")
    assert await bus.mark_started(running)
    assert await bury(bus, doomed)
    assert await fail(bus, await broker.take(bus))
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    return running


@pytest.mark.parametrize("below_child", [False, True])
async def test_a_call_that_ran_when_its_task_was_reopened_counts(
    broker: Broker, bus: EventBus, below_child: bool
) -> None:
    """Its result comes before the reopened run has requested anything."""
    running = await fail_with_running_call(broker, bus, below_child=below_child)
    assert await answer(bus, running, b'"late"')
    turn = await ask_again(broker, bus) if below_child else await broker.take(bus)
    assert (await loaded(bus, turn)).journal[running.run.rpartition("/")[2]].endswith(b'"late"')
    assert await broker.call("EXISTS", broker.keys.started) == 0


@pytest.mark.parametrize("below_child", [False, True])
async def test_a_reopened_run_waits_for_a_call_that_runs_still(
    broker: Broker, bus: EventBus, below_child: bool
) -> None:
    """It is not requested a second time, however its holder ends it."""
    running = await fail_with_running_call(broker, bus, below_child=below_child)
    turn = await ask_again(broker, bus) if below_child else await broker.take(bus)
    step = running.run.rpartition("/")[2]
    fields = await loaded(bus, turn)
    assert (step in fields.journal, step in fields.pending) == (False, True)
    assert await suspend(bus, turn, ["a", step, "!"])
    assert await answer(bus, running, b'{"type":"UnknownOutcome","message":"?"}', status=b"E")
    turn = await broker.take(bus)
    assert (turn.run, turn.step) == ("r/1" if below_child else "r", step)


async def test_a_result_below_an_open_child_run_that_came_after_the_end_counts(broker: Broker, bus: EventBus) -> None:
    doomed = await open_child(broker, bus)
    assert await suspend(bus, await broker.take(bus), ask("2"))
    running = await broker.take(bus, "tool")
    assert await bus.mark_started(running)
    assert await bury(bus, doomed)
    assert await fail(bus, await broker.take(bus))
    assert not await bus.retry(running, 0, b"", counts=False)
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    journal = (await loaded(bus, await ask_again(broker, bus))).journal
    assert b"UnknownOutcome" in journal["2"]


# -- bounded memory ----------------------------------------------------------------------------------------------


async def kept(broker: Broker) -> bool:
    return await broker.call("EXISTS", broker.keys.base + RUN) == 1


@pytest.mark.parametrize("how", ["drop", "erase", "trim"])
async def test_a_journal_is_deleted_with_the_last_letter(broker: Broker, bus: EventBus, how: str) -> None:
    found = await fail_with_open_child(broker, bus)
    assert await kept(broker)
    if how == "drop":
        assert await bus.drop_letter(found)
    elif how == "erase":
        assert await bus.erase("t") == "OK"
    else:
        await bus.trim_letters(1, 3_600_000)
        assert await broker.entries("dead") == []
    assert not await kept(broker)
    assert not [name for name in await broker.task("t") if name.startswith("c:")]


async def test_a_journal_is_deleted_when_the_reopened_task_ends(broker: Broker, bus: EventBus) -> None:
    assert await bus.redrive(await fail_with_open_child(broker, bus), reopen=True) == ["ok", "t"]
    assert await complete(bus, await broker.take(bus))
    assert not await kept(broker)


async def test_no_journal_is_kept_for_the_completed_run_of_an_instance(broker: Broker, bus: EventBus) -> None:
    """It is not reopened, since it has written its state."""
    await broker.submit(bus, "t", key="k")
    child = ask("1", "editor", stream="agent", wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ask("2"))
    doomed = await broker.take(bus, "tool")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    await broker.take(bus)
    assert await bury(bus, doomed)
    assert await complete(bus, await broker.take(bus), state=b"{}")
    assert not await kept(broker)


async def test_no_journal_is_kept_of_an_abandoned_child_run(broker: Broker, bus: EventBus) -> None:
    """Its parent has ended without it, so no reopened run requests it."""
    await broker.submit(bus, "t")
    child = ask("1", "editor", stream="agent", wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ask("2"))
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent"), ask("2"))
    doomed, below = await broker.take(bus, "tool"), await broker.take(bus, "tool")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await broker.call("EXISTS", broker.keys.base + RUN + "/1") == 1
    assert await answer(bus, below)
    assert await complete(bus, await broker.take(bus))
    inner = await broker.take(bus, "tool")
    assert await answer(bus, inner)
    assert await bury(bus, doomed)
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert await broker.call("EXISTS", broker.keys.base + RUN + "/1") == 0


async def test_no_journal_is_kept_once_the_letter_is_dropped(broker: Broker, bus: EventBus) -> None:
    """The task still runs, and nothing pins it at its end."""
    assert await bury(bus, await open_child(broker, bus))
    assert await bus.drop_letter(await letter(broker))
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert not await kept(broker)


async def test_a_child_run_without_a_journal_is_not_kept(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    child = ask("1", "editor", stream="agent", wait="g1")
    assert await suspend(bus, await broker.take(bus), child, ask("2"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert not await kept(broker)


async def test_a_journal_is_deleted_if_the_request_is_refused(broker: Broker, bus: EventBus) -> None:
    """The mailbox is full, so the reopened run continues with an error."""
    found = await fail_with_open_child(broker, bus, "e")
    await broker.call("HSET", broker.keys.meta, "mailbox_max", 1)
    await broker.submit(bus, "other", "editor", "e")
    await broker.submit(bus, "next", "editor", "e")
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    holder = await broker.take(bus)
    turn = await broker.take(bus)
    assert (holder.task, turn.task) == ("other", "t")
    child = ask("1", "editor", stream="agent", key="e")
    assert await suspend(bus, turn, child)
    assert b"MailboxFull" in (await loaded(bus, await broker.take(bus))).journal["1"]
    assert not await kept(broker)


# -- letters below a child run -----------------------------------------------------------------------------------


async def fail_below_child(broker: Broker, bus: EventBus, key: str = "") -> str:
    """Fail task `t` by the second call of its child run 1. Return the letter."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent", key=key))
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"), b'"paid"')
    assert await suspend(bus, await broker.take(bus), ask("2"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert await fail(bus, await broker.take(bus))
    return await letter(broker)


@pytest.mark.parametrize("key", ["", "e"])
async def test_a_call_of_a_failed_child_run_is_redriven(broker: Broker, bus: EventBus, key: str) -> None:
    found = await fail_below_child(broker, bus, key)
    assert (await broker.final("t"))["steps"] == 3, "the dead call has no row here"
    assert await bus.redrive(found, reopen=True) == ["ok", "t"]
    root = await broker.take(bus)
    fields = await loaded(bus, root)
    assert (root.run, fields.journal, fields.pending) == ("r", {}, {})
    assert await suspend(bus, root, ask("1", "editor", stream="agent", key=key))
    child = await broker.take(bus)
    fields = await loaded(bus, child)
    assert ([*fields.journal], [*fields.pending]) == (["1"], ["2"])
    assert await suspend(bus, child, ["a", "2", "!"])
    call = await broker.take(bus, "tool")
    assert (call.run, call.attempt) == ("r/1/2", 1)
    assert await answer(bus, call)
    await broker.nothing(bus, "tool")
    assert await complete(bus, await broker.take(bus))
    assert await complete(bus, await broker.take(bus))
    final = await broker.final("t")
    assert (final["status"], final["steps"]) == ("completed", 4), "the runs' repeated rows replace the first ones"
    await broker.idle()


async def test_a_dead_turn_of_a_child_run_is_redriven(broker: Broker, bus: EventBus) -> None:
    """Its caller requests it again, and it continues from its journal."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await bury(bus, await broker.take(bus))
    assert await fail(bus, await broker.take(bus))
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    root = await broker.take(bus)
    assert root.run == "r"
    await broker.nothing(bus)
    assert await suspend(bus, root, ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    assert (child.run, child.attempt, [*(await loaded(bus, child)).journal]) == ("r/1", 1, ["1"])
    assert await complete(bus, child)
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_call_two_runs_below_is_redriven(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    for _ in range(3):
        assert await fail(bus, await broker.take(bus))
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ["a", "1", "!"])
    call = await broker.take(bus, "tool")
    assert (call.run, await answer(bus, call)) == ("r/1/1/1", True)
    for _ in range(3):
        assert await complete(bus, await broker.take(bus))
    await broker.idle()


@pytest.mark.parametrize("ends_first", [False, True])
async def test_a_run_below_a_failed_child_run_continues(broker: Broker, bus: EventBus, ends_first: bool) -> None:
    """It was open when its caller failed: it ends before its task does, or continues from its journal."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    inner = ask("1", "writer", stream="agent", wait="g1")
    assert await suspend(bus, await broker.take(bus), inner, ask("2"))
    doomed = await broker.take(bus, "tool")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"), b'"paid"')
    below = await broker.take(bus)
    assert below.run == "r/1/1"
    assert await bury(bus, doomed)
    assert await fail(bus, await broker.take(bus))
    if ends_first:
        assert await complete(bus, below)
    assert await fail(bus, await broker.take(bus))
    if not ends_first:
        assert not await complete(bus, below)
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    child = await broker.take(bus)
    fields = await loaded(bus, child)
    assert ([*fields.journal], [*fields.pending]) == (["1"] if ends_first else [], ["2"])
    if not ends_first:
        assert await suspend(bus, child, inner, ["a", "2", "g1"])
        assert [*(await loaded(bus, await broker.take(bus))).journal] == ["1"]


async def test_a_call_of_an_open_child_run_is_redriven(broker: Broker, bus: EventBus) -> None:
    """The child run had not acted on its error when the task was cancelled."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert await kept(broker)
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert not await complete(bus, await broker.take(bus)), "the child's resume of its first life"
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    fields = await loaded(bus, await broker.take(bus))
    assert ([*fields.journal], [*fields.pending]) == ([], ["1"])


async def refused(broker: Broker, bus: EventBus, found: str, data: bytes = b"") -> list[str]:
    """Redrive a letter without success. Return the answer."""
    before = await broker.snapshot()
    answered = await bus.redrive(found, reopen=True, data=data)
    assert await broker.snapshot() == before
    return answered


async def test_a_call_of_a_child_run_that_has_answered_is_not_redriven(broker: Broker, bus: EventBus) -> None:
    """It has caught the error, and its caller has its result."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await bury(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    assert await fail(bus, await broker.take(bus))
    assert await refused(broker, bus, await letter(broker)) == ["gone", "t"]


async def test_a_dead_turn_whose_caller_has_other_results_is_not_redriven(broker: Broker, bus: EventBus) -> None:
    """A run was answered, then failed; its letter is of an earlier call of the same step."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await bury(bus, await broker.take(bus))
    await broker.call("HSET", broker.keys.base + "task:t", "j:1", f"{DIGEST}K{now()}null")
    assert await fail(bus, await broker.take(bus))
    assert await refused(broker, bus, await letter(broker)) == ["gone", "t"]


async def test_a_dead_turn_that_its_caller_had_left_is_not_redriven(broker: Broker, bus: EventBus) -> None:
    """The caller had failed before, without a letter, so its journal is gone: its steps would run again."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await suspend(bus, await broker.take(bus), ask("1", "writer", stream="agent", wait="0"), ask("2"))
    left = await broker.take(bus)
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert await bury(bus, left)
    assert await fail(bus, await broker.take(bus))
    assert await refused(broker, bus, await letter(broker)) == ["gone", "t"]


async def test_a_child_run_is_not_redriven_with_new_data(broker: Broker, bus: EventBus) -> None:
    """Its caller passes its input again."""
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    assert await bury(bus, await broker.take(bus))
    assert await fail(bus, await broker.take(bus))
    assert await refused(broker, bus, await letter(broker), b'"new"') == ["called", "t"]


async def test_a_task_that_has_answered_another_partition_is_not_redriven(broker: Broker, bus: EventBus) -> None:
    """The run that called it has the error, and nobody waits for another answer."""
    await broker.submit(bus, "t", replyto="@1|caller|r|1|writer")
    assert await bury(bus, await broker.take(bus))
    assert await refused(broker, bus, await letter(broker)) == ["answered", "t"]


# -- instances ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below_child", [False, True])
async def test_a_reopened_run_gets_its_instance_from_its_first_life(
    broker: Broker, bus: EventBus, below_child: bool
) -> None:
    """Its turn was in flight when the task ended, and ends only after the run has joined the mailbox again."""
    if below_child:
        doomed = await open_child(broker, bus, "e")
    else:
        await broker.submit(bus, "t", "editor", "e")
        assert await suspend(bus, await broker.take(bus), ask("1"), ask("2"))
        call, doomed = await broker.take(bus, "tool"), await broker.take(bus, "tool")
        assert await answer(bus, call)
    first = await broker.take(bus)
    assert await bury(bus, doomed)
    assert await bus.cancel("t", "no more") == ["cancelled"]
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    if below_child:
        stale = await broker.take(bus)
        assert not await complete(bus, stale)
        child = ask("1", "editor", stream="agent", key="e", wait="g1")
        assert await suspend(bus, await broker.take(bus), child, ["a", "2", "g1"])
    assert await broker.mailbox("editor/e") == [f"t|{first.run}"]
    assert not await complete(bus, first)
    again = await broker.take(bus)
    assert (again.run, again.entry != first.entry) == (first.run, True)
    assert "1" in (await loaded(bus, again)).journal


async def test_a_reopened_run_does_not_begin_with_the_state_of_its_first_life(broker: Broker, bus: EventBus) -> None:
    """Its instance handles events concurrently, so the run had a state of its own."""
    await broker.call("HSET", broker.keys.interleaved, "writer", "1")
    await broker.submit(bus, "other", key="k")
    other = await broker.take(bus)
    await broker.submit(bus, "t", key="k")
    assert await bury(bus, await broker.take(bus))
    assert await complete(bus, other, state=b'{"n":7}')
    assert await bus.redrive(await letter(broker), reopen=True) == ["ok", "t"]
    assert (await loaded(bus, await broker.take(bus))).state == b'{"n":7}'
