"""How connections to a broker are made, by redis-py: they come signed in, from a server that is ready."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, cast

from runtime_core.bus.address import QUICK, Address
from runtime_core.errors import ServerError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection
    from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
    from redis.exceptions import RedisError

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
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                connection = await self._open(place)
        except (RedisError, UnicodeError) as error:
            raise _plain(error) from error
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
