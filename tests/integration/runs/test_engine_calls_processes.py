"""`ctx.engine("local")` in worker processes: a crash or a hang there fails one step."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from runtime_core.host.local import LocalApp
from tests.contracts.engine import functions
from tests.contracts.engine.promises import until
from tests.fleet import Fleet
from tests.integration.engines.test_pool import gone, pid_of
from tests.servers.process import Server
from weft import AgentContext, App, Client, Reject
from weft.aworld import StateManager
from weft.errors import EngineError

WAIT = 60.0
"""Patience of a test, which decides nothing."""

app = App("compute")


@app.engine_function
def where(number: int) -> dict[str, int]:
    return {"number": number, "pid": os.getpid()}


@app.engine_function
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.engine_function
def break_off(reason: str) -> None:
    raise ZeroDivisionError(reason)


@app.engine_function(timeout_seconds=3)
def too_long(folder: str) -> None:
    functions.hold(folder, "slow", "never")


@app.engine_function
def hold(folder: str) -> None:
    functions.hold(folder, "held", "never")


@app.engine_function
def gated(folder: str) -> str:
    return functions.hold(folder, "gated")


@app.agent("gated")
async def run_gated(ctx: AgentContext, folder: str) -> str:
    name: str = await ctx.engine("local").call(gated, folder=folder)
    return name


@app.agent("compute")
async def compute(ctx: AgentContext, folder: str) -> list[object]:
    engine = ctx.engine("local")
    found = await ctx.gather(
        engine.call(where, number=1),
        engine.call(die),
        engine.call(break_off, reason="no"),
        engine.call(too_long, folder=folder),
        engine.call(where, number=2),
        return_exceptions=True,
    )
    return [f"{one.type}: {one.message}" if isinstance(one, EngineError) else one for one in found]


@app.agent("held")
async def held(ctx: AgentContext, folder: str) -> None:
    await ctx.engine("local").call(hold, folder=folder)


@app.agent("lost")
async def lost(ctx: AgentContext, input: None) -> str:
    """A function that a process cannot find."""
    try:
        await ctx.engine("local").call("nested")
    except EngineError as error:
        raise Reject(str(error)) from None
    return "found"


async def test_steps_run_in_processes_and_fail_alone(tmp_path: Path) -> None:
    async with LocalApp(app, engine_processes=2) as client:
        task = await client.submit("compute", str(tmp_path))
        first, died, broke, slow, last = (await task.result(timeout=WAIT)).value()
    assert (first["number"], last["number"]) == (1, 2)
    assert os.getpid() not in (first["pid"], last["pid"])
    assert died == "WorkerDied: the worker process was ended by SIGKILL while it ran the call"
    assert broke == "ZeroDivisionError: no"
    assert slow == "TimeoutError: the call did not end within 3 s; its process was ended"
    assert gone(pid_of(str(tmp_path), "slow"))


async def test_the_cancel_of_a_task_ends_its_process(tmp_path: Path) -> None:
    async with LocalApp(app, engine_processes=1) as client:
        task = await client.submit("held", str(tmp_path))
        await until(lambda: functions.count_begun(str(tmp_path)) == 1, "the function runs")
        await task.cancel()
        await until(lambda: gone(pid_of(str(tmp_path), "held")), "its process is ended")


async def test_a_function_that_cannot_be_sent_is_a_clear_failure() -> None:
    inner = App("inner")

    @inner.engine_function
    def nested() -> None:
        return None

    inner.include(app)
    async with LocalApp(inner, engine_processes=1) as client:
        response = await (await client.submit("lost", None)).result(timeout=WAIT)
    assert response.error is not None
    assert "nested: cannot be sent to a process" in response.error["message"]
    assert "top of a module" in response.error["message"]


async def test_a_killed_handlers_processes_die_and_the_step_runs_again(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    """In a real service, the call runs again in another process, and the task continues."""
    folder = tmp_path / "calls"
    folder.mkdir()
    fleet = Fleet(
        valkey.url,
        namespace,
        tmp_path / "fleet",
        app="tests.integration.runs.test_engine_calls_processes:app",
        environ={"WEFT_ENGINE_PROCESSES": "1"},
    )
    async with fleet, Client.connect(valkey.url, namespace=namespace) as client, StateManager(client) as state:
        task = await client.submit("gated", str(folder))
        await until(lambda: functions.count_begun(str(folder)) == 1, "the function runs")
        pid = pid_of(str(folder), "gated")
        wait = asyncio.create_task(state.wait_for_task(task.task_id, WAIT))
        fleet.kill("agent-handler-1")
        await until(lambda: gone(pid), "its worker is gone too")
        await until(lambda: pid_of(str(folder), "gated") != pid, "the step runs again")
        (folder / "gate").touch()
        root = await wait
        assert (root.status, root.results[0].result) == ("SUCCESS", "gated")
