"""One model call of an agent, a step that is repeated until the model answers; and the conversation that it belongs to,
as it is shortened and kept.

ModelRequest ──fit──> tokens.py ──> ctx.model: one step ──> Sender.send, live only ──> the provider
    ^                                    │ recorded
    └── ctx.sleep: waits on the broker ──┴─ not answered: {"retry_after": s, "error": {…}}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pydantic_ai.messages import ModelResponse, TextPart
from pydantic_ai.models import ModelRequestParameters

from runtime_core.declare.manifest import HookPoint
from runtime_core.errors import InvalidInput, LocalStepError
from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.attempt import (
    Attempts,
    Decide,
    ModelAttempt,
    Sender,
    backoff,
    corrected_tokens,
    label_of,
    messages_json,
    messages_of,
    overhead_tokens,
)
from runtime_core.llm.client import CallState, with_key
from runtime_core.llm.failures import Endpoint, ModelFailed
from runtime_core.llm.tokens import KeepAll, Message, Window, cuts, estimate_tokens, is_store, price_of
from runtime_core.runs.ports import Reserve
from runtime_core.wire import codec

if TYPE_CHECKING:
    from runtime_core.llm.models import OpenModels
    from runtime_core.runs.context import AgentContext

log = logging.getLogger(__name__)

RESERVED = "Reserved"
"""The error type when other calls of the task have reserved the rest of its limits."""

DEFAULT_MAX_TOKENS = 4_096
"""The longest answer of a call if the task has a limit and the agent's settings have no `max_tokens`."""

LEAST_TOKENS = 16
"""The shortest answer worth a request; some providers accept no lower limit."""

RESERVED_WAIT_SECONDS = (0.5, 30.0)
"""The first and the longest wait for reservations of other calls."""

SHOWN_MAX_BYTES = 256 * 1024
"""Longer conversations are not in the payload of hooks around a compaction."""

MESSAGES = "messages"
"""The key in `ctx.state` under which an instance with a key keeps its conversation."""

MEMORY_MAX_BYTES = 512 * 1024
"""The most bytes of a kept conversation, so that its instance's state has room for more."""


class Compaction:
    """Shortens a conversation by a window strategy, with the hooks around it. It is the strategy's WindowContext."""

    def __init__(
        self,
        ctx: AgentContext,
        settings: ModelSettings,
        name: str,
        *,
        purpose: str,
        request: Mapping[str, Any] | None = None,  # Any: JSON
        memory: dict[str, Any] | None = None,  # Any: see WindowContext
        left_out: int = 0,
    ) -> None:
        """`name` begins the names of the strategy's model calls; `purpose`, for hooks, is `request` or `memory`.

        `request` is what the messages are sent with. `memory` is the strategy's storage; None: the one in the
        instance's state. `left_out` is how many messages the hooks know to be left out.
        """
        self.ctx = ctx
        self._request = request
        self._settings = settings
        self._name = name
        self._purpose = purpose
        self._memory = memory
        self.left_out = left_out
        self._own_calls = 0
        self._given: list[Message] = []
        self._announced = False

    @property
    def overhead_tokens(self) -> int:
        return 0 if self._request is None else overhead_tokens(self._request)

    @property
    def memory(self) -> dict[str, Any]:  # Any: see WindowContext
        if self._memory is None:
            return cast(dict[str, Any], self.ctx.state.setdefault("window", {}))
        return self._memory

    def tokens(self, messages: Sequence[Message]) -> int:
        return (self._settings.estimate or estimate_tokens)(messages)

    async def ask(self, messages: list[Message], *, model: str | None = None) -> str:
        await self._announce()
        self._own_calls += 1
        settings = replace(self._settings, window=None, stream=False, model=model or self._settings.model)
        name = f"{self._name} window {self._own_calls}"
        response = await ask_model(self.ctx, settings, messages, name=name)
        return "".join(part.content for part in response.parts if isinstance(part, TextPart))

    async def fit(self, window: Window, messages: list[Message], *, shrink: bool = False) -> list[Message]:
        """Return what the strategy keeps. Raises Denied if a hook refuses that something is left out."""
        self._given, self._announced = messages, False
        fitted = await window.fit(self, messages, shrink=shrink)
        if not any(map(self.ctx.hooked, _AROUND_COMPACTION)):
            return fitted
        left_out = len(messages) - len(fitted)
        if not self._announced and left_out in (0, self.left_out):
            return fitted  # nothing more is left out than before
        await self._announce()
        self.left_out = left_out
        await self._fire(HookPoint.AFTER_CONTEXT_COMPACT, fitted)
        return fitted

    async def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            await self._fire(HookPoint.BEFORE_CONTEXT_COMPACT, self._given)

    async def _fire(self, point: HookPoint, messages: list[Message]) -> None:
        if not self.ctx.hooked(point):
            return
        payload: dict[str, object] = {"count": len(messages), "tokens": self.tokens(messages)}
        if len(codec.encode(messages)) <= SHOWN_MAX_BYTES:
            payload["messages"] = messages
        await self.ctx.hook(point, payload, name=self._purpose)


