"""Answers of a provider that never end, or are larger than anything: a bounded part is read, and one line says so."""

from __future__ import annotations

import ast
import asyncio
import gzip
import inspect
import resource
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pydantic_ai import providers

from runtime_core.declare.declaration import RetryPolicy
from runtime_core.llm import client as model_client
from runtime_core.llm.agent import ModelSettings
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
async def test_an_endless_answer_ends_the_task_in_one_line(
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


# -- other providers ------------------------------------------------------------------------------------------------


class Opened(Exception):
    """Stops the opening of a model once its provider has its client."""


def client_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:  # Any: an HTTP client
    """Return the HTTP client that a provider of this kind is opened with; its library need not be installed."""
    given: list[Any] = []

    class Fake:
        def __init__(self, *, api_key: str | None = None, http_client: object = None) -> None:
            given.append(http_client)
            raise Opened

    monkeypatch.setattr(model_client, "infer_provider_class", lambda kind: Fake)
    monkeypatch.setattr(model_client, "infer_model", lambda name, provider: provider(kind))
    with pytest.raises(Opened):
        model_client._named(f"{kind}:m", ModelSettings(f"{kind}:m"))
    return given[0]


@pytest.mark.parametrize("kind", ["google", "mistral", "groq", "cohere"])
@pytest.mark.parametrize("case", ["an endless line of a stream", "an endless stream of comments", "a bomb"])
async def test_the_answers_of_other_providers_are_bounded_too(
    monkeypatch: pytest.MonkeyPatch, kind: str, case: str
) -> None:
    monkeypatch.setattr(model_client, "MAX_ANSWER_BYTES", MIB)
    monkeypatch.setattr(model_client, "MAX_LINE_BYTES", MIB // 2)
    # Libraries that need httpx install it; httpx2 has the same classes.
    monkeypatch.setitem(sys.modules, "httpx", httpx2)
    content, encoding, part, said = ENDLESS[case]
    async with provider(content, encoding, part) as url, client_of(kind, monkeypatch) as client:
        with pytest.raises((httpx2.ReadError, httpx2.DecodingError), match=said):
            # A library may ask for compressed answers.
            await client.get(url, headers={"Accept-Encoding": "gzip"})


async def test_no_library_of_a_provider_gets_a_compressed_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of("google", monkeypatch)
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers["Accept-Encoding"])
        return httpx2.Response(200, text="ok")

    client._transport = httpx2.MockTransport(answer)
    async with client:
        assert (await client.get("http://provider/", headers={"Accept-Encoding": "gzip"})).text == "ok"
    assert asked == ["identity"]


def test_every_provider_that_takes_an_http_client_is_given_one_of_its_library() -> None:
    """Reads the providers of pydantic-ai: a new one must be bounded, or be named in the documents."""
    kinds: dict[str, str] = {}
    for path in Path(inspect.getfile(providers)).parent.glob("[a-z]*.py"):
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.FunctionDef) and found.name == "__init__":
                for argument in (*found.args.args, *found.args.kwonlyargs):
                    if argument.arg == "http_client" and argument.annotation is not None:
                        kinds[path.stem.replace("_", "-")] = ast.unparse(argument.annotation)
    assert {kind for kind, type in kinds.items() if type.startswith("httpx.")} == model_client._LEGACY
    assert {kind for kind, type in kinds.items() if type.startswith("AsyncClient")} == model_client._IGNORES_CLIENT
    both = ("AsyncHTTPClient", "_OpenAIHTTPClient", "httpx2.AsyncClient")
    others = {kind for kind, type in kinds.items() if type.startswith(both)}
    assert others == kinds.keys() - model_client._LEGACY - model_client._IGNORES_CLIENT
    assert {"google", "mistral", "openai", "anthropic", "azure", "openrouter"} <= others
