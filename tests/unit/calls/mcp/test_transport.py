"""How failed HTTP requests to an MCP server are reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from runtime_core.calls.mcp.transport import NOT_SENT, _Client

SESSION = {"mcp-session-id": "s-1"}


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that answers each request with these bytes, or closes the connection if there are none."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()
        await server.wait_closed()


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


async def sent(method: str, url: str, headers: dict[str, str]) -> tuple[int, Any, int]:
    """Return the status, the body's error, and how often the end of the session was reported."""
    ends: list[int] = []
    async with _Client(lambda why: ends.append(1)) as client:
        response = await client.request(method, url, headers=headers)
        said = response.json()["error"]["data"][NOT_SENT] if response.status_code == 503 else None
        return response.status_code, said, len(ends)


@pytest.mark.parametrize(
    ("method", "headers", "becomes"),
    [
        ("POST", SESSION, (503, True, 1)),
        ("DELETE", SESSION, (204, None, 1)),
        ("POST", {}, (404, None, 0)),
    ],
)
async def test_a_session_that_the_server_forgot_has_ended(
    method: str, headers: dict[str, str], becomes: tuple[int, Any, int]
) -> None:
    async with answering(NOT_FOUND) as url:
        assert await sent(method, url, headers) == becomes


async def test_a_request_that_could_not_leave_is_distinguished_from_one_whose_answer_was_lost() -> None:
    async with answering(b"") as url:
        assert await sent("POST", url, SESSION) == (503, False, 0)
        assert await sent("DELETE", url, SESSION) == (204, None, 0)
    # Nobody listens there now.
    assert await sent("POST", url, SESSION) == (503, True, 1)
