"""The watch over the event loop: which code it interrupts, and which it does not."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import chain
from types import FrameType, SimpleNamespace
from typing import cast

import pytest

from runtime_core.bus.deliveries import Delivery
from runtime_core.consumer import progress
from runtime_core.consumer.progress import INTERRUPT_SIGNAL, LoopWatch, interruptible, silenced_by
from runtime_core.consumer.settle import failed_from, failure_of
from runtime_core.declare.tool import AbandonedThreads, run_in_thread, run_limited
from runtime_core.engines.local import LocalEngine
from runtime_core.errors import BlockedEventLoop, LoopInterrupt
from runtime_core.runs.scheduler import _guarded
from runtime_core.runs.step import call_function
from runtime_core.telemetry.logs import HANDLED
from tests.servers.matrix import first_of

LIMIT = 0.4
COMPUTED_SECONDS = 0.75 * LIMIT
"""Of processor time, estimated before it is spent: of a busy machine's time it must be a tenth at least."""


@asynccontextmanager
async def watched(
    monkeypatch: pytest.MonkeyPatch, *, interrupts: bool = True, limit_seconds: float = LIMIT
) -> AsyncIterator[LoopWatch]:
    # A test runs under coverage or a debugger now and then.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(**{**vars(sys), "gettrace": lambda: None}))
    watch = LoopWatch(LIMIT, limit_seconds, interrupts=interrupts)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        if watch._thread.is_alive():
            watch._thread.join()  # it may still be about to log


async def spin() -> object:
    end_at = time.monotonic() + 30
    while time.monotonic() < end_at:
        pass
    return None


async def test_code_that_holds_the_loop_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(monkeypatch):
        began = time.monotonic()
        HANDLED.set(Delivery(0, "tool", b"1-0"))
        with pytest.raises(
            BlockedEventLoop, match=r"blocked the event loop for .* in test_progress.py:\d+ in spin"
        ) as caught:
            await run_limited("spin", 60, spin)
        assert time.monotonic() - began < 20
    assert "in spin" in "".join(traceback.format_exception(caught.value))
    (report,) = (each for each in caplog.records if "event loop blocked for" in each.message)
    assert "\n" not in report.message
    assert "in spin" in report.fields["traceback"]  # type: ignore[attr-defined]  # it is in `extra`


async def test_code_that_no_delivery_runs_is_only_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(monkeypatch):
        time.sleep(1.5 * LIMIT)  # holding the loop is the point
    assert "in test_code_that_no_delivery_runs_is_only_reported by" in caplog.text


async def test_a_blocked_loop_has_heartbeats_until_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    silent = threading.Event()

    async def beat(lasts: Callable[[], bool]) -> None:
        while lasts():
            beats.append(time.monotonic())
            await asyncio.sleep(0.02)
        silent.set()

    watch = LoopWatch(LIMIT, 4 * LIMIT, interrupts=False)
    watch.start(beat)
    try:
        began = time.monotonic()
        assert silent.wait(30)  # holding the loop is the point
    finally:
        watch.stop()
    # Measured roughly, since the machine may be busy.
    assert LIMIT / 3 <= beats[0] - began < 3 * LIMIT
    assert beats[-1] - began > 2 * LIMIT


async def test_a_program_with_its_own_handler_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert INTERRUPT_SIGNAL is not None

    def own(number: int, frame: FrameType | None) -> None: ...

    signal.signal(INTERRUPT_SIGNAL, own)
    try:
        async with watched(monkeypatch):
            assert signal.getsignal(INTERRUPT_SIGNAL) is own
        assert signal.getsignal(INTERRUPT_SIGNAL) is own
    finally:
        signal.signal(INTERRUPT_SIGNAL, signal.SIG_DFL)


async def test_a_running_loop_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch):
        end_at = time.monotonic() + 2 * LIMIT
        while time.monotonic() < end_at:
            await asyncio.sleep(0)


async def test_a_service_without_user_code_only_logs_the_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    HANDLED.set(Delivery(0, "tool", b"1-0"))
    async with watched(monkeypatch, interrupts=False):
        end_at = time.monotonic() + 60
        while "event loop blocked for" not in caplog.text:
            assert time.monotonic() < end_at
        for _ in range(40):
            time.sleep(LIMIT / 20)  # holding the loop is the point


async def test_a_stray_signal_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch):
        assert INTERRUPT_SIGNAL is not None
        signal.raise_signal(INTERRUPT_SIGNAL)
        await asyncio.sleep(0)


def frames(*modules: str) -> FrameType | None:
    """Return a stack, innermost frame first."""
    frame: SimpleNamespace | None = None
    for module in reversed(modules):
        frame = SimpleNamespace(f_globals={"__name__": module}, f_back=frame)
    return cast("FrameType | None", frame)


@pytest.mark.parametrize(
    ("modules", "wanted"),
    [
        (("desk.agents", "runtime_core.runs.scheduler", "asyncio.runners"), True),
        (("json.decoder", "desk.agents", "runtime_core.runs.scheduler"), True),
        (("concurrent.futures._base", "threading", "desk.agents", "runtime_core.declare.tool"), True),
        (("numpy.linalg", "runtime_core.declare.tool"), True),
        (("runtime_core.declare.schema", "desk.agents", "runtime_core.runs.scheduler"), False),
        (("logging", "runtime_core.runs.scheduler"), False),
        (("re2", "runtime_core.telemetry.redaction", "desk.agents", "runtime_core.runs.scheduler"), False),
        (("asyncio.tasks", "desk.agents", "runtime_core.runs.scheduler"), False),
        (("torch", "importlib._bootstrap", "desk.agents", "runtime_core.runs.scheduler"), False),
        (("asyncio.runners", "runtime_core.host.service"), False),
    ],
)
def test_only_code_of_users_is_interrupted(modules: tuple[str, ...], wanted: bool) -> None:
    assert interruptible(frames(*modules)) is wanted


