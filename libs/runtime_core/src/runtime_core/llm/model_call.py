"""One model call of an agent, as the conversation sees it: a step that is answered, however often it must be made.

    ask_model ──fit──> window.py ──> ctx.model: one step ──> the function below, live only ──> client.py
        ^                                  │ recorded
        └── ctx.sleep: waits on the broker ┴─ not answered: {"retry_after": s, "error": {…}}

What is decided by clocks, gates and settings is decided inside the step and recorded with it, so that a replay, also by
another version of the code, goes the same way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from runtime_core import codec
from runtime_core.errors import InvalidInput, LocalStepError
from runtime_core.llm.agent import Decide, ModelSettings, OutputSpec, ToolSpec
from runtime_core.llm.budget import estimate_tokens, price_of, tokens_of_json
from runtime_core.llm.failures import (
    RATE_LIMITED,
    Later,
    ModelFailed,
    ModelProblem,
    Place,
    given_up,
    judged,
    wrong_settings,
)
from runtime_core.llm.messages import Pieces
from runtime_core.llm.window import KeepAll, Message, Window
from runtime_core.runs.model_step import ModelCall, Reserve
from runtime_core.telemetry.attributes import ERROR_TYPE
from runtime_core.telemetry.gen_ai import model_span, request_attributes, response_attributes
from runtime_core.telemetry.redaction import Attribute, redactor

if TYPE_CHECKING:
    from runtime_core.llm.budget import Measured
    from runtime_core.llm.client import OpenModel, Response
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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model wants to be called."""

    id: str
    """Of the call, in the conversation."""
    name: str
    """As the model knows it."""
    arguments: dict[str, Any] | str  # Any: the tool's own JSON
    """Text where what the model wrote is no JSON object."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model has answered."""

    message: Message
    """The JSON of the ModelResponse, to go into the conversation as it is."""
    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop, length, tool_call, content_filter, error."""
    usage: dict[str, float]
    """input_tokens, output_tokens, tokens, requests, and cost where the price is known."""
    model: str = ""
    provider: str = ""
    decided: Any = None  # Any: JSON of whoever has decided
    """What `decide` gave when the answer came."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Answer:
        """From a model call's journaled result. Raises InvalidInput for what is none (a hook may have changed it)."""
        message = result.get("message")
        if not isinstance(message, dict) or not isinstance(parts := message.get("parts"), list):
            raise InvalidInput("model call", "its result has no message with parts: a hook has taken them away")
        return cls(
            message=message,
            text="".join(str(part.get("content", "")) for part in parts if part.get("part_kind") == "text"),
            tool_calls=tuple(_tool_call(part) for part in parts if part.get("part_kind") == "tool-call"),
            finish_reason=str(result.get("finish_reason", "")),
            usage=dict(result.get("usage") or {}),
            model=str(result.get("model", "")),
            provider=str(result.get("provider", "")),
            decided=result.get("decided"),
        )


async def ask_model(
    ctx: AgentContext,
    agent: ModelSettings,
    messages: list[Message],
    *,
    tools: Sequence[ToolSpec] = (),
    output: OutputSpec | None = None,
    number: int,
    decide: Decide | None = None,
) -> Answer:
    """Ask the agent's model, and wait on the broker's timer where it cannot answer now.

    `number` counts the calls of the run; see `Decide` for `decide`. Raises ModelFailed where it will not answer, and
    Denied where a hook refuses.
    """
    asking = _Asking(ctx, agent, tools, output, number, decide)
    return await asking.answer(messages)