_AROUND_COMPACTION = (HookPoint.BEFORE_CONTEXT_COMPACT, HookPoint.AFTER_CONTEXT_COMPACT)


class ModelRequest:
    """A request that is repeated until it is answered."""

    def __init__(
        self,
        ctx: AgentContext,
        settings: ModelSettings,
        request: dict[str, Any],  # Any: JSON, see `request_json`
        sender: Sender,
        *,
        name: str,
        decide: Decide | None = None,
        left_out: int = 0,
    ) -> None:
        """`name` is persisted with the run: another version of the code finds the answer by it.

        `left_out` is how many messages earlier requests of the run left out.
        """
        self.ctx = ctx
        self._agent = settings
        self._request = request
        self._sender = sender
        self._name = name
        self._decide = decide
        self.left_out = left_out
        self._models: OpenModels = ctx.functions.models

    async def answer(self) -> Mapping[str, Any]:
        """Return the journaled result: `message`, `finish_reason`, `usage`, `decided` …

        Raises ModelFailed if the model does not answer, and Denied if a hook refuses the call.
        """
        window: Window = self._agent.window or KeepAll()
        messages = self._request["messages"]
        compaction = Compaction(
            self.ctx, self._agent, self._name, purpose="request", request=self._request, left_out=self.left_out
        )
        sent = await compaction.fit(window, messages)
        self.left_out = compaction.left_out
        try:
            return await self._until_answered(sent, self._name)
        except ModelFailed as error:
            if error.type != "ContextTooLong":
                raise
            smaller = await compaction.fit(window, messages, shrink=True)
            if len(smaller) >= len(sent) and compaction.tokens(smaller) >= compaction.tokens(sent):
                raise
        return await self._until_answered(smaller, f"{self._name} smaller")

    async def _until_answered(self, messages: list[Message], identity: str) -> Mapping[str, Any]:
        request = {**self._request, "messages": messages}
        tries = Attempts(began=self.ctx.now(), deadline=self.ctx.deadline)
        while True:
            # Drawn even if it is not used, so that each replay has the same steps.
            tries.chance = self.ctx.random()
            live = ModelAttempt(self.ctx, self._agent, self._request, self._sender, tries, self._decide)
            try:
                result: Any = await self.ctx.model(
                    request["model"], request, live.make, identity=identity, reserve=self._reserve(request)
                )
            except LocalStepError as error:
                if error.type != RESERVED:
                    raise ModelFailed(error.type, error.message) from error
                tries.reserved += 1
                await self.ctx.sleep(backoff(RESERVED_WAIT_SECONDS, 2.0, tries.reserved))
                continue
            if not isinstance(result, dict) or ("retry_after" not in result and not _is_answer(result)):
                raise InvalidInput(
                    "message.parts",
                    f"is missing in the answer of model {request['model']!r} after the hooks of after_llm_call: "
                    "let each return it; weft task show lists what they returned",
                )
            if "retry_after" not in result:
                return result
            tries.count(result)
            await self.ctx.sleep(result["retry_after"])

    def _reserve(self, request: Mapping[str, Any]) -> Reserve:
        """Return the reservation of the call: its estimated input, and its shortest and longest answer."""
        given = corrected_tokens(self._agent, self._models.estimate_errors, request)
        longest = max(request.get("settings", {}).get("max_tokens") or DEFAULT_MAX_TOKENS, 1)
        shortest = min(LEAST_TOKENS, longest)
        reserve = {"tokens": (given + shortest, given + longest)}
        price = price_of(self._agent.prices, request["model"])
        if price is None:
            return cast(Reserve, reserve)
        return {**reserve, "cost": (price.cost(given, shortest), price.cost(given, longest))}


