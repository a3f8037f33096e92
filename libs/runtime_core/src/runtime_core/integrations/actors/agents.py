"""The classes for agents: the base class, agents whose handlers are selected by message type, and a function as an
agent."""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import logging
import types
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, cast, final, overload

from runtime_core.errors import ConfigurationError
from runtime_core.integrations.actors.errors import CantHandleException
from runtime_core.integrations.actors.identity import AgentId, AgentType, TopicId
from runtime_core.integrations.actors.message import (
    CancellationToken,
    DropMessage,
    MessageContext,
    MessageHandlerContext,
    SubscriptionInstantiationContext,
)
from runtime_core.integrations.actors.protocol import (
    AgentInstantiationContext,
    AgentMetadata,
    AgentRuntime,
    Subscription,
    TypePrefixSubscription,
    TypeSubscription,
    UnboundSubscription,
    Vocabulary,
    topic_reader,
)
from runtime_core.integrations.actors.serialization import MessageSerializer, try_get_known_serializers_for_type

logger = logging.getLogger(__name__)
# Any: agents, messages and results are the user's own types.
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
Match = Callable[[Any, MessageContext], bool]


class BaseAgent(ABC):
    """The base class of agents: subclass it and write `on_message_impl`, or subclass RoutedAgent.

    Any: the user's message types, and JSON states. After each message, the broker stores the result of `save_state` (a
    JSON object) if it has changed. An agent without `save_state` has no durable state.
    """

    unbound_subscriptions: ClassVar[list[UnboundSubscription]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.unbound_subscriptions = []

    def __init__(self, description: str) -> None:
        if not isinstance(description, str):
            raise ValueError(f"an agent's description must be a string, not {description!r}")
        self._description = description
        self._id: AgentId | None = None
        self._runtime: AgentRuntime | None = None
        if AgentInstantiationContext.is_in_factory_call():
            self._runtime = AgentInstantiationContext.current_runtime()
            self._id = AgentInstantiationContext.current_agent_id()

    # -- identity ----------------------------------------------------------------------------------------------

    async def bind_id_and_runtime(self, id: AgentId, runtime: AgentRuntime) -> None:
        """Raises RuntimeError if the agent has a different id or runtime."""
        if self._id is not None and self._id != id:
            raise RuntimeError(f"agent {self._id} cannot be registered as {id}, too: create another object")
        if self._runtime is not None and self._runtime is not runtime:
            raise RuntimeError(f"agent {id} belongs to another runtime: create another object")
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
        """Handle one message. An agent handles its messages one at a time."""

    async def send_message(
        self,
        message: Any,
        recipient: AgentId,
        *,
        cancellation_token: CancellationToken | None = None,
        message_id: str | None = None,
    ) -> Any:
        """Call another agent and wait for its answer; see Runtime.send_message."""
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
        warnings.warn(f"{type(self).__name__} has no save_state: its state is not kept", stacklevel=2)
        return {}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        warnings.warn(f"{type(self).__name__} has no load_state: the state is ignored", stacklevel=2)

    async def close(self) -> None:  # noqa: B027  # may be left as it is
        """Called when the object is dropped, at the end or to save memory."""

    # -- registration ------------------------------------------------------------------------------------------

    @classmethod
    def handled_types(cls) -> Iterable[builtins.type]:
        """Return the message types that the class handles, so that they are known before the first message."""
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
        """Register a type of agents with the subscriptions of this class, and with one to topics `<type>:…`."""
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
        """Register this object as one agent, subscribed to the topic type of its key's name and to `<type>:…`."""
        agent_id = await runtime.register_agent_instance(self, agent_id)
        runtime.add_message_serializer(self._serializers())
        await runtime.add_subscription(TypeSubscription(agent_id.key, agent_id.type))
        if not skip_class_subscriptions:
            for subscription in await self._class_subscriptions(AgentType(agent_id.type)):
                await runtime.add_subscription(subscription)
        if not skip_direct_message_subscription:
            with contextlib.suppress(ValueError):  # another object of this type already has it
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
    # The colon separates the topics of one type from those of another that begins with its name.
    return TypePrefixSubscription(f"{type}:", type)


class MessageHandler(Protocol):
    """A decorated method."""

    target_types: Sequence[type]
    produces_types: Sequence[object]
    is_message_handler: bool
    router: Match

    def __call__(self, agent: Any, message: Any, ctx: MessageContext) -> Awaitable[Any]: ...


@overload
def message_handler(func: Method) -> Method: ...


@overload
def message_handler(
    func: None = None, *, strict: bool = True, match: Match | None = None
) -> Callable[[Method], Method]: ...


def message_handler(
    func: Method | None = None, *, strict: bool = True, match: Match | None = None
) -> Method | Callable[[Method], Method]:
    """Handle messages of the annotated type or union, sent or published: `async def f(self, message: T, ctx) -> R`.

    Subclasses of T are handled, too, unless a handler names them. If several handlers take a type, the first in
    alphabetical order whose `match(message, ctx)` is true is called. `strict`: a message or result whose type differs
    from what annotated is an error (CantHandleException, ValueError); otherwise it logs a warning.
    """
    return _decorator(func, strict, match, lambda ctx: True)


@overload
def event(func: Method) -> Method: ...


@overload
def event(func: None = None, *, strict: bool = True, match: Match | None = None) -> Callable[[Method], Method]: ...


def event(
    func: Method | None = None, *, strict: bool = True, match: Match | None = None
) -> Method | Callable[[Method], Method]:
    """As message_handler, for published messages only. Nobody waits, so it returns None."""
    return _decorator(func, strict, match, lambda ctx: not ctx.is_rpc)


@overload
def rpc(func: Method) -> Method: ...


@overload
def rpc(func: None = None, *, strict: bool = True, match: Match | None = None) -> Callable[[Method], Method]: ...


def rpc(
    func: Method | None = None, *, strict: bool = True, match: Match | None = None
) -> Method | Callable[[Method], Method]:
    """As message_handler, for requests only. The sender waits for the result."""
    return _decorator(func, strict, match, lambda ctx: ctx.is_rpc)


class RoutedAgent(BaseAgent):
    """An agent whose decorated methods handle its messages. It logs a message without a handler."""

    _routes: ClassVar[dict[type, list[MessageHandler]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._routes = {}
        for name in sorted(dir(cls)):
            handler = getattr(cls, name, None)
            if getattr(handler, "is_message_handler", False):
                for target in cast(MessageHandler, handler).target_types:
                    cls._routes.setdefault(target, []).append(cast(MessageHandler, handler))

    async def on_message_impl(self, message: Any, ctx: MessageContext) -> Any:
        for kind in type(message).__mro__:
            for handler in self._routes.get(kind, ()):
                if handler.router(message, ctx):
                    return await handler(self, message, ctx)
        return await self.on_unhandled_message(message, ctx)

    async def on_unhandled_message(self, message: Any, ctx: MessageContext) -> None:
        """Called for a message without a handler; override it to be strict."""
        logger.info("%s has no handler for a message of type %s", self.id, type(message).__name__)

    @classmethod
    def handled_types(cls) -> Iterable[type]:
        return cls._routes.keys()


def types_of(hint: object) -> list[object]:
    """Return the types of an annotation: all members of a union."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(hint) for part in types_of(member)]
    return [types.NoneType if hint is None else hint]


def class_of(hint: object) -> type | None:
    """Return the runtime class of an annotated type; None for any."""
    if hint is Any or hint is object:
        return None
    if typing.is_typeddict(hint):
        return dict
    found = typing.get_origin(hint) or hint
    return found if isinstance(found, type) else None


def _decorator(
    func: Method | None, strict: bool, match: Match | None, fits: Callable[[MessageContext], bool]
) -> Method | Callable[[Method], Method]:
    def decorate(method: Method) -> Method:
        targets, produces = _annotated(method)
        allowed = [class_of(hint) for hint in produces]

        @functools.wraps(method)
        async def wrapper(self: Any, message: Any, ctx: MessageContext) -> Any:
            if not isinstance(message, tuple(targets)):
                problem = f"{method.__qualname__} takes {_named(targets)}, not {type(message).__name__}"
                if strict:
                    raise CantHandleException(problem)
                logger.warning(problem)
            result = await method(self, message, ctx)
            if None not in allowed and not isinstance(result, tuple(one for one in allowed if one is not None)):
                problem = f"{method.__qualname__} returns {_named(produces)}, not {type(result).__name__}"
                if strict:
                    raise ValueError(problem)
                logger.warning(problem)
            return result

        handler = cast(MessageHandler, wrapper)
        handler.target_types = targets
        handler.produces_types = produces
        handler.is_message_handler = True
        handler.router = lambda message, ctx: fits(ctx) and (match is None or match(message, ctx))
        return cast(Method, wrapper)

    return decorate if func is None else decorate(func)


def _annotated(method: Callable[..., object]) -> tuple[list[type], list[object]]:
    """Return the message types and result types of a handler. Raises ConfigurationError."""
    where = f"handler {method.__qualname__}"
    names = list(inspect.signature(method).parameters)
    if len(names) != 3 or not inspect.iscoroutinefunction(method):
        raise ConfigurationError(f"{where}: write async def f(self, message: T, ctx: MessageContext) -> R")
    try:
        hints = typing.get_type_hints(method, localns=_locals_of_class_body())
    except NameError as error:
        raise ConfigurationError(f"{where}: an annotation has an unknown name: {error}") from error
    for name in (names[1], "return"):
        if name not in hints:
            raise ConfigurationError(f"{where} has no annotation for {name!r}, which selects the handler")
    targets = []
    for hint in types_of(hints[names[1]]):
        target = class_of(hint)
        targets.append(object if target is None else target)
    return targets, types_of(hints["return"])


def _locals_of_class_body() -> dict[str, object]:
    """Return the local names of the functions around a class, to resolve annotations that are text."""
    found: dict[str, object] = {}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_locals is not frame.f_globals:
            for name, value in frame.f_locals.items():
                found.setdefault(name, value)
        frame = frame.f_back
    return found


def _named(hints: Iterable[object]) -> str:
    return " | ".join(getattr(hint, "__name__", str(hint)) for hint in hints)


class ClosureContext(Protocol):
    """The agent, as its function sees it. Any: the user's message types."""

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
    """An agent from a function: `async def f(agent: ClosureContext, message: T, ctx) -> R`.

    It lives in the process that registered it and has no state. Programs often use one to get results out of the
    runtime.
    """

    def __init__(self, description: str, closure: Closure, *, unknown_type_policy: UnknownTypePolicy = "warn") -> None:
        if not AgentInstantiationContext.is_in_factory_call():
            raise RuntimeError("only the runtime creates a ClosureAgent: use ClosureAgent.register_closure")
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
        """Do nothing: a function has no state."""

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
        """Register the function as a type of agents with these subscriptions.

        `unknown_type_policy` applies to messages of types that the function does not take.
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
    """Return the types of the second argument. Raises ConfigurationError."""
    where = f"closure {getattr(closure, '__qualname__', closure)!s}"
    names = list(inspect.signature(closure).parameters)
    hints = typing.get_type_hints(closure)
    if len(names) != 3 or names[1] not in hints or "return" not in hints:
        raise ConfigurationError(f"{where}: write async def f(agent: ClosureContext, message: T, ctx: …) -> R")
    return tuple(class_of(hint) or object for hint in types_of(hints[names[1]]))


def native() -> Vocabulary:
    """Return this package's own types as a Vocabulary."""
    return Vocabulary(
        agent_id=AgentId,
        agent_type=AgentType,
        topic_id=TopicId,
        message_context=MessageContext,
        metadata=AgentMetadata,
        cancellation_token=CancellationToken,
        handler_scope=lambda id, message, context: MessageHandlerContext.populate_context(id),
        factory_scope=lambda runtime, id: AgentInstantiationContext.populate_context((runtime, id)),
        keeps_state=_keeps_state,
        topic_of=topic_reader(TypeSubscription, TypePrefixSubscription),
        drop_message=DropMessage,
    )


def _keeps_state(agent: object) -> bool:
    saves = getattr(type(agent), "save_state", None)
    return saves not in (None, BaseAgent.save_state, ClosureAgent.save_state)
