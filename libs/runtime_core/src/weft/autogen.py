"""AutoGen programs on Weft: `WeftAgentRuntime` replaces autogen_core's `SingleThreadedAgentRuntime`."""

from __future__ import annotations

from runtime_core.base.lazy import needs_extra

try:
    from runtime_core.integrations.autogen import WeftAgentRuntime
except ModuleNotFoundError as error:
    raise needs_extra("weft.autogen", "autogen", error) from error

__all__ = ["WeftAgentRuntime"]
