"""AutoGen programs on Weft: `WeftAgentRuntime` replaces autogen_core's `SingleThreadedAgentRuntime`.

1. `runtime` is the runtime of `runtime_core.integrations.actors`, with AutoGen's types, loggers and tracer.
2. `serialization` writes messages so that each part keeps its class.
"""

from __future__ import annotations

from runtime_core.base.lazy import needs_extra

try:
    from runtime_core.integrations.autogen.runtime import WeftAgentRuntime
except ModuleNotFoundError as error:
    raise needs_extra("runtime_core.integrations.autogen", "autogen", error) from error

__all__ = ["WeftAgentRuntime"]
