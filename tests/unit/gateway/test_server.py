"""Connections are bounded in bytes, in time and in number, and wrong HTTP gets one problem."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime_core.gateway import server

PATIENCE = 20.0
LINE = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
BOUND = server.HEAD_MAX_BYTES
READ_SIZE = 256 * 1024
"""What one read of a connection brings at most, with both event loops."""


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, or at once on /early."""
    request = Request(scope, receive, send)
    body = b"early" if request.url.path == "/early" else await request.body()
    await Response(body)(scope, receive, send)


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """Serve the application on a port."""
    listening = server.listen("127.0.0.1", 0)
    serving = server.server_of(application, 2.0)
    running = asyncio.create_task(serving.serve([listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        serving.should_exit = True
        await running


async def answer(port: int, *parts: bytes) -> bytes:
    """Send parts, and return everything until the server ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(PATIENCE):
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


def kinds(said: bytes) -> list[tuple[int, str]]:
    """Return status and kind of each problem in what a server has said."""
    found = []
    for each in said.split(b"HTTP/1.1 ")[1:]:
        head, _, body = each.partition(b"\r\n\r\n")
        assert b"content-type: application/problem+json" in head.lower(), each
        found.append((int(head[:3]), json.loads(body)["type"].rpartition(":")[2]))
    return found


LENGTHS = {
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "length and chunks": b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown encoding": b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "hidden encoding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "signed length": b"Content-Length: +3\r\n\r\nabc",
    "folded header": b"X: a\r\n b\r\n\r\n",
    "blank in a name": b"Content-Length : 3\r\n\r\nabc",
    "bare line feed in a chunk": b"Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
    "NUL": b"X: \x00\r\n\r\n",
}


@pytest.mark.parametrize("rest", LENGTHS.values(), ids=list(LENGTHS))
async def test_an_ambiguous_request_is_refused_and_nothing_behind_it_is_read(rest: bytes) -> None:
    async with served() as port:
        said = await answer(port, LINE + rest + b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kinds(said) == [(400, "syntax")]


@pytest.mark.parametrize("start", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00"])
async def test_other_protocols_get_a_problem(start: bytes) -> None:
    async with served() as port:
        assert kinds(await answer(port, start)) == [(400, "syntax")]


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([b"GET /" + b"a" * 2 * BOUND + b" HTTP/1.1\r\n\r\n"], id="path"),
        pytest.param([LINE + b"X: " + b"a" * 2 * BOUND + b"\r\n\r\n"], id="header"),
        pytest.param([LINE + b"X: 1\r\n" * BOUND + b"\r\n"], id="headers"),
        pytest.param([LINE + b"X: " + b"a" * BOUND, *[b"a" * READ_SIZE] * 4], id="header without an end"),
    ],
)
async def test_a_head_is_bounded(parts: list[bytes]) -> None:
    async with served() as port:
        said = await answer(port, *parts)
        assert said == b"" or kinds(said) == [(431, "head")]  # empty: the client still wrote


async def test_a_large_head_is_refused_with_the_reason() -> None:
    async with served() as port:
        assert kinds(await answer(port, LINE + b"X: " + b"a" * BOUND + b"\r\n\r\n")) == [(431, "head")]
        small = LINE + b"Connection: close\r\nContent-Length: 0\r\nX: " + b"a" * (BOUND - 1000) + b"\r\n\r\n"
        assert (await answer(port, small)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(b"0\r\n" + b"X: 1\r\n" * BOUND, id="trailers"),
        pytest.param(b"0\r\nX: " + b"a" * 3 * READ_SIZE, id="trailer without an end"),
        pytest.param(b"3;" + b"a" * 3 * READ_SIZE, id="extension of a chunk"),
    ],
)
async def test_chunk_extensions_and_trailers_are_bounded(end: bytes) -> None:
    async with served() as port:
        await answer(port, LINE + b"Transfer-Encoding: chunked\r\n\r\n" + end)  # returns, so the server has closed


async def test_a_body_larger_than_a_head_arrives() -> None:
    async with served() as port:
        body = b"a" * 10 * BOUND
        said = await answer(port, LINE + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body), body)
        assert said.endswith(body)


async def test_a_head_that_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    async with served() as port:
        assert kinds(await answer(port)) == [(408, "slow")]
        assert kinds(await answer(port, LINE)) == [(408, "slow")]
        after_another = await answer(port, b"GET /early HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nX: ")
        assert after_another.startswith(b"HTTP/1.1 200 ")
        assert kinds(after_another[after_another.rindex(b"HTTP/1.1") :]) == [(408, "slow")]


async def test_an_unread_body_ends_the_connection() -> None:
    async with served() as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LINE.replace(b"/ ", b"/early ") + b"Content-Length: 1000000\r\n\r\n")
        assert (await reader.readuntil(b"early")).startswith(b"HTTP/1.1 200 ")
        ended = asyncio.create_task(reader.read())
        while not ended.done():  # each byte would put off the end of a silent connection
            writer.write(b"a")
            await asyncio.wait([ended], timeout=0.1)
        writer.close()


async def test_the_next_request_may_follow_an_unread_body() -> None:
    async with served() as port, asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(LINE.replace(b"/ ", b"/early ") + b"Content-Length: 3\r\n\r\n")
            await reader.readuntil(b"early")
            writer.write(b"abc")
        assert await reader.read() == b""  # silent, it ends some seconds later
        writer.close()


async def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 2)
    async with served() as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert kinds(await answer(port)) == [(503, "overloaded")]
        for _, writer in held:
            writer.close()
        while not (await answer(port, b"GET /early HTTP/1.1\r\nConnection: close\r\n\r\n")).endswith(b"early"):
            pass
