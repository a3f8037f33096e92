"""Steps that others perform (tools, agents, engines, humans, timers), and steps that nobody waits for.

For each kind: first its request with its part of the commit, then the step that code awaits.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any

from runtime_core.consumer.effects import JournaledStep, StepRequest
from runtime_core.declare.schema import encode
from runtime_core.errors import AgentError, ConfigurationError, InvalidInput, InvalidResult, LimitExceeded
from runtime_core.runs.context_values import Conflict
from runtime_core.runs.effects import AnswerType, Approval, Call, Publish, Question, Receive, Send, Spend, Timer
from runtime_core.runs.journal import from_json, packed_now
from runtime_core.runs.output import OUTPUT
from runtime_core.runs.scheduler import Wait
from runtime_core.runs.shared_context import Context
from runtime_core.runs.step import DurableStep, T, name_and_pool, result_of
from runtime_core.wire import codec
from runtime_core.wire.commands import MAX_SECONDS
from runtime_core.wire.ids import checked_key, step_digest, task_of_message, uuid_of_place
from runtime_core.wire.step import Usage

if TYPE_CHECKING:
    from runtime_core.declare.schema import Reader
    from runtime_core.runs.execution import Execution
    from runtime_core.runs.scheduler import Branch

SESSION_AGENT = "weft.session"
_PATCH = re.compile(r"[A-Za-z0-9_\-]{1,100}")
VERDICT = "verdict"
"""What an approval expects, in its event on the wire."""
VERDICTS = ("approve", "deny", "edit")


class RequestStep(DurableStep[T]):
    """A step that the commit requests at the end of the turn. The run is suspended until its result."""

    __slots__ = ("request",)
    request: StepRequest

    def __await__(self) -> Generator[Any, None, T]:  # Any: what asyncio's futures yield to their task
        run = self.run
        branch = run.flow.branch_here(self)
        value = run.sought(self, branch)
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
            request.snapshot = self.run.snapshot_of(branch)


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
            "return a type that can be read from its own JSON, or call it by name to get the JSON. If the type has "
            "changed since the call, roll back, or accept both types, and redrive the task's dead letter",
        ) from None


def call(
    run: Execution,
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


def call_agent(run: Execution, branch: Branch, agent: object, input: object, *, key: str) -> RequestStep[Any]:
    """Return a call of an agent, given its function, class or name: see `ctx.agent`."""
    known = run.functions.agent(agent)
    name, pool = name_and_pool(run, "agent", known, agent)
    data = encode(input, "input") if known is None else known.encode_input(input)
    reader = None if known is None or isinstance(agent, str) else known.result_reader
    key = checked_key("key of ctx.agent", key)
    return call(run, branch, "agent", name, data=data, key=key, pool=pool, reader=reader)


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A request to the agent that keeps sessions."""

    merge: str = ""
    """Changes to merge (JSON of `Context.export_changes`); empty: only read."""


class Session:
    """The context that all tasks of a session share. The agent `weft.session` keeps it, one instance per session.

    `app.add_sessions()` declares that agent. `async with` forks the context. If the block ends without an error, it
    merges the fork's changes, after the changes that other tasks have merged meanwhile:

        async with ctx.session() as session:
            session.put("topic", topic)
    """

    def __init__(self, run: Execution) -> None:
        self._id = run.meta.get("session_id", "")
        if not self._id:
            raise InvalidInput("session_id", "this task has no session: submit it with a session_id")
        self._run = run
        self._fork: Context | None = None
        self.conflicts: list[Conflict] = []
        """Conflicts with changes of other tasks; filled at the end of the block."""

    async def __aenter__(self) -> Context:
        context = await self._ask(SessionRequest())
        run = self._run
        name = uuid_of_place(run.place(run.flow.branch_here("ctx.session"), "uuid"))
        self._fork = context.fork(task_id=run.task_id, agent=run.definition.name, name=str(name))
        return self._fork

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        fork = self._fork
        if kind is None and fork is not None and fork.changed:
            context = await self._ask(SessionRequest(merge=fork.export_changes().decode()))
            self.conflicts = [conflict for conflict in context.conflicts if conflict.branch == fork.id]

    async def _ask(self, request: SessionRequest) -> Context:
        try:
            branch = self._run.flow.branch_here("ctx.session")
            snapshot: str = await call_agent(self._run, branch, SESSION_AGENT, request, key=self._id)
        except AgentError as error:
            if error.type != "UnknownName":
                raise
            raise ConfigurationError(
                "no app in this namespace keeps sessions: call app.add_sessions() in one of them"
            ) from None
        return Context.restore(snapshot.encode())


def sleep(run: Execution, branch: Branch, after_ms: int) -> RequestStep[None]:
    """Return a wait of `after_ms` milliseconds from the commit that requests it."""
    step: RequestStep[None] = RequestStep(run, branch, "timer", "sleep", "", b"%d" % after_ms)
    step.request = Timer(step.id, step.digest, after_ms)
    return step


class QuestionStep(RequestStep[Any]):  # Any: of the question's type, or whatever JSON was sent
    """A question to a human or another program."""

    __slots__ = ("expected",)

    def __init__(
        self,
        run: Execution,
        branch: Branch,
        prompt: str,
        *,
        data: bytes,
        timeout_ms: int | None,
        default: bytes | None,
        expected: AnswerType | None = None,
        as_json: bool = False,
    ) -> None:
        """`as_json`: the result is the answer's JSON, even if it has a type."""
        # The terms are the key, so that questions with different terms have different digests. The type is not a term.
        super().__init__(run, branch, "human", prompt, f"{timeout_ms} {default!r}", data)
        self.expected = None if as_json else expected
        self.request = Question(
            self.id, self.digest, prompt, data, timeout_ms=timeout_ms, default=default,
            schema=b"" if expected is None else expected.schema,
        )  # fmt: skip

    def read(self, payload: bytes) -> Any:  # Any: see the class
        return from_json(payload) if self.expected is None else self.expected.read(payload)


