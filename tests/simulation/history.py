"""One history: a few tasks, a few processes, some faults, and what must hold at its end.

1. `chooser.py` says where choices come from
2. `programs.py` is the app; `ledger.py` counts what it really did
3. `processes.py` are the processes, `faults.py` what happens to them
4. `loop.py`, `transport.py`, `scheduler.py`, `server.py`, `clock.py` run them, one broker call at a time
5. `invariants.py` says what must hold
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.keys import ingress
from runtime_core.bus.values import NotDurable
from runtime_core.client.fork import plan_fork
from runtime_core.errors import BusError, InvalidInput, Rejected, ServerError
from runtime_core.ingress.admission import Admission
from runtime_core.maintenance.keeper import ClockWatch
from runtime_core.telemetry.metrics import Metrics
from runtime_core.wire.commands import CANCEL, SIGNAL, SUBMIT, Submission, digest
from runtime_core.wire.envelope import Envelope, to_fields
from tests.simulation import faults, invariants
from tests.simulation.chooser import Chooser, pick, weighted
from tests.simulation.clock import virtual
from tests.simulation.ledger import Ledger
from tests.simulation.loop import PROCESS, SimLoop
from tests.simulation.processes import HandlerProcess, Process, RelayProcess
from tests.simulation.programs import KEYED, KEYS, LEDGER, Program, draw_program, simulated_app
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import CLOCK, EPOCH_MS, SimServer
from tests.simulation.services import MemoryStore, ServiceProcess
from tests.simulation.transport import SimTransport

NAMESPACE = "s"
ANSWERS = "answers"
"""Where clients of the whole system want to be answered."""
FAULT_STEPS = 125
"""Faults come within so many steps of the history."""
MOST_SECONDS = 60.0
"""Of virtual time, after which everything must have ended."""


@dataclass
class Task:
    """What a client submits."""

    id: str
    agent: str
    key: str
    program: Program
    timeout_seconds: float | None
    copies: int
    client: int
    tenant: str = ""

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
    """How a history ended."""

    violations: list[invariants.Violation]
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
    """Runs one history on a server that belongs to it meanwhile."""

    def __init__(self, server: SimServer, chooser: Chooser, *, seed: int | str = 0) -> None:
        self.server = server
        self.chooser = chooser
        self.seed = seed
        self.loop = SimLoop()
        partitions = 2 if chooser.choose(8) == 7 else 1
        self.scheduler = Scheduler(self.loop, server, chooser, NAMESPACE, partitions)
        self.ledger = Ledger(self._journaled, self._owner_lives)
        self.scheduler.context.run(LEDGER.set, self.ledger)
        self.app = simulated_app()
        self.served: list[HandlerProcess | ServiceProcess] = []
        """Processes that faults may hit."""
        self.whole = chooser.choose(8) == 7
        """Whether clients send commands, and all services run: else handlers run alone, and clients call functions."""
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
        self.open_calls = 0
        """What clients wait for."""
        self.tasks = self._draw_tasks()
        self.planned = self._draw_faults()
        self._reopen = chooser.choose(3)
        self._answers = chooser.choose(3)
        """How many people answer each question at once; the others are answered by their time limit."""
        self._takes_turns = chooser.choose(4) == 3
        """Whether one unread entry makes a work stream long, so that new tasks wait for the turns of their tenants."""
        self._answered: dict[str, None] = {}
        self._told = 0
        """How many commands were sent."""
        self._started = 0
        self._client = Process(self.scheduler, "client")

    # -- the plan ----------------------------------------------------------------------------------------------

    def _draw_tasks(self) -> list[Task]:
        chooser, tasks = self.chooser, []
        clients = 1 + chooser.choose(2)
        for number in range(1 + weighted(chooser, [(3, 0), (4, 1), (3, 2), (1, 3)])):
            agent = pick(chooser, (*KEYED, "free"))
            key = pick(chooser, KEYS) if agent in KEYED else ""
            timeout = 2.0 if chooser.choose(12) == 11 else None
            copies = 2 if chooser.choose(8) == 7 else 1
            program = draw_program(chooser, agent=agent)
            client = chooser.choose(clients)
            # One client's submits to an instance stay in order within a tenant.
            tenant = ("", "a")[client] if key else ("", "a", "b")[number % 3]
            tasks.append(Task(f"t{number}", agent, key, program, timeout, copies, client, tenant))
        return tasks

    def _draw_faults(self) -> list[tuple[int, Callable[[History], None]]]:
        chooser = self.chooser
        count = weighted(chooser, [(2, 0), (5, 1), (4, 2), (2, 3), (1, 4)])
        return [(1 + chooser.choose(FAULT_STEPS), weighted(chooser, faults.FAULTS)) for _ in range(count)]

    # -- running -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run it to its end and look at what is left."""
        scheduler = self.scheduler
        lines = [f"task {task}" for task in self.tasks]
        for step, fault in self.planned:
            scheduler.at(step, _bound(fault, self))
        violations: list[invariants.Violation] = []
        with virtual(self.loop, self.server.library, seed=self.seed):
            self._prepare()
            asyncio.set_event_loop(self.loop)
            try:
                self.loop.run_until_complete(self._direct())
            except invariants.Broken as broken:
                violations += broken.violations
            finally:
                self._dispose()
        violations += [invariants.Violation(kind, text) for kind, text in self.ledger.broken]
        return Outcome(
            violations=violations,
            lines=lines,
            choices=list(self.chooser.made),
            steps=scheduler.steps,
            seconds=self.loop.now,
            faults=[fault.__name__ for _, fault in self.planned],
        )

    def _prepare(self) -> None:
        """An empty broker that knows the app's names; the functions stay loaded from history to history."""
        commands: list[tuple[Argument, ...]] = [("FLUSHALL",), ("SET", CLOCK, EPOCH_MS)]
        commands.append(("HSET", f"{NAMESPACE}:settings", "partitions", len(self.scheduler.bases), "format", 1))
        for base in self.scheduler.bases:
            commands += [
                ("HSET", base + "agents", *[item for name in self.app.agents for item in (name, "agent")]),
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
        """Start everything, then look now and then whether all is done."""
        scheduler, chooser = self.scheduler, self.chooser
        for _ in range(1 + chooser.choose(2)):
            self.start_process("agent")
        if any(_uses(task.program, "tool", "try", "once") for task in self.tasks):
            self.start_process("tool")
        people = self._answers and any(_uses(task.program, "human") for task in self.tasks)
        if self.whole:
            for _ in range(1 + chooser.choose(2)):
                self.start_process("admit")
            self.start_process("record")
        elif len(scheduler.bases) > 1:
            RelayProcess(scheduler, "relay").start(_metrics())
        if not self.whole and any(fault is faults.step_clock for _, fault in self.planned):
            keeper = Process(scheduler, "keeper")
            keeper.spawn(self._watch_clock(keeper))
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
                    raise invariants.Broken(invariants.stuck(self))
            else:
                still = 0
            if self.clock_stepped and work and self._only_late_timers(work):
                # Timers that were set by a clock that had stepped, before that was noticed, are late by that step.
                return
            if self.loop.now > MOST_SECONDS:
                raise invariants.Broken(invariants.unsettled(self))
            await asyncio.sleep(0.5)
        found = invariants.look(self)
        if found:
            raise invariants.Broken(found)

    def _work_left(self) -> tuple[int, int]:
        """How much the broker holds that somebody must still do, and how many tasks are open."""
        commands: list[tuple[Argument, ...]] = []
        for base in self.scheduler.bases:
            commands += [
                ("XLEN", base + "agent"), ("XLEN", base + "tool"), ("ZCARD", base + "timers"),
                ("HLEN", base + "delayed"), ("XLEN", base + "asks"), ("XLEN", base + "replies"),
                ("XPENDING", base + "agent", "agent-handler"), ("XPENDING", base + "tool", "tool-handler"),
                ("ZCARD", base + "requests"), ("HGET", base + "meta", "queued"), ("ZCARD", base + "open"),
            ]  # fmt: skip
        replies = self.server.pipeline(commands)
        opened = sum(cast(int, reply) for reply in replies[10::11])
        work = 0
        for at, reply in enumerate(replies):
            if at % 11 == 10 or isinstance(reply, ServerError):
                continue
            if at % 11 == 9:
                work += int(cast(bytes | None, reply) or 0)
                continue
            work += cast(int, reply[0]) if isinstance(reply, list) else cast(int, reply)
        if self.whole:
            work += self._unread_commands()
            for number, base in enumerate(self.scheduler.bases):
                newest = cast(
                    list[tuple[bytes, object]], self.server.execute("XREVRANGE", base + "record", "+", "-", "COUNT", 1)
                )
                work += bool(newest) and not self.store.caught_up(number, newest[0][0].decode())
        return work, opened

    def _unread_commands(self) -> int:
        """How many commands nobody has read, or that nobody has done with."""
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
        return late >= work

    def _broker_ms(self, base: str) -> int:
        offset = cast(bytes | None, self.server.execute("HGET", base + "meta", "offset"))
        return self.scheduler.server_ms() + int(offset or 0)

    async def _watch_clock(self, keeper: Process) -> None:
        watches = [ClockWatch(bus) for bus in keeper.buses()]
        while True:
            for watch in watches:
                with suppress(BusError):
                    await watch.look()
            await asyncio.sleep(0.5)

    def _dispose(self) -> None:
        """Take everything down; what code does now counts no more."""
        loop, scheduler = self.loop, self.scheduler
        self.ledger.journaled = lambda task, run, step: False
        for process in scheduler.processes:
            process.dead = True
        scheduler.active.clear()
        scheduler.actions.clear()
        scheduler.disk_errors = 0
        loop.quiescent = loop.stop
        for _ in range(4):
            left = [task for task in asyncio.all_tasks(loop) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            loop._scheduled.clear()
            loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    # -- who acts ----------------------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        self.scheduler.note(what)

    def start_process(self, what: str) -> None:
        """Start a handler of the stream `agent` or `tool`, a state-manager (`admit`) or a recorder (`record`)."""
        self._started += 1
        name = f"{what}{self._started}"
        process: HandlerProcess | ServiceProcess
        if what in ("agent", "tool"):
            finish = pick(self.chooser, (0.1, 1.0))
            process = HandlerProcess(self.scheduler, name, what, self.app, _metrics(), finish)
        else:
            process = ServiceProcess(self.scheduler, name, what, self.store, _metrics())
        self.served.append(process)
        process.start()

    def _ask(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let the client do something; the history goes on until it has."""
        self.open_calls += 1

        async def ask() -> None:
            try:
                await coroutine
            finally:
                self.open_calls -= 1

        self._client.spawn(ask())

    async def _submit_all(self, tasks: list[Task]) -> None:
        """One client's submits, one after the other over one connection; copies of one go out at once."""
        admission = Admission(self._client.buses())
        transport = self._client.transport()
        for task in tasks:
            if self.whole:
                body: dict[str, Any] = {"agent": task.agent, "input": task.program, "task_id": task.id}
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
            input_json=msgspec.json.encode(task.program),
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
        """Append a command to the ingress; its answers come on a stream of the user's."""
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
        """What clients were answered, as attributes of events, with `data`."""
        found = cast(list[tuple[bytes, list[bytes]]], self.server.execute("XRANGE", ANSWERS, "-", "+"))
        return [
            {fields[at].decode(): fields[at + 1].decode() for at in range(0, len(fields), 2)} for _, fields in found
        ]

    def _answer_questions(self) -> None:
        """Let people answer the questions that are open, each differently, all at once."""
        for task in (*self.tasks, *self.forks):
            base = self._base_of(task.id)
            names = cast(list[bytes], self.server.execute("HKEYS", f"{base}task:{task.id}"))
            asked = [name.decode()[2:] for name in names if name.startswith(b"q:") and b"m:" + name[2:] in names]
            for step in asked:
                place = f"{task.id} r:{step}"
                if place in self._answered:
                    continue
                self._answered[place] = None
                self.note(f"{self._answers} people answer question r:{step} of {task.id}")
                for number in range(self._answers):
                    self._ask(self._signal(task.id, f"r:{step}", f"answer {number}"))

    async def _signal(self, task: str, request: str, value: str) -> None:
        if self.whole:
            self._told += 1
            body = {"task_id": task, "request_id": request, "value": value}
            await self._command(self._client.transport(), SIGNAL, f"signal-{self._told}", body)
            return
        bus = await Admission(self._client.buses()).find(task)
        with suppress(BusError):
            await bus.signal(task, request, msgspec.json.encode(value))

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
        """Fork a task as it stands now, from step `at` on, or with all that it has done."""
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
        """Drive dead letters again, perhaps each twice at once; whether there was anything."""
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


def run(server: SimServer, chooser: Chooser, *, seed: int | str = 0, story: bool = False) -> Outcome:
    """Run one history. With `story`, its events are in the outcome's lines, and a fingerprint of them."""
    history = History(server, chooser, seed=seed)
    outcome = history.run()
    if story:
        told = invariants.story(history)
        outcome.lines += told
        outcome.fingerprint = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    return outcome


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
