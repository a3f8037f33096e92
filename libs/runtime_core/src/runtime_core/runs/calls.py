"""Steps that others answer: tools, agents, engines, humans and timers. Approvals are questions with three answers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from runtime_core import codec
from runtime_core.consumer.effects import Asking, Call, Question, Timer
from runtime_core.errors import InvalidInput
from runtime_core.runs.scheduler import Wait
from runtime_core.runs.sharing import snapshot_of
from runtime_core.runs.step import Step, T, from_json, result_of

if TYPE_CHECKING:
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch


class Asked(Step[T]):
    """Asked for by the commit of the turn that first waits for it; the run is suspended until its result."""

    __slots__ = ("request",)
    request: Asking

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


VERDICT = "verdict"
"""What such a question expects, in its event on the wire."""
VERDICTS = ("approve", "deny", "edit")


@dataclass(frozen=True, slots=True)
class Approval:
    """A human's verdict."""

    verdict: str
    """`approve`, `deny` or `edit`."""
    value: Any  # Any: JSON
    """What was edited; for the other verdicts what the human was shown."""
    reason: str = ""

    @property
    def approved(self) -> bool:
        """Whether it may be done, as it was or as it was edited."""
        return self.verdict != "deny"

    @property
    def denied(self) -> bool:
        return self.verdict == "deny"


class ApprovalQuestion(Asked[Approval]):
    """The step of a question whose answer must be a verdict; the broker refuses any other."""

    __slots__ = ()

    def __init__(
        self, run: Run, branch: Branch, prompt: str, *, data: bytes, timeout_ms: int | None, default: bool | None
    ) -> None:
        # In the place of a key, as for other questions: those with other terms have another digest.
        super().__init__(run, branch, "human", prompt, f"{VERDICT} {timeout_ms} {default}", data)
        answer = None if default is None else codec.encode(default)
        self.request = Question(
            self.id, self.digest, prompt, data, timeout_ms=timeout_ms, default=answer, expects=VERDICT
        )

    def read(self, payload: bytes) -> Approval:
        return approval_of(from_json(payload), from_json(self.data))


def approval_of(answer: object, shown: object) -> Approval:
    """What an answer stands for: true, false, or `{"verdict", "value"?, "reason"?}`. Raises InvalidInput."""
    if isinstance(answer, bool):
        return Approval("approve" if answer else "deny", shown)
    if isinstance(answer, dict) and answer.get("verdict") in VERDICTS:
        verdict = answer["verdict"]
        return Approval(verdict, answer.get("value") if verdict == "edit" else shown, str(answer.get("reason") or ""))
    raise InvalidInput("value", f"{codec.quoted(answer)} is no verdict: true, false or an object with `verdict`")


def checked_default(default: object, field: str) -> bool | None:
    """The answer at the deadline; None where there is none. Raises InvalidInput(field)."""
    if isinstance(default, EllipsisType):
        return None
    if isinstance(default, bool):
        return default
    if default in ("approve", "deny"):
        return default == "approve"
    raise InvalidInput(field, f"{codec.quoted(default)} is neither True nor False: they approve and deny")
