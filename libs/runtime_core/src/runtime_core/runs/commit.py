"""From a turn's effects to the arguments of its commit, in the order in which the program asked for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from runtime_core.bus.connection import Argument
from runtime_core.bus.topics import published, sent
from runtime_core.bus.values import Delivery
from runtime_core.consumer.effects import Call, Completed, Effect, Publish, Question, Send, Spend, Suspended, Timer
from runtime_core.ids import fingerprint, instance_address, partition_of, task_of_message
from runtime_core.record.step import Step, StepError
from runtime_core.runs.ports import DeclaredApp
from runtime_core.runs.sharing import with_snapshot, without_snapshot
from runtime_core.telemetry.trace_context import restated
from runtime_core.wire.envelope import rfc3339


def parts_of(
    result: Suspended | Completed, delivery: Delivery, app: DeclaredApp, partitions: int = 1
) -> tuple[list[Argument], int]:
    """The parts of a commit (see `commit_turn.lua`) and how many there are."""
    # A message that nobody waits for goes first: two sends to one instance keep the order of the program.
    effects: list[Effect] = [*result.sends, *result.spends]
    if isinstance(result, Completed):
        answer = answer_parts(delivery)
        return parts(effects, delivery, app, partitions) + answer, len(effects) + bool(answer)
    effects += result.asked
    asked = parts(effects, delivery, app, partitions)
    for step, wait in result.again:
        asked += (_AGAIN, step, wait)
    return asked, len(effects) + len(result.again)


def parts(effects: Sequence[Effect], delivery: Delivery, app: DeclaredApp, partitions: int = 1) -> list[Argument]:
    """Return the parts for these effects, in this order."""
    turn = _Turn(delivery, app, partitions)
    return [argument for effect in effects for argument in _PARTS[type(effect)](effect, turn)]


class _Turn(NamedTuple):
    """The turn that asks, and what decides where its events go."""

    delivery: Delivery
    app: DeclaredApp
    partitions: int


def _call(call: Call, turn: _Turn) -> Sequence[Argument]:
    delivery = turn.delivery
    context = restated(delivery.context, delivery.trace) if delivery.trace else delivery.context
    if call.snapshot:
        context = with_snapshot(context, call.snapshot)
    elif context and call.kind != "agent":
        # Only an agent gets the snapshot of the asking run's context.
        context = without_snapshot(context)
    return (
        "c", _stream(call, turn.app, delivery, turn.partitions), call.step, call.name, call.key, call.digest, call.wait,
        call.data, context,
    )  # fmt: skip


def _timer(timer: Timer, _: _Turn) -> Sequence[Argument]:
    return ("t", timer.step, timer.digest, timer.wait, timer.after_ms, timer.status, timer.payload)


def _question(question: Question, turn: _Turn) -> Sequence[Argument]:
    # First, where there is one: the function that takes the answer looks for it at this place.
    request: dict[str, object] = {"expects": question.expects} if question.expects else {}
    request |= {
        "task_id": turn.delivery.task,
        # With a random end, so that nobody guesses it. The broker keeps the one that was committed.
        "request_id": f"{turn.delivery.run}:{question.step}-{secrets.token_hex(8)}",
        "prompt": question.prompt,
        "data": msgspec.Raw(question.data or b"null"),
    }
    if question.timeout_ms is not None:
        request["deadline"] = rfc3339(time.time() * 1000 + question.timeout_ms)
    if question.default is not None:
        request["default"] = msgspec.Raw(question.default)
    return (
        "q", question.step, question.digest, question.wait, msgspec.json.encode(request),
        "" if question.timeout_ms is None else question.timeout_ms,
        b"" if question.default is None else question.default,
    )  # fmt: skip


def _send(send: Send, turn: _Turn) -> Sequence[Argument]:
    delivery = turn.delivery
    there = _elsewhere(send.agent, send.key, delivery.partition, turn.partitions)
    if there is not None:
        agent = f"@{there}:{send.agent}"
    else:
        # No declared name begins with `@`, which means another partition there: it stays a name that nobody has.
        agent = f"?{send.agent}" if send.agent.startswith("@") else send.agent
    context = restated(sent(without_snapshot(delivery.context)), delivery.trace)
    task = task_of_message(delivery.task, delivery.run, send.step)
    return ("s", task, agent, send.key, send.data, context, send.step, send.digest)


def _publish(message: Publish, turn: _Turn) -> Sequence[Argument]:
    delivery = turn.delivery
    # Where there are several partitions, the relay finds those of the agents.
    topic = message.topic if turn.partitions == 1 else f"@{message.topic}"
    sender = delivery.instance
    context = published(without_snapshot(delivery.context), message.topic, sender, delivery.trace)
    task = task_of_message(delivery.task, delivery.run, message.step)
    return ("p", task, topic, message.key, message.data, context, sender, message.step, message.digest)


def _spend(spend: Spend, _: _Turn) -> Sequence[Argument]:
    return ("u", spend.step, spend.digest, spend.usage.to_json())


_PARTS: Mapping[type[Effect], Callable[[Any, _Turn], Sequence[Argument]]] = {  # Any: the effect of that type
    Call: _call,
    Timer: _timer,
    Question: _question,
    Send: _send,
    Publish: _publish,
    Spend: _spend,
}
"""The part of each kind of effect. It begins with a letter, which `shared/fields.lua` names."""
_AGAIN = "a"


def answer_parts(delivery: Delivery) -> list[Argument]:
    """The part that says by which span a run has ended, for the run that waits for it; none where nothing is traced."""
    return ["l", delivery.trace] if delivery.trace else []


def _elsewhere(agent: str, key: str, here: int, partitions: int) -> int | None:
    """The partition of an agent's instance, where that is another one."""
    if not key or partitions == 1:
        return None
    there = partition_of(instance_address(agent, key), partitions)
    return None if there == here else there


def _stream(call: Call, app: DeclaredApp, delivery: Delivery, partitions: int) -> str:
    """The call's work stream; a name that this app lacks is looked up among all apps by the commit."""
    if call.kind == "agent" and (
        (there := _elsewhere(call.name, call.key, delivery.partition, partitions)) is not None
    ):
        place = f"@{there}:{fingerprint(delivery.task, delivery.run, call.step, digits=32)}"
        return f"{place}:{call.timeout_ms}" if call.timeout_ms else place
    if call.kind == "tool":
        known = app.tools.get(call.name) is not None
        server = None if known else app.functions.mcp_server_of(call.name)
        if server is not None:
            # Its tools may not be listed yet; who runs the server knows when they are.
            return f"tool:{server.pool}" if server.pool else "tool"
    elif call.kind == "agent":
        known = app.agents.get(call.name) is not None
    else:
        known = True  # an engine's stream: steps wait there, also where no gateway serves it yet
    if not known:
        return f"?{call.kind}"
    return f"{call.kind}:{call.pool}" if call.pool else call.kind


def row_of_run(delivery: Delivery, status: str, started: float, ended: float, owner: str) -> Step:
    """The trajectory's row of an agent's run."""
    row = Step(delivery.run, "agent", delivery.name, status, started, ended)
    row.attempt = delivery.attempt
    row.key = delivery.key
    row.owner = owner
    if delivery.kind == "start" and delivery.data:
        row.input = msgspec.Raw(delivery.data)
    if delivery.errors:
        row.errors = msgspec.json.decode(delivery.errors, type=list[StepError])
    return row
