"""Schedules the branches of a run: which run, which wait, and how they are stopped."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from runtime_core.consumer.effects import Failed
from runtime_core.consumer.settle import failure_of
from runtime_core.declare.schema import users_code_ended
from runtime_core.errors import LoopInterrupt, WeftError, error_of_exit
from runtime_core.runs.journal import StepOfRun
from runtime_core.telemetry.logs import HANDLED, guards_users_code

if TYPE_CHECKING:
    from runtime_core.consumer.effects import StepRequest
    from runtime_core.runs.shared_context import Context

log = logging.getLogger(__name__)
NO_PATCHES: Mapping[str, bool] = {}
CANCEL_GRACE_SECONDS = 2.0
"""How long a cancelled function may take to end before it is abandoned."""


class Branch:
    """Numbers steps as `<prefix>1`, `<prefix>2`, … so that ids depend on the program and not on timing."""

    __slots__ = (
        "attempt_read", "beside", "context", "count", "now_ms", "parent", "patches", "performing", "pieces", "prefix",
        "stopped",
    )  # fmt: skip

    def __init__(self, prefix: str, now_ms: int, parent: Branch | None = None) -> None:
        self.prefix = prefix
        self.parent = parent
        """The branch that waits for this one; None: this is the run's first."""
        self.context: Context | None = None
        """The branch's context, created at its first use; see `Execution.context_of`."""
        self.attempt_read: int = 1 if parent is None else parent.attempt_read
        """What `ctx.attempt` has returned here. The digests of the following steps hold it if it is not 1."""
        self.patches: Mapping[str, bool] = NO_PATCHES if parent is None else parent.patches
        """What `ctx.patched` has returned here, and in the branches above before this one began. Replaced, not changed.
        """
        self.beside = False
        """Whether the parent continues alongside this branch, so its later steps do not follow this branch's."""
        self.count = 0
        self.pieces = 0
        """How many pieces of output its code has made."""
        self.now_ms = now_ms
        """The time of the latest result that this branch has seen, for `ctx.now()`."""
        self.performing = False
        """Whether the body of a `ctx.step` runs in this branch, which may take no steps."""
        self.stopped = False
        """Whether this branch alone was stopped; it takes no more steps while the run continues."""

    @property
    def uses_context(self) -> bool:
        """Whether the code has used the context of this branch or of one above."""
        above: Branch | None = self
        while above is not None:
            if above.context is not None:
                return True
            above = above.parent
        return False

    def move(self, prefix: str) -> None:
        """Number the next steps and pieces of output from 1 under another prefix."""
        self.prefix, self.count, self.pieces = prefix, 0, 0

    def saw(self, epoch_ms: int) -> None:
        self.now_ms = max(self.now_ms, epoch_ms)

    def joined(self, ended: Branch) -> None:
        """Take over what an awaited branch has seen."""
        self.saw(ended.now_ms)
        self.attempt_read = max(self.attempt_read, ended.attempt_read)


class Requested(StepOfRun, Protocol):
    """A step that others perform."""

    order: int
    """Its place among all steps of this execution."""
    request: StepRequest


class Wait:
    """What one branch waits for: results of steps, and ends of helpers.

    A helper is a branch or a local step that runs beside it. A branch is in at most one wait at a time.
    """

    __slots__ = ("future", "helpers", "missing", "owner", "woken")

    def __init__(self) -> None:
        self.missing: dict[str, Requested] = {}
        self.helpers = 0
        self.owner: asyncio.Task[Any] | None = None  # Any: tasks of all result types
        self.future: asyncio.Future[None] | None = None
        self.woken = False

    def over(self) -> bool:
        return not self.missing and not self.helpers


class NextEnd(Wait):
    """A wait for the end of one more helper, for a branch that takes their results one at a time."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        """The number of helpers when the branch began to wait."""

    def over(self) -> bool:
        return self.helpers < self.running


class _OneRound:
    """`await ONE_ROUND` lets the event loop run everything else that is ready, once."""

    __slots__ = ()

    def __await__(self) -> Generator[None, None, None]:
        return iter((None,))  # type: ignore[return-value]  # an iterator is enough, and it costs less


ONE_ROUND = _OneRound()


class OwnFlowOnly:
    """An awaitable that asyncio takes for a coroutine, so that `create_task`, `gather` and the like refuse it by name.

    Without these methods asyncio raises a TypeError that says nothing about the remedy.
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers report such calls themselves, since they see no Coroutine here

        def send(self, value: object) -> NoReturn:
            """Refuse to start: only a task of asyncio calls this."""
            raise self.run.flow.misplaced(self)

        def throw(self, *error: object) -> NoReturn:
            """As `send`."""
            raise self.run.flow.misplaced(self)

        def close(self) -> None:
            """Do nothing: there is no frame to close."""


