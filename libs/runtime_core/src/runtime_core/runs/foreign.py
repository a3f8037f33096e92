"""Code that runs in asyncio tasks of its own, as other libraries' code does, inside a durable run.

Such code cannot take steps: which of its tasks comes first is asyncio's affair. It asks for *operations* instead. Its
host, a branch of the run, performs them as steps and gives the results back. So that a replay is like the first time,
whatever came first then:

- An operation's steps are named after what it is (name, key, how many of those before it) and not after its place.
- The code goes on until all of it waits (`foreign_loop.py`). Only then is something begun, or one result handed in.
- Results are handed in by the time at which the broker has stored them, one at a time, also where many are there.
- What the journal does not know is begun when no known result is left to hand in: it was not there before either.
- The code's clock stands at the latest result. A timer is a step, as `ctx.sleep`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from runtime_core.consumer.effects import COMPLETED
from runtime_core.declare.schema import encode
from runtime_core.errors import Divergence, Outcome
from runtime_core.ids import fingerprint
from runtime_core.runs.branches import Gather, as_coroutine
from runtime_core.runs.calls import Asked, call, sleep
from runtime_core.runs.foreign_loop import ForeignLoop
from runtime_core.runs.journal import time_of
from runtime_core.runs.scheduler import Branch, NextEnd, Wait
from runtime_core.runs.sharing import join

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.step import Elsewhere

log = logging.getLogger(__name__)

END_SECONDS = 1.0
"""How long threads of code that was cancelled may hold up its end."""

Work = Callable[[Branch], Awaitable[Any]]  # Any: the operation's own result
"""Makes what an operation does: a step in the given branch, or a coroutine, which takes its steps in that branch."""


class Operation:
    """Something that the code asks for; `future`, on the code's loop, takes its end."""

    __slots__ = ("branch", "ended_ms", "future", "group", "label", "name", "outcome", "stopped", "timer", "work")

    def __init__(self, name: str, label: str, work: Work, group: str, future: asyncio.Future[Any]) -> None:
        self.name = name
        self.label = label
        self.work = work
        self.group = group
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.branch: Branch | None = None
        """The one whose end stops it; None: not begun."""
        self.outcome: asyncio.Future[Any] | None = None
        self.ended_ms = 0
        self.stopped = False


