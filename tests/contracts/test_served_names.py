"""Work for a name that no running handler has is found at once, and nothing else is reported as such."""

from __future__ import annotations

import logging

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.client.task_view import describe_wait, read_task
from runtime_core.consumer.announcements import ServedNames, announce_served, forget_served, served_by_handlers
from runtime_core.consumer.heartbeat import Owner
from runtime_core.declare.manifest import Manifest
from runtime_core.state_manager.measures import UNSERVED_LOOKS, Measures, cure_of, find_unserved
from runtime_core.state_manager.stuck import describe_lack
from runtime_core.telemetry import names
from runtime_core.telemetry.metrics import PartitionMetrics
from tests.contracts.broker import AGENTS, LEASE_MS, TOOLS, Broker, ask, nap, suspend


async def handlers(broker: Broker, agents: tuple[str, ...] = AGENTS, tools: tuple[str, ...] = TOOLS) -> list[EventBus]:
    """Return the owners of an agent-handler and a tool-handler that have said what they can run."""
    agent, tool = await broker.owner("agent-handler"), await broker.owner("tool-handler")
    await announce_served([agent], "agent", agents)
    await announce_served([tool], "tool", tools)
    return [agent, tool]


async def found(bus: EventBus) -> list[tuple[str, str, int]]:
    return [(each.kind, each.name, each.count) for each in await find_unserved(bus)]


async def test_names_that_handlers_have_are_served(broker: Broker, bus: EventBus) -> None:
    await handlers(broker)
    await broker.submit(bus, "t")
    assert await found(bus) == []


async def test_a_removed_agent_is_found_wherever_its_runs_are(broker: Broker, bus: EventBus) -> None:
    agent, _ = await handlers(broker)
    for task in ("on-stream", "waits", "child"):
        await broker.submit(bus, task, "desk" if task == "child" else "writer")
    for task in ("on-stream", "waits", "child"):
        turn = await broker.take(bus)
        if task == "waits":
            assert await suspend(bus, turn, nap("1", 3_600_000))
        elif task == "child":
            assert await suspend(bus, turn, ask("1", "writer", stream="agent"))
    await announce_served([agent], "agent", ("editor", "desk"))
    assert await found(bus) == [("agent", "writer", 3)]
    (lacking,) = await find_unserved(bus)
    assert str(lacking).startswith("no running handler has agent 'writer': 3 runs or calls wait for it, such as task ")


async def test_an_agent_with_the_name_of_an_app_is_found_too(broker: Broker, bus: EventBus) -> None:
    """Only the agents of runtimes, whose manifests have their names, are left to another check."""
    agent, _ = await handlers(broker)
    for app in ("writer", "actor.editor"):
        await bus.transport.call("HSET", bus.keys.manifests, app, Manifest(app, "1").to_json())
    await broker.submit(bus, "t", "writer")
    await broker.submit(bus, "u", "editor")
    await announce_served([agent], "agent", ("desk",))
    assert await found(bus) == [("agent", "writer", 1)]


async def test_a_removed_tool_is_found_on_its_stream_and_before_its_retry(broker: Broker, bus: EventBus) -> None:
    _, tool = await handlers(broker)
    for task in ("a", "b"):
        await broker.submit(bus, task)
        assert await suspend(bus, await broker.take(bus), ask("1", "search"), ask("2", "rank"))
    call = await broker.take(bus, "tool")
    assert call.name == "search"
    await bus.retry(call, 1_000, b"", counts=False)  # as a handler does that lacks the name
    await announce_served([tool], "tool", ("rank",))
    assert await found(bus) == [("tool", "search", 2)]


async def test_a_tool_of_a_pool_that_nobody_serves_names_the_pool(broker: Broker, bus: EventBus) -> None:
    """Its app runs, but no handler has its pool in WEFT_POOLS."""
    await handlers(broker)
    await bus.transport.call("HSET", bus.keys.tools, "render", "tool:gpu")
    await broker.submit(bus, "t")
    assert await suspend(bus, await broker.take(bus), ask("1", "render", stream="tool:gpu"))
    (lacking,) = await find_unserved(bus)
    assert str(lacking) == (
        "no running handler of pool 'gpu' has tool 'render': 1 run or call waits for it, such as task t"
    )
    assert cure_of(lacking.pool) == "start one with WEFT_POOLS=gpu"
    view = await read_task(bus, "t")
    assert view is not None
    assert view["without_handler"] == [{"kind": "tool", "name": "render", "pool": "gpu"}]
    assert describe_lack(view["without_handler"][0]) == (
        "no running handler of pool 'gpu' has tool 'render'", "start one with WEFT_POOLS=gpu",
    )  # fmt: skip


