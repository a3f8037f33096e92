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
