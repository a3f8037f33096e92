"""A driver process: started, lost, started again; its work ends once in every case."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runtime_core.engines.driver import driver as driver_module
from runtime_core.engines.driver.driver import Driver
from runtime_core.engines.protocol import ConnectionState, Error, Pickled, Registered, Value, Work
from tests.engine_backends.files import FOLDER, Files
from tests.engine_backends.folder import alive
from tests.fleet import ROOT
from tests.service_forks import SOURCES

WAIT = 60.0
"""Patience of a test, which decides nothing."""
SCRIPTED = "tests.engine_backends.scripted:Scripted"
MIB = 1024 * 1024


def environ(folder: Path) -> dict[str, str]:
    return {**os.environ, FOLDER: str(folder), "PYTHONPATH": SOURCES}


@asynccontextmanager
async def driver_of(folder: Path, backend: str = SCRIPTED) -> AsyncIterator[Driver]:
    driver = Driver(backend, environ(folder))
    await driver.start()
    try:
        yield driver
    finally:
        await driver.stop()


async def connected(driver: Driver, wanted: bool = True) -> ConnectionState:
    async with asyncio.timeout(WAIT):
        state = driver.state
        while state.connected is not wanted:
            state = await driver.changed(state)
        return state


async def until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not check():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def work(name: str, key: str = "", data: bytes = b"{}") -> Work:
    return Work(Registered("tests.app:app", "", name, data), name, key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path)
    files.up()
    return files


async def test_a_driver_answers_a_call_and_forgets_it(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        state = await connected(driver)
        assert state.info == {"version": "1.0", "at": "a folder"}
        assert await driver.run(work("echo", "k", b'{"a":1}')) == Value(b'{"a":1}')
        told: list[bytes] = []
        assert await driver.run(work("progress"), told.append) == Value(b"null")
        assert told == [b'{"done":0}', b'{"done":1}', b'{"done":2}']
        wrong = await driver.run(work("wrong"))
        assert isinstance(wrong, Error)
        assert (wrong.cause, wrong.retryable) == ("invalid", False)
        driver.forget("k")
        await until(lambda: "forgot k" in files.journal())
        assert driver.memory_bytes > MIB
    assert files.journal()[-1] == "closed"


async def test_a_defect_of_a_backend_fails_only_one_call(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)
        failed = await driver.run(work("defect"))
        assert isinstance(failed, Error)
        assert (failed.cause, failed.type) == ("worker", "LookupError")
        assert await driver.run(work("echo")) == Value(b"{}")
        assert driver.starts == 1


async def test_only_the_cancelled_call_is_stopped_on_the_engine(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)
        first, second = (asyncio.create_task(driver.run(work("wait", key))) for key in ("one", "two"))
        await until(lambda: {"began wait one", "began wait two"} <= set(files.journal()))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        # Whoever cancelled it may count on that it runs no more.
        assert "stopped one" in files.journal()
        assert not second.done()
        second.cancel()
        await asyncio.wait((second,))
        assert driver.running == 0


async def test_a_call_that_ignores_its_cancel_does_not_block_its_caller(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "CANCEL_SECONDS", 0.1)
    async with driver_of(files.folder) as driver:
        await connected(driver)
        running = asyncio.create_task(driver.run(work("stubborn", "k")))
        await until(lambda: "began stubborn k" in files.journal())
        running.cancel()
        async with asyncio.timeout(WAIT):
            await asyncio.wait((running,))
        assert running.cancelled()
        assert driver.running == 0
        assert await driver.run(work("echo")) == Value(b"{}")


async def test_a_detached_call_continues(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)
        begun = driver.begin(work("wait", "k"))
        await until(lambda: "began wait k" in files.journal())
        begun.leave()
        assert driver.running == 0
    # Not even the end of its driver stops it, where the engine outlives that.
    assert "stopped k" not in files.journal()


async def test_a_killed_driver_loses_its_running_calls_and_is_replaced(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)
        running = [asyncio.create_task(driver.run(work("wait", str(number)))) for number in range(3)]
        died = asyncio.create_task(driver.run(work("die")))
        async with asyncio.timeout(WAIT):
            ends = await asyncio.gather(*running, died)
        assert {end.cause for end in ends if isinstance(end, Error)} == {"lost"}
        assert len(ends) == 4
        await connected(driver)
        assert driver.starts == 2
        assert await driver.run(work("echo")) == Value(b"{}")
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any("ended by SIGKILL" in line and "a library prints this" in line for line in told), told


async def test_a_lost_engine_ends_running_calls_and_the_driver_waits_for_it(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)
        running = asyncio.create_task(driver.run(work("wait", "k")))
        await until(lambda: "began wait k" in files.journal())
        files.down()
        async with asyncio.timeout(WAIT):
            end = await running
        assert isinstance(end, Error)
        assert end.cause == "lost"
        assert "the file up has gone" in end.message
        await connected(driver, False)
        async with asyncio.timeout(WAIT):
            state = driver.state
            while "touch the file up" not in state.reason:
                state = await driver.changed(state)
        away = await driver.run(work("echo"))
        assert isinstance(away, Error)
        assert (away.cause, away.type) == ("away", "EngineUnavailable")
        assert "touch the file up" in away.message
        lost_at = time.time()
        assert driver.connected_since < lost_at
        files.up()
        await connected(driver)
        assert driver.connected_since > lost_at
        assert await driver.run(work("echo")) == Value(b"{}")


async def test_a_missing_package_is_reported_in_one_line(tmp_path: Path) -> None:
    async with driver_of(tmp_path, "tests.engine_backends.scripted:Missing") as driver, asyncio.timeout(WAIT):
        state = driver.state
        while "not installed" not in state.reason:
            state = await driver.changed(state)
        assert "no_such_engine" in state.reason
        assert "\n" not in state.reason


async def test_a_driver_that_hangs_is_killed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "SILENT_BEATS", 2)
    async with driver_of(files.folder) as driver:
        await connected(driver)
        async with asyncio.timeout(WAIT):
            end = await driver.run(work("hang"))
        assert isinstance(end, Error)
        assert end.cause == "lost"
        await connected(driver)
        assert driver.starts >= 2


async def test_a_large_message_round_trips_without_blocking_the_loop(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)
        turns = 0

        async def go_round() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.001)
                turns += 1

        beside = asyncio.create_task(go_round())
        payload = b"x" * (48 * MIB)
        async with asyncio.timeout(WAIT):
            end = await driver.run(Work(Pickled(payload), "size"))
        beside.cancel()
        assert isinstance(end, Value)
        assert len(end.data) == len(payload)
        assert turns > 5


async def test_ten_thousand_calls_leave_nothing_behind(files: Files) -> None:
    async with driver_of(files.folder) as driver:
        await connected(driver)

        async def calls(count: int) -> int:
            for _ in range(count // 100):
                ends = await asyncio.gather(*(driver.run(work("echo", str(n), b"{}")) for n in range(100)))
                assert ends == [Value(b"{}")] * 100
            return driver.memory_bytes

        before = await calls(2_000)
        after = await calls(8_000)
        assert after - before < 16 * MIB
        assert driver.running == 0


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_driver_ends_with_the_process_that_started_it(hangs: bool, files: Files) -> None:
    code = (
        "import asyncio, os, sys\n"
        "from runtime_core.engines.protocol import Registered, Work\n"
        "from runtime_core.engines.driver.driver import Driver\n"
        "async def main():\n"
        f"    driver = Driver({SCRIPTED!r}, dict(os.environ))\n"
        "    await driver.start()\n"
        "    while not driver.state.connected:\n"
        "        await driver.changed(driver.state)\n"
        f"    if {hangs}:\n"
        "        driver.begin(Work(Registered('', '', 'hang', b''), 'hang'))\n"
        "    print(driver.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ(files.folder), stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        await until(lambda: not hangs or "began hang " in files.journal())
        parent.send_signal(signal.SIGKILL)
        await until(lambda: not alive(pid))
        assert hangs or files.journal()[-1] == "closed"
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
