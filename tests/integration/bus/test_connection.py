"""The connection to a server with failing networks and servers: nothing is lost, and effects happen once."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar, cast

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from redis import Redis
from redis.credentials import CredentialProvider

from runtime_core.bus import connection
from runtime_core.bus.connection import WRITTEN_AT_ONCE, Reply, RespTransport
from runtime_core.bus.connector import Connector, parse_address
from runtime_core.bus.deliveries import Delivery
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.consumer.consumer import Consumer
from runtime_core.consumer.heartbeat import Owner
from runtime_core.errors import BusUnavailable, ConfigurationError, Fenced, ServerError
from runtime_core.telemetry.metrics import Metrics
from tests.conftest import OwnServer
from tests.contracts.broker import Broker, answer, ask, complete, send, suspend
from tests.servers.cluster import CLUSTER_OPTIONS, SLOTS, join
from tests.servers.matrix import only_in_matrix, repeat_on
from tests.servers.process import HOST, Server, free_port
from tests.servers.proxy import Proxy
from tests.servers.sentinel import sentinel

SECONDS = 60.0
"""How long anything may take on a machine that is busy."""
HANDSHAKE_SECONDS = 4.0
"""For a connection that will be refused: it is tried so long, and the last refusal is what is said."""
LEASE_SECONDS = 0.6


@asynccontextmanager
async def client(url: str, silence_seconds: float = 10.0) -> AsyncIterator[RespTransport]:
    transport = RespTransport(parse_address(url), silence_seconds=silence_seconds)
    await transport.connect(SECONDS)
    try:
        yield transport
    finally:
        await transport.close()


@asynccontextmanager
async def partition(url: str, namespace: str, silence_seconds: float = 10.0) -> AsyncIterator[tuple[Broker, EventBus]]:
    """A partition with its agents and tools known, and one owner, all over one connection."""
    async with client(url, silence_seconds) as transport:

        async def connected() -> RespTransport:
            return transport

        broker = Broker("server", Keys(namespace, 0), connected, transport)
        await prepare(broker)
        yield broker, await broker.owner()


async def prepare(broker: Broker) -> None:
    await EventBus(broker.admin, broker.keys).make_groups(["agent", "tool"])
    for agent in ("writer", "editor"):
        await broker.call("HSET", broker.keys.agents, agent, "agent")
    await broker.call("HSET", broker.keys.tools, "search", "tool")


async def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


# -- the network -----------------------------------------------------------------------------------------------------


async def test_calls_in_flight_are_repeated_in_order(valkey: Server, namespace: str) -> None:
    """A call ends with its own reply, however often its connection breaks, and calls keep their order."""
    async with Proxy(valkey.url) as proxy, client(proxy.url) as transport:
        answered: list[int] = []

        async def push(number: int) -> None:
            await transport.call("RPUSH", f"{namespace}:list", number)
            answered.append(number)

        calls = []
        for number in range(300):
            calls.append(asyncio.ensure_future(push(number)))
            if number % 50 == 25:
                await until(lambda: proxy.open_connections > 0)
                proxy.cut()
            if number % 10 == 0:
                await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*calls)
        assert transport.reconnects >= 1
        assert answered == list(range(300))
        stored = [
            int(cast(bytes, item))
            for item in cast(list[Reply], await transport.call("LRANGE", f"{namespace}:list", 0, -1))
        ]
        assert list(dict.fromkeys(stored)) == list(range(300))


async def test_the_server_begins_before_a_tick_ends(valkey: Server, namespace: str) -> None:
    """Many calls of one tick leave in groups. This program returns to its event loop when the first group is done."""
    key, deadline = f"{namespace}:count", time.monotonic() + SECONDS
    with Redis.from_url(valkey.url) as other:
        async with client(valkey.url) as transport:
            calls = [transport.call("INCR", key) for _ in range(WRITTEN_AT_ONCE + 1)]
            while int(cast(bytes, other.get(key)) or 0) < WRITTEN_AT_ONCE:
                assert time.monotonic() < deadline
            assert await asyncio.gather(*calls) == list(range(1, WRITTEN_AT_ONCE + 2))


async def test_calls_wait_while_no_server_listens(valkey: Server, namespace: str) -> None:
    async with Proxy(valkey.url) as proxy, client(proxy.url) as transport:
        await proxy.down()
        calls = [asyncio.ensure_future(transport.call("RPUSH", f"{namespace}:list", number)) for number in range(20)]
        done, _ = await asyncio.wait(calls, timeout=0.1)
        assert not done
        await proxy.up()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*calls)
        assert await transport.call("LLEN", f"{namespace}:list") == 20


async def test_a_commit_whose_reply_is_lost_takes_effect_once(valkey: Server, namespace: str) -> None:
    """The repeated call finds its work done, which is not an error."""
    async with Proxy(valkey.url) as proxy, partition(proxy.url, namespace) as (broker, bus):
        await broker.submit(bus, "t", key="k")
        turn = await broker.take(bus)
        lost = proxy.lose_reply(b"commit_turn")
        assert await suspend(bus, turn, ask("1"), send("note", step="2")) is False
        assert lost.is_set()
        call = await broker.take(bus, "tool")
        lost = proxy.lose_reply(b"commit_call")
        assert await answer(bus, call) is False
        assert lost.is_set()
        turns = {turn.task: turn for turn in [await broker.take(bus), await broker.take(bus)]}
        assert sorted(turns) == ["note", "t"]
        lost = proxy.lose_reply(b"commit_turn")
        assert await complete(bus, turns["t"], state=b'{"n":1}') is False
        assert lost.is_set()
        assert await complete(bus, turns["note"])
        assert await broker.hash("inst:writer/k") == {"state": '{"n":1}'}
        assert [entry["t"] for entry in await broker.entries("record") if "e" in entry] == ["t", "note"]
        await broker.idle()


async def test_a_request_that_never_arrived_is_sent_again(valkey: Server, namespace: str) -> None:
    async with Proxy(valkey.url) as proxy, partition(proxy.url, namespace) as (broker, bus):
        await broker.submit(bus, "t")
        turn = await broker.take(bus)
        lost = proxy.lose_request(b"commit_turn")
        assert await complete(bus, turn)
        assert lost.is_set()
        await broker.idle()


async def test_a_submit_whose_reply_is_lost_starts_one_task(valkey: Server, namespace: str) -> None:
    """The id is chosen before the first attempt."""
    async with Proxy(valkey.url) as proxy, partition(proxy.url, namespace) as (broker, bus):
        lost = proxy.lose_reply(b"_submit")
        submitted = await broker.submit(bus, "t")
        assert lost.is_set()
        assert (submitted.task, submitted.status, submitted.started) == ("t", "accepted", False)
        assert len(await broker.entries("agent")) == 1


async def test_a_read_whose_reply_is_lost_leaves_what_can_be_found(valkey: Server, namespace: str) -> None:
    """The group says that this owner holds it; reading there returns the delivery."""
    async with Proxy(valkey.url) as proxy, partition(proxy.url, namespace) as (broker, bus):
        await broker.submit(bus, "t")
        lost = proxy.lose_reply(b"XREADGROUP")
        with pytest.raises(BusUnavailable, match="broke during a read"):
            await bus.read(["agent"], 1, 5)
        assert lost.is_set()
        await broker.nothing(bus)
        taken, malformed = await bus.reopen("agent", await bus.own_pending("agent"))
        assert malformed == []
        (turn,) = taken
        assert await complete(bus, turn)
        await broker.idle()


class Completes:
    """A handler that completes each turn, and logs it."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self.handled: list[str] = []

    async def handle(self, delivery: Delivery) -> None:
        await complete(self._bus, delivery, state=b'{"n":1}')
        self.handled.append(delivery.task)

    def forget(self) -> None:
        pass

    def drain(self) -> None:
        """A call is one step: it has begun."""

    def stop_task(self, task: str) -> None:
        pass


