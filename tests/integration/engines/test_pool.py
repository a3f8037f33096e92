"""A worker process that dies, hangs or cannot be reached fails only its own call."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from runtime_core.engines.runtime_engine import CallFailed
from tests.contracts.engine import functions
from tests.contracts.engine.promises import open_gate, until
from weft.engines import EngineCall, LocalEngine, RunConfig
from weft.errors import InvalidInput

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    async with LocalEngine(RunConfig(mode="processes", worker_num=2)) as made:
        yield made
    assert made.worker_pids == []


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        # A child of somebody who has not looked yet is dead too.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def pid_of(folder: str, name: str) -> int:
    return int((Path(folder) / f"begun-{name}").read_text())


async def test_a_dead_worker_fails_only_its_call(engine: LocalEngine, folder: str) -> None:
    """The neighbour runs while the other one dies, and later calls get a new process."""
    calls = [EngineCall(functions.hold, (folder, "neighbour")), EngineCall(functions.die, (folder, "dead"))]
    calls += [EngineCall(functions.add, (number,)) for number in range(10)]
    running = asyncio.create_task(engine.agather(*calls, return_exceptions=True))
    await until(lambda: functions.count_begun(folder) == 2, "both have begun")
    await until(lambda: gone(pid_of(folder, "dead")), "one is dead")
    open_gate(folder)
    neighbour, dead, *others = await running
    assert (neighbour, others) == ("neighbour", list(range(10)))
    assert isinstance(dead, CallFailed)
    assert str(dead) == ("call 1 (die): WorkerDied: the worker process was ended by SIGKILL while it ran the call")


async def test_an_exit_is_a_death_too(engine: LocalEngine) -> None:
    with pytest.raises(
        CallFailed, match="WorkerDied: the worker process ended with exit status 3 while it ran the call"
    ):
        await engine.map(functions.exit_at_once, [3])
    assert await engine.map(functions.add, [1]) == [1]


async def test_a_death_is_noticed_even_if_a_child_of_the_worker_lives(engine: LocalEngine, folder: str) -> None:
    with pytest.raises(CallFailed, match="was ended by SIGKILL"):
        await engine.map(functions.die_with_a_child, [folder])
    open_gate(folder)


async def test_workers_that_died_while_idle_cost_no_call(folder: str) -> None:
    """The number of deaths does not matter: there is no limit of attempts."""
    number = 5
    async with LocalEngine(RunConfig(mode="processes", worker_num=number)) as engine:
        calls = [EngineCall(functions.hold, (folder, str(number))) for number in range(number)]
        running = asyncio.create_task(engine.agather(*calls))
        await until(lambda: functions.count_begun(folder) == number, "all workers are there")
        open_gate(folder)
        await running
        dead = engine.worker_pids
        assert len(dead) == number
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        for pid in dead:
            await until(partial(gone, pid), "it is dead")
        [new] = await engine.agather(functions.process)
        assert new not in dead


async def test_a_call_that_had_not_reached_its_worker_goes_to_another(engine: LocalEngine, folder: str) -> None:
    [pid] = await engine.agather(functions.process)
    os.kill(pid, signal.SIGSTOP)
    running = asyncio.create_task(engine.agather(EngineCall(functions.begun, (folder, "a"))))
    assert engine._pool is not None
    [worker] = engine._pool._all
    await until(worker._talking.locked, "it is on its way to the process, or in the pipe")
    os.kill(pid, signal.SIGKILL)
    await running
    assert pid_of(folder, "a") != pid


async def test_a_process_is_used_again(engine: LocalEngine) -> None:
    one = await engine.agather(functions.process)
    assert await engine.agather(functions.process) == one
    assert len(engine.worker_pids) == 1


async def test_a_call_that_takes_too_long_loses_its_process(engine: LocalEngine, folder: str) -> None:
    limit = 0.5
    while functions.count_begun(folder) == 0:  # on a busy machine its time is over before it begins
        with pytest.raises(
            CallFailed, match=rf"TimeoutError: the call did not end within {limit:g} s; its process was ended"
        ):
            await engine.agather(EngineCall(functions.hold, (folder, "slow"), timeout_seconds=limit))
        limit *= 2
    assert gone(pid_of(folder, "slow"))


async def test_a_cancel_ends_the_process(engine: LocalEngine, folder: str) -> None:
    running = asyncio.create_task(engine.agather(EngineCall(functions.hold, (folder, "a"))))
    await until(lambda: functions.count_begun(folder) == 1, "the call runs")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gone(pid_of(folder, "a"))


async def test_close_leaves_no_process_behind(folder: str) -> None:
    engine = LocalEngine(RunConfig(mode="processes", worker_num=2))
    await engine.map(functions.add, range(4))
    pids = engine.worker_pids
    assert pids
    await engine.close()
    assert all(gone(pid) for pid in pids)


UNSENDABLE: dict[str, Callable[[], EngineCall]] = {
    "a lambda": lambda: EngineCall(lambda: None),
    "an argument": lambda: EngineCall(functions.same, (threading.Lock(),)),
    "a named argument": lambda: EngineCall(functions.same, (), {"value": threading.Lock()}),
    "a bound method": lambda: EngineCall(partial(threading.Event().wait, 1)),
}


@pytest.mark.parametrize("name", UNSENDABLE)
async def test_an_unsendable_value_is_one_clear_error_before_anything_begins(
    engine: LocalEngine, folder: str, name: str
) -> None:
    calls = [EngineCall(functions.begun, (folder, "a")), UNSENDABLE[name]()]
    with pytest.raises(InvalidInput, match=r"calls\[1\]: .*cannot be sent to a process.*top of a module"):
        await engine.agather(*calls)
    assert functions.count_begun(folder) == 0
    assert engine.worker_pids == []


async def test_a_result_that_cannot_be_sent_back_fails_only_its_call(engine: LocalEngine) -> None:
    with pytest.raises(CallFailed, match="PicklingError: the result, a function, cannot be sent back"):
        await engine.agather(functions.unsendable)
    assert await engine.map(functions.add, [1]) == [1]


async def test_an_error_shows_where_it_came_from(engine: LocalEngine) -> None:
    with pytest.raises(CallFailed) as failed:
        await engine.map(functions.fail, ["why"])
    assert any("in fail" in note for note in failed.value.__cause__.__notes__)  # type: ignore[union-attr]


PARENT = """
import asyncio, sys
from weft.engines import EngineCall, LocalEngine, RunConfig
from tests.contracts.engine import functions

async def main(folder):
    engine = LocalEngine(RunConfig(mode="processes", worker_num=1))
    await engine.agather(EngineCall(functions.hold, (folder, "orphan")))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


async def test_workers_end_with_their_parent_however_it_dies(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(script), str(folder)], env=environment)
    try:
        await until(lambda: functions.count_begun(str(folder)) == 1, "the call runs")
        pid = pid_of(str(folder), "orphan")
        assert not gone(pid)
    finally:
        parent.kill()
        parent.wait()
    await until(lambda: gone(pid), "the worker ends")


UNGUARDED = """
import asyncio
from weft.engines import LocalEngine, RunConfig
from tests.contracts.engine import functions

async def main():
    async with LocalEngine(RunConfig(mode="processes", worker_num=1)) as engine:
        await engine.map(functions.add, [1])

asyncio.run(main())
"""


async def test_a_program_without_a_main_guard_gets_a_clear_error(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = done.stderr.splitlines()[-1]
    assert "WorkerDied: the worker process ended with exit status 1 before it took the call" in said
    assert "if __name__ == '__main__'" in said
