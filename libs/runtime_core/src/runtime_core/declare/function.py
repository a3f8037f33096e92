"""Declared functions with typed arguments: the base of tools and engine functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TypedDict

from runtime_core.declare.declaration import (
    Place,
    RetryPolicy,
    arguments_of,
    checked_name,
    checked_pool,
    checked_retry,
    checked_timeout,
    is_generator,
)
from runtime_core.declare.schema import Arguments, Reader, Schema, arguments_reader, result_reader, result_schema
from runtime_core.errors import ConfigurationError, InvalidInput


class FunctionSettings(TypedDict, total=False):
    """The options of any declared function. `App.tool` and `App.engine_function` describe them."""

    name: str | None
    timeout_seconds: float
    retry: RetryPolicy | None
    pool: str


class DeclaredFunction:
    """A function with its name, limits and typed arguments. Error messages call it by its `kind`."""

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
        """Raise ConfigurationError for mistakes that show without evaluating the annotations."""
        if not callable(function) or inspect.isclass(function):
            article = "an" if kind[0] in "aeiou" else "a"
            raise ConfigurationError(f"{function!r} ({place}) cannot be {article} {kind}: give a function")
        self.name = checked_name(kind, name, function, place)
        self.what = f"{kind} {self.name!r}"
        self.function = function
        self.source: object = function
        """The key by which the app finds it."""
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
        """The reader of the arguments. Raises ConfigurationError for types that JSON cannot represent."""
        return arguments_reader(self.what, self.function, self._arguments, self.place)

    @functools.cached_property
    def result_schema(self) -> Schema | None:
        """The JSON schema of the result; None if it is not declared."""
        return result_schema(self.what, self.function, self.place)

    @functools.cached_property
    def result_reader(self) -> Reader | None:
        """The reader of the results for a caller in this program; None if their JSON is enough."""
        return result_reader(self.what, self.function, self.place)

    def named(self, values: Sequence[object]) -> dict[str, object]:
        """Return values that a caller gives by position under the names of the arguments. Raises InvalidInput."""
        if len(values) > len(self._arguments):
            raise InvalidInput("arguments", f"{self.what} takes {len(self._arguments)} arguments, not {len(values)}")
        return {argument.name: value for argument, value in zip(self._arguments, values, strict=False)}

    def check(self) -> None:
        """Build the reader and the schema. Raises ConfigurationError."""
        _ = self.arguments, self.result_schema
