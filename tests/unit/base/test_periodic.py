"""The periodic loop, the watch over progress, and time limits, which behave as `asyncio.timeout` does."""

from __future__ import annotations

import asyncio

import pytest

from runtime_core.base.periodic import Periodic, Slices, TimeLimit
from runtime_core.consumer.progress import ProgressWatch


async def test_it_runs_at_once_and_again_after_the_interval() -> None:
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1

    periodic = Periodic("count", 0.001, count)
    periodic.start()
    periodic.start()
    async with asyncio.timeout(60):
        await periodic.started.wait()
        await periodic.ran(3)
    await periodic.stop()
    ended_at = calls
    assert ended_at >= 3
    assert not periodic.started.is_set()
    await asyncio.sleep(0.02)
    assert calls == ended_at, "it ran after its stop"


async def test_a_trigger_does_not_wait_for_the_interval() -> None:
    async def nothing() -> None:
        pass

    periodic = Periodic("rare", 3600, nothing)
    periodic.start()
    async with asyncio.timeout(60):
        await periodic.ran()
        periodic.trigger()
        await periodic.ran()
    await periodic.stop()


async def test_a_trigger_during_a_call_causes_one_more_call() -> None:
    inside, go_on = asyncio.Event(), asyncio.Event()
    calls = 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        inside.set()
        await go_on.wait()

    periodic = Periodic("slow", 3600, slow)
    periodic.start()
    async with asyncio.timeout(60):
        await inside.wait()
        periodic.trigger()
        periodic.trigger()
        go_on.set()
        await periodic.ran(2)
    await periodic.stop()
    assert calls == 2


async def test_errors_are_reported_and_never_end_it() -> None:
    errors: list[Exception] = []

    async def broken() -> None:
        raise ValueError("no")

    periodic = Periodic("broken", 0.001, broken, errors.append)
    periodic.start()
    async with asyncio.timeout(60):
        await periodic.ran(3)
    await periodic.stop()
    assert len(errors) >= 3


async def test_consecutive_errors_are_retried_with_backoff(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise ValueError("no")

    periodic = Periodic("broken", 0, broken)
    periodic.start()
    async with asyncio.timeout(60):
        await periodic.ran(3)
    await periodic.stop()
    waits = [record.getMessage().partition("next try in ")[2].partition(" s")[0] for record in caplog.records[:3]]
    assert waits == ["0.02", "0.04", "0.08"]


async def test_stop_ends_even_a_function_that_swallows_its_cancellation() -> None:
    inside = asyncio.Event()

    async def deaf() -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    periodic = Periodic("deaf", 0.001, deaf)
    periodic.start()
    async with asyncio.timeout(60):
        await inside.wait()
        periodic.trigger()
        await periodic.stop()


async def test_a_cancelled_stop_is_cancelled() -> None:
    inside, release = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()

    periodic = Periodic("slow to end", 1, slow_to_end)
    periodic.start()
    await inside.wait()
    stop = asyncio.create_task(periodic.stop())
    await asyncio.wait([stop], timeout=0.01)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    release.set()


def test_only_work_that_waits_without_progress_is_unhealthy() -> None:
    now = 100.0
    watch = ProgressWatch(10.0, lambda: now)
    now += 1000
    assert watch.health().ok, "idle for long"
    watch.waiting(True)
    now += 10
    assert watch.health().ok, "within the limit"
    watch.waiting(True)
    now += 0.5
    health = watch.health()
    assert not health.ok
    assert health.reason == "work has waited without progress for 10.5 s (limit 10 s)"
    watch.progressed()
    assert watch.health().ok
    now += 11
    assert not watch.health().ok
    watch.waiting(False)
    assert watch.health().ok


def test_work_within_its_time_limit_is_not_a_stall() -> None:
    """A supervisor that restarted the process would interrupt it each time, so a slow tool would never end."""
    now = 100.0
    watch = ProgressWatch(10.0, lambda: now, work_seconds=600.0)
    watch.waiting(True)
    now += 600
    assert watch.stalled_seconds == 0
    now += 10
    assert watch.health().ok
    now += 1
    assert watch.stalled_seconds == 11
    assert not watch.health().ok


def test_time_in_which_a_broker_owes_an_answer_does_not_count() -> None:
    now = 100.0
    watch = ProgressWatch(10.0, lambda: now)
    watch.waiting(True)
    now += 4
    watch.asks_broker("first")
    now += 1000
    assert watch.stalled_seconds == 4
    watch.asks_broker("first")  # its heartbeat is tried again
    watch.asks_broker("second")
    now += 1000
    watch.broker_answered("first")
    now += 1000
    assert watch.stalled_seconds == 4, "the other one is away"
    watch.broker_answered("second")
    watch.broker_answered("second")
    now += 6
    assert watch.health().ok
    now += 1
    assert not watch.health().ok, "the brokers serve, and nothing moves"


def test_work_that_arrives_during_an_outage_waits_from_its_end() -> None:
    now = 100.0
    watch = ProgressWatch(10.0, lambda: now)
    watch.asks_broker("it")
    now += 1000
    watch.waiting(True)
    now += 1000
    assert watch.stalled_seconds == 0
    watch.broker_answered("it")
    assert watch.stalled_seconds == 0
    now += 3
    assert watch.stalled_seconds == 3


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


async def test_long_work_pauses_after_each_slice() -> None:
    slices = Slices(10)
    paused = []
    for _ in range(9):
        work = asyncio.ensure_future(slices.worked(4))
        await asyncio.sleep(0)
        paused.append(not work.done())
        await work
    assert paused == [False, False, True] * 3
