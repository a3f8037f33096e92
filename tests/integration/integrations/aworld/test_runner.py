"""The phases of a runner: in order, cancelled, dropped, and declared wrongly."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from runtime_core.host.local import LocalApp
from tests.integration.integrations.aworld.small_agents import exclaim, failure, upper
from weft import App, TaskResponse
from weft.aworld import (
    Runner,
    Runners,
    Task,
    TaskRunner,
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks run in this process."""
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)


class Phases(Runner):
    """Reports its calls through the stream, and does what the input says."""

    async def pre_run(self) -> None:
        await self.ctx.emit("pre")

    async def do_run(self, context: object = None) -> TaskResponse | None:
        await self.ctx.emit("do")
        if self.observation.content == "raise":
            raise ValueError("in do_run")
        return None

    async def post_run(self) -> None:
        await self.ctx.emit("post")
        if self.observation.content == "post":
            raise ValueError("in post_run")


@pytest.mark.parametrize(
    ("input", "status", "message"),
    [("go", "completed", ""), ("raise", "failed", "in do_run"), ("post", "failed", "in post_run")],
)
async def test_the_phases_come_once_and_in_order(input: str, status: str, message: str) -> None:
    events = [event async for event in Runners.streaming_run(input, runner_cls=Phases)]
    assert [event.text for event in events[:-1]] == ["pre", "do", "post"]
    response = events[-1].response
    assert response is not None
    assert (response.status, response.msg) == (status, message)


async def test_an_error_of_post_run_does_not_hide_that_of_do_run(caplog: pytest.LogCaptureFixture) -> None:
    class Both(Phases):
        async def post_run(self) -> None:
            raise ValueError("in post_run")

    with caplog.at_level(logging.ERROR):
        assert (await Runners.run("raise", runner_cls=Both)).msg == "in do_run"
    assert "post_run of Both failed" in caplog.text


async def test_a_runner_that_is_cancelled_cleans_up() -> None:
    cleaned = asyncio.Event()
    begun = asyncio.Event()

    class Busy(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse | None:
            begun.set()
            await asyncio.sleep(600)
            return None

        async def post_run(self) -> None:
            cleaned.set()

    app = App("busy")
    app.add_runner(Busy)
    async with LocalApp(app) as client, asyncio.timeout(60):
        running = asyncio.create_task(Runners.run("x", runner_cls=Busy, client=client, id="b-1"))
        await begun.wait()
        await (await client.task("b-1")).cancel()
        assert (await running).status == "cancelled"
        await cleaned.wait()


async def test_a_waiting_run_that_is_dropped_does_not_clean_up() -> None:
    cleaned = False

    class Waits(TaskRunner):
        async def do_run(self, context: object = None) -> TaskResponse | None:
            await self.ctx.human("go on?")
            return None

        async def post_run(self) -> None:
            nonlocal cleaned
            cleaned = True

    app = App("waits")
    app.add_runner(Waits)
    async with LocalApp(app) as client:
        task = await client.submit("weft.task.Waits", {})
        async for event in task.stream():
            if event.type == "weft.human.requested":
                break
    assert not cleaned


async def test_a_runner_may_do_without_a_context_and_be_named_by_text() -> None:
    response = await Runners.run("x", runner_cls=f"{__name__}.NoContext")
    assert response.answer == "x"


@pytest.mark.parametrize("phase", ["pre_run", "do_run", "post_run"])
async def test_a_phase_that_is_not_async_is_named(phase: str) -> None:
    async def do_run(self: Runner) -> TaskResponse:
        return TaskResponse(self.task.id)

    sync: Any = type("Sync", (Runner,), {"do_run": do_run, phase: lambda self: None})
    response = await Runners.run("x", runner_cls=sync)
    assert failure(response) == ("InvalidInput", f"{phase}: of Sync is not async: write async def {phase}")


class NoContext(Runner):
    async def do_run(self) -> TaskResponse:  # type: ignore[override]  # as users of other runtimes write it
        return TaskResponse(task_id=self.task.id, content=self.task.input)


async def test_a_runner_outside_a_run_raises_an_error_with_the_remedy() -> None:
    from runtime_core.errors import WeftError

    with pytest.raises(WeftError, match=r"runner_cls=NoContext and call Runners.run_task"):
        await NoContext(Task()).run()


async def test_a_runner_that_returns_another_type_raises_a_clear_error() -> None:
    class Wrong(Runner):
        async def do_run(self, context: object = None) -> Any:  # Any: wrong on purpose
            return "text"

    assert "return a TaskResponse" in (await Runners.run("x", runner_cls=Wrong)).msg


async def test_the_response_of_a_runner_counts_even_without_an_answer() -> None:
    class Judge(TaskRunner):
        async def do_run(self, context: Any = None) -> TaskResponse:
            found = await super().do_run(context)
            assert found is not None
            if found.answer == "HI":
                return TaskResponse(self.task.id, status="failed", msg="too loud")
            return TaskResponse(self.task.id, status="success")

    assert failure(await Runners.run("hi", agent=upper, runner_cls=Judge)) == ("TaskFailed", "too loud")
    response = await Runners.run("hi", agent=exclaim, runner_cls=Judge)
    assert (response.status, response.answer) == ("completed", None)
