"""An app's hooks as its runs use them: the hooks of each run, and the agent for those of ended tasks.

The imports are inside the methods: a process that only declares an app need not load them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime_core.hooks.declared import HookTable

if TYPE_CHECKING:
    from runtime_core.declare.declaration import RetryPolicy
    from runtime_core.hooks.around import RunHooks
    from runtime_core.runs.definition import AgentDefinition
    from runtime_core.runs.run import Run


class AppHookTable(HookTable):
    """The declarations of one app, for its runs; `runs.ports.AppHooks` documents the methods."""

    def of_ends_agent(self, app: str) -> AgentDefinition:
        """Return the agent that runs the hooks of tasks that ended without completing."""
        from runtime_core.hooks.ended import TaskEnded

        return TaskEnded(app)

    def ended_task(self, input: bytes) -> str:
        """Return the id of the task that this input of that agent describes."""
        from runtime_core.hooks.ended import ended_task

        return ended_task(input)

    def of_run(
        self, run: Run, *, of_end: bool, retry: RetryPolicy, entry: Callable[[], str], failed: Callable[[str], None]
    ) -> RunHooks:
        """Return the hooks of one run: those that its task names and those that always run."""
        from runtime_core.hooks.around import RunHooks
        from runtime_core.hooks.ended import HooksOfEnd

        kind = HooksOfEnd if of_end else RunHooks
        named = run.meta.get("hooks", {})
        return kind(run, self, named, retry=retry, entry=entry, failed=failed)
