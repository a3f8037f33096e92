"""Messages of a runtime: requests that end, and publications that reach each subscriber once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.integration.integrations.actors.agents import (
    DEFAULT,
    Answer,
    Ask,
    Asker,
    Echo,
    Gate,
    Note,
    Ping,
    Sink,
)
from weft.errors import InvalidInput
from weft.runtime import (
    AgentId,
    ClosureAgent,
    ClosureContext,
    DefaultSubscription,
    DefaultTopicId,
    MessageContext,
    Runtime,
    TopicId,
    TypePrefixSubscription,
    TypeSubscription,
    UndeliverableException,
)

SECONDS = 60


async def gate_of(runtime: Runtime, key: str = "one") -> Gate:
    return await runtime.try_get_underlying_agent_instance(AgentId("gate", key), Gate)


async def test_a_request_to_a_runtime_that_does_not_run_ends_at_its_time_limit(runtime: Runtime) -> None:
    handled: list[str] = []

    class Counts(Echo):
        async def on_message_impl(self, message: Any, ctx: MessageContext) -> Any:
            handled.append(message.text)
            return await super().on_message_impl(message, ctx)

    await Counts.register(runtime, "echo", Counts)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(TimeoutError, match=r"^echo/one has not answered within 0\.1 s, and no process"):
            await runtime.send_message(Ask("late"), AgentId("echo", "one"), timeout=0.1)
        runtime.start()
        await runtime.send_message(Ask("now"), AgentId("echo", "one"))
    assert handled == ["now"], "what was given up is not handled later"


async def test_overlapping_subscriptions_deliver_once(runtime: Runtime) -> None:
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("news.sport", "sink"))
    await runtime.add_subscription(TypePrefixSubscription("news", "sink"))
    await runtime.add_subscription(_Custom())
    runtime.start()
    await runtime.publish_message(Note("goal"), TopicId("news.sport", "one"))
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    sink = await runtime.try_get_underlying_agent_instance(AgentId("sink", "one"), Sink)
    assert sink.notes == ["goal"]


class _Custom:
    """A custom subscription: source `one` goes to `sink/one`, others to `sink/all`."""

    id = "custom"

    def is_match(self, topic_id: TopicId) -> bool:
        return True

    def map_to_agent(self, topic_id: TopicId) -> AgentId:
        return AgentId("sink", "one" if topic_id.source == "one" else "all")


async def test_a_subscription_of_any_class_works_in_its_process(runtime: Runtime) -> None:
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(_Custom())

    async def tell(agent: ClosureContext, message: Ask, ctx: MessageContext) -> None:
        await agent.publish_message(Note("from a handler"), TopicId("elsewhere", "two"))

    await ClosureAgent.register_closure(runtime, "teller", tell)
    runtime.start()
    await runtime.publish_message(Note("from outside"), TopicId("elsewhere", "two"))
    await runtime.send_message(Ask("go"), AgentId("teller", "x"))
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    sink = await runtime.try_get_underlying_agent_instance(AgentId("sink", "all"), Sink)
    assert sorted(sink.notes) == ["from a handler", "from outside"]


async def test_an_unknown_recipient_raises_inside_a_handler_too(runtime: Runtime) -> None:
    await Asker.register(runtime, "asker", Asker)
    runtime.start()
    with pytest.raises(UndeliverableException):
        await runtime.send_message(Ask("one"), AgentId("asker", "x"))


async def test_a_repeated_message_id_is_the_same_request(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("default", "sink"))
    runtime.start()
    answers = [await runtime.send_message(Ask("hi"), AgentId("echo", "a"), message_id="m-1") for _ in range(3)]
    assert answers == [Answer("hi", "echo/a")] * 3
    for _ in range(3):
        await runtime.publish_message(Note("n"), DEFAULT, message_id="p-1")
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    assert (await runtime.agent_save_state(AgentId("echo", "a"))) == {"count": 1}
    assert (await runtime.agent_save_state(AgentId("sink", "default"))) == {"notes": ["n"]}


async def test_agents_ask_many_others_at_once_and_publish(runtime: Runtime) -> None:
    await Asker.register(runtime, "asker", Asker)
    await Echo.register(runtime, "echo", Echo)
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("default", "sink"))
    runtime.start()
    answer = await runtime.send_message(Ask("one two three"), AgentId("asker", "k"))
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    assert answer == Answer("one two three", by="asker/k")
    assert (await runtime.agent_save_state(AgentId("sink", "k"))) == {"notes": ["3 answers"]}


async def test_agents_may_call_back_into_their_callers(runtime: Runtime) -> None:
    await runtime.register_factory("ping", lambda: Ping("pong"))
    await runtime.register_factory("pong", lambda: Ping("ping"))
    runtime.start()
    total = await asyncio.wait_for(runtime.send_message(5, AgentId("ping", "x")), SECONDS)
    assert total == 15
    assert (await runtime.agent_save_state(AgentId("ping", "x"))) == {"seen": [5, 3, 1]}
    assert (await runtime.agent_save_state(AgentId("pong", "x"))) == {"seen": [4, 2, 0]}


async def test_messages_sent_before_the_start_wait_for_it(runtime: Runtime) -> None:
    await Echo.register(runtime, "echo", Echo)
    asked = asyncio.create_task(runtime.send_message(Ask("early"), AgentId("echo", "a")))
    await asyncio.sleep(0)
    runtime.start()
    assert (await asyncio.wait_for(asked, SECONDS)).text == "early"


async def test_a_publication_is_sent_while_its_handler_continues(runtime: Runtime) -> None:
    heard = asyncio.Event()

    async def tells(agent: ClosureContext, message: Ask, ctx: MessageContext) -> None:
        await agent.publish_message(Note("now"), DefaultTopicId())
        await asyncio.wait_for(heard.wait(), SECONDS)

    async def hears(agent: ClosureContext, message: Note, ctx: MessageContext) -> None:
        heard.set()

    await ClosureAgent.register_closure(runtime, "tells", tells)
    await ClosureAgent.register_closure(runtime, "hears", hears, subscriptions=lambda: [DefaultSubscription()])
    runtime.start()
    await asyncio.wait_for(runtime.send_message(Ask("go"), AgentId("tells", "a")), SECONDS)


async def test_a_sender_does_not_get_its_own_publication(runtime: Runtime) -> None:
    async def tells(agent: ClosureContext, message: Note, ctx: MessageContext) -> None:
        await agent.publish_message(Note(message.text + "!"), DefaultTopicId())

    await ClosureAgent.register_closure(runtime, "tells", tells, subscriptions=lambda: [DefaultSubscription()])
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("default", "sink"))
    runtime.start()
    await runtime.publish_message(Note("n"), DEFAULT)
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    assert (await runtime.agent_save_state(AgentId("sink", "default"))) == {"notes": ["n", "n!"]}


async def test_an_oversized_message_is_refused_at_the_sender(runtime: Runtime) -> None:
    async def grows(agent: ClosureContext, message: Ask, ctx: MessageContext) -> Answer:
        return Answer("x" * 2_000_000)

    await ClosureAgent.register_closure(runtime, "grows", grows)
    runtime.start()
    with pytest.raises(InvalidInput, match="over the limit"):
        await runtime.send_message(Ask("x" * 2_000_000), AgentId("grows", "a"))
    with pytest.raises(InvalidInput, match="over the limit"):
        await runtime.send_message(Ask("x"), AgentId("grows", "a"))
