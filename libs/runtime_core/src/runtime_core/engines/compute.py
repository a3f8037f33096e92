"""Compute steps of agents in worker processes: what `ctx.engine("local")` uses where processes are configured."""

from __future__ import annotations

from runtime_core.agents.ports import LocalFunction
from runtime_core.encoding import encode
from runtime_core.engines.local_engine import LocalEngine
from runtime_core.engines.run_config import RunConfig
from runtime_core.engines.runtime_engine import EngineCall


class ProcessCompute:
    """Runs engine functions in up to `processes` worker processes, each call under its function's limit."""

    def __init__(self, processes: int) -> None:
        self.engine = LocalEngine(RunConfig(mode="processes", worker_num=processes))

    async def run(self, function: LocalFunction, arguments: bytes, /) -> bytes:
        """Call it with a JSON object; its result as JSON. A cancel ends the process that runs it.

        Raises InvalidInput (`arguments.…`, `result`, or a function that cannot be sent) and CallFailed.
        """
        call = EngineCall(function.bound(arguments), name=function.name, timeout_seconds=function.timeout_seconds)
        [result] = await self.engine.agather(call)
        return encode(result, "result")

    async def close(self) -> None:
        """End the processes."""
        await self.engine.close()
