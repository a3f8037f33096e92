"""A publisher's floods on a server with the settings of `deploy/`: its own connections end, and others continue."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from redis.exceptions import ConnectionError as LostConnection
from redis.exceptions import ResponseError

from tests.conftest import OwnServer
from tests.fleet import ROOT
from tests.integration.bus.acl.test_function_rights import SHOP, Broker
from tests.servers.matrix import MATRIX, only_in_matrix, repeat_on
from tests.servers.process import HOST

pytestmark = pytest.mark.timeout(300)

MEMORY = 256 * 1024 * 1024
CONFIGURATIONS = ("deploy/k8s/base/broker/redis.conf", "deploy/compose/redis.conf")
BOUNDS = ("maxmemory-clients", "proto-max-bulk-len")
BULK = 64 * 1024 * 1024


def bounds_in(configuration: str) -> dict[str, str]:
    lines = (line.partition(" ") for line in (ROOT / configuration).read_text().splitlines())
    return {name: value for name, _, value in lines if name in BOUNDS}


@pytest.fixture(params=repeat_on(*MATRIX))
def broker(request: pytest.FixtureRequest, own_server: OwnServer) -> Iterator[Broker]:
    options = [word for name, value in bounds_in(CONFIGURATIONS[0]).items() for word in (f"--{name}", value)]
    broker = Broker(own_server(request.param, options=("--maxmemory", str(MEMORY), *options)))
    yield broker
    broker.admin.close()


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_brokers_that_deploy_sets_up_bound_what_a_client_may_hold(configuration: str) -> None:
    assert bounds_in(configuration) == {"maxmemory-clients": "20%", "proto-max-bulk-len": "64mb"}


def flood(broker: Broker, requests: bytes, connections: int = 16) -> None:
    """Send as the publisher on many connections without reading, until the server has closed each of them."""
    with ExitStack() as stack:
        opened = []
        for _ in range(connections):
            connection = stack.enter_context(socket.create_connection((HOST, broker.port)))
            connection.sendall(f"AUTH {SHOP.name} {SHOP.name}\r\n".encode())
            assert connection.recv(5) == b"+OK\r\n"
            connection.settimeout(0.2)
            opened.append(connection)
        for _ in range(20):
            for connection in opened:
                with suppress(OSError):
                    connection.sendall(requests)
            held = broker.admin.execute_command("INFO", "memory").decode()
            [used] = [int(line.removeprefix("used_memory:")) for line in held.splitlines() if "used_memory:" in line]
            assert used < MEMORY
            with broker.as_user("publisher") as other:
                assert other.execute_command("XADD", "weft:tasks", "*", "type", "weft.task.submit")


def test_unread_replies_do_not_fill_the_brokers_memory(broker: Broker) -> None:
    flood(broker, b"COMMAND\r\n" * 50)


@only_in_matrix("another way to fill the memory of a connection")
def test_an_unfinished_command_does_not_fill_the_brokers_memory(broker: Broker) -> None:
    flood(broker, b"*1000000\r\n$4\r\nXADD\r\n" + b"$1000000\r\n%b\r\n" % (b"x" * 1_000_000) * 20)


def test_an_entry_over_the_limit_ends_its_connection(broker: Broker) -> None:
    with broker.as_user(SHOP.name) as shop:
        with pytest.raises((ResponseError, LostConnection)):
            shop.execute_command("XADD", "weft:tasks:shop", "*", "data", b"x" * (BULK + 1))
        assert shop.execute_command("PING")
    assert broker.admin.xlen("weft:tasks:shop") == 0
