"""A pydantic-ai agent as an agent of an app, and its tools as tools of that app."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Unpack, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_ai import FunctionToolset, ModelMessagesTypeAdapter, RunContext
from pydantic_ai.agent import AbstractAgent
from pydantic_ai.durable_exec import (
    DurableOperation,
    DurableRunContext,
    DynamicToolsetCallToolParams,
    ToolsetCallToolId,
    ToolsetCallToolParams,
)
from pydantic_ai.exceptions import AgentRunError, UsageLimitExceeded, UserError
from pydantic_ai.messages import UserContent
from pydantic_ai.toolsets import AbstractToolset
from pydantic_core import to_jsonable_python

from runtime_core.declare.declaration import NAME, Place
from runtime_core.declare.manifest import ToolEntry
from runtime_core.declare.schema import Schema, encode
from runtime_core.declare.tool import AbandonedThreads, Tool, ToolContext, ToolSettings, run_limited
from runtime_core.errors import AgentError, ConfigurationError, InvalidInput
from runtime_core.llm.agent import ModelSettings, check_memory
from runtime_core.llm.attempt import messages_json
from runtime_core.llm.model_call import ConversationMemory
from runtime_core.llm.pydantic_ai.durability import (
    CARRIED,
    ENGINE,
    SETTINGS,
    RepetitionGuard,
    RequestHooks,
    StepBackend,
    WeftDurability,
    definitions,
    run_agent,
    tool_name,
)
from runtime_core.llm.tokens import REMEMBERED
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import AgentDefinition, AgentSettings, Coro
from runtime_core.wire import codec


class Dependencies:
    """Creates the deps of an agent, in an agent-handler for its code and in a tool-handler for each tool call.

    `make` is a function `()` or `(data)`, sync or async, which takes the input's `deps`. None: the input's `deps` are
    read as the agent's `deps_type`. Processes do not share changes to deps.
    """

    def __init__(
        self, what: str, agent: AbstractAgent[Any, Any], make: Callable[..., object] | None, place: Place
    ) -> None:
        """Raises ConfigurationError for an unsuitable `make`."""
        self._what = what
        self._type = agent.deps_type
        self._make = make
        self._takes_data = False
        if make is None:
            return
        if not callable(make):
            raise ConfigurationError(
                f"{what} ({place}) has deps={make!r}: pass a function that creates them, because several processes "
                "need them; pass data in the input, as deps"
            )
        try:
            needed = len(inspect.signature(make).parameters)
        except ValueError:  # some C classes have no signature
            needed = 0
        if needed > 1:
            raise ConfigurationError(
                f"{what} ({place}): deps takes {needed} arguments: let it take none, or the input's deps"
            )
        self._takes_data = needed == 1

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:  # Any: the user's own type
        return TypeAdapter(self._type)

    async def make(self, data: object) -> Any:  # Any: the user's own type
        """Return the deps for the input's `deps` (JSON). Raises InvalidInput (`input.deps`)."""
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
                "declare the agent with deps=, a function that creates them in each process",
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
                f"{name} cannot be read from JSON ({error}): declare {self._what} with deps=, a function that "
                "creates it",
            ) from None


THREADS = 4
"""The most threads of an agent in one process; started when needed."""
_CALL: contextvars.ContextVar[ToolContext] = contextvars.ContextVar("weft_pydantic_ai_tool_call")
_content: TypeAdapter[list[UserContent]] = TypeAdapter(list[UserContent])


@dataclass(frozen=True, slots=True)
class DecodedInput:
    """A decoded input."""

    prompt: str | list[UserContent] | None
    deps: object
    """JSON."""


