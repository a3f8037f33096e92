"""The order in which a host starts, announces, runs and stops its parts, and what it does when one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import RespTransport, Transport
from runtime_core.bus.namespace import connect
from runtime_core.bus.private_server import new_database
from runtime_core.consumer.progress import HEALTHY, Health
from runtime_core.errors import ServerError, WeftError
from runtime_core.host.host import Host
from runtime_core.host.local import LocalApp
from runtime_core.telemetry.metrics import Metrics
from weft import App
from weft.errors import ConfigurationError

SECONDS = 10


class Told:
    """What the parts of a host did, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, line: str, error: Exception | None = None) -> Callable[[], Awaitable[None]]:
        async def step() -> None:
            self.lines.append(line)
            if error is not None:
                raise error

        return step

    async def connect(self) -> Transport:
        transport = await connect(new_database())
        assert isinstance(transport, RespTransport)
        close = transport.close

        async def close_and_tell() -> None:
            self.lines.append("close the connection")
            await close()

        transport.close = close_and_tell  # type: ignore[method-assign]
        return transport

    def host(self) -> Host:
        return Host(self.connect, Metrics(CollectorRegistry(), "test"))


class Worker:
    """A role that works until it is stopped."""

    def __init__(self, told: Told, name: str, health: Health = HEALTHY) -> None:
        self.told = told
        self.name = name
        self.health = health
        self.stopped = asyncio.Event()
        self.is_ready = True

    async def start(self) -> None:
        self.told.lines.append(f"start {self.name}")

    async def run(self) -> None:
        self.told.lines.append(f"run {self.name}")
        await self.stopped.wait()
        self.told.lines.append(f"{self.name} ran")

    async def stop(self) -> None:
        self.stopped.set()

    def ready(self) -> bool:
        return self.is_ready

    def progress(self) -> Health:
        return self.health


async def test_parts_stop_in_the_reverse_order_of_their_start() -> None:
    told = Told()
    host = told.host()
    await host.connect()
    host.add(start=told.step("start a"), stop=told.step("stop a"))
    host.add_roles(Worker(told, "b"), Worker(told, "c"))
    host.add(start=told.step("start d"), stop=told.step("stop d"))
    host.announce(told.step("announce"))
    await host.start()
    await asyncio.sleep(0)
    while "run c" not in told.lines:  # tasks begin with a later round of the loop
        await asyncio.sleep(0)
    assert told.lines[:5] == ["start a", "start b", "start c", "start d", "announce"]
    running = asyncio.create_task(host.run())
    del told.lines[:]
    await host.stop()
    assert told.lines == ["stop d", "b ran", "c ran", "stop a", "close the connection"]
    await asyncio.wait_for(running, SECONDS)


async def test_a_part_that_only_runs_is_cancelled() -> None:
    told = Told()
    host = told.host()
    host.add(run=asyncio.Event().wait)
    await host.start()
    await asyncio.wait_for(host.stop(), SECONDS)
    await host.run()


async def test_a_host_ends_with_the_error_of_a_part() -> None:
    told = Told()
    host = told.host()
    host.add_roles(Worker(told, "a"))
    host.add(run=told.step("run b", WeftError("b has ended")))
    await host.start()
    with pytest.raises(WeftError, match="b has ended"):
        await asyncio.wait_for(host.run(), SECONDS)
    await host.stop()
    with pytest.raises(WeftError, match="b has ended"):
        await host.run()


async def test_a_failed_start_stops_only_the_started_parts() -> None:
    told = Told()
    host = told.host()
    host.add(start=told.step("start a"), stop=told.step("stop a"))
    host.add(start=told.step("start b", WeftError("b cannot start")), stop=told.step("stop b"))
    host.add(start=told.step("start c"), stop=told.step("stop c"))
    with pytest.raises(WeftError, match="b cannot start"):
        await host.start()
    await host.stop()
    assert told.lines == ["start a", "start b", "stop b", "stop a"]


async def test_a_part_that_cannot_stop_keeps_no_other_from_stopping() -> None:
    told = Told()
    host = told.host()
    await host.connect()
    host.add(stop=told.step("stop a"))
    host.add(stop=told.step("stop b", WeftError("b cannot stop")))
    await host.start()
    with pytest.raises(WeftError, match="b cannot stop"):
        await host.stop()
    assert told.lines == ["stop b", "stop a", "close the connection"]


async def test_a_role_that_joins_a_running_host_starts_and_stops_once() -> None:
    told = Told()
    host = told.host()
    host.add_roles(Worker(told, "a"))
    await host.start()
    host.add_roles(Worker(told, "b"))
    await host.join()
    await asyncio.sleep(0)
    await host.stop()
    assert sorted(told.lines) == ["a ran", "b ran", "run a", "run b", "start a", "start b"]


async def test_a_host_is_as_ready_and_as_healthy_as_its_worst_role() -> None:
    told = Told()
    host = told.host()
    healthy, stalled = Worker(told, "a"), Worker(told, "b", Health(False, "b stalls"))
    host.add_roles(healthy)
    assert host.ready()
    assert host.progress().ok
    host.add_roles(stalled)
    assert host.progress().reason == "b stalls"
    stalled.is_ready = False
    assert not host.ready()


async def test_a_full_broker_does_not_end_a_host_that_announces(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    host = told.host()
    host.announce(told.step("announce a", ServerError("OOM command not allowed")))
    host.announce(told.step("announce b"))
    await host.start()
    assert told.lines[:2] == ["announce a", "announce b"]
    assert "is announced again when memory is free" in caplog.text
    await host.stop()
    refused = told.host()
    refused.announce(told.step("announce c", ServerError("NOPERM")))
    with pytest.raises(ServerError, match="NOPERM"):
        await refused.start()
    await refused.stop()


async def test_a_local_app_whose_start_fails_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalApp(App("failing"))

    async def refuse() -> None:
        raise ConfigurationError("no client today")

    monkeypatch.setattr(local.client, "open", refuse)
    before = asyncio.all_tasks()
    with pytest.raises(ConfigurationError, match="no client today"):
        async with local:
            pass
    assert asyncio.all_tasks() == before
