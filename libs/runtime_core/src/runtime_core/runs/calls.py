"""Steps that others perform (tools, agents, engines, humans, timers), and steps that nobody waits for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from runtime_core import codec
from runtime_core.consumer.effects import Call, Publish, Question, Send, Spend, StepRequest, Timer
from runtime_core.errors import InvalidInput, LimitExceeded
from runtime_core.ids import task_of_message
from runtime_core.record.step import Usage
from runtime_core.runs.journal import from_json
from runtime_core.runs.scheduler import Wait
from runtime_core.runs.sharing import snapshot_of
from runtime_core.runs.step import Step, T, result_of

if TYPE_CHECKING:
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch

VERDICT = "verdict"
"""What an approval expects, in its event on the wire."""
VERDICTS = ("approve", "deny", "edit")


class RequestStep(Step[T]):
    """A step that the commit requests at the end of the turn. The run is suspended until its result."""

    __slots__ = ("request",)
    request: StepRequest

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
        """Send the calling branch's context with a new call of an agent, if the code has used it."""
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
    step_class: type[RequestStep[Any]] | None = None,
) -> RequestStep[Any]:  # Any: whatever JSON the called function returns
    """Return a call of a tool, an agent or a function on a remote engine. `kind` is the work stream's name.

    `step_class` is the class of the step; None: `RequestStep`.
    """
    step: RequestStep[Any] = (step_class or RequestStep)(run, branch, kind, name, key, data)
    step.request = Call(kind, step.id, name, data, step.digest, key=key, pool=pool)
    return step


def sleep(run: Run, branch: Branch, after_ms: int) -> RequestStep[None]:
    """Return a wait of `after_ms` milliseconds from the commit that requests it."""
    step: RequestStep[None] = RequestStep(run, branch, "timer", "sleep", "", b"%d" % after_ms)
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
) -> RequestStep[Any]:  # Any: the answer is whatever JSON the human's client sends
    """Return a question to a human or another program."""
    # Used as the key, so that questions with other terms have another digest.
    terms = f"{timeout_ms} {default!r}"
    step: RequestStep[Any] = RequestStep(run, branch, "human", prompt, terms, data)
    step.request = Question(step.id, step.digest, prompt, data, timeout_ms=timeout_ms, default=default)
    return step


@dataclass(frozen=True, slots=True)
class Approval:
    """A human's verdict."""

    verdict: str
    """`approve`, `deny` or `edit`."""
    value: Any  # Any: JSON
    """The edited value; for other verdicts the value that the human saw."""
    reason: str = ""

    @property
    def approved(self) -> bool:
        """Whether to continue, with the original or the edited value."""
        return self.verdict != "deny"

    @property
    def denied(self) -> bool:
        return self.verdict == "deny"


class ApprovalQuestion(RequestStep[Approval]):
    """A question whose answer must be a verdict. The broker refuses any other answer."""

    __slots__ = ()

    def __init__(
        self, run: Run, branch: Branch, prompt: str, *, data: bytes, timeout_ms: int | None, default: bool | None
    ) -> None:
        # Used as the key, as for other questions: other terms give another digest.
        super().__init__(run, branch, "human", prompt, f"{VERDICT} {timeout_ms} {default}", data)
        answer = None if default is None else codec.encode(default)
        self.request = Question(
            self.id, self.digest, prompt, data, timeout_ms=timeout_ms, default=answer, expects=VERDICT
        )

    def read(self, payload: bytes) -> Approval:
        return approval_of(from_json(payload), from_json(self.data))


def approval_of(answer: object, shown: object) -> Approval:
    """Return the verdict in an answer: true, false, or `{"verdict", "value"?, "reason"?}`. Raises InvalidInput."""
    if isinstance(answer, bool):
        return Approval("approve" if answer else "deny", shown)
    if isinstance(answer, dict) and answer.get("verdict") in VERDICTS:
        verdict = answer["verdict"]
        return Approval(verdict, answer.get("value") if verdict == "edit" else shown, str(answer.get("reason") or ""))
    raise InvalidInput(
        "value", f"{codec.quoted(answer)} is not a verdict: send true, false or an object with `verdict`"
    )


