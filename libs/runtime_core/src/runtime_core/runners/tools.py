"""Objects with a `step` method as tools, and the call of a tool by a runner or a policy."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from runtime_core.declaration import Place
from runtime_core.policy import RetryPolicy
from runtime_core.tools.tool import Tool

if TYPE_CHECKING:
    from runtime_core.agents.context import AgentContext


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


def call_tool(ctx: AgentContext, name: str, args: Mapping[str, object]) -> Awaitable[Any]:  # Any: the tool's own JSON
    """A step that calls a tool with `args`, by name, or whole where the tool is an object with `step`."""
    if isinstance(ctx.functions.tool(name), StepTool):
        return ctx.tool(name, **{StepTool.ARGUMENT: args})
    return ctx.tool(name, **args)
