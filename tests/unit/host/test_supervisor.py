"""The supervisor, with real child processes that run, die, refuse to start and hang."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_core.host import supervisor as supervisor_module
from runtime_core.host.supervisor import ChildSpec, Supervisor
from runtime_core.telemetry.logs import last_line

WAITS = "import signal, sys; print('here', flush=True); signal.signal(15, lambda *_: sys.exit(0)); signal.pause()"
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); print('here', flush=True); signal.pause(); signal.pause()"


class Output(io.StringIO):
    """Collects lines; `until` waits for one."""

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()

    async def until(self, pattern: str, times: int = 1) -> None:
        await until(lambda: len(re.findall(pattern, self.getvalue())) >= times, lambda: self.getvalue())


async def until(condition: Callable[[], bool], otherwise: Callable[[], object] = lambda: "") -> None:
    end_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_at, otherwise()
        await asyncio.sleep(0.01)


def child(name: str, code: str) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-S", "-u", "-c", code], dict(os.environ))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_lines_are_shown_with_names_and_stop_is_clean() -> None:
    output = Output()
    code = WAITS + "; print('end')"
    own = "print('12:03:04 worker-b  ✓ ready'); print('{\"time\":1}'); print('x' * 70000);"
    supervisor = Supervisor([child("a", code), child("worker-b", own + WAITS)], output)
    running = asyncio.create_task(supervisor.run())
    await output.until("here", 2)
    supervisor.stop()
    assert await running == 0
    lines = output.lines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d a         \| here", next(line for line in lines if " a " in line))
    assert "12:03:04 worker-b  ✓ ready" in lines
    assert '{"time":1}' in lines
    assert sum(line.count("x") for line in lines) == 70000, "a very long line is shown in pieces"
    assert supervisor.pids == {}


async def test_names_are_coloured_only_when_asked() -> None:
    for colour, shown in ((True, "\x1b[36ma\x1b[0m  | here"), (None, "a  | here")):
        output = Output()
        supervisor = Supervisor([child("a", WAITS)], output, colour=colour)
        running = asyncio.create_task(supervisor.run())
        await output.until("here")
        supervisor.stop()
        await running
        assert output.lines()[0][9:] == shown


async def test_a_killed_child_is_restarted_and_logged() -> None:
    output = Output()
    supervisor = Supervisor([child("a", WAITS)], output)
    running = asyncio.create_task(supervisor.run())
    await output.until("here")
    first = supervisor.pids["a"]
    os.kill(first, signal.SIGKILL)
    await output.until("here", 2)
    assert supervisor.pids["a"] != first
    supervisor.stop()
    assert await running == 0
    assert re.search(r"a  ! exited \(signal 9, SIGKILL\) after \d+\.\d s; restarting in 0\.2 s", output.getvalue())


async def test_pauses_grow_and_restarts_never_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(supervisor_module, "LONGEST_BACKOFF_SECONDS", 0.04)
    output = Output()
    spec = child("a", "raise SystemExit(1)")
    supervisor = Supervisor([spec], output)
    supervisor._children[0].backoff_seconds = 0.01
    running = asyncio.create_task(supervisor.run())
    await output.until("restarting", 5)
    supervisor.stop()
    assert await running == 0
    assert re.findall(r"restarting in ([\d.]+) s", output.getvalue())[:5] == ["0.01", "0.02", "0.04", "0.04", "0.04"]


@pytest.mark.parametrize("log_format", ["text", "json"])
async def test_a_child_that_fails_three_times_ends_all_children(log_format: str) -> None:
    output = Output()
    line = last_line("b", log_format, "WEFT_APP is not set")
    supervisor = Supervisor([child("a", WAITS), child("b", f"print({line!r}); raise SystemExit(1)")], output)
    async with asyncio.timeout(60):
        assert await supervisor.run() == 1
    assert supervisor.failure == line
    assert output.getvalue().count("WEFT_APP is not set") == 3
    assert supervisor.pids == {}


async def test_a_missing_command_ends_them_all() -> None:
    output = Output()
    missing = ChildSpec("b", ["/nowhere/at-all"], dict(os.environ))
    supervisor = Supervisor([child("a", WAITS), missing], output)
    async with asyncio.timeout(60):
        assert await supervisor.run() == 1
    assert "/nowhere/at-all" in supervisor.failure


async def test_a_child_that_does_not_stop_is_killed_with_what_it_started() -> None:
    output = Output()
    spawns = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {DEAF!r}]).pid, flush=True);"
    supervisor = Supervisor([child("a", spawns + DEAF)], output, shutdown_seconds=0.1)
    running = asyncio.create_task(supervisor.run())
    await output.until("here", 2)
    grandchild = int(output.lines()[0].rpartition(" ")[2])
    supervisor.stop()
    assert await running == 0
    assert "did not stop in time" in output.getvalue()
    await until(lambda: not is_alive(grandchild))


async def test_descendants_of_a_killed_child_are_killed(tmp_path: Path) -> None:
    output = Output()
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print('pid', p.pid, flush=True); p.wait()"
    supervisor = Supervisor([child("a", code)], output)
    running = asyncio.create_task(supervisor.run())
    await output.until(r"pid \d+")
    found = re.search(r"pid (\d+)", output.getvalue())
    assert found is not None
    started = int(found[1])
    assert is_alive(started)
    os.kill(supervisor.pids["a"], signal.SIGKILL)
    await until(lambda: not is_alive(started))
    supervisor.stop()
    await running


async def test_a_second_stop_kills_at_once() -> None:
    output = Output()
    supervisor = Supervisor([child("a", DEAF)], output, shutdown_seconds=3600)
    running = asyncio.create_task(supervisor.run())
    await output.until("here")
    supervisor.stop()
    supervisor.stop()
    async with asyncio.timeout(60):
        assert await running == 0


async def test_a_grandchild_that_holds_the_output_does_not_hold_up_the_stop() -> None:
    output = Output()
    spawns = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
    supervisor = Supervisor([child("a", spawns + WAITS)], output)
    running = asyncio.create_task(supervisor.run())
    await output.until("here")
    supervisor.stop()
    async with asyncio.timeout(60):
        assert await running == 0


async def test_a_cancelled_supervisor_leaves_no_child() -> None:
    output = Output()
    supervisor = Supervisor([child("a", DEAF)], output)
    running = asyncio.create_task(supervisor.run())
    await output.until("here")
    pid = supervisor.pids["a"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert supervisor.pids == {}
    assert not is_alive(pid)
