"""A caller's token cancels what handles its request, also a request that the handler has made itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from autogen_core import (
    AgentId,
    CancellationToken,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    default_subscription,
    message_handler,
)

from runtime_core.integrations.autogen import WeftAgentRuntime

INNER, OUTER = AgentId("inner", "default"), AgentId("outer", "default")
WAIT_SECONDS = 20


@dataclass
class Wait:
    """Asks an agent to wait for ever."""


class Waiting(RoutedAgent):
    """Waits until it is cancelled; says when it has begun."""

    def __init__(self, begun: asyncio.Event) -> None:
        super().__init__("waits")
        self.begun = begun
        self.token: CancellationToken | None = None
        self.cancelled = asyncio.Event()

    @message_handler
    async def on_wait(self, message: Wait, ctx: MessageContext) -> Wait:
        self.token = ctx.cancellation_token
        self.begun.set()
        try:
            await self.wait(ctx)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return message

    async def wait(self, ctx: MessageContext) -> None:
        for_ever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await ctx.cancellation_token.link_future(for_ever)


class Asking(Waiting):
    """Waits for another agent."""

    async def wait(self, ctx: MessageContext) -> None:
        await self.send_message(Wait(), INNER, cancellation_token=ctx.cancellation_token)


@default_subscription
class Listening(Waiting):
    """Waits when it hears something."""


@pytest.mark.parametrize("asked", [INNER, OUTER])
async def test_a_token_cancels_the_caller_and_every_handler(asked: AgentId) -> None:
    begun = asyncio.Event()
    runtime = WeftAgentRuntime()
    await Waiting.register(runtime, "inner", lambda: Waiting(begun))
    await Asking.register(runtime, "outer", lambda: Asking(asyncio.Event()))
    runtime.start()
    token = CancellationToken()
    response = asyncio.create_task(runtime.send_message(Wait(), asked, cancellation_token=token))
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await response
    for id in {INNER, asked}:
        agent = await runtime.try_get_underlying_agent_instance(id, Waiting)
        await asyncio.wait_for(agent.cancelled.wait(), WAIT_SECONDS)
    asked_agent = await runtime.try_get_underlying_agent_instance(asked, Waiting)
    assert asked_agent.token is token
    await asyncio.wait_for(runtime.stop_when_idle(), WAIT_SECONDS)
    await runtime.close()


async def test_a_token_that_was_cancelled_before_sends_nothing() -> None:
    begun = asyncio.Event()
    runtime = WeftAgentRuntime()
    await Waiting.register(runtime, "inner", lambda: Waiting(begun))
    runtime.start()
    token = CancellationToken()
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runtime.send_message(Wait(), INNER, cancellation_token=token)
    await asyncio.wait_for(runtime.stop_when_idle(), WAIT_SECONDS)
    assert not begun.is_set()
    await runtime.close()


async def test_the_token_of_a_published_message_reaches_its_handlers() -> None:
    begun = asyncio.Event()
    runtime = WeftAgentRuntime()
    await Listening.register(runtime, "listening", lambda: Listening(begun))
    runtime.start()
    token = CancellationToken()
    await runtime.publish_message(Wait(), DefaultTopicId(), cancellation_token=token)
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    token.cancel()
    await asyncio.wait_for(runtime.stop_when_idle(), WAIT_SECONDS)
    agent = await runtime.try_get_underlying_agent_instance(AgentId("listening", "default"), Listening)
    assert agent.cancelled.is_set()
    await runtime.close()