class Foreign:
    """The host of code that has tasks of its own; see the module. Made by `host`."""

    def __init__(self, ctx: AgentContext) -> None:
        self.ctx = ctx
        """For what operations do: the code itself takes no steps."""
        run, branch = ctx._here("foreign code")
        self._run = run
        self._branch = branch
        self.id = run.take_id(branch)
        run.check_place(self.id, "foreign code")
        self._prefix = f"{self.id}."
        self._outer = asyncio.get_running_loop()
        self.loop = ForeignLoop(  # type: ignore[abstract]  # abstract for typeshed only: the rest is refused by name
            self._outer, branch.now_ms, lambda: run.flow.rouse(self._wait)
        )
        self._wait = NextEnd()
        self._created: list[Operation] = []
        self._open: list[Operation] = []
        """Begun, and not handed in yet."""
        self._ended: list[Operation] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._labels: set[str] = set()
        self._known = {
            ".".join(step[len(self._prefix) :].split(".", 2)[:2])
            for step in (*run.journal.values, *run.journal.pending)
            if step.startswith(self._prefix)
        }
        self._unclaimed = set(self._known)
        """What the journal knows and the code has not asked for yet."""
        self._known_results = len(run.journal.values)
        self.replaying = bool(self._known)
        """Whether the code is where it has been before: until it is given a result that the journal did not hold."""
        self._over = False

    # ---- the code's side -----------------------------------------------------------------------------------

    async def perform(
        self, name: str, work: Work, *, key: str = "", group: str = "", order: int = 0
    ) -> Any:  # Any: its own result
        """Ask for an operation, from a task of the code, and wait for its end. Raises what a step raises.

        `name` is persisted with the run. `key` tells operations of one name apart that may be asked for in any order.
        Operations of one `group` that are asked for together wake the run together, where each is one question. The
        record sorts them by `order`, and a fork takes over what is before: the same number at each replay.
        A task that is cancelled here goes on; the operation does too, and its result is dropped.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise self._run.flow.misuse(f"operation {name!r} outside the code that foreign code's host runs")
        if self._over:
            raise asyncio.CancelledError("the run is over")
        operation = self._create(name, key, work, group, order)
        self._created.append(operation)
        return await operation.future

    async def tool(
        self, name: str, tool: str, data: bytes, *, pool: str = "", key: str = "", group: str = "", order: int = 0
    ) -> Any:  # Any: the tool's own JSON
        """An operation that calls a tool with `data`, a JSON object of arguments. Raises as `ctx.tool`."""
        run = self._run

        def work(branch: Branch) -> Awaitable[Any]:  # Any: as above
            if run.hooks is not None and (guarded := run.hooks.tool(branch, tool, data, pool)) is not None:
                return guarded
            return call(run, branch, "tool", tool, data=data, pool=pool)

        return await self.perform(name, work, key=key, group=group, order=order)

    async def agent(
        self, name: str, agent: Elsewhere, input: object, *, key: str = "", group: str = "", order: int = 0
    ) -> Any:  # Any: the agent's own JSON
        """An operation that asks an agent. Raises as `ctx.agent`."""
        run = self._run
        known = run.functions.agent(agent.name)
        data = encode(input, "input") if known is None else known.encode_input(input)

        def work(branch: Branch) -> Awaitable[Any]:  # Any: as above
            return call(run, branch, "agent", agent.name, data=data, pool=agent.pool)

        return await self.perform(name, work, key=key, group=group, order=order)

    def _create(self, name: str, key: str, work: Work, group: str, order: int) -> Operation:
        self._counts[name, key] += 1
        # Seven hexadecimal digits are nine decimal ones at most: a number, as all places in a program are.
        number = int(fingerprint(name, key, str(self._counts[name, key]), digits=7), 16)
        while (label := f"{order}.{number}") in self._labels:
            number += 1
        self._labels.add(label)
        self._unclaimed.discard(label)
        return Operation(name, label, work, group, self.loop.create_future())

    # ---- the host's side -----------------------------------------------------------------------------------

    async def run_to_end(self, code: Coroutine[Any, Any, Any]) -> Any:  # Any: the code's own result
        """Run the code to its end in the branch that awaits this."""
        context = contextvars.copy_context()
        context.run(_HERE.set, self)
        root = self.loop.create_task(code, name=self._run.flow.label, context=context)
        try:
            await self._advance(root)
        finally:
            self._over = True
            await self._close(root)
        if root.cancelled():
            raise RuntimeError("the code was cancelled from within, by nobody of the run")
        error = root.exception()
        if isinstance(error, SystemExit):
            raise RuntimeError(f"the code called sys.exit({error.code!r})")
        return root.result()

    async def _advance(self, root: asyncio.Task[Any]) -> None:  # Any: the code's own result
        flow = self._run.flow
        while True:
            await self.loop.run_ready()
            flow.check_going()
            self._look_at_timers()
            self._forget_cancelled()
            if root.done():
                self._check_claimed()
                return
            self._begin([each for each in self._created if each.label in self._known])
            await flow.settled(self._prefix)
            flow.check_going()
            self._take_ended()
            if self._ended:
                self._hand_in(min(self._ended, key=lambda each: (each.ended_ms, each.label)))
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

    def _look_at_timers(self) -> None:
        """Have a step for the timer that is due first, and none for those that are cancelled or over."""
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
                # One of a group goes on with the others.
                if branch is not None and all(each.future.cancelled() for each in others):
                    self._run.flow.stop_branch(branch, "nobody waits for the operation any more")
        self._open = [each for each in self._open if not each.stopped]

    def _begin(self, operations: list[Operation]) -> None:
        """Begin these operations; those of a group that are one question each wait together."""
        run = self._run
        together: dict[str, list[tuple[Operation, Asked[Any]]]] = {}  # Any: steps of all result types
        for operation in operations:
            branch = Branch(f"{self._prefix}{operation.label}.", self._branch.now_ms, self._branch)
            try:
                part = operation.work(branch)
            except Exception as error:
                # What cannot be asked, such as arguments without JSON, is the code's error, at every replay.
                operation.future.set_exception(error)
                continue
            self._open.append(operation)
            if operation.group and isinstance(part, Asked):
                together.setdefault(operation.group, []).append((operation, part))
                continue
            operation.branch = branch
            operation.outcome = run.flow.help(as_coroutine(part), branch, self._wait)
        for members in together.values():
            # Its own steps have no use for it: a gather of steps takes no place.
            branch = Branch(f"{self._prefix}{members[0][0].label}.", self._branch.now_ms, self._branch)
            helper = run.flow.help(self._all_of(members, branch), branch, self._wait)
            for operation, _ in members:
                operation.branch = branch
                operation.outcome = helper
        self._created = [each for each in self._created if each not in operations]

    async def _all_of(self, members: list[tuple[Operation, Asked[Any]]], branch: Branch) -> dict[str, Any]:
        """Outcomes by the operations' labels: results, or exceptions to be raised."""
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
                # About the attempt of the whole run, and none of the code's business.
                raise error
            operation.ended_ms = operation.ended_ms or operation.branch.now_ms
            self._ended.append(operation)
        self._open = [each for each in self._open if each not in self._ended and not each.stopped]

    def _hand_in(self, operation: Operation) -> None:
        """Let the code have one result, at the time at which it was stored."""
        self._ended.remove(operation)
        outcome, branch, future = operation.outcome, operation.branch, operation.future
        assert outcome is not None
        assert branch is not None
        self._branch.saw(operation.ended_ms)
        if branch.context is not None:
            join(self._run, self._branch, branch)
        seconds = self._branch.now_ms / 1000
        if operation.timer is not None:
            seconds = max(seconds, operation.timer.when())
        # Timers that were due before go first.
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
        """Block this branch: where all others wait too, the run is suspended."""
        elapsing = self._elapse_here()
        try:
            await self._run.flow.next_end(self._wait)
        finally:
            if elapsing is not None:
                elapsing.cancel()

    def _elapse_here(self) -> asyncio.TimerHandle | None:
        """While the turn goes on, the broker does not know of a new timer: this process measures it."""
        timers = [each for each in self._open if each.timer is not None]
        if not timers:
            return None
        first = min(timers, key=lambda each: each.timer.when() if each.timer is not None else 0.0)
        assert first.timer is not None
        return self._outer.call_later(max(0.0, first.timer.when() - self.loop.time()), self._elapsed, first)

    def _elapsed(self, operation: Operation) -> None:
        branch = operation.branch
        if branch is None or not self._run.flow.active:  # the run is suspended: the broker's timer counts
            return
        asked = (each for wait in self._run.flow.waits for each in wait.missing.values())
        step = next((each for each in asked if each.id.startswith(branch.prefix)), None)
        if step is None or step.id in self._run.journal.pending:
            return

        async def note() -> None:
            run = self._run
            run.deliver(step.id, await run.record(step, COMPLETED, b"null"))

        self._run.flow.help(note(), None, Wait())

    # ---- ends ----------------------------------------------------------------------------------------------

    def _check_claimed(self) -> None:
        """Park the run where the journal holds operations that the code has not asked for."""
        if not self._unclaimed:
            return
        held = sorted(self._unclaimed)
        asked = ", ".join(sorted({each.name for each in self._open if each.timer is None})) or "nothing more"
        raise self._run.flow.abort(
            Divergence(
                f"step {self.id} of run {self._run.run_id}: the journal holds the operations {', '.join(held)}, and "
                f"the code asks for {asked}: it has changed since the run began; roll back or fix it, then redrive"
            )
        )

    async def _close(self, root: asyncio.Task[Any]) -> None:  # Any: the code's own result
        """End what is left: tasks of the code, by CancelledError; operations that nobody waits for any more."""
        loop, flow = self.loop, self._run.flow
        try:
            if not flow.stopping:
                for branch in {each.branch for each in self._open if each.branch is not None}:
                    flow.stop_branch(branch, "the code has ended")
            # Twice: what a task starts while it is being cancelled is cancelled too.
            for _ in range(2):
                for task in tuple(loop.tasks):
                    task.cancel()
                await loop.run_ready()
                if loop.threads and loop.tasks:
                    await loop.next_notice(END_SECONDS)
                    await loop.run_ready()
            await flow.settled(self._prefix)
        finally:
            loop.close()
            for task in tuple(loop.tasks):
                log.warning("%s: %s did not end when it was cancelled and is left behind", flow.label, task.get_name())
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch: it is said here
            if root.done() and not root.cancelled():
                root.exception()


_HERE: contextvars.ContextVar[Foreign] = contextvars.ContextVar("weft_foreign")


def foreign_here() -> Foreign | None:
    """The host of the running code; None outside, and inside the steps that it performs."""
    foreign = _HERE.get(None)
    try:
        return foreign if foreign is not None and asyncio.get_running_loop() is foreign.loop else None
    except RuntimeError:  # a thread
        return None


async def host(ctx: AgentContext, code: Callable[[Foreign], Coroutine[Any, Any, Any]]) -> Any:  # Any: the code's own
    """Run `code(foreign)` in tasks of its own, with operations by `foreign.perform`, and give its result."""
    foreign = Foreign(ctx)
    return await foreign.run_to_end(code(foreign))
