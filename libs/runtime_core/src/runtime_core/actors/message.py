"""A message on its way to a handler, and what a handler, a factory and a list of subscriptions can ask about it."""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, final

import msgspec

from runtime_core.actors.errors import CancellationToken
from runtime_core.actors.identity import AgentId, AgentType, TopicId
from runtime_core.actors.serialization import JSON_DATA_CONTENT_TYPE, SerializationRegistry
from runtime_core.codec import MAX_DATA_BYTES
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from runtime_core.actors.protocol import AgentRuntime


@dataclass
class MessageContext:
    """What a handler knows of the message besides its content."""

    sender: AgentId | None
    """None: it was sent from outside of any agent."""
    topic_id: TopicId | None
    """None: it was sent to this agent alone."""
    is_rpc: bool
    """Whether the sender waits for what the handler returns."""
    cancellation_token: CancellationToken
    message_id: str


class _Static:
    """A name for values of the current context; there are no objects of it."""

    def __init__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} has no objects: use its class methods")


_factory: ContextVar[tuple[AgentRuntime, AgentId]] = ContextVar("weft agent factory")
_handler: ContextVar[AgentId] = ContextVar("weft message handler")
_subscriptions: ContextVar[AgentType] = ContextVar("weft subscriptions")


class AgentInstantiationContext(_Static):
    """For which runtime and agent a factory, or the constructor that it calls, runs."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: tuple[AgentRuntime, AgentId]) -> Iterator[None]:
        """Make this runtime and agent the current ones; tests of a constructor use it too."""
        token = _factory.set(ctx)
        try:
            yield
        finally:
            _factory.reset(token)

    @classmethod
    def current_runtime(cls) -> AgentRuntime:
        """Raises RuntimeError outside of a factory."""
        found = _factory.get(None)
        return _outside("a factory; let the runtime make the agent") if found is None else found[0]

    @classmethod
    def current_agent_id(cls) -> AgentId:
        """Raises RuntimeError outside of a factory."""
        found = _factory.get(None)
        return _outside("a factory; let the runtime make the agent") if found is None else found[1]

    @classmethod
    def is_in_factory_call(cls) -> bool:
        return _factory.get(None) is not None


class MessageHandlerContext(_Static):
    """Whose handler runs."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: AgentId) -> Iterator[None]:
        token = _handler.set(ctx)
        try:
            yield
        finally:
            _handler.reset(token)

    @classmethod
    def agent_id(cls) -> AgentId:
        """Raises RuntimeError outside of a handler."""
        found = _handler.get(None)
        return _outside("a message handler") if found is None else found


class SubscriptionInstantiationContext(_Static):
    """For which type of agents subscriptions are made."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: AgentType) -> Iterator[None]:
        token = _subscriptions.set(ctx)
        try:
            yield
        finally:
            _subscriptions.reset(token)

    @classmethod
    def agent_type(cls) -> AgentType:
        """Raises RuntimeError where no type is being registered."""
        found = _subscriptions.get(None)
        return _outside("a registration; name the agent type") if found is None else found


def _outside(of: str) -> NoReturn:
    raise RuntimeError(f"this may be asked only inside of {of}")


class DefaultTopicId(TopicId):
    """Topic type `default`, with the key of the agent whose handler runs as its source (outside: `default`)."""

    __slots__ = ()

    def __init__(self, type: str = "default", source: str | None = None) -> None:
        if source is None:
            try:
                source = MessageHandlerContext.agent_id().key
            except RuntimeError:
                source = "default"
        super().__init__(type, source)


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
