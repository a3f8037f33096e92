"""Handlers are killed while each restart runs newer code: with `ctx.patched` every task ends as its code began it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskHandle
from tests.fleet import Fleet, plain_redis
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ROUNDS = 3
HANDLERS = ("agent-handler-1", "agent-handler-2")


def steps(*, outline: bool, check: bool) -> list[str]:
    middle = [part for number in range(ROUNDS) for part in (f"draft {number}", f"fact {number}")]
    return ["begin", *["outline"] * outline, *middle, *["check", "checked"] * check, "end"]


ALLOWED = {
    1: [steps(outline=outline, check=check) for outline in (False, True) for check in (False, True)],
    2: [steps(outline=True, check=check) for check in (False, True)],
    3: [steps(outline=True, check=True)],
}
"""The possible results of a task, by the release that it was submitted to."""


async def test_tasks_end_while_handlers_are_killed_and_come_back_with_newer_code(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    release.write_text("1")
    fleet = Fleet(
        valkey.url,
        namespace,
        tmp_path / "fleet",
        replicas={"agent-handler": 2, "tool-handler": 1, "state-manager": 1, "trajectory-recorder": 1},
        app="tests.apps.changing_app:app",
        environ={"CHANGING_APP_RELEASE": str(release)},
    )
    tasks: list[tuple[int, TaskHandle]] = []
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        for number in (1, 2, 3):
            release.write_text(str(number))
            if number > 1:
                # One after the other: both releases run side by side meanwhile.
                for name in HANDLERS:
                    fleet.kill(name)
                    tasks += [(number - 1, await client.submit("report", ROUNDS)) for _ in range(10)]
                    await fleet.ready([name])
            tasks += [(number, await client.submit("report", ROUNDS)) for _ in range(30)]
            await asyncio.sleep(0.1)  # so that kills meet tasks at all of their steps
        results = await asyncio.gather(*(task.result(timeout=120) for _, task in tasks))
        for (begun_with, _), result in zip(tasks, results, strict=True):
            assert result.status == "completed", result
            assert result.output in ALLOWED[begun_with], (begun_with, result.output)
        assert len({str(result.output) for result in results}) > 1
        assert fleet.harmed == 4
        async with plain_redis(valkey.port) as redis:
            assert await redis.xlen(f"{namespace}:{{0}}:dead") == 0
