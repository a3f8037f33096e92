"""The data of one execution of an agent, and the journal, the port and the shared context as its steps use them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from runtime_core.bus.commits import JOURNAL_LIMIT
from runtime_core.consumer.effects import Effect, JournaledStep, UsageEffect
from runtime_core.consumer.settle import place_in_code
from runtime_core.errors import Divergence, JournalLost, JournalMoved, LimitExceeded
from runtime_core.runs.journal import (
    DIGEST_BYTES,
    MAX_JOURNAL_BYTES,
    PATCHED,
    Journal,
    Rows,
    State,
    packed_now,
)
from runtime_core.runs.output import RunOutput
from runtime_core.runs.ports import Attempt, Definition, Meta, RunPort, Workplace
from runtime_core.runs.scheduler import Branch, Flow
from runtime_core.runs.shared_context import Context, snapshot_in, with_member, wrapped
from runtime_core.wire.ids import ANY_DIGEST, any_digest, attempt_in_digest
from runtime_core.wire.step import as_call

if TYPE_CHECKING:
    from runtime_core.bus.deliveries import RunFields
    from runtime_core.runs.journal import StepOfRun
    from runtime_core.runs.output import PieceStep
    from runtime_core.runs.ports import BackgroundJob, RunHooks

logger = logging.getLogger(__name__)
NO_META = Meta()
_T = TypeVar("_T")


class Execution:
    """One execution of an agent, as its steps see it. `Run` (`run.py`) runs it, turn by turn.

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
        self.spends: list[UsageEffect] = []
        self.journaled: list[JournaledStep] = []
        self.answered: list[str] = []
        """Requests in mid-turn whose answers the code has used."""
        self.jobs: list[BackgroundJob] = []
        """The jobs of `ctx.background`, in the order of the program."""
        self.steps_taken = 0
        self.attempts_read: dict[str, int] = {}
        """What `ctx.attempt` has returned, by place."""
        self.output = RunOutput(stored.output) if stored.output is not None else None
        """None: it has emitted nothing."""
        self.unawaited: dict[str, object] = {}
        """Steps and gathers that the code has created and not awaited, by id."""
        self.holders = stored.holders
        self.overrides = dict(stored.overrides)
        """The instance's state from each of these steps on, since a nested run changed it; see `later_state`."""
        self._state_number = 0
        self.input = stored.data
        """JSON."""
        self.hooks: RunHooks | None = None
        """The hooks around this run and its calls; None for most runs."""

    # ---- the context of its events -------------------------------------------------------------------------

    def allow_tools(self, names: Sequence[str]) -> None:
        """Also limit this run, and all that it calls and sends from now on, to these tools."""
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

    # ---- the context that its code shares ------------------------------------------------------------------

    def context_of(self, branch: Branch) -> Context:
        """Return the context of a branch, created at its first use.

        The context of the run's first branch is a fork of the calling run's, or empty. That of a branch of `ctx.gather`
        is a fork of its waiting branch's.
        """
        if branch.context is None:
            if branch.parent is not None:
                branch.context = self.context_of(branch.parent).fork(name=f"~{branch.prefix}")
            else:
                branch.context = self._first_context()
        return branch.context

    def _first_context(self) -> Context:
        agent = self.definition.name
        snapshot = snapshot_in(self.carried)
        if not snapshot:
            return Context(self.meta.get("session_id", ""), self.task_id, agent, id=f"{self.task_id}/{self.run_id}")
        return Context.restore(snapshot).fork(task_id=self.task_id, agent=agent, name=self.run_id)

    def snapshot_of(self, branch: Branch) -> bytes:
        """Return the snapshot to send with a call of this branch; empty if the code has not used the context."""
        return self.context_of(branch).snapshot() if branch.uses_context else b""

    def join(self, branch: Branch, helper: Branch) -> None:
        """Merge the context of an ended branch into that of the branch that waited for it."""
        if helper.context is not None:
            self.context_of(branch).merge(helper.context)

    def answer(self, output: bytes) -> bytes | None:
        """Return the output with the changes of the context, for the calling run; None if nothing has changed."""
        context = self.branch.context
        if context is None or "/" not in self.run_id or not context.changed:
            return None
        return wrapped(output, context.export_changes())

    # ---- the journal, as steps see it ----------------------------------------------------------------------

    def check_journal(self) -> None:
        """Raise LimitExceeded if the journal has too many steps, or too large results."""
        if len(self.journal.values) > JOURNAL_LIMIT:
            raise _too_many()
        if self.journal.size > MAX_JOURNAL_BYTES:
            raise _too_large()

    def deliver(self, step: str, value: bytes) -> None:
        """Add the journal value of a finished step. A known step stays unchanged."""
        if self.journal.add(step, value):
            if self.journal.size > MAX_JOURNAL_BYTES:
                self.flow.abort(_too_large())
            self.flow.deliver(step)

    def take_id(self, branch: Branch, kind: str = "", digest: str = "") -> str:
        """Return the id of the branch's next step, which is its place. A subclass may use kind and digest instead.

        Ends the run with CancelledError if it exceeds the limit of steps.
        """
        self.steps_taken += 1
        if self.steps_taken > JOURNAL_LIMIT:
            raise self.flow.abort(_too_many())
        branch.count += 1
        return f"{branch.prefix}{branch.count}"

    def wait_for_await(self, step: PieceStep) -> None:
        """Note a piece of output until it is emitted. Ends the run with CancelledError if too many are not awaited."""
        if len(self.unawaited) >= JOURNAL_LIMIT:
            raise self.flow.abort(LimitExceeded(f"more than {JOURNAL_LIMIT} emits are not awaited: await each one"))
        self.unawaited[step.id] = step

    def emit(self, step: PieceStep) -> None:
        """Send a piece of output, unless the broker has it.

        Ends the run with CancelledError if the port fails, or if the broker has different output, to replay the run.
        """
        if self.output is None:
            self.output = RunOutput()
        try:
            piece = self.output.add(step, self.rows)
            if piece is not None:
                self.port.emit(piece, self.journal.values)
        except Exception as error:
            raise self.flow.abandon(error) from error

    def read_attempt(self) -> int:
        """Return `ctx.attempt`: where the journal holds later steps of this branch, the attempt that took them.

        So a replay takes the same path, although it has a different attempt number. The digests of the steps after the
        first read of an attempt above 1 hold its number.
        """
        branch = self.flow.here
        if branch is None:  # in a function of `ctx.step`, or a hook
            return self.attempt
        later = ""
        place: Branch | None = branch
        while not later and place is not None:  # what follows the end of a branch are the next steps of its parent
            later = self.journal.digest(self.journal.next_step(place.prefix, place.count))
            place = place.parent
        attempt = attempt_in_digest(later) if later else max(self.attempt, branch.attempt_read)
        branch.attempt_read = self.attempts_read[f"{branch.prefix}{branch.count}"] = attempt
        return attempt

    def patch(self, branch: Branch, name: str) -> str | None:
        """Return the id of the mark of this patch if the branch takes it; None if it does not.

        A branch takes it if the journal has its mark, or if no earlier execution has passed this place.
        """
        mark = self.journal.patch(branch.prefix, name)
        if not mark and self.passed(branch):
            return None
        return mark or f"{branch.prefix}{branch.count}{PATCHED}{name}"

    def passed(self, branch: Branch) -> bool:
        """Return whether an earlier execution has passed this place: the journal holds a step that follows it."""
        place: Branch | None = branch
        while place is not None:
            if self.journal.next_step(place.prefix, place.count):
                return True
            place = None if place.beside else place.parent
        return False

    def place(self, branch: Branch, kind: str) -> str:
        """Take a place in the program that the journal does not hold, and return its name among those of all tasks."""
        step = self.take_id(branch)
        self.check_place(step, kind)
        return f"{self.task_id}/{self.run_id}/{step}"

    def check_place(self, step: str, kind: str) -> None:
        """Check that the journal holds nothing at this place, for calls that take an id and record nothing."""
        if self.journal.digest(step):
            raise self._diverged(step, f"ctx.{kind}" if kind.isidentifier() else kind)

    def find(self, step: StepOfRun) -> bytes | None:
        """Return the journal value of a step; None if there is none yet.

        Parks the run with CancelledError if the journal holds a different step at this place.
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

    def sought(self, step: StepOfRun, branch: Branch) -> bytes | None:
        """As `find`, for a step that this branch performs and waits for: it must not be repeated at a different place.

        Parks the run with CancelledError if the step is new, but the journal holds the same step at a later place that
        the code has not reached. So the code has left out something that takes a place, such as `ctx.uuid()`.
        """
        value = self.find(step)
        if value is not None or step.id in self.journal.pending or not self.journal.values:
            return value
        place: Branch | None = branch
        while place is not None:
            if later := self.journal.same_later(place.prefix, place.count, step.digest):
                call = as_call(step.kind, step.name, step.key, step.data)
                raise self._diverged(later, f"{call} at place {step.id}, after fewer calls than before")
            place = None if place.beside else place.parent
        return None

    def later_state(self, changed: bytes) -> bytes:
        """Return the state in `<number> <state>`, or nothing if the run has it, or a later one.

        A replay takes results in the order of the program, not in the order in which nested runs ended.
        """
        number, _, state = changed.partition(b" ")
        if not number or int(number) <= self._state_number:
            return b""
        self._state_number = int(number)
        return state

    def found(self, step: StepOfRun) -> bytes:
        """As `find`, for a step with a value."""
        value = self.find(step)
        assert value is not None, step
        return value

    def keep(self, step: StepOfRun) -> None:
        """Add a step without a result, which the broker journals itself."""
        self.journal.add(step.id, packed_now(step.digest))

    def note_journaled(self, step: StepOfRun, value: bytes, usage: bytes = b"") -> None:
        """Note a step that was journaled in mid-turn, so that the commit checks that the broker still has it."""
        self.journaled.append(JournaledStep(step.id, value, step.kind, step.name, usage))

    def note_sent(self, messages: Iterable[Effect]) -> None:
        """As `note_journaled`, of messages that were sent in mid-turn."""
        self.journaled += [JournaledStep(each.step, b"", "", "", message=each) for each in messages]

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

    async def record(self, step: StepOfRun, status: bytes, payload: bytes) -> bytes:
        """Journal the result of a step that ran here. Return the stored value, maybe from another process."""
        write = partial(self.port.record, step.id, step.digest, status, payload, step.kind, step.name)
        return await self.of_port(self.after_others(write))

    async def after_others(self, write: Callable[[], Awaitable[_T]]) -> _T:
        """Journal a result by `write`, after the turn's other results if the broker has lost them."""
        try:
            return await write()
        except JournalLost as lost:
            # Without them, a replay would take their steps again and then find this result, which depends on the old.
            logger.warning("run %s of task %s: %s: storing it again", self.run_id, self.task_id, lost)
        if over := await self.port.store_again(self.journaled, self.journal.values, self.answered):
            raise LimitExceeded(over)
        try:
            return await write()
        except JournalLost as lost:  # one that the code has not come to in its replay
            raise JournalMoved(str(lost)) from None

    def diverged(self, step: StepOfRun) -> asyncio.CancelledError:
        """Park the run, since the journal holds a different step here. The caller raises the returned error."""
        return self._diverged(step.id, as_call(step.kind, step.name, step.key, step.data))

    def _diverged(self, step: str, now: str) -> asyncio.CancelledError:
        line, trace = place_in_code(sys._getframe(1))
        return self.flow.abort(Divergence(self.run_id, step, now, line=line, trace=trace))


def _too_many() -> LimitExceeded:
    return LimitExceeded(
        f"the run takes more than {JOURNAL_LIMIT} steps: split it into several agents, each with its own run"
    )


def _too_large() -> LimitExceeded:
    return LimitExceeded(
        f"the results of the run's steps exceed {MAX_JOURNAL_BYTES} bytes together: "
        "store large ones elsewhere and return references"
    )
