"""An app that workers import by name. The arguments of its functions say what to do."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from weft import App, Reject, Retry
from weft.engines import EngineContext, Reference, Resources

app = App("remote")


@app.engine_function
def echo(value: Any) -> Any:  # Any: whatever JSON the test sends
    return value


@app.engine_function
def add(left: int, right: int = 1) -> dict[str, int]:
    return {"sum": left + right, "pid": os.getpid()}


@app.engine_function
def fail(how: str) -> None:
    match how:
        case "value":
            raise ValueError("no such value: ü")
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "retry":
            raise Retry(after=timedelta(seconds=7), reason="busy")
        case "reject":
            raise Reject("not this one", type="Refused")
        case "import":
            import a_module_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401  # that is the test
        case "silent":
            raise _Unreadable


class _Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@app.engine_function
def large(count: int) -> str:
    return "x" * count


@app.engine_function
def unreadable() -> object:
    return {"it": object()}


@app.engine_function
def size(text: str) -> int:
    return len(text)


@app.engine_function
def place(where: Reference) -> str:
    return where.url


@app.engine_function
def told(ctx: EngineContext, word: str = "") -> list[object]:
    return [ctx.task_id, ctx.run_id, ctx.attempt, ctx.idempotency_key, ctx.deadline, word]


@app.engine_function(name="rank", version="1")
def rank_by_one(passages: list[str]) -> list[str]:
    return sorted(passages)


@app.engine_function(name="rank", version="2", resources=Resources(cpus=2, gpus=1), actors=2)
def rank_by_two(passages: list[str]) -> list[str]:
    return sorted(passages, reverse=True)


@app.engine_function(version="7")
def alone() -> str:
    return "alone"


@app.engine_function
class Counter:
    """Counts its calls."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def __call__(self, by: int) -> int:
        self.count += by
        return self.count


@app.engine_function
def job(spark, table: str) -> list[str]:  # type: ignore[no-untyped-def]  # a Spark job needs no type there
    return [table, type(spark).__name__]


@app.batch_job
def train(epochs: int) -> list[str]:
    return ["python", "-m", "train", str(epochs)] if epochs else []
