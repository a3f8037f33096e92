"""Weft's runtime of agents with AutoGen's types, event logs and spans, for AutoGen programs."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from autogen_core import (
    EVENT_LOGGER_NAME,
    ROOT_LOGGER_NAME,
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
    MessageHandlerContext,
    TopicId,
    TypePrefixSubscription,
    TypeSubscription,
)
from autogen_core._telemetry import MessageRuntimeTracingConfig, TraceHelper  # AutoGen's other runtimes use these too
from autogen_core.exceptions import (
    CantHandleException,
    MessageDroppedException,
    NotAccessibleError,
    UndeliverableException,
)
from autogen_core.logging import (
    AgentConstructionExceptionEvent,
    DeliveryStage,
    MessageEvent,
    MessageHandlerExceptionEvent,
    MessageKind,
)
from opentelemetry.trace import Span, TracerProvider

from runtime_core.errors import ConfigurationError
from runtime_core.integrations.actors.errors import SerializationError
from runtime_core.integrations.actors.instances import Stepping
from runtime_core.integrations.actors.protocol import Vocabulary, topic_reader
from runtime_core.integrations.actors.runtime import Runtime
from runtime_core.integrations.actors.serialization import SerializationRegistry
from runtime_core.integrations.autogen.serialization import FaithfulRegistry

AgentT = TypeVar("AgentT", bound=Agent)

logger = logging.getLogger(f"{ROOT_LOGGER_NAME}.weft")
events = logging.getLogger(EVENT_LOGGER_NAME)


def autogen(telemetry: Telemetry) -> Vocabulary:
    """Return the types of autogen_core as a Vocabulary."""
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
        # So the members of a cancelled team have seen the task, as AutoGen's users expect when they resume the team.
        cancelled_is_handled=True,
    )


def saves_state(agent: Any) -> bool:  # Any: any class with the methods of an agent
    """Return whether its class overrides `save_state`: AutoGen's base classes save nothing, and one warns each time."""
    return type(agent).save_state not in (BaseAgent.save_state, ClosureAgent.save_state)


def locks_itself(cls: type) -> bool:
    """Return whether this is a class of AgentChat agents, which have their own queues."""
    # Not imported here: a program without AgentChat need not have it.
    module = sys.modules.get("autogen_agentchat.teams._group_chat._sequential_routed_agent")
    return module is not None and issubclass(cls, module.SequentialRoutedAgent)


def _keeps_state(agent: Any) -> bool:  # Any: as above
    """Return whether to save the agent's state after each message.

    Not that of AgentChat's agents: a member of a team is an object of its program, and the team saves its state as a
    whole. Reading the state of a nested team starts it, which must not happen while it starts itself.
    """
    return saves_state(agent) and not locks_itself(type(agent))


class WeftAgentRuntime(Runtime):
    """An `autogen_core.AgentRuntime` whose messages and states are on a broker.

    It takes the arguments of `SingleThreadedAgentRuntime`, with the same meaning. In addition, `url` names the broker
    (None: WEFT_REDIS_URL, or else one in this process), and `namespace` a namespace that programs share (None:
    WEFT_NAMESPACE, or else one of this runtime's own, which `close` erases). `services` says whether services run on a
    shared namespace. `interleave`, True for all types or a list of them, lets an agent handle several messages
    concurrently, as all agents do in AutoGen. Other agents handle one message at a time, except for AgentChat's, which
    have their own queues. `replay_unheard` gives subscribers earlier messages that had no subscriber.

    Any: messages, agents and states are the user's own types.
    """

    if TYPE_CHECKING:
        # With this vocabulary the base class uses AutoGen's types, which its signatures cannot express.
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
        interleave: bool | Collection[str] = False,
        replay_unheard: bool = False,
    ) -> None:
        registry = FaithfulRegistry()
        self._telemetry = Telemetry(registry, tracer_provider)
        self._interleave = _checked_interleave(interleave)
        self._instance_classes: dict[str, type] = {}
        super().__init__(
            url,
            namespace,
            intervention_handlers=intervention_handlers,
            ignore_unhandled_exceptions=ignore_unhandled_exceptions,
            services=services,
            replay_unheard=replay_unheard,
            own_namespace=True,
            vocabulary=autogen(self._telemetry),
            registry=registry,
        )

    def start(self) -> None:
        """Begin to handle messages. Raises ConfigurationError if `interleave` names a type that is not registered."""
        unknown = [] if isinstance(self._interleave, bool) else sorted(self._interleave - set(self._factories))
        if unknown:
            raise ConfigurationError(
                f"interleave names {', '.join(map(repr, unknown))}, which this runtime has not registered; it has "
                f"{', '.join(map(repr, sorted(self._factories))) or 'no types'}: register types before start"
            )
        stepping, self._actors.stepping = self._actors.stepping, None
        super().start()
        if stepping is not None:
            stepping.end()

    # -- step by step ------------------------------------------------------------------------------------------

    @property
    def unprocessed_messages_count(self) -> int:
        """How many messages no handler has begun; a publication counts once for each recipient.

        It waits for the broker. Raises RuntimeError in a shared namespace.
        """
        self._check_alone("unprocessed_messages_count")
        with ThreadPoolExecutor(1) as thread:  # a separate event loop, since this is not a coroutine
            waiting = thread.submit(lambda: asyncio.run(self._host.count_open())).result()
        return max(0, waiting - self._actors.begun)

    async def process_next(self) -> None:
        """Begin to handle the next message, or take note of the next answer; wait for one if there is none.

        Raises RuntimeError if the runtime is started, or shares its namespace, and the error of a published message's
        handler with `ignore_unhandled_exceptions=False`.
        """
        self._check_alone("process_next")
        if self._started:
            raise RuntimeError("process_next: the runtime is started, and takes the messages itself")
        self._host.follow_loop()
        self._raise_unhandled()
        if self._actors.stepping is None:
            self._actors.stepping = Stepping()
        stepping = self._actors.stepping
        await self._host.start()
        await stepping.step()

    async def _process_next(self) -> None:
        await self.process_next()

    def _check_alone(self, what: str) -> None:
        if not (self._host.own or self._host.private):
            raise RuntimeError(
                f"{what}: other processes may handle the messages of the namespace {self._host.namespace!r}: create "
                "the runtime without a namespace"
            )

    # -- messages ----------------------------------------------------------------------------------------------

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
        if self._actors.stepping is not None:
            self._actors.stepping.note_answer()
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
                f"agents of type {agent_id.type!r} are objects of class {cls.__name__} here: {agent_id} cannot be a "
                f"{type(agent_instance).__name__}"
            )
        options.setdefault("interleave", self._interleaves(agent_id.type, cls))
        await super().register_agent_instance(agent_instance, cast(Any, agent_id), **options)
        self._instance_classes[agent_id.type] = cls
        return agent_id

    async def save_state(self) -> Mapping[str, Any]:
        """Return the states of all agents of the namespace, including AgentChat's agents in this process."""
        state = dict(await super().save_state())
        for instance in self._instances.all():
            if saves_state(instance.agent) and not instance.keeps_state:
                state["/".join(instance.place)] = dict(await instance.agent.save_state())
        return state

    async def _build(self, type: str, key: str) -> Any:
        try:
            if type in self._instance_classes:
                raise RuntimeError(
                    f"there is no agent {type}/{key}: agents of this type were registered as objects; is a "
                    "subscription for another type registered for this one?"
                )
            return await super()._build(type, key)
        except Exception as error:
            self._telemetry.not_constructed(AgentId(type, key), error)
            raise

    def _interleaves(self, agent_type: str | AgentType, cls: type | None) -> bool:
        name = agent_type if isinstance(agent_type, str) else agent_type.type
        named = self._interleave if isinstance(self._interleave, bool) else name in self._interleave
        return named or (cls is not None and locks_itself(cls))


