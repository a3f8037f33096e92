"""The app that the gateways' tests run: steps that succeed, and steps that fail in every way."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from runtime_core.app.app import App
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.engines.function import EngineContext
from runtime_core.engines.results import Reference
from runtime_core.errors import EngineError, Reject, Retry
from runtime_core.runs.context import AgentContext
from tests.apps.fleet_app import note

app = App("engines")

QUICK = RetryPolicy(attempts=3, base_seconds=0.05, factor=2.0, max_seconds=0.2)


@app.engine_function
def double(number: int) -> int:
    return 2 * number


@app.engine_function
def traced(ctx: EngineContext) -> list[str]:
    """The trace id of a separate span, that span's parent, and what the function knows about its step."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    with trace.get_tracer("app").start_as_current_span("inner") as span:
        parent = getattr(span, "parent", None)
        own = span.get_span_context()
        return [f"{own.trace_id:032x}", f"{parent.span_id:016x}" if parent is not None else "", ctx.traceparent]


@app.engine_function
def half(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


@app.engine_function
def hold(folder: str, name: str, ctx: EngineContext) -> str:
    """Report that it runs, continue when the folder has a file `gate`, and report how it ended."""
    note(f"{folder}/held", f"{name} {ctx.idempotency_key} {os.getpid()}")
    try:
        while not Path(folder, "gate").exists():
            time.sleep(0.02)
    except BaseException as error:
        note(f"{folder}/stopped", f"{name} {type(error).__name__}")
        raise
    return name


@app.engine_function(retry=QUICK)
def raises(folder: str, ctx: EngineContext) -> int:
    """Succeeds at its third attempt."""
    note(f"{folder}/raised", f"{ctx.attempt} {ctx.idempotency_key}")
    if ctx.attempt == 1:
        raise ValueError("the first attempt goes wrong")
    if ctx.attempt == 2:
        raise Retry(0.01, "the second one asks for another")
    return ctx.attempt


@app.engine_function(retry=QUICK)
def dies(folder: str) -> None:
    note(f"{folder}/died", str(os.getpid()))
    os._exit(3)


@app.engine_function
def refuses() -> None:
    raise Reject("not these numbers", type="Unfit")


@app.engine_function
def unspeakable() -> object:
    """Returns a value that JSON cannot hold."""
    return object()


@app.engine_function
def large(size: int) -> str:
    return "x" * size


@app.engine_function
def count(spark: Any, number: int) -> int:
    """A Spark job."""
    found: int = spark.range(number).count()
    return found


@app.agent("step")
async def step(ctx: AgentContext, wanted: dict[str, object]) -> object:
    """Call one function on one engine with the given arguments."""
    arguments = wanted.get("arguments", {})
    assert isinstance(arguments, dict)
    engine = ctx.engine(str(wanted.get("engine", "ray")))
    return await engine.call(str(wanted["function"]), **arguments)


@app.agent("all")
async def every(ctx: AgentContext, folder: str) -> list[object]:
    """Every possible outcome of a step, in one task."""
    engine = ctx.engine("ray")
    found = await ctx.gather(
        engine.call(double, number=21),
        engine.call("nobody_has_it"),
        engine.call("double", number="many"),
        engine.call(unspeakable),
        engine.call(raises, folder=folder),
        engine.call(refuses),
        engine.call(dies, folder=folder),
        engine.call(large, size=2_000_000),
        return_exceptions=True,
    )
    return [_shown(one) for one in found]


@app.agent("job")
async def job(ctx: AgentContext, folder: str) -> str:
    """Start a step beside the agent, and cancel it once somebody says so."""
    beside = ctx.background(ctx.engine("ray").call(hold, folder=folder, name="job"))
    await ctx.receive("cancel")
    beside.cancel()
    await ctx.receive("end")
    return "the agent went on"


@app.agent("maps")
async def maps(ctx: AgentContext, input: None) -> list[object]:
    """Every possible outcome of a map: all items succeed, some, none; and an invalid map."""
    engine = ctx.engine("ray")
    found = await ctx.gather(
        engine.map(half, [2, 4, 6]),
        engine.map(half, [2, 3, 4], return_exceptions=True),
        engine.map(half, [2, 3, 5]),
        engine.map(half, []),
        engine.map(large, [1, 300_000, 700_000]),
        engine.map("nobody_has_it", [1]),
        return_exceptions=True,
    )
    return [_shown(one) for one in found]


@app.engine_function
def measured(text: str, times: int = 1, beside: str = "") -> int:
    return len(text) * times + len(beside)


@app.engine_function
def referred(text: Reference) -> int:
    return text.bytes


@app.engine_function
def counted(spark: Any, names: list[str]) -> int:
    """A Spark job over rows from its arguments."""
    found: int = spark.createDataFrame([[name] for name in names], "name string").count()
    return found


LARGE_INPUTS = [2_100_000, 2_100_002, [700_010, 700_011], [1_500_001, 1_500_002]]
"""What `large_inputs` returns, on any engine."""


@app.agent("large_inputs")
async def large_inputs(ctx: AgentContext, named: str) -> list[object]:
    """Arguments and items that no event could carry; on Spark, including those of a job."""
    engine = ctx.engine(named)
    beside, text = "y" * 700_000, "x" * 1_400_000
    found = await ctx.gather(
        engine.call(measured, text=text, beside=beside),
        engine.call(referred, text=text + beside),
        engine.map(measured, ["a" * 700_010, "a" * 700_011]),
        engine.map(measured, ["a", "bb"], beside="z" * 1_500_000),
    )
    return [*found, await engine.call(counted, names=["n" * 8] * 200_000)] if named == "spark" else list(found)


def _shown(found: object) -> object:
    if isinstance(found, list):
        return [_shown(one) for one in found]
    return f"{found.type}: {found.message}" if isinstance(found, EngineError) else found


@app.agent("fan")
async def fan(ctx: AgentContext, count: int) -> int:
    """Run this many steps at once and return the sum of their results."""
    engine = ctx.engine("ray")
    found: list[int] = await ctx.gather(*(engine.call(double, number=number) for number in range(count)))
    return sum(found)
