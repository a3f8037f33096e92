"""The interface of every engine, its RunConfig, and how long a step waits for an absent engine."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, overload
from weakref import WeakValueDictionary

import msgspec

from runtime_core.errors import ConfigurationError, EngineError, InvalidInput
from runtime_core.wire.codec import quoted

MODES = ("threads", "processes", "async")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of an engine. Raises ConfigurationError for invalid ones."""

    name: str = "local"
    """`local`, `ray`, `spark`, or `package.module:Class` for your own engine."""
    worker_num: int | None = None
    """How many calls run at once, from 1; None: one for each processor of the engine."""
    mode: str = "threads"
    """`threads`, `processes` (a call that dies or takes too long is ended), or `async` (coroutines on this loop)."""
    timeout_seconds: float | None = None
    """The limit of each call, from its start; None: no limit. A call may have its own."""

    address: str = ""
    """The address of the engine `ray` or `spark`; empty: WEFT_RAY_ADDRESS or WEFT_SPARK_REMOTE."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"RunConfig: name={self.name!r} is not an engine: use 'local'")
        number = self.worker_num
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigurationError(f"RunConfig: worker_num={number!r} must be a whole number of at least 1")
        if self.mode not in MODES:
            raise ConfigurationError(f"RunConfig: mode={self.mode!r} is not a mode: use {', '.join(MODES)}")
        check_timeout("RunConfig", self.timeout_seconds)

    @property
    def workers(self) -> int:
        """How many calls run at once."""
        return self.worker_num or os.cpu_count() or 1


def check_timeout(what: str, seconds: object) -> None:
    """Raise ConfigurationError unless this is a limit in seconds, or None."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ConfigurationError(f"{what}: timeout_seconds={seconds!r} must be a number of seconds above 0")


Function = Callable[..., Any]
"""Any: user functions take and return anything. Plain or async."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call: a function with its arguments and options."""

    function: Function
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """The call's name in errors; empty: the function's own name."""
    timeout_seconds: float | None = None
    """The call's own limit, in place of the engine's."""
    claims: tuple[str, ...] = ()
    """Resources for exclusive use, as in `("gpu:0",)`: two calls that share one never run at once."""

    def __call__(self, *args: object, **kwargs: object) -> Any:  # Any: what the function returns
        """Call the function with its own arguments, for an engine whose `execute` calls what it is given."""
        return self.function(*self.args, **self.kwargs)

    @property
    def shown(self) -> str:
        """The call's name in errors."""
        function = self.function
        while hasattr(function, "func"):  # functools.partial
            function = function.func
        return self.name or getattr(function, "__qualname__", None) or type(function).__qualname__


class CallFailed(EngineError):
    """One call of an engine has failed; `index` and `name` identify it.

    `type` and `message` are the original error's. `__cause__` is that error if it could be transferred. The type is
    `WorkerDied` if the worker died, and `TimeoutError` if the call took too long.
    """

    def __init__(self, index: int, name: str, type: str, message: str) -> None:
        super().__init__(type, message)
        self.args = (f"call {index} ({name}): {type}: {message}",)
        self.index = index
        self.name = name

    def __reduce__(self) -> tuple[type[CallFailed], tuple[int, str, str, str]]:
        return CallFailed, (self.index, self.name, self.type, self.message)


class Failure(Exception):
    """An engine's error for a failed call; `error` is the original error, if there is one."""

    def __init__(self, type: str, message: str, error: BaseException | None = None) -> None:
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.error = error

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the failure for an exception of the user's function."""
        return cls(type(error).__name__, str(error), error)


