"""One call on Ray: as a task, on a long-lived actor, or as a batch job; and Ray's errors as ours."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import ray
import ray.exceptions as errors

from runtime_core.engines.mapping import Answer, Items, run_map
from runtime_core.engines.protocol import Error, Mapped, Outcome, Registered, Report, Resources, Value, Work
from runtime_core.engines.ray.cluster import DASHBOARD_VARIABLE, JOBS_URL_VARIABLE
from runtime_core.engines.ray.worker import CallProcess, LongLived, WorkerJob, run_job
from runtime_core.engines.results import Results
from runtime_core.telemetry.redaction import kept

CANCEL_AGAIN_SECONDS = 0.4
"""The time between two cancels of a task, in seconds."""
CANCEL_LATER_SECONDS = 5.0
"""The same after TASK_STOP_SECONDS, when nobody waits for the end any more."""
FORCE_SECONDS = 3.0
"""The time after which Ray kills the worker of a cancelled task, in seconds. By then the worker has ended itself, or
its interpreter hangs. Sooner, Ray might kill it when it already runs another task."""
TASK_STOP_SECONDS = 10.0
"""The longest wait for a task to stop, in seconds."""
ACTOR_IDLE_SECONDS = 300.0
"""The idle time after which actors are ended, in seconds."""
NODES_CACHED_SECONDS = 5.0
"""How long the list of nodes is cached, in seconds."""
MAX_IN_FLIGHT = 1000
"""The most tasks of one map that run at the same time."""
JOB_POLL_SECONDS = 1.0
JOB_STOP_SECONDS = 10.0
JOB_LOG_BYTES = 4096
"""The size of the log's tail that a job's result contains, in bytes."""
JOB_VARIABLE_PREFIX = "WEFT_APP_"
"""The prefix of the environment variables for the command; no setting of Weft itself has it."""
SUCCEEDED, PENDING = "SUCCEEDED", "PENDING"

logger = logging.getLogger(__name__)


def failure_of(error: BaseException, begun: CallProcess | None) -> Error:
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
        self.answer: Answer = Error("worker", "NoAnswer", "its worker returned no answer")
        self._stream = stream
        self._following = asyncio.create_task(self._follow())
        self._cancelling: asyncio.Task[None] | None = None

    async def wait(self, event: asyncio.Event, seconds: float | None = None) -> bool:
        """Wait for the event. Return False if it does not happen within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Interrupt the task. Its worker ends if the task continues. Wait up to TASK_STOP_SECONDS for the end."""
        self._cancelling = asyncio.create_task(self._cancel_until_ended())
        if not await self.wait(self.ended, TASK_STOP_SECONDS):
            logger.error("a task did not stop within %g s; it is cancelled again until it ends", TASK_STOP_SECONDS)

    async def _cancel_until_ended(self) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        while not self.ended.is_set():
            # Repeated: Ray drops a cancel that hits a task between two states.
            await asyncio.to_thread(_cancel, self._stream, now() >= began + FORCE_SECONDS)
            is_late = now() >= began + TASK_STOP_SECONDS
            await self.wait(self.ended, CANCEL_LATER_SECONDS if is_late else CANCEL_AGAIN_SECONDS)

    async def _follow(self) -> None:
        begun = None
        try:
            async for reference in cast(AsyncIterator[Any], self._stream):
                message = await reference
                if isinstance(message, CallProcess):
                    begun = message
                    self.began.set()
                else:
                    self.answer = message
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
    return f"the call did not end within {seconds:g} s; it was stopped on the cluster"


def _cancel(stream: Any, force: bool) -> None:  # Any: Ray's
    try:
        ray.cancel(stream, force=force)
    except Exception as error:
        logger.debug("a cancel failed: %s", error)


@dataclass(eq=False)
class _Actor:
    handle: Any  # Ray's
    where: CallProcess


class ActorPools:
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
        """End the actors of pools that have been idle for ACTOR_IDLE_SECONDS."""
        now = asyncio.get_running_loop().time()
        for key, pool in list(self._pools.items()):
            if pool.users == 0 and now - pool.used > ACTOR_IDLE_SECONDS:
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
        self._idle: list[_Actor] = []
        self._class = ray.remote(LongLived)

    async def run(self, job: bytes, limit_seconds: float) -> Answer:
        """Run a job, as `ActorPools.run` does."""
        self.users += 1
        try:
            async with self._slots:
                return await self._run(job, limit_seconds)
        finally:
            self.users -= 1
            self.used = asyncio.get_running_loop().time()

    def close(self) -> None:
        """End the idle actors."""
        while self._idle:
            _end(self._idle.pop())

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
                self._idle.append(actor)
            else:
                # An actor cannot cancel a single call.
                _end(actor)

    async def _actor(self, job: bytes) -> _Actor:
        while self._idle:
            actor = self._idle.pop()
            try:
                # Checked first: an actor that died while idle costs no call.
                await actor.handle.ready.remote()
            except Exception as error:
                logger.info("an idle actor of %s died: %s", self._name, type(error).__name__)
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


class RayExecution:
    """Runs work on the cluster that this process has joined."""

    def __init__(self) -> None:
        self.actors = ActorPools()
        self._tasks = Tasks()
        self._nodes: list[dict[str, float]] = []
        self._nodes_at = -NODES_CACHED_SECONDS

    async def run(self, work: Work, results: Results, report: Report) -> Outcome:
        """Run one call to its end. If cancelled, stop it on the cluster."""
        nodes = await self._known_nodes()
        if missing := lacking(work.resources, nodes):
            logger.warning("%s waits: %s", work.name, missing)
            report(msgspec.json.encode({"waiting": "resources", "reason": missing}))

        async def run_one(part: Work, limit: float) -> Answer:
            runner = self.actors if part.actors else self._tasks
            return await runner.run(WorkerJob(part, results).packed(), part, limit)

        if isinstance(work.call, Mapped):
            cpus = sum(node.get("CPU", 0) for node in nodes)
            in_flight = work.call.in_flight or max(1, int(4 * cpus))
            return await run_map(work, work.call, min(in_flight, MAX_IN_FLIGHT), run_one, report)
        answer = await run_one(work, work.timeout_seconds)
        assert not isinstance(answer, Items)  # only maps have items
        return answer

    async def _known_nodes(self) -> list[dict[str, float]]:
        now = asyncio.get_running_loop().time()
        if now - self._nodes_at >= NODES_CACHED_SECONDS:
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


async def run_batch(url: str, work: Work, execution: RayExecution, results: Results, report: Report) -> Outcome:
    """Run the command that the function returns, or attach to its running job. If cancelled, stop the job."""
    if not url:
        message = (
            f"batch jobs need the cluster's dashboard: set {JOBS_URL_VARIABLE}, or {DASHBOARD_VARIABLE}=1 for the "
            "gateway's own Ray"
        )
        return Error("invalid", "NoDashboard", message, retryable=False)
    try:
        jobs = await asyncio.to_thread(_client, url)
        return await _Batch(jobs, work, report).run(execution, results)
    except (RuntimeError, OSError) as error:
        # The job may still run; the next attempt finds it.
        lines = str(error).strip().splitlines()
        return Error("lost", "JobsUnavailable", f"Ray's Jobs API at {url} does not answer: {lines[0] if lines else ''}")


class _Batch:
    def __init__(self, jobs: Any, work: Work, report: Report) -> None:  # Any: Ray's
        self._jobs = jobs
        self._work = work
        self._report = report

    async def run(self, execution: RayExecution, results: Results) -> Outcome:
        submission_id, found = await self._found()
        if not found:
            command = await self._command(execution, results)
            if isinstance(command, Error):
                return command
            await asyncio.to_thread(self._submit, submission_id, command)
        try:
            return await self._followed(submission_id)
        except asyncio.CancelledError:
            await self._stop(submission_id)
            raise

    async def _found(self) -> tuple[str, bool]:
        """Return the id of this attempt's job, and whether the job exists."""
        base = "weft-" + hashlib.sha256(self._work.key.encode()).hexdigest()[:24]
        for number in range(1, self._work.step.attempt + 1):
            submission_id = base if number == 1 else f"{base}-{number}"
            info = await asyncio.to_thread(self._info, submission_id)
            if info is None:
                return submission_id, False
            if not info.status.is_terminal() or info.status == SUCCEEDED:
                return submission_id, True
        return submission_id, True

    async def _command(self, execution: RayExecution, results: Results) -> str | Error:
        """Call the function on the cluster like any other and return its command."""
        call = msgspec.structs.replace(self._work, batch=False, actors=0, key="", resources=Resources(cpus=0))
        outcome = await execution.run(call, results, lambda progress: None)
        if isinstance(outcome, Error):
            return outcome
        command = msgspec.json.decode(outcome.data)
        if isinstance(command, list) and command and all(isinstance(part, str) for part in command):
            return shlex.join(command)
        if isinstance(command, str) and command.strip():
            return command
        given = kept(str(command), 100)
        message = f"a batch job's function must return a command, as text or a list of texts, not {given!r}"
        return Error("invalid", "InvalidInput", message, retryable=False)

    def _submit(self, submission_id: str, command: str) -> None:
        step, need = self._work.step, self._work.resources
        options: dict[str, Any] = {}  # Any: what Ray takes
        if need != Resources():
            options = {
                "entrypoint_num_cpus": need.cpus,
                "entrypoint_num_gpus": need.gpus or None,
                "entrypoint_memory": need.memory_bytes or None,
                "entrypoint_resources": dict(need.custom) or None,
            }
        try:
            self._jobs.submit_job(
                entrypoint=command,
                submission_id=submission_id,
                metadata={"name": self._work.name, "weft_task": step.task, "weft_run": step.run},
                runtime_env={
                    "env_vars": {
                        f"{JOB_VARIABLE_PREFIX}TASK_ID": step.task,
                        f"{JOB_VARIABLE_PREFIX}IDEMPOTENCY_KEY": self._work.key,
                    }
                },
                **options,
            )
        except RuntimeError:
            # Another gateway may have submitted it first.
            if self._info(submission_id) is None:
                raise

    async def _followed(self, submission_id: str) -> Outcome:
        loop = asyncio.get_running_loop()
        reported, began = "", None
        while True:
            info = await asyncio.to_thread(self._info, submission_id)
            if info is None:
                return Error("lost", "WorkLost", f"the cluster no longer knows the job {submission_id}")
            status = info.status.value
            if status != reported:
                reported = status
                self._report(msgspec.json.encode({"status": status, "submission_id": submission_id}))
            if info.status.is_terminal():
                return await self._ended(submission_id, status, info.message or "")
            if status != PENDING and began is None:
                began = loop.time()
            limit = self._work.timeout_seconds
            if limit and began is not None and loop.time() - began > limit:
                await self._stop(submission_id)
                return Error("limit", "TimeoutError", late(limit))
            await asyncio.sleep(JOB_POLL_SECONDS)

    async def _ended(self, submission_id: str, status: str, message: str) -> Outcome:
        logs = await asyncio.to_thread(self._jobs.get_job_logs, submission_id)
        tail = logs.encode(errors="replace")[-JOB_LOG_BYTES:].decode(errors="ignore")
        if status == SUCCEEDED:
            return Value(msgspec.json.encode({"status": status, "submission_id": submission_id, "logs": tail}))
        kind = "BatchJobFailed" if status == "FAILED" else "BatchJobStopped"
        return Error("function", kind, f"the job {submission_id} ended with {status}: {message}\n{tail}".strip())

    async def _stop(self, submission_id: str) -> None:
        await asyncio.to_thread(self._jobs.stop_job, submission_id)
        async with asyncio.timeout(JOB_STOP_SECONDS):
            while (info := await asyncio.to_thread(self._info, submission_id)) and not info.status.is_terminal():  # noqa: ASYNC110  # it polls another machine
                await asyncio.sleep(JOB_POLL_SECONDS / 4)

    def _info(self, submission_id: str) -> Any:  # Any: Ray's; None if there is no such job
        try:
            return self._jobs.get_job_info(submission_id)
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise


def _client(url: str) -> Any:  # Any: Ray's
    from ray.job_submission import JobSubmissionClient  # here: it imports modules that only batch jobs need

    return JobSubmissionClient(url)
