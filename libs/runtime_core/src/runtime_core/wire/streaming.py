"""What of a task's stream a reader wants: its steps, pieces of output, what its agents say, or all of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput

STEP_RECORDED = "weft.step.recorded"
_OUTPUT_DELTA = "weft.output.delta"


class StreamingMode(Enum):
    """A reader's choice. The final event and questions to humans are in every one of them."""

    CORE = "core"
    """Steps of agents, tools, tasks and groups, as they are committed."""
    CHUNK = "chunk"
    """Pieces of output as they come: what agents emit, and the progress of calls."""
    OUTPUT = "output"
    """What agents say (`ctx.emit`), without the progress of calls."""
    CHUNK_OUTPUT = "chunk_output"
    """All pieces of output."""
    ALL = "all"
    """Steps and all pieces of output."""

    @property
    def steps(self) -> bool:
        """Whether the task has to show its steps."""
        return self in (StreamingMode.CORE, StreamingMode.ALL)

    def shows(self, type: str, data: Mapping[str, Any]) -> bool:  # Any: JSON of the event
        """Whether an event of the stream is wanted."""
        if type == STEP_RECORDED:
            return self.steps
        if type == _OUTPUT_DELTA:
            return self is not StreamingMode.CORE and not (self is StreamingMode.OUTPUT and data.get("progress"))
        return True


def streaming_mode(field: str, value: object) -> StreamingMode:
    """A mode by its value, as the wire has it. Raises InvalidInput."""
    try:
        return StreamingMode(value)
    except ValueError:
        known = ", ".join(mode.value for mode in StreamingMode)
        raise InvalidInput(field, f"{quoted(value)} is no streaming mode; known are {known}") from None