async def test_a_handed_back_run_is_in_the_queue_of_its_task(broker: Broker, bus: EventBus) -> None:
    """A handler hands it back for a second, again and again, which is no attempt of it."""
    agent, _ = await handlers(broker)
    await broker.submit(bus, "t")
    await bus.retry(await broker.take(bus), 1_000, b"", counts=False)
    await announce_served([agent], "agent", ("desk",))
    view = await read_task(bus, "t")
    assert view is not None
    assert view["waits_for"] == [
        {"run": "r", "step": "", "kind": "agent", "name": "writer", "handler": "", "errors": []}
    ]
    assert describe_wait(view["waits_for"][0], 0) == "agent writer, in the queue: no handler has taken it yet"


async def test_a_name_that_one_of_several_handlers_has_is_served(broker: Broker, bus: EventBus) -> None:
    await handlers(broker, agents=("editor",))
    await handlers(broker, agents=("writer", "desk"))
    await broker.submit(bus, "t")
    assert await found(bus) == []


async def test_a_handler_that_has_not_said_its_names_yet_may_have_any(broker: Broker, bus: EventBus) -> None:
    """So it is during a rolling update from a release that does not say them."""
    await handlers(broker, agents=())
    await broker.submit(bus, "t")
    assert await found(bus) == [("agent", "writer", 1)]
    await broker.owner("agent-handler")
    assert (await served_by_handlers(bus)).agents is None
    assert await found(bus) == []


async def test_the_names_of_a_dead_handler_do_not_count(broker: Broker, bus: EventBus) -> None:
    agent, _ = await handlers(broker)
    await broker.submit(bus, "t")
    await broker.silence(agent)
    assert await found(bus) == [("agent", "writer", 1)]
    await forget_served(bus)
    assert len(await broker.hash("served")) == 1


async def test_a_handler_that_rejoins_under_a_new_name_announces_its_names_again(broker: Broker, bus: EventBus) -> None:
    agent, _ = await handlers(broker)
    await broker.submit(bus, "t")
    await broker.silence(agent)
    await Owner(agent, "agent-handler", LEASE_MS / 1000).enter()
    assert await found(bus) == []  # it may have any
    await announce_served([agent], "agent", AGENTS)
    assert (await served_by_handlers(bus)).agents == frozenset(AGENTS)


async def test_no_handler_at_all_lacks_every_name(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    assert await found(bus) == [("agent", "writer", 1)]


async def test_an_ended_task_needs_no_handler(broker: Broker, bus: EventBus) -> None:
    await handlers(broker, agents=())
    await broker.submit(bus, "t")
    await bus.cancel("t", "not needed")
    assert await found(bus) == []


def test_tools_of_a_server_are_served_by_their_prefix() -> None:
    served = ServedNames(frozenset(), frozenset({"rank", "files.*"}))
    assert not served.lacks("tool", "files.read")
    assert served.lacks("tool", "filesystem.read")
    assert served.lacks("tool", "search")
    assert not ServedNames(None, None).lacks("tool", "search")


async def test_the_leader_exports_it_and_logs_it_once(
    broker: Broker, bus: EventBus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent, _ = await handlers(broker, agents=("editor",))
    await broker.submit(bus, "t")
    measures = Measures(bus, PartitionMetrics(), lambda: True, bus.transport)

    async def exported() -> list[tuple[tuple[str, ...], float]]:
        return [(each.labels, each.value) for each in await measures.take() if each.metric is names.NAMES_UNSERVED]

    def logged() -> list[str]:
        return [record.message for record in caplog.records if "writer" in record.message]

    for _ in range(UNSERVED_LOOKS - 1):
        assert await exported() == [(("agent", "writer"), 1)]
    assert logged() == []  # it may be a restart
    for _ in range(3):
        assert await exported() == [(("agent", "writer"), 1)]
    assert logged() == [
        "partition 0: no running handler has agent 'writer': 1 run or call waits for it, such as task t; "
        "start one, or roll back"
    ]
    await announce_served([agent], "agent", AGENTS)
    assert await exported() == []
    assert logged()[1:] == ["partition 0: no work waits any more for agent 'writer'"]
