"""AutoGen programs on Weft: `WeftAgentRuntime` in the place of autogen_core's `SingleThreadedAgentRuntime`.

1. `runtime.py` is the runtime: the one of `runtime_core.actors`, which speaks AutoGen's types here.
2. `vocabulary.py` says which types those are.
3. `tagged.py` and `serialization.py` write messages so that each part comes back as the class it was.
4. `telemetry.py` tells AutoGen's own loggers and tracer what happens.
"""

from __future__ import annotations

from runtime_core.integrations.autogen.runtime import WeftAgentRuntime

__all__ = ["WeftAgentRuntime"]
