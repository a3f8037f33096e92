"""Connects to a server: a child process over stdin and stdout, or a URL over streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self, TextIO

import httpx2
from anyio import BrokenResourceError, EndOfStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, jsonrpc_message_adapter

from runtime_core.base.lifeline import tied
from runtime_core.base.periodic import cancel_and_wait
from runtime_core.declare.declaration import one_line
from runtime_core.declare.mcp_server import MCPServer
from runtime_core.telemetry.redaction import READ_CHARACTERS, kept

NOT_SENT = "dev.weft/not-sent"
"""Member of the data of errors that our client creates: whether the server has not received the request."""
CONNECT_SECONDS = 10.0
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Limit of one message of a server. Larger than any result that can be stored, which is refused with its name."""
MAX_WRONG_LINES = 1_000
"""A session ends after this many consecutive lines that are not messages."""
GRACE_SECONDS = 2.0
"""How long a process may take to end after its stdin was closed, and again after SIGTERM."""
LONGEST_LINE = 2_000
_LINE_BYTES = 4 * READ_CHARACTERS + 4
"""Bytes kept of a line: more than redaction reads, since a secret may begin at the end of the logged part."""
_PART_BYTES = 64 * 1024
_POLL_SECONDS = 0.01

logger = logging.getLogger(__name__)

Received = SessionMessage | Exception
OnEnd = Callable[[str], None]
"""Called with the reason why a connection was lost; empty if it is not worth logging."""
Streams = tuple[Any, Any]  # Any: the SDK names these types in a private module


@asynccontextmanager
async def streams_to(declared: MCPServer, on_end: OnEnd) -> AsyncGenerator[Streams]:
    """Open the two streams of a connection. Calls `on_end` with the reason when the connection is lost.

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
            streamable_http_client(declared.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
        ):
            yield streams


# -- a process ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _streams_to_process(declared: MCPServer, on_end: OnEnd) -> AsyncGenerator[Streams]:
    """Start the server's process. The SDK's own transport would keep a line of any length."""
    assert declared.command is not None
    environment = declared.env()
    program = declared.command[0]
    if os.sep not in program and shutil.which(program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(f"program {program!r} is not on the PATH")
    async with contextlib.AsyncExitStack() as stack:
        with await _errors_to_log(declared, stack) as errors:
            process = await asyncio.create_subprocess_exec(
                # Kill the server's process when this process ends, however it ends.
                *tied(declared.command, signal.SIGKILL),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=get_default_environment() | environment,
                cwd=declared.cwd,
                start_new_session=True,
                limit=_PART_BYTES,
            )
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        received = _Received(process.stdout, declared.what, on_end)
        try:
            yield received, _Sent(process.stdin)
        finally:
            await _shielded(_end(process, patient=not received.broken))


async def _shielded(work: Coroutine[Any, Any, None]) -> None:
    """Await the work. A cancellation waits for its end: otherwise the server would outlive its session."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


async def _end(process: asyncio.subprocess.Process, patient: bool) -> None:
    """End the process: close its stdin, then terminate its session, then kill its session."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    # A server that is blocked on its stdout would not notice the end of its stdin.
    draining = asyncio.get_running_loop().create_task(_drain(process.stdout))
    try:
        if patient and not await _ended(process, GRACE_SECONDS):
            _signal(process, signal.SIGTERM)
            await _ended(process, GRACE_SECONDS)
        if process.returncode is None:
            _signal(process, signal.SIGKILL)
            if not await _ended(process, GRACE_SECONDS):
                logger.warning("process %d of an MCP server is still alive after SIGKILL", process.pid)
    finally:
        await cancel_and_wait(draining)
        # The pipes may be held open by processes that the server has started.
        process._transport.close()  # type: ignore[attr-defined]  # asyncio offers no other way


async def _ended(process: asyncio.subprocess.Process, seconds: float) -> bool:
    """Wait for the process alone: `wait` also waits for its pipes, which others may hold open."""
    deadline = time.monotonic() + seconds
    while process.returncode is None:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _drain(output: asyncio.StreamReader) -> None:
    """Read and drop the rest of the output, up to the limit of one message."""
    size = 0
    while size < MAX_MESSAGE_BYTES and (part := await output.read(_PART_BYTES)):
        size += len(part)


class _Stream:
    """One stream of a server's process, which its end closes."""

    async def aclose(self) -> None:
        """Do nothing: the process's end closes the stream."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing, like `aclose`."""


