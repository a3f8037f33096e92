"""Reads requests: bounded bodies, headers and parameters, and limits per caller and per replica.

Every error names its part of the request.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from runtime_core.base.text import choices
from runtime_core.bus.tasks import NotYet
from runtime_core.errors import BusError, InvalidInput, NotDurable, Rejected, StoreUnavailable
from runtime_core.wire import codec
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import as_object, refuse_unknown
from runtime_core.wire.ids import MAX_NAME_CHARACTERS, has_control

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 1.0
"""When to repeat a request that the broker could not take."""


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A kind of error: the last part of its `type`, its status and its title."""

    name: str
    status: HTTPStatus
    title: str


BODY = ProblemKind("body", HTTPStatus.BAD_REQUEST, "The body cannot be read")
PARAMETER = ProblemKind("parameter", HTTPStatus.BAD_REQUEST, "A parameter or header is wrong")
FIELD = ProblemKind("field", HTTPStatus.UNPROCESSABLE_ENTITY, "A field of the body is wrong")
NO_ROUTE = ProblemKind("no-route", HTTPStatus.NOT_FOUND, "There is no such path")
NO_TASK = ProblemKind("no-task", HTTPStatus.NOT_FOUND, "There is no such task")
NO_LETTER = ProblemKind("no-dead-letter", HTTPStatus.NOT_FOUND, "There is no such dead letter")
NO_SCHEDULE = ProblemKind("no-schedule", HTTPStatus.NOT_FOUND, "There is no such schedule")
NO_TRAJECTORY = ProblemKind("no-trajectory", HTTPStatus.NOT_FOUND, "The task has no trajectory yet")
METHOD = ProblemKind("method", HTTPStatus.METHOD_NOT_ALLOWED, "The path does not take this method")
SYNTAX = ProblemKind("syntax", HTTPStatus.BAD_REQUEST, "The request is not valid HTTP")
HEAD = ProblemKind("head", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The head of the request is too large")
SLOW = ProblemKind("slow", HTTPStatus.REQUEST_TIMEOUT, "The request did not arrive in time")
CONFLICT = ProblemKind("conflict", HTTPStatus.CONFLICT, "The request conflicts with the state of a task")
TOO_LARGE = ProblemKind("too-large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large")
MEDIA = ProblemKind("media-type", HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body is not JSON")
UNAUTHORIZED = ProblemKind("unauthorized", HTTPStatus.UNAUTHORIZED, "The request has no valid API key or token")
FORBIDDEN = ProblemKind("forbidden", HTTPStatus.FORBIDDEN, "The API key or token does not allow this")
NO_HOST = ProblemKind("host", HTTPStatus.MISDIRECTED_REQUEST, "The request is for another host")
RATE = ProblemKind("rate", HTTPStatus.TOO_MANY_REQUESTS, "Too many requests")
STREAMS = ProblemKind("streams", HTTPStatus.TOO_MANY_REQUESTS, "Too many open streams")
OVERLOADED = ProblemKind("overloaded", HTTPStatus.SERVICE_UNAVAILABLE, "Weft cannot take the request now")
NO_STORE = ProblemKind("no-store", HTTPStatus.SERVICE_UNAVAILABLE, "The gateway has no trajectory store")
NO_APP = ProblemKind("no-app", HTTPStatus.SERVICE_UNAVAILABLE, "The gateway has no app")
REPLAY = ProblemKind("replay", HTTPStatus.BAD_GATEWAY, "The code of the app could not be run")
DEFECT = ProblemKind("defect", HTTPStatus.INTERNAL_SERVER_ERROR, "The gateway failed")
KINDS = (
    BODY, PARAMETER, FIELD, NO_ROUTE, NO_TASK, NO_LETTER, NO_SCHEDULE, NO_TRAJECTORY, METHOD, SYNTAX, HEAD, SLOW,
    CONFLICT, TOO_LARGE, MEDIA, UNAUTHORIZED, FORBIDDEN, NO_HOST, RATE, STREAMS, OVERLOADED, NO_STORE, NO_APP,
    REPLAY, DEFECT,
)  # fmt: skip


@dataclass(eq=False)
class Problem(Exception):
    """An error that ends a request, or one item of a batch."""

    kind: ProblemKind
    detail: str
    field: str = ""
    """What is wrong: a path in the body (`conf.max_steps`), a parameter or a header; empty: the request as a whole."""
    retry_after_seconds: float | None = None
    headers: Mapping[str, str] | None = None

    def document(self) -> dict[str, object]:
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


def no_letter(letter_id: str) -> Problem:
    """Return the problem of a dead letter that does not exist."""
    return Problem(
        NO_LETTER, f"there is no dead letter {quoted(letter_id)}: it may be redriven or dropped", "letter_id"
    )


def no_schedule(schedule_id: str) -> Problem:
    """Return the problem of a schedule that does not exist."""
    return Problem(NO_SCHEDULE, f"there is no schedule {quoted(schedule_id)}", "schedule_id")


def problem_of(error: Exception) -> Problem | None:
    """Return an error of Weft as a problem; None for an unexpected error."""
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
            return Problem(CONFLICT, "was used before with different content", "Idempotency-Key")
        if error.field == "task_id":
            return Problem(CONFLICT, error.message, error.field)
    if isinstance(error, InvalidInput):
        if error.field == "data":
            return Problem(BODY, error.message)
        return Problem(FIELD, error.message, error.field.removeprefix("data."))
    if isinstance(error, StoreUnavailable):
        return Problem(OVERLOADED, "the trajectory store does not answer; try again", "", RETRY_SECONDS)
    if isinstance(error, BusError):
        return Problem(OVERLOADED, "the broker does not answer; send the same request again", "", RETRY_SECONDS)
    return None


BODIES_MAX_BYTES = 64 * 1024 * 1024
"""Bodies that are in memory at once."""
CALLERS_MAX = 10_000
"""Callers whose rate is remembered."""
BURST_SECONDS = 1.0
"""A caller may send the requests of this time at once."""


class Limits:
    """Counts the bodies in memory, the open streams, and the requests of each caller."""

    def __init__(
        self,
        rate: float,
        streams_max: int,
        caller_streams_percent: int = 100,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rate`: requests per second of one caller; 0: no limit. `caller_streams_percent`: how many of the streams
        that others leave one caller may have.
        """
        self._rate = rate
        self._streams_max = streams_max
        self._caller_streams_percent = caller_streams_percent
        self._monotonic = monotonic
        self._bodies = 0
        self._streams: Counter[str] = Counter()
        """Open streams by holder."""
        self._spent: OrderedDict[str, float] = OrderedDict()
        """Caller → when its last request will be paid for; the longest silent first."""

    def count_request(self, caller: str, requests: int = 1) -> None:
        """Count requests of a caller. Raises Problem if they come too fast."""
        if not self._rate:
            return
        now = self._monotonic()
        due = max(self._spent.get(caller, 0.0), now)
        wait = due - now - BURST_SECONDS
        if wait > 0:
            raise Problem(RATE, f"the limit is {self._rate:g} requests per second", "", wait)
        self._spent[caller] = due + requests / self._rate
        self._spent.move_to_end(caller)
        if len(self._spent) > CALLERS_MAX:
            self._spent.popitem(last=False)

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Count a body: call the function with the size of each part. It raises Problem if memory is short."""
        counted = 0

        def count(size: int) -> None:
            nonlocal counted
            if self._bodies + size > BODIES_MAX_BYTES:
                raise Problem(OVERLOADED, "too many bodies are being read", "", RETRY_SECONDS)
            self._bodies += size
            counted += size

        try:
            yield count
        finally:
            self._bodies -= counted

    def open_stream(self, holder: str) -> None:
        """Count a stream of `Caller.holder` until `close_stream`. Raises Problem if too many are open."""
        free = self._streams_max - self._streams.total()
        if free <= 0:
            raise Problem(STREAMS, f"this replica has {self._streams_max} open streams", "", RETRY_SECONDS)
        # A share of what the others leave: however many callers take their full share, the next one finds free streams.
        held = self._streams[holder]
        if held * (100 - self._caller_streams_percent) >= free * self._caller_streams_percent:
            why = f"this caller has {held} open streams at this replica, its part of {self._streams_max}"
            raise Problem(STREAMS, why, "", RETRY_SECONDS)
        self._streams[holder] += 1

    def close_stream(self, holder: str) -> None:
        self._streams[holder] -= 1
        if not self._streams[holder]:
            del self._streams[holder]


BODY_MAX_BYTES = 2 * 1024 * 1024
"""The largest body of one task: input and metadata have at most 1 MiB, and escapes may double them."""
BATCH_MAX_BYTES = 8 * 1024 * 1024
BODY_SECONDS = 30.0
"""How long a body may take to arrive."""
FORM = "application/x-www-form-urlencoded"
FIELDS_MAX = 1_000
"""Fields of one form."""
_ENTRY = re.compile(r"(\d{1,19})-(\d{1,19})")
_WHOLE = re.compile(r"[0-9]{1,9}")


async def read_object(
    request: Request, limits: Limits, known: Collection[str], most: int = BODY_MAX_BYTES, *, required: bool = True
) -> dict[str, object]:
    """Return the body, a JSON object with members among `known`. Raises Problem, or InvalidInput for a member.

    Without a body it is empty, unless it is `required`.
    """
    absent = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if absent and not required:
        return {}
    kind = media_type(request)
    if kind != codec.JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        shown = f"Content-Type {quoted(kind)}" if kind else "no Content-Type"
        raise Problem(MEDIA, f"{shown}: send application/json", "Content-Type")
    with limits.body() as count:
        data = await _read(request, count, most)
        try:
            body = codec.decode(data, limit=most)
        except InvalidInput as error:
            raise Problem(BODY, error.message) from None
    if not isinstance(body, dict):
        raise Problem(BODY, f"{quoted(body)} is not an object")
    refuse_unknown("", body, known)
    return body


async def read_body(request: Request, limits: Limits, most: int) -> bytes:
    """Return a body of any media type. Raises Problem."""
    with limits.body() as count:
        return await _read(request, count, most)


_ONCE = ("Host", "Authorization", "Content-Type", "Content-Encoding")


def check_headers(request: Request) -> None:
    """Raise Problem for a header of which a proxy may have read another one."""
    for name in _ONCE:
        if len(request.headers.getlist(name)) > 1:
            raise Problem(PARAMETER, "is there more than once", name)


def _check_encoding(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise Problem(MEDIA, f"{quoted(encoding)}: send the body without an encoding", "Content-Encoding")
    _, _, charset = request.headers.get("content-type", "").lower().partition("charset=")
    if charset.partition(";")[0].strip(' "') not in ("", "utf-8", "us-ascii"):
        raise Problem(MEDIA, f"{quoted(charset)}: send UTF-8", "Content-Type")


def media_type(request: Request) -> str:
    """Return the Content-Type without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _read(request: Request, count: Callable[[int], None], most: int) -> bytes:
    _check_encoding(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:19]) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                count(len(part))
                parts.append(part)
    except TimeoutError:
        raise Problem(SLOW, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise Problem(BODY, "the connection ended before the body did") from None
    return b"".join(parts)


async def read_form(request: Request, limits: Limits, most: int) -> dict[str, list[str]]:
    """Return the fields of a form (`application/x-www-form-urlencoded`). Raises Problem."""
    kind = media_type(request)
    if kind != FORM:
        raise Problem(MEDIA, f"Content-Type {quoted(kind)}: send {FORM}", "Content-Type")
    with limits.body() as count:
        data = await _read(request, count, most)
    try:
        return parse_qs(data.decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX, errors="strict")
    except ValueError:
        raise Problem(BODY, f"the body is not a form of at most {FIELDS_MAX} fields in UTF-8") from None


def _too_large(most: int) -> Problem:
    return Problem(TOO_LARGE, f"the body is over the limit of {most} bytes: store the data and send a reference")


def list_of_objects(name: str, value: object, most: int) -> list[dict[str, object]]:
    """Return a list of 1 to `most` objects. Raises InvalidInput."""
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise InvalidInput(name, f"is not a list of 1 to {most} objects")
    return [as_object(f"{name}.{place}", item) for place, item in enumerate(value)]


def json_reply(document: object, status: int = 200, **headers: str) -> Response:
    return Response(msgspec.json.encode(document), status, headers, codec.JSON)


LINES = "application/jsonl"


class Lines(StreamingResponse):
    """JSON lines. They count as an open stream until they are sent."""

    def __init__(self, lines: AsyncIterator[bytes], limits: Limits, holder: str) -> None:
        super().__init__(lines, media_type=LINES)
        self._limits = limits
        self._holder = holder

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # Any: of ASGI
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._limits.close_stream(self._holder)


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is this machine's own."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    if ":" in host and host.count(":") > 1 and not host.startswith("["):
        name = host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# -- headers and parameters --------------------------------------------------------------------------------------


def header(request: Request, name: str) -> str:
    """Return a header of at most 256 characters; empty if it is absent. Raises Problem."""
    values = request.headers.getlist(name)
    if not values:
        return ""
    if len(values) > 1 or not 1 <= len(values[0]) <= MAX_NAME_CHARACTERS or has_control(values[0]):
        raise Problem(PARAMETER, f"is not one text of 1 to {MAX_NAME_CHARACTERS} characters", name)
    return values[0]


def check_entry(name: str, text: str) -> None:
    """Raise Problem for a header that is not the id of a stream's entry, such as `1763690000000-0`."""
    found = _ENTRY.fullmatch(text)
    if found is None or any(int(part) >= 2**63 for part in found.groups()):
        raise Problem(
            PARAMETER, f"{quoted(text)} is not the id of an event of this stream, as in 1763690000000-0", name
        )


class Parameters:
    """The query of a request. Raises Problem for a parameter that is not in `known`, or that comes twice."""

    def __init__(self, request: Request, known: Collection[str]) -> None:
        self._values: dict[str, str] = {}
        for name, value in request.query_params.multi_items():
            shown = quoted(name)[1:-1]
            if name not in known:
                raise Problem(PARAMETER, f"unknown; {choices(known)}", shown)
            if name in self._values:
                raise Problem(PARAMETER, "is there more than once", shown)
            if len(value) > 512 or has_control(value):
                raise Problem(PARAMETER, "is not text of at most 512 characters without control characters", shown)
            self._values[name] = value

    def text(self, name: str) -> str:
        return self._values.get(name, "")

    def choice(self, name: str, allowed: Collection[str]) -> str:
        value = self._values.get(name, "")
        if value and value not in allowed:
            raise Problem(PARAMETER, f"{quoted(value)} is not one of {', '.join(allowed)}", name)
        return value

    def whole(self, name: str, default: int, most: int) -> int:
        """Return a whole number from 1 to `most`."""
        value = self._values.get(name)
        if value is None:
            return default
        if not _WHOLE.fullmatch(value) or not 1 <= int(value) <= most:
            raise Problem(PARAMETER, f"{quoted(value)} is not a whole number from 1 to {most}", name)
        return int(value)

    def moment(self, name: str, default: float) -> float:
        """Return a time in epoch milliseconds, given as RFC 3339 with an offset."""
        value = self._values.get(name)
        if value is None:
            return default
        try:
            found = datetime.fromisoformat(value)
            if found.tzinfo is None:
                raise ValueError
            return max(0.0, found.timestamp() * 1000)
        except (ValueError, OverflowError):
            raise Problem(
                PARAMETER, f"{quoted(value)} is not a time with an offset, as in 2030-01-01T00:00:00Z", name
            ) from None
