"""From the broker's URL to a connection: redis-py reads the URL, connects, signs in and finds masters.

redis-py is imported where it is used: that takes 0.1 s, and a program that imports `weft` may never connect.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import SplitResult, urlsplit

from runtime_core.errors import ConfigurationError, ServerError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection, ConnectionPool
    from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
    from redis.exceptions import RedisError


MEMORY = "memory://"
"""A server of this process alone; `bus/private_server.py`."""

SCHEMES = {
    "redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix",
    "redis+sentinel": "redis", "rediss+sentinel": "rediss",
}  # fmt: skip
"""What redis-py calls each scheme of ours."""
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile", "ssl_password",
)  # fmt: skip
SENTINEL_OPTIONS = ("sentinel_password", "sentinel_ssl", "sentinel_username")
OPTIONS = ("credential_provider", "db", *SENTINEL_OPTIONS, *TLS_OPTIONS)
SENTINEL_PORT = 26379
QUICK = {"socket_connect_timeout": 0.5, "socket_timeout": 0.5}
"""One of several servers that accepts and says nothing must leave time to ask the others within a connect."""
_QUOTING = "in a password, write / as %2F, ? as %3F, # as %23 and @ as %40"

Options = Mapping[str, Any]  # Any: redis-py's keyword arguments, each of a type of its own


@dataclass(frozen=True, slots=True)
class Address:
    """One broker: what redis-py's connections to it are made with."""

    options: Options
    """`host` and `port`, or `path`, with `db`, `username`, `password` and `ssl_…`."""
    tls: bool = False
    master: str = ""
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_options: Options = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Empty where the server is a socket, or the one that Sentinels name."""
        return "" if self.path or self.master else str(self.options.get("host", "localhost"))

    @property
    def path(self) -> str:
        return str(self.options.get("path", ""))

    @property
    def database(self) -> int:
        return int(self.options.get("db", 0))

    def pool(self) -> ConnectionPool:
        """What makes connections to this broker.

        RESP2 is the form of replies that this package reads; it spares a HELLO and the announcement of the client.
        """
        from redis.asyncio.connection import ConnectionPool, SSLConnection, UnixDomainSocketConnection
        from redis.asyncio.retry import Retry
        from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
        from redis.backoff import NoBackoff

        spoken: dict[str, Any] = {"protocol": 2, "driver_info": None}  # Any: as Options
        if self.master:
            # Whoever connects asks again; a Sentinel that is away must not be waited for.
            once = {"retry": Retry(NoBackoff(), 0), **QUICK}
            sentinel = Sentinel(self.sentinels, sentinel_kwargs={**spoken, **once, **self.sentinel_options})
            return SentinelConnectionPool(self.master, sentinel, ssl=self.tls, **self.options, **spoken)
        if self.path:
            return ConnectionPool(UnixDomainSocketConnection, **self.options, **spoken)
        if self.tls:
            return ConnectionPool(SSLConnection, **self.options, **spoken)
        return ConnectionPool(**self.options, **spoken)

    def check(self) -> None:
        """Raise ConfigurationError where a connection cannot even be made: a file or a value that is wrong."""
        from redis.asyncio.connection import SSLConnection
        from redis.exceptions import RedisError

        try:
            connection = self.pool().make_connection()
            if isinstance(connection, SSLConnection):
                connection.ssl_context.get()
        except RedisError as error:
            raise ConfigurationError(f"WEFT_REDIS_URL: {error}") from None
        except OSError as error:
            files = ", ".join(f"{name}={self.options[name]!r}" for name in TLS_OPTIONS if name in self.options)
            raise ConfigurationError(
                f"WEFT_REDIS_URL: {files}: cannot be used: {error.strerror or error}; name a file with the certificates"
                " (PEM) that sign the server's as ssl_ca_certs, and this client's own as ssl_certfile and ssl_keyfile"
            ) from None

    def __str__(self) -> str:
        """Without the password: this goes into messages."""
        if self.path:
            return f"unix://{self.path}"
        if self.master:
            return f"sentinel master {self.master!r}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.options.get('port', 6379)}/{self.database}"


def parse_address(url: str) -> Address:
    """Read `redis://`, `rediss://` (TLS), `unix://` or `redis+sentinel://a:26379,b:26379/master/0`, with redis-py.

    Raises ConfigurationError naming WEFT_REDIS_URL, also where redis-py would pass over a mistake. It shows nothing of
    the URL that may be a part of a password.
    """
    parts = _split(url)
    sentinels: tuple[tuple[str, int], ...] = ()
    master = ""
    if parts.scheme.endswith("+sentinel"):
        user, at, hosts = parts.netloc.rpartition("@")
        master, _, database = parts.path.strip("/").partition("/")
        if not master:
            raise _wrong("name the Sentinel master, as in redis+sentinel://host:26379/mymaster/0")
        sentinels = tuple(_sentinel(each) for each in hosts.split(","))
        parts = parts._replace(netloc=f"{user}{at}{hosts.partition(',')[0]}", path=f"/{database}")
    options = _read(parts)
    if unknown := sorted(set(options) - {"username", "password", "host", "port", "path", *OPTIONS}):
        raise _wrong(
            f"{unknown[0][:40]!r} is not an option; there are {', '.join(OPTIONS)}"
            if unknown[0].isidentifier()
            else f"it cannot be read: {_QUOTING}"
        )
    if not sentinels and not set(options).isdisjoint(SENTINEL_OPTIONS):
        raise _wrong(f"{', '.join(SENTINEL_OPTIONS)} are for Sentinels: write redis+sentinel:// or rediss+sentinel://")
    tls = SCHEMES[parts.scheme] == "rediss"
    own = {name: options.pop(name) for name in SENTINEL_OPTIONS if name in options}
    secured = {name: value for name, value in options.items() if name in TLS_OPTIONS}
    asks_by_tls = tls if "sentinel_ssl" not in own else own["sentinel_ssl"].lower() in ("1", "true", "yes")
    if secured and not tls and not asks_by_tls:
        raise _wrong("ssl_… are for TLS: write rediss://, or rediss+sentinel://")
    if "credential_provider" in options:
        options["credential_provider"] = _credential_provider(options)
    if not master:
        return Address(options, tls)
    for name in ("host", "port", *(() if tls else secured)):
        options.pop(name, None)
    asked = {"username": own.get("sentinel_username"), "password": own.get("sentinel_password"), "ssl": asks_by_tls}
    return Address(options, tls, master, sentinels, asked | (secured if asks_by_tls else {}))


def _split(url: str) -> SplitResult:
    """The parts of a URL, where none of them can be a part of a password that was not quoted."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _wrong(f"{error}; write an IPv6 address as [::1]") from None
    if parts.scheme not in SCHEMES:
        raise _wrong(f"{parts.scheme!r} is not a scheme that Weft knows; use {', '.join(SCHEMES)}")
    if parts.fragment or "@" in parts.query or (parts.scheme != "unix" and "@" in parts.path):
        raise _wrong(f"it cannot be read: {_QUOTING}")
    return parts


