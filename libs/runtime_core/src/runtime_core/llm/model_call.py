"""One model call of an agent: a step that is answered, however often it must be made.

    ModelRequest ──fit──> window.py ──> ctx.model: one step ──> Sender.send, live only ──> the provider
        ^                                    │ recorded
        └── ctx.sleep: waits on the broker ──┴─ not answered: {"retry_after": s, "error": {…}}

What is decided by clocks, gates and settings is decided inside the step and recorded with it, so that a replay, also by
another version of the code, goes the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import quote

from pydantic_ai import ModelMessagesTypeAdapter
from pydantic_ai.messages import (
    AgentStreamEvent,
    ModelMessage,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition
from pydantic_core import to_jsonable_python

from runtime_core import codec
from runtime_core.errors import InvalidInput, LocalStepError
from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.budget import estimate_tokens, price_of, tokens_of_json
from runtime_core.llm.failures import (
    RATE_LIMITED,
    Broken,
    Later,
    ModelFailed,
    ModelProblem,
    Place,
    given_up,
    judged,
)
from runtime_core.llm.window import KeepAll, Message, Window
from runtime_core.runs.model_step import ModelCall, Reserve
from runtime_core.telemetry.attributes import ERROR_TYPE
from runtime_core.telemetry.gen_ai import Span, model_span, request_attributes, response_attributes
from runtime_core.telemetry.redaction import Attribute, redactor

if TYPE_CHECKING:
    from runtime_core.llm.models import Gate, OpenModels
    from runtime_core.runs.context import AgentContext

RESERVED = "Reserved"
"""The type of the error where other calls of the task hold what is left of its limits."""

DEFAULT_MAX_TOKENS = 4_096
"""How long an answer may be where the task has a limit and the agent's settings say nothing."""

LEAST_TOKENS = 16
"""An answer that may not have so many is not worth asking for; some providers take no less."""

RESERVED_WAIT_SECONDS = (0.5, 30.0)
"""The first and the longest wait for other calls of the task to end."""

RATE_LIMIT_WAIT_SECONDS = (0.5, 60.0)
"""The least wait after a first rate limit, which grows by half with each further one, and how far it grows."""

IDEMPOTENCY_KEY = "Idempotency-Key"
"""The header, as OpenAI's and other clients name it."""

Decide = Callable[[ModelResponse], object]
"""Called inside the step with the finished answer, before it is journaled. What it gives (JSON) is journaled with the
answer, as member `decided`: so what was decided by tools, schemas and rules as they were then stays as it was, whatever
a later deploy changes."""


class Sender(Protocol):
    """How a request reaches a model. All of it runs inside the step, where the journal holds no answer."""

    @property
    def traced(self) -> bool:
        """Whether somebody else makes the call's span."""
        ...

    async def place(self, named: str | None) -> Place:
        """Where the model is asked; `named`: another one than the agent's, by name. Raises ModelProblem."""
        ...

    async def send(self, request: Mapping[str, Any], settings: Mapping[str, Any], live: Live) -> tuple[Any, Any]:
        """The ModelResponse, and its JSON. Raises the client's errors and Broken."""
        ...


@dataclass(slots=True)
class Live:
    """What is known of a call while it is made."""

    named: str | None
    """The model that a hook has chosen; None: the agent's."""
    pieces: Pieces | None
    """Where text goes; None: it is not shown."""
    silence_seconds: float
    idempotency_key: str
    """The same in every attempt of the call."""
    traceparent: str = ""
    began: float = field(default_factory=time.monotonic)
    first_seconds: float | None = None
    """To the first piece; None: there is none yet."""


