"""Admission keeps the order of the ingress stream, even if the leading state-manager dies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from runtime_core.bus.connection import RespTransport
from runtime_core.bus.connector import parse_address
from runtime_core.client.client import Client
from tests.fleet import Fleet, until
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

SENDERS = ("ann", "ben", "cem", "dea")
EACH = 60


async def test_senders_keep_their_order_while_the_admitter_is_killed(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "notes")
    replicas = {"agent-handler": 2, "tool-handler": 1, "state-manager": 2}
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=replicas) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        edge = RespTransport(parse_address(valkey.url))
        await edge.connect(5)

        async def send(sender: str) -> None:
            for number in range(EACH):
                message = {"type": "Add", "data": {"sender": sender, "number": number, "path": path}}
                data = json.dumps({"agent": "ledger", "key": "shared", "input": message})
                await edge.call(
                    "XADD", f"{namespace}:tasks", "*", "type", "weft.task.submit", "id", f"{sender}-{number}",
                    "data", data,
                )  # fmt: skip
                if number == EACH // 2 and sender == SENDERS[0]:
                    for name in fleet.names("state-manager"):
                        if "leads admit" in fleet.members[name].text():
                            fleet.kill(name)

        await asyncio.gather(*(send(sender) for sender in SENDERS))

        async def admitted() -> bool:
            return await edge.call("XLEN", f"{namespace}:tasks") == 0

        await until(admitted, 60, "everything is admitted")
        await edge.close()
        asked = await client.submit("ledger", {"type": "str", "data": "all"}, key="shared")
        state = (await asked.result(timeout=60)).value()
    for sender in SENDERS:
        assert [number for name, number in state if name == sender] == list(range(EACH))


async def test_the_others_continue_without_a_state_manager(valkey: Server, namespace: str, tmp_path: Path) -> None:
    """Every consumer reclaims deliveries and promotes timers."""
    replicas = {"agent-handler": 2, "tool-handler": 1, "trajectory-recorder": 1}
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=replicas) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        tasks = [await client.submit("naps", 0.5) for _ in range(8)]
        fleet.kill(fleet.names("agent-handler")[0])
        for task in tasks:
            assert (await task.result(timeout=60)).status == "completed"
