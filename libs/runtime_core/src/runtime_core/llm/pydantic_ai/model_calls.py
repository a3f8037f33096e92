"""A model request of pydantic-ai as a step: asked once, kept with what it has used, asked again by timers."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from opentelemetry.trace import NoOpTracer
from pydantic_ai import ModelMessagesTypeAdapter, RunContext
from pydantic_ai.durable_exec import DurableOperation, ModelRequestParams
from pydantic_ai.messages import AgentStreamEvent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models import ModelRequestParameters
from pydantic_core import to_jsonable_python

from runtime_core.errors import LocalStepError
from runtime_core.llm.agent import OUTAGES
from runtime_core.llm.budget import estimate_tokens, price_of, tokens_of_json
from runtime_core.llm.failures import Later, ModelFailed, ModelProblem, Place, given_up, judged
from runtime_core.llm.messages import Pieces
from runtime_core.telemetry.attributes import ERROR_TYPE
from runtime_core.telemetry.gen_ai import Span, model_span, request_attributes, response_attributes
from runtime_core.telemetry.redaction import Attribute
from runtime_core.telemetry.spans import within

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext
    from runtime_core.runs.model_step import ModelCall, Reserve

RATE_LIMIT_PATIENCE_SECONDS = 3600.0
"""How long a provider may put a request off, again and again."""
RESERVED_WAIT_SECONDS = 1.0
"""How long a request waits for other calls of the task that hold what is left of its limits; doubled, up to 30 s."""
DEFAULT_MAX_TOKENS = 4_096
"""How long an answer may be where the task has a limit and the agent's settings say nothing."""
LEAST_TOKENS = 16
"""An answer that may not have so many is not worth asking for."""

_PIECES: contextvars.ContextVar[Pieces] = contextvars.ContextVar("weft_pydantic_ai_pieces")
Prices = Mapping[str, Any]  # Any: llm.prices.Price, as `price_of` looks


async def ask(
    ctx: AgentContext,
    name: str,
    operation: DurableOperation[ModelRequestParams, Any, Any],  # Any: as journaled
    params: ModelRequestParams,
    context: contextvars.Context,
    prices: Prices,
) -> object:
    """The answer to a request, as its operation writes it. In a branch of the run; `context` is the asking task's.

    Raises ModelFailed for what no further try would mend.
    """
    asking = _Asking(ctx, name, operation, params, context, prices)
    return await asking.until_answered()


