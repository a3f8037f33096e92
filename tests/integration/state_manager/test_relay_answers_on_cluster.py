"""Answers to a `replyto` stream on another server of a Cluster do not interrupt the admission."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from redis.crc import key_slot

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.keys import STATE_MANAGER
from runtime_core.bus.namespace import connect
from runtime_core.host.state_manager import build
from runtime_core.settings import Settings
from runtime_core.telemetry.metrics import Metrics
from tests.conftest import OwnServer
from tests.fleet import until
from tests.servers.cluster import CLUSTER_OPTIONS, SLOTS, join

pytestmark = pytest.mark.timeout(300)

SERVERS = 3
COMMANDS = 20


def server_of(key: str) -> int:
    return key_slot(key.encode()) * SERVERS // SLOTS


async def test_answers_on_another_server_cause_no_reconnects(
    own_server: OwnServer, namespace: str, tmp_path: Path
) -> None:
    servers = [own_server(append=None, options=CLUSTER_OPTIONS) for _ in range(SERVERS)]
    await join(servers)
    tasks = f"{namespace}:tasks"
    answers = next(key for number in range(99) if server_of(key := f"answers:{number}") != server_of(tasks))
    settings = Settings(tmp_path, f"sqlite:///{tmp_path}/t.db", redis_url=servers[0].url, namespace=namespace)
    host = await build(settings, Metrics(CollectorRegistry(), STATE_MANAGER))
    await host.start()
    sender = await connect(servers[server_of(tasks)].url)
    reader = await connect(servers[server_of(answers)].url)
    try:
        sent = 0

        async def answered() -> bool:
            return await reader.call("XLEN", answers) == sent

        while sent < COMMANDS:
            await sender.call("XADD", tasks, "*", "type", "weft.nonsense", "data", "{}", "replyto", answers)
            sent += 1
            await until(answered, 60, "the command is rejected")
        reconnects = [each.reconnects for each in host._transports if isinstance(each, RespTransport)]
        # Not two for each answer. Each connection may begin at another server, and measuring asks for lengths.
        assert max(reconnects) < COMMANDS / 2, reconnects
    finally:
        await host.stop()
        for transport in (sender, reader):
            await transport.close()