def receive(
    run: Execution, branch: Branch, name: str, *, timeout_ms: int | None, default: bytes | None
) -> RequestStep[Any]:  # Any: the message is whatever JSON was sent
    """Return a wait for a message."""
    step: RequestStep[Any] = RequestStep(run, branch, "receive", name, f"{timeout_ms} {default!r}", b"")
    step.request = Receive(step.id, step.digest, name, timeout_ms=timeout_ms, default=default)
    return step


class ApprovalQuestion(RequestStep[Approval]):
    """A question whose answer must be a verdict. The broker refuses any other answer."""

    __slots__ = ()

    def __init__(
        self, run: Execution, branch: Branch, prompt: str, *, data: bytes, timeout_ms: int | None, default: bool | None
    ) -> None:
        # Used as the key, as for other questions: different terms give a different digest.
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


class Outgoing(DurableStep[T]):
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
        if self.run.find(self) is None:
            self.run.flow.check_going()
            self.go()
            self.run.keep(self)

    def go(self) -> None:
        raise NotImplementedError


def room(run: Execution) -> Generator[Any, None, None]:  # Any: asyncio's protocol
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

    It is not a step: the journal does not hold it, and no limit of steps counts it. Its id is `<step>e<number>`: the
    step of its branch that precedes it, and its number among the branch's pieces. So code may emit any number of pieces
    between two steps.
    """

    __slots__ = ("_performed", "after", "branch_name")

    def __init__(self, run: Execution, branch: Branch, data: bytes, name: str = "emit") -> None:
        # Not DurableStep's: it takes a step and computes a digest.
        self.run = run
        self.kind, self.name, self.key, self.data, self.digest = "emit", name, "", data, ""
        branch.pieces += 1
        self.id = f"{branch.prefix}{branch.count}e{branch.pieces}"
        self.after = branch.count
        self.branch_name = f"{branch.prefix}{OUTPUT}"
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
        run.emit(self)


class SendStep(Outgoing[str]):
    """A message to an agent, sent by the commit that ends this turn."""

    __slots__ = ()

    def __init__(self, run: Execution, branch: Branch, agent: str, key: str, data: bytes, digest: str = "") -> None:
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

    def __init__(self, run: Execution, branch: Branch, topic: str, source: str, data: bytes, digest: str = "") -> None:
        super().__init__(run, branch, "publish", topic, source, data, digest)

    def go(self) -> None:
        self.run.sends.append(Publish(self.id, self.name, self.key, self.data, self.digest))
        self.run.rows.add(self, input=self.data)


class Note(Outgoing[None]):
    """A row of kind `message` in the trajectory, written once."""

    __slots__ = ()

    def __init__(self, run: Execution, branch: Branch, name: str, data: bytes) -> None:
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

    def __init__(self, run: Execution, branch: Branch, usage: Usage) -> None:
        super().__init__(run, branch, "usage", next(iter(usage.models), "usage"), "", usage.to_json())
        self.usage = usage

    def go(self) -> None:
        self.run.spends.append(Spend(self.id, self.digest, self.usage))
        self.run.rows.add(self, usage=self.usage.amounts)


class Patch(Outgoing[None]):
    """The mark of a patch that a branch takes. It has its own id, so it moves no step to another place."""

    __slots__ = ()

    def __init__(self, run: Execution, name: str, mark: str) -> None:
        self.run, self.kind, self.name, self.key, self.data = run, "patch", name, "", b""
        self.digest = step_digest("patch", name, "", b"")
        self.id = mark
        self.order = run.steps_taken

    def go(self) -> None:
        mark = JournaledStep(self.id, packed_now(self.digest), self.kind, self.name)
        self.run.port.mark(mark, self.run.journal.values)
        self.run.journaled.append(mark)
        self.run.rows.add(self)


def patched(run: Execution, branch: Branch, name: str) -> bool:
    """Return `ctx.patched`: whether the branch takes this patch. Its first answer counts for the whole branch."""
    if name not in branch.patches:
        mark = run.patch(branch, name)
        if mark:
            Patch(run, name, mark).perform(branch)
        branch.patches = {**branch.patches, name: mark is not None}
    return branch.patches[name]


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
        hint = ": pass other values as data=" if field.startswith("prompt") else ""
        raise InvalidInput(field, f"{codec.quoted(value)} is not a string{hint}")
    return value


def check_awaitable(what: str, parts: Sequence[object]) -> None:
    """Raise InvalidInput for a part that is neither a step nor a coroutine."""
    for part in parts:
        if not hasattr(part, "__await__"):
            raise InvalidInput(
                f"part of {what}", f"{part!r} is neither a step nor a coroutine: pass ctx.tool(…) or work()"
            )


def checked_conf(conf: object) -> object:
    """Return the settings of tools. Raises InvalidInput unless they are an object."""
    if not isinstance(conf, Mapping):
        raise InvalidInput("conf of ctx.set_tools_conf", f"{conf!r} is not an object by tool name")
    return conf
