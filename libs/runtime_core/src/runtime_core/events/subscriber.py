"""A function that an app has declared for messages of all its event-driven runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime_core.codec import quoted
from runtime_core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DeclaredSubscriber:
    """As `EventManager.register` takes it. Raises ConfigurationError for what can take no message."""

    category: str
    topic: str
    function: Callable[..., Any]  # Any: the user's own function of a message
    transformer: bool = False
    order: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.category, str) or not self.category:
            raise ConfigurationError(
                f"subscribe({quoted(self.category)}): give the category of messages, as in "
                'app.subscribe("agent", "collector")'
            )
        if not isinstance(self.topic, str):
            raise ConfigurationError(f"subscribe: topic {quoted(self.topic)} is not text")
        if isinstance(self.order, bool) or not isinstance(self.order, int):
            raise ConfigurationError(f"subscribe: order {quoted(self.order)} is not a whole number")
        if not callable(self.function):
            raise ConfigurationError(f"subscribe: {self.function!r} cannot be called; give a function of a message")
