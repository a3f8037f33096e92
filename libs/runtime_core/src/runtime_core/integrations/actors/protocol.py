"""Protocols of agents, runtimes and programs, and subscriptions.

Also the context of factories, a proxy for a remote agent, and the types that agents see.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

from runtime_core.bus.topics import TopicSubscription
from runtime_core.integrations.actors.errors import (
    CantHandleException,
    MessageDroppedException,
    NotAccessibleError,
    UndeliverableException,
)
from runtime_core.integrations.actors.identity import AgentId, AgentType, TopicId, agent_name
from runtime_core.integrations.actors.message import (
    CancellationToken,
    ContextNamespace,
    MessageContext,
    SubscriptionInstantiationContext,
    outside,
)
from runtime_core.integrations.actors.serialization import MessageSerializer
from runtime_core.wire.ids import fingerprint

UnboundSubscription = Callable[[], "list[Subscription] | Awaitable[list[Subscription]]"]
"""Creates subscriptions for the type that is being registered."""

Class = TypeVar("Class", bound=type)


class Subscription(Protocol):
    """A rule from a topic to an agent.

    The broker stores the two kinds below. They apply to every process of the namespace, even while the process that
    added them is down. Any other object with these members works in the process that publishes.
    """

    @property
    def id(self) -> str: ...

    def is_match(self, topic_id: TopicId) -> bool: ...

    def map_to_agent(self, topic_id: TopicId) -> AgentId:
        """Return the receiving agent. Raises CantHandleException for a topic that does not match."""
        ...


class _ByType:
    """A topic type, exact or as a prefix, and the receiving type of agents. The topic's source is the agent's key."""

    kind = ""

    def __init__(self, topic_type: str, agent_type: str | AgentType, id: str | None) -> None:
        self._topic_type = topic_type
        self._agent_type = agent_type.type if isinstance(agent_type, AgentType) else agent_type
        # Derived from its content: a process that starts again adds the same subscription, not another one.
        self._id = id or fingerprint(self.kind, topic_type, self._agent_type)

    @property
    def id(self) -> str:
        return self._id

    @property
    def agent_type(self) -> str:
        return self._agent_type

    def is_match(self, topic_id: TopicId) -> bool:
        raise NotImplementedError

    def map_to_agent(self, topic_id: TopicId) -> AgentId:
        if not self.is_match(topic_id):
            raise CantHandleException(f"{self!r} does not match the topic {topic_id}")
        return AgentId(self._agent_type, topic_id.source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ByType):
            return NotImplemented
        return self.id == other.id or (
            self.kind == other.kind and self._topic_type == other._topic_type and self._agent_type == other._agent_type
        )

    __hash__ = None  # type: ignore[assignment]  # equal subscriptions may differ in their ids

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._topic_type!r}, {self._agent_type!r})"


class TypeSubscription(_ByType):
    """Topics of exactly this type reach the agent of `agent_type` with the topic's source as its key."""

    kind = "type"

    def __init__(self, topic_type: str, agent_type: str | AgentType, id: str | None = None) -> None:
        super().__init__(topic_type, agent_type, id)

    @property
    def topic_type(self) -> str:
        return self._topic_type

    def is_match(self, topic_id: TopicId) -> bool:
        return topic_id.type == self._topic_type


class TypePrefixSubscription(_ByType):
    """As TypeSubscription, for all topic types with the prefix."""

    kind = "prefix"

    def __init__(self, topic_type_prefix: str, agent_type: str | AgentType, id: str | None = None) -> None:
        super().__init__(topic_type_prefix, agent_type, id)

    @property
    def topic_type_prefix(self) -> str:
        return self._topic_type

    def is_match(self, topic_id: TopicId) -> bool:
        return topic_id.type.startswith(self._topic_type)


