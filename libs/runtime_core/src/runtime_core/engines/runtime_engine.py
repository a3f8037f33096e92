"""What every engine promises, the RunConfig that names an engine and its workers, and the wait for an absent engine."""

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

from runtime_core.codec import quoted
from runtime_core.errors import ConfigurationError, EngineError, InvalidInput

MODES = ("threads", "processes", "async")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings of an engine. Raises ConfigurationError for one that cannot work."""

    name: str = "local"
    """`local`, `ray`, `spark`, or `package.module:Class` for an engine of one's own."""
    worker_num: int | None = None
    """How many calls run at once, from 1; None: as many as the engine has processors."""
    mode: str = "threads"
    """`threads`, `processes` (a call that dies or takes too long is ended), or `async` (coroutines on this loop)."""
    timeout_seconds: float | None = None
    """The limit of each call, from when it begins; None: no limit. A call may have its own."""

    address: str = ""
    """Where the engine `ray` or `spark` is; empty: as WEFT_RAY_ADDRESS or WEFT_SPARK_REMOTE says."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"RunConfig: name={self.name!r} names no engine: give 'local'")
        number = self.worker_num
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ConfigurationError(f"RunConfig: worker_num={number!r} is not a whole number from 1")
        if self.mode not in MODES:
            raise ConfigurationError(f"RunConfig: mode={self.mode!r} is none; there are {', '.join(MODES)}")
        check_timeout("RunConfig", self.timeout_seconds)

    @property
    def workers(self) -> int:
        """How many calls run at once."""
        return self.worker_num or os.cpu_count() or 1


def check_timeout(what: str, seconds: object) -> None:
    """Raises ConfigurationError for what is no limit in seconds."""
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ConfigurationError(f"{what}: timeout_seconds={seconds!r} is not a number of seconds above 0")


Function = Callable[..., Any]
"""Any: what user functions take and return. Plain or async."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One call: a function with its arguments, and how it is to be run."""

    function: Function
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """What errors call it; empty: the function's own name."""
    timeout_seconds: float | None = None
    """Its own limit, in place of the engine's."""
    claims: tuple[str, ...] = ()
    """Names of what it needs for itself, as in `("gpu:0",)`: two calls that share one never run at once."""

    @property
    def shown(self) -> str:
        """Its name in errors."""
        function = self.function
        while hasattr(function, "func"):  # functools.partial
            function = function.func
        return self.name or getattr(function, "__qualname__", None) or type(function).__qualname__


class CallFailed(EngineError):
    """One call of an engine has failed; `index` and `name` say which.

    `type` and `message` are the original error's. `__cause__` is that error where it could be brought here; a worker
    that died has type `WorkerDied`, one that took too long `TimeoutError`.
    """

    def __init__(self, index: int, name: str, type: str, message: str) -> None:
        super().__init__(type, message)
        self.args = (f"call {index} ({name}): {type}: {message}",)
        self.index = index
        self.name = name

    def __reduce__(self) -> tuple[type[CallFailed], tuple[int, str, str, str]]:
        return CallFailed, (self.index, self.name, self.type, self.message)


class Failure(Exception):
    """What an engine raises for a call that has failed; `error` is the original, where there is one."""

    def __init__(self, type: str, message: str, error: BaseException | None = None) -> None:
        super().__init__(type, message)
        self.type = type
        self.message = message
        self.error = error

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """The failure that an exception of the user's function is."""
        return cls(type(error).__name__, str(error), error)


