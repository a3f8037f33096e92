"""Commands as batch jobs of the cluster, through Ray's Jobs API.

The cluster holds a job under its submission id, which follows from the key of the work: who asks with the same key
attaches to it. A job that failed counts as an attempt, and the next attempt has an id of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
from typing import Any

import msgspec

from runtime_core.clusters.ray.calls import Execution, late
from runtime_core.clusters.ray.settings import DASHBOARD, JOBS_URL
from runtime_core.engines.protocol import Error, Outcome, Report, Resources, Value, Work
from runtime_core.engines.results import Results
from runtime_core.telemetry.redaction import kept

POLL_SECONDS = 1.0
STOP_SECONDS = 10.0
LOG_BYTES = 4096
"""The size of the log's tail that a job's result contains, in bytes."""
VARIABLES = "WEFT_APP_"
"""The prefix of the environment variables for the command; no setting of Weft itself has it."""
SUCCEEDED, PENDING = "SUCCEEDED", "PENDING"


async def run_batch(url: str, work: Work, execution: Execution, results: Results, report: Report) -> Outcome:
    """Run the command that the function returns, or attach to its running job. If cancelled, stop the job."""
    if not url:
        message = f"batch jobs need the cluster's dashboard: set {JOBS_URL}, or {DASHBOARD}=1 for a Ray of the gateway"
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

    async def run(self, execution: Execution, results: Results) -> Outcome:
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

    async def _command(self, execution: Execution, results: Results) -> str | Error:
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
        message = f"a batch job's function gives a command, a text or a list of texts, and not {given!r}"
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
                    "env_vars": {f"{VARIABLES}TASK_ID": step.task, f"{VARIABLES}IDEMPOTENCY_KEY": self._work.key}
                },
                **options,
            )
        except RuntimeError:
            # Another gateway may have submitted it first.
            if self._info(submission_id) is None:
                raise

    async def _followed(self, submission_id: str) -> Outcome:
        loop = asyncio.get_running_loop()
        told, began = "", None
        while True:
            info = await asyncio.to_thread(self._info, submission_id)
            if info is None:
                return Error("lost", "WorkLost", f"the cluster does not know the job {submission_id} any more")
            status = info.status.value
            if status != told:
                told = status
                self._report(msgspec.json.encode({"status": status, "submission_id": submission_id}))
            if info.status.is_terminal():
                return await self._ended(submission_id, status, info.message or "")
            if status != PENDING and began is None:
                began = loop.time()
            limit = self._work.timeout_seconds
            if limit and began is not None and loop.time() - began > limit:
                await self._stop(submission_id)
                return Error("limit", "TimeoutError", late(limit))
            await asyncio.sleep(POLL_SECONDS)

    async def _ended(self, submission_id: str, status: str, message: str) -> Outcome:
        logs = await asyncio.to_thread(self._jobs.get_job_logs, submission_id)
        tail = logs.encode(errors="replace")[-LOG_BYTES:].decode(errors="ignore")
        if status == SUCCEEDED:
            return Value(msgspec.json.encode({"status": status, "submission_id": submission_id, "logs": tail}))
        kind = "BatchJobFailed" if status == "FAILED" else "BatchJobStopped"
        return Error("function", kind, f"the job {submission_id} ended as {status}: {message}\n{tail}".strip())

    async def _stop(self, submission_id: str) -> None:
        await asyncio.to_thread(self._jobs.stop_job, submission_id)
        async with asyncio.timeout(STOP_SECONDS):
            while (info := await asyncio.to_thread(self._info, submission_id)) and not info.status.is_terminal():  # noqa: ASYNC110  # it is another machine that is asked
                await asyncio.sleep(POLL_SECONDS / 4)

    def _info(self, submission_id: str) -> Any:  # Any: Ray's; None if there is no such job
        try:
            return self._jobs.get_job_info(submission_id)
        except RuntimeError as error:
            if "404" in str(error) or "does not exist" in str(error):
                return None
            raise


def _client(url: str) -> Any:  # Any: Ray's
    from ray.job_submission import JobSubmissionClient  # here: it loads modules that only batch jobs need

    return JobSubmissionClient(url)
