"""One history: a few tasks, a few processes, some faults, and the invariants at its end.

1. `choice_source.py` has the sources of choices
2. `tasks.py` and `schedules.py` are what clients ask for, `clients.py` how they do it
3. `programs.py` and `objects.py` are the app; `ledger.py` counts what it really did
4. `processes.py`, `services.py` and `engines.py` are the processes, `faults.py` what happens to them
5. `loop.py`, `transport.py`, `scheduler.py`, `server.py`, `clock.py` run them, one broker call at a time
6. `work_left.py` says when it is over, `invariants.py`, `schedules.py` and `waiting.py` what must hold
7. `story.py` reports what happened
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.keys import ingress
from runtime_core.bus.topics import TopicSubscription
from runtime_core.errors import BusError, ServerError
from runtime_core.runs.turn import SETTLE_SECONDS
from runtime_core.state_manager.keeper import ClockWatch
from runtime_core.state_manager.publishers import Publisher
from runtime_core.telemetry.metrics import Metrics
from tests.simulation import faults, invariants, schedules, waiting
from tests.simulation.choice_source import ChoiceSource, pick, weighted
from tests.simulation.clients import FEED_SECONDS, PUBLISHER, Clients
from tests.simulation.clock import virtual
from tests.simulation.engines import ENGINES, Cluster, GatewayProcess
from tests.simulation.ledger import LEDGER, Ledger
from tests.simulation.loop import PROCESS, SimLoop
from tests.simulation.objects import STREAM as OBJECTS
from tests.simulation.processes import HandlerProcess, Process, RelayProcess, RoleProcess, SchedulerProcess
from tests.simulation.programs import (
    LATE,
    OBJECT,
    SUBSCRIPTIONS,
    TURN_SECONDS,
    draw_mix,
    simulated_app,
)
from tests.simulation.scheduler import Scheduler
from tests.simulation.server import CLOCK, EPOCH_MS, SimServer
from tests.simulation.services import MOST_ANSWER_BYTES, MemoryStore, ServiceProcess
from tests.simulation.snapshot import ENDED, Broken, Violation
from tests.simulation.story import story as story_of
from tests.simulation.tasks import draw_tasks, uses
from tests.simulation.work_left import WorkLeft

NAMESPACE = "s"
FAULT_STEPS = 125
"""Faults come within so many steps of the history."""
SOON_MS = 100_000
"""A schedule that is due later is no work that is left: one that came once is kept for a day."""
GATEWAY_SECONDS = 3.0
"""How long a gateway may take to stop."""
MOST_SECONDS = 60.0
"""Of virtual time, after which everything must have ended."""
FAULT_SECONDS = 20.0
"""How much longer it may take for each fault beyond the fourth."""
TAKEN_SECONDS = TURN_SECONDS + SETTLE_SECONDS
"""How much longer it may take if a server has lost the end of a turn whose owner is alive: until then nobody else takes
that turn."""


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
        self.ledger = Ledger(self._journaled, self._owner_lives, self._is_open, self._holders, self._carried)
        self.scheduler.context.run(LEDGER.set, self.ledger)
        self.app = simulated_app()
        self.served: list[RoleProcess | SchedulerProcess] = []
        """Processes that faults may hit."""
        self.whole = choice_source.choose(8) == 7
        """Whether clients send commands, and all services run: else handlers run alone, and clients call functions."""
        self.objects = choice_source.choose(10) == 9
        """Whether agents that are objects take part: they ask each other in the middle of a turn."""
        self.quorum = choice_source.choose(4) == 3
        """Whether submits wait for a replica, all over the same connections."""
        self.bounds_answers = self.whole and choice_source.choose(2) == 1
        """Whether only the newest answers are kept."""
        self.clusters: dict[str, Cluster] = {}
        """By engine, what runs compute steps, where there are any."""
        if choice_source.choose(10) == 9:
            self.clusters = {name: Cluster(engine, self.scheduler, self.ledger) for name, engine in ENGINES.items()}
        self.streams = ["agent", "tool", *([OBJECTS] if self.objects else []), *self.clusters]
        """The work streams."""
        self._work = WorkLeft(server, self.scheduler.bases, self.streams)
        self.store = MemoryStore()
        self.uncertain: list[str] = []
        """Tasks that a broker may have lost with its last writes."""
        self.lost_tail = False
        self.clock_stepped = False
        self.narrow = choice_source.choose(4) == 3
        """Whether it has about half of the operations and of the kinds of faults, which then meet more often."""
        mix = draw_mix(choice_source, engines=bool(self.clusters), narrow=self.narrow)
        self.tasks = draw_tasks(choice_source, mix, objects=self.objects)
        self.schedule: list[schedules.Command] = []
        if choice_source.choose(2 if self.whole else 24) == 1:
            # In the place of a task, so that no history becomes longer.
            self.schedule = schedules.draw(choice_source)
            del self.tasks[1:]
        self.starters = 1 + choice_source.choose(2) if self.schedule and not self.whole else 0
        """How many processes start what is due, where no state-manager does."""
        self.planned = self._draw_faults()
        self.clients = Clients(self)
        self._takes_turns = choice_source.choose(4) == 3
        """Whether one unread entry makes a work stream long, so that new tasks wait for the turns of their tenants."""
        self._started = 0

    # -- the plan ----------------------------------------------------------------------------------------------

    def _draw_faults(self) -> list[tuple[int, Callable[[History], None]]]:
        choice_source = self.choice_source
        kinds = faults.kinds(self)
        if self.narrow:
            kinds = [each for each in kinds if choice_source.choose(2)] or kinds
            count = weighted(choice_source, [(1, 1), (2, 2), (4, 3), (4, 4), (3, 6), (1, 9)])
        else:
            count = weighted(choice_source, [(2, 0), (5, 1), (4, 2), (2, 3), (1, 4)])
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
        if self.bounds_answers:
            publisher = Publisher(name=PUBLISHER, tenant=PUBLISHER)
            commands.append(("HSET", self.scheduler.bases[0] + "publishers", PUBLISHER, msgspec.json.encode(publisher)))
        self.server.pipeline(commands)
        if not self.server.execute("FUNCTION", "LIST"):
            self.server.load_library()

    async def _direct(self) -> None:
        """Start everything, then check from time to time whether all is done."""
        scheduler, choice_source = self.scheduler, self.choice_source
        for _ in range(1 + choice_source.choose(2)):
            self.start_process("agent")
        if any(uses(task.program, "tool", "try", "once", "limited", "slim") for task in self.tasks):
            self.start_process("tool")
        for engine in self.clusters:
            if any(uses(task.program, engine) for task in self.tasks):
                for _ in range(1 + choice_source.choose(2)):
                    self.start_process(engine)
        people = self.clients.answers_questions and any(uses(task.program, "human") for task in self.tasks)
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
            self.clients.ask(self.clients.set_schedule(self.schedule))
        for client in range(2):
            mine = [task for task in self.tasks if task.client == client]
            if mine:
                self.clients.ask(self.clients.submit_all(mine))
        await asyncio.sleep(0.2)
        receives = any(uses(task.program, "receive") for task in self.tasks)
        redriven = False
        still = 0
        while True:
            if people:
                self.clients.answer_questions()
            if receives:
                self.clients.feed()
            if self.clients.failure is not None:
                raise self.clients.failure
            work, opened = self._work_left()
            if work == 0 and not self.clients.open_calls:
                if not opened and not redriven:
                    redriven = True
                    if self.clients.redrive_letters():
                        await asyncio.sleep(0.25)
                        continue
                if not opened:
                    break
                still += 1
                # A message for one step may wake another, whose key the first one holds: the next message comes later.
                if still > 3 + (2 * FEED_SECONDS if receives else 0):
                    raise Broken(waiting.stuck(self))
            else:
                still = 0
            if self.clock_stepped and work and self._only_late_timers(work):
                # Timers that were set by a clock that had stepped, before that was noticed, are late by that step.
                return
            if self.loop.now > self._most_seconds():
                raise Broken(waiting.unsettled(self))
            await asyncio.sleep(0.5)
        found = invariants.look(self)
        if found:
            raise Broken(found)

    def _most_seconds(self) -> float:
        return MOST_SECONDS + FAULT_SECONDS * max(0, len(self.planned) - 4) + (TAKEN_SECONDS if self.lost_tail else 0)

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
            late += cast(int, self.server.execute("HLEN", base + "waiting"))
            late += cast(int, self.server.execute("ZCARD", base + "requests"))  # what such a timer keeps waiting
            late += cast(int, self.server.execute("ZCARD", base + "scheduled"))
        requests = sum(cast(int, self.server.execute("ZCARD", base + "requests")) for base in self.scheduler.bases)
        if self.objects and requests:
            # Their handlers stay in the turn, whose entry counts as stored and as pending.
            late += 2 * sum(cast(int, self.server.execute("XLEN", base + OBJECTS)) for base in self.scheduler.bases)
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
            bounds = MOST_ANSWER_BYTES if self.bounds_answers else None
            process = ServiceProcess(self.scheduler, name, what, self.store, _metrics(), bounds)
        self.served.append(process)
        process.start()
        return process

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

    def _carried(self, task: str, run: str, step: str) -> bool:
        if run == "r" or not any(fork.id == task for fork in self.clients.forks):
            return False
        value = self.server.execute("HGET", f"{self._base_of(task)}run:{task}/{run}", f"j:{step}")
        return value is not None and cast(bytes, value).startswith(b"*")

    def _is_open(self, task: str, run: str) -> bool:
        """Return whether this run or call is not over on the broker: its task is open, and its step lacks a result."""
        base = self._base_of(task)
        status = self.server.execute("HGET", f"{base}task:{task}", "status")
        if status is None or cast(bytes, status).decode() in ENDED:
            return False
        parent, _, step = run.rpartition("/")
        key = f"{base}task:{task}" if parent == "r" else f"{base}run:{task}/{parent}"
        return not parent or self.server.execute("HEXISTS", key, f"m:{step}") == 1

    def _holders(self, limit: str, task: str) -> list[str] | None:
        """Return what holds slots of a limit, as `task|path`; None if a server has lost its last writes."""
        found = self.server.execute("ZRANGE", f"{self._base_of(task)}slots:{limit}", 0, -1)
        return None if self.lost_tail else [each.decode() for each in cast(list[bytes], found)]

    def _owner_lives(self) -> bool:
        process = PROCESS.get()
        assert isinstance(process, HandlerProcess)
        return not process.dead and all(
            self.server.execute("ZSCORE", bus.keys.alive, bus.owner) is not None for bus in process.owners
        )


def run(server: SimServer, choice_source: ChoiceSource, *, seed: int | str = 0, story: bool = False) -> Outcome:
    """Run one history. With `story`, its events are in the outcome's lines, and a fingerprint of them."""
    history = History(server, choice_source, seed=seed)
    outcome = history.run()
    if story:
        told = story_of(history)
        outcome.lines += told
        outcome.fingerprint = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
    history.scheduler.log.clear()  # most of what the garbage collector would have to look at
    return outcome


def _tasks_of(loop: SimLoop) -> list[asyncio.Task[Any]]:
    """All its tasks. Unlike `asyncio.all_tasks`, this looks at each task once."""
    return [task for task in list(asyncio.tasks._all_tasks) if task.get_loop() is loop]  # type: ignore[attr-defined]


def _subscribed(each: TopicSubscription) -> tuple[str, str]:
    return ("^", f"{each.topic} {each.agent}") if each.prefix else (f"={each.topic}", each.agent)


@cache
def _metrics() -> Metrics:
    return Metrics(CollectorRegistry(), "simulation")


def _bound(fault: Callable[[History], None], history: History) -> Callable[[], None]:
    return lambda: fault(history)
