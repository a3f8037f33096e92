"""What ends a conversation that would not end by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from runtime_core import codec
from runtime_core.errors import StepError

TOLD_AT = 3
"""So many equal calls in a row, and the model is told."""
ENDED_AT = 6
"""So many, and the conversation ends."""
MAX_HANDED = 10
"""How often one conversation may be handed over."""


class ConversationFailed(StepError):
    """A model's conversation has ended without an answer.

    `type` says why: OutputInvalid, ToolCallsInvalid, RepeatedCall, TurnLimit, HandoffLimit, ContentFiltered.
    """


class Guards:
    """Counts over one run. Its input is what was journaled, so a replay counts the same."""

    def __init__(self, what: str, *, tool_retries: int, output_retries: int) -> None:
        self._what = what
        self._tool_retries = tool_retries
        self._output_retries = output_retries
        self._wrong: Counter[str] = Counter()
        self._wrong_outputs = 0
        self._last: tuple[str, bytes] = ("", b"")
        self._in_a_row = 0

    def called(self, name: str, arguments: Mapping[str, Any]) -> str:  # Any: JSON
        """Note a call that is made; what the model is to be told of it, mostly nothing. Raises ConversationFailed."""
        self._wrong.pop(name, None)
        this = (name, codec.canonical(arguments))
        self._in_a_row = self._in_a_row + 1 if this == self._last else 1
        self._last = this
        if self._in_a_row >= ENDED_AT:
            raise ConversationFailed(
                "RepeatedCall",
                f"{self._what} has called {name} {ENDED_AT} times in a row with the same arguments: say in its "
                "instructions when to stop, or let the tool say why nothing changes",
            )
        if self._in_a_row < TOLD_AT:
            return ""
        return (
            f"You have made this call {self._in_a_row} times in a row with the same arguments. Use the results that "
            f"you have, or try something else: after {ENDED_AT} times the conversation is ended."
        )

    def wrong(self, name: str, why: str) -> None:
        """Note a call that could not be made. Raises ConversationFailed after `tool_retries` more."""
        self._wrong[name] += 1
        if self._wrong[name] > self._tool_retries:
            raise ConversationFailed(
                "ToolCallsInvalid",
                f"{self._what} has called {name} wrongly {self._wrong[name]} times "
                f"(tool_retries={self._tool_retries}), the last time: {why}",
            )

    def wrong_output(self, why: str) -> None:
        """Note an answer that is not what was asked for. Raises ConversationFailed after `output_retries` more."""
        self._wrong_outputs += 1
        if self._wrong_outputs > self._output_retries:
            raise ConversationFailed(
                "OutputInvalid",
                f"the answer of {self._what} is not what was asked for, after {self._wrong_outputs} tries "
                f"(output_retries={self._output_retries}): {why}",
            )
