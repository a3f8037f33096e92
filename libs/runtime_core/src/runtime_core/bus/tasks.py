"""Verbs for tasks and topics: submit, cancel, signal, query, subscribe, publish."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import msgspec

from runtime_core.bus.connection import Argument, Reply, text, texts
from runtime_core.bus.durability import DurabilityVerbs
from runtime_core.bus.values import Misplaced, NotYet, OpenRequest, Submitted, TopicSubscription
from runtime_core.errors import Fenced, Rejected
from runtime_core.record.step import ENCODER, FORK_STEP, Fork, Step
from runtime_core.wire.commands import Begun, Submission


class TaskVerbs(DurabilityVerbs):
    """What clients and the services do with whole tasks."""

    async def submit(self, new: Submission) -> Submitted:
        """Start a task, or say what became of an equal submit.

        Raises `Rejected` with the field, `NotYet` before the first manifest, `Fenced` for a replaced admitter,
        `Misplaced` where one of its ids is claimed for another partition, `NotDurable` where the task runs and its
        submit may still be lost with the broker.
        """
        connection = self.transport.reconnects
        function, more = ("submit", []) if new.begun is None else ("fork", _fork_arguments(new.begun))
        reply = await self.call(
            function, new.task_id, new.source, new.event_id, new.digest, new.agent, new.key, new.input_json,
            new.replyto, new.carried(), new.session_id, new.max_steps, new.time_limit_ms(), new.epoch,
            int(new.streamed), new.limits, new.claims, f"{new.priority}|{new.tenant}" if new.in_turn else "", *more,
        )  # fmt: skip
        answer = texts(reply)
        match answer[0]:
            case "started":
                if self.durability != "fast":
                    await self.make_durable(connection, wrote=True, task=answer[1])
                return Submitted(answer[1], "accepted", True, self.keys.partition)
            case "known":
                # The first submit may have ended in NotDurable.
                await self.make_durable(connection, wrote=False, task=answer[1])
                return Submitted(answer[1], answer[2], False, self.keys.partition)
            case "overloaded":
                seconds = float(answer[2]) if len(answer) > 2 else 1.0
                raise Rejected("overloaded", answer[1], retry_after_seconds=seconds, task_id=new.task_id)
            case "wait":
                raise NotYet("data.agent", "no agent-handler has published its agents yet", 0.2, new.task_id)
            case "fenced":
                raise Fenced("another admitter leads")
            case "elsewhere" | "taken" | "again":
                raise _misplaced(answer, new.task_id)
        raise Rejected(answer[1], answer[2], task_id=new.task_id)

    async def claim(self, new: Submission, partition: int, fields: Sequence[str]) -> list[str]:
        """Claim ids (`task_id`, `id`) for a submit whose task is to start in another partition; a token for each.

        Raises `Misplaced` where one is claimed already, `Rejected` where it can never be.
        """
        connection = self.transport.reconnects
        reply = await self.call("claim", new.task_id, new.source, new.event_id, new.digest, partition, *fields)
        answer = texts(reply)
        match answer[0]:
            case "ok":
                await self.make_durable(connection, wrote=True, task=new.task_id)
                return answer[1:]
            case "elsewhere" | "taken":
                raise _misplaced(answer, new.task_id)
        raise Rejected(answer[1], answer[2], task_id=new.task_id)

    async def refuse(self, new: Submission, field: str, token: str) -> str | None:
        """Let no submit with this claim start here from now on; the digest of one that has started, else None."""
        answer = texts(await self.call("refuse", field, new.task_id, new.source, new.event_id, token))
        return answer[1] if answer[0] == "started" else None

    async def unclaim(self, new: Submission, field: str, token: str) -> None:
        """Free an id whose claim was refused where its task was to start."""
        await self.call("unclaim", field, new.task_id, new.source, new.event_id, token)

    async def cancel(self, task: str, reason: str, *, durable: bool = True) -> list[str]:
        """`cancelled`, `ended` + status, or `unknown` (then a later submit of this id is refused).

        Raises `NotDurable` as `submit` does, unless it need not be `durable`.
        """
        connection = self.transport.reconnects
        answer = texts(await self.call("cancel", task, reason))
        if durable:
            await self.make_durable(connection, wrote=answer[0] != "ended", task=task)
        return answer

    async def withdraw(self, task: str) -> bool:
        """Tell the task's handler that nobody wants its answer; nothing ends. False where the task is over."""
        return await self.call("withdraw", task) == b"OK"

    async def signal(
        self, task: str, request: str, value: bytes, event: str = "", *, trace: str = "", durable: bool = True
    ) -> list[str]:
        """`ok`, `answered`, `no_request`, `unknown`, `ended` + status, or `invalid` + what the question expects.

        `event` is the source and id of the answer, one line each: a repeat of the answer that counted gets `ok` again,
        within the dedupe window, also after the task has ended. `trace` is the traceparent of the span that hands the
        answer over, where it is traced. Raises `NotDurable` as `cancel` does.
        """
        connection = self.transport.reconnects
        answer = texts(await self.call("signal", task, request, value, trace, event))
        if answer[0] == "ok" and durable:
            await self.make_durable(connection, wrote=len(answer) == 1, task=task)
        return answer[:1] if answer[0] == "ok" else answer

    async def answered(
        self,
        task: str,
        run: str,
        step: str,
        status: bytes,
        payload: bytes,
        agent: str,
        there: str,
        usage: bytes = b"",
        trace: str = "",
    ) -> bool:
        """Answer a step that was asked in another partition, where task `there` has ended; once.

        `usage` (JSON) is what that task has used, `trace` the traceparent of the span that has ended it.
        """
        return await self.call("answered", task, run, step, status, payload, agent, there, usage, trace) == b"OK"

    async def due_requests(self, count: int) -> tuple[int, list[OpenRequest]]:
        """How many requests to other partitions were due for a look, and those of them that are still open.

        Requests over their time limit have ended.
        """
        due, *flat = cast(list[Reply], await self.call("due_requests", count))
        names = [text(item) for item in flat]
        return cast(int, due), [_open_request(*pair) for pair in zip(names[::2], names[1::2], strict=True)]

    async def repeat_request(self, request: OpenRequest) -> str:
        """Ask again: `OK`, `QUEUED` where the relay still has the request, `DONE` where nobody waits any more."""
        return text(await self.call("repeat_request", request.member))

    async def forget_request(self, request: OpenRequest) -> None:
        """Look at the request no more."""
        await self.transport.call("ZREM", self.keys.requests, request.member)

    async def usage(self, task: str) -> bytes:
        """What a task has used so far (JSON); empty for nothing."""
        found = await self.transport.call("HGET", self.keys.task(task), "us")
        return cast(bytes, found) if found is not None else b""

    async def erase(self, task: str) -> str:
        """`OK`, `unknown`, or the status of a task that has not ended."""
        return text(await self.call("erase", task))

    async def put_state(self, instance: str, state: bytes) -> bool:
        """Set the state (JSON) of the instance `agent/key`; False where a run holds it."""
        return await self.call("put_state", instance, state) == b"OK"

    async def knows_tool(self, name: str) -> bool:
        """Whether any app has declared this tool."""
        return await self.transport.call("HEXISTS", self.keys.tools, name) == 1

    async def knows_engine_function(self, name: str) -> bool:
        """Whether any app has declared this engine function; without a version: any version of it."""
        return await self.transport.call("HEXISTS", self.keys.engine_functions, name) == 1

    async def knows_agent(self, name: str) -> bool:
        return await self.transport.call("HEXISTS", self.keys.agents, name) == 1

    async def idle(self) -> tuple[int, str]:
        """How much there is to do in this partition, and a text that changes when anything is appended."""
        open_work, mark = cast(list[Reply], await self.call("idle"))
        return cast(int, open_work), text(mark)


