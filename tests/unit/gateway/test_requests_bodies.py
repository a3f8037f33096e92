"""Bodies of requests: a late or incomplete one is one Problem."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.types import Message

from runtime_core.gateway import requests
from runtime_core.gateway.requests import Problem


def request(receive: Callable[[], Awaitable[Message]], *headers: tuple[bytes, bytes]) -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": list(headers)}, receive)


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def gone() -> Message:
    return {"type": "http.disconnect"}


async def test_a_body_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "BODY_SECONDS", 0.01)
    async with asyncio.timeout(10):
        with pytest.raises(Problem, match="did not arrive within"):
            await requests._read(request(never), lambda size: None, 100)


async def test_a_connection_that_ends_before_the_body_is_named() -> None:
    with pytest.raises(Problem, match="the connection ended before the body did"):
        await requests._read(request(gone), lambda size: None, 100)


@pytest.mark.parametrize("name", ["Host", "Authorization", "Content-Type", "Content-Encoding"])
def test_a_repeated_security_header_is_refused(name: str) -> None:
    one, other = [(name.lower().encode(), value) for value in (b"one", b"other")]
    requests.check_headers(request(never, one))
    with pytest.raises(Problem, match="more than once") as refused:
        requests.check_headers(request(never, one, other))
    assert refused.value.field == name
