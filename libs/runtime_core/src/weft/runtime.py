"""Agents as objects, with AutoGen's names but without AutoGen: requests, topics, subscriptions, state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
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

_PLACES = {
    "AgentId": "runtime_core.integrations.actors.identity",
    "AgentInstantiationContext": "runtime_core.integrations.actors.protocol",
    "AgentProxy": "runtime_core.integrations.actors.protocol",
    "AgentType": "runtime_core.integrations.actors.identity",
    "BaseAgent": "runtime_core.integrations.actors.agents",
    "CancellationToken": "runtime_core.integrations.actors.message",
    "CantHandleException": "runtime_core.integrations.actors.errors",
    "ClosureAgent": "runtime_core.integrations.actors.agents",
    "ClosureContext": "runtime_core.integrations.actors.agents",
    "DefaultInterventionHandler": "runtime_core.integrations.actors.message",
    "DefaultSubscription": "runtime_core.integrations.actors.protocol",
    "DefaultTopicId": "runtime_core.integrations.actors.message",
    "DropMessage": "runtime_core.integrations.actors.message",
    "InterventionHandler": "runtime_core.integrations.actors.message",
    "MessageContext": "runtime_core.integrations.actors.message",
    "MessageDroppedException": "runtime_core.integrations.actors.errors",
    "MessageSerializer": "runtime_core.integrations.actors.serialization",
    "NotAccessibleError": "runtime_core.integrations.actors.errors",
    "RemoteError": "runtime_core.integrations.actors.errors",
    "RoutedAgent": "runtime_core.integrations.actors.agents",
    "Runtime": "runtime_core.integrations.actors.runtime",
    "RuntimeStopped": "runtime_core.integrations.actors.errors",
    "SerializationError": "runtime_core.integrations.actors.errors",
    "Subscription": "runtime_core.integrations.actors.protocol",
    "TopicId": "runtime_core.integrations.actors.identity",
    "TypePrefixSubscription": "runtime_core.integrations.actors.protocol",
    "TypeSubscription": "runtime_core.integrations.actors.protocol",
    "UndeliverableException": "runtime_core.integrations.actors.errors",
    "UnknownPayload": "runtime_core.integrations.actors.serialization",
    "default_subscription": "runtime_core.integrations.actors.protocol",
    "event": "runtime_core.integrations.actors.agents",
    "message_handler": "runtime_core.integrations.actors.agents",
    "rpc": "runtime_core.integrations.actors.agents",
    "type_subscription": "runtime_core.integrations.actors.protocol",
}

__getattr__ = loader(__name__, _PLACES)
