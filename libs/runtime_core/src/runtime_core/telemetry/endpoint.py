"""A small HTTP/1.1 server for metrics and health checks: GET and HEAD, one request per connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

HEAD_MAX_BYTES = 16 * 1024
REQUEST_SECONDS = 5.0

TEXT = "text/plain; charset=utf-8"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a path."""

    status: HTTPStatus
    body: bytes
    content_type: str = TEXT


def plain(status: HTTPStatus, line: str) -> Response:
    """Return a response with one line of text."""
    return Response(status, line.encode() + b"\n")


class Endpoint:
    """Serves `routes` (path → function that returns the response) on `host` and `port`; port 0 takes a free one.

    Bad requests get status 400. Requests that take longer than 5 s are closed.
    """

    def __init__(self, host: str, port: int, routes: Mapping[str, Callable[[], Response]]) -> None:
        self.host = host
        self.port = port
        """The actual port, after `start`."""
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The base URL, as in `http://127.0.0.1:9464`."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Start listening. Raises OSError if the address is not available."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=HEAD_MAX_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and close open connections."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for writer in tuple(self._connections):
            writer.close()
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                method, answer = await self._answer(reader)
                writer.write(_response(method, answer))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has gone or is too slow
        finally:
            self._connections.discard(writer)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Response]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "GET", plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request headers are too large")
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return "GET", plain(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
        method, path = words[0], words[1].split("?", 1)[0]
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self._routes)
            return method, plain(HTTPStatus.NOT_FOUND, f"no such path; paths are {known}")
        if method not in ("GET", "HEAD"):
            return method, plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        try:
            return method, route()
        except Exception:
            logger.exception("cannot answer %s", path)
            return method, plain(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the log")


def _response(method: str, answer: Response) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if answer.status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() if method == "HEAD" else head.encode() + answer.body