class _Asking:
    """A call that is made until it is answered; also what a window strategy may use (`window.Asking`)."""

    def __init__(
        self,
        ctx: AgentContext,
        agent: ModelSettings,
        tools: Sequence[ToolSpec],
        output: OutputSpec | None,
        number: int,
        decide: Decide | None,
    ) -> None:
        self.ctx = ctx
        self._agent = agent
        self._tools = [asdict(tool) for tool in tools]
        self._output = None if output is None else asdict(output)
        self._number = number
        self._decide = decide
        self._own_calls = 0
        """Calls that the window strategy has made."""

    # ---- what a window strategy sees -----------------------------------------------------------------------

    @property
    def overhead_tokens(self) -> int:
        return _overhead({"tools": self._tools, "output": self._output})

    @property
    def memory(self) -> dict[str, Any]:  # Any: see window.Asking
        return cast(dict[str, Any], self.ctx.state.setdefault("window", {}))

    def tokens(self, messages: Sequence[Message]) -> int:
        return (self._agent.estimate or estimate_tokens)(messages)

    async def ask(self, messages: list[Message], *, model: str | None = None) -> str:
        self._own_calls += 1
        agent = replace(self._agent, window=None, stream=False, model=model or self._agent.model)
        inner = _Asking(self.ctx, agent, (), None, self._number, None)
        return (await inner.answer(messages, f"window {self._own_calls}")).text

    # ---- asking --------------------------------------------------------------------------------------------

    async def answer(self, messages: list[Message], purpose: str = "") -> Answer:
        window: Window = self._agent.window or KeepAll()
        sent = await window.fit(self, messages, shrink=False)
        try:
            return await self._until_answered(sent, purpose)
        except ModelFailed as error:
            if error.type != "ContextTooLong":
                raise
            smaller = await window.fit(self, messages, shrink=True)
            if len(smaller) >= len(sent) and self.tokens(smaller) >= self.tokens(sent):
                raise
        return await self._until_answered(smaller, f"{purpose} smaller".strip())

    async def _until_answered(self, messages: list[Message], purpose: str) -> Answer:
        request = self._request(messages)
        tries = _Tries(began=self.ctx.now(), deadline=self.ctx.deadline)
        while True:
            # Drawn whether it is used or not, so that each replay takes the same places.
            tries.chance = self.ctx.random()
            try:
                result = await self._once(request, purpose, tries)
            except LocalStepError as error:
                if error.type != RESERVED:
                    raise ModelFailed(error.type, error.message) from error
                tries.reserved += 1
                await self.ctx.sleep(_growing(RESERVED_WAIT_SECONDS, 2.0, tries.reserved))
                continue
            if "retry_after" not in result:
                return Answer.of(result)
            tries.count(result)
            await self.ctx.sleep(result["retry_after"])

    async def _once(self, request: dict[str, Any], purpose: str, tries: _Tries) -> Mapping[str, Any]:
        identity: dict[str, object] = {"model call": self._number, "try": tries.made}
        if purpose:
            identity["for"] = purpose
        live = _LiveCall(self.ctx, self._agent, tries, self._decide)
        result = await self.ctx.model(
            request["model"], request, live.make, identity=identity, reserve=self._reserve(request)
        )
        return cast(Mapping[str, Any], result)

    def _request(self, messages: list[Message]) -> dict[str, Any]:
        """As it is recorded; messages as they are, so that the record keeps each of them once."""
        request: dict[str, Any] = {
            "messages": messages,
            "model": _label(self._agent.model),
            "settings": dict(self._agent.settings),
            "tools": self._tools,
        }
        if self._output is not None:
            request["output"] = self._output
        return request

    def _reserve(self, request: Mapping[str, Any]) -> Reserve:
        """What the call may use of the task's limits: its input by estimate, and the longest answer."""
        given = _given(self._agent, self.ctx.functions.models.measured, request)
        longest = max(self._agent.settings.get("max_tokens") or DEFAULT_MAX_TOKENS, 1)
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

    @property
    def made(self) -> int:
        return self.outages + self.rate_limits + self.reserved

    def count(self, result: Mapping[str, Any]) -> None:
        if result.get("error", {}).get("type") == RATE_LIMITED:
            self.rate_limits += 1
        else:
            self.outages += 1


