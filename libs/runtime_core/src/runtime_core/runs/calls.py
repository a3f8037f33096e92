"""Steps that others perform (tools, agents, engines, humans, timers), and steps that nobody waits for.

For each kind: first what it requests from the commit, with its part of it, then the step that code awaits.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core import codec
from runtime_core.bus.topics import published, sent
from runtime_core.consumer.effects import COMPLETED, WAKE, JournaledStep, StepRequest
from runtime_core.errors import InvalidInput, InvalidResult, LimitExceeded
from runtime_core.ids import fingerprint, instance_address, partition_of, step_digest, task_of_message
from runtime_core.record.step import Usage
from runtime_core.runs.journal import from_json, packed_now
from runtime_core.runs.scheduler import Wait
from runtime_core.runs.sharing import snapshot_of, with_member, with_snapshot, without_snapshot
from runtime_core.runs.step import Step, T, result_of
from runtime_core.telemetry.trace_context import restated
from runtime_core.wire.commands import MAX_SECONDS
from runtime_core.wire.envelope import rfc3339

if TYPE_CHECKING:
    from runtime_core.bus.connection import Argument
    from runtime_core.consumer.effects import CommittedTurn
    from runtime_core.declare.schema import Reader
    from runtime_core.runs.run import Run
    from runtime_core.runs.scheduler import Branch

_PATCH = re.compile(r"[A-Za-z0-9_\-]{1,100}")
VERDICT = "verdict"
"""What an approval expects, in its event on the wire."""
VERDICTS = ("approve", "deny", "edit")


class Call(msgspec.Struct):
    """A call of a tool, an agent or an engine. The run waits for its result."""

    kind: str
    """`tool`, `agent`, `ray` or `spark`: the work stream's name."""
    step: str
    name: str
    data: bytes
    """JSON: the arguments of a tool or engine function (an object), or the input of an agent."""
    digest: str
    wait: str = WAKE
    key: str = ""
    """The instance key of an agent; empty: each run has its own instance."""
    pool: str = ""
    snapshot: bytes = b""
    """The context of the calling branch (JSON); empty if the code has not used it."""
    timeout_ms: int = 0
    """The time limit of a request to another partition; 0: the namespace's default."""
    limits: Sequence[Sequence[str]] = ()
    """The tools that the task and the calling agent allow, if the agent has a list of its own."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        delivery = turn.delivery
        context = restated(delivery.context, delivery.trace) if delivery.trace else delivery.context
        if self.snapshot:
            context = with_snapshot(context, self.snapshot)
        elif context and self.kind != "agent":
            # Only agents get the snapshot of the calling run's context.
            context = without_snapshot(context)
        if self.limits:
            context = with_member(context, "tools", self.limits)
        return (
            "c", self._target(turn), self.step, self.name, self.key, self.digest, self.wait, self.data, context,
        )  # fmt: skip

    def _target(self, turn: CommittedTurn) -> str:
        """Return the call's work stream, or the task that calls the instance in another partition."""
        there = _elsewhere(self.name, self.key, turn) if self.kind == "agent" else None
        if there is None:
            return turn.stream_of(self.kind, self.name, self.pool)
        task = fingerprint(turn.delivery.task, turn.delivery.run, self.step, digits=32)
        return f"@{there}:{task}:{self.timeout_ms}" if self.timeout_ms else f"@{there}:{task}"


@dataclass(slots=True)
class Timer:
    """A step that the broker itself answers when it is due."""

    step: str
    digest: str
    after_ms: int
    wait: str = WAKE

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        return ("t", self.step, self.digest, self.wait, self.after_ms, COMPLETED, b"null")


