"""`WeftAgentRuntime`, as in `weft.autogen`."""

from __future__ import annotations

from runtime_core.base.lazy import needs_extra

try:
    from runtime_core.facades.actors.autogen import WeftAgentRuntime
except ModuleNotFoundError as error:
    raise needs_extra("runtime_core.integrations.autogen", "autogen", error) from error

__all__ = ["WeftAgentRuntime"]
