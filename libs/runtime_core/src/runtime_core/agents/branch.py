"""A branch: one line of execution in a run, which numbers its own steps; and what a branch waits for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime_core.agents.asked import Asked
    from runtime_core.context.context import Context


class Branch:
    """Numbers steps as `<prefix>1`, `<prefix>2`, … so that ids depend on the program and not on timing."""

    __slots__ = ("context", "count", "now_ms", "parent", "performing", "prefix", "stopped")

    def __init__(self, prefix: str, now_ms: int, parent: Branch | None = None) -> None:
        self.prefix = prefix
        self.parent = parent
        """The branch that waits for this one; None: the run's first."""
        self.context: Context | None = None
        """What this branch knows, once it was asked for; see `run_context.py`."""
        self.count = 0
        self.now_ms = now_ms
        """Time of the latest result that this branch has seen: what `ctx.now()` gives."""
        self.performing = False
        """True while the body of a `ctx.step` runs in this branch: it may take no steps."""
        self.stopped = False
        """True once it was ended by itself, while the run goes on: it takes no more steps."""

    def next_id(self) -> str:
        self.count += 1
        return f"{self.prefix}{self.count}"

    def move(self, prefix: str) -> None:
        """Number the steps to come from 1 under another prefix."""
        self.prefix, self.count = prefix, 0

    def saw(self, epoch_ms: int) -> None:
        self.now_ms = max(self.now_ms, epoch_ms)


class Wait:
    """What must be there before one branch can go on: results of steps, and helpers that end.

    A helper is a branch or a local step that runs beside it. A branch is in at most one wait at a time.
    """

    __slots__ = ("future", "helpers", "missing", "owner", "woken")

    def __init__(self) -> None:
        self.missing: dict[str, Asked[Any]] = {}  # Any: steps of all result types
        self.helpers = 0
        self.owner: asyncio.Task[Any] | None = None  # Any: tasks of all result types
        self.future: asyncio.Future[None] | None = None
        self.woken = False

    def over(self) -> bool:
        return not self.missing and not self.helpers
