"""Declared tools, the context of a call, and the time limit of a call."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, cast

from runtime_core.base.periodic import TimeLimit
from runtime_core.declare.declaration import Limit, Place, RetryPolicy, checked_limits, is_async, without_context
from runtime_core.declare.function import DeclaredFunction, FunctionSettings
from runtime_core.declare.manifest import ToolEntry
from runtime_core.declare.schema import encode, encode_result, users_code_ended
from runtime_core.errors import LoopInterrupt, error_of_exit
from runtime_core.telemetry.logs import HANDLED, guards_users_code
from runtime_core.wire.step import NOTHING_USED, Usage, total_usage

PROGRESS_AT_ONCE = 16
"""Progress reports that a thread may queue for the loop before it waits."""
PROGRESS_WAIT_SECONDS = 1.0
"""How long a thread waits for a busy loop; then it drops the report."""
_FIRST_REPORT = threading.Lock()


class ToolContext:
    """The context of a tool call. Safe to use from the tool's thread."""

    __slots__ = (
        "_cancelled",
        "_loop",
        "_on_progress",
        "_reports",
        "_spent",
        "attempt",
        "conf",
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
        conf: Mapping[str, Any] | None = None,  # Any: JSON
        on_progress: Callable[[bytes], None] | None = None,
    ) -> None:
        self.task_id = task_id
        self.run_id = run_id
        """The run id of this call, the same in every attempt."""
        self.attempt = attempt
        """The number of the attempt, starting at 1."""
        self.idempotency_key = idempotency_key or run_id
        """The same in every attempt of this call: pass it to services that must not act twice."""
        self.deadline = deadline
        """Epoch seconds after which the result is no longer needed; None: no deadline."""
        self.traceparent = traceparent
        """The task's trace (W3C Trace Context); empty if it has none."""
        self.tracestate = tracestate
        self.conf: Mapping[str, Any] = conf or {}  # Any: JSON
        """The tool's settings of the task (`Task.tools_conf`)."""
        self._on_progress = on_progress
        self._reports: threading.Semaphore | None = None
        self._cancelled = False
        self._spent: list[Usage] = []
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:  # created outside a loop, as in a test of a plain function
            self._loop = None

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer needed. Async tools are cancelled too; plain functions should check this."""
        return self._cancelled

    def cancel(self) -> None:
        """Mark the result as no longer needed. The caller of the tool calls this."""
        self._cancelled = True  # a single assignment, safe from any thread

    def progress(self, value: object) -> None:
        """Report progress to the client, as any JSON value. The record does not keep it.

        If a call reports faster than the broker accepts, its thread is slowed down, and only the latest report is
        sent.
        """
        report = self._on_progress
        if report is None:
            return
        data = encode(value, "progress")
        if self._loop is None or _running_loop() is self._loop:
            report(data)
            return
        with _FIRST_REPORT:
            if self._reports is None:  # most tools never report from a thread
                self._reports = threading.Semaphore(PROGRESS_AT_ONCE)
        if self._reports.acquire(timeout=PROGRESS_WAIT_SECONDS):
            self._loop.call_soon_threadsafe(self._report, self._reports, report, data)

    def _report(self, slots: threading.Semaphore, report: Callable[[bytes], None], data: bytes) -> None:
        slots.release()
        report(data)

    def spend(self, *, model: str = "", **amounts: float) -> None:
        """Report usage, as in `spend(tokens=812, cost=0.004, model="…")`. Several reports add up.

        The usage is added to the task's when the attempt ends, even with an error. Raises InvalidInput (`spend.…`).
        """
        self._spent.append(Usage.of(amounts, model))  # a single append, safe from any thread

    def used(self) -> Usage:
        """The usage reported so far."""
        return total_usage(list(self._spent)) if self._spent else NOTHING_USED


def is_allowed(limits: Sequence[Sequence[str]], name: str) -> bool:
    """Whether each of these lists allows the tool `name`.

    An entry is a name, a pattern such as `files.*`, or the common part of the names `part__action`.
    """
    return all(any(_matches(each, name) for each in names) for names in limits)


def is_pattern(name: object) -> bool:
    """Whether this is a pattern of tools' names."""
    return isinstance(name, str) and any(char in name for char in "*?[")


def _matches(allowed: str, name: str) -> bool:
    return allowed == name or name.startswith(f"{allowed}__") or fnmatchcase(name, allowed)


def not_allowed(limits: Sequence[Sequence[str]], name: str) -> str:
    """Return the message about a call of a tool that these lists do not allow."""
    known = [", ".join(names) or "none" for names in limits if not is_allowed([names], name)]
    return f"tool {name!r} is not allowed here, only {known[0]}: add it to tool_names of the task or the agent"


class AbandonedThreads:
    """Counts plain functions that run past their limit and still hold a thread: Python cannot stop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._total = 0

    @property
    def running(self) -> int:
        """Threads that the pool lacks now."""
        return self._running

    @property
    def total(self) -> int:
        """Threads ever abandoned, including those that have ended."""
        return self._total

    def add(self, work: Future[object]) -> None:
        """Count a call until it ends."""
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
    """Await `call()` with a time limit. Raises TimeoutError that names `what` and the limit.

    Some ends become errors of the call, because they would mislead the caller: `sys.exit()` would end the service, and
    a CancelledError raised inside looks like a cancellation from outside.
    """
    limit = TimeLimit(timeout_seconds)
    try:
        with limit:
            result = await call()
            users_code_ended()
            return result
    except TimeoutError:
        if limit.passed:
            raise TimeoutError(f"{what} passed its limit of {timeout_seconds:g} s") from None
        raise
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{what} raised CancelledError, but was not cancelled") from None
    except LoopInterrupt as interrupt:
        raise interrupt.blocked() from None
    except (SystemExit, KeyboardInterrupt) as error:
        raise error_of_exit(what, error) from None
    except Exception:
        raise
    except BaseException as error:  # the caller looks for an Exception: the call would never end
        if isinstance(error, GeneratorExit) and not limit.runs_here():
            raise  # nobody runs this coroutine any more, so it is closed
        raise _no_exception(what, error) from error


async def run_in_thread(
    what: str,
    timeout_seconds: float,
    function: Callable[[], object],
    threads: Executor,
    abandoned: AbandonedThreads,
    on_abandon: Callable[[], None],
) -> object:
    """Run a plain function in `threads`, with a time limit that includes the wait for a free thread.

    A function that exceeds the limit, or whose call is cancelled, keeps running in its thread. Then `on_abandon` is
    called, which can notify the function, and `abandoned` counts it until it ends.
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


