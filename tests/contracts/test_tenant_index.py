"""Lists of a tenant's tasks and of open tasks read their own indexes: their cost does not depend on other tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from runtime_core.bus.event_bus import EventBus
from runtime_core.client.task_view import MAX_SCANNED, TaskFilter, list_tasks
from runtime_core.state_manager.keeper import sweep_index
from tests.contracts.broker import Broker, complete

LONG_AGO_MS = 1
HOUR_MS = 3_600_000


async def start(broker: Broker, bus: EventBus, task: str, tenant: str) -> None:
    await broker.submit(bus, task, tenant=tenant, in_turn=True)


async def listed(bus: EventBus, tenant: str) -> list[str]:
    page = await list_tasks([bus], TaskFilter(tenant=tenant), 50)
    assert page.cursor == ""
    return [row["task_id"] for row in page.tasks]


async def fill_index(broker: Broker, names: Sequence[str]) -> None:
    for first in range(0, len(names), 1000):
        places = [part for name in names[first : first + 1000] for part in (LONG_AGO_MS, name)]
        await broker.call("ZADD", broker.keys.index, *places)


async def tenants_with_index(broker: Broker) -> list[bytes]:
    return cast(list[bytes], await broker.call("ZRANGE", broker.keys.indexes, 0, -1))


async def test_a_tenants_list_reads_no_task_of_others(broker: Broker, bus: EventBus) -> None:
    await start(broker, bus, "acme.1", "acme")
    await start(broker, bus, "other", "other")
    await fill_index(broker, [f"passed-{number}" for number in range(20 * MAX_SCANNED // 10)])
    # An entry of the shared index that a scan of it would list: the tenant's list does not read it.
    await broker.call("ZREM", broker.keys.index, "acme.1")
    assert await listed(bus, "acme") == ["acme.1"]
    assert await listed(bus, "nobody") == []


async def test_a_list_of_open_tasks_reads_no_ended_one(broker: Broker, bus: EventBus) -> None:
    for task in ("acme.1", "acme.2", "plain"):
        await start(broker, bus, task, "acme" if task != "plain" else "")
    await fill_index(broker, [f"ended-{number}" for number in range(MAX_SCANNED + 1)])
    # `plain` was reopened later.
    created = float(cast(bytes, await broker.call("ZSCORE", broker.keys.open_tasks, "plain")))
    await broker.call("ZADD", broker.keys.open_tasks, int(created) + HOUR_MS, "plain")
    for tenant, expected in (("", ["plain", "acme.2", "acme.1"]), ("acme", ["acme.2", "acme.1"])):
        for until in (math.inf, created + HOUR_MS):
            found, cursor = [], ""
            for _ in expected:
                wanted = TaskFilter(status="accepted", tenant=tenant, until_ms=until)
                page = await list_tasks([bus], wanted, 1, cursor)
                found += [row["task_id"] for row in page.tasks]
                cursor = page.cursor
            assert sorted(found, reverse=True) == expected
            assert found[:1] == expected[:1] or tenant, "the one that was opened last"
            assert cursor == ""


async def test_a_task_without_tenant_has_no_place_but_in_the_shared_index(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "plain")
    await start(broker, bus, "turns", "")
    assert await broker.call("EXISTS", broker.keys.indexes, broker.keys.index_of("")) == 0


async def test_a_sweep_forgets_expired_tasks_of_tenants(broker: Broker, bus: EventBus) -> None:
    for task in ("acme.old", "acme.new", "gone.old", "late.new"):
        await start(broker, bus, task, task.partition(".")[0])
    for task in ("acme.old", "gone.old"):
        await broker.call("DEL", broker.keys.task(task))
        await broker.call("ZADD", broker.keys.index_of(task.partition(".")[0]), LONG_AGO_MS, task)
    for tenant in ("acme", "gone"):
        await broker.call("ZADD", broker.keys.indexes, LONG_AGO_MS, tenant)
    await sweep_index(bus, HOUR_MS)
    assert await broker.call("ZRANGE", broker.keys.index_of("acme"), 0, -1) == [b"acme.new"]
    assert await broker.call("EXISTS", broker.keys.index_of("gone")) == 0
    assert sorted(await tenants_with_index(broker)) == [b"acme", b"late"]
    # The tenant's oldest task decides when its index is swept next.
    created = await broker.call("ZSCORE", broker.keys.index_of("acme"), "acme.new")
    assert await broker.call("ZSCORE", broker.keys.indexes, "acme") == created


async def test_a_sweep_counts_a_task_once(broker: Broker, bus: EventBus) -> None:
    await start(broker, bus, "acme.old", "acme")
    await broker.call("DEL", broker.keys.task("acme.old"))
    for index in (broker.keys.index, broker.keys.index_of("acme")):
        await broker.call("ZADD", index, LONG_AGO_MS, "acme.old")
    await broker.call("ZADD", broker.keys.indexes, LONG_AGO_MS, "acme")
    await sweep_index(bus, HOUR_MS)
    assert await broker.call("HGET", broker.keys.meta, "swept") == b"1"
    assert await tenants_with_index(broker) == []


async def test_an_erased_task_leaves_its_tenants_index(broker: Broker, bus: EventBus) -> None:
    await start(broker, bus, "acme.1", "acme")
    assert await complete(bus, await broker.take(bus))
    assert await bus.erase("acme.1") == "OK"
    assert await broker.call("EXISTS", broker.keys.index_of("acme")) == 0
