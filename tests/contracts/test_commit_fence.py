"""A commit takes effect once: only if `cur` of the instance or run is its entry, and only for a living owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from runtime_core.bus.connection import Argument
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import Fenced, ServerError
from tests.contracts.broker import Broker, answer, ask, bury, complete, fail, now, send, suspend


async def test_a_turn_takes_effect_whole(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k", replyto=broker.keys.reply("c"))
    await broker.call("XADD", broker.keys.reply("c"), "*", "seen", "1")
    turn = await broker.take(bus)
    assert await complete(bus, turn, send("note"), output=b'"yes"', state=b'{"n":1}', record=b'[["row"]]')
    final = await broker.final("t")
    assert (final["status"], final["output"], final["steps"]) == ("completed", "yes", 1)
    assert await broker.hash("inst:writer/k") == {"state": '{"n":1}'}
    answers = await broker.entries("reply:c")
    assert [entry["t"] for entry in answers[1:]] == ["t"]
    record = await broker.entries("record")
    assert [(entry["t"], entry["d"]) for entry in record] == [("t", '[["row"]]')]
    note = await broker.take(bus)
    assert (note.task, note.name, note.data) == ("note", "editor", b'"note"')
    assert await complete(bus, note)
    await broker.idle()


async def test_a_commit_repeated_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """The reply of a commit was lost, and the client sends it again."""
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1"), send("note", step="2"))
    before = await broker.snapshot()
    assert not await suspend(bus, turn, ask("1"), send("note", step="2"))
    assert await broker.snapshot() == before


async def test_an_end_repeated_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """This also holds for the commit that ends a task: its instance may be another task's by then."""
    await broker.submit(bus, "t", key="k")
    await broker.submit(bus, "u", key="k")
    turn = await broker.take(bus)
    assert await complete(bus, turn, send("note"), state=b"1")
    before = await broker.snapshot()
    assert not await complete(bus, turn, send("note"), state=b"2")
    assert await broker.snapshot() == before


async def test_a_result_repeated_changes_nothing(broker: Broker, bus: EventBus) -> None:
    """Only the commit that removes a step from the missing set writes its result and counts."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", wait="g1"), ask("2", wait="g1"))
    call = await broker.take(bus, "tool")
    assert await answer(bus, call)
    before = await broker.snapshot()
    assert not await answer(bus, call, b'"other"')
    assert await broker.snapshot() == before


async def test_state_is_written_only_by_the_end_of_a_run(broker: Broker, bus: EventBus) -> None:
    """A waiting run shows no state. A replay starts with the state that the run began with."""
    await broker.submit(bus, "first", key="k")
    assert await complete(bus, await broker.take(bus), state=b'{"n":1}')
    await broker.submit(bus, "second", key="k")
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1"), state=b'{"n":2}')
    instance = await broker.hash("inst:writer/k")
    assert instance["state"] == '{"n":1}'
    assert await answer(bus, await broker.take(bus, "tool"))
    resumed = await broker.take(bus)
    loaded = await bus.load(resumed)
    assert loaded is not None
    assert loaded.state == b'{"n":1}'
    assert await complete(bus, resumed, state=b'{"n":3}')
    assert await broker.hash("inst:writer/k") == {"state": '{"n":3}'}
    await broker.idle()


async def test_a_failed_run_writes_no_state(broker: Broker, bus: EventBus) -> None:
    """A failed run's changes to its state are dropped, including those it had shown in the middle."""
    await broker.submit(bus, "first", key="k")
    await complete(bus, await broker.take(bus), state=b'{"n":1}')
    await broker.submit(bus, "second", key="k")
    await suspend(bus, await broker.take(bus), ask("1"), state=b'{"n":2}')
    await answer(bus, await broker.take(bus, "tool"))
    assert await fail(bus, await broker.take(bus))
    assert await broker.hash("inst:writer/k") == {"state": '{"n":1}'}
    await broker.idle()


async def test_a_dead_owner_commits_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """A stopped process resumes after it was declared dead: it is refused, and another has its work."""
    await broker.submit(bus, "before")
    assert await complete(bus, await broker.take(bus)), "a commit of its own does not outlive it"
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    await broker.silence(bus)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await complete(bus, turn, send("note"), state=b"1")
    with pytest.raises(Fenced):
        await suspend(bus, turn, ask("1"))
    with pytest.raises(Fenced):
        await bus.retry(turn, 0, b"")
    with pytest.raises(Fenced):
        await bury(bus, turn)
    assert await broker.snapshot() == before
    adopted = await other.adopt("agent", 10, False)
    assert [delivery.entry for delivery in adopted.deliveries] == [turn.entry]
    assert await complete(other, adopted.deliveries[0])
    await broker.idle()