@asynccontextmanager
async def consuming(transport: RespTransport, keys: Keys) -> AsyncIterator[Completes]:
    bus = EventBus(transport, keys)
    handler = Completes(bus)
    metrics = Metrics(CollectorRegistry(), "test")
    consumer = Consumer(bus, ["agent"], handler, metrics, service="test", lease_seconds=LEASE_SECONDS)
    await consumer.start()
    running = asyncio.create_task(consumer.run())
    try:
        yield handler
    finally:
        await consumer.stop()
        await asyncio.wait([running], timeout=SECONDS)


async def test_a_consumer_takes_the_entries_of_a_lost_reply(valkey: Server, namespace: str) -> None:
    """While it lives nobody adopts it, so it has to look by itself."""
    async with partition(valkey.url, namespace) as (broker, bus), Proxy(valkey.url) as proxy:
        lost = proxy.lose_reply(b"XREADGROUP")
        await broker.submit(bus, "t")
        async with client(proxy.url) as transport, consuming(transport, broker.keys) as handler:
            await until(lambda: handler.handled == ["t"])
            assert lost.is_set()
        assert await broker.status("t") == "completed"
        await broker.idle()


async def test_a_consumer_works_through_a_network_that_breaks(valkey: Server, namespace: str) -> None:
    """Every submit is handled once, while all connections break again and again."""
    tasks = [f"t{number}" for number in range(60)]
    async with partition(valkey.url, namespace) as (broker, bus), Proxy(valkey.url) as proxy:
        async with client(proxy.url) as transport, consuming(transport, broker.keys) as handler:
            for at, task in enumerate(tasks):
                await broker.submit(bus, task)
                if at % 6 == 3:
                    proxy.cut()
                await asyncio.sleep(0.002)
            deadline = time.monotonic() + SECONDS
            while await broker.entries("agent"):
                assert time.monotonic() < deadline, await broker.entries("agent")
                await asyncio.sleep(0.02)
            assert set(handler.handled) <= set(tasks)
        ended = [entry["t"] for entry in await broker.entries("record") if "e" in entry]
        assert sorted(ended) == sorted(tasks)
        await broker.idle()


