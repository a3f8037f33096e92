"""Runs code with its own asyncio tasks, such as another library's, inside a durable run.

Such code cannot take steps, since asyncio decides which of its tasks runs first. It requests *operations* instead. Its
host, a branch of the run, performs them as steps and returns their results. To make a replay equal to the first
execution:

- An operation's id comes from its content (name, key, number of equal ones before it), not from its place.
- The code runs until all of it waits (`guest_loop.py`). Only then does the host start operations or return a result.
- The host returns one result at a time, in the order in which the broker stored them.
- The host starts an operation that the journal does not know only after it has returned all known results.
- The code's clock shows the time of the latest result. A timer is a step, like `ctx.sleep`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from runtime_core.declare.schema import encode
from runtime_core.errors import Divergence, Outcome, error_of_exit
from runtime_core.runs.branches import Gather, as_coroutine
from runtime_core.runs.calls import RequestStep, call, sleep
from runtime_core.runs.guest_loop import GuestLoop
from runtime_core.runs.journal import time_of
from runtime_core.runs.scheduler import Branch, NextEnd, Wait
from runtime_core.wire.ids import fingerprint
from runtime_core.wire.step import RESULT_OK

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.step import CallTarget

log = logging.getLogger(__name__)

THREADS_END_SECONDS = 1.0
"""How long the threads of cancelled code may delay its end."""

Work = Callable[[Branch], Awaitable[Any]]  # Any: the operation's own result
"""Returns a step in the given branch, or a coroutine that takes its steps in that branch."""


class GuestRequest:
    """A request of the code. `future`, on the code's loop, gets its result."""

    __slots__ = ("branch", "ended_ms", "future", "group", "label", "name", "outcome", "stopped", "timer", "work")

    def __init__(self, name: str, label: str, work: Work, group: str, future: asyncio.Future[Any]) -> None:
        self.name = name
        self.label = label
        self.work = work
        self.group = group
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.branch: Branch | None = None
        """The branch to stop when the operation is cancelled; None: not started."""
        self.outcome: asyncio.Future[Any] | None = None
        self.ended_ms = 0
        self.stopped = False


