"""One history: a few tasks, a few processes, some faults, and the invariants at its end.

1. `choice_source.py` says where choices come from
2. `programs.py` is the app; `ledger.py` counts what it really did
3. `processes.py` are the processes, `faults.py` what happens to them
4. `loop.py`, `transport.py`, `scheduler.py`, `server.py`, `clock.py` run them, one broker call at a time
5. `invariants.py` and `schedules.py` say what must hold
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.durability import NotDurable
from runtime_core.bus.keys import ingress
from runtime_core.bus.tasks import TopicSubscription
from runtime_core.bus.topics import Topics
from runtime_core.client.fork import plan_fork
from runtime_core.errors import BusError, InvalidInput, Rejected, ServerError
from runtime_core.ids import fingerprint
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.schedules import DELETE, SET, Schedules, parse_set
from runtime_core.maintenance.keeper import ClockWatch
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.commands import CANCEL, PUBLISH, SIGNAL, SUBMIT, Submission, digest
from runtime_core.wire.envelope import Envelope, to_fields
from tests.simulation import faults, invariants, schedules
from tests.simulation.choice_source import ChoiceSource, pick, weighted
from tests.simulation.clock import virtual
from tests.simulation.engines import ENGINES, Cluster, GatewayProcess
from tests.simulation.ledger import LEDGER, Ledger
from tests.simulation.loop import PROCESS, SimLoop
from tests.simulation.objects import OBJECT, draw_object_program, envelope_of
from tests.simulation.objects import STREAM as OBJECTS
from tests.simulation.processes import HandlerProcess, Process, RelayProcess, RoleProcess, SchedulerProcess
from tests.simulation.programs import (
    KEYED,
    KEYS,
    LATE,
    SUBSCRIPTIONS,
    UNHEARD,
    Program,
    draw_program,
    draw_topic,
    message,
    simulated_app,
)
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import CLOCK, EPOCH_MS, SimServer
from tests.simulation.services import MemoryStore, ServiceProcess
from tests.simulation.snapshot import Broken, Violation
from tests.simulation.transport import SimTransport
from tests.simulation.work_left import WorkLeft

NAMESPACE = "s"
ANSWERS = "answers"
"""Where clients of the whole system want to be answered."""
FAULT_STEPS = 125
"""Faults come within so many steps of the history."""
SOON_MS = 100_000
"""A schedule that is due later is no work that is left: one that came once is kept for a day."""
QUESTION_MS = 13
"""How many digits, of the time at which it was asked, stand before a question on the broker."""
GATEWAY_SECONDS = 3.0
"""How long a gateway may take to stop."""
MOST_SECONDS = 60.0
"""Of virtual time, after which everything must have ended."""


@dataclass
class Task:
    """A client's submit."""

    id: str
    agent: str
    key: str
    program: Program
    timeout_seconds: float | None
    copies: int
    client: int
    tenant: str = ""

    @property
    def input(self) -> object:
        """As JSON."""
        return envelope_of(self.program) if self.agent == OBJECT else self.program

    def __str__(self) -> str:
        place = f"{self.agent}/{self.key}" if self.key else self.agent
        limit = f", timeout {self.timeout_seconds} s" if self.timeout_seconds else ""
        return (
            f"{self.id}: {place} {msgspec.json.encode(self.program).decode()}{limit}, client {self.client}"
            + (f", submitted {self.copies} times" if self.copies > 1 else "")
            + (f", tenant {self.tenant}" if self.tenant else "")
        )


@dataclass
class Outcome:
    """The outcome of a history."""

    violations: list[Violation]
    lines: list[str]
    choices: list[int]
    steps: int
    seconds: float
    fingerprint: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return sorted({violation.kind for violation in self.violations})


