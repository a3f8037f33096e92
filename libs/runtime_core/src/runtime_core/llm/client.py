"""The client of the providers: pydantic-ai's model layer, and the only file that asks a model.

It takes seconds to load, so whoever needs it imports it in a thread, at the first call. See
docs/decisions/0015-pydantic-ai-as-the-model-client.md.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import httpx2
import msgspec
from pydantic_ai import ModelMessagesTypeAdapter
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import Model, ModelRequestParameters, create_async_httpx2_client, infer_model, parse_model_id
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class
from pydantic_ai.settings import ModelSettings as ClientSettings
from pydantic_ai.tools import ToolDefinition

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.failures import Broken, Place

OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer of a model."""

    message: dict[str, Any]  # Any: the JSON of a ModelResponse
    finish_reason: str
    usage: dict[str, float]
    """input_tokens, output_tokens, tokens, and cached and reasoning tokens where there are any."""
    provider: str
    model: str
    """As the response names it, often with a date."""
    response_id: str
    seconds: float
    first_seconds: float | None
    """To the first piece; None: it was not streamed."""
    cost: float | None
    """As the provider says; mostly it does not."""


class OpenModel:
    """A model with its connections. One for each settings in an event loop."""

    def __init__(self, model: Model, http: httpx2.AsyncClient | None) -> None:
        self.model = model
        self.place = Place(model.system, model.model_name, _shown_url(model.base_url))
        self._http = http

    @classmethod
    async def make(cls, settings: ModelSettings, named: str | None = None) -> OpenModel:
        """The model of these settings, or the one `named` with their keys. Raises what the client raises.

        In a thread: it loads certificates and the provider's own library.
        """
        made = await asyncio.to_thread(_made, settings, settings.model if named is None else named)
        await made.model.__aenter__()
        return made

    async def close(self) -> None:
        await self.model.__aexit__(None, None, None)
        if self._http is not None:
            await self._http.aclose()

    async def ask(
        self,
        request: Mapping[str, Any],
        limits: ModelSettings,
        max_tokens: int | None,
        on_text: OnText | None,
        *,
        idempotency_key: str,
    ) -> Response:
        """Send a request (as call.py records it) and return when the answer is complete.

        `max_tokens` is the most that the answer may have; None: as the settings say. `on_text` is told pieces of text;
        None: the answer is not streamed. `idempotency_key` is the same in every attempt of a call: where a process died
        between an answer and its keeping, a provider or gateway that knows the header need not do the work again.
        Raises the client's errors and Broken.
        """
        began = time.monotonic()
        messages = ModelMessagesTypeAdapter.validate_json(msgspec.json.encode(request["messages"]))
        settings = _settings(request["settings"], limits, max_tokens)
        if "extra_headers" not in getattr(self.model, "unsupported_settings", ()):
            headers = {IDEMPOTENCY_KEY: quote(idempotency_key), **settings.get("extra_headers", {})}
            settings["extra_headers"] = headers
        parameters = _parameters(request.get("tools", ()), request.get("output"))
        first: float | None = None
        if on_text is None:
            answer = await model_request(
                self.model, messages, model_settings=settings, model_request_parameters=parameters
            )
        else:

            def note_first() -> None:
                nonlocal first
                first = time.monotonic() - began

            answer = await self._streamed(messages, settings, parameters, limits.silence_seconds, on_text, note_first)
        if answer.state == "suspended":
            raise UserError("the model paused its turn, as in background mode: switch that off in settings=")
        return _response(answer, self.model, time.monotonic() - began, first)

    async def _streamed(
        self,
        messages: list[ModelMessage],
        settings: ClientSettings,
        parameters: ModelRequestParameters,
        silence_seconds: float,
        on_text: OnText,
        note_first: Callable[[], None],
    ) -> ModelResponse:
        async with model_request_stream(
            self.model, messages, model_settings=settings, model_request_parameters=parameters
        ) as stream:
            # Until the first piece a model may think for long: there only the limit of the whole call holds.
            limit: float | None = None
            events = aiter(stream)
            while True:
                try:
                    async with asyncio.timeout(limit):
                        event = await anext(events, None)
                except TimeoutError:
                    raise Broken(f"the stream said nothing for {silence_seconds:g} s") from None
                if event is None:
                    break
                if limit is None:
                    note_first()
                    limit = silence_seconds
                if text := _text(event):
                    on_text(text)
            answer = stream.get()
        if answer.state in ("incomplete", "interrupted"):
            raise Broken("the stream ended before the answer was complete")
        return answer


IDEMPOTENCY_KEY = "Idempotency-Key"
"""The header, as OpenAI's and other clients name it."""

_TAKE_CLIENT = frozenset({"openai", "openai-chat", "openai-responses", "anthropic"})
"""Providers that get connections of ours, with the agent's limits; others make their own."""


