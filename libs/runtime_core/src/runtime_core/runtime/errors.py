"""What the runtime of agents raises besides the core's errors."""

from __future__ import annotations

from runtime_core.errors import InvalidInput, WeftError


class InvalidName(InvalidInput, ValueError):
    """A type, key or source that cannot name an agent or a topic. A ValueError too, as other runtimes raise it."""


class UndeliverableException(WeftError):
    """A message that has no recipient: its type is registered nowhere in the namespace."""


class CantHandleException(WeftError):
    """An agent got a message that none of its handlers takes."""


class MessageDroppedException(WeftError):
    """An intervention handler dropped the message, or the response to it."""


class NotAccessibleError(WeftError):
    """The agent object lives in another process, so it cannot be handed out here."""


class RuntimeStopped(WeftError):
    """The runtime was stopped while a caller waited. The message stays on the broker and is handled later."""


class SerializationError(InvalidInput, ValueError):
    """A message that has no serializer, or whose serializer cannot write or read it. The text names its type."""


class RemoteError(WeftError):
    """A handler failed with an error whose class this process does not have.

    `type` is the module-qualified name of that class, `message` the error's text (maybe empty).
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}" if message else type)
        self.type = type
        self.message = message