class DefaultSubscription(TypeSubscription):
    """The topic type `default`, or another one, for the agent type that is being registered."""

    def __init__(self, topic_type: str = "default", agent_type: str | AgentType | None = None) -> None:
        if agent_type is None:
            try:
                agent_type = SubscriptionInstantiationContext.agent_type()
            except RuntimeError:
                raise CantHandleException(
                    "DefaultSubscription needs agent_type=… if no agent type is being registered"
                ) from None
        super().__init__(topic_type, agent_type)


def subscription_factory(subscription: UnboundSubscription) -> Callable[[Class], Class]:
    """A class decorator: each registered type of this class gets these subscriptions."""

    def decorate(cls: Class) -> Class:
        # A subclass of BaseAgent has its own list.
        cls.unbound_subscriptions.append(subscription)  # type: ignore[attr-defined]
        return cls

    return decorate


@overload
def default_subscription() -> Callable[[Class], Class]: ...


@overload
def default_subscription(cls: Class) -> Class: ...


def default_subscription(cls: Class | None = None) -> Callable[[Class], Class] | Class:
    """A class decorator: agents of this class get the topic type `default`."""
    decorate: Callable[[Class], Class] = subscription_factory(lambda: [DefaultSubscription()])
    return decorate if cls is None else decorate(cls)


def type_subscription(topic_type: str) -> Callable[[Class], Class]:
    """A class decorator: agents of this class get this topic type."""
    return subscription_factory(lambda: [DefaultSubscription(topic_type)])


AgentT = TypeVar("AgentT")


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    type: str
    key: str
    description: str


@runtime_checkable
class Agent(Protocol):
    """An agent that a runtime can run. Its state is a JSON object."""

    @property
    def metadata(self) -> AgentMetadata: ...

    @property
    def id(self) -> AgentId: ...

    async def bind_id_and_runtime(self, id: AgentId, runtime: AgentRuntime) -> None:
        """Bind the agent, once, before its first message. Raises RuntimeError if it is bound elsewhere."""
        ...

    async def on_message(self, message: Any, ctx: MessageContext) -> Any:  # Any: the user's message types
        """Handle one message. The result is the answer to a request."""
        ...

    async def save_state(self) -> Mapping[str, Any]: ...  # Any: the user's JSON

    async def load_state(self, state: Mapping[str, Any]) -> None: ...  # Any: as above

    async def close(self) -> None:
        """Called when the object is dropped. Its state may live on."""
        ...


