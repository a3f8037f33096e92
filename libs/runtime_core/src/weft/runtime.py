"""Agents as objects, with AutoGen's names but without AutoGen: requests, topics, subscriptions, state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.base.lazy import loader

if TYPE_CHECKING:
    from runtime_core.facades.actors.agents import (
        BaseAgent,
        ClosureAgent,
        ClosureContext,
        RoutedAgent,
        event,
        message_handler,
        rpc,
    )
    from runtime_core.facades.actors.errors import (
        CancellationToken,
        CantHandleException,
        MessageDroppedException,
        NotAccessibleError,
        RemoteError,
        RuntimeStopped,
        SerializationError,
        UndeliverableException,
    )
    from runtime_core.facades.actors.identity import AgentId, AgentType, TopicId
    from runtime_core.facades.actors.message import (
        DefaultInterventionHandler,
        DefaultTopicId,
        DropMessage,
        InterventionHandler,
        MessageContext,
    )
    from runtime_core.facades.actors.protocol import (
        AgentInstantiationContext,
        AgentProxy,
        DefaultSubscription,
        Subscription,
        TypePrefixSubscription,
        TypeSubscription,
        default_subscription,
        type_subscription,
    )
    from runtime_core.facades.actors.runtime import Runtime
    from runtime_core.facades.actors.serialization import MessageSerializer, UnknownPayload

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
    "AgentId": "runtime_core.facades.actors.identity",
    "AgentInstantiationContext": "runtime_core.facades.actors.protocol",
    "AgentProxy": "runtime_core.facades.actors.protocol",
    "AgentType": "runtime_core.facades.actors.identity",
    "BaseAgent": "runtime_core.facades.actors.agents",
    "CancellationToken": "runtime_core.facades.actors.errors",
    "CantHandleException": "runtime_core.facades.actors.errors",
    "ClosureAgent": "runtime_core.facades.actors.agents",
    "ClosureContext": "runtime_core.facades.actors.agents",
    "DefaultInterventionHandler": "runtime_core.facades.actors.message",
    "DefaultSubscription": "runtime_core.facades.actors.protocol",
    "DefaultTopicId": "runtime_core.facades.actors.message",
    "DropMessage": "runtime_core.facades.actors.message",
    "InterventionHandler": "runtime_core.facades.actors.message",
    "MessageContext": "runtime_core.facades.actors.message",
    "MessageDroppedException": "runtime_core.facades.actors.errors",
    "MessageSerializer": "runtime_core.facades.actors.serialization",
    "NotAccessibleError": "runtime_core.facades.actors.errors",
    "RemoteError": "runtime_core.facades.actors.errors",
    "RoutedAgent": "runtime_core.facades.actors.agents",
    "Runtime": "runtime_core.facades.actors.runtime",
    "RuntimeStopped": "runtime_core.facades.actors.errors",
    "SerializationError": "runtime_core.facades.actors.errors",
    "Subscription": "runtime_core.facades.actors.protocol",
    "TopicId": "runtime_core.facades.actors.identity",
    "TypePrefixSubscription": "runtime_core.facades.actors.protocol",
    "TypeSubscription": "runtime_core.facades.actors.protocol",
    "UndeliverableException": "runtime_core.facades.actors.errors",
    "UnknownPayload": "runtime_core.facades.actors.serialization",
    "default_subscription": "runtime_core.facades.actors.protocol",
    "event": "runtime_core.facades.actors.agents",
    "message_handler": "runtime_core.facades.actors.agents",
    "rpc": "runtime_core.facades.actors.agents",
    "type_subscription": "runtime_core.facades.actors.protocol",
}

__getattr__ = loader(__name__, _PLACES)