def _read(parts: SplitResult) -> dict[str, Any]:  # Any: as Options
    """What redis-py reads in a URL of one server."""
    from redis.asyncio.connection import parse_url

    try:
        if parts.scheme != "unix" and parts.port == 0:
            raise ValueError("no port")
        options: dict[str, Any] = dict(parse_url(parts._replace(scheme=SCHEMES[parts.scheme]).geturl()))
    except ValueError as error:
        if "connection URL" in str(error):
            raise _wrong(f"{error}") from None
        raise _wrong(f"the port is no number up to 65535; {_QUOTING}") from None
    options.pop("connection_class", None)
    # redis-py takes database 0 where it cannot read the path, and 12 for /1/2.
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    if path and ("db" not in options or "/" in path):
        raise _wrong("the database behind the last / is not a number, as in …:6379/0")
    return options


def _sentinel(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"redis://{text}")
        return parts.hostname or "localhost", parts.port or SENTINEL_PORT
    except ValueError:
        raise _wrong(f"a Sentinel's port is no number up to 65535; {_QUOTING}") from None


def _credential_provider(options: Options) -> object:
    """What `credential_provider=package.module:name` names, called where it is a class or a function."""
    from redis.credentials import CredentialProvider

    if options.keys() & {"username", "password"}:
        raise _wrong("give a user and a password, or a credential_provider, not both")
    module, _, name = str(options["credential_provider"]).partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _wrong(f"credential_provider: {error}; write it as package.module:name") from error
    provider = found if isinstance(found, CredentialProvider) else found()
    if not isinstance(provider, CredentialProvider):
        raise _wrong(f"credential_provider={module}:{name} is no redis.CredentialProvider, and makes none")
    return provider