class Guest:
    """The host of code with its own asyncio tasks; see the module. Created by `host`."""

    def __init__(self, ctx: AgentContext) -> None:
        self.ctx = ctx
        """For operations; the code itself takes no steps."""
        run, branch = ctx._here("guest code")
        self._run = run
        self._branch = branch
        self.id = run.take_id(branch)
        run.check_place(self.id, "guest code")
        self._prefix = f"{self.id}."
        self._outer = asyncio.get_running_loop()
        self.loop = GuestLoop(  # type: ignore[abstract]  # abstract for typeshed only: the other methods are refused by name
            self._outer, branch.now_ms, lambda: run.flow.wake(self._wait)
        )
        self._wait = NextEnd()
        self._created: list[GuestRequest] = []
        self._open: list[GuestRequest] = []
        """Operations that were started and whose result the code does not have."""
        self._ended: list[GuestRequest] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._labels: set[str] = set()
        self._known = {
            ".".join(step[len(self._prefix) :].split(".", 2)[:2])
            for step in (*run.journal.values, *run.journal.pending)
            if step.startswith(self._prefix)
        }
        self._unclaimed = set(self._known)
        """Operations in the journal that the code has not requested."""
        self._known_results = len(run.journal.values)
        self.replaying = bool(self._known)
        """Whether the code is replaying: True until it gets a result that the journal did not hold."""
        self._over = False

    # ---- the code's side -----------------------------------------------------------------------------------

    async def perform(
        self, name: str, work: Work, *, key: str = "", group: str = "", order: int = 0
    ) -> Any:  # Any: its own result
        """Request an operation from a task of the code and wait for its result. Raises the errors of a step.

        `name` is stored with the run. `key` distinguishes operations of one name whose order may vary. Operations of
        one `group` that are requested together, each a single call, wake the run together. The record sorts operations
        by `order`, and a fork copies those before it, so pass the same number in each replay. If the task is cancelled
        here, the operation continues and its result is dropped.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise self._run.flow.misuse(f"operation {name!r} outside the code of its host")
        if self._over:
            raise asyncio.CancelledError("the run is over")
        operation = self._create(name, key, work, group, order)
        self._created.append(operation)
        return await operation.future

    async def tool(
        self, name: str, tool: str, data: bytes, *, pool: str = "", key: str = "", group: str = "", order: int = 0
    ) -> Any:  # Any: the tool's own JSON
        """Request a call of a tool with `data`, a JSON object of arguments. Raises as `ctx.tool`."""
        run = self._run

        def work(branch: Branch) -> Awaitable[Any]:  # Any: as above
            if run.hooks is not None and (guarded := run.hooks.tool(branch, tool, data, pool)) is not None:
                return guarded
            return call(run, branch, "tool", tool, data=data, pool=pool)

        return await self.perform(name, work, key=key, group=group, order=order)

    async def agent(
        self, name: str, agent: CallTarget, input: object, *, key: str = "", group: str = "", order: int = 0
    ) -> Any:  # Any: the agent's own JSON
        """Request a call of an agent. Raises as `ctx.agent`."""
        run = self._run
        known = run.functions.agent(agent.name)
        data = encode(input, "input") if known is None else known.encode_input(input)

        def work(branch: Branch) -> Awaitable[Any]:  # Any: as above
            return call(run, branch, "agent", agent.name, data=data, pool=agent.pool)

        return await self.perform(name, work, key=key, group=group, order=order)

    def _create(self, name: str, key: str, work: Work, group: str, order: int) -> GuestRequest:
        self._counts[name, key] += 1
        # Seven hexadecimal digits have at most nine decimal digits. Places in a program are decimal numbers.
        number = int(fingerprint(name, key, str(self._counts[name, key]), digits=7), 16)
        while (label := f"{order}.{number}") in self._labels:
            number += 1
        self._labels.add(label)
        self._unclaimed.discard(label)
        return GuestRequest(name, label, work, group, self.loop.create_future())

    # ---- the host's side -----------------------------------------------------------------------------------

    async def run_to_end(self, code: Coroutine[Any, Any, Any]) -> Any:  # Any: the code's own result
        """Run the code to its end, in the branch that awaits this."""
        context = contextvars.copy_context()
        context.run(_HERE.set, self)
        root = self.loop.create_task(code, name=self._run.flow.label, context=context)
        try:
            await self._advance(root)
        finally:
            self._over = True
            await self._close(root)
        if root.cancelled():
            what = f"the code of agent {self._run.definition.name!r}"
            raise RuntimeError(f"{what} cancelled its own task: return or raise an error instead")
        error = root.exception()
        if isinstance(error, SystemExit):
            raise error_of_exit(f"the code of agent {self._run.definition.name!r}", error)
        return root.result()

    async def _advance(self, root: asyncio.Task[Any]) -> None:  # Any: the code's own result
        flow = self._run.flow
        while True:
            await self.loop.run_ready()
            flow.check_going()
            self._update_timer()
            self._forget_cancelled()
            if root.done():
                self._check_claimed()
                return
            self._begin([each for each in self._created if each.label in self._known])
            await flow.settled(self._prefix)
            flow.check_going()
            self._take_ended()
            if self._ended:
                self._deliver(min(self._ended, key=lambda each: (each.ended_ms, each.label)))
            elif self._created:
                self._begin(self._created)
            elif self.loop.runnable:
                continue
            elif self.loop.threads or not self._open:
                with flow.at_work():
                    await flow.next_end(self._wait)
            else:
                self._check_claimed()
                await self._until_one_ends()

    def _update_timer(self) -> None:
        """Keep one step for the earliest timer; drop the steps of cancelled and expired timers."""
        now = self.loop.time()
        first = self.loop.next_timer()
        for operation in (*self._open, *self._ended, *self._created):
            timer = operation.timer
            if timer is None:
                continue
            if timer is first:
                first = None
            elif timer.cancelled() or timer.when() <= now:
                operation.future.cancel()
        if first is not None:
            after_ms = max(1, math.ceil((first.when() - now) * 1000))
            operation = self._create("timer", "", lambda branch: sleep(self._run, branch, after_ms), "", 0)
            operation.timer = first
            self._created.append(operation)

    def _forget_cancelled(self) -> None:
        self._created = [each for each in self._created if not each.future.cancelled()]
        self._ended = [each for each in self._ended if not each.future.cancelled()]
        for operation in self._open:
            if operation.future.cancelled() and not operation.stopped:
                operation.stopped = True
                branch = operation.branch
                others = (each for each in self._open if each.branch is branch)
                # A group continues while one of its members does.
                if branch is not None and all(each.future.cancelled() for each in others):
                    self._run.flow.stop_branch(branch, "nobody waits for the operation")
        self._open = [each for each in self._open if not each.stopped]

    def _begin(self, operations: list[GuestRequest]) -> None:
        """Start these operations. Single calls of one group wait together."""
        run = self._run
        together: dict[str, list[tuple[GuestRequest, RequestStep[Any]]]] = {}  # Any: steps of all result types
        for operation in operations:
            branch = Branch(f"{self._prefix}{operation.label}.", self._branch.now_ms, self._branch)
            try:
                part = operation.work(branch)
            except Exception as error:
                # An impossible request, for example arguments that JSON cannot hold, fails in the code in every replay.
                operation.future.set_exception(error)
                continue
            self._open.append(operation)
            if operation.group and isinstance(part, RequestStep):
                together.setdefault(operation.group, []).append((operation, part))
                continue
            operation.branch = branch
            operation.outcome = run.flow.help(as_coroutine(part), branch, self._wait)
        for members in together.values():
            # Each step has its own branch, and a gather of steps takes no place.
            branch = Branch(f"{self._prefix}{members[0][0].label}.", self._branch.now_ms, self._branch)
            helper = run.flow.help(self._all_of(members, branch), branch, self._wait)
            for operation, _ in members:
                operation.branch = branch
                operation.outcome = helper
        self._created = [each for each in self._created if each not in operations]

    async def _all_of(self, members: list[tuple[GuestRequest, RequestStep[Any]]], branch: Branch) -> dict[str, Any]:
        """Return the outcomes by the operations' labels: results, or exceptions to raise."""
        parts = [part for _, part in members]
        results = await Gather(self._run, branch, parts, True)
        for operation, part in members:
            operation.ended_ms = time_of(self._run.journal.values[part.id])
        return {operation.label: result for (operation, _), result in zip(members, results, strict=True)}

    def _take_ended(self) -> None:
        for operation in self._open:
            assert operation.outcome is not None
            assert operation.branch is not None
            if not operation.outcome.done():
                continue
            if operation.outcome.cancelled():
                operation.future.cancel()
                operation.stopped = True
                continue
            if isinstance(error := operation.outcome.exception(), Outcome):
                # Retry and Reject concern the attempt of the whole run, not the code.
                raise error
            operation.ended_ms = operation.ended_ms or operation.branch.now_ms
            self._ended.append(operation)
        self._open = [each for each in self._open if each not in self._ended and not each.stopped]

    def _deliver(self, operation: GuestRequest) -> None:
        """Return one result to the code, at the time at which it was stored."""
        self._ended.remove(operation)
        outcome, branch, future = operation.outcome, operation.branch, operation.future
        assert outcome is not None
        assert branch is not None
        self._branch.saw(operation.ended_ms)
        if branch.context is not None:
            self._run.join(self._branch, branch)
        seconds = self._branch.now_ms / 1000
        if operation.timer is not None:
            seconds = max(seconds, operation.timer.when())
        # Timers that are due earlier run first.
        self.loop.move_to(seconds)
        self.replaying = self.replaying and len(self._run.journal.values) == self._known_results
        error = outcome.exception()
        result = None if error is not None else outcome.result()
        if operation.group and isinstance(result, dict) and operation.label in result:
            result = result[operation.label]
            error = result if isinstance(result, Exception) else None
        if error is not None:
            future.set_exception(error)
            if operation.timer is not None:
                future.exception()
        else:
            future.set_result(result)

    # ---- waiting -------------------------------------------------------------------------------------------

    async def _until_one_ends(self) -> None:
        """Block this branch. If all others wait, too, the run is suspended."""
        elapsing = self._elapse_here()
        try:
            await self._run.flow.next_end(self._wait)
        finally:
            if elapsing is not None:
                elapsing.cancel()

    def _elapse_here(self) -> asyncio.TimerHandle | None:
        """Measure a new timer here during the turn, since the broker does not know it before the commit."""
        timers = [each for each in self._open if each.timer is not None]
        if not timers:
            return None
        first = min(timers, key=lambda each: each.timer.when() if each.timer is not None else 0.0)
        assert first.timer is not None
        return self._outer.call_later(max(0.0, first.timer.when() - self.loop.time()), self._elapsed, first)

    def _elapsed(self, operation: GuestRequest) -> None:
        branch = operation.branch
        if branch is None or not self._run.flow.active:  # the run is suspended, so the broker's timer counts
            return
        asked = (each for wait in self._run.flow.waits for each in wait.missing.values())
        step = next((each for each in asked if each.id.startswith(branch.prefix)), None)
        if step is None or step.id in self._run.journal.pending:
            return

        async def note() -> None:
            run = self._run
            value = await run.record(step, RESULT_OK, b"null")
            run.note_journaled(step, value)
            run.deliver(step.id, value)

        self._run.flow.help(note(), None, Wait())

    # ---- ends ----------------------------------------------------------------------------------------------

    def _check_claimed(self) -> None:
        """Park the run if the journal holds operations that the code has not requested."""
        if not self._unclaimed:
            return
        held = sorted(self._unclaimed)
        asked = ", ".join(sorted({each.name for each in self._open if each.timer is None})) or "nothing more"
        raise self._run.flow.abort(
            Divergence(self._run.run_id, self.id, asked, recorded=f"the operations {', '.join(held)}")
        )

    async def _close(self, root: asyncio.Task[Any]) -> None:  # Any: the code's own result
        """Cancel the remaining tasks of the code, and operations that nobody waits for."""
        loop, flow = self.loop, self._run.flow
        try:
            if not flow.stopping:
                for branch in {each.branch for each in self._open if each.branch is not None}:
                    flow.stop_branch(branch, "the code has ended")
            # Twice, to cancel also what a task starts during its cancellation.
            for _ in range(2):
                for task in tuple(loop.tasks):
                    task.cancel()
                await loop.run_ready()
                if loop.threads and loop.tasks:
                    await loop.next_notice(THREADS_END_SECONDS)
                    await loop.run_ready()
            await flow.settled(self._prefix)
        finally:
            loop.close()
            for task in tuple(loop.tasks):
                log.warning("%s: %s ignored its cancellation and is abandoned", flow.label, task.get_name())
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch: the line above is enough
            if root.done() and not root.cancelled():
                root.exception()


_HERE: contextvars.ContextVar[Guest] = contextvars.ContextVar("weft_guest")


def current_guest() -> Guest | None:
    """Return the host of the running code; None outside, and inside the steps that it performs."""
    guest = _HERE.get(None)
    try:
        return guest if guest is not None and asyncio.get_running_loop() is guest.loop else None
    except RuntimeError:  # a thread
        return None


async def host(ctx: AgentContext, code: Callable[[Guest], Coroutine[Any, Any, Any]]) -> Any:  # Any: the code's own
    """Run `code(guest)` in separate tasks; it requests operations with `guest.perform`. Return its result."""
    guest = Guest(ctx)
    return await guest.run_to_end(code(guest))
