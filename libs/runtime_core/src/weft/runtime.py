"""Agents as objects, with AutoGen's names but without AutoGen: requests, topics, subscriptions, state."""

from __future__ import annotations

from runtime_core.integrations.actors.agents import (
    BaseAgent,
    ClosureAgent,
    ClosureContext,
    RoutedAgent,
    event,
    message_handler,
    rpc,
)
from runtime_core.integrations.actors.errors import (
    CantHandleException,
    MessageDroppedException,
    NotAccessibleError,
    RemoteError,
    RuntimeStopped,
    SerializationError,
    UndeliverableException,
)
from runtime_core.integrations.actors.identity import AgentId, AgentType, TopicId
from runtime_core.integrations.actors.message import (
    CancellationToken,
    DefaultInterventionHandler,
    DefaultTopicId,
    DropMessage,
    InterventionHandler,
    MessageContext,
)
from runtime_core.integrations.actors.protocol import (
    AgentInstantiationContext,
    AgentProxy,
    DefaultSubscription,
    Subscription,
    TypePrefixSubscription,
    TypeSubscription,
    default_subscription,
    type_subscription,
)
from runtime_core.integrations.actors.runtime import Runtime
from runtime_core.integrations.actors.serialization import MessageSerializer, UnknownPayload

__all__ = [
    "AgentId",
    "AgentInstantiationContext",
    "AgentProxy",
    "AgentType",
    "BaseAgent",
    "CancellationToken",
    "CantHandleException",
    "ClosureAgent",
    "ClosureContext",
    "DefaultInterventionHandler",
    "DefaultSubscription",
    "DefaultTopicId",
    "DropMessage",
    "InterventionHandler",
    "MessageContext",
    "MessageDroppedException",
    "MessageSerializer",
    "NotAccessibleError",
    "RemoteError",
    "RoutedAgent",
    "Runtime",
    "RuntimeStopped",
    "SerializationError",
    "Subscription",
    "TopicId",
    "TypePrefixSubscription",
    "TypeSubscription",
    "UndeliverableException",
    "UnknownPayload",
    "default_subscription",
    "event",
    "message_handler",
    "rpc",
    "type_subscription",
]