class ModelRequest:
    """A request that is made until it is answered; also what a window strategy may use (`window.Asking`)."""

    def __init__(
        self,
        ctx: AgentContext,
        settings: ModelSettings,
        request: dict[str, Any],  # Any: JSON, see `request_json`
        sender: Sender,
        *,
        name: str,
        decide: Decide | None = None,
    ) -> None:
        """`name` is persisted with the run: by it another version of the code finds the answer again."""
        self.ctx = ctx
        self._agent = settings
        self._request = request
        self._sender = sender
        self._name = name
        self._decide = decide
        self._models: OpenModels = ctx.functions.models
        self._own_calls = 0
        """Calls that the window strategy has made."""

    # ---- what a window strategy sees -----------------------------------------------------------------------

    @property
    def overhead_tokens(self) -> int:
        return _overhead(self._request)

    @property
    def memory(self) -> dict[str, Any]:  # Any: see window.Asking
        return cast(dict[str, Any], self.ctx.state.setdefault("window", {}))

    def tokens(self, messages: Sequence[Message]) -> int:
        return (self._agent.estimate or estimate_tokens)(messages)

    async def ask(self, messages: list[Message], *, model: str | None = None) -> str:
        self._own_calls += 1
        settings = replace(self._agent, window=None, stream=False, model=model or self._agent.model)
        name = f"{self._name} window {self._own_calls}"
        response = await ask_model(self.ctx, settings, messages, name=name)
        return "".join(part.content for part in response.parts if isinstance(part, TextPart))

    # ---- asking --------------------------------------------------------------------------------------------

    async def answer(self) -> Mapping[str, Any]:
        """The journaled result: `message`, `finish_reason`, `usage`, `decided` …

        Raises ModelFailed where the model will not answer, and Denied where a hook refuses.
        """
        window: Window = self._agent.window or KeepAll()
        messages = self._request["messages"]
        sent = await window.fit(self, messages, shrink=False)
        try:
            return await self._until_answered(sent, self._name)
        except ModelFailed as error:
            if error.type != "ContextTooLong":
                raise
            smaller = await window.fit(self, messages, shrink=True)
            if len(smaller) >= len(sent) and self.tokens(smaller) >= self.tokens(sent):
                raise
        return await self._until_answered(smaller, f"{self._name} smaller")

    async def _until_answered(self, messages: list[Message], identity: str) -> Mapping[str, Any]:
        request = {**self._request, "messages": messages}
        tries = _Tries(began=self.ctx.now(), deadline=self.ctx.deadline)
        while True:
            # Drawn whether it is used or not, so that each replay takes the same places.
            tries.chance = self.ctx.random()
            live = _LiveCall(self.ctx, self._agent, self._request, self._sender, tries, self._decide)
            try:
                result: Any = await self.ctx.model(
                    request["model"], request, live.make, identity=identity, reserve=self._reserve(request)
                )
            except LocalStepError as error:
                if error.type != RESERVED:
                    raise ModelFailed(error.type, error.message) from error
                tries.reserved += 1
                await self.ctx.sleep(_growing(RESERVED_WAIT_SECONDS, 2.0, tries.reserved))
                continue
            if not isinstance(result, dict) or ("retry_after" not in result and not _is_answer(result)):
                raise InvalidInput("model call", "its result has no message with parts: a hook has taken them away")
            if "retry_after" not in result:
                return result
            tries.count(result)
            await self.ctx.sleep(result["retry_after"])

    def _reserve(self, request: Mapping[str, Any]) -> Reserve:
        """What the call may use of the task's limits: its input by estimate, and the longest answer."""
        given = _given(self._agent, self._models.measured, request)
        longest = max(request.get("settings", {}).get("max_tokens") or DEFAULT_MAX_TOKENS, 1)
        shortest = min(LEAST_TOKENS, longest)
        reserve = {"tokens": (given + shortest, given + longest)}
        price = price_of(self._agent.prices, request["model"])
        if price is None:
            return cast(Reserve, reserve)
        return {**reserve, "cost": (price.cost(given, shortest), price.cost(given, longest))}


@dataclass(slots=True)
class _Tries:
    """How often a call was made until now, and why it was not answered. The same at each replay."""

    began: datetime
    deadline: float | None
    outages: int = 0
    rate_limits: int = 0
    reserved: int = 0
    chance: float = 0.0
    """For the jitter of the next wait."""

    def count(self, result: Mapping[str, Any]) -> None:
        if result.get("error", {}).get("type") == RATE_LIMITED:
            self.rate_limits += 1
        else:
            self.outages += 1


