"""Hosts of whole tasks on Ray: actors that run the handlers of the tasks' app, and are replaced when they die."""

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

from runtime_core.engines.protocol import Error, Outcome, Report
from runtime_core.errors import WeftError
from runtime_core.host.host import Host
from runtime_core.integrations.aworld.engines.packing import HostsSpec, start_host
from runtime_core.telemetry.redaction import kept

_SPECS = msgspec.msgpack.Decoder(HostsSpec)

logger = logging.getLogger(__name__)


class TaskHost:
    """One host. It takes tasks from the broker like a handler service, so other hosts reclaim them if it dies."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def start(self, spec: bytes, in_flight: int) -> str:
        """Start to take tasks. Return an empty string, or a one-line error. `spec` is an encoded HostsSpec."""
        decoded = _SPECS.decode(spec)
        try:
            self._host = await start_host(decoded, cloudpickle.loads, in_flight)
        except WeftError as error:
            return str(error) or type(error).__name__
        logger.info("hosting tasks in process %d", os.getpid())
        return ""

    async def run(self) -> None:
        """Work until `stop`. Raises the error that ends a handler."""
        assert self._host is not None
        await self._host.run()

    async def stop(self) -> None:
        """Finish the deliveries in progress, or hand them back."""
        if self._host is not None:
            await self._host.stop()


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
"""The wait between the death of a host and its replacement, which doubles after each death."""
DEATHS_MAX = 6
"""How many hosts in a row may die before they are ready: then the app that they load kills them. With the pauses this
takes longer than to notice that all of Ray is gone."""
LEAST_IN_FLIGHT = 16
"""The least limit of concurrent turns in a host: turns that wait for other agents must not fill it."""
STOP_SECONDS = 4.0
"""How long hosts may take to finish their deliveries at the end."""

Actor = Any  # Any: Ray's handles have no types


class _Refused(Exception):
    """A host cannot work with this HostsSpec, and neither could another one."""


class Hosts:
    """The hosts of one app. `spec` is an encoded HostsSpec.

    Ray schedules only the actors. Tasks run wherever a host takes them from the broker, so the death of an actor, a
    worker or a node loses no task: the other hosts reclaim its deliveries.
    """

    def __init__(self, spec: bytes, report: Report) -> None:
        self._encoded = spec
        self._spec = _SPECS.decode(spec)
        self._report = report
        self._in_flight = LEAST_IN_FLIGHT
        self._actors: dict[int, Actor] = {}
        self._reading: set[int] = set()

    async def run(self) -> Outcome:
        """Keep the hosts until cancelled, or until they cannot work."""
        try:
            number = await asyncio.to_thread(self._number)
            # A limit per host, so that the first host to start does not take all tasks.
            self._in_flight = max(LEAST_IN_FLIGHT, -(-self._spec.at_once // number))
            async with asyncio.TaskGroup() as group:
                for place in range(number):
                    group.create_task(self._keep(place), name=f"keep host {place}")
        except (_Refused, BaseExceptionGroup) as error:
            return Error("invalid", "ConfigurationError", str(_refusal(error)), retryable=False)
        finally:
            # Shielded: this task may be cancelled a second time.
            await asyncio.shield(asyncio.create_task(self._end()))
        raise AssertionError("hosts end only with an error")

    def _number(self) -> int:
        here = socket.gethostname()
        if self._spec.here_only:
            for node in ray.nodes():
                if node["Alive"] and node["NodeManagerHostname"] != here:
                    raise _Refused(
                        f"the broker is reachable only from this machine, and Ray has nodes elsewhere "
                        f"({node['NodeManagerHostname']}): set WEFT_REDIS_URL to a broker that all nodes reach"
                    )
        return self._spec.number or max(1, int(ray.cluster_resources().get("CPU", 1)))

    async def _keep(self, place: int) -> None:
        pause, deaths = FIRST_PAUSE_SECONDS, 0
        while True:
            try:
                await self._host(place)
                why = "its handlers ended unexpectedly"
            except RayError as error:
                why = f"{type(error).__name__}: {kept(' '.join(str(error).split()), 300)}"
            if place in self._reading:
                pause, deaths = FIRST_PAUSE_SECONDS, 0
            deaths += 1
            if deaths == DEATHS_MAX:
                raise _Refused(f"{deaths} hosts in a row died before they were ready; the last one: {why}")
            await self._drop(place)
            logger.warning("lost host %d, starting another one in %g s: %s", place, pause, why)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    async def _host(self, place: int) -> None:
        """Run one host from its start to its end. Raises RayError if it dies."""
        actor = self._actors[place] = await asyncio.to_thread(_new_actor)
        refused: str = await actor.start.remote(self._encoded, self._in_flight)
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
    """Return the first _Refused of a group; raise any other error."""
    first = error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if not isinstance(first, _Refused):
        raise error
    return first


def _new_actor() -> Actor:
    # Ray's default for actors: one CPU to be placed, none while it lives. Tasks mostly wait, and the work they wait
    # for may need that CPU. No restarts by Ray: a new actor must call `start` first.
    return ray.remote(TaskHost).options(max_restarts=0, scheduling_strategy="SPREAD").remote()


def _kill(actor: Actor) -> None:
    with contextlib.suppress(Exception):  # the actor or the cluster may be dead
        ray.kill(actor, no_restart=True)


async def _settled(stop: Any) -> None:  # Any: an ObjectRef
    with contextlib.suppress(RayError):
        await stop
