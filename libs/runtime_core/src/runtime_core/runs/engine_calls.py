"""`ctx.engine(...)`: compute steps, in this process or on a cluster."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.engines.protocol import Error, Outcome, Value
from runtime_core.engines.protocol import Step as EngineStep
from runtime_core.engines.results import (
    MAP,
    MOST_IN_FLIGHT,
    MapRequest,
    items_of,
    map_outcome,
    with_errors,
    with_references,
)
from runtime_core.errors import EngineError, InvalidInput, Reject
from runtime_core.runs.calls import Asked, call
from runtime_core.runs.failure import clean
from runtime_core.runs.local_steps import LocalStep, call_function
from runtime_core.runs.step import from_json, name_and_pool
from runtime_core.telemetry import gen_ai

if TYPE_CHECKING:
    from runtime_core.engines.results import Results
    from runtime_core.runs.ports import LocalFunction
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch


PROGRESS_SECONDS = 0.5


class LocalCall(LocalStep):
    """One call of an engine function, in a thread or a worker process."""

    __slots__ = ("_traceparent", "function")

    def __init__(self, run: Run, branch: Branch, function: LocalFunction, data: bytes, key: str = "") -> None:
        super().__init__(run, branch, "engine", function.name, self._traced, data, key)
        self.function = function
        self._traceparent = ""

    async def _traced(self) -> object:
        run = f"{self.run.run_id}/{self.id}"
        with gen_ai.engine_span("local", self.function.name, call=run) as span:
            self._traceparent = span.traceparent
            return await self.compute()

    async def compute(self) -> object:
        """Do what the step asks for; its result, as plain JSON values."""
        return from_json(await self.called(self.data))

    async def called(self, arguments: bytes) -> bytes:
        """The function's result, as JSON. Raises what it raised, and InvalidInput."""
        run = self.run
        step = EngineStep(
            task=run.task_id,
            run=f"{run.run_id}/{self.id}",
            attempt=run.attempt,
            key=f"{run.task_id}/{run.run_id}/{self.id}",
            deadline=run.meta.get("deadline") or 0.0,
            traceparent=self._traceparent,
        )
        try:
            if run.compute is not None:
                return await run.compute.run(self.function, arguments, step, run.results)
            body = partial(_called, self.function, arguments, step, run.results)
            result = await call_function(body, (), {})
        except Reject as error:
            # As on any other engine: it is about this call, and not about the run.
            raise EngineError(error.type, error.reason) from error
        assert isinstance(result, bytes)  # `_called` says so; what is called in a thread loses its type
        return result

    def read(self, payload: bytes) -> Any:  # Any: the function's own JSON
        return with_references(from_json(payload), payload)


class LocalMap(LocalCall):
    """Calls of one engine function, a bounded number at once; the failure of an item touches no other."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, function: LocalFunction, data: bytes) -> None:
        super().__init__(run, branch, function, data, MAP)

    async def compute(self) -> object:
        request = MapRequest.from_json(self.data)
        compute = self.run.compute
        most = compute.workers if compute is not None else os.cpu_count() or 1
        workers = min(request.in_flight or most, most, len(request.items))
        outcomes: list[Outcome | None] = [None] * len(request.items)
        progress = _Progress(self, len(request.items))
        todo = iter(range(len(request.items)))
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(request, todo, outcomes, progress))
        progress.tell()
        ended = map_outcome(items_of([each for each in outcomes if each is not None]), request.return_exceptions)
        if isinstance(ended, Error):
            raise EngineError(ended.type, ended.message)
        task = self.run.task_id
        return from_json(await asyncio.to_thread(self.run.results.kept, ended.data, task))

    async def _work(
        self, request: MapRequest, todo: Iterator[int], outcomes: list[Outcome | None], progress: _Progress
    ) -> None:
        """Take items until there is none left."""
        for index in todo:
            arguments = msgspec.json.encode({**request.arguments, request.over: request.items[index]})
            try:
                outcomes[index] = Value(await self.called(arguments))
            except (Exception, SystemExit) as error:
                outcomes[index] = _failed(error)
            progress.ended(outcomes[index])

    def read(self, payload: bytes) -> Any:  # Any: a list of the function's own JSON
        return with_errors(super().read(payload))


class _Progress:
    """Tells the task's stream how far a map is, now and then and at its end."""

    def __init__(self, step: LocalMap, total: int) -> None:
        self._step = step
        self._total = total
        self._done = self._failed = 0
        self._told_at = time.monotonic()

    def ended(self, outcome: Outcome | None) -> None:
        self._done += 1
        self._failed += isinstance(outcome, Error)
        if time.monotonic() - self._told_at >= PROGRESS_SECONDS and self._done < self._total:
            self.tell()

    def tell(self) -> None:
        self._told_at = time.monotonic()
        said = {"done": self._done, "failed": self._failed, "total": self._total}
        self._step.run.port.progress(self._step.id, msgspec.json.encode(said))


