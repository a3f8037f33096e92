"""Turns the broker's URL into a connection: redis-py parses the URL, connects, authenticates and finds masters.

Functions here import redis-py when they need it: that takes 0.1 s, and a program that imports `weft` may never connect.
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

from runtime_core.base.lazy import load_redis
from runtime_core.errors import ConfigurationError, ServerError

if TYPE_CHECKING:
    from redis.asyncio.cluster import NodesManager
    from redis.asyncio.connection import AbstractConnection, ConnectionPool
    from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
    from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECONDS = 2.0
MEMORY = "memory://"
"""The URL of a server for this process alone: see `bus/private_server.py`."""

SCHEMES = {
    "redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix",
    "redis+sentinel": "redis", "rediss+sentinel": "rediss",
}  # fmt: skip
"""Schemes that Weft accepts, and the names that redis-py has for them."""
TLS_OPTIONS = (
    "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile", "ssl_password",
)  # fmt: skip
SENTINEL_OPTIONS = ("sentinel_password", "sentinel_ssl", "sentinel_username")
OPTIONS = ("credential_provider", "db", *SENTINEL_OPTIONS, *TLS_OPTIONS)
SENTINEL_PORT = 26379
QUICK_TIMEOUTS = {"socket_connect_timeout": 0.5, "socket_timeout": 0.5}
"""With several servers, one that accepts but never replies must leave time to ask the others."""
_QUOTING = "in a password, write / as %2F, ? as %3F, # as %23 and @ as %40"

Place = tuple[str, int]
"""A server's host and port."""
Options = Mapping[str, Any]  # Any: redis-py's keyword arguments of different types


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """One broker, with redis-py's options for connections to it."""

    options: Options
    """`host` and `port`, or `path`, with `db`, `username`, `password` and `ssl_…`."""
    tls: bool = False
    master: str = ""
    sentinels: tuple[tuple[str, int], ...] = ()
    sentinel_options: Options = field(default_factory=dict)

    @property
    def host(self) -> str:
        """Empty for a socket, and if Sentinels name the server."""
        return "" if self.path or self.master else str(self.options.get("host", "localhost"))

    @property
    def path(self) -> str:
        return str(self.options.get("path", ""))

    @property
    def database(self) -> int:
        return int(self.options.get("db", 0))

    def pool(self) -> ConnectionPool:
        """Return a pool that makes connections to this broker.

        They use RESP2, whose replies this package parses. That also saves a HELLO and the client's announcement.
        """
        from redis.asyncio.connection import ConnectionPool, SSLConnection, UnixDomainSocketConnection
        from redis.asyncio.retry import Retry
        from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
        from redis.backoff import NoBackoff

        spoken: dict[str, Any] = {"protocol": 2, "driver_info": None}  # Any: as Options
        if self.master:
            # The caller connects again, so an unreachable Sentinel must not block this connect.
            once = {"retry": Retry(NoBackoff(), 0), **QUICK_TIMEOUTS}
            sentinel = Sentinel(self.sentinels, sentinel_kwargs={**spoken, **once, **self.sentinel_options})
            return SentinelConnectionPool(self.master, sentinel, ssl=self.tls, **self.options, **spoken)
        if self.path:
            return ConnectionPool(UnixDomainSocketConnection, **self.options, **spoken)
        if self.tls:
            return ConnectionPool(SSLConnection, **self.options, **spoken)
        return ConnectionPool(**self.options, **spoken)

    def check(self) -> None:
        """Raise ConfigurationError for a wrong file or value that makes any connection impossible."""
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
        """Return the address for messages, without the password."""
        if self.path:
            return f"unix://{self.path}"
        if self.master:
            return f"sentinel master {self.master!r}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.options.get('port', 6379)}/{self.database}"


