"""A declared tool, and one call of it: what the function gets, and its time limit."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol, cast

from runtime_core.declare.declaration import Place, is_async, without_context
from runtime_core.declare.function import DeclaredFunction, FunctionSettings
from runtime_core.declare.manifest import ToolEntry
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.declare.schema import encode, encode_result
from runtime_core.errors import LoopInterrupt
from runtime_core.record.usage import Usage, total

PROGRESS_AT_ONCE = 16
"""Reports that a thread may have handed to the loop before it waits."""
PROGRESS_WAIT_SECONDS = 1.0
"""How long it waits for a loop that takes none; then the report is dropped."""


class ToolContext:
    """What a tool is told of the call that it serves. May be used from the tool's thread."""

    __slots__ = (
        "_cancelled",
        "_loop",
        "_on_progress",
        "_reports",
        "_spent",
        "attempt",
        "deadline",
        "idempotency_key",
        "run_id",
        "task_id",
        "traceparent",
        "tracestate",
    )

    def __init__(
        self,
        *,
        task_id: str,
        run_id: str,
        attempt: int = 1,
        idempotency_key: str = "",
        deadline: float | None = None,
        traceparent: str = "",
        tracestate: str = "",
        on_progress: Callable[[bytes], None] | None = None,
    ) -> None:
        self.task_id = task_id
        self.run_id = run_id
        """The id of this call's run: the same in every attempt."""
        self.attempt = attempt
        """From 1."""
        self.idempotency_key = idempotency_key or run_id
        """The same in every attempt of this call: pass it to what must not happen twice."""
        self.deadline = deadline
        """Epoch seconds after which nobody wants the result; None: there is no such time."""
        self.traceparent = traceparent
        """The trace that the task belongs to (W3C Trace Context); empty where it has none."""
        self.tracestate = tracestate
        self._on_progress = on_progress
        self._reports = threading.Semaphore(PROGRESS_AT_ONCE)
        self._cancelled = False
        self._spent: list[Usage] = []
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # made outside a loop, as in a test of a plain function
            self._loop = None

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer wanted. An async tool is cancelled as well; a plain one should look."""
        return self._cancelled

    def cancel(self) -> None:
        """Say that the result is no longer wanted. Called by who runs the tool."""
        self._cancelled = True  # one assignment: safe to read from any thread

    def progress(self, value: object) -> None:
        """Show the client how far the call is: any value that JSON can hold. Not kept in the record.

        A call that reports faster than the broker takes it is slowed down in its thread, and only its latest report is
        sent.
        """
        report = self._on_progress
        if report is None:
            return
        data = encode(value, "progress")
        if self._loop is None or _running_loop() is self._loop:
            report(data)
        elif self._reports.acquire(timeout=PROGRESS_WAIT_SECONDS):
            self._loop.call_soon_threadsafe(self._report, report, data)

    def _report(self, report: Callable[[bytes], None], data: bytes) -> None:
        self._reports.release()
        report(data)

    def spend(self, *, model: str = "", **amounts: float) -> None:
        """Report what the call has used, as in `spend(tokens=812, cost=0.004, model="…")`; several reports add up.

        It is added to the task's usage when the attempt ends, however it ends. Raises InvalidInput (`spend.…`).
        """
        self._spent.append(Usage.of(amounts, model))  # one append: safe from any thread

    def used(self) -> Usage:
        """What was reported until now."""
        return total(list(self._spent))


class AbandonedThreads:
    """Counts plain functions that passed their limit and still hold a thread: Python cannot stop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._total = 0

    @property
    def running(self) -> int:
        """Threads that are lost to the pool now."""
        return self._running

    @property
    def total(self) -> int:
        """All that were ever abandoned, those that have ended since included."""
        return self._total

    def add(self, work: Future[object]) -> None:
        """Count this call until it ends."""
        with self._lock:
            self._running += 1
            self._total += 1
        work.add_done_callback(self._ended)

    def _ended(self, work: Future[object]) -> None:
        with self._lock:
            self._running -= 1


async def run_limited(
    what: str,
    timeout_seconds: float,
    call: Callable[[], Coroutine[object, object, object]],
) -> object:
    """Await `call()`, at most this long. Raises TimeoutError that names `what` and the limit.

    An end that would reach the caller as something else is made an error of the call: `sys.exit()` would end
    the service, and a cancellation from within looks like one from outside.
    """
    try:
        async with asyncio.timeout(timeout_seconds) as limit:
            return await call()
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{what} passed its limit of {timeout_seconds:g} s") from None
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{what} ended with CancelledError, though nobody cancelled it") from None
    except LoopInterrupt as interrupt:
        raise interrupt.blocked() from None
    except SystemExit as error:
        raise RuntimeError(f"{what} called sys.exit({error.code!r})") from None


