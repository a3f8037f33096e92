"""Subscriptions: which topics reach which agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, overload

from runtime_core.actors.errors import CantHandleException
from runtime_core.actors.identity import AgentId, AgentType, TopicId
from runtime_core.actors.message import SubscriptionInstantiationContext
from runtime_core.ids import fingerprint

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
