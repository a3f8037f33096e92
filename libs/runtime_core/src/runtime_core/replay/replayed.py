"""What a replay gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime_core.aworld.events.message import Message
from runtime_core.errors import WeftError
from runtime_core.ids import ROOT_RUN
from runtime_core.replay.run import DivergedStep
from runtime_core.wire.results import TaskResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReplay:
    """One run, replayed."""

    run: str
    agent: str
    status: str
    """`completed`, `failed`, `stopped` (at a step without a result, or before `until`), `diverged`, or `unknown`: the
    app has no such agent."""
    output: Any = None  # Any: JSON
    error: dict[str, str] | None = None
    state: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    """The instance's state when the replay ended; a replay begins with an empty one."""
    stopped_at: str | None = None
    diverged: DivergedStep | None = None
    same: bool = False
    """Whether it ended as the record says."""
    messages: Sequence[Message] = ()
    emitted: Sequence[Any] = ()  # Any: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay gave."""

    task_id: str
    messages: Sequence[Message] = ()
    """Those that were given to the sink or the handlers, or that the code has emitted."""
    following: Sequence[Message] = ()
    """What handlers have yielded; nobody has handled these."""
    runs: Mapping[str, RunReplay] = field(default_factory=dict)
    """By run id, where code was replayed."""
    stopped_at: str | None = None
    """The message or step before which the replay ended."""
    response: TaskResponse | None = None
    """How the task ended in the LocalApp, where it ran there."""

    @property
    def run(self) -> RunReplay:
        """The task's first run. Raises WeftError where no code was replayed."""
        if ROOT_RUN not in self.runs:
            raise WeftError(f"of task {self.task_id} only messages were replayed; give an App to replay its code")
        return self.runs[ROOT_RUN]

    @property
    def divergences(self) -> list[DivergedStep]:
        """Where code and record differ, by run."""
        return [run.diverged for run in self.runs.values() if run.diverged is not None]
