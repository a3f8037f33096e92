"""A declared engine function: what may run on the local, Ray and Spark engines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from runtime_core.declaration import (
    NO_DEFAULT,
    Place,
    arguments_of,
    checked_name,
    checked_pool,
    checked_retry,
    checked_timeout,
    is_async,
    is_generator,
    unannotated,
)
from runtime_core.encoding import encode
from runtime_core.errors import ConfigurationError
from runtime_core.policy import RetryPolicy
from runtime_core.schema import Arguments, Schema, arguments_reader, result_schema


class EngineFunction:
    """A plain function with its name, limits and typed arguments.

    It has no context and no state: the same call may run in a thread here or on a worker elsewhere.
    """

    def __init__(
        self,
        function: Callable[..., object],
        place: Place,
        *,
        name: str | None = None,
        timeout_seconds: float = 3600.0,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        if not callable(function) or inspect.isclass(function):
            raise ConfigurationError(f"{function!r} ({place}) cannot be an engine function: give a function")
        self.name = checked_name("engine function", name, function, place)
        self.what = f"engine function {self.name!r}"
        self.function = self.source = function
        self.place = place
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)
        self.retry = checked_retry(self.what, retry, place)
        self.pool = checked_pool(self.what, pool, place)
        self.description = inspect.getdoc(function) or ""
        if is_async(function):
            raise ConfigurationError(
                f"{self.what} ({place}) is async: declare a plain function, since it runs on workers without a loop"
            )
        if is_generator(function):
            raise ConfigurationError(f"{self.what} ({place}) is a generator: return a list")
        self._arguments = arguments_of(self.what, function, place)
        for argument in self._arguments:
            if argument.annotation is NO_DEFAULT:
                raise unannotated(self.what, argument, place)

    @functools.cached_property
    def arguments(self) -> Arguments:
        """What reads the arguments. Made at the first use; raises ConfigurationError for types without JSON."""
        return arguments_reader(self.what, self.function, self._arguments, self.place)

    @functools.cached_property
    def result_schema(self) -> Schema | None:
        """The JSON schema of the result; None where the function does not say."""
        return result_schema(self.what, self.function, self.place)

    def check(self) -> None:
        """Make all that the first call would make. Raises ConfigurationError."""
        _ = self.arguments, self.result_schema

    def run(self, arguments: bytes, /) -> bytes:
        """Call the function here and now with `arguments` (a JSON object); its result as JSON.

        Raises InvalidInput (`arguments.…`, `result`) and whatever the function raises. The limit in seconds is the
        engine's to keep.
        """
        return encode(self.function(**self.arguments.decode(arguments)), "result")
