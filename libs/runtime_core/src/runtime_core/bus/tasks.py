"""Verbs for tasks: submit (to one partition or several), cancel, signal, query."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import msgspec
from msgspec.structs import replace

from runtime_core.bus.connection import Argument, Reply, text, texts
from runtime_core.bus.partition import Partition
from runtime_core.errors import Fenced, Rejected, ServerError
from runtime_core.wire.commands import ForkJournal, Submission
from runtime_core.wire.ids import ROOT_RUN, partition_of
from runtime_core.wire.step import ENCODER, FORK_STEP, Fork, Status, Step

Bus = TypeVar("Bus", bound="TaskVerbs")

SUBMIT_ATTEMPTS = 20
"""How often to try a submit while others claim the same ids."""


@dataclass(slots=True)
class Submitted:
    """The task that a submit started, or that an equal one had started before."""

    task: str
    status: str
    started: bool
    partition: int = field(default=0, compare=False)
    """The partition of the task."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request to another partition without a result yet, or a task to cancel there."""

    member: str
    """`task|run|step` of the waiting step, or `@<partition>:<task>|<caller>` if the calling task has ended."""
    partition: int
    """The other partition."""
    task: str
    """The task in the other partition."""

    @property
    def caller(self) -> str:
        """The ended task whose request to cancel; empty for a request that a step waits for."""
        return self.member.rpartition("|")[2] if self.member.startswith("@") else ""


class Misplaced(Rejected):
    """Another partition has a claim on an id of the submit, or the submit's own claim was refused (`again`).

    `equal`: the claim is of a submit with equal content. `submit_once` resolves it.
    """

    def __init__(self, kind: str, field: str, holder: int, token: str, task: str) -> None:
        super().__init__(field, f"has a claim for partition {holder}; submit again", 1.0, task)
        self.again = kind == "again"
        self.equal = kind == "elsewhere"
        self.holder = holder
        self.token = token


class NotYet(Rejected):
    """No manifest has arrived yet, so Weft cannot check the submit; it may accept it later."""


