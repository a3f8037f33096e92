"""An engine step waits for a gateway as long as its task allows, then fails. It is never lost, and ends once."""

from __future__ import annotations

import json
from typing import cast

import msgspec
import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.library import library
from runtime_core.engines.runtime_engine import ENGINE_WAIT_SECONDS
from runtime_core.errors import Fenced
from runtime_core.state_manager.keeper import Keeper
from runtime_core.state_manager.measures import Measures
from runtime_core.state_manager.stuck import EngineWatch, find_stuck, free
from runtime_core.telemetry.metrics import PartitionMetrics
from runtime_core.telemetry.names import STREAM_LAG
from tests.contracts.broker import Broker, ask, complete, suspend

NOBODY = "no ray-gateway serves this namespace: start one (weft up --ray), or use the engine local"


async def asked(broker: Broker, bus: EventBus, *, context: bytes = b"", stream: str = "ray", task: str = "t") -> None:
    """A task that waits for a step of an engine."""
    await broker.submit(bus, task, context=context)
    assert await suspend(bus, await broker.take(bus), ask("1", "rank", stream=stream, context=context))


async def gateway(broker: Broker, stream: str = "ray") -> EventBus:
    """A gateway that serves a stream, whose group exists."""
    bus = await broker.owner("ray-gateway")
    await bus.make_groups([stream])
    await bus.announce_engine([stream])
    return bus


