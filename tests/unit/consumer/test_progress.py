"""The watch over the event loop: which code it interrupts, and which it does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType, SimpleNamespace
from typing import cast

import pytest

from runtime_core.consumer import progress
from runtime_core.consumer.failure import failed_from, failure_of
from runtime_core.consumer.progress import INTERRUPT_SIGNAL, LoopWatch, interruptible
from runtime_core.errors import LoopBlocked, LoopInterrupt
from runtime_core.tools.tool import run_limited

LIMIT = 0.4


@asynccontextmanager
async def watched(monkeypatch: pytest.MonkeyPatch, *, interrupts: bool = True) -> AsyncIterator[LoopWatch]:
    # A test runs under coverage or a debugger now and then.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(**{**vars(sys), "gettrace": lambda: None}))
    watch = LoopWatch(LIMIT, interrupts=interrupts)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


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
        with pytest.raises(
            LoopBlocked, match=r"blocked the event loop for .* at .*test_progress.py:\d+ \(spin\)"
        ) as caught:
            await run_limited("spin", 60, spin)
        assert time.monotonic() - began < 20
    assert "in spin" in "".join(traceback.format_exception(caught.value))
    assert "the event loop has been blocked for" in caplog.text
    assert "in spin" in caplog.text


async def test_a_loop_that_turns_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watched(monkeypatch):
        end_at = time.monotonic() + 3 * LIMIT
        while time.monotonic() < end_at:
            await asyncio.sleep(0)


async def test_a_service_without_users_code_only_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(monkeypatch, interrupts=False):
        end_at = time.monotonic() + 60
        while "the event loop has been blocked for" not in caplog.text:
            assert time.monotonic() < end_at
        for _ in range(10):
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
        (("concurrent.futures._base", "threading", "desk.agents", "runtime_core.tools.tool"), True),
        (("numpy.linalg", "runtime_core.tools.tool"), True),
        (("runtime_core.declare.schema", "desk.agents", "runtime_core.runs.scheduler"), False),
        (("logging", "runtime_core.runs.scheduler"), False),
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
        assert (failed.type, failed.message, failed.retryable) == ("LoopBlocked", "held the loop", True)


FORKS = """
import os, sys, threading
from runtime_core.host.forked import guard_forks
from runtime_core.tools.tool import _guarded

guard_forks()

def twice():
    if how == "process":
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=print, args=("ran",), kwargs={"flush": True})
        child.start()
        child.join()
        return child.exitcode
    if how == "terminated":
        import multiprocessing, signal, time
        signal.signal(signal.SIGTERM, lambda *_: None)
        heard, says = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=lambda: (says.send(1), time.sleep(600)))
        child.start()
        heard.recv()
        child.terminate()
        child.join(60)
        return -child.exitcode
    pid = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else "child"

how = sys.argv[1]
print(_guarded("it", twice), flush=True)
"""


@pytest.mark.parametrize(("how", "said"), [("fork", ["70"]), ("process", ["ran", "0"]), ("terminated", ["15"])])
def test_a_child_ends_where_it_would_come_back(how: str, said: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, how],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=dict(os.environ),
    )
    assert done.stdout.split() == said
    assert ("returned from the code that forked it" in done.stderr) is (how == "fork")
