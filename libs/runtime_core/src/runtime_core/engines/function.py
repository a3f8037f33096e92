"""A declared engine function: what may run on the local, Ray and Spark engines."""

from __future__ import annotations

import functools
from collections.abc import Callable

from runtime_core.declaration import NO_DEFAULT, Place, is_async, unannotated
from runtime_core.encoding import encode
from runtime_core.errors import ConfigurationError
from runtime_core.function import DeclaredFunction
from runtime_core.manifest import EngineFunctionEntry
from runtime_core.policy import RetryPolicy


class EngineFunction(DeclaredFunction):
    """A plain function with its name, limits and typed arguments.

    It has no context and no state: the same call may run in a thread here or on a worker elsewhere.
    """

    def __init__(
        self,
        function: Callable[..., object],
        place: Place,
        *,
        timeout_seconds: float = 3600.0,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        super().__init__(
            "engine function", function, place, timeout_seconds=timeout_seconds, name=name, retry=retry, pool=pool
        )
        if is_async(function):
            raise ConfigurationError(
                f"{self.what} ({place}) is async: declare a plain function, since it runs on workers without a loop"
            )
        for argument in self._arguments:
            if argument.annotation is NO_DEFAULT:
                raise unannotated(self.what, argument, place)

    def entry(self) -> EngineFunctionEntry:
        """What the manifest says of it. Raises ConfigurationError as `check` does."""
        return EngineFunctionEntry(
            arguments=self.arguments.schema(),
            result=self.result_schema,
            pool=self.pool,
            description=self.description,
        )

    def run(self, arguments: bytes, /) -> bytes:
        """Call the function here and now with `arguments` (a JSON object); its result as JSON.

        Raises InvalidInput (`arguments.…`, `result`) and whatever the function raises. The limit in seconds is the
        engine's to keep.
        """
        return encode(self.bound(arguments)(), "result")

    def bound(self, arguments: bytes, /) -> Callable[[], object]:
        """The function with its arguments, read from a JSON object. Raises InvalidInput (`arguments.…`)."""
        return functools.partial(self.function, **self.arguments.decode(arguments))
