"""A calls B calls A: a request from a run that its target waits for is a nested turn, not a deadlock."""

from __future__ import annotations

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from tests.contracts.broker import Broker, again, answer, ask, bury, complete, suspend


def ask_writer(step: str, *, wait: str = "!") -> list[bytes | str | int | float]:
    return ask(step, "writer", stream="agent", key="k", wait=wait)


async def asked_editor(broker: Broker, bus: EventBus) -> Delivery:
    """writer/k has called the editor, whose turn this is; `mail` waits for writer/k."""
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    await broker.submit(bus, "mail", key="k")
    editor = await broker.take(bus)
    assert editor.run == "r/1"
    return editor


async def finish(broker: Broker, bus: EventBus) -> None:
    """The rest of `asked_editor`: the editor, the writer, then its waiting event."""
    for task, run in (("t", "r/1"), ("t", "r"), ("mail", "r")):
        turn = await broker.take(bus)
        assert (turn.task, turn.run) == (task, run)
        await broker.nothing(bus)
        assert await complete(bus, turn)
    await broker.idle()


async def test_a_reentrant_call_is_delivered_at_once(broker: Broker, bus: EventBus) -> None:
    await suspend(bus, await asked_editor(broker, bus), ask_writer("1"))
    nested = await broker.take(bus)
    assert (nested.run, nested.instance) == ("r/1/1", "writer/k")
    assert (await broker.hash("inst:writer/k"))["busy"] == "t|r\nt|r/1/1"
    await broker.nothing(bus)
    assert await complete(bus, nested)
    assert (await broker.hash("inst:writer/k"))["busy"] == "t|r"
    assert await broker.mailbox("writer/k") == ["mail|r"]
    await finish(broker, bus)


async def test_an_agent_may_call_itself(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask_writer("1"))
    nested = await broker.take(bus)
    assert nested.run == "r/1"
    await complete(bus, nested)
    await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_two_nested_calls_run_one_after_the_other(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask_writer("1", wait="g1"), ask_writer("2", wait="g1"))
    for run in ("r/1", "r/2", "r"):
        turn = await broker.take(bus)
        assert turn.run == run
        await broker.nothing(bus)
        await complete(bus, turn)
    await broker.idle()


async def test_a_nested_call_waits_while_its_instance_runs(broker: Broker, bus: EventBus) -> None:
    """There are never two turns at once: the holder is in the middle of a turn when its callee calls back."""
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"), ask("2"))
    editor = await broker.take(bus)
    await answer(bus, await broker.take(bus, "tool"))
    holder = await broker.take(bus)
    assert (holder.run, holder.kind) == ("r", "resume")
    await suspend(bus, editor, ask_writer("1"))
    await broker.nothing(bus)
    await suspend(bus, holder, again("1"))
    nested = await broker.take(bus)
    assert nested.run == "r/1/1"
    await broker.nothing(bus)
    for run in ("r/1/1", "r/1", "r"):
        turn = nested if run == "r/1/1" else await broker.take(bus)
        assert turn.run == run
        assert await complete(bus, turn)
    await broker.idle()


async def test_the_holder_is_not_resumed_during_a_nested_turn(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask_writer("1"), ask("2"))
    nested = await broker.take(bus)
    await answer(bus, await broker.take(bus, "tool"))
    await broker.nothing(bus)
    assert (await broker.task("t"))["cur"] == "pend"
    assert await complete(bus, nested)
    resumed = await broker.take(bus)
    assert (resumed.run, resumed.kind) == ("r", "resume")
    assert resumed.turn == -1, "no run in memory may continue: the nested run may have changed the state"
    await broker.nothing(bus)
    await complete(bus, resumed)
    await broker.idle()


async def test_the_holder_is_not_resumed_between_nested_turns(broker: Broker, bus: EventBus) -> None:
    """A tool has answered meanwhile, so the holder waits for nothing but its nested calls."""
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask_writer("1"), ask_writer("2"), ask("3"))
    first = await broker.take(bus)
    await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, first)
    second = await broker.take(bus)
    assert second.run == "r/2"
    await broker.nothing(bus)
    assert (await broker.task("t"))["cur"] == "pend"
    assert await complete(bus, second)
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_nested_turn_sees_and_writes_the_holders_state(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask_writer("1"), state=b'{"n":1}')
    nested = await broker.take(bus)
    seen = await bus.load(nested)
    assert seen is not None
    assert seen.state == b'{"n":1}'
    await complete(bus, nested, state=b'{"n":2}')
    assert (await broker.hash("inst:writer/k")).get("state") is None, "only the end of the run that holds writes it"
    resumed = await broker.take(bus)
    seen = await bus.load(resumed)
    assert seen is not None
    assert (seen.state, seen.overrides) == (b"", {"1": b'2 {"n":2}'})
    assert await suspend(bus, resumed, ask("2"))
    assert await answer(bus, await broker.take(bus, "tool"))
    resumed = await broker.take(bus)
    seen = await bus.load(resumed)
    assert seen is not None
    assert seen.overrides == {"1": b'2 {"n":2}'}, "a later result comes with no change"
    await complete(bus, resumed, state=b'{"n":3}')
    assert await broker.hash("inst:writer/k") == {"state": '{"n":3}'}
    await broker.idle()


