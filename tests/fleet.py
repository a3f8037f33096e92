"""The four services as real processes, which a test may kill, pause and restart.

async with Fleet(server.url, namespace, tmp_path, replicas=2) as fleet:
    fleet.kill("agent-handler-1")               # the fleet starts it again
    …                                           # at the end each process must stop cleanly
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

from redis.asyncio import Redis

from tests.service_forks import COMMAND, SOURCES, Fork, start

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("agent-handler", "tool-handler", "state-manager", "trajectory-recorder")
APP = "tests.apps.fleet_app:app"
READY_SECONDS = 60.0
"""How long a service may take until it reads, on a machine that is busy with other tests."""
CLEAN_SECONDS = 60.0
REPLACE_SECONDS = 300.0
"""How long a replica that is replaced may take to finish what it runs."""
COMMAND_SECONDS = 120.0
WATCH_SECONDS = 0.05
READY = re.compile(r"ready in [\d.]+ s \(process (\d+)\)")
DEFECTS = (
    "Traceback",
    "unexpected error",
    "the handler failed on",
    "was never retrieved",
    "was never awaited",
)
"""What no log may hold, whatever was killed: an error that the code did not foresee."""


PlainRedis: TypeAlias = Any
"""redis-py's client. Any, since it types most replies as a union of all the shapes that it knows."""


class FleetError(AssertionError):
    """A process of the fleet did something unexpected. The message has the end of its log."""


@dataclass
class Member:
    """One replica of a service."""

    name: str
    """As in `agent-handler-1`: the service and a number from 1."""
    service: str
    log: Path
    process: subprocess.Popen[bytes] | Fork | None = None
    paused: bool = False
    killed: bool = False
    """Whether the test has killed it, so that its end is no surprise."""
    terminated: bool = False
    """Whether it was asked to stop: it must do so with status 0, or before it had begun."""
    starts: int = 0
    ended_with: list[int] = field(default_factory=list)
    """Exit statuses so far; negative ones are signals."""
    replaced: list[int] = field(default_factory=list)
    """Ids of the processes that another one has taken the place of."""

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} is not running"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def ready(self) -> bool:
        """Whether the current process has reported that it is ready."""
        return self.process is not None and str(self.process.pid) in READY.findall(self.text())


@dataclass
class Harm:
    """One kill or pause."""

    name: str
    pid: int
    began: float
    """Seconds since 1970, and so is the next."""
    ended: float
    """When it was resumed, infinite while it is paused; of a kill: when it began."""


