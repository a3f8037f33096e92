"""How an error of a handler reaches who waits for the answer: by class name and text, and as the same class again."""

from __future__ import annotations

from runtime_core.runtime.classes import find_class, name_of
from runtime_core.runtime.errors import RemoteError

UNDELIVERABLE = "UnknownName"
"""How the broker says that no agent has the name that was asked."""
_NOT_FROM_ELSEWHERE = (RemoteError, KeyboardInterrupt, SystemExit, GeneratorExit)
"""Classes that no message may raise here."""
_OF_THE_CORE = {"TimeLimit": TimeoutError, "HumanTimeout": TimeoutError, "RequestTimeout": TimeoutError}


def text_of(error: BaseException) -> str:
    """What the error says. Of one that was given a single text, that text: `str` of a KeyError would quote it."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        return error.args[0]
    return str(error)


class Failures:
    """Makes errors again from what travelled. One for each runtime."""

    def __init__(self) -> None:
        self._seen: dict[str, type[BaseException]] = {}

    def name(self, error: BaseException) -> str:
        """The name under which the error travels; classes made inside of functions are found again by it too."""
        name = error.type if isinstance(error, RemoteError) else name_of(type(error))
        if not isinstance(error, RemoteError):
            self._seen[name] = type(error)
        return name

    def error(self, type: str, message: str) -> BaseException:
        """The error of this class with this text; RemoteError where this process does not have the class."""
        found = self._seen.get(type) or _OF_THE_CORE.get(type) or find_class(type)
        if found is None or not issubclass(found, BaseException) or issubclass(found, _NOT_FROM_ELSEWHERE):
            return RemoteError(type, message)
        try:
            return found(message)
        except Exception:  # a constructor of the user's takes other arguments, or refuses these
            error = found.__new__(found)
            error.args = (message,)
            return error
