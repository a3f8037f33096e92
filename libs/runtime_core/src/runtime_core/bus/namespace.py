"""Opening a namespace: is the server fit for it, and does it agree with what is stored there?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from runtime_core.bus.address import parse_address
from runtime_core.bus.keys import NAMESPACE_FORMAT, Keys, namespace_settings
from runtime_core.bus.resp import RespTransport
from runtime_core.bus.transport import Reply, Transport
from runtime_core.errors import BusUnavailable, ConfigurationError, ServerError

CONNECT_SECONDS = 5.0


async def connect(url: str, *, wait_seconds: float = CONNECT_SECONDS) -> Transport:
    """A client of the broker at `url`; `memory://` makes a broker in this process.

    Raises ConfigurationError in one line where it cannot be reached.
    """
    if url.startswith("memory://"):
        # Loaded only where it is used: it brings a Lua interpreter.
        from runtime_core.bus.memory.server import MemoryServer, MemoryTransport

        return MemoryTransport(MemoryServer())
    transport = RespTransport(parse_address(url))
    try:
        await transport.connect(wait_seconds)
    except BusUnavailable as error:
        raise ConfigurationError(f"WEFT_REDIS_URL: {error}; is the server running there?") from error
    return transport


async def open_namespace(
    transport: Transport, namespace: str, partitions: int, limits: Mapping[str, int] | None = None
) -> list[Keys]:
    """Check the server and the namespace; the keys of each partition.

    `limits` (retention, stream_max, …) are stored for the functions of the bus where they are given.
    Raises ConfigurationError in one line for an evicting server, other partitions or a newer format.
    """
    await _check_policy(transport)
    key = namespace_settings(namespace)
    await transport.call("HSETNX", key, "partitions", partitions)
    await transport.call("HSETNX", key, "format", NAMESPACE_FORMAT)
    stored = cast(list[bytes], await transport.call("HMGET", key, "partitions", "format"))
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
    keys = [Keys(namespace, partition) for partition in range(partitions)]
    if limits:
        for partition in keys:
            flat = [item for pair in limits.items() for item in pair]
            await transport.call("HSET", partition.meta, *flat)
    return keys


async def _check_policy(transport: Transport) -> None:
    policy = await memory_policy(transport)
    if policy and policy != "noeviction":
        raise ConfigurationError(
            f"the server's maxmemory-policy is {policy}: it may evict work that is not done; "
            "set it to noeviction (CONFIG SET maxmemory-policy noeviction)"
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
    return _fields(reply)


def _fields(reply: Reply) -> dict[str, str]:
    lines = cast(bytes, reply).decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
