"""Steps that others perform: tools, agents, engines, humans and timers, and those that nobody waits for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from runtime_core import codec
from runtime_core.consumer.effects import Asking, Call, Publish, Question, Send, Spend, Timer
from runtime_core.errors import InvalidInput, LimitExceeded
from runtime_core.ids import task_of_message
from runtime_core.record.usage import Usage
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


class Outgoing(Step[T]):
    """Done at once where the journal does not hold it; else nothing happens."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, T]:  # Any: asyncio's protocol
        self.run.flow.branch_here(self)
        self.perform()
        yield from room(self.run)
        return self.result()

    def result(self) -> T:
        """What the code gets: nothing, where there is nothing to say."""
        return None  # type: ignore[return-value]  # T is None but for steps that say otherwise

    def perform(self) -> None:
        if self.run.find(self) is None:
            self.run.flow.check_going()
            self.go()
            self.run.keep(self)

    def go(self) -> None:
        raise NotImplementedError


def room(run: Run) -> Generator[Any, None, None]:  # Any: asyncio's protocol
    """Wait until the broker has taken enough of what the run has emitted; mostly it has, and nothing is awaited."""
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
    """A report of what was used, which the commit of this turn adds to the task's usage."""

    __slots__ = ("usage",)

    def __init__(self, run: Run, branch: Branch, usage: Usage) -> None:
        super().__init__(run, branch, "usage", next(iter(usage.models), "usage"), "", usage.to_json())
        self.usage = usage

    def go(self) -> None:
        self.run.spends.append(Spend(self.id, self.digest, self.usage))
        self.run.rows.add(self, usage=self.usage.amounts)


PIECE_BYTES = 1024
"""What a write costs besides its data: a task, its command and its reply."""
RUN_BYTES = 1024 * 1024
"""How much one run may have on its way before `ctx.emit` waits."""
RUN_MAX_BYTES = 8 * RUN_BYTES
"""How much one run may have on its way through calls that cannot wait, such as `ModelCall.stream`."""
PROCESS_BYTES = 32 * RUN_BYTES
"""How much all runs of a process may have on its way before `ctx.emit` waits."""


class Outflow:
    """Counts the bytes on their way, of a run or of the whole process, and lets writers wait. Belongs to one loop."""

    __slots__ = ("_limit", "_waiting", "bytes")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self.bytes > self._limit

    def begin(self, size: int) -> None:
        self.bytes += size

    def end(self, size: int) -> None:
        self.bytes -= size
        while self._waiting and not self.full:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)

    async def room(self) -> None:
        """Wait until less than the limit is on its way."""
        while self.full:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
