"""Processes of agents as objects are killed and paused at random: no answer is lost, crossed or wrong, and each agent
has counted each message once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from runtime_core.base.lifeline import tied
from runtime_core.consumer.announcements import is_announced
from tests.apps.kills_app import KEYS, TYPES, Order, Receipt, desk_of
from tests.chaos.harm import EVERY_SECONDS, MOST_HARM, RESULT_SECONDS, harm_broker, under
from tests.chaos.invariants import check_broker
from tests.conftest import ROOT, OwnServer
from tests.fleet import DEFECTS, plain_redis
from tests.servers.matrix import only_in_matrix
from tests.servers.process import Server
from weft.runtime import AgentId, Runtime, TypeSubscription

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

ORDERS = int(os.environ.get("WEFT_CHAOS_TASKS") or 200)
AT_ONCE = 200
"""How many of them wait for their answers at once."""
CALLED = max(20, ORDERS // 10)
"""Orders of a process that is killed as well, and asks again for what it has no answer of."""
LEASE_SECONDS = 1.0
LEAST_HARM = 5
WORKERS = ("worker-1", "worker-2", "worker-3")
CALLER = "caller"

Harm = Callable[[], Coroutine[None, None, None]]


class Processes:
    """Three workers and a caller. A killed one is started again, until the caller has all answers."""

    def __init__(self, url: str, namespace: str, folder: Path) -> None:
        self.answers = folder / "answers"
        self.harmed = 0
        self._folder = folder
        app = [sys.executable, "-m", "tests.apps.kills_app", url, namespace, f"{LEASE_SECONDS:g}"]
        self._command = tied(app, signal.SIGKILL)
        self._forks: subprocess.Popen[bytes] | None = None
        self._pids: dict[str, int] = {}
        self._killed: set[int] = set()
        self._called = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        pipe = subprocess.PIPE
        self._forks = subprocess.Popen(self._command, cwd=ROOT, stdin=pipe, stdout=pipe)
        for name in WORKERS:
            self._start(name)
        self._watching = asyncio.create_task(self._watch(), name="watch the processes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))
        if self._forks is not None:
            self._forks.kill()
            self._forks.communicate()
        logs = {path.stem: path.read_text() for path in self._folder.glob("*.log")}
        if error is not None:
            for name, text in logs.items():
                print(f"=== {name}\n{text[-4000:]}")
        else:
            defects = [f"{name}: {text[-4000:]}" for name, text in logs.items() if any(d in text for d in DEFECTS)]
            assert not defects, "\n".join(defects)

    def harm(self, chance: random.Random) -> int:
        """Kill or pause one of them. Return the id of one that is paused now, else 0."""
        alive = {name: pid for name, pid in self._pids.items() if _alive(pid)}
        if not alive:
            return 0
        name = chance.choice(list(alive))
        pause = chance.random() < 0.3 and name != CALLER
        os.kill(alive[name], signal.SIGSTOP if pause else signal.SIGKILL)
        if not pause:
            self._killed.add(alive[name])
        self.harmed += 1
        return alive[name] if pause else 0

    async def called(self) -> None:
        """Start the caller and wait until it has all answers. Raises if a process ends by itself."""
        self._start(CALLER)
        waiting = asyncio.create_task(self._called.wait())
        assert self._watching is not None
        await asyncio.wait((waiting, self._watching), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._watching.done():
            self._watching.result()

    def _start(self, name: str) -> None:
        role = f"caller {self.answers} {CALLED}" if name == CALLER else "worker"
        assert self._forks is not None
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(f"{self._folder / name}.log {role}\n".encode())
        self._forks.stdin.flush()
        self._pids[name] = int(self._forks.stdout.readline())

    async def _watch(self) -> None:
        while True:
            for name, pid in list(self._pids.items()):
                if _alive(pid):
                    continue
                if name == CALLER and self.answers.with_suffix(".done").exists():
                    del self._pids[name]
                    self._called.set()
                    continue
                assert pid in self._killed, f"{name} ended by itself; see its log"
                self._start(name)
            await asyncio.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_requests_survive_kills(own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int) -> None:
    await orders(own_server(), namespace, tmp_path, chaos_seed)


@only_in_matrix("the broker is killed too")
async def test_requests_survive_kills_of_the_broker_too(
    own_server: OwnServer, namespace: str, tmp_path: Path, chaos_seed: int
) -> None:
    await orders(own_server(append="always"), namespace, tmp_path, chaos_seed, broker_dies=True)


async def orders(server: Server, namespace: str, folder: Path, seed: int, *, broker_dies: bool = False) -> None:
    """Request all orders while processes are harmed, then check the invariants."""
    chance = random.Random(seed)
    answers: dict[str, Receipt] = {}
    room = asyncio.Semaphore(AT_ONCE)
    async with (
        Processes(server.url, namespace, folder) as processes,
        Runtime(server.url, namespace, services=False, lease_seconds=LEASE_SECONDS) as runtime,
    ):

        async def one(number: int) -> None:
            async with room:
                answers[f"order-{number}"] = await runtime.send_message(
                    Order(f"order-{number}", number), desk_of(number), timeout=RESULT_SECONDS
                )

        async def harm() -> None:
            async with asyncio.TaskGroup() as harms:
                harms.create_task(harm_processes(processes, chance))
                if broker_dies:
                    harms.create_task(harm_broker(server, chance, lambda: len(answers) / ORDERS))

        async with under(harm()), asyncio.timeout(RESULT_SECONDS):
            # What is published before anybody has subscribed is nobody's, once the type is known.
            await runtime.add_subscription(TypeSubscription("told", "auditor"))
            await known(runtime)
            await asyncio.gather(processes.called(), *(one(number) for number in range(ORDERS)))
        assert processes.harmed >= LEAST_HARM
        check_answers(answers, processes.answers)
        async with asyncio.timeout(RESULT_SECONDS):
            await check_states(runtime)
            await runtime.stop_when_idle()
        async with plain_redis(server.port) as redis:
            await check_broker(redis, namespace, work=[f"agent:{name}" for name in TYPES])


async def known(runtime: Runtime) -> None:
    """Wait until workers have registered all types: before that, a request fails at once."""
    buses = await runtime.broker()
    for name in TYPES:
        while not await is_announced(buses[0], "agent", name):  # the workers are other processes
            await asyncio.sleep(0.02)


async def harm_processes(processes: Processes, chance: random.Random) -> None:
    """Every 300 ms one process is killed, or paused for longer than its lease, until that has been enough."""
    waking: set[asyncio.Task[None]] = set()

    async def wake(pid: int) -> None:
        try:
            await asyncio.sleep(LEASE_SECONDS * chance.uniform(1.2, 2.0))
        finally:
            with contextlib.suppress(ProcessLookupError):  # killed meanwhile
                os.kill(pid, signal.SIGCONT)

    try:
        while processes.harmed < MOST_HARM:
            await asyncio.sleep(EVERY_SECONDS)
            paused = processes.harm(chance)
            if paused:
                task = asyncio.create_task(wake(paused), name=f"wake {paused}")
                waking.add(task)
                task.add_done_callback(waking.discard)
        if waking:
            await asyncio.wait(waking)
    finally:
        for task in list(waking):
            task.cancel()
        if waking:
            await asyncio.wait(waking)


def number_of(id: str) -> int:
    return int(id.rpartition("-")[2])


def agents_of(id: str) -> dict[str, str]:
    """Return the key of each type's agent that handles an order."""
    number = number_of(id)
    keys = {"desk": number, "clerk": number // 2, "ledger": number // 3, "auditor": number}
    return {type: f"k{key % KEYS}" for type, key in keys.items()}


def check_answers(answers: dict[str, Receipt], file: Path) -> None:
    """Check that each caller has the answer to its own order, from the right agents."""
    found = {id: (receipt.id, *receipt.by) for id, receipt in answers.items()}
    for line in file.read_text().splitlines():
        id, *said = line.split()
        found[id] = tuple(said)
    every = [f"order-{number}" for number in range(ORDERS)] + [f"called-{number}" for number in range(CALLED)]
    wanted = {id: (id, *(f"{type}/{key}" for type, key in agents_of(id).items() if type != "auditor")) for id in every}
    assert found == wanted


async def check_states(runtime: Runtime) -> None:
    """Check that each agent has seen each of its messages once; waits for publications."""
    ids = [f"order-{number}" for number in range(ORDERS)] + [f"called-{number}" for number in range(CALLED)]
    wanted = {
        (type, f"k{key}"): {id: 1 for id in ids if agents_of(id)[type] == f"k{key}"}
        for type in TYPES
        for key in range(KEYS)
    }
    while not await runtime._is_idle():
        await asyncio.sleep(0.05)
    wrong = {}
    for (type, key), seen in wanted.items():
        state = await runtime.agent_save_state(AgentId(type, key))
        # An agent that nobody has come to has nothing.
        found = dict(state["seen"])
        if found != seen:
            ids_of = found.keys() | seen.keys()
            wrong[f"{type}/{key}"] = {id: found.get(id, 0) for id in ids_of if found.get(id) != seen.get(id)}
    assert not wrong, f"not handled just once, by agent: {wrong}"