async def test_a_dead_owner_answers_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    await broker.silence(bus)
    before = await broker.snapshot()
    with pytest.raises(Fenced):
        await answer(bus, call)
    assert await broker.snapshot() == before
    assert await answer(other, (await other.adopt("tool", 10, False)).deliveries[0])
    assert await complete(other, await broker.take(other))
    await broker.idle()


async def test_only_one_of_two_owners_of_an_entry_takes_effect(broker: Broker, bus: EventBus, other: EventBus) -> None:
    """Both owners live and both hold the entry (the group was lost): the first commit counts, for each kind."""
    await broker.submit(bus, "t")
    first = await broker.take(bus)
    await broker.lose_group()
    second = await broker.take(other)
    assert first.entry == second.entry
    assert await suspend(bus, first, ask("1"))
    before = await broker.snapshot()
    assert not await suspend(other, second, ask("1"))
    assert not await complete(other, second, state=b"1")
    assert not await other.retry(second, 0, b"")
    assert not await bury(other, second)
    assert await broker.snapshot() == before


@pytest.mark.parametrize("late", [True, False])
async def test_an_owner_that_only_the_server_remembers_commits_nothing_twice(
    broker: Broker, bus: EventBus, other: EventBus, late: bool
) -> None:
    """A server that was a replica for a while, or another release's functions, did not see who was declared dead.

    The state of the run and of the step decides then: of two commits, the first one counts.
    """
    await broker.submit(bus, "first", key="k")
    assert await complete(other, await broker.take(other))
    for task in ("t", "next"):
        await broker.submit(bus, task, key="k")

    async def commit_both(stale: Delivery, adopted: Delivery, commit: Callable[..., Awaitable[bool]]) -> None:
        pairs = [(other, stale), (bus, adopted)]
        outcomes = []
        for owner, delivery in reversed(pairs) if late else pairs:
            with suppress(Fenced):
                outcomes.append(await commit(owner, delivery))
        assert outcomes.count(True) == 1

    async def lose(stream: str) -> tuple[Delivery, Delivery]:
        taken = await broker.take(other, stream)
        await broker.call("ZREM", broker.keys.base + "alive", other.owner)
        (adopted,) = (await bus.adopt(stream, 10, False)).deliveries
        return taken, adopted

    async def wait(owner: EventBus, turn: Delivery) -> bool:
        return await suspend(owner, turn, ask("1"))

    await commit_both(*await lose("agent"), wait)
    await other.beat(3000, True, "")
    await commit_both(*await lose("tool"), answer)
    await other.beat(3000, True, "")
    await commit_both(*await lose("agent"), complete)
    following = await broker.take(bus)
    assert following.task == "next"
    assert await complete(bus, following)
    await broker.idle()


@pytest.mark.parametrize(
    "parts",
    [["z", "1", "2"], ["c", "tool", "1"], [*ask("1"), "c"]],
    ids=["unknown letter", "cut", "more than counted"],
)
@pytest.mark.parametrize("mode", ["w", "c"])
async def test_a_commit_with_a_malformed_part_changes_nothing(
    broker: Broker, bus: EventBus, mode: str, parts: list[Argument]
) -> None:
    await broker.submit(bus, "t", key="k")
    turn = await broker.take(bus)
    before = await broker.snapshot()
    with pytest.raises(ServerError, match="malformed part"):
        await bus.commit_turn(turn, mode, now(), b"[]", 1, b"{}", b"", parts, 1)
    assert await broker.snapshot() == before
    assert await complete(bus, turn)


async def test_a_run_that_has_not_changed_the_state_leaves_it(broker: Broker, bus: EventBus) -> None:
    for task, state in (("a", b'{"n":1}'), ("b", b"")):
        await broker.submit(bus, task, key="k")
        assert await complete(bus, await broker.take(bus), state=state)
        assert (await broker.hash("inst:writer/k"))["state"] == '{"n":1}'


async def test_a_run_without_an_instance_leaves_no_state(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await complete(bus, await broker.take(bus), state=b'{"n":1}')
    assert await broker.call("KEYS", broker.keys.base + "inst:*") == []
