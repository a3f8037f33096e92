"""A run: one execution of an agent, turn by turn, and the rule that wakes it again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from operator import attrgetter
from typing import Any, Protocol

from runtime_core.bus.deliveries import RunFields
from runtime_core.consumer.effects import NO_WAKE, WAKE, Completed, Failed, Suspended, TurnResult, finished_steps
from runtime_core.consumer.settle import failure_of
from runtime_core.errors import WeftError
from runtime_core.runs.branches import Gather
from runtime_core.runs.context import AgentContext
from runtime_core.runs.execution import NO_META, Execution
from runtime_core.runs.ports import Attempt, BackgroundJob, Definition, Meta, RunPort, Workplace
from runtime_core.runs.scheduler import ONE_ROUND, Requested, Wait

log = logging.getLogger(__name__)
QUICK_ROUNDS = 2
"""Most turns end within this many rounds of the event loop. Only a longer one gets a timer and a future."""
_in_program_order = attrgetter("order")


class RunDefinition(Definition, Protocol):
    """The definition of an agent whose function a run executes."""

    def start(self, ctx: AgentContext, value: Any, /) -> Coroutine[Any, Any, object]:  # Any: see above
        """Return the coroutine of one execution from the top."""
        ...


def suspend(waits: Iterable[Wait], pending: Mapping[str, str]) -> Suspended:
    """Return the effects of a turn whose branches all wait.

    A branch that waits for one step wakes with its result (`!`). One that waits for several steps of a gather wakes
    with the last result (`g<n>`). If the gather also waits for helper branches, its steps do not wake the run (`0`):
    the helpers' steps do, and the turn in which the last helper ends requests the rest again.
    """
    tokens: dict[str, str] = {}
    steps: list[Requested] = []
    groups = 0
    for wait in waits:
        if not wait.missing:
            continue
        if wait.helpers:
            token = NO_WAKE
        elif len(wait.missing) == 1:
            token = WAKE
        else:
            token = f"g{groups}"
            groups += 1
        for name, step in wait.missing.items():
            if name in tokens:
                token_of_both = _stronger(tokens[name], token)
            else:
                token_of_both = token
                steps.append(step)
            tokens[name] = token_of_both
    if len(steps) > 1:
        steps.sort(key=_in_program_order)

    suspended = Suspended()
    for step in steps:
        token = tokens[step.id]
        if step.id in pending:
            suspended.again.append((step.id, token))
            continue
        step.request.wait = token
        suspended.requests.append(step.request)
    return suspended


def _stronger(one: str, other: str) -> str:
    """Return the token of a step that two branches wait for. Waking early costs a turn; not waking would hang."""
    if one == NO_WAKE:
        return other
    if other == NO_WAKE:
        return one
    return WAKE


class Run(Execution):
    """One execution of an agent. Belongs to one event loop; not thread-safe.

    A turn lasts until the function ends, or until all of its branches wait for steps that others perform. The caller
    then commits the turn's effects. Later, `deliver` and `advance` continue the same run. In another process, a new
    Run runs the function again from the top, and finished steps return their results from the journal (replay). A run
    of an actor's handler (`integrations/actors/actor.py`) names its steps and failures in its own way.

    `stored` is the run on the broker. A step with a result there does not run again, a pending step is not requested
    again, and the next commit writes the rows of unrecorded steps. `meta` describes the task.
    """

    def __init__(
        self,
        definition: RunDefinition,
        attempt: Attempt,
        stored: RunFields,
        port: RunPort,
        workplace: Workplace,
        meta: Meta = NO_META,
    ) -> None:
        super().__init__(definition, attempt, stored, port, workplace, meta)
        self.definition: RunDefinition = definition
        self._root: asyncio.Task[object] | None = None
        self._over = False

    # ---- the caller's side -------------------------------------------------------------------------------

    async def advance(self) -> TurnResult:
        """Run one turn. Return errors of the agent's code as Failed.

        Raises the port's errors (Fenced, BusError); then nothing may be committed. If this call is cancelled, drop the
        run.
        """
        if self._over:
            raise WeftError(f"{self.flow.label} is over: create a new Run to continue")
        flow = self.flow
        if self._root is None and flow.verdict is None:
            self._start()
        rounds = QUICK_ROUNDS
        while flow.verdict is None:
            # First: the function may have ended between its last result and this turn.
            if self.jobs and self._root is not None and self._root.done():
                self._stop_jobs(self._root)
            if not flow.active:
                break
            if rounds:
                rounds -= 1
                await ONE_ROUND
            else:
                limit = asyncio.get_running_loop().call_later(self.definition.timeout_seconds, self._time_out)
                try:
                    await flow.quiet()
                finally:
                    limit.cancel()
        if flow.verdict is not None:
            return await self._ended_by(flow.verdict)
        root = self._root
        assert root is not None
        if root.done() and (not self.jobs or _has_failed(root) or all(job.over for job in self.jobs)):
            result = self._result(root)
            if self.flow.tasks or self.unawaited:
                await self._close()
            self._over = True
            return result
        return await self._suspended()

    @property
    def begun(self) -> bool:
        """Whether the function has been started."""
        return self._root is not None

    @property
    def awaited(self) -> frozenset[str]:
        """The steps that the run is blocked on."""
        return frozenset(self.flow.waiting)

    @property
    def over(self) -> bool:
        """Whether no further turn is possible: the function has ended, or the run was dropped."""
        return self._over

    def cancel(self, reason: str) -> None:
        """Cancel the code: `ctx.cancelled` becomes true, and its awaits raise CancelledError.

        The current turn, or the next one, ends the run.
        """
        if self._over or self.flow.stopping:
            return
        self.cancelled = True
        if self._root is None:
            self.flow.end(_cancelled(reason), reason)
        else:
            self.flow.stop(reason)

    def drop(self) -> None:
        """Stop the run here; it requests, sends, records and logs nothing more.

        The code's cleanup (`finally`, `async with`) still runs, with CancelledError. `ctx.cancelled` stays false, since
        the task continues elsewhere.
        """
        if not self._over:
            self._over = True
            self.flow.stop("dropped")
            self._close_unawaited()

    async def aclose(self) -> None:
        """As `drop`, and wait at most 2 seconds for the function to end."""
        self.drop()
        await self.flow.stopped()

    # ---- the turn ----------------------------------------------------------------------------------------

    def _start(self) -> None:
        try:
            coroutine = self.code()
        except Exception as error:
            self.flow.abort(error)
        else:
            self._root = self.flow.start(coroutine, self.branch)

    def code(self) -> Coroutine[Any, Any, object]:  # Any: asyncio's protocol
        """Return the coroutine of one execution from the top. Raises the error that ends the run before it begins."""
        self.check_journal()
        if self.hooks is not None:
            return self.hooks.around(self.input)
        return self.definition.start(AgentContext(self), self.definition.decode_input(self.input))

    def _time_out(self) -> None:
        self.flow.end(self.timed_out(self.definition.timeout_seconds), "time limit")

    def timed_out(self, seconds: float) -> Failed:
        """Return how the run ends when its turn exceeds the agent's time limit."""
        return Failed(
            "TimeLimit",
            f"a turn of agent {self.definition.name!r} ran for more than {seconds:g} s: "
            "raise its timeout_seconds or do less in one turn",
        )

    def _stop_jobs(self, root: asyncio.Task[object]) -> None:
        """Stop the jobs with `at_end="cancel"`; all of them if the function has failed."""
        for job in self.jobs:
            if not job.over and (job.at_end == "cancel" or _has_failed(root)):
                job.stop()

    async def _suspended(self) -> Suspended | Failed:
        if self.output is not None:
            self.output.close_rows()
        pending = self.journal.pending
        result = suspend(self.flow.waits, pending)
        if self.state.used:
            try:
                result.working_state = self.state.working_change()
            except Exception as error:
                return await self._ended_by(_for_good(error))
        for request in result.requests:
            pending[request.step] = request.digest
        if self.jobs:
            result.withdrawn = self._take_unwanted()
        result.sends, self.sends = self.sends, []
        result.spends, self.spends = self.spends, []
        if self.rows.collected:
            result.steps = self.rows.take()
        result.journaled, self.journaled = self.journaled, []
        return result

    def _take_unwanted(self) -> list[str]:
        """Return, once, the requested steps that only cancelled jobs wanted."""
        jobs = [job for job in self.jobs if job.cancelled]
        prefixes = tuple(f"{job.id}." for job in jobs)
        given = {step for job in jobs for step in job.given} - self.flow.waiting.keys()
        pending = self.journal.pending
        unwanted = [step for step in pending if step in given or step.startswith(prefixes)]
        for step in unwanted:
            del pending[step]
        return unwanted

    def _result(self, root: asyncio.Task[object]) -> Completed | Failed:
        if root.cancelled():
            failed = (
                _cancelled(self.flow.why)
                if self.cancelled
                else Failed("CancelledError", "the agent's function raised CancelledError by itself")
            )
        elif (error := root.exception()) is not None:
            failed = failure_of(error)
        elif self.jobs and (unseen := _unseen_error(self.jobs)) is not None:
            failed = failure_of(unseen)
        else:
            try:
                for job in self.jobs:
                    if not job.seen:
                        job.merge(self.branch)
                output = self.definition.encode_output(root.result())
                answer = self.answer(output) if self.branch.context is not None else None
                state = self.state.changed() if self.state.used else None
            except Exception as wrong:
                failed = _for_good(wrong)
            else:
                if self.unawaited:
                    self._warn_of_unawaited()
                if self.output is not None:
                    self.output.check_end([f"{job.id}." for job in self.jobs if job.cancelled])
                    self.output.close_rows()
                return Completed(
                    output, answer, sends=self.sends, spends=self.spends, steps=self.rows.collected, state=state,
                    journaled=[step for step in self.journaled if step.usage or step.message] if self.journaled else [],
                    withdrawn=self._take_unwanted() if self.jobs else [],
                )  # fmt: skip
        return self._with_effects(failed)

    async def _ended_by(self, verdict: Failed | BaseException) -> Failed:
        self.flow.stop("the run has failed")
        await self._close()
        if not isinstance(verdict, Failed):
            raise verdict
        return self._with_effects(verdict)

    def _with_effects(self, failed: Failed) -> Failed:
        if self.output is not None:
            self.output.close_rows()
        failed.steps = finished_steps(self.rows.take(), self.sends)
        failed.spends, failed.journaled = self.spends, self.journaled
        return failed

    async def _close(self) -> None:
        self._over = True
        self.flow.stop("the run is over")
        await self.flow.stopped()
        self._close_unawaited()

    def _warn_of_unawaited(self) -> None:
        steps = ", ".join(repr(step) for step in self.unawaited.values())
        log.warning("%s created steps and never awaited them, so they did nothing: %s", self.flow.label, steps)

    def _close_unawaited(self) -> None:
        for step in self.unawaited.values():
            if isinstance(step, Gather):
                step.close()
        self.unawaited.clear()


def _has_failed(root: asyncio.Task[object]) -> bool:
    return root.cancelled() or root.exception() is not None


def _unseen_error(jobs: Iterable[BackgroundJob]) -> BaseException | None:
    """Return the first error of a job that nobody has awaited."""
    return next((job.error for job in jobs if job.error is not None and not job.seen), None)


def _cancelled(reason: str) -> Failed:
    return Failed("Cancelled", reason, retryable=False)


def _for_good(error: BaseException) -> Failed:
    """Return a failure that is not retried: the same code would give the same result and state again."""
    failed = failure_of(error)
    failed.retryable = False
    return failed
