"""The response of an ended task is completed from its record, or returned without it."""

from __future__ import annotations

import logging

import pytest

from runtime_core.aworld.response import completed
from runtime_core.trajectory.reading import TaskTrajectory
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
