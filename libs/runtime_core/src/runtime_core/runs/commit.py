"""From a turn's effects to the arguments of its commit, in the order in which the program asked for them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from runtime_core.bus.connection import Argument
from runtime_core.bus.delivery import Delivery
from runtime_core.bus.topics import published, sent
from runtime_core.consumer.effects import Call, Completed, Publish, Send, Spend, Suspended
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
    parts = parts_of_sends(result.sends, delivery, partitions) + spend_parts(result.spends)
    count = len(result.sends) + len(result.spends)
    if isinstance(result, Completed):
        answer = answer_parts(delivery)
        return parts + answer, count + bool(answer)
    parts += parts_of_calls(result.calls, delivery, app, partitions)
    for timer in result.timers:
        parts += ("t", timer.step, timer.digest, timer.wait, timer.after_ms, timer.status, timer.payload)
    for question in result.questions:
        # First, where there is one: the function that takes the answer looks for it at this place.
        request: dict[str, object] = {"expects": question.expects} if question.expects else {}
        request |= {
            "task_id": delivery.task,
            # With a random end, so that nobody guesses it. The broker keeps the one that was committed.
            "request_id": f"{delivery.run}:{question.step}-{secrets.token_hex(8)}",
            "prompt": question.prompt,
            "data": msgspec.Raw(question.data or b"null"),
        }
        if question.timeout_ms is not None:
            request["deadline"] = rfc3339(time.time() * 1000 + question.timeout_ms)
        if question.default is not None:
            request["default"] = msgspec.Raw(question.default)
        parts += (
            "q", question.step, question.digest, question.wait, msgspec.json.encode(request),
            "" if question.timeout_ms is None else question.timeout_ms,
            b"" if question.default is None else question.default,
        )  # fmt: skip
    for step, wait in result.again:
        parts += ("a", step, wait)
    count += len(result.calls) + len(result.timers) + len(result.questions) + len(result.again)
    return parts, count


def parts_of_sends(sends: Sequence[Send | Publish], delivery: Delivery, partitions: int) -> list[Argument]:
    """The parts of messages that nobody waits for."""
    parts: list[Argument] = []
    for send in sends:
        task = task_of_message(delivery.task, delivery.run, send.step)
        if isinstance(send, Publish):
            # Where there are several partitions, the relay finds those of the agents.
            topic = send.topic if partitions == 1 else f"@{send.topic}"
            sender = delivery.instance
            context = published(without_snapshot(delivery.context), send.topic, sender, delivery.trace)
            parts += ("p", task, topic, send.key, send.data, context, sender, send.step, send.digest)
            continue
        there = _elsewhere(send.agent, send.key, delivery.partition, partitions)
        if there is not None:
            agent = f"@{there}:{send.agent}"
        else:
            # No declared name begins with `@`, which means another partition there: it stays a name that nobody has.
            agent = f"?{send.agent}" if send.agent.startswith("@") else send.agent
        context = restated(sent(without_snapshot(delivery.context)), delivery.trace)
        parts += ("s", task, agent, send.key, send.data, context, send.step, send.digest)
    return parts


def parts_of_calls(calls: Sequence[Call], delivery: Delivery, app: DeclaredApp, partitions: int) -> list[Argument]:
    """The parts of calls whose results the run waits for."""
    parts: list[Argument] = []
    for call in calls:
        parts += (
            "c", _stream(call, app, delivery, partitions), call.step, call.name, call.key, call.digest, call.wait,
            call.data, _context(call, restated(delivery.context, delivery.trace)),
        )  # fmt: skip
    return parts


def _context(call: Call, x: bytes) -> bytes:
    """What travels with a call: an agent gets the context of who asks it."""
    if call.snapshot:
        return with_snapshot(x, call.snapshot)
    return x if call.kind == "agent" else without_snapshot(x)


def answer_parts(delivery: Delivery) -> list[Argument]:
    """The part that says by which span a run has ended, for the run that waits for it; none where nothing is traced."""
    return ["l", delivery.trace] if delivery.trace else []


def spend_parts(spends: Sequence[Spend]) -> list[Argument]:
    """The parts of a commit that say what was used, one for each."""
    parts: list[Argument] = []
    for spend in spends:
        parts += ("u", spend.step, spend.digest, spend.usage.to_json())
    return parts


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
