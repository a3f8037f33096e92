"""One attempt at a model call: the request as it is recorded, the function of the step, and what its outcome means.

Decisions that depend on clocks, gates and settings are made here and recorded with the step, so that a replay makes the
same ones, even with a different version of the code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic_ai import ModelMessagesTypeAdapter
from pydantic_ai.messages import ModelMessage, ModelResponse
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition
from pydantic_core import to_jsonable_python

from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.client import CallState, TextBatcher
from runtime_core.llm.failures import (
    RATE_LIMITED,
    Endpoint,
    ModelProblem,
    StreamBroken,
    Transient,
    classify,
    final_error,
)
from runtime_core.llm.tokens import EstimateErrors, Message, estimate_tokens, price_of, tokens_of_json
from runtime_core.runs.model_step import ModelCall
from runtime_core.telemetry.gen_ai import GenAISpan, model_span, request_attributes, response_attributes
from runtime_core.telemetry.redaction import Attribute, redactor
from runtime_core.telemetry.spans import ERROR_TYPE
from runtime_core.wire import codec

if TYPE_CHECKING:
    from runtime_core.llm.models import Gate, OpenModels
    from runtime_core.runs.context import AgentContext

RATE_LIMIT_WAIT_SECONDS = (0.5, 60.0)
"""The first and the longest minimum wait after a rate limit; it grows by half each time."""

Decide = Callable[[ModelResponse], object]
"""Called inside the step with the finished answer. Its result (JSON) is journaled as the answer's `decided`, so that a
later deploy with other tools, schemas or rules does not change it."""


def messages_of(given: Sequence[Message]) -> list[ModelMessage]:
    """Decode messages. Raises ValidationError."""
    return ModelMessagesTypeAdapter.validate_json(codec.encode(given))


def messages_json(messages: Sequence[ModelMessage]) -> list[Message]:
    return cast(list[Message], ModelMessagesTypeAdapter.dump_python(list(messages), mode="json"))


def request_json(
    messages: Sequence[ModelMessage], model: str, settings: object, parameters: ModelRequestParameters
) -> dict[str, Any]:
    """Return a request as the record keeps it. Equal messages have equal bytes in every request."""
    written = messages_json(messages)
    for message in written:
        if message.get("kind") == "request":
            # The replaying process sets these from its clock. Messages of the model keep their time.
            message.pop("timestamp", None)
            for part in message.get("parts", ()):
                part.pop("timestamp", None)
    request: dict[str, Any] = {"messages": written, "model": model}
    if settings:
        request["settings"] = to_jsonable_python(settings, serialize_unknown=True)
    if tools := [
        {"name": tool.name, "description": tool.description or "", "arguments": tool.parameters_json_schema}
        for tool in (*parameters.function_tools, *parameters.output_tools)
    ]:
        request["tools"] = tools
    if parameters.output_mode != "text":
        request["output"] = {"mode": parameters.output_mode}
        if parameters.output_object is not None:
            request["output"]["schema"] = parameters.output_object.json_schema
    return request


def with_tools(parameters: ModelRequestParameters, tools: Sequence[Mapping[str, Any]]) -> ModelRequestParameters:
    """Return the parameters with the tools of a request that a hook changed."""
    outputs = {tool.name: tool for tool in parameters.output_tools}
    known = {tool.name: tool for tool in parameters.function_tools} | outputs
    made = [
        replace(
            known.get(tool["name"], ToolDefinition(name=tool["name"])),
            description=tool.get("description"),
            parameters_json_schema=tool["arguments"],
        )
        for tool in tools
    ]
    return replace(
        parameters,
        function_tools=[tool for tool in made if tool.name not in outputs],
        output_tools=[tool for tool in made if tool.name in outputs],
    )


def label_of(model: object) -> str:
    """Return the name of a model that is not open."""
    if isinstance(model, str):
        return model
    name = getattr(model, "model_id", None) or getattr(model, "__qualname__", None)
    return str(name or type(model).__qualname__)


def corrected_tokens(settings: ModelSettings, errors: EstimateErrors, request: Mapping[str, Any]) -> int:
    """Estimate the tokens of a request, corrected by the errors of earlier estimates."""
    return int(errors.corrected(request["model"], estimated_tokens(settings, request)))


def estimated_tokens(settings: ModelSettings, request: Mapping[str, Any]) -> int:
    return (settings.estimate or estimate_tokens)(request["messages"]) + overhead_tokens(request)


def overhead_tokens(request: Mapping[str, Any]) -> int:
    """Estimate the tokens of a request's tools and output schema."""
    schema = request.get("output", {}).get("schema")
    return tokens_of_json([*request.get("tools", ()), *([schema] if schema else ())])


