"""The Ray backend of a driver process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from runtime_core.engines.protocol import Error, Outcome, Report, Work
from runtime_core.engines.ray.cluster import Cluster, RaySettings
from runtime_core.engines.ray.worker import WorkerJob

if TYPE_CHECKING:
    from runtime_core.engines.ray.calls import RayExecution
    from runtime_core.engines.ray.holder import News

UNAVAILABLE_TRIES = 5
"""The number of attempts to reach a holder that is temporarily unavailable, with a pause between them."""
UNAVAILABLE_PAUSE_SECONDS = 1.0
STOP_SECONDS = 12.0

logger = logging.getLogger(__name__)


class RayBackend:
    """Runs work with a key through the holder, which attaches to running work; runs other work directly."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._cluster: Cluster | None = None
        self._settings: RaySettings | None = None
        self._execution: RayExecution | None = None
        self._holder: Any = None  # Any: Ray's
        self._attaching = asyncio.Lock()

    async def connect(self) -> Mapping[str, str]:
        """Implement Backend: join the cluster of WEFT_RAY_ADDRESS, or start one."""
        if self._cluster is None:
            self._settings = RaySettings.from_environment(self._environ)
            self._cluster = Cluster(self._settings)
        info = await self._cluster.open()
        # Not earlier: Ray reads its environment when it is imported.
        from runtime_core.engines.ray.calls import RayExecution

        self._execution = RayExecution()
        return info

    async def lost(self) -> str:
        assert self._cluster is not None
        return await self._cluster.lost()

    async def run(self, work: Work, report: Report) -> Outcome:
        outcome = await self._run(work, report)
        # If the head dies, its workers die first, which is not a failure of the work that they ran.
        if isinstance(outcome, Error) and outcome.cause == "worker" and self._cluster is not None:
            gone = await self._cluster.gone()
            if gone:
                return Error("lost", "EngineLost", f"ray was lost while it ran: {gone}")
        return outcome

    async def _run(self, work: Work, report: Report) -> Outcome:
        assert self._settings is not None
        assert self._cluster is not None
        assert self._execution is not None
        if work.driver_side:
            return Error("invalid", "WrongEngine", f"{work.name} is a Spark job, which Ray cannot run", retryable=False)
        if work.batch:
            from runtime_core.engines.ray.calls import run_batch

            return await run_batch(self._cluster.jobs_url, work, self._execution, self._settings.results, report)
        if not work.key:
            outcome: Outcome = await self._execution.run(work, self._settings.results, report)
            return outcome
        return await self._kept(work, report)

    async def forget(self, key: str) -> None:
        if self._holder is not None:
            await self._holder.forget.remote(key)

    async def close(self) -> None:
        if self._cluster is not None:
            await self._cluster.close()

    # -- the holder ------------------------------------------------------------------------------------------------

    async def _kept(self, work: Work, report: Report) -> Outcome:
        from ray.exceptions import ActorDiedError, RayActorError

        assert self._settings is not None
        packed = WorkerJob(work, self._settings.results).packed()
        holder = await self._attached()
        try:
            try:
                await _retried(lambda: holder.begin.remote(packed))
            except ActorDiedError:
                # It died before it received this work, so the work has not started.
                holder = await self._attached(instead_of=holder)
                await _retried(lambda: holder.begin.remote(packed))
            return await self._follow(holder, work.key, report)
        except RayActorError as error:
            await self._left(holder)
            return Error("lost", "HolderLost", f"the holder of this work died in the cluster: {type(error).__name__}")
        except asyncio.CancelledError:
            with suppress(RayActorError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await holder.stop.remote(work.key)
            raise

    async def _follow(self, holder: Any, key: str, report: Report) -> Outcome:  # Any: Ray's
        from runtime_core.engines.ray.holder import News

        seen = 0
        while True:
            news: News = msgspec.msgpack.decode(await _retried(lambda: holder.follow.remote(key, seen)), type=News)  # noqa: B023  # asked at once
            if news.unknown:
                return Error("lost", "WorkLost", "the holder no longer has it")
            for progress in news.progress:
                report(progress)
            seen = news.seen
            if news.outcome is not None:
                if isinstance(news.outcome, Error):
                    # The next request with this key wants another attempt.
                    await holder.forget.remote(key)
                return news.outcome

    async def _attached(self, instead_of: Any = None) -> Any:  # Any: Ray's
        from runtime_core.engines.ray.holder import attach

        assert self._settings is not None
        async with self._attaching:
            if self._holder is None or self._holder is instead_of:
                self._holder = await asyncio.to_thread(attach, self._settings.namespace)
            return self._holder

    async def _left(self, holder: Any) -> None:  # Any: Ray's
        async with self._attaching:
            if self._holder is holder:
                self._holder = None


async def _retried(call: Callable[[], Awaitable[Any]]) -> Any:  # Any: the holder's answer
    """Ask the holder; retry if it is unavailable, since all requests are idempotent."""
    from ray.exceptions import ActorUnavailableError

    for _ in range(UNAVAILABLE_TRIES - 1):
        try:
            return await call()
        except ActorUnavailableError:
            await asyncio.sleep(UNAVAILABLE_PAUSE_SECONDS)
    return await call()