class History:
    """Runs one history on a server that it uses alone meanwhile."""

    def __init__(self, server: SimServer, choice_source: ChoiceSource, *, seed: int | str = 0) -> None:
        self.server = server
        self.choice_source = choice_source
        self.seed = seed
        self.loop = SimLoop()
        partitions = 2 if choice_source.choose(8) == 7 else 1
        self.scheduler = Scheduler(self.loop, server, choice_source, NAMESPACE, partitions)
        self.ledger = Ledger(self._journaled, self._owner_lives)
        self.scheduler.context.run(LEDGER.set, self.ledger)
        self.app = simulated_app()
        self.served: list[RoleProcess | SchedulerProcess] = []
        """Processes that faults may hit."""
        self.whole = choice_source.choose(8) == 7
        """Whether clients send commands, and all services run: else handlers run alone, and clients call functions."""
        self.objects = choice_source.choose(10) == 9
        """Whether agents that are objects take part: they ask each other in the middle of a turn."""
        self.clusters: dict[str, Cluster] = {}
        """By engine, what runs compute steps, where there are any."""
        if choice_source.choose(10) == 9:
            self.clusters = {name: Cluster(engine, self.scheduler, self.ledger) for name, engine in ENGINES.items()}
        self.streams = ["agent", "tool", *([OBJECTS] if self.objects else []), *self.clusters]
        """The work streams."""
        self._work = WorkLeft(server, self.scheduler.bases, self.streams)
        self.store = MemoryStore()
        self.accepted: list[str] = []
        """Tasks that clients were told are accepted, in the order in which they were told."""
        self.uncertain: list[str] = []
        """Tasks that a broker may have lost with its last writes."""
        self.redriven: dict[str, None] = {}
        self.forks: list[Task] = []
        self.carried: dict[str, frozenset[str]] = {}
        """By fork, the steps whose results it took over from its origin."""
        self.lost_tail = False
        self.clock_stepped = False
        self.failure: Exception | None = None
        """A defect of a client's code here."""
        self.open_calls = 0
        """What clients wait for."""
        self.tasks = self._draw_tasks()
        self.schedule: list[schedules.Command] = []
        if choice_source.choose(2 if self.whole else 24) == 1:
            # In the place of a task, so that no history becomes longer.
            self.schedule = schedules.draw(choice_source)
            del self.tasks[1:]
        self.starters = 1 + choice_source.choose(2) if self.schedule and not self.whole else 0
        """How many processes start what is due, where no state-manager does."""
        self.published: list[tuple[str, str, str]] = []
        """Id, topic and source of each message that clients were told is published."""
        self.heard = False
        """Whether a client has subscribed the agent that was not known before."""
        self.planned = self._draw_faults()
        self._reopen = choice_source.choose(3)
        self._answers = choice_source.choose(3)
        """How many people answer each question at once; the others are answered by their time limit."""
        self._takes_turns = choice_source.choose(4) == 3
        """Whether one unread entry makes a work stream long, so that new tasks wait for the turns of their tenants."""
        self._answered: dict[str, None] = {}
        self._told = 0
        """How many commands were sent."""
        self._started = 0
        self._client = Process(self.scheduler, "client")

    # -- the plan ----------------------------------------------------------------------------------------------

    def _draw_tasks(self) -> list[Task]:
        choice_source, tasks = self.choice_source, []
        clients = 1 + choice_source.choose(2)
        for number in range(1 + weighted(choice_source, [(3, 0), (4, 1), (3, 2), (1, 3)])):
            agent = OBJECT if self.objects and choice_source.choose(4) else pick(choice_source, (*KEYED, "free"))
            key = pick(choice_source, KEYS) if agent in (*KEYED, OBJECT) else ""
            timeout = 2.0 if choice_source.choose(12) == 11 else None
            copies = 2 if choice_source.choose(8) == 7 else 1
            program = (
                draw_object_program(choice_source, key)
                if agent == OBJECT
                else draw_program(choice_source, agent=agent, engines=bool(self.clusters))
            )
            client = choice_source.choose(clients)
            # One client's submits to an instance stay in order within a tenant.
            tenant = ("", "a")[client] if key else ("", "a", "b")[number % 3]
            tasks.append(Task(f"t{number}", agent, key, program, timeout, copies, client, tenant))
        return tasks

    def _draw_faults(self) -> list[tuple[int, Callable[[History], None]]]:
        choice_source = self.choice_source
        count = weighted(choice_source, [(2, 0), (5, 1), (4, 2), (2, 3), (1, 4)])
        kinds = faults.kinds(self)
        return [(1 + choice_source.choose(FAULT_STEPS), weighted(choice_source, kinds)) for _ in range(count)]

    # -- running -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run it to its end and check what is left."""
        scheduler = self.scheduler
        lines = [f"task {task}" for task in self.tasks]
        lines += [f"schedule: {command}" for command in self.schedule]
        for step, fault in self.planned:
            scheduler.at(step, _bound(fault, self))
        violations: list[Violation] = []
        poll_seconds = schedules.POLL_SECONDS if self.schedule else 5.0
        with virtual(self.loop, self.server.library, seed=self.seed, poll_seconds=poll_seconds):
            self._prepare()
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._direct())
            except Broken as broken:
                violations += broken.violations
            finally:
                self._dispose()
        violations += [Violation(kind, text) for kind, text in self.ledger.broken]
        return Outcome(
            violations=violations,
            lines=lines,
            choices=list(self.choice_source.made),
            steps=scheduler.steps,
            seconds=self.loop.now,
            faults=[fault.__name__ for _, fault in self.planned],
        )

    def _prepare(self) -> None:
        """Set up an empty broker that knows the app's names. The functions stay loaded from history to history."""
        commands: list[tuple[Argument, ...]] = [("FLUSHALL",), ("SET", CLOCK, EPOCH_MS)]
        commands.append(("HSET", f"{NAMESPACE}:settings", "partitions", len(self.scheduler.bases), "format", 1))
        for base in self.scheduler.bases:
            commands += [
                (
                    "HSET",
                    base + "agents",
                    *[part for name in self.app.agents if name != LATE for part in (name, "agent")],
                ),
                ("HSET", base + "topics", *[part for each in SUBSCRIPTIONS for part in _subscribed(each)]),
                ("HSET", base + "agents", OBJECT, OBJECTS),
                ("HSET", base + "tools", *[item for name in self.app.tools for item in (name, "tool")]),
                ("HSET", base + "meta", "request_timeout_ms", 15_000, *(("ready_max", 1) if self._takes_turns else ())),
                ("XGROUP", "CREATE", base + "agent", "agent-handler", "0", "MKSTREAM"),
                ("XGROUP", "CREATE", base + "tool", "tool-handler", "0", "MKSTREAM"),
                ("XGROUP", "CREATE", base + "record", "state-manager", "0", "MKSTREAM"),
                ("XGROUP", "CREATE", base + "record", "trajectory-recorder", "0", "MKSTREAM"),
            ]
        self.server.pipeline(commands)
        if not self.server.execute("FUNCTION", "LIST"):
            self.server.load_library()

    async def _direct(self) -> None:
        """Start everything, then check from time to time whether all is done."""
        scheduler, choice_source = self.scheduler, self.choice_source
        for _ in range(1 + choice_source.choose(2)):
            self.start_process("agent")
        if any(_uses(task.program, "tool", "try", "once") for task in self.tasks):
            self.start_process("tool")
        for engine in self.clusters:
            if any(_uses(task.program, engine) for task in self.tasks):
                for _ in range(1 + choice_source.choose(2)):
                    self.start_process(engine)
        people = self._answers and any(_uses(task.program, "human") for task in self.tasks)
        if self.whole:
            for _ in range(1 + choice_source.choose(2)):
                self.start_process("admit")
            self.start_process("record")
        elif len(scheduler.bases) > 1:
            RelayProcess(scheduler, "relay").start(_metrics())
        if not self.whole and any(fault is faults.step_clock for _, fault in self.planned):
            keeper = Process(scheduler, "keeper")
            keeper.spawn(self._watch_clock(keeper))
        if self.schedule:
            for _ in range(self.starters):
                self.start_process("schedule")
            self._ask(self._set_schedule(self.schedule))
        for client in range(2):
            mine = [task for task in self.tasks if task.client == client]
            if mine:
                self._ask(self._submit_all(mine))
        await asyncio.sleep(0.2)
        redriven = False
        still = 0
        while True:
            if people:
                self._answer_questions()
            if self.failure is not None:
                raise self.failure
            work, opened = self._work_left()
            if work == 0 and not self.open_calls:
                if not opened and not redriven:
                    redriven = True
                    if self.redrive_letters():
                        await asyncio.sleep(0.25)
                        continue
                if not opened:
                    break
                still += 1
                if still > 3:
                    raise Broken(invariants.stuck(self))
            else:
                still = 0
            if self.clock_stepped and work and self._only_late_timers(work):
                # Timers that were set by a clock that had stepped, before that was noticed, are late by that step.
                return
            if self.loop.now > MOST_SECONDS:
                raise Broken(invariants.unsettled(self))
            await asyncio.sleep(0.5)
        found = invariants.look(self)
        if found:
            raise Broken(found)

    def _work_left(self) -> tuple[int, int]:
        """Return how much the broker holds that somebody must still do, and how many tasks are open."""
        work, opened = self._work.count()
        if self.schedule:
            base = self.scheduler.bases[0]
            soon = self._broker_ms(base) + SOON_MS
            work += cast(int, self.server.execute("ZCOUNT", base + "scheduled", "-inf", soon))
        if self.whole:
            work += self._unread_commands()
            for number, base in enumerate(self.scheduler.bases):
                newest = cast(
                    list[tuple[bytes, object]], self.server.execute("XREVRANGE", base + "record", "+", "-", "COUNT", 1)
                )
                work += bool(newest) and not self.store.caught_up(number, newest[0][0].decode())
        return work, opened

    def _unread_commands(self) -> int:
        """Return how many commands nobody has read or finished."""
        key = ingress(NAMESPACE)
        try:
            groups = cast(list[list[Reply]], self.server.execute("XINFO", "GROUPS", key))
        except ServerError:
            return 0  # no such stream
        if not groups:
            return 1
        named = dict(zip(groups[0][::2], groups[0][1::2], strict=True))
        last = cast(bytes, named[b"last-delivered-id"]).decode()
        unread = cast(list[object], self.server.execute("XRANGE", key, f"({last}", "+", "COUNT", 10))
        return len(unread) + cast(int, named[b"pending"])

    def _only_late_timers(self, work: int) -> bool:
        late = 0
        for base in self.scheduler.bases:
            late += cast(int, self.server.execute("ZCOUNT", base + "timers", self._broker_ms(base) + 60_000, "+inf"))
            late += cast(int, self.server.execute("HLEN", base + "delayed"))
            late += cast(int, self.server.execute("ZCARD", base + "requests"))  # what such a timer keeps waiting
            late += cast(int, self.server.execute("ZCARD", base + "scheduled"))
        return late >= work

    def _broker_ms(self, base: str) -> int:
        offset = cast(bytes | None, self.server.execute("HGET", base + "meta", "offset"))
        return self.scheduler.server_ms() + int(offset or 0)

    async def _watch_clock(self, keeper: Process) -> None:
        watches = [ClockWatch(bus) for bus in keeper.buses()]
        while True:
            for watch in watches:
                with suppress(BusError):
                    await watch.check()
            await asyncio.sleep(0.5)

    def _dispose(self) -> None:
        """End everything; whatever code still does counts no more."""
        loop, scheduler = self.loop, self.scheduler
        self.ledger.journaled = lambda task, run, step: False
        for process in scheduler.processes:
            process.dead = True
        scheduler.active.clear()
        scheduler.actions.clear()
        scheduler.disk_errors = 0
        loop.quiescent = loop.stop
        for _ in range(4):
            left = [task for task in _tasks_of(loop) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            loop.drop_timers()
            loop.run_forever()
        for task in _tasks_of(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            asyncio.tasks._unregister_task(task)
        loop.close()

    # -- who acts ----------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        self.scheduler.note(what)

    def start_process(self, what: str) -> RoleProcess | SchedulerProcess:
        """Start a handler of the stream `agent` or `tool`, a gateway (`ray`, `spark`), a state-manager (`admit`), a
        recorder (`record`), or what starts due schedules without a state-manager (`schedule`)."""
        self._started += 1
        name = f"{what}{self._started}"
        process: RoleProcess | SchedulerProcess
        if what == "schedule":
            process = SchedulerProcess(self.scheduler, name)
        elif what in ("agent", "tool"):
            stop = pick(self.choice_source, (0.3, 3.0))
            objects = self.objects and what == "agent"
            process = HandlerProcess(self.scheduler, name, what, self.app, _metrics(), stop, objects)
        elif what in self.clusters:
            process = GatewayProcess(self.scheduler, name, self.clusters[what], self.app, _metrics(), GATEWAY_SECONDS)
        else:
            process = ServiceProcess(self.scheduler, name, what, self.store, _metrics())
        self.served.append(process)
        process.start()
        return process

    def _ask(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let the client do something. The history continues until that is done."""
        self.open_calls += 1

        async def ask() -> None:
            try:
                await coroutine
            except Exception as error:
                self.failure = error
            finally:
                self.open_calls -= 1

        self._client.spawn(ask())

    async def _submit_all(self, tasks: list[Task]) -> None:
        """Submit one client's tasks one after the other over one connection; copies of one are sent at once."""
        admission = Admission(self._client.buses())
        transport = self._client.transport()
        for task in tasks:
            if self.whole:
                body: dict[str, Any] = {"agent": task.agent, "input": task.input, "task_id": task.id}
                body |= {"key": task.key} if task.key else {}
                body |= {"conf": {"timeout_seconds": task.timeout_seconds}} if task.timeout_seconds else {}
                for _ in range(task.copies):
                    await self._command(transport, SUBMIT, task.id, body, task.tenant)
                continue
            await asyncio.gather(*(self._submit(admission, task) for _ in range(task.copies)))

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
                    self.note(f"{task} is rejected: {error}")
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
            id=id, source="sim", type=kind, replyto=ANSWERS, tenant=tenant, data=msgspec.json.encode(body)
        )
        while True:
            try:
                await transport.call("XADD", ingress(NAMESPACE), "*", *to_fields(command))
            except BusError:
                await asyncio.sleep(0.2)
            else:
                return

    def answers(self) -> list[dict[str, str]]:
        """Return the answers to clients, as attributes of events, with `data`."""
        found = cast(list[tuple[bytes, list[bytes]]], self.server.execute("XRANGE", ANSWERS, "-", "+"))
        return [
            {fields[at].decode(): fields[at + 1].decode() for at in range(0, len(fields), 2)} for _, fields in found
        ]

    def _answer_questions(self) -> None:
        """Answer all open questions of all runs, each differently, all at once."""
        for base in self.scheduler.bases:
            for name in cast(list[bytes], self.server.execute("ZRANGE", base + "open", 0, -1)):
                task = name.decode()
                asked = self._asked(f"{base}task:{task}")
                runs = [found[2:].decode() for found in asked if found.startswith(b"k:")]
                for fields in (asked, *(self._asked(f"{base}run:{task}/{run}") for run in runs)):
                    for found, value in fields.items():
                        if found.startswith(b"q:") and b"m:" + found[2:] in fields:
                            self._answer_question(task, value)

    def _asked(self, key: str) -> dict[bytes, bytes]:
        flat = cast(list[bytes], self.server.execute("HGETALL", key))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def _answer_question(self, task: str, question: bytes) -> None:
        request = msgspec.json.decode(question[QUESTION_MS:])["request_id"]
        if request in self._answered:
            return
        self._answered[request] = None
        self.note(f"{self._answers} people answer question {request} of {task}")
        for number in range(self._answers):
            self._ask(self._signal(task, request, f"answer {number}"))

    async def _signal(self, task: str, request: str, value: str) -> None:
        if self.whole:
            self._told += 1
            body = {"task_id": task, "request_id": request, "value": value}
            await self._command(self._client.transport(), SIGNAL, f"signal-{self._told}", body)
            return
        bus = await Admission(self._client.buses()).find(task)
        with suppress(BusError):
            await bus.signal(task, request, msgspec.json.encode(value))

    def client_repeats_schedule(self) -> None:
        """Send the last command again: the broker may have lost it, and an interval would continue forever."""
        if self.schedule:
            self._ask(self._set_schedule(self.schedule[-1:]))

    async def _set_schedule(self, commands: Sequence[schedules.Command]) -> None:
        """Send one client's commands for the schedule, in order."""
        buses, transport = self._client.buses(), self._client.transport()
        kept = Schedules(buses[0], Admission(buses))
        for command in commands:
            await asyncio.sleep(command.wait_seconds)
            self.note(f"the schedule {'is deleted' if command.data is None else 'is set'}")
            if self.whole:
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

    def client_publishes(self, times: int) -> None:
        """Publish a message, several times at once under one id."""
        topic, source = draw_topic(self.choice_source)
        self._told += 1
        id = f"message-{self._told}"
        self.note(f"{id} is published on {topic} for {source or 'anybody'}, {times} times at once")
        self._ask(self._publish(id, topic, source, times))

    async def _publish(self, id: str, topic: str, source: str, times: int) -> None:
        published = fingerprint("sim", id, digits=32)
        if self.whole:
            body: dict[str, Any] = {"topic": topic, "data": message(source)}
            body |= {"source": source} if source else {}
            transport = self._client.transport()
            for _ in range(times):
                await self._command(transport, PUBLISH, id, body)
        else:
            topics, data = Topics(self._client.buses()), msgspec.json.encode(message(source))
            publishing = (_insist(lambda: topics.publish(published, topic, source, data)) for _ in range(times))
            await asyncio.gather(*publishing)
        self.published.append((published, topic, source))

    def client_subscribes(self) -> None:
        """Let a new agent appear, which gets messages that had no subscriber."""
        self.note(f"{LATE} appears, and subscribes to {UNHEARD}")
        self._ask(self._subscribe())

    async def _subscribe(self) -> None:
        buses = self._client.buses()
        for bus in buses:
            await _insist(partial(bus.transport.call, "HSET", bus.keys.agents, LATE, "agent"))
        await _insist(lambda: Topics(buses).subscribe(TopicSubscription(UNHEARD, LATE)))
        self.heard = True

    def client_cancels(self, number: int, times: int) -> None:
        task = self.tasks[number].id
        if task not in self.accepted and not self.whole:
            return
        self.note(f"{task} is cancelled by its user, {times} times at once")
        for _ in range(times):
            self._ask(self._cancel(task))

    async def _cancel(self, task: str) -> None:
        if self.whole:
            self._told += 1
            await self._command(self._client.transport(), CANCEL, f"cancel-{self._told}", {"task_id": task})
            return
        bus = await Admission(self._client.buses()).find(task)
        with suppress(BusError):
            await bus.cancel(task, "the user's wish")

    def client_forks(self, number: int, at: str | None) -> None:
        """Fork a task in its current state, from step `at` on, or with all its results."""
        origin = self.tasks[number]
        fork = replace(origin, id=f"{origin.id}-fork{len(self.forks)}", copies=1, timeout_seconds=None)
        self.forks.append(fork)
        self.note(f"{origin.id} is forked as {fork.id}, {f'at step {at}' if at else 'at its end'}")
        self._ask(self._fork(origin.id, fork.id, at))

    async def _fork(self, origin: str, fork: str, at: str | None) -> None:
        admission = Admission(self._client.buses())
        try:
            bus = await admission.find(origin)
            plan = await plan_fork(bus, NAMESPACE, origin, at=at, input=..., store=None)
        except (InvalidInput, BusError) as error:
            self.note(f"{fork} is not made: {error}")
            return
        submission = plan.submission(task_id=fork)
        self.carried[fork] = frozenset(plan.begun.journal)
        await self._admit(admission, submission)

    def redrive_letters(self) -> bool:
        """Redrive dead letters, perhaps each twice at once. Return whether there were any."""
        if not self._reopen:
            return False
        found = False
        for number, base in enumerate(self.scheduler.bases):
            for entry, fields in cast(
                list[tuple[bytes, list[bytes]]], self.server.execute("XRANGE", base + "dead", "-", "+")
            ):
                named = dict(zip(fields[::2], fields[1::2], strict=True))
                task = named.get(b"taskid", b"").decode()
                if (
                    not task
                    or b"h" not in named
                    or self.server.execute("HGET", f"{base}task:{task}", "status") == b"completed"
                ):
                    continue  # nobody has a reason to drive what a completed task has done without
                found = True
                self.redriven[task] = None
                self.ledger.once.pop((task, named[b"runid"].decode()), None)
                self.note(f"letter {entry.decode()} of {task} is driven again, {self._reopen} times at once")
                for _ in range(self._reopen):
                    self._ask(self._redrive(number, entry.decode()))
        return found

    async def _redrive(self, partition: int, letter: str) -> None:
        bus = self._client.buses()[partition]
        with suppress(BusError):
            self.note(f"redrive {letter}: {await bus.redrive(letter, True)}")

    # -- what the ledger asks ----------------------------------------------------------------------------------

    def _base_of(self, task: str) -> str:
        for base in self.scheduler.bases:
            if self.server.execute("EXISTS", f"{base}task:{task}"):
                return base
        return self.scheduler.bases[0]

    def _journaled(self, task: str, run: str, step: str) -> bool:
        base = self._base_of(task) if len(self.scheduler.bases) > 1 else self.scheduler.bases[0]
        key = f"{base}task:{task}" if run == "r" else f"{base}run:{task}/{run}"
        return self.server.execute("HEXISTS", key, f"j:{step}") == 1

    def _owner_lives(self) -> bool:
        process = PROCESS.get()
        assert isinstance(process, HandlerProcess)
        return all(self.server.execute("ZSCORE", bus.keys.alive, bus.owner) is not None for bus in process.owners)


def run(server: SimServer, choice_source: ChoiceSource, *, seed: int | str = 0, story: bool = False) -> Outcome:
    """Run one history. With `story`, its events are in the outcome's lines, and a fingerprint of them."""
    history = History(server, choice_source, seed=seed)
    outcome = history.run()
    if story:
        told = invariants.story(history)
        outcome.lines += told
        outcome.fingerprint = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    history.scheduler.log.clear()  # most of what the garbage collector would have to look at
    return outcome


def _tasks_of(loop: SimLoop) -> list[asyncio.Task[Any]]:
    """All its tasks. Unlike `asyncio.all_tasks`, this looks at each task once."""
    return [task for task in list(asyncio.tasks._all_tasks) if task.get_loop() is loop]  # type: ignore[attr-defined]


async def _insist(call: Callable[[], Awaitable[object]]) -> None:
    """Act as a client that wants something done: try until it succeeds."""
    while True:
        try:
            await call()
        except (BusError, Rejected):
            await asyncio.sleep(0.2)
        else:
            return


def _subscribed(each: TopicSubscription) -> tuple[str, str]:
    return ("^", f"{each.topic} {each.agent}") if each.prefix else (f"={each.topic}", each.agent)


@cache
def _metrics() -> Metrics:
    return Metrics(CollectorRegistry(), "simulation")


def _bound(fault: Callable[[History], None], history: History) -> Callable[[], None]:
    return lambda: fault(history)


def _uses(program: Program, *names: str) -> bool:
    for op in program:
        if op[0] in names:
            return True
        match op:
            case ["ask" | "send", _, _, inner] if _uses(inner, *names):
                return True
            case ["gather", branches] if any(_uses(branch, *names) for branch in branches):
                return True
    return False
