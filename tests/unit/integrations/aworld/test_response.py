"""The response of an ended task is completed from its record, or returned without it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runtime_core.integrations.aworld.response import StoreReader, completed
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.trajectory.store import TrajectoryStore
from runtime_core.wire.step import TaskEnd
from weft import TaskResponse
from weft.aworld import Task
from weft.errors import ConfigurationError, StoreUnavailable


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TimeoutError(), "task t: its record is not complete after 10 s: the response has none"),
        (StoreUnavailable("no database"), "task t: its record cannot be read, and the response has none: no database"),
        (ConfigurationError("newer"), "task t: its record cannot be read, and the response has none: newer"),
    ],
)
async def test_a_record_that_cannot_be_read_does_not_cost_the_response(
    error: Exception, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def read(task: str) -> TaskTrajectory:
        raise error

    caplog.set_level(logging.WARNING)
    response = TaskResponse("t", "completed", output="done")
    assert await completed(response, Task(id="t", input="x", agent="a"), read) is response
    assert [record.getMessage() for record in caplog.records] == [line]


async def test_a_store_is_opened_once_for_all_tasks_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Store:
        async def task(self, namespace: str, task: str) -> TaskTrajectory:
            done.append(f"read {namespace} {task}")
            return TaskTrajectory(namespace, task, TaskEnd(task, "completed", "a", 0, 0.0, 1.0), [])

        async def close(self) -> None:
            done.append("close")

    async def opened(url: str) -> Store:
        await asyncio.sleep(0)
        done.append(f"open {url}")
        return Store()

    monkeypatch.setattr(TrajectoryStore, "open", opened)
    reader = StoreReader("sqlite:///x", "weft")
    await asyncio.gather(reader("a"), reader("b"))
    await reader.close()
    await reader.close()
    assert done == ["open sqlite:///x", "read weft a", "read weft b", "close"]
