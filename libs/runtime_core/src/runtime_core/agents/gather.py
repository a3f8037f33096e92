"""`ctx.gather`: several steps and branches at once, waited for together."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Generator, Sequence
from typing import TYPE_CHECKING, Any

from runtime_core.agents.asked import Asked
from runtime_core.agents.branch import Branch, Wait
from runtime_core.agents.local import LocalStep
from runtime_core.agents.outgoing import Outgoing, room
from runtime_core.agents.run_context import join
from runtime_core.agents.step import Step, result_of
from runtime_core.errors import Outcome

if TYPE_CHECKING:
    from runtime_core.agents.run import Run


class Gather:
    """Awaitable; gives the results in the order of its parts.

    Steps keep their own ids. A coroutine becomes a branch: as part i (from 0) of the gather at place k, its
    steps are `k.i.1`, `k.i.2`, … A gather of steps alone takes no place.

    All parts are waited for, also when one has failed; then the first error in the order of the parts is
    raised. (Which error comes first by the clock differs between an execution and its replay.) With
    `return_exceptions` errors are results; Retry and Reject are still raised.
    """

    __slots__ = ("_parts", "_return_exceptions", "_tasks", "_wait", "id", "run")

    def __init__(
        self,
        run: Run,
        branch: Branch,
        parts: Sequence[Awaitable[Any]],  # Any: each part has a result type of its own
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

    def _take_place(self, branch: Branch) -> None:
        run = self.run
        for place, part in enumerate(self._parts):
            if asyncio.isfuture(part):
                raise run.flow.misuse(
                    f"part {place} of ctx.gather is an asyncio {type(part).__name__}: "
                    "give it the step or the coroutine itself, so that a replay finds its steps again"
                )
        if not all(isinstance(part, (Step, Gather)) for part in self._parts):
            self.id = run.take_id(branch)
            run.check_place(self.id, "gather")
            run.unawaited[self.id] = self

    def __await__(self) -> Generator[Any, None, list[Any]]:  # Any: see `parts`
        run = self.run
        branch = run.flow.branch_here(self)
        if self._wait is None:
            self._start(Wait(), branch)
        elif not self._wait.over():
            raise run.flow.misuse("a ctx.gather is awaited by two branches at once: await it in one of them")
        wait = self._wait
        assert wait is not None
        if not wait.over():
            yield from run.flow.wait(wait)
        yield from room(run)
        return self._results(branch)

    def _start(self, wait: Wait, branch: Branch) -> None:
        """Ask the journal for each part and begin what is not there. `wait` collects what is missing."""
        run = self.run
        run.flow.check_going()
        self._wait = wait
        for place, part in enumerate(self._parts):
            self._start_part(place, part, wait, branch)
        # Last: what a failure leaves unstarted is closed with the run.
        run.unawaited.pop(self.id, None)

    def _start_part(self, place: int, part: Awaitable[Any], wait: Wait, branch: Branch) -> None:  # Any: see parts
        run = self.run
        match part:
            case Asked():
                if run.find(part) is None:
                    part.carry(branch)
                    wait.missing[part.id] = part
            case LocalStep():
                if run.find(part) is None:
                    self._tasks[place] = run.flow.help(part.perform(), None, wait), None
            case Outgoing():
                part.perform()
            case Gather():
                if part._wait is None:
                    part._start(wait, branch)
                elif not part._wait.over():
                    raise run.flow.misuse("a ctx.gather is part of two others at once")
            case _:
                helper = Branch(f"{self.id}.{place}.", branch.now_ms, branch)
                self._tasks[place] = run.flow.help(as_coroutine(part), helper, wait), helper

    def close(self) -> None:
        """Close the coroutines that will not be started any more: Python warns of them else."""
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
        if isinstance(part, Step):
            if task is not None:
                task.result()  # raises Retry and Reject, which no journal holds
            return result_of(part, self.run.found(part), branch)
        assert task is not None
        if helper is not None:
            branch.saw(helper.now_ms)
            if helper.context is not None:
                join(self.run, branch, helper)
        return task.result()


def as_coroutine(part: Awaitable[Any]) -> Coroutine[Any, Any, Any]:  # Any: see Gather
    """What a branch runs, from a coroutine or anything else that can be awaited."""
    if inspect.iscoroutine(part):
        return part

    async def awaited() -> Any:  # Any: see Gather
        return await part

    return awaited()
