"""The ASGI application: its routes, and what every request passes through."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime_core.gateway.limits import Limits
from runtime_core.gateway.openapi import document
from runtime_core.gateway.problems import DEFECT, METHOD, NO_HOST, NO_ROUTE, Problem, problem_of
from runtime_core.gateway.streams import StreamRoutes
from runtime_core.gateway.tasks import TaskRoutes, json_reply

logger = logging.getLogger(__name__)

Handler = Callable[[Request, str], Awaitable[Response]]
_CORS_MAX_AGE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Operation:
    """A method on a path."""

    method: str
    path: str
    handler: Handler


def operations(tasks: TaskRoutes, streams: StreamRoutes) -> list[Operation]:
    """Return every operation; `openapi.document` describes the same ones."""
    return [
        Operation("POST", "/v1/tasks", tasks.submit),
        Operation("GET", "/v1/tasks", tasks.list),
        Operation("POST", "/v1/batches", tasks.submit_batch),
        Operation("GET", "/v1/tasks/{task_id}", tasks.show),
        Operation("POST", "/v1/tasks/{task_id}/cancel", tasks.cancel),
        Operation("POST", "/v1/tasks/{task_id}/answers", tasks.answer),
        Operation("GET", "/v1/tasks/{task_id}/events", streams.events),
        Operation("GET", "/openapi.json", _describe),
    ]


async def _describe(request: Request, caller: str) -> Response:
    return json_reply(document())


def build_application(offered: Sequence[Operation], limits: Limits, origins: Sequence[str]) -> Starlette:
    """Return the application. `origins` are the web pages whose scripts may call it."""
    by_path: dict[str, dict[str, Handler]] = {}
    for one in offered:
        by_path.setdefault(one.path, {})[one.method] = one.handler
    routes = [Route(path, _Resource(limits, methods), methods=None) for path, methods in by_path.items()]
    middleware = []
    if origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "Idempotency-Key", "Last-Event-ID", "traceparent"],
                expose_headers=["Location", "Retry-After"],
                max_age=_CORS_MAX_AGE_SECONDS,
            )
        )
    application = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _no_route},
    )
    application.router.redirect_slashes = False  # a redirect would name the host that the request does
    return application


class _Resource:
    """A path with its methods, as an ASGI application."""

    def __init__(self, limits: Limits, methods: Mapping[str, Handler]) -> None:
        self._limits = limits
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Request(scope, receive, send))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        try:
            caller = self._caller_of(request)
            handler = self._methods.get(request.method)
            if handler is None:
                allowed = ", ".join(self._methods)
                raise Problem(METHOD, f"{request.method[:20]}: methods are {allowed}", headers={"Allow": allowed})
            self._limits.count_request(caller)
            return await handler(request, caller)
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                logger.error("%s %s failed", request.method, request.scope["path"][:200], exc_info=error)
                problem = Problem(DEFECT, "an error that nobody expected; the log of the gateway has it")
            return problem.response()

    def _caller_of(self, request: Request) -> str:
        address = request.client.host if request.client else ""
        # A web page can point its own host name at 127.0.0.1, and then passes for the same origin.
        if not is_loopback(request.headers.get("host", "")):
            raise Problem(NO_HOST, "this gateway has no keys and answers to localhost only", "Host")
        return address


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


async def _no_route(request: Request, error: Exception) -> Response:
    return Problem(NO_ROUTE, "see /openapi.json for the paths").response()