@guards_users_code
def _guarded(what: str, function: Callable[[], object]) -> object:
    handled = HANDLED.get()  # noqa: F841  # LoopWatch reads it from the frame
    try:
        result = function()
        users_code_ended()
        return result
    except StopIteration as error:  # a future cannot hold StopIteration: the call would never end
        raise RuntimeError(f"{what} raised StopIteration") from error
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the waiting loop
        raise error_of_exit(what, error) from None
    except Exception:
        raise
    except BaseException as error:
        raise _no_exception(what, error) from error


def _no_exception(what: str, error: BaseException) -> RuntimeError:
    return RuntimeError(f"{what} raised {type(error).__name__}, which is not an Exception")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class CallableTool(Protocol):
    """A tool that can be called."""

    @property
    def name(self) -> str: ...

    @property
    def repeatable(self) -> bool:
        """False: an attempt with an unknown outcome is not repeated."""
        ...

    @property
    def retry(self) -> RetryPolicy: ...

    @property
    def limits(self) -> Sequence[Limit]:
        """How many of its calls may be open, or start in a time."""
        ...

    @property
    def counted_as(self) -> str:
        """The name of all calls that its limits count."""
        ...

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call the tool with `arguments` (a JSON object). Return its result as JSON. Raises the attempt's error."""
        ...


@dataclass(frozen=True, slots=True)
class ToolUnavailable:
    """The server of a tool is unavailable now."""

    wait_seconds: float | None
    """Seconds until a call is retried, without counting as an attempt; None: the call fails."""
    message: str


class ToolSource(Protocol):
    """Tools that are found at the time of a call, such as those of MCP servers."""

    def find(self, name: str, /) -> CallableTool | None: ...

    def away(self, name: str, /) -> ToolUnavailable | None: ...


class ToolSettings(FunctionSettings, total=False):
    """The options of a tool. `App.tool` describes them."""

    repeatable: bool
    limit: Limit | Sequence[Limit] | None


class Tool(DeclaredFunction):
    """A function, async or plain, with its name, limits and typed arguments. `App.tool` describes its options."""

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
        limit: Limit | Sequence[Limit] | None = None,
    ) -> None:
        """Raises ConfigurationError for mistakes that show without evaluating the annotations."""
        super().__init__("tool", function, place, timeout_seconds=timeout_seconds, name=name, retry=retry, pool=pool)
        self.repeatable = repeatable
        self.counted_as = self.name
        self.limits = checked_limits(self.what, limit, place)
        self._is_async = is_async(function)
        self._context_name, self._arguments = without_context(self.what, self._arguments, ToolContext, place)

    def entry(self) -> ToolEntry:
        """Return the tool's entry in the manifest. Raises ConfigurationError as `check` does."""
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
        """Call the function with `arguments` (a JSON object). Return its result as JSON.

        A plain function runs in `threads`. Raises InvalidInput (`arguments.…`, `result`), InvalidResult, TimeoutError
        at the limit, and the function's own errors.
        """
        given = self.arguments.decode(arguments)
        if self._context_name:
            given[self._context_name] = context
        call = functools.partial(self.function, **given)
        if self._is_async:
            # `is_async` has checked that a call returns a coroutine, which the type cannot express.
            coroutine = cast("Callable[[], Coroutine[object, object, object]]", call)
            try:
                result = await run_limited(self.what, self.timeout_seconds, coroutine)
            except BaseException:
                context.cancel()  # threads that the tool left running can see that the call is over
                raise
        else:
            result = await run_in_thread(self.what, self.timeout_seconds, call, threads, abandoned, context.cancel)
        data = encode_result(result)
        if (check := self.result_check) is not None and type(result) is not check.exact:
            check.check(result, data, "result")
        return data


class StepTool(Tool):
    """A tool from an object with a `step` method, which gets the arguments as one value.

    A parameter `conf` of the method gets the settings that the task gives the tool, a dict.
    """

    ARGUMENT = "args"

    def __init__(self, instance: object, place: Place, *, name: str) -> None:
        step = cast("Callable[..., object]", getattr(instance, "step"))  # noqa: B009  # the caller has checked it
        takes_conf = "conf" in inspect.signature(step).parameters

        def given(context: ToolContext) -> dict[str, object]:
            return {"conf": dict(context.conf)} if takes_conf else {}

        if inspect.iscoroutinefunction(step):

            async def call(args: object, context: ToolContext) -> object:
                return await cast("Awaitable[object]", step(args, **given(context)))

            super().__init__(call, place, name=name, retry=RetryPolicy(attempts=1))
        else:

            def call_here(args: object, context: ToolContext) -> object:
                return step(args, **given(context))

            super().__init__(call_here, place, name=name, retry=RetryPolicy(attempts=1))
        self.source = instance
        self.description = inspect.getdoc(type(instance)) or ""
