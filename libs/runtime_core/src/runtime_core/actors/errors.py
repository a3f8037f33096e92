"""Errors of the actor runtime, their transport to the caller, and the token that cancels a request."""

from __future__ import annotations

import threading
from asyncio import Future
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from runtime_core.actors.checks import find_class, name_of
from runtime_core.errors import Deadlock, InvalidInput, WeftError


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


class CancellationToken:
    """Cancels the futures that are linked to it, and calls its callbacks, once. Thread-safe.

    Callbacks run in the thread that cancels, outside the lock, so a callback may use the token.
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Cancel. A repeat does nothing."""
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_cancelled(self) -> bool:
        return self._cancelled

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call the callback at the cancellation; at once if the token is cancelled."""
        with self._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def remove_callback(self, callback: Callable[[], None]) -> None:
        """Remove a callback, so that a long-lived token does not collect them."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def link_future(self, future: Future[Any]) -> Future[Any]:  # Any: futures of all result types
        """Cancel the future with this token."""

        def cancel() -> None:
            future.cancel()

        self.add_callback(cancel)
        return future


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
        except Exception:  # a constructor of the user's takes other arguments, or refuses these
            error = found.__new__(found)
            error.args = (message,)
            return error