async def overrides(bus: EventBus, resumed: Delivery) -> dict[str, bytes]:
    seen = await bus.load(resumed)
    assert seen is not None
    return seen.overrides


async def test_a_run_sees_the_state_of_a_concurrent_reentrant_call_on_top_of_it(broker: Broker, bus: EventBus) -> None:
    """Its own result came while it waited for the end of the other one."""
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask_writer("1"), ask_writer("2"), state=b'{"n":1}')
    await suspend(bus, await broker.take(bus), ask("5"))
    other = await broker.take(bus)
    assert (other.run, (await broker.hash("inst:writer/k"))["busy"]) == ("r/2", "t|r\nt|r/1\nt|r/2")
    await answer(bus, await broker.take(bus, "tool"))
    await complete(bus, other, state=b'{"n":2}')
    below = await broker.take(bus)
    assert (below.run, await overrides(bus, below)) == ("r/1", {"5": b'2 {"n":2}'})
    await complete(bus, below, state=b'{"n":3}')
    caller = await broker.take(bus)
    assert await overrides(bus, caller) == dict.fromkeys(("1", "2"), b'3 {"n":3}')
    await complete(bus, caller)
    await broker.idle()


async def test_every_branch_of_a_run_sees_the_state_of_a_nested_turn(broker: Broker, bus: EventBus) -> None:
    """A replay takes results in the order of the program: before the nested turn, at its end and later."""
    await broker.submit(bus, "t", key="k")
    branches = [ask("1"), ask("2", "editor", stream="agent"), ask("3"), ask("4")]
    await suspend(bus, await broker.take(bus), *branches, ask_writer("5"), state=b'{"n":1}')
    editor, nested = await broker.take(bus), await broker.take(bus)
    calls = [await broker.take(bus, "tool") for _ in ("1", "3", "4")]
    await answer(bus, calls[0])
    await complete(bus, editor)
    await complete(bus, nested, state=b'{"n":2}')
    resumed = await broker.take(bus)
    await answer(bus, calls[1])
    changed = b'2 {"n":2}'
    assert await overrides(bus, resumed) == dict.fromkeys(("1", "2", "3", "5"), changed)
    assert await suspend(bus, resumed, again("4"), ask("6"))
    await answer(bus, calls[2])
    resumed = await broker.take(bus)
    assert await overrides(bus, resumed) == dict.fromkeys(("1", "2", "3", "4", "5"), changed)
    await answer(bus, await broker.take(bus, "tool"))
    await complete(bus, resumed)
    await broker.idle()


async def test_a_result_after_a_nested_turn_without_a_change_is_no_change(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", key="k")
    await suspend(bus, await broker.take(bus), ask("1"), ask_writer("2"))
    nested = await broker.take(bus)
    await answer(bus, await broker.take(bus, "tool"))
    await complete(bus, nested)
    resumed = await broker.take(bus)
    assert await overrides(bus, resumed) == {}
    assert "un" not in await broker.task("t")
    await complete(bus, resumed)
    await broker.idle()


async def test_the_next_event_does_not_see_the_state_in_mid_run_of_the_last(broker: Broker, bus: EventBus) -> None:
    for task in ("t", "mail"):
        await broker.submit(bus, task, key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"), state=b'{"n":1}')
    assert (await broker.hash("inst:writer/k"))["ws"] == '{"n":1}'
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    assert "ws" not in await broker.hash("inst:writer/k")
    turn = await broker.take(bus)
    assert turn.task == "mail"
    assert await complete(bus, turn)
    await broker.idle()


async def test_a_dead_nested_call_lets_its_holder_continue(broker: Broker, bus: EventBus) -> None:
    await suspend(bus, await asked_editor(broker, bus), ask_writer("1"))
    assert await bury(bus, await broker.take(bus))
    await finish(broker, bus)


async def test_a_request_of_another_task_is_not_nested(broker: Broker, bus: EventBus) -> None:
    """Only the chain counts: another task's request waits in the mailbox, even from the same agents."""
    await suspend(bus, await asked_editor(broker, bus), ask("1"))
    await broker.submit(bus, "u", agent="editor")
    await suspend(bus, await broker.take(bus), ask_writer("1"))
    await broker.nothing(bus)
    assert await broker.mailbox("writer/k") == ["mail|r", "u|r/1"]
