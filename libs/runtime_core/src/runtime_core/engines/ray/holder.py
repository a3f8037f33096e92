"""The step holder: an actor in the cluster that runs work with a key, so that the work outlives drivers and gateways.

              begin(key) ──> run it, unless the key is known
driver ──>   follow(key) ──> new progress, and the outcome
               stop(key) ──> stop it on the cluster
             forget(key) ──> drop the outcome

Work that a driver submits ends with the driver; work that the holder submits ends with the holder.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray

from runtime_core.engines.protocol import Error, Outcome, Value
from runtime_core.engines.ray.calls import RayExecution
from runtime_core.engines.ray.cluster import RAY_NAMESPACE
from runtime_core.engines.ray.worker import WorkerJob

PROTOCOL = 1
"""The protocol's version, part of the holder's name: each version of drivers has its own holder."""
HELD_SECONDS = 600.0
"""How long an outcome is stored for a driver that asks for it, in seconds."""
MAX_HELD = 10_000
MAX_HELD_BYTES = 256 * 1024**2
HOLDER_SWEEP_SECONDS = 10.0
FOLLOW_SECONDS = 20.0
"""The longest that a driver's `follow` waits for news, in seconds."""
MAX_PROGRESS_HELD = 64
MAX_CALLS = 4000
"""The most concurrent calls of the holder."""

logger = logging.getLogger(__name__)


class News(msgspec.Struct, frozen=True):
    """The state of a run since the last request."""

    seen: int
    """The number of progress events so far, for the next request."""
    progress: list[bytes]
    outcome: Outcome | None = None
    unknown: bool = False
    """Whether there is no such run."""


@dataclass(eq=False)
class _Run:
    task: asyncio.Task[None] | None = None
    progress: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_PROGRESS_HELD))
    reported: int = 0
    outcome: Outcome | None = None
    ended_at: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size(self) -> int:
        return len(self.outcome.data) if isinstance(self.outcome, Value) else 0

    def report(self, value: bytes) -> None:
        self.progress.append(value)
        self.reported += 1
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class StepHolder:
    """The actor. All its methods run on one loop."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}
        self._execution: RayExecution | None = None
        self._sweeping: asyncio.Task[None] | None = None

    async def ping(self) -> None:
        """Do nothing; a reply shows that the holder is alive."""

    async def begin(self, packed: bytes) -> None:
        """Start a WorkerJob unless its key is known."""
        if self._execution is None:
            self._execution = RayExecution()
            self._sweeping = asyncio.create_task(self._sweep())
        job = msgspec.msgpack.decode(packed, type=WorkerJob)
        if job.work.key not in self._runs:
            run = self._runs[job.work.key] = _Run()
            run.task = asyncio.create_task(self._run(self._execution, run, job), name=f"run {job.work.name}")

    async def follow(self, key: str, seen: int) -> bytes:
        """Return news of a run once it has more than `seen` progress events or ends, or after FOLLOW_SECONDS."""
        run = self._runs.get(key)
        if run is None:
            return msgspec.msgpack.encode(News(seen, [], unknown=True))
        if run.outcome is None and run.reported <= seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_SECONDS):
                    await run.changed.wait()
        new = run.reported - seen
        progress = list(run.progress)[-new:] if new > 0 else []
        return msgspec.msgpack.encode(News(run.reported, progress, run.outcome))

    async def stop(self, key: str) -> None:
        """Stop a run on the cluster and drop it."""
        run = self._runs.get(key)
        if run is None or run.task is None:
            return
        run.task.cancel()
        await asyncio.wait((run.task,))
        if self._runs.get(key) is run:
            del self._runs[key]

    async def forget(self, key: str) -> None:
        """Drop the outcome of a run that has ended."""
        run = self._runs.get(key)
        if run is not None and run.outcome is not None:
            del self._runs[key]

    async def _run(self, execution: RayExecution, run: _Run, job: WorkerJob) -> None:
        try:
            run.outcome = await execution.run(job.work, job.results, run.report)
        except asyncio.CancelledError:
            run.outcome = Error("cancelled", "Cancelled", "it was cancelled")
        except Exception as error:
            logger.exception("%s failed with an unexpected error", job.work.name)
            run.outcome = Error("worker", type(error).__name__, f"the holder failed to run it: {error}")
        finally:
            run.ended_at = asyncio.get_running_loop().time()
            run.notify()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(HOLDER_SWEEP_SECONDS)
            assert self._execution is not None
            self._execution.actors.sweep()
            self._drop(asyncio.get_running_loop().time() - HELD_SECONDS)

    def _drop(self, before: float) -> None:
        """Drop outcomes older than `before`, and the oldest ones beyond the limits."""
        ended = sorted(
            ((run.ended_at, run.size, key) for key, run in self._runs.items() if run.outcome is not None), reverse=True
        )
        held = 0
        for number, (ended_at, size, key) in enumerate(ended):
            held += size
            if ended_at < before or number >= MAX_HELD or held > MAX_HELD_BYTES:
                del self._runs[key]


def attach(namespace: str) -> Any:  # Any: Ray's
    """Return the holder of a namespace; start it if there is none. Blocks."""
    return (
        ray.remote(StepHolder)
        .options(
            name=f"weft-holder-{namespace}-{PROTOCOL}",
            namespace=RAY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            # It needs no CPU and must run even when all CPUs are in use.
            num_cpus=0,
            max_concurrency=MAX_CALLS,
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()
    )
