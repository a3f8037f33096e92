"""The envelope of a message on its way, and how a program looks at messages before they are handled."""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, final

import msgspec

from runtime_core.actors.context import MessageContext
from runtime_core.actors.identity import AgentId
from runtime_core.actors.serialization import JSON_DATA_CONTENT_TYPE, SerializationRegistry
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.errors import InvalidInput

NO_PAYLOAD = msgspec.Raw(b"")


class Content(msgspec.Struct, omit_defaults=True):
    """A message by its type. JSON is inside as it is, anything else in base64."""

    message_type: str
    payload: msgspec.Raw = NO_PAYLOAD
    content_type: str = JSON_DATA_CONTENT_TYPE
    payload_base64: str = ""


class MessageEnvelope(msgspec.Struct, omit_defaults=True):
    """The input of an actor's run. Addresses are texts, `type/key` and `type/source`."""

    content: Content | None = None
    sender: str = ""
    topic: str = ""
    message_id: str = ""
    is_rpc: bool = False
    operation: str = ""
    """`save_state`, `load_state` or `metadata` instead of a message; what `load_state` loads is in `state`."""
    state: msgspec.Raw = NO_PAYLOAD


_ENCODER = msgspec.json.Encoder()
_envelope = msgspec.json.Decoder(MessageEnvelope)
_content = msgspec.json.Decoder(Content | None)


def content_of(message: Any, registry: SerializationRegistry) -> Content:  # Any: the user's message types
    """Raises SerializationError."""
    name, content_type, data = registry.write(message)
    if content_type == JSON_DATA_CONTENT_TYPE:
        return Content(name, msgspec.Raw(data))
    return Content(name, content_type=content_type, payload_base64=base64.b64encode(data).decode())


def message_of(content: Content, registry: SerializationRegistry) -> Any:  # Any: the user's message types
    """The message, or UnknownPayload. Raises SerializationError."""
    json = content.content_type == JSON_DATA_CONTENT_TYPE
    data = bytes(content.payload) if json else base64.b64decode(content.payload_base64)
    return registry.deserialize(data, type_name=content.message_type, data_content_type=content.content_type)


def encode_envelope(envelope: MessageEnvelope) -> bytes:
    """Raises InvalidInput for one over the limit of an event's data."""
    return _bounded(_ENCODER.encode(envelope))


def decode_envelope(data: bytes) -> MessageEnvelope:
    """Raises InvalidInput for an input that is no envelope."""
    try:
        return _envelope.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            "input", f'is no message for this agent, {error}; see docs/runtime.md, "On the wire"'
        ) from error


def encode_response(response: Any, registry: SerializationRegistry) -> bytes:  # Any: the user's message types
    """A run's output: null, or a message by its type. Raises SerializationError, and InvalidInput over the limit."""
    return b"null" if response is None else _bounded(_ENCODER.encode(content_of(response, registry)))


def decode_response(data: bytes, registry: SerializationRegistry) -> Any:  # Any: the user's message types
    """Raises SerializationError, InvalidInput."""
    try:
        content = _content.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput("output", f"is no response of an actor: {error}") from error
    return None if content is None else message_of(content, registry)


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_DATA_BYTES:
        raise InvalidInput("message", f"is {len(data)} bytes, over the limit of {MAX_DATA_BYTES}; send a reference")
    return data


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
