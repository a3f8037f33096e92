"""Agents that pick a handler by the message's type."""

from __future__ import annotations

import functools
import inspect
import logging
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, cast, overload

from runtime_core.actors.base_agent import BaseAgent
from runtime_core.actors.errors import CantHandleException
from runtime_core.actors.message import MessageContext
from runtime_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Any: agents, messages and results are the user's own types.
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])
Match = Callable[[Any, MessageContext], bool]


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
    """Handle messages of the annotated type (or union), sent or published: `async def f(self, message: T, ctx) -> R`.

    Subclasses of T are handled too where no handler names them. Of several handlers of a type, in alphabetical
    order, the first whose `match(message, ctx)` is true is called. `strict`: a message or a result of another type
    than annotated is an error (CantHandleException, ValueError); else a warning.
    """
    return _decorator(func, strict, match, lambda ctx: True)


@overload
def event(func: Method) -> Method: ...


@overload
def event(func: None = None, *, strict: bool = True, match: Match | None = None) -> Callable[[Method], Method]: ...


def event(
    func: Method | None = None, *, strict: bool = True, match: Match | None = None
) -> Method | Callable[[Method], Method]:
    """As message_handler, for published messages only: nobody waits, so it returns None."""
    return _decorator(func, strict, match, lambda ctx: not ctx.is_rpc)


@overload
def rpc(func: Method) -> Method: ...


@overload
def rpc(func: None = None, *, strict: bool = True, match: Match | None = None) -> Callable[[Method], Method]: ...


def rpc(
    func: Method | None = None, *, strict: bool = True, match: Match | None = None
) -> Method | Callable[[Method], Method]:
    """As message_handler, for requests only: the sender waits for what it returns."""
    return _decorator(func, strict, match, lambda ctx: ctx.is_rpc)


class RoutedAgent(BaseAgent):
    """An agent whose decorated methods handle its messages. What no handler takes is logged."""

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
        """Called for a message that no handler takes; override it to be strict."""
        logger.info("%s has no handler for a message of type %s", self.id, type(message).__name__)

    @classmethod
    def handled_types(cls) -> Iterable[type]:
        return cls._routes.keys()


def types_of(hint: object) -> list[object]:
    """The types of an annotation: of a union all of its members."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(hint) for part in types_of(member)]
    return [types.NoneType if hint is None else hint]


def class_of(hint: object) -> type | None:
    """The class that objects of an annotated type have at run time; None for any."""
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
    """Message types and result types of a handler. Raises ConfigurationError."""
    where = f"handler {method.__qualname__}"
    names = list(inspect.signature(method).parameters)
    if len(names) != 3 or not inspect.iscoroutinefunction(method):
        raise ConfigurationError(f"{where}: write async def f(self, message: T, ctx: MessageContext) -> R")
    try:
        hints = typing.get_type_hints(method, localns=_locals_of_class_body())
    except NameError as error:
        raise ConfigurationError(f"{where}: an annotation names what is not known there, {error}") from error
    for name in (names[1], "return"):
        if name not in hints:
            raise ConfigurationError(f"{where} has no annotation for {name!r}: it is picked by the message's type")
    targets = []
    for hint in types_of(hints[names[1]]):
        target = class_of(hint)
        targets.append(object if target is None else target)
    return targets, types_of(hints["return"])


def _locals_of_class_body() -> dict[str, object]:
    """Names of the functions around a class: an annotation as text may mean a class that one of them made."""
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