async def outcome(broker: Broker, bus: EventBus) -> tuple[str, dict[str, str]]:
    """Return how the step ended, from the one event that wakes the task: `K` or `E`, and its value."""
    turn = await broker.take(bus)
    assert (turn.kind, turn.step) == ("resume", "1")
    await broker.nothing(bus)
    status, value = turn.data[8:9].decode(), json.loads(turn.data[22:])
    assert await complete(bus, turn)
    return status, value


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the watch has logged."""
    return [record.getMessage() for record in caplog.records if record.name == EngineWatch.__module__]


async def waits(broker: Broker) -> bool:
    return "m:1" in await broker.task("t")


def test_both_sides_have_the_same_default() -> None:
    assert f"ENGINE_WAIT_SECONDS = {ENGINE_WAIT_SECONDS:g}\n".encode() in library().source


async def test_a_step_without_a_gateway_waits_and_says_so(broker: Broker, bus: EventBus) -> None:
    before = (await bus.gateways("ray")).now
    await asked(broker, bus, context=b'{"tenant":"shop"}')
    after = (await bus.gateways("ray")).now
    await EngineWatch(bus).check()
    assert await waits(broker)
    [told] = await broker.entries("out:t")
    data = json.loads(told["data"])
    assert (told["type"], data["run_id"], data["progress"]) == ("weft.output.delta", "r/1", True)
    assert data["value"] == {"waiting": "ray", "reason": NOBODY}
    [entry] = await broker.entries("ray")
    context = json.loads(entry["x"])
    assert context["tenant"] == "shop"
    assert before <= context["engine_until"] - ENGINE_WAIT_SECONDS <= after, "all by the clock of the broker"
    await bus.cancel("t", "no more")
    assert [event["type"] for event in await broker.entries("out:t")] == ["weft.output.delta", "weft.task.cancelled"]
    assert cast(int, await broker.call("TTL", broker.keys.out("t"))) > 0


@pytest.mark.parametrize("wait", [120.5, 60])
async def test_the_conf_says_how_long(broker: Broker, bus: EventBus, wait: float) -> None:
    await asked(broker, bus, context=json.dumps({"engine_wait_seconds": wait}).encode())
    watch = EngineWatch(bus)
    await broker.pass_time(int(wait * 1000) - 30_000)
    await watch.check()
    assert await waits(broker)
    await broker.pass_time(31_000)
    await watch.check()
    assert await outcome(broker, bus) == ("E", {"type": "EngineUnavailable", "message": NOBODY})
    assert await broker.entries("ray") == []
    await broker.idle()


async def test_a_step_that_may_not_wait_fails_at_once(broker: Broker, bus: EventBus) -> None:
    """With any other configuration it would wait."""
    await asked(broker, bus, context=b'{"engine_wait_seconds":0.0}')
    assert await broker.entries("ray") == []
    assert await broker.entries("out:t") == []
    assert await outcome(broker, bus) == ("E", {"type": "EngineUnavailable", "message": NOBODY})
    await broker.idle()


async def test_a_stream_that_a_gateway_has_served_is_known(broker: Broker, bus: EventBus) -> None:
    await gateway(broker, "ray:gpu")
    assert await broker.hash("engines") == {"ray:gpu": "ray:gpu"}


async def test_a_step_that_may_not_wait_runs_where_a_gateway_serves(broker: Broker, bus: EventBus) -> None:
    there = await gateway(broker)
    await asked(broker, bus, context=b'{"engine_wait_seconds":0}')
    assert await there.commit_call(await broker.take(there, "ray"), b"K", 1_700_000_000_000, b'{"a":"b"}', b"[]", 1)
    assert await outcome(broker, bus) == ("K", {"a": "b"})
    assert await broker.entries("out:t") == [], "nothing is told of a step that waits for nobody"


async def test_the_end_of_a_step_is_in_the_record(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus)
    await broker.pass_time(61_000)
    await EngineWatch(bus).check()
    rows = [row for entry in await broker.entries("record") for row in json.loads(entry["d"])]
    [row] = [row for row in rows if row["run"] == "r/1"]
    assert (row["kind"], row["name"], row["status"]) == ("ray", "rank", "failed")
    assert row["error"]["type"] == "EngineUnavailable"


async def test_a_late_gateway_gets_the_waiting_steps(
    broker: Broker, bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    await asked(broker, bus)
    there = await gateway(broker)
    await broker.pass_time(3_600_000)
    await EngineWatch(bus).check()
    assert await waits(broker), "what is served is its gateway's to end"
    assert warnings_of(caplog) == []
    call = await broker.take(there, "ray")
    assert (call.name, call.run) == ("rank", "r/1")
    assert await there.commit_call(call, b"K", 1_700_000_000_000, b'{"a":"b"}', b"[]", 1)
    assert await outcome(broker, bus) == ("K", {"a": "b"})
    await broker.idle()


async def test_a_pool_without_a_gateway_is_distinguished_from_one_that_has_one(broker: Broker, bus: EventBus) -> None:
    await gateway(broker)
    await asked(broker, bus, stream="ray:big")
    await broker.pass_time(61_000)
    await EngineWatch(bus).check()
    status, error = await outcome(broker, bus)
    assert status == "E"
    assert (
        error["message"] == "no ray-gateway serves the pool big: start one with WEFT_POOLS=big, or use the engine local"
    )


async def test_an_engine_stays_available_while_one_of_two_gateways_runs(broker: Broker, bus: EventBus) -> None:
    first, second = await gateway(broker), await gateway(broker)
    assert (await bus.gateways("ray")).live == 2
    await first.withdraw_engine(["ray"])
    assert (await bus.gateways("ray")).live == 1
    await second.leave(())
    there = await bus.gateways("ray")
    assert (there.live, there.problem) == (0, NOBODY)
    assert there.silent_seconds is not None
    assert (await bus.gateways("spark")).silent_seconds is None


async def test_a_gateway_that_is_killed_no_longer_counts(broker: Broker, bus: EventBus) -> None:
    there = await gateway(broker)
    await broker.silence(there)
    assert (await bus.gateways("ray")).live == 0
    again = await gateway(broker)
    assert (await bus.gateways("ray")).live == 1
    kept = cast(list[bytes], await broker.call("ZRANGE", broker.keys.gateways, 0, -1))
    assert sorted(kept) == [b"ray", f"ray {again.owner}".encode()], "nothing is left of the one before"


async def test_steps_that_wait_for_an_engine_are_logged_repeatedly(
    broker: Broker, bus: EventBus, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime_core.state_manager.stuck.WARN_SECONDS", 1e9)
    watch = EngineWatch(bus)
    await watch.check()
    assert warnings_of(caplog) == []
    await asked(broker, bus)
    for _ in range(3):
        await watch.check()
    assert warnings_of(caplog) == [f"steps wait on ray (1): {NOBODY}"]


async def test_a_step_waits_again_when_its_gateway_leaves(broker: Broker, bus: EventBus) -> None:
    """A step that has run for an hour is not given up because its gateway restarts."""
    there = await gateway(broker)
    await asked(broker, bus)
    await broker.take(there, "ray")
    await broker.pass_time(3_600_000)
    await there.withdraw_engine(["ray"])
    await there.leave(())
    watch = EngineWatch(bus)
    await watch.check()
    assert await waits(broker)
    # The clock of beats counts its silence; the partition's own clock does not.
    await broker.call("HINCRBY", broker.keys.meta, "beat_clock", 61_000)
    await watch.check()
    assert (await outcome(broker, bus))[0] == "E"


async def test_an_entry_of_a_live_owner_is_not_reclaimed(broker: Broker, bus: EventBus) -> None:
    """It runs and has reported that; or the broker has lost the report."""
    there = await gateway(broker)
    await asked(broker, bus, context=b'{"engine_wait_seconds":1}')
    call = await broker.take(there, "ray")
    await broker.call("DEL", broker.keys.gateways)
    await broker.pass_time(3_600_000)
    await EngineWatch(bus).check()
    assert await waits(broker)
    assert await there.commit_call(call, b"K", 1_700_000_000_000, b'{"a":"b"}', b"[]", 1)
    assert await outcome(broker, bus) == ("K", {"a": "b"})


async def overdue(broker: Broker, bus: EventBus) -> Delivery:
    """A step whose time had run out when the watch looked a moment ago."""
    await asked(broker, bus, context=b'{"engine_wait_seconds":1}')
    await broker.pass_time(3_600_000)
    [entry] = await broker.entries("ray")
    fields = [item.encode() for name in ("h", "d", "x") for item in (name, entry[name])]
    return Delivery(0, "ray", entry["id"].encode(), fields)


ERROR = b'{"type":"EngineUnavailable","message":"late"}'


async def test_a_gateway_that_starts_between_the_check_and_the_end_gets_the_step(broker: Broker, bus: EventBus) -> None:
    seen = await overdue(broker, bus)
    there = await gateway(broker)
    assert not await bus.expire_call(seen, 1_700_000_000_000, ERROR, b"[]")
    assert await there.commit_call(await broker.take(there, "ray"), b"K", 1_700_000_000_000, b'{"a":"b"}', b"[]", 1)
    assert not await bus.expire_call(seen, 1_700_000_000_000, ERROR, b"[]")
    assert await outcome(broker, bus) == ("K", {"a": "b"})


async def test_a_gateway_declared_dead_does_not_end_the_step_twice(broker: Broker, bus: EventBus) -> None:
    """It is declared dead while it works, and returns under another name: the first end counts."""
    seen = await overdue(broker, bus)
    there = await broker.owner("ray-gateway")
    await there.make_groups(["ray"])
    call = await broker.take(there, "ray")
    assert not await bus.expire_call(seen, 1_700_000_000_000, ERROR, b"[]")
    await broker.silence(there)
    assert await bus.expire_call(seen, 1_700_000_000_000, ERROR, b"[]")
    again = await broker.owner("ray-gateway")
    assert not await again.commit_call(call, b"K", 1_700_000_000_000, b'{"a":"b"}', b"[]", 1)
    await broker.nothing(again, "ray")
    assert await outcome(broker, bus) == ("E", msgspec.json.decode(ERROR))
    assert await broker.entries("ray") == []


async def test_a_step_that_was_handed_back_is_not_ended_by_its_old_entry(broker: Broker, bus: EventBus) -> None:
    seen = await overdue(broker, bus)
    there = await gateway(broker)
    assert await there.retry(await broker.take(there, "ray"), 5_000, b"", counts=False)
    await there.leave(())
    assert not await bus.expire_call(seen, 1_700_000_000_000, ERROR, b"[]")
    assert await waits(broker)


async def test_a_cancelled_task_leaves_no_step_behind(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus)
    await bus.cancel("t", "no more")
    await EngineWatch(bus).check()
    assert await broker.entries("ray") == []
    assert await broker.status("t") == "cancelled"


async def test_a_step_that_waits_for_an_engine_is_measured_and_not_stuck(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus, stream="ray:big")
    taken = await Measures(bus, PartitionMetrics(), lambda: True, bus.transport).take()
    lag = [sample.value for sample in taken if sample.metric is STREAM_LAG and sample.labels[0] == "ray:big"]
    assert lag == [1]
    assert await find_stuck(bus) == []
    [entry] = await broker.entries("ray:big")
    await broker.call("XDEL", broker.keys.stream("ray:big"), entry["id"])
    [lost] = await find_stuck(bus)
    assert (lost.what, lost.run) == ("call", "r/1")
    assert await free(bus, lost)
    assert (await outcome(broker, bus))[1]["type"] == "LostEntry"


async def test_the_keeper_watches_if_no_services_run(broker: Broker, bus: EventBus) -> None:
    await overdue(broker, bus)
    await Keeper(bus).tidy()
    assert (await outcome(broker, bus))[1]["type"] == "EngineUnavailable"


async def test_no_step_waits_if_no_gateway_may_start(broker: Broker, bus: EventBus) -> None:
    await asked(broker, bus)
    await EngineWatch(bus, gateways_may_start=False).check()
    assert (await outcome(broker, bus))[1]["type"] == "EngineUnavailable"


async def test_a_leader_that_was_declared_dead_ends_nothing(broker: Broker, bus: EventBus, other: EventBus) -> None:
    seen = await overdue(broker, bus)
    await broker.silence(other)
    with pytest.raises(Fenced):
        await other.expire_call(seen, 1_700_000_000_000, ERROR, b"[]")
    assert await waits(broker)


async def test_a_long_queue_is_read_in_pieces(broker: Broker, bus: EventBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that may still wait do not hide those behind them."""
    monkeypatch.setattr("runtime_core.state_manager.stuck.STEPS_PAGE", 2)
    for number in range(5):
        await asked(broker, bus, context=b'{"engine_wait_seconds":100000}', task=f"patient-{number}")
    await asked(broker, bus, context=b'{"engine_wait_seconds":1}')
    await broker.pass_time(3_600_000)
    watch = EngineWatch(bus)
    for _ in range(4):
        await watch.check()
    assert not await waits(broker)
    assert len(await broker.entries("ray")) == 5
    await broker.pass_time(100_000_000)
    for _ in range(4):
        await watch.check()
    assert await broker.entries("ray") == []


async def test_a_turn_that_continues_waits_too(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    answers = await bus.ask(turn, 1_700_000_000_000, "reply", b"", ask("1", "rank", stream="spark"), 1)
    assert answers == {}
    [told] = await broker.entries("out:t")
    assert json.loads(told["data"])["value"]["waiting"] == "spark"
    assert "o" in (await broker.task("t"))["fl"], "the task's end closes what it has opened"