def _called(function: LocalFunction, arguments: bytes, step: EngineStep, results: Results) -> bytes:
    return results.encoded(function.bound(arguments, step, store=results.blob_url)(), step.task)


def _failed(error: BaseException) -> Error:
    if isinstance(error, EngineError):
        return Error("function", error.type, clean(error.message))
    return Error("function", type(error).__name__, clean(str(error)))


LOCAL = "local"


class Engine:
    """One of `local` (threads or worker processes of this one), `ray` and `spark`."""

    __slots__ = ("_engine", "_run")

    def __init__(self, run: Run, engine: str) -> None:
        self._run = run
        self._engine = engine

    @property
    def name(self) -> str:
        """`local`, `ray` or `spark`."""
        return self._engine

    def call(self, function: object, /, **arguments: object) -> Asked[Any] | LocalStep:  # Any: its own JSON
        """Call a registered engine function, by itself or by name, as in `"rank"` or `"rank@2"`.

        Raises EngineError when awaited. A large result is a `Reference`, which may be an argument of other calls.
        """
        branch, known, name, pool = self._found("call", function)
        data = encode(arguments, f"arguments of engine function {name!r}")
        if self._engine != LOCAL or known is None:
            return call(self._run, branch, self._engine, name, data=data, pool=pool, made=_Call)
        return LocalCall(self._run, branch, known, data)

    def map(
        self,
        function: object,
        items: Iterable[object],
        /,
        *,
        in_flight: int = 0,
        return_exceptions: bool = False,
        **common: object,
    ) -> Asked[Any] | LocalStep:  # Any: a list of the function's own JSON
        """Call it with each of `items`, as one step: a list of the results, in their order.

        An item becomes the function's first argument that `common`, the same in all calls, does not give. At most
        `in_flight` items are under way at once; 0: as many as the engine takes. When all have ended, the first error
        in order is raised, as EngineError; with `return_exceptions` an EngineError stands in the place of each that
        failed. The task's stream is told how far it is.
        """
        branch, known, name, pool = self._found("map", function)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 0 <= in_flight <= MOST_IN_FLIGHT:
            raise InvalidInput("in_flight", f"{in_flight!r} is no whole number from 0 to {MOST_IN_FLIGHT}")
        if isinstance(items, str | bytes) or not isinstance(items, Iterable):
            raise InvalidInput("items", f"a {type(items).__name__} has no items to map over: give a list")
        over = "" if known is None else known.item_argument("", common)
        listed = list(items)
        data = encode(
            {
                "over": over,
                "items": listed,
                "arguments": common,
                "in_flight": in_flight,
                "return_exceptions": bool(return_exceptions),
            },
            f"items of engine function {name!r}",
        )
        if self._engine != LOCAL or known is None:
            return call(self._run, branch, self._engine, name, data=data, key=MAP, pool=pool, made=_Map)
        return LocalMap(self._run, branch, known, data)

    def _found(self, what: str, function: object) -> tuple[Branch, LocalFunction | None, str, str]:
        """Where the code stands, the function as this app declares it, its name and its pool."""
        run = self._run
        branch = run.flow.branch_here(f"ctx.engine({self._engine!r}).{what}")
        known = run.functions.engine_function(function)
        if known is None and self._engine == LOCAL:
            raise run.flow.misuse(
                f"{getattr(function, '__qualname__', function)!r} is no engine function of this app: "
                "decorate it with @app.engine_function"
            )
        if known is not None and (refusal := known.refusal(self._engine)):
            raise InvalidInput("engine", refusal)
        return branch, known, *name_and_pool(run, "engine function", known, function)


class _Call(Asked[Any]):  # Any: the function's own JSON
    __slots__ = ()

    def read(self, payload: bytes) -> Any:
        return with_references(from_json(payload), payload)


class _Map(Asked[Any]):  # Any: a list of the function's own JSON
    __slots__ = ()

    def read(self, payload: bytes) -> Any:
        return with_errors(with_references(from_json(payload), payload))