async def test_a_stop_ends_the_writing_of_a_dead_letter(valkey: Server, namespace: str) -> None:
    """The entry stays: whoever adopts it makes it a dead letter."""
    async with partition(valkey.url, namespace) as (broker, _), client(valkey.url) as transport:
        begun = asyncio.Event()

        class Silent(EventBus):
            async def dead_letter(self, *args: object) -> None:  # type: ignore[override]
                begun.set()
                await asyncio.Event().wait()

        silent = Silent(transport, broker.keys)
        metrics = Metrics(CollectorRegistry(), "test")
        consumer = Consumer(silent, ["agent"], Completes(silent), metrics, service="test", lease_seconds=LEASE_SECONDS)
        await consumer.start()
        running = asyncio.create_task(consumer.run())
        await broker.call("XADD", broker.keys.stream("agent"), "*", "nonsense", "x")
        async with asyncio.timeout(SECONDS):
            await begun.wait()
            await consumer.stop()
            await running
        assert [task for task in asyncio.all_tasks() if task.get_name() == "bury"] == []
        assert len(await broker.entries("agent")) == 1


async def test_a_silent_connection_is_dropped(valkey: Server, namespace: str) -> None:
    """A cable is pulled, and neither side notices. Calls continue over the next connection."""
    async with Proxy(valkey.url) as proxy, client(proxy.url, silence_seconds=1.0) as transport:
        proxy.freeze()
        call = asyncio.ensure_future(transport.call("SET", f"{namespace}:x", "1"))
        before = proxy.accepted
        await until(lambda: proxy.accepted > before)
        assert not call.done()
        proxy.heal()
        async with asyncio.timeout(SECONDS):
            assert await call == b"OK"
        assert transport.reconnects >= 1


async def test_a_read_on_a_silent_connection_ends(valkey: Server, namespace: str) -> None:
    """Otherwise its reader would wait forever for entries that the server has sent to a dead socket."""
    async with Proxy(valkey.url) as proxy, partition(proxy.url, namespace, silence_seconds=1.0) as (broker, bus):
        await broker.nothing(bus)
        await broker.submit(bus, "t")
        proxy.freeze()
        with pytest.raises(BusUnavailable):
            async with asyncio.timeout(SECONDS):
                await bus.read(["agent"], 1, 50)
        proxy.heal()
        deadline = time.monotonic() + SECONDS
        taken: list[Delivery] = []
        while not taken:
            assert time.monotonic() < deadline
            with suppress(BusUnavailable):  # silent for a second again, on a busy machine
                taken, _ = await bus.read(["agent"], 1, 20)
                if not taken:
                    taken, _ = await bus.reopen("agent", await bus.own_pending("agent"))
        assert taken[0].task == "t"


async def test_close_ends_waiting_calls(valkey: Server, namespace: str) -> None:
    async with Proxy(valkey.url) as proxy:
        transport = RespTransport(parse_address(proxy.url))
        await transport.connect(SECONDS)
        proxy.freeze()
        call = asyncio.ensure_future(transport.call("PING"))
        await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(BusUnavailable, match="closed"):
            await call
        with pytest.raises(BusUnavailable, match="closed"):
            await transport.call("PING")


# -- the server ------------------------------------------------------------------------------------------------------


