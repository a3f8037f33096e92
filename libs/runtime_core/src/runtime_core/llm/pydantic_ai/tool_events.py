"""The contents of a pydantic-ai agent's tool events.

An event has the tool's own arguments, and the member `weft.run` with data of the run.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter
from pydantic_ai import FunctionToolset, RunContext
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    DurabilityEngineSpec,
    DurableRunContext,
    DynamicToolsetCallToolParams,
    ParameterTransports,
    ToolsetCallToolId,
    ToolsetCallToolParams,
    revalidate_function_call,
)
from pydantic_ai.tools import ToolDefinition
from pydantic_core import to_jsonable_python

from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput

CARRIED = "weft.run"
"""The member beside the arguments. No Python parameter can have this name."""
SETTINGS = "weft"
"""The key of a tool's metadata that holds its ToolSettings; False there: the tool runs between the steps."""
OWN_TOOLSET = "<agent>"
"""pydantic-ai's id for the tools of the agent itself."""
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
"""Fields of a run context that another version of the code may change: they must not be part of a call's digest."""

definitions: TypeAdapter[ToolDefinition] = TypeAdapter(ToolDefinition)

ENGINE = DurabilityEngineSpec(
    engine_name="Weft",
    durable_unit_noun="step",
    durable_container_noun="run",
    codec=JSON_CODEC,
    # A toolset connects inside the step that needs it, never between steps.
    toolset_lifecycles={"function": "enter-never", "mcp": "enter-never", "dynamic": "enter-never"},
    tool_config_key=SETTINGS,
)


def tool_name(agent: str, operation: ToolsetCallToolId, tool: str) -> str:
    """Return the name of the event's tool. It is persisted with runs that wait for it."""
    toolset = operation.toolset_id
    if operation.toolset_kind != "function":
        return f"{agent}.{toolset}"
    return f"{agent}.{tool}" if toolset == OWN_TOOLSET else f"{agent}.{toolset}.{tool}"


def event_data(
    operation: ToolsetCallToolId, params: ToolsetCallToolParams | DynamicToolsetCallToolParams, deps: object
) -> bytes:
    """Return a tool event as JSON. Raises InvalidInput for arguments that JSON cannot represent."""
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
            carried["definition"] = definitions.dump_python(definition, mode="json")
    if CARRIED in arguments:
        raise InvalidInput(f"arguments.{CARRIED}", "is a reserved name: rename the tool's parameter")
    try:
        plain = to_jsonable_python({**arguments, CARRIED: carried})
    except ValueError as error:
        raise InvalidInput(f"arguments of {params.name}", str(error)) from error
    return encode(plain, f"arguments of tool {params.name!r}")


def _context_of(ctx: RunContext[Any]) -> dict[str, Any]:  # Any: JSON
    """Return the fields of the run context to send, with the same bytes at each replay."""
    carried = {name: value for name, value in DurableRunContext.serialize_run_context(ctx).items() if name not in _LIVE}
    for name, value in carried.items():
        if isinstance(value, set | frozenset):
            carried[name] = sorted(value)
        elif name == "usage":  # omit the zeros, which are its defaults
            carried[name] = {part: number for part, number in to_jsonable_python(value).items() if number}
    return carried


class Revalidating(ParameterTransports):
    """Validates arguments again with the tool's schema, because they were sent as JSON."""

    async def prepare_function_call(
        self, toolset: FunctionToolset[Any], params: ToolsetCallToolParams
    ) -> ToolsetCallToolParams:
        return await revalidate_function_call(toolset, params, engine_spec=ENGINE)
