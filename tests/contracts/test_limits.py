"""Everything that can grow has a named limit, and work in progress continues."""

from __future__ import annotations

import pytest

from runtime_core.bus.connection import Argument
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import LimitExceeded, Rejected
from tests.contracts.broker import DIGEST, Broker, again, answer, ask, complete, nap, question, send, suspend


async def limit(broker: Broker, name: str, value: int) -> None:
    await broker.call("HSET", broker.keys.meta, name, value)


async def test_a_full_mailbox_refuses_submits(broker: Broker, bus: EventBus) -> None:
    """Submits are rejected with a delay; waiting work continues and makes room."""
    await limit(broker, "mailbox_max", 2)
    for number in range(3):
        await broker.submit(bus, f"t{number}", key="k")
    before = await broker.snapshot()
    with pytest.raises(Rejected, match="the mailbox of writer/k is full") as error:
        await broker.submit(bus, "late", key="k")
    assert error.value.field == "overloaded"
    assert error.value.retry_after_seconds
    assert await broker.snapshot() == before
    assert (await broker.submit(bus, "elsewhere", key="other")).started
    assert await complete(bus, await broker.take(bus))
    assert (await broker.submit(bus, "late", key="k")).started


async def test_a_full_mailbox_answers_an_agent_with_an_error(broker: Broker, bus: EventBus) -> None:
    """The calling agent gets an error as the step's result, in the commit that requests it."""
    await limit(broker, "mailbox_max", 2)
    for number in range(3):
        await broker.submit(bus, f"t{number}", agent="editor", key="k")
    await broker.submit(bus, "asks")
    turns = {turn.task: turn for turn in [await broker.take(bus), await broker.take(bus)]}
    assert await suspend(bus, turns["asks"], ask("1", "editor", stream="agent", key="k"))
    assert await broker.mailbox("editor/k") == ["t1|r", "t2|r"]
    turn = await broker.take(bus)
    assert (turn.task, turn.kind, turn.step) == ("asks", "resume", "1")
    assert b"MailboxFull" in turn.data
    assert turn.data[8:9] == b"E"
    assert not await broker.hash("run:asks/r/1")
    assert not [name for name in await broker.task("asks") if name.startswith("k:")]
    assert await complete(bus, turn)
    assert await complete(bus, turns["t0"])
    for _ in range(2):
        assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_full_mailbox_refuses_a_message(broker: Broker, bus: EventBus) -> None:
    """A message that nobody waits for is not delivered; its task ends failed, so that it can be found."""
    await limit(broker, "mailbox_max", 1)
    for number in range(2):
        await broker.submit(bus, f"t{number}", agent="editor", key="k")
    await broker.submit(bus, "sends")
    turns = {turn.task: turn for turn in [await broker.take(bus), await broker.take(bus)]}
    assert await complete(bus, turns["sends"], send("note", key="k"))
    assert await broker.mailbox("editor/k") == ["t1|r"]
    final = await broker.final("note")
    assert final["status"] == "failed"
    error = final["error"]
    assert isinstance(error, dict)
    assert error["type"] == "MailboxFull"
    assert await broker.call("ZSCORE", broker.keys.base + "index", "note") is not None


async def test_a_full_work_stream_refuses_submits(broker: Broker, bus: EventBus) -> None:
    """This holds for commits, too."""
    await broker.submit(bus, "t")
    await limit(broker, "stream_max", 1)
    with pytest.raises(Rejected, match="holds as much open work") as error:
        await broker.submit(bus, "late")
    assert error.value.field == "overloaded"
    assert await suspend(bus, await broker.take(bus), ask("1"))
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    assert (await broker.submit(bus, "late")).started


async def test_a_full_record_refuses_submits(broker: Broker, bus: EventBus) -> None:
    """Only admission stops."""
    await broker.submit(bus, "t")
    await broker.submit(bus, "u")
    assert await complete(bus, await broker.take(bus))
    await limit(broker, "record_max", 1)
    with pytest.raises(Rejected, match="the record stream is over its limit"):
        await broker.submit(bus, "late")
    assert await complete(bus, await broker.take(bus))


async def test_a_task_over_its_limit_of_steps_requests_nothing_more(broker: Broker, bus: EventBus) -> None:
    """The commit is refused before anything is written. The turn may still end its run."""
    await broker.submit(bus, "t", max_steps=4)
    assert await suspend(bus, await broker.take(bus), ask("1"), record=b'["a", "b"]', steps=2)
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    before = await broker.snapshot()
    with pytest.raises(LimitExceeded, match="max_steps=4"):
        await suspend(bus, turn, ask("2"), question("3"))
    with pytest.raises(LimitExceeded):
        await suspend(bus, turn, nap("2", 1000), record=b'["c"]', steps=1)
    assert await broker.snapshot() == before
    assert await suspend(bus, turn, ask("2"))


async def test_only_new_steps_count(broker: Broker, bus: EventBus) -> None:
    """Waiting again, usage and steps that are journaled already are no new steps."""
    await broker.submit(bus, "t", max_steps=2)
    turn = await broker.take(bus)
    assert await suspend(bus, turn, ask("1"), ask("2"))
    assert await answer(bus, await broker.take(bus, "tool"))
    turn = await broker.take(bus)
    await bus.record(turn, "3", DIGEST.encode() + b"K1700000000000null")
    parts: list[list[Argument]] = [again("2"), ["u", "3", DIGEST, b'{"tokens":1}'], ["j", "3"]]
    assert await suspend(bus, turn, *parts, record=b'["c"]', steps=1)


async def test_the_limit_counts_the_whole_task(broker: Broker, bus: EventBus) -> None:
    """A child run cannot use more than its task has left."""
    await broker.submit(bus, "t", max_steps=3)
    parts = (ask("1", "editor", stream="agent"),)
    assert await suspend(bus, await broker.take(bus), *parts, record=b'["a", "b"]', steps=2)
    child = await broker.take(bus)
    with pytest.raises(LimitExceeded, match="max_steps=3"):
        await suspend(bus, child, ask("1"), ask("2"))
    assert await suspend(bus, child, ask("1"))
