"""What commands of the in-process broker answer: RESP2 shapes, and the error replies they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from runtime_core.bus.connection import Reply
from runtime_core.errors import ServerError

Args: TypeAlias = tuple[bytes, ...]
"""The words after a command's name."""


class Status(bytes):
    """A simple string, as in `OK`: the same bytes for a client, a table `{ok=…}` for a script."""

    __slots__ = ()


OK = Status(b"OK")

NO_LIMIT = 1 << 62
"""The `most` of a command that takes any number of words."""


class Command(NamedTuple):
    """One entry of the command table. `least` and `most` count the words after the name."""

    handler: Callable[[Args], Reply]
    least: int
    most: int
    writes: bool


def syntax_error() -> ServerError:
    """The reply to options that fit no form of the command."""
    return ServerError("ERR syntax error")


def wrong_type() -> ServerError:
    """The reply to a command against a key that holds another type."""
    return ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")


def wrong_arity(command: str) -> ServerError:
    """The reply to too few or too many words; `command` is in lower case, as in `xgroup|create`."""
    return ServerError(f"ERR wrong number of arguments for '{command}' command")


def shown(word: bytes) -> str:
    """A word as it appears inside an error text."""
    return word.decode("utf-8", "replace")
