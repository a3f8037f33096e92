"""AutoGen's own types, for the runtime of agents to speak."""

from __future__ import annotations

import sys
from typing import Any

from autogen_core import (
    AgentId,
    AgentInstantiationContext,
    AgentMetadata,
    AgentType,
    BaseAgent,
    CancellationToken,
    ClosureAgent,
    DropMessage,
    MessageContext,
    TopicId,
    TypePrefixSubscription,
    TypeSubscription,
)
from autogen_core.exceptions import (
    CantHandleException,
    MessageDroppedException,
    NotAccessibleError,
    UndeliverableException,
)

from runtime_core.actors.vocabulary import Vocabulary, topic_reader
from runtime_core.integrations.autogen.telemetry import Telemetry


def autogen(telemetry: Telemetry) -> Vocabulary:
    """The vocabulary of autogen_core."""
    return Vocabulary(
        agent_id=AgentId,
        agent_type=AgentType,
        topic_id=TopicId,
        message_context=MessageContext,
        metadata=lambda type, key, description: AgentMetadata(type=type, key=key, description=description),
        cancellation_token=CancellationToken,
        handler_scope=telemetry.handling,
        factory_scope=lambda runtime, id: AgentInstantiationContext.populate_context((runtime, id)),
        keeps_state=_keeps_state,
        topic_of=topic_reader(TypeSubscription, TypePrefixSubscription),
        drop_message=DropMessage,
        undeliverable=UndeliverableException,
        cant_handle=CantHandleException,
        dropped=MessageDroppedException,
        not_accessible=NotAccessibleError,
        # A team's members have seen the task then, as AutoGen's users expect when they go on with it.
        cancelled_is_handled=True,
    )


def saves_state(agent: Any) -> bool:  # Any: any class with the methods of an agent
    """Whether its class saves something: AutoGen's bases save nothing, and one of them warns of it at each call."""
    return type(agent).save_state not in (BaseAgent.save_state, ClosureAgent.save_state)


def locks_itself(cls: type) -> bool:
    """Whether this is an agent of AgentChat, which queues what must wait by itself, and answers the rest meanwhile."""
    # Not imported here: a program without AgentChat need not have it.
    module = sys.modules.get("autogen_agentchat.teams._group_chat._sequential_routed_agent")
    return module is not None and issubclass(cls, module.SequentialRoutedAgent)


def _keeps_state(agent: Any) -> bool:  # Any: as above
    """Whether its state is saved after each message.

    Not AgentChat's: a member of a team is an object of its program, whose state the team saves as a whole. To ask a
    nested team for its state starts it, which must not happen beside its own start.
    """
    return saves_state(agent) and not locks_itself(type(agent))
