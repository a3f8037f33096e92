"""Clients and people: what they ask of the system, and what they were told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from runtime_core.bus.keys import ingress
from runtime_core.bus.topics import Topics, TopicSubscription
from runtime_core.client.fork import plan_fork
from runtime_core.errors import BusError, InvalidInput, NotDurable, Rejected
from runtime_core.state_manager.admission import Admission
from runtime_core.state_manager.schedules import DELETE, SET, Schedules, parse_set
from runtime_core.wire.commands import CANCEL, PUBLISH, SIGNAL, SUBMIT, Submission, digest
from runtime_core.wire.envelope import Envelope, to_fields
from runtime_core.wire.ids import fingerprint
from tests.simulation import schedules
from tests.simulation.choice_source import pick
from tests.simulation.processes import Process
from tests.simulation.programs import LATE, MESSAGES, UNHEARD, draw_topic, message
from tests.simulation.tasks import Task
from tests.simulation.transport import SimTransport

if TYPE_CHECKING:
    from tests.simulation.history import History

PUBLISHER = "shop"
"""The publisher to whom answers belong that are bounded."""
ANSWERS, BOUNDED = "answers", "shop:answers"
"""Where clients of the whole system want to be answered. Of the second stream, only the newest answers are kept."""
FEED_SECONDS = 2.0
"""After how long a step that still waits for a message gets another one: others may have received the first."""
QUESTION_MS = 13
"""How many digits, of the time at which it was asked, stand before a question on the broker."""


@dataclass
class Message:
    """A message that a client sends to a running task. Its value is its own."""

    task: str
    name: str
    value: str
    sent_at: int
    """The step of the history in which it was sent."""
    accepted_at: int = 0
    """The step in which its sender knew that it was accepted."""
    accepted_ms: int = 0
    """The same by the server's clock."""
    accepted: bool = False
    uncertain: bool = False
    """Whether a broker may have lost it with its last writes."""


# ARGV: base, prefix of two letters. Returns task, run, step and value of each field of a step that waits.
_WAITING = """
local base, found = ARGV[1], {}
local function look(task, run, fields)
  for name, value in pairs(fields) do
    if string.sub(name, 1, 2) == ARGV[2] and fields['m:' .. string.sub(name, 3)] then
      found[#found + 1] = {task, run, string.sub(name, 3), value}
    end
  end
end
local function fields_of(key)
  local flat, fields = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  return fields
end
for _, task in ipairs(redis.call('ZRANGE', base .. 'open', 0, -1)) do
  local own = fields_of(base .. 'task:' .. task)
  look(task, 'r', own)
  for name in pairs(own) do
    if string.sub(name, 1, 2) == 'k:' then
      look(task, string.sub(name, 3), fields_of(base .. 'run:' .. task .. '/' .. string.sub(name, 3)))
    end
  end
end
table.sort(found, function(a, b)
  for i = 1, 3 do
    if a[i] ~= b[i] then return a[i] < b[i] end
  end
  return false
end)
local flat = {}
for _, each in ipairs(found) do
  for i = 1, 4 do flat[#flat + 1] = each[i] end
end
return flat
"""


