"""Work on a Ray cluster through a separate driver process, while parts of both are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from runtime_core.engines.driver.driver import Driver
from runtime_core.engines.protocol import Error, Mapped, Outcome, Registered, Resources, StepInfo, Value, Work
from tests.conftest import ROOT
from tests.contracts.engine.promises import open_gate, until
from tests.engines.ray_cluster import RayCluster

pytestmark = pytest.mark.asyncio(loop_scope="session")

FUNCTIONS = "tests.engines.ray_app:app"
PATIENCE = 300.0
"""Seconds until a test gives up; they decide nothing."""


@asynccontextmanager
async def driver_of(environ: dict[str, str]) -> AsyncIterator[Driver]:
    driver = Driver("ray", {**environ, "PYTHONPATH": str(ROOT)})
    await driver.start()
    try:
        await connected(driver)
        yield driver
    finally:
        await driver.stop()


async def connected(driver: Driver) -> None:
    async with asyncio.timeout(PATIENCE):
        state = driver.state
        while not state.connected:
            state = await driver.changed(state)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def work(function: str, key: str = "", /, **arguments: object) -> Work:
    return Work(Registered(FUNCTIONS, str(ROOT), function, json.dumps(arguments).encode()), function, key=key)


def mapped(function: str, over: str, items: list[object], key: str, /, **arguments: object) -> Work:
    call = Registered(FUNCTIONS, str(ROOT), function, json.dumps(arguments).encode())
    return Work(Mapped(call, over, json.dumps(items).encode(), 0), function, key=key)


def changed(given: Work, /, **changes: object) -> Work:
    fields = {name: getattr(given, name) for name in given.__struct_fields__}
    return Work(**{**fields, **changes})


def value(outcome: Outcome) -> object:
    assert isinstance(outcome, Value), outcome
    found: object = json.loads(outcome.data)
    return found


def failed(outcome: Outcome) -> tuple[str, str]:
    assert isinstance(outcome, Error), outcome
    return outcome.cause, outcome.type


def runs(folder: str, name: str) -> int:
    """Return how often `hold` has begun under this name."""
    path = Path(folder) / f"runs-{name}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def pid_of(folder: str, name: str) -> int:
    return int((Path(folder) / f"begun-{name}").read_text())


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


async def begun(folder: str, name: str) -> None:
    await until_slowly(lambda: (Path(folder) / f"begun-{name}").exists(), f"{name} has begun")


async def until_slowly(true: Callable[[], bool], what: str) -> None:
    """Like `until`, for conditions that need a worker or a cluster first."""
    with suppress(AssertionError):
        await until(true, what)
        return
    await until(true, what)


async def cancelled(running: asyncio.Task[Outcome]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_function_runs_by_its_name_with_a_key_and_without(ray_driver: Driver) -> None:
    assert value(await ray_driver.run(work("add", left=1))) == 2
    assert value(await ray_driver.run(work("add", "add/1", left=1, right=4))) == 5
    assert ray_driver.state.info["version"].startswith("Ray 2.")


async def test_errors_of_the_library_are_translated(ray_driver: Driver) -> None:
    assert failed(await ray_driver.run(work("add", "bad/1", left="one"))) == ("invalid", "InvalidInput")
    assert failed(await ray_driver.run(work("nothing", "bad/2"))) == ("invalid", "UnknownName")
    missing = await ray_driver.run(work("missing", "bad/3"))
    assert failed(missing) == ("invalid", "ModuleNotFoundError")
    assert "a_module_that_nobody_has" in missing.message  # type: ignore[union-attr]
    app = Work(Registered("no.such_app:app", str(ROOT), "add", b"{}"), "add", key="bad/4")
    nobody = await ray_driver.run(app)
    assert failed(nobody)[0] == "invalid"
    assert "no.such_app" in nobody.message  # type: ignore[union-attr]
    spark = await ray_driver.run(changed(work("add", "bad/5", left=1), driver_side=True))
    assert failed(spark) == ("invalid", "WrongEngine")
    batch = await ray_driver.run(changed(work("command", "bad/6", words=["true"]), batch=True))
    assert failed(batch) == ("invalid", "NoDashboard")


async def test_a_large_result_goes_to_the_blob_store(ray_driver: Driver, ray_blobs: Path) -> None:
    reference = value(
        await ray_driver.run(changed(work("large", "large/1", count=100 * 2**20), step=StepInfo("t", "r")))
    )
    assert isinstance(reference, dict)
    assert reference["bytes"] == 100 * 2**20 + 2
    [file] = [path for path in ray_blobs.rglob("*.json") if path.is_file()]
    assert file.stat().st_size == 100 * 2**20 + 2


async def test_the_same_key_attaches_and_runs_once(ray_driver: Driver, folder: str) -> None:
    same = work("hold", f"same/{folder}", folder=folder, name="a")
    first, second = (asyncio.create_task(ray_driver.run(same)) for _ in range(2))
    await begun(folder, "a")
    open_gate(folder)
    assert [value(await first), value(await second)] == ["a", "a"]
    assert value(await ray_driver.run(same)) == "a", "the outcome is held until it is forgotten"
    assert runs(folder, "a") == 1
    ray_driver.forget(same.key)
    assert value(await ray_driver.run(same)) == "a"
    assert runs(folder, "a") == 2


async def test_a_failure_is_not_held(ray_driver: Driver, folder: str) -> None:
    for times in (1, 2):
        died = changed(work("unlucky", f"fail/{folder}", item=50, folder=folder), timeout_seconds=60.0)
        assert failed(await ray_driver.run(died)) == ("worker", "WorkerDied")
        assert (Path(folder) / "deaths").read_text() == "x" * times


async def test_a_killed_worker_fails_only_its_call(ray_driver: Driver, folder: str) -> None:
    one, other = (
        asyncio.create_task(ray_driver.run(work("hold", f"{name}/{folder}", folder=folder, name=name))) for name in "ab"
    )
    await begun(folder, "a")
    await begun(folder, "b")
    os.kill(pid_of(folder, "a"), signal.SIGKILL)
    assert failed(await one) == ("worker", "WorkerDied")
    open_gate(folder)
    assert value(await other) == "b"


@pytest.mark.parametrize("key", ["", "cancel"])
async def test_a_cancel_ends_a_call_that_nothing_interrupts(ray_driver: Driver, folder: str, key: str) -> None:
    running = asyncio.create_task(ray_driver.run(work("sleep", key and f"{key}/{folder}", folder=folder, name="long")))
    await begun(folder, "long")
    pid = pid_of(folder, "long")
    await cancelled(running)
    await until(lambda: gone(pid), "its worker has ended")


async def test_a_limit_ends_a_call_that_nothing_interrupts(ray_driver: Driver, folder: str) -> None:
    late = changed(work("sleep", f"late/{folder}", folder=folder, name="long"), timeout_seconds=2.0)
    assert failed(await ray_driver.run(late)) == ("limit", "TimeoutError")
    await until(lambda: gone(pid_of(folder, "long")), "its worker has ended")


async def test_a_map_reports_the_items_that_fail_hang_or_kill(ray_driver: Driver, folder: str) -> None:
    reports: list[dict[str, int]] = []
    numbers: list[object] = list(range(60))
    given = changed(mapped("unlucky", "item", numbers, f"map/{folder}", folder=folder), timeout_seconds=5.0)
    entries = value(await ray_driver.run(given, lambda report: reports.append(json.loads(report))))
    assert isinstance(entries, list)
    bad = {index: entry["error"]["type"] for index, entry in enumerate(entries) if "error" in entry}
    assert bad == {3: "ValueError", 7: "TimeoutError", 50: "WorkerDied"}
    assert [entry.get("value") for entry in entries] == [None if item in bad else 2 * item for item in range(60)]
    assert reports[-1] == {"done": 60, "failed": 3, "total": 60}


async def test_a_thousand_concurrent_steps_all_return(ray_driver: Driver) -> None:
    outcomes = await asyncio.gather(
        *(ray_driver.run(work("add", f"thousand/{number}", left=number)) for number in range(1000))
    )
    assert [value(outcome) for outcome in outcomes] == [number + 1 for number in range(1000)]
    for number in range(1000):
        ray_driver.forget(f"thousand/{number}")


async def test_actors_keep_what_they_have_loaded_and_are_replaced(ray_driver: Driver) -> None:
    call = changed(work("Loaded"), actors=1)
    answers = [value(await ray_driver.run(changed(call, key=f"warm/{number}"))) for number in range(3)]
    [pid] = {answer[0] for answer in answers}  # type: ignore[index]
    assert [answer[1] for answer in answers] == [1, 2, 3]  # type: ignore[index]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: gone(pid), "it is dead")
    again = await ray_driver.run(changed(call, key="warm/4"))
    # Ray may not know yet that it is dead; then that call fails, and the next one has a new actor.
    if isinstance(again, Error):
        assert failed(again) == ("worker", "WorkerDied")
        again = await ray_driver.run(changed(call, key="warm/5"))
    fresh = value(again)
    assert isinstance(fresh, list)
    assert fresh[0] != pid
    assert fresh[1] == 1


async def test_a_call_waits_for_missing_resources_and_reports_them(ray_driver: Driver, folder: str) -> None:
    reports: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    needy = changed(work("special", f"needy/{folder}"), resources=Resources(custom={"accelerator": 2}))
    running = asyncio.create_task(ray_driver.run(needy, lambda report: reports.put_nowait(json.loads(report))))
    async with asyncio.timeout(PATIENCE):
        told = await reports.get()
    assert told["waiting"] == "resources"
    assert "accelerator 2 (the most that a node has is 0)" in told["reason"]
    assert not running.done()
    await cancelled(running)


async def test_work_outlives_the_driver_that_has_brought_it(ray_cluster: RayCluster, folder: str) -> None:
    """That driver created its holder, too. The next driver attaches by the key, as another gateway's would."""
    held = work("hold", f"outlive/{folder}", folder=folder, name="a")
    environ = {**ray_cluster.environ, "WEFT_NAMESPACE": "outlive"}
    async with driver_of(environ) as driver:
        running = asyncio.create_task(driver.run(held))
        await begun(folder, "a")
        assert driver.pid is not None
        os.kill(driver.pid, signal.SIGKILL)
        assert failed(await running) == ("lost", "EngineLost")
        await connected(driver)
        again = asyncio.create_task(driver.run(held))
        open_gate(folder)
        assert value(await again) == "a"
    assert runs(folder, "a") == 1


