"""One call on Ray, as a task or of a long-lived actor, within its limit; and Ray's errors as ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import ray
import ray.exceptions as errors

from runtime_core.clusters.ray.mapping import run_map
from runtime_core.clusters.ray.worker import Answer, Begun, Items, Job, LongLived, run_job
from runtime_core.engines.protocol import Error, Mapped, Outcome, Registered, Report, Resources, Work
from runtime_core.engines.results import Results
from runtime_core.telemetry.redaction import kept


def failure_of(error: BaseException, begun: Begun | None) -> Error:
    """Return the error of a call that Ray ended, from the exception that awaiting it raised."""
    where = f" ({begun})" if begun is not None else ""
    match error:
        case errors.OutOfMemoryError():
            return Error("worker", "WorkerDied", f"Ray ended the worker{where}, since its node was out of memory")
        case errors.TaskCancelledError():
            return Error("cancelled", "Cancelled", "it was stopped on the cluster")
        case errors.ActorDiedError() | errors.ActorUnavailableError():
            return Error("worker", "WorkerDied", f"the actor that ran it{where} has died: {_reason(error)}")
        case errors.NodeDiedError() | errors.LocalRayletDiedError():
            return Error("worker", "WorkerDied", f"the node that ran it{where} has died")
        case errors.WorkerCrashedError():
            return Error("worker", "WorkerDied", f"the worker process that ran it{where} has died")
        case errors.TaskUnschedulableError() | errors.ActorUnschedulableError():
            return Error("invalid", type(error).__name__, _reason(error), retryable=False)
        case errors.RuntimeEnvSetupError():
            return Error("worker", "RuntimeEnvSetupError", _reason(error))
        case errors.RayTaskError() if isinstance(error.cause, ImportError):
            # Weft's own import: errors of the function's import are caught where it runs.
            message = f"a worker of the cluster cannot import Weft ({error.cause}): install it on all nodes"
            return Error("invalid", type(error.cause).__name__, message, retryable=False)
        case errors.OwnerDiedError() | errors.ObjectLostError():
            return Error("lost", "ResultLost", f"its result was lost with a node: {_reason(error)}")
        case _:
            return Error("worker", type(error).__name__, _reason(error))


def _reason(error: BaseException) -> str:
    """Return Ray's message in one line, without its internal ids."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.partition(":")[0].endswith(("_id", "class_name", "namespace", "pid"))]
    return kept(" ".join(said), 500) or type(error).__name__


SOFT_SECONDS = 0.4
"""The time between KeyboardInterrupt in a task and the kill of its worker, in seconds."""
STOPPING_SECONDS = 10.0
"""The longest wait for a task to stop, in seconds."""

logger = logging.getLogger(__name__)


class Tasks:
    """Runs jobs as tasks. Ray does not retry them: the gateway does, durably and with a count."""

    def __init__(self) -> None:
        self._remote = ray.remote(run_job)

    async def run(self, job: bytes, work: Work, limit_seconds: float) -> Answer:
        """Run a job to its end. A limit of 0 means no limit. If cancelled, stop the task."""
        # In a thread: Ray sometimes queries its GCS, which may be unreachable.
        stream = await asyncio.to_thread(self._submit, job, work)
        task = _Task(stream)
        try:
            await task.wait(task.began)
            ended = await task.wait(task.ended, limit_seconds or None)
        except asyncio.CancelledError:
            await task.stop()
            raise
        if not ended:
            await task.stop()
            return Error("limit", "TimeoutError", late(limit_seconds))
        return task.answer

    def _submit(self, job: bytes, work: Work) -> Any:  # Any: Ray's
        options = resource_options(work.resources)
        return self._remote.options(num_returns="streaming", max_retries=0, name=work.name, **options).remote(job)


class _Task:
    """The answer of one task."""

    def __init__(self, stream: Any) -> None:  # Any: Ray's
        self.began = asyncio.Event()
        """Set when the task starts, or ends without having started."""
        self.ended = asyncio.Event()
        self.answer: Answer = Error("worker", "NoAnswer", "its worker has said nothing")
        self._stream = stream
        self._following = asyncio.create_task(self._follow())

    async def wait(self, event: asyncio.Event, seconds: float | None = None) -> bool:
        """Wait for the event. Return False if it does not happen within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Interrupt the task, then kill its worker. Wait up to STOPPING_SECONDS for the end."""
        patience, force = SOFT_SECONDS, False
        until = asyncio.get_running_loop().time() + STOPPING_SECONDS
        while not self.ended.is_set() and asyncio.get_running_loop().time() < until:
            # Repeated: Ray drops a cancel that hits a task between two states.
            await asyncio.to_thread(_cancel, self._stream, force)
            await self.wait(self.ended, patience)
            force = True
        if not self.ended.is_set():
            logger.error("a task did not stop within %g s", STOPPING_SECONDS)

    async def _follow(self) -> None:
        begun = None
        try:
            async for reference in cast(AsyncIterator[Any], self._stream):
                said = await reference
                if isinstance(said, Begun):
                    begun = said
                    self.began.set()
                else:
                    self.answer = said
        except Exception as error:
            self.answer = failure_of(error, begun)
        finally:
            self.began.set()
            self.ended.set()


