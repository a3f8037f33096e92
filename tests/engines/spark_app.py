"""The app whose functions and jobs the tests of Spark run."""

from __future__ import annotations

import datetime
import decimal
import importlib
import os
import time
from pathlib import Path
from typing import Any

from tests.contracts.engine.functions import begun, wait_for
from weft import App
from weft.engines import EngineContext

app = App("spark-tests")


@app.engine_function
def doubled(number: int) -> int:
    return 2 * number


@app.engine_function
def shouted(text: str) -> str:
    return text.upper() + "‽ 🙂"


@app.engine_function
def told(context: EngineContext) -> dict[str, Any]:
    return {"task": context.task_id, "attempt": context.attempt, "key": context.idempotency_key, "pid": os.getpid()}


@app.engine_function
def failing(message: str) -> None:
    raise ValueError(message)


@app.engine_function
def dying(item: int, of: int, folder: str = "") -> int:
    """Ends its process on request; each call leaves a file."""
    if folder:
        Path(folder, f"{item}-{time.time_ns()}").touch()
    if item == of:
        os._exit(7)
    return item


@app.engine_function
def importing() -> None:
    importlib.import_module("no_such_module_anywhere")


@app.engine_function
def large(megabytes: int) -> str:
    return "x" * (megabytes * 1024 * 1024)


@app.engine_function
def unencodable() -> Any:
    return object()


@app.engine_function
def holding(folder: str, name: str, gate: str = "gate") -> str:
    begun(folder, name)
    wait_for(folder, gate)
    return name


@app.engine_function
def asleep(folder: str, name: str) -> None:
    """One call in C, which nothing in Python interrupts."""
    begun(folder, name)
    time.sleep(600)


@app.engine_function
def rows_job(spark: Any, count: int, start: int = 0) -> Any:
    return spark.range(start, start + count).selectExpr("id", "concat('ü', id) AS name")


@app.engine_function
def kinds_job(spark: Any) -> Any:
    return spark.createDataFrame(
        [
            (
                None,
                datetime.date(2026, 1, 2),
                datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
                decimal.Decimal("1.50"),
                float("nan"),
                [1, None],
                {"ключ": "🙂"},
            )
        ],
        "empty string, day date, moment timestamp, price decimal(9,2), missing double, list array<int>, "
        "by map<string,string>",
    )


@app.engine_function
def value_job(spark: Any, value: Any) -> Any:
    return value


@app.engine_function
def collected_job(spark: Any) -> Any:
    return spark.sql("SELECT 1 AS one, named_struct('two', 2) AS inner").collect()


@app.engine_function
def pandas_job(spark: Any, count: int) -> Any:
    import pandas

    return pandas.DataFrame({"number": range(count), "text": ["ü"] * count})


@app.engine_function
def failing_job(spark: Any, sql: str) -> Any:
    return spark.sql(sql)


@app.engine_function
def raising_job(spark: Any) -> None:
    raise LookupError("no such corpus")


@app.engine_function
def importing_job(spark: Any) -> None:
    importlib.import_module("no_such_module_anywhere")


@app.engine_function
def unencodable_job(spark: Any) -> Any:
    return {"session": spark}


@app.engine_function
def view_job(spark: Any, folder: str, name: str) -> list[str]:
    """Registers a view and a setting under the same names as other calls do, and sees its own."""
    spark.createDataFrame([(name,)], "name string").createOrReplaceTempView("mine")
    spark.conf.set("spark.sql.session.timeZone", f"+0{name}:00")
    begun(folder, name)
    wait_for(folder, "gate")
    return [spark.table("mine").first()["name"], spark.conf.get("spark.sql.session.timeZone")]


@app.engine_function
def slow_job(spark: Any, folder: str, name: str, seconds: int = 600, tasks: int = 1, gate: str = "") -> int:
    """Runs tasks on the executors; each reports its begin, and sleeps or waits until its gate is open."""

    def body(batches: Any) -> Any:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        begun(folder, f"{name}{context.partitionId()}")
        if gate:
            wait_for(folder, f"{gate}{context.partitionId()}")
        else:
            time.sleep(seconds)
        for batch in batches:
            yield pyarrow.RecordBatch.from_pydict({"n": [batch.num_rows]}, pyarrow.schema([("n", pyarrow.int64())]))

    return len(spark.range(0, tasks, 1, tasks).mapInArrow(body, "n long").collect())


@app.engine_function
def spinning_job(spark: Any, folder: str) -> None:
    """Runs no Spark operation: only its own code can be stopped."""
    begun(folder, "spinning")
    while True:
        pass


@app.engine_function
def stubborn_job(spark: Any, folder: str) -> int:
    """Continues whatever it is told."""
    begun(folder, "stubborn")
    while not Path(folder, "gate").exists():
        try:
            wait_for(folder, "gate")
        except BaseException:
            continue
    try:
        spark.range(1).count()
    except Exception:
        Path(folder, "refused").touch()
        raise
    Path(folder, "served").touch()
    return 1