async def test_a_killed_holder_loses_its_work_and_the_next_one_runs_it(ray_driver: Driver, folder: str) -> None:
    held = work("hold", f"kept/{folder}", folder=folder, name="a")
    running = asyncio.create_task(ray_driver.run(held))
    await begun(folder, "a")
    worker = pid_of(folder, "a")
    raylet = parent_of(worker)
    # Those of other tests' namespaces too, which nobody asks for anything any more.
    holders = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and is_holder(entry, raylet)]
    assert holders
    for holder in holders:
        os.kill(int(holder.name), signal.SIGKILL)
    assert failed(await running) == ("lost", "HolderLost")
    await until_slowly(lambda: gone(worker), "what it had submitted has ended")
    again = asyncio.create_task(ray_driver.run(held))
    await until_slowly(lambda: runs(folder, "a") == 2, "it runs again")
    open_gate(folder)
    assert value(await again) == "a"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_holder(entry: Path, raylet: int) -> bool:
    """Whether it is a holder on this raylet's node."""
    try:
        named = b"StepHolder" in (entry / "cmdline").read_bytes()
        return named and parent_of(int(entry.name)) == raylet
    except OSError:
        return False


@pytest.mark.timeout(900)
async def test_a_killed_head_is_noticed_and_its_work_runs_again(folder: str) -> None:
    held = work("hold", f"head/{folder}", folder=folder, name="a")
    with RayCluster(2) as cluster:
        async with driver_of(cluster.environ) as driver:
            running = asyncio.create_task(driver.run(held))
            await begun(folder, "a")
            await asyncio.to_thread(cluster.kill, "gcs_server", "raylet")
            async with asyncio.timeout(PATIENCE):
                assert failed(await running)[0] == "lost"
                while driver.state.connected:
                    await driver.changed(driver.state)
            assert failed(await driver.run(work("add", "away", left=1))) == ("away", "EngineUnavailable")
            cluster.start()
            await connected(driver)
            open_gate(folder)
            assert value(await driver.run(held)) == "a"
    assert runs(folder, "a") == 2


