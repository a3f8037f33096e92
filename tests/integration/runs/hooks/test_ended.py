"""End hooks run once, whatever ended the task: in an app of one process, and on the services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime_core.bus.deliveries import pairs
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.errors import Reject
from runtime_core.host.local import LocalApp
from runtime_core.runs.hooks.declared import Deny
from runtime_core.state_manager.dead_letters import DeadLetters
from runtime_core.wire.ids import instance_address, partition_of
from tests.apps.ends_app import HOOKS, app
from tests.fleet import Fleet, until
from tests.servers.process import Server
from weft import AgentContext, App, Client, SubmitOptions, TaskHandle
from weft.hooks import HookEvent

pytestmark = pytest.mark.timeout(300)

AGENT = "weft.task-ended.ends"
LOCAL, SERVICES = "local", "services"


@asynccontextmanager
async def running(place: str, server: Callable[[], Server], namespace: str, folder: Path) -> AsyncIterator[Client]:
    if place == LOCAL:
        async with LocalApp(app) as client:
            yield client
        return
    url = server().url
    replicas = {"agent-handler": 2, "tool-handler": 1, "state-manager": 1}
    async with (
        Fleet(url, namespace, folder, app="tests.apps.ends_app:app", replicas=replicas, may_die=True),
        Client.connect(url, namespace=namespace) as client,
    ):
        yield client


@pytest.fixture(params=[LOCAL, SERVICES])
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Callable[[], Server]:
    """A server that starts when it is first used."""

    def start() -> Server:
        found = request.getfixturevalue("valkey")
        assert isinstance(found, Server)
        return found

    return start


def noted(path: Path) -> list[list[str]]:
    """The hooks' notes: hook, task, agent, name, type of the error."""
    return [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []


async def all_done(client: Client) -> None:
    """Wait until no hook of an end is running or queued."""

    async def done() -> bool:
        for bus in client.buses:
            entries = pairs(await bus.transport.call("XRANGE", bus.keys.stream("agent"), "-", "+"))
            if any(AGENT.encode() in fields[1] for _, fields in entries):
                return False
        return True

    await until(done, 60, "the hooks of ends have run")


async def submit(
    client: Client,
    path: Path,
    agent: str,
    input: object = None,
    *,
    key: str = "",
    hooks: Mapping[str, list[str]] = HOOKS,
    **limits: float,
) -> TaskHandle:
    options = SubmitOptions(hooks=hooks, metadata={"path": str(path)}, **limits)  # type: ignore[arg-type]  # limits all
    return await client.submit(agent, input, key=key, session_id="s", options=options)


async def test_each_kind_of_end_runs_the_hooks_once(
    place: str, server: Callable[[], Server], namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with running(place, server, namespace, tmp_path / "fleet") as client:
        waits = await submit(client, path, "queue", "waits", key="one")
        tasks = {
            "Cancelled": await submit(client, path, "naps"),
            "TimeLimit": await submit(client, path, "naps", timeout_seconds=0.3),
            "ValueError": await submit(client, path, "raises"),
            "Reject": await submit(client, path, "rejects"),
        }
        limits = [
            await submit(client, path, "steps", max_steps=4),
            await submit(client, path, "spends", max_tokens=10),
        ]
        turn = await submit(client, path, "hangs")
        output = await submit(client, path, "unspeakable")
        queued = await submit(client, path, "queue", "never begins", key="one")
        fine = await submit(client, path, "echo", 1)
        await tasks["Cancelled"].cancel("no more")
        await queued.cancel("no more")
        ends = {}
        kinds = [*tasks.items(), *(("LimitExceeded", task) for task in limits)]
        for kind, task in [*kinds, ("TimeLimit", turn), ("InvalidInput", output), ("Cancelled", queued)]:
            response = await task.result(timeout=60)
            assert response.error is not None
            assert response.error["type"] == kind
            ends[task.task_id] = kind
        assert (await fine.result(timeout=60)).value() == 1
        await waits.cancel("enough")
        ends[waits.task_id] = "Cancelled"
        await all_done(client)
    found = noted(path)
    for ended, kind in ends.items():
        mine = [(hook, name, error) for hook, of, _, name, error in found if of == ended]
        agent = next(agent for _, of, agent, _, _ in found if of == ended)
        assert mine == [
            ("after", agent, kind),
            ("handle_error", agent, kind),
            ("send_alert", agent, kind),
            ("close_session", "s", kind),
        ], ended
    assert [hook for hook, of, *_ in found if of == fine.task_id] == ["after", "celebrate"]
    assert {of for _, of, *_ in found} == {*ends, fine.task_id}


async def test_a_living_process_runs_the_end_hooks_of_an_agent_that_kills_its_process(
    server: Callable[[], Server], namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with running(SERVICES, server, namespace, tmp_path / "fleet") as client:
        task = await submit(client, path, "dies")
        response = await task.result(timeout=90)
        assert response.error is not None
        assert response.error["type"] == "Poison"
        await all_done(client)
    assert [(hook, error) for hook, _, _, _, error in noted(path)] == [
        ("after", "Poison"), ("handle_error", "Poison"), ("send_alert", "Poison"), ("close_session", "Poison"),
    ]  # fmt: skip


async def test_a_hook_that_kills_its_process_does_not_repeat_earlier_hooks(
    server: Callable[[], Server], namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with running(SERVICES, server, namespace, tmp_path / "fleet") as client:
        hooks = {"error": ["handle_error", "dies_once", "send_alert"]}
        task = await submit(client, path, "rejects", hooks=hooks)
        assert (await task.result(timeout=60)).status == "failed"
        await all_done(client)
    assert [hook for hook, *_ in noted(path)] == ["handle_error", "dies_once", "send_alert"]


async def test_messages_carry_the_hooks_and_a_full_mailbox_is_an_end(
    place: str, server: Callable[[], Server], namespace: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with running(place, server, namespace, tmp_path / "fleet") as client:
        for bus in client.buses:
            await bus.transport.call("HSET", bus.keys.meta, "mailbox_max", 1)
        waits = await submit(client, path, "queue", "waits", key="one")

        async for event in waits.stream():
            if event.type == "weft.human.requested":
                break
        tells = await submit(client, path, "tells", ["fails", "finds no room"])
        assert (await tells.result(timeout=60)).status == "completed"
        await all_done(client)
        await waits.cancel("enough")

        async def both() -> bool:
            return len([line for line in noted(path) if line[0] == "send_alert"]) >= 3

        await until(both, 40, "the mailbox is emptied")
        await all_done(client)
    alerts = {of: error for hook, of, _, _, error in noted(path) if hook == "send_alert"}
    assert alerts.pop(waits.task_id) == "Cancelled"
    assert sorted(alerts.values()) == ["MailboxFull", "ValueError"]
    assert tells.task_id not in alerts
    assert len([line for line in noted(path) if line[0] == "send_alert"]) == 3


async def test_a_task_whose_agents_live_in_other_partitions_has_one_beginning_and_one_end(
    server: Callable[[], Server], namespace: str, tmp_path: Path
) -> None:
    path, url, partitions = tmp_path / "notes", server().url, 3
    replicas = {"agent-handler": 1, "state-manager": 1}
    settings = {"WEFT_PARTITIONS": str(partitions)}
    keys = [f"k{number}" for number in range(6)]
    assert len({partition_of(instance_address("queue", key), partitions) for key in keys}) == partitions
    async with (
        Fleet(url, namespace, tmp_path / "fleet", app="tests.apps.ends_app:app", replicas=replicas, environ=settings),
        Client.connect(url, namespace=namespace, partitions=partitions) as client,
    ):
        hooks = {"start": ["begin"], "error": ["handle_error"]}
        tasks = [await submit(client, path, "asks", key, hooks=hooks) for key in keys]
        for task in tasks:
            assert (await task.result(timeout=60)).status == "failed"
        await all_done(client)
    for hook in hooks:
        name = hooks[hook][0]
        assert sorted(of for each, of, *_ in noted(path) if each == name) == sorted(task.task_id for task in tasks)


# ---- in one process --------------------------------------------------------------------------------------------


async def test_always_hooks_run_for_a_task_that_never_started() -> None:
    desk, seen = App("desk"), []

    @desk.hook("error", always=True)
    def alert(event: HookEvent) -> None:
        assert event.error is not None
        seen.append((event.task_id, event.run_id, event.agent, event.key, event.error["type"], event.payload))

    @desk.agent("waits")
    async def waits(ctx: AgentContext) -> None:
        await ctx.human("go on?")

    async with LocalApp(desk) as client:
        await client.submit("waits", key="k", task_id="first")
        second = await client.submit("waits", key="k", task_id="second")
        await second.cancel("no more")
    assert seen == [("second", "r", "waits", "k", "Cancelled", None)]


async def test_an_app_ends_after_the_hooks_of_its_tasks_ends() -> None:
    """There are more hooks than a consumer takes at once; the rest waits on the broker."""
    desk, seen = App("desk"), set()

    @desk.hook("error", always=True)
    async def alert(event: HookEvent) -> None:
        await asyncio.sleep(0)
        seen.add(event.task_id)

    @desk.agent("waits")
    async def waits(ctx: AgentContext) -> None:
        await ctx.human("go on?")

    async with LocalApp(desk) as client:
        tasks = [await client.submit("waits", key="k") for _ in range(1000)]
        await asyncio.gather(*(task.cancel("no more") for task in tasks))
    assert seen == {task.task_id for task in tasks}


async def test_end_hooks_can_only_observe_and_their_failures_are_reported() -> None:
    desk = App("desk")
    seen: list[object] = []

    @desk.hook("error", always=True, guard=True)
    def too_late(event: HookEvent) -> Deny:
        return Deny("no")

    @desk.hook("error", always=True)
    def alert(event: HookEvent) -> None:
        seen.append(event.attempt)

    @desk.hook("start", always=True)
    def starts(event: HookEvent) -> None:
        seen.append(event.agent)

    @desk.agent("agent", retry=RetryPolicy(attempts=2, base_seconds=0.001))
    async def agent(ctx: AgentContext) -> None:
        raise ValueError(f"attempt {ctx.attempt}")

    local = LocalApp(desk)
    async with local as client:
        task = await client.submit("agent")
        assert (await task.result(timeout=60)).status == "failed"
    assert seen == ["agent", 2]
    assert 'weft_hook_failures_total{point="task_failed",service="local"} 1.0' in local.metrics.exposition().decode()


async def test_a_redriven_task_that_fails_again_has_two_ends() -> None:
    desk, seen = App("desk"), []

    @desk.hook("error", always=True)
    def alert(event: HookEvent) -> None:
        seen.append(event.error["message"] if event.error is not None else "")

    @desk.agent("agent", retry=RetryPolicy(attempts=1))
    async def agent(ctx: AgentContext) -> None:
        raise ValueError(f"broken {len(seen)}")

    async with LocalApp(desk) as client:
        task = await client.submit("agent")
        assert (await task.result(timeout=60)).status == "failed"

        async def told() -> bool:
            return bool(seen)

        await until(told, 60, "the first end is told")
        letters = DeadLetters(client.buses)
        async for letter in letters.all():
            await letters.redrive(letter.letter_id, reopen=True)
        again = await client.task(task.task_id)
        assert (await again.result(timeout=60)).status == "failed"
    assert seen == ["broken 0", "broken 1"]


async def test_a_message_carries_its_senders_session_and_metadata_but_not_its_topic() -> None:
    desk, seen = App("desk"), []

    @desk.agent("hears", topics=["news"])
    async def hears(ctx: AgentContext, text: str) -> None:
        await ctx.send("told", text)

    @desk.agent("told")
    async def told(ctx: AgentContext, text: str) -> None:
        seen.append((text, ctx.session_id, dict(ctx.metadata), ctx.topic, ctx.sender))

    @desk.agent("sends")
    async def sends(ctx: AgentContext) -> None:
        await ctx.send("told", "direct")

    @desk.agent("publishes")
    async def publishes(ctx: AgentContext) -> None:
        await ctx.publish("news", "by topic")

    async with LocalApp(desk) as client:
        for agent in ("sends", "publishes"):
            task = await client.submit(
                agent, session_id="s", options=SubmitOptions(metadata={"order": 7}, timeout_seconds=90)
            )
            assert (await task.result(timeout=60)).status == "completed"

        async def both() -> bool:
            return len(seen) == 2

        await until(both, 60, "both messages are there")
    assert sorted(seen) == [("by topic", "s", {"order": 7}, "", ""), ("direct", "s", {"order": 7}, "", "")]


async def test_an_app_without_such_hooks_declares_no_agent_for_them() -> None:
    desk = App("desk")
    desk.hook("start", name="log", always=True)(lambda event: None)

    @desk.agent("agent")
    async def agent(ctx: AgentContext) -> None:
        raise Reject("no")

    assert list(desk.manifest().agents) == ["agent"]
    desk.hook("error", name="alert")(lambda event: None)
    assert list(desk.manifest().agents) == ["agent", "weft.task-ended.desk"]
