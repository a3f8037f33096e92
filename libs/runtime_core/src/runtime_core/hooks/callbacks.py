"""Callbacks: what looks at the result of a tool before the agent has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from runtime_core.declaration import NAME, Place, checked_timeout, is_generator
from runtime_core.encoding import encode
from runtime_core.errors import ConfigurationError

SEPARATOR = "__"
"""Between a tool and one of its actions, in a callback's key."""


class CallbackResultType(StrEnum):
    """What becomes of the tool's result."""

    BYPASS = "bypass"
    """It stays as it is."""
    OVERRIDE = "override"
    """`result_data` takes its place."""


@dataclass(frozen=True, slots=True)
class CallbackResult:
    """What a callback says. With `success=False` the tool's result stays as it is, whatever the type."""

    success: bool = True
    result_data: Any = None  # Any: JSON that takes the place of the tool's result
    result_type: CallbackResultType = CallbackResultType.BYPASS


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a callback is given."""

    tool_name: str
    action_name: str
    """The argument `action` of the call where it is text, else empty."""
    arguments: Mapping[str, Any]  # Any: the tool's own JSON
    content: Any  # Any: the tool's own result
    task_id: str
    run_id: str


class Callback:
    """A function `(result: ToolResult)`, sync or async, under the name of a tool or `tool__action`."""

    def __init__(self, key: str, function: Callable[..., object], place: Place, *, timeout_seconds: float) -> None:
        """Raises ConfigurationError."""
        if not isinstance(key, str) or not NAME.fullmatch(key):
            raise ConfigurationError(
                f"callback key {key!r} ({place}) cannot be used: write @app.callback('tool') or 'tool__action'"
            )
        self.key = key
        self.what = f"callback {key!r}"
        self.place = place
        if not callable(function) or is_generator(function):
            raise ConfigurationError(f"{self.what} ({place}): {function!r} is no function that returns a result")
        self.function = function
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)


def keys_of(tool: str, arguments: Mapping[str, object]) -> list[str]:
    """The keys under which a call's callback may be declared, the most special one first."""
    action = action_of(arguments)
    return [f"{tool}{SEPARATOR}{action}", tool] if action else [tool]


def action_of(arguments: Mapping[str, object]) -> str:
    action = arguments.get("action")
    return action if isinstance(action, str) else ""


def recorded(result: object, what: str) -> dict[str, object]:
    """The callback's answer as the journal keeps it. Raises TypeError for another answer, InvalidInput for no JSON."""
    if result is None:
        result = CallbackResult()
    if not isinstance(result, CallbackResult):
        raise TypeError(f"{what} returned {result!r}: return None or CallbackResult(…)")
    kind = CallbackResultType(result.result_type)
    encode(result.result_data, f"the result_data of {what}")
    return {"success": bool(result.success), "type": str(kind), "result_data": result.result_data}
