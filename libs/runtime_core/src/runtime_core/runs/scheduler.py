"""Which branches of a run are running and which wait, and how all of them are stopped."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from runtime_core.consumer.effects import Failed
from runtime_core.errors import LoopInterrupt, WeftError
from runtime_core.runs.failure import failure_of

if TYPE_CHECKING:
    from runtime_core.runs.calls import Asked
    from runtime_core.sharing.context import Context


class Branch:
    """Numbers steps as `<prefix>1`, `<prefix>2`, … so that ids depend on the program and not on timing."""

    __slots__ = ("context", "count", "now_ms", "parent", "performing", "prefix", "stopped")

    def __init__(self, prefix: str, now_ms: int, parent: Branch | None = None) -> None:
        self.prefix = prefix
        self.parent = parent
        """The branch that waits for this one; None: the run's first."""
        self.context: Context | None = None
        """What this branch knows, once it was asked for; see `sharing.py`."""
        self.count = 0
        self.now_ms = now_ms
        """Time of the latest result that this branch has seen: what `ctx.now()` gives."""
        self.performing = False
        """True while the body of a `ctx.step` runs in this branch: it may take no steps."""
        self.stopped = False
        """True once it was ended by itself, while the run goes on: it takes no more steps."""

    def next_id(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count}"

    def move(self, prefix: str) -> None:
        """Number the steps to come from 1 under another prefix."""
        self.prefix, self.count = prefix, 0

    def saw(self, epoch_ms: int) -> None:
        self.now_ms = max(self.now_ms, epoch_ms)


class Wait:
    """What must be there before one branch can go on: results of steps, and helpers that end.

    A helper is a branch or a local step that runs beside it. A branch is in at most one wait at a time.
    """

    __slots__ = ("future", "helpers", "missing", "owner", "woken")

    def __init__(self) -> None:
        self.missing: dict[str, Asked[Any]] = {}  # Any: steps of all result types
        self.helpers = 0
        self.owner: asyncio.Task[Any] | None = None  # Any: tasks of all result types
        self.future: asyncio.Future[None] | None = None
        self.woken = False

    def over(self) -> bool:
        return not self.missing and not self.helpers


class NextEnd(Wait):
    """A wait that is over when one more helper has ended, for a branch that takes their results one at a time."""

    __slots__ = ("running",)

    def __init__(self) -> None:
        super().__init__()
        self.running = 0
        """The number of helpers when the branch began to wait."""

    def over(self) -> bool:
        return self.helpers < self.running


log = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""How long an agent's function may take to end after it was cancelled; then it is left behind."""


