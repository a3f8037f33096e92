"""An accepted submit is as durable as `WEFT_DURABILITY` says, on real servers that are cut off, paused and killed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.partition import DURABLE_SECONDS, WAIT_SLICE_MS
from runtime_core.client.client import Client
from runtime_core.errors import ConfigurationError, NotDurable, Rejected
from tests.conftest import OwnServer
from tests.contracts.broker import Broker, complete, question, suspend
from tests.contracts.conftest import close_broker, open_broker, server_clients
from tests.servers.matrix import MATRIX, VALKEY_9, repeat_on
from tests.servers.process import Server
from tests.servers.proxy import Proxy

WITH_WAITAOF = repeat_on(*(kind for kind in MATRIX if kind != "redis-7.0"))


@asynccontextmanager
async def durable(url: str, broker: Broker, durability: str) -> AsyncIterator[EventBus]:
    """One client of the partition, over a separate connection."""
    transport = RespTransport(parse_address(url))
    await transport.connect(60)
    try:
        yield EventBus(transport, broker.keys, durability=durability)
    finally:
        await transport.close()


@asynccontextmanager
async def partition(server: Server, namespace: str) -> AsyncIterator[Broker]:
    broker = await open_broker(VALKEY_9, namespace, server_clients(server.url))
    try:
        yield broker
    finally:
        await close_broker(broker)


@pytest.fixture
async def replicated(own_server: OwnServer, namespace: str) -> AsyncIterator[tuple[Server, Server, Broker]]:
    """A master, a replica that is in sync with it, and a partition on the master."""
    master = own_server()
    replica = own_server(options=("--replicaof", f"127.0.0.1 {master.port}"))
    async with partition(master, namespace) as broker:
        async with asyncio.timeout(60):
            while b"state=online" not in await info(broker):
                await asyncio.sleep(0.02)
        yield master, replica, broker


async def info(broker: Broker) -> bytes:
    reply = await broker.call("INFO", "replication")
    assert isinstance(reply, bytes)
    return reply


@pytest.mark.parametrize("kind", WITH_WAITAOF)
async def test_an_fsynced_submit_outlives_a_kill_of_the_server(
    own_server: OwnServer, namespace: str, kind: str
) -> None:
    server = own_server(kind, append="always")
    async with partition(server, namespace) as broker:
        async with durable(server.url, broker, "fsync") as bus:
            await bus.check_durability()
            for number in range(50):
                assert (await broker.submit(bus, f"t{number}")).started
            server.kill()
        server.start()
        for number in range(50):
            assert await broker.status(f"t{number}") == "accepted"


@pytest.mark.parametrize(
    ("append", "problem"),
    [
        ("everysec", r"^WEFT_DURABILITY=fsync: the server's appendfsync is everysec; set it to always"),
        ("no", r"^WEFT_DURABILITY=fsync: the server's appendfsync is no; set it to always"),
        (None, r"^WEFT_DURABILITY=fsync: the server does not support it .*append-only file"),
    ],
)
async def test_fsync_is_refused_where_the_server_does_not_sync_each_write(
    own_server: OwnServer, namespace: str, append: str | None, problem: str
) -> None:
    """Valkey 8.1 and 9 answer WAITAOF before fdatasync under everysec."""
    server = own_server(append=append)  # type: ignore[arg-type]
    async with partition(server, namespace) as broker, durable(server.url, broker, "fsync") as bus:
        with pytest.raises(ConfigurationError, match=problem):
            await bus.check_durability()
        with pytest.raises(NotDurable, match=r"appendfsync|append-only|appendonly|not confirmed"):
            await broker.submit(bus, "t")


async def test_fsync_is_refused_where_the_setting_cannot_be_read(own_server: OwnServer, namespace: str) -> None:
    server = own_server(append="always")
    async with partition(server, namespace) as broker, durable(server.url, broker, "fsync") as bus:
        await broker.call("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all", "-config")
        await bus.transport.call("AUTH", "shop", "secret")
        with pytest.raises(ConfigurationError, match=r"grant the broker's user \+config\|get"):
            await bus.check_durability()
        with pytest.raises(NotDurable, match="cannot read"):
            await broker.submit(bus, "t")
        await broker.call("ACL", "SETUSER", "shop", "+config|get")
        await bus.check_durability()


async def test_redis_waits_whatever_the_setting_is(own_server: OwnServer, namespace: str) -> None:
    """A user without the right to CONFIG is enough there."""
    server = own_server("redis-8.0", append="everysec")
    async with partition(server, namespace) as broker, durable(server.url, broker, "fsync") as bus:
        await broker.call("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all", "-config")
        await bus.transport.call("AUTH", "shop", "secret")
        await bus.check_durability()
        await broker.submit(bus, "first")
        began = time.monotonic()
        for number in range(3):
            await broker.submit(bus, f"t{number}")
        assert time.monotonic() - began > 1.0, "one fsync a second"


async def test_a_client_refuses_a_durability_that_the_server_cannot_provide(
    own_server: OwnServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_server(append="everysec")
    async with partition(server, namespace):
        monkeypatch.setenv("WEFT_DURABILITY", "fsync")
        with pytest.raises(ConfigurationError, match="appendfsync is everysec"):
            await Client.connect(server.url, namespace=namespace).open()
        monkeypatch.setenv("WEFT_DURABILITY", "fsnyc")
        with pytest.raises(ConfigurationError, match="WEFT_DURABILITY"):
            await Client.connect(server.url, namespace=namespace).open()


@pytest.mark.parametrize(("durability", "wait"), [("quorum", b"WAIT"), ("fsync", b"WAITAOF")])
async def test_a_wait_repeated_on_a_new_connection_confirms_nothing(
    own_server: OwnServer, namespace: str, durability: str, wait: bytes
) -> None:
    """The server answers at once, since that connection has written nothing."""
    server = own_server(append="always")
    async with (
        partition(server, namespace) as broker,
        Proxy(server.url) as proxy,
        durable(proxy.url, broker, durability) as bus,
    ):
        cut = proxy.lose_request(b"\r\n" + wait + b"\r\n")
        with pytest.raises(NotDurable) as refused:
            await broker.submit(bus, "t")
        assert cut.is_set()
        assert (refused.value.task_id, refused.value.field) == ("t", "durability")
        assert await broker.status("t") == "accepted", "it runs, and the client does not count on it"


async def test_a_lagging_replica_delays_every_repeat(replicated: tuple[Server, Server, Broker]) -> None:
    master, replica, broker = replicated
    async with durable(master.url, broker, "quorum") as bus:
        assert (await broker.submit(bus, "before")).started
        replica.pause()
        for _ in range(2):
            with pytest.raises(NotDurable, match="not confirmed as quorum"):
                await broker.submit(bus, "t")
    async with durable(master.url, broker, "quorum") as another:
        with pytest.raises(NotDurable, match="not confirmed as quorum"):
            await broker.submit(another, "t")
        replica.resume()
        assert not (await broker.submit(another, "t")).started
    async with durable(replica.url, broker, "fast") as there:
        found = await there.transport.call("HGET", broker.keys.task("t"), "status")
        assert found == b"accepted", "what was answered is on the replica"


async def test_a_cut_during_the_wait_for_a_replica(replicated: tuple[Server, Server, Broker]) -> None:
    master, replica, broker = replicated
    async with Proxy(master.url) as proxy, durable(proxy.url, broker, "quorum") as bus:
        assert (await broker.submit(bus, "before")).started
        replica.pause()
        submitting = asyncio.create_task(broker.submit(bus, "t"))
        async with asyncio.timeout(60):
            while b"blocked_clients:0" in await blocked(broker):
                await asyncio.sleep(0.005)
        proxy.cut()
        with pytest.raises(NotDurable):
            await submitting
        replica.resume()


async def blocked(broker: Broker) -> bytes:
    reply = await broker.call("INFO", "clients")
    assert isinstance(reply, bytes)
    return reply


async def test_commands_that_wait_at_once_share_their_waits(replicated: tuple[Server, Server, Broker]) -> None:
    """A wait holds up its whole connection, so 40 of them in a row would hold up the heartbeats behind them."""
    master, replica, broker = replicated
    async with durable(master.url, broker, "quorum") as bus:
        assert (await broker.submit(bus, "before")).started
        replica.pause()
        before = await waits(broker)
        refused = await asyncio.gather(*(broker.submit(bus, f"t{n}") for n in range(40)), return_exceptions=True)
        assert [type(each) for each in refused] == [NotDurable] * 40
        slices = DURABLE_SECONDS * 1000 / WAIT_SLICE_MS
        assert await waits(broker) - before <= 2 * slices
        submitting = asyncio.gather(*(broker.submit(bus, f"t{n}") for n in range(40)))
        replica.resume()
        assert not any(submitted.started for submitted in await submitting)
    async with durable(replica.url, broker, "fast") as there:
        for number in range(40):
            assert await there.transport.call("EXISTS", broker.keys.task(f"t{number}")) == 1


async def waits(broker: Broker) -> int:
    """How many WAITs the server has been sent."""
    reply = await broker.call("INFO", "commandstats")
    assert isinstance(reply, bytes)
    found = re.search(rb"cmdstat_wait:calls=(\d+)", reply)
    return int(found[1]) if found else 0


async def test_every_accepted_answer_waited_for_durability(replicated: tuple[Server, Server, Broker]) -> None:
    """Cancels, answers and messages wait too, and so does a call that finds its work done."""
    master, replica, broker = replicated
    owner = await broker.owner()
    for task in ("asks", "runs"):
        await broker.submit(owner, task)
    assert await suspend(owner, await broker.take(owner), question("1"))
    async with durable(master.url, broker, "quorum") as bus:
        replica.pause()
        for _ in range(2):
            with pytest.raises(NotDurable):
                await bus.signal("asks", "r:1", b"1", "shop\ne1")
        for _ in range(2):
            with pytest.raises(NotDurable):
                await bus.cancel("runs", "no more")
        with pytest.raises(NotDurable):
            await bus.publish("m", "news", "", b"1")
        replica.resume()
        assert await bus.signal("asks", "r:1", b"1", "shop\ne1") == ["ok"]
        assert await bus.cancel("runs", "no more") == ["ended", "cancelled"]


async def test_a_client_repeats_calls_left_open_by_a_broken_connection(
    own_server: OwnServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_server(append="always")
    monkeypatch.setenv("WEFT_DURABILITY", "fsync")
    async with (
        partition(server, namespace) as broker,
        Proxy(server.url) as proxy,
        Client.connect(proxy.url, namespace=namespace) as client,
    ):
        cut = proxy.lose_request(b"\r\nWAITAOF\r\n")
        handle = await client.submit("writer", "hi")
        assert cut.is_set()
        assert await broker.status(handle.task_id) == "accepted"
        cut = proxy.lose_request(b"\r\nWAITAOF\r\n")
        assert await handle.cancel() == "cancelled"
        assert cut.is_set()


async def test_an_app_that_waits_for_no_replica_is_reported(own_server: OwnServer, namespace: str) -> None:
    server = own_server()
    async with partition(server, namespace) as broker, durable(server.url, broker, "quorum") as bus:
        with pytest.raises(Rejected, match=r"not confirmed as quorum .*: check that the broker's replicas") as refused:
            await broker.submit(bus, "t")
        assert refused.value.retry_after_seconds == 1.0
        owner = await broker.owner()
        assert await complete(owner, await broker.take(owner)), "the task runs"


async def test_a_quorum_submit_outlives_its_master(replicated: tuple[Server, Server, Broker]) -> None:
    master, replica, broker = replicated
    async with durable(master.url, broker, "quorum") as bus:
        for number in range(50):
            assert (await broker.submit(bus, f"t{number}")).started
        master.kill()
    async with durable(replica.url, broker, "fast") as promoted:
        await promoted.transport.call("REPLICAOF", "NO", "ONE")
        for number in range(50):
            found = await promoted.transport.call("HGET", broker.keys.task(f"t{number}"), "status")
            assert found == b"accepted"
