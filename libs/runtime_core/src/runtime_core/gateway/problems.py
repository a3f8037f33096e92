"""Errors as `application/problem+json` (RFC 9457), each with the field that is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from runtime_core.bus.durability import NotDurable
from runtime_core.bus.tasks import NotYet
from runtime_core.errors import BusError, InvalidInput, Rejected

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 1.0
"""When to send a request again that the broker could not take."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of error: the last part of its `type`, its status and its title."""

    name: str
    status: HTTPStatus
    title: str


BODY = Kind("body", HTTPStatus.BAD_REQUEST, "The body cannot be read")
PARAMETER = Kind("parameter", HTTPStatus.BAD_REQUEST, "A parameter or header is wrong")
FIELD = Kind("field", HTTPStatus.UNPROCESSABLE_ENTITY, "A field of the body is wrong")
NO_ROUTE = Kind("no-route", HTTPStatus.NOT_FOUND, "There is no such path")
NO_TASK = Kind("no-task", HTTPStatus.NOT_FOUND, "There is no such task")
METHOD = Kind("method", HTTPStatus.METHOD_NOT_ALLOWED, "The path does not take this method")
SLOW = Kind("slow", HTTPStatus.REQUEST_TIMEOUT, "The body did not arrive in time")
CONFLICT = Kind("conflict", HTTPStatus.CONFLICT, "The request conflicts with the state of a task")
TOO_LARGE = Kind("too-large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large")
MEDIA = Kind("media-type", HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body is not JSON")
NO_HOST = Kind("host", HTTPStatus.MISDIRECTED_REQUEST, "The request is for another host")
RATE = Kind("rate", HTTPStatus.TOO_MANY_REQUESTS, "Too many requests")
STREAMS = Kind("streams", HTTPStatus.TOO_MANY_REQUESTS, "Too many open streams")
OVERLOADED = Kind("overloaded", HTTPStatus.SERVICE_UNAVAILABLE, "Weft cannot take the request now")
DEFECT = Kind("defect", HTTPStatus.INTERNAL_SERVER_ERROR, "The gateway failed")
KINDS = (
    BODY, PARAMETER, FIELD, NO_ROUTE, NO_TASK, METHOD, SLOW, CONFLICT, TOO_LARGE, MEDIA, NO_HOST, RATE, STREAMS,
    OVERLOADED, DEFECT,
)  # fmt: skip


@dataclass(eq=False)
class Problem(Exception):
    """An error that ends a request, or one item of a batch."""

    kind: Kind
    detail: str
    field: str = ""
    """What is wrong: a path in the body (`conf.max_steps`), a parameter or a header; empty: the request as a whole."""
    retry_after_seconds: float | None = None
    headers: Mapping[str, str] | None = None

    def document(self) -> dict[str, object]:
        """Return the members of the problem."""
        found: dict[str, object] = {
            "type": f"urn:weft:problem:{self.kind.name}",
            "title": self.kind.title,
            "status": self.kind.status.value,
            "detail": self.detail,
        }
        if self.field:
            found["field"] = self.field
        if self.retry_after_seconds is not None:
            found["retry_after_seconds"] = self.retry_after_seconds
        return found

    def response(self) -> Response:
        headers = dict(self.headers or {})
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))
        return Response(msgspec.json.encode(self.document()), self.kind.status.value, headers, MEDIA_TYPE)


def no_task(task_id: str) -> Problem:
    """Return the problem of a task that does not exist."""
    return Problem(NO_TASK, f"there is no task {task_id!r}, or its retention time is over", "task_id")


def problem_of(error: Exception) -> Problem | None:
    """Return an error of Weft as a problem; None for one that nobody expected."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, NotYet):
        return Problem(OVERLOADED, f"no handler has declared its agents yet ({error.message})", "", RETRY_SECONDS)
    if isinstance(error, NotDurable):
        return Problem(OVERLOADED, f"{error}; send the same request again", "", error.retry_after_seconds)
    if isinstance(error, Rejected):
        if error.retry_after_seconds is not None:
            return Problem(OVERLOADED, error.message, "", error.retry_after_seconds)
        if error.field == "id":
            return Problem(CONFLICT, "was used before with other content", "Idempotency-Key")
        if error.field == "task_id":
            return Problem(CONFLICT, error.message, error.field)
    if isinstance(error, InvalidInput):
        if error.field == "data":
            return Problem(BODY, error.message)
        return Problem(FIELD, error.message, error.field.removeprefix("data."))
    if isinstance(error, BusError):
        return Problem(OVERLOADED, "the broker does not answer; send the same request again", "", RETRY_SECONDS)
    return None
