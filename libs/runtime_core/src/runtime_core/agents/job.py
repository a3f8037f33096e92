"""`ctx.background`: a branch of the run that goes on beside the function, which may wait for it later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any, Literal

from runtime_core.agents.branch import Branch, Wait
from runtime_core.agents.gather import Gather, as_coroutine
from runtime_core.agents.local import LocalStep
from runtime_core.agents.run_context import context_of, join
from runtime_core.agents.step import Step
from runtime_core.errors import JobCancelled

if TYPE_CHECKING:
    from runtime_core.agents.run import Run

AtEnd = Literal["join", "cancel"]


class Job:
    """Work that was started and is not waited for yet. `await job` gives its result, or raises its error.

    Its steps are `k.1`, `k.2`, … for a job at place k. Where the function ends first, the run ends after its jobs
    (`join`; an error that nobody has awaited then fails the run) or stops them (`cancel`).
    """

    __slots__ = ("_branch", "_task", "_wait", "at_end", "cancelled", "id", "run", "seen")

    def __init__(self, run: Run, branch: Branch, part: Awaitable[Any], at_end: AtEnd) -> None:  # Any: its own result
        self.run = run
        self.at_end = at_end
        self.cancelled = False
        self.seen = False
        """Whether somebody has got its result, or its error."""
        if asyncio.isfuture(part):
            raise run.flow.misuse(
                f"ctx.background was given an asyncio {type(part).__name__}: give it the step or the coroutine itself, "
                "so that a replay finds its steps again"
            )
        self.id = run.take_id(branch)
        run.check_place(self.id, "background")
        self._branch = Branch(f"{self.id}.", branch.now_ms, branch)
        # Now and not at its first use: the branch that has started it goes on and changes its own.
        self._branch.context = context_of(run, branch).fork(name=f"~{self._branch.prefix}")
        self._wait = Wait()
        self._task: asyncio.Task[Any] | None = None  # Any: as `part`
        if run.journal.values.get(self._cancel_id, b"")[-4:] == b"true":
            # How far it had come before it was cancelled depended on the clock: a replay does not start it at all.
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
        """Whether it has ended, by itself or by `cancel`."""
        return self.cancelled or self._wait.over()

    @property
    def error(self) -> BaseException | None:
        """What it has raised, where it ended by that."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def __await__(self) -> Generator[Any, None, Any]:  # Any: the result of what was given
        run = self.run
        branch = run.flow.branch_here(self)
        self.seen = True
        if not self.over:
            if self._wait in run.flow.waits:
                raise run.flow.misuse("a job is awaited by two branches at once: await it in one of them")
            yield from run.flow.wait(self._wait)
        if self.cancelled or self._task is None:
            raise JobCancelled(f"the job {self.id} was cancelled")
        branch.saw(self._branch.now_ms)
        self.merge(branch)
        return self._task.result()

    def merge(self, branch: Branch) -> None:
        """Bring what the job has changed in its context into that of a branch; a second time it changes nothing."""
        if not self.cancelled:
            join(self.run, branch, self._branch)

    async def cancel(self) -> bool:
        """Stop it, and give True; False where it had ended by then. A step: a replay gets the same answer.

        Its code gets CancelledError where it waits. What it has asked others for goes on to its end, and the result is
        dropped; what it was about to send in this turn may be left out.
        """
        branch = self.run.flow.branch_here("job.cancel")

        async def still_open() -> bool:
            return not self.over

        place = Branch(f"{self.id}.c.", branch.now_ms)
        if not await LocalStep(self.run, place, "step", "job.cancel", still_open, b""):
            return False
        self.stop()
        return True

    def stop(self) -> None:
        """End it here, without a trace in the journal."""
        if not self.cancelled:
            self.cancelled = self.seen = True
            if self._task is not None:
                self.run.flow.stop_branch(self._branch, "the job was cancelled")

    def __repr__(self) -> str:
        return f"<job {self.id}>"


def _forget(run: Run, part: Awaitable[Any]) -> None:  # Any: as Job's
    if isinstance(part, Step | Gather):
        run.unawaited.pop(part.id, None)
    if hasattr(part, "close"):  # a coroutine, or a gather of some, that will never be awaited
        part.close()