class _Received(_Stream):
    """The messages on a process's stdout, one in each line. Reports their end: the SDK tells only pending requests."""

    def __init__(self, output: asyncio.StreamReader, what: str, on_end: OnEnd) -> None:
        self.broken = False
        """Whether the server breaks the protocol, so that nothing more is read."""
        self._output = output
        self._what = what
        self._on_end = on_end
        self._buffer = bytearray()
        self._searched = 0
        self._wrong = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        try:
            return await self.receive()
        except EndOfStream:
            raise StopAsyncIteration from None

    async def receive(self) -> Received:
        """Return the next message, or the error of a line that is not a message. Raises EndOfStream at the end."""
        # The buffer may hold thousands of lines, and reading it does not suspend.
        await asyncio.sleep(0)
        line = await self._line()
        try:
            message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as error:
            self._wrong += 1
            if self._wrong == 1:
                logger.warning("%s wrote a line to its stdout that is not a message: %s", self._what, shown(line))
            elif self._wrong >= MAX_WRONG_LINES:
                self._break(f"it wrote {MAX_WRONG_LINES} lines in a row that are not messages")
            return error
        self._wrong = 0
        return message

    async def _line(self) -> bytes:
        if self.broken:
            raise EndOfStream
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > MAX_MESSAGE_BYTES:
                self._buffer.clear()
                self._break(f"it sent over {MAX_MESSAGE_BYTES} bytes without a line break")
                raise EndOfStream
            try:
                part = await self._output.read(_PART_BYTES)
            except OSError:
                part = b""
            if not part:
                self._on_end("")
                raise EndOfStream
            self._buffer += part
        line = bytes(memoryview(self._buffer)[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _break(self, why: str) -> None:
        self.broken = True
        self._on_end(why)


class _Sent(_Stream):
    """Writes messages to a process's stdin, one in each line."""

    def __init__(self, input: asyncio.StreamWriter) -> None:
        self._input = input

    async def send(self, message: SessionMessage) -> None:
        """Write the message. Raises BrokenResourceError if the process has ended."""
        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        try:
            self._input.write(text.encode(errors="replace") + b"\n")
            await self._input.drain()
        except (OSError, RuntimeError) as error:
            raise BrokenResourceError from error


def shown(line: bytes | bytearray) -> str:
    """Return the start of a line, redacted, for the log."""
    return kept(line[:_LINE_BYTES].decode(errors="replace").rstrip(), LONGEST_LINE)


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
        text = shown(self._line)
        self._line.clear()
        if text:
            logger.info("%s: %s", self._what, text)


# -- a URL -------------------------------------------------------------------------------------------------------


class _Client(httpx2.AsyncClient):
    """An HTTP client in which a failed request affects no other.

    In the SDK, an error of one request ends the session with all its calls. This client turns it into an error response
    of the protocol, which says whether the request was sent.
    """

    def __init__(self, on_end: OnEnd, **settings: Any) -> None:  # Any: httpx2's settings
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
                self._on_end("")
            # The end of a session needs no reply from a lost server.
            return httpx2.Response(204, request=request) if ending else _failure(request, one_line(error), not_sent)
        if response.status_code == 404 and "mcp-session-id" in request.headers:
            # The server has restarted or dropped the session, and has not handled the request.
            await response.aclose()
            self._on_end("")
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
            if len(body) > MAX_MESSAGE_BYTES:
                raise httpx2.ReadError(f"the server's answer is larger than {MAX_MESSAGE_BYTES} bytes")
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
