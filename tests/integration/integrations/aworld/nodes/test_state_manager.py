"""`StateManager` with whole apps and a real server: runs as nodes, use from an agent, waits across a broker's death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.host.local import LocalApp
from runtime_core.integrations.aworld.nodes.store import RunNodeStatus
from tests.conftest import OwnServer
from tests.servers.process import Server
from weft import AgentContext, App, Client, Reject, SubmitOptions
from weft.aworld import HandleResult, RunNode, StateManager

WAIT = 30.0
"""Patience of a test, which decides nothing."""

app = App("nodes")
managers: dict[str, StateManager] = {}
"""What the agents below use, by session: an agent's process would connect its own."""


@app.tool
async def look_up(word: str) -> str:
    if word == "nothing":
        raise Reject("there is nothing")
    return word.upper()


@app.agent("helper")
async def helper(ctx: AgentContext, word: str) -> str:
    found: str = await ctx.tool(look_up, word=word)
    return found


@app.agent("lead")
async def lead(ctx: AgentContext, words: list[str]) -> list[object]:
    return list(await ctx.gather(*(ctx.agent(helper, word) for word in words)))


@app.agent("counting")
async def counting(ctx: AgentContext, input: None) -> str:
    """Counts external work as a node, once, however often the run is replayed."""
    state = managers[ctx.session_id]
    node_id = f"{ctx.task_id}-export"
    await ctx.step(state.create_node, node_id, "TOOL", "export", task_id=ctx.task_id)
    await ctx.step(state.run_node, node_id)
    await ctx.sleep(0.01)
    await ctx.step(state.run_succeed, node_id, "exported")
    node = await ctx.step(state.get_node, node_id)
    assert isinstance(node, dict)
    return f"{node['status']} {node['result_msg']}"


@pytest.fixture
async def local() -> AsyncIterator[tuple[LocalApp, Client]]:
    async with (running := LocalApp(app, trajectory=True)) as client:
        yield running, client


async def test_a_task_is_seen_while_it_runs_and_after_the_broker_has_forgotten_it(
    local: tuple[LocalApp, Client],
) -> None:
    running, client = local
    async with StateManager(client, running.trajectories) as state:
        task = await client.submit("lead", ["a", "b"], session_id="s")
        root = await state.wait_for_task(task.task_id, WAIT)
        assert root.status is RunNodeStatus.SUCCESS
        await running.recorded(task.task_id)
        for forgotten in (False, True):
            if forgotten:
                await task.delete()
            nodes = await state.query_by_task(task.task_id)
            assert sorted((node.busi_type.value, node.busi_id, node.status.value) for node in nodes) == [
                ("AGENT", "helper", "SUCCESS"),
                ("AGENT", "helper", "SUCCESS"),
                ("AGENT", "lead", "SUCCESS"),
                ("TOOL", "look_up", "SUCCESS"),
                ("TOOL", "look_up", "SUCCESS"),
            ]
            assert nodes == sorted(nodes, key=lambda node: (node.create_time, node.node_id))
            [tree] = await state.tree(task.task_id)
            assert tree.node.busi_id == "lead"
            assert [[below.node.busi_id for below in child.children] for child in tree.children] == [["look_up"]] * 2
            for found in (await state.query_by_session("s"), await state.query_by_agent("lead")):
                assert [node.node_id for node in found] == [f"{task.task_id}/r"]
            assert (await state.wait_for_task(task.task_id, WAIT)).status is RunNodeStatus.SUCCESS


async def test_a_failed_task_reports_why(local: tuple[LocalApp, Client]) -> None:
    running, client = local
    async with StateManager(client, running.trajectories) as state:
        task = await client.submit("lead", ["a", "nothing"])
        root = await state.wait_for_task(task.task_id, WAIT)
        assert (root.status, root.ended) == (RunNodeStatus.FAILED, True)
        assert root.result_msg
        await running.recorded(task.task_id)
        failed = await state.query_by_task(task.task_id, status="FAILED")
        assert [node.busi_id for node in failed] == ["lead", "helper", "look_up"]
        assert "there is nothing" in failed[-1].result_msg


