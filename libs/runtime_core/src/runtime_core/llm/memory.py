"""The conversation that an instance with a key keeps from task to task."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from runtime_core import codec
from runtime_core.llm.agent import ModelSettings
from runtime_core.llm.model_call import Compaction
from runtime_core.llm.tokens import Message, Window, cuts, is_store

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext

log = logging.getLogger(__name__)

MESSAGES = "messages"
"""The key in `ctx.state` under which an instance with a key keeps its conversation."""

MEMORY_MAX_BYTES = 512 * 1024
"""The most bytes of a kept conversation, so that its instance's state has room for more."""


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
