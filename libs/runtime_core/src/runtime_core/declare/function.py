"""A declared function with typed arguments: what tools and engine functions have in common."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypedDict

from runtime_core.declare.declaration import (
    Place,
    arguments_of,
    checked_name,
    checked_pool,
    checked_retry,
    checked_timeout,
    is_generator,
)
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.declare.schema import Arguments, Schema, arguments_reader, result_schema
from runtime_core.errors import ConfigurationError


class FunctionSettings(TypedDict, total=False):
    """What may be said of a function where it is declared."""

    name: str | None
    """None: the function's own."""
    timeout_seconds: float
    """Limits one attempt."""
    retry: RetryPolicy | None
    pool: str
    """Of the handlers that run it; `` is the default one."""


class DeclaredFunction:
    """A function with its name, limits and typed arguments. `kind` is what messages call it."""

    def __init__(
        self,
        kind: str,
        function: Callable[..., object],
        place: Place,
        *,
        timeout_seconds: float,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        if not callable(function) or inspect.isclass(function):
            article = "an" if kind[0] in "aeiou" else "a"
            raise ConfigurationError(f"{function!r} ({place}) cannot be {article} {kind}: give a function")
        self.name = checked_name(kind, name, function, place)
        self.what = f"{kind} {self.name!r}"
        self.function = function
        self.source: object = function
        """What the app finds it by."""
        self.place = place
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)
        self.retry = checked_retry(self.what, retry, place)
        self.pool = checked_pool(self.what, pool, place)
        self.description = inspect.getdoc(function) or ""
        if is_generator(function):
            raise ConfigurationError(f"{self.what} ({place}) is a generator: return a list")
        self._arguments = arguments_of(self.what, function, place)

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
