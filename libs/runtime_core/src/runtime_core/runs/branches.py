"""`ctx.gather`, `ctx.background` and `ctx.released`: what runs concurrently, in a run and beside it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from runtime_core.errors import JobCancelled, Outcome
from runtime_core.runs.calls import Outgoing, RequestStep, room, sleep
from runtime_core.runs.effects import Acquire, Release
from runtime_core.runs.scheduler import Branch, OwnFlowOnly, Wait
from runtime_core.runs.step import DurableStep, LocalStep, result_of
from runtime_core.wire.ids import step_digest
from runtime_core.wire.step import KEY_RETURNS

if TYPE_CHECKING:
    from runtime_core.runs.execution import Execution

T = TypeVar("T")
AtEnd = Literal["join", "cancel"]


class Gather(OwnFlowOnly):
    """Awaitable; gives the results in the order of its parts.

    Steps keep their own ids. A coroutine becomes a branch: as part i (from 0) of the gather at place k, it numbers its
    steps `k.i.1`, `k.i.2`, … A gather of steps alone takes no place.

    It waits for all parts, even if one fails, and then raises the first error in the order of the parts. (Which error
    comes first in time may differ in a replay.) With `return_exceptions` errors are results, except Retry and Reject.
    """

    __slots__ = ("_parts", "_return_exceptions", "_tasks", "_wait", "id", "run")

    def __init__(
        self,
        run: Execution,
        branch: Branch,
        parts: Sequence[Awaitable[Any]],  # Any: each part has its own result type
        return_exceptions: bool,
    ) -> None:
        self.run = run
        self.id = ""
        self._parts = parts
        self._return_exceptions = return_exceptions
        self._tasks: dict[int, tuple[asyncio.Task[Any], Branch | None]] = {}  # Any: see `parts`
        self._wait: Wait | None = None
        try:
            self._take_place(branch)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<ctx.gather of {len(self._parts)}>"

    def _take_place(self, branch: Branch) -> None:
        run = self.run
        for place, part in enumerate(self._parts):
            if asyncio.isfuture(part):
                raise run.flow.misuse(
                    f"part {place} of ctx.gather is an asyncio {type(part).__name__}: "
                    "pass the step or the coroutine itself, so that a replay finds its steps again"
                )
        if not all(isinstance(part, (DurableStep, Gather)) for part in self._parts):
            self.id = run.take_id(branch)
            run.check_place(self.id, "gather")
            run.unawaited[self.id] = self

    def __await__(self) -> Generator[Any, None, list[Any]]:  # Any: see `parts`
        run = self.run
        branch = run.flow.branch_here(self)
        if self._wait is None:
            self._start(Wait(), branch)
        elif not self._wait.over():
            raise run.flow.misuse("two branches await a ctx.gather at once: await it in one of them")
        wait = self._wait
        assert wait is not None
        if not wait.over():
            yield from run.flow.wait(wait)
        yield from room(run)
        return self._results(branch)

    def _start(self, wait: Wait, branch: Branch) -> None:
        """Start the parts that the journal does not have. `wait` collects the missing results."""
        run = self.run
        run.flow.check_going()
        self._wait = wait
        for place, part in enumerate(self._parts):
            self._start_part(place, part, wait, branch)
        # Last, since the end of the run closes the coroutines that a failure here leaves unstarted.
        run.unawaited.pop(self.id, None)

    def _start_part(self, place: int, part: Awaitable[Any], wait: Wait, branch: Branch) -> None:  # Any: see parts
        run = self.run
        match part:
            case RequestStep():
                if run.sought(part, branch) is None:
                    part.carry(branch)
                    wait.missing[part.id] = part
            case LocalStep():
                if run.sought(part, branch) is None:
                    self._tasks[place] = run.flow.help(part.perform(), None, wait), None
            case Outgoing():
                part.perform(branch)
            case Gather():
                if part._wait is None:
                    part._start(wait, branch)
                elif not part._wait.over():
                    raise run.flow.misuse("a ctx.gather is part of two others at once")
            case _:
                helper = Branch(f"{self.id}.{place}.", branch.now_ms, branch)
                self._tasks[place] = run.flow.help(as_coroutine(part), helper, wait), helper

    @property
    def parts(self) -> Sequence[Awaitable[Any]]:  # Any: see `_results`
        return self._parts

    def close(self) -> None:
        """Close the coroutines that will never start, or Python warns about them."""
        for part in self._parts:
            if inspect.iscoroutine(part) and inspect.getcoroutinestate(part) == inspect.CORO_CREATED:
                part.close()

    def _results(self, branch: Branch) -> list[Any]:  # Any: see `parts`
        results: list[Any] = []  # Any: see `parts`
        first: Exception | None = None
        for place, part in enumerate(self._parts):
            try:
                results.append(self._result(place, part, branch))
            except Exception as error:
                if self._return_exceptions and not isinstance(error, Outcome):
                    results.append(error)
                elif first is None:
                    first = error
        if first is not None:
            raise first
        return results

    def _result(self, place: int, part: Awaitable[Any], branch: Branch) -> object:  # Any: see `parts`
        match part:
            case Outgoing():
                return part.result()
            case Gather():
                return part._results(branch)
        task, helper = self._tasks.get(place, (None, None))
        if isinstance(part, DurableStep):
            if task is not None:
                task.result()  # raises Retry and Reject, which are not journaled
            return result_of(part, self.run.found(part), branch)
        assert task is not None
        if helper is not None:
            branch.joined(helper)
            if helper.context is not None:
                self.run.join(branch, helper)
        return task.result()


class Compound(Generic[T]):
    """One action of several steps, such as `ctx.tool` with hooks around it. Await or gather it like a step.

    It takes one place `k` in the program; its own steps are `k.0.1`, `k.0.2`, …
    """

    __slots__ = ("_label", "_work")

    def __init__(self, run: Execution, branch: Branch, label: str, work: Coroutine[Any, Any, T]) -> None:
        self._label = label
        self._work = Gather(run, branch, [work], False)

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        results = yield from self._work.__await__()
        result: T = results[0]
        return result

    def __repr__(self) -> str:
        return f"<steps {self._work.id}: {self._label}>"


def as_coroutine(part: Awaitable[Any]) -> Coroutine[Any, Any, Any]:  # Any: see Gather
    if inspect.iscoroutine(part):
        return part

    async def awaited() -> Any:  # Any: see Gather
        return await part

    return awaited()


class Job(OwnFlowOnly, Generic[T]):
    """Work in the background. `await job` returns its result or raises its error.

    The job at place k numbers its steps `k.1`, `k.2`, … If the function ends first, the run waits for the job (`join`;
    an error that nobody has awaited fails the run) or stops it (`cancel`).
    """

    __slots__ = ("_branch", "_task", "_wait", "at_end", "cancelled", "given", "id", "run", "seen")

    def __init__(self, run: Execution, branch: Branch, part: Awaitable[T], at_end: AtEnd) -> None:
        self.run = run
        self.at_end = at_end
        self.cancelled = False
        self.seen = False
        """Whether the code has its result or its error."""
        if asyncio.isfuture(part):
            raise run.flow.misuse(
                f"ctx.background got an asyncio {type(part).__name__}: pass the step or the coroutine itself, "
                "so that a replay finds its steps again"
            )
        self.id = run.take_id(branch)
        run.check_place(self.id, "background")
        self.given = _steps_of(part)
        """The steps that were created outside the job and that it awaits."""
        self._branch = Branch(f"{self.id}.", branch.now_ms, branch)
        self._branch.beside = True
        # Fork now, not at its first use: the parent branch continues and changes its own context.
        self._branch.context = run.context_of(branch).fork(name=f"~{self._branch.prefix}")
        self._wait = Wait()
        self._task: asyncio.Task[Any] | None = None  # Any: as `part`
        if run.journal.values.get(self._cancel_id, b"")[-4:] == b"true":
            # Its progress before the cancellation depended on timing, so a replay does not start it.
            self.cancelled = True
            _forget(run, part)
        else:
            self._task = run.flow.help(as_coroutine(part), self._branch, self._wait)
        run.jobs.append(self)

    @property
    def _cancel_id(self) -> str:
        return f"{self.id}.c.1"

    @property
    def over(self) -> bool:
        """Whether it has ended or was cancelled."""
        return self.cancelled or self._wait.over()

    @property
    def error(self) -> BaseException | None:
        """Its error; None if it has none, or is still running."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        run = self.run
        branch = run.flow.branch_here(self)
        self.seen = True
        if not self.over:
            if self._wait in run.flow.waits:
                raise run.flow.misuse("two branches await a job at once: await it in one of them")
            yield from run.flow.wait(self._wait)
        if self.cancelled or self._task is None:
            raise JobCancelled(f"the job {self.id} was cancelled")
        branch.joined(self._branch)
        self.merge(branch)
        result: T = self._task.result()
        return result

    def merge(self, branch: Branch) -> None:
        """Merge the job's context into that of a branch. A repeat changes nothing."""
        if not self.cancelled:
            self.run.join(branch, self._branch)

    def cancel(self) -> JobCancellation:
        """Stop the job, even without `await`. Awaited, return True, or False if it had ended.

        This is a step: a replay gets the same answer.

        Its code gets CancelledError at its await. With the end of this turn, its running calls and the runs of agents
        that it called are stopped, as those of a cancelled task. Messages that it was about to send in this turn may be
        lost.
        """
        branch = self.run.flow.branch_here("job.cancel")
        return JobCancellation(self, Branch(f"{self.id}.c.", branch.now_ms))

    def ends(self, wait: Wait) -> None:
        """Wake a wait as soon as the job has ended."""
        if self._task is not None:
            self._task.add_done_callback(lambda _: self.run.flow.wake(wait))

    def stop(self) -> None:
        """Stop it without a step in the journal."""
        if not self.cancelled:
            self.cancelled = self.seen = True
            if self._task is not None:
                self.run.flow.stop_branch(self._branch, "the job was cancelled")

    def __repr__(self) -> str:
        return f"<job {self.id}>"