class _DirectSender:
    """Sends messages to a model without an agent, and streams no text."""

    traced = False

    def __init__(self, models: OpenModels, settings: ModelSettings) -> None:
        self._models = models
        self._settings = settings

    async def endpoint(self, named: str | None) -> Endpoint:
        return (await self._models.open_or_fail(self._settings, named)).endpoint

    async def send(
        self, request: Mapping[str, Any], settings: Mapping[str, Any], live: CallState
    ) -> tuple[ModelResponse, Message]:
        opened = await self._models.open_or_fail(self._settings, live.named)
        response = await opened.model.request(
            messages_of(request["messages"]), with_key(settings, opened.model, live), ModelRequestParameters()
        )
        return response, messages_json([response])[0]


async def ask_model(ctx: AgentContext, settings: ModelSettings, messages: list[Message], *, name: str) -> ModelResponse:
    """Call a model with messages only, as a step of the run, and return its answer."""
    request = {"messages": messages, "model": label_of(settings.model), "settings": dict(settings.settings)}
    asking = ModelRequest(ctx, settings, request, _DirectSender(ctx.functions.models, settings), name=name)
    [response] = messages_of([(await asking.answer())["message"]])
    assert isinstance(response, ModelResponse)  # a model only answers with these
    return response


def _is_answer(result: Mapping[str, Any]) -> bool:
    message = result.get("message")
    return isinstance(message, dict) and isinstance(message.get("parts"), list)


class ConversationMemory:
    """The conversation of an instance with a key, kept from task to task: see `memory` of LLMAgent."""

    def __init__(self, ctx: AgentContext, settings: ModelSettings, memory: object, agent: str) -> None:
        self._ctx = ctx
        self._settings = settings
        self._memory = memory
        self._agent = agent

    async def recall(self) -> Sequence[Message]:
        """Return the kept conversation; empty without a key."""
        ctx, memory = self._ctx, self._memory
        if not ctx.key or memory is None:
            return ()
        if is_store(memory):
            return cast(Sequence[Message], await ctx.step(memory.load, self._id, name="load conversation") or ())
        return cast(Sequence[Message], ctx.state.get(MESSAGES, ()))

    async def remember(self, messages: list[Message]) -> None:
        """Keep a conversation, shortened as the memory says. Without a key it does nothing."""
        ctx, memory = self._ctx, self._memory
        if not ctx.key:
            return
        if memory is None or is_store(memory):
            ctx.state.pop(MESSAGES, None)
            if memory is not None:
                await ctx.step(memory.save, self._id, messages, name="save conversation")
            return
        shortening = Compaction(ctx, self._settings, f"{self._agent} memory", purpose="memory", memory={})
        ctx.state[MESSAGES] = self._within_state(await shortening.fit(cast(Window, memory), messages))

    @property
    def _id(self) -> str:
        return f"{self._agent}/{self._ctx.key}"

    def _within_state(self, messages: list[Message]) -> list[Message]:
        """Return the messages, or only the last exchange, or nothing, so that the state can hold them."""
        last = cuts(messages)[-1:]
        for kept in (messages, *(messages[at:] for at in last)):
            if len(codec.encode(kept)) <= MEMORY_MAX_BYTES:
                return kept
        log.warning(
            "agent %s, key %s: the last exchange alone is over %d bytes, so nothing of the conversation is kept",
            self._agent, self._ctx.key, MEMORY_MAX_BYTES,
        )  # fmt: skip
        return []
