"""The actor style: a class whose methods handle messages by type, with state that outlives the process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from runtime_core.declare.declaration import Place, arguments_of, is_async, needed_argument
from runtime_core.errors import ConfigurationError

# What a handler returns and awaits is the user's; only that it is a method and async is asked for.
Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, object]])

_MARK = "__weft_handles__"


class Agent:
    """Base of agents with durable state.

    An instance is made without arguments for each run and forgotten after it: what shall last belongs into
    `ctx.state`, which holds JSON values for the agent's key. `state`, a dict on the class, says what a new key
    starts with.
    """

    state: ClassVar[dict[str, object]] = {}


@dataclass(frozen=True, slots=True)
class Handler:
    """One method of an agent and the type of the messages it takes."""

    message: str
    """The name in `{"type": …, "data": …}`."""
    message_type: object
    method: str
    function: Callable[..., object]


def handles(message_type: object) -> Callable[[Method], Method]:
    """Mark an async method `(self, message, ctx)` of an Agent as the handler of messages of this type.

    `message_type` is a class (pydantic model, dataclass, TypedDict, `str` …); its name is the message's type on
    the wire. A method may handle several types: mark it once for each.
    """

    def mark(method: Method) -> Method:
        marked: tuple[object, ...] = getattr(method, _MARK, ())
        setattr(method, _MARK, (*marked, message_type))
        return method

    return mark


def handlers_of(what: str, agent: type[Agent], place: Place) -> dict[str, Handler]:
    """The handlers of an agent's class by message name. Raises ConfigurationError for a class that cannot work."""
    found: dict[str, Handler] = {}
    for name in dir(agent):
        function = inspect.getattr_static(agent, name)
        for message_type in getattr(function, _MARK, ()):
            handler = Handler(_name_of(what, message_type, name, place), message_type, name, function)
            other = found.get(handler.message)
            if other is not None:
                raise ConfigurationError(
                    f"{what} ({place}): {other.method} and {name} both handle {handler.message}: keep one"
                )
            _check_handler(what, handler, place)
            found[handler.message] = handler
    if not found:
        raise ConfigurationError(
            f"{what} ({place}) handles nothing: mark an async method of {agent.__name__} with @handles(MessageType)"
        )
    return found


def check_constructor(what: str, agent: type[Agent], place: Place) -> None:
    """Raises ConfigurationError where the class cannot be made without arguments, or its `state` is no dict."""
    needed = needed_argument(agent)
    if needed is not None:
        raise ConfigurationError(
            f"{what} ({place}): {agent.__name__}() needs {needed!r}: an instance is made for each run, "
            "so give it a default"
        )
    if not isinstance(inspect.getattr_static(agent, "state"), dict):
        raise ConfigurationError(f"{what} ({place}): {agent.__name__}.state is not a dict: write state = {{…}}")


def _name_of(what: str, message_type: object, method: str, place: Place) -> str:
    name = getattr(message_type, "__name__", None)
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{what} ({place}): {method} handles {message_type!r}, which has no name: give a class"
        )
    return name


def _check_handler(what: str, handler: Handler, place: Place) -> None:
    where = f"{what}, method {handler.method!r}"
    if not is_async(handler.function):
        raise ConfigurationError(f"{where} ({place}) is not async: write async def {handler.method}")
    if len(arguments_of(where, handler.function, place)) != 3:
        raise ConfigurationError(
            f"{where} ({place}) has other arguments: write async def {handler.method}(self, message, ctx)"
        )
