"""Messages of one sender to one agent instance are handled one at a time and in order, by any number of replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskHandle
from tests.fleet import Fleet
from tests.servers.matrix import is_full
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

SENDERS = ("ann", "ben", "cem", "dea")
EACH = 250 if is_full() else 100


async def test_each_senders_messages_are_handled_in_order_and_one_at_a_time(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    replicas = {"agent-handler": 3, "tool-handler": 1, "state-manager": 1}
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=replicas),
        Client.connect(valkey.url, namespace=namespace) as client,
    ):

        async def send(sender: str) -> list[TaskHandle]:
            """Send one message after the other, without waiting for their tasks."""
            return [
                await client.submit(
                    "ledger",
                    {"type": "Add", "data": {"sender": sender, "number": number, "path": str(path)}},
                    key="shared",
                )
                for number in range(EACH)
            ]

        handles = await asyncio.gather(*(send(sender) for sender in SENDERS))
        counts = [[(await handle.result(timeout=90)).value() for handle in of_sender] for of_sender in handles]
        asked = await client.submit("ledger", {"type": "str", "data": "all"}, key="shared")
        state = (await asked.result(timeout=60)).value()

    for of_sender in counts:
        assert of_sender == sorted(of_sender)
    assert sorted(count for of_sender in counts for count in of_sender) == list(range(1, len(SENDERS) * EACH + 1))
    for sender in SENDERS:
        assert [number for name, number in state if name == sender] == list(range(EACH))

    lines = path.read_text().splitlines()
    assert len(lines) == 2 * len(SENDERS) * EACH
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.partition(" ")[0] == "begin"
        assert end == begin.replace("begin", "end")
    assert [line.split()[1:] for line in lines[::2]] == [[name, str(number)] for name, number in state]
