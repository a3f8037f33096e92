"""What the doctor measures itself. `tests/integration/cli/test_doctor.py` runs all checks by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.client.doctor import Changes, Installation
from runtime_core.client.doctor import server as check_server
from runtime_core.settings import Settings
from tests.servers.process import Server
from tests.servers.proxy import Proxy


@pytest.mark.parametrize(("lease_seconds", "ok"), [(0.1, False), (30.0, True)])
async def test_the_doctor_reports_a_broker_that_is_slower_than_the_lease(
    lease_seconds: float, ok: bool, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    async with Proxy(valkey.url) as proxy:
        transport = RespTransport(parse_address(proxy.url))
        await transport.connect(60)
        buses = [EventBus(transport, Keys(namespace, 0))]
        settings = Settings(data_dir=tmp_path, trajectory_url="", lease_seconds=lease_seconds)
        proxy.delay_seconds = 0.1
        [finding] = [
            finding async for finding in check_server(Installation(settings, proxy.url, transport, buses), Changes())
        ]
        await transport.close()
    assert finding.ok == ok, finding.message
    assert ("longer than the lease of 0.1 s" in finding.message) != ok