def test_a_blocked_loop_is_an_attempt_that_failed() -> None:
    error = LoopInterrupt("held the loop").blocked()
    for failed in (failure_of(error), failed_from(error)):
        assert (failed.type, failed.message, failed.retryable) == ("BlockedEventLoop", "held the loop", True)


def work_of_c() -> Iterator[int]:
    """Return what C code that consumes it computes, and then waits for. It keeps the global lock for all of that.

    Its waiting alone takes the limit. A process that computes nothing counts as paused.
    """
    began = time.process_time()
    sum(range(2_000_000))
    numbers = range(int(2_000_000 * COMPUTED_SECONDS / (time.process_time() - began)))
    return chain(numbers, map(ctypes.PyDLL(None).usleep, (int(LIMIT * 1e6),)))


def keep_lock() -> int:
    """Keep the global lock, and go on for a moment: on a busy machine the watch may look a little later."""
    total = sum(work_of_c())
    time.sleep(LIMIT)
    return total


async def keeping_lock() -> object:
    return str(keep_lock())


def keep_lock_to_end() -> int:
    """Keep the global lock until it returns, without a call afterwards."""
    work, consumed = work_of_c(), deque[int](maxlen=0)
    consumed += work
    return 0


async def keeping_lock_to_end() -> object:
    return keep_lock_to_end()


def delivery_of(task: str) -> Delivery:
    delivery = Delivery(0, "agent", b"1-0")
    delivery.task, delivery.run = task, "r"
    return delivery


async def test_c_code_that_keeps_the_global_lock_ends_its_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = delivery_of("keeps")
    # On a busy machine the limit of the loop could end the code while it looks for the time that it computes.
    async with watched(monkeypatch, limit_seconds=30.0):
        HANDLED.set(delivery)
        with pytest.raises(BlockedEventLoop, match=r"global lock .* in test_progress.py:\d+ in keep_lock") as caught:
            await _guarded(keeping_lock())
    assert not failure_of(caught.value).retryable
    assert not failed_from(caught.value).retryable
    assert "run r of task keeps kept Python's global lock" in caplog.text
    assert "in keep_lock" in silenced_by(delivery, 2)
    assert silenced_by(delivery, 2) == "", "once"


async def named_in_time(
    monkeypatch: pytest.MonkeyPatch, name: str, code: Callable[[], Coroutine[object, object, object]]
) -> str:
    """Return what the watch says of code that keeps the lock until it returns.

    Where the code ends, another thread may get the lock before the watch does. Then only another run can be named.
    """
    delivery = delivery_of(name)
    for _ in range(10):
        async with watched(monkeypatch):
            HANDLED.set(delivery)
            await code()
        if said := silenced_by(delivery, 2):
            return said
    return ""


async def test_code_that_keeps_the_global_lock_until_it_returns_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = await named_in_time(monkeypatch, "to the end", lambda: _guarded(keeping_lock_to_end()))
    assert "in its last expression before it returned" in said


def test_a_later_turn_of_a_run_that_has_kept_the_lock_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    delivery = delivery_of("goes on")
    monkeypatch.setitem(progress.SILENCED, ("goes on", "r"), "kept the lock")
    assert silenced_by(delivery, 1) == ""
    assert silenced_by(delivery, 2) == "", "forgotten"


async def test_a_delivery_that_does_not_block_the_loop_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may have moved on to another one before it handles the signal."""
    blocking, other = delivery_of("blocking"), delivery_of("other")
    async with watched(monkeypatch) as watch:
        HANDLED.set(other)
        watch._silencing = blocking, 1.0, sys._getframe()
        assert INTERRUPT_SIGNAL is not None

        async def raises() -> None:
            signal.raise_signal(INTERRUPT_SIGNAL)

        await run_limited("other", 60, raises)


async def in_tool(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as threads:
        await run_in_thread("it", 60, function, threads, AbandonedThreads(), lambda: None)


async def in_step(function: Callable[[], object]) -> None:
    await call_function(function, (), {})


async def in_engine(function: Callable[[], object]) -> None:
    async with LocalEngine() as engine:
        await engine.execute([function])


@pytest.mark.parametrize("place", [in_tool, in_step, in_engine])
async def test_a_plain_function_that_keeps_the_global_lock_until_it_returns_is_named(
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Callable[[], object]], Coroutine[object, object, None]],
) -> None:
    said = await named_in_time(monkeypatch, place.__name__, lambda: place(keep_lock_to_end))
    assert "in its last expression before it returned" in said


# The test above tries each place.
@pytest.mark.parametrize("place", first_of(in_tool, in_step, in_engine))
async def test_a_plain_function_that_keeps_the_global_lock_is_named(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: Callable[[Callable[[], object]], Coroutine[object, object, None]],
) -> None:
    delivery = delivery_of(place.__name__)
    async with watched(monkeypatch):
        HANDLED.set(delivery)
        await place(keep_lock)
    assert f"run r of task {place.__name__} kept Python's global lock" in caplog.text
    assert "in keep_lock" in silenced_by(delivery, 2)


async def test_a_paused_process_has_kept_no_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def paused() -> None:
        ctypes.PyDLL(None).usleep(int(4 * LIMIT * 1e6))  # no thread runs, and nothing is computed

    delivery = delivery_of("paused")
    async with watched(monkeypatch):
        HANDLED.set(delivery)
        await _guarded(paused())
    assert "global lock" not in caplog.text
    assert silenced_by(delivery, 2) == ""
