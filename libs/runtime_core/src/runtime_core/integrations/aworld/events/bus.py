"""The event bus for programs: publish messages, handle them by topic, or consume them one by one.

It is a Runtime of agents whose only agents are receivers of topics, so messages have the promises of any other agent's:
durable when `publish` returns, redelivered when a process dies, kept as dead letters when their handler fails for good.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence
from itertools import chain
from types import TracebackType
from typing import Any, Self

from runtime_core.declare.declaration import RetryPolicy
from runtime_core.errors import InvalidInput, Retry, WeftError
from runtime_core.integrations.actors.agents import BaseAgent
from runtime_core.integrations.actors.identity import TopicId
from runtime_core.integrations.actors.message import MessageContext
from runtime_core.integrations.actors.protocol import TypePrefixSubscription, TypeSubscription
from runtime_core.integrations.actors.runtime import Runtime
from runtime_core.integrations.aworld.events.handlers import Subscriber
from runtime_core.integrations.aworld.events.manager import messages_from
from runtime_core.integrations.aworld.events.message import Message
from runtime_core.wire.codec import quoted
from runtime_core.wire.ids import fingerprint

_PART = re.compile(r"[\w\-.]+")
_TRIES = RetryPolicy(attempts=5)
"""How often a message is handled before it becomes a dead letter."""
_GIVEN_BACK = RetryPolicy(attempts=1_000_000)
"""A consumed message cannot fail: each process that stops may give it back."""


class EventBus:
    """Messages between programs: `async with EventBus("redis://…") as bus: await bus.publish(message)`.

    `url` and `namespace` are those of Runtime; without a broker the bus ends with this process. Each `group` gets every
    message, and its processes share them. A subscription begins with the first `subscribe` or `consume` of a group and
    lasts until `unsubscribe`, even while no process of the group runs. Before there is any, messages are kept for up to
    an hour. `services=False`: no services run on that broker, so this process does their work.

    Messages with one `session_id` are handled one at a time, in the order in which they were published; different
    sessions concurrently.
    """

    def __init__(
        self, url: str | None = None, namespace: str | None = None, *, group: str = "default", services: bool = True
    ) -> None:
        self._group = _part("group", group)
        self._runtime = Runtime(url, namespace, services=services)
        self._receivers: dict[str, _Receiver] = {}
        self._registering = asyncio.Lock()
        self._taken: dict[str, list[_Taken]] = {}
        """Messages that `consume` has returned and `done` has not ended, by id.

        There are several of one id if a message was consumed by its topic and by its category.
        """

    async def __aenter__(self) -> Self:
        self._runtime.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop. Consumed messages without `done` are delivered again, to any process of the group."""
        for receiver in self._receivers.values():
            receiver.closed = True
        queued = (one for each in self._receivers.values() for one in each.queued())
        for taken in (*chain.from_iterable(self._taken.values()), *queued):
            taken.give_back()
        await self._runtime.close()

    # ---- publish ---------------------------------------------------------------------------------------------

    async def publish(self, messages: Message | Sequence[Message]) -> Message | list[Message]:
        """Publish one message or several, in order. Return them with their ids when the broker has them.

        A message without an id gets one; a repeat with the same id reaches nobody twice. Topic and category consist of
        letters, digits and `_-.`; a message without a topic is published to its receiver. Raises InvalidInput.
        """
        if isinstance(messages, Message):
            return await self._publish(messages)
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise InvalidInput("messages", f"{quoted(messages)} is neither a Message nor a list of them")
        return [await self._publish(message) for message in messages]

    async def _publish(self, message: object) -> Message:
        if not isinstance(message, Message):
            raise InvalidInput("messages", f"{quoted(message)} is not a Message")
        # As `Message.from_dict` reads it, so that a wrong field is refused here and not by the receiver.
        message = Message.from_dict(message.to_dict())
        message = message if message.id else message.replace(id=secrets.token_hex(16))
        topic = f"{_address(message.category)}{_part('message.topic', message.topic or message.receiver)}"
        await self._runtime.publish_message(
            message.to_dict(), TopicId(topic, message.session_id or "default"), message_id=message.id
        )
        return message

    # ---- handlers ----------------------------------------------------------------------------------------------

    async def subscribe(
        self, event_type: str, topic: str, handler: Subscriber, *, order: int = 0, retry: RetryPolicy = _TRIES
    ) -> None:
        """Call `handler(message)` for the messages of a category and a topic; an empty topic: of the category.

        It may be sync or async. The messages that it returns are published in the same step that ends the delivery.
        Handlers of one topic run one after the other, lower `order` first. If one raises, all run again, as `retry`
        says, and at last the message is a dead letter. `retry` is that of the first handler of the topic.
        """
        if not callable(handler):
            raise InvalidInput("handler", f"{handler!r} is not callable: pass a function that takes a message")
        await self._receiver("handle", event_type, topic, retry, (order, handler))

    async def unsubscribe(self, event_type: str, topic: str, handler: Subscriber | None = None) -> None:
        """Remove a handler; without one, end the subscription that `consume` began.

        Without a handler left, the group gets no more messages of the topic. Raises InvalidInput for a handler that is
        not subscribed here, and for a topic that was not consumed here.
        """
        use = "consume" if handler is None else "handle"
        async with self._registering:
            receiver = self._receivers.get(self._name(use, event_type, topic))
            kept = [] if receiver is None else [each for each in receiver.handlers if each[1] != handler]
            if receiver is None or not receiver.subscribed or (handler and len(kept) == len(receiver.handlers)):
                what = "consume" if handler is None else repr(handler)
                raise InvalidInput("handler", f"{what} is not subscribed to {event_type!r}, topic {topic!r}")
            receiver.handlers[:] = kept
            if not kept:
                await self._runtime.remove_subscription(receiver.subscription.id)
                receiver.subscribed = False

    # ---- consume -----------------------------------------------------------------------------------------------

    async def consume(
        self,
        message: Message | None = None,
        *,
        event_type: str = "",
        topic: str = "",
        timeout: float | None = None,
    ) -> Message:
        """Return the next message of a category and a topic, given by name or as those of `message`.

        Call `done` with it when it is handled: until then, its session's next message waits, and if this process dies,
        another process of the group gets it. Raises TimeoutError after `timeout` seconds.
        """
        if message is not None:
            if not isinstance(message, Message):
                raise InvalidInput("message", f"{quoted(message)} is not a Message")
            event_type, topic = message.category, message.topic or message.receiver
        receiver = await self._receiver("consume", event_type, topic, _GIVEN_BACK)
        taken = await asyncio.wait_for(receiver.queue.get(), timeout)
        self._taken.setdefault(taken.message.id, []).append(taken)
        return taken.message

    async def done(self, message: Message | str) -> None:
        """End the delivery of a consumed message, given itself or its id. Raises InvalidInput if it is not open."""
        id = message.id if isinstance(message, Message) else message
        open_here = self._taken.get(id) if isinstance(id, str) else None
        if not open_here:
            raise InvalidInput("message", f"{quoted(id)} is not an open message that was consumed here")
        open_here[0].end()
        self.forget(open_here[0])

    def forget(self, taken: _Taken) -> None:
        """Forget a consumed message whose delivery has ended."""
        open_here = self._taken.get(taken.message.id, [])
        if taken in open_here:
            open_here.remove(taken)
        if not open_here:
            self._taken.pop(taken.message.id, None)

    # ---- receivers ---------------------------------------------------------------------------------------------

    def _name(self, use: str, event_type: object, topic: object) -> str:
        _address(event_type)
        if topic != "":
            _part("topic", topic)
        return f"bus-{use}-{fingerprint(self._group, str(event_type), str(topic))}"

    async def _receiver(
        self,
        use: str,
        event_type: str,
        topic: str,
        retry: RetryPolicy,
        handler: tuple[int, Subscriber] | None = None,
    ) -> _Receiver:
        name = self._name(use, event_type, topic)
        async with self._registering:
            known = self._receivers.get(name)
            receiver = known or _Receiver(self, name, f"{_address(event_type)}{topic}", exact=bool(topic))
            if handler is not None:  # before the registration: messages may wait for it
                receiver.handlers.append(handler)
                receiver.handlers.sort(key=lambda each: each[0])
            receiver.consumed = handler is None
            if known is None:
                await self._runtime.register_factory(name, lambda: _ReceivingAgent(receiver), retry=retry)
                self._receivers[name] = receiver
            if not receiver.subscribed:
                await self._runtime.add_subscription(receiver.subscription)
                receiver.subscribed = True
        return receiver


