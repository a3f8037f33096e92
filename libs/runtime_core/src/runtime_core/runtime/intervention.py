"""Looking at, changing and dropping messages on their way."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, final

from runtime_core.runtime.context import MessageContext
from runtime_core.runtime.identity import AgentId

logger = logging.getLogger(__name__)

Handler = TypeVar("Handler")


@final
class DropMessage:
    """Returned (the class, or an object of it) by an intervention handler to drop the message."""


class InterventionHandler(Protocol):
    """Sees every message where it is sent, and every response where it arrives. Any: the user's message types.

    Each method returns the message, changed or not, or DropMessage. Returning None changes nothing, with a warning.
    An error that it raises reaches who sent. Several handlers compose: each sees what the one before returned.
    """

    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any: ...

    async def on_publish(self, message: Any, *, message_context: MessageContext) -> Any: ...

    async def on_response(self, message: Any, *, sender: AgentId, recipient: AgentId | None) -> Any: ...


class DefaultInterventionHandler(InterventionHandler):
    """Changes nothing: a base for handlers that look at some messages only."""

    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any:
        return message

    async def on_publish(self, message: Any, *, message_context: MessageContext) -> Any:
        return message

    async def on_response(self, message: Any, *, sender: AgentId, recipient: AgentId | None) -> Any:
        return message


async def intervene(
    handlers: Sequence[Handler],
    message: Any,  # Any: the user's message types
    ask: Callable[[Handler, Any], Awaitable[Any]],
    dropped: type,
) -> Any:
    """What is left of a message after all handlers; `dropped` itself where one of them drops it."""
    for handler in handlers:
        result = await ask(handler, message)
        if result is dropped or isinstance(result, dropped):
            return dropped
        if result is None:
            if message is not None:
                logger.warning(
                    "%s returned None for a message of type %s, which changes nothing; return DropMessage to drop it",
                    type(handler).__name__,
                    type(message).__name__,
                )
            continue
        message = result
    return message
