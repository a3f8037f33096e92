"""A process that was stopped in the middle, as by SIGSTOP, holds replies of the broker that it has not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_core.client.client import Client
from tests.chaos.invariants import check_broker, check_instances, check_once
from tests.fleet import Fleet, plain_redis, until
from tests.servers.process import Server

WAIT = 60.0
HANDLER = "tool-handler-1"
REPLICAS = {"agent-handler": 1, "tool-handler": 1, "state-manager": 1}


@pytest.mark.parametrize("ends", ["cancelled", "declared dead"])
async def test_a_call_in_an_unread_reply_runs_once_or_never(
    ends: str, valkey: Server, namespace: str, tmp_path: Path
) -> None:
    """The broker has handed out the call, and the process finds it in its socket when it continues.

    By then the task is cancelled, or the process is declared dead, so that the call is no longer its own.
    """
    ledger = tmp_path / "ledger"
    ledger.touch()
    async with (
        Fleet(valkey.url, namespace, tmp_path, replicas=REPLICAS, app="tests.apps.seams_app:app") as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
        plain_redis(valkey.port) as redis,
    ):
        stream = f"{namespace}:{{0}}:tool"

        async def asked() -> bool:
            return bool(await redis.xlen(stream))

        before = 0
        while True:
            fleet.pause(HANDLER)
            task = await client.submit("clerk", {"path": str(ledger), "waits": [0.01]}, task_id=f"t{before}")
            await until(asked, WAIT, "the call is on its stream")
            [group] = await redis.xinfo_groups(stream)
            if group["pending"]:
                break
            # No read was under way: nobody has got the call.
            fleet.resume(HANDLER)
            await task.result(timeout=WAIT)
            before += 1
        if ends == "cancelled":
            await task.cancel()
        else:
            paused = fleet.members[HANDLER].pid

            async def declared_dead() -> bool:
                alive = await redis.zrange(f"{namespace}:{{0}}:alive", 0, -1)
                return not any(f".{paused}.".encode() in owner for owner in alive)

            await until(declared_dead, WAIT, "the others declare it dead")
        fleet.resume(HANDLER)
        response = await task.result(timeout=WAIT)
        await check_broker(redis, namespace)
        await check_instances(redis, namespace)
    check_once(ledger)
    begun = ledger.read_text().count("once ") - before
    assert (response.output, begun) == ((None, 0) if ends == "cancelled" else ("done", 1))
