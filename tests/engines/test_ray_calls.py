"""How a task of Ray is cancelled: by interrupts, and by a kill of its worker only if they achieve nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from runtime_core.engines.ray import calls

CANCELS = 4
"""How many cancels it takes to end the task of a test."""


class Stream:
    """A task, as its caller sees it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        await self.ended.wait()
        raise StopAsyncIteration


@pytest.mark.parametrize(("after_seconds", "force"), [(math.inf, False), (0.0, True)])
async def test_a_cancel_is_repeated_and_kills_the_worker_late(
    monkeypatch: pytest.MonkeyPatch, after_seconds: float, force: bool
) -> None:
    """If Ray killed it soon, it might hit the next task of the worker: see `Interrupts`."""
    forced: list[bool] = []
    loop = asyncio.get_running_loop()

    def cancel(stream: Stream, *, force: bool) -> None:
        forced.append(force)
        if len(forced) == CANCELS:
            loop.call_soon_threadsafe(stream.ended.set)

    monkeypatch.setattr("ray.cancel", cancel)
    monkeypatch.setattr(calls, "CANCEL_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(calls, "FORCE_SECONDS", after_seconds)
    monkeypatch.setattr(calls, "TASK_STOP_SECONDS", math.inf)
    await calls._Task(Stream()).stop()
    assert len(forced) >= CANCELS
    assert set(forced) == {force}


async def test_a_cancel_continues_after_its_caller_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Ray may take longer than the caller waits. The worker must become free nevertheless."""
    stream, cancels, loop = Stream(), 0, asyncio.get_running_loop()

    def cancel(stream: Stream, *, force: bool) -> None:
        nonlocal cancels
        cancels += 1
        if cancels == CANCELS:
            loop.call_soon_threadsafe(stream.ended.set)

    monkeypatch.setattr("ray.cancel", cancel)
    monkeypatch.setattr(calls, "CANCEL_LATER_SECONDS", 0.001)
    monkeypatch.setattr(calls, "TASK_STOP_SECONDS", 0.0)
    await calls._Task(stream).stop()
    assert not stream.ended.is_set()
    async with asyncio.timeout(60):
        await stream.ended.wait()
    assert cancels == CANCELS