class TaskVerbs(Partition):
    """Verbs of clients and services for whole tasks."""

    async def submit(self, new: Submission) -> Submitted:
        """Start a task, or return the one that an equal submit has started.

        Raises `Rejected` with the field, `NotYet` before the first manifest, `Fenced` for a replaced admitter,
        `Misplaced` if another partition has a claim on one of its ids, and `NotDurable` if the task runs but the broker
        may still lose its submit.
        """
        connection = self.transport.reconnects
        function, more = ("submit", []) if new.begun is None else ("fork", _fork_arguments(new.begun))
        args = (
            new.task_id, new.source, new.event_id, new.digest, new.agent, new.key, new.input_json,
            new.replyto, new.carried(), new.session_id, new.max_steps, new.time_limit_ms(), new.epoch,
            int(new.streamed), new.limits, new.claims, f"{new.priority}|{new.tenant}" if new.in_turn else "", *more,
        )  # fmt: skip
        try:
            reply = await self.transport.call(b"FCALL", self._functions[function], 1, self._base, *args)
        except ServerError as error:
            reply = await self.call_after(error, function, args)
        found: list[bytes] = reply  # type: ignore[assignment]  # the shape of this function's reply
        if found[0] == b"started":
            task = found[1].decode()
            if self.durability != "fast":
                await self.make_durable(connection, wrote=True, task=task)
            return Submitted(task, "accepted", True, self.keys.partition)
        answer = texts(reply)
        match answer[0]:
            case "known":
                # The first submit may have ended in NotDurable.
                await self.make_durable(connection, wrote=False, task=answer[1])
                return Submitted(answer[1], answer[2], False, self.keys.partition)
            case "overloaded":
                seconds = float(answer[2]) if len(answer) > 2 else 1.0
                raise Rejected("overloaded", answer[1], retry_after_seconds=seconds, task_id=new.task_id)
            case "wait":
                why = "no agent-handler has published its agents yet: start one, as `weft up` does"
                raise NotYet("data.agent", why, 0.2, new.task_id)
            case "fenced":
                raise Fenced("another admitter leads")
            case "elsewhere" | "taken" | "again":
                raise _misplaced(answer, new.task_id)
        raise Rejected(answer[1], answer[2], task_id=new.task_id)

    async def claim(self, new: Submission, partition: int, fields: Sequence[str]) -> list[str]:
        """Claim ids (`task_id`, `id`) for a submit whose task starts in another partition. Return a token for each.

        Raises `Misplaced` if one has a claim already, and `Rejected` if it can never get one.
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
        """Prevent submits with this claim from starting here. Return the digest of one that has started, else None."""
        answer = texts(await self.call("refuse", field, new.task_id, new.source, new.event_id, token))
        return answer[1] if answer[0] == "started" else None

    async def unclaim(self, new: Submission, field: str, token: str) -> None:
        """Free an id after the partition of its task has refused the claim."""
        await self.call("unclaim", field, new.task_id, new.source, new.event_id, token)

    async def cancel(self, task: str, reason: str, *, durable: bool = True) -> list[str]:
        """Cancel a task. Return `cancelled`, `ended` + status, or `unknown` (then this id can never be submitted).

        Raises `NotDurable` as `submit` does, unless `durable` is false.
        """
        connection = self.transport.reconnects
        answer = texts(await self.call("cancel", task, reason))
        if durable:
            await self.make_durable(connection, wrote=answer[0] != "ended", task=task)
        return answer

    async def withdraw_request(self, task: str) -> bool:
        """Tell the task's handler that nobody wants its answer. Nothing ends. Return False if the task is over."""
        return await self.call("withdraw_request", task) == b"OK"

    async def signal(
        self,
        task: str,
        request: str,
        value: bytes,
        event: str = "",
        *,
        trace: str = "",
        durable: bool = True,
        fits: bool = False,
    ) -> list[str]:
        """Answer a question of a task.

        Returns `ok`, `answered`, `no_request`, `unknown`, `ended` + status, `invalid` + what the question expects +
        the wrong part of the answer, as in `value.topic`, or `schema` + the question (JSON), if that has a schema:
        check the answer against it, then call again with `fits`.
        `event` is the source and id of the answer, one line each: within the dedupe window, a repeat of the accepted
        answer gets `ok` again, even after the task has ended. `trace` is the traceparent of the span that delivers the
        answer. Raises `NotDurable` as `cancel` does.
        """
        connection = self.transport.reconnects
        answer = texts(await self.call("signal", task, request, value, trace, event, *(("fits",) if fits else ())))
        if answer[0] == "invalid":
            return [*answer, "value"]
        if answer[0] == "ok" and durable:
            await self.make_durable(connection, wrote=len(answer) == 1, task=task)
        return answer[:1] if answer[0] == "ok" else answer

    async def send_message(self, task: str, name: str, value: bytes, event: str, *, durable: bool = True) -> list[str]:
        """Send a message (JSON) to a running task.

        Returns `ok`, `reused`, `unknown`, `ended` + status, or `full` + why. `event` is the source and id of the
        message, one line each: within the dedupe window, a repeat gets `ok` again and sends nothing. Raises
        `NotDurable` as `cancel` does.
        """
        connection = self.transport.reconnects
        answer = texts(await self.call("send_message", task, name, value, event))
        if answer[0] == "ok" and durable:
            await self.make_durable(connection, wrote=len(answer) == 1, task=task)
        return answer[:1] if answer[0] == "ok" else answer

    async def answer_request(
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
        """Answer a step that called another partition, where task `there` has ended. Return False for a repeat.

        `usage` (JSON) is that task's usage, `trace` the traceparent of the span that ended it.
        """
        return await self.call("answer_request", task, run, step, status, payload, agent, there, usage, trace) == b"OK"

    async def due_requests(self, count: int) -> tuple[int, list[OpenRequest]]:
        """Return how many requests to other partitions were due for a check, and those that are still open.

        Ends requests over their time limit.
        """
        due, *flat = cast(list[Reply], await self.call("due_requests", count))
        names = [text(item) for item in flat]
        return cast(int, due), [_open_request(*pair) for pair in zip(names[::2], names[1::2], strict=True)]

    async def repeat_request(self, request: OpenRequest) -> str:
        """Repeat a request. Return `OK`, `QUEUED` if the relay still has it, or `DONE` if nobody waits any more."""
        return text(await self.call("repeat_request", request.member))

    async def forget_request(self, request: OpenRequest) -> None:
        """Stop checking the request."""
        await self.transport.call("ZREM", self.keys.requests, request.member)

    async def usage(self, task: str) -> bytes:
        """Return a task's usage so far (JSON); empty for none."""
        found = await self.transport.call("HGET", self.keys.task(task), "us")
        return cast(bytes, found) if found is not None else b""

    async def erase(self, task: str) -> str:
        """Erase an ended task. Return `OK`, `unknown`, or the status of a task that has not ended."""
        return text(await self.call("erase", task))

    async def put_state(self, instance: str, state: bytes) -> bool:
        """Set the state (JSON) of the instance `agent/key`. Return False if a run holds it."""
        return await self.call("put_state", instance, state) == b"OK"

    async def input_of(self, task: str, run: str) -> tuple[bytes, bytes]:
        """Return a run's input and context (JSON); empty if they are not known."""
        own, of_task = await asyncio.gather(
            self.transport.call("HMGET", self.keys.run(task, run), "d", "x"),
            self.transport.call("HGET", self.keys.task(task), "x"),
        )
        data, context = cast(list[bytes | None], own)
        return data or b"", context or cast(bytes | None, of_task) or b""

    async def idle(self) -> tuple[int, str]:
        """Return the amount of open work in this partition, and a text that changes when anything is appended."""
        open_work, mark = cast(list[Reply], await self.call("idle"))
        return cast(int, open_work), text(mark)

    async def mailbox_events(self) -> int:
        reply = cast(list[bytes], await self.transport.call("ZRANGE", self.keys.mailboxes, 0, -1, "WITHSCORES"))
        return sum(int(float(depth)) for depth in reply[1::2])


def _misplaced(answer: Sequence[str], task: str) -> Misplaced:
    kind, field, holder, token = (*answer, "-1", "")[:4]
    return Misplaced(kind, field, int(holder), token, task)


def _open_request(member: str, place: str) -> OpenRequest:
    partition, _, task = place[1:].partition(":")
    return OpenRequest(member, int(partition), task)


def _fork_arguments(begun: ForkJournal) -> list[Argument]:
    """Return the arguments of `fork.lua` that follow those of `submit`."""
    now = time.time() * 1000
    place = {"task": begun.task, "step": begun.step}
    origin = msgspec.json.encode(place)
    row = Step(
        ROOT_RUN, "fork", begun.task, Status.COMPLETED, now, now, step=FORK_STEP, fork=Fork(begun.task, begun.step)
    )
    row.input = msgspec.Raw(
        msgspec.json.encode({**place, "result": msgspec.Raw(begun.result)}) if begun.result else origin
    )
    arguments: list[Argument] = [origin, ENCODER.encode([row]), begun.started_ms or ""]
    for step, value in begun.journal.items():
        arguments += (step, value)
    return arguments


def home_of(buses: Sequence[Bus], task: str) -> Bus:
    """Return the partition that a task's id maps to."""
    return buses[partition_of(task, len(buses), "task_id")]


async def find_place(buses: Sequence[Bus], task: str) -> Bus:
    """Return the partition where a task is; if no partition has it, the one that its id maps to."""
    home = home_of(buses, task)
    if len(buses) == 1:
        return home
    noted, status = await asyncio.gather(
        home.transport.call("HGET", home.keys.places, task),
        home.transport.call("HGET", home.keys.task(task), "status"),
    )
    if noted is not None:
        return buses[int(cast(bytes, noted))]
    if status is None:
        # The task of a message is in its sender's or its instance's partition, which nothing records.
        others = [bus for bus in buses if bus is not home]
        found = await asyncio.gather(*(bus.transport.call("HGET", bus.keys.task(task), "status") for bus in others))
        for bus, status in zip(others, found, strict=True):
            if status is not None:
                return bus
    return home


async def forget_place(buses: Sequence[TaskVerbs], task: str) -> None:
    """Delete the note of where an erased task was."""
    if len(buses) > 1:
        home = home_of(buses, task)
        await home.transport.call("HDEL", home.keys.places, task)


async def submit_once(buses: Sequence[TaskVerbs], target: int, id_home: int, new: Submission) -> Submitted:
    """Start a task in partition `target` of several, or find where an equal submit has started it.

    `id_home` is the partition of source and id. Raises the errors of `TaskVerbs.submit`.
    """
    for _ in range(SUBMIT_ATTEMPTS):
        replyto = buses[target].keys.reply(new.client) if new.client else new.replyto
        attempt = _SubmitAttempt(buses, target, id_home, replace(new, replyto=replyto))
        try:
            return await attempt.run()
        except Misplaced as found:
            target = await attempt.settle(found)
        except Rejected as error:
            if error.retry_after_seconds is None:
                await attempt.give_up()
            raise
    raise Rejected(
        "overloaded",
        "other submits with the same ids are under way: submit again",
        retry_after_seconds=1.0,
        task_id=new.task_id,
    )


class _SubmitAttempt:
    """One attempt to submit to one partition."""

    def __init__(self, buses: Sequence[TaskVerbs], target: int, id_home: int, new: Submission) -> None:
        self.new = new
        self._buses = buses
        self._target = target
        self._asked = target
        """The partition that replied last."""
        # The task id first: it decides where the task is.
        self._homes = {"task_id": home_of(buses, new.task_id).keys.partition, "id": id_home}
        self._tokens = {"task_id": "", "id": ""}

    async def run(self) -> Submitted:
        for home in dict.fromkeys(self._homes.values()):
            if home != self._target:
                self._asked = home
                fields = [field for field, of_field in self._homes.items() if of_field == home]
                tokens = await self._buses[home].claim(self.new, self._target, fields)
                self._tokens.update(zip(fields, tokens, strict=True))
        self._asked = self._target
        self.new.claims = f"{self._tokens['id']}|{self._tokens['task_id']}"
        return await self._buses[self._target].submit(self.new)

    async def settle(self, found: Misplaced) -> int:
        """Return the partition to try next. Raises Rejected if another submit has used the id for different content."""
        field = found.field
        if found.again:
            await self._free(field, self._tokens[field])
            return self._target
        if found.equal and field == "task_id":
            return found.holder
        digest = await self._buses[found.holder].refuse(self.new, field, found.token)
        if digest is None:
            await self._buses[self._asked].unclaim(self.new, field, found.token)
            return self._target
        if digest != self.new.digest:
            await self.give_up()
            raise Rejected(field, _used(self.new, field), task_id=self.new.task_id)
        if field == "id":
            await self._drop("task_id")  # claimed for the wrong partition
        if not found.equal:
            await self._buses[self._asked].unclaim(self.new, field, found.token)
        return found.holder

    async def give_up(self) -> None:
        """Free the ids that were claimed for a submit that is finally rejected."""
        for claimed in self._tokens:
            await self._drop(claimed)

    async def _drop(self, field: str) -> None:
        """Free an id, unless an equal submit has started with the same claim in the meantime."""
        token = self._tokens[field]
        if token and await self._buses[self._target].refuse(self.new, field, token) is None:
            await self._free(field, token)

    async def _free(self, field: str, token: str) -> None:
        await self._buses[self._homes[field]].unclaim(self.new, field, token)


def _used(new: Submission, field: str) -> str:
    if field == "task_id":
        return f"a task {new.task_id} with different content exists"
    return f"the id {new.event_id} of source {new.source} was used before with different content"
