"""The text of an answer on its way to the client, while the model writes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime_core.agents.model_step import ModelCall

BATCH_SECONDS = 0.04
"""How long a piece waits for others."""
BATCH_CHARACTERS = 200


class Pieces:
    """Puts small pieces together, so that a fast model does not cost the broker a write for each word."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._waiting: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        if call.attempt > 1:
            # What an earlier attempt has shown is replaced, even where this one has nothing to say.
            call.stream("")

    def add(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= BATCH_CHARACTERS:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._send)

    def close(self) -> None:
        """Send what is left. What was taken back leaves nothing."""
        self._send()

    async def take_back(self) -> None:
        """Tell the client that what it was shown is no answer."""
        self._waiting.clear()
        if self._shown:
            await self._call.again()
            self._call.stream("")

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        text = "".join(self._waiting)
        self._waiting.clear()
        self._size = 0
        self._shown = True
        self._call.stream(text)
