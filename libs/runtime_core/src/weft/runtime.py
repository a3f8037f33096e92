"""Agents as objects, with AutoGen's names but without AutoGen: requests, topics, subscriptions, state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
    from runtime_core.actors.agents import (
        BaseAgent,
        ClosureAgent,
        ClosureContext,
        RoutedAgent,
        event,
        message_handler,
        rpc,
    )
    from runtime_core.actors.errors import (
        CancellationToken,
        CantHandleException,
        MessageDroppedException,
        NotAccessibleError,
        RemoteError,
        RuntimeStopped,
        SerializationError,
        UndeliverableException,
    )
    from runtime_core.actors.identity import AgentId, AgentType, TopicId
    from runtime_core.actors.message import (
        DefaultInterventionHandler,
        DefaultTopicId,
        DropMessage,
        InterventionHandler,
        MessageContext,
    )
    from runtime_core.actors.protocol import (
        AgentInstantiationContext,
        AgentProxy,
        DefaultSubscription,
        Subscription,
        TypePrefixSubscription,
        TypeSubscription,
        default_subscription,
        type_subscription,
    )
    from runtime_core.actors.runtime import Runtime
    from runtime_core.actors.serialization import MessageSerializer, UnknownPayload

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
    "AgentId": "runtime_core.actors.identity",
    "AgentInstantiationContext": "runtime_core.actors.protocol",
    "AgentProxy": "runtime_core.actors.protocol",
    "AgentType": "runtime_core.actors.identity",
    "BaseAgent": "runtime_core.actors.agents",
    "CancellationToken": "runtime_core.actors.errors",
    "CantHandleException": "runtime_core.actors.errors",
    "ClosureAgent": "runtime_core.actors.agents",
    "ClosureContext": "runtime_core.actors.agents",
    "DefaultInterventionHandler": "runtime_core.actors.message",
    "DefaultSubscription": "runtime_core.actors.protocol",
    "DefaultTopicId": "runtime_core.actors.message",
    "DropMessage": "runtime_core.actors.message",
    "InterventionHandler": "runtime_core.actors.message",
    "MessageContext": "runtime_core.actors.message",
    "MessageDroppedException": "runtime_core.actors.errors",
    "MessageSerializer": "runtime_core.actors.serialization",
    "NotAccessibleError": "runtime_core.actors.errors",
    "RemoteError": "runtime_core.actors.errors",
    "RoutedAgent": "runtime_core.actors.agents",
    "Runtime": "runtime_core.actors.runtime",
    "RuntimeStopped": "runtime_core.actors.errors",
    "SerializationError": "runtime_core.actors.errors",
    "Subscription": "runtime_core.actors.protocol",
    "TopicId": "runtime_core.actors.identity",
    "TypePrefixSubscription": "runtime_core.actors.protocol",
    "TypeSubscription": "runtime_core.actors.protocol",
    "UndeliverableException": "runtime_core.actors.errors",
    "UnknownPayload": "runtime_core.actors.serialization",
    "default_subscription": "runtime_core.actors.protocol",
    "event": "runtime_core.actors.agents",
    "message_handler": "runtime_core.actors.agents",
    "rpc": "runtime_core.actors.agents",
    "type_subscription": "runtime_core.actors.protocol",
}

__getattr__ = loader(__name__, _PLACES)
