"""The part of HTTP/1.1 that the clients use: requests with a length, answers with one or in chunks, keep-alive."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Names in small letters."""
    body: bytes


class BadRequest(Exception):
    """The bytes are no request that this server understands."""


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request of a connection; None if the client has closed it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    target = rest.rpartition(" ")[0]
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        raise BadRequest("a request in chunks is not read here: send content-length")
    try:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    url = urlsplit(target)
    return Request(method, url.path, dict(parse_qsl(url.query)), headers, body)


def head_of(status: int, headers: Mapping[str, str]) -> bytes:
    """The status line and the headers of an answer."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}\r\n".encode("latin-1")


def json_reply(status: int, body: bytes) -> bytes:
    """A whole answer that holds JSON."""
    return head_of(status, {"content-type": "application/json", "content-length": str(len(body))}) + body


def chunk_of(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