def _misplaced(answer: Sequence[str], task: str) -> Misplaced:
    kind, field, holder, token = (*answer, "-1", "")[:4]
    return Misplaced(kind, field, int(holder), token, task)


def _open_request(member: str, place: str) -> OpenRequest:
    partition, _, task = place[1:].partition(":")
    return OpenRequest(member, int(partition), task)


def _fork_arguments(begun: Begun) -> list[Argument]:
    """What `fork.lua` takes besides the arguments of `submit`."""
    now = time.time() * 1000
    told = {"task": begun.task, "step": begun.step}
    origin = msgspec.json.encode(told)
    row = Step("r", "fork", begun.task, "completed", now, now, step=FORK_STEP, fork=Fork(begun.task, begun.step))
    row.input = msgspec.Raw(
        msgspec.json.encode({**told, "result": msgspec.Raw(begun.result)}) if begun.result else origin
    )
    arguments: list[Argument] = [origin, ENCODER.encode([row]), begun.started_ms or ""]
    for step, value in begun.journal.items():
        arguments += (step, value)
    return arguments


class TopicVerbs(DurabilityVerbs):
    """Topics of this partition, and the agents that have subscribed to them."""

    async def publish(
        self, message: str, topic: str, key: str, data: bytes, context: bytes = b"", sender: str = ""
    ) -> int:
        """Start a task for each agent that has subscribed to the topic; returns how many there are.

        `message` is its id: a repeat starts nothing again. `key` names the instance of each agent (empty: one of its
        own), `sender` an instance that does not get it. Raises `Rejected` where the broker is full, `NotDurable` as
        `submit` does.
        """
        connection = self.transport.reconnects
        reply = cast(list[Reply], await self.call("publish", message, topic, key, data, context, sender))
        if reply[0] == b"overloaded":
            raise Rejected("overloaded", text(reply[1]), retry_after_seconds=1.0)
        await self.make_durable(connection, wrote=False)  # whether a repeat wrote anything, the reply does not say
        return cast(int, reply[1])

    async def subscribe(self, wanted: TopicSubscription, *, deliver: bool = True) -> bool:
        """Subscribe; False where there is an equal subscription.

        `deliver` gives the agent what nobody had subscribed to, if that was before the agent was first heard of.
        """
        kind = "prefix" if wanted.prefix else "type"
        return await self.call("subscribe", kind, wanted.topic, wanted.agent, "1" if deliver else "") == 1

    async def note_agent(self, agent: str) -> None:
        """Note that there is this agent: from now on a topic without it has chosen to be without it."""
        await self.call("subscribe", "agent", "", agent, "")

    async def unsubscribe(self, unwanted: TopicSubscription) -> bool:
        """End a subscription; False where there is none."""
        kind = "prefix" if unwanted.prefix else "type"
        return await self.call("unsubscribe", kind, unwanted.topic, unwanted.agent) == 1

    async def subscriptions(self) -> list[TopicSubscription]:
        """All of them, by topic."""
        reply = cast(list[bytes], await self.transport.call("HGETALL", self.keys.topics))
        found = []
        for name, value in zip(reply[::2], reply[1::2], strict=True):
            field = name.decode()
            if field.startswith("="):
                found += [TopicSubscription(field[1:], agent) for agent in value.decode().split("\n")]
            elif field == "^":
                for line in value.decode().split("\n"):
                    prefix, _, agent = line.partition(" ")
                    found.append(TopicSubscription(prefix, agent, prefix=True))
        return sorted(found, key=lambda each: (each.topic, each.prefix, each.agent))