async def test_a_server_that_is_killed_and_started_again(own_server: OwnServer, namespace: str) -> None:
    """Answered calls are there, others are repeated, and running work is committed afterwards."""
    server = own_server(append="always")
    async with partition(server.url, namespace) as (broker, bus):
        await broker.submit(bus, "before", key="k")
        turn = await broker.take(bus)
        server.kill()
        during = [asyncio.ensure_future(broker.submit(bus, f"during{number}", key="k")) for number in range(5)]
        commit = asyncio.ensure_future(complete(bus, turn, state=b'{"n":1}'))
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(SECONDS):
            assert [submitted.started for submitted in await asyncio.gather(*during)] == [True] * 5
            assert await commit
        for number in range(5):
            turn = await broker.take(bus)
            assert turn.task == f"during{number}"
            assert await complete(bus, turn)
        assert await broker.status("before") == "completed"
        await broker.idle()


async def test_a_pause_of_the_broker_declares_no_owner_dead(own_valkey: Server, namespace: str) -> None:
    """The broker's failure declares nobody dead."""
    async with (
        partition(own_valkey.url, namespace) as (broker, bus),
        client(own_valkey.url) as transport,
        consuming(transport, broker.keys) as handler,
    ):
        await broker.submit(bus, "before")
        await until(lambda: handler.handled == ["before"])
        owners = await broker.call("ZCARD", broker.keys.alive)
        own_valkey.pause()
        await asyncio.sleep(2 * LEASE_SECONDS)
        own_valkey.resume()
        await Owner(bus, "late", LEASE_SECONDS).enter()
        assert cast(int, await broker.call("ZCARD", broker.keys.alive)) == cast(int, owners) + 1
        await broker.submit(bus, "after")
        await until(lambda: handler.handled == ["before", "after"])


async def test_functions_that_were_flushed_are_loaded_again(own_valkey: Server, namespace: str) -> None:
    """Somebody else's deployment deletes them while work runs."""
    async with partition(own_valkey.url, namespace) as (broker, bus):
        await broker.submit(bus, "t")
        await broker.call("FUNCTION", "FLUSH")
        turn = await broker.take(bus)
        # Many calls at once meet the missing library, and each loads it or finds it loaded.
        await asyncio.gather(*(broker.submit(bus, f"u{number}") for number in range(20)))
        await broker.call("FUNCTION", "FLUSH")
        assert await complete(bus, turn)
        assert len(await broker.entries("agent")) == 20


async def test_work_continues_on_a_server_that_was_emptied(own_valkey: Server, namespace: str) -> None:
    """All data is lost, and the next task is not: owners return under new names, and groups are created again."""
    async with partition(own_valkey.url, namespace) as (broker, bus):
        await broker.submit(bus, "lost")
        turn = await broker.take(bus)
        await broker.call("FLUSHALL")
        await broker.call("FUNCTION", "FLUSH")
        with pytest.raises(Fenced):
            await complete(bus, turn)
        owner = Owner(bus, "handler", LEASE_SECONDS)
        with pytest.raises(Fenced):
            await owner.beat()
        await owner.enter()
        await broker.call("HSET", broker.keys.agents, "writer", "agent")
        await broker.submit(bus, "next")
        assert await bus.read(["agent"], 1, 5) == ([], [])
        assert await complete(bus, await broker.take(bus))
        assert await complete(bus, turn) is False
        assert await broker.status("next") == "completed"
        assert await broker.status("lost") == ""
        assert await broker.entries("agent") == []


async def test_a_consumer_survives_an_emptied_server(own_valkey: Server, namespace: str) -> None:
    async with (
        partition(own_valkey.url, namespace) as (broker, bus),
        client(own_valkey.url) as transport,
        consuming(transport, broker.keys) as handler,
    ):
        await broker.submit(bus, "before")
        await until(lambda: handler.handled == ["before"])
        await broker.call("FLUSHALL")
        await broker.call("HSET", broker.keys.agents, "writer", "agent")
        await broker.submit(bus, "after")
        await until(lambda: handler.handled == ["before", "after"])


# -- being let in ----------------------------------------------------------------------------------------------------


async def test_a_blocked_event_loop_does_not_count_as_server_silence(valkey: Server) -> None:
    """Otherwise a program that loads a model while its runtime starts would read that no server runs."""
    transport = RespTransport(parse_address(valkey.url))
    connecting = asyncio.create_task(transport.connect(1.0))
    await asyncio.sleep(0)
    time.sleep(1.5)  # the loop is blocked: this is what is tested
    await connecting
    assert await transport.call("PING") == b"PONG"
    await transport.close()


