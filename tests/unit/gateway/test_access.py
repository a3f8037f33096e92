"""Replays of recorded tasks: the app's code runs in a separate process, which is bounded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from runtime_core.app import loading
from runtime_core.gateway.access import REPLAY_SECONDS, Replays
from runtime_core.gateway.keys import Caller
from runtime_core.gateway.requests import NO_APP, OVERLOADED, REPLAY, Problem
from runtime_core.state_manager.publishers import Publisher
from runtime_core.telemetry import redaction
from runtime_core.telemetry.secret_search import HIDDEN
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.step import Step, TaskEnd
from tests.fleet import until

HEAD = """
import os, sys, time
from weft import AgentContext, App
app = App("desk")
@app.tool
async def search(query: str) -> list[str]:
    return []
@app.agent("writer")
async def writer(ctx: AgentContext, topic: str) -> str:
"""
FOLLOWS = "    await ctx.tool('search', query=topic)\n    return 'ok'\n"
ANYONE = Caller("anyone")


def recorded() -> TaskTrajectory:
    """Return a task that searched and ended."""
    text = msgspec.Raw(b'"streams"')
    run = Step("r", "agent", "writer", "completed", 1.0, 3.0, input=text, output=msgspec.Raw(b'"ok"'))
    call = Step("r", "tool", "search", "completed", 1.0, 2.0, step="1", input=msgspec.Raw(b'{"query":"streams"}'))
    call.output = msgspec.Raw(b"[]")
    return TaskTrajectory("weft", "order-7", TaskEnd("order-7", "completed", "writer", 2, 1.0, 3.0), [run, call])


def app_of(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """Write an app whose agent has this body, and return its reference."""
    monkeypatch.chdir(folder)
    (folder / "desk.py").write_text(HEAD + body)
    return "desk:app"


async def test_code_follows_the_record_or_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "a-key-of-twenty-letters")
    replays = Replays(app_of(tmp_path, monkeypatch, "    print('noise')\n" + FOLLOWS))
    same = await replays.check(ANYONE, recorded())
    assert (same["follows"], same["runs"], same["difference"]) == (True, 1, None)
    app_of(tmp_path, monkeypatch, FOLLOWS.replace("topic", "os.environ['WORD']"))
    with redaction.use(redaction.Redactor([os.environ["WORD"]])):
        other = await replays.check(ANYONE, recorded())
    assert other == {
        "task_id": "order-7", "follows": False, "runs": 1, "further": [], "skipped": {},
        "difference": {
            "agent": "writer", "run": "r", "step": "1", "recorded": 'ctx.tool("search", query="streams")',
            "now": f'ctx.tool("search", query="{HIDDEN}")', "line": "desk.py:10 in writer",
        },
    }  # fmt: skip
    longer = Replays(app_of(tmp_path, monkeypatch, FOLLOWS.replace("return", "await ctx.sleep(1)\n    return")))
    found = await longer.check(ANYONE, recorded())
    assert (found["follows"], [each["now"] for each in found["further"]]) == (True, ["ctx.sleep(1)"])


async def test_an_app_without_the_agent_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = app_of(tmp_path, monkeypatch, FOLLOWS)
    (tmp_path / "desk.py").write_text((HEAD + FOLLOWS).replace('"writer"', '"other"'))
    found = await Replays(reference).check(ANYONE, recorded())
    assert (found["follows"], found["skipped"]) == (None, {"this app has no agent 'writer'": 1})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("    while True: pass\n", "it did not end within 1 s"),
        ("    os._exit(3)\n", "its process ended with status 3"),
        ("    os.kill(os.getpid(), 9)\n", "its process ended with status -9"),
        ("    pass\nraise OSError('no disk')\n", "no disk"),
        ("    pass\napp = 5\n", "desk:app"),
    ],
)
async def test_code_that_breaks_is_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    replays = Replays(app_of(tmp_path, monkeypatch, body), 1.0 if "while" in body else REPLAY_SECONDS)
    with pytest.raises(Problem) as raised:
        await replays.check(ANYONE, recorded())
    assert raised.value.kind is REPLAY
    assert why in raised.value.detail


async def test_tasks_started_by_the_code_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "    import subprocess\n    open('pid', 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))\n"
    await Replays(app_of(tmp_path, monkeypatch, body + FOLLOWS)).check(ANYONE, recorded())
    status = Path(f"/proc/{(tmp_path / 'pid').read_text()}/status")

    async def ended() -> bool:
        try:
            return "zombie" in status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    # A signal is sent at once, but a busy machine takes a while to end a process.
    await until(ended, 20, "the program that the code has started ends")


async def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"    return 'x' * {loading.REPLAY_MAX_BYTES}\n"
    found = await Replays(app_of(tmp_path, monkeypatch, body)).check(ANYONE, recorded())
    assert "MemoryError" in found["difference"]["now"]


async def test_the_code_gets_no_settings_of_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_REDIS_URL", "redis://gateway:secret@broker")
    monkeypatch.setenv("WEFT_APP_COLOUR", "red")
    body = "    await ctx.tool('search', query=','.join(n for n in os.environ if n.startswith('WEFT_')))\n"
    found = await Replays(app_of(tmp_path, monkeypatch, body)).check(ANYONE, recorded())
    assert found["difference"]["now"] == 'ctx.tool("search", query="WEFT_APP_COLOUR")'


async def test_few_replays_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = Replays(app_of(tmp_path, monkeypatch, "    time.sleep(60)\n"))
    own, other, third = (Caller(name, scope=Publisher(name=name, tenant=name)) for name in ("acme", "evil", "third"))
    running = [asyncio.create_task(replays.check(own, recorded()))]
    await asyncio.sleep(0)
    with pytest.raises(Problem) as raised:
        await replays.check(own, recorded())
    assert raised.value.kind is OVERLOADED
    running.append(asyncio.create_task(replays.check(other, recorded())))
    await asyncio.sleep(0)
    with pytest.raises(Problem) as raised:
        await replays.check(third, recorded())
    assert (raised.value.kind, raised.value.retry_after_seconds) == (OVERLOADED, 30.0)
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    app_of(tmp_path, monkeypatch, FOLLOWS)
    assert (await replays.check(own, recorded()))["follows"] is True


async def test_without_an_app_it_says_how_to_set_one() -> None:
    with pytest.raises(Problem, match="WEFT_APP") as raised:
        await Replays("").check(ANYONE, recorded())
    assert raised.value.kind is NO_APP
