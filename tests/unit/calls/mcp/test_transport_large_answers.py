"""Answers of an MCP server over HTTP that are larger than any result."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator

import httpx2
import pytest

from runtime_core.calls.mcp import transport

MOST = 100_000


class Large(httpx2.AsyncByteStream):
    """A body that is sent in parts."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(MOST // 10):
            yield b" " * 1000


async def answered(monkeypatch: pytest.MonkeyPatch, response: httpx2.Response) -> httpx2.Response:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", MOST)
    served = httpx2.MockTransport(lambda request: response)
    async with (
        transport._Client(lambda why: None, transport=served) as client,
        client.stream("POST", "http://server/mcp", json={}) as found,
    ):
        await found.aread()
        return found


@pytest.mark.parametrize("compressed", [False, True])
async def test_an_answer_that_is_too_large_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    headers = {"Content-Type": "application/json"}
    if compressed:
        body = gzip.compress(b" " * 100 * MOST)
        assert len(body) < MOST
        response = httpx2.Response(200, headers={**headers, "Content-Encoding": "gzip"}, content=body)
    else:
        response = httpx2.Response(200, headers=headers, stream=Large())
    found = await answered(monkeypatch, response)
    error = found.json()["error"]
    assert found.status_code == 503
    assert f"the server's answer is larger than {MOST} bytes" in error["message"]
    assert error["data"] == {transport.NOT_SENT: False}


async def test_other_answers_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"jsonrpc": "2.0", "id": 1, "result": {"text": "ä" * 1000}}
    headers = {"Content-Type": "application/json; charset=utf-8", "Mcp-Session-Id": "s", "Content-Encoding": "gzip"}
    body = gzip.compress(json.dumps(value).encode())
    found = await answered(monkeypatch, httpx2.Response(200, headers=headers, content=body))
    assert (found.status_code, found.json(), found.headers["mcp-session-id"]) == (200, value, "s")
