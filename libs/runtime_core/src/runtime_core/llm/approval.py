"""Which of a model's calls a human is asked about first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

import msgspec

from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.runs.calls import checked_default

log = logging.getLogger(__name__)

Arguments = Mapping[str, Any]  # Any: JSON


class Asking(msgspec.Struct, omit_defaults=True):
    """One rule that fits a call, as it is journaled with the model's answer."""

    over: float | None = None
    """Only where the task has cost more than this; None: always."""
    timeout_seconds: float | None = None
    """None: there is no limit."""
    default: bool | None = None
    """What holds at the limit; None: nothing was said, and the call is refused."""


class Approve:
    """A human is asked before a call of a tool (or of another agent) whose name fits `pattern`.

    `when(arguments)` looks at the call's arguments, a dict; what it raises counts as yes. `cost_over` asks only once
    the task has cost more than that, in the currency of `prices`. After `timeout` (seconds or timedelta; None: no
    limit) the answer is `default`, True or False; without a default the call is refused. The human approves, denies
    or edits the arguments; the model is told of a denial, with the reason, and of an edit.
    """

    __slots__ = ("cost_over", "default", "pattern", "timeout_seconds", "when")

    def __init__(
        self,
        pattern: str = "*",
        *,
        when: Callable[[Arguments], object] | None = None,
        cost_over: float | None = None,
        timeout: float | timedelta | None = None,
        default: object = ...,
    ) -> None:
        """Raises ConfigurationError that names the argument."""
        if not isinstance(pattern, str) or not pattern:
            raise ConfigurationError(f"Approve pattern={pattern!r}: give a tool's name or a pattern such as 'delete_*'")
        if when is not None and not callable(when):
            raise ConfigurationError(f"Approve({pattern!r}) has when={when!r}: give a function of the arguments")
        self.pattern = pattern
        self.when = when
        self.cost_over = None if cost_over is None else _number(pattern, "cost_over", cost_over)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self.timeout_seconds = None if seconds is None else _number(pattern, "timeout", seconds)
        self.default = _default(pattern, default)

    def __repr__(self) -> str:
        return f"Approve({self.pattern!r})"

    def asks(self, name: str, arguments: Arguments) -> bool:
        """Whether a call fits, its cost aside."""
        if not fnmatchcase(name, self.pattern):
            return False
        if self.when is None:
            return True
        try:
            return bool(self.when(arguments))
        except Exception:
            log.warning("%r: when() has failed for a call of %s: a human is asked", self, name, exc_info=True)
            return True


def asking(rules: Sequence[Approve], name: str, arguments: Arguments) -> list[Asking]:
    """The rules that fit a call, up to the first that needs no look at what the task has cost."""
    found: list[Asking] = []
    for rule in rules:
        if rule.asks(name, arguments):
            found.append(Asking(rule.cost_over, rule.timeout_seconds, rule.default))
            if rule.cost_over is None:
                break
    return found


def asked_at(rules: Sequence[Asking], cost: float) -> Asking | None:
    """The rule by which a human is asked, where the task has cost this much; None: nobody is asked."""
    return next((rule for rule in rules if rule.over is None or cost > rule.over), None)


def _number(pattern: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"Approve({pattern!r}) has {name}={value!r}: give a number from 0 up")
    return float(value)


def _default(pattern: str, default: object) -> bool | None:
    if isinstance(default, EllipsisType):
        return None
    try:
        return checked_default(default, "default")
    except InvalidInput as error:
        raise ConfigurationError(f"Approve({pattern!r}): {error}") from None
