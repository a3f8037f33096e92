"""MCP servers in tool-handler processes: several replicas, kills, and the announced tools."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from runtime_core.client.client import Client
from tests.fleet import Fleet, plain_redis, until
from tests.mcp_servers.ledger import VARIABLE, Ledger
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)

APP = "tests.apps.mcp_app:app"
SECONDS = 90.0


def fleet(server: Server, namespace: str, folder: Path, tool_handlers: int) -> tuple[Fleet, Ledger]:
    ledger = Ledger(folder / "ledger")
    replicas = {"agent-handler": 1, "tool-handler": tool_handlers, "state-manager": 1}
    return Fleet(
        server.url, namespace, folder, replicas=replicas, app=APP, environ={VARIABLE: str(ledger.path)}
    ), ledger


async def used(client: Client, tool: str, **arguments: object) -> object:
    task = await client.submit("use", {"tool": tool, "arguments": arguments})
    return (await task.result(timeout=SECONDS)).output


def alive(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_each_tool_handler_has_its_own_server_and_agent_handlers_have_none(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    members, ledger = fleet(valkey, namespace, tmp_path, tool_handlers=2)
    async with members, Client.connect(valkey.url, namespace=namespace) as client:
        # The first call comes before any server is connected, and waits for one.
        assert await used(client, "desk.say", text="first") == "first"

        async def both() -> bool:
            return len(ledger.lines("started")) == 2

        await until(both, SECONDS, "each has started its server")

        async def shared() -> bool:
            await asyncio.gather(*(used(client, "desk.echo", text="a") for _ in range(20)))
            return len({line["pid"] for line in ledger.lines("echo")}) == 2

        await until(shared, SECONDS, "both servers were called")
        assert len(ledger.lines("started")) == 2
        handlers = {members.members[name].pid for name in members.names("tool-handler")}
        parents = {
            int(Path(f"/proc/{line['pid']}/stat").read_text().rpartition(")")[2].split()[1])
            for line in ledger.lines("started")
        }
        assert parents == handlers
        assert "mcp" not in members.members["agent-handler-1"].text()

        async with plain_redis(valkey.port) as redis:
            published = json.loads(await redis.hget(f"{namespace}:{{0}}:manifests", "mcp-app/mcp/desk"))
            assert published["tools"]["desk.echo"]["arguments"]["required"] == ["text"]
            assert published["tools"]["desk.pay"]["repeatable"] is False
            assert published["tools"]["desk.slow"].get("repeatable", True) is True
            assert await redis.hget(f"{namespace}:{{0}}:tools", "desk.say") == b"tool"
    assert not any(alive(line["pid"]) for line in ledger.lines("started"))


async def test_a_call_that_may_not_be_repeated_ends_as_unknown_when_its_tool_handler_is_killed(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    members, ledger = fleet(valkey, namespace, tmp_path, tool_handlers=1)
    async with members, Client.connect(valkey.url, namespace=namespace) as client:
        paying = asyncio.create_task(used(client, "desk.pay", name="rent", seconds=600))

        async def begun() -> object:
            return ledger.lines("begun")

        await until(begun, SECONDS, "the call has begun")
        [line] = ledger.lines("begun")
        # A server that hangs does not see that nobody listens to it any more.
        os.kill(line["pid"], signal.SIGSTOP)
        members.kill("tool-handler-1")
        failed = await paying
        assert isinstance(failed, dict)
        assert failed["error"] == "UnknownOutcome"
        assert len(ledger.lines("begun")) == 1

        async def ended() -> bool:
            return not alive(line["pid"])

        try:
            await until(ended, SECONDS, "no server outlives its tool-handler")
        finally:
            with suppress(ProcessLookupError):
                os.kill(line["pid"], signal.SIGKILL)


async def test_a_repeatable_call_runs_again_with_its_key_after_a_kill_of_its_tool_handler(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    members, ledger = fleet(valkey, namespace, tmp_path, tool_handlers=1)
    async with members, Client.connect(valkey.url, namespace=namespace) as client:
        going = asyncio.create_task(used(client, "desk.slow", name="n", seconds=3.0))

        async def begun() -> object:
            return ledger.lines("begun")

        await until(begun, SECONDS, "the call has begun")
        members.kill("tool-handler-1")
        assert await going == {"name": "n"}
        lines = ledger.lines("begun")
        assert len(lines) >= 2
        assert len({line["key"] for line in lines}) == 1


async def test_a_server_that_dies_all_the_time_disturbs_no_other_tool(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    members, ledger = fleet(valkey, namespace, tmp_path, tool_handlers=1)
    async with members, Client.connect(valkey.url, namespace=namespace) as client:
        assert await used(client, "desk.say", text="a") == "a"
        for _ in range(3):
            os.kill(ledger.lines("started")[-1]["pid"], signal.SIGKILL)
            count = len(ledger.lines("started"))
            assert await used(client, "own") == "served"

            async def again(before: int = count) -> bool:
                return len(ledger.lines("started")) > before

            await until(again, SECONDS, "the server was started again")
        assert await used(client, "desk.say", text="b") == "b"