def _checked_interleave(value: object) -> bool | frozenset[str]:
    """Raises ConfigurationError."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in value):
        raise ConfigurationError(f"interleave is {value!r}: pass True, False or a list of agent types")
    return frozenset(value)


class Telemetry:
    """The event logs and spans of one runtime, under the names that AutoGen's own runtime uses.

    Any: the user's message types.
    """

    def __init__(self, registry: SerializationRegistry, tracer_provider: TracerProvider | None) -> None:
        self._registry = registry
        self._tracer = TraceHelper(tracer_provider, MessageRuntimeTracingConfig("SingleThreadedAgentRuntime"))

    @contextmanager
    def sending(self, message: Any, to: AgentId | TopicId, sender: AgentId | None) -> Iterator[Span]:
        """Log and trace a message that is sent or published."""
        self._log(message, sender, to, _kind(to), DeliveryStage.SEND)
        with self._tracer.trace_block(
            "create", to, parent=None, extraAttributes={"message_type": type(message).__name__}
        ) as span:
            yield span

    @contextmanager
    def handling(self, agent: AgentId, message: Any, context: MessageContext) -> Iterator[None]:
        """Log and trace a handler."""
        self._log(
            message,
            context.sender,
            agent if context.is_rpc else None,
            MessageKind.DIRECT if context.is_rpc else MessageKind.PUBLISH,
            DeliveryStage.DELIVER,
        )
        with ExitStack() as stack:
            if context.topic_id is not None:
                stack.enter_context(self._tracer.trace_block("publish", context.topic_id, parent=None))
            else:
                stack.enter_context(self._tracer.trace_block("send", agent, parent=None))
            stack.enter_context(self._tracer.trace_block("process", agent, parent=None))
            stack.enter_context(MessageHandlerContext.populate_context(agent))
            try:
                yield
            except BaseException as error:
                if not context.is_rpc:
                    logger.error("Error processing publish message for %s", agent, exc_info=True)
                events.info(
                    MessageHandlerExceptionEvent(payload=self._text(message), handling_agent=agent, exception=error)
                )
                raise

    def answered(self, response: Any, by: AgentId, to: AgentId | None) -> None:
        """Log a response that reached the sender of the request."""
        self._log(response, by, to, MessageKind.RESPOND, DeliveryStage.DELIVER)

    def not_constructed(self, agent: AgentId, error: Exception) -> None:
        """Log the error of a factory."""
        logger.error("Error constructing agent %s", agent, exc_info=error)
        events.info(AgentConstructionExceptionEvent(agent_id=agent, exception=error))

    def _log(
        self,
        message: Any,
        sender: AgentId | None,
        receiver: AgentId | TopicId | None,
        kind: MessageKind,
        stage: DeliveryStage,
    ) -> None:
        # Serialize the message only if a handler listens.
        if events.isEnabledFor(logging.INFO):
            events.info(
                MessageEvent(
                    payload=self._text(message), sender=sender, receiver=receiver, kind=kind, delivery_stage=stage
                )
            )

    def _text(self, message: Any) -> str:
        try:
            return self._registry.write(message)[2].decode(errors="replace")
        except SerializationError:
            return "Message could not be serialized"


def _kind(to: AgentId | TopicId) -> MessageKind:
    return MessageKind.DIRECT if isinstance(to, AgentId) else MessageKind.PUBLISH
