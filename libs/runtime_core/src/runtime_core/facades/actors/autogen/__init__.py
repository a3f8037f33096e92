"""AutoGen programs on Weft: `WeftAgentRuntime` replaces autogen_core's `SingleThreadedAgentRuntime`.

1. `runtime` is the runtime of `runtime_core.facades.actors`, with AutoGen's types, loggers and tracer.
2. `serialization` writes messages so that each part keeps its class.
"""

from __future__ import annotations

from runtime_core.facades.actors.autogen.runtime import WeftAgentRuntime

__all__ = ["WeftAgentRuntime"]
