"""The base of all steps, and local steps: a process runs them once, records the result, and replays it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

from runtime_core.base.text import text_of_error
from runtime_core.consumer.settle import class_name, error_text, traceback_of
from runtime_core.declare.schema import encode, users_code_ended
from runtime_core.errors import (
    AgentError,
    Deadlock,
    EngineError,
    HumanTimeout,
    InvalidInput,
    LocalStepError,
    LoopInterrupt,
    Outcome,
    ReceiveTimeout,
    StepError,
    ToolError,
    error_of_exit,
)
from runtime_core.runs.journal import (
    DIGEST_BYTES,
    canonical,
    from_json,
    payload_of,
    recorded_error,
    status_of,
    time_of,
    unpacked,
)
from runtime_core.runs.scheduler import OwnFlowOnly
from runtime_core.runs.shared_context import unwrapped
from runtime_core.telemetry.logs import HANDLED, guards_users_code
from runtime_core.wire import codec
from runtime_core.wire.ids import digest_in_attempt, step_digest
from runtime_core.wire.step import RESULT_ERROR, RESULT_OK, StepFailure

if TYPE_CHECKING:
    from runtime_core.declare.tool import Tool
    from runtime_core.runs.execution import Execution
    from runtime_core.runs.ports import RegisteredFunction
    from runtime_core.runs.scheduler import Branch

T = TypeVar("T")
Plain = TypeVar("Plain", bool, int, float, str, list[Any], dict[str, Any])  # Any: JSON values
"""Types that a result still has when it was written as JSON and read again."""
MaybeAsync: TypeAlias = "Coroutine[Any, Any, Plain] | Plain"
_ERRORS: dict[str, type[StepError]] = {
    "tool": ToolError,
    "agent": AgentError,
    "engine": EngineError,
    "ray": EngineError,
    "spark": EngineError,
    "human": HumanTimeout,
    "receive": ReceiveTimeout,
    "step": LocalStepError,
    "model": LocalStepError,
}
_CONTAINERS = (b"{", b"[")
"""The first byte of JSON that may have keys in any order."""


class DurableStep(OwnFlowOnly, Generic[T]):
    """A durable step of a run. Await it, once or several times, for its result.

    It takes its id when it is created and does nothing until it is awaited or gathered. The run warns about steps that
    never run.
    """

    identified = False
    """Whether the digest comes from an identity instead of the name and data."""

    __slots__ = ("data", "digest", "id", "key", "kind", "name", "order", "run")

    def __init__(
        self, run: Execution, branch: Branch, kind: str, name: str, key: str, data: bytes, digest: str = ""
    ) -> None:
        """`digest` replaces the digest of kind, name, key and data."""
        self.run = run
        self.kind = kind
        self.name = name
        self.key = key
        self.data = data
        """JSON of the request."""
        self.digest = digest or step_digest(kind, name, key, canonical(data) if data[:1] in _CONTAINERS else data)
        self.id = run.take_id(branch, kind, self.digest)
        if branch.attempt_read > 1:
            self.digest = digest_in_attempt(self.digest, branch.attempt_read)
        self.order = run.steps_taken
        """Its place among all steps of this execution."""
        run.unawaited[self.id] = self

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        raise NotImplementedError

    def read(self, payload: bytes) -> T:
        """Return the result in a recorded payload."""
        result: T = from_json(payload)  # type: ignore[assignment]  # JSON, whose shape the step's creator declares
        return result

    def __repr__(self) -> str:
        return f"<step {self.id}: {self.kind} {self.name}>"


def result_of(step: DurableStep[T], value: bytes, branch: Branch) -> T:
    """Return the result in a journal value, or raise its error. Live steps and replays both use it."""
    status, ended_ms, payload = unpacked(value)
    branch.saw(ended_ms)
    if status == RESULT_ERROR:
        type, message = recorded_error(value)
        if type == Deadlock.__name__ and step.kind in ("agent", "acquire"):
            raise Deadlock(type, message)
        raise _ERRORS.get(step.kind, StepError)(type, message)
    if step.kind == "agent":
        payload, changes = unwrapped(payload)
        if changes:
            step.run.context_of(branch).merge_changes(changes)
    return step.read(payload)


class HasStep(Protocol):
    """An object that `App.add_tool` declares as a tool."""

    step: Callable[..., object]


@dataclass(frozen=True, slots=True)
class CallTarget:
    """A callable tool or agent of any app, with its name and pool from the manifests."""

    name: str
    pool: str = ""


def name_and_pool(run: Execution, kind: str, known: RegisteredFunction | None, named: object) -> tuple[str, str]:
    """Return the name and pool of a call. A name that this app does not know goes to the default pool.

    Ends the run with a WeftError for a function that is not registered.
    """
    if known is not None:
        return known.name, known.pool
    if isinstance(named, CallTarget):
        return named.name, named.pool
    if isinstance(named, str) and named:
        return named, ""
    label = getattr(named, "__qualname__", None) or repr(named)
    raise run.flow.misuse(
        f"{label} is not one of this app's {kind}s: register it before the app starts, or pass a name (text)"
    )


def with_positions(
    values: Sequence[object], arguments: Mapping[str, object], name: str, known: Tool | None
) -> dict[str, object]:
    """Return arguments by name, some of them given by position. Raises InvalidInput."""
    if known is None:
        raise InvalidInput("arguments", f"tool {name!r} is not in this app: give its arguments by name")
    named = known.named(values)
    for argument in arguments:
        if argument in named:
            raise InvalidInput(f"arguments.{argument}", f"tool {name!r} got it by position and by name: give it once")
    return {**named, **arguments}


class Ready(Generic[T]):
    """An awaitable with a known result."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:  # Any: asyncio's protocol; this one yields nothing
        yield from ()
        return self._value


