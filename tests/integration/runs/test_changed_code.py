"""Handlers are killed while each restart runs newer code: with `ctx.patched` every task ends as its code began it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskHandle
from tests.fleet import Fleet, plain_redis, until
from tests.servers.matrix import only_in_matrix
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


def put(release: Path, number: str) -> None:
    """Set the release: a process that starts meanwhile reads the old number or the new one."""
    aside = release.with_suffix(".aside")
    aside.write_text(number)
    aside.replace(release)


async def test_tasks_end_while_handlers_are_killed_and_come_back_with_newer_code(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    put(release, "1")
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
            put(release, str(number))
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


async def test_a_task_whose_code_differs_names_both_calls_and_the_line(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    put(release, "1")
    fleet = Fleet(
        valkey.url,
        namespace,
        tmp_path,
        app="tests.apps.changing_app:app",
        environ={"CHANGING_APP_RELEASE": str(release), "WEFT_DATA_DIR": str(tmp_path)},
    )
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        task = await client.submit("careless", "tea", task_id="t-1")

        async def waits(at: str) -> bool:
            async with plain_redis(valkey.port, text=True) as redis:
                return str(await redis.hget(f"{namespace}:{{0}}:task:{task.task_id}", "cur")) == at

        async def sleeps() -> bool:
            async with plain_redis(valkey.port, text=True) as redis:
                return bool(await redis.hexists(f"{namespace}:{{0}}:task:{task.task_id}", "m:2"))

        await until(sleeps, 30, "the task sleeps")
        put(release, "2")
        fleet.kill("agent-handler-1")
        await fleet.ready(["agent-handler-1"])
        async with plain_redis(valkey.port, text=True) as redis:  # wake it
            await redis.zadd(f"{namespace}:{{0}}:timers", {"s|t-1|r|2": 1}, xx=True)
        await until(lambda: waits("park"), 30, "the task is parked")
        shown = (await fleet.weft("task", "show", "t-1")).stdout
        assert "status   waiting (parked)\n" in shown
        assert re.search(r"t-1 +parked +careless", (await fleet.weft("task", "list")).stdout)
        assert "changing_app.py:" in shown
        assert "in careless\n" in shown
        assert "code: found = await ctx.tool(lookup_all, names=[name])\n" in shown
        assert 'recorded: ctx.tool("lookup", name="tea")\n' in shown
        assert 'now: ctx.tool("lookup_all", names=["tea"])\n' in shown
        letters = json.loads((await fleet.weft("dead", "list", "--json")).stdout)
        message = letters[0]["error"]["message"]
        assert message.startswith("step 1 of run r (changing_app.py:")
        assert (
            'the journal has ctx.tool("lookup", name="tea"), but the code now requests ctx.tool("lookup_all"' in message
        )
        report = json.loads((await fleet.weft("doctor", "--json")).stdout)
        (parked,) = [check for check in report["checks"] if check["check"] == "parked"]
        assert not parked["ok"]
        assert "agent 'careless' of task t-1 is parked: step 1 of run r" in parked["message"]
        assert parked["remedy"] == f"weft task show t-1; weft dead redrive {letters[0]['letter_id']}"
        # A rollback and a redrive: it goes on.
        put(release, "1")
        fleet.kill("agent-handler-1")
        await fleet.ready(["agent-handler-1"])
        assert (await fleet.weft("dead", "redrive", "--all")).returncode == 0
        assert (await task.result(timeout=30)).output == "tea"
        report = json.loads((await fleet.weft("doctor", "--json")).stdout)
        assert [check["ok"] for check in report["checks"] if check["check"] == "parked"] == [True]


@only_in_matrix("by all commands")
async def test_a_renamed_agent_is_named_by_commands_and_the_log(valkey: Server, namespace: str, tmp_path: Path) -> None:
    release = tmp_path / "release"
    put(release, "1")
    fleet = Fleet(
        valkey.url,
        namespace,
        tmp_path,
        app="tests.apps.changing_app:app",
        environ={"CHANGING_APP_RELEASE": str(release), "WEFT_DATA_DIR": str(tmp_path)},
    )
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client:
        await client.submit("att", None, task_id="t-1")

        async def waits() -> bool:
            async with plain_redis(valkey.port, text=True) as redis:
                return str(await redis.hget(f"{namespace}:{{0}}:task:t-1", "status")) == "waiting"

        await until(waits, 30, "the task waits")
        assert "no running handler" not in (await fleet.weft("task", "show", "t-1")).stdout
        put(release, "4")
        fleet.kill("agent-handler-1")
        await fleet.ready(["agent-handler-1"])

        async def logged() -> bool:
            return "no running handler has agent 'att'" in fleet.members["state-manager-1"].text()

        await until(logged, 30, "the state-manager names it")
        shown = (await fleet.weft("task", "show", "t-1")).stdout
        assert "no running handler has agent 'att': start one, or roll back" in shown
        report = json.loads((await fleet.weft("doctor", "--json")).stdout)
        (names,) = [check for check in report["checks"] if check["check"] == "names"]
        assert names["message"] == "no running handler has agent 'att': 1 run or call waits for it, such as task t-1"
        put(release, "1")
        fleet.kill("agent-handler-1")
        await fleet.ready(["agent-handler-1"])

        async def served() -> bool:
            return "no work waits any more for agent 'att'" in fleet.members["state-manager-1"].text()

        await until(served, 30, "the state-manager sees it again")
