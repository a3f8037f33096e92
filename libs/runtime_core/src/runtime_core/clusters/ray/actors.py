"""Calls on long-lived actors: each function that wants them has a few, which keep what it has loaded."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import ray

from runtime_core.clusters.ray.tasks import failure_of, late, resource_options
from runtime_core.clusters.ray.worker import Answer, Begun, LongLived
from runtime_core.engines.protocol import Error, Mapped, Registered, Work

IDLE_SECONDS = 300.0
"""How long actors rest until they are ended."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Actor:
    handle: Any  # Ray's
    where: Begun


class Actors:
    """The actors of all functions, in pools."""

    def __init__(self) -> None:
        self._pools: dict[tuple[object, ...], Pool] = {}

    async def run(self, job: bytes, work: Work, limit_seconds: float) -> Answer:
        """Run a job on an actor of its function. A limit of 0 is none. Cancelled, it ends the actor."""
        call = work.call.function if isinstance(work.call, Mapped) else work.call
        assert isinstance(call, Registered)
        need = work.resources
        key = (call.app, call.folder, call.name, work.actors, need.cpus, need.gpus, need.memory_bytes,
               tuple(sorted(need.custom.items())))  # fmt: skip
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(work)
        return await pool.run(job, limit_seconds)

    def sweep(self) -> None:
        """End the actors that have rested for long."""
        now = asyncio.get_running_loop().time()
        for key, pool in list(self._pools.items()):
            if pool.users == 0 and now - pool.used > IDLE_SECONDS:
                del self._pools[key]
                pool.close()


class Pool:
    """The actors of one function: started when they are needed, replaced when they die."""

    def __init__(self, work: Work) -> None:
        self.users = 0
        """Calls under way, or waiting."""
        self.used = asyncio.get_running_loop().time()
        self._name = work.name
        self._options = resource_options(work.resources)
        self._slots = asyncio.Semaphore(work.actors)
        self._resting: list[_Actor] = []
        self._class = ray.remote(LongLived)

    async def run(self, job: bytes, limit_seconds: float) -> Answer:
        """As of Actors."""
        self.users += 1
        try:
            async with self._slots:
                return await self._run(job, limit_seconds)
        finally:
            self.users -= 1
            self.used = asyncio.get_running_loop().time()

    def close(self) -> None:
        """End those that rest."""
        while self._resting:
            _end(self._resting.pop())

    async def _run(self, job: bytes, limit_seconds: float) -> Answer:
        try:
            actor = await self._actor(job)
        except Exception as error:
            return failure_of(error, None)
        kept = False
        try:
            running = asyncio.ensure_future(_awaited(actor.handle.run.remote(job)))
            done, _ = await asyncio.wait((running,), timeout=limit_seconds or None)
            if not done:
                running.cancel()
                return Error("limit", "TimeoutError", late(limit_seconds))
            answer: Answer = running.result()
            kept = True
            return answer
        except Exception as error:
            return failure_of(error, actor.where)
        finally:
            if kept:
                self._resting.append(actor)
            else:
                # An actor cannot be told to leave a call alone.
                _end(actor)

    async def _actor(self, job: bytes) -> _Actor:
        while self._resting:
            actor = self._resting.pop()
            try:
                # One that died in its rest costs nobody a call.
                await actor.handle.ready.remote()
            except Exception as error:
                logger.info("an actor of %s died in its rest: %s", self._name, type(error).__name__)
                continue
            return actor
        handle = await asyncio.to_thread(self._start)
        try:
            return _Actor(handle, await handle.ready.remote(job))
        except BaseException:
            ray.kill(handle)
            raise

    def _start(self) -> Any:  # Any: Ray's
        return self._class.options(max_restarts=0, max_task_retries=0, max_concurrency=1, **self._options).remote()


async def _awaited(reference: Any) -> Answer:  # Any: Ray's
    answer: Answer = await reference
    return answer


def _end(actor: _Actor) -> None:
    ray.kill(actor.handle, no_restart=True)
