"""How the bus reaches a broker: one small protocol, implemented by `resp` (a server) and `memory` (this process)."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

Argument = bytes | str | int | float
Reply = bytes | int | None | list["Reply"]


class Transport(Protocol):
    """One client of a broker.

    Calls are sent in the order in which they are made and answered in that order. A call that meets a broken
    connection is sent again after the reconnect, so every call must be one that may be repeated; it ends with
    `BusUnavailable` only when the transport is closed. Error replies raise `ServerError`.
    """

    def call(self, *args: Argument) -> Awaitable[Reply]:
        """Send one command; several calls of one loop tick travel in one write."""
        ...

    async def blocking(self, *args: Argument) -> Reply:
        """Send a command that may wait on the broker, on a connection of its own.

        Raises `BusUnavailable` when that connection breaks: a read may then have handed out entries whose
        reply was lost, which the caller must look for.
        """
        ...

    @property
    def reconnects(self) -> int:
        """How often the connection for calls was made again."""
        ...

    async def close(self) -> None:
        """Fail what is open and let go of the connections."""
        ...