async def test_a_task_past_its_time_limit_is_a_timeout(local: tuple[LocalApp, Client]) -> None:
    _, client = local
    async with StateManager(client) as state:
        gate = App("gate")

        @gate.agent("slow")
        async def slow(ctx: AgentContext, input: None) -> None:
            await ctx.human("well?")

        async with LocalApp(gate) as other, StateManager(other) as there:
            task = await other.submit("slow", None, options=SubmitOptions(timeout_seconds=0.05))
            assert (await there.wait_for_task(task.task_id, WAIT)).status is RunNodeStatus.TIMEOUT
        assert await state.query_by_agent("slow") == []


async def test_an_agent_counts_its_work_as_nodes(local: tuple[LocalApp, Client]) -> None:
    _, client = local
    async with StateManager(client) as state:
        managers["counted"] = state
        task = await client.submit("counting", None, session_id="counted")
        assert (await task.result(timeout=WAIT)).value() == "SUCCESS exported"
        node = await state.get_node(f"{task.task_id}-export")
        assert isinstance(node, RunNode)
        assert node.busi_id == "export"
        assert node in await state.query_by_task(task.task_id)
    managers.clear()


# -- a real server -----------------------------------------------------------------------------------------------


async def lost_once(client: Client, server: Server) -> EventBus:
    """Kill the broker and start it again. Returns once it answers."""
    server.kill()
    server.start()
    [bus] = client.buses
    async with asyncio.timeout(WAIT):
        await bus.transport.call("PING")
    return bus


async def test_waits_outlive_the_death_of_the_broker(own_server: OwnServer, namespace: str) -> None:
    server = own_server(append="always")
    async with (
        Client.connect(server.url, namespace=namespace) as client,
        StateManager(client, look_seconds=3600) as state,
        Client.connect(server.url, namespace=namespace) as another,
        StateManager(another) as elsewhere,
    ):
        await state.create_group("g", ["a", "b"])
        for name in ("a", "b"):
            await state.create_node(name, group_id="g")
        waits = [asyncio.create_task(wait) for wait in (state.wait_for_node("a", WAIT), state.wait_for_node("b", WAIT))]
        group = asyncio.create_task(state.wait_for_group("g", WAIT))
        await elsewhere.run_node("a")
        await elsewhere.run_succeed("a", "before", [HandleResult("x", result=1)])
        assert (await waits[0]).result_msg == "before"
        await lost_once(client, server)
        await elsewhere.run_node("b")
        await elsewhere.run_failed("b", "after")
        assert (await waits[1]).result_msg == "after"
        assert (await group).failed_root_node_ids == ["b"]
        kept = await state.get_node("a")
        assert kept is not None
        assert kept.results == [HandleResult("x", result=1)]


async def test_a_wait_sees_changes_made_during_an_outage(own_server: OwnServer, namespace: str) -> None:
    """A broker that comes back empty ends the wait with an error; the wait does not hang."""
    server = own_server(append=None)
    async with Client.connect(server.url, namespace=namespace) as client, StateManager(client) as state:
        await state.create_node("n")
        wait = asyncio.create_task(state.wait_for_node("n", WAIT))
        await state.create_node("other")
        await lost_once(client, server)
        with pytest.raises(Exception, match="no node 'n' is known"):
            await wait


WORKER = """
import asyncio, sys
from weft import Client
from weft.aworld import StateManager

async def main(url, namespace, node):
    async with Client.connect(url, namespace=namespace) as client, StateManager(client) as state:
        if await state.run_node(node):
            print("mine", flush=True)
            await asyncio.sleep(3600)
        print("another's", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_one_process_claims_a_node_and_after_its_death_the_group_fails(valkey: Server, namespace: str) -> None:
    async with Client.connect(valkey.url, namespace=namespace) as client, StateManager(client) as state:
        await state.create_group("g", ["n"])
        await state.create_node("n", group_id="g")
        command = [sys.executable, "-c", WORKER, valkey.url, namespace, "n"]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        try:
            said = {}
            for worker in workers:
                assert worker.stdout is not None
                said[worker.pid] = (await asyncio.to_thread(worker.stdout.readline)).strip()
            assert sorted(said.values()) == ["another's", "another's", "mine"]
            group = asyncio.create_task(state.wait_for_group("g", WAIT))
            winner = next(worker for worker in workers if said[worker.pid] == "mine")
            winner.kill()
            await asyncio.to_thread(winner.wait)
            assert await state.run_timeout("n", "its process died")
            assert (await group).failed_root_node_ids == ["n"]
        finally:
            for worker in workers:
                worker.kill()
                await asyncio.to_thread(worker.wait)
                assert worker.stdout is not None
                worker.stdout.close()