class Fleet:
    """Replicas of the services on one server and namespace. Processes that end are started again, as by a supervisor.

    Use it in the main thread: on Linux the processes end with the thread that started them.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        folder: Path,
        *,
        replicas: int | Mapping[str, int] = 1,
        lease_seconds: float = 1.0,
        app: str = APP,
        environ: Mapping[str, str] | None = None,
        may_die: bool = False,
        commands: Mapping[str, Sequence[str]] | None = None,
        urls: Mapping[str, str] | None = None,
    ) -> None:
        """`urls` has the broker of a service, by its name, where that differs from `url`.

        `replicas` is a number for all services, or one by service (others then run not at all).

        `commands` has what runs in place of a service, by its name: a module and its arguments.

        `may_die` says that processes may end by themselves, as where an app kills its own process.
        """
        self.url = url
        self.namespace = namespace
        self.folder = folder
        self.lease_seconds = lease_seconds
        self.trajectory_url = f"sqlite:///{folder / 'trajectory.db'}"
        self._may_die = may_die
        self._commands = dict(commands or {})
        self._urls = dict(urls or {})
        counts = dict.fromkeys(SERVICES, replicas) if isinstance(replicas, int) else replicas
        self.members = {
            f"{service}-{number}": Member(f"{service}-{number}", service, folder / f"{service}-{number}.log")
            for service, count in counts.items()
            for number in range(1, count + 1)
        }
        self.environ: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WEFT_")},
            "WEFT_REDIS_URL": url,
            "WEFT_NAMESPACE": namespace,
            "WEFT_APP": app,
            "WEFT_LEASE_SECONDS": f"{lease_seconds:g}",
            "WEFT_DATA_DIR": str(folder),
            "WEFT_TRAJECTORY_URL": self.trajectory_url,
            "PYTHONPATH": SOURCES,
            **(environ or {}),
        }
        self.harms: list[Harm] = []
        """Each kill and each pause of a process."""
        self._supervisor: asyncio.Task[None] | None = None
        self._surprises: list[str] = []
        self._commands_run = 0

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for member in self.members.values():
                self._start(member)
            await self.ready()
        except BaseException:
            self._end()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="supervise the fleet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.stop()
                self.check()
            else:
                print(self.logs())
        finally:
            await self._stop_supervising()
            self._end()

    # -- what a test does to it --------------------------------------------------------------------------------

    async def weft(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the command as the operator of this fleet."""
        self._commands_run += 1
        printed, errors = (self.folder / f"weft-{self._commands_run}.{name}" for name in ("out", "err"))
        process = start((COMMAND, *arguments), {**self.environ, **environ}, printed, errors)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                while (status := process.poll()) is None:
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, status, printed.read_text(), errors.read_text())

    def names(self, *services: str) -> list[str]:
        """The replicas of these services, or of all."""
        return [name for name, member in self.members.items() if not services or member.service in services]

    def kill(self, name: str) -> None:
        """SIGKILL. The fleet starts it again."""
        member = self.members[name]
        if member.running:
            now = time.time()
            self._end_pauses(member.pid, now)
            self.harms.append(Harm(name, member.pid, now, now))
            member.killed = True
            member.paused = False
            os.kill(member.pid, signal.SIGKILL)

    def terminate(self, name: str) -> None:
        """Send SIGTERM and start no replacement until it has stopped."""
        member = self.members[name]
        if member.running:
            now = time.time()
            self.harms.append(Harm(name, member.pid, now, now))
            member.terminated = True
            os.kill(member.pid, signal.SIGTERM)

    def pause(self, name: str) -> None:
        """Send SIGSTOP: it keeps its deliveries and connections, and is silent."""
        member = self.members[name]
        if member.running:
            self.harms.append(Harm(name, member.pid, time.time(), math.inf))
            member.paused = True
            os.kill(member.pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Send SIGCONT if it is still paused."""
        member = self.members[name]
        if member.paused and member.running:
            os.kill(member.pid, signal.SIGCONT)
            self._end_pauses(member.pid, time.time())
        member.paused = False

    def use_urls(self, urls: Mapping[str, str]) -> None:
        """Set the brokers of services that start from now on, by service."""
        self._urls = dict(urls)

    def run_instead(self, commands: Mapping[str, Sequence[str]]) -> None:
        """Set what runs in place of these services from now on: a module and its arguments."""
        self._commands.update(commands)

    async def replace(self, name: str) -> None:
        """Replace a process as a rollout does: start a new one, and when it is ready, send SIGTERM to the old one.

        It must end with status 0. Raises FleetError where it does not.
        """
        member = self.members[name]
        old = member.process
        assert old is not None, f"{name} is not running"
        self._start(member)
        try:
            await self.ready([name])
            old.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + REPLACE_SECONDS
            while old.poll() is None:
                if time.monotonic() > deadline:
                    raise FleetError(f"{name} ({old.pid}) did not stop; its log: {member.text()[-4000:]}")
                await asyncio.sleep(0.02)
        finally:
            if old.poll() is None:
                old.kill()
            old.wait()
        member.replaced.append(old.pid)
        if old.returncode != 0:
            raise FleetError(f"{name} ({old.pid}) ended with {old.returncode}; its log: {member.text()[-4000:]}")

    async def ready(self, names: Iterable[str] | None = None, seconds: float = READY_SECONDS) -> None:
        """Wait until these replicas, or all, read. Raises FleetError with the log of one that does not."""
        waited = [self.members[name] for name in (self.members if names is None else names)]
        deadline = time.monotonic() + seconds
        for member in waited:
            while not member.ready():
                if self._supervisor is None and not member.running:
                    raise FleetError(f"{member.name} ended at its start; its log: {member.text()}")
                if time.monotonic() > deadline:
                    raise FleetError(f"{member.name} did not read within {seconds:g} s; its log: {member.text()}")
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Send SIGTERM to all: each must exit with status 0. Raises FleetError for one that does not."""
        for name in self.members:
            self.resume(name)
        await self._stop_supervising()
        for member in self.members.values():
            if member.running:
                os.kill(member.pid, signal.SIGTERM)
        deadline = time.monotonic() + CLEAN_SECONDS
        for member in self.members.values():
            while member.running:
                if time.monotonic() > deadline:
                    raise FleetError(f"{member.name} did not stop; its log: {member.text()[-4000:]}")
                await asyncio.sleep(0.02)
            status = member.process.returncode if member.process is not None else 0
            stopped_at_start = status == -signal.SIGTERM and not member.ready()
            if status != 0 and not member.killed and not stopped_at_start:
                raise FleetError(f"{member.name} stopped with status {status}; its log: {member.text()[-4000:]}")

    async def restart(self) -> None:
        """Stop all gracefully and start all again: waiting work must survive the end of every process."""
        await self.stop()
        for member in self.members.values():
            member.killed = False
            self._start(member)
        await self.ready()
        self._supervisor = asyncio.create_task(self._supervise(), name="supervise the fleet")

    # -- what a test asks of it --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise FleetError for unexpected ends, and for logged errors that the code did not expect."""
        if self._surprises:
            raise FleetError("; ".join(self._surprises))
        for member in self.members.values():
            text = member.text()
            for defect in DEFECTS:
                if defect in text:
                    at = text.index(defect)
                    raise FleetError(f"{member.name} logged an error: {text[max(0, at - 500) : at + 3000]}")

    def logs(self, size: int = 4000) -> str:
        """Return the end of every log."""
        return "\n".join(f"=== {member.name}\n{member.text()[-size:]}" for member in self.members.values())

    @property
    def harmed(self) -> int:
        """Return how often a process was killed or paused."""
        return len(self.harms)

    @property
    def replacements(self) -> int:
        """Return how often a process was replaced by another one."""
        return sum(len(member.replaced) for member in self.members.values())

    def declared_dead(self) -> set[int]:
        """Processes of members of which one was silent for a lease and lived: what it did then counts for nothing."""
        return {
            int(pid)
            for member in self.members.values()
            if "this owner was declared dead" in member.text()
            for pid in READY.findall(member.text())
        }

    # -- inside ------------------------------------------------------------------------------------------------

    def _end_pauses(self, pid: int, at: float) -> None:
        for harm in self.harms:
            if harm.pid == pid:
                harm.ended = min(harm.ended, at)

    def _start(self, member: Member) -> None:
        member.starts += 1
        command = self._commands.get(member.service) or (f"services.{member.service.replace('-', '_')}",)
        environ = {
            **self.environ,
            "WEFT_INSTANCE": member.name,
            "WEFT_REDIS_URL": self._urls.get(member.service, self.url),
        }
        member.process = start(command, environ, member.log)

    async def _supervise(self) -> None:
        while True:
            for member in self.members.values():
                if member.process is not None and member.process.poll() is not None:
                    status = member.process.returncode
                    member.ended_with.append(status)
                    stopped = member.terminated and status in (0, -signal.SIGTERM)
                    if not member.killed and not stopped and not self._may_die:
                        self._surprises.append(f"{member.name} ended with {status}: {member.text()[-2000:]}")
                    member.killed = member.terminated = False
                    self._start(member)
            await asyncio.sleep(WATCH_SECONDS)

    async def _stop_supervising(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
            self._supervisor = None

    def _end(self) -> None:
        for member in self.members.values():
            if member.process is not None and member.process.poll() is None:
                member.process.kill()
                member.process.wait()


async def until(check: Callable[[], Awaitable[object]], seconds: float, what: str) -> None:
    """Wait until `check` returns something true. Raises AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.02)


def plain_redis(port: int, *, text: bool = False) -> PlainRedis:
    """A client that is not Weft's, for an `async with`. `text` decodes its replies."""
    return Redis(port=port, protocol=2, socket_timeout=60, decode_responses=text)
