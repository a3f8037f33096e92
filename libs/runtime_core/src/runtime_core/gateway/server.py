"""The gateway as an ASGI application and as part of a process: it connects, listens, and drains its streams."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runtime_core.base.periodic import Periodic
from runtime_core.client.client import Client
from runtime_core.client.doctor import Installation
from runtime_core.consumer.progress import HEALTHY, Health
from runtime_core.errors import BusError, ConfigurationError
from runtime_core.gateway.access import Access
from runtime_core.gateway.console.actions import Actions
from runtime_core.gateway.console.boards import Boards
from runtime_core.gateway.console.pages import Pages
from runtime_core.gateway.console.site import Site
from runtime_core.gateway.keys import (
    ANSWER,
    OPERATE,
    READ,
    SUBMIT,
    UNKNOWN_KEY_SECONDS,
    ApiKeys,
    Caller,
    CodeLogin,
    Provider,
    ProviderAway,
    TokenRefused,
    Tokens,
    caller_of,
)
from runtime_core.gateway.openapi import document
from runtime_core.gateway.openapi_resources import paths, schemas
from runtime_core.gateway.requests import (
    DEFECT,
    FORBIDDEN,
    HEAD,
    METHOD,
    NO_HOST,
    NO_ROUTE,
    OVERLOADED,
    RETRY_SECONDS,
    SLOW,
    SYNTAX,
    UNAUTHORIZED,
    Limits,
    Problem,
    check_headers,
    is_loopback,
    problem_of,
)
from runtime_core.gateway.resources import LetterRoutes, ScheduleRoutes, TrajectoryRoutes
from runtime_core.gateway.tasks import EventRoutes, StreamRoutes, TaskRoutes
from runtime_core.settings import Settings
from runtime_core.state_manager.schedules import ScheduleBounds
from runtime_core.wire import codec
from runtime_core.wire.envelope import ATTRIBUTES

logger = logging.getLogger(__name__)

Handler = Callable[[Request, Caller], Awaitable[Response]]
_CORS_MAX_AGE_SECONDS = 600
_HEADERS = ("Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "traceparent")
_EVENT_HEADERS = tuple(f"ce-{name}" for name in ATTRIBUTES if name not in ("datacontenttype", "replyto"))
"""The attributes of an event that Weft reads from headers."""


@dataclass(frozen=True, slots=True)
class RouteMethod:
    """A method on a path."""

    method: str
    path: str
    handler: Handler
    role: str = ""
    """What a key must be allowed to do; empty: no key is needed."""


def operations(access: Access, limits: Limits, streams: StreamRoutes) -> list[RouteMethod]:
    """Return every operation; `openapi.document` describes the same ones."""
    tasks, records = TaskRoutes(access, limits), TrajectoryRoutes(access, limits)
    letters, schedules = LetterRoutes(access, limits), ScheduleRoutes(access, limits)
    return [
        RouteMethod("POST", "/v1/tasks", tasks.submit, SUBMIT),
        RouteMethod("GET", "/v1/tasks", tasks.list, READ),
        RouteMethod("POST", "/v1/batches", tasks.submit_batch, SUBMIT),
        RouteMethod("POST", "/v1/events", EventRoutes(access, limits).receive, SUBMIT),
        RouteMethod("GET", "/v1/tasks/{task_id}", tasks.show, READ),
        RouteMethod("POST", "/v1/tasks/{task_id}/cancel", tasks.cancel, OPERATE),
        RouteMethod("POST", "/v1/tasks/{task_id}/answers", tasks.answer, ANSWER),
        RouteMethod("POST", "/v1/tasks/{task_id}/messages", tasks.send, ANSWER),
        RouteMethod("GET", "/v1/agents", tasks.agents, SUBMIT),
        RouteMethod("GET", "/v1/questions", tasks.questions, READ),
        RouteMethod("GET", "/v1/tasks/{task_id}/events", streams.events, READ),
        RouteMethod("POST", "/v1/tasks/{task_id}/forks", records.fork, OPERATE),
        RouteMethod("POST", "/v1/tasks/{task_id}/replay", records.replay, OPERATE),
        RouteMethod("GET", "/v1/tasks/{task_id}/trajectory", records.show, READ),
        RouteMethod("GET", "/v1/tasks/{task_id}/difference", records.difference, READ),
        RouteMethod("GET", "/v1/steps", records.export, READ),
        RouteMethod("GET", "/v1/usage", records.usage, READ),
        RouteMethod("GET", "/v1/dead-letters", letters.list, READ),
        RouteMethod("GET", "/v1/dead-letter-groups", letters.groups, READ),
        RouteMethod("GET", "/v1/dead-letters/{letter_id}", letters.show, READ),
        RouteMethod("POST", "/v1/dead-letters/{letter_id}/redrive", letters.redrive, OPERATE),
        RouteMethod("DELETE", "/v1/dead-letters/{letter_id}", letters.drop, OPERATE),
        RouteMethod("GET", "/v1/schedules", schedules.list, READ),
        RouteMethod("GET", "/v1/schedules/{schedule_id}", schedules.show, READ),
        RouteMethod("PUT", "/v1/schedules/{schedule_id}", schedules.set, OPERATE),
        RouteMethod("DELETE", "/v1/schedules/{schedule_id}", schedules.delete, OPERATE),
        RouteMethod("POST", "/v1/schedules/{schedule_id}/run", schedules.run, OPERATE),
        RouteMethod("GET", "/openapi.json", _describe),
    ]


@cache
def description() -> bytes:
    """Return the OpenAPI document of all operations as JSON."""
    nobody = cast(Any, None)  # Any: only their roles are read
    offered = operations(nobody, nobody, StreamRoutes(nobody, nobody, nobody))
    return msgspec.json.encode(document(paths(), schemas(), {(one.method, one.path): one.role for one in offered}))


async def _describe(request: Request, caller: Caller) -> Response:
    return Response(description(), media_type=codec.JSON)


def build_application(
    offered: Sequence[RouteMethod],
    limits: Limits,
    origins: Sequence[str],
    keys: ApiKeys | None = None,
    pages: Sequence[Route] = (),
    tokens: Tokens | None = None,
) -> Starlette:
    """Return the application. `origins` are the web pages whose scripts may call it. None for `keys`: it is open.

    `pages` are those of the console. `tokens` checks those of an identity provider, which callers may send instead of
    keys.
    """
    by_path: dict[str, dict[str, RouteMethod]] = {}
    for one in offered:
        by_path.setdefault(one.path, {})[one.method] = one
    routes = [Route(path, _Resource(limits, methods, keys, tokens), methods=None) for path, methods in by_path.items()]
    middleware = []
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST", "PUT", "DELETE"],
                allow_headers=[*_HEADERS, *_EVENT_HEADERS],
                expose_headers=["Location", "Retry-After"],
                max_age=_CORS_MAX_AGE_SECONDS,
            )
        )
    application = Starlette(
        routes=[*routes, *pages],
        middleware=middleware,
        exception_handlers={HTTPException: _no_route},
    )
    application.router.redirect_slashes = False  # a redirect would name the host that the request does
    return application


class _Resource:
    """A path with its methods, as an ASGI application."""

    def __init__(
        self, limits: Limits, methods: Mapping[str, RouteMethod], keys: ApiKeys | None, tokens: Tokens | None
    ) -> None:
        self._limits = limits
        self._methods = methods
        self._keys = keys
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        try:
            check_headers(request)
            operation = self._methods.get(request.method)
            caller = await self._caller_of(request, "" if operation is None else operation.role)
            if operation is None:
                allowed = ", ".join(self._methods)
                raise Problem(METHOD, f"{request.method[:20]} is not one of {allowed}", headers={"Allow": allowed})
            self._limits.count_request(caller.name)
            return await operation.handler(request, caller)
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                logger.error("%s %s failed", request.method, request.scope["path"][:200], exc_info=error)
                problem = Problem(DEFECT, "unexpected error; see the log of the gateway")
            return problem.response()

    async def _caller_of(self, request: Request, role: str) -> Caller:
        """Return who sends a request. Raises Problem if the caller is unknown, or lacks the role (empty: none)."""
        address = request.client.host if request.client else ""
        if self._keys is None:
            # A web page can point its own host name at 127.0.0.1, and then passes for the same origin.
            if not is_loopback(request.headers.get("host", "")):
                raise Problem(NO_HOST, "this gateway has no keys and answers to localhost only", "Host")
            return Caller(address)
        if not role:
            return Caller(address, ())
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        caller = await self._authenticated(address, text.strip() if scheme.lower() == "bearer" else "")
        if role not in caller.roles:
            raise Problem(
                FORBIDDEN, f"{caller.name} lacks the role {role!r}; it has {', '.join(caller.roles) or 'none'}"
            )
        return caller

    async def _authenticated(self, address: str, text: str) -> Caller:
        """Return who sends a key or a token."""
        assert self._keys is not None
        why = "send the header Authorization: Bearer weft_…; `weft key create` makes a key"
        if text:
            why = "the key is unknown or revoked; `weft key list` shows the valid ones, by the part after weft_"
        try:
            if self._tokens is not None and text.count(".") == 2:
                return await self._tokens.caller(text)
            key = await self._keys.find(text)
            if key is not None:
                return caller_of(key)
        except TokenRefused as error:
            why = str(error)
        except ProviderAway as error:
            raise Problem(OVERLOADED, str(error), "Authorization", UNKNOWN_KEY_SECONDS) from None
        self._limits.count_request(address)
        raise Problem(UNAUTHORIZED, why, "Authorization", headers={"WWW-Authenticate": "Bearer"})


async def _no_route(request: Request, error: Exception) -> Response:
    return Problem(NO_ROUTE, "see /openapi.json for the paths").response()


PORT = 8080
ASK_SECONDS = 1.0
"""How often a replica asks the broker whether it answers."""
FINISH_SHARE = 0.7
"""Share of the shutdown time in which open requests may finish."""
HEAD_MAX_BYTES = 16 * 1024
"""The largest head of a request: its first line and its headers, or the trailers of its body."""
HEAD_SECONDS = 10.0
"""How long a head may take to arrive, and how long a new connection may be silent."""
LINGER_SECONDS = 5.0
"""How long the rest of a body may arrive that was answered before its end."""
CONNECTIONS_MAX = 10_000
BACKLOG = 1024


def tokens_of(settings: Settings) -> Tokens | None:
    """Return what checks tokens of the identity provider; None without one. Raises ConfigurationError."""
    issuer = settings.http_oidc_issuer
    if not issuer:
        return None
    if settings.http_auth != "keys":
        raise ConfigurationError("WEFT_HTTP_OIDC_ISSUER: an open gateway checks nothing: set WEFT_HTTP_AUTH=keys")
    if not settings.http_oidc_audience:
        raise ConfigurationError(
            "WEFT_HTTP_OIDC_AUDIENCE is missing: without it, tokens for other programs would be accepted"
        )
    return Tokens(provider_of(settings))


def provider_of(settings: Settings) -> Provider:
    """Return the configured identity provider."""
    return Provider(
        settings.http_oidc_issuer or "",
        settings.http_oidc_audience or "",
        settings.http_oidc_tenant_claim,
        settings.http_oidc_roles_claim,
    )


def login_of(settings: Settings) -> CodeLogin | None:
    """Return what logs people in at the identity provider; None without one. Raises ConfigurationError."""
    if settings.http_oidc_client_id is None:
        return None
    if not settings.http_oidc_issuer or not settings.http_oidc_audience:
        raise ConfigurationError("WEFT_HTTP_OIDC_CLIENT_ID: also set WEFT_HTTP_OIDC_ISSUER and WEFT_HTTP_OIDC_AUDIENCE")
    return CodeLogin(provider_of(settings), settings.http_oidc_client_id, settings.http_oidc_client_secret or "")


class Gateway:
    """One replica. It is stateless: any other one continues what this one has begun."""

    def __init__(self, settings: Settings, client: Client) -> None:
        self._settings = settings
        self._client = client
        self._stopping = asyncio.Event()
        self._access: Access | None = None
        self._server: Server | None = None
        self._socket: socket.socket | None = None
        self._asking = Periodic("ask the broker", ASK_SECONDS, self._ask)
        self._answers = False
        self._serving = False

    async def start(self) -> None:
        host = self._settings.http_host
        has_keys = self._settings.http_auth == "keys"
        if not has_keys and not is_loopback(host):
            raise ConfigurationError(
                f"WEFT_HTTP_HOST={host!r}: without keys the gateway listens on this machine only: set "
                "WEFT_HTTP_AUTH=keys, or WEFT_HTTP_HOST=127.0.0.1"
            )
        tokens, login = tokens_of(self._settings), login_of(self._settings)
        await self._client.open()
        self._answers = True
        self._asking.start()
        self._socket = listen(host, PORT if self._settings.http_port is None else self._settings.http_port)
        settings = self._settings
        limits = Limits(settings.http_rate, settings.http_streams_max, settings.http_caller_streams_percent)
        buses = self._client.buses
        self._access = Access(
            self._client,
            installation=Installation(settings, settings.redis_url or "memory://", buses[0].transport, buses),
            blobs=settings.blob_url or "",
            trajectory_url=settings.trajectory_url,
            schedule_bounds=ScheduleBounds(settings.tenant_schedules_max, settings.tenant_schedules_max_bytes),
            app=settings.app or "",
        )
        keys = ApiKeys(self._client.buses[0]) if has_keys else None
        streams = StreamRoutes(self._access, limits, self._stopping)
        site = Site(limits, keys, login)
        shown = (
            Pages(site, self._access, streams, settings.http_trace_url or "", settings.http_log_url or ""),
            Boards(site, self._access),
            Actions(self._access),
        )
        pages = site.routes([page for each in shown for page in each.pages()])
        application = build_application(
            operations(self._access, limits, streams), limits, settings.http_origins, keys, pages, tokens
        )
        self._server = server_of(application, settings.shutdown_seconds)

    async def run(self) -> None:
        assert self._server is not None
        assert self._socket is not None
        name = self._socket.getsockname()
        shown = f"[{name[0]}]" if ":" in name[0] else name[0]
        open_to = "for callers with a key"
        if self._settings.http_auth == "open":
            open_to = "open without keys: everyone on this machine may do everything"
        logger.info("HTTP on http://%s:%d, %s", shown, name[1], open_to)
        self._serving = True
        assert self._access is not None
        warming = asyncio.create_task(self._access.warm_up())
        try:
            await self._server.serve([self._socket])
        finally:
            warming.cancel()

    async def stop(self) -> None:
        """End the streams, let open requests finish, then disconnect."""
        self._stopping.set()
        await self._asking.stop()
        if self._server is not None:
            self._server.should_exit = True
            if self._serving:
                await self._server.ended.wait()
        if self._socket is not None:
            self._socket.close()
        if self._access is not None:
            await self._access.close()
        await self._client.close()

    def ready(self) -> bool:
        return self._answers and not self._stopping.is_set()

    def progress(self) -> Health:
        return HEALTHY

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                for bus in self._client.buses:
                    await bus.transport.call("PING")
            self._answers = True
        except (BusError, TimeoutError):
            self._answers = False


class Server(uvicorn.Server):
    """Leaves signals to the process, which stops the gateway in order."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()
        """Set once it serves no more, or if it never has."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.ended.set()


def server_of(application: ASGIApp, shutdown_seconds: float) -> Server:
    """Return what serves an application over HTTP."""
    return Server(
        uvicorn.Config(
            application,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            http=HttpConnection,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, int(FINISH_SHARE * shutdown_seconds)),
        )
    )


class HttpConnection(HttpToolsProtocol):
    """Bounds heads in bytes and in time, and the number of connections. It answers wrong HTTP with a problem."""

    _head = 0
    """Bytes of the head so far, or of the trailers."""
    _unparsed = 0
    """Bytes that have arrived since the parser found something: those of a line that does not end."""
    _in_head = False
    _lingers = False
    _refusal: Problem | None = None
    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            self._refuse(Problem(OVERLOADED, f"this replica has {CONNECTIONS_MAX} connections", "", RETRY_SECONDS))
            return
        self._silence = self.loop.call_later(HEAD_SECONDS, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hush()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_MAX_BYTES and not self.transport.is_closing():
            self._refuse(_large_head())
        elif self._in_head and self._silence is None:
            self._silence = self.loop.call_later(HEAD_SECONDS, self._expire)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal or Problem(SYNTAX, "send HTTP/1.1, with one valid length of the body"))

    def on_message_begin(self) -> None:
        self._head, self._in_head = 0, True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head, self._in_head = 0, False
        self._hush()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()
        if self._lingers:
            self._lingers = False
            self._hush()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self.cycle.more_body:
            # Nobody reads the rest of this body. A close while it arrives would take the answer from the client.
            self._lingers = True
            self._silence = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head += size
        if self._head > HEAD_MAX_BYTES:
            self._refusal = _large_head()
            raise ValueError(self._refusal.detail)  # it ends the parser, which then calls `send_400_response`

    def _expire(self) -> None:
        self._silence = None
        if not self.transport.is_closing():
            self._refuse(Problem(SLOW, f"the head of the request did not arrive within {HEAD_SECONDS:g} s"))

    def _hush(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _refuse(self, problem: Problem) -> None:
        """Answer with a problem, unless another answer has begun, and close the connection."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not (cycle.response_started or self.pipeline):
            if cycle is not None:
                cycle.disconnected = True  # drops what the application still sends
            response = problem.response()
            response.headers["Connection"] = "close"
            status = problem.kind.status
            lines = [b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode())]
            lines += [b"%s: %s" % pair for pair in response.raw_headers]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body))
        self.transport.close()


def _large_head() -> Problem:
    return Problem(HEAD, f"the head of the request is over the limit of {HEAD_MAX_BYTES} bytes")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigurationError if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "the port is in use" if in_use else os.strerror(getattr(error, "errno", 0) or 0)
        raise ConfigurationError(
            f"WEFT_HTTP_PORT={port}: cannot listen on {host}: {why}; choose another port (0: any free port)"
        ) from None
    return listening
