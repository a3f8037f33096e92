"""Declared functions with typed arguments: the base of tools and engine functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypedDict, cast, get_args, get_origin

from pydantic import BaseModel, PydanticUserError, TypeAdapter
from typing_extensions import get_type_hints, is_typeddict

from runtime_core.declare.declaration import (
    NO_DEFAULT,
    Place,
    RetryPolicy,
    arguments_of,
    checked_name,
    checked_pool,
    checked_retry,
    checked_timeout,
    is_generator,
    one_line,
    resolved,
)
from runtime_core.declare.schema import (
    Arguments,
    Reader,
    Schema,
    arguments_reader,
    result_reader,
    result_schema,
)
from runtime_core.errors import ConfigurationError, InvalidInput, InvalidResult


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

    @functools.cached_property
    def result_check(self) -> ResultCheck | None:
        """The check of results; None if their type is not declared, or allows any JSON."""
        return result_check(self.what, self.function, self.place)

    def named(self, values: Sequence[object]) -> dict[str, object]:
        """Return values that a caller gives by position under the names of the arguments. Raises InvalidInput."""
        if len(values) > len(self._arguments):
            raise InvalidInput("arguments", f"{self.what} takes {len(self._arguments)} arguments, not {len(values)}")
        return {argument.name: value for argument, value in zip(self._arguments, values, strict=False)}

    def check(self) -> None:
        """Build the reader and the schema. Raises ConfigurationError."""
        _ = self.arguments, self.result_schema


class ResultCheck:
    """Checks results of a function against its return type."""

    __slots__ = ("_adapter", "_reader", "_trusts", "_what", "exact")

    def __init__(self, what: str, hint: object) -> None:
        self._what = what
        self._adapter: TypeAdapter[object] = TypeAdapter(hint)  # type: ignore[arg-type]  # a type known only at run time
        self._reader = Reader(self._adapter, strict=True)
        self._trusts = _checks_itself(hint, set())
        self.exact = _exact_type(hint)
        """A value of this type fits for sure; None: there is none."""

    def check(self, value: object, data: bytes, field: str) -> None:
        """Raise InvalidResult, which names the wrong part, if neither JSON of a result nor its value fits."""
        try:
            self._reader.decode(data, field)
            return
        except InvalidInput as error:
            where, message = error.field, error.message
        except Exception as error:  # the type's own code
            where, message = field, f"its JSON cannot be read as the type, {one_line(error)}"
        if not self._trusts or not self._is_of_the_type(value):  # a model may write other JSON than it reads
            raise InvalidResult(
                where, f"{message}; it does not fit the return type of {self._what}: correct the result or the type"
            )

    def _is_of_the_type(self, value: object) -> bool:
        try:
            self._adapter.validate_python(value, strict=True)
        except Exception:  # the type's own code
            return False
        return True


def result_check(what: str, function: Callable[..., object], place: Place) -> ResultCheck | None:
    """Return the check of a function's results; None if any JSON fits, or JSON cannot tell."""
    returned = inspect.signature(function).return_annotation
    if returned is NO_DEFAULT:
        return None
    try:
        hint = resolved(what, "return", returned, function, place)
        if hint is object or hint is Any:
            return None
        return ResultCheck(what, hint)
    except (ConfigurationError, PydanticUserError, TypeError, NameError, RecursionError):
        return None


def _checks_itself(hint: object, seen: set[object]) -> bool:
    """Return whether a type has classes that check their values: models, enums, dataclasses with `__post_init__`."""
    if isinstance(hint, type) and hint not in seen:
        seen.add(hint)
        if issubclass(hint, Enum) or hasattr(hint, "__pydantic_validator__") or hasattr(hint, "__post_init__"):
            return True
        if dataclasses.is_dataclass(hint) or is_typeddict(hint):
            return any(_checks_itself(part, seen) for part in get_type_hints(hint).values())
    return any(_checks_itself(part, seen) for part in get_args(hint))


def _exact_type(hint: object) -> type | None:
    """Return the type of which each value fits; None if there is none."""
    if hint in (str, int, bool, float, list, dict) or (isinstance(hint, type) and issubclass(hint, BaseModel | Enum)):
        return cast(type, hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (list, dict) and arguments[-1] in (Any, object) and arguments[0] in (Any, object, str):
        return cast(type, origin)
    return None