def checked_default(default: object, field: str) -> bool | None:
    """Return the answer at the deadline; None if there is none. Raises InvalidInput(field)."""
    if isinstance(default, EllipsisType):
        return None
    if isinstance(default, bool):
        return default
    if default in ("approve", "deny"):
        return default == "approve"
    raise InvalidInput(field, f"{codec.quoted(default)} is neither True (approve) nor False (deny)")


class Outgoing(Step[T]):
    """A step that nobody waits for. It is performed at once, unless the journal holds it."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:  # Any: asyncio's protocol
        self.run.flow.branch_here(self)
        self.perform()
        yield from room(self.run)
        return self.result()

    def result(self) -> T:
        """Return the step's result; None for most kinds."""
        return None  # type: ignore[return-value]  # T is None but for steps that say otherwise

    def perform(self) -> None:
        if self.run.find(self) is None:
            self.run.flow.check_going()
            self.go()
            self.run.keep(self)

    def go(self) -> None:
        raise NotImplementedError


def room(run: Run) -> Generator[Any, None, None]:  # Any: asyncio's protocol
    """Wait while too many of the run's bytes are unanswered by the broker."""
    waiting = run.port.room()
    if waiting is None:
        return
    try:
        yield from waiting.__await__()
    except LimitExceeded as error:
        raise run.flow.abort(error) from error
    run.flow.check_going()


class Emit(Outgoing[None]):
    """A delta (text or any JSON value) to the client."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, data: bytes) -> None:
        super().__init__(run, branch, "emit", "emit", "", data)

    def go(self) -> None:
        try:
            self.run.port.emit(self.id, self.digest, self.data)
        except Exception as error:
            raise self.run.flow.abandon(error) from error
        self.run.rows.add(self, output=self.data)


class SendStep(Outgoing[str]):
    """A message to an agent, sent by the commit that ends this turn."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, agent: str, key: str, data: bytes, digest: str = "") -> None:
        super().__init__(run, branch, "send", agent, key, data, digest)

    def result(self) -> str:
        """The id of the task that it starts."""
        return task_of_message(self.run.task_id, self.run.run_id, self.id)

    def go(self) -> None:
        self.run.sends.append(Send(self.id, self.name, self.key, self.data, self.digest))
        self.run.rows.add(self, input=self.data)


class PublishStep(Outgoing[None]):
    """A message to a topic, published by the commit that ends this turn."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, topic: str, source: str, data: bytes, digest: str = "") -> None:
        super().__init__(run, branch, "publish", topic, source, data, digest)

    def go(self) -> None:
        self.run.sends.append(Publish(self.id, self.name, self.key, self.data, self.digest))
        self.run.rows.add(self, input=self.data)


class Note(Outgoing[None]):
    """A row of kind `message` in the trajectory, written once."""

    __slots__ = ()

    def __init__(self, run: Run, branch: Branch, name: str, data: bytes) -> None:
        super().__init__(run, branch, "message", name, "", data)

    def go(self) -> None:
        try:
            self.run.port.note(self.id, self.digest, self.name)
        except Exception as error:
            raise self.run.flow.abandon(error) from error
        self.run.rows.add(self, input=self.data)


class SpendStep(Outgoing[None]):
    """A report of usage. This turn's commit adds it to the task's usage."""

    __slots__ = ("usage",)

    def __init__(self, run: Run, branch: Branch, usage: Usage) -> None:
        super().__init__(run, branch, "usage", next(iter(usage.models), "usage"), "", usage.to_json())
        self.usage = usage

    def go(self) -> None:
        self.run.spends.append(Spend(self.id, self.digest, self.usage))
        self.run.rows.add(self, usage=self.usage.amounts)
