"""What agents of a task are given and give back: observations, actions, their results, and handing over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from runtime_core.errors import InvalidInput


@dataclass
class ActionResult:
    """What came of one action. `success` False: `error` says why, and `content` is None."""

    content: Any = None  # Any: the tool's or agent's own JSON
    success: bool = True
    error: str = ""
    tool_name: str = ""
    tool_call_id: str = ""


@dataclass
class Observation:
    """What an agent sees: `content` is any JSON value; `action_result` says what its last actions gave."""

    content: Any = None  # Any: whatever JSON the task's input, or the agent before, is
    observer: str = ""
    images: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    action_result: list[ActionResult] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        """Whether it says nothing but its content."""
        return not (self.observer or self.images or self.info or self.action_result)

    def __str__(self) -> str:
        """The content as text: what a prompt, or a next observation made of it, is to hold."""
        return str(self.content)

    @classmethod
    def of(cls, value: object) -> Observation:
        """An observation from itself, from its JSON object, or from anything else as its content."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and "content" in value and value.keys() <= _OBSERVED:
            given = {str(name): part for name, part in value.items()}
            given["action_result"] = [
                part if isinstance(part, ActionResult) else ActionResult(**part)
                for part in given.get("action_result", ())
            ]
            return cls(**given)
        return cls(content=value)


@dataclass
class ActionModel:
    """One action of an agent: a call of `tool_name` with `params`, or without a name its answer, `policy_info`.

    `tool_name` may name an agent, which is asked then; `agent_name` names one to hand over to.
    """

    tool_name: str = ""
    action_name: str = ""
    agent_name: str = ""
    params: dict[str, Any] = field(default_factory=dict)  # Any: JSON
    policy_info: Any = None  # Any: JSON
    tool_call_id: str = ""


@dataclass
class Handoff:
    """An agent's answer that hands over to agent `handoff` of its swarm, with what that one shall see."""

    handoff: str
    content: Any = None  # Any: JSON


_OBSERVED = {part.name for part in fields(Observation)}
_ACTION = {part.name for part in fields(ActionModel)}
_HANDOFF = {part.name for part in fields(Handoff)}


def handoff_in(output: object) -> Handoff | None:
    """The handing over that an agent's output (JSON) stands for, or None."""
    if isinstance(output, Handoff):
        return output
    if isinstance(output, Mapping) and isinstance(output.get("handoff"), str) and output.keys() <= _HANDOFF:
        return Handoff(output["handoff"], output.get("content"))
    return None


def actions_in(output: object) -> list[ActionModel]:
    """The actions that an agent's output (JSON) asks for: a list of them, or `{"actions": [...]}`; else none."""
    if isinstance(output, Mapping) and output.keys() == {"actions"}:
        output = output["actions"]
    if not _is_list(output) or not output or not all(_is_action(part) for part in output):
        return []
    return [action_of(part, "actions") for part in output]


def action_of(value: object, field: str) -> ActionModel:
    """An action from itself or its JSON object. Raises InvalidInput that names `field`."""
    if isinstance(value, ActionModel):
        return value
    if isinstance(value, Mapping) and value.keys() <= _ACTION:
        return ActionModel(**value)
    raise InvalidInput(field, f"{value!r} is no ActionModel: give tool_name and params, or policy_info")


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)


def _is_action(value: object) -> bool:
    if isinstance(value, ActionModel):
        return bool(value.tool_name)
    return isinstance(value, Mapping) and bool(value.get("tool_name")) and value.keys() <= _ACTION
