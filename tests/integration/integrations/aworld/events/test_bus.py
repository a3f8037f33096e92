"""The event bus for programs, in memory and on a broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest

from runtime_core.bus.connector import MEMORY
from tests.servers.matrix import VALKEY_9
from tests.servers.process import Server
from weft import RetryPolicy
from weft.aworld import AgentMessage, EventBus, Message
from weft.errors import InvalidInput


class Make(Protocol):
    """Create a bus that is closed at the end of the test."""

    async def __call__(self, **options: Any) -> EventBus: ...  # Any: the bus's own


@pytest.fixture(params=["memory", VALKEY_9])
def broker(request: pytest.FixtureRequest, shared_server: Callable[[str], Server]) -> str:
    return MEMORY if request.param == "memory" else shared_server(request.param).url


@pytest.fixture
async def make(broker: str, namespace: str) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack, asyncio.timeout(60):

        async def made(**options: Any) -> EventBus:
            return await stack.enter_async_context(EventBus(broker, namespace, services=False, **options))

        yield made


def news(payload: object, **fields: Any) -> Message:
    return Message(category="agent", topic="news", payload=payload, **fields)


async def test_handlers_get_the_messages_of_their_topic_in_order(make: Make) -> None:
    bus = await make()
    seen: list[tuple[str, object]] = []
    everything = asyncio.Event()

    async def second(message: Message) -> None:
        seen.append(("second", message.payload))

    def first(message: Message) -> AgentMessage | None:
        seen.append(("first", message.payload))
        return AgentMessage(topic="echo", payload="done") if message.payload == 3 else None

    await bus.subscribe("agent", "news", second, order=1)
    await bus.subscribe("agent", "news", first)
    await bus.subscribe("agent", "echo", lambda message: everything.set())
    await bus.publish([news(number) for number in (1, 2, 3)])
    await bus.publish(Message(category="agent", topic="other", payload=4))
    await everything.wait()
    assert seen == [(name, number) for number in (1, 2, 3) for name in ("first", "second")]


async def test_a_subscription_to_a_category_gets_all_its_topics(make: Make) -> None:
    bus = await make()
    seen: asyncio.Queue[Message] = asyncio.Queue()
    await bus.subscribe("agent", "", seen.put)
    sent = [await bus.publish(Message(category="agent", topic=topic, payload=1)) for topic in ("a", "b")]
    await bus.publish(Message(category="tool", topic="a", payload=1))
    assert [await seen.get(), await seen.get()] == sent
    assert seen.empty()


async def test_messages_are_consumed_one_by_one_and_in_order_until_done(make: Make) -> None:
    bus = await make()
    await bus.publish([news(number) for number in range(3)])
    for number in range(3):
        taken = await bus.consume(event_type="agent", topic="news")
        assert taken.payload == number
        with pytest.raises(TimeoutError):
            await bus.consume(taken, timeout=0.05)
        await bus.done(taken)
    with pytest.raises(InvalidInput, match="is not an open message"):
        await bus.done(taken)


async def test_other_sessions_do_not_wait(make: Make) -> None:
    bus = await make()
    await bus.publish([news(1, session_id="a"), news(2, session_id="b")])
    taken = [await bus.consume(event_type="agent", topic="news") for _ in range(2)]
    assert sorted(message.payload for message in taken) == [1, 2]


async def test_a_repeated_publication_reaches_no_subscriber_twice(make: Make) -> None:
    bus = await make()
    for _ in range(2):
        await bus.publish(news(1, id="m-1"))
    await bus.publish(news(2))
    for payload in (1, 2):
        taken = await bus.consume(event_type="agent", topic="news")
        assert taken.payload == payload
        await bus.done(taken.id)


async def test_a_handler_is_retried_before_the_next_message(make: Make) -> None:
    bus = await make()
    seen: asyncio.Queue[object] = asyncio.Queue()

    async def fails(message: Message) -> None:
        await seen.put(message.payload)
        if message.payload == "bad":
            raise ValueError("never")

    await bus.subscribe("agent", "news", fails, retry=RetryPolicy(attempts=2, base_seconds=0.001))
    await bus.publish([news("bad"), news("good")])
    assert [await seen.get() for _ in range(3)] == ["bad", "bad", "good"]


async def test_without_handlers_nothing_is_delivered(make: Make) -> None:
    bus = await make()
    seen: asyncio.Queue[object] = asyncio.Queue()

    async def note(message: Message) -> None:
        await seen.put(message.payload)

    await bus.subscribe("agent", "news", note)
    await bus.unsubscribe("agent", "news", note)
    with pytest.raises(InvalidInput, match="is not subscribed"):
        await bus.unsubscribe("agent", "news", note)
    await bus.publish(news(1))
    await bus.subscribe("agent", "news", note)
    await bus.publish(news(2))
    assert await seen.get() == 2
    assert seen.empty()


async def test_a_message_that_is_consumed_by_topic_and_by_category_is_done_twice(make: Make) -> None:
    bus = await make()
    topics = ("news", "")
    for topic in topics:  # subscribes
        with pytest.raises(TimeoutError):
            await bus.consume(event_type="agent", topic=topic, timeout=0.01)
    await bus.publish([news(1), news(2)])
    for payload in (1, 2):
        taken = [await bus.consume(event_type="agent", topic=topic) for topic in topics]
        assert [message.payload for message in taken] == [payload, payload]
        for message in taken:
            await bus.done(message)


async def test_without_consumers_nothing_is_kept(make: Make) -> None:
    bus = await make()
    with pytest.raises(InvalidInput, match="consume is not subscribed"):
        await bus.unsubscribe("agent", "news")
    with pytest.raises(TimeoutError):
        await bus.consume(event_type="agent", topic="news", timeout=0.01)
    await bus.unsubscribe("agent", "news")
    with pytest.raises(InvalidInput, match="consume is not subscribed"):
        await bus.unsubscribe("agent", "news")
    await bus.publish(news(1))
    with pytest.raises(TimeoutError):
        await bus.consume(event_type="agent", topic="news", timeout=0.01)
    await bus.publish(news(2))
    assert (await bus.consume(event_type="agent", topic="news")).payload == 2


async def test_each_group_gets_every_message_and_its_processes_share_them(
    shared_server: Callable[[str], Server], namespace: str
) -> None:
    url = shared_server(VALKEY_9).url
    seen: asyncio.Queue[str] = asyncio.Queue()
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        buses = [
            await stack.enter_async_context(EventBus(url, namespace, group=group, services=False))
            for group in ("one", "one", "two")
        ]
        for bus, name in zip(buses, ("one", "one", "two"), strict=True):

            def note(message: Message, name: str = name) -> None:
                seen.put_nowait(name)

            await bus.subscribe("agent", "news", note)
        await buses[0].publish([news(number, session_id=str(number)) for number in range(4)])
        got = [await seen.get() for _ in range(8)]
        assert (got.count("one"), got.count("two")) == (4, 4)
        assert seen.empty()


async def test_a_consumed_message_without_done_goes_to_another_process(
    shared_server: Callable[[str], Server], namespace: str
) -> None:
    url = shared_server(VALKEY_9).url
    async with asyncio.timeout(60):
        async with EventBus(url, namespace, services=False) as bus:
            await bus.publish([news(1), news(2)])
            assert (await bus.consume(event_type="agent", topic="news")).payload == 1
        async with EventBus(url, namespace, services=False) as other:
            for payload in (1, 2):
                taken = await other.consume(event_type="agent", topic="news")
                assert taken.payload == payload
                await other.done(taken)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (news(1, priority="high"), "message.priority"),
        (Message(category="agent", payload=1), "message.topic"),
        (Message(category="no spaces", topic="a", payload=1), "event_type"),
        ("text", "messages"),
        ([1], "messages"),
    ],
)
async def test_a_wrong_message_is_refused_by_field(wrong: Any, field: str) -> None:
    async with EventBus(MEMORY) as bus:
        with pytest.raises(InvalidInput) as refused:
            await bus.publish(wrong)
        assert refused.value.field == field


async def test_wrong_arguments_are_refused_by_field() -> None:
    with pytest.raises(InvalidInput, match="group"):
        EventBus(MEMORY, group="a b")
    async with EventBus(MEMORY) as bus:
        with pytest.raises(InvalidInput, match="handler"):
            await bus.subscribe("agent", "news", None)  # type: ignore[arg-type]  # what a program may do wrong
        with pytest.raises(InvalidInput, match="topic"):
            await bus.consume(event_type="agent", topic="a b")