class Flow:
    """The tasks of one run. A branch is a task that takes steps; a local step beside a branch is one that may not.

    A task that waits for steps is blocked; one that awaits anything else (an HTTP request, a thread) is active.
    The turn is over when none is active.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.waits: dict[Wait, None] = {}
        """What blocked branches wait for, in the order in which they were blocked."""
        self.waiting: dict[str, list[Wait]] = {}
        """The same by step."""
        self.active = 0
        self.verdict: Failed | BaseException | None = None
        """How the run ends whatever its code does: as a value, or as an error of the port for the caller."""
        self.stopping = False
        self.why = ""
        # None: a local step, which takes no steps itself.
        self._branches: dict[asyncio.Task[Any], Branch | None] = {}  # Any: results of all types
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Future[None] | None = None

    # ---- a turn ------------------------------------------------------------------------------------------

    def start(self, coroutine: Coroutine[Any, Any, object], branch: Branch) -> asyncio.Task[object]:
        """Start the root branch on the running loop."""
        self._loop = asyncio.get_running_loop()
        return self._spawn(coroutine, branch, None)

    async def until_quiet(self) -> None:
        """Wait until no task is active, or the run must end."""
        loop = asyncio.get_running_loop()
        try:
            while self.active and self.verdict is None:
                self._turn = loop.create_future()
                await self._turn
        finally:
            self._turn = None

    def deliver(self, step: str) -> None:
        """The step has its result now."""
        for wait in self.waiting.pop(step, ()):
            wait.missing.pop(step, None)
            self._wake_if_over(wait)

    # ---- what steps ask ----------------------------------------------------------------------------------

    def branch_here(self, what: object) -> Branch:
        """The branch whose task is running. Anywhere else steps have no place: ends the run by WeftError."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without a loop
            task = None
        branch = None if task is None else self._branches.get(task)
        if branch is None or branch.performing:
            raise self.misuse(
                f"{what!r} outside the agent's own flow: inside ctx.step, a thread, or a task of asyncio "
                "(gather, wait_for, create_task, TaskGroup) a replay could not find it again; "
                "use ctx.gather to do things at once, and timeout= to limit a wait"
            )
        if branch.stopped:
            raise asyncio.CancelledError("the job was cancelled")
        return branch

    def is_stopped(self, task: asyncio.Task[Any] | None) -> bool:  # Any: as `_branches`
        """Whether the task's branch was ended by itself (see `stop_branch`)."""
        branch = None if task is None else self._branches.get(task)
        return branch is not None and branch.stopped

    def help(
        self, coroutine: Coroutine[Any, Any, Any], branch: Branch | None, wait: Wait
    ) -> asyncio.Task[Any]:  # Any: results of all types
        """Start a branch, or (without one) a local step, beside the branch that will wait for it."""
        wait.helpers += 1
        return self._spawn(coroutine, branch, wait)

    def wait(self, wait: Wait) -> Generator[Any, None, None]:  # Any: what a future yields to its task
        """Block the running branch until `wait` is over."""
        self.check_going()
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
                raise self.misuse(
                    f"the wait for step {', '.join(wait.missing) or 'results'} was cancelled from outside: "
                    "asyncio.timeout and wait_for count this process's time, which a replay does not have; "
                    "use timeout= of the step, or ctx.sleep"
                ) from None
            raise

    @types.coroutine
    def next_end(self, wait: NextEnd) -> Generator[Any, None, None]:  # Any: as `wait`
        """Block the running branch until one more helper has ended, or `rouse` wakes it."""
        wait.running = wait.helpers
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
        """Wait until each branch under `prefix` waits for others, is in the body of a step, or has ended."""
        while not self.stopping and self._in_transit(prefix):  # noqa: ASYNC110  # it ends in a few rounds
            await asyncio.sleep(0)

    def _in_transit(self, prefix: str) -> bool:
        waiting = {wait.owner for wait in self.waits}
        return any(
            branch is not None and branch.prefix.startswith(prefix) and not branch.performing and task not in waiting
            for task, branch in self._branches.items()
        )

    def rouse(self, wait: Wait) -> None:
        """Let a branch go on though its wait is not over; one that does not wait goes on anyhow."""
        if wait in self.waits:
            self._release(wait)

    def check_going(self) -> None:
        """Raises CancelledError where the run is being cancelled, dropped or ended."""
        if self.stopping:
            raise asyncio.CancelledError(self.why)

    # ---- ends --------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> asyncio.CancelledError:
        """End the run with this error, whatever its code does; raise what is returned.

        It is a CancelledError, since code that catches Exception must not go on.
        """
        return self.end(failure_of(error), f"{type(error).__name__}: {error}")

    def abandon(self, error: BaseException) -> asyncio.CancelledError:
        """As `abort`, for an error of the port: the caller gets it raised, before any failure of the code."""
        self.verdict = error
        return self.end(error, f"{type(error).__name__}: {error}")

    def misuse(self, message: str) -> WeftError:
        """End the run since its code uses the context in a way that no replay could repeat; raise the error."""
        error = WeftError(message)
        self.abort(error)
        return error

    def end(self, verdict: Failed | BaseException, why: str) -> asyncio.CancelledError:
        """The first verdict stays. The turn under way, or the next one, stops the tasks and returns it."""
        if self.verdict is None:
            self.verdict = verdict
        if not self.stopping:
            self.stopping = True
            self.why = why
        self._poke()
        return asyncio.CancelledError(self.why)

    def stop(self, why: str) -> None:
        """Cancel all tasks: each gets CancelledError where it awaits, and again at each step it tries."""
        if not self.stopping:
            self.stopping = True
            self.why = why
        for wait in list(self.waits):
            self._give_up(wait)
        for task in self._branches:
            task.cancel(why)

    def stop_branch(self, branch: Branch, why: str) -> None:
        """End a branch, with those that it has started, by CancelledError where they await; the others go on."""
        tasks = [
            task
            for task, other in self._branches.items()
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
            known = self._branches[task]
            if known is not None:
                known.stopped = True
            task.cancel(why)

    async def stopped(self) -> None:
        """Wait, but not for long, until all tasks have ended."""
        if not self._branches:
            return
        _, late = await asyncio.wait(list(self._branches), timeout=GRACE_SECONDS)
        if late:
            log.warning("%s did not end within %g s of its cancellation and is left behind", self.label, GRACE_SECONDS)

    # ---- bookkeeping -------------------------------------------------------------------------------------

    def _spawn(
        self, coroutine: Coroutine[Any, Any, Any], branch: Branch | None, wait: Wait | None
    ) -> asyncio.Task[Any]:  # Any: results of all types
        # Not loop.create_task: an eager task factory would run the code before its branch is known.
        task = asyncio.Task(_guarded(coroutine), loop=self._loop, name=self.label)
        self._branches[task] = branch
        self.active += 1
        task.add_done_callback(partial(self._done, coroutine, wait))
        return task

    def _done(
        self, coroutine: Coroutine[Any, Any, Any], wait: Wait | None, task: asyncio.Task[Any]
    ) -> None:  # Any: results of all types
        del self._branches[task]
        # A task that is cancelled before its first step has never begun the coroutine.
        coroutine.close()
        if not task.cancelled():
            # Looked at here so that asyncio does not report it; who waits for the task handles it.
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
        """Its branch goes on by an exception, which ends the run: no other wait matters any more."""
        if wait not in self.waits:
            return
        del self.waits[wait]
        self.active += 1
        for step in wait.missing:
            self.waiting.pop(step, None)

    def _inactive(self) -> None:
        self.active -= 1
        if not self.active:
            self._poke()

    def _poke(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:  # Any: results of all types
    try:
        return await coroutine
    except LoopInterrupt as interrupt:
        raise interrupt.blocked() from None
    except SystemExit as error:
        # It would end the event loop, and with it the worker and all its other runs.
        raise RuntimeError(f"the agent's function called sys.exit({error.code!r})") from None
