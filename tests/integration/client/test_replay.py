"""`check` runs new code on recorded tasks, and names the first difference of each in words."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime_core.client.replay import Check, check
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.errors import InvalidInput
from runtime_core.host.local import LocalApp
from runtime_core.runs.journal import canonical
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.wire.ids import step_digest
from runtime_core.wire.step import DIGEST, ENCODER, NOTHING, StepFailure
from tests.servers.matrix import is_full
from tests.service_forks import SOURCES
from weft import AgentContext, App

Code = Callable[[AgentContext, str], Awaitable[object]]


def desk(code: Code, name: str = "desk") -> App:
    """Return an app with this agent, a second agent and some tools."""
    app = App("desk")

    @app.tool
    async def search(query: str) -> str:
        return f"found {query}"

    @app.tool
    async def rank(items: list[str]) -> list[str]:
        return items

    @app.agent("writer")
    async def writer(ctx: AgentContext, text: str) -> str:
        return str(await ctx.step(str.upper, text, name="upper"))

    app.agent(name, retry=RetryPolicy(attempts=3, base_seconds=0.001))(code)  # type: ignore[type-var]  # is checked there
    return app


async def before(ctx: AgentContext, topic: str) -> object:
    found = await ctx.tool("search", query=topic)
    await ctx.emit(found)
    written = await ctx.agent("writer", found)
    await ctx.sleep(0.001)
    return written


@asynccontextmanager
async def recorded(app: App, folder: Path, *tasks: tuple[str, str, str]) -> AsyncIterator[TrajectoryStore]:
    """Run tasks (id, agent, key) and open their record."""
    url = f"sqlite:///{folder / 'trajectory.db'}"
    local = LocalApp(app, trajectory=url)
    async with local as client:
        for task, agent, key in tasks:
            handle = await client.submit(agent, "tea", task_id=task, key=key)
            await handle.result(timeout=60)
            await local.recorded(task)
    store = await TrajectoryStore.open(url)
    try:
        yield store
    finally:
        await store.close()


async def checked(old: Code, new: Code, folder: Path, *, key: str = "", **more: Any) -> Check:
    async with recorded(desk(old), folder, ("t-1", "desk", key)) as store:
        return await check(store, desk(new), namespace="local", **more)


def only(found: Check) -> tuple[str, str, str]:
    """Return step, recorded side and new side of the only difference."""
    (difference,) = found.differences
    assert (difference.task, difference.agent, difference.run) == ("t-1", "desk", "r")
    return difference.step, difference.recorded, difference.now


async def test_the_same_code_does_not_differ(tmp_path: Path) -> None:
    found = await checked(before, before, tmp_path)
    assert (found.ok, found.tasks, found.runs) == (True, 1, 2), str(found)


async def test_another_result_is_no_difference(tmp_path: Path) -> None:
    async def after(ctx: AgentContext, topic: str) -> object:
        return {"text": await before(ctx, topic), "version": 2}

    assert (await checked(before, after, tmp_path)).ok


async def test_other_arguments_are_named(tmp_path: Path) -> None:
    async def after(ctx: AgentContext, topic: str) -> object:
        return await ctx.tool("search", query=f"{topic}!")

    found = await checked(before, after, tmp_path)
    assert only(found) == ("1", 'ctx.tool("search", query="tea")', 'ctx.tool("search", query="tea!")')
    assert found.differences[0].line.startswith("test_replay.py:")
    assert str(found).endswith("tasks: 1, runs: 1, differences: 1")


async def test_another_agent_is_named(tmp_path: Path) -> None:
    async def after(ctx: AgentContext, topic: str) -> object:
        await ctx.emit(await ctx.tool("search", query=topic))
        return await ctx.tool("rank", items=[topic])

    step, was, now = only(await checked(before, after, tmp_path))
    assert (step, was, now) == ("2", 'ctx.agent("writer", "found tea")', 'ctx.tool("rank", items=["tea"])')


async def test_a_missing_step_is_named(tmp_path: Path) -> None:
    async def less(ctx: AgentContext, topic: str) -> object:
        return await ctx.tool("search", query=topic)

    step, was, now = only(await checked(before, less, tmp_path))
    assert (step, was, now) == ("2", 'ctx.agent("writer", "found tea")', "it ends without this step")


async def test_a_step_after_the_last_one_is_a_note(tmp_path: Path) -> None:
    async def more(ctx: AgentContext, topic: str) -> object:
        await before(ctx, topic)
        return await ctx.tool("rank", items=[])

    async with recorded(desk(before), tmp_path, ("t-1", "desk", ""), ("t-2", "desk", "")) as store:
        found = await check(store, desk(more), namespace="local")
    assert (found.ok, found.tasks, found.runs, found.differences) == (True, 2, 4, [])
    assert [(each.task, each.now) for each in found.further] == [
        ("t-1", 'ctx.tool("rank", items=[])'),
        ("t-2", 'ctx.tool("rank", items=[])'),
    ]
    note, total = str(found).splitlines()
    assert note.startswith("note: 2 runs of agent 'desk' ended, and the code goes on at test_replay.py:")
    assert ' in more, such as ctx.tool("rank", items=[]) in task t-1' in note
    assert total == "tasks: 2, runs: 4, differences: 0"


async def test_a_step_inserted_in_a_branch_before_the_last_step_is_a_difference(tmp_path: Path) -> None:
    async def branch(ctx: AgentContext, topic: str, *, twice: bool) -> object:
        await ctx.tool("search", query=topic)
        return await ctx.tool("rank", items=[]) if twice else None

    async def old(ctx: AgentContext, topic: str) -> object:
        await ctx.gather(branch(ctx, topic, twice=False), branch(ctx, topic, twice=False))
        return await ctx.tool("rank", items=[topic])

    async def new(ctx: AgentContext, topic: str) -> object:
        await ctx.gather(branch(ctx, topic, twice=True), branch(ctx, topic, twice=False))
        return await ctx.tool("rank", items=[topic])

    _, was, now = only(await checked(old, new, tmp_path))
    assert (was, now) == ("it ended without another step", 'ctx.tool("rank", items=[])')


async def test_a_redriven_step_counts_with_its_later_result(tmp_path: Path) -> None:
    async def one(ctx: AgentContext, topic: str) -> object:
        return await ctx.tool("search", query=topic)

    async with recorded(desk(one), tmp_path, ("t-1", "desk", "")) as store:
        found = await store.task("local", "t-1")
        assert found is not None
        (call,) = (each for each in found.steps if each.kind == "tool")
        failed = msgspec.structs.replace(
            call, attempt=3, ended=call.ended - 5, status="failed", output=NOTHING, error=StepFailure("OSError", "down")
        )
        record = RecordEntry("9999999999999-0", "t-1", ENCODER.encode([failed]), None)
        await store.write("local", 1, 1, [record])
        assert [each.status for each in (await in_store(store)).steps if each.kind == "tool"] == ["failed", "completed"]
        assert (await check(store, desk(one), namespace="local")).ok


async def test_a_step_redriven_with_new_data_is_not_a_difference(tmp_path: Path) -> None:
    """The code has requested what the digest of the row says; the edit belongs to the redrive."""

    async def one(ctx: AgentContext, topic: str) -> object:
        return await ctx.tool("search", query=topic)

    async def other(ctx: AgentContext, topic: str) -> object:
        return await ctx.tool("search", query="coffee")

    async with recorded(desk(one), tmp_path, ("t-1", "desk", "")) as store:
        (call,) = (each for each in (await in_store(store)).steps if each.kind == "tool")
        requested = step_digest("tool", "search", "", canonical(bytes(call.input)))
        edited = msgspec.structs.replace(
            call, ended=call.ended + 5, input=msgspec.Raw(b'{"query":"coffee"}'), attributes={DIGEST: requested}
        )
        record = RecordEntry("9999999999999-0", "t-1", ENCODER.encode([edited]), None)
        await store.write("local", 1, 1, [record])
        assert (await check(store, desk(one), namespace="local")).ok
        assert only(await check(store, desk(other), namespace="local"))[0] == "1"


async def test_a_fork_with_a_different_result_follows_it(tmp_path: Path) -> None:
    """Its steps before the fork are those of its origin, even where many tasks are checked."""
    url = f"sqlite:///{tmp_path / 'trajectory.db'}"
    local = LocalApp(desk(before), trajectory=url)
    async with local as client:
        await (await client.submit("desk", "tea", task_id="t-1")).result(timeout=60)
        await local.recorded("t-1")
        fork = await client.fork("t-1", at="2", input="replaced", task_id="f-1", store=local.trajectories)
        await fork.result(timeout=60)
        await local.recorded("f-1")
    store = await TrajectoryStore.open(url)
    try:
        found = await check(store, desk(before), namespace="local")
    finally:
        await store.close()
    assert (found.ok, found.tasks, found.further) == (True, 2, [])


async def in_store(store: TrajectoryStore) -> TaskTrajectory:
    found = await store.task("local", "t-1")
    assert found is not None
    return found


async def test_an_error_of_the_new_code_is_named(tmp_path: Path) -> None:
    async def after(ctx: AgentContext, topic: str) -> object:
        found = await ctx.tool("search", query=topic)
        return found["text"]

    step, was, now = only(await checked(before, after, tmp_path))
    assert (step, was) == ("", "it completed")
    assert now.startswith('it fails with "TypeError: ')


async def test_patched_code_does_not_differ_from_tasks_of_before_and_after(tmp_path: Path) -> None:
    async def after(ctx: AgentContext, topic: str) -> object:
        if ctx.patched("first"):
            await ctx.tool("rank", items=[topic])
        written = await before(ctx, topic)
        if ctx.patched("last"):
            await ctx.tool("rank", items=[topic])
        return written

    (tmp_path / "a").mkdir()
    assert (await checked(before, after, tmp_path / "a")).ok
    (tmp_path / "b").mkdir()
    assert (await checked(after, after, tmp_path / "b")).ok
    (tmp_path / "c").mkdir()
    step, was, now = only(await checked(after, before, tmp_path / "c"))
    assert (step, was, now) == ("1", 'ctx.tool("rank", items=["tea"])', 'ctx.tool("search", query="tea")')


async def test_a_run_of_several_attempts_replays_as_it_went(tmp_path: Path) -> None:
    """Each place sees the attempt that went on from it, in calls of others, too."""

    async def retried(ctx: AgentContext, topic: str) -> object:
        first = ctx.attempt
        await ctx.tool("search", query=f"{topic} {first}")
        if ctx.attempt == 1:
            raise RuntimeError("the first attempt fails after a call")
        second = ctx.attempt
        await ctx.tool("search", query=f"{topic} {second}")
        return [first, await ctx.step(str, ctx.attempt, name="third")]

    found = await checked(retried, retried, tmp_path)
    assert found.ok, str(found)


async def test_a_job_stopped_by_the_end_of_its_run_is_not_a_difference(tmp_path: Path) -> None:
    async def jobs(ctx: AgentContext, topic: str) -> object:
        async def watch() -> None:
            while True:
                await ctx.sleep(3600)

        ctx.background(watch(), at_end="cancel")
        return await ctx.tool("search", query=topic)

    found = await checked(jobs, jobs, tmp_path)
    assert found.ok, str(found)


async def test_state_that_is_not_recorded_is_no_difference(tmp_path: Path) -> None:
    async def counts(ctx: AgentContext, topic: str) -> object:
        ctx.state["n"] = ctx.state.get("n", 0) + 1
        return await ctx.tool("search", query=f"{topic} {ctx.state['n']}")

    tasks = [(f"t-{number}", "desk", "k") for number in range(2)]
    async with recorded(desk(counts), tmp_path, *tasks) as store:
        found = await check(store, desk(counts), namespace="local")
    assert found.ok
    assert found.skipped == {"the state of an agent with a key is not recorded": 1}
    assert "runs not compared: 1, since the state of an agent with a key is not recorded" in str(found)


async def test_an_agent_that_the_app_lacks_is_named(tmp_path: Path) -> None:
    async with recorded(desk(before, "old-desk"), tmp_path, ("t-1", "old-desk", "")) as store:
        found = await check(store, desk(before), namespace="local")
    assert found.skipped == {"this app has no agent 'old-desk'": 1}
    assert found.runs == 1


async def test_tasks_are_selected(tmp_path: Path) -> None:
    async with recorded(desk(before), tmp_path, ("a", "desk", ""), ("b", "desk", ""), ("c", "writer", "")) as store:

        async def count(**more: Any) -> int:
            return (await check(store, desk(before), namespace="local", **more)).tasks

        assert await count() == 3
        assert await count(agent="writer") == 1
        assert await count(limit=2) == 2
        assert await count(since=timedelta(hours=1)) == 3
        assert await count(since=datetime.now(UTC) + timedelta(hours=1)) == 0
        with pytest.raises(InvalidInput, match="time zone"):
            await count(since=datetime(2026, 1, 1))  # that is what is refused


TASKS = 1_000 if is_full() else 300


async def test_hundreds_of_tasks_are_checked_in_seconds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'trajectory.db'}"
    local = LocalApp(desk(before), trajectory=url)
    async with local as client:
        handles = [await client.submit("desk", f"tea {number}", task_id=f"t-{number}") for number in range(TASKS)]
        await asyncio.gather(*(handle.result(timeout=120) for handle in handles))
        await asyncio.gather(*(local.recorded(f"t-{number}", timeout=60) for number in range(TASKS)))
    store = await TrajectoryStore.open(url)
    try:
        began = time.process_time()
        found = await check(store, desk(before), namespace="local")
        took = time.process_time() - began
    finally:
        await store.close()
    assert (found.ok, found.tasks, found.runs) == (True, TASKS, 2 * TASKS)
    assert took < TASKS / 100, f"{took:.1f} s"
    print(f"{took:.2f} s")


APP = """
from weft import AgentContext, App