class LocalStep(DurableStep[Any]):  # Any: the recorded JSON of what the function returned
    """Runs its body in mid-turn, journals the result, and returns what the journal holds."""

    __slots__ = ("body", "started")

    def __init__(
        self,
        run: Execution,
        branch: Branch,
        kind: str,
        name: str,
        body: Callable[[], Awaitable[object]],
        data: bytes,
        key: str = "",
        digest: str = "",
    ) -> None:
        super().__init__(run, branch, kind, name, key, data, digest)
        self.body = body
        self.started = False

    def __await__(self) -> Generator[Any, None, Any]:  # Any: see the class
        branch = self.run.flow.branch_here(self)
        value = self.run.sought(self, branch)
        if value is None:
            branch.performing = True
            try:
                value = yield from self.perform().__await__()
            finally:
                branch.performing = False
        return result_of(self, value, branch)

    async def perform(self) -> bytes:
        """Run the body once and journal its result. Return the journal value that counts now.

        Retry and Reject are raised unrecorded: they concern the attempt, not this step.
        """
        run = self.run
        run.flow.check_going()
        if self.started:
            raise run.flow.misuse(f"two branches await {self!r} at once: await it in one of them")
        self.started = True
        # Before the body, since another process may have performed this step and handed the run back.
        await run.of_port(run.port.confirm(run.journal.values))
        run.flow.check_going()
        began = time.time() * 1000
        status, payload, error = await self._run_body()
        value = await self.journal(status, payload)
        run.journal.add(self.id, value)
        is_ours = status_of(value) == status and payload_of(value) == payload
        run.note_journaled(self, value, self.usage() if is_ours else b"")
        if is_ours:
            # The journaled time: a replay from the trajectory sees the times that this run saw (`ctx.now`).
            ended = max(began, float(time_of(value)))
            self.note_row(began, ended, b"" if error else payload, error)
        else:
            # Another process was first. Its commit will not count, so the commit of this turn writes the row.
            run.rows.journaled(self, value)
        # The other process may have run different code.
        if value[:DIGEST_BYTES] != self.digest.encode():
            raise run.diverged(self)
        return value

    async def _run_body(self) -> tuple[bytes, bytes, StepFailure | None]:
        """Run the body. Return the status and the payload for the journal, and the error for the row."""
        run = self.run
        failure: BaseException | None = None
        result: object = None
        try:
            result = await self.body()
            users_code_ended()
        except Outcome:
            self.started = False
            raise
        except asyncio.CancelledError as error:
            run.flow.check_going()
            task = asyncio.current_task()
            if run.flow.is_stopped(task):
                raise
            if task is not None and task.cancelling():
                raise run.flow.misuse(
                    f"{self!r} was cancelled from outside: put asyncio.timeout inside the function of ctx.step, "
                    "so that a replay gets the same result"
                ) from None
            failure = error
        except LoopInterrupt as interrupt:
            failure = interrupt.blocked()
        except (Exception, SystemExit) as error:
            # SystemExit, too: it would end the process with all its other runs.
            failure = error
        except KeyboardInterrupt as error:
            failure = error_of_exit(f"{self.kind} {self.name!r}", error)
        # The body may have misused the context, which ends the run.
        run.flow.check_going()
        if failure is None:
            try:
                return RESULT_OK, encode(result, f"result of {self.kind} {self.name!r}"), None
            except InvalidInput as error:
                raise run.flow.abort(error) from error
        kind, message = class_name(failure), error_text(text_of_error(failure))
        if self.kind == "engine" and isinstance(failure, EngineError):
            # The engine names the error of its call.
            kind, message = failure.type, error_text(failure.message)
        row_error = StepFailure(kind, message, traceback_of(failure), at=time.time() * 1000)
        return RESULT_ERROR, codec.encode({"type": kind, "message": message}), row_error

    async def journal(self, status: bytes, payload: bytes) -> bytes:
        """Journal the result unless there is one. Return the stored journal value."""
        return await self.run.record(self, status, payload)

    def usage(self) -> bytes:
        """Return what it has used (JSON; empty: nothing)."""
        return b""

    def note_row(self, started: float, ended: float, output: bytes, error: StepFailure | None) -> None:
        """Add its row for the trajectory. Times are epoch milliseconds."""
        self.run.rows.add(self, started=started, ended=ended, input=self.data, output=output, error=error)


async def call_function(
    function: Callable[..., object],
    arguments: Sequence[object],
    named: Mapping[str, object],
) -> object:
    """Call a function: an async one on the event loop, another one in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # checks whether the call is async, not whether there is one
    ):
        # cast: checked above
        return await cast(Callable[..., Awaitable[object]], function)(*arguments, **named)
    call = functools.partial(function, *arguments, **named)
    in_context = functools.partial(contextvars.copy_context().run, _unstoppable, call)
    result = await asyncio.get_running_loop().run_in_executor(None, in_context)
    # A lambda may return a coroutine; it runs here, on the loop.
    return await result if inspect.isawaitable(result) else result


@guards_users_code
def _unstoppable(function: Callable[[], object]) -> object:
    handled = HANDLED.get()  # noqa: F841  # LoopWatch reads it from the frame
    try:
        result = function()
        users_code_ended()
        return result
    except StopIteration as error:
        # A future cannot hold StopIteration, so its awaiter would wait forever.
        raise RuntimeError("the function raised StopIteration") from error


def label_of(fn: Callable[..., object]) -> str:
    """Return the name of a step that calls this function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__
