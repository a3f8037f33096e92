"""Steps that others answer: tools, agents, engines, humans, and the broker's own clock."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from runtime_core.agents.branch import Wait
from runtime_core.agents.run_context import snapshot_of
from runtime_core.agents.step import Step, T, result_of
from runtime_core.consumer.effects import Call, Question, Timer

if TYPE_CHECKING:
    from runtime_core.agents.branch import Branch
    from runtime_core.agents.run import Run


class Asked(Step[T]):
    """Asked for by the commit of the turn that first waits for it; the run is suspended until its result."""

    __slots__ = ("request",)
    request: Call | Timer | Question

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        run = self.run
        branch = run.flow.branch_here(self)
        value = run.find(self)
        if value is None:
            self.carry(branch)
            wait = Wait()
            wait.missing[self.id] = self
            yield from run.flow.wait(wait)
            value = run.found(self)
        return result_of(self, value, branch)

    def carry(self, branch: Branch) -> None:
        """Give an agent that is to be asked the context of the branch that asks, where that was used."""
        request = self.request
        if isinstance(request, Call) and request.kind == "agent" and self.id not in self.run.journal.pending:
            request.snapshot = snapshot_of(self.run, branch)


def call(
    run: Run,
    branch: Branch,
    kind: str,
    name: str,
    *,
    data: bytes,
    key: str = "",
    pool: str = "",
    made: type[Asked[Any]] | None = None,
) -> Asked[Any]:  # Any: whatever JSON the called function returns
    """A call of a tool, an agent or a function on a remote engine. `kind` is the work stream's name.

    `made` is the step's class, where that reads its result in its own way.
    """
    step: Asked[Any] = (made or Asked)(run, branch, kind, name, key, data)
    step.request = Call(kind, step.id, name, data, step.digest, key=key, pool=pool)
    return step


def sleep(run: Run, branch: Branch, after_ms: int) -> Asked[None]:
    """A wait of `after_ms` milliseconds, counted from the commit that asks for it."""
    step: Asked[None] = Asked(run, branch, "timer", "sleep", "", b"%d" % after_ms)
    step.request = Timer(step.id, step.digest, after_ms)
    return step


def question(
    run: Run,
    branch: Branch,
    prompt: str,
    *,
    data: bytes,
    timeout_ms: int | None,
    default: bytes | None,
) -> Asked[Any]:  # Any: the answer is whatever JSON the human's client sends
    """A question to a human or another program."""
    # In the place of a key, so that the digest tells questions with other terms apart.
    terms = f"{timeout_ms} {default!r}"
    step: Asked[Any] = Asked(run, branch, "human", prompt, terms, data)
    step.request = Question(step.id, step.digest, prompt, data, timeout_ms=timeout_ms, default=default)
    return step