class Clients:
    """All clients, in one process that nothing happens to.

    In a history of the whole system they send commands to the ingress; else they call the functions themselves.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._process = Process(history.scheduler, "client")
        choice_source = history.choice_source
        self._reopen = choice_source.choose(3)
        """How often each dead letter is driven again, at once."""
        self._people = choice_source.choose(3)
        """How many people answer each question at once; the others are answered by their time limit."""
        self.accepted: list[str] = []
        """Tasks that clients were told are accepted, in the order in which they were told."""
        self.redriven: dict[str, None] = {}
        self.forks: list[Task] = []
        self.carried: dict[str, frozenset[str]] = {}
        """By fork, the steps whose results it took over from its origin."""
        self.published: list[tuple[str, str, str]] = []
        """Id, topic and source of each message that clients were told is published."""
        self.messages: list[Message] = []
        """Messages to running tasks, in the order in which they were sent."""
        self._feeds_all = choice_source.choose(2) == 1
        """Whether each step that waits for a message gets one; else only those that wait without a limit."""
        self._fed: dict[tuple[str, str, str], float] = {}
        """By task, run and step: when it was last sent a message."""
        self.heard = False
        """Whether a client has subscribed the agent that was not known before."""
        self.failure: Exception | None = None
        """A defect of the code here."""
        self.open_calls = 0
        """What clients wait for."""
        self._answered: dict[str, None] = {}
        self._told = 0
        """How many commands were sent."""
        self._durable: Admission | None = None
        """Where submits wait for a replica: the connections of all clients."""

    @property
    def answers_questions(self) -> bool:
        return self._people > 0

    def ask(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let the client do something. The history continues until that is done."""
        self.open_calls += 1

        async def asked() -> None:
            try:
                await coroutine
            except Exception as error:
                self.failure = error
            finally:
                self.open_calls -= 1

        self._process.spawn(asked())

    async def submit_all(self, tasks: list[Task]) -> None:
        """Submit one client's tasks one after the other over one connection; copies of one are sent at once."""
        admission = self._admission()
        transport = self._process.transport()
        for task in tasks:
            if self._history.whole:
                body: dict[str, Any] = {"agent": task.agent, "input": task.input, "task_id": task.id}
                body |= {"key": task.key} if task.key else {}
                body |= {"conf": {"timeout_seconds": task.timeout_seconds}} if task.timeout_seconds else {}
                for _ in range(task.copies):
                    await self._command(transport, SUBMIT, task.id, body, task.tenant)
                continue
            await asyncio.gather(*(self._submit(admission, task) for _ in range(task.copies)))

    def _admission(self) -> Admission:
        """Return what submits go through: connections of their own, or those on which submits wait for a replica."""
        if not self._history.quorum:
            return Admission(self._process.buses())
        if self._durable is None:
            buses = self._process.buses()
            for bus in buses:
                bus.durability = "quorum"
            self._durable = Admission(buses)
        return self._durable

    async def _submit(self, admission: Admission, task: Task) -> None:
        submission = Submission(
            task_id=task.id,
            agent=task.agent,
            key=task.key,
            input_json=msgspec.json.encode(task.input),
            source="sim",
            event_id=task.id,
            digest=digest(SUBMIT, task.program),
            tenant=task.tenant,
            timeout_ms=int(task.timeout_seconds * 1000) if task.timeout_seconds else 0,
            in_turn=True,
            epoch="-" if task.id[-1] in "02468" else "",
        )
        await self._admit(admission, submission)

    async def _admit(self, admission: Admission, submission: Submission) -> None:
        task = submission.task_id
        while True:
            try:
                await admission.admit(submission)
            except NotDurable:
                continue
            except Rejected as error:
                if error.retry_after_seconds is None:
                    self._history.note(f"{task} is rejected: {error}")
                    return
                await asyncio.sleep(error.retry_after_seconds)
            except BusError:
                await asyncio.sleep(0.2)  # the disk: a client tries again
            else:
                if task not in self.accepted:
                    self.accepted.append(task)
                return

    async def _command(
        self, transport: SimTransport, kind: str, id: str, body: dict[str, Any], tenant: str = ""
    ) -> None:
        """Append a command to the ingress. Its answers arrive on a stream of the user's."""
        command = Envelope(
            id=id, source="sim", type=kind, replyto=self._stream, tenant=tenant, data=msgspec.json.encode(body)
        )
        while True:
            try:
                await transport.call("XADD", ingress(self._history.scheduler.namespace), "*", *to_fields(command))
            except BusError:
                await asyncio.sleep(0.2)
            else:
                return

    @property
    def _stream(self) -> str:
        """Where clients want to be answered."""
        return BOUNDED if self._history.bounds_answers else ANSWERS

    def answers(self) -> list[dict[str, str]]:
        """Return the answers to clients, as attributes of events, with `data`: all that were ever written."""
        found = []
        for _, _, args, reply in self._history.scheduler.log:
            if args[:2] == ("XADD", self._stream) and isinstance(reply, bytes):
                fields = [part.decode() if isinstance(part, bytes) else str(part) for part in args[3:]]
                found.append({"": reply.decode(), **dict(zip(fields[::2], fields[1::2], strict=True))})
        return found

    def kept_answers(self) -> dict[str, int]:
        """Return the answers that are left: their ids, and their sizes in bytes."""
        kept = cast(list[tuple[bytes, list[bytes]]], self._history.server.execute("XRANGE", self._stream, "-", "+"))
        return {entry.decode(): sum(map(len, fields)) for entry, fields in kept}

    def answer_questions(self) -> None:
        """Answer all open questions of all runs, each differently, all at once."""
        for _, task, _, _, value in self._waiting(b"q:"):
            self._answer_question(task, value)

    def feed(self) -> None:
        """Send a message to each step that waits for one without a limit, and perhaps to others."""
        now = self._history.loop.now
        for base, task, run, step, value in self._waiting(b"n:"):
            if now < self._fed.get((task, run, step), -FEED_SECONDS) + FEED_SECONDS:
                continue
            timer = f"s|{task}|{run}|{step}"
            if self._feeds_all or self._history.server.execute("ZSCORE", base + "timers", timer) is None:
                self._fed[task, run, step] = now
                self.ask(self._send(task, [value[QUESTION_MS:].decode()], 1))

    def _waiting(self, prefix: bytes) -> Iterator[tuple[str, str, str, str, bytes]]:
        """Return base, task, run, step and value of the fields with this prefix, of steps that wait."""
        for base in self._history.scheduler.bases:
            found = cast(list[bytes], self._history.server.execute("EVAL", _WAITING, 0, base, prefix))
            for at in range(0, len(found), 4):
                task, run, step = (part.decode() for part in found[at : at + 3])
                yield base, task, run, step, found[at + 3]

    def _answer_question(self, task: str, question: bytes) -> None:
        request = msgspec.json.decode(question[QUESTION_MS:])["request_id"]
        if request in self._answered:
            return
        self._answered[request] = None
        self._history.note(f"{self._people} people answer question {request} of {task}")
        for number in range(self._people):
            self.ask(self._signal(task, request, f"answer {number}"))

    async def _signal(self, task: str, request: str, value: str) -> None:
        if self._history.whole:
            self._told += 1
            body = {"task_id": task, "request_id": request, "value": value}
            await self._command(self._process.transport(), SIGNAL, f"signal-{self._told}", body)
            return
        bus = await Admission(self._process.buses()).find(task)
        with suppress(BusError):
            await bus.signal(task, request, msgspec.json.encode(value))

    def send(self, number: int, count: int) -> None:
        """Send messages to a task in its current state, one after the other."""
        task, choice_source = self._history.tasks[number].id, self._history.choice_source
        names = [pick(choice_source, MESSAGES) for _ in range(count)]
        times = 1 + choice_source.choose(2)
        self._history.note(f"messages {', '.join(names)} are sent to {task}, each {times} times at once")
        self.ask(self._send(task, names, times))

    async def _send(self, task: str, names: Sequence[str], times: int) -> None:
        bus = await Admission(self._process.buses()).find(task)
        steps = self._history.scheduler
        for name in names:
            sent = Message(task, name, f"m{len(self.messages)}", steps.steps)
            self.messages.append(sent)
            answers: list[list[str]] = []

            async def insist(name: str = name, value: str = sent.value, answers: list[list[str]] = answers) -> None:
                answers.append(await bus.send_message(task, name, msgspec.json.encode(value), f"sim\n{value}"))

            await asyncio.gather(*(_insist(insist) for _ in range(times)))
            sent.accepted_at, sent.accepted_ms = steps.steps, steps.server_ms()
            sent.accepted = any(answer[0] == "ok" for answer in answers)
            self._history.note(f"message {sent.value} ({name}) to {task}: {answers}")

    def repeat_lost(self) -> None:
        """Send again what the broker may have lost: messages that steps wait for, and the schedule's last command.

        Without that command an interval would continue forever.
        """
        self._fed.clear()
        if self._history.schedule:
            self.ask(self.set_schedule(self._history.schedule[-1:]))

    async def set_schedule(self, commands: Sequence[schedules.Command]) -> None:
        """Send one client's commands for the schedule, in order."""
        buses, transport = self._process.buses(), self._process.transport()
        kept = Schedules(buses[0], Admission(buses))
        for command in commands:
            await asyncio.sleep(command.wait_seconds)
            self._history.note(f"the schedule {'is deleted' if command.data is None else 'is set'}")
            if self._history.whole:
                self._told += 1
                kind, body = (
                    (SET, command.data) if command.data is not None else (DELETE, {"schedule_id": schedules.ID})
                )
                await self._command(transport, kind, f"schedule-{self._told}", body)
            elif command.data is None:
                await _insist(lambda: kept.delete(schedules.ID))
            else:
                schedule = parse_set(command.data, await buses[0].time_ms())
                await _insist(partial(kept.set, schedule))

    def publish(self, times: int) -> None:
        """Publish a message, several times at once under one id."""
        topic, source = draw_topic(self._history.choice_source)
        self._told += 1
        id = f"message-{self._told}"
        self._history.note(f"{id} is published on {topic} for {source or 'anybody'}, {times} times at once")
        self.ask(self._publish(id, topic, source, times))

    async def _publish(self, id: str, topic: str, source: str, times: int) -> None:
        published = fingerprint("sim", id, digits=32)
        if self._history.whole:
            body: dict[str, Any] = {"topic": topic, "data": message(source)}
            body |= {"source": source} if source else {}
            transport = self._process.transport()
            for _ in range(times):
                await self._command(transport, PUBLISH, id, body)
        else:
            topics, data = Topics(self._process.buses()), msgspec.json.encode(message(source))
            publishing = (_insist(lambda: topics.publish(published, topic, source, data)) for _ in range(times))
            await asyncio.gather(*publishing)
        self.published.append((published, topic, source))

    def subscribe(self) -> None:
        """Let a new agent appear, which gets messages that had no subscriber."""
        self._history.note(f"{LATE} appears, and subscribes to {UNHEARD}")
        self.ask(self._subscribe())

    async def _subscribe(self) -> None:
        buses = self._process.buses()
        for bus in buses:
            await _insist(partial(bus.transport.call, "HSET", bus.keys.agents, LATE, "agent"))
        await _insist(lambda: Topics(buses).subscribe(TopicSubscription(UNHEARD, LATE)))
        self.heard = True

    def cancel(self, number: int, times: int) -> None:
        task = self._history.tasks[number].id
        if task not in self.accepted and not self._history.whole:
            return
        self._history.note(f"{task} is cancelled by its user, {times} times at once")
        for _ in range(times):
            self.ask(self._cancel(task))

    async def _cancel(self, task: str) -> None:
        if self._history.whole:
            self._told += 1
            await self._command(self._process.transport(), CANCEL, f"cancel-{self._told}", {"task_id": task})
            return
        bus = await Admission(self._process.buses()).find(task)
        with suppress(BusError):
            await bus.cancel(task, "the user's wish")

    def fork(self, number: int, at: str | None) -> None:
        """Fork a task in its current state, from step `at` on, or with all its results."""
        origin = self._history.tasks[number]
        fork = replace(origin, id=f"{origin.id}-fork{len(self.forks)}", copies=1, timeout_seconds=None)
        self.forks.append(fork)
        self._history.note(f"{origin.id} is forked as {fork.id}, {f'at step {at}' if at else 'at its end'}")
        self.ask(self._fork(origin.id, fork.id, at))

    async def _fork(self, origin: str, fork: str, at: str | None) -> None:
        admission = self._admission()
        try:
            bus = await admission.find(origin)
            plan = await plan_fork(bus, bus.keys.namespace, origin, at=at, input=..., store=None)
        except (InvalidInput, BusError) as error:
            self._history.note(f"{fork} is not made: {error}")
            return
        submission = plan.submission(task_id=fork)
        self.carried[fork] = frozenset(plan.begun.journal)
        await self._admit(admission, submission)

    def redrive_letters(self) -> bool:
        """Redrive dead letters, perhaps each twice at once. Return whether there were any."""
        if not self._reopen:
            return False
        found = False
        for number, base in enumerate(self._history.scheduler.bases):
            for entry, fields in cast(
                list[tuple[bytes, list[bytes]]], self._history.server.execute("XRANGE", base + "dead", "-", "+")
            ):
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                task = named.get(b"taskid", b"").decode()
                if (
                    not task
                    or b"h" not in named
                    or self._history.server.execute("HGET", f"{base}task:{task}", "status") == b"completed"
                ):
                    continue  # nobody has a reason to drive what a completed task has done without
                found = True
                self.redriven[task] = None
                self._history.ledger.once.pop((task, named[b"runid"].decode()), None)
                self._history.note(f"letter {entry.decode()} of {task} is driven again, {self._reopen} times at once")
                for _ in range(self._reopen):
                    self.ask(self._redrive(number, entry.decode()))
        return found

    async def _redrive(self, partition: int, letter: str) -> None:
        bus = self._process.buses()[partition]
        with suppress(BusError):
            self._history.note(f"redrive {letter}: {await bus.redrive(letter, True)}")


async def _insist(call: Callable[[], Awaitable[object]]) -> None:
    """Act as a client that wants something done: try until it succeeds."""
    while True:
        try:
            await call()
        except (BusError, Rejected):
            await asyncio.sleep(0.2)
        else:
            return
