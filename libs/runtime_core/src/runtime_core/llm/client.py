"""The models of the providers, as pydantic-ai has them, and one for an agent that opens its own when it is asked.

It takes seconds to load, so whoever needs it imports it in a thread, at the first call.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import httpx2
from pydantic_ai import RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import (
    Model,
    ModelRequestParameters,
    StreamedResponse,
    create_async_httpx2_client,
    infer_model,
    parse_model_id,
)
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class
from pydantic_ai.settings import ModelSettings as ClientSettings

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.failures import Place

if TYPE_CHECKING:
    from runtime_core.llm.models import OpenModels


class OpenModel:
    """A model with its connections. One for each settings in an event loop."""

    def __init__(self, model: Model, http: httpx2.AsyncClient | None) -> None:
        self.model = model
        self.place = Place(model.system, model.model_name, shown_url(model.base_url))
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


class LazyModel(Model[Any]):
    """The model of an agent's settings, which is opened in the process that asks it, when it asks."""

    def __init__(self, models: OpenModels, settings: ModelSettings, named: str | None = None) -> None:
        super().__init__()
        self._open_models = models
        self._calling = settings
        self._chosen = named

    @property
    def model_name(self) -> str:
        return self._chosen or str(getattr(self._calling.model, "model_name", self._calling.model))

    @property
    def system(self) -> str:
        return "weft"

    def named(self, name: str) -> LazyModel:
        """Another model, with the same settings."""
        return LazyModel(self._open_models, self._calling, name)

    async def __aenter__(self) -> Self:
        """The process's open models outlive a request."""
        return self

    async def __aexit__(self, *args: object) -> None:
        """See above."""

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ClientSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        opened = await self._open_models.open(self._calling, self._chosen)
        return await opened.model.request(messages, model_settings, model_request_parameters)

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ClientSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        opened = await self._open_models.open(self._calling, self._chosen)
        async with opened.model.request_stream(
            messages, model_settings, model_request_parameters, run_context
        ) as stream:
            yield stream


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


def shown_url(url: str | None) -> str:
    """The URL without a password: it is shown in errors."""
    if not url:
        return ""
    parsed = httpx2.URL(url)
    return str(parsed.copy_with(username=None, password=None)).rstrip("/")
