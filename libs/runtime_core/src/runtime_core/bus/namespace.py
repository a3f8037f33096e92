"""Opens a namespace: checks the server, and the settings that are stored in the namespace."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import cast

from runtime_core.bus.connection import RespTransport, Transport
from runtime_core.bus.connector import MEMORY, BrokerAddress, parse_address
from runtime_core.bus.keys import NAMESPACE_FORMAT, OWN_NAMESPACE, OWN_NAMESPACES, Keys, namespace_settings
from runtime_core.errors import BusLost, BusUnavailable, ConfigurationError, ServerError

logger = logging.getLogger(__name__)

OWN_NAMESPACE_SILENT_MS = 24 * 3600 * 1000
"""After this time without a note, the program of a private namespace counts as ended."""
ERASED_AT_ONCE = 1000

CONNECT_SECONDS = 5.0
ROLE_POLL_SECONDS = 0.25
OLDEST_REDIS = 7
"""Valkey reports itself as Redis 7.2, and adds its own version."""


async def connect(url: str, *, wait_seconds: float = CONNECT_SECONDS) -> Transport:
    """Return a client of the broker at `url`. `memory://` is a private server that this process starts at first use.

    Raises ConfigurationError, in one line, if the broker is unreachable.
    """
    if not url.startswith(MEMORY):
        return await _connected(parse_address(url), wait_seconds)
    from runtime_core.bus.private_server import private_server, why_lost  # here: services never use it

    return await _connected(parse_address(await private_server(url)), wait_seconds, why_lost)


async def _connected(
    address: BrokerAddress, wait_seconds: float, why_lost: Callable[[], str] = lambda: ""
) -> Transport:
    address.check()
    transport = RespTransport(address, why_lost=why_lost)
    try:
        await transport.connect(wait_seconds)
    except BusLost as lost:
        raise ConfigurationError(str(lost)) from None
    except BusUnavailable as error:
        raise ConfigurationError(f"WEFT_REDIS_URL: {error}; {_remedy(error.__cause__, address)}") from error
    return transport


async def open_namespace(
    transport: Transport, namespace: str, partitions: int, limits: Mapping[str, int] | None = None
) -> list[Keys]:
    """Check the server and the namespace, and return the keys of each partition.

    Stores `limits` (retention, stream_max, …), if given, for the functions of the bus. Raises ConfigurationError, in
    one line, if the server evicts keys or is too old, if the namespace has a different number of partitions or a newer
    format, and if the broker's user lacks rights.
    """
    await _check_policy(transport)
    try:
        keys = await _opened(transport, namespace, partitions)
        for partition in keys if limits else ():
            await _set_limits(transport, partition.meta, limits or {})
        return keys
    except ServerError as error:
        if str(error).startswith("OOM"):
            raise ConfigurationError(
                f"WEFT_REDIS_URL: the broker's memory is full, and the namespace {namespace!r} does not exist yet:"
                " raise maxmemory"
            ) from error
        if not str(error).startswith("NOPERM"):
            raise
        raise ConfigurationError(
            f"WEFT_REDIS_URL: the broker's user may not work in the namespace {namespace!r} ({error}): use another"
            ' user or WEFT_NAMESPACE, or grant the rights that the page "Users of the broker" lists'
        ) from error


async def _opened(transport: Transport, namespace: str, partitions: int) -> list[Keys]:
    key = namespace_settings(namespace)
    stored = cast(list[bytes | None], await transport.call("HMGET", key, "partitions", "format"))
    if None in stored:
        # Write only if needed: a server at its memory limit refuses writes, and a process that drains it must start.
        await transport.call("HSETNX", key, "partitions", partitions)
        await transport.call("HSETNX", key, "format", NAMESPACE_FORMAT)
        stored = cast(list[bytes | None], await transport.call("HMGET", key, "partitions", "format"))
    return _checked(namespace, partitions, cast(list[bytes], stored))


def _checked(namespace: str, partitions: int, stored: list[bytes]) -> list[Keys]:
    if int(stored[0]) != partitions:
        raise ConfigurationError(
            f"WEFT_PARTITIONS={partitions}: the namespace {namespace!r} was created with {stored[0].decode()}, which "
            f"cannot change; set WEFT_PARTITIONS={stored[0].decode()} or use another WEFT_NAMESPACE"
        )
    if int(stored[1]) > NAMESPACE_FORMAT:
        raise ConfigurationError(
            f"the namespace {namespace!r} has format {stored[1].decode()}, this release reads up to "
            f"{NAMESPACE_FORMAT}: update this service"
        )
    return [Keys(namespace, partition) for partition in range(partitions)]


async def note_own(transport: Transport, namespace: str, now_ms: int) -> None:
    """Note that the program of a private namespace is alive, and erase the namespaces of programs that have ended."""
    await transport.call("ZADD", OWN_NAMESPACES, now_ms, namespace)
    gone = await transport.call("ZRANGEBYSCORE", OWN_NAMESPACES, "-inf", f"({now_ms - OWN_NAMESPACE_SILENT_MS}")
    if gone:
        await erase_own(transport, *(name.decode() for name in cast(list[bytes], gone)))


async def erase_own(transport: Transport, *namespaces: str) -> None:
    """Erase private namespaces with all their keys. Scans the database once, however many they are."""
    erased = {name.encode() for name in namespaces}
    cursor: bytes = b"0"
    while True:
        scan = ("SCAN", cursor, "MATCH", f"{OWN_NAMESPACE}*", "COUNT", ERASED_AT_ONCE)
        cursor, keys = cast(tuple[bytes, list[bytes]], await transport.call(*scan))
        for key in keys:
            if key.partition(b":")[0] in erased:
                await transport.call("UNLINK", key)
        if cursor == b"0":
            break
    await transport.call("ZREM", OWN_NAMESPACES, *namespaces)


async def _set_limits(transport: Transport, meta: str, limits: Mapping[str, int]) -> None:
    flat = [item for pair in limits.items() for item in pair]
    try:
        await transport.call("HSET", meta, *flat)
    except ServerError as error:
        if not str(error).startswith("OOM"):
            raise
        logger.warning("the broker's memory is full: its stored limits stay as they are until the next start")


def _remedy(cause: BaseException | None, address: BrokerAddress) -> str:
    """Return what to do about an unreachable broker, by the cause."""
    said = str(cause)
    match cause:
        case ServerError() if said.endswith("(a Sentinel)"):
            return "correct sentinel_username and sentinel_password in it, or leave them out"
        case ServerError() if said.startswith(("WRONGPASS", "NOAUTH", "ERR invalid password", "ERR AUTH")):
            return "correct user and password in it, as in redis://<user>:<password>@host:port"
        case ServerError() if "DB index" in said:
            return "correct the database after the last /"
        case ServerError() if said.startswith("LOADING"):
            return "it is still loading its data: try again in a moment"
        case ServerError():
            return "see the server's log"
        case ssl.SSLCertVerificationError():
            return "name the certificates that sign the server's as ?ssl_ca_certs=…"
        case ssl.SSLError():
            return "does the server speak TLS there? Without TLS use redis://"
        case socket.gaierror():
            return "is the host name right?"
        case TimeoutError() | None if address.tls:
            return "is it the server, and does it speak TLS there? Without TLS use redis://"
        case ConnectionResetError() if not address.tls:
            return "is it the server? With TLS use rediss://"
    return "is the server running there?"


async def _check_policy(transport: Transport) -> None:
    server = await server_info(transport, "server")
    version = server.get("redis_version", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < OLDEST_REDIS:
        raise ConfigurationError(
            f"WEFT_REDIS_URL: the server is Redis {version}, which has no functions: update it to Redis"
            f" {OLDEST_REDIS}.0 or newer, or Valkey"
        )
    # In a Cluster, calls go to the server of their keys, whichever server the URL names.
    if not is_cluster(server):
        await _check_role(transport)
    policy = await memory_policy(transport)
    if policy and policy != "noeviction":
        raise ConfigurationError(
            f"the server's maxmemory-policy is {policy}: it may evict unfinished work; "
            "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )


async def _check_role(transport: Transport) -> None:
    for _ in range(round(CONNECT_SECONDS / ROLE_POLL_SECONDS)):
        if (await server_info(transport, "replication")).get("role") != "slave":
            return
        await asyncio.sleep(ROLE_POLL_SECONDS)  # it may be about to become the master
    raise ConfigurationError(
        "WEFT_REDIS_URL: the server is a replica, which refuses writes: name its master, or redis+sentinel://…"
    )


async def memory_policy(transport: Transport) -> str:
    """Return the server's eviction policy; empty if this user may not read it."""
    return (await server_info(transport, "memory")).get("maxmemory_policy", "")


def is_cluster(info: Mapping[str, str]) -> bool:
    """Return whether INFO's section `server` is that of a server of a Cluster. Valkey has its own name for the mode."""
    return "cluster" in (info.get("redis_mode"), info.get("server_mode"))


SECTIONS = ("server", "clients", "memory", "persistence", "stats")


async def server_info(transport: Transport, *sections: str) -> dict[str, str]:
    """Return these sections of INFO (default: SECTIONS); empty if this user may not read it."""
    try:
        reply = await transport.call("INFO", *(sections or SECTIONS))
    except ServerError:
        return {}
    lines = cast(bytes, reply).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
