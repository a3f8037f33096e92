"""A declared tool: a function that is called by name, with arguments from JSON."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from typing import cast

from runtime_core.declare.declaration import Place, is_async, without_context
from runtime_core.declare.encoding import encode_result
from runtime_core.declare.function import DeclaredFunction, FunctionSettings
from runtime_core.declare.manifest import ToolEntry
from runtime_core.declare.retry_policy import RetryPolicy
from runtime_core.tools.call import AbandonedThreads, ToolContext, run_in_thread, run_limited


class ToolSettings(FunctionSettings, total=False):
    """What may be said of a tool where it is declared; `timeout_seconds` is 60 where nothing is said."""

    repeatable: bool
    """False: an attempt whose end is unknown must not be made again."""


class Tool(DeclaredFunction):
    """A function, async or plain, with its name, limits and typed arguments: see `ToolSettings`."""

    def __init__(
        self,
        function: Callable[..., object],
        place: Place,
        *,
        timeout_seconds: float = 60.0,
        repeatable: bool = True,
        name: str | None = None,
        retry: RetryPolicy | None = None,
        pool: str = "",
    ) -> None:
        """Raises ConfigurationError for what can be seen without evaluating the annotations."""
        super().__init__("tool", function, place, timeout_seconds=timeout_seconds, name=name, retry=retry, pool=pool)
        self.repeatable = repeatable
        self._is_async = is_async(function)
        self._context_name, self._arguments = without_context(self.what, self._arguments, ToolContext, place)

    def entry(self) -> ToolEntry:
        """What the manifest says of it. Raises ConfigurationError as `check` does."""
        return ToolEntry(
            arguments=self.arguments.schema(),
            result=self.result_schema,
            pool=self.pool,
            description=self.description,
            repeatable=self.repeatable,
        )

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Call the function with `arguments` (a JSON object) and give its result as JSON.

        A plain function runs in `threads`. Raises InvalidInput (`arguments.…`, `result`), InvalidResult, TimeoutError
        at the limit, and whatever the function raises.
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
        return encode_result(result)


class StepTool(Tool):
    """An object with a `step` method as a tool: it is called with its arguments as one value."""

    ARGUMENT = "args"

    def __init__(self, instance: object, place: Place, *, name: str) -> None:
        step = cast("Callable[[object], object]", getattr(instance, "step"))  # noqa: B009  # who asks has looked

        if inspect.iscoroutinefunction(step):

            async def call(args: object) -> object:
                return await cast("Awaitable[object]", step(args))

            super().__init__(call, place, name=name, retry=RetryPolicy(attempts=1))
        else:

            def call_here(args: object) -> object:
                return step(args)

            super().__init__(call_here, place, name=name, retry=RetryPolicy(attempts=1))
        self.source = instance
        self.description = inspect.getdoc(type(instance)) or ""
