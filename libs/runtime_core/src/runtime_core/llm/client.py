"""The models of providers, opened with pydantic-ai, and the streamed text of their answers.

This module takes seconds to load: import it in a thread, at the first call.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote

import httpx2
from pydantic_ai import RunContext
from pydantic_ai.messages import (
    AgentStreamEvent,
    ModelMessage,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import (
    Model,
    ModelRequestParameters,
    StreamedResponse,
    create_async_http_client,
    create_async_httpx2_client,
    infer_model,
    parse_model_id,
)
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers import Provider, infer_provider_class
from pydantic_ai.providers.gateway import gateway_provider
from pydantic_ai.settings import ModelSettings as ClientSettings

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.failures import Endpoint, StreamBroken
from runtime_core.runs.model_step import ModelCall

IDEMPOTENCY_KEY = "Idempotency-Key"
"""The header of OpenAI's and other clients."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Limit of one answer of a provider, as it is sent."""
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Limit of a line of it: one event of a stream, or an answer that is not streamed."""

BATCH_SECONDS = 0.04
"""How long text waits for more."""
BATCH_CHARACTERS = 200

CURRENT_CALL: ContextVar[CallState] = ContextVar("weft_model_call")
"""The current call, for the handler of its events."""


class OpenModel:
    """A model with its connections; one per event loop and settings."""

    def __init__(self, model: Model, http: Any | None) -> None:
        self.model = model
        self.endpoint = Endpoint(model.system, model.model_name, shown_url(model.base_url))
        self._http = http

    @classmethod
    async def make(cls, settings: ModelSettings, named: str | None = None) -> OpenModel:
        """Open the model of these settings, or the model `named` with their keys. Raises the client's errors.

        Runs in a thread: it loads certificates and the provider's library.
        """
        made = await asyncio.to_thread(_made, settings, settings.model if named is None else named)
        await made.model.__aenter__()
        return made

    async def close(self) -> None:
        await self.model.__aexit__(None, None, None)
        if self._http is not None:
            await self._http.aclose()


Opener = Callable[[ModelSettings, str | None], Awaitable[OpenModel]]
"""Opens the model of these settings, or the named one with their keys, once per process."""


class LazyModel(Model[Any]):
    """The model of an agent's settings, opened at its first request, in the process that makes it."""

    def __init__(self, open: Opener, settings: ModelSettings, named: str | None = None) -> None:
        super().__init__()
        self._open = open
        self._model_settings = settings
        self._chosen = named

    @property
    def model_name(self) -> str:
        return self._chosen or str(getattr(self._model_settings.model, "model_name", self._model_settings.model))

    @property
    def system(self) -> str:
        return "weft"

    def named(self, name: str) -> LazyModel:
        """Return another model with the same settings."""
        return LazyModel(self._open, self._model_settings, name)

    async def __aenter__(self) -> Self:
        """Do nothing: open models outlive a request."""
        return self

    async def __aexit__(self, *args: object) -> None:
        """Do nothing, like `__aenter__`."""

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ClientSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        opened = await self._open(self._model_settings, self._chosen)
        return await opened.model.request(messages, model_settings, model_request_parameters)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ClientSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        opened = await self._open(self._model_settings, self._chosen)
        async with opened.model.request_stream(
            messages, model_settings, model_request_parameters, run_context
        ) as stream:
            yield stream


_LEGACY = frozenset({"cohere", "github", "groq"})
"""Providers whose libraries need httpx itself; the others take httpx2."""
_IGNORES_CLIENT = frozenset({"huggingface"})
"""Providers that accept an HTTP client and do not use it."""


def _made(settings: ModelSettings, wanted: object) -> OpenModel:
    if isinstance(wanted, Model):
        return OpenModel(wanted, None)
    if callable(wanted):
        model = wanted()
        if not isinstance(model, Model):
            raise TypeError(f"model= is a function that returned {model!r}: it must return a Model of pydantic-ai")
        return OpenModel(model, None)
    if not isinstance(wanted, str):
        raise TypeError(f"model= is {wanted!r}: pass a name, a Model of pydantic-ai, or a function that returns one")
    return _named(wanted, settings)


def _named(name: str, settings: ModelSettings) -> OpenModel:
    """Open a model by its name in pydantic-ai, with the base URL, key and timeouts of the settings."""
    # infer_model does not check the provider's name if it gets a provider factory.
    known, wanted = parse_model_id(name)
    try:
        takes_client = "http_client" in inspect.signature(infer_provider_class(known or "")).parameters
    except ValueError:
        infer_model(name)  # raises, and suggests a similar name
        raise
    http: list[Any] = []  # Any: the client of httpx2, or of httpx, which need not be installed

    def provider(kind: str) -> Provider[Any]:
        make = _provider_of(kind)
        takes = inspect.signature(make).parameters
        given: dict[str, Any] = {"base_url": settings.base_url, "api_key": settings.api_key}
        given = {name: value for name, value in given.items() if value is not None}
        for parameter in given:
            if parameter not in takes:
                raise TypeError(f"provider {kind!r} takes no {parameter}: leave it out, or pass a Model as model=")
        if takes_client and kind not in _IGNORES_CLIENT:
            http.append(_http(settings, kind.removeprefix("gateway/") in _LEGACY))
            given["http_client"] = http[0]
        return make(**given)

    if known == "openai-chat":
        from pydantic_ai.models.openai import OpenAIChatModel  # imported here: other providers do not need openai

        # A stream without a finish reason was cut off, even if the transport saw no error.
        whole = OpenAIModelProfile(openai_chat_streaming_requires_finish_reason=True)
        model: Model = OpenAIChatModel(wanted, provider=provider(known), profile=whole)
    else:
        model = infer_model(name, provider)
    return OpenModel(model, http[0] if http else None)


