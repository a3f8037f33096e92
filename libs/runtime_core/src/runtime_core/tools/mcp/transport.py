"""Connects to a server: a child process over stdin and stdout, or a URL over streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TextIO

import httpx2
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._stream_protocols import ReadStream
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED

from runtime_core.declare.declaration import one_line
from runtime_core.lifeline import tied
from runtime_core.telemetry.redaction import READ_CHARACTERS, kept
from runtime_core.tools.mcp.server import MCPServer

NOT_SENT = "dev.weft/not-sent"
"""Member of the data of errors that our client creates: whether the server has not received the request."""
CONNECT_SECONDS = 10.0
MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Limit of one message over HTTP. Larger than any result that can be stored, which is refused with its name."""
LONGEST_LINE = 2_000
_LINE_BYTES = 4 * READ_CHARACTERS + 4
"""Bytes kept of a line: more than redaction reads, since a secret may begin at the end of the logged part."""

logger = logging.getLogger(__name__)

Received = SessionMessage | Exception
Streams = tuple[Any, Any]  # Any: the SDK names these types in a private module


@asynccontextmanager
async def streams_to(declared: MCPServer, on_end: Callable[[], None]) -> AsyncGenerator[Streams]:
    """Open the two streams of a connection. Calls `on_end` when the connection is lost.

    Raises OSError if the program cannot be started.
    """
    if declared.command is not None:
        async with _streams_to_process(declared, on_end) as streams:
            yield streams
    else:
        assert declared.url is not None  # a declaration has either
        async with (
            _Client(
                on_end,
                headers=declared.headers(),
                # No limit on reads: calls have their own limit, and a subscription may be silent for days.
                timeout=httpx2.Timeout(CONNECT_SECONDS, read=None, write=30.0, pool=None),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
            ) as client,
            streamable_http_client(declared.url, http_client=client, max_sse_event_size=MAX_EVENT_BYTES) as streams,
        ):
            yield streams


# -- a process ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _streams_to_process(declared: MCPServer, on_end: Callable[[], None]) -> AsyncGenerator[Streams]:
    assert declared.command is not None
    environment = declared.env()
    program = declared.command[0]
    if os.sep not in program and shutil.which(program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(f"program {program!r} is not on the PATH")
    # Kill the server's process when this process ends, however it ends.
    command = tied(declared.command, signal.SIGKILL)
    parameters = StdioServerParameters(
        command=command[0], args=command[1:], env=environment, cwd=declared.cwd, encoding_error_handler="replace"
    )
    async with contextlib.AsyncExitStack() as stack:
        with await _errors_to_log(declared, stack) as errors:
            read, write = await stack.enter_async_context(stdio_client(parameters, errlog=errors))
        yield _Watched(read, on_end), write


async def _errors_to_log(declared: MCPServer, stack: contextlib.AsyncExitStack) -> TextIO:
    """Return a file for the process's stderr: its lines go to the log with the server's name, until `stack` closes."""
    read, write = os.pipe()
    file = os.fdopen(write, "w")
    try:
        lines = await asyncio.get_running_loop().connect_read_pipe(
            lambda: _Lines(declared.what), os.fdopen(read, "rb", buffering=0)
        )
    except BaseException:
        file.close()
        raise
    # Close it: processes that the server has started may hold the pipe for longer.
    stack.callback(lines[0].close)
    return file


class _Lines(asyncio.Protocol):
    """Logs each arriving line, and the start of a long one."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._line = bytearray()

    def data_received(self, data: bytes) -> None:
        first, *others = data.split(b"\n")
        self._add(first)
        for part in others:
            self._log()
            self._add(part)

    def eof_received(self) -> None:
        self._log()

    def _add(self, part: bytes) -> None:
        self._line += part[: _LINE_BYTES - len(self._line)]

    def _log(self) -> None:
        text = self._line.decode(errors="replace").rstrip()
        self._line.clear()
        if text:
            logger.info("%s: %s", self._what, kept(text, LONGEST_LINE))


class _Watched:
    """A read stream that reports its end: the SDK reports it only to pending requests."""

    def __init__(self, stream: ReadStream[Received], on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    async def receive(self) -> Received:
        try:
            return await self._stream.receive()
        except Exception:
            self._on_end()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self._stream.__anext__()
        except (StopAsyncIteration, Exception):
            self._on_end()
            raise

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stream.__aexit__(kind, error, trace)


# -- a URL -------------------------------------------------------------------------------------------------------


class _Client(httpx2.AsyncClient):
    """An HTTP client in which a failed request affects no other.

    In the SDK, an error of one request ends the session with all its calls. This client turns it into an error response
    of the protocol, which says whether the request was sent.
    """

    def __init__(self, on_end: Callable[[], None], **settings: Any) -> None:  # Any: httpx2's settings
        super().__init__(**settings)
        self._on_end = on_end

    async def send(self, request: httpx2.Request, **settings: Any) -> httpx2.Response:
        ending = request.method == "DELETE"
        try:
            response = await super().send(request, **settings)
            if response.headers.get("content-type", "").lower().startswith("application/json"):
                # The SDK would read it whole, however large it is.
                response = await _read(response)
        except httpx2.TransportError as error:
            not_sent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
            if not_sent:
                self._on_end()
            # The end of a session needs no reply from a lost server.
            return httpx2.Response(204, request=request) if ending else _failure(request, one_line(error), not_sent)
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            # The server has restarted or dropped the session, and has not handled the request.
            await response.aclose()
            self._on_end()
            if ending:
                return httpx2.Response(204, request=request)
            return _failure(request, "the server has dropped the session", not_sent=True)
        return response


async def _read(response: httpx2.Response) -> httpx2.Response:
    """Return the response with its body. Raises ReadError if that is too large."""
    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_EVENT_BYTES:
                raise httpx2.ReadError(f"the server's answer has over {MAX_EVENT_BYTES} bytes")
    finally:
        await response.aclose()
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in ("content-encoding", "content-length", "transfer-encoding")
    ]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


def _failure(request: httpx2.Request, message: str, not_sent: bool) -> httpx2.Response:
    error = {"code": CONNECTION_CLOSED, "message": message, "data": {NOT_SENT: not_sent}}
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)
