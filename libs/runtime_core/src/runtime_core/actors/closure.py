"""An agent from a function."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, Protocol

from runtime_core.actors.base_agent import BaseAgent
from runtime_core.actors.errors import CancellationToken, CantHandleException
from runtime_core.actors.identity import AgentId, AgentType, TopicId
from runtime_core.actors.message import (
    AgentInstantiationContext,
    MessageContext,
    SubscriptionInstantiationContext,
)
from runtime_core.actors.protocol import AgentRuntime
from runtime_core.actors.routed import class_of, types_of
from runtime_core.actors.serialization import try_get_known_serializers_for_type
from runtime_core.actors.subscription import Subscription
from runtime_core.errors import ConfigurationError


class ClosureContext(Protocol):
    """What the function gets of its agent. Any: the user's message types."""

    @property
    def id(self) -> AgentId: ...

    async def send_message(
        self,
        message: Any,
        recipient: AgentId,
        *,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any: ...

    async def publish_message(
        self, message: Any, topic_id: TopicId, *, cancellation_token: CancellationToken | None = None
    ) -> None: ...


Closure = Callable[[ClosureContext, Any, MessageContext], Awaitable[Any]]  # Any: as above
UnknownTypePolicy = Literal["error", "warn", "ignore"]


class ClosureAgent(BaseAgent):
    """An agent whose messages a function handles: `async def f(agent: ClosureContext, message: T, ctx) -> R`.

    It lives in the process that registered it and has no state; a function is often used to take results out of the
    runtime.
    """

    def __init__(self, description: str, closure: Closure, *, unknown_type_policy: UnknownTypePolicy = "warn") -> None:
        if not AgentInstantiationContext.is_in_factory_call():
            raise RuntimeError("a ClosureAgent is made by its runtime: use ClosureAgent.register_closure")
        super().__init__(description)
        self._closure = closure
        self._expected = _message_types(closure)
        self._policy = unknown_type_policy

    async def on_message_impl(self, message: Any, ctx: MessageContext) -> Any:
        if not isinstance(message, self._expected):
            problem = (
                f"{self.id} takes {' | '.join(one.__name__ for one in self._expected)}, not {type(message).__name__}"
            )
            if self._policy == "error":
                raise CantHandleException(problem)
            if self._policy == "warn":
                warnings.warn(f"{problem}; see unknown_type_policy", stacklevel=1)
                return None
        return await self._closure(self, message, ctx)

    async def save_state(self) -> Mapping[str, Any]:
        return {}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """A function has no state."""

    @classmethod
    async def register_closure(
        cls,
        runtime: AgentRuntime,
        type: str,
        closure: Closure,
        *,
        unknown_type_policy: UnknownTypePolicy = "warn",
        skip_direct_message_subscription: bool = False,
        description: str = "",
        subscriptions: Callable[[], list[Subscription] | Awaitable[list[Subscription]]] | None = None,
    ) -> AgentType:
        """Register the function as a type of agents, with these subscriptions.

        `unknown_type_policy` is for messages of other types than the function takes.
        """
        expected = _message_types(closure)

        def factory() -> ClosureAgent:
            return ClosureAgent(description, closure, unknown_type_policy=unknown_type_policy)

        agent_type = await ClosureAgent.register(
            runtime,
            type,
            factory,
            skip_class_subscriptions=True,
            skip_direct_message_subscription=skip_direct_message_subscription,
        )
        for kind in expected:
            runtime.add_message_serializer(try_get_known_serializers_for_type(kind))
        if subscriptions is not None:
            with SubscriptionInstantiationContext.populate_context(agent_type):
                made = subscriptions()
                wanted = await made if inspect.isawaitable(made) else made
            for subscription in wanted:
                await runtime.add_subscription(subscription)
        return agent_type


def _message_types(closure: Closure) -> tuple[type, ...]:
    """The types of the second argument. Raises ConfigurationError."""
    where = f"closure {getattr(closure, '__qualname__', closure)!s}"
    names = list(inspect.signature(closure).parameters)
    hints = typing.get_type_hints(closure)
    if len(names) != 3 or names[1] not in hints or "return" not in hints:
        raise ConfigurationError(f"{where}: write async def f(agent: ClosureContext, message: T, ctx: …) -> R")
    return tuple(class_of(hint) or object for hint in types_of(hints[names[1]]))
