"""The backend of Spark with a real Spark Connect server."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runtime_core.engines.protocol import Error, Mapped, Outcome, Registered, StepInfo, Value, Work
from runtime_core.engines.results import Reference
from runtime_core.engines.spark.backend import SparkBackend
from tests.conftest import ROOT
from tests.contracts.engine.functions import count_begun
from tests.contracts.engine.promises import open_gate
from tests.engines.conftest import SparkServer
from tests.engines.patience import PATIENCE_SECONDS, until

# The first of them starts a JVM, which takes minutes on a machine that is busy enough.
pytestmark = pytest.mark.timeout(900)
APP = "tests.engines.spark_app:app"


@pytest.fixture
async def backend(spark: SparkServer, tmp_path: Path) -> AsyncIterator[SparkBackend]:
    """One with a blob store."""
    made = SparkBackend({"WEFT_SPARK_REMOTE": spark.url, "WEFT_BLOB_URL": (tmp_path / "blobs").as_uri()})
    await made.connect()
    yield made
    await made.close()


def registered(name: str, /, **arguments: object) -> Registered:
    return Registered(APP, str(ROOT), name, json.dumps(arguments).encode())


def work(name: str, /, *, timeout_seconds: float = 0.0, attempt: int = 1, key: str = "", **arguments: object) -> Work:
    run = uuid.uuid4().hex
    return Work(
        registered(name, **arguments),
        name,
        key=key or f"weft/t1/{run}",
        timeout_seconds=timeout_seconds,
        driver_side=name.endswith("_job"),
        step=StepInfo("t1", run, attempt, key or run),
    )


def mapped(name: str, over: str, items: list[Any], /, *, in_flight: int = 0, **common: object) -> Work:
    call = Mapped(registered(name, **common), over, json.dumps(items).encode(), in_flight)
    return Work(call, name, key=f"weft/t1/{uuid.uuid4().hex}", step=StepInfo("t1", "r1"))


class Reports(list[dict[str, Any]]):
    def __call__(self, value: bytes) -> None:
        self.append(json.loads(value))


async def run(backend: SparkBackend, given: Work) -> Outcome:
    return await backend.run(given, Reports())


async def value_of(backend: SparkBackend, given: Work) -> Any:
    outcome = await run(backend, given)
    assert isinstance(outcome, Value), outcome
    return json.loads(outcome.data)


async def error_of(backend: SparkBackend, given: Work) -> Error:
    outcome = await run(backend, given)
    assert isinstance(outcome, Error), outcome
    return outcome


async def cancelled(running: asyncio.Task[Outcome]) -> None:
    running.cancel()
    with suppress(asyncio.CancelledError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await running
    assert running.cancelled()


# -- functions on the executors --------------------------------------------------------------------------------------


async def test_a_function_runs_on_a_worker_and_knows_its_step(backend: SparkBackend) -> None:
    given = work("told", attempt=3)
    answer = await value_of(backend, given)
    assert answer.pop("pid") != os.getpid()
    assert answer == {"task": "t1", "attempt": 3, "key": given.step.key}
    assert await value_of(backend, work("shouted", text="straße \x00 ü")) == "STRASSE \x00 Ü‽ 🙂"


async def test_each_way_a_function_ends_is_one_clear_error(backend: SparkBackend) -> None:
    ends = {
        "failing": work("failing", message="no ü"),
        "importing": work("importing"),
        "unencodable": work("unencodable"),
        "wrong": work("doubled", number="many"),
        "unknown": work("tripled", number=1),
        "dying": work("dying", item=1, of=1),
    }
    errors = dict(zip(ends, await asyncio.gather(*(error_of(backend, given) for given in ends.values())), strict=True))
    assert {name: (error.cause, error.type) for name, error in errors.items()} == {
        "failing": ("function", "ValueError"),
        "importing": ("invalid", "ModuleNotFoundError"),
        "unencodable": ("invalid", "InvalidInput"),
        "wrong": ("invalid", "InvalidInput"),
        "unknown": ("invalid", "UnknownName"),
        "dying": ("worker", "WorkerDied"),
    }
    assert errors["failing"].message == "no ü"
    assert "in failing" in errors["failing"].traceback
    assert "no_such_module_anywhere" in errors["importing"].message
    assert errors["wrong"].message.startswith("arguments.number: ")
    no_app = await error_of(backend, Work(Registered("tests.engines.no_app:app", str(ROOT), "x", b"{}"), "x"))
    assert (no_app.cause, "no_app" in no_app.message) == ("invalid", True)


async def test_a_large_result_goes_by_reference(backend: SparkBackend) -> None:
    answer = await value_of(backend, work("large", megabytes=100))
    reference = Reference.from_value(answer)
    assert reference is not None
    assert reference.bytes == 100 * 1024 * 1024 + 2


async def test_a_cancel_ends_one_call_and_its_worker_and_no_other(backend: SparkBackend, tmp_path: Path) -> None:
    """The cancelled call is in C; the other one calls a function of the same name."""
    folder = str(tmp_path)
    one = asyncio.create_task(run(backend, work("asleep", folder=folder, name="one")))
    other = asyncio.create_task(run(backend, work("holding", folder=folder, name="other")))
    await until(lambda: count_begun(folder) == 2, "both run")
    pid = (tmp_path / "begun-one").read_text()
    await cancelled(one)
    await until(lambda: not Path("/proc", pid).exists(), "the worker of the cancelled call is gone")
    open_gate(folder)
    outcome = await other
    assert outcome == Value(b'"other"')


async def test_a_limit_ends_a_call_and_its_worker(backend: SparkBackend, tmp_path: Path) -> None:
    folder = str(tmp_path)
    error = await error_of(backend, work("asleep", folder=folder, name="one", timeout_seconds=3))
    assert (error.cause, error.type) == ("limit", "TimeoutError")
    assert error.message.startswith("the call did not end within 3 s")
    # Where the worker needed all of that time to come so far, it has not begun, and never does.
    pids = [path.read_text() for path in tmp_path.glob("begun-*")]
    await until(lambda: not any(Path("/proc", pid).exists() for pid in pids), "its worker is gone")


# -- maps ------------------------------------------------------------------------------------------------------------


async def test_a_map_keeps_the_order_and_reports_progress(backend: SparkBackend) -> None:
    reports = Reports()
    outcome = await backend.run(mapped("doubled", "number", list(range(300))), reports)
    assert isinstance(outcome, Value)
    assert json.loads(outcome.data) == [{"value": 2 * number} for number in range(300)]
    assert reports[-1] == {"done": 300, "failed": 0, "total": 300}
    assert await value_of(backend, mapped("doubled", "number", [])) == []


async def test_a_failure_of_a_map_touches_one_item(backend: SparkBackend, tmp_path: Path) -> None:
    """This covers a worker that dies with other items in the same call."""
    items = [*range(40)]
    ends = await value_of(backend, mapped("dying", "item", items, in_flight=2, of=33, folder=str(tmp_path)))
    died = ends.pop(33)
    assert died["error"]["type"] == "WorkerDied"
    assert ends == [{"value": item} for item in items if item != 33]
    assert len(list(tmp_path.glob("33-*"))) <= 2, "together, and once alone: Spark's own repetition runs nothing"
    mixed = await value_of(backend, mapped("doubled", "number", [1, "zwei", 3]))
    assert (mixed[0], mixed[2]) == ({"value": 2}, {"value": 6})
    assert mixed[1]["error"]["type"] == "InvalidInput"


async def test_a_cancel_of_a_map_ends_all_of_it(backend: SparkBackend, tmp_path: Path) -> None:
    folder = str(tmp_path)
    names = [str(number) for number in range(6)]
    running = asyncio.create_task(run(backend, mapped("holding", "name", names, in_flight=2, folder=folder)))
    await until(lambda: count_begun(folder) == 2, "as many run as may")
    pids = [path.read_text() for path in tmp_path.glob("begun-*")]
    await cancelled(running)
    await until(lambda: not any(Path("/proc", pid).exists() for pid in pids), "their workers are gone")
    assert count_begun(folder) == 2


# -- jobs ------------------------------------------------------------------------------------------------------------


async def test_a_job_returns_rows(backend: SparkBackend) -> None:
    assert await value_of(backend, work("rows_job", count=3)) == [{"id": n, "name": f"ü{n}"} for n in range(3)]
    assert await value_of(backend, work("rows_job", count=0)) == []
    assert await value_of(backend, work("pandas_job", count=2)) == [{"number": n, "text": "ü"} for n in range(2)]
    assert await value_of(backend, work("collected_job")) == [{"one": 1, "inner": {"two": 2}}]
    assert await value_of(backend, work("value_job", value={"ü": [1, None]})) == {"ü": [1, None]}
    assert await value_of(backend, work("kinds_job")) == [
        {
            "empty": None,
            "day": "2026-01-02",
            "moment": "2026-01-02T03:04:05Z",
            "price": "1.50",
            "missing": None,
            "list": [1, None],
            "by": {"ключ": "🙂"},
        }
    ]


@pytest.mark.parametrize("name", ["rows_job", "pandas_job"])
async def test_a_large_table_is_written_as_parquet(backend: SparkBackend, tmp_path: Path, name: str) -> None:
    answer = await value_of(backend, work(name, count=10_001))
    reference = Reference.from_value(answer)
    assert reference is not None
    assert (reference.format, reference.rows) == ("parquet", 10_001)
    assert reference.bytes > 10_000
    table = reference.load((tmp_path / "blobs").as_uri())
    assert table.num_rows == 10_001


async def test_a_large_table_needs_a_blob_store(spark: SparkServer) -> None:
    backend = SparkBackend({"WEFT_SPARK_REMOTE": spark.url})
    await backend.connect()
    error = await error_of(backend, work("rows_job", count=10_001))
    assert error.cause == "invalid"
    assert "WEFT_BLOB_URL" in error.message
    await backend.close()


async def test_each_way_a_job_ends_is_one_clear_error(backend: SparkBackend) -> None:
    ends = {
        "raising": work("raising_job"),
        "sql": work("failing_job", sql="SELECT * FROM nowhere"),
        "late": work("failing_job", sql="SELECT raise_error('at row ü') AS x"),
        "importing": work("importing_job"),
        "unencodable": work("unencodable_job"),
        "wrong": work("rows_job", count="many"),
        "twice": work("failing_job", sql="SELECT 1 AS x, 2 AS x"),
    }
    errors = dict(zip(ends, await asyncio.gather(*(error_of(backend, given) for given in ends.values())), strict=True))
    assert {name: (error.cause, error.type) for name, error in errors.items()} == {
        "raising": ("function", "LookupError"),
        "sql": ("function", "AnalysisException"),
        "late": ("function", "SparkRuntimeException"),
        "importing": ("invalid", "ModuleNotFoundError"),
        "unencodable": ("invalid", "InvalidInput"),
        "wrong": ("invalid", "InvalidInput"),
        "twice": ("invalid", "InvalidInput"),
    }
    assert "TABLE_OR_VIEW_NOT_FOUND" in errors["sql"].message
    assert "JVM stacktrace" not in errors["sql"].message
    assert "at row ü" in errors["late"].message


async def test_jobs_do_not_see_each_others_views_and_settings(backend: SparkBackend, tmp_path: Path) -> None:
    folder = str(tmp_path)
    jobs = [asyncio.create_task(value_of(backend, work("view_job", folder=folder, name=name))) for name in "12"]
    await until(lambda: count_begun(folder) == 2, "both have registered their views")
    open_gate(folder)
    assert await asyncio.gather(*jobs) == [["1", "+01:00"], ["2", "+02:00"]]


async def test_a_cancel_ends_the_operations_of_one_job_and_of_no_other(backend: SparkBackend, tmp_path: Path) -> None:
    folder = str(tmp_path)
    one = asyncio.create_task(run(backend, work("slow_job", folder=folder, name="one")))
    other = asyncio.create_task(run(backend, work("slow_job", folder=folder, name="other", gate="gate")))
    await until(lambda: count_begun(folder) == 2, "both run")
    pid = (tmp_path / "begun-one0").read_text()
    await cancelled(one)
    await until(lambda: not Path("/proc", pid).exists(), "the tasks of the cancelled one are gone")
    open_gate(folder, "gate0")
    assert await other == Value(b"1")


async def test_a_job_over_its_limit_is_stopped(backend: SparkBackend, tmp_path: Path) -> None:
    error = await error_of(backend, work("slow_job", folder=str(tmp_path), name="one", timeout_seconds=1))
    assert (error.cause, error.type) == ("limit", "TimeoutError")
    spinning = await error_of(backend, work("spinning_job", folder=str(tmp_path), timeout_seconds=1))
    assert (spinning.cause, spinning.type) == ("limit", "TimeoutError")
    assert backend.abandoned == 0, "its own code was stopped"
    threads = threading.enumerate
    await until(lambda: "spark job spinning_job" not in {one.name for one in threads()}, "its thread has ended")


async def test_a_job_that_does_not_end_is_left_without_its_session(backend: SparkBackend, tmp_path: Path) -> None:
    folder = str(tmp_path)
    running = asyncio.create_task(run(backend, work("stubborn_job", folder=folder)))
    await until(lambda: count_begun(folder) == 1, "it runs")
    await cancelled(running)
    assert backend.abandoned == 1
    open_gate(folder)
    await until((tmp_path / "refused").exists, "what it asks of Spark is refused")
    await until(lambda: backend.abandoned == 0, "its thread has ended")


async def test_progress_comes_from_the_stages(backend: SparkBackend, tmp_path: Path) -> None:
    folder = str(tmp_path)
    reports = Reports()
    given = work("slow_job", folder=folder, name="task", tasks=3, gate="gate")
    running = asyncio.create_task(backend.run(given, reports))
    open_gate(folder, "gate0")
    await until(lambda: bool(reports) and reports[-1]["tasks_done"] == 1, "one task of three is done")
    assert reports[-1] == {"stages": 1, "tasks_done": 1, "tasks": 3}
    assert all(one != next_one for one, next_one in itertools.pairwise(reports)), "equal ones are dropped"
    open_gate(folder, "gate1")
    open_gate(folder, "gate2")
    assert await running == Value(b"3")


async def test_a_later_attempt_ends_work_that_an_earlier_one_left_running(spark: SparkServer, tmp_path: Path) -> None:
    """The first gateway's driver is not asked: it may be dead."""
    folder, key = str(tmp_path), f"weft/t1/{uuid.uuid4().hex}"
    backends = [SparkBackend({"WEFT_SPARK_REMOTE": spark.url}) for _ in range(2)]
    for backend in backends:
        await backend.connect()
    first = asyncio.create_task(run(backends[0], work("slow_job", folder=folder, name="one", key=key)))
    await until(lambda: count_begun(folder) == 1, "the first attempt runs")
    given = work("slow_job", folder=folder, name="two", seconds=0, key=key, attempt=2)
    assert await value_of(backends[1], given) == 1
    ended = await first
    assert isinstance(ended, Error)
    for backend in backends:
        await backend.close()
