"""The engine `local`: threads or processes of this machine, or coroutines on this loop. Also finds engines by name."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from runtime_core.declare.schema import encode, users_code_ended
from runtime_core.engines.results import has_references
from runtime_core.engines.runtime_engine import CallFailed, EngineCall, Failure, RunConfig, RuntimeEngine
from runtime_core.errors import ConfigurationError, InvalidInput, Outcome
from runtime_core.telemetry.logs import HANDLED, guards_users_code
from runtime_core.wire.commands import ENGINES

if TYPE_CHECKING:
    from runtime_core.engines.function import EngineFunction
    from runtime_core.engines.pool import WorkerPool
    from runtime_core.engines.protocol import StepInfo
    from runtime_core.engines.results import Results


Body = Callable[[], Any]
"""A call without arguments; Any: the user's function returns anything."""


class LocalEngine(RuntimeEngine):
    """Runs calls on this machine, by `RunConfig.mode`.

    | mode | a plain function | an async one | a call that takes too long |
    |---|---|---|---|
    | `threads` | in a thread | in a thread, with its own loop | is abandoned: nothing can end a thread |
    | `processes` | in a process | in a process, with its own loop | its process is killed |
    | `async` | in a thread | on this loop | is cancelled; a plain one as in `threads` |

    Processes need functions, arguments and results that `pickle` can send, so functions at the top of a module.
    """

    def __init__(self, config: RunConfig | None = None) -> None:
        super().__init__(config)
        self._pool: WorkerPool | None = None

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of its workers; none in other modes."""
        return self._pool.pids if self._pool is not None else []

    async def _start(self) -> None:
        if self.config.mode == "processes":
            # Imported at demand, since it loads multiprocessing.
            from runtime_core.engines.pool import WorkerPool

            self._pool = WorkerPool(self.config.workers)

    async def _stop(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    def _prepare(self, call: EngineCall) -> Body | bytes:
        if self._pool is None:
            return functools.partial(call.function, *call.args, **call.kwargs)
        try:
            return pickle.dumps((call.function, call.args, dict(call.kwargs)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # the arguments' own methods may raise anything
            raise InvalidInput(
                "calls",
                f"cannot be sent to a process, {error}: pass a function from the top of a module and plain arguments, "
                "or use mode='threads'",
            ) from error

    async def _run(self, prepared: Body | bytes, timeout_seconds: float | None) -> object:
        if self._pool is not None:
            return await self._pool.run(cast(bytes, prepared), timeout_seconds)
        body = cast(Body, prepared)
        on_loop = self.config.mode == "async" and _is_async(body)
        running = asyncio.ensure_future(_on_loop(body) if on_loop else _in_thread(body))
        try:
            await asyncio.wait((running,), timeout=timeout_seconds)
            if not running.done():
                raise Failure("TimeoutError", f"the call did not end within {timeout_seconds:g} s")
            return running.result()
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait((running,))
            if not running.cancelled():
                running.exception()  # retrieve the error, or asyncio reports it


def _is_async(body: Body) -> bool:
    function: object = body
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004  # checks whether the call is async, not whether there is one


async def _on_loop(body: Body) -> object:
    try:
        return await body()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Failure("CancelledError", "the function was cancelled from inside") from None
    except BaseException as error:  # SystemExit, too: it would end the loop
        raise Failure.of(error) from None


async def _in_thread(body: Body) -> object:
    """Run a call in a separate thread, which is abandoned if the call is cancelled.

    Not in a pool, which abandoned calls would fill. The thread is a daemon, so an abandoned call does not keep the
    program from ending.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: object, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def run() -> None:
        result, failure = None, None
        try:
            result = context.run(_call, body)
        except BaseException as error:  # SystemExit, too: it ends the call
            failure = error
        with suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="weft engine call", daemon=True).start()
    result, error = await done
    if error is not None:
        raise Failure.of(error)
    return result


@guards_users_code
def _call(body: Body) -> object:
    handled = HANDLED.get()  # noqa: F841  # LoopWatch reads it from the frame
    result = body()
    users_code_ended()
    return asyncio.run(result) if inspect.iscoroutine(result) else result


