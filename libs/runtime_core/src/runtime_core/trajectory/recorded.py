"""What the trajectory store returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_core.trajectory.steps import Fork, Step, TaskEnd


@dataclass(frozen=True, slots=True)
class TaskTrajectory:
    """What is recorded of one task."""

    namespace: str
    task: str
    end: TaskEnd | None
    """None while the task runs, or while its end has not been recorded yet."""
    steps: list[Step]
    """By run path, then step path, then attempt; a run's own row comes first, `r/2` before `r/10`."""
    fork: Fork | None = None
    """Where the task was forked, if it was."""
    inherited: list[Step] = field(default_factory=list)
    """The steps before the fork, which other tasks have done; in the order of `steps`."""

    @property
    def complete(self) -> bool:
        """The end is recorded, and at least as many steps as it counts."""
        return self.end is not None and len(self.steps) >= self.end.steps


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step with its task."""

    task: str
    end: TaskEnd | None
    step: Step


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record entry whose steps could not be read, kept as it came."""

    partition: int
    entry_id: str
    task: str
    reason: str
    steps: bytes