def _made(settings: ModelSettings, wanted: object) -> OpenModel:
    if isinstance(wanted, Model):
        return OpenModel(wanted, None)
    if callable(wanted):
        model = wanted()
        if not isinstance(model, Model):
            raise TypeError(f"model= is a function that gave {model!r}: it must give a Model of pydantic-ai")
        return OpenModel(model, None)
    if not isinstance(wanted, str):
        raise TypeError(f"model= is {wanted!r}: give a name, a Model of pydantic-ai, or a function that makes one")
    return _named(wanted, settings)


def _named(name: str, settings: ModelSettings) -> OpenModel:
    """A model by pydantic-ai's name for it, with the base URL, the key and the timeouts of the settings."""
    # With a provider factory of one's own the client does not look whether it knows the provider.
    known, wanted = parse_model_id(name)
    try:
        takes = inspect.signature(infer_provider_class(known or "")).parameters
    except ValueError:
        infer_model(name)  # raises, with the name that may have been meant
        raise
    http: list[httpx2.AsyncClient] = []

    def provider(kind: str) -> Provider[Any]:
        given: dict[str, Any] = {"base_url": settings.base_url, "api_key": settings.api_key}
        given = {name: value for name, value in given.items() if value is not None}
        for parameter in given:
            if parameter not in takes:
                raise TypeError(f"provider {kind!r} takes no {parameter}: leave it out, or give a Model as model=")
        if kind in _TAKE_CLIENT:
            http.append(_http(settings))
            given["http_client"] = http[0]
        return infer_provider_class(kind)(**given) if given else infer_provider(kind)

    if known == "openai-chat":
        from pydantic_ai.models.openai import OpenAIChatModel  # where it is needed: others bring no openai

        # What ends without a finish reason has been cut off, though the transport may not have seen it.
        whole = OpenAIModelProfile(openai_chat_streaming_requires_finish_reason=True)
        model: Model = OpenAIChatModel(wanted, provider=provider(known), profile=whole)
    else:
        model = infer_model(name, provider)
    return OpenModel(model, http[0] if http else None)


def _http(settings: ModelSettings) -> httpx2.AsyncClient:
    return create_async_httpx2_client(timeout=httpx2.Timeout(settings.call_seconds, connect=settings.connect_seconds))


def _settings(given: Mapping[str, Any], limits: ModelSettings, max_tokens: int | None) -> ClientSettings:
    settings: dict[str, Any] = {"request_timeout": limits.call_seconds, "timeout": limits.call_seconds, **given}
    if max_tokens is not None:
        settings["max_tokens"] = max_tokens
    # Retries are the run's: they wait on the broker, and each is in the record.
    settings["max_retries"] = 0
    return cast(ClientSettings, settings)


def _parameters(tools: Sequence[Mapping[str, Any]], output: Mapping[str, Any] | None) -> ModelRequestParameters:
    definitions = [
        ToolDefinition(name=tool["name"], description=tool.get("description"), parameters_json_schema=tool["arguments"])
        for tool in tools
    ]
    if output is None or output["mode"] == "text":
        return ModelRequestParameters(function_tools=definitions)
    if output["mode"] == "native":
        wanted = OutputObjectDefinition(
            json_schema=output["schema"], name=output["name"], description=output.get("description") or None
        )
        return ModelRequestParameters(function_tools=definitions, output_mode="native", output_object=wanted)
    by_tool = ToolDefinition(
        name=output["name"],
        description=output.get("description") or None,
        parameters_json_schema=output["schema"],
        kind="output",
    )
    return ModelRequestParameters(
        function_tools=definitions, output_mode="tool", output_tools=[by_tool], allow_text_output=False
    )


def _text(event: ModelResponseStreamEvent) -> str:
    match event:
        case PartStartEvent(part=TextPart(content=text)):
            return text
        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            return text
    return ""


def _response(answer: ModelResponse, model: Model, seconds: float, first: float | None) -> Response:
    usage: dict[str, float] = {
        "input_tokens": answer.usage.input_tokens,
        "output_tokens": answer.usage.output_tokens,
        "tokens": answer.usage.input_tokens + answer.usage.output_tokens,
        "requests": 1,
    }
    details = {
        "cached_tokens": answer.usage.cache_read_tokens,
        "cache_write_tokens": answer.usage.cache_write_tokens,
        "reasoning_tokens": answer.usage.output_reasoning_tokens or answer.usage.details.get("reasoning_tokens", 0),
    }
    usage |= {name: amount for name, amount in details.items() if amount}
    message: dict[str, Any] = ModelMessagesTypeAdapter.dump_python([answer], mode="json")[0]
    cost = answer.usage.cost
    calls = any(part.part_kind == "tool-call" for part in answer.parts)
    return Response(
        message=message,
        # One of the two APIs says `stop` for tool calls.
        finish_reason="tool_call"
        if calls and answer.finish_reason in (None, "stop")
        else answer.finish_reason or "stop",
        usage=usage,
        provider=answer.provider_name or model.system,
        model=answer.model_name or model.model_name,
        response_id=answer.provider_response_id or "",
        seconds=seconds,
        first_seconds=first,
        cost=None if cost is None else float(cost),
    )


def _shown_url(url: str | None) -> str:
    """The URL without a password: it is shown in errors."""
    if not url:
        return ""
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(username=None, password=None)).rstrip("/")
