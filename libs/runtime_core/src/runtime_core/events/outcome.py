"""How an event-driven run has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime_core.errors import InvalidInput, LimitExceeded, StepError, TaskCancelled
from runtime_core.events.errors import HandlerError
from runtime_core.events.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOutcome:
    """What `run_events` gives. `value()` is the answer, or raises the error."""

    status: str
    """`completed`, `failed`, `cancelled` or `interrupted`."""
    answer: Any = None  # Any: the payload of the message that ended the run
    error: dict[str, str] | None = None
    """`type` and `message`, where it did not complete."""
    message: Message | None = None
    """What ended the run."""
    unhandled: Sequence[Message] = field(default_factory=tuple)
    """Messages that waited when the run ended. They are on the record as all others are."""
    handled: int = 0
    cause: Exception | None = None
    """The handler's own exception, in the process where it was raised."""

    def value(self) -> Any:  # Any: as answer
        """The answer. Raises HandlerError, TaskCancelled, or the StepError that a handler left through."""
        if self.status == "completed":
            return self.answer
        # These say by themselves that another attempt would give the same.
        if isinstance(self.cause, StepError | InvalidInput | LimitExceeded):
            raise self.cause
        error = self.error or {}
        if self.status in ("cancelled", "interrupted"):
            raise TaskCancelled(error.get("type", self.status), error.get("message", ""))
        raise HandlerError(error.get("type", self.status), error.get("message", "")) from self.cause