async def test_an_unreachable_server_is_reported_in_one_line() -> None:
    with pytest.raises(ConfigurationError) as error:
        await connect("redis://127.0.0.1:1/0", wait_seconds=0.1)
    text = str(error.value)
    assert text.startswith("WEFT_REDIS_URL: no answer from redis://127.0.0.1:1/0")
    assert "\n" not in text


async def test_a_password_is_needed(own_server: OwnServer, namespace: str) -> None:
    """The error names a wrong password as the cause, without showing it."""
    server = own_server(options=("--requirepass", "right"))
    for user in ("", ":wrong@"):
        with pytest.raises(ConfigurationError) as error:
            await connect(f"redis://{user}{HOST}:{server.port}", wait_seconds=HANDSHAKE_SECONDS)
        text = str(error.value)
        assert "WRONGPASS" in text or "NOAUTH" in text
        assert "\n" not in text
        assert "wrong@" not in text
    async with partition(f"redis://:right@{HOST}:{server.port}", namespace) as (broker, bus):
        await one_task(broker, bus)


RIGHTS = (
    "-@all", "+@read", "+@write", "+@connection", "-@dangerous",
    "+fcall", "+time", "+info", "+wait", "+function|load", "+function|list", "+function|delete",
)  # fmt: skip
"""What a user of Weft needs besides the keys of its namespace (and of the streams that `replyto` may name).

`+waitaof` comes on top for `WEFT_DURABILITY=fsync`, on servers that have it.
"""


@pytest.mark.parametrize("kind", repeat_on("valkey-9", "redis-7.0"))
async def test_a_user_needs_rights_to_its_namespace_only(own_server: OwnServer, namespace: str, kind: str) -> None:
    server = own_server(kind)
    async with client(server.url) as admin:
        keys = f"~{namespace}:*"
        await admin.call("ACL", "SETUSER", "weft", "on", ">secret", "resetchannels", keys, *RIGHTS)
        async with partition(f"redis://weft:secret@{HOST}:{server.port}", namespace) as (limited, bus):

            async def connected() -> RespTransport:
                return admin

            # The test looks at the keys as somebody who may see all of them.
            await one_task(Broker("server", limited.keys, connected, admin), bus)
            await open_namespace(limited.admin, namespace, 1)
            for forbidden in (["FLUSHALL"], ["KEYS", "*"], ["SET", "elsewhere", "1"], ["CONFIG", "GET", "*"]):
                with pytest.raises(ServerError, match="NOPERM"):
                    await limited.call(*forbidden)


async def test_a_tls_connection_checks_the_certificate(own_server: OwnServer, namespace: str, tmp_path: Path) -> None:
    """The certificate is checked, including its host name."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    certify(key, certificate, f"IP:{HOST}")
    port = free_port()
    own_server(
        "redis-7.0",
        options=(
            "--tls-port", str(port), "--tls-auth-clients", "no",
            "--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate),
        ),
    )  # fmt: skip
    url = f"rediss://{HOST}:{port}"
    async with partition(f"{url}?ssl_ca_certs={certificate}", namespace) as (broker, bus):
        await one_task(broker, bus)
    with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
        await connect(url, wait_seconds=HANDSHAKE_SECONDS)
    other = tmp_path / "other.pem"
    certify(tmp_path / "other-key.pem", other, f"IP:{HOST}")
    with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
        await connect(f"{url}?ssl_ca_certs={other}", wait_seconds=HANDSHAKE_SECONDS)
    with pytest.raises(ConfigurationError, match="mismatch"):
        await connect(f"rediss://localhost:{port}?ssl_ca_certs={certificate}", wait_seconds=HANDSHAKE_SECONDS)
    async with client(f"{url}?ssl_cert_reqs=none") as transport:
        assert await transport.call("PING") == b"PONG"


def certify(key: Path, certificate: Path, name: str) -> None:
    """Make a certificate that signs itself."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=weft",
         "-addext", f"subjectAltName={name}", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip


