"""How a map iterates over its items, with simulated workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from runtime_core.engines import mapping
from runtime_core.engines.mapping import Answer, Items, run_map
from runtime_core.engines.protocol import Error, Mapped, Outcome, Registered, Value, Work

Play = Callable[[list[int], float], Awaitable[Answer]]


async def run(count: int, in_flight: int, play: Play, *, limit: float = 0.0) -> tuple[Outcome, list[dict[str, int]]]:
    call = Mapped(
        Registered("app:app", "", "double", b"{}"), "item", json.dumps(list(range(count))).encode(), in_flight
    )
    reports: list[bytes] = []

    async def run_items(work: Work, seconds: float) -> Answer:
        assert isinstance(work.call, Mapped)
        return await play(json.loads(work.call.items), seconds)

    outcome = await run_map(Work(call, "double", timeout_seconds=limit), call, in_flight, run_items, reports.append)
    return outcome, [json.loads(report) for report in reports]


def doubled(items: list[int], seconds: float = 0.0) -> Items:
    return Items([Value(str(2 * item).encode()) for item in items], seconds)


def entries(outcome: Outcome) -> list[dict[str, object]]:
    assert isinstance(outcome, Value)
    found: list[dict[str, object]] = json.loads(outcome.data)
    return found


async def test_results_are_in_the_order_of_the_items_and_small_items_go_together() -> None:
    chunks: list[int] = []

    async def play(items: list[int], seconds: float) -> Answer:
        chunks.append(len(items))
        await asyncio.sleep(0)
        return doubled(items, 0.0001 * len(items))

    outcome, reports = await run(10_000, 4, play)
    assert entries(outcome) == [{"value": 2 * item} for item in range(10_000)]
    assert len(chunks) < 200
    assert reports[-1] == {"done": 10_000, "failed": 0, "total": 10_000}


async def test_large_items_go_alone_and_at_most_the_limit_at_once() -> None:
    running, most = 0, 0

    async def play(items: list[int], seconds: float) -> Answer:
        nonlocal running, most
        assert len(items) == 1
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return doubled(items, 5.0)

    outcome, _ = await run(30, 4, play)
    assert most == 4
    assert len(entries(outcome)) == 30


@pytest.mark.parametrize("cause", ["worker", "limit"])
async def test_an_item_that_ends_its_worker_fails_alone(cause: str) -> None:
    alone: list[int] = []
    limits: list[tuple[int, float]] = []

    async def play(items: list[int], seconds: float) -> Answer:
        limits.append((len(items), seconds))
        await asyncio.sleep(0)
        if 77 in items:
            if len(items) == 1:
                alone.append(items[0])
            return msgspec.convert({"end": "error", "cause": cause, "type": "Gone", "message": "it has died"}, Error)
        return doubled(items, 0.001 * len(items))

    outcome, reports = await run(100, 2, play, limit=9)
    found = entries(outcome)
    assert found.pop(77) == {"error": {"type": "Gone", "message": "it has died"}}
    assert found == [{"value": 2 * item} for item in range(100) if item != 77]
    assert alone == [77]
    assert reports[-1] == {"done": 100, "failed": 1, "total": 100}
    assert {seconds for count, seconds in limits if count == 1} == {9}
    assert {seconds for count, seconds in limits if count > 1} == {10}


async def test_a_call_that_a_worker_does_not_start_in_time_goes_to_another_worker() -> None:
    async def play(items: list[int], seconds: float) -> Answer:
        await asyncio.sleep(0)
        return doubled(items[: max(1, len(items) // 2)], 0.0)

    outcome, _ = await run(500, 3, play)
    assert entries(outcome) == [{"value": 2 * item} for item in range(500)]


async def test_an_error_of_a_function_fails_only_its_item() -> None:
    async def play(items: list[int], seconds: float) -> Answer:
        return Items([Error("function", "ValueError", f"no {item}") for item in items], 0.0)

    outcome, _ = await run(3, 1, play)
    assert entries(outcome) == [{"error": {"type": "ValueError", "message": f"no {item}"}} for item in range(3)]


async def test_a_map_of_nothing_is_an_empty_list() -> None:
    async def play(items: list[int], seconds: float) -> Answer:
        raise AssertionError("nothing is to be run")

    outcome, reports = await run(0, 3, play)
    assert entries(outcome) == []
    assert reports == [{"done": 0, "failed": 0, "total": 0}]


async def test_a_cancel_stops_running_items() -> None:
    begun, stopped = asyncio.Semaphore(0), 0

    async def play(items: list[int], seconds: float) -> Answer:
        nonlocal stopped
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            stopped += 1
        raise AssertionError("it waits for ever")

    running = asyncio.create_task(run(10, 3, play))
    for _ in range(3):
        await begun.acquire()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stopped == 3


async def test_results_that_are_too_large_together_end_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MAX_RESULT_BYTES", 1000)
    calls = 0

    async def play(items: list[int], seconds: float) -> Answer:
        nonlocal calls
        calls += 1
        return Items([Value(b'"' + b"x" * 300 + b'"')], 5.0)

    outcome, _ = await run(100, 1, play)
    assert isinstance(outcome, Error)
    assert (outcome.cause, outcome.type) == ("invalid", "ResultTooLarge")
    assert calls < 10


async def test_a_few_fast_items_do_not_put_all_others_into_one_task() -> None:
    chunks: list[int] = []

    async def play(items: list[int], seconds: float) -> Answer:
        chunks.append(len(items))
        return doubled(items, 0.0001 * len(items))

    await run(5000, 1, play)
    assert chunks[:3] == [1, 10, 100]


async def test_large_items_share_a_task_only_up_to_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "MAX_CHUNK_BYTES", 5)
    chunks: list[list[int]] = []

    async def play(items: list[int], seconds: float) -> Answer:
        chunks.append(items)
        return doubled(items, 0.0001)

    await run(20, 1, play)
    assert max(map(len, chunks)) == 5


async def test_an_exception_ends_the_map_and_its_running_tasks() -> None:
    stopped: list[int] = []

    async def play(items: list[int], seconds: float) -> Answer:
        if items == [1]:
            raise ConnectionError("lost")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            stopped.extend(items)
            raise
        raise AssertionError("it is cancelled")

    with pytest.raises(ConnectionError):
        await run(4, 3, play)
    assert stopped == [0, 2]
