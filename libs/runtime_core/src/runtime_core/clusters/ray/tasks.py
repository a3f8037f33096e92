"""A call as a task of Ray, under its limit from when a worker takes it, and Ray's errors in our words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, cast

import ray
import ray.exceptions as errors

from runtime_core.clusters.ray.worker import Answer, Begun, run_job
from runtime_core.engines.protocol import Error, Resources, Work
from runtime_core.telemetry.redaction import kept


def failure_of(error: BaseException, begun: Begun | None) -> Error:
    """How a call ended that Ray has ended, by what awaiting it has raised."""
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
            # Our own code and not the function's, which is imported where errors are caught.
            message = f"a worker of the cluster cannot import Weft ({error.cause}): install it on all nodes"
            return Error("invalid", type(error.cause).__name__, message, retryable=False)
        case errors.OwnerDiedError() | errors.ObjectLostError():
            return Error("lost", "ResultLost", f"its result was lost with a node: {_reason(error)}")
        case _:
            return Error("worker", type(error).__name__, _reason(error))


def _reason(error: BaseException) -> str:
    """What Ray says, in one line without the fields that only Ray knows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.partition(":")[0].endswith(("_id", "class_name", "namespace", "pid"))]
    return kept(" ".join(said), 500) or type(error).__name__


SOFT_SECONDS = 0.4
"""How long a task may take to end by itself after KeyboardInterrupt was raised in it, until its worker is killed."""
STOPPING_SECONDS = 10.0
"""How long a task is waited for that was told to stop."""

logger = logging.getLogger(__name__)


class Tasks:
    """Runs jobs as tasks. Retries are the gateway's: durable and counted, so Ray makes none."""

    def __init__(self) -> None:
        self._remote = ray.remote(run_job)

    async def run(self, job: bytes, work: Work, limit_seconds: float) -> Answer:
        """Run a job to its end. A limit of 0 is none. Cancelled, it stops the task."""
        # In a thread: Ray asks its GCS now and then, which may be away.
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
    """What comes back of one task."""

    def __init__(self, stream: Any) -> None:  # Any: Ray's
        self.began = asyncio.Event()
        """Or has ended without."""
        self.ended = asyncio.Event()
        self.answer: Answer = Error("worker", "NoAnswer", "its worker has said nothing")
        self._stream = stream
        self._following = asyncio.create_task(self._follow())

    async def wait(self, event: asyncio.Event, seconds: float | None = None) -> bool:
        """Whether it happened in time."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Ask it to end, then kill its worker; returns when it has ended."""
        patience, force = SOFT_SECONDS, False
        until = asyncio.get_running_loop().time() + STOPPING_SECONDS
        while not self.ended.is_set() and asyncio.get_running_loop().time() < until:
            # Again and again: Ray forgets a cancel that meets a task between two of its states.
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


def resource_options(resources: Resources) -> dict[str, Any]:  # Any: what Ray takes
    """What Ray is told of a call's needs."""
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus or None,
        "memory": resources.memory_bytes or None,
        "resources": dict(resources.custom) or None,
    }


def late(seconds: float) -> str:
    """The message of a call over its limit."""
    return f"it was not done within {seconds:g} s; it was stopped on the cluster"


def _cancel(stream: Any, force: bool) -> None:  # Any: Ray's
    try:
        ray.cancel(stream, force=force)
    except Exception as error:
        logger.debug("a cancel was not taken: %s", error)
