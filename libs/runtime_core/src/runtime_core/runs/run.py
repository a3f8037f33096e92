"""A run: one execution of an agent, turn by turn, and the rule that wakes it again."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from runtime_core.bus.commits import JOURNAL_LIMIT
from runtime_core.bus.deliveries import RunFields
from runtime_core.consumer.effects import (
    NO_WAKE,
    WAKE,
    Completed,
    Effect,
    Failed,
    JournaledStep,
    Suspended,
    TurnResult,
    UsageReport,
)
from runtime_core.consumer.settle import failure_of, place_in_code
from runtime_core.errors import Divergence, LimitExceeded, WeftError
from runtime_core.ids import ANY_DIGEST, any_digest, attempt_in_digest, step_digest
from runtime_core.record.step import as_call
from runtime_core.runs.calls import Patch
from runtime_core.runs.context import AgentContext
from runtime_core.runs.journal import DIGEST_BYTES, MAX_JOURNAL_BYTES, PATCHED, Journal, Rows, State, packed_now
from runtime_core.runs.output import RunOutput
from runtime_core.runs.ports import Attempt, Definition, Meta, RunPort, Workplace
from runtime_core.runs.scheduler import ONE_ROUND, Branch, Flow, Wait
from runtime_core.runs.sharing import answer_of, with_member
from runtime_core.runs.step import Step, canonical

if TYPE_CHECKING:
    from runtime_core.runs.branches import Gather, Job
    from runtime_core.runs.calls import Emit, RequestStep
    from runtime_core.runs.ports import RunHooks

log = logging.getLogger(__name__)
NO_META = Meta()
QUICK_ROUNDS = 2
"""Most turns end within so many rounds of the event loop. Only a longer one gets a timer and a future."""
_T = TypeVar("_T")
_in_program_order = attrgetter("order")


def suspend(waits: Iterable[Wait], pending: Mapping[str, str]) -> Suspended:
    """Return the effects of a turn whose branches all wait.

    A branch that waits for one step wakes with its result (`!`). One that waits for several steps of a gather wakes
    with the last result (`g<n>`). If the gather also waits for helper branches, its steps do not wake the run (`0`):
    the helpers' steps do, and the turn in which the last helper ends requests the rest again.
    """
    tokens: dict[str, str] = {}
    steps: list[RequestStep[Any]] = []  # Any: steps of all result types
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


class Run:
    """One execution of an agent. Belongs to one event loop; not thread-safe.

    A turn lasts until the function ends, or until all of its branches wait for steps that others perform. The caller
    then commits the turn's effects. Later, `deliver` and `advance` continue the same run. In another process, a new
    Run runs the function again from the top, and finished steps return their results from the journal (replay). A run
    of an actor's handler (`actors/actor.py`) names its steps and failures in its own way.

    `stored` is the run on the broker. A step with a result there does not run again, a pending step is not requested
    again, and the next commit writes the rows of unrecorded steps. `meta` describes the task.
    """

    def __init__(
        self,
        definition: Definition,
        attempt: Attempt,
        stored: RunFields,
        port: RunPort,
        workplace: Workplace,
        meta: Meta = NO_META,
    ) -> None:
        self.definition = definition
        self.task_id = attempt.task_id
        self.run_id = attempt.run_id
        self.attempt = attempt.number
        self.key = attempt.key
        self.meta = meta
        self.port = port
        self.functions = workplace.functions
        self.compute = workplace.compute
        self.results = workplace.results
        self.carried = stored.context
        """The context of the event that began the run."""
        self.tool_limits: Sequence[Sequence[str]] = meta.get("tools", ())
        """The lists of tools that this run and all that it calls are limited to."""
        self.own_tools = definition.own_tools
        """The tools that the agent itself is limited to; empty: no such list."""
        self.recarried = False
        """Whether the code has changed `carried`."""
        self.branch = Branch("", stored.started_ms)
        self.cancelled = False
        self.journal = Journal(stored.journal, stored.pending)
        self.state = State(stored.state)
        self.flow = Flow(f"run {self.run_id} of task {self.task_id} (agent {definition.name})")
        self.rows = Rows(self.run_id, self.attempt, attempt.owner, stored.unrecorded)
        self.sends: list[Effect] = []
        self.spends: list[UsageReport] = []
        self.journaled: list[JournaledStep] = []
        self.jobs: list[Job] = []
        """The jobs of `ctx.background`, in the order of the program."""
        self.steps_taken = 0
        self.attempts_read: dict[str, int] = {}
        """What `ctx.attempt` has returned, by place."""
        self.output = RunOutput(stored.output) if stored.output is not None else None
        """None: it has emitted nothing."""
        self.unawaited: dict[str, Step[Any] | Gather] = {}  # Any: steps of all result types
        self.holders = stored.holders
        self.overrides = dict(stored.overrides)
        """The instance's state from each of these steps on, since a nested run changed it; see `later_state`."""
        self._state_number = 0
        self.input = stored.data
        """JSON."""
        self._root: asyncio.Task[object] | None = None
        self._over = False
        self.hooks: RunHooks | None = None
        """The hooks around this run and its calls; None for most runs."""

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

    def deliver(self, step: str, value: bytes) -> None:
        """Add the journal value of a finished step. A known step stays unchanged."""
        if self.journal.add(step, value):
            if self.journal.size > MAX_JOURNAL_BYTES:
                self.flow.abort(_too_large())
            self.flow.deliver(step)

    def allow_tools(self, names: Sequence[str]) -> None:
        """Limit this run, and all that it calls and sends from now on, to these tools, too."""
        wanted = list(dict.fromkeys(names))
        if wanted not in self.tool_limits:
            self.tool_limits = [*self.tool_limits, wanted]
            self.carry("tools", self.tool_limits)

    def carry(self, name: str, value: object) -> None:
        """Add a member to the context of all events that this run causes from now on."""
        self.carried = with_member(self.carried, name, value)
        self.recarried = True

    def limits_of_tools(self) -> Sequence[Sequence[str]]:
        """Return the lists for a call of a tool by this run."""
        if not self.own_tools:
            return self.tool_limits
        own = [named if (known := self.functions.tool(named)) is None else known.name for named in self.own_tools]
        return [*self.tool_limits, [str(each) for each in own]]

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
        if len(self.journal.values) > JOURNAL_LIMIT:
            raise _too_many()
        if self.journal.size > MAX_JOURNAL_BYTES:
            raise _too_large()
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
                answer = answer_of(self, self.branch, output) if self.branch.context is not None else None
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
                    journaled=[step for step in self.journaled if step.usage] if self.journaled else [],
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
        failed.spends, failed.steps, failed.journaled = self.spends, self.rows.take(), self.journaled
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
            if not isinstance(step, Step):
                step.close()
        self.unawaited.clear()

    # ---- the journal, as steps see it ----------------------------------------------------------------------

    def take_id(self, branch: Branch, kind: str = "", digest: str = "") -> str:
        """Return the id of the branch's next step, which is its place. A subclass may use kind and digest instead.

        Ends the run with CancelledError if it exceeds the limit of steps.
        """
        self.steps_taken += 1
        if self.steps_taken > JOURNAL_LIMIT:
            raise self.flow.abort(_too_many())
        branch.count += 1
        return f"{branch.prefix}{branch.count}"

    def wait_for_await(self, step: Emit) -> None:
        """Note a piece of output until it is emitted. Ends the run with CancelledError if too many are not awaited."""
        if len(self.unawaited) >= JOURNAL_LIMIT:
            raise self.flow.abort(LimitExceeded(f"more than {JOURNAL_LIMIT} emits are not awaited: await each one"))
        self.unawaited[step.id] = step

    def emit(self, step: Emit, branch: Branch) -> None:
        """Send a piece of output, unless the broker has it.

        Ends the run with CancelledError: to replay it, if the broker has other output; if the port fails.
        """
        if step.id in self.journal.values or step.id in self.journal.pending:
            # From a release that journaled each piece; or another step is there, which parks the run.
            step.digest = step_digest(step.kind, step.name, step.key, canonical(step.data))
            self.find(step)
            return
        if self.output is None:
            self.output = RunOutput()
        try:
            piece = self.output.add(branch, step, self.rows)
            if piece is not None:
                self.port.emit(piece, self.journal.values)
        except Exception as error:
            raise self.flow.abandon(error) from error

    def read_attempt(self) -> int:
        """Return `ctx.attempt`: where the journal holds later steps of this branch, the attempt that took them.

        So a replay takes the same path, although the number of the attempt is another one. The digests of the steps
        after the first read of an attempt above 1 hold its number.
        """
        branch = self.flow.here
        if branch is None:  # in a function of `ctx.step`, or a hook
            return self.attempt
        later = ""
        place: Branch | None = branch
        while not later and place is not None:  # what follows the end of a branch are the next steps of its parent
            later = self.journal.next_digest(place.prefix, place.count)
            place = place.parent
        attempt = attempt_in_digest(later) if later else max(self.attempt, branch.attempt_read)
        branch.attempt_read = self.attempts_read[f"{branch.prefix}{branch.count}"] = attempt
        return attempt

    def patched(self, branch: Branch, name: str) -> bool:
        """Return `ctx.patched`: whether the branch takes this patch. Its first answer counts for the whole branch.

        A branch takes it if the journal has its mark, or if no earlier execution has passed this place.
        """
        if name not in branch.patches:
            mark = self.journal.patch(branch.prefix, name)
            taken = bool(mark) or not self.passed(branch)
            if taken:
                Patch(self, name, mark or f"{branch.prefix}{branch.count}{PATCHED}{name}").perform(branch)
            branch.patches = {**branch.patches, name: taken}
        return branch.patches[name]

    def passed(self, branch: Branch) -> bool:
        """Return whether an earlier execution has passed this place: the journal holds a step that follows it."""
        place: Branch | None = branch
        while place is not None:
            if self.journal.next_digest(place.prefix, place.count):
                return True
            place = None if place.beside else place.parent
        return False

    def check_place(self, step: str, kind: str) -> None:
        """Check that the journal holds nothing at this place, for calls that take an id and record nothing."""
        if self.journal.digest(step):
            raise self._diverged(step, f"ctx.{kind}" if kind.isidentifier() else kind)

    def find(self, step: Step[Any]) -> bytes | None:  # Any: steps of all result types
        """Return the journal value of a step; None if there is none yet.

        Parks the run with CancelledError if the journal holds another step at this place.
        """
        self.unawaited.pop(step.id, None)
        value = self.journal.values.get(step.id)
        if value is None:
            if self.journal.pending.get(step.id, step.digest) != step.digest:
                raise self.diverged(step)
            return None
        held = value[:DIGEST_BYTES].decode("ascii", "replace")
        if held != step.digest and held not in (ANY_DIGEST, any_digest(step.kind, step.name)):
            raise self.diverged(step)
        if step.id in self.rows.unrecorded:
            self.note_journaled(step, value, self.rows.replayed(step, value))
        if self.overrides and (changed := self.later_state(self.overrides.pop(step.id, b""))):
            self.state.replace(changed)
        return value

    def later_state(self, changed: bytes) -> bytes:
        """Return the state in `<number> <state>`, or nothing if the run has a later one.

        A replay takes results in the order of the program, not in the order in which nested runs ended.
        """
        number, _, state = changed.partition(b" ")
        if not number or int(number) < self._state_number:
            return b""
        self._state_number = int(number)
        return state

    def found(self, step: Step[Any]) -> bytes:  # Any: steps of all result types
        """As `find`, for a step with a value."""
        value = self.find(step)
        assert value is not None, step
        return value

    def keep(self, step: Step[Any]) -> None:  # Any: steps of all result types
        """Add a step without a result, which the broker journals itself."""
        self.journal.add(step.id, packed_now(step.digest))

    def note_journaled(self, step: Step[Any], value: bytes, usage: bytes = b"") -> None:  # Any: see `find`
        """Note a step that was journaled in mid-turn, so that the commit checks that the broker still has it."""
        self.journaled.append(JournaledStep(step.id, value, step.kind, step.name, usage))

    async def of_port(self, doing: Awaitable[_T]) -> _T:
        """Await a call of the port. An error ends the run; the agent's code never sees it."""
        try:
            return await doing
        except asyncio.CancelledError:
            raise
        except LimitExceeded as error:
            raise self.flow.abort(error) from error
        except Exception as error:
            raise self.flow.abandon(error) from error

    async def record(self, step: Step[Any], status: bytes, payload: bytes) -> bytes:  # Any: steps of all result types
        """Journal the result of a step that ran here. Return the stored value, maybe from another process."""
        return await self.of_port(self.port.record(step.id, step.digest, status, payload, step.kind, step.name))

    def diverged(self, step: Step[Any]) -> asyncio.CancelledError:  # Any: steps of all result types
        """Park the run, since the journal holds another step at this place. Raise the returned error."""
        return self._diverged(step.id, as_call(step.kind, step.name, step.key, step.data))

    def _diverged(self, step: str, now: str) -> asyncio.CancelledError:
        line, trace = place_in_code(sys._getframe(1))
        return self.flow.abort(Divergence(self.run_id, step, now, line=line, trace=trace))


def _has_failed(root: asyncio.Task[object]) -> bool:
    return root.cancelled() or root.exception() is not None


def _unseen_error(jobs: Iterable[Job]) -> BaseException | None:
    """Return the first error of a job that nobody has awaited."""
    return next((job.error for job in jobs if job.error is not None and not job.seen), None)


def _cancelled(reason: str) -> Failed:
    return Failed("Cancelled", reason, retryable=False)


def _for_good(error: BaseException) -> Failed:
    """Return a failure that is not retried: the same code would give the same result and state again."""
    failed = failure_of(error)
    failed.retryable = False
    return failed


def _too_many() -> LimitExceeded:
    return LimitExceeded(
        f"the run takes more than {JOURNAL_LIMIT} steps: split it into several agents, each with its own run"
    )


def _too_large() -> LimitExceeded:
    return LimitExceeded(
        f"the results of the run's steps exceed {MAX_JOURNAL_BYTES} bytes together: "
        "store large ones elsewhere and return references"
    )
