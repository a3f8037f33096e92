"""How an event-driven run fails."""

from __future__ import annotations

from runtime_core.errors import InvalidInput, StepError


class UnknownReceiver(InvalidInput):
    """A message that nobody takes: no handler of its category, or none of its topic. It ends the task."""


class HandlerError(StepError):
    """A handler has failed; `type` and `message` are those of its error. The run is not tried again."""
