"""The base of agents that are objects."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self, final

from runtime_core.actors.errors import CancellationToken
from runtime_core.actors.identity import AgentId, AgentType, TopicId
from runtime_core.actors.message import AgentInstantiationContext, MessageContext, SubscriptionInstantiationContext
from runtime_core.actors.protocol import AgentMetadata, AgentRuntime
from runtime_core.actors.serialization import MessageSerializer, try_get_known_serializers_for_type
from runtime_core.actors.subscription import (
    Subscription,
    TypePrefixSubscription,
    TypeSubscription,
    UnboundSubscription,
)


class BaseAgent(ABC):
    """Subclass it and write `on_message_impl`; or subclass RoutedAgent, which picks a handler by the message's type.

    Any: the user's message types, and JSON states. What `save_state` returns (a JSON object) is kept on the broker
    after each message that changed it; an agent without `save_state` has no state that outlives its process.
    """

    unbound_subscriptions: ClassVar[list[UnboundSubscription]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.unbound_subscriptions = []

    def __init__(self, description: str) -> None:
        if not isinstance(description, str):
            raise ValueError(f"an agent's description is a text, not {description!r}")
        self._description = description
        self._id: AgentId | None = None
        self._runtime: AgentRuntime | None = None
        if AgentInstantiationContext.is_in_factory_call():
            self._runtime = AgentInstantiationContext.current_runtime()
            self._id = AgentInstantiationContext.current_agent_id()

    # -- who it is ---------------------------------------------------------------------------------------------

    async def bind_id_and_runtime(self, id: AgentId, runtime: AgentRuntime) -> None:
        """Raises RuntimeError for an agent that has another id or runtime already."""
        if self._id is not None and self._id != id:
            raise RuntimeError(f"agent {self._id} cannot be registered as {id} too: make another object")
        if self._runtime is not None and self._runtime is not runtime:
            raise RuntimeError(f"agent {id} belongs to another runtime: make another object")
        self._id, self._runtime = id, runtime

    @property
    def id(self) -> AgentId:
        if self._id is None:
            raise RuntimeError("the agent has no id before it is registered")
        return self._id

    @property
    def type(self) -> str:
        return self.id.type

    @property
    def runtime(self) -> AgentRuntime:
        if self._runtime is None:
            raise RuntimeError("the agent has no runtime before it is registered")
        return self._runtime

    @property
    def metadata(self) -> AgentMetadata:
        return AgentMetadata(self.id.type, self.id.key, self._description)

    # -- messages ----------------------------------------------------------------------------------------------

    @final
    async def on_message(self, message: Any, ctx: MessageContext) -> Any:
        return await self.on_message_impl(message, ctx)

    @abstractmethod
    async def on_message_impl(self, message: Any, ctx: MessageContext) -> Any:
        """Handle one message. Messages of one agent come one after the other."""

    async def send_message(
        self,
        message: Any,
        recipient: AgentId,
        *,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any:
        """Ask another agent and wait for its answer; see Runtime.send_message."""
        return await self.runtime.send_message(
            message, recipient, sender=self.id, cancellation_token=cancellation_token, message_id=message_id
        )

    async def publish_message(
        self, message: Any, topic_id: TopicId, *, cancellation_token: CancellationToken | None = None
    ) -> None:
        """Publish to a topic; see Runtime.publish_message."""
        await self.runtime.publish_message(message, topic_id, sender=self.id, cancellation_token=cancellation_token)

    # -- state -------------------------------------------------------------------------------------------------

    async def save_state(self) -> Mapping[str, Any]:
        warnings.warn(f"{type(self).__name__} has no save_state: nothing of it is kept", stacklevel=2)
        return {}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        warnings.warn(f"{type(self).__name__} has no load_state: the state is ignored", stacklevel=2)

    async def close(self) -> None:  # noqa: B027  # may be left as it is
        """Called when the object is let go, at the end or to save memory."""

    # -- registration ------------------------------------------------------------------------------------------

    @classmethod
    def handled_types(cls) -> Iterable[builtins.type]:
        """Message types that the class names, so that they are known before the first one arrives."""
        return ()

    @classmethod
    async def register(
        cls,
        runtime: AgentRuntime,
        type: str,
        factory: Callable[[], Self | Awaitable[Self]],
        *,
        skip_class_subscriptions: bool = False,
        skip_direct_message_subscription: bool = False,
    ) -> AgentType:
        """Register a type of agents, with the subscriptions of this class and one to topics `<type>:…`."""
        agent_type = await runtime.register_factory(type, factory, expected_class=cls)
        runtime.add_message_serializer(cls._serializers())
        if not skip_class_subscriptions:
            for subscription in await cls._class_subscriptions(agent_type):
                await runtime.add_subscription(subscription)
        if not skip_direct_message_subscription:
            await runtime.add_subscription(_direct(agent_type.type))
        return agent_type

    async def register_instance(
        self,
        runtime: AgentRuntime,
        agent_id: AgentId,
        *,
        skip_class_subscriptions: bool = True,
        skip_direct_message_subscription: bool = False,
    ) -> AgentId:
        """Register this object as one agent, with subscriptions to topics of its key's name and `<type>:…`."""
        agent_id = await runtime.register_agent_instance(self, agent_id)
        runtime.add_message_serializer(self._serializers())
        await runtime.add_subscription(TypeSubscription(agent_id.key, agent_id.type))
        if not skip_class_subscriptions:
            for subscription in await self._class_subscriptions(AgentType(agent_id.type)):
                await runtime.add_subscription(subscription)
        if not skip_direct_message_subscription:
            with contextlib.suppress(ValueError):  # another object of this type has it
                await runtime.add_subscription(_direct(agent_id.type))
        return agent_id

    @classmethod
    async def _class_subscriptions(cls, agent_type: AgentType) -> list[Subscription]:
        found: list[Subscription] = []
        with SubscriptionInstantiationContext.populate_context(agent_type):
            for make in cls.unbound_subscriptions:
                made = make()
                found += await made if inspect.isawaitable(made) else made
        return found

    @classmethod
    def _serializers(cls) -> Sequence[MessageSerializer[Any]]:
        return [one for kind in cls.handled_types() for one in try_get_known_serializers_for_type(kind)]


def _direct(type: str) -> Subscription:
    # The colon keeps the topics of one type apart from those of another whose name begins with it.
    return TypePrefixSubscription(f"{type}:", type)