class _LiveCall:
    """The function of the step: runs where the journal holds no result, and never at a replay."""

    def __init__(self, ctx: AgentContext, agent: ModelSettings, tries: _Tries, decide: Decide | None) -> None:
        self._ctx = ctx
        self._agent = agent
        self._models: OpenModels = ctx.functions.models
        self._tries = tries
        self._decide = decide

    async def make(self, request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        """Gives the result of the call as it is journaled; raises ModelProblem where it has failed for good."""
        redactor().learn(self._agent.api_key)
        opened = await self._open(request)
        attributes = self._attributes(opened.place, request)
        # Before the gate: what is held back is told, and counted, of the same model as what is asked.
        call.row(attributes=attributes)
        gate = self._models.pacing().gate((opened.place, self._agent.api_key))
        if (wait := gate.closed_for()) is not None:
            held = Later(RATE_LIMITED, "held back: the provider has asked this process to wait", wait)
            return self._not_now(held, wait, opened.place, call)
        with model_span(opened.place.model, attributes) as span:
            span.asked(request["messages"], request.get("tools", ()))
            try:
                result = await self._ask(opened, gate, request, call)
            except ModelProblem as error:
                call.row(attributes={ERROR_TYPE: type(error).__name__})
                raise
            call.row(attributes=response_attributes(result))
            span.answered(result)
        return result

    async def _ask(self, opened: OpenModel, gate: Gate, request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        pieces = Pieces(call) if self._shows_text(request) else None
        try:
            response = await opened.ask(
                request,
                self._agent,
                self._max_tokens(request, call),
                None if pieces is None else pieces.add,
                idempotency_key=call.idempotency_key,
            )
        except Exception as error:
            if pieces is not None:
                await pieces.take_back()
            verdict = judged(error, opened.place)
            if verdict is None:
                raise
            if isinstance(verdict, ModelProblem):
                raise verdict from error
            wait = self._wait(verdict)
            if verdict.rate_limited:
                wait = gate.close(wait)
            return self._not_now(verdict, wait, opened.place, call, error)
        finally:
            if pieces is not None:
                pieces.close()
        return self._answered(response, request, call)

    async def _open(self, request: Mapping[str, Any]) -> OpenModel:
        # A hook may have chosen another model.
        named = request["model"] if request["model"] != _label(self._agent.model) else None
        try:
            return await self._models.open(self._agent, named)
        except Exception as error:
            if type(error).__module__.startswith("runtime_core."):
                raise
            place = Place("", str(request["model"]), self._agent.base_url or "")
            raise wrong_settings(f"{type(error).__name__}: {error}", place) from error

    def _attributes(self, place: Place, request: Mapping[str, Any]) -> dict[str, Attribute]:
        return request_attributes(
            provider=place.provider,
            model=place.model,
            settings=request["settings"],
            base_url=place.base_url,
            agent=self._ctx.agent_name,
            session=self._ctx.session_id,
            stream=self._shows_text(request),
            output_type="json" if request.get("output") else "text",
        )

    def _shows_text(self, request: Mapping[str, Any]) -> bool:
        output = request.get("output")
        # The text of a native structured answer is JSON, which is nothing to read.
        return self._agent.stream and not (output and output["mode"] == "native")

    def _max_tokens(self, request: Mapping[str, Any], call: ModelCall) -> int | None:
        """What was granted, less the input as it was estimated; None: no limit but that of the settings."""
        if not call.granted:
            return None
        wanted = request["settings"].get("max_tokens")
        limits = [] if wanted is None else [wanted]
        given = _given(self._agent, self._models.measured, request)
        if "tokens" in call.granted:
            limits.append(int(call.granted["tokens"]) - given)
        price = price_of(self._agent.prices, request["model"])
        if "cost" in call.granted and price is not None and price.output:
            limits.append(int((call.granted["cost"] - price.cost(given, 0)) / price.output * 1_000_000))
        return max(min(limits), 1) if limits else None

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

    def _answered(self, response: Response, request: Mapping[str, Any], call: ModelCall) -> dict[str, Any]:
        usage = dict(response.usage)
        price = price_of(self._agent.prices, response.model, request["model"])
        cost = response.cost
        if price is not None:
            cost = price.cost(usage["input_tokens"], usage["output_tokens"], usage.get("cached_tokens", 0))
        if cost is not None:
            usage["cost"] = cost
        call.spend(model=response.model, **usage)
        self._models.measured.note(request["model"], _estimated(self._agent, request), usage["input_tokens"])
        result: dict[str, Any] = {
            "message": response.message,
            "finish_reason": response.finish_reason,
            "usage": usage,
            "provider": response.provider,
            "model": response.model,
            "seconds": round(response.seconds, 6),
        }
        if response.first_seconds is not None:
            result["first_seconds"] = round(response.first_seconds, 6)
        if self._decide is not None:
            result["decided"] = self._decide(Answer.of(result))
        return result


def _label(model: object) -> str:
    """How a model is named before it is open."""
    if isinstance(model, str):
        return model
    name = getattr(model, "model_id", None) or getattr(model, "__qualname__", None)
    return str(name or type(model).__qualname__)


def _given(agent: ModelSettings, measured: Measured, request: Mapping[str, Any]) -> int:
    """The tokens of a request, as it is estimated in the light of earlier ones."""
    return measured.corrected(request["model"], _estimated(agent, request))


def _estimated(agent: ModelSettings, request: Mapping[str, Any]) -> int:
    return (agent.estimate or estimate_tokens)(request["messages"]) + _overhead(request)


def _overhead(request: Mapping[str, Any]) -> int:
    """The tokens of a request's tools and of its answer's schema."""
    output = request.get("output")
    return tokens_of_json([*request.get("tools", ()), *([output["schema"]] if output else ())])


def _tool_call(part: Mapping[str, Any]) -> ToolCall:
    given = part.get("args")
    arguments: dict[str, Any] | str
    if isinstance(given, dict):
        arguments = given
    elif given is None or (isinstance(given, str) and not given.strip()):
        arguments = {}
    else:
        try:
            read = codec.decode(str(given).encode())
        except (InvalidInput, UnicodeEncodeError):
            read = None
        arguments = read if isinstance(read, dict) else str(given)
    return ToolCall(str(part.get("tool_call_id", "")), str(part.get("tool_name", "")), arguments)


def _growing(bounds: tuple[float, float], factor: float, number: int) -> float:
    """The wait after the `number`th time (from 1): from the first bound, growing by `factor`, to the second."""
    first, last = bounds
    return min(last, first * factor ** min(number - 1, 64))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
