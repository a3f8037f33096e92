"""From what the branches wait for to what the broker is asked, with the rule that wakes the run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from runtime_core.consumer.effects import NO_WAKE, WAKE, Suspended
from runtime_core.runs.scheduler import Wait

if TYPE_CHECKING:
    from runtime_core.runs.calls import Asked

_in_program_order = attrgetter("order")


def suspend(waits: Iterable[Wait], pending: Mapping[str, str]) -> Suspended:
    """The effects of a turn whose branches all wait.

    A branch that waits for one step wakes the run with it (`!`); one that waits for several steps of a gather
    when the last of them is there (`g<n>`). Steps of a gather that also waits for helper branches wake nobody
    (`0`): a helper's own steps do, and the turn in which the last helper ends asks for the rest again.
    """
    tokens: dict[str, str] = {}
    steps: list[Asked[Any]] = []  # Any: steps of all result types
    groups = 0
    for wait in waits:
        if not wait.missing:
            continue
        if wait.helpers:
            token = NO_WAKE
        elif len(wait.missing) == 1:
            token = WAKE
        else:
            token = f"g{groups}"
            groups += 1
        for name, step in wait.missing.items():
            if name in tokens:
                token_of_both = _stronger(tokens[name], token)
            else:
                token_of_both = token
                steps.append(step)
            tokens[name] = token_of_both
    if len(steps) > 1:
        steps.sort(key=_in_program_order)

    suspended = Suspended()
    for step in steps:
        token = tokens[step.id]
        if step.id in pending:
            suspended.again.append((step.id, token))
            continue
        step.request.wait = token
        suspended.asked.append(step.request)
    return suspended


def _stronger(one: str, other: str) -> str:
    """The rule for a step that two branches wait for. Waking early costs a turn; not waking would hang."""
    if one == NO_WAKE:
        return other
    if other == NO_WAKE:
        return one
    return WAKE
