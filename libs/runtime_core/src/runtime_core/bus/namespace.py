"""Opening a namespace: is the server fit for it, and does it agree with what is stored there?"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Mapping
from typing import cast

from runtime_core.bus.connection import RespTransport, Transport
from runtime_core.bus.connector import MEMORY, Address, parse_address
from runtime_core.bus.keys import NAMESPACE_FORMAT, Keys, namespace_settings
from runtime_core.errors import BusUnavailable, ConfigurationError, ServerError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ROLE_LOOK_SECONDS = 0.25
OLDEST_REDIS = 7
"""Valkey says that it is Redis 7.2, and its own version besides."""


async def connect(url: str, *, wait_seconds: float = CONNECT_SECONDS) -> Transport:
    """A client of the broker at `url`. `memory://` is a private server, which this process starts at the first use.

    Raises ConfigurationError in one line where it cannot be reached.
    """
    if url.startswith(MEMORY):
        from runtime_core.bus.private_server import private_server  # here: services never use it

        url = await private_server(url)
    address = parse_address(url)
    address.check()
    transport = RespTransport(address)
    try:
        await transport.connect(wait_seconds)
    except BusUnavailable as error:
        raise ConfigurationError(f"WEFT_REDIS_URL: {error}; {_remedy(error.__cause__, address)}") from error
    return transport


async def open_namespace(
    transport: Transport, namespace: str, partitions: int, limits: Mapping[str, int] | None = None
) -> list[Keys]:
    """Check the server and the namespace; the keys of each partition.

    `limits` (retention, stream_max, …) are stored for the functions of the bus where they are given.
    Raises ConfigurationError in one line for an evicting or too old server, for other partitions, a newer format, and
    where the broker's user may not do what Weft does.
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
                f"WEFT_REDIS_URL: the broker's memory is full, and the namespace {namespace!r} is not there yet:"
                " raise maxmemory"
            ) from error
        if not str(error).startswith("NOPERM"):
            raise
        raise ConfigurationError(
            f"WEFT_REDIS_URL: the broker's user may not work in the namespace {namespace!r} ({error}): name another"
            " user or WEFT_NAMESPACE, or give it the rights that docs/operations.md has under The broker"
        ) from error


async def _opened(transport: Transport, namespace: str, partitions: int) -> list[Keys]:
    key = namespace_settings(namespace)
    stored = cast(list[bytes | None], await transport.call("HMGET", key, "partitions", "format"))
    if None in stored:
        # Only then: at its memory limit a server takes no writes, and who comes back to drain it must get in.
        await transport.call("HSETNX", key, "partitions", partitions)
        await transport.call("HSETNX", key, "format", NAMESPACE_FORMAT)
        stored = cast(list[bytes | None], await transport.call("HMGET", key, "partitions", "format"))
    return _checked(namespace, partitions, cast(list[bytes], stored))


def _checked(namespace: str, partitions: int, stored: list[bytes]) -> list[Keys]:
    if int(stored[0]) != partitions:
        raise ConfigurationError(
            f"WEFT_PARTITIONS={partitions}: the namespace {namespace!r} was made with {stored[0].decode()}, which is "
            f"fixed; set WEFT_PARTITIONS={stored[0].decode()} or use another WEFT_NAMESPACE"
        )
    if int(stored[1]) > NAMESPACE_FORMAT:
        raise ConfigurationError(
            f"the namespace {namespace!r} has format {stored[1].decode()}, this release reads up to "
            f"{NAMESPACE_FORMAT}: update this service"
        )
    return [Keys(namespace, partition) for partition in range(partitions)]


async def _set_limits(transport: Transport, meta: str, limits: Mapping[str, int]) -> None:
    flat = [item for pair in limits.items() for item in pair]
    try:
        await transport.call("HSET", meta, *flat)
    except ServerError as error:
        if not str(error).startswith("OOM"):
            raise
        logger.warning("the broker's memory is full: the limits that it holds stay as they are until the next start")


def _remedy(cause: BaseException | None, address: Address) -> str:
    """What to do about a broker that could not be reached, by what stood in the way."""
    said = str(cause)
    match cause:
        case ServerError() if said.endswith("(a Sentinel)"):
            return "correct sentinel_username and sentinel_password in it, or leave them out"
        case ServerError() if said.startswith(("WRONGPASS", "NOAUTH", "ERR invalid password", "ERR AUTH")):
            return "correct user and password in it, as in redis://<user>:<password>@host:port"
        case ServerError() if "DB index" in said:
            return "correct the database behind the last /"
        case ServerError() if said.startswith("LOADING"):
            return "it reads its file still: start this again in a moment"
        case ServerError():
            return "look at the server's log"
        case ssl.SSLCertVerificationError():
            return "give the certificates that sign the server's as ?ssl_ca_certs=…"
        case ssl.SSLError():
            return "does the server speak TLS there? Without TLS it is redis://"
        case socket.gaierror():
            return "is the host's name right?"
        case TimeoutError() | None if address.tls:
            return "is it the server, and does it speak TLS there? Without TLS it is redis://"
        case ConnectionResetError() if not address.tls:
            return "is it the server? With TLS it is rediss://"
    return "is the server running there?"


async def _check_policy(transport: Transport) -> None:
    server = await _info(transport, "server")
    version = server.get("redis_version", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < OLDEST_REDIS:
        raise ConfigurationError(
            f"WEFT_REDIS_URL: the server is Redis {version}, which has no functions: update it to Redis"
            f" {OLDEST_REDIS}.0 or newer, or Valkey"
        )
    # In a Cluster calls go where their keys are, whichever of its servers is named.
    if server.get("redis_mode") != "cluster":
        await _check_role(transport)
    policy = await memory_policy(transport)
    if policy and policy != "noeviction":
        raise ConfigurationError(
            f"the server's maxmemory-policy is {policy}: it may evict work that is not done; "
            "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
        )


async def _check_role(transport: Transport) -> None:
    looks = round(CONNECT_SECONDS / ROLE_LOOK_SECONDS)
    for _ in range(looks):
        if (await _info(transport, "replication")).get("role") != "slave":
            return
        await asyncio.sleep(ROLE_LOOK_SECONDS)  # it may be about to become the master
    raise ConfigurationError(
        "WEFT_REDIS_URL: the server is a replica, which takes no writes: name its master, or redis+sentinel://…"
    )


async def memory_policy(transport: Transport) -> str:
    """The server's eviction policy; empty where this user may not ask for it."""
    return (await server_memory(transport)).get("maxmemory_policy", "")


async def server_memory(transport: Transport) -> dict[str, str]:
    """The memory section of INFO; empty where this user may not ask for it."""
    return await _info(transport, "memory")


async def server_info(transport: Transport) -> dict[str, str]:
    """What INFO says of memory, clients, server, persistence and stats; empty where this user may not ask for it."""
    return await _info(transport, "server", "clients", "memory", "persistence", "stats")


async def _info(transport: Transport, *sections: str) -> dict[str, str]:
    try:
        reply = await transport.call("INFO", *sections)
    except ServerError:
        return {}
    lines = cast(bytes, reply).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