class RuntimeEngine(ABC):
    """Runs functions somewhere: `async with LocalEngine(RunConfig(mode="processes")) as engine`.

    - Results come in the order of the calls, whatever the order in which they end.
    - At most `RunConfig.workers` calls run at once, over all uses of the engine; they begin in order.
    - A call that fails touches no other: with `return_exceptions` its place holds the CallFailed, without it the first
      one in order is raised after all calls have ended. With `fail_fast` it is raised at once and the rest is stopped.
    - The event loop is never blocked. A cancel of the caller stops the calls.
    - What cannot be sent is refused with InvalidInput (`calls[<index>]`) before any call begins.

    It belongs to the event loop on which it was started.
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
        """Make ready; a later call changes nothing. `execute` does it where it was not done.

        Raises ConfigurationError for an engine that was closed, or that cannot work here.
        """
        if self._closed:
            raise ConfigurationError(f"{type(self).__name__} was closed: make another one")
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.config.workers)
            await self._start()

    async def close(self) -> None:
        """Stop what runs (its callers get CallFailed, type `EngineClosed`) and let go of all workers."""
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
        """Call each function with the same arguments: a dict of functions gives a dict of results, a list a list.

        An EngineCall among them brings its own arguments.
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
            raise InvalidInput("funcs", f"{quoted(funcs)} is no list or dict of functions")
        calls = [call if isinstance(call, EngineCall) else EngineCall(call, args, kwargs) for call in funcs]
        return await self._all(calls, return_exceptions, fail_fast)

    async def agather(
        self, *calls: Function | EngineCall, return_exceptions: bool = False, fail_fast: bool = False
    ) -> list[Any]:  # Any: what the functions return
        """Run several calls at once, each with its own arguments: EngineCall, `functools.partial`, or none at all."""
        return await self.execute(calls, return_exceptions=return_exceptions, fail_fast=fail_fast)

    async def map(
        self, function: Function, items: Iterable[object], *, return_exceptions: bool = False, fail_fast: bool = False
    ) -> list[Any]:  # Any: what the function returns
        """Call a function with each item."""
        calls = [EngineCall(function, (item,)) for item in items]
        return await self._all(calls, return_exceptions, fail_fast)

    def func_wrapper(self, function: Function) -> Function:
        """What is called in place of a function; an engine of one's own may put something around it."""
        return function

    # -- what an engine is ---------------------------------------------------------------------------------------

    async def _start(self) -> None:  # noqa: B027  # an engine may have nothing to do here
        """Make ready, once."""

    async def _stop(self) -> None:  # noqa: B027  # as above
        """Let go of everything; nothing runs any more."""

    @abstractmethod
    def _prepare(self, call: EngineCall) -> object:
        """What `_run` needs of a call; all calls are prepared, in a thread, before one begins. Raises InvalidInput."""

    @abstractmethod
    async def _run(self, prepared: Any, timeout_seconds: float | None) -> object:  # Any: what `_prepare` gave
        """Run one call. Raises Failure. When it is cancelled it stops the call as well as it can."""

    # -- running -------------------------------------------------------------------------------------------------

    async def _all(self, calls: Sequence[EngineCall], return_exceptions: bool, fail_fast: bool) -> list[Any]:
        await self.start()
        # In a thread: large arguments take their time.
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
            # With `fail_fast` those that were stopped are not the cause.
            failed = [outcome for outcome in outcomes if isinstance(outcome, CallFailed)]
            for outcome in sorted(failed, key=lambda one: one.type == "Cancelled"):
                raise outcome
        return outcomes

    def _prepare_all(self, calls: Sequence[EngineCall]) -> list[object]:
        prepared = []
        for index, call in enumerate(calls):
            if not callable(call.function):
                raise InvalidInput(f"calls[{index}]", f"{call.function!r} is no function")
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
        # The claims first: who waits for one does not keep a worker from others.
        async with self._claimed(call.claims), self._slots:
            try:
                return await self._run(prepared, limit)
            except Failure as failure:
                raise CallFailed(index, call.shown, failure.type, failure.message) from failure.error

    @asynccontextmanager
    async def _claimed(self, claims: Iterable[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            # In one order for all, so that two calls never wait for each other.
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
                raise error  # the engine's own: no call's failure, and nobody's result
            return task.result() if error is None else error
        if self._closed:
            return CallFailed(index, call.shown, "EngineClosed", "the engine was closed")
        return CallFailed(index, call.shown, "Cancelled", "it was stopped, since another call has failed")


ENGINE_WAIT_SECONDS = 60.0
"""Where the task's conf says nothing else; the bus's functions have the same."""
UNAVAILABLE = "EngineUnavailable"
"""The type of the error with which a step ends that has waited too long."""


class _Wait(msgspec.Struct):
    engine_until: float | None = None
    engine_wait_seconds: float = ENGINE_WAIT_SECONDS


_EXACT = msgspec.json.Decoder(_Wait)


def wait_until(context: bytes, away_since: float) -> float:
    """Until when a step waits, in seconds since 1970; `context` is what came with its call.

    It waits from when it was asked for; where the engine was lost later, from then (`away_since`) on: a step that has
    run for an hour is not given up when its gateway is started again.
    """
    known = _EXACT.decode(context) if context else _Wait()
    until = away_since + known.engine_wait_seconds
    return until if known.engine_until is None else max(until, known.engine_until)