@dataclass(slots=True)
class Question:
    """A step that a human or another program answers with `weft.task.signal`."""

    step: str
    digest: str
    prompt: str
    data: bytes
    """JSON that is shown with the question."""
    wait: str = WAKE
    timeout_ms: int | None = None
    default: bytes | None = None
    """The answer (JSON) at the deadline; None: the deadline is an error."""
    expects: str = ""
    """`verdict`: the broker accepts only a verdict. Empty: it accepts any JSON."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        # `expects` comes first: `signal.lua` looks for it there.
        request: dict[str, object] = {"expects": self.expects} if self.expects else {}
        request |= {
            "task_id": turn.delivery.task,
            # With random digits, so that nobody can guess it. The broker keeps the committed one.
            "request_id": f"{turn.delivery.run}:{self.step}-{secrets.token_hex(8)}",
            "prompt": self.prompt,
            "data": msgspec.Raw(self.data or b"null"),
        }
        if self.timeout_ms is not None:
            request["deadline"] = rfc3339(time.time() * 1000 + self.timeout_ms)
        if self.default is not None:
            request["default"] = msgspec.Raw(self.default)
        return (
            "q", self.step, self.digest, self.wait, msgspec.json.encode(request),
            "" if self.timeout_ms is None else self.timeout_ms,
            b"" if self.default is None else self.default,
        )  # fmt: skip


@dataclass(slots=True)
class Receive:
    """A step that waits for a message to the task, which `TaskHandle.send` or `weft task send` sends."""

    step: str
    digest: str
    name: str
    wait: str = WAKE
    timeout_ms: int | None = None
    default: bytes | None = None
    """The result (JSON) at the deadline; None: the deadline is an error."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        return (
            "m", self.step, self.digest, self.wait, self.name, "" if self.timeout_ms is None else self.timeout_ms,
            b"" if self.default is None else self.default,
        )  # fmt: skip


@dataclass(slots=True)
class Send:
    """A message to an agent. Nobody waits for it: the commit starts a separate task."""

    step: str
    agent: str
    key: str
    data: bytes
    digest: str = ""
    """The commit journals the step with it, so that a replay does not send again."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        delivery = turn.delivery
        there = _elsewhere(self.agent, self.key, turn)
        if there is not None:
            agent = f"@{there}:{self.agent}"
        else:
            # `@` means another partition, and no declared name begins with it: mark the name as unknown.
            agent = f"?{self.agent}" if self.agent.startswith("@") else self.agent
        context = restated(sent(without_snapshot(delivery.context)), delivery.trace)
        task = task_of_message(delivery.task, delivery.run, self.step)
        return ("s", task, agent, self.key, self.data, context, self.step, self.digest)


@dataclass(slots=True)
class Publish:
    """A message to every agent that subscribes to a topic, each in a separate task."""

    step: str
    topic: str
    key: str
    """The topic's source: the instance key of each receiving agent. Empty: a new instance."""
    data: bytes
    digest: str = ""
    """As in `Send`."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        delivery = turn.delivery
        # With several partitions, the relay finds the agents' partitions.
        topic = self.topic if turn.partitions == 1 else f"@{self.topic}"
        sender = delivery.instance
        context = published(without_snapshot(delivery.context), self.topic, sender, delivery.trace)
        task = task_of_message(delivery.task, delivery.run, self.step)
        return ("p", task, topic, self.key, self.data, context, sender, self.step, self.digest)


@dataclass(slots=True)
class Spend:
    """A step's usage. The commit adds it to the task's usage and journals the step, so that it counts once."""

    step: str
    digest: str
    usage: Usage

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        return ("u", self.step, self.digest, self.usage.to_json())


def _elsewhere(agent: str, key: str, turn: CommittedTurn) -> int | None:
    """Return the partition of an agent's instance; None if it is the turn's own."""
    if not key or turn.partitions == 1:
        return None
    there = partition_of(instance_address(agent, key), turn.partitions)
    return None if there == turn.delivery.partition else there


class RequestStep(Step[T]):
    """A step that the commit requests at the end of the turn. The run is suspended until its result."""

    __slots__ = ("request",)
    request: StepRequest

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        run = self.run
        branch = run.flow.branch_here(self)
        value = run.find(self)
        if value is None:
            if self.kind == "agent":
                self.carry(branch)
            wait = Wait()
            wait.missing[self.id] = self
            yield from run.flow.wait(wait)
            value = run.find(self)
            assert value is not None, self
        return result_of(self, value, branch)

    def carry(self, branch: Branch) -> None:
        """Send the calling branch's context with a new call of an agent, if the code has used it."""
        request = self.request
        if isinstance(request, Call) and request.kind == "agent" and self.id not in self.run.journal.pending:
            request.snapshot = snapshot_of(self.run, branch)


class TypedCall(RequestStep[T]):
    """A call whose result is read into the return type of the called function."""

    __slots__ = ("reader",)
    reader: Reader

    def read(self, payload: bytes) -> T:
        result: T = read_result(self.reader, self.kind, self.name, payload)
        return result


