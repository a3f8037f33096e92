"""What may become of a call that got no result, from the SDK's errors to three classes of ours."""

from __future__ import annotations

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, REQUEST_TIMEOUT
from pydantic import ValidationError

from runtime_core.declare.declaration import one_line
from runtime_core.telemetry.redaction import kept

NOT_SENT = "dev.weft/not-sent"
"""In the data of an error that our own client made: no server has looked at the request."""


class NotSent(Exception):
    """The server has not seen the call; the session is of no more use."""


class Lost(Exception):
    """The connection was lost, or the server failed: whether the call took effect is not known."""

    def __init__(self, message: str, *, broken: bool) -> None:
        super().__init__(message)
        self.broken = broken
        """Whether the session is of no more use."""


class Refused(Exception):
    """The server has answered with an error: it would answer the same again."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


def told(error: Exception) -> NotSent | Lost | Refused:
    """What an error of the SDK says of the call."""
    if isinstance(error, MCPError):
        return _told(error)
    if isinstance(error, ValidationError | RuntimeError):
        # The server's answer is not what the protocol, or the tool's own output schema, says.
        return Refused("InvalidResult", kept(" ".join(str(error).split()), 1000))
    return Lost(one_line(error), broken=True)


def _told(error: MCPError) -> NotSent | Lost | Refused:
    code, message, data = error.error.code, error.error.message, error.error.data
    if isinstance(data, dict) and NOT_SENT in data:
        # One request of several on their own connections: the session goes on.
        return NotSent(message) if data[NOT_SENT] else Lost(message, broken=False)
    if code == CONNECTION_CLOSED:
        return Lost(message, broken=True)
    if code in (INTERNAL_ERROR, REQUEST_TIMEOUT):
        return Lost(message, broken=False)
    return Refused("MCPError", f"{message} (code {code})")


def cause_of(error: BaseException) -> BaseException:
    """The first plain error inside a group: what a connection ended with."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
