"""The event loop for the code of a run: callbacks, tasks and threads, and a clock that its host moves."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from runtime_core.errors import WeftError
from runtime_core.runs.guest_loop import CALLBACKS_PER_SLICE, GuestLoop

SECONDS = 30.0


class Noticed:
    """Counts the notices of a loop."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def noticed() -> Noticed:
    return Noticed()


@pytest.fixture
async def loop(noticed: Noticed) -> AsyncIterator[GuestLoop]:
    made = GuestLoop(asyncio.get_running_loop(), 1_000, noticed)  # type: ignore[abstract]  # it sets the others by name
    yield made
    made.close()


async def test_callbacks_run_in_order_and_see_their_own_loop(loop: GuestLoop) -> None:
    seen: list[object] = []

    def first() -> None:
        seen.append(asyncio.get_running_loop() is loop)
        loop.call_soon(seen.append, "third")

    loop.call_soon(first)
    loop.call_soon(seen.append, "second")
    loop.call_soon(seen.append, "never").cancel()
    assert seen == []
    await loop.run_ready()
    assert seen == [True, "second", "third"]
    assert not loop.runnable
    assert not loop.is_running()
    assert asyncio.get_running_loop() is not loop


async def test_other_runs_get_a_turn_between_slices(loop: GuestLoop) -> None:
    turns: list[str] = []

    def own(left: int) -> None:
        turns.append("own")
        if left:
            loop.call_soon(own, left - 1)

    loop.call_soon(own, 2 * CALLBACKS_PER_SLICE)
    asyncio.get_running_loop().call_soon(lambda: asyncio.get_running_loop().call_soon(turns.append, "other"))
    await loop.run_ready()
    assert turns.index("other") <= 2 * CALLBACKS_PER_SLICE


async def test_timers_fire_when_the_host_moves_the_clock(loop: GuestLoop) -> None:
    fired: list[str] = []
    assert loop.time() == 1.0
    loop.call_later(2, fired.append, "b")
    loop.call_later(2, fired.append, "c")
    loop.call_later(1, fired.append, "a")
    loop.call_later(0.5, fired.append, "never").cancel()
    loop.call_at(0.5, fired.append, "at once")
    await loop.run_ready()
    assert fired == ["at once"]
    timer = loop.next_timer()
    assert timer is not None
    assert timer.when() == 2.0, "a cancelled timer is not the next one"
    loop.move_to(2.0)
    await loop.run_ready()
    assert fired == ["at once", "a"]
    loop.move_to(3.5)
    loop.move_to(1.0)
    assert loop.time() == 3.5, "the clock never goes back"
    await loop.run_ready()
    assert fired == ["at once", "a", "b", "c"]
    assert loop.next_timer() is None


async def test_tasks_are_known_until_they_end(loop: GuestLoop) -> None:
    gate = loop.create_future()

    async def work() -> int:
        await gate
        return 7

    task = loop.create_task(work(), name="mine")
    await loop.run_ready()
    assert loop.tasks == {task}
    gate.set_result(None)
    await loop.run_ready()
    assert (task.result(), loop.tasks) == (7, set())


async def test_an_exit_of_the_code_stays_in_its_task(loop: GuestLoop) -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    task = loop.create_task(leaves())
    await loop.run_ready()
    assert isinstance(task.exception(), SystemExit)


async def test_the_end_of_a_thread_is_noticed(loop: GuestLoop, noticed: Noticed) -> None:
    go_on = threading.Event()

    def work(fails: bool) -> str:
        assert go_on.wait(SECONDS)
        if fails:
            raise ValueError("no")
        return "done"

    results = [loop.run_in_executor(None, work, fails) for fails in (False, True)]
    assert (loop.threads, noticed.count) == (2, 0)
    go_on.set()
    async with asyncio.timeout(SECONDS):
        while loop.threads:
            await loop.next_notice(SECONDS)
    assert (results[0].result(), noticed.count) == ("done", 2)
    assert str(results[1].exception()) == "no"


async def test_another_loop_or_thread_makes_callbacks_ready(loop: GuestLoop, noticed: Noticed) -> None:
    seen: list[str] = []
    thread = threading.Thread(target=loop.call_soon_threadsafe, args=(seen.append, "from outside"))
    thread.start()
    thread.join(SECONDS)
    async with asyncio.timeout(SECONDS):
        await loop.next_notice(SECONDS)
    assert (loop.runnable, noticed.count, seen) == (True, 1, [])
    await loop.run_ready()
    assert seen == ["from outside"]


async def test_an_abandoned_generator_is_closed_in_its_own_loop(loop: GuestLoop, noticed: Noticed) -> None:
    closed_in: list[object] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed_in.append(asyncio.get_running_loop())

    async def code() -> None:
        async for _ in numbers():
            return

    hooks = sys.get_asyncgen_hooks()
    loop.create_task(code())
    await loop.run_ready()
    async with asyncio.timeout(SECONDS):
        while not closed_in:
            if not loop.runnable:
                await loop.next_notice(SECONDS)
            await loop.run_ready()
    assert closed_in == [loop]
    assert sys.get_asyncgen_hooks() == hooks


async def test_a_closed_loop_refuses_work_and_ignores_threads(loop: GuestLoop, noticed: Noticed) -> None:
    go_on = threading.Event()
    left = loop.run_in_executor(None, go_on.wait, SECONDS)
    loop.call_soon(noticed)
    loop.close()
    assert (loop.is_closed(), loop.runnable) == (True, False)

    async def work() -> None: ...

    coroutine = work()
    for call in (
        lambda: loop.call_soon(print),
        lambda: loop.call_soon_threadsafe(print),
        lambda: loop.call_later(1, print),
        lambda: loop.create_task(coroutine),
        lambda: loop.run_in_executor(None, print),
    ):
        with pytest.raises(RuntimeError, match="its run is over"):
            call()
    coroutine.close()
    go_on.set()
    async with asyncio.timeout(SECONDS):
        while loop.threads:
            await asyncio.sleep(0)
    assert (left.done(), noticed.count) == (False, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda loop: loop.create_connection(asyncio.Protocol, "127.0.0.1", 1),
        lambda loop: loop.subprocess_exec(asyncio.SubprocessProtocol, "true"),
        lambda loop: loop.getaddrinfo("localhost", 1),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.run_until_complete(None),
    ],
)
async def test_sockets_and_processes_are_refused_with_the_remedy(
    loop: GuestLoop, call: Callable[[GuestLoop], object]
) -> None:
    with pytest.raises(WeftError, match="between the steps of a durable run: move code that connects"):
        call(loop)