def _wrong(what: str) -> ConfigurationError:
    return ConfigurationError(f"WEFT_REDIS_URL: {what}")


logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECONDS = 2.0

Place = tuple[str, int]
"""A server's host and port."""


class Connector:
    """Connects to the server that an address names: itself, by Sentinels, or as one of a Cluster.

    Which server of a Cluster is decided by what was asked last: MOVED names it, and after a loss the servers that are
    left do.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._pool = address.pool()
        self._is_cluster: bool | None = None
        self._servers: list[Place] = []
        """Of the Cluster, as far as they are known."""
        self._warned = False
        self._slot: int | None = None
        self._place: Place | None = None
        """Where the slot is in the Cluster; None: to be looked up, or what the address says."""

    async def open(self) -> AbstractConnection:
        """Connect, sign in and make sure that the server is ready. Raises OSError or ServerError."""
        from redis.exceptions import RedisError

        place, self._place = self._place, None
        task = cast("asyncio.Task[object]", asyncio.current_task())
        cancelled_before = task.cancelling()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                connection = await self._open(place)
        except (RedisError, UnicodeError) as error:
            raise _plain(error) from error
        if task.cancelling() > cancelled_before:
            # redis-py sends within `asyncio.wait_for`, which before Python 3.12 can lose a cancellation.
            await connection.disconnect(nowait=True)
            raise asyncio.CancelledError
        return connection

    def follow(self, moved: ServerError | None) -> None:
        """Go where MOVED says; without it the connection was lost, and a Cluster is asked where the slot is now."""
        from redis.exceptions import MovedError

        self._place = None
        if moved is not None and str(moved).startswith("MOVED"):
            told = MovedError(str(moved).removeprefix("MOVED "))
            self._slot = told.slot_id
            self._place = (told.host or self._address.host, told.port)

    async def _open(self, place: Place | None) -> AbstractConnection:
        if self._servers and place is None:
            place = await self._look_up()
        connection = await self._connected(place)
        try:
            await _ask(connection, "PING")
            if self._is_cluster is None:
                self._is_cluster = await _says_cluster(connection)
            if self._is_cluster and not self._servers:
                await self._learn()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return connection

    async def _connected(self, place: Place | None) -> AbstractConnection:
        pool = self._pool
        if self._address.master:
            return await self._connected_by_sentinels(pool.make_connection(), cast("SentinelConnectionPool", pool))
        connection: AbstractConnection = pool.make_connection()
        if place is not None:
            connection = pool.connection_class(**{**pool.connection_kwargs, "host": place[0], "port": place[1]})
        if self._address.host:
            await _resolve(place[0] if place else self._address.host)
        await connection.connect()
        return connection

    async def _connected_by_sentinels(
        self, connection: AbstractConnection, pool: SentinelConnectionPool
    ) -> AbstractConnection:
        from redis.asyncio.sentinel import MasterNotFoundError

        sentinel: Sentinel = pool.sentinel_manager
        try:
            try:
                await connection.connect()
                return connection
            except MasterNotFoundError as error:
                some_failed = " : " in str(error)  # that, and not how, is what it tells
            if some_failed:
                await _check_sentinels(sentinel)
            raise ConnectionRefusedError(f"the Sentinels know no master {self._address.master!r} that is up")
        finally:
            await sentinel.aclose()

    async def _learn(self) -> None:
        """Learn a Cluster's servers while one answers: when it is gone, another tells where its slots are."""
        try:
            await self._look_up()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "cannot read which servers the Cluster has: without the one that WEFT_REDIS_URL names nobody is"
                    " asked where keys are; does the broker's user have +cluster|slots? (%s)",
                    error,
                )

    async def _look_up(self) -> Place:
        """Ask the Cluster where the slot is; any of its servers, where none is known yet."""
        from redis.asyncio.cluster import ClusterNode, NodesManager
        from redis.exceptions import RedisClusterException, RedisError

        options: dict[str, Any] = {**self._pool.connection_kwargs, **QUICK}  # Any: see Options
        first = (options.pop("host", "localhost"), options.pop("port", 6379))
        options["connection_class"] = self._pool.connection_class
        nodes = [ClusterNode(host, port, **options) for host, port in dict.fromkeys((*self._servers, first))]
        manager = NodesManager(nodes, False, options, dynamic_startup_nodes=False)
        try:
            await manager.initialize()
            found = manager.default_node if self._slot is None else manager.get_node_from_slot(self._slot)
            self._servers = [(node.host, int(node.port)) for node in manager.nodes_cache.values()]
            return found.host, int(found.port)
        except (RedisError, RedisClusterException, LookupError) as error:
            raise ConnectionRefusedError(
                f"no server of the Cluster says where slot {self._slot} is: {error}"
            ) from error
        finally:
            await manager.aclose()
            await manager.aclose("startup_nodes")