def resource_options(resources: Resources) -> dict[str, Any]:  # Any: Ray's options
    """Return Ray's options for the resources of a call."""
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus or None,
        "memory": resources.memory_bytes or None,
        "resources": dict(resources.custom) or None,
    }


def late(seconds: float) -> str:
    """Return the message for a call that exceeded its limit."""
    return f"it was not done within {seconds:g} s; it was stopped on the cluster"


def _cancel(stream: Any, force: bool) -> None:  # Any: Ray's
    try:
        ray.cancel(stream, force=force)
    except Exception as error:
        logger.debug("a cancel was not taken: %s", error)


IDLE_SECONDS = 300.0
"""The idle time after which actors are ended, in seconds."""


@dataclass(eq=False)
class _Actor:
    handle: Any  # Ray's
    where: Begun


class Actors:
    """The actors of all functions, in one pool per function."""

    def __init__(self) -> None:
        self._pools: dict[tuple[object, ...], Pool] = {}

    async def run(self, job: bytes, work: Work, limit_seconds: float) -> Answer:
        """Run a job on an actor of its function. A limit of 0 means no limit. If cancelled, end the actor."""
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
        """End the actors of pools that have been idle for IDLE_SECONDS."""
        now = asyncio.get_running_loop().time()
        for key, pool in list(self._pools.items()):
            if pool.users == 0 and now - pool.used > IDLE_SECONDS:
                del self._pools[key]
                pool.close()


class Pool:
    """The actors of one function: started on demand and replaced when they die."""

    def __init__(self, work: Work) -> None:
        self.users = 0
        """The number of calls that run or wait."""
        self.used = asyncio.get_running_loop().time()
        self._name = work.name
        self._options = resource_options(work.resources)
        self._slots = asyncio.Semaphore(work.actors)
        self._resting: list[_Actor] = []
        self._class = ray.remote(LongLived)

    async def run(self, job: bytes, limit_seconds: float) -> Answer:
        """Run a job, as `Actors.run` does."""
        self.users += 1
        try:
            async with self._slots:
                return await self._run(job, limit_seconds)
        finally:
            self.users -= 1
            self.used = asyncio.get_running_loop().time()

    def close(self) -> None:
        """End the idle actors."""
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
                # An actor cannot cancel a single call.
                _end(actor)

    async def _actor(self, job: bytes) -> _Actor:
        while self._resting:
            actor = self._resting.pop()
            try:
                # Checked first: an actor that died while idle costs no call.
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


NODES_SECONDS = 5.0
"""How long the list of nodes is cached, in seconds."""
MOST_IN_FLIGHT = 1000
"""The most tasks of one map that run at the same time."""


class Execution:
    """Runs work on the cluster that this process has joined."""

    def __init__(self) -> None:
        self.actors = Actors()
        self._tasks = Tasks()
        self._nodes: list[dict[str, float]] = []
        self._nodes_at = -NODES_SECONDS

    async def run(self, work: Work, results: Results, report: Report) -> Outcome:
        """Run one call to its end. If cancelled, stop it on the cluster."""
        nodes = await self._known_nodes()
        if missing := lacking(work.resources, nodes):
            logger.warning("%s waits: %s", work.name, missing)
            report(msgspec.json.encode({"waiting": "resources", "reason": missing}))

        async def run_one(part: Work, limit: float) -> Answer:
            runner = self.actors if part.actors else self._tasks
            return await runner.run(Job(part, results).packed(), part, limit)

        if isinstance(work.call, Mapped):
            cpus = sum(node.get("CPU", 0) for node in nodes)
            in_flight = work.call.in_flight or max(1, int(4 * cpus))
            return await run_map(work, work.call, min(in_flight, MOST_IN_FLIGHT), run_one, report)
        answer = await run_one(work, work.timeout_seconds)
        assert not isinstance(answer, Items)  # only maps have items
        return answer

    async def _known_nodes(self) -> list[dict[str, float]]:
        now = asyncio.get_running_loop().time()
        if now - self._nodes_at >= NODES_SECONDS:
            self._nodes_at = now
            self._nodes = await asyncio.to_thread(_nodes)
        return self._nodes


def lacking(resources: Resources, nodes: list[dict[str, float]]) -> str:
    """Return one line about the resources that no single node has; empty if a node has them all."""
    needs = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": float(resources.memory_bytes), **resources.custom}
    needs = {name: amount for name, amount in needs.items() if amount > 0}
    if not nodes or any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return ""
    short = [
        f"{name} {amount:g} (the most that a node has is {largest:g})"
        for name, amount in needs.items()
        if (largest := max(node.get(name, 0) for node in nodes)) < amount
    ]
    return f"no node of the cluster has {', '.join(short) or 'all of ' + ', '.join(needs) + ' together'}"


def _nodes() -> list[dict[str, float]]:
    alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # Any: Ray's
    return [node["Resources"] for node in alive]
