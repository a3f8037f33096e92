"""A function that meets an error has changed nothing: functions on the broker are isolated, not rolled back.

Each case is run once as it should be; then once more for every key that it named, with a value of the wrong type in
that key's place. Another key cannot make a difference: up to the first wrong value, both runs are the same.
"""

from __future__ import annotations

from itertools import count
from typing import cast

import pytest

import tests.contracts.atomic_upkeep  # noqa: F401  # registers its cases
from runtime_core.bus.event_bus import EventBus
from runtime_core.errors import ServerError
from tests.contracts.atomic_tasks import CASES, Act, Case, Stage
from tests.contracts.broker import (
    Broker,
    complete,
    nap,
    suspend,
)
from tests.contracts.function_rights import Watch


async def set_stage(broker: Broker, build: Case, namespace: str) -> tuple[Broker, Act]:
    place = broker.elsewhere(namespace)
    await place.prepare()
    stage = Stage(place, await place.owner(), await place.owner())
    return place, await build(stage)


@pytest.mark.parametrize("name", CASES)
async def test_an_error_changes_nothing(broker: Broker, namespace: str, name: str) -> None:
    numbers = count()
    place, act = await set_stage(broker, CASES[name], f"{namespace}.{next(numbers)}")
    before = await place.snapshot()
    with Watch(broker.port) as watch:
        await act()
        names = watch.keys(place.keys.base) - {""}
    after = await place.snapshot()
    assert name in {"a_result_that_comes_too_late"} or after != before, "the case itself must change something"
    assert names, "the case itself must name keys"
    broken: dict[str, list[str]] = {}
    for wrong in sorted(names):
        place, act = await set_stage(broker, CASES[name], f"{namespace}.{next(numbers)}")
        key = place.keys.base + wrong
        await place.call("DEL", key)
        await place.call("SET", key, "of the wrong type")
        before = await place.snapshot()
        try:
            await act()
        except ServerError:
            after = await place.snapshot()
            # A tenant's place in its rate expires by itself.
            expired = {key for key in before.keys() - after.keys() if ":rate:" in key}
            changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
            changed = [key for key in changed if key not in expired]
            if changed:
                broken[wrong] = [key[len(place.keys.base) :] for key in changed]
    # All snapshots of later tests go through these keys too: there are thousands.
    await broker.call("UNLINK", *cast(list[bytes], await broker.call("KEYS", f"{namespace}.*")))
    assert not broken, "\n".join(f"{wrong} of the wrong type: changed {changed}" for wrong, changed in broken.items())


@pytest.mark.parametrize("count", [3999, 4001, 9000])
async def test_a_turn_of_any_size_is_committed_whole(broker: Broker, bus: EventBus, count: int) -> None:
    """Lua can pass only a limited number of arguments at once. A fan-out has no limit but the journal's."""
    await broker.submit(bus, "t")
    parts = [nap(str(number), 1000, wait="g1") for number in range(count)]
    assert await suspend(bus, await broker.take(bus), *parts)
    fields = await broker.task("t")
    assert len([name for name in fields if name.startswith("m:")]) == count
    assert (fields["g1"], fields["cur"], fields["status"]) == (str(count), "held", "waiting")
    await bus.cancel("t", "no more")
    await broker.idle()


async def test_a_timer_that_cannot_fire_does_not_delay_others(broker: Broker, bus: EventBus) -> None:
    """It stays, is retried later, and continues once the cause is fixed."""
    for task in ("broken", "sound"):
        await broker.submit(bus, task)
        await suspend(bus, await broker.take(bus), nap("1", 1000))
    fields = await broker.call("HGETALL", broker.keys.task("broken"))
    assert isinstance(fields, list)
    await broker.call("DEL", broker.keys.task("broken"))
    await broker.call("SET", broker.keys.task("broken"), "of the wrong type")
    await broker.pass_time(2000)
    await bus.promote()
    turn = await broker.take(bus)
    assert turn.task == "sound"
    await complete(bus, turn)
    await broker.call("DEL", broker.keys.task("broken"))
    await broker.call("HSET", broker.keys.task("broken"), *[item for item in fields if isinstance(item, bytes)])
    await bus.promote()
    await broker.nothing(bus)
    await broker.pass_time(61_000)
    await bus.promote()
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


@pytest.mark.parametrize("waits", ["retry", "nap"])
async def test_a_timer_whose_stream_is_damaged_fires_later(broker: Broker, bus: EventBus, waits: str) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    await (bus.retry(turn, 1000, b"{}") if waits == "retry" else suspend(bus, turn, nap("1", 1000)))
    stream = broker.keys.stream("agent")
    aside = stream + "-aside"
    await broker.call("RENAME", stream, aside)
    await broker.call("SET", stream, "of the wrong type")
    await broker.pass_time(2000)
    await bus.promote()
    await broker.call("RENAME", aside, stream)
    await broker.pass_time(61_000)
    await bus.promote()
    assert await complete(bus, await broker.take(bus))
    await broker.idle()


async def test_a_damaged_task_does_not_block_its_mailbox(broker: Broker, bus: EventBus) -> None:
    for task in ("first", "damaged", "third"):
        await broker.submit(bus, task, key="k")
    await broker.call("DEL", broker.keys.task("damaged"))
    await broker.call("SET", broker.keys.task("damaged"), "of the wrong type")
    assert await complete(bus, await broker.take(bus))
    turn = await broker.take(bus)
    assert turn.task == "third"
    assert await complete(bus, turn)
    await broker.idle()