_CLUSTERS = {
    "ray": "runtime_core.engines.driver.driver:RayEngine",
    "spark": "runtime_core.engines.driver.driver:SparkEngine",
}
"""Loaded by name, so that unused engines cost nothing."""


def engine_name(engine: type[RuntimeEngine]) -> str:
    """Return the name of your own engine: `package.module:Class`."""
    return f"{engine.__module__}:{engine.__qualname__}"


def engine_class(name: str) -> type[RuntimeEngine]:
    """Import your own engine, `package.module:Class`. Raises ConfigurationError."""
    module, _, attribute = name.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"engine {name!r} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RuntimeEngine)):
        raise ConfigurationError(f"engine {name!r} is {found!r}: name a subclass of RuntimeEngine")
    return found


def engine_named(name: str, config: RunConfig | None = None) -> RuntimeEngine:
    """Return the engine `local`, `ray` or `spark`, or your own as `package.module:Class`; not started.

    `config` has its settings; `name` overrides the name in it. Raises ConfigurationError for an unknown engine.
    """
    config = replace(config or RunConfig(), name=name)
    if name == "local":
        return LocalEngine(config)
    name = _CLUSTERS.get(name, name)
    if not name.partition(":")[2]:
        raise ConfigurationError(
            f"engine {name!r} does not exist: use 'local', 'ray', 'spark', or your own engine as 'package.module:Class'"
        )
    return engine_class(name)(config)


class EngineCompute:
    """Runs engine functions on an engine of this process, each call under its function's limit."""

    def __init__(self, engine: RuntimeEngine) -> None:
        self.engine = engine

    @property
    def workers(self) -> int:
        """How many calls run at once."""
        return self.engine.config.workers

    async def run(self, function: EngineFunction, arguments: bytes, step: StepInfo, results: Results, /) -> bytes:
        """Call it with a JSON object. Return JSON. A cancel stops the call, as the engine does.

        Raises InvalidInput (`arguments.…`, `result`, or a function that cannot be pickled), CallFailed, and the
        function's Retry and Reject.
        """
        bind = functools.partial(function.bound, arguments, step, store=results.blob_url)
        # Reading a blob waits for a disk or a network.
        bound = await asyncio.to_thread(bind) if has_references(arguments) else bind()
        call = EngineCall(bound, name=function.name, timeout_seconds=function.timeout_seconds)
        try:
            [result] = await self.engine.execute([call])
        except CallFailed as failed:
            if isinstance(failed.__cause__, Outcome):
                raise failed.__cause__ from None
            raise
        data = encode(result, "result", limit=sys.maxsize)
        return data if len(data) <= results.limit else await asyncio.to_thread(results.kept, data, step.task)

    async def close(self) -> None:
        await self.engine.close()


class ProcessCompute(EngineCompute):
    """Runs engine functions in up to `processes` worker processes. A cancel kills the process of its call."""

    def __init__(self, processes: int) -> None:
        super().__init__(LocalEngine(RunConfig(mode="processes", worker_num=processes)))


class OwnEngines:
    """The engines that an app has declared, by `package.module:Class`. Each starts at its first call in a process."""

    def __init__(self) -> None:
        self.declared: dict[str, tuple[type[RuntimeEngine], RunConfig]] = {}
        self._open: dict[str, tuple[asyncio.AbstractEventLoop, EngineCompute]] = {}

    def compute(self, name: str) -> EngineCompute:
        """Return where an engine's functions run. Raises InvalidInput (`engine`) for an engine that is not declared."""
        self.check(name)
        loop, known = asyncio.get_running_loop(), self._open.get(name)
        if known is None or known[0] is not loop:  # an engine belongs to one event loop
            engine, config = self.declared[name]
            known = self._open[name] = (loop, EngineCompute(engine(config)))
        return known[1]

    def check(self, name: str, field: str = "engine") -> None:
        """Raise InvalidInput unless the engine is declared."""
        if name not in self.declared:
            known = ", ".join((*ENGINES, *self.declared))
            raise InvalidInput(field, f"{name!r} is not an engine; there are {known}; app.add_engine declares your own")

    async def close(self) -> None:
        """Close the engines that this event loop has used."""
        loop = asyncio.get_running_loop()
        for name, (opened, compute) in list(self._open.items()):
            if opened is loop:
                del self._open[name]
                await compute.close()
