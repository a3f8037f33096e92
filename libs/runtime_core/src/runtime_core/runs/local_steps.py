"""Steps that this process does itself: `ctx.step` and the local engine. Done once, recorded, then replayed."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from runtime_core import codec
from runtime_core.consumer.effects import COMPLETED, FAILED
from runtime_core.declare.schema import encode
from runtime_core.errors import EngineError, InvalidInput, LoopInterrupt, Outcome
from runtime_core.record.step import StepError as RowError
from runtime_core.runs.failure import clean, text_of, type_of
from runtime_core.runs.journal import DIGEST_BYTES, payload_of, status_of, time_of
from runtime_core.runs.step import Step, result_of
from runtime_core.text import text_of_error

if TYPE_CHECKING:
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch


class LocalStep(Step[Any]):  # Any: the recorded JSON of what the function returned
    """Runs its body while the turn goes on, journals the result, and goes on with what the journal holds."""

    __slots__ = ("body", "started")

    def __init__(
        self,
        run: Run,
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
        value = self.run.find(self)
        if value is None:
            branch.performing = True
            try:
                value = yield from self.perform().__await__()
            finally:
                branch.performing = False
        return result_of(self, value, branch)

    async def perform(self) -> bytes:
        """Run the body once and journal what it gave; returns the journal value that holds now.

        Retry and Reject pass unrecorded: they are about the attempt and not about this step.
        """
        run = self.run
        run.flow.check_going()
        if self.started:
            raise run.flow.misuse(f"{self!r} is awaited by two branches at once: await it in one of them")
        self.started = True
        # Before the body: another process may have done this step and handed the run back.
        await run.of_port(run.port.confirm(run.journal.values))
        run.flow.check_going()
        began = time.time() * 1000
        failure: BaseException | None = None
        result: object = None
        try:
            result = await self.body()
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
                    "where a replay cannot miss it"
                ) from None
            failure = error
        except LoopInterrupt as interrupt:
            failure = interrupt.blocked()
        except (Exception, SystemExit) as error:
            # SystemExit too: it would end the worker with all its other runs.
            failure = error
        # The body may have misused the context: that is no result of the step.
        run.flow.check_going()

        row_error: RowError | None = None
        if failure is None:
            status = COMPLETED
            try:
                payload = encode(result, f"result of {self.kind} {self.name!r}")
            except InvalidInput as error:
                raise run.flow.abort(error) from error
        else:
            status = FAILED
            kind, message = type_of(failure), clean(text_of_error(failure))
            if self.kind == "engine" and isinstance(failure, EngineError):
                # The engine's word for what has failed in its call: that is the step's error.
                kind, message = failure.type, clean(failure.message)
            payload = codec.encode({"type": kind, "message": message})
            row_error = RowError(kind, message, text_of(failure), at=time.time() * 1000)
        value = await self.journal(status, payload)
        run.journal.add(self.id, value)
        if status_of(value) == status and payload_of(value) == payload:
            # As journaled: a replay from the trajectory sees the times that this run saw (`ctx.now`).
            ended = max(began, float(time_of(value)))
            self.note_row(began, ended, payload if failure is None else b"", row_error)
        else:
            # Another process was first. Its commit will not count: the row is written by the commit of this turn.
            run.rows.journaled(self, value)
        # It may have had other code.
        if value[:DIGEST_BYTES] != self.digest.encode():
            raise run.diverged(self)
        return value

    async def journal(self, status: bytes, payload: bytes) -> bytes:
        """Write the result, put if absent: the journal value that is stored now."""
        return await self.run.record(self, status, payload)

    def note_row(self, started: float, ended: float, output: bytes, error: RowError | None) -> None:
        """Note what the trajectory says of it. Times are epoch milliseconds."""
        self.run.rows.add(self, started=started, ended=ended, input=self.data, output=output, error=error)


async def call_function(
    function: Callable[..., object],
    arguments: Sequence[object],
    named: Mapping[str, object],
) -> object:
    """Call a sync or async function; a sync one in a thread, so that it does not stop the loop."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # not "is it callable": whether its call is async
    ):
        # cast: what the line above has found out
        return await cast(Callable[..., Awaitable[object]], function)(*arguments, **named)
    in_context = functools.partial(contextvars.copy_context().run, function, *arguments, **named)
    result = await asyncio.get_running_loop().run_in_executor(None, _unstoppable, in_context)
    # A lambda may return a coroutine; it runs here, on the loop.
    return await result if inspect.isawaitable(result) else result


def _unstoppable(function: Callable[[], object]) -> object:
    try:
        return function()
    except StopIteration as error:
        # A future cannot hold StopIteration: whoever awaits it would wait for ever.
        raise RuntimeError("the function raised StopIteration") from error
