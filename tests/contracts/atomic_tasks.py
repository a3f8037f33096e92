"""Cases of test_atomicity.py: tasks, turns, calls, timers and messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery, pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import OpenRequest
from runtime_core.bus.topics import TopicSubscription
from runtime_core.wire.commands import ForkJournal, Submission
from tests.contracts.broker import (
    DIGEST,
    Broker,
    acquire,
    again,
    answer,
    ask,
    bury,
    complete,
    emit_pieces,
    fail,
    nap,
    now,
    question,
    receive,
    release,
    send,
    suspend,
)

Act = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class Stage:
    """What each case starts with: a partition and two living owners."""

    broker: Broker
    bus: EventBus
    other: EventBus


Case = Callable[[Stage], Awaitable[Act]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


async def busy(stage: Stage, *, streamed: int = 2, limits: bytes = b"") -> None:
    """A keyed instance whose event is in flight, with another waiting in its mailbox."""
    broker, bus = stage.broker, stage.bus
    reply = broker.keys.reply("c")
    await broker.call("XADD", reply, "*", "seen", "1")
    await broker.submit(bus, "t", key="k", replyto=reply, streamed=streamed, timeout_ms=90_000, limits=limits)
    await broker.submit(bus, "next", key="k", replyto="elsewhere")


@case
async def submit_to_an_idle_instance(stage: Stage) -> Act:
    return lambda: stage.broker.submit(stage.bus, "t", key="k", timeout_ms=1000, context=b"{}", streamed=1)


@case
async def a_state_set_from_outside(stage: Stage) -> Act:
    return lambda: stage.bus.put_state("writer/k", b"{}")


@case
async def submit_to_a_busy_instance(stage: Stage) -> Act:
    await busy(stage)
    return lambda: stage.broker.submit(stage.bus, "third", key="k")


@case
async def submit_without_a_key(stage: Stage) -> Act:
    return lambda: stage.broker.submit(stage.bus, "t", timeout_ms=1000)


@case
async def submit_with_a_random_id(stage: Stage) -> Act:
    return lambda: stage.broker.submit(stage.bus, "t", timeout_ms=1000, epoch="-")


async def waiting(stage: Stage) -> None:
    """Two tenants with one waiting task each, on a stream that is long enough to queue them."""
    broker, bus = stage.broker, stage.bus
    await broker.call("HSET", broker.keys.meta, "ready_max", 1)
    await broker.call("HSET", broker.keys.tenants, "shop", "2 10 10")
    await broker.submit(bus, "first", in_turn=True)
    await broker.submit(bus, "waits", key="k", tenant="shop", in_turn=True, timeout_ms=1000)
    await broker.submit(bus, "waits too", in_turn=True)


@case
async def submit_of_a_tenant(stage: Stage) -> Act:
    await stage.broker.call("HSET", stage.broker.keys.tenants, "shop", "2 10 10")
    return lambda: stage.broker.submit(stage.bus, "t", tenant="shop", in_turn=True)


@case
async def submit_that_waits_for_its_turn(stage: Stage) -> Act:
    await waiting(stage)
    return lambda: stage.broker.submit(stage.bus, "t", tenant="shop", in_turn=True)


@case
async def fork_that_waits_for_its_turn(stage: Stage) -> Act:
    await waiting(stage)
    begun = ForkJournal("origin", "2", {"1": b"*1234567K1700000000000null"})
    return lambda: stage.broker.submit(stage.bus, "t", begun=begun, in_turn=True)


@case
async def fork_with_child_runs(stage: Stage) -> Act:
    value = b"*1234567K1700000000000null"
    begun = ForkJournal("origin", "2", {"1": value, "2/": b"editor", "2/1": value})
    return lambda: stage.broker.submit(stage.bus, "t", begun=begun)


@case
async def a_refill(stage: Stage) -> Act:
    await waiting(stage)
    await stage.broker.take(stage.bus)
    return lambda: stage.bus.refill(5)


@case
async def a_cancel_before_its_turn(stage: Stage) -> Act:
    await waiting(stage)
    return lambda: stage.bus.cancel("waits", "no more")


def claimed() -> Submission:
    new = Submission("t", "test", "event-t", "digest-t", "writer", b"1")
    new.claims = "|"
    return new


@case
async def claims_of_a_submit(stage: Stage) -> Act:
    return lambda: stage.bus.claim(claimed(), 1, ["task_id", "id"])


@case
async def claims_over_the_dedupe_limit(stage: Stage) -> Act:
    await stage.broker.call("HSET", stage.broker.keys.meta, "dedupe_max", 1)
    return lambda: stage.bus.claim(claimed(), 1, ["task_id", "id"])


@case
async def a_claim_that_is_given_up(stage: Stage) -> Act:
    [token] = await stage.bus.claim(claimed(), 1, ["task_id"])
    return lambda: stage.bus.unclaim(claimed(), "task_id", token)


@case
async def a_claim_that_is_refused(stage: Stage) -> Act:
    return lambda: stage.bus.refuse(claimed(), "task_id", "100")


@case
async def submit_with_claims(stage: Stage) -> Act:
    return lambda: stage.bus.submit(claimed())


@case
async def fork_of_a_task(stage: Stage) -> Act:
    begun = ForkJournal("origin", "2", {"1": b"*1234567K1700000000000null"})
    return lambda: stage.broker.submit(stage.bus, "t", begun=begun)


@case
async def submit_over_the_dedupe_limit(stage: Stage) -> Act:
    await stage.broker.call("HSET", stage.broker.keys.meta, "dedupe_max", 1)
    await stage.broker.submit(stage.bus, "first")
    return lambda: stage.broker.submit(stage.bus, "t")


@case
async def submit_of_an_admitter(stage: Stage) -> Act:
    epoch = await stage.bus.lead("admit")
    return lambda: stage.broker.submit(stage.bus, "t", epoch=str(epoch))


@case
async def a_message_to_several_subscribers(stage: Stage) -> Act:
    for agent in ("writer", "editor"):
        await stage.bus.subscribe(TopicSubscription("news", agent))
    await stage.broker.submit(stage.bus, "t", key="k")
    await stage.broker.submit(stage.bus, "u", agent="editor", key="k")
    return lambda: stage.bus.publish("m", "news", "k", b'"hello"', b'{"topic":"news"}')


@case
async def a_turn_that_publishes_what_nobody_hears(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    message: list[Argument] = ["p", "m", "news", "", b'"hello"', b'{"topic":"news"}', "", "1", DIGEST]
    return lambda: suspend(stage.bus, turn, message, ask("2"), record=b"[]")


@case
async def a_publication_in_mid_turn_that_nobody_hears(stage: Stage) -> Act:
    # Without a key: the check of an instance reads the same keys.
    await stage.broker.submit(stage.bus, "alone")
    turn = await stage.broker.take(stage.bus)
    message: list[Argument] = ["p", "m", "news", "", b'"hello"', b'{"topic":"news"}', "", "1", DIGEST]
    return lambda: stage.bus.ask(turn, 1_700_000_000_000, "reply:c", b"", message, 1)


@case
async def a_request_in_mid_turn_that_nobody_takes(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "alone")
    turn = await stage.broker.take(stage.bus)
    part = ask("1", "nobody", stream="?agent")
    return lambda: stage.bus.ask(turn, 1_700_000_000_000, "reply:c", b"", part, 1)


@case
async def a_request_in_mid_turn_of_an_instance(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: stage.bus.ask(turn, 1_700_000_000_000, "reply:c", b"{}", ask("1", "search", stream="?tool"), 1)


@case
async def a_turn_that_sends_to_another_partition(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "alone")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, ask("0"), send("note", "@1:editor", key="e", step="2"))


@case
async def a_turn_that_publishes_to_all_partitions(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "alone")
    turn = await stage.broker.take(stage.bus)
    message: list[Argument] = ["p", "m", "@news", "k", b'"hello"', b"", "", "1", DIGEST]
    return lambda: suspend(stage.bus, turn, ask("0"), message)


@case
async def a_turn_that_waits_for_everything(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    parts: list[list[Argument]] = [
        ask("1", wait="g1"),
        ask("2", "editor", stream="agent", wait="g1", context=b"{}"),
        ask("3", "editor", stream="?agent", key="e", wait="g1"),
        ask("4", "writer", stream="agent", key="k", wait="g1"),
        ask("5", "search", stream="?tool", wait="0"),
        ask("6", "nobody", stream="?tool", wait="0"),
        nap("7", 1000, wait="g1"),
        question("8", wait="g1", timeout_ms=1000),
        send("note", key="e", step="9"),
        send("memo", step="10"),
        ["u", "11", DIGEST, b'{"tokens":1}'],
    ]
    return lambda: suspend(stage.bus, turn, *parts, state=b"{}", record=b"[]", steps=3)


@case
async def a_turn_that_asks_an_engine_without_a_gateway(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    parts = [ask("1", "rank", stream="ray", wait="g1"), ask("2", "rank", stream="spark:big", wait="g1", context=b"{}")]
    return lambda: suspend(stage.bus, turn, *parts, record=b"[]")


@case
async def a_gateway_that_says_so(stage: Stage) -> Act:
    await stage.bus.announce_engine(["ray"])
    return lambda: stage.other.announce_engine(["ray", "ray:big"])


@case
async def a_step_of_an_engine_that_has_waited_too_long(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1", "rank", stream="ray"))
    [(entry, fields)] = pairs(await stage.broker.call("XRANGE", stage.broker.keys.stream("ray"), "-", "+"))
    step = Delivery(0, "ray", entry, fields)
    return lambda: stage.bus.expire_call(step, now(), b'{"type":"EngineUnavailable","message":"late"}', b"[]")


@case
async def a_turn_that_meets_a_result_it_had_not_seen(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1"), ask("2"))
    await answer(stage.bus, await stage.broker.take(stage.bus, "tool"))
    turn = await stage.broker.take(stage.bus)
    await answer(stage.bus, await stage.broker.take(stage.bus, "tool"))
    return lambda: suspend(stage.bus, turn, again("2"), state=b"{}", record=b"[]", steps=1)


@case
async def a_turn_that_only_asks_a_tool(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, ask("1"))


@case
async def a_turn_that_asks_a_human(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t", replyto="elsewhere")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, nap("1", 1000), question("2"))


@case
async def a_turn_that_asks_a_tool_and_has_rows(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, ask("1"), record=b"[]", steps=1)


@case
async def a_turn_that_asks_tools_of_two_pools(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, ask("1", wait="g1"), ask("2", stream="tool:big", wait="g1"))


@case
async def a_turn_that_asks_an_agent_without_a_key(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, ask("1", "editor", stream="agent"))


@case
async def a_turn_that_does_nothing_but_end_its_task(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t", replyto=stage.broker.keys.reply("c"))
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn)


@case
async def a_turn_that_ends_its_task(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn, send("note", key="e"), send("memo"), state=b"{}")


@case
async def a_turn_that_ends_a_task_answered_elsewhere(stage: Stage) -> Act:
    await busy(stage)
    await complete(stage.bus, await stage.broker.take(stage.bus))
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn, state=b"{}")


@case
async def a_turn_that_fails_its_task(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: fail(stage.bus, turn)


async def asked(stage: Stage) -> None:
    """A task that waits for a keyed agent's answer; events wait in that agent's mailbox."""
    await busy(stage)
    await stage.broker.submit(stage.bus, "mine", agent="desk", key="d")
    turn = await stage.broker.take(stage.bus)
    parts = [ask("1", "editor", stream="agent", key="e"), ask("2"), nap("3", 60_000)]
    await suspend(stage.bus, turn, *parts)
    await stage.broker.submit(stage.bus, "mail", agent="editor", key="e")


@case
async def a_child_that_ends(stage: Stage) -> Act:
    await asked(stage)
    await stage.broker.take(stage.bus)
    child = await stage.broker.take(stage.bus)
    assert child.run == "r/1"
    return lambda: complete(stage.bus, child, send("note", agent="desk", key="d"), state=b"{}")


@case
async def a_child_that_fails(stage: Stage) -> Act:
    await asked(stage)
    await stage.broker.take(stage.bus)
    child = await stage.broker.take(stage.bus)
    return lambda: fail(stage.bus, child)


@case
async def a_nested_call_that_ends(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1", "writer", stream="agent", key="k"), ask("2"))
    await answer(stage.bus, await stage.broker.take(stage.bus, "tool"))
    nested = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, nested, state=b"{}")


@case
async def a_turn_that_ends_below_a_call_back(stage: Stage) -> Act:
    """The reentrant call came through another partition: it goes on, with the state that the turn leaves."""
    broker, bus = stage.broker, stage.bus
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await bus.ask(turn, 1_700_000_000_000, "reply:c", b"", ask("c1", "editor", stream="?agent"), 1)
    await broker.take(bus)
    await broker.submit(bus, "back", key="k", context=b'{"~chain":"0:t|r"}')
    assert (await broker.take(bus)).task == "back"
    return lambda: complete(bus, turn, state=b"{}")


@case
async def a_turn_that_ends_before_a_long_mailbox(stage: Stage) -> Act:
    """Events of ended tasks are skipped a few at a time: a timer continues with the rest."""
    broker, bus = stage.broker, stage.bus
    for number in range(60):
        await broker.submit(bus, f"t{number}", key="k")
    turn = await broker.take(bus)
    for number in range(1, 60):
        await broker.call("HSET", broker.keys.task(f"t{number}"), "status", "cancelled")
    return lambda: complete(bus, turn)


@case
async def a_parent_that_ends_before_its_children(stage: Stage) -> Act:
    await asked(stage)
    await stage.broker.take(stage.bus)
    child = await stage.broker.take(stage.bus)
    await suspend(stage.bus, child, ask("1"))
    await answer(stage.bus, await stage.broker.take(stage.bus, "tool"))
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn)


@case
async def a_commit_that_comes_too_late(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    await stage.bus.cancel("t", "no more")
    return lambda: complete(stage.bus, turn)


@case
async def a_result_that_wakes_the_run(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: answer(stage.bus, call)


@case
async def a_result_that_wakes_a_child(stage: Stage) -> Act:
    await asked(stage)
    await stage.broker.take(stage.bus, "tool")
    await stage.broker.take(stage.bus)
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1", wait="g1"))
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: answer(stage.bus, call)


@case
async def a_result_that_comes_too_late(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    await stage.bus.cancel("t", "no more")
    return lambda: answer(stage.bus, call)


@case
async def retry_of_a_turn(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: stage.bus.retry(turn, 100, b"{}")


@case
async def retry_of_a_child(stage: Stage) -> Act:
    await asked(stage)
    await stage.broker.take(stage.bus)
    child = await stage.broker.take(stage.bus)
    return lambda: stage.bus.retry(child, 100, b"{}")


@case
async def retry_of_a_call(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: stage.bus.retry(call, 100, b"{}")


@case
async def retry_that_comes_too_late(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    await stage.bus.cancel("t", "no more")
    return lambda: stage.bus.retry(turn, 100, b"{}")


@case
async def a_child_over_a_limit_of_its_task(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1", "editor", stream="agent", key="e"))
    turn = await stage.broker.take(stage.bus)
    error = b'{"type":"LimitExceeded","message":"over"}'
    used: list[Argument] = ["u", "1", DIGEST, b'{"tokens":1}']
    return lambda: stage.bus.commit_turn(turn, "x", now(), b"[]", 1, error, b"", used, 1)


@case
async def a_call_over_a_limit_of_its_task(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t", key="k", streamed=2, limits=b'{"tokens":1}')
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1"))
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: stage.bus.commit_call(call, b"K", now(), b"1", b"[]", 1, b'{"tokens":2}')


@case
async def dead_letter_of_a_task(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: bury(stage.bus, turn)


@case
async def dead_letter_of_a_child(stage: Stage) -> Act:
    await asked(stage)
    await stage.broker.take(stage.bus)
    child = await stage.broker.take(stage.bus)
    return lambda: bury(stage.bus, child)


@case
async def dead_letter_of_a_call(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: bury(stage.bus, call)


@case
async def dead_letter_that_parks(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: bury(stage.bus, turn, "diverged")


@case
async def dead_letter_of_foreign_work(stage: Stage) -> Act:
    await stage.broker.call("XADD", stage.broker.keys.stream("agent"), "*", "what", "ever")
    _, malformed = await stage.bus.read(["agent"], 1, 5)
    stream, entry, _ = malformed[0]
    return lambda: stage.bus.dead_letter(stream, entry, "malformed", b"[]", 1, b"{}")


@case
async def promote_retries(stage: Stage) -> Act:
    await asked(stage)
    await stage.bus.retry(await stage.broker.take(stage.bus), 100, b"{}")
    await stage.bus.retry(await stage.broker.take(stage.bus), 100, b"{}")
    await stage.bus.retry(await stage.broker.take(stage.bus, "tool"), 100, b"{}")
    await stage.broker.pass_time(200)
    return lambda: stage.bus.promote()


@case
async def promote_a_nap_and_a_question(stage: Stage) -> Act:
    await busy(stage)
    parts = [nap("1", 100, wait="g1"), question("2", wait="g1", timeout_ms=100)]
    await suspend(stage.bus, await stage.broker.take(stage.bus), *parts)
    await stage.broker.pass_time(200)
    return lambda: stage.bus.promote()


@case
async def promote_the_end_of_a_task(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1", "editor", stream="agent", key="e"))
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1"))
    await stage.broker.pass_time(100_000)
    return lambda: stage.bus.promote()


@case
async def cancel_of_a_waiting_task(stage: Stage) -> Act:
    await busy(stage)
    await suspend(
        stage.bus, await stage.broker.take(stage.bus), ask("1", "editor", stream="agent", key="e"), nap("2", 9)
    )
    await suspend(stage.bus, await stage.broker.take(stage.bus), ask("1"))
    return lambda: stage.bus.cancel("t", "no more")


async def hooked(stage: Stage) -> None:
    """As `busy`; the app of the agents has hooks at the end of a task."""
    for agent in ("writer", "editor"):
        await stage.broker.call("HSET", stage.broker.keys.end_hooks, agent, "!weft.task-ended.desk")
    await busy(stage)


@case
async def cancel_of_a_task_with_hooks(stage: Stage) -> Act:
    await hooked(stage)
    return lambda: stage.bus.cancel("t", "no more")


@case
async def a_turn_that_fails_its_task_with_hooks(stage: Stage) -> Act:
    await hooked(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: fail(stage.bus, turn)


@case
async def a_message_with_hooks_to_a_full_mailbox(stage: Stage) -> Act:
    await hooked(stage)
    await stage.broker.call("HSET", stage.broker.keys.meta, "mailbox_max", 1)
    await stage.broker.submit(stage.bus, "sender", agent="desk")
    await stage.broker.take(stage.bus)
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn, send("note", agent="writer", key="k"))


@case
async def cancel_of_an_unknown_task(stage: Stage) -> Act:
    return lambda: stage.bus.cancel("t", "no more")


@case
async def withdraw_of_a_waiting_task(stage: Stage) -> Act:
    await busy(stage)
    return lambda: stage.bus.withdraw_request("t")


@case
async def a_signal_with_an_id(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    await suspend(stage.bus, await stage.broker.take(stage.bus), question("1"))
    return lambda: stage.bus.signal("t", "r:1", b"true", "source\nid")


@case
async def a_schedule_that_is_set(stage: Stage) -> Act:
    return lambda: stage.bus.schedule("s", "", b"{}", 1000, 10)


@case
async def a_schedule_that_is_removed(stage: Stage) -> Act:
    await stage.bus.schedule("s", "", b"{}", 1000, 10)
    return lambda: stage.bus.schedule("s", b"{}", b"", None)


@case
async def signal(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), question("1", timeout_ms=1000))
    return lambda: stage.bus.signal("t", "r:1", b"true")


@case
async def a_message_to_a_step_that_waits(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), receive("1", timeout_ms=1000))
    return lambda: stage.bus.send_message("t", "news", b"1", "shop\n1")


@case
async def a_message_that_is_kept(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "t")
    return lambda: stage.bus.send_message("t", "news", b"1", "shop\n1")


@case
async def a_wait_for_a_kept_message(stage: Stage) -> Act:
    await busy(stage)
    await stage.bus.send_message("t", "news", b"1", "shop\n1")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, receive("1", timeout_ms=1000), receive("2", timeout_ms=1000))


@case
async def a_key_that_is_given_up(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, release("1", b"{}"), nap("2", 1000))


@case
async def a_key_that_is_taken_back(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, release("1", b"{}"), acquire("2"))


@case
async def a_key_that_comes_back(stage: Stage) -> Act:
    await busy(stage)
    await suspend(stage.bus, await stage.broker.take(stage.bus), release("1", b"{}"), acquire("2"))
    turn = await stage.broker.take(stage.bus)
    return lambda: complete(stage.bus, turn)


@case
async def record(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: stage.bus.record(turn, "1", DIGEST.encode() + b"K1700000000000null")


@case
async def emit(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: emit_pieces(stage.bus, turn, b'"text"', first=1)


async def calling(stage: Stage) -> Delivery:
    """A turn in the middle of a model call that has reserved something."""
    await busy(stage, limits=b'{"tokens":10}')
    turn = await stage.broker.take(stage.bus)
    await stage.bus.begin_call(turn, "1", b'{"tokens":[1,4]}')
    return turn


@case
async def begin_of_a_model_call(stage: Stage) -> Act:
    turn = await calling(stage)
    return lambda: stage.bus.begin_call(turn, "2", b'{"tokens":[1,4]}')


@case
async def end_of_a_model_call(stage: Stage) -> Act:
    turn = await calling(stage)
    return lambda: stage.bus.settle_call(turn, "1", DIGEST.encode() + b"K1700000000000null", b'{"tokens":3}')


@case
async def a_piece_of_a_models_answer(stage: Stage) -> Act:
    turn = await calling(stage)
    return lambda: stage.bus.stream(turn, "1", 1, [b"chunk", b'"text"'])


@case
async def progress(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: stage.bus.progress(call, b"0.5")


@case
async def a_turn_that_asks_another_partition(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    parts = [
        ask("1", "editor", stream="@1:there", key="e", wait="g1"),
        ask("2", wait="g1"),
        send("note", "@1:editor", "e"),
    ]
    return lambda: suspend(stage.bus, turn, *parts)


@case
async def an_answer_of_another_partition(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    await suspend(stage.bus, turn, ask("1", "editor", stream="@1:there", key="e"))
    return lambda: stage.bus.answer_request("t", "r", "1", b"K", b"1", "editor", "there", b'{"tokens":1}')


@case
async def cancel_of_a_task_that_asks_another_partition(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    await suspend(stage.bus, turn, ask("1", "editor", stream="@1:there", key="e"))
    return lambda: stage.bus.cancel("t", "no more")


async def asked_elsewhere(stage: Stage, limit: str = "") -> None:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    await suspend(stage.bus, turn, ask("1", "editor", stream="@1:there" + limit, key="e"))


@case
async def a_look_at_an_open_request(stage: Stage) -> Act:
    await asked_elsewhere(stage)
    await stage.broker.pass_time(11_000)
    return lambda: stage.bus.due_requests(10)


@case
async def a_request_over_its_time_limit(stage: Stage) -> Act:
    await asked_elsewhere(stage, ":5000")
    await stage.broker.pass_time(6000)
    return lambda: stage.bus.due_requests(10)


@case
async def a_request_that_is_repeated(stage: Stage) -> Act:
    await asked_elsewhere(stage)
    await stage.broker.call("DEL", stage.broker.keys.asks)
    return lambda: stage.bus.repeat_request(OpenRequest("t|r|1", 1, "there"))


_SLOTS = [("agent:writer||", 1, 1, 60_000)]


@case
async def slots_of_a_run(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: stage.bus.take_slots(turn, _SLOTS, each_attempt=False)


@case
async def slots_that_another_run_holds(stage: Stage) -> Act:
    await stage.broker.submit(stage.bus, "holder")
    assert await stage.bus.take_slots(await stage.broker.take(stage.bus), _SLOTS, each_attempt=False)
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    return lambda: stage.bus.take_slots(turn, _SLOTS, each_attempt=False)


@case
async def slots_of_a_call(stage: Stage) -> Act:
    await asked(stage)
    call = await stage.broker.take(stage.bus, "tool")
    return lambda: stage.bus.take_slots(call, [("tool:search||", 1, 1, 60_000)], each_attempt=True)


@case
async def an_end_that_lets_others_start(stage: Stage) -> Act:
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    assert await stage.bus.take_slots(turn, [("agent:writer||", 1, 0, 0)], each_attempt=False)
    await stage.broker.submit(stage.bus, "waits")
    waits = await stage.broker.take(stage.bus)
    assert await stage.bus.take_slots(waits, [("agent:writer||", 1, 0, 0)], each_attempt=False) is False
    return lambda: complete(stage.bus, turn)


_ONE = [("agent:writer||", 1, 0, 0)]


async def _away_with_a_slot(stage: Stage) -> None:
    """A run holds the only slot and has given up its key. The next event of the instance is in flight."""
    await busy(stage)
    turn = await stage.broker.take(stage.bus)
    assert await stage.bus.take_slots(turn, _ONE, each_attempt=False)
    await suspend(stage.bus, turn, release("1", b"{}"), question("2"))


@case
async def a_key_that_its_next_holder_cannot_use_yet(stage: Stage) -> Act:
    await _away_with_a_slot(stage)
    assert await stage.bus.take_slots(await stage.broker.take(stage.bus), _ONE, each_attempt=False) is False
    await stage.bus.signal("t", "r:2", b"true")
    turn = await stage.broker.take(stage.bus)
    return lambda: suspend(stage.bus, turn, acquire("3"))


@case
async def a_wait_for_a_slot_that_gives_the_key_back(stage: Stage) -> Act:
    await _away_with_a_slot(stage)
    second = await stage.broker.take(stage.bus)
    await stage.bus.signal("t", "r:2", b"true")
    await suspend(stage.bus, await stage.broker.take(stage.bus), acquire("3"))
    return lambda: stage.bus.take_slots(second, _ONE, each_attempt=False)
