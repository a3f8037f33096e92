"""The event loop that all runs of a service share: code sees only its own tasks there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from runtime_core.host.service import _GuardedLoop
from runtime_core.telemetry.logs import HANDLED

Tasks = set[asyncio.Task[object]]


@dataclass
class Run:
    task: str
    run: str = "r"
    context: bytes = b""


def tasks_by_both_names(loop: asyncio.AbstractEventLoop | None = None) -> list[Tasks]:
    return [asyncio.all_tasks(loop), asyncio.tasks.all_tasks(loop)]


async def as_code(run: Run | None, function: Callable[[], object]) -> object:
    """Call a function inside a run, in a task that Weft has created."""
    HANDLED.set(run)
    return function()


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard replaces functions of the module."""
    monkeypatch.setattr(asyncio, "all_tasks", asyncio.all_tasks)
    monkeypatch.setattr(asyncio.tasks, "all_tasks", asyncio.tasks.all_tasks)


def test_code_sees_only_its_own_tasks_under_both_names() -> None:
    begun: dict[str, asyncio.Task[object]] = {}

    def begin(name: str) -> list[Tasks]:
        begun[name] = asyncio.get_running_loop().create_task(asyncio.sleep(60, None), name=name)
        return tasks_by_both_names()

    async def runs() -> None:
        for name in ("a", "b"):
            seen = await asyncio.create_task(as_code(Run(name), lambda name=name: begin(name)))  # type: ignore[misc]
            assert isinstance(seen, list)
            assert [begun[name] in found for found in seen] == [True, True]
            assert [len(found) for found in seen] == [2, 2], "its current task, and the one that it has created"
            assert asyncio.current_task() not in seen[0] | seen[1]
        everything = {asyncio.current_task(), *begun.values()}
        assert tasks_by_both_names() == [everything, everything], "Weft itself sees all"

    with asyncio.Runner() as runner:
        _GuardedLoop(runner.get_loop())
        runner.run(runs())


def test_a_thread_of_code_sees_the_tasks_of_its_own_loop() -> None:
    """A tool may run a loop in its thread: `asyncio.run` must find the tasks there, to cancel them."""

    async def own_loop() -> tuple[list[Tasks], Tasks]:
        task = asyncio.create_task(asyncio.sleep(60, None))
        here = asyncio.current_task()
        assert here is not None
        return tasks_by_both_names(), {here, task}

    def in_thread(shared: asyncio.AbstractEventLoop) -> list[Tasks]:
        seen, expected = asyncio.run(own_loop())
        assert seen == [expected, expected]
        return tasks_by_both_names(shared)

    async def runs() -> None:
        HANDLED.set(Run("a"))
        mine = asyncio.create_task(asyncio.sleep(60, None))
        assert await asyncio.to_thread(in_thread, asyncio.get_running_loop()) == [{mine}, {mine}]

    with asyncio.Runner() as runner:
        _GuardedLoop(runner.get_loop())
        runner.run(runs())
