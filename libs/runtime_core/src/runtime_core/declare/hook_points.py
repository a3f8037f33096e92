"""The points of a task's life at which hooks run."""

from __future__ import annotations

import difflib
from enum import StrEnum

from runtime_core.errors import InvalidInput


class HookPoint(StrEnum):
    """A point in a task's life. `HookPoint("start")` and the other older names return the same members."""

    # Around a task, in its first run.
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
    # Around an agent's steps.
    BEFORE_LLM_CALL = "before_llm_call"
    AFTER_LLM_CALL = "after_llm_call"
    BEFORE_TOOL_CALL = "before_tool_call"
    AFTER_TOOL_CALL = "after_tool_call"
    TOOL_CALL_FAILED = "tool_call_failed"
    HUMAN_REQUESTED = "human_requested"
    HUMAN_ANSWERED = "human_answered"
    OUTPUT_PROCESS = "output_process"
    # Around a shortened conversation with a model; agents with other ways to shorten one fire them with `ctx.hook`.
    BEFORE_CONTEXT_COMPACT = "before_context_compact"
    AFTER_CONTEXT_COMPACT = "after_context_compact"

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
"""The points of a task that failed or was cancelled; END_POINTS in `shared/hooks.lua`."""
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
"""Points that a task reaches once, however many agents work for it."""


GUARD_MARK = "!"
"""The prefix of a guard's name in a task's context: a process without the hook still knows that it guards."""


def point_named(name: object, field: str) -> HookPoint:
    """Return the point with this name, current or older. Raises InvalidInput(field) with the known names."""
    try:
        return HookPoint(str(name))
    except ValueError:
        near = difflib.get_close_matches(str(name), HookPoint, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(HookPoint)}"
        raise InvalidInput(field, f"is not a hook point; {hint}") from None
