"""What a turn requests from its commit: a class for each kind of effect, with its part of the commit."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.bus.topics import published, sent
from runtime_core.consumer.effects import WAKE
from runtime_core.declare.declaration import place_of
from runtime_core.declare.manifest import value_check
from runtime_core.declare.schema import ValueReader
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.runs.shared_context import with_member, with_snapshot, without_snapshot
from runtime_core.telemetry.trace_context import restated
from runtime_core.wire import codec
from runtime_core.wire.envelope import rfc3339
from runtime_core.wire.ids import fingerprint, instance_address, partition_of, task_of_message

if TYPE_CHECKING:
    from runtime_core.bus.connection import Argument
    from runtime_core.consumer.effects import CommittedTurn
    from runtime_core.wire.step import Usage


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
    """The tools that the task and the calling agent allow, if the agent has its own list."""

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
        return ("t", self.step, self.digest, self.wait, self.after_ms)


@dataclass(frozen=True, slots=True)
class AnswerType:
    """The type of a question's answer. It is part of the code: the journal has the answer as JSON."""

    value: ValueReader
    schema: bytes
    """Its JSON schema, which the question shows."""

    def read(self, payload: bytes) -> Any:  # Any: of the type that the code has given
        """Return the answer. Raises InvalidInput: no schema has the rules of a validator in Python."""
        return self.value.decode(payload, "answer")


def answer_type(hint: object, default: bytes | None) -> AnswerType:
    """Return the type of an answer.

    Raises ConfigurationError if JSON cannot represent it, and InvalidInput if the answer at the deadline does not fit.
    """
    try:
        found = _known_answer_type(hint)
    except TypeError:  # a type without a hash
        found = _answer_type(hint)
    if default is not None:
        found.value.decode(default, "default of ctx.human")
    return found


def _answer_type(hint: object) -> AnswerType:
    place = place_of(None, 4)  # the line that asks
    value = ValueReader("type of ctx.human", hint, place)
    schema = value.schema()
    try:
        value_check(schema, formats=True)
    except InvalidInput as error:
        raise ConfigurationError(f"type of ctx.human ({place}): its schema is not valid, {error.message}") from None
    return AnswerType(value, codec.encode(schema))


_known_answer_type = functools.lru_cache(maxsize=256)(_answer_type)


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
    schema: bytes = b""
    """JSON schema of the answer. Empty: any JSON, or a verdict."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        # `expects` and `schema` come first: `signal.lua` looks for them there.
        request: dict[str, object] = {"expects": self.expects} if self.expects else {}
        if self.schema:
            request["schema"] = msgspec.Raw(self.schema)
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
        """Whether the human, or the default after the limit, said no."""
        return self.verdict == "deny"


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


@dataclass(slots=True)
class Release:
    """The run gives up its key with the commit of this turn."""

    step: str
    digest: str
    state: bytes
    """The state that the run leaves (JSON); empty: unchanged."""

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        return ("r", self.step, self.digest, self.state)


@dataclass(slots=True)
class Acquire:
    """A step that the broker answers with the instance's state once the run holds its key again."""

    step: str
    digest: str
    wait: str = "!"

    def part(self, turn: CommittedTurn) -> Sequence[Argument]:
        return ("k", self.step, self.digest, self.wait)


def _elsewhere(agent: str, key: str, turn: CommittedTurn) -> int | None:
    """Return the partition of an agent's instance; None if it is the turn's own."""
    if not key or turn.partitions == 1:
        return None
    there = partition_of(instance_address(agent, key), turn.partitions, "key")
    return None if there == turn.delivery.partition else there