class Sender(Protocol):
    """Sends a request to a model, inside the step."""

    @property
    def traced(self) -> bool:
        """Whether other code creates the call's span."""
        ...

    async def endpoint(self, named: str | None) -> Endpoint:
        """Return the endpoint of the agent's model, or of the model `named`. Raises ModelProblem."""
        ...

    async def send(self, request: Mapping[str, Any], settings: Mapping[str, Any], live: CallState) -> tuple[Any, Any]:
        """Return the ModelResponse and its JSON. Raises the client's errors and StreamBroken."""
        ...


@dataclass(slots=True)
class Attempts:
    """The unanswered attempts of a call, by reason. The same at each replay."""

    began: datetime
    deadline: float | None
    outages: int = 0
    rate_limits: int = 0
    reserved: int = 0
    chance: float = 0.0
    """The jitter of the next wait, 0 to 1."""

    def count(self, result: Mapping[str, Any]) -> None:
        if result.get("error", {}).get("type") == RATE_LIMITED:
            self.rate_limits += 1
        else:
            self.outages += 1


class ModelAttempt:
    """The function of the step. It runs only if the journal has no result, so never at a replay."""

    def __init__(
        self,
        ctx: AgentContext,
        agent: ModelSettings,
        wanted: Mapping[str, Any],
        sender: Sender,
        tries: Attempts,
        decide: Decide | None,
    ) -> None:
        self._ctx = ctx
        self._agent = agent
        self._wanted = wanted
        self._models: OpenModels = ctx.functions.models
        self._sender = sender
        self._tries = tries
        self._decide = decide

    async def make(self, request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        """Make the call and return its result for the journal. Raises ModelProblem if it failed permanently."""
        redactor().learn(self._agent.api_key)
        # A hook may choose another model.
        named = request["model"] if request["model"] != self._wanted["model"] else None
        endpoint = await self._sender.endpoint(named)
        attributes = self._attributes(endpoint, request)
        # Before the gate, so that calls that it holds back are recorded with the same model.
        call.row(attributes=attributes)
        gate = self._models.pacing().gate((endpoint, self._agent.api_key))
        if (wait := gate.closed_for()) is not None:
            held = Transient(RATE_LIMITED, "held back: the provider asked this process to wait", wait)
            return self._postponed(held, wait, endpoint, call)
        span_of_call: AbstractContextManager[GenAISpan] = (
            nullcontext(GenAISpan()) if self._sender.traced else model_span(endpoint.model, attributes)
        )
        with span_of_call as span:
            span.asked(request["messages"], request.get("tools", ()))
            live = CallState(named, None, self._agent.silence_seconds, call.idempotency_key, span.traceparent)
            try:
                result = await self._ask(endpoint, gate, request, call, live)
            except ModelProblem as error:
                call.row(attributes={ERROR_TYPE: type(error).__name__})
                raise
            call.row(attributes=response_attributes(result))
            span.answered(result)
        return result

    async def _ask(
        self, endpoint: Endpoint, gate: Gate, request: dict[str, Any], call: ModelCall, live: CallState
    ) -> dict[str, Any]:
        pieces = live.pieces = TextBatcher(call) if self._shows_text(request) else None
        try:
            response, message = await self._sender.send(request, self._settings(request, call), live)
            if response.state in ("incomplete", "interrupted"):
                raise StreamBroken("the stream ended before the answer was complete")
        except Exception as error:
            if pieces is not None:
                await pieces.withdraw()
            verdict = classify(error, endpoint)
            if verdict is None:
                raise
            if isinstance(verdict, ModelProblem):
                raise verdict from error
            wait = self._wait(verdict)
            if verdict.rate_limited:
                wait = gate.close(wait)
            return self._postponed(verdict, wait, endpoint, call, error)
        finally:
            if pieces is not None:
                pieces.close()
        return self._answered(response, message, request, call, endpoint, live)

    def _attributes(self, endpoint: Endpoint, request: Mapping[str, Any]) -> dict[str, Attribute]:
        return request_attributes(
            provider=endpoint.provider,
            model=endpoint.model,
            settings=request.get("settings"),
            base_url=endpoint.base_url,
            agent=self._ctx.agent_name,
            session=self._ctx.session_id,
            stream=self._shows_text(request),
            output_type="json" if request.get("output") else "text",
        )

    def _shows_text(self, request: Mapping[str, Any]) -> bool:
        # The text of a native structured answer is JSON, not text to read.
        return self._agent.stream and request.get("output", {}).get("mode") != "native"

    def _settings(self, request: Mapping[str, Any], call: ModelCall) -> dict[str, Any]:
        """Return the agent's settings with its timeouts and with the granted length of the answer."""
        seconds = self._agent.call_seconds
        settings = {"request_timeout": seconds, "timeout": seconds, **request.get("settings", {})}
        limits = [settings["max_tokens"]] if settings.get("max_tokens") is not None else []
        given = corrected_tokens(self._agent, self._models.estimate_errors, request)
        if "tokens" in call.granted:
            limits.append(int(call.granted["tokens"]) - given)
        price = price_of(self._agent.prices, request["model"])
        if "cost" in call.granted and price is not None and price.output:
            limits.append(int((call.granted["cost"] - price.cost(given, 0)) / price.output * 1_000_000))
        if call.granted and limits:
            settings["max_tokens"] = max(min(limits), 1)
        # The run retries: its waits are on the broker, and each attempt is recorded.
        settings["max_retries"] = 0
        return settings

    def _wait(self, later: Transient) -> float:
        """Return the seconds until the next attempt: as the provider asked, and longer after many refusals."""
        chance = self._tries.chance
        if later.rate_limited:
            least = backoff(RATE_LIMIT_WAIT_SECONDS, 1.5, self._tries.rate_limits + 1) * (1 + chance) / 2
            return max(later.after_seconds or 0.0, least)
        if later.after_seconds is not None:
            return later.after_seconds
        return self._agent.retry.delay_seconds(self._tries.outages + 1, lambda: chance)

    def _postponed(
        self, later: Transient, wait: float, endpoint: Endpoint, call: ModelCall, error: Exception | None = None
    ) -> dict[str, Any]:
        """Return the result of a call that will be retried; raise if it will not."""
        if (why := self._why_final(later, wait)) is not None:
            raise final_error(later, endpoint, why) from error
        call.row(error=(later.type, later.detail))
        return {"retry_after": round(wait, 3), "error": {"type": later.type, "message": later.detail}}

    def _why_final(self, later: Transient, wait: float) -> str | None:
        """Return why the call is not retried; None if it is."""
        tries, again = self._tries, time.time() + wait
        if later.rate_limited:
            patience = self._agent.rate_limit_patience_seconds
            if again - tries.began.timestamp() > patience:
                return f"not answered within rate_limit_patience_seconds={patience:g}"
            if tries.deadline is not None and again > tries.deadline:
                return f"the task's time limit is {_clock(tries.deadline)}, before the next attempt"
        elif tries.outages + 1 >= self._agent.retry.attempts:
            return f"tried {tries.outages + 1} times"
        return None

    def _answered(
        self,
        response: ModelResponse,
        message: object,
        request: Mapping[str, Any],
        call: ModelCall,
        endpoint: Endpoint,
        live: CallState,
    ) -> dict[str, Any]:
        usage = _usage(response)
        model = response.model_name or endpoint.model
        price = price_of(self._agent.prices, model, request["model"])
        if price is not None:
            usage["cost"] = price.cost(usage["input_tokens"], usage["output_tokens"], usage.get("cached_tokens", 0))
        elif response.usage.cost is not None:
            usage["cost"] = float(response.usage.cost)
        call.spend(model=model, **usage)
        self._models.estimate_errors.note(
            request["model"], estimated_tokens(self._agent, request), usage["input_tokens"]
        )
        calls_tools = any(part.part_kind == "tool-call" for part in response.parts)
        reason = response.finish_reason
        result: dict[str, Any] = {
            "message": message,
            # One of OpenAI's two APIs reports `stop` for tool calls.
            "finish_reason": "tool_call" if calls_tools and reason in (None, "stop") else reason or "stop",
            "usage": usage,
            "provider": response.provider_name or endpoint.provider,
            "model": model,
            "seconds": round(time.monotonic() - live.began, 6),
        }
        if live.first_seconds is not None:
            result["first_seconds"] = round(live.first_seconds, 6)
        if self._decide is not None:
            result["decided"] = self._decide(response)
        return result


def _usage(response: ModelResponse) -> dict[str, float]:
    used = response.usage
    usage: dict[str, float] = {
        "input_tokens": used.input_tokens,
        "output_tokens": used.output_tokens,
        "tokens": used.input_tokens + used.output_tokens,
        "requests": 1,
    }
    details = {
        "cached_tokens": used.cache_read_tokens,
        "cache_write_tokens": used.cache_write_tokens,
        "reasoning_tokens": used.output_reasoning_tokens or used.details.get("reasoning_tokens", 0),
    }
    return usage | {name: amount for name, amount in details.items() if amount}


def backoff(bounds: tuple[float, float], factor: float, number: int) -> float:
    """Return the wait after attempt `number` (from 1): the first bound, growing by `factor` up to the second."""
    first, last = bounds
    return min(last, first * factor ** min(number - 1, 64))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
