"""A pydantic-ai agent as an agent of an app: its input, its dependencies, its conversation, its tools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Unpack

from pydantic import TypeAdapter, ValidationError
from pydantic_ai import ModelMessagesTypeAdapter
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.durable_exec import DurableOperation, ToolsetCallToolId
from pydantic_ai.exceptions import AgentRunError, UsageLimitExceeded, UserError
from pydantic_ai.messages import UserContent
from pydantic_ai.toolsets import AbstractToolset
from pydantic_core import to_jsonable_python

from runtime_core import codec
from runtime_core.declare.declaration import Place
from runtime_core.declare.schema import Schema, encode
from runtime_core.errors import AgentError, ConfigurationError, InvalidInput
from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.pydantic_ai.durability import Calls, Guarding, StepBackend, WeftDurability, run_agent
from runtime_core.llm.pydantic_ai.tool_calls import PydanticTool, tools_of
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import AgentDefinition, AgentSettings, Coro


class Dependencies:
    """Makes the deps of an agent: in agent-handler for its code, and in tool-handler for each call of a tool.

    `make` is a function `()` or `(data)`, sync or async, of the input's `deps`; None: these are read as the agent's
    `deps_type`. What one process changes in them no other sees.
    """

    def __init__(
        self, what: str, agent: AbstractAgent[Any, Any], make: Callable[..., object] | None, place: Place
    ) -> None:
        """Raises ConfigurationError for what is no such function."""
        self._what = what
        self._type = agent.deps_type
        self._make = make
        self._takes_data = False
        if make is None:
            return
        if not callable(make):
            raise ConfigurationError(
                f"{what} ({place}) has deps={make!r}: give a function that makes them, since several processes need "
                "them; data goes into the input, as deps"
            )
        try:
            needed = len(inspect.signature(make).parameters)
        except ValueError:  # some classes of C have no signature
            needed = 0
        if needed > 1:
            raise ConfigurationError(f"{what} ({place}): deps takes {needed} arguments: take none, or the input's deps")
        self._takes_data = needed == 1

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:  # Any: the user's own type
        return TypeAdapter(self._type)

    async def make(self, data: object) -> Any:  # Any: the user's own type
        """The deps for the input's `deps`, JSON. Raises InvalidInput(`input.deps`)."""
        if self._make is not None:
            made = self._make(data) if self._takes_data else self._make()
            return await made if inspect.isawaitable(made) else made
        if self._type in (type(None), object, Any):
            return data
        name = getattr(self._type, "__name__", str(self._type))
        if data is None:
            raise InvalidInput(
                "input.deps",
                f'{self._what} needs deps of type {name}: send them as JSON, {{"prompt": …, "deps": {{…}}}}, or '
                "declare the agent with deps=, a function that makes them in each process",
            )
        try:
            return self._adapter.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(("input.deps", *map(str, first["loc"])))
            raise InvalidInput(place, f"{first['msg']} ({name})") from None
        except Exception as error:
            raise InvalidInput(
                "input.deps",
                f"{name} cannot be read from JSON ({error}): declare {self._what} with deps=, a function that makes it",
            ) from None


THREADS = 4
"""Of an agent in one process; made when they are needed."""
HISTORY = "messages"
"""Where an instance with a key keeps its conversation, in `ctx.state`."""
_content: TypeAdapter[list[UserContent]] = TypeAdapter(list[UserContent])


@dataclass(frozen=True, slots=True)
class Question:
    """A decoded input."""

    prompt: str | list[UserContent] | None
    deps: object
    """JSON."""