def _provider_of(kind: str) -> Callable[..., Provider[Any]]:
    if kind.startswith("gateway/"):
        return functools.partial(gateway_provider, kind.removeprefix("gateway/"))
    return infer_provider_class(kind)


def _http(settings: ModelSettings, legacy: bool = False) -> Any:  # Any: see `_named`
    """Return a client whose answers are bounded: of httpx2, or of httpx for libraries that take no other."""
    if legacy:
        limits: dict[str, Any] = {"timeout": settings.call_seconds, "connect": settings.connect_seconds}
        client: Any = create_async_http_client(**limits)  # raises ImportError if httpx is missing
        library: Any = sys.modules["httpx"]
    else:
        timeout = httpx2.Timeout(settings.call_seconds, connect=settings.connect_seconds)
        client, library = create_async_httpx2_client(timeout=timeout), httpx2
    client.event_hooks["request"].append(_uncompressed)
    client.event_hooks["response"].append(functools.partial(_bound, library))
    return client


async def _uncompressed(request: Any) -> None:
    """Ask for an answer as it is, whatever the provider's library asks for: few compressed bytes may hold gigabytes."""
    request.headers["Accept-Encoding"] = "identity"


async def _bound(library: Any, response: Any) -> None:
    """Limit the size of a response whose body is still to be read. `library` is httpx2 or httpx."""
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        await response.aclose()
        raise library.DecodingError(f"the answer is compressed ({encoding[:40]!r}) but the request did not allow that")
    response.stream = _bounded_stream(library)(response.stream)


@functools.cache
def _bounded_stream(library: Any) -> Any:
    """Return the class of a response's bytes. They raise ReadError if they or one of their lines exceed the limits."""

    class BoundedStream(library.AsyncByteStream):  # type: ignore[misc]  # the base class of either library
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            line = size = 0
            async for part in self._stream:
                size += len(part)
                end = part.rfind(b"\n")
                line = line + len(part) if end < 0 else len(part) - end - 1
                if size > MAX_ANSWER_BYTES:
                    raise library.ReadError(f"the answer has over {MAX_ANSWER_BYTES} bytes")
                if line > MAX_LINE_BYTES:
                    raise library.ReadError(f"a line of the answer has over {MAX_LINE_BYTES} bytes")
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    return BoundedStream


def shown_url(url: str | None) -> str:
    """Return the URL without user and password, for errors."""
    if not url:
        return ""
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(username=None, password=None)).rstrip("/")


# ---- one call ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CallState:
    named: str | None
    """The model that a hook chose; None: the agent's model."""
    pieces: TextBatcher | None
    """Streams the text to the client; None: do not stream."""
    silence_seconds: float
    idempotency_key: str
    """The same in every attempt of the call."""
    traceparent: str = ""
    began: float = field(default_factory=time.monotonic)
    first_seconds: float | None = None
    """The time to the first event; None: there is none yet."""


def with_key(settings: Mapping[str, Any], model: object, live: CallState) -> Any:  # Any: a TypedDict of theirs
    """Return the settings with the call's idempotency key as a header, if the client can send headers.

    If a process dies before it journals an answer, a gateway that knows the header can answer the repeat from its
    store.
    """
    if "extra_headers" in getattr(model, "unsupported_settings", ()):
        return settings
    headers = {IDEMPOTENCY_KEY: quote(live.idempotency_key), **settings.get("extra_headers", {})}
    return {**settings, "extra_headers": headers}


async def show(stream: AsyncIterable[AgentStreamEvent]) -> AsyncIterator[AgentStreamEvent]:
    """Yield a model's events, and stream their text to the client. Raises StreamBroken after a long silence."""
    live = CURRENT_CALL.get(None)
    # A model may think for long before its first event: until then only the limit of the whole call applies.
    limit: float | None = None
    events = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(limit):
                event = await anext(events, None)
        except TimeoutError:
            if live is None or limit is None:
                raise
            raise StreamBroken(f"the stream was silent for {limit:g} s") from None
        if event is None:
            return
        if live is not None:
            if live.first_seconds is None:
                live.first_seconds = time.monotonic() - live.began
                limit = live.silence_seconds
            if live.pieces is not None and (text := _text(event)):
                live.pieces.add(text)
        yield event


def _text(event: AgentStreamEvent) -> str:
    match event:
        case PartStartEvent(part=TextPart(content=text)):
            return text
        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            return text
    return ""


class TextBatcher:
    """Batches streamed text, so that a fast model does not cost a broker write for each word."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._waiting: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        if call.attempt > 1:
            # Replace the text of an earlier attempt, even if this one has none.
            call.stream("")

    def add(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= BATCH_CHARACTERS:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._send)

    def close(self) -> None:
        """Send the rest of the text."""
        self._send()

    async def withdraw(self) -> None:
        """Drop waiting text, and withdraw the text that the client has."""
        self._waiting.clear()
        if self._shown:
            await self._call.again()
            self._call.stream("")

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting:
            return
        text = "".join(self._waiting)
        self._waiting.clear()
        self._size = 0
        self._shown = True
        self._call.stream(text)
