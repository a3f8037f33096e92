"""The protocols of agents and runtimes, the context of factories, and a proxy for an agent in any process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from runtime_core.actors.errors import CancellationToken
from runtime_core.actors.identity import AgentId, AgentType, TopicId
from runtime_core.actors.message import ContextNamespace, MessageContext, outside
from runtime_core.actors.serialization import MessageSerializer
from runtime_core.actors.subscription import Subscription

AgentT = TypeVar("AgentT")


@dataclass(frozen=True, slots=True)
class AgentMetadata:
    """The metadata of an agent."""

    type: str
    key: str
    description: str


@runtime_checkable
class Agent(Protocol):
    """An agent that a runtime can run. Its state is a JSON object."""

    @property
    def metadata(self) -> AgentMetadata: ...

    @property
    def id(self) -> AgentId: ...

    async def bind_id_and_runtime(self, id: AgentId, runtime: AgentRuntime) -> None:
        """Bind the agent, once, before its first message. Raises RuntimeError if it is bound elsewhere."""
        ...

    async def on_message(self, message: Any, ctx: MessageContext) -> Any:  # Any: the user's message types
        """Handle one message. The result is the answer to a request."""
        ...

    async def save_state(self) -> Mapping[str, Any]: ...  # Any: the user's JSON

    async def load_state(self, state: Mapping[str, Any]) -> None: ...  # Any: as above

    async def close(self) -> None:
        """Called when the object is dropped. Its state may live on."""
        ...


class AgentRuntime(Protocol):
    """The methods of a runtime. Any: the user's message types, and JSON states."""

    async def send_message(
        self,
        message: Any,
        recipient: AgentId,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any: ...

    async def publish_message(
        self,
        message: Any,
        topic_id: TopicId,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> None: ...

    async def register_factory(
        self,
        type: str | AgentType,
        agent_factory: Callable[[], AgentT | Awaitable[AgentT]],
        *,
        expected_class: type[AgentT] | None = None,
    ) -> AgentType: ...

    async def register_agent_instance(self, agent_instance: Agent, agent_id: AgentId) -> AgentId: ...

    async def try_get_underlying_agent_instance(self, id: AgentId, type: type[AgentT] = ...) -> AgentT: ...

    async def get(self, id_or_type: AgentId | AgentType | str, /, key: str = ..., *, lazy: bool = ...) -> AgentId: ...

    async def save_state(self) -> Mapping[str, Any]: ...

    async def load_state(self, state: Mapping[str, Any]) -> None: ...

    async def agent_metadata(self, agent: AgentId) -> AgentMetadata: ...

    async def agent_save_state(self, agent: AgentId) -> Mapping[str, Any]: ...

    async def agent_load_state(self, agent: AgentId, state: Mapping[str, Any]) -> None: ...

    async def add_subscription(self, subscription: Subscription) -> None: ...

    async def remove_subscription(self, id: str) -> None: ...

    def add_message_serializer(self, serializer: MessageSerializer[Any] | Sequence[MessageSerializer[Any]]) -> None: ...


class AgentProxy:
    """Represents one agent through its runtime. Any: the user's message types, and JSON states."""

    def __init__(self, agent: AgentId, runtime: AgentRuntime) -> None:
        self._agent = agent
        self._runtime = runtime

    @property
    def id(self) -> AgentId:
        return self._agent

    @property
    def metadata(self) -> Awaitable[AgentMetadata]:
        return self._runtime.agent_metadata(self._agent)

    async def send_message(
        self,
        message: Any,
        *,
        sender: AgentId | None = None,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any:
        return await self._runtime.send_message(
            message, self._agent, sender=sender, cancellation_token=cancellation_token, message_id=message_id
        )

    async def save_state(self) -> Mapping[str, Any]:
        return await self._runtime.agent_save_state(self._agent)

    async def load_state(self, state: Mapping[str, Any]) -> None:
        await self._runtime.agent_load_state(self._agent, state)


_factory: ContextVar[tuple[AgentRuntime, AgentId]] = ContextVar("weft agent factory")


class AgentInstantiationContext(ContextNamespace):
    """The runtime and the agent for which a factory, or the constructor that it calls, runs."""

    @classmethod
    @contextmanager
    def populate_context(cls, ctx: tuple[AgentRuntime, AgentId]) -> Iterator[None]:
        """Set the current runtime and agent; also for tests of a constructor."""
        token = _factory.set(ctx)
        try:
            yield
        finally:
            _factory.reset(token)

    @classmethod
    def current_runtime(cls) -> AgentRuntime:
        """Raises RuntimeError outside a factory."""
        found = _factory.get(None)
        return outside("a factory; let the runtime make the agent") if found is None else found[0]

    @classmethod
    def current_agent_id(cls) -> AgentId:
        """Raises RuntimeError outside a factory."""
        found = _factory.get(None)
        return outside("a factory; let the runtime make the agent") if found is None else found[1]

    @classmethod
    def is_in_factory_call(cls) -> bool:
        return _factory.get(None) is not None
