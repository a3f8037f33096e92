"""Several runtimes of one namespace: what AutoGen's tests over gRPC request, skip, or expect otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from autogen_core import (
    AgentId,
    CancellationToken,
    DefaultTopicId,
    MessageContext,
    RoutedAgent,
    TopicId,
    message_handler,
)
from google.protobuf.wrappers_pb2 import StringValue  # type: ignore[import-untyped]  # protobuf ships no types

from runtime_core.errors import InvalidInput
from runtime_core.integrations.autogen import WeftAgentRuntime
from tests.autogen.helpers.autogen_test_utils import (
    CascadingAgent,
    CascadingMessageType,
    ContentMessage,
    LoopbackAgent,
    LoopbackAgentWithDefaultSubscription,
)
from tests.servers.process import Server

IDLE_SECONDS = 60
Make = Callable[[], WeftAgentRuntime]


@pytest.fixture
async def make(valkey: Server, namespace: str) -> AsyncIterator[Make]:
    """Creates runtimes of one namespace; all are closed at the end."""
    made: list[WeftAgentRuntime] = []

    def one() -> WeftAgentRuntime:
        made.append(WeftAgentRuntime(url=valkey.url, namespace=namespace, services=False))
        return made[-1]

    yield one
    for runtime in made:
        await runtime.close()


@asynccontextmanager
async def running(make: Make, count: int) -> AsyncIterator[list[WeftAgentRuntime]]:
    runtimes = [make() for _ in range(count)]
    for runtime in runtimes:
        runtime.start()
    yield runtimes


async def calls(runtime: WeftAgentRuntime, type: str, key: str = "default") -> int:
    agent = await runtime.try_get_underlying_agent_instance(AgentId(type, key), RoutedAgent)
    assert isinstance(agent, LoopbackAgent | CascadingAgent)
    return agent.num_calls


async def test_a_cascade_over_several_runtimes_reaches_each_agent_exactly_as_often_as_it_should(make: Make) -> None:
    agents, initial, rounds = 5, 5, 4
    async with running(make, agents) as workers:
        for number, worker in enumerate(workers):
            await CascadingAgent.register(worker, f"name{number}", lambda: CascadingAgent(rounds))
        publisher = make()
        publisher.start()
        for _ in range(initial):
            await publisher.publish_message(CascadingMessageType(round=1), DefaultTopicId())
        await asyncio.wait_for(publisher.stop_when_idle(), IDLE_SECONDS)
        expected = sum(initial * (agents - 1) ** number for number in range(rounds))
        assert [await calls(worker, f"name{number}") for number, worker in enumerate(workers)] == [expected] * agents


async def test_several_runtimes_serve_one_type_and_no_message_is_handled_twice(make: Make) -> None:
    async with running(make, 2) as workers:
        for worker in workers:
            await LoopbackAgent.register(worker, "name", LoopbackAgent)
        client = make()
        client.start()
        answers = await asyncio.gather(
            *(client.send_message(ContentMessage(str(number)), AgentId("name", str(number))) for number in range(40))
        )
        assert answers == [ContentMessage(str(number)) for number in range(40)]
        handled = [[await calls(worker, "name", str(number)) for number in range(40)] for worker in workers]
        assert [one + other for one, other in zip(*handled, strict=True)] == [1] * 40


async def test_the_next_runtime_handles_messages_that_a_stopped_one_left(make: Make) -> None:
    first, client, second = make(), make(), make()
    await LoopbackAgentWithDefaultSubscription.register(first, "worker", LoopbackAgentWithDefaultSubscription)
    first.start()
    client.start()
    await asyncio.wait_for(first.stop_when_idle(), IDLE_SECONDS)
    await first.close()
    await client.publish_message(ContentMessage("while nobody is there"), DefaultTopicId())
    await LoopbackAgentWithDefaultSubscription.register(second, "worker", LoopbackAgentWithDefaultSubscription)
    second.start()
    await asyncio.wait_for(second.stop_when_idle(), IDLE_SECONDS)
    assert await calls(second, "worker") == 1


async def test_the_default_topic_has_the_key_of_the_handler_that_publishes(make: Make) -> None:
    async with running(make, 1) as (worker,):
        await CascadingAgent(max_rounds=5).register_instance(worker, AgentId("instance_agent", "instance_agent"))
        await CascadingAgent.register(worker, "factory_agent", lambda: CascadingAgent(max_rounds=5))
        for round in range(5):
            await worker.publish_message(
                CascadingMessageType(round=round + 1), TopicId("instance_agent", "instance_agent")
            )
        await asyncio.wait_for(worker.stop_when_idle(), IDLE_SECONDS)
        assert await calls(worker, "instance_agent", "instance_agent") == 5
        assert await calls(worker, "factory_agent", "instance_agent") == 4
        assert await calls(worker, "factory_agent", "default") == 0


async def test_a_message_that_is_too_large_is_refused_where_it_is_sent(make: Make) -> None:
    async with running(make, 2) as (worker, client):
        await LoopbackAgent.register(worker, "name", LoopbackAgent)
        large = ContentMessage("." * 900_000)
        assert await client.send_message(large, AgentId("name", "default")) == large
        with pytest.raises(InvalidInput, match="1048576"):
            await client.send_message(ContentMessage("." * 2**20), AgentId("name", "default"))
        assert await calls(worker, "name") == 1


class Proto(RoutedAgent):
    """Receives and sends protobuf messages."""

    def __init__(self) -> None:
        super().__init__("protobuf")

    @message_handler
    async def on_value(self, message: StringValue, ctx: MessageContext) -> StringValue:
        return StringValue(value=message.value.upper())


async def test_messages_of_protobuf_are_requests_and_answers_too(make: Make) -> None:
    async with running(make, 2) as (worker, client):
        await Proto.register(worker, "proto", Proto)
        answer = await client.send_message(StringValue(value="größe"), AgentId("proto", "default"))
        assert answer == StringValue(value="GRÖSSE")


class Waiting(RoutedAgent):
    """Waits until its caller wants no answer any more, and counts that."""

    def __init__(self, begun: asyncio.Event) -> None:
        super().__init__("waits")
        self.begun = begun
        self.cancelled = 0

    @message_handler
    async def on_content(self, message: ContentMessage, ctx: MessageContext) -> None:
        cancelled = asyncio.Event()
        ctx.cancellation_token.add_callback(cancelled.set)
        self.begun.set()
        await cancelled.wait()
        self.cancelled += 1

    async def save_state(self) -> Mapping[str, Any]:
        return {"cancelled": self.cancelled}

    async def load_state(self, state: Mapping[str, Any]) -> None:
        self.cancelled = state["cancelled"]


@pytest.mark.parametrize("when", ["while it is handled", "before it is handled"])
async def test_a_cancellation_reaches_a_handler_in_another_runtime(make: Make, when: str) -> None:
    worker, client = make(), make()
    begun = asyncio.Event()
    await Waiting.register(worker, "waiting", lambda: Waiting(begun))
    client.start()
    id, token = AgentId("waiting", "default"), CancellationToken()
    response = asyncio.create_task(client.send_message(ContentMessage("x"), id, cancellation_token=token))
    if when == "while it is handled":
        worker.start()
        await asyncio.wait_for(begun.wait(), IDLE_SECONDS)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(response, IDLE_SECONDS)
    if when == "before it is handled":
        (bus,) = await client.broker()
        async with asyncio.timeout(IDLE_SECONDS):
            # Only the broker knows when it has learned of it.
            while not await bus.transport.call("ZCARD", f"{bus.keys.base}stopped"):
                await asyncio.sleep(0.01)
        worker.start()
    await asyncio.wait_for(client.stop_when_idle(), IDLE_SECONDS)
    assert await worker.agent_save_state(id) == {"cancelled": 1}
