"""A task that is ended early keeps the rows of the steps that its open turns had finished."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskHandle
from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.wire.commands import SubmitOptions
from tests.chaos.invariants import check_broker, check_trajectories
from tests.fleet import Fleet, plain_redis, until
from tests.servers.process import Server

WAIT = 60.0
HANDLER = "agent-handler-1"
FINISHED = {"flat": 3, "below": 4}
"""How many steps each task has finished when it ends."""


async def cancelled(fleet: Fleet, tasks: list[TaskHandle]) -> None:
    for task in tasks:
        await task.cancel()


async def cancelled_then_killed(fleet: Fleet, tasks: list[TaskHandle]) -> None:
    await cancelled(fleet, tasks)
    fleet.kill(HANDLER)


async def killed_then_cancelled(fleet: Fleet, tasks: list[TaskHandle]) -> None:
    fleet.kill(HANDLER)
    await cancelled(fleet, tasks)


async def out_of_time(fleet: Fleet, tasks: list[TaskHandle]) -> None:
    """Their time limit ends them."""


@pytest.mark.parametrize("end", [cancelled, cancelled_then_killed, killed_then_cancelled, out_of_time])
async def test_finished_steps_of_open_turns_have_rows(
    end: Callable[[Fleet, list[TaskHandle]], Awaitable[None]], valkey: Server, namespace: str, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    options = SubmitOptions(timeout_seconds=3.0 if end is out_of_time else None)
    async with (
        Fleet(valkey.url, namespace, tmp_path, app="tests.apps.seams_app:app") as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        tasks = [
            await client.submit(
                "spreads", {"path": str(ledger), "below": name == "below"}, task_id=name, options=options
            )
            for name in FINISHED
        ]

        async def finished() -> bool:
            return ledger.read_text().count("kept ") == sum(FINISHED.values())

        await until(finished, WAIT, "the steps are in the journals")
        await end(fleet, tasks)
        responses = [await task.result(timeout=WAIT) for task in tasks]
        assert {response.status for response in responses} == {"failed" if end is out_of_time else "cancelled"}
        await check_trajectories(fleet.trajectory_url, namespace, responses, 1)
        store = await TrajectoryStore.open(fleet.trajectory_url)
        try:
            for name, count in FINISHED.items():
                found = await store.task(namespace, name)
                assert found is not None
                assert len([step for step in found.steps if step.name.startswith("charge")]) == count
        finally:
            await store.close()
        async with plain_redis(valkey.port) as redis:
            await check_broker(redis, namespace)
