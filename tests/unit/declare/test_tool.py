"""Calls of tools: arguments by type hints, limits, results as JSON."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import math
import signal
import threading
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Literal

import msgspec
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from runtime_core.app.app import App
from runtime_core.declare.schema import encode
from runtime_core.declare.tool import AbandonedThreads, ToolContext, run_limited
from runtime_core.errors import InvalidInput, error_of_exit
from tests.unit.declare.calls import Call, context, declared


class Filter(BaseModel):
    field: str
    limit: int = 10


@dataclasses.dataclass
class Passage:
    title: str
    score: float = 0.0


class Options(TypedDict):
    deep: bool


class Color(Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: int
    y: int


# ---------------------------------------------------------------- arguments


async def test_arguments_become_the_declared_types(call: Call) -> None:
    def it(
        text: str,
        number: int,
        ratio: float,
        filters: list[Filter],
        passage: Passage,
        options: Options,
        when: datetime,
        kind: Literal["a", "b"] = "a",
        maybe: int | None = None,
    ) -> dict[str, object]:
        assert isinstance(filters[0], Filter)
        assert isinstance(passage, Passage)
        return {"seen": [text, number, ratio, filters[0].limit, passage.score, options["deep"], when.year, kind, maybe]}

    result = await call(
        it,
        text="x",
        number="7",
        ratio=2,
        filters=[{"field": "f"}],
        passage={"title": "t", "score": 1.5},
        options={"deep": True},
        when="2031-02-03T04:05:06Z",
    )

    assert result == {"seen": ["x", 7, 2.0, 10, 1.5, True, 2031, "a", None]}


def _takes(query: str, limit: int = 3, filters: list[Filter] | None = None, tags: dict[str, int] | None = None) -> int:
    return limit


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (b"{}", "arguments.query: is missing"),
        (b'{"query": 5}', "arguments.query: Input should be a valid string, got 5"),
        (b'{"query": "a", "limit": true}', "arguments.limit: Input should be a number, not a boolean, got True"),
        (b'{"query": "a", "limit": "many"}', "arguments.limit: Input should be a valid integer"),
        (b'{"query": "a", "limit": 1.5}', "arguments.limit: Input should be a valid integer"),
        (
            b'{"query": "a", "filters": [{"field": "f"}, {"limit": 1}]}',
            "arguments.filters.1.field: is missing",
        ),
        (b'{"query": "a", "tags": {"x": false}}', "arguments.tags.x: Input should be a number"),
        (b'{"query": "a", "qery": 1}', "arguments.qery: is not known; choose from query, limit, filters, tags"),
        (b'{"limit": true}', "arguments.query: is missing (and 1 more)"),
        (b'["a"]', "arguments: Input should be an object, got ['a']"),
        (b"", "arguments: Invalid JSON"),
        (b'{"query": "a"', "arguments: Invalid JSON"),
        (b'{"query": "\xff"}', "arguments: Invalid JSON"),
        (b"[" * 5000, "arguments: Invalid JSON"),
    ],
)
def test_wrong_arguments_are_refused_by_name_in_one_line(arguments: bytes, refusal: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        declared(_takes).arguments.decode(arguments)

    assert str(refused.value).startswith(refusal)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_an_unmatched_union_names_the_argument() -> None:
    def it(value: int | list[int]) -> None: ...

    with pytest.raises(InvalidInput) as refused:
        declared(it).arguments.decode(b'{"value": "x"}')

    assert refused.value.field == "arguments.value"


@pytest.mark.parametrize(("given", "read"), [("5", "5"), (5, 5), (True, True), (None, None)])
def test_a_union_keeps_the_value_that_fits_exactly(given: object, read: object) -> None:
    def it(value: int | str | bool | None) -> None: ...

    found = declared(it).arguments.decode(json.dumps({"value": given}).encode())["value"]

    assert found == read
    assert type(found) is type(read)


def test_bounds_of_a_field_are_checked_and_shown_in_the_schema() -> None:
    def it(count: Annotated[int, Field(ge=1, description="how many")]) -> None: ...

    tool = declared(it)

    assert tool.arguments.schema()["properties"] == {
        "count": {"minimum": 1, "description": "how many", "title": "Count", "type": "integer"}
    }
    with pytest.raises(InvalidInput, match=r"arguments\.count: .*greater than or equal to 1, got 0"):
        tool.arguments.decode(b'{"count": 0}')
    with pytest.raises(InvalidInput, match="not a boolean"):
        tool.arguments.decode(b'{"count": true}')


def test_any_argument_name_is_allowed() -> None:
    def it(schema: str, copy: str, model_config: str, _hidden: int = 1, self_: int = 2) -> None: ...

    found = declared(it).arguments.decode(b'{"schema": "a", "copy": "b", "model_config": "c", "_hidden": 3}')

    assert found == {"schema": "a", "copy": "b", "model_config": "c", "_hidden": 3}


def test_the_schema_holds_defaults_and_refuses_others() -> None:
    def it(query: str, limit: int = 3, since: datetime = datetime(2031, 1, 1, tzinfo=UTC)) -> list[str]:
        """Find texts.

        More of it.
        """
        return []

    tool = declared(it)
    schema = tool.arguments.schema()

    assert schema["required"] == ["query"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["limit"]["default"] == 3  # type: ignore[index]  # JSON
    assert schema["properties"]["since"]["default"] == "2031-01-01T00:00:00Z"  # type: ignore[index]  # JSON
    assert tool.result_schema == {"items": {"type": "string"}, "type": "array"}
    assert tool.description == "Find texts.\n\nMore of it."


async def test_the_context_is_given_by_its_type_under_any_name(
    threads: ThreadPoolExecutor, abandoned: AbandonedThreads
) -> None:
    async def it(about: ToolContext, word: str) -> list[object]:
        return [about.idempotency_key, about.attempt, about.cancelled, word]

    def optional(word: str, ctx: ToolContext | None = None) -> bool:
        return ctx is not None

    assert await declared(it).call(b'{"word": "x"}', context(), threads, abandoned) == b'["r/1",1,false,"x"]'
    assert await declared(optional).call(b'{"word": "x"}', context(), threads, abandoned) == b"true"
    for annotation in ("tools.ToolContext", "Optional[ToolContext]", "'ToolContext | None'", ToolContext | None):
        optional.__annotations__["ctx"] = annotation
        assert await declared(optional).call(b'{"word": "x"}', context(), threads, abandoned) == b"true"
    with pytest.raises(InvalidInput, match="is not known"):
        declared(it).arguments.decode(b'{"word": "x", "about": 1}')


# ---------------------------------------------------------------- limits


async def test_a_plain_function_runs_in_the_given_threads_with_the_callers_context(call: Call) -> None:
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace")
    trace.set("t-9")

    def it() -> list[object]:
        return [threading.current_thread() is threading.main_thread(), trace.get()]

    assert await call(it) == [False, "t-9"]


async def test_an_async_tool_is_stopped_at_its_limit(threads: ThreadPoolExecutor, abandoned: AbandonedThreads) -> None:
    stopped = asyncio.Event()

    async def it() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    ctx = context()
    with pytest.raises(TimeoutError, match=r"^tool 'it' passed its limit of 0\.05 s$"):
        await declared(it, timeout_seconds=0.05).call(b"{}", ctx, threads, abandoned)

    assert stopped.is_set()
    assert ctx.cancelled
    assert abandoned.total == 0


async def test_a_plain_tool_over_its_limit_is_abandoned_and_counted_until_it_ends(abandoned: AbandonedThreads) -> None:
    release, ended = threading.Event(), threading.Event()

    def it() -> None:
        release.wait()

    ctx = context()
    with ThreadPoolExecutor(1) as threads:
        try:
            with pytest.raises(TimeoutError, match="passed its limit"):
                await declared(it, timeout_seconds=0.05).call(b"{}", ctx, threads, abandoned)
            assert ctx.cancelled
            assert (abandoned.running, abandoned.total) == (1, 1)
            # Its thread is lost to the pool: the next call waits in the queue, and is none that was abandoned.
            with pytest.raises(TimeoutError):
                await declared(lambda: 1, timeout_seconds=0.05).call(b"{}", context(), threads, abandoned)
            assert (abandoned.running, abandoned.total) == (1, 1)
        finally:
            release.set()
        threads.submit(ended.set)
        assert await asyncio.to_thread(ended.wait, 60)
    assert (abandoned.running, abandoned.total) == (0, 1)


async def test_a_plain_tool_learns_that_its_call_was_cancelled(
    threads: ThreadPoolExecutor, abandoned: AbandonedThreads
) -> None:
    began = threading.Event()
    release = threading.Event()

    def it() -> None:
        began.set()
        release.wait()

    ctx = context()
    running = asyncio.create_task(declared(it).call(b"{}", ctx, threads, abandoned))
    assert await asyncio.to_thread(began.wait, 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert ctx.cancelled
    assert abandoned.running == 1
    release.set()


async def test_a_tools_own_timeout_error_is_kept(call: Call) -> None:
    async def it() -> None:
        raise TimeoutError("the other side is slow")

    with pytest.raises(TimeoutError, match=r"^the other side is slow$"):
        await call(it)


async def _exits() -> None:
    raise SystemExit(3)


def _exits_plainly() -> None:
    raise SystemExit(3)


async def _interrupts() -> None:
    raise KeyboardInterrupt


def _interrupts_plainly() -> None:
    raise KeyboardInterrupt


async def _raises_no_exception() -> None:
    raise BaseException("b")


def _raises_no_exception_plainly() -> None:
    raise BaseException("b")


async def _raises_generator_exit() -> None:
    raise GeneratorExit


def _raises_generator_exit_plainly() -> None:
    raise GeneratorExit


async def _cancels_itself() -> None:
    raise asyncio.CancelledError


def _stops_iteration() -> None:
    raise StopIteration


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_exits, r"tool 'it' called sys\.exit\(3\)"),
        (_raises_no_exception, "tool 'it' raised BaseException, which is not an Exception"),
        (_raises_no_exception_plainly, "tool 'it' raised BaseException, which is not an Exception"),
        (_raises_generator_exit, "tool 'it' raised GeneratorExit, which is not an Exception"),
        (_raises_generator_exit_plainly, "tool 'it' raised GeneratorExit, which is not an Exception"),
        (_interrupts, "tool 'it' raised KeyboardInterrupt"),
        (_interrupts_plainly, "tool 'it' raised KeyboardInterrupt"),
        (_exits_plainly, r"tool 'it' called sys\.exit\(3\)"),
        (_cancels_itself, "tool 'it' raised CancelledError, but was not cancelled"),
        (_stops_iteration, "tool 'it' raised StopIteration"),
    ],
)
async def test_ends_that_would_harm_the_caller_become_errors(
    call: Call, function: Callable[..., object], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        await call(function)


def test_an_abandoned_call_is_closed_quietly() -> None:
    async def it() -> None:
        await asyncio.Event().wait()

    async def begin() -> Coroutine[object, object, object]:
        begun = run_limited("it", 60, it)

        async def start() -> None:
            begun.send(None)

        await asyncio.create_task(start())
        return begun

    asyncio.run(begin()).close()  # raises any error except GeneratorExit


def test_ctrl_c_of_a_person_is_not_swallowed() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            error_of_exit("the code", KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, handler)


async def test_progress_from_a_thread_is_reported_on_the_loop(
    threads: ThreadPoolExecutor, abandoned: AbandonedThreads
) -> None:
    seen: list[tuple[bytes, bool]] = []
    arrived = asyncio.Event()

    def report(data: bytes) -> None:
        seen.append((data, threading.current_thread() is threading.main_thread()))
        arrived.set()

    def it(ctx: ToolContext) -> None:
        ctx.progress({"done": 3})

    ctx = ToolContext(task_id="t", run_id="r", on_progress=report)
    await declared(it).call(b"{}", ctx, threads, abandoned)
    await asyncio.wait_for(arrived.wait(), 60)

    assert seen == [(b'{"done":3}', True)]


def test_a_context_without_a_loop_or_a_listener_works_in_a_plain_test() -> None:
    ctx = context()
    ctx.progress("half")
    ctx.cancel()

    assert ctx.cancelled


# ---------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, b"null"),
        ("ü\n", '"ü\\n"'.encode()),
        ([1, 2.5, True, {"a": None}], b'[1,2.5,true,{"a":null}]'),
        ((1, "b"), b'[1,"b"]'),
        ({"r": (1, [2])}, b'{"r":[1,[2]]}'),
        (Passage("t", 1.5), b'{"title":"t","score":1.5}'),
        ([Filter(field="f")], b'[{"field":"f","limit":10}]'),
        (Point(1, 2), b'{"x":1,"y":2}'),
        (datetime(2031, 1, 2, 3, 4, tzinfo=UTC), b'"2031-01-02T03:04:00Z"'),
        (uuid.UUID(int=7), b'"00000000-0000-0000-0000-000000000007"'),
        ({"b", "a", "c"}, b'["a","b","c"]'),
        (timedelta(hours=1), b'"PT1H"'),
        (Decimal("1.10"), b'"1.10"'),
        (Color.RED, b'"red"'),
        ({1: "one"}, b'{"1":"one"}'),
        ({"deep": {"when": Passage("t")}}, b'{"deep":{"when":{"title":"t","score":0.0}}}'),
    ],
)
def test_results_are_written_as_json(value: object, written: bytes) -> None:
    assert encode(value, "result") == written


def _cyclic() -> list[object]:
    loop: list[object] = []
    loop.append(loop)
    return loop


def _deep() -> list[object]:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "object cannot be written as JSON"),
        ({"a": [Passage("t"), object()]}, "object cannot be written as JSON"),
        (App("x"), r"runtime_core\.app\.app\.App cannot be written as JSON"),
        (b"raw", "bytes cannot be written as JSON: encode it as text, or store it"),
        ({"a": [b"raw"]}, "bytes cannot be written as JSON"),
        (Passage(b"raw"), "bytes cannot be written as JSON"),  # type: ignore[arg-type]  # what is to be caught
        (math.nan, "Out of range float"),
        ([{"a": math.inf}], "Out of range float"),
        (Passage("t", math.nan), "Out of range float"),
        (_cyclic(), "contains itself|Circular"),
        (_deep(), "nested too deeply|Circular"),
        ("\ud800", "surrogate|UTF-8"),
        ({"a": "\ud800", "b": Passage("t")}, "surrogate|UTF-8"),
        (2**70, "outside 64 bits"),
        ([Passage("t"), 2**70], "outside 64 bits"),
        ({(1, 2): "pair"}, "keys must be str"),
        ((n for n in range(3)), "generator can be read only once: return a list"),
        ("x" * (1 << 20), r"is 1,048,578 bytes of JSON, over the limit of 1,048,576: store it as a blob and return"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_json_cannot_hold_is_refused_by_its_type(value: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        encode(value, "result")

    assert refused.value.field == "result"
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


async def test_a_result_that_was_not_awaited_says_so(call: Call) -> None:
    async def later() -> int:
        return 1

    forgotten = later()

    def it() -> object:
        return forgotten

    with pytest.raises(InvalidInput, match="coroutine was not awaited"):
        await call(it)
    forgotten.close()


# ---------------------------------------------------------------- declarations that are refused
