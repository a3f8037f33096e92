"""What redis-py is given for the broker in a URL, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio.cluster
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.credentials import CredentialProvider

from runtime_core.bus.connector import Connector, parse_address
from runtime_core.errors import ConfigurationError
from runtime_core.settings import without_password


class Vault(CredentialProvider):
    """Credentials from elsewhere."""

    def get_credentials(self) -> tuple[str, str]:
        return "weft", "from the vault"


VAULT = Vault()
NOT_A_PROVIDER = dict


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
async def test_a_server_address_has_user_password_and_database(scheme: str) -> None:
    address = parse_address(f"{scheme}://shop:se%2Fcret@host:7000/3")
    connection = address.pool().make_connection()
    assert type(connection) is Connection
    assert (connection.host, connection.port, connection.db) == ("host", 7000, 3)
    assert (connection.username, connection.password) == ("shop", "se/cret")
    assert connection.protocol == 2
    assert str(address) == "redis://host:7000/3"


async def test_parts_that_an_address_leaves_out_get_defaults() -> None:
    connection = parse_address("redis://").pool().make_connection()
    assert (connection.host, connection.port, connection.db, connection.password) == ("localhost", 6379, 0, None)


async def test_an_ipv6_address_may_be_in_brackets() -> None:
    connection = parse_address("redis://[::1]:7000").pool().make_connection()
    assert (connection.host, connection.port) == ("::1", 7000)


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
async def test_tls_certificates_are_checked_by_default(scheme: str) -> None:
    connection = parse_address(f"{scheme}://host").pool().make_connection()
    assert type(connection) is SSLConnection
    assert connection.check_hostname
    assert connection.cert_reqs.name == "CERT_REQUIRED"
    unchecked = parse_address(f"{scheme}://host?ssl_cert_reqs=none").pool().make_connection()
    assert unchecked.cert_reqs.name == "CERT_NONE"


async def test_a_private_certificate_is_trusted() -> None:
    url = "rediss://host?ssl_ca_certs=/ca.pem&ssl_certfile=/own.pem&ssl_keyfile=/own.key"
    connection = parse_address(url).pool().make_connection()
    assert (connection.ca_certs, connection.certfile, connection.keyfile) == ("/ca.pem", "/own.pem", "/own.key")


async def test_a_unix_socket_may_have_any_path() -> None:
    address = parse_address("unix:///run/a%20folder/redis@1.sock?db=2")
    connection = address.pool().make_connection()
    assert type(connection) is UnixDomainSocketConnection
    assert (connection.path, connection.db) == ("/run/a folder/redis@1.sock", 2)
    assert address.host == ""


async def test_sentinels_get_no_password_of_the_broker() -> None:
    address = parse_address("redis+sentinel://weft:secret@a,b:26380/Main/1")
    pool = address.pool()
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "Main"
    asked = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("a", 26379), ("b", 26380)]
    assert {each["password"] for each in asked} == {None}, "the broker's password is not for Sentinels"
    connection = pool.make_connection()
    assert (connection.username, connection.password, connection.db) == ("weft", "secret", 1)
    assert str(address) == "sentinel master 'Main'"


async def test_sentinels_may_have_tls_and_their_own_password() -> None:
    url = "rediss+sentinel://:secret@a:26379/main?sentinel_username=asks&sentinel_password=other&ssl_ca_certs=/ca.pem"
    pool = parse_address(url).pool()
    assert isinstance(pool, SentinelConnectionPool)
    [sentinel] = pool.sentinel_manager.sentinels
    asked = sentinel.connection_pool.make_connection()
    assert type(asked) is SSLConnection
    assert (asked.username, asked.password, asked.ca_certs) == ("asks", "other", "/ca.pem")
    connection = pool.make_connection()
    assert type(connection) is SentinelManagedSSLConnection
    assert (connection.password, connection.ca_certs) == ("secret", "/ca.pem")


@pytest.mark.parametrize(("scheme", "given", "asked"), [("rediss", "no", Connection), ("redis", "yes", SSLConnection)])
async def test_tls_to_sentinels_may_differ(scheme: str, given: str, asked: type) -> None:
    url = f"{scheme}+sentinel://a:26379/main?sentinel_ssl={given}&ssl_ca_certs=/ca.pem"
    pool = parse_address(url).pool()
    assert isinstance(pool, SentinelConnectionPool)
    [sentinel] = pool.sentinel_manager.sentinels
    assert type(sentinel.connection_pool.make_connection()) is asked
    assert isinstance(pool.make_connection(), SSLConnection) is (asked is Connection)


@pytest.mark.parametrize("name", ["VAULT", "Vault"])
async def test_a_credential_provider_gives_user_and_password(name: str) -> None:
    address = parse_address(f"redis://host?credential_provider={__name__}:{name}")
    provider = address.pool().make_connection().credential_provider
    assert isinstance(provider, CredentialProvider)
    assert provider.get_credentials() == ("weft", "from the vault")


@pytest.mark.parametrize(
    ("rest", "told"),
    [
        ("host/0?credential_provider=no_such_module:it", "write it as package.module:name"),
        (f"host/0?credential_provider={__name__}:absent", "write it as package.module:name"),
        (
            f"host/0?credential_provider={__name__}:NOT_A_PROVIDER",
            "neither is a redis.CredentialProvider nor returns one",
        ),
        (f"u:s3cr@host?credential_provider={__name__}:VAULT", "not both"),
        ("host?socket_timeout=1", "'socket_timeout' is not an option"),
        ("host?protocol=3", "'protocol' is not an option"),
        ("host?sentinel_password=s3cr", "are for Sentinels"),
        ("host?ssl_ca_certs=/ca.pem", "write rediss://"),
        ("host?db=one", "Invalid value for 'db'"),
        ("u:s3cr@host/1/2", "not a number"),
        ("u:1#s3cr@host", "write / as %2F"),
        ("u:1?s3cr@host", "write / as %2F"),
        ("u:1/s3cr@host", "write / as %2F"),
    ],
)
def test_an_invalid_address_is_refused_without_showing_its_password(rest: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^WEFT_REDIS_URL: ") as refused:
        parse_address(f"redis://{rest}")
    assert told in str(refused.value)
    assert "s3cr" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("rediss://host?ssl_ca_certs=/no/such/file", "name a file with the certificates"),
        ("rediss://host?ssl_cert_reqs=no", "Invalid SSL Certificate Requirements Flag"),
    ],
)
async def test_an_unusable_address_is_refused_before_connecting(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        parse_address(url).check()


def test_no_password_is_shown() -> None:
    url = "rediss+sentinel://weft:s3cr@a/main?sentinel_password=s3cr&db=1&ssl_password=s3cr"
    assert without_password(url) == "rediss+sentinel://weft:***@a/main?sentinel_password=***&db=1&ssl_password=***"


async def test_a_second_cancel_leaves_no_connection_to_the_cluster_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    asked, closing, may_close, all_closed = (asyncio.Event() for _ in range(4))

    class Nodes:
        def __init__(self, *args: object, **options: object) -> None:
            pass

        async def initialize(self) -> None:
            asked.set()
            await asyncio.Event().wait()

        async def aclose(self, attr: str = "nodes_cache") -> None:
            closing.set()
            await may_close.wait()
            closed.append(attr)
            if len(closed) == 2:
                all_closed.set()

    monkeypatch.setattr(redis.asyncio.cluster, "NodesManager", Nodes)
    look_up = asyncio.ensure_future(Connector(parse_address("redis://127.0.0.1:1"))._look_up())
    await asked.wait()
    look_up.cancel()
    await closing.wait()
    look_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await look_up
    may_close.set()
    await asyncio.wait_for(all_closed.wait(), 10)
    assert closed == ["nodes_cache", "startup_nodes"]


async def test_a_cancel_after_a_sentinel_has_replied_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closing, may_close, closed, disconnected = (asyncio.Event() for _ in range(4))

    class Master(SentinelManagedConnection):
        async def connect(self) -> None:
            """Connected at once."""

        async def disconnect(self, *arguments: object, **options: object) -> None:
            disconnected.set()

    class Watching(Sentinel):
        async def aclose(self) -> None:
            closing.set()
            await may_close.wait()
            closed.set()

    monkeypatch.setattr("redis.asyncio.sentinel.Sentinel", Watching)
    monkeypatch.setattr("redis.asyncio.sentinel.SentinelManagedConnection", Master)
    opening = asyncio.ensure_future(Connector(parse_address("redis+sentinel://127.0.0.1:1/main"))._open(None))
    await closing.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert disconnected.is_set(), "to the master"
    may_close.set()
    await closed.wait()