class AgentRuntime(Protocol):
    """The methods of a runtime. Any: the user's message types, and JSON states."""

    async def send_message(
        self,
        message: Any,
        recipient: AgentId,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any: ...

    async def publish_message(
        self,
        message: Any,
        topic_id: TopicId,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> None: ...

    async def register_factory(
        self,
        type: str | AgentType,
        agent_factory: Callable[[], AgentT | Awaitable[AgentT]],
        *,
        expected_class: type[AgentT] | None = None,
    ) -> AgentType: ...

    async def register_agent_instance(self, agent_instance: Agent, agent_id: AgentId) -> AgentId: ...

    async def try_get_underlying_agent_instance(self, id: AgentId, type: type[AgentT] = ...) -> AgentT: ...

    async def get(self, id_or_type: AgentId | AgentType | str, /, key: str = ..., *, lazy: bool = ...) -> AgentId: ...

    async def save_state(self) -> Mapping[str, Any]: ...

    async def load_state(self, state: Mapping[str, Any]) -> None: ...

    async def agent_metadata(self, agent: AgentId) -> AgentMetadata: ...

    async def agent_save_state(self, agent: AgentId) -> Mapping[str, Any]: ...

    async def agent_load_state(self, agent: AgentId, state: Mapping[str, Any]) -> None: ...

    async def add_subscription(self, subscription: Subscription) -> None: ...

    async def remove_subscription(self, id: str) -> None: ...

    def add_message_serializer(self, serializer: MessageSerializer[Any] | Sequence[MessageSerializer[Any]]) -> None: ...


class AgentProxy:
    """Represents one agent through its runtime. Any: the user's message types, and JSON states."""

    def __init__(self, agent: AgentId, runtime: AgentRuntime) -> None:
        self._agent = agent
        self._runtime = runtime

    @property
    def id(self) -> AgentId:
        return self._agent

    @property
    def metadata(self) -> Awaitable[AgentMetadata]:
        return self._runtime.agent_metadata(self._agent)

    async def send_message(
        self,
        message: Any,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any:
        return await self._runtime.send_message(
            message, self._agent, sender=sender, cancellation_token=cancellation_token, message_id=message_id
        )

    async def save_state(self) -> Mapping[str, Any]:
        return await self._runtime.agent_save_state(self._agent)

    async def load_state(self, state: Mapping[str, Any]) -> None:
        await self._runtime.agent_load_state(self._agent, state)


_factory: ContextVar[tuple[AgentRuntime, AgentId]] = ContextVar("weft agent factory")


class AgentInstantiationContext(ContextNamespace):
    """The runtime and the agent for which a factory, or the constructor that it calls, runs."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: tuple[AgentRuntime, AgentId]) -> Iterator[None]:
        """Set the current runtime and agent; also for tests of a constructor."""
        token = _factory.set(ctx)
        try:
            yield
        finally:
            _factory.reset(token)

    @classmethod
    def current_runtime(cls) -> AgentRuntime:
        """Raises RuntimeError outside a factory."""
        found = _factory.get(None)
        return outside("a factory; let the runtime make the agent") if found is None else found[0]

    @classmethod
    def current_agent_id(cls) -> AgentId:
        """Raises RuntimeError outside a factory."""
        found = _factory.get(None)
        return outside("a factory; let the runtime make the agent") if found is None else found[1]

    @classmethod
    def is_in_factory_call(cls) -> bool:
        return _factory.get(None) is not None


@dataclass(frozen=True)
class Vocabulary:
    """Creates the values that agents see. Any: classes of a library that the runtime does not know."""

    agent_id: Callable[[str, str], Any]
    """From type and key."""
    agent_type: Callable[[str], Any]
    topic_id: Callable[[str, str], Any]
    """From type and source."""
    message_context: Callable[..., Any]
    """Takes sender, topic_id, is_rpc, cancellation_token and message_id by name."""
    metadata: Callable[[str, str, str], Any]
    """From type, key and description."""
    cancellation_token: Callable[[], Any]
    handler_scope: Callable[[Any, Any, Any], AbstractContextManager[None]]
    """Around a handler, with the agent's id, the message and its context."""
    factory_scope: Callable[[Any, Any], AbstractContextManager[None]]
    """Around a factory, with the runtime and the agent's id."""
    keeps_state: Callable[[Any], bool]
    """Whether an agent object has state to store."""
    topic_of: Callable[[Any], TopicSubscription | None]
    """Returns a subscription as the broker stores it; None if only this process can evaluate it."""
    drop_message: type
    undeliverable: type[Exception] = UndeliverableException
    cant_handle: type[Exception] = CantHandleException
    dropped: type[Exception] = MessageDroppedException
    not_accessible: type[Exception] = NotAccessibleError
    cancelled_is_handled: bool = False
    """Whether a request whose caller's token was cancelled is still handled: its handler sees the cancellation and
    decides. False: the request ends, and later actions of its handler do not count.
    """


def topic_reader(by_type: Any, by_prefix: Any) -> Callable[[Any], TopicSubscription | None]:
    """Return a reader of subscriptions of these two classes, for `Vocabulary.topic_of`. Any: classes of any library."""

    def topic_of(subscription: Any) -> TopicSubscription | None:
        # A subclass may match differently from its base, so only the subclass itself can tell.
        match = getattr(type(subscription), "is_match", None)
        if isinstance(subscription, by_type) and match is by_type.is_match:
            return TopicSubscription(subscription.topic_type, agent_name(subscription.agent_type))
        if isinstance(subscription, by_prefix) and match is by_prefix.is_match:
            return TopicSubscription(subscription.topic_type_prefix, agent_name(subscription.agent_type), prefix=True)
        return None

    return topic_of
