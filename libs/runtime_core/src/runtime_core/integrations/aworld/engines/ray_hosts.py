"""Hosts of whole tasks on Ray: actors that run the handlers of the tasks' app, and are replaced when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray import cloudpickle
from ray.exceptions import RayError

from runtime_core.engines.protocol import Outcome, Report
from runtime_core.errors import WeftError
from runtime_core.host.host import Host
from runtime_core.integrations.aworld.engines.packing import Hosts, HostsEnded, HostsSpec, start_host
from runtime_core.telemetry.redaction import kept

logger = logging.getLogger(__name__)


class TaskHost:
    """One host. It takes tasks from the broker like a handler service, so other hosts reclaim them if it dies."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def start(self, spec: bytes, in_flight: int) -> str:
        """Start to take tasks. Return an empty string, or a one-line error. `spec` is an encoded HostsSpec."""
        decoded = msgspec.msgpack.decode(spec, type=HostsSpec)
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


STOP_SECONDS = 4.0
"""How long hosts may take to finish their deliveries at the end."""

Actor = Any  # Any: Ray's handles have no types


class RayHosts(Hosts):
    """The hosts of one app. `spec` is an encoded HostsSpec."""

    def __init__(self, spec: bytes, report: Report) -> None:
        super().__init__(spec, report, 0.0)  # a host starts once it has loaded the app
        self._actors: dict[int, Actor] = {}

    async def run(self) -> Outcome:
        """Keep the hosts until cancelled, or until they cannot work."""
        try:
            await self.keep(await asyncio.to_thread(self._places), self._host)
        except HostsEnded as ended:
            return ended.error
        finally:
            # Shielded: this task may be cancelled a second time.
            await asyncio.shield(asyncio.create_task(self._end()))
        raise AssertionError("hosts end only with an error")

    def _places(self) -> int:
        here = socket.gethostname()
        if self.spec.here_only:
            for node in ray.nodes():
                if node["Alive"] and node["NodeManagerHostname"] != here:
                    raise HostsEnded(
                        f"the broker is reachable only from this machine, and Ray has nodes elsewhere "
                        f"({node['NodeManagerHostname']}): set WEFT_REDIS_URL to a broker that all nodes reach"
                    )
        return self.spec.number or max(1, int(ray.cluster_resources().get("CPU", 1)))

    async def _host(self, place: int, start: Callable[[], None]) -> str:
        actor = None
        try:
            actor = self._actors[place] = await asyncio.to_thread(_new_actor)
            refused: str = await actor.start.remote(self.encoded, self.in_flight)
            if refused:
                raise HostsEnded(refused)
            start()
            await actor.run.remote()
            why = "its handlers ended unexpectedly"
        except RayError as error:
            why = f"{type(error).__name__}: {kept(' '.join(str(error).split()), 300)}"
        if actor is not None:
            await asyncio.to_thread(_kill, actor)
            del self._actors[place]
        return why

    async def _end(self) -> None:
        with contextlib.suppress(TimeoutError, RayError):
            async with asyncio.timeout(STOP_SECONDS):
                stops = [self._actors[place].stop.remote() for place in self.started]
                await asyncio.gather(*(_settled(stop) for stop in stops))
        for actor in self._actors.values():
            await asyncio.to_thread(_kill, actor)


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