class PydanticAgent(AgentDefinition):
    """An agent of pydantic-ai, declared in an app."""

    def __init__(
        self,
        name: str,
        agent: object,
        place: Place,
        *,
        deps: Callable[..., object] | None = None,
        stream: bool = True,
        prices: Mapping[str, Any] = MappingProxyType({}),  # Any: names to Price
        memory: object = REMEMBERED,
        **settings: Unpack[AgentSettings],
    ) -> None:
        """Raise ConfigurationError for an agent that cannot run durably."""
        super().__init__(name, agent, place, **settings)
        if not isinstance(agent, AbstractAgent):
            raise ConfigurationError(
                f"{self.what} ({place}): {agent!r} is not an agent of pydantic-ai: pass a pydantic_ai.Agent"
            )
        self.agent: AbstractAgent[Any, Any] = agent
        self.dependencies = Dependencies(self.what, agent, deps, place)
        check_memory(self.what, memory, has_model=False)
        self._memory = memory
        self._calls = RequestHooks(ModelSettings(None, stream=stream, prices=prices))
        bound = self._durability(None)
        try:
            self._backend = _backend(bound.for_agent(agent))
        except UserError as error:
            raise ConfigurationError(f"{self.what} ({place}): {error}") from error
        self.app_tools = tools_of(self, self.operations, place)
        """The tools that the app declares with the agent."""

    @property
    def operations(self) -> Mapping[ToolsetCallToolId, DurableOperation[Any, Any, Any]]:
        return self._backend.tools

    @functools.cached_property
    def toolsets(self) -> Mapping[str, AbstractToolset[Any]]:
        """The toolsets that list and call tools themselves, by id."""
        found: dict[str, AbstractToolset[Any]] = {}

        def note(toolset: AbstractToolset[Any]) -> None:
            if toolset.id is not None:
                found[toolset.id] = toolset

        for toolset in self.agent.toolsets:
            toolset.apply(note)
        return found

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Threads for sync functions between the steps. The host must know when they end, so they are our own."""
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
        except Exception:  # types of other libraries without a schema raise many kinds of errors
            return None

    def decode_input(self, data: bytes) -> DecodedInput:
        given = codec.decode(data)
        deps: object = None
        if isinstance(given, dict):
            unknown = sorted(given.keys() - {"prompt", "deps"})
            if unknown:
                raise InvalidInput(f"input.{unknown[0]}", "is not known; choose from prompt, deps")
            deps, given = given.get("deps"), given.get("prompt")
        if given is None or isinstance(given, str):
            return DecodedInput(given, deps)
        try:
            return DecodedInput(_content.validate_python(given), deps)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise InvalidInput("input.prompt", f"is neither text nor a list of content parts: {first['msg']}") from None

    def encode_output(self, value: object) -> bytes:
        return encode(to_jsonable_python(value), "output")

    # ---- run -----------------------------------------------------------------------------------------------

    def start(self, ctx: AgentContext, value: object) -> Coro:
        assert isinstance(value, DecodedInput)  # what decode_input gave
        return self._run(ctx, value)

    async def _run(self, ctx: AgentContext, question: DecodedInput) -> object:
        deps = await self.dependencies.make(question.deps)
        memory = ConversationMemory(ctx, self._calls.settings, self._memory, self.name)
        history = ModelMessagesTypeAdapter.validate_python(await memory.recall())
        try:
            result = await run_agent(
                ctx,
                self.agent,
                question.prompt,
                deps=deps,
                history=history,
                threads=self._threads,
                capabilities=[self._durability(question.deps), RepetitionGuard(self.what)],
                metadata=dict(ctx.metadata) or None,
            )
        except (AgentRunError, UsageLimitExceeded, UserError) as error:
            # A retry would fail in the same way.
            raise AgentError(type(error).__name__, str(error)) from error
        await memory.remember(messages_json(result.all_messages()))
        return result.output


def _backend(bound: object) -> StepBackend:
    """Return the backend of a capability that is bound to an agent, alone or combined with others."""
    for capability in (bound, *getattr(bound, "capabilities", ())):
        if isinstance(capability, WeftDurability):
            return capability.get_durable_operation_backend()
    raise AssertionError(f"{bound!r} holds no WeftDurability")


# ---- tools ------------------------------------------------------------------------------------------------------


def tool_call() -> ToolContext:
    """Return the context of the current tool call: idempotency key, attempt, progress. Raises LookupError elsewhere."""
    return _CALL.get()


class PydanticTool(Tool):
    """A function tool of an agent, or a whole toolset whose tools are known only at run time (MCP, dynamic)."""

    def __init__(
        self, owner: PydanticAgent, operation: ToolsetCallToolId, tool: str, place: Place, settings: ToolSettings
    ) -> None:
        """`tool` is the function tool's name; empty for a whole toolset."""
        name = tool_name(owner.name, operation, tool)
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{owner.what} ({place}): its tool would be named {name!r}, which is invalid: use letters, digits, "
                "_ . or -, at most 128; change the id of the toolset or the name of the tool"
            )
        settings = settings.copy()
        settings["name"] = name
        super().__init__(_unused, place, **settings)
        self.source = self
        self._owner = owner
        self._operation = operation
        self._tool = tool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PydanticTool) and (self.name, self._owner) == (other.name, other._owner)

    def __hash__(self) -> int:
        return hash(self.name)

    def check(self) -> None:
        """Do nothing: pydantic-ai checked the schema with the agent."""

    def entry(self) -> ToolEntry:
        declared = self._declared()
        return ToolEntry(
            arguments=dict(declared.function_schema.json_schema) if declared is not None else {"type": "object"},
            result=None,
            pool=self.pool,
            description=(declared.description or "") if declared is not None else "",
            repeatable=self.repeatable,
        )

    async def call(
        self, arguments: bytes, context: ToolContext, threads: Executor, abandoned: AbandonedThreads
    ) -> bytes:
        """Execute a tool event. The tool's message to the model, including ModelRetry, is the result."""
        try:
            return encode(
                await run_limited(self.what, self.timeout_seconds, lambda: self._run(arguments, context, threads)),
                "result",
            )
        except BaseException:
            context.cancel()
            raise

    async def _run(self, data: bytes, context: ToolContext, threads: Executor) -> object:
        given = codec.decode(data)
        carried = given.pop(CARRIED, None) if isinstance(given, dict) else None
        if not isinstance(given, dict) or not isinstance(carried, Mapping):
            raise InvalidInput("arguments", f"only its agent can call {self.what}: member {CARRIED} is missing")
        agent = self._owner.agent
        run_context = DurableRunContext.restore(
            cast("Mapping[str, Any]", carried.get("context", {})),
            deps=await self._owner.dependencies.make(carried.get("deps")),
            agent=agent,
            engine_spec=ENGINE,
        )
        operation = self._owner.operations[self._operation]
        token = _CALL.set(context)
        try:
            with agent.using_thread_executor(threads):
                params = self._params(given, carried, run_context)
                return operation.result_codec.dump(await operation.handler(params))
        finally:
            _CALL.reset(token)

    def _params(
        self, given: dict[str, Any], carried: Mapping[str, Any], run_context: RunContext[Any]
    ) -> ToolsetCallToolParams | DynamicToolsetCallToolParams:
        kind = self._operation.toolset_kind
        if kind == "function":
            return ToolsetCallToolParams(self._tool, tool_args=given, ctx=run_context, tool=None)
        definition = definitions.validate_python(carried["definition"]) if "definition" in carried else None
        name = str(carried.get("tool", ""))
        if kind == "dynamic":
            return DynamicToolsetCallToolParams(name, tool_args=given, ctx=run_context, tool_def=definition)
        toolset = self._owner.toolsets[self._operation.toolset_id]
        assert definition is not None  # set by `event_data`
        tool = cast("Any", toolset).tool_for_tool_def(
            definition, ctx=run_context
        )  # an MCPToolset, which needs another extra
        return ToolsetCallToolParams(name, tool_args=given, ctx=run_context, tool=tool)

    def _declared(self) -> Any:  # Any: pydantic-ai's Tool
        toolset = self._owner.toolsets.get(self._operation.toolset_id)
        return toolset.tools.get(self._tool) if isinstance(toolset, FunctionToolset) else None


def tools_of(owner: PydanticAgent, operations: Iterable[ToolsetCallToolId], place: Place) -> list[PydanticTool]:
    """Return the tools that an app must declare for an agent."""
    found = []
    for operation in operations:
        toolset = owner.toolsets.get(operation.toolset_id)
        if operation.toolset_kind != "function" or not isinstance(toolset, FunctionToolset):
            found.append(PydanticTool(owner, operation, "", place, {}))
            continue
        for name, tool in toolset.tools.items():
            settings = (tool.metadata or {}).get(SETTINGS, {})
            if settings is not False:
                found.append(PydanticTool(owner, operation, name, place, settings))
    return found


async def _unused() -> None:
    """A placeholder for the function: PydanticTool overrides `call`."""
