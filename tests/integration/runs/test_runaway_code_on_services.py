"""Agents on services that emit endlessly or return far too much: memory stays bounded, and others continue."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from tests.fleet import Fleet
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

MIB = 1024 * 1024
RUNAWAYS = 6


def most_memory(pid: int) -> int:
    """The largest resident size of a process so far, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def test_memory_is_bounded_while_agents_emit_without_end(valkey: Server, namespace: str, tmp_path: Path) -> None:
    fleet = Fleet(valkey.url, namespace, tmp_path, app="tests.apps.runaway_app:app")
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        pid = fleet.members["agent-handler-1"].pid
        before = most_memory(pid)
        runaways = [await client.submit("emits") for _ in range(RUNAWAYS)]
        runaways += [await client.submit("returns", 64 * MIB) for _ in range(RUNAWAYS)]
        nap = await client.submit("naps", 0.0)
        assert (await nap.result(timeout=60)).status == "completed"
        for end in await asyncio.gather(*(task.result(timeout=120) for task in runaways)):
            assert end.status == "failed"
            assert end.error is not None
            assert end.error["type"] in ("LimitExceeded", "InvalidInput")
            assert "over" in end.error["message"] or "exceed" in end.error["message"]
            assert "limit" in end.error["message"]
        grown = most_memory(pid) - before
        # The 64 MiB that each of the others returns are their own.
        assert grown < (RUNAWAYS * 64 + 256) * MIB, f"it grew by {grown / MIB:.0f} MiB"
        assert fleet.harmed == 0
