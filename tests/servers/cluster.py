"""Make one Cluster of several real servers: masters with their shares of the slots, and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from tests.fleet import plain_redis, until
from tests.servers.process import HOST, Server

CLUSTER_OPTIONS = ("--cluster-enabled", "yes")
SLOTS = 16384


async def join(servers: Sequence[Server], url_of: Callable[[Server], str] = lambda server: server.url) -> None:
    """Share the slots out and wait until every server knows all others. `url_of` may name a user."""
    transports = [RespTransport(parse_address(url_of(server))) for server in servers]
    for number, transport in enumerate(transports):
        await transport.connect(10)
        first, last = SLOTS * number // len(servers), SLOTS * (number + 1) // len(servers) - 1
        await transport.call("CLUSTER", "ADDSLOTSRANGE", first, last)
        if number:
            await transport.call("CLUSTER", "MEET", HOST, servers[0].port)

    async def whole() -> bool:
        for transport in transports:
            info = await transport.call("CLUSTER", "INFO")
            assert isinstance(info, bytes)
            if b"cluster_state:ok" not in info or b"cluster_known_nodes:%d\r" % len(servers) not in info:
                return False
        return True

    await until(whole, 30, "the cluster is whole")
    await asyncio.gather(*(transport.close() for transport in transports))


async def follow(master: Server, replica: Server) -> None:
    """Make a server the replica of a master of a Cluster, and wait until it is in sync."""
    async with plain_redis(master.port, text=True) as first, plain_redis(replica.port, text=True) as second:
        name = await first.execute_command("CLUSTER", "MYID")
        await second.execute_command("CLUSTER", "MEET", HOST, master.port)

        async def knows() -> bool:
            return name in str(await second.execute_command("CLUSTER", "NODES"))

        await until(knows, 30, "the replica knows its master")
        await second.execute_command("CLUSTER", "REPLICATE", name)

        async def in_sync() -> bool:
            return bool((await second.info("replication"))["master_link_status"] == "up")

        await until(in_sync, 30, "the replica is in sync")
