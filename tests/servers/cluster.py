"""Make one Cluster of several real servers, each a master with its share of the slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from tests.fleet import until
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