async def _ask(connection: AbstractConnection, *command: str) -> object:
    await connection.send_command(*command)
    return cast(object, await connection.read_response())


async def _says_cluster(connection: AbstractConnection) -> bool:
    """Whether this is a server of a Cluster. HELLO is what every user may ask."""
    from redis.exceptions import ResponseError

    try:
        said = cast(list[object], await _ask(connection, "HELLO"))
    except ResponseError:
        return False
    return b"cluster" in said


async def _check_sentinels(sentinel: Sentinel) -> None:
    """Raise what keeps the first Sentinel that cannot be asked from answering."""
    from redis.exceptions import RedisError

    for each in sentinel.sentinels:
        try:
            await each.ping()
        except RedisError as error:
            told = _plain(error)
            raise ServerError(f"{told} (a Sentinel)") if isinstance(told, ServerError) else told from error


async def _resolve(host: str) -> None:
    """Look a name up before redis-py does.

    A look-up cannot be stopped, and uvloop reports one that fails after the connect has been given up as a defect.
    """
    looking = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM))
    looking.add_done_callback(lambda looked: looked.cancelled() or looked.exception())
    await asyncio.shield(looking)


def _plain(error: RedisError | UnicodeError) -> OSError | ServerError:
    """What an error of redis-py means: a reply of the server, or what happened to the connection."""
    from redis.exceptions import RedisError, ResponseError

    if isinstance(error, RedisError):
        if error.status_code:
            return ServerError(f"{error.status_code} {error}")
        if isinstance(error, ResponseError):
            return ServerError(str(error))
    under = error.__context__ or error
    if isinstance(under, UnicodeError):
        what = "the host's name cannot be one: a part of it is empty, or longer than 63 letters"
        return socket.gaierror(socket.EAI_NONAME, what)
    return under if isinstance(under, OSError) else ConnectionResetError(str(error))
