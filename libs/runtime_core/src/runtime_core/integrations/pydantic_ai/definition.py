"""A pydantic-ai agent as an agent of an app: what it is asked, its conversation, what it answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Unpack

from pydantic import TypeAdapter, ValidationError
from pydantic_ai import ModelMessagesTypeAdapter
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.durable_exec import DurableOperation, ToolsetCallToolId, replay_scope
from pydantic_ai.exceptions import AgentRunError, UsageLimitExceeded, UserError
from pydantic_ai.messages import UserContent
from pydantic_ai.toolsets import AbstractToolset
from pydantic_core import to_jsonable_python

from runtime_core import codec
from runtime_core.agents.context import AgentContext
from runtime_core.agents.definition import AgentDefinition, AgentSettings, Coro
from runtime_core.agents.foreign import Foreign, host
from runtime_core.declaration import Place
from runtime_core.encoding import encode
from runtime_core.errors import AgentError, ConfigurationError, InvalidInput
from runtime_core.integrations.pydantic_ai.dependencies import Dependencies
from runtime_core.integrations.pydantic_ai.durability import StepBackend, WeftDurability
from runtime_core.integrations.pydantic_ai.model_calls import Prices
from runtime_core.integrations.pydantic_ai.tool_calls import PydanticTool, tools_of
from runtime_core.schema import Schema

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
        prices: Prices = MappingProxyType({}),
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Raises ConfigurationError for an agent that cannot run durably."""
        super().__init__(name, agent, place, **settings)
        if not isinstance(agent, AbstractAgent):
            raise ConfigurationError(f"{self.what} ({place}): {agent!r} is not an agent of pydantic-ai")
        self.agent: AbstractAgent[Any, Any] = agent
        self.dependencies = Dependencies(self.what, agent, deps, place)
        self._stream = stream
        self._prices = prices
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
        return WeftDurability(name=self.name, carried_deps=deps, stream=self._stream, prices=self._prices)

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

        async def converse(foreign: Foreign) -> object:
            # Where the agent is instrumented: its spans of what was done by an earlier process are not made again.
            with (
                self.agent.using_thread_executor(self._threads),
                replay_scope(is_replaying=lambda: foreign.replaying),
            ):
                return await self._converse(ctx, question, deps, history)

        return await host(ctx, converse)

    async def _converse(self, ctx: AgentContext, question: Question, deps: object, history: list[Any]) -> object:
        try:
            result = await self.agent.run(
                question.prompt,
                deps=deps,
                message_history=history or None,
                capabilities=[self._durability(question.deps)],
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
