"""A declared tool: a function that is called by name, with arguments from JSON."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import cast, get_args

from runtime_core.declaration import (
    NO_DEFAULT,
    Argument,
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
from runtime_core.tools.call import AbandonedThreads, ToolContext, run_in_thread, run_limited

# The annotation as text: the class may be imported for type checkers only, and then cannot be looked up.
_CONTEXT = re.compile(r"['\"]?((\w+\.)*Optional\[)?(\w+\.)*ToolContext(\s*\|\s*None)?\]?['\"]?")


class Tool:
    """A function, async or plain, with its name, limits and typed arguments.

    `timeout_seconds` limits one attempt; `repeatable=False` says that an attempt whose end is unknown must not be
    made again; `pool` names the pool of handlers that runs it, `` the default one.
    """

    def __init__(
        self,
        function: Callable[..., object],
        place: Place,
        *,
        name: str | None = None,
        timeout_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
        repeatable: bool = True,
        pool: str = "",
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        if not callable(function) or inspect.isclass(function):
            raise ConfigurationError(f"{function!r} ({place}) cannot be a tool: give a function")
        self.name = checked_name("tool", name, function, place)
        self.what = f"tool {self.name!r}"
        self.function = self.source = function
        self.place = place
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)
        self.retry = checked_retry(self.what, retry, place)
        self.repeatable = repeatable
        self.pool = checked_pool(self.what, pool, place)
        self.description = inspect.getdoc(function) or ""
        if is_generator(function):
            raise ConfigurationError(f"{self.what} ({place}) is a generator: return a list")
        self._is_async = is_async(function)
        self._context_name, self._arguments = _split(self.what, arguments_of(self.what, function, place), place)

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

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call the function with `arguments` (a JSON object) and give its result as JSON.

        A plain function runs in `threads`. Raises InvalidInput (`arguments.…`, `result`), TimeoutError at the
        limit, and whatever the function raises.
        """
        given = self.arguments.decode(arguments)
        if self._context_name:
            given[self._context_name] = context
        call = functools.partial(self.function, **given)
        if self._is_async:
            # `is_async` has looked: a call gives a coroutine, which the type of a bare callable cannot say.
            coroutine = cast("Callable[[], Coroutine[object, object, object]]", call)
            try:
                result = await run_limited(self.what, self.timeout_seconds, coroutine)
            except BaseException:
                context.cancel()  # what the tool left running, in threads of its own, can see that it is over
                raise
        else:
            result = await run_in_thread(self.what, self.timeout_seconds, call, threads, abandoned, context.cancel)
        return encode(result, "result")


def _split(what: str, arguments: list[Argument], place: Place) -> tuple[str, list[Argument]]:
    """The name of the argument that takes the context (`` without one), and the others."""
    context_name = ""
    others = []
    for argument in arguments:
        if argument.annotation is NO_DEFAULT:
            raise unannotated(what, argument, place)
        if not _is_context(argument.annotation):
            others.append(argument)
        elif context_name:
            raise ConfigurationError(
                f"{what} ({place}) takes a ToolContext twice, {context_name!r} and {argument.name!r}: remove one"
            )
        else:
            context_name = argument.name
    return context_name, others


def _is_context(annotation: object) -> bool:
    if isinstance(annotation, str):
        return _CONTEXT.fullmatch(annotation.strip()) is not None
    return annotation is ToolContext or ToolContext in get_args(annotation)