class RuntimeEngine(ABC):
    """Runs functions: `async with LocalEngine(RunConfig(mode="processes")) as engine`.

    - Results come in the order of the calls, whatever the order in which they end.
    - At most `RunConfig.workers` calls run at once, over all uses of the engine. They start in order.
    - A failed call does not affect others. With `return_exceptions` its result is the CallFailed; otherwise the first
      in order is raised after all calls have ended. With `fail_fast` it is raised at once, and the others are stopped.
    - The event loop is never blocked. Cancelling the caller stops the calls.
    - A call that cannot be sent raises InvalidInput (`calls[<index>]`) before any call starts.

    An engine belongs to the event loop on which it was started.
    """

    def __init__(self, config: RunConfig | None = None) -> None:
        self.config = config or RunConfig()
        self._slots: asyncio.Semaphore | None = None
        self._claims: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[object]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the engine; a repeat does nothing. `execute` starts it if needed.

        Raises ConfigurationError for an engine that was closed, or that cannot work here.
        """
        if self._closed:
            raise ConfigurationError(f"{type(self).__name__} was closed: create another one")
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.config.workers)
            await self._start()

    async def close(self) -> None:
        """Stop running calls (their callers get CallFailed, type `EngineClosed`) and end all workers."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self._slots is not None:
            await self._stop()

    # -- use -----------------------------------------------------------------------------------------------------

    @overload
    async def execute(
        self, funcs: Mapping[str, Function | EngineCall], /, *args: object, return_exceptions: bool = False,
        fail_fast: bool = False, **kwargs: object,
    ) -> dict[str, Any]: ...  # fmt: skip

    @overload
    async def execute(
        self, funcs: Sequence[Function | EngineCall], /, *args: object, return_exceptions: bool = False,
        fail_fast: bool = False, **kwargs: object,
    ) -> list[Any]: ...  # fmt: skip

    async def execute(
        self,
        funcs: Mapping[str, Function | EngineCall] | Sequence[Function | EngineCall],
        /,
        *args: object,
        return_exceptions: bool = False,
        fail_fast: bool = False,
        **kwargs: object,
    ) -> dict[str, Any] | list[Any]:  # Any: what the functions return
        """Call each function with the same arguments. A dict of functions returns a dict of results, a list a list.

        An EngineCall among them has its own arguments.
        """
        if isinstance(funcs, Mapping):
            named = [
                replace(call, name=call.name or key)
                if isinstance(call, EngineCall)
                else EngineCall(call, args, kwargs, key)
                for key, call in funcs.items()
            ]
            return dict(zip(funcs, await self._all(named, return_exceptions, fail_fast), strict=True))
        if isinstance(funcs, str) or not isinstance(funcs, Iterable):
            raise InvalidInput("funcs", f"{quoted(funcs)} is not a list or dict of functions")
        calls = [call if isinstance(call, EngineCall) else EngineCall(call, args, kwargs) for call in funcs]
        return await self._all(calls, return_exceptions, fail_fast)

    async def agather(
        self, *calls: Function | EngineCall, return_exceptions: bool = False, fail_fast: bool = False
    ) -> list[Any]:  # Any: what the functions return
        """Run several calls at once, each with its own arguments: EngineCall, `functools.partial` or function."""
        return await self.execute(calls, return_exceptions=return_exceptions, fail_fast=fail_fast)

    async def map(
        self, function: Function, items: Iterable[object], *, return_exceptions: bool = False, fail_fast: bool = False
    ) -> list[Any]:  # Any: what the function returns
        """Call a function with each item."""
        calls = [EngineCall(function, (item,)) for item in items]
        return await self._all(calls, return_exceptions, fail_fast)

    def func_wrapper(self, function: Function) -> Function:
        """Return the callable to call instead of a function. Your own engine may wrap it."""
        return function

    # -- for subclasses ------------------------------------------------------------------------------------------

    async def _start(self) -> None:  # noqa: B027  # an engine may have nothing to do here
        """Start the engine, once."""

    async def _stop(self) -> None:  # noqa: B027  # as above
        """End all workers. No call runs any more."""

    @abstractmethod
    def _prepare(self, call: EngineCall) -> object:
        """Prepare a call for `_run`. All calls are prepared, in a thread, before one starts. Raises InvalidInput."""

    @abstractmethod
    async def _run(self, prepared: Any, timeout_seconds: float | None) -> object:  # Any: the result of `_prepare`
        """Run one call. Raises Failure. If cancelled, it stops the call if it can."""

    # -- running -------------------------------------------------------------------------------------------------

    async def _all(self, calls: Sequence[EngineCall], return_exceptions: bool, fail_fast: bool) -> list[Any]:
        await self.start()
        # In a thread, since large arguments take time.
        prepared = await asyncio.to_thread(self._prepare_all, calls)
        tasks = [
            self._begin(self._one(index, call, ready))
            for index, (call, ready) in enumerate(zip(calls, prepared, strict=True))
        ]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION if fail_fast else asyncio.ALL_COMPLETED)
        finally:
            left = [task for task in tasks if not task.done()]
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        outcomes = [
            self._outcome(index, call, task) for index, (call, task) in enumerate(zip(calls, tasks, strict=True))
        ]
        if not return_exceptions or fail_fast:
            # With `fail_fast`, the stopped calls are not the cause.
            failed = [outcome for outcome in outcomes if isinstance(outcome, CallFailed)]
            for outcome in sorted(failed, key=lambda one: one.type == "Cancelled"):
                raise outcome
        return outcomes

    def _prepare_all(self, calls: Sequence[EngineCall]) -> list[object]:
        prepared = []
        for index, call in enumerate(calls):
            if not callable(call.function):
                raise InvalidInput(f"calls[{index}]", f"{call.function!r} is not a function")
            check_timeout(f"calls[{index}]", call.timeout_seconds)
            try:
                prepared.append(self._prepare(replace(call, function=self.func_wrapper(call.function))))
            except InvalidInput as error:
                raise InvalidInput(f"calls[{index}]", f"{call.shown}: {error.message}") from error.__cause__
        return prepared

    def _begin(self, running: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(running)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _one(self, index: int, call: EngineCall, prepared: object) -> object:
        assert self._slots is not None
        limit = self.config.timeout_seconds if call.timeout_seconds is None else call.timeout_seconds
        # Claims first: a call that waits for a claim occupies no worker.
        async with self._claimed(call.claims), self._slots:
            try:
                return await self._run(prepared, limit)
            except Failure as failure:
                raise CallFailed(index, call.shown, failure.type, failure.message) from failure.error

    @asynccontextmanager
    async def _claimed(self, claims: Iterable[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            # In one order for all calls, so that they cannot deadlock.
            for claim in sorted(set(claims)):
                lock = self._claims.get(claim)
                if lock is None:
                    lock = self._claims[claim] = asyncio.Lock()
                await stack.enter_async_context(lock)
            yield

    def _outcome(self, index: int, call: EngineCall, task: asyncio.Task[object]) -> object:
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, CallFailed):
                raise error  # an error of the engine, not of a call
            return task.result() if error is None else error
        if self._closed:
            return CallFailed(index, call.shown, "EngineClosed", "the engine was closed")
        return CallFailed(index, call.shown, "Cancelled", "it was stopped, since another call has failed")


ENGINE_WAIT_SECONDS = 60.0
"""The default if the task's conf has none; the bus's functions have the same."""
UNAVAILABLE = "EngineUnavailable"
"""The error type of a step that waited too long."""


class _WaitLimits(msgspec.Struct):
    engine_until: float | None = None
    engine_wait_seconds: float = ENGINE_WAIT_SECONDS


_EXACT = msgspec.json.Decoder(_WaitLimits)


def wait_until(context: bytes, away_since: float) -> float:
    """Return until when a step waits, in epoch seconds; `context` came with its call.

    A step waits from its request, or from the loss of the engine (`away_since`) if that is later. So a step that has
    run for an hour does not fail when its gateway restarts.
    """
    known = _EXACT.decode(context) if context else _WaitLimits()
    until = away_since + known.engine_wait_seconds
    return until if known.engine_until is None else max(until, known.engine_until)
