"""A time limit behaves as `asyncio.timeout` does."""

from __future__ import annotations

import asyncio

import pytest

from runtime_core.time_limit import TimeLimit


async def test_a_limit_that_passes_raises_timeout_error_and_leaves_no_cancellation_behind() -> None:
    limit = TimeLimit(0.001)
    with pytest.raises(TimeoutError), limit:
        await asyncio.Event().wait()
    assert limit.passed
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


@pytest.mark.parametrize("seconds", [None, 60.0])
async def test_a_block_that_ends_in_time_ends_as_without_a_limit(seconds: float | None) -> None:
    with TimeLimit(seconds) as limit:
        value = await asyncio.sleep(0, "done")
    assert (value, limit.passed) == ("done", False)
    with pytest.raises(KeyError), TimeLimit(seconds):
        raise KeyError
    with pytest.raises(TimeoutError, match="its own"), TimeLimit(seconds):
        raise TimeoutError("its own")


async def test_code_that_ignores_the_limit_ends_as_it_wants_and_leaves_no_cancellation_behind() -> None:
    with TimeLimit(0.001) as limit:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            value = "its own"
    task = asyncio.current_task()
    assert task is not None
    assert (limit.passed, value, task.cancelling()) == (True, "its own", 0)


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def limited(seconds: float) -> None:
        with TimeLimit(seconds):
            try:
                await asyncio.Event().wait()
            finally:
                task.cancel()  # a second one, while the first is under way

    for seconds, cancels in ((60.0, True), (0.001, False)):
        task = asyncio.create_task(limited(seconds))
        await asyncio.sleep(0)
        if cancels:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