class _LiveCall:
    """The function of the step: runs where the journal holds no result, and never at a replay."""

    def __init__(
        self,
        ctx: AgentContext,
        agent: ModelSettings,
        wanted: Mapping[str, Any],
        sender: Sender,
        tries: _Tries,
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
        """Gives the result of the call as it is journaled; raises ModelProblem where it has failed for good."""
        redactor().learn(self._agent.api_key)
        # A hook may have chosen another model.
        named = request["model"] if request["model"] != self._wanted["model"] else None
        place = await self._sender.place(named)
        attributes = self._attributes(place, request)
        # Before the gate: what is held back is told, and counted, of the same model as what is asked.
        call.row(attributes=attributes)
        gate = self._models.pacing().gate((place, self._agent.api_key))
        if (wait := gate.closed_for()) is not None:
            held = Later(RATE_LIMITED, "held back: the provider has asked this process to wait", wait)
            return self._not_now(held, wait, place, call)
        span_of_call: AbstractContextManager[Span] = (
            nullcontext(Span()) if self._sender.traced else model_span(place.model, attributes)
        )
        with span_of_call as span:
            span.asked(request["messages"], request.get("tools", ()))
            live = Live(named, None, self._agent.silence_seconds, call.idempotency_key, span.traceparent)
            try:
                result = await self._ask(place, gate, request, call, live)
            except ModelProblem as error:
                call.row(attributes={ERROR_TYPE: type(error).__name__})
                raise
            call.row(attributes=response_attributes(result))
            span.answered(result)
        return result

    async def _ask(
        self, place: Place, gate: Gate, request: dict[str, Any], call: ModelCall, live: Live
    ) -> dict[str, Any]:
        pieces = live.pieces = Pieces(call) if self._shows_text(request) else None
        try:
            response, message = await self._sender.send(request, self._settings(request, call), live)
            if response.state in ("incomplete", "interrupted"):
                raise Broken("the stream ended before the answer was complete")
        except Exception as error:
            if pieces is not None:
                await pieces.take_back()
            verdict = judged(error, place)
            if verdict is None:
                raise
            if isinstance(verdict, ModelProblem):
                raise verdict from error
            wait = self._wait(verdict)
            if verdict.rate_limited:
                wait = gate.close(wait)
            return self._not_now(verdict, wait, place, call, error)
        finally:
            if pieces is not None:
                pieces.close()
        return self._answered(response, message, request, call, place, live)

    def _attributes(self, place: Place, request: Mapping[str, Any]) -> dict[str, Attribute]:
        return request_attributes(
            provider=place.provider,
            model=place.model,
            settings=request.get("settings"),
            base_url=place.base_url,
            agent=self._ctx.agent_name,
            session=self._ctx.session_id,
            stream=self._shows_text(request),
            output_type="json" if request.get("output") else "text",
        )

    def _shows_text(self, request: Mapping[str, Any]) -> bool:
        # The text of a native structured answer is JSON, which is nothing to read.
        return self._agent.stream and request.get("output", {}).get("mode") != "native"

    def _settings(self, request: Mapping[str, Any], call: ModelCall) -> dict[str, Any]:
        """As the agent's, with its limits of time, and with the longest answer that was granted."""
        seconds = self._agent.call_seconds
        settings = {"request_timeout": seconds, "timeout": seconds, **request.get("settings", {})}
        limits = [settings["max_tokens"]] if settings.get("max_tokens") is not None else []
        given = _given(self._agent, self._models.measured, request)
        if "tokens" in call.granted:
            limits.append(int(call.granted["tokens"]) - given)
        price = price_of(self._agent.prices, request["model"])
        if "cost" in call.granted and price is not None and price.output:
            limits.append(int((call.granted["cost"] - price.cost(given, 0)) / price.output * 1_000_000))
        if call.granted and limits:
            settings["max_tokens"] = max(min(limits), 1)
        # Retries are the run's: they wait on the broker, and each is in the record.
        settings["max_retries"] = 0
        return settings

    def _wait(self, later: Later) -> float:
        """Seconds until the call is made again: as the provider has asked, and longer after many refusals."""
        chance = self._tries.chance
        if later.rate_limited:
            least = _growing(RATE_LIMIT_WAIT_SECONDS, 1.5, self._tries.rate_limits + 1) * (1 + chance) / 2
            return max(later.after_seconds or 0.0, least)
        if later.after_seconds is not None:
            return later.after_seconds
        return self._agent.retry.delay_seconds(self._tries.outages + 1, lambda: chance)

    def _not_now(
        self, later: Later, wait: float, place: Place, call: ModelCall, error: Exception | None = None
    ) -> dict[str, Any]:
        """The result of a call that will be made again; raises where it will not."""
        if (why := self._enough(later, wait)) is not None:
            raise given_up(later, place, why) from error
        call.row(error=(later.type, later.detail))
        return {"retry_after": round(wait, 3), "error": {"type": later.type, "message": later.detail}}

    def _enough(self, later: Later, wait: float) -> str | None:
        """Why the call is not made again; None: it is."""
        tries, again = self._tries, time.time() + wait
        if later.rate_limited:
            patience = self._agent.rate_limit_patience_seconds
            if again - tries.began.timestamp() > patience:
                return f"not answered within rate_limit_patience_seconds={patience:g}"
            if tries.deadline is not None and again > tries.deadline:
                return f"the task's time ends at {_clock(tries.deadline)}, before the call may be made again"
        elif tries.outages + 1 >= self._agent.retry.attempts:
            return f"tried {tries.outages + 1} times"
        return None

    def _answered(
        self,
        response: ModelResponse,
        message: object,
        request: Mapping[str, Any],
        call: ModelCall,
        place: Place,
        live: Live,
    ) -> dict[str, Any]:
        usage = _usage(response)
        model = response.model_name or place.model
        price = price_of(self._agent.prices, model, request["model"])
        if price is not None:
            usage["cost"] = price.cost(usage["input_tokens"], usage["output_tokens"], usage.get("cached_tokens", 0))
        elif response.usage.cost is not None:
            usage["cost"] = float(response.usage.cost)
        call.spend(model=model, **usage)
        self._models.measured.note(request["model"], _estimated(self._agent, request), usage["input_tokens"])
        calls_tools = any(part.part_kind == "tool-call" for part in response.parts)
        reason = response.finish_reason
        result: dict[str, Any] = {
            "message": message,
            # One of the two APIs of OpenAI says `stop` for tool calls.
            "finish_reason": "tool_call" if calls_tools and reason in (None, "stop") else reason or "stop",
            "usage": usage,
            "provider": response.provider_name or place.provider,
            "model": model,
            "seconds": round(time.monotonic() - live.began, 6),
        }
        if live.first_seconds is not None:
            result["first_seconds"] = round(live.first_seconds, 6)
        if self._decide is not None:
            result["decided"] = self._decide(response)
        return result


class _Direct:
    """Asks a model without an agent around it, and shows nothing."""

    traced = False

    def __init__(self, models: OpenModels, settings: ModelSettings) -> None:
        self._models = models
        self._settings = settings

    async def place(self, named: str | None) -> Place:
        return (await self._models.open_or_fail(self._settings, named)).place

    async def send(
        self, request: Mapping[str, Any], settings: Mapping[str, Any], live: Live
    ) -> tuple[ModelResponse, Message]:
        opened = await self._models.open_or_fail(self._settings, live.named)
        response = await opened.model.request(
            messages_of(request["messages"]), with_key(settings, opened.model, live), ModelRequestParameters()
        )
        return response, messages_json([response])[0]


async def ask_model(ctx: AgentContext, settings: ModelSettings, messages: list[Message], *, name: str) -> ModelResponse:
    """The answer to messages alone, as a step of the run."""
    request = {"messages": messages, "model": label_of(settings.model), "settings": dict(settings.settings)}
    asking = ModelRequest(ctx, settings, request, _Direct(ctx.functions.models, settings), name=name)
    [response] = messages_of([(await asking.answer())["message"]])
    assert isinstance(response, ModelResponse)  # the only kind that answers
    return response


# ---- messages and requests as JSON -----------------------------------------------------------------------------


def messages_of(given: Sequence[Message]) -> list[ModelMessage]:
    """Raises ValidationError for what are no messages."""
    return ModelMessagesTypeAdapter.validate_json(codec.encode(given))


def messages_json(messages: Sequence[ModelMessage]) -> list[Message]:
    return cast(list[Message], ModelMessagesTypeAdapter.dump_python(list(messages), mode="json"))


def request_json(
    messages: Sequence[ModelMessage], model: str, settings: object, parameters: ModelRequestParameters
) -> dict[str, Any]:
    """What the record keeps of a request. The same messages have the same bytes in each later request."""
    written = messages_json(messages)
    for message in written:
        if message.get("kind") == "request":
            # Written by the clock of the process that replays; what a model has said keeps its time.
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
    """The parameters with the tools of a request that a hook has changed."""
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


def with_key(settings: Mapping[str, Any], model: object, live: Live) -> Any:  # Any: a TypedDict of theirs
    """The settings with the call's key as a header, where the client can send one.

    Where a process died between an answer and its keeping, a gateway that knows the header need not do the work again.
    """
    if "extra_headers" in getattr(model, "unsupported_settings", ()):
        return settings
    headers = {IDEMPOTENCY_KEY: quote(live.idempotency_key), **settings.get("extra_headers", {})}
    return {**settings, "extra_headers": headers}


def label_of(model: object) -> str:
    """How a model is named before it is open."""
    if isinstance(model, str):
        return model
    name = getattr(model, "model_id", None) or getattr(model, "__qualname__", None)
    return str(name or type(model).__qualname__)


def _is_answer(result: Mapping[str, Any]) -> bool:
    message = result.get("message")
    return isinstance(message, dict) and isinstance(message.get("parts"), list)


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


def _given(agent: ModelSettings, measured: Any, request: Mapping[str, Any]) -> int:  # Any: budget.Measured
    """The tokens of a request, as it is estimated in the light of earlier ones."""
    return int(measured.corrected(request["model"], _estimated(agent, request)))


def _estimated(agent: ModelSettings, request: Mapping[str, Any]) -> int:
    return (agent.estimate or estimate_tokens)(request["messages"]) + _overhead(request)


def _overhead(request: Mapping[str, Any]) -> int:
    """The tokens of a request's tools and of its answer's schema."""
    schema = request.get("output", {}).get("schema")
    return tokens_of_json([*request.get("tools", ()), *([schema] if schema else ())])


def _growing(bounds: tuple[float, float], factor: float, number: int) -> float:
    """The wait after the `number`th time (from 1): from the first bound, growing by `factor`, to the second."""
    first, last = bounds
    return min(last, first * factor ** min(number - 1, 64))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


# ---- the text of an answer while the model writes it -------------------------------------------------------------

LIVE: ContextVar[Live] = ContextVar("weft_model_call")
"""The call that is being made, for the handler of its events."""


async def show(stream: AsyncIterable[AgentStreamEvent]) -> AsyncIterator[AgentStreamEvent]:
    """Pass a model's events on, and show the text in them to the task's client. Raises Broken after a long silence."""
    live = LIVE.get(None)
    # Until the first piece a model may think for long: there only the limit of the whole call holds.
    limit: float | None = None
    events = aiter(stream)
    while True:
        try:
            async with asyncio.timeout(limit):
                event = await anext(events, None)
        except TimeoutError:
            if live is None or limit is None:
                raise
            raise Broken(f"the stream said nothing for {limit:g} s") from None
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


BATCH_SECONDS = 0.04
"""How long a piece waits for others."""
BATCH_CHARACTERS = 200


class Pieces:
    """Puts small pieces together, so that a fast model does not cost the broker a write for each word."""

    def __init__(self, call: ModelCall) -> None:
        self._call = call
        self._waiting: list[str] = []
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._shown = False
        if call.attempt > 1:
            # What an earlier attempt has shown is replaced, even where this one has nothing to say.
            call.stream("")

    def add(self, text: str) -> None:
        self._waiting.append(text)
        self._size += len(text)
        if self._size >= BATCH_CHARACTERS:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_SECONDS, self._send)

    def close(self) -> None:
        """Send what is left. What was taken back leaves nothing."""
        self._send()

    async def take_back(self) -> None:
        """Tell the client that what it was shown is no answer."""
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