class PydanticAgent(AgentDefinition):
    """An agent of pydantic-ai under a name of the app's."""

    def __init__(
        self,
        name: str,
        agent: object,
        place: Place,
        *,
        deps: Callable[..., object] | None = None,
        stream: bool = True,
        prices: Mapping[str, Any] = MappingProxyType({}),  # Any: names to Price
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Raises ConfigurationError for an agent that cannot run durably."""
        super().__init__(name, agent, place, **settings)
        if not isinstance(agent, AbstractAgent):
            raise ConfigurationError(f"{self.what} ({place}): {agent!r} is not an agent of pydantic-ai")
        self.agent: AbstractAgent[Any, Any] = agent
        self.dependencies = Dependencies(self.what, agent, deps, place)
        self._calls = Calls(ModelSettings(None, stream=stream, prices=prices))
        bound = self._durability(None)
        try:
            self._backend = _backend(bound.for_agent(agent))
        except UserError as error:
            raise ConfigurationError(f"{self.what} ({place}): {error}") from error
        self.app_tools = tools_of(self, self.operations, place)
        """What the app declares with it."""

    @property
    def operations(self) -> Mapping[ToolsetCallToolId, DurableOperation[Any, Any, Any]]:
        """How tools are called, by toolset."""
        return self._backend.tools

    @functools.cached_property
    def toolsets(self) -> Mapping[str, AbstractToolset[Any]]:
        """Those that list and call tools themselves, by id."""
        found: dict[str, AbstractToolset[Any]] = {}

        def note(toolset: AbstractToolset[Any]) -> None:
            if toolset.id is not None:
                found[toolset.id] = toolset

        for toolset in self.agent.toolsets:
            toolset.apply(note)
        return found

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """For plain functions between the steps: the host knows when these threads end, of others it does not."""
        return ThreadPoolExecutor(THREADS, thread_name_prefix=f"code of {self.name}")

    def _durability(self, deps: object) -> WeftDurability:
        return WeftDurability(name=self.name, calls=self._calls, carried_deps=deps)

    # ---- declared ------------------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        declared = {tool.name for tool in self.app_tools}
        late = [tool.name for tool in tools_of(self, self.operations, self.place) if tool.name not in declared]
        if late:
            raise ConfigurationError(
                f"{self.what} ({self.place}) got tools after it was declared: {', '.join(late)}: call "
                "add_pydantic_agent after the agent's last @agent.tool"
            )

    def input_schema(self) -> Schema:
        parts: Schema = {"type": "array", "items": {"type": ["string", "object"]}}
        return {
            "anyOf": [
                {"type": "string"},
                parts,
                {
                    "type": "object",
                    "properties": {"prompt": {"anyOf": [{"type": "string"}, parts]}, "deps": {}},
                    "additionalProperties": False,
                },
            ]
        }

    def output_schema(self) -> Schema | None:
        output = self.agent.output_type
        if not isinstance(output, type) or output is str:
            return {"type": "string"} if output is str else None
        try:
            return dict(TypeAdapter(output).json_schema(mode="serialization"))
        except Exception:  # a type without a schema, of many libraries' kinds: the output then says what it is
            return None

    def decode_input(self, data: bytes) -> Question:
        given = codec.decode(data)
        deps: object = None
        if isinstance(given, dict):
            unknown = sorted(given.keys() - {"prompt", "deps"})
            if unknown:
                raise InvalidInput(f"input.{unknown[0]}", "is not known; known are prompt, deps")
            deps, given = given.get("deps"), given.get("prompt")
        if given is None or isinstance(given, str):
            return Question(given, deps)
        try:
            return Question(_content.validate_python(given), deps)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidInput("input.prompt", f"is neither text nor a list of content parts: {first['msg']}") from None

    def encode_output(self, value: object) -> bytes:
        return encode(to_jsonable_python(value), "output")

    # ---- run -----------------------------------------------------------------------------------------------

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, Question)  # what decode_input gave
        return self._run(ctx, value)

    async def _run(self, ctx: AgentContext, question: Question) -> object:
        deps = await self.dependencies.make(question.deps)
        history = ModelMessagesTypeAdapter.validate_python(ctx.state.get(HISTORY, [])) if ctx.key else []
        try:
            result = await run_agent(
                ctx,
                self.agent,
                question.prompt,
                deps=deps,
                history=history,
                threads=self._threads,
                capabilities=[self._durability(question.deps), Guarding(self.what)],
                metadata=dict(ctx.metadata) or None,
            )
        except (AgentRunError, UsageLimitExceeded, UserError) as error:
            # The same code would do the same again.
            raise AgentError(type(error).__name__, str(error)) from error
        if ctx.key:
            ctx.state[HISTORY] = ModelMessagesTypeAdapter.dump_python(result.all_messages(), mode="json")
        return result.output


def _backend(bound: object) -> StepBackend:
    """Of the capability that is bound to an agent, alone or with companions."""
    for capability in (bound, *getattr(bound, "capabilities", ())):
        if isinstance(capability, WeftDurability):
            return capability.get_durable_operation_backend()
    raise AssertionError(f"{bound!r} holds no WeftDurability")


__all__ = ["PydanticAgent", "PydanticTool", "Question"]