class _Asking:
    """A request that is made until it is answered."""

    def __init__(
        self,
        ctx: AgentContext,
        name: str,
        operation: DurableOperation[ModelRequestParams, Any, Any],  # Any: as journaled
        params: ModelRequestParams,
        context: contextvars.Context,
        prices: Prices,
    ) -> None:
        model = cast("Any", params.run_context.model)  # a Model: a realtime session has no runs
        self._ctx = ctx
        self._name = name
        self._operation = operation
        self._params = params
        self._context = context
        self._prices = prices
        self._model = str(getattr(model, "model_name", "") or params.model_id or "model")
        self._place = Place(str(getattr(model, "system", "")), self._model, str(getattr(model, "base_url", "") or ""))
        self._request = request_json(params, self._model)
        self._given = estimate_tokens(self._request["messages"]) + tokens_of_json(self._request.get("tools", ()))
        self._began: datetime = ctx.now()
        self._tries = 0
        self._chance = 0.0

    async def until_answered(self) -> object:
        held = 0
        while True:
            # Drawn whether it is used or not, so that each replay takes the same places.
            self._chance = self._ctx.random()
            try:
                kept = await self._ctx.model(
                    self._model, self._request, self._once, identity=self._name, reserve=self._reserve()
                )
            except LocalStepError as error:
                if error.type != "Reserved":
                    raise ModelFailed(error.type, error.message) from error
                held += 1
                await self._ctx.sleep(min(30.0, RESERVED_WAIT_SECONDS * 2.0 ** min(held - 1, 8)))
                continue
            if "retry_after" not in kept:
                return kept["message"]
            self._tries += 1
            await self._ctx.sleep(kept["retry_after"])

    async def _once(self, request: object, call: ModelCall) -> dict[str, Any]:
        """The function of the step: runs where the journal holds no answer."""
        began = time.monotonic()
        pieces = Pieces(call)
        inside = self._context.copy()
        inside.run(_PIECES.set, pieces)
        params = self._limited(call)
        attributes = self._attributes(params)
        call.row(attributes=attributes)
        with self._span(attributes) as span:

            async def body() -> Any:  # Any: as journaled
                with within(span.traceparent):
                    return self._operation.result_codec.dump(await self._operation.handler(params))

            span.asked(self._request["messages"], self._request.get("tools", ()))
            try:
                kept = await self._made(body, inside, pieces, call, began)
            except ModelProblem as error:
                call.row(attributes={ERROR_TYPE: type(error).__name__})
                raise
            call.row(attributes=response_attributes(kept))
            span.answered(kept)
        return kept

    async def _made(
        self,
        body: Callable[[], Coroutine[Any, Any, Any]],  # Any: as journaled
        inside: contextvars.Context,
        pieces: Pieces,
        call: ModelCall,
        began: float,
    ) -> dict[str, Any]:
        try:
            payload = await asyncio.get_running_loop().create_task(body(), context=inside)
        except Exception as error:
            await pieces.take_back()
            verdict = judged(error, self._place)
            if isinstance(verdict, ModelProblem):
                raise verdict from error
            if verdict is None:
                raise
            return self._not_now(verdict, call, error)
        finally:
            pieces.close()
        return self._kept(payload, call, time.monotonic() - began)

    def _attributes(self, params: ModelRequestParams) -> dict[str, Attribute]:
        mode = params.model_request_parameters.output_mode
        return request_attributes(
            provider=self._place.provider,
            model=self._place.model,
            settings=params.model_settings,
            base_url=self._place.base_url,
            agent=self._ctx.agent_name,
            session=self._ctx.session_id,
            output_type="text" if mode == "text" else "json",
        )

    def _span(self, attributes: Mapping[str, Attribute]) -> AbstractContextManager[Span]:
        """The request's span; none where the agent is instrumented by pydantic-ai, whose own span is there."""
        if not isinstance(self._params.run_context.tracer, NoOpTracer):
            return nullcontext(Span())
        return model_span(self._place.model, attributes)

    def _limited(self, call: ModelCall) -> ModelRequestParams:
        settings: dict[str, Any] = dict(self._params.model_settings or {})
        # The client's own retries would hold this process; those of the run wait on the broker, and are recorded.
        settings.setdefault("max_retries", 0)
        limits = [settings["max_tokens"]] if settings.get("max_tokens") else []
        if "tokens" in call.granted:
            limits.append(int(call.granted["tokens"]) - self._given)
        if limits:
            settings["max_tokens"] = max(1, min(limits))
        return dataclasses.replace(self._params, model_settings=cast("Any", settings))  # a TypedDict of theirs

    def _not_now(self, later: Later, call: ModelCall, error: Exception) -> dict[str, Any]:
        if later.rate_limited:
            least = min(60.0, 0.5 * 1.5 ** min(self._tries, 32)) * (1 + self._chance) / 2
            wait = max(later.after_seconds or 0.0, least)
            waited = time.time() + wait - self._began.timestamp()
            enough = f"put off for more than {RATE_LIMIT_PATIENCE_SECONDS:g} s"
            over = waited > RATE_LIMIT_PATIENCE_SECONDS
        else:
            backoff = OUTAGES.delay_seconds(self._tries + 1, lambda: self._chance)
            wait = backoff if later.after_seconds is None else later.after_seconds
            enough = f"tried {self._tries + 1} times"
            over = self._tries + 1 >= OUTAGES.attempts
        if over:
            raise given_up(later, self._place, enough) from error
        call.row(error=(later.type, later.detail))
        return {"retry_after": round(wait, 3), "error": {"type": later.type, "message": later.detail}}

    def _reserve(self) -> Reserve:
        """What the request may use of the task's limits: its input by estimate, and the longest answer."""
        longest = int(self._request.get("settings", {}).get("max_tokens") or DEFAULT_MAX_TOKENS)
        shortest = min(LEAST_TOKENS, longest)
        reserve = {"tokens": (float(self._given + shortest), float(self._given + longest))}
        if (price := price_of(self._prices, self._model)) is not None:
            reserve["cost"] = (price.cost(self._given, shortest), price.cost(self._given, longest))
        return reserve

    def _kept(self, payload: object, call: ModelCall, seconds: float) -> dict[str, Any]:
        message: Mapping[str, Any] = payload if isinstance(payload, dict) else {}
        told: Mapping[str, Any] = message.get("usage") or {}
        received, given = int(told.get("input_tokens") or 0), int(told.get("output_tokens") or 0)
        usage: dict[str, float] = {"input_tokens": received, "output_tokens": given, "tokens": received + given}
        usage["requests"] = 1
        if cached := int(told.get("cache_read_tokens") or 0):
            usage["cached_tokens"] = cached
        answered = str(message.get("model_name") or self._model)
        if (price := price_of(self._prices, answered, self._model)) is not None:
            usage["cost"] = price.cost(received, given, cached)
        call.spend(model=answered, **usage)
        return {
            "message": payload,
            "finish_reason": message.get("finish_reason") or "stop",
            "usage": usage,
            "provider": str(message.get("provider_name") or self._place.provider),
            "model": answered,
            "seconds": round(seconds, 6),
        }


def request_json(params: ModelRequestParams, model: str) -> dict[str, Any]:
    """What the record keeps of a request. The same messages have the same bytes in each later request."""
    messages = ModelMessagesTypeAdapter.dump_python(params.messages, mode="json")
    for message in messages:
        if message.get("kind") == "request":
            # Written by the clock of the process that replays; what a model has said keeps its time.
            message.pop("timestamp", None)
            for part in message.get("parts", ()):
                part.pop("timestamp", None)
    parameters = params.model_request_parameters
    request: dict[str, Any] = {"messages": messages, "model": model}
    if params.model_settings:
        request["settings"] = to_jsonable_python(dict(params.model_settings), serialize_unknown=True)
    if tools := _tools(parameters):
        request["tools"] = tools
    if parameters.output_mode not in ("text", "tool"):
        request["output"] = {"mode": parameters.output_mode}
    return request


def _tools(parameters: ModelRequestParameters) -> list[dict[str, Any]]:
    return [
        {"name": tool.name, "description": tool.description or "", "arguments": tool.parameters_json_schema}
        for tool in (*parameters.function_tools, *parameters.output_tools)
    ]


async def show(context: RunContext[Any], stream: AsyncIterable[AgentStreamEvent]) -> AsyncIterable[AgentStreamEvent]:
    """Pass a model's events on, and show the text in them to the task's client."""
    pieces = _PIECES.get(None)
    async for event in stream:
        if pieces is not None and (text := _text(event)):
            pieces.add(text)
        yield event


def _text(event: AgentStreamEvent) -> str:
    if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
        return event.part.content
    if isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
        return event.delta.content_delta
    return ""
