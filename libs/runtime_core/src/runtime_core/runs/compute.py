"""Compute steps of agents in worker processes: what `ctx.engine("local")` uses where processes are configured."""

from __future__ import annotations

import asyncio
import functools
import sys

from runtime_core.declare.schema import encode
from runtime_core.engines.local import LocalEngine
from runtime_core.engines.protocol import Step
from runtime_core.engines.results import Results, has_references
from runtime_core.engines.runtime_engine import CallFailed, EngineCall, RunConfig
from runtime_core.errors import Outcome
from runtime_core.runs.ports import LocalFunction


class ProcessCompute:
    """Runs engine functions in up to `processes` worker processes, each call under its function's limit."""

    def __init__(self, processes: int) -> None:
        self.engine = LocalEngine(RunConfig(mode="processes", worker_num=processes))

    @property
    def workers(self) -> int:
        """How many calls run at once."""
        return self.engine.config.workers

    async def run(self, function: LocalFunction, arguments: bytes, step: Step, results: Results, /) -> bytes:
        """Call it with a JSON object; its result as JSON. A cancel ends the process that runs it.

        Raises InvalidInput (`arguments.…`, `result`, or a function that cannot be sent), CallFailed, and Retry and
        Reject where the function did.
        """
        bind = functools.partial(function.bound, arguments, step, store=results.blob_url)
        # What reads a blob waits for a disk, or for a network.
        bound = await asyncio.to_thread(bind) if has_references(arguments) else bind()
        call = EngineCall(bound, name=function.name, timeout_seconds=function.timeout_seconds)
        try:
            [result] = await self.engine.agather(call)
        except CallFailed as failed:
            if isinstance(failed.__cause__, Outcome):
                raise failed.__cause__ from None
            raise
        data = encode(result, "result", limit=sys.maxsize)
        return data if len(data) <= results.limit else await asyncio.to_thread(results.kept, data, step.task)

    async def close(self) -> None:
        """End the processes."""
        await self.engine.close()
