"""Scores of trajectory items, by a function of the user."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from runtime_core.errors import InvalidInput
from runtime_core.trajectory.items import TrajectoryItem
from runtime_core.trajectory.steps import TaskEnd

Score: TypeAlias = float | Mapping[str, Any] | None  # Any: the user's own JSON
RewardFunction: TypeAlias = Callable[[TrajectoryItem, TaskEnd | None], Score | Awaitable[Score]]
"""Gets an item and how its task ended (None: it has not); returns a number, or an object with `score` and whatever else
is to be kept in `details`, or None for no score. May be async."""


async def score(item: TrajectoryItem, end: TaskEnd | None, reward: RewardFunction) -> None:
    """Fill in the item's reward. InvalidInput, which names the item, where that fails."""
    try:
        given = reward(item, end)
        if inspect.isawaitable(given):
            given = await given
    except Exception as error:
        raise InvalidInput("reward", f"of item {item.id}: {type(error).__name__}: {error}") from error
    if isinstance(given, Mapping):
        details = dict(given)
        given = details.pop("score", None)
        item.reward.details = details
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise InvalidInput(
            "reward", f"of item {item.id} is {given!r}: return a finite number, an object with `score`, or None"
        )
    item.reward.score = float(given)
