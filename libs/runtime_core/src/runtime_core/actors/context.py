"""What a handler, a factory and a list of subscriptions can ask for: who they are, for whom they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from runtime_core.actors.errors import CancellationToken
from runtime_core.actors.identity import AgentId, AgentType, TopicId

if TYPE_CHECKING:
    from runtime_core.actors.protocol import AgentRuntime


@dataclass
class MessageContext:
    """What a handler knows of the message besides its content."""

    sender: AgentId | None
    """None: it was sent from outside of any agent."""
    topic_id: TopicId | None
    """None: it was sent to this agent alone."""
    is_rpc: bool
    """Whether the sender waits for what the handler returns."""
    cancellation_token: CancellationToken
    message_id: str


class _Static:
    """A name for values of the current context; there are no objects of it."""

    def __init__(self) -> None:
        raise RuntimeError(f"{type(self).__name__} has no objects: use its class methods")


_factory: ContextVar[tuple[AgentRuntime, AgentId]] = ContextVar("weft agent factory")
_handler: ContextVar[AgentId] = ContextVar("weft message handler")
_subscriptions: ContextVar[AgentType] = ContextVar("weft subscriptions")


class AgentInstantiationContext(_Static):
    """For which runtime and agent a factory, or the constructor that it calls, runs."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: tuple[AgentRuntime, AgentId]) -> Iterator[None]:
        """Make this runtime and agent the current ones; tests of a constructor use it too."""
        token = _factory.set(ctx)
        try:
            yield
        finally:
            _factory.reset(token)

    @classmethod
    def current_runtime(cls) -> AgentRuntime:
        """Raises RuntimeError outside of a factory."""
        found = _factory.get(None)
        return _outside("a factory; let the runtime make the agent") if found is None else found[0]

    @classmethod
    def current_agent_id(cls) -> AgentId:
        """Raises RuntimeError outside of a factory."""
        found = _factory.get(None)
        return _outside("a factory; let the runtime make the agent") if found is None else found[1]

    @classmethod
    def is_in_factory_call(cls) -> bool:
        return _factory.get(None) is not None


class MessageHandlerContext(_Static):
    """Whose handler runs."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: AgentId) -> Iterator[None]:
        token = _handler.set(ctx)
        try:
            yield
        finally:
            _handler.reset(token)

    @classmethod
    def agent_id(cls) -> AgentId:
        """Raises RuntimeError outside of a handler."""
        found = _handler.get(None)
        return _outside("a message handler") if found is None else found


class SubscriptionInstantiationContext(_Static):
    """For which type of agents subscriptions are made."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: AgentType) -> Iterator[None]:
        token = _subscriptions.set(ctx)
        try:
            yield
        finally:
            _subscriptions.reset(token)

    @classmethod
    def agent_type(cls) -> AgentType:
        """Raises RuntimeError where no type is being registered."""
        found = _subscriptions.get(None)
        return _outside("a registration; name the agent type") if found is None else found


def _outside(of: str) -> NoReturn:
    raise RuntimeError(f"this may be asked only inside of {of}")


class DefaultTopicId(TopicId):
    """Topic type `default`, with the key of the agent whose handler runs as its source (outside: `default`)."""

    __slots__ = ()

    def __init__(self, type: str = "default", source: str | None = None) -> None:
        if source is None:
            try:
                source = MessageHandlerContext.agent_id().key
            except RuntimeError:
                source = "default"
        super().__init__(type, source)
