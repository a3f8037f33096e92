"""Where a hook may run, and which agent runs an app's hooks of tasks that ended without being completed."""

from __future__ import annotations

import difflib
from enum import StrEnum

from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput


class HookPoint(StrEnum):
    """A place in a task's life. `HookPoint("start")` and the other older names give the member that they stand for."""

    # Around a task: in its first run.
    TASK_CREATED = "task_created"
    SESSION_STARTED = "session_started"
    USER_INPUT_RECEIVED = "user_input_received"
    PRE_TASK_CALL = "pre_task_call"
    POST_TASK_CALL = "post_task_call"
    TASK_COMPLETED = "task_completed"
    TASK_FAILED = "task_failed"
    SESSION_FINISHED = "session_finished"
    SESSION_FAILED = "session_failed"
    # Around each agent's run.
    AGENT_STARTED = "agent_started"
    AGENT_STOPPED = "agent_stopped"
    # Around what an agent does.
    BEFORE_LLM_CALL = "before_llm_call"
    AFTER_LLM_CALL = "after_llm_call"
    BEFORE_TOOL_CALL = "before_tool_call"
    AFTER_TOOL_CALL = "after_tool_call"
    TOOL_CALL_FAILED = "tool_call_failed"
    HUMAN_REQUESTED = "human_requested"
    HUMAN_ANSWERED = "human_answered"
    OUTPUT_PROCESS = "output_process"
    # Reached by `ctx.hook`: only the agent's own code knows when.
    BEFORE_CONTEXT_COMPACT = "before_context_compact"
    AFTER_CONTEXT_COMPACT = "after_context_compact"
    FILE_CHANGED = "file_changed"

    # Older names, as attributes.
    START = TASK_CREATED
    FINISHED = TASK_COMPLETED
    ERROR = TASK_FAILED
    PRE_LLM_CALL = BEFORE_LLM_CALL
    POST_LLM_CALL = AFTER_LLM_CALL
    PRE_TOOL_CALL = BEFORE_TOOL_CALL
    POST_TOOL_CALL = AFTER_TOOL_CALL

    @classmethod
    def _missing_(cls, value: object) -> HookPoint | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) and value == value.lower() else None


AFTER_FAILED_TASK = (HookPoint.POST_TASK_CALL, HookPoint.TASK_FAILED, HookPoint.SESSION_FAILED)
"""What is left for a task that has ended without being completed; `shared/hooks.lua` has them as END_POINTS."""
OF_A_TASK = frozenset(
    {
        HookPoint.TASK_CREATED,
        HookPoint.SESSION_STARTED,
        HookPoint.USER_INPUT_RECEIVED,
        HookPoint.PRE_TASK_CALL,
        HookPoint.TASK_COMPLETED,
        HookPoint.SESSION_FINISHED,
        *AFTER_FAILED_TASK,
    }
)
"""Points that a task has once, however many agents work for it."""


def point_named(name: object, field: str) -> HookPoint:
    """The point of this name, new or older. Raises InvalidInput(field) that lists the known ones."""
    try:
        return HookPoint(str(name))
    except ValueError:
        near = difflib.get_close_matches(str(name), HookPoint, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(HookPoint)}"
        raise InvalidInput(field, f"is no hook point; {hint}") from None


def agent_of_ends(app: str) -> str:
    """The name of the agent that runs an app's hooks of ended tasks."""
    return f"weft.task-ended.{app}"


def enders(manifest: Manifest) -> dict[str, str]:
    """Agent → who runs the hooks of its tasks' ends, behind `!` where some always run, `?` where only named ones do.

    Empty for an app that declares no hook there.
    """
    there = [hook for point in AFTER_FAILED_TASK for hook in manifest.hooks.get(point, {}).values()]
    if not there:
        return {}
    own = agent_of_ends(manifest.app)
    mark = "!" if any(hook.always for hook in there) else "?"
    return {name: mark + own for name in manifest.agents if name != own}