async def test_a_client_follows_a_failover_by_sentinel(own_server: OwnServer, namespace: str, tmp_path: Path) -> None:
    """The client asks the Sentinels again at each connect, even if one accepts and never answers."""
    # Without the delay in which a master waits for more replicas to ask for its data.
    master = own_server(append="always", options=("--repl-diskless-sync-delay", "0"))
    replica = own_server(append="always", options=("--replicaof", HOST, str(master.port)))
    with sentinel(tmp_path / "sentinel", master) as port:
        async with client(f"redis://{HOST}:{port}") as watcher, client(replica.url) as follower:
            await eventually(watcher, b"name", "SENTINEL", "REPLICAS", "main")
            await eventually(follower, b"master_link_status:up", "INFO", "replication")
            async with Proxy(f"redis://{HOST}:{port}") as silent:
                silent.freeze()
                _, _, quiet = silent.url.rpartition("//")
                url = f"redis+sentinel://{quiet},{HOST}:{port}/main/0"
                async with partition(url, namespace) as (broker, bus):
                    await broker.submit(bus, "before")
                    # On a busy machine the Sentinel may replace the master already now.
                    assert await broker.call("WAIT", 1, 5000) == 1
                    turn = await broker.take(bus)
                    assert await broker.call("WAIT", 1, 5000) == 1
                    master.kill()
                    async with asyncio.timeout(SECONDS):
                        submitted = await broker.submit(bus, "after")
                        assert submitted.started
                        assert await complete(bus, turn)
                        # The connection for reads is made again at its next use.
                        while True:
                            try:
                                taken = await bus.read(["agent"], 1, 5)
                            except BusUnavailable:
                                await asyncio.sleep(0.02)
                                continue
                            break
                    assert [turn.task for turn in taken[0]] == ["after"]
                    assert await complete(bus, taken[0][0])
                    await broker.idle()
                    role = cast(list[Reply], await follower.call("ROLE"))
                    assert role[0] == b"master"