class Flow:
    """The asyncio tasks of one run. A branch takes steps; a local step that runs beside a branch takes none.

    A task that waits for steps is blocked; one that awaits anything else (an HTTP request, a thread) is active. The
    turn ends when no task is active.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.waits: dict[Wait, None] = {}
        """The waits of blocked branches, in the order in which they were blocked."""
        self.waiting: dict[str, list[Wait]] = {}
        """The same waits, by step."""
        self.active = 0
        self.verdict: Failed | BaseException | None = None
        """How the run ends, whatever its code does: a failure, or an error of the port to raise."""
        self.stopping = False
        self.why = ""
        self.tasks: dict[asyncio.Task[Any], Branch | None] = {}  # Any: results of all types
        """All tasks that have not ended, by branch; None: a local step, which takes no steps."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Future[None] | None = None

    # ---- a turn ------------------------------------------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, object], branch: Branch) -> asyncio.Task[object]:
        """Start the root branch on the running loop."""
        self._loop = asyncio.get_running_loop()
        return self._spawn(coroutine, branch, None)

    def quiet(self) -> asyncio.Future[None]:
        """Return a future that is done when no task is active, or the run must end. By then tasks may be active again.

        The run must be active, and one caller at a time may wait.
        """
        self._turn = asyncio.get_running_loop().create_future()
        return self._turn

    def deliver(self, step: str) -> None:
        """Wake the branches that waited for this step alone."""
        for wait in self.waiting.pop(step, ()):
            wait.missing.pop(step, None)
            self._wake_if_over(wait)

    # ---- for steps ---------------------------------------------------------------------------------------

    def branch_here(self, what: object) -> Branch:
        """Return the branch of the running task. Anywhere else, end the run with a WeftError: steps have no place."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without a loop
            task = None
        branch = None if task is None else self.tasks.get(task)
        if branch is None or branch.performing:
            raise self.misplaced(what)
        if branch.stopped:
            raise asyncio.CancelledError("the job was cancelled")
        return branch

    @property
    def here(self) -> Branch | None:
        """The branch of the running task, if it may take steps; else None."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without a loop
            return None
        branch = None if task is None else self.tasks.get(task)
        return None if branch is None or branch.performing else branch

    def is_stopped(self, task: asyncio.Task[Any] | None) -> bool:  # Any: as `tasks`
        """Whether the task's branch was stopped alone (see `stop_branch`)."""
        branch = None if task is None else self.tasks.get(task)
        return branch is not None and branch.stopped

    def help(
        self, coroutine: Coroutine[Any, Any, Any], branch: Branch | None, wait: Wait
    ) -> asyncio.Task[Any]:  # Any: results of all types
        """Start a branch, or without one a local step, beside the branch that will wait for it."""
        wait.helpers += 1
        return self._spawn(coroutine, branch, wait)

    def wait(self, wait: Wait) -> Generator[Any, None, None]:  # Any: what a future yields to its task
        """Block the running branch until `wait` is over."""
        if self.stopping:
            raise asyncio.CancelledError(self.why)
        assert self._loop is not None
        future = wait.future = self._loop.create_future()
        wait.owner = asyncio.current_task()
        self.waits[wait] = None
        for step in wait.missing:
            self.waiting.setdefault(step, []).append(wait)
        self._inactive()
        try:
            yield from future
        except asyncio.CancelledError:
            if self.is_stopped(wait.owner):
                raise
            self._give_up(wait)
            if not self.stopping:
                wrong = self.misuse(
                    f"the wait for step {', '.join(wait.missing) or 'results'} was cancelled from outside: "
                    "asyncio.timeout and wait_for measure this process's time, which differs in a replay; "
                    "use ctx.wait_for"
                )
                # The run may be suspended, so that it ends only in its next turn.
                log.warning("%s fails: %s", self.label, wrong)
                raise wrong from None
            raise

    @types.coroutine
    def next_end(self, wait: NextEnd) -> Generator[Any, None, None]:  # Any: as `wait`
        """Block the running branch until one more helper has ended, or `wake` wakes it."""
        wait.running = wait.helpers
        yield from self.wait(wait)

    @types.coroutine
    def woken(self, wait: Wait) -> Generator[Any, None, None]:  # Any: as `wait`
        """Block the running branch until `wake` wakes it."""
        yield from self.wait(wait)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep the turn open while something other than a branch is at work, such as a thread."""
        self.active += 1
        try:
            yield
        finally:
            self._inactive()

    async def settled(self, prefix: str) -> None:
        """Wait until each branch under `prefix` is blocked, performs a step, or has ended."""
        while not self.stopping and self._in_transit(prefix):  # noqa: ASYNC110  # ends after a few rounds
            await asyncio.sleep(0)

    def _in_transit(self, prefix: str) -> bool:
        waiting = {wait.owner for wait in self.waits}
        return any(
            branch is not None and branch.prefix.startswith(prefix) and not branch.performing and task not in waiting
            for task, branch in self.tasks.items()
        )

    def wake(self, wait: Wait) -> None:
        """Wake a branch before its wait is over. Does nothing if it does not wait."""
        if wait in self.waits:
            self._release(wait)

    def check_going(self) -> None:
        """Raise CancelledError if the run is being cancelled, dropped or ended."""
        if self.stopping:
            raise asyncio.CancelledError(self.why)

    # ---- ends --------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> asyncio.CancelledError:
        """End the run with this error, whatever its code does. Raise the returned error.

        It is a CancelledError, so that code that catches Exception does not continue.
        """
        return self.end(failure_of(error), f"{type(error).__name__}: {error}")

    def abandon(self, error: BaseException) -> asyncio.CancelledError:
        """As `abort`, for an error of the port. `advance` raises it, even after a failure of the code."""
        self.verdict = error
        return self.end(error, f"{type(error).__name__}: {error}")

    def misuse(self, message: str) -> WeftError:
        """End the run, since a replay could not repeat how its code uses the context. Raise the returned error."""
        error = WeftError(message)
        self.abort(error)
        return error

    def misplaced(self, what: object) -> WeftError:
        """As `misuse`, for a step where the run cannot number its steps."""
        return self.misuse(
            f"{what!r} outside the agent's own flow, in ctx.step, a thread or an asyncio task: a replay could not find "
            "it again. Use ctx.gather instead of asyncio.gather and TaskGroup, ctx.background instead of "
            "create_task, and ctx.wait_for instead of asyncio.wait_for and asyncio.timeout"
        )

    def end(self, verdict: Failed | BaseException, why: str) -> asyncio.CancelledError:
        """Set the verdict unless there is one. The current turn, or the next one, stops the tasks and returns it."""
        if self.verdict is None:
            self.verdict = verdict
        if not self.stopping:
            self.stopping = True
            self.why = why
        self._poke()
        return asyncio.CancelledError(self.why)

    def stop(self, why: str) -> None:
        """Cancel all tasks. Each gets CancelledError at its await, and again at each further step."""
        if not self.stopping:
            self.stopping = True
            self.why = why
        for wait in list(self.waits):
            self._give_up(wait)
        for task in self.tasks:
            task.cancel(why)

    def stop_branch(self, branch: Branch, why: str) -> None:
        """Cancel a branch and the branches that it started. The others continue."""
        tasks = [
            task
            for task, other in self.tasks.items()
            if other is not None and (other is branch or other.prefix.startswith(branch.prefix))
        ]
        for wait in [wait for wait in self.waits if wait.owner in tasks]:
            del self.waits[wait]
            self.active += 1
            for step in wait.missing:
                others = [other for other in self.waiting.get(step, ()) if other is not wait]
                if others:
                    self.waiting[step] = others
                else:
                    self.waiting.pop(step, None)
        for task in tasks:
            known = self.tasks[task]
            if known is not None:
                known.stopped = True
            task.cancel(why)

    async def stopped(self) -> None:
        """Wait at most `CANCEL_GRACE_SECONDS` for all tasks to end."""
        if not self.tasks:
            return
        _, late = await asyncio.wait(list(self.tasks), timeout=CANCEL_GRACE_SECONDS)
        if late:
            log.warning("%s ignored its cancellation for %g s and is abandoned", self.label, CANCEL_GRACE_SECONDS)

    # ---- bookkeeping -------------------------------------------------------------------------------------

    def _spawn(
        self, coroutine: Coroutine[Any, Any, Any], branch: Branch | None, wait: Wait | None
    ) -> asyncio.Task[Any]:  # Any: results of all types
        # Not loop.create_task: an eager task factory would run the code before `tasks` has its branch.
        task = asyncio.Task(_guarded(coroutine), loop=self._loop, name=self.label)
        self.tasks[task] = branch
        self.active += 1
        task.add_done_callback(partial(self._done, coroutine, wait))
        return task

    def _done(
        self, coroutine: Coroutine[Any, Any, Any], wait: Wait | None, task: asyncio.Task[Any]
    ) -> None:  # Any: results of all types
        del self.tasks[task]
        # A task that is cancelled before it starts never begins the coroutine.
        coroutine.close()
        if not task.cancelled():
            # Retrieve the error, or asyncio reports it; whoever waits for the task handles it.
            task.exception()
        if wait is not None:
            wait.helpers -= 1
            self._wake_if_over(wait)
        self._inactive()

    def _wake_if_over(self, wait: Wait) -> None:
        if wait.over() and wait in self.waits:
            self._release(wait)

    def _release(self, wait: Wait) -> None:
        del self.waits[wait]
        self.active += 1
        if wait.future is not None and not wait.future.done():
            wait.future.set_result(None)

    def _give_up(self, wait: Wait) -> None:
        """Remove a wait whose branch gets an exception, which ends the run."""
        if wait not in self.waits:
            return
        del self.waits[wait]
        self.active += 1
        for step in wait.missing:
            self.waiting.pop(step, None)

    def _inactive(self) -> None:
        self.active -= 1
        if not self.active and self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def _poke(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


@guards_users_code
async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:  # Any: results of all types
    handled = HANDLED.get()  # noqa: F841  # LoopWatch reads it from the frame
    try:
        result = await coroutine
        users_code_ended()
        return result
    except LoopInterrupt as interrupt:
        raise interrupt.blocked() from None
    except (SystemExit, KeyboardInterrupt) as error:
        raise error_of_exit("the agent's function", error) from None
