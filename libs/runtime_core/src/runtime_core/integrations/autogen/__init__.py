"""AutoGen programs on Weft: `WeftAgentRuntime` in the place of autogen_core's `SingleThreadedAgentRuntime`.

1. `runtime` is the runtime of `runtime_core.actors`, with AutoGen's types.
2. `serialization` writes messages so that each part comes back as the class it was.
3. `telemetry` logs and traces messages by AutoGen's own loggers and tracer.
"""

from __future__ import annotations

from runtime_core.integrations.autogen.runtime import WeftAgentRuntime

__all__ = ["WeftAgentRuntime"]