async def test_sentinels_may_have_their_own_password(own_server: OwnServer, namespace: str, tmp_path: Path) -> None:
    """It is the Sentinels' own password: the broker's may be another."""
    master = own_server(options=("--requirepass", "right"))
    folder = tmp_path / "sentinel"
    with sentinel(folder, master, "requirepass theirs", "sentinel auth-pass main right") as port:
        async with client(f"redis://:theirs@{HOST}:{port}") as watcher:
            await eventually(watcher, HOST.encode(), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        url = f"redis+sentinel://:right@{HOST}:{port}"
        async with partition(f"{url}/main?sentinel_password=theirs", namespace) as (broker, bus):
            await one_task(broker, bus)
        for given in ("", "?sentinel_password=wrong"):
            with pytest.raises(ConfigurationError, match="correct sentinel_username and sentinel_password") as refused:
                await connect(f"{url}/main{given}", wait_seconds=HANDSHAKE_SECONDS)
            assert "right" not in str(refused.value)
        with pytest.raises(ConfigurationError, match="know no reachable master named 'other'"):
            await connect(f"{url}/other?sentinel_password=theirs", wait_seconds=HANDSHAKE_SECONDS)


@only_in_matrix("TLS and a password at once")
async def test_sentinels_may_require_tls_and_a_password(own_server: OwnServer, namespace: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    certify(key, certificate, f"IP:{HOST}")
    port = free_port()
    tls = (f"tls-cert-file {certificate}", f"tls-key-file {key}", f"tls-ca-cert-file {certificate}")
    options = [f"--{word}" if at == 0 else word for line in tls for at, word in enumerate(line.split())]
    server = own_server(
        "redis-7.0", options=("--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "right", *options)
    )
    settings = (
        "port 0", "tls-port {own}", "tls-auth-clients no", "tls-replication yes", *tls,
        "requirepass theirs", "sentinel auth-pass main right",
    )  # fmt: skip
    with sentinel(tmp_path / "sentinel", server, *settings, port=port, command=server.command) as own:
        trusting = f"ssl_ca_certs={certificate}"
        async with client(f"rediss://:theirs@{HOST}:{own}?{trusting}") as watcher:
            await eventually(watcher, HOST.encode(), "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        url = f"rediss+sentinel://:right@{HOST}:{own}/main?sentinel_password=theirs"
        async with partition(f"{url}&{trusting}", namespace) as (broker, bus):
            await one_task(broker, bus)
        with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED"):
            await connect(url, wait_seconds=HANDSHAKE_SECONDS)


class Rotating(CredentialProvider):
    """A password that changes with each connection."""

    passwords: ClassVar[list[str]] = []
    failures: ClassVar[int] = 0

    async def get_credentials_async(self) -> tuple[str, str]:
        if not Rotating.passwords:
            Rotating.failures += 1
            raise LookupError("the vault is sealed")
        return "weft", Rotating.passwords.pop(0)


async def test_each_connection_asks_the_credential_provider(own_server: OwnServer, namespace: str) -> None:
    server = own_server()
    async with client(server.url) as admin:
        await admin.call("ACL", "SETUSER", "weft", "on", ">first", "~*", "+@all")
        Rotating.passwords = ["first", "second"]
        async with client(f"{server.url}?credential_provider={__name__}:Rotating") as transport:
            assert await transport.call("ACL", "WHOAMI") == b"weft"
            await admin.call("ACL", "SETUSER", "weft", "resetpass", ">second")
            await admin.call("CLIENT", "KILL", "USER", "weft")
            async with asyncio.timeout(SECONDS):
                assert await transport.call("ACL", "WHOAMI") == b"weft"
        assert Rotating.passwords == []


async def test_a_connection_comes_back_after_its_credential_provider_has_failed(
    own_server: OwnServer, namespace: str
) -> None:
    """As after any error that redis-py does not announce: an error that ended the reconnects would hang all calls."""
    server = own_server()
    async with client(server.url) as admin:
        await admin.call("ACL", "SETUSER", "weft", "on", ">word", "~*", "+@all")
        Rotating.passwords = ["word"]
        async with client(f"{server.url}?credential_provider={__name__}:Rotating") as transport:
            assert await transport.call("ACL", "WHOAMI") == b"weft"
            Rotating.failures = 0
            await admin.call("CLIENT", "KILL", "USER", "weft")
            asked = asyncio.ensure_future(transport.call("ACL", "WHOAMI"))
            async with asyncio.timeout(SECONDS):
                while not Rotating.failures:
                    await asyncio.sleep(0.01)
            with pytest.raises(BusUnavailable, match="LookupError: the vault is sealed"):
                await transport.blocking("XREAD", "BLOCK", 10, "STREAMS", namespace, "$")
            Rotating.passwords = ["word"]
            async with asyncio.timeout(SECONDS):
                assert await asked == b"weft"


class Resetting(CredentialProvider):
    """Has the server reset the connection that was just made, before redis-py writes to it."""

    listening: ClassVar[socket.socket]

    async def get_credentials_async(self) -> tuple[str, str]:
        accepted, _ = self.listening.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that close() resets it
        accepted.close()
        for _ in range(20):
            await asyncio.sleep(0)  # the event loop learns of it
        return "weft", "word"


def test_a_server_that_dies_during_a_connect_is_a_lost_connection(caplog: pytest.LogCaptureFixture) -> None:
    """The services run on uvloop, which raises RuntimeError for a write to a connection that the server has reset."""
    with socket.create_server((HOST, 0)) as Resetting.listening:
        url = f"redis://{HOST}:{Resetting.listening.getsockname()[1]}?credential_provider={__name__}:Resetting"
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, pytest.raises(ConnectionResetError) as lost:
            runner.run(Connector(parse_address(url)).open())
    assert isinstance(lost.value.__cause__, RuntimeError)
    assert caplog.text == ""


async def test_a_cluster_works_after_losing_the_server_in_the_url(own_server: OwnServer, namespace: str) -> None:
    """Its servers are learned while it answers. When it is gone, another one knows where its keys are now."""
    options = ("--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no", *CLUSTER_OPTIONS)
    servers = [own_server(append=None, options=options) for _ in range(3)]
    await join(servers)
    replica = own_server(append=None, options=options)
    seed, other = servers[0].url, servers[1].url
    async with client(seed) as master, client(replica.url) as copy, client(other) as witness:
        name = cast(bytes, await master.call("CLUSTER", "MYID")).decode()
        await copy.call("CLUSTER", "MEET", HOST, servers[0].port)
        await eventually(copy, name.encode(), "CLUSTER", "NODES")
        await copy.call("CLUSTER", "REPLICATE", name)
        await eventually(copy, b"master_link_status:up", "INFO", "replication")
        await eventually(witness, str(replica.port).encode(), "CLUSTER", "SLOTS")
        keys = [f"{namespace}:{number}" for number in range(64)]
        slots = {key: cast(int, await witness.call("CLUSTER", "KEYSLOT", key)) for key in keys}
    here = next(key for key in keys if slots[key] < SLOTS // 3)
    there = next(key for key in keys if SLOTS // 3 < slots[key] < 2 * SLOTS // 3)
    async with client(seed) as stays, client(seed) as moves:
        assert await stays.call("SET", here, "1") == b"OK"
        assert await moves.call("SET", there, "1") == b"OK"
        servers[0].kill()
        async with client(other) as admin:
            await admin.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        async with asyncio.timeout(SECONDS):
            assert await moves.call("SET", there, "2") == b"OK"
            assert await stays.call("SET", here, "2") == b"OK", "its replica is the master now"


async def eventually(transport: RespTransport, expected: bytes, *command: str) -> None:
    deadline = time.monotonic() + SECONDS
    while expected not in repr(reply := await transport.call(*command)).encode():
        assert time.monotonic() < deadline, reply
        await asyncio.sleep(0.02)


async def one_task(broker: Broker, bus: EventBus) -> None:
    """Everything that a task needs from the broker, from the submit to the answer, with a retry and periodic work."""
    await open_namespace(broker.admin, broker.keys.namespace, 1)
    await broker.submit(bus, "t", key="k")
    assert await suspend(bus, await broker.take(bus), ask("1"))
    call = await broker.take(bus, "tool")
    assert await bus.retry(call, 0, b"")
    await broker.pass_time(10)
    await bus.promote()
    assert await answer(bus, await broker.take(bus, "tool"))
    assert await complete(bus, await broker.take(bus))
    assert await broker.status("t") == "completed"
    await bus.beat(60_000, False, "")
    await bus.adopt("agent", 10, False)
    assert await bus.own_pending("agent") == {}
    await bus.trim_record()
    await broker.idle()


async def test_an_abandoned_connect_leaves_nothing_behind() -> None:
    """Nobody was given the transport, so nobody could close it."""
    accepted = asyncio.Event()
    connections: list[asyncio.StreamWriter] = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Never answer, as a server that hangs."""
        connections.append(writer)
        accepted.set()

    async with await asyncio.start_server(accept, HOST) as server:
        port = server.sockets[0].getsockname()[1]
        transport = RespTransport(parse_address(f"redis://{HOST}:{port}"))
        connecting = asyncio.create_task(transport.connect(SECONDS))
        await asyncio.wait_for(accepted.wait(), SECONDS)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("connection")] == []
        for writer in connections:
            writer.close()


async def test_a_read_that_is_cancelled_while_it_connects_ends(valkey: Server) -> None:
    """At each step of the event loop until the read waits: none of them may lose the cancellation."""
    for steps in range(40):
        transport = RespTransport(parse_address(valkey.url))
        reading = asyncio.create_task(transport.blocking("XREAD", "BLOCK", 60_000, "STREAMS", "nothing", "$"))
        for _ in range(steps):
            await asyncio.sleep(0)
        reading.cancel()
        done, _ = await asyncio.wait((reading,), timeout=SECONDS)
        assert done, f"cancelled after {steps} steps"
        assert reading.cancelled()
        await transport.close()


@pytest.mark.parametrize("refuses", ["READONLY", "NOREPLICAS"])
async def test_a_server_that_refuses_calls_is_not_flooded_with_connections(
    own_valkey: Server, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts connections, and replies to a PING: a replica, or a master whose replicas are away."""
    monkeypatch.setattr(connection, "BACKOFF_FIRST_SECONDS", 0.3)
    async with client(own_valkey.url) as admin, client(own_valkey.url) as transport:
        if refuses == "READONLY":
            await admin.call("REPLICAOF", HOST, "1")
        else:
            await admin.call("CONFIG", "SET", "min-replicas-to-write", "1")
        began = asyncio.get_running_loop().time()
        answered = transport.call("SET", "key", "value")
        async with asyncio.timeout(SECONDS):
            while transport.reconnects < 3:
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - began > 3 * 0.3
            await admin.call("REPLICAOF", "NO", "ONE")
            await admin.call("CONFIG", "SET", "min-replicas-to-write", "0")
            assert await answered == b"OK"


async def test_a_call_to_an_unserved_slot_does_not_hold_up_the_calls_after_it(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has executed them: they get their replies before the next connection, which takes long here."""
    monkeypatch.setattr(connection, "BACKOFF_FIRST_SECONDS", 3600.0)
    monkeypatch.setattr(connection, "BACKOFF_LAST_SECONDS", 3600.0)
    server = own_server(options=("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no"))
    async with client(server.url) as admin, client(server.url) as transport, asyncio.timeout(SECONDS):
        away = cast(int, await admin.call("CLUSTER", "KEYSLOT", "away"))
        await admin.call("CLUSTER", "ADDSLOTSRANGE", 0, away - 1, away + 1, SLOTS - 1)
        while b"cluster_state:ok" not in cast(bytes, await admin.call("CLUSTER", "INFO")):
            await asyncio.sleep(0.01)
        unserved = [transport.call("INCR", "away") for _ in range(2)]
        assert await transport.call("INCR", "here") == 1
        assert not any(call.done() for call in unserved)
        assert await admin.call("GET", "here") == b"1"
