"""Stand-ins for tools and models."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from runtime_core.app.app import App
from runtime_core.declare.schema import encode_result
from runtime_core.declare.tool import AbandonedThreads, Tool, ToolContext
from runtime_core.errors import ConfigurationError, WeftError


class Failed:
    """Hides a module's frames from pytest's report of a failure that its message explains.

    pytest reads it as `__tracebackhide__` of the module.
    """

    def __call__(self, failure: Any) -> bool:  # Any: pytest's ExceptionInfo
        return isinstance(failure.value, AssertionError | TimeoutError | WeftError)


class StandIn(Tool):
    """A tool with the name, arguments and limits of another one. Subclasses define `call`."""

    def __init__(self, real: Tool) -> None:
        self.__dict__.update(real.__dict__)
        self.real = real


class FakeTool(StandIn):
    """A tool whose calls a test answers."""

    def __init__(self, real: Tool, answer: Callable[..., object]) -> None:
        super().__init__(real)
        self._answer = answer
        self._wants_context = (
            self._context_name in inspect.signature(answer).parameters if self._context_name else False
        )
        self.calls: list[dict[str, Any]] = []  # Any: the tool's arguments
        """The arguments of each call, by name, in the order of the calls. A retried call is in it several times."""

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        given = self.arguments.decode(arguments)
        self.calls.append(dict(given))
        if self._wants_context:
            given[self._context_name] = context
        result = self._answer(**given)
        return encode_result(await result if inspect.isawaitable(result) else result)


def tool_of(app: App, named: object) -> Tool:
    """Return a tool of the app. Raises ConfigurationError."""
    found = app.functions.tool(named)
    if found is None:
        known = ", ".join(sorted(app.tools)) or "none"
        raise ConfigurationError(f"app {app.name!r} declares no tool {named!r}: it declares {known}")
    return found


@dataclass(frozen=True)
class ToolCall:
    """What a scripted model asks for: a call of the tool `name` with these arguments."""

    name: str
    arguments: dict[str, Any]  # Any: JSON

    def __init__(self, name: str, /, **arguments: Any) -> None:  # Any: JSON
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "arguments", arguments)


Reply = str | ToolCall | Sequence[ToolCall] | Exception
"""An answer in text, calls of tools, or the error that the request raises."""


class ScriptedModel:
    """Answers the requests of models with the replies of a script, in the order of the requests."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = list(replies)
        self.requests: list[list[Any]] = []  # Any: messages of pydantic-ai
        """The messages of each request."""

    def next(self, messages: list[Any]) -> str | Sequence[ToolCall]:  # Any: as above
        """Return the next reply. Raises it if it is an error, and AssertionError after the last one."""
        self.requests.append(messages)
        if len(self.requests) > len(self._replies):
            raise AssertionError(
                f"the script of the model has {len(self._replies)} replies, and this is one more request"
            )
        reply = self._replies[len(self.requests) - 1]
        if isinstance(reply, Exception):
            raise reply
        return [reply] if isinstance(reply, ToolCall) else reply

    def model(self) -> object:
        """Return it as a Model of pydantic-ai. Raises ConfigurationError without `weft[llm]`."""
        try:
            from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
            from pydantic_ai.models.function import DeltaToolCall, FunctionModel
        except ImportError:
            raise ConfigurationError("a scripted model needs pydantic-ai: pip install 'weft[llm]'") from None

        def answer(messages: list[Any], _: object) -> ModelResponse:
            reply = self.next(messages)
            if isinstance(reply, str):
                return ModelResponse(parts=[TextPart(reply)])
            return ModelResponse(parts=[ToolCallPart(each.name, each.arguments) for each in reply])

        async def stream(messages: list[Any], _: object) -> AsyncIterator[str | dict[int, DeltaToolCall]]:
            reply = self.next(messages)
            if isinstance(reply, str):
                yield reply
                return
            yield {
                number: DeltaToolCall(name=each.name, json_args=json.dumps(each.arguments))
                for number, each in enumerate(reply)
            }

        return FunctionModel(answer, stream_function=stream, model_name="scripted")
