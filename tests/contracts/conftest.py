"""The contract of the bus is tested on every bus: in this process and on each server of the matrix."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from runtime_core.bus.address import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.memory.server import MemoryServer, MemoryTransport
from runtime_core.bus.resp import RespTransport
from runtime_core.bus.transport import Transport
from tests.contracts.broker import Broker, Connect
from tests.servers.matrix import MATRIX
from tests.servers.process import Server

MEMORY = "memory"


def memory_clients() -> Connect:
    """Clients of one new server in this process."""
    server = MemoryServer()

    async def connect() -> Transport:
        return MemoryTransport(server)

    return connect


def server_clients(url: str) -> Connect:
    async def connect() -> Transport:
        transport = RespTransport(parse_address(url))
        await transport.connect(10.0)
        return transport

    return connect


async def open_broker(kind: str, namespace: str, connect: Connect) -> Broker:
    """A partition with its groups made and its agents and tools known."""
    admin = await connect()
    broker = Broker(kind, Keys(namespace, 0), connect, admin, transports=[admin])
    await broker.prepare()
    return broker


async def close_broker(broker: Broker) -> None:
    for transport in broker.transports:
        await transport.close()


@pytest.fixture(params=[MEMORY, *MATRIX])
async def broker(
    request: pytest.FixtureRequest, shared_server: Callable[[str], Server], namespace: str
) -> AsyncIterator[Broker]:
    """A fresh partition on each kind of broker in turn."""
    kind: str = request.param
    connect = memory_clients() if kind == MEMORY else server_clients(shared_server(kind).url)
    broker = await open_broker(kind, namespace, connect)
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