class _Taken:
    """A message in the hands of this process, until `end` or `give_back`."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(True)

    def give_back(self) -> None:
        if not self.ended.done():
            self.ended.set_result(False)


class _Receiver:
    """What this process does with the messages of one topic."""

    def __init__(self, bus: EventBus, agent: str, topic: str, *, exact: bool) -> None:
        self.bus = bus
        self.subscription = (TypeSubscription if exact else TypePrefixSubscription)(topic, agent)
        self.subscribed = False
        self.handlers: list[tuple[int, Subscriber]] = []
        self.consumed = False
        self.queue: asyncio.Queue[_Taken] = asyncio.Queue()
        self.closed = False

    def queued(self) -> list[_Taken]:
        """Remove and return the messages that wait for `consume`."""
        return [self.queue.get_nowait() for _ in range(self.queue.qsize())]

    async def receive(self, message: Message) -> None:
        if self.consumed:
            taken = _Taken(message)
            self.queue.put_nowait(taken)
            if self.closed:
                taken.give_back()
            try:
                ended = await taken.ended
            finally:
                self.bus.forget(taken)
            if not ended:
                raise Retry(0.0)
            return
        if not self.handlers:
            raise WeftError(f"no handler is subscribed to topic {message.topic!r} in this process any more")
        for _, handler in list(self.handlers):
            async for following in messages_from(handler(message)):
                await self.bus.publish(following)


class _ReceivingAgent(BaseAgent):
    """The agent of a receiver for one session."""

    def __init__(self, receiver: _Receiver) -> None:
        super().__init__("receives messages of an event bus")
        self._receiver = receiver

    async def on_message_impl(self, message: Any, ctx: MessageContext) -> None:  # Any: a message as JSON
        await self._receiver.receive(Message.from_dict(message))


def _address(category: object) -> str:
    return f"bus:{_part('event_type', category)}:"


def _part(field: str, value: object) -> str:
    if not isinstance(value, str) or not _PART.fullmatch(value):
        raise InvalidInput(field, f"{quoted(value)} does not consist of letters, digits and _-.")
    return value
