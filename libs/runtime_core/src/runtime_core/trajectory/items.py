"""A trajectory as items for training: the state that an agent saw, what it did, and what came of it."""

from __future__ import annotations

from typing import Any

import msgspec


class ItemMeta(msgspec.Struct):
    """Whose item it is, and when."""

    session_id: str
    task_id: str
    run_id: str
    agent: str
    step: int
    """The item's number in its task, from 1."""
    step_id: str
    """The step in which the agent decided, as in `3.0.1`; empty where the item stands for the whole run."""
    execute_time: float
    """When it began, in epoch milliseconds."""
    pre_agent: str | None
    """The agent of the item before it in the task; None for the first."""


class ItemState(msgspec.Struct):
    """What the agent knew."""

    input: Any  # the user's own JSON
    """What the run was asked."""
    messages: list[Any] | None  # the user's own JSON
    """What was given to the model; None where the step says nothing of messages."""
    context: dict[str, Any]  # the user's own JSON
    """`key` of the instance, `attempt`, and whatever a strategy adds."""


class ItemAction(msgspec.Struct):
    """What the agent did."""

    content: Any  # the user's own JSON
    """The model's answer, or what the run returned."""
    tool_calls: list[Any]  # the user's own JSON
    """As the model named them, else the calls that followed: `{"id", "type", "name", "arguments"}`."""
    is_agent_finished: bool
    """Whether it was the run's last decision and the run completed."""
    usage: dict[str, float]
    """Tokens of the model call."""
    logprobs: Any = None  # as the model gives them
    ext_info: dict[str, Any] = {}  # whatever a strategy adds; `duration_ms`, and `error` where it failed


class ItemReward(msgspec.Struct):
    """What came of it."""

    tool_outputs: list[dict[str, Any]]  # the tools' own JSON
    """`{"id", "name", "status", "output", "error"}` of each call that followed, in the order of the program."""
    status: str
    """Of the step or run that the item stands for: `completed`, `failed` or `cancelled`."""
    score: float | None = None
    """What the reward function gave; None without one."""
    details: dict[str, Any] = {}  # what else the reward function gave


class TrajectoryItem(msgspec.Struct):
    """State, action and reward of one decision."""

    id: str
    """`task:run:step`: the same at each export."""
    meta: ItemMeta
    state: ItemState
    action: ItemAction
    reward: ItemReward