class JobCancellation:
    """Stops a job as soon as it is created. `await` returns whether it has stopped the job."""

    __slots__ = ("_branch", "_job", "_place", "_task", "_wait")

    def __init__(self, job: Job[Any], place: Branch) -> None:
        self._job = job
        self._place = place
        self._wait = Wait()
        # A sibling of the job's branch: the end of the job stops all branches below it.
        self._branch = Branch(f"c{job.id}.", place.now_ms)
        self._task = job.run.flow.help(self._stop(), self._branch, self._wait)

    def __await__(self) -> Generator[Any, None, bool]:  # Any: asyncio's protocol
        flow = self._job.run.flow
        branch = flow.branch_here("job.cancel")
        if not self._wait.over():
            yield from flow.wait(self._wait)
        branch.joined(self._branch)
        stopped: bool = self._task.result()
        return stopped

    async def _stop(self) -> bool:
        job = self._job

        async def still_open() -> bool:
            return not job.over

        if not await LocalStep(job.run, self._place, "step", "job.cancel", still_open, b""):
            return False
        job.stop()
        return True


class _Signal(Wait):
    """A wait that only `Flow.wake` ends."""

    __slots__ = ()

    def over(self) -> bool:
        return False


async def limited(
    run: Execution, branch: Branch, part: Awaitable[Any], limit_ms: int
) -> Any:  # Any: the part's own result
    """Wait for the part, or raise TimeoutError at the limit: see `ctx.wait_for`."""

    async def due() -> None:
        await sleep(run, run.flow.branch_here("ctx.wait_for"), limit_ms)

    job = Job(run, branch, part, "cancel")
    timer = Job(run, branch, due(), "cancel")
    either = _Signal()
    for each in (job, timer):
        each.ends(either)
    while not (job.over or timer.over):
        await run.flow.woken(either)
    # Which of the two was first is a step, so a replay gets the same answer although it has both results.
    late = await job.cancel()
    timer.stop()
    if late:
        name = repr(part) if isinstance(part, DurableStep) else getattr(part, "__qualname__", type(part).__name__)
        raise TimeoutError(f"{name} took longer than {limit_ms / 1000:g} s")
    return await job