async def run_in_thread(
    what: str,
    timeout_seconds: float,
    function: Callable[[], object],
    threads: Executor,
    abandoned: AbandonedThreads,
    on_abandon: Callable[[], None],
) -> object:
    """Run a plain function in `threads`, at most this long (the wait for a free thread included).

    A function that passes the limit, or whose call is cancelled, goes on in its thread: `on_abandon` is called
    so that it can hear of it, and it is counted in `abandoned` until it ends.
    """
    work = threads.submit(contextvars.copy_context().run, _guarded, what, function)
    try:
        return await run_limited(what, timeout_seconds, functools.partial(_await, work))
    finally:
        if not work.done() and not work.cancel():
            on_abandon()
            abandoned.add(work)


async def _await(work: Future[object]) -> object:
    return await asyncio.wrap_future(work)


def _guarded(what: str, function: Callable[[], object]) -> object:
    try:
        return function()
    except StopIteration as error:  # a future cannot carry it: the call would never end
        raise RuntimeError(f"{what} raised StopIteration") from error
    except SystemExit as error:  # it would end the loop that waits
        raise RuntimeError(f"{what} called sys.exit({error.code!r})") from None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class CallableTool(Protocol):
    """A tool, as far as a call of it is concerned."""

    @property
    def name(self) -> str: ...

    @property
    def repeatable(self) -> bool:
        """False: an attempt whose end is unknown is not made again."""
        ...

    @property
    def retry(self) -> RetryPolicy: ...

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call it with `arguments` (a JSON object); its result as JSON. Raises whatever ends the attempt."""
        ...


@dataclass(frozen=True, slots=True)
class Away:
    """The tools under a name cannot be asked now."""

    wait_seconds: float | None
    """After this long a call of them is looked at again, without counting; None: it fails."""
    message: str


class ToolSource(Protocol):
    """Tools that are not known before they are looked for, such as those of MCP servers."""

    def find(self, name: str, /) -> CallableTool | None: ...

    def away(self, name: str, /) -> Away | None: ...


class ToolSettings(FunctionSettings, total=False):
    """What may be said of a tool where it is declared; `timeout_seconds` is 60 where nothing is said."""

    repeatable: bool
    """False: an attempt whose end is unknown must not be made again."""


class Tool(DeclaredFunction):
    """A function, async or plain, with its name, limits and typed arguments: see `ToolSettings`."""

    def __init__(
        self,
        function: Callable[..., object],
        place: Place,
        *,
        timeout_seconds: float = 60.0,
        repeatable: bool = True,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        super().__init__("tool", function, place, timeout_seconds=timeout_seconds, name=name, retry=retry, pool=pool)
        self.repeatable = repeatable
        self._is_async = is_async(function)
        self._context_name, self._arguments = without_context(self.what, self._arguments, ToolContext, place)

    def entry(self) -> ToolEntry:
        """What the manifest says of it. Raises ConfigurationError as `check` does."""
        return ToolEntry(
            arguments=self.arguments.schema(),
            result=self.result_schema,
            pool=self.pool,
            description=self.description,
            repeatable=self.repeatable,
        )

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call the function with `arguments` (a JSON object) and give its result as JSON.

        A plain function runs in `threads`. Raises InvalidInput (`arguments.…`, `result`), InvalidResult, TimeoutError
        at the limit, and whatever the function raises.
        """
        given = self.arguments.decode(arguments)
        if self._context_name:
            given[self._context_name] = context
        call = functools.partial(self.function, **given)
        if self._is_async:
            # `is_async` has looked: a call gives a coroutine, which the type of a bare callable cannot say.
            coroutine = cast("Callable[[], Coroutine[object, object, object]]", call)
            try:
                result = await run_limited(self.what, self.timeout_seconds, coroutine)
            except BaseException:
                context.cancel()  # what the tool left running, in threads of its own, can see that it is over
                raise
        else:
            result = await run_in_thread(self.what, self.timeout_seconds, call, threads, abandoned, context.cancel)
        return encode_result(result)


class StepTool(Tool):
    """An object with a `step` method as a tool: it is called with its arguments as one value."""

    ARGUMENT = "args"

    def __init__(self, instance: object, place: Place, *, name: str) -> None:
        step = cast("Callable[[object], object]", getattr(instance, "step"))  # noqa: B009  # who asks has looked

        if inspect.iscoroutinefunction(step):

            async def call(args: object) -> object:
                return await cast("Awaitable[object]", step(args))

            super().__init__(call, place, name=name, retry=RetryPolicy(attempts=1))
        else:

            def call_here(args: object) -> object:
                return step(args)

            super().__init__(call_here, place, name=name, retry=RetryPolicy(attempts=1))
        self.source = instance
        self.description = inspect.getdoc(type(instance)) or ""
