"""The types that agents see: this package's own, or those of another library with the same concepts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from runtime_core.bus.tasks import TopicSubscription
from runtime_core.integrations.actors.agents import BaseAgent, ClosureAgent
from runtime_core.integrations.actors.errors import (
    CancellationToken,
    CantHandleException,
    MessageDroppedException,
    NotAccessibleError,
    UndeliverableException,
)
from runtime_core.integrations.actors.identity import AgentId, AgentType, TopicId, agent_name
from runtime_core.integrations.actors.message import DropMessage, MessageContext, MessageHandlerContext
from runtime_core.integrations.actors.protocol import (
    AgentInstantiationContext,
    AgentMetadata,
    TypePrefixSubscription,
    TypeSubscription,
)


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


def native() -> Vocabulary:
    """Return this package's own types."""
    return Vocabulary(
        agent_id=AgentId,
        agent_type=AgentType,
        topic_id=TopicId,
        message_context=MessageContext,
        metadata=AgentMetadata,
        cancellation_token=CancellationToken,
        handler_scope=lambda id, message, context: MessageHandlerContext.populate_context(id),
        factory_scope=lambda runtime, id: AgentInstantiationContext.populate_context((runtime, id)),
        keeps_state=_keeps_state,
        topic_of=topic_reader(TypeSubscription, TypePrefixSubscription),
        drop_message=DropMessage,
    )


def _keeps_state(agent: object) -> bool:
    saves = getattr(type(agent), "save_state", None)
    return saves not in (None, BaseAgent.save_state, ClosureAgent.save_state)


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