def parse_address(url: str) -> BrokerAddress:
    """Parse `redis://`, `rediss://` (TLS), `unix://` or `redis+sentinel://a:26379,b:26379/master/0`, with redis-py.

    Raises ConfigurationError naming WEFT_REDIS_URL, even for mistakes that redis-py ignores. The error shows no part of
    the URL that may belong to a password.
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
        return BrokerAddress(options, tls)
    for name in ("host", "port", *(() if tls else secured)):
        options.pop(name, None)
    asked = {"username": own.get("sentinel_username"), "password": own.get("sentinel_password"), "ssl": asks_by_tls}
    return BrokerAddress(options, tls, master, sentinels, asked | (secured if asks_by_tls else {}))


def _split(url: str) -> SplitResult:
    """Return the parts of a URL. Raises ConfigurationError if one may belong to a password that was not quoted."""
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
    """Return the options that redis-py parses from the URL of one server."""
    load_redis()
    from redis.asyncio.connection import parse_url

    try:
        if parts.scheme != "unix" and parts.port == 0:
            raise ValueError("no port")
        options: dict[str, Any] = dict(parse_url(parts._replace(scheme=SCHEMES[parts.scheme]).geturl()))
    except ValueError as error:
        if "connection URL" in str(error):
            raise _wrong(f"{error}") from None
        raise _wrong(f"the port is not a number up to 65535; {_QUOTING}") from None
    options.pop("connection_class", None)
    # redis-py takes database 0 if it cannot parse the path, and 12 for /1/2.
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    if path and ("db" not in options or "/" in path):
        raise _wrong("the database after the last / is not a number, as in …:6379/0")
    return options


def _sentinel(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"redis://{text}")
        return parts.hostname or "localhost", parts.port or SENTINEL_PORT
    except ValueError:
        raise _wrong(f"a Sentinel's port is not a number up to 65535; {_QUOTING}") from None


def _credential_provider(options: Options) -> object:
    """Return the object that `credential_provider=package.module:name` names, or the result of calling it."""
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
        raise _wrong(f"credential_provider={module}:{name} neither is a redis.CredentialProvider nor returns one")
    return provider


def _wrong(what: str) -> ConfigurationError:
    return ConfigurationError(f"WEFT_REDIS_URL: {what}")


class Connector:
    """Connects to the server that an address names: directly, by Sentinels, or as one of a Cluster.

    In a Cluster, the last request selects the server: MOVED names it, and after a loss the remaining servers do.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._pool = address.pool()
        self._is_cluster: bool | None = None
        self._servers: list[Place] = []
        """The known servers of the Cluster."""
        self._warned = False
        self._slot: int | None = None
        self._place: Place | None = None
        """The server of the slot in the Cluster; None: look it up, or use the address."""
        self._closing: asyncio.Task[None] | None = None
        """Closes the connections that last read the Cluster. Kept here: the event loop holds its tasks weakly."""

    async def open(self) -> AbstractConnection:
        """Connect, authenticate and check that the server is ready. Raises OSError or ServerError."""
        from redis.exceptions import RedisError

        place, self._place = self._place, None
        task = cast("asyncio.Task[object]", asyncio.current_task())
        cancelled_before = task.cancelling()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                connection = await self._open(place)
        except (RedisError, UnicodeError) as error:
            raise _plain(error) from error
        except (OSError, ServerError):
            raise
        except Exception as error:
            if _lost_with_uvloop(error):
                raise ConnectionResetError("the server closed the connection") from error
            # From a credential provider, or redis-py. The caller connects again, so that it may pass.
            logger.warning("cannot connect to %s", self._address, exc_info=True)
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        if task.cancelling() > cancelled_before:
            # redis-py sends within `asyncio.wait_for`, which before Python 3.12 can lose a cancellation.
            await connection.disconnect(nowait=True)
            raise asyncio.CancelledError
        return connection

    def follow(self, moved: ServerError | None) -> None:
        """Use the server that MOVED names. Without it the connection was lost: the next `open` asks the Cluster."""
        from redis.exceptions import MovedError

        self._place = None
        if moved is not None and str(moved).startswith("MOVED"):
            target = MovedError(str(moved).removeprefix("MOVED "))
            self._slot = target.slot_id
            self._place = (target.host or self._address.host, target.port)

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
        await _connect(connection)
        return connection

    async def _connected_by_sentinels(
        self, connection: AbstractConnection, pool: SentinelConnectionPool
    ) -> AbstractConnection:
        from redis.asyncio.sentinel import MasterNotFoundError

        sentinel: Sentinel = pool.sentinel_manager
        try:
            try:
                await _connect(connection)
                return connection
            except MasterNotFoundError as error:
                some_failed = " : " in str(error)  # redis-py reports that some failed, but not why
            if some_failed:
                await _check_sentinels(sentinel)
            raise ConnectionRefusedError(f"the Sentinels know no reachable master named {self._address.master!r}")
        finally:
            # In a task, as in `_look_up`.
            self._closing = asyncio.create_task(sentinel.aclose(), name="close connections to the Sentinels")
            try:
                await asyncio.shield(self._closing)
            except BaseException:
                # A cancel, or a Sentinel that does not let go: nobody gets the connection to the master.
                await connection.disconnect(nowait=True)
                raise

    async def _learn(self) -> None:
        """Learn a Cluster's servers while one replies: after its failure, another one knows where its slots are."""
        try:
            await self._look_up()
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "cannot list the Cluster's servers, so only the one in WEFT_REDIS_URL can say where keys are: give"
                    " the broker's user +cluster|slots (%s)",
                    error,
                )

    async def _look_up(self) -> Place:
        """Ask the Cluster where the slot is. Return any known server if none knows the slot yet."""
        from redis.asyncio.cluster import ClusterNode, NodesManager
        from redis.exceptions import RedisClusterException, RedisError

        options: dict[str, Any] = {**self._pool.connection_kwargs, **QUICK_TIMEOUTS}  # Any: see Options
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
            wanted = "has slots yet" if self._slot is None else f"knows where slot {self._slot} is"
            reason = "" if isinstance(error, LookupError) else f": {error}"
            raise ConnectionRefusedError(f"no server of the Cluster {wanted}{reason}") from error
        finally:
            # In a task: a second cancellation here would leave connections open.
            self._closing = asyncio.create_task(_close(manager), name="close connections to the Cluster")
            await asyncio.shield(self._closing)


