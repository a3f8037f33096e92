"""What an engine function is told of the call that it serves."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_core.engines.protocol import Step


@dataclass(frozen=True, slots=True)
class EngineContext:
    """The step that an engine function runs for: declare an argument of this type to get it, on any engine."""

    task_id: str = ""
    run_id: str = ""
    """The id of this call's run: the same in every attempt."""
    attempt: int = 1
    """From 1."""
    idempotency_key: str = ""
    """The same in every attempt of this call: pass it to what must not happen twice."""
    deadline: float | None = None
    """When the task must be done, in epoch seconds; None: no limit."""
    traceparent: str = ""
    """The span of this attempt, for what the function calls elsewhere; empty where nothing is traced."""

    @classmethod
    def of(cls, step: Step) -> EngineContext:
        """The same as it came with a call."""
        return cls(
            step.task,
            step.run,
            step.attempt,
            step.key or f"{step.task}/{step.run}",
            step.deadline or None,
            step.traceparent,
        )
