"""Errors of the actor runtime and the checks of arguments that raise them."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from runtime_core.declare.schema import encode
from runtime_core.errors import ConfigurationError, Deadlock, InvalidInput, WeftError
from runtime_core.settings import SETTING_NAME


def name_of(cls: type) -> str:
    """Return `module.Outer.Inner`; a built-in class has no module in its name."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def find_class(name: str) -> type | None:
    """Return the class of this name in a loaded module, else None.

    Imports nothing: a message must not choose which code runs.
    """
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        module = sys.modules.get(".".join(parts[:at]) or "builtins")
        if module is None:
            continue
        found: object = module
        for part in parts[at:]:
            found = getattr(found, part, None)
        if isinstance(found, type) and name_of(found) == name:
            return found
    return None


# Any and object below: callers may pass anything by mistake.
_AGENT = ("bind_id_and_runtime", "on_message")
_SUBSCRIPTION = ("id", "is_match", "map_to_agent")
_SERIALIZER = ("type_name", "data_content_type", "serialize", "deserialize")
_INTERVENTION = ("on_send", "on_publish", "on_response")
_TOKEN = ("is_cancelled", "add_callback")


def check_agent_id(field: str, value: object) -> None:
    """Raises InvalidInput."""
    if not (_is_text(value, "type") and _is_text(value, "key")):
        raise InvalidInput(field, f"{value!r} is not an agent's id: pass AgentId(type, key)")


def check_topic_id(field: str, value: object) -> None:
    """Raises InvalidInput."""
    if not (_is_text(value, "type") and _is_text(value, "source")):
        raise InvalidInput(field, f"{value!r} is not a topic's id: pass TopicId(type, source)")


def check_message(sender: object, token: object, message_id: object) -> None:
    """Check the arguments that requests and publications share. Raises InvalidInput."""
    if sender is not None:
        check_agent_id("sender", sender)
    if token is not None:
        _check_has("cancellation_token", token, _TOKEN, "is not a token: pass a CancellationToken(), or nothing")
    if message_id is not None and not (isinstance(message_id, str) and message_id):
        raise InvalidInput("message_id", f"{message_id!r} is not an id: pass a unique string, or nothing")


def check_seconds(field: str, value: object) -> None:
    """Raises InvalidInput."""
    if not _is_number(value) or not value > 0:
        raise InvalidInput(field, f"{value!r} is not a time limit: pass seconds above 0, or nothing")


def agent_type_of(value: object) -> Any:
    """Return the name of a type, which is a string or an AgentType. Raises InvalidInput."""
    if isinstance(value, str):
        return value
    if not _is_text(value, "type"):
        raise InvalidInput("type", f"{value!r} is not an agent's type: pass a string or AgentType(…)")
    return value.type  # type: ignore[attr-defined]  # checked above


def check_factory(type: str, value: object) -> None:
    """Raises InvalidInput."""
    if not callable(value):
        raise InvalidInput("agent_factory", f"{value!r} of type {type!r} is not callable: pass a function or a class")


def check_agent(what: str, value: object) -> None:
    """Raises InvalidInput. `what` is as in `'the factory of agents of type …'`."""
    _check_has("agent", value, _AGENT, f"of {what} is not an agent: derive its class from BaseAgent")


def check_class(value: object) -> None:
    """Raises InvalidInput."""
    if not isinstance(value, type):
        raise InvalidInput("type", f"{value!r} is not a class: pass the expected class of the agent's object")


def encoded_state(state: object) -> bytes:
    """Return an agent's state as JSON. Raises InvalidInput."""
    if not isinstance(state, Mapping):
        raise InvalidInput("state", f"{state!r} is not a state: pass a JSON object, as save_state returns it")
    return encode(state, "state")


def check_saved(state: object, of_subscription: Sequence[str], of_message: Sequence[str], names: Sequence[str]) -> None:
    """Check the state of a runtime; `names` are the keys of subscriptions and messages. Raises InvalidInput."""
    if not isinstance(state, Mapping):
        raise InvalidInput("state", f"{state!r} is not a saved state: pass a result of Runtime.save_state")
    for name, fields in zip(names, (of_subscription, of_message), strict=True):
        entries = state.get(name, ())
        if not isinstance(entries, list | tuple):
            raise InvalidInput(f"state[{name!r}]", f"is a {type(entries).__name__}: pass the saved list")
        for at, entry in enumerate(entries):
            missing = [field for field in fields if not isinstance(entry, Mapping) or field not in entry]
            if missing:
                raise InvalidInput(f"state[{name!r}][{at}]", f"has no {', '.join(missing)}: pass it as it was saved")


def check_subscription(value: object) -> None:
    """Raises InvalidInput."""
    _check_has(
        "subscription",
        value,
        _SUBSCRIPTION,
        "is not a subscription: pass a TypeSubscription, or an object with the same methods",
    )


def check_serializer(value: object) -> None:
    """Check a serializer or a sequence of them. Raises InvalidInput."""
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        _check_has("serializer", each, _SERIALIZER, "is not a serializer")