@pytest.mark.timeout(900)
async def test_a_local_ray_ends_with_its_driver_and_runs_batch_jobs(tmp_path: Path) -> None:
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("WEFT_", "RAY_"))}
    environ |= {"WEFT_RAY_DASHBOARD": "1", "WEFT_RAY_LOCAL_CPUS": "2"}
    async with driver_of(environ) as driver:
        pids = children_of(driver.pid)
        assert pids
        reports: list[dict[str, str]] = []

        async def batch(words: list[str], key: str, attempt: int = 1) -> Outcome:
            given = changed(
                work("command", key, words=words), batch=True, step=StepInfo(task="t", run="r", attempt=attempt)
            )
            return await driver.run(given, lambda report: reports.append(json.loads(report)))

        mark = tmp_path / "ran"
        command = ["sh", "-c", f"echo once >> {mark}; echo hello"]
        done = value(await batch(command, "job/1"))
        assert isinstance(done, dict)
        assert (done["status"], "hello" in done["logs"]) == ("SUCCEEDED", True)
        assert reports[-1] == {"status": "SUCCEEDED", "submission_id": done["submission_id"]}
        assert value(await batch(command, "job/1")) == done, "the same key attaches to the same job"
        assert mark.read_text() == "once\n"

        failing = ["sh", "-c", f"echo again >> {mark}; exit 3"]
        for attempt in (1, 2):
            assert failed(await batch(failing, "job/2", attempt)) == ("function", "BatchJobFailed")
        assert mark.read_text() == "once\nagain\nagain\n", "another attempt is another job"

        held = asyncio.create_task(batch(["sh", "-c", f"echo $$ > {mark}.pid; exec sleep 600"], "job/3"))
        pid_file = Path(f"{mark}.pid")
        await until_slowly(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "the job runs")
        await cancelled(held)
        await until_slowly(lambda: gone(int(pid_file.read_text())), "the job has ended")
        os.kill(driver.pid or 0, signal.SIGKILL)
        await until_slowly(lambda: all(gone(pid) for pid in pids), "its Ray has ended with it")


def children_of(pid: int | None) -> list[int]:
    """The process's descendants."""
    found, parents = [pid], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = parent_of(int(entry.name))
    for parent in found:
        found.extend(child for child, its in parents.items() if its == parent)
    return [each for each in found[1:] if each is not None]