def _steps_of(part: Awaitable[Any]) -> Sequence[str]:  # Any: as Job's
    """Return the ids of the steps in a part that was created before its job."""
    if isinstance(part, Gather):
        return [step for each in part.parts for step in _steps_of(each)]
    return (part.id,) if isinstance(part, DurableStep) else ()


def _forget(run: Execution, part: Awaitable[Any]) -> None:  # Any: as Job's
    if isinstance(part, DurableStep | Gather):
        run.unawaited.pop(part.id, None)
    if hasattr(part, "close"):  # a coroutine, or a gather of some, that will never be awaited
        part.close()


class ReleaseStep(Outgoing[None]):
    """The run gives up its key, unless a run below waits for it."""

    __slots__ = ()

    def __init__(self, run: Execution, branch: Branch) -> None:
        super().__init__(run, branch, "release", "key", "", b"")

    def go(self) -> None:
        self.run.sends.append(Release(self.id, self.digest, self.run.state.changed() or b""))
        self.run.rows.add(self)


class AcquireStep(RequestStep[bytes]):
    """The run waits for its key. The result is the instance's state (JSON).

    Its id is that of the release, with a suffix: a step inside the block that failed before and then succeeds, after a
    redrive, is followed by others.
    """

    __slots__ = ()

    def __init__(self, run: Execution, release: str) -> None:
        # Not DurableStep's: it takes a step, and its digest depends on `ctx.attempt`.
        self.run, self.kind, self.name, self.key, self.data = run, "acquire", "key", "", b""
        self.digest = step_digest("acquire", "key", "", b"")
        self.id = release + KEY_RETURNS
        self.order = run.steps_taken
        self.request = Acquire(self.id, self.digest)

    def read(self, payload: bytes) -> bytes:
        return payload


class Released:
    """`async with ctx.released():` — inside, other events with the run's key are handled."""

    __slots__ = ("_release", "_run")

    def __init__(self, run: Execution) -> None:
        self._run = run
        self._release = ""
        """The id of the step that gave up the key."""

    async def __aenter__(self) -> None:
        run = self._run
        if not run.key:
            return
        branch = run.flow.branch_here("ctx.released")
        if branch is not run.branch:
            raise run.flow.misuse(
                "ctx.released in a coroutine of ctx.gather or ctx.background, which does not hold the run's key alone: "
                "use it in the agent's own function, around the gather"
            )
        if run.state.released:
            raise run.flow.misuse("ctx.released inside ctx.released: the run has given up its key already")
        step = ReleaseStep(run, branch)
        self._release = step.id
        await step
        run.state.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        if not run.key or (error is not None and not isinstance(error, Exception)):
            return  # the run is being stopped here
        if run.state.differs():
            raise run.flow.misuse(CHANGED)
        run.state.acquire(await AcquireStep(run, self._release))


CHANGED = (
    "ctx.state was used inside ctx.released, where other runs may change it: "
    "read what you need before, and change it afterwards"
)