def checked_interventions(handlers: Iterable[object] | None) -> list[Any]:
    """Return the handlers as a list. Raises ConfigurationError."""
    if not isinstance(handlers, Iterable | None):
        raise ConfigurationError(f"intervention_handlers is {handlers!r}: pass a list of handlers")
    found = list(handlers or ())
    for handler in found:
        try:
            if isinstance(handler, type):
                raise InvalidInput("intervention_handlers", f"{handler.__name__} is a class: pass an object of it")
            remedy = "is not a handler: derive its class from DefaultInterventionHandler"
            _check_has("intervention_handlers", handler, _INTERVENTION, remedy)
        except InvalidInput as error:
            raise ConfigurationError(str(error)) from None
    return found


def check_settings(lease_seconds: object, shutdown_seconds: object, max_instances: object) -> None:
    """Raises ConfigurationError."""
    if not _is_number(lease_seconds) or not lease_seconds > 0:
        raise ConfigurationError(f"lease_seconds is {lease_seconds!r}: pass seconds above 0")
    if not _is_number(shutdown_seconds) or shutdown_seconds < 0:
        raise ConfigurationError(f"shutdown_seconds is {shutdown_seconds!r}: pass seconds, 0 for no wait")
    if not isinstance(max_instances, int) or isinstance(max_instances, bool) or max_instances < 1:
        raise ConfigurationError(f"max_instances is {max_instances!r}: pass a whole number from 1")


def check_broker(url: object, namespace: object) -> None:
    """Raises ConfigurationError."""
    if url is not None and not isinstance(url, str):
        raise ConfigurationError(f"url is {url!r}: pass the broker's URL as a string, or nothing")
    if namespace is not None and not (isinstance(namespace, str) and SETTING_NAME.fullmatch(namespace)):
        raise ConfigurationError(f"namespace is {namespace!r}: pass 1 to 64 letters, digits, `_` or `-`, or nothing")


def check_flags(**flags: object) -> None:
    """Raises ConfigurationError."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} is {value!r}: pass True or False")


def _check_has(field: str, value: object, names: Sequence[str], remedy: str) -> None:
    missing = [name for name in names if not hasattr(value, name)]
    if missing or isinstance(value, type):
        lacks = f" (it has no {', '.join(missing)})" if missing else ""
        raise InvalidInput(field, f"{value!r} {remedy}{lacks}")


def _is_text(value: object, name: str) -> bool:
    return not isinstance(value, type) and isinstance(getattr(value, name, None), str)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class InvalidName(InvalidInput, ValueError):
    """A type, key or source that cannot name an agent or a topic. Also a ValueError, as in other runtimes."""


class UndeliverableException(WeftError):
    """A message without a recipient: no process in the namespace has registered its type."""


class CantHandleException(WeftError):
    """An agent got a message that none of its handlers takes."""


class MessageDroppedException(WeftError):
    """An intervention handler dropped the message or its response."""


class NotAccessibleError(WeftError):
    """The agent object lives in another process."""


class RuntimeStopped(WeftError):
    """The runtime was stopped while a caller waited. The message stays on the broker and is handled later."""


class SerializationError(InvalidInput, ValueError):
    """A message without a serializer, or one that its serializer cannot write or read. The text names its type."""


class RemoteError(WeftError):
    """A handler failed with an error whose class this process does not have.

    `type` is the module-qualified name of that class, `message` the error's text, which may be empty.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.message = message


REMEMBERED_ERRORS = 1000
UNDELIVERABLE = "UnknownName"
"""The broker's error type for an unknown agent name."""
_NOT_FROM_ELSEWHERE = (RemoteError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Classes that no message may raise here."""
_OF_THE_CORE = {"TimeLimit": TimeoutError, "HumanTimeout": TimeoutError, "RequestTimeout": TimeoutError}


def text_of(error: BaseException) -> str:
    """Return the error's text. For a single string argument this is that string: `str` of a KeyError would quote it."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        return error.args[0]
    return str(error)


class Failures:
    """Remembers errors of handlers, and recreates errors from their type and text. Each runtime has one."""

    def __init__(self) -> None:
        self._seen: dict[str, type[BaseException]] = {}
        self._raised: OrderedDict[str, BaseException] = OrderedDict()

    def note_raised(self, place: str, error: BaseException) -> None:
        """Keep the error object for a caller in this process, who gets it instead of a copy."""
        self._raised[place] = error
        if len(self._raised) > REMEMBERED_ERRORS:
            self._raised.popitem(last=False)

    def raised(self, place: str, type: str) -> BaseException | None:
        """Return the error object that a handler in this process raised, once."""
        raised = self._raised.pop(place, None)
        return raised if raised is not None and self.name(raised) == type else None

    def name(self, error: BaseException) -> str:
        """Return the error's type name. Classes defined inside functions are found again by it."""
        name = error.type if isinstance(error, RemoteError) else name_of(type(error))
        if not isinstance(error, RemoteError):
            self._seen[name] = type(error)
        return name

    def error(self, type: str, message: str) -> BaseException:
        """Return the error of this class with this text; RemoteError if this process does not have the class."""
        if type == Deadlock.__name__:
            return Deadlock(type, message)
        found = self._seen.get(type) or _OF_THE_CORE.get(type) or find_class(type)
        if found is None or not issubclass(found, BaseException) or issubclass(found, _NOT_FROM_ELSEWHERE):
            return RemoteError(type, message)
        try:
            return found(message)
        except Exception:  # the user's constructor takes different arguments, or refuses these
            error = found.__new__(found)
            error.args = (message,)
            return error
