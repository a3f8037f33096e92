"""Messages and their envelopes, the contexts of handlers and subscriptions, and the token that cancels a request."""

from __future__ import annotations

import base64
import logging
import threading
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, final

import msgspec

from runtime_core.errors import InvalidInput
from runtime_core.integrations.actors.identity import AgentId, AgentType, TopicId
from runtime_core.integrations.actors.serialization import JSON_DATA_CONTENT_TYPE, SerializationRegistry
from runtime_core.wire.codec import MAX_DATA_BYTES

logger = logging.getLogger(__name__)
_handler: ContextVar[AgentId] = ContextVar("weft message handler")
_subscriptions: ContextVar[AgentType] = ContextVar("weft subscriptions")


@dataclass
class MessageContext:
    """What a handler knows about its message besides the content."""

    sender: AgentId | None
    """None: the sender is not an agent."""
    topic_id: TopicId | None
    """None: the message was sent to this agent alone."""
    is_rpc: bool
    """Whether the sender waits for the handler's result."""
    cancellation_token: CancellationToken
    message_id: str


class ContextNamespace:
    """A namespace for values of the current context. It has no instances."""

    def __init__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} has no objects: use its class methods")


class MessageHandlerContext(ContextNamespace):
    """The agent whose handler runs."""

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
        """Raises RuntimeError outside a handler."""
        found = _handler.get(None)
        return outside("a message handler") if found is None else found


class SubscriptionInstantiationContext(ContextNamespace):
    """The type of agents whose subscriptions are being created."""

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
        """Raises RuntimeError if no type is being registered."""
        found = _subscriptions.get(None)
        return outside("a registration; name the agent type") if found is None else found


def outside(of: str) -> NoReturn:
    """Raise the error of a context variable that is read where nothing has set it."""
    raise RuntimeError(f"available only inside {of}")


class DefaultTopicId(TopicId):
    """Topic type `default`; the source is the key of the agent whose handler runs, outside a handler `default`."""

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
    """A message with its type. JSON is embedded as it is, other content as base64."""

    message_type: str
    payload: msgspec.Raw = NO_PAYLOAD
    content_type: str = JSON_DATA_CONTENT_TYPE
    payload_base64: str = ""


class MessageEnvelope(msgspec.Struct, omit_defaults=True):
    """The input of an actor's run. Addresses are text, `type/key` and `type/source`."""

    content: Content | None = None
    sender: str = ""
    topic: str = ""
    message_id: str = ""
    is_rpc: bool = False
    operation: str = ""
    """`save_state`, `load_state` or `metadata` instead of a message; `state` holds what `load_state` loads."""
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
    """Raises InvalidInput over the limit of an event's data."""
    return _bounded(_ENCODER.encode(envelope))


def decode_envelope(data: bytes) -> MessageEnvelope:
    """Raises InvalidInput for an invalid envelope."""
    try:
        return _envelope.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput(
            "input",
            f'is not a message for this agent, {error}; see "On the wire" on the page "Agents as objects: the runtime"',
        ) from error


def encode_response(response: Any, registry: SerializationRegistry) -> bytes:  # Any: the user's message types
    """Return a run's output: null, or a message with its type. Raises SerializationError, and InvalidInput if too
    large.
    """
    return b"null" if response is None else _bounded(_ENCODER.encode(content_of(response, registry)))


def decode_response(data: bytes, registry: SerializationRegistry) -> Any:  # Any: the user's message types
    """Raises SerializationError, InvalidInput."""
    try:
        content = _content.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidInput("output", f"is not an actor's response: {error}") from error
    return None if content is None else message_of(content, registry)


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_DATA_BYTES:
        raise InvalidInput("message", f"is {len(data)} bytes, over the limit of {MAX_DATA_BYTES}; send a reference")
    return data


Handler = TypeVar("Handler")


@final
class DropMessage:
    """An intervention handler returns this class, or an object of it, to drop the message."""


class InterventionHandler(Protocol):
    """Sees every message that this process sends, and every response that it receives. Any: the user's message types.

    Each method returns the message, changed or not, or DropMessage. None changes nothing and logs a warning. The sender
    gets an error that it raises. Several handlers compose: each sees the result of the one before.
    """

    async def on_send(self, message: Any, *, message_context: MessageContext, recipient: AgentId) -> Any: ...

    async def on_publish(self, message: Any, *, message_context: MessageContext) -> Any: ...

    async def on_response(self, message: Any, *, sender: AgentId, recipient: AgentId | None) -> Any: ...


class DefaultInterventionHandler(InterventionHandler):
    """Changes nothing: a base class for handlers that need only some of the methods."""

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
    """Return the message after all handlers; `dropped` if one of them drops it."""
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


class CancellationToken:
    """Cancels the futures that are linked to it, and calls its callbacks, once. Thread-safe.

    Callbacks run in the thread that cancels, outside the lock, so a callback may use the token.
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Cancel. A repeat does nothing."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_cancelled(self) -> bool:
        return self._cancelled

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call the callback at the cancellation; at once if the token is cancelled."""
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Remove a callback, so that a long-lived token does not collect them."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def link_future(self, future: Future[Any]) -> Future[Any]:  # Any: futures of all result types
        """Cancel the future with this token."""

        def cancel() -> None:
            future.cancel()

        self.add_callback(cancel)
        return future
