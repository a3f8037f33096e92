"""Inside the tools of a pydantic-ai agent that `App.add_pydantic_agent` runs: the call's ToolContext."""

from __future__ import annotations

from runtime_core.base.lazy import needs_extra

try:
    from runtime_core.llm.pydantic_ai.definition import tool_call
except ModuleNotFoundError as error:
    raise needs_extra("weft.pydantic_ai", "llm", error) from error

__all__ = ["tool_call"]