async def _close(manager: NodesManager) -> None:
    await manager.aclose()
    await manager.aclose("startup_nodes")


async def _ask(connection: AbstractConnection, *command: str) -> object:
    await connection.send_command(*command)
    return cast(object, await connection.read_response())


async def _says_cluster(connection: AbstractConnection) -> bool:
    """Return whether this is a server of a Cluster. Uses HELLO, which every user may send."""
    from redis.exceptions import ResponseError

    try:
        said = cast(list[object], await _ask(connection, "HELLO"))
    except ResponseError:
        return False
    return b"cluster" in said


async def _check_sentinels(sentinel: Sentinel) -> None:
    """Raise the error of the first Sentinel that does not reply."""
    from redis.exceptions import RedisError

    for each in sentinel.sentinels:
        try:
            await each.ping()
        except RedisError as error:
            cause = _plain(error)
            raise ServerError(f"{cause} (a Sentinel)") if isinstance(cause, ServerError) else cause from error


async def _resolve(host: str) -> None:
    """Resolve a host name before redis-py does.

    A lookup cannot be stopped, and uvloop reports one that fails after its connect was cancelled as a defect.
    """
    looking = asyncio.ensure_future(asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM))
    looking.add_done_callback(lambda looked: looked.cancelled() or looked.exception())
    await asyncio.shield(looking)


async def _connect(connection: AbstractConnection) -> None:
    try:
        await connection.connect()
    except BaseException:
        # redis-py leaves it open after the errors of others, such as a credential provider.
        await connection.disconnect(nowait=True)
        raise


def _lost_with_uvloop(error: Exception) -> bool:
    """Return whether uvloop raised this because the server had closed the connection before a write.

    A server that is killed does this: the kernel closes its clients' sockets before the one that still accepts.
    """
    return isinstance(error, RuntimeError) and str(error).endswith("the handler is closed")


def _plain(error: RedisError | UnicodeError) -> OSError | ServerError:
    """Convert an error of redis-py to the server's error reply or the connection's error."""
    from redis.exceptions import RedisError, ResponseError

    if isinstance(error, RedisError):
        if error.status_code:
            return ServerError(f"{error.status_code} {error}")
        if isinstance(error, ResponseError):
            return ServerError(str(error))
    under = error.__context__ or error
    if isinstance(under, UnicodeError):
        what = "this is not a valid host name: a part of it is empty, or longer than 63 letters"
        return socket.gaierror(socket.EAI_NONAME, what)
    return under if isinstance(under, OSError) else ConnectionResetError(str(error))
