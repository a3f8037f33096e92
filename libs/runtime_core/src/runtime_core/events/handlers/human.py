"""Asks humans, for as long as it takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput
from runtime_core.events.constants import Constants
from runtime_core.events.handler import Handler
from runtime_core.events.message import Message

_TERMS = ("prompt", "data", "timeout", "default")


class DefaultHumanHandler(Handler):
    """Asks with `ctx.human`, which holds no process while it waits; the answer goes to who asked.

    The payload is the prompt, or `{"prompt", "data", "timeout" (seconds), "default"}`.
    """

    async def handle(self, message: Message) -> AsyncIterator[Message]:
        answer = message.payload if message.category == Constants.HUMAN_RESPONSE else await self.ask(message)
        for following in self.answers(message, answer, sender="human", topic=Constants.HUMAN_RESPONSE):
            yield following

    async def ask(self, message: Message) -> object:
        """The human's answer, or the default. Raises HumanTimeout."""
        terms = question_of(message)
        prompt = terms.pop("prompt")
        answer: object = await self.ctx.human(str(prompt), **terms)
        return answer


def question_of(message: Message) -> dict[str, Any]:  # Any: what ctx.human takes
    """The terms of a question. Raises InvalidInput, field `message.payload`."""
    payload = message.payload
    if isinstance(payload, str):
        return {"prompt": payload}
    if not isinstance(payload, Mapping) or not isinstance(payload.get("prompt"), str):
        raise InvalidInput("message.payload", f"{quoted(payload)} is neither a prompt nor an object with `prompt`")
    unknown = sorted(set(payload) - set(_TERMS))
    if unknown:
        raise InvalidInput(f"message.payload.{unknown[0]}", f"unknown; known are {', '.join(_TERMS)}")
    return dict(payload)
