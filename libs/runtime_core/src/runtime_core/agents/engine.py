"""`ctx.engine(...)`: compute steps, here or on a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from runtime_core.agents.asked import Asked, call
from runtime_core.agents.engine_step import LocalCall, LocalMap
from runtime_core.agents.local import LocalStep
from runtime_core.agents.naming import name_and_pool
from runtime_core.agents.values import from_json
from runtime_core.encoding import encode
from runtime_core.engines.mapped import MAP, MOST_IN_FLIGHT, with_errors
from runtime_core.engines.reference import with_references
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from runtime_core.agents.branch import Branch
    from runtime_core.agents.ports import LocalFunction
    from runtime_core.agents.run import Run

LOCAL = "local"


class Engine:
    """One of `local` (threads or worker processes of this one), `ray` and `spark`."""

    __slots__ = ("_engine", "_run")

    def __init__(self, run: Run, engine: str) -> None:
        self._run = run
        self._engine = engine

    @property
    def name(self) -> str:
        """`local`, `ray` or `spark`."""
        return self._engine

    def call(self, function: object, /, **arguments: object) -> Asked[Any] | LocalStep:  # Any: its own JSON
        """Call a registered engine function, by itself or by name, as in `"rank"` or `"rank@2"`.

        Raises EngineError when awaited. A large result is a `Reference`, which may be an argument of other calls.
        """
        branch, known, name, pool = self._found("call", function)
        data = encode(arguments, f"arguments of engine function {name!r}")
        if self._engine != LOCAL or known is None:
            return call(self._run, branch, self._engine, name, data=data, pool=pool, made=_Call)
        return LocalCall(self._run, branch, known, data)

    def map(
        self,
        function: object,
        items: Iterable[object],
        /,
        *,
        in_flight: int = 0,
        return_exceptions: bool = False,
        **common: object,
    ) -> Asked[Any] | LocalStep:  # Any: a list of the function's own JSON
        """Call it with each of `items`, as one step: a list of the results, in their order.

        An item becomes the function's first argument that `common`, the same in all calls, does not give. At most
        `in_flight` items are under way at once; 0: as many as the engine takes. When all have ended, the first error
        in order is raised, as EngineError; with `return_exceptions` an EngineError stands in the place of each that
        failed. The task's stream is told how far it is.
        """
        branch, known, name, pool = self._found("map", function)
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 0 <= in_flight <= MOST_IN_FLIGHT:
            raise InvalidInput("in_flight", f"{in_flight!r} is no whole number from 0 to {MOST_IN_FLIGHT}")
        if isinstance(items, str | bytes) or not isinstance(items, Iterable):
            raise InvalidInput("items", f"a {type(items).__name__} has no items to map over: give a list")
        over = "" if known is None else known.item_argument("", common)
        listed = list(items)
        data = encode(
            {
                "over": over,
                "items": listed,
                "arguments": common,
                "in_flight": in_flight,
                "return_exceptions": bool(return_exceptions),
            },
            f"items of engine function {name!r}",
        )
        if self._engine != LOCAL or known is None:
            return call(self._run, branch, self._engine, name, data=data, key=MAP, pool=pool, made=_Map)
        return LocalMap(self._run, branch, known, data)

    def _found(self, what: str, function: object) -> tuple[Branch, LocalFunction | None, str, str]:
        """Where the code stands, the function as this app declares it, its name and its pool."""
        run = self._run
        branch = run.flow.branch_here(f"ctx.engine({self._engine!r}).{what}")
        known = run.functions.engine_function(function)
        if known is None and self._engine == LOCAL:
            raise run.flow.misuse(
                f"{getattr(function, '__qualname__', function)!r} is no engine function of this app: "
                "decorate it with @app.engine_function"
            )
        if known is not None and (refusal := known.refusal(self._engine)):
            raise InvalidInput("engine", refusal)
        return branch, known, *name_and_pool(run, "engine function", known, function)


class _Call(Asked[Any]):  # Any: the function's own JSON
    __slots__ = ()

    def read(self, payload: bytes) -> Any:
        return with_references(from_json(payload), payload)


class _Map(Asked[Any]):  # Any: a list of the function's own JSON
    __slots__ = ()

    def read(self, payload: bytes) -> Any:
        return with_errors(with_references(from_json(payload), payload))
