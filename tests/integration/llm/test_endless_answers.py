"""Answers of a provider that never end, or are larger than anything: a bounded part is read, and one line says so."""

from __future__ import annotations

import asyncio
import gzip
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from runtime_core.declare.declaration import RetryPolicy
from runtime_core.llm import client as model_client
from tests.integration.llm.asking import app_of, asker, failure
from tests.openai_server.driver import OpenAIServer
from weft.testing import LocalApp

MIB = 1024 * 1024
MOST_GROWTH = 64 * MIB
SENT = 16 * MIB
"""What the server sends before it gives up: far more than the limits of these tests."""

JSON, STREAM = "application/json", "text/event-stream"
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'
ENDLESS = {
    "an endless line of a stream": (STREAM, "", lambda: b'data: {"id":"' + b"x" * 65536, "a line of the answer"),
    "an endless stream of comments": (STREAM, "", lambda: b": ping\n\n" * 10_000, "the answer has over"),
    "an endless stream of events": (STREAM, "", lambda: EVENT * 200, "the answer has over"),
    "an endless answer": (JSON, "", lambda: b'{"id":"' + b"x" * 65536, "a line of the answer"),
    "an endless answer of many lines": (JSON, "", lambda: b"\n" * 65536, "the answer has over"),
    "a bomb": (JSON, "gzip", lambda: gzip.compress(b" " * 64 * MIB), "compressed"),
}


@asynccontextmanager
async def provider(kind: str, encoding: str, part: Callable[[], bytes]) -> AsyncIterator[str]:
    """A server that answers every request with this part, again and again."""
    sent = part()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            lines = [
                "HTTP/1.1 200 OK",
                f"Content-Type: {kind}",
                *([f"Content-Encoding: {encoding}"] if encoding else []),
            ]
            writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode())
            for _ in range(SENT // len(sent) + 1):
                writer.write(sent)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


@pytest.mark.parametrize("case", ENDLESS)
async def test_an_answer_without_an_end_ends_the_task_in_one_line(
    openai_server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(model_client, "MAX_ANSWER_BYTES", MIB)
    monkeypatch.setattr(model_client, "MAX_LINE_BYTES", MIB // 2)
    kind, encoding, part, said = ENDLESS[case]
    async with provider(kind, encoding, part) as url:
        agent = asker(
            openai_server, base_url=url, stream=kind == STREAM, retry=RetryPolicy(attempts=2, base_seconds=0.01)
        )
        async with LocalApp(app_of(agent)) as client:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            failed, message = await failure(client)
    assert failed in ("ModelOutage", "ModelUnreachable")
    assert said in message
    assert "\n" not in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_GROWTH // 1024
