"""`ctx.engine(...)`: compute steps, here or on a cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from runtime_core.agents.asked import Asked, call
from runtime_core.agents.local import LocalStep, call_function
from runtime_core.agents.naming import name_and_pool
from runtime_core.agents.ports import Compute, LocalFunction
from runtime_core.agents.values import from_json
from runtime_core.encoding import encode

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from runtime_core.agents.run import Run

LOCAL = "local"
ENGINES = (LOCAL, "ray", "spark")


class Engine:
    """One of `local` (a thread or a worker process of this one), `ray` and `spark`."""

    __slots__ = ("_engine", "_run")

    def __init__(self, run: Run, engine: str) -> None:
        self._run = run
        self._engine = engine

    def call(self, function: object, /, **arguments: object) -> Asked[Any] | LocalStep:  # Any: its own JSON
        """Call a registered engine function, by itself or by name. Raises EngineError when awaited."""
        run = self._run
        branch = run.flow.branch_here(f"ctx.engine({self._engine!r}).call")
        known = run.functions.engine_function(function)
        if self._engine == LOCAL and known is None:
            raise run.flow.misuse(
                f"{getattr(function, '__qualname__', function)!r} is no engine function of this app: "
                "decorate it with @app.engine_function"
            )
        name, pool = name_and_pool(run, "engine function", known, function)
        data = encode(arguments, f"arguments of engine function {name!r}")
        if self._engine != LOCAL or known is None:
            return call(run, branch, self._engine, name, data=data, pool=pool)
        body = partial(_run_here, known, data, run.threads, run.compute)
        return LocalStep(run, branch, "engine", name, body, data)


async def _run_here(
    function: LocalFunction, arguments: bytes, threads: Executor | None, compute: Compute | None
) -> object:
    if compute is not None:
        return from_json(await compute.run(function, arguments))
    result = await call_function(function.run, (arguments,), {}, threads)
    assert isinstance(result, bytes)  # `run` says so; what is called in a thread loses its type
    return from_json(result)
