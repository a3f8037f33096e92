"""`ctx.engine(...)`: compute steps in this process, in its worker processes, or on a cluster."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.base.text import text_of_error
from runtime_core.consumer.settle import class_name, error_text
from runtime_core.declare.schema import encode
from runtime_core.engines.protocol import Error, Outcome, StepInfo, Value
from runtime_core.engines.results import (
    DEFAULT_INLINE_BYTES,
    DEFAULT_MAX_BYTES,
    MAP,
    MOST_IN_FLIGHT,
    MapRequest,
    Results,
    has_references,
    items_of,
    map_outcome,
    with_errors,
    with_references,
)
from runtime_core.errors import EngineError, InvalidInput, LocalStepError, Reject
from runtime_core.runs.branches import Compound
from runtime_core.runs.calls import RequestStep, call
from runtime_core.runs.journal import from_json
from runtime_core.runs.step import LocalStep, call_function, name_and_pool
from runtime_core.telemetry import gen_ai
from runtime_core.wire.codec import MAX_DATA_BYTES
from runtime_core.wire.commands import is_own_engine

if TYPE_CHECKING:
    from runtime_core.engines.function import EngineFunction
    from runtime_core.runs.execution import Execution
    from runtime_core.runs.scheduler import Branch

LOCAL = "local"
PROGRESS_SECONDS = 0.5
INPUTS_STEP = "weft.inputs"
"""The name of the step that stores the inputs. Its result has their references."""
MAX_INPUT_BYTES = DEFAULT_MAX_BYTES
"""The most bytes of JSON that one compute step takes."""

ITEMS = ""
"""The part with the items of a map: no argument has this name."""
Parts = Mapping[str, msgspec.Raw]
"""The arguments of a step by name, or the items of a map and the arguments that they share, as JSON."""


class Engine:
    """An engine: `local` (threads or worker processes), `ray`, `spark`, or one that the app has declared."""

    __slots__ = ("_engine", "_run")

    def __init__(self, run: Execution, engine: str) -> None:
        self._run = run
        self._engine = engine

    @property
    def name(self) -> str:
        """`local`, `ray`, `spark` or `package.module:Class`."""
        return self._engine

    def call(self, function: object, /, **arguments: object) -> RequestStep[Any] | LocalStep | LargeInput:
        """Call a registered engine function, given itself or its name (`"rank"`, `"rank@2"`).

        Raises EngineError when awaited. A large result is a `Reference`, which other calls accept as an argument.
        Arguments of more than 1 MiB go by reference, too.
        """
        branch, known, name, pool = self._found("call", function)
        data = encode(arguments, f"arguments of engine function {name!r}", limit=MAX_INPUT_BYTES)

        def send(branch: Branch, data: bytes) -> RequestStep[Any] | LocalStep:
            if known is None or not self._here:
                return call(self._run, branch, self._engine, name, data=data, pool=pool, step_class=_EngineCall)
            return LocalCall(self._run, branch, known, data, engine=self._engine)

        if len(data) <= MAX_DATA_BYTES:
            return send(branch, data)
        parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        return LargeInput(self._run, branch, name, parts, lambda branch, sent: send(branch, msgspec.json.encode(sent)))

    def map(
        self,
        function: object,
        items: Iterable[object],
        /,
        *,
        in_flight: int = 0,
        return_exceptions: bool = False,
        **common: object,
    ) -> RequestStep[Any] | LocalStep | LargeInput:
        """Call the function with each of `items`, as one step. Returns a list of the results in the same order.

        All calls share the arguments `common`; an item becomes the first of the other arguments. At most `in_flight`
        calls run at once; 0: as many as the engine takes. After the last call, the first error in order is raised as
        EngineError; with `return_exceptions` each failed item has an EngineError as its result. The task's stream gets
        the progress. Items and arguments of more than 1 MiB go by reference.
        """
        branch, known, name, pool = self._found("map", function)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 0 <= in_flight <= MOST_IN_FLIGHT:
            raise InvalidInput("in_flight", f"{in_flight!r} is not a whole number from 0 to {MOST_IN_FLIGHT}")
        if isinstance(items, str | bytes) or not isinstance(items, Iterable):
            raise InvalidInput("items", f"a {type(items).__name__} has no items to map over: pass a list")
        over = "" if known is None else known.item_argument("", common)
        request: dict[str, object] = {
            "over": over,
            "items": list(items),
            "arguments": common,
            "in_flight": in_flight,
            "return_exceptions": bool(return_exceptions),
        }
        data = encode(request, f"items of engine function {name!r}", limit=MAX_INPUT_BYTES)

        def send(branch: Branch, data: bytes) -> RequestStep[Any] | LocalStep:
            if known is None or not self._here:
                return call(self._run, branch, self._engine, name, data=data, key=MAP, pool=pool, step_class=_EngineMap)
            return LocalMap(self._run, branch, known, data, engine=self._engine)

        def send_parts(branch: Branch, sent: dict[str, Any]) -> RequestStep[Any] | LocalStep:  # Any: JSON
            return send(branch, msgspec.json.encode({**request, "items": sent.pop(ITEMS), "arguments": sent}))

        if len(data) <= MAX_DATA_BYTES:
            return send(branch, data)
        whole = MapRequest.from_json(data)
        parts = {ITEMS: msgspec.Raw(msgspec.json.encode(whole.items)), **whole.arguments}
        return LargeInput(self._run, branch, name, parts, send_parts)

    @property
    def _here(self) -> bool:
        """Whether this process calls the engine; the gateways of clusters take their steps from streams."""
        return self._engine == LOCAL or is_own_engine(self._engine)

    def _found(self, what: str, function: object) -> tuple[Branch, EngineFunction | None, str, str]:
        """Return the current branch, the function as this app declares it, its name and its pool."""
        run = self._run
        branch = run.flow.branch_here(f"ctx.engine({self._engine!r}).{what}")
        known = run.functions.engine_function(function)
        if known is None and self._here:
            raise run.flow.misuse(
                f"{getattr(function, '__qualname__', function)!r} is not an engine function of this app: "
                "decorate it with @app.engine_function"
            )
        if known is not None and (refusal := known.refusal(self._engine)):
            raise InvalidInput("engine", refusal)
        return branch, known, *name_and_pool(run, "engine function", known, function)


class LargeInput:
    """A compute step with a large input: one step stores the input, and the next one sends the references.

    Await or gather it like a step.
    """

    __slots__ = ("_compound",)

    def __init__(
        self,
        run: Execution,
        branch: Branch,
        name: str,
        parts: Parts,
        send: Callable[[Branch, dict[str, Any]], Awaitable[Any]],  # Any: JSON, and the function's own result
    ) -> None:
        """`send` makes the step of the function `name`, given its branch and the parts: references for large ones."""
        self._compound = Compound(run, branch, f"large input of {name}", _sent(run, name, parts, send))

    def __await__(self) -> Generator[Any, None, Any]:  # Any: asyncio's protocol, and the function's own result
        return self._compound.__await__()

    def __repr__(self) -> str:
        return repr(self._compound)


async def _sent(
    run: Execution,
    name: str,
    parts: Parts,
    send: Callable[[Branch, dict[str, Any]], Awaitable[Any]],  # Any: as in LargeInput
) -> Any:
    what = f"inputs of {name}"
    # A replay checks the content by its digest, whatever store it went to.
    digests = {part: hashlib.sha256(data).hexdigest() for part, data in parts.items()}
    body = partial(asyncio.to_thread, stored, parts, run.results, run.task_id)
    described = msgspec.json.encode({"function": name, "sha256": digests})
    try:
        found = await LocalStep(run, run.flow.branch_here(what), "step", INPUTS_STEP, body, described)
    except LocalStepError as error:
        raise EngineError(error.type, error.message) from error
    return await send(run.flow.branch_here(what), {**parts, **found})


def stored(parts: Parts, results: Results, task: str) -> dict[str, Any]:  # Any: JSON
    """Store the largest parts until the others fit in an event. Return the references by part.

    Blocks. Raises InvalidInput (`arguments`, `arguments.…`) and OSError.
    """
    left = sum(map(len, parts.values()))
    if not results.blob_url:
        raise InvalidInput(
            "arguments",
            f"are {left:,} bytes of JSON, over the limit of {MAX_DATA_BYTES:,} for values, and there is no blob store: "
            "set WEFT_BLOB_URL, or send less",
        )
    found: dict[str, Any] = {}  # Any: JSON
    for name, data in sorted(parts.items(), key=lambda part: -len(part[1])):
        # The values of references inside an argument's blob would not be read.
        if left <= DEFAULT_INLINE_BYTES or (name != ITEMS and has_references(bytes(data))):
            continue
        field = "items" if name == ITEMS else f"arguments.{name}"
        found[name] = results.referenced(bytes(data), task, field).to_value()
        left -= len(data)
    if left > MAX_DATA_BYTES:
        raise InvalidInput(
            "arguments",
            f"with references inside are {left:,} bytes of JSON, over the limit of {MAX_DATA_BYTES:,}: pass each "
            "reference as a separate argument",
        )
    return found


class _EngineCall(RequestStep[Any]):  # Any: the function's own JSON
    __slots__ = ()

    def read(self, payload: bytes) -> Any:
        return with_references(from_json(payload), payload)


class _EngineMap(RequestStep[Any]):  # Any: a list of the function's own JSON
    __slots__ = ()

    def read(self, payload: bytes) -> Any:
        return with_errors(with_references(from_json(payload), payload))


class LocalCall(LocalStep):
    """One call of an engine function, in a thread, a worker process, or an engine that the app has declared."""

    __slots__ = ("_engine", "_traceparent", "backend", "function")

    def __init__(
        self,
        run: Execution,
        branch: Branch,
        function: EngineFunction,
        data: bytes,
        key: str = "",
        *,
        engine: str = LOCAL,
    ) -> None:
        super().__init__(run, branch, "engine", function.name, self._traced, data, key)
        self.function = function
        self._engine = engine
        self.backend = run.compute if engine == LOCAL else run.functions.engines.compute(engine)
        self._traceparent = ""

    async def _traced(self) -> object:
        run = f"{self.run.run_id}/{self.id}"
        with gen_ai.engine_span(self._engine, self.function.name, call=run) as span:
            self._traceparent = span.traceparent
            return await self.compute()

    async def compute(self) -> object:
        """Compute the result, as plain JSON values."""
        return from_json(await self.called(self.data))

    async def called(self, arguments: bytes) -> bytes:
        """Return the function's result as JSON. Raises the function's error, or InvalidInput."""
        run = self.run
        step = StepInfo(
            task=run.task_id,
            run=f"{run.run_id}/{self.id}",
            attempt=run.attempt,
            key=f"{run.task_id}/{run.run_id}/{self.id}",
            deadline=run.meta.get("deadline") or 0.0,
            traceparent=self._traceparent,
        )
        try:
            if self.backend is not None:
                return await self.backend.run(self.function, arguments, step, run.results)
            body = partial(_called, self.function, arguments, step, run.results)
            result = await call_function(body, (), {})
        except Reject as error:
            # As on other engines, it concerns this call, not the run.
            raise EngineError(error.type, error.reason) from error
        assert isinstance(result, bytes)  # `_called` returns bytes; `call_function` loses the type
        return result

    def read(self, payload: bytes) -> Any:  # Any: the function's own JSON
        return with_references(from_json(payload), payload)


class LocalMap(LocalCall):
    """Calls of one engine function, a bounded number at once. A failed item does not affect the others."""

    __slots__ = ()

    def __init__(
        self, run: Execution, branch: Branch, function: EngineFunction, data: bytes, *, engine: str = LOCAL
    ) -> None:
        super().__init__(run, branch, function, data, MAP, engine=engine)

    async def compute(self) -> object:
        request = MapRequest.from_json(self.data)
        if request.is_large:
            request = await asyncio.to_thread(request.loaded, self.run.results.blob_url)
        compute = self.backend
        most = compute.workers if compute is not None else os.cpu_count() or 1
        workers = min(request.in_flight or most, most, len(request.listed))
        outcomes: list[Outcome | None] = [None] * len(request.listed)
        progress = _MapProgress(self, len(request.listed))
        todo = iter(range(len(request.listed)))
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(request, todo, outcomes, progress))
        progress.send()
        ended = map_outcome(items_of([each for each in outcomes if each is not None]), request.return_exceptions)
        if isinstance(ended, Error):
            raise EngineError(ended.type, ended.message)
        task = self.run.task_id
        return from_json(await asyncio.to_thread(self.run.results.kept, ended.data, task))

    async def _work(
        self, request: MapRequest, todo: Iterator[int], outcomes: list[Outcome | None], progress: _MapProgress
    ) -> None:
        """Process items until none is left."""
        for index in todo:
            arguments = msgspec.json.encode({**request.arguments, request.over: request.listed[index]})
            try:
                outcomes[index] = Value(await self.called(arguments))
            except (Exception, SystemExit) as error:
                outcomes[index] = _failed(error)
            progress.ended(outcomes[index])

    def read(self, payload: bytes) -> Any:  # Any: a list of the function's own JSON
        return with_errors(super().read(payload))


class _MapProgress:
    """Sends the progress of a map to the task's stream, now and then and at its end."""

    def __init__(self, step: LocalMap, total: int) -> None:
        self._step = step
        self._total = total
        self._done = self._failed = 0
        self._sent_at = time.monotonic()

    def ended(self, outcome: Outcome | None) -> None:
        self._done += 1
        self._failed += isinstance(outcome, Error)
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS and self._done < self._total:
            self.send()

    def send(self) -> None:
        self._sent_at = time.monotonic()
        counts = {"done": self._done, "failed": self._failed, "total": self._total}
        self._step.run.port.progress(self._step.id, msgspec.json.encode(counts))


def _called(function: EngineFunction, arguments: bytes, step: StepInfo, results: Results) -> bytes:
    return results.encoded(function.bound(arguments, step, store=results.blob_url)(), step.task)


def _failed(error: BaseException) -> Error:
    if isinstance(error, EngineError):
        return Error("function", error_text(error.type), error_text(error.message))
    return Error("function", class_name(error), error_text(text_of_error(error)))
