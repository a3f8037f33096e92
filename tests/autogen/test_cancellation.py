"""A caller's token cancels the handler of its request, and requests that this handler has made."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from autogen_core import (
    AgentId,
    CancellationToken,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    default_subscription,
    message_handler,
)

from runtime_core.integrations.autogen import WeftAgentRuntime

INNER, OUTER = AgentId("inner", "default"), AgentId("outer", "default")
REMEMBERING, HEARING = AgentId("remembering", "default"), AgentId("hearing", "default")
WAIT_SECONDS = 60


@dataclass
class Wait:
    """Requests that an agent wait forever."""


class Waiting(RoutedAgent):
    """Waits until it is cancelled; reports when it has begun."""

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


class Cleaning(Waiting):
    """When it is cancelled, it calls another agent to record that, and publishes that it has cleaned up."""

    async def wait(self, ctx: MessageContext) -> None:
        try:
            await super().wait(ctx)
        finally:
            await self.send_message(Note("cleaning up"), REMEMBERING)
            await self.publish_message(Note("cleaned up"), DefaultTopicId())


@default_subscription
class Listening(Waiting):
    """Waits when it gets a message."""


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


@dataclass
class Note:
    """Something to remember."""

    text: str


class Noting(RoutedAgent):
    """Keeps its messages, and whether its token was cancelled."""

    def __init__(self) -> None:
        super().__init__("remembers")
        self.seen: list[tuple[str, bool]] = []


class Remembering(Noting):
    """Publishes its messages."""

    @message_handler
    async def on_note(self, message: Note, ctx: MessageContext) -> None:
        self.seen.append((message.text, ctx.cancellation_token.is_cancelled()))
        await self.publish_message(Note(f"heard: {message.text}"), DefaultTopicId())


@default_subscription
class Hearing(Noting):
    """Receives what others publish."""

    @message_handler
    async def on_note(self, message: Note, ctx: MessageContext) -> None:
        self.seen.append((message.text, ctx.cancellation_token.is_cancelled()))


@pytest.mark.parametrize("runtime_class", [WeftAgentRuntime, SingleThreadedAgentRuntime])
@pytest.mark.parametrize("when", ["before it is sent", "before it is handled"])
async def test_a_request_is_handled_even_if_its_token_was_cancelled(runtime_class: type[Any], when: str) -> None:
    """A team that is cancelled at once has still received its task, and continues it when it runs again."""
    runtime = runtime_class()
    await Remembering.register(runtime, "remembering", Remembering)
    await Hearing.register(runtime, "hearing", Hearing)
    token = CancellationToken()
    if when == "before it is sent":
        token.cancel()
    response = asyncio.create_task(runtime.send_message(Note("task"), REMEMBERING, cancellation_token=token))
    await asyncio.sleep(0)  # it begins, and nobody handles messages yet
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(response, WAIT_SECONDS)
    runtime.start()
    await asyncio.wait_for(runtime.stop_when_idle(), WAIT_SECONDS)
    agent = await runtime.try_get_underlying_agent_instance(REMEMBERING, Remembering)
    assert agent.seen == [("task", True)]
    hearing = await runtime.try_get_underlying_agent_instance(HEARING, Hearing)
    assert hearing.seen == [("heard: task", False)]
    await runtime.close()


@pytest.mark.parametrize("runtime_class", [WeftAgentRuntime, SingleThreadedAgentRuntime])
async def test_the_work_of_a_handler_after_the_cancel_counts(runtime_class: type[Any]) -> None:
    """It may clean up, and send messages."""
    begun = asyncio.Event()
    runtime = runtime_class()
    await Cleaning.register(runtime, "inner", lambda: Cleaning(begun))
    await Remembering.register(runtime, "remembering", Remembering)
    await Hearing.register(runtime, "hearing", Hearing)
    runtime.start()
    token = CancellationToken()
    response = asyncio.create_task(runtime.send_message(Wait(), INNER, cancellation_token=token))
    await asyncio.wait_for(begun.wait(), WAIT_SECONDS)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(response, WAIT_SECONDS)
    await asyncio.wait_for(runtime.stop_when_idle(), WAIT_SECONDS)
    hearing = await runtime.try_get_underlying_agent_instance(HEARING, Hearing)
    assert hearing.seen == [("heard: cleaning up", False), ("cleaned up", False)]
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