app = App("desk")

@app.tool
async def search(query: str) -> str:
    return query

@app.agent("desk")
async def desk(ctx: AgentContext, topic: str) -> object:
    return await ctx.tool("search", query={query})
"""


async def test_the_command_names_the_difference_and_fails(tmp_path: Path) -> None:
    async with recorded(desk(before), tmp_path, ("t-1", "desk", "")):
        pass
    (tmp_path / "new_desk.py").write_text(APP.format(query="topic.upper()"))

    def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "runtime_core.cli.main", "replay", "check", *arguments],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join((SOURCES, str(tmp_path))),
                "WEFT_NAMESPACE": "local",
                "WEFT_TRAJECTORY_URL": f"sqlite:///{tmp_path / 'trajectory.db'}",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    ended = weft("--app", "new_desk:app", "--since", "7d")
    assert ended.returncode == 1, ended.stderr
    first, *_ = ended.stdout.splitlines()
    assert first.startswith("task t-1: step 1 of run r of agent 'desk' (new_desk.py:")
    assert first.endswith(' in desk): ctx.tool("search", query="tea"); now ctx.tool("search", query="TEA")')
    found = json.loads(weft("--app", "new_desk:app", "--json").stdout)
    assert (found["ok"], found["tasks"]) == (False, 1)
    assert found["differences"][0]["now"] == 'ctx.tool("search", query="TEA")'
    wrong = weft("--app", "new_desk:app", "--since", "soon")
    assert wrong.returncode == 2
    assert "neither a span, as in 7d or 12h, nor a time" in wrong.stderr
    assert "--app package.module:app" in weft().stderr