def read_result(reader: Reader, kind: str, name: str, payload: bytes) -> Any:  # Any: the function's own result
    """Return a result (JSON) as the return type of its function. Raises InvalidResult if it does not fit."""
    try:
        return reader.decode(payload or b"null", "result")
    except InvalidInput as error:
        raise InvalidResult(
            error.field,
            f"{error.message}; it does not fit the return type of {kind} {name!r}: "
            "return a type that can be read from its own JSON, or call it by name to get the JSON",
        ) from None


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
    reader: Reader | None = None,
) -> RequestStep[Any]:  # Any: whatever the called function returns
    """Return a call of a tool, an agent or a function on a remote engine. `kind` is the work stream's name.

    `step_class` is the class of the step; None: `RequestStep`. `reader` reads the result; None: it stays plain JSON.
    """
    step: RequestStep[Any]
    if reader is None:
        step = (step_class or RequestStep)(run, branch, kind, name, key, data)
    else:
        typed: TypedCall[Any] = TypedCall(run, branch, kind, name, key, data)
        typed.reader = reader
        step = typed
    limits = run.limits_of_tools() if kind == "tool" and run.own_tools else ()
    step.request = Call(kind, step.id, name, data, step.digest, key=key, pool=pool, limits=limits)
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


def receive(
    run: Run, branch: Branch, name: str, *, timeout_ms: int | None, default: bytes | None
) -> RequestStep[Any]:  # Any: the message is whatever JSON was sent
    """Return a wait for a message."""
    step: RequestStep[Any] = RequestStep(run, branch, "receive", name, f"{timeout_ms} {default!r}", b"")
    step.request = Receive(step.id, step.digest, name, timeout_ms=timeout_ms, default=default)
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
        self.perform(self.run.flow.branch_here(self))
        yield from room(self.run)
        return self.result()

    def result(self) -> T:
        """Return the step's result; None for most kinds."""
        return None  # type: ignore[return-value]  # T is None but for steps that say otherwise

    def perform(self, branch: Branch) -> None:
        """Perform it in this branch."""
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
    except Exception as error:
        raise run.flow.abandon(error) from error
    run.flow.check_going()


class Emit(Outgoing[None]):
    """A piece of output (text or any JSON value). Its name is `emit`, or `chunk` for a piece of a longer output.

    It has a place like a step, but is none: the journal does not hold it, and no limit of steps counts it.
    """

    __slots__ = ("_performed", "place")

    def __init__(self, run: Run, branch: Branch, data: bytes, name: str = "emit") -> None:
        # Not Step's: it takes a step and computes a digest.
        self.run = run
        self.kind, self.name, self.key, self.data, self.digest = "emit", name, "", data, ""
        branch.count += 1
        self.place = branch.count
        self.id = f"{branch.prefix}{branch.count}"
        self.order = run.steps_taken
        self._performed = False
        run.wait_for_await(self)

    def perform(self, branch: Branch) -> None:
        run = self.run
        run.unawaited.pop(self.id, None)
        if self._performed:
            return
        run.flow.check_going()
        self._performed = True
        run.emit(self, branch)


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


class Patch(Outgoing[None]):
    """The mark of a patch that a branch takes. It has its own id, so it moves no step to another place."""

    __slots__ = ()

    def __init__(self, run: Run, name: str, mark: str) -> None:
        self.run, self.kind, self.name, self.key, self.data = run, "patch", name, "", b""
        self.digest = step_digest("patch", name, "", b"")
        self.id = mark
        self.order = run.steps_taken

    def go(self) -> None:
        mark = JournaledStep(self.id, packed_now(self.digest), self.kind, self.name)
        self.run.port.mark(mark, self.run.journal.values)
        self.run.journaled.append(mark)
        self.run.rows.add(self)


def checked_patch(name: object) -> str:
    """Return the name of a patch. Raises InvalidInput."""
    if not isinstance(name, str) or _PATCH.fullmatch(name) is None:
        raise InvalidInput("name of ctx.patched", f"{name!r} is not a name: use 1 to 100 letters, digits, - or _")
    return name


def milliseconds(delay: float | timedelta, field: str, least: int = 0) -> int:
    """Return a delay in milliseconds; one below 0 counts as 0. Raises InvalidInput(field)."""
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    try:
        found = max(0, round(seconds * 1000))
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(field, f"{delay!r} is not a number of seconds or a timedelta") from None
    if found < least:
        raise InvalidInput(field, f"{delay!r} must be above 0")
    if found > MAX_SECONDS * 1000:
        raise InvalidInput(field, f"{delay!r} is more than {MAX_SECONDS} seconds")
    return found


def checked_text(value: object, field: str) -> str:
    """Return the value if it is a string. Raises InvalidInput(field)."""
    if not isinstance(value, str):
        raise InvalidInput(field, f"{codec.quoted(value)} is not a string: pass other values as data=")
    return value
