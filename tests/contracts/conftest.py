"""Run the contract tests on the selected servers: on one by default, on all on request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from runtime_core.bus.connection import RespTransport, Transport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from tests.contracts.broker import Broker, Connect
from tests.contracts.function_rights import Watch
from tests.servers.containers import CONTAINERS, Containers, docker_is_here
from tests.servers.matrix import MATRIX, VALKEY_9, repeat_on
from tests.servers.process import Server
from tests.servers.unavailable import Unavailable


def server_clients(url: str) -> Connect:
    async def connect() -> Transport:
        transport = RespTransport(parse_address(url))
        await transport.connect(10.0)
        return transport

    return connect


async def open_broker(kind: str, namespace: str, connect: Connect) -> Broker:
    """A partition with its groups created and its agents and tools registered."""
    admin = await connect()
    broker = Broker(kind, Keys(namespace, 0), connect, admin, transports=[admin])
    await broker.prepare()
    return broker


async def close_broker(broker: Broker) -> None:
    for transport in broker.transports:
        await transport.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out containers that cannot run here: tests/servers/test_containers.py reports them once."""
    asked = {kind for item in items if (kind := broker_of(item)) in CONTAINERS}
    if not asked or config.option.collectonly:
        return
    away = set()
    with Containers() as containers:
        for kind in sorted(asked):
            try:
                containers.fetch(kind)
            except Unavailable:
                away.add(kind)
    left_out = [item for item in items if broker_of(item) in away]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if broker_of(item) not in away]


def broker_of(item: pytest.Item) -> str:
    """The kind of broker that a test runs on; empty for one without."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("broker", "")) if callspec else ""


@pytest.fixture(params=repeat_on(*MATRIX, *(CONTAINERS if docker_is_here() else ())))
async def broker(
    request: pytest.FixtureRequest,
    shared_server: Callable[[str], Server],
    container_url: Callable[[str], str],
    namespace: str,
) -> AsyncIterator[Broker]:
    """A fresh partition on each selected kind of broker in turn."""
    kind: str = request.param
    url = container_url(kind) if kind in CONTAINERS else shared_server(kind).url
    broker = await open_broker(kind, namespace, server_clients(url))
    broker.port = int(url.rpartition(":")[2])
    yield broker
    await close_broker(broker)


@pytest.fixture
async def bus(broker: Broker) -> EventBus:
    """One owner on the broker."""
    return await broker.owner()


@pytest.fixture
async def other(broker: Broker) -> EventBus:
    """A second owner on the same broker."""
    return await broker.owner()


@pytest.fixture(autouse=True)
def functions_stay_within_their_rights(request: pytest.FixtureRequest) -> Iterator[None]:
    """`weft acl` derives users' rights from the functions' source: no function may need more."""
    if broker_of(request.node) != VALKEY_9:
        yield  # one server is enough
        return
    with Watch(request.getfixturevalue("shared_server")(VALKEY_9).port) as watch:
        yield
        beyond = watch.beyond_their_rights()
    assert not beyond, f"runtime_core/bus/acl/users.py does not see what functions do: {sorted(beyond)}"
