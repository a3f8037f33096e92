"""A tool of a pydantic-ai agent as a tool event: what it carries, and how a tool-handler does it.

The event's arguments are the tool's own, and beside them the member `weft.run`: what the run knows (`_Carried`).
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pydantic import TypeAdapter
from pydantic_ai import FunctionToolset, RunContext
from pydantic_ai.durable_exec import (
    DurableOperation,
    DurableRunContext,
    DynamicToolsetCallToolParams,
    ParameterTransports,
    ToolsetCallToolId,
    ToolsetCallToolParams,
    revalidate_function_call,
)
from pydantic_ai.tools import ToolDefinition
from pydantic_core import to_jsonable_python

from runtime_core import codec
from runtime_core.declare.declaration import NAME, Place
from runtime_core.declare.manifest import ToolEntry
from runtime_core.declare.schema import encode
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.tools.tool import AbandonedThreads, Tool, ToolContext, ToolSettings, run_limited

if TYPE_CHECKING:
    from runtime_core.llm.pydantic_ai.definition import PydanticAgent

CARRIED = "weft.run"
"""The member beside the arguments. No parameter of Python can have this name."""
SETTINGS = "weft"
"""The key of a tool's metadata that holds its ToolSettings; False there: the tool runs between the steps."""
OWN_TOOLSET = "<agent>"
"""The id that pydantic-ai gives to the tools that belong to the agent itself."""
_LIVE = frozenset(
    {
        "available_tool_names",
        "active_capability_ids",
        "_deferred_capability_ids",
        "_tool_names_by_kind",
        "_anchored_evidence",
        "deadline",
    }
)
"""What a run context carries that another version of the code may change: it would count as another question."""

_CALL: contextvars.ContextVar[ToolContext] = contextvars.ContextVar("weft_pydantic_ai_tool_call")
_definitions: TypeAdapter[ToolDefinition] = TypeAdapter(ToolDefinition)

ToolOperation: TypeAlias = "DurableOperation[Any, Any, Any]"  # Any: parameters and results of several kinds


def tool_call() -> ToolContext:
    """The call that the running tool serves: its idempotency key, attempt, progress. Raises LookupError elsewhere."""
    return _CALL.get()


def tool_name(agent: str, operation: ToolsetCallToolId, tool: str) -> str:
    """The name of the event's tool. Persisted, with runs that wait for it."""
    toolset = operation.toolset_id
    if operation.toolset_kind != "function":
        return f"{agent}.{toolset}"
    return f"{agent}.{tool}" if toolset == OWN_TOOLSET else f"{agent}.{toolset}.{tool}"


def event_data(
    operation: ToolsetCallToolId, params: ToolsetCallToolParams | DynamicToolsetCallToolParams, deps: object
) -> bytes:
    """JSON of a tool event. Raises InvalidInput for arguments that JSON cannot hold."""
    carried: dict[str, Any] = {"context": _context_of(params.ctx)}  # Any: JSON
    if deps is not None:
        carried["deps"] = deps
    definition = params.tool_def if isinstance(params, DynamicToolsetCallToolParams) else None
    if operation.toolset_kind == "mcp" and isinstance(params, ToolsetCallToolParams) and params.tool is not None:
        definition = params.tool.tool_def
    arguments = params.tool_args
    if operation.toolset_kind != "function":
        carried["tool"] = params.name
        if definition is not None:
            carried["definition"] = _definitions.dump_python(definition, mode="json")
    if CARRIED in arguments:
        raise InvalidInput(f"arguments.{CARRIED}", "is a name of the runtime's own: rename the tool's parameter")
    try:
        plain = to_jsonable_python({**arguments, CARRIED: carried})
    except ValueError as error:
        raise InvalidInput(f"arguments of {params.name}", str(error)) from error
    return encode(plain, f"arguments of tool {params.name!r}")


def _context_of(ctx: RunContext[Any]) -> dict[str, Any]:  # Any: JSON
    """What of the run context travels; the same bytes at each replay."""
    carried = {name: value for name, value in DurableRunContext.serialize_run_context(ctx).items() if name not in _LIVE}
    for name, value in carried.items():
        if isinstance(value, set | frozenset):
            carried[name] = sorted(value)
        elif name == "usage":  # mostly zeros, which it begins with
            carried[name] = {part: number for part, number in to_jsonable_python(value).items() if number}
    return carried


class Revalidating(ParameterTransports):
    """Arguments have travelled as JSON: they are read again by the tool's own schema."""

    async def prepare_function_call(
        self, toolset: FunctionToolset[Any], params: ToolsetCallToolParams
    ) -> ToolsetCallToolParams:
        from runtime_core.llm.pydantic_ai.durability import ENGINE

        return await revalidate_function_call(toolset, params, engine_spec=ENGINE)


class PydanticTool(Tool):
    """A function tool of an agent, or a whole toolset whose tools are known at run time only (MCP, dynamic)."""

    def __init__(
        self, owner: PydanticAgent, operation: ToolsetCallToolId, tool: str, place: Place, settings: ToolSettings
    ) -> None:
        """`tool` is the function tool's name; empty for a whole toolset."""
        name = tool_name(owner.name, operation, tool)
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{owner.what} ({place}): its tool would be called {name!r}, which cannot be used: letters, digits, "
                "_ . or -, at most 128; give the toolset another id, or the tool another name"
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
        """What its schema needs was made with the agent."""

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
        """Do a tool event. What the tool says to the model, also by ModelRetry and its like, is the result."""
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
            raise InvalidInput("arguments", f"{self.what} is called by its agent only: member {CARRIED} is missing")
        from runtime_core.llm.pydantic_ai.durability import ENGINE

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
        definition = _definitions.validate_python(carried["definition"]) if "definition" in carried else None
        name = str(carried.get("tool", ""))
        if kind == "dynamic":
            return DynamicToolsetCallToolParams(name, tool_args=given, ctx=run_context, tool_def=definition)
        toolset = self._owner.toolsets[self._operation.toolset_id]
        assert definition is not None  # `event_data` has put it there
        tool = cast("Any", toolset).tool_for_tool_def(definition, ctx=run_context)  # MCPToolset: an extra of its own
        return ToolsetCallToolParams(name, tool_args=given, ctx=run_context, tool=tool)

    def _declared(self) -> Any:  # Any: pydantic-ai's Tool
        toolset = self._owner.toolsets.get(self._operation.toolset_id)
        return toolset.tools.get(self._tool) if isinstance(toolset, FunctionToolset) else None


def tools_of(owner: PydanticAgent, operations: Iterable[ToolsetCallToolId], place: Place) -> list[PydanticTool]:
    """The tools that an app has to declare for an agent."""
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
    """Stands in for the function: `call` is written again."""
