"""Hosts of whole tasks on Ray: actors that run the handlers of the tasks' app, replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import Any

import msgspec
import ray
from ray import cloudpickle
from ray.exceptions import RayError

from runtime_core.aworld.place import HostsWanted
from runtime_core.aworld.task_app import unpack
from runtime_core.config.settings import Settings
from runtime_core.engines.protocol import Error, Outcome, Report
from runtime_core.errors import WeftError
from runtime_core.host import task_host
from runtime_core.host.host import Host
from runtime_core.telemetry.redaction import kept

_WANTED = msgspec.msgpack.Decoder(HostsWanted)

logger = logging.getLogger(__name__)


def dumps(value: object) -> bytes:
    """Make bytes of objects for `start`: also of those that no module has, with their code."""
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


class TaskHost:
    """One host. It takes tasks from the broker as a handler service does, so that others adopt them when it dies."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def start(self, wanted: bytes, in_flight: int) -> str:
        """Read from the broker; why that cannot be, in one line, else empty. `wanted` is a HostsWanted."""
        told = _WANTED.decode(wanted)
        try:
            app = unpack(told.app, cloudpickle.loads)
            self._host = await task_host.build(app, Settings.from_environment(told.environ), in_flight)
            await self._host.start()
        except WeftError as error:
            return str(error) or type(error).__name__
        logger.info("hosts tasks in process %d", os.getpid())
        return ""

    async def run(self) -> None:
        """Work until `stop`; raises what ends a handler."""
        assert self._host is not None
        await self._host.run()

    async def stop(self) -> None:
        """Finish what is in hand, or hand it back."""
        if self._host is not None:
            await self._host.stop()


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""Between the death of a host and its successor."""
DEATHS_MAX = 6
"""Hosts in a row that die in one place before they have read anything: what they are told to load kills them. Together
with the pauses that is longer than it takes to notice that all of Ray is gone."""
LEAST_IN_FLIGHT = 16
"""Turns of agents that a host has in hand at most: turns that ask others in their midst must not fill it."""
STOP_SECONDS = 4.0
"""How long hosts may finish what they have in hand at the end."""

Actor = Any  # Any: Ray's handles have no types


class _Refused(Exception):
    """A host cannot work as it was told to, and neither could another one."""


class Hosts:
    """Some actors of one kind. `told` is a HostsWanted.

    Ray schedules only the actors. Tasks run wherever a host takes them from the broker, so the death of an actor, a
    worker or a node costs no task: the other hosts reclaim its deliveries.
    """

    def __init__(self, told: bytes, report: Report) -> None:
        self._told = told
        self._wanted = _WANTED.decode(told)
        self._report = report
        self._in_flight = LEAST_IN_FLIGHT
        self._actors: dict[int, Actor] = {}
        self._reading: set[int] = set()

    async def run(self) -> Outcome:
        """Keep them until cancelled, or until they cannot work."""
        try:
            number = await asyncio.to_thread(self._number)
            # Each gets its share, also where one begins to read before the others.
            self._in_flight = max(LEAST_IN_FLIGHT, -(-self._wanted.at_once // number))
            async with asyncio.TaskGroup() as group:
                for place in range(number):
                    group.create_task(self._keep(place), name=f"keep host {place}")
        except (_Refused, BaseExceptionGroup) as error:
            return Error("invalid", "ConfigurationError", str(_refusal(error)), retryable=False)
        finally:
            # In a task of its own: this one may be cancelled a second time.
            await asyncio.shield(asyncio.create_task(self._end()))
        raise AssertionError("hosts end by their errors only")

    def _number(self) -> int:
        here = socket.gethostname()
        if self._wanted.here_only:
            for node in ray.nodes():
                if node["Alive"] and node["NodeManagerHostname"] != here:
                    raise _Refused(
                        f"the broker answers on this machine only, and Ray has nodes elsewhere "
                        f"({node['NodeManagerHostname']}): set WEFT_REDIS_URL to a broker that all of them reach"
                    )
        return self._wanted.number or max(1, int(ray.cluster_resources().get("CPU", 1)))

    async def _keep(self, place: int) -> None:
        pause, deaths = FIRST_PAUSE_SECONDS, 0
        while True:
            try:
                await self._host(place)
                why = "its handlers have ended by themselves"
            except RayError as error:
                why = f"{type(error).__name__}: {kept(' '.join(str(error).split()), 300)}"
            if place in self._reading:
                pause, deaths = FIRST_PAUSE_SECONDS, 0
            deaths += 1
            if deaths == DEATHS_MAX:
                raise _Refused(f"{deaths} hosts in a row have died before they could work; the last one: {why}")
            await self._drop(place)
            logger.warning("host %d is lost, another one is started in %g s: %s", place, pause, why)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    async def _host(self, place: int) -> None:
        """One host from its start to its end. Raises RayError where it dies."""
        actor = self._actors[place] = await asyncio.to_thread(_new_actor)
        refused: str = await actor.start.remote(self._told, self._in_flight)
        if refused:
            raise _Refused(refused)
        self._reading.add(place)
        self._tell()
        await actor.run.remote()

    async def _drop(self, place: int) -> None:
        actor = self._actors.pop(place, None)
        if actor is not None:
            await asyncio.to_thread(_kill, actor)
        if place in self._reading:
            self._reading.remove(place)
            self._tell()

    def _tell(self) -> None:
        self._report(msgspec.json.encode({"hosts": len(self._reading)}))

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(STOP_SECONDS):
                stops = [self._actors[place].stop.remote() for place in self._reading]
                await asyncio.gather(*(_settled(stop) for stop in stops))
        for actor in self._actors.values():
            await asyncio.to_thread(_kill, actor)


def _refusal(error: BaseException) -> _Refused:
    """The first refusal of a group. Raises what is no refusal."""
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if not isinstance(first, _Refused):
        raise error
    return first


def _new_actor() -> Actor:
    # Ray's own way of counting an actor: a CPU to be placed, none while it lives, since tasks mostly wait, and what
    # they wait for may need that CPU. No restarts by Ray: a new actor has to be told what to load.
    return ray.remote(TaskHost).options(max_restarts=0, scheduling_strategy="SPREAD").remote()


def _kill(actor: Actor) -> None:
    with contextlib.suppress(Exception):  # it may be dead, and the cluster too
        ray.kill(actor, no_restart=True)


async def _settled(stop: Any) -> None:  # Any: an ObjectRef
    with contextlib.suppress(RayError):
        await stop
