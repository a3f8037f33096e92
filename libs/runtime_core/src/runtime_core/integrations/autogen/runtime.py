"""The runtime of agents in AutoGen's own types, for AutoGen programs."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from autogen_core import (
    Agent,
    AgentId,
    AgentInstantiationContext,
    AgentMetadata,
    AgentType,
    BaseAgent,
    CancellationToken,
    ClosureAgent,
    DropMessage,
    InterventionHandler,
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
from opentelemetry.trace import TracerProvider

from runtime_core.actors.runtime import Runtime
from runtime_core.actors.vocabulary import Vocabulary, topic_reader
from runtime_core.integrations.autogen.serialization import FaithfulRegistry
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


AgentT = TypeVar("AgentT", bound=Agent)


class WeftAgentRuntime(Runtime):
    """An `autogen_core.AgentRuntime` whose messages and states are on a broker.

    It takes what `SingleThreadedAgentRuntime` takes, and means the same by it. Beyond that: `url` and `namespace` say
    which broker (as of `weft.runtime.Runtime`: WEFT_REDIS_URL, else one in this process), `services` whether services
    run beside it, and `interleaved` names types of agents whose messages are handled beside each other, as AutoGen
    handles all; those of other types wait for each other, but for AgentChat's, which do so by themselves.

    Any: messages, agents and states are the user's own types.
    """

    if TYPE_CHECKING:
        # The vocabulary makes the base speak AutoGen's types, which its own signatures cannot say.
        async def try_get_underlying_agent_instance(  # type: ignore[override]
            self, id: AgentId, type: type[AgentT] = ...
        ) -> AgentT: ...
        async def get(  # type: ignore[override]
            self, id_or_type: AgentId | AgentType | str, /, key: str = ..., *, lazy: bool = ...
        ) -> AgentId: ...
        async def agent_metadata(self, agent: AgentId) -> AgentMetadata: ...  # type: ignore[override]
        async def agent_save_state(self, agent: AgentId) -> Mapping[str, Any]: ...  # type: ignore[override]
        async def agent_load_state(self, agent: AgentId, state: Mapping[str, Any]) -> None: ...  # type: ignore[override]

    def __init__(
        self,
        *,
        intervention_handlers: list[InterventionHandler] | None = None,
        tracer_provider: TracerProvider | None = None,
        ignore_unhandled_exceptions: bool = True,
        url: str | None = None,
        namespace: str | None = None,
        services: bool = True,
        interleaved: Collection[str] = (),
    ) -> None:
        registry = FaithfulRegistry()
        self._telemetry = Telemetry(registry, tracer_provider)
        self._interleaved = frozenset(interleaved)
        self._instance_classes: dict[str, type] = {}
        super().__init__(
            url,
            namespace,
            intervention_handlers=intervention_handlers,
            ignore_unhandled_exceptions=ignore_unhandled_exceptions,
            services=services,
            vocabulary=autogen(self._telemetry),
            registry=registry,
        )

    async def send_message(  # type: ignore[override]  # see above
        self,
        message: Any,
        recipient: AgentId,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        with self._telemetry.sending(message, recipient, sender):
            response = await super().send_message(
                message,
                cast(Any, recipient),
                sender=cast(Any, sender),
                cancellation_token=cancellation_token,
                message_id=message_id,
                timeout=timeout,
            )
        self._telemetry.answered(response, recipient, sender)
        return response

    async def publish_message(  # type: ignore[override]  # see above
        self,
        message: Any,
        topic_id: TopicId,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> None:
        with self._telemetry.sending(message, topic_id, sender):
            await super().publish_message(
                message,
                topic_id,
                sender=cast(Any, sender),
                cancellation_token=cancellation_token,
                message_id=message_id,
            )

    async def register_factory(  # type: ignore[override]  # see above
        self,
        type: str | AgentType,
        agent_factory: Callable[[], AgentT | Awaitable[AgentT]],
        *,
        expected_class: type[AgentT] | None = None,
        **options: Any,
    ) -> AgentType:
        options.setdefault("interleave", self._interleaves(type, expected_class))
        made = super().register_factory(cast(Any, type), agent_factory, expected_class=expected_class, **options)
        return cast(AgentType, await made)

    async def register_agent_instance(  # type: ignore[override]  # see above
        self, agent_instance: Agent, agent_id: AgentId, **options: Any
    ) -> AgentId:
        cls = self._instance_classes.get(agent_id.type, type(agent_instance))
        if cls is not type(agent_instance):
            raise ValueError(
                f"agents of type {agent_id.type!r} are objects of {cls.__name__} here: {agent_id} cannot be one of "
                f"{type(agent_instance).__name__}"
            )
        options.setdefault("interleave", self._interleaves(agent_id.type, cls))
        await super().register_agent_instance(agent_instance, cast(Any, agent_id), **options)
        self._instance_classes[agent_id.type] = cls
        return agent_id

    async def save_state(self) -> Mapping[str, Any]:
        """States of all agents of the namespace, those of AgentChat's that are objects of this process among them."""
        state = dict(await super().save_state())
        for instance in self._instances.all():
            if saves_state(instance.agent) and not instance.keeps_state:
                state["/".join(instance.place)] = dict(await instance.agent.save_state())
        return state

    async def _build(self, type: str, key: str) -> Any:
        try:
            if type in self._instance_classes:
                raise RuntimeError(
                    f"there is no agent {type}/{key}: agents of this type were registered as objects; does a "
                    "subscription lead here that was meant for another type?"
                )
            return await super()._build(type, key)
        except Exception as error:
            self._telemetry.not_constructed(AgentId(type, key), error)
            raise

    def _interleaves(self, agent_type: str | AgentType, cls: type | None) -> bool:
        name = agent_type if isinstance(agent_type, str) else agent_type.type
        return name in self._interleaved or (cls is not None and locks_itself(cls))
