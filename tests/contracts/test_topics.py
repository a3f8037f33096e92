"""Topics: each subscriber gets a published message once, in its own task; a message without subscribers is kept."""

from __future__ import annotations

import pytest

from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.topics import Topics, TopicSubscription, task_of_message
from runtime_core.errors import Rejected
from runtime_core.wire.ids import instance_address, partition_of
from tests.contracts.broker import DIGEST, Broker, ask, complete, suspend
from tests.contracts.two_partitions import two_partitions

NEWS = TopicSubscription("news", "writer")
NEWS_OF_EDITOR = TopicSubscription("news", "editor")
ALL_NEWS = TopicSubscription("new", "writer", prefix=True)


async def heard(broker: Broker, bus: EventBus) -> list[str]:
    """Complete turn after turn. Return the instances in the order in which they came."""
    found = []
    while await broker.entries("agent"):
        turn = await broker.take(bus)
        found.append(turn.instance or turn.name)
        assert await complete(bus, turn)
    return found


def publish(topic: str, key: str = "k", *, step: str = "0", sender: str = "") -> list[bytes | str | int | float]:
    """Publish from a turn."""
    return ["p", f"message-{step}", topic, key, b'"hello"', b'{"topic":"news"}', sender, step, DIGEST]


async def test_every_subscriber_gets_the_message_in_its_own_task(broker: Broker, bus: EventBus) -> None:
    assert await bus.subscribe(NEWS)
    assert await bus.subscribe(NEWS_OF_EDITOR)
    assert await bus.publish("m", "news", "k", b'"hello"', b'{"topic":"news"}') == 2
    turns = [await broker.take(bus), await broker.take(bus)]
    assert {turn.instance for turn in turns} == {"writer/k", "editor/k"}
    assert len({turn.task for turn in turns}) == 2
    assert all(turn.data == b'"hello"' and turn.context == b'{"topic":"news"}' for turn in turns)
    for turn in turns:
        assert await complete(bus, turn)
    await broker.idle()


async def test_a_message_reaches_a_replay_with_its_context(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.publish("m", "news", "k", b'"hello"', b'{"topic":"news"}')
    fields = await bus.load(await broker.take(bus))
    assert fields is not None
    assert (fields.data, fields.context) == (b'"hello"', b'{"topic":"news"}')


async def test_messages_on_other_topics_are_not_received(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.subscribe(NEWS_OF_EDITOR)
    assert await bus.publish("m", "newspaper", "k", b"1") == 0
    await broker.nothing(bus)


async def test_overlapping_subscriptions_deliver_once(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.subscribe(ALL_NEWS)
    assert await bus.publish("m", "news", "k", b"1") == 1
    assert await bus.publish("m2", "newspaper", "k", b"1") == 1
    assert await heard(broker, bus) == ["writer/k", "writer/k"]


async def test_the_sender_does_not_receive_its_own_message(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.subscribe(NEWS_OF_EDITOR)
    assert await bus.publish("m", "news", "k", b"1", b"", "writer/k") == 1
    assert await bus.publish("m2", "news", "other", b"1", b"", "writer/k") == 2
    assert sorted(await heard(broker, bus)) == ["editor/k", "editor/other", "writer/other"]


async def test_a_sender_gets_no_messages_from_before_its_subscription(broker: Broker, bus: EventBus) -> None:
    for message, key in (("m", "k"), ("m2", "other")):
        assert await bus.publish(message, "news", key, b"1", b"", "writer/k") == 0
    assert await bus.subscribe(NEWS)
    assert await heard(broker, bus) == ["writer/other"]


async def test_removing_an_unknown_subscription_changes_nothing(broker: Broker, bus: EventBus) -> None:
    assert not await bus.unsubscribe(NEWS)
    assert not await bus.unsubscribe(ALL_NEWS)


async def test_a_repeated_publish_starts_nothing_again(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.publish("m", "news", "k", b"1")
    await bus.publish("m", "news", "k", b"1")
    assert await heard(broker, bus) == ["writer/k"]
    await bus.publish("m", "news", "k", b"1")  # its task has ended
    assert await heard(broker, bus) == []


async def test_an_equal_subscription_is_stored_once(broker: Broker, bus: EventBus) -> None:
    assert await bus.subscribe(NEWS)
    assert not await bus.subscribe(NEWS)
    assert await bus.subscribe(ALL_NEWS)
    assert not await bus.subscribe(ALL_NEWS)
    assert await bus.subscriptions() == [ALL_NEWS, NEWS]


async def test_unsubscribed_agents_receive_nothing(broker: Broker, bus: EventBus) -> None:
    for wanted in (NEWS, NEWS_OF_EDITOR, ALL_NEWS):
        await bus.subscribe(wanted)
    assert await bus.unsubscribe(NEWS)
    assert not await bus.unsubscribe(NEWS)
    assert await bus.unsubscribe(ALL_NEWS)
    assert await bus.subscriptions() == [NEWS_OF_EDITOR]
    await bus.publish("m", "news", "k", b"1")
    assert await heard(broker, bus) == ["editor/k"]


async def test_a_message_without_a_subscriber_waits_for_a_subscription_by_prefix(broker: Broker, bus: EventBus) -> None:
    await bus.publish("m", "newspaper", "k", b"1")
    await bus.publish("m2", "weather", "k", b"2")
    await bus.subscribe(ALL_NEWS)
    assert await heard(broker, bus) == ["writer/k"]


async def test_an_agent_that_exists_subscribes_to_nothing(broker: Broker, bus: EventBus) -> None:
    await bus.publish("m", "news", "k", b"1")
    await bus.note_agent("writer")
    assert await bus.subscriptions() == []
    await broker.nothing(bus)


async def test_a_message_without_a_subscriber_waits_for_a_later_agent(broker: Broker, bus: EventBus) -> None:
    assert await bus.publish("m", "news", "k", b'"early"', b'{"topic":"news"}') == 0
    await bus.subscribe(NEWS)
    turn = await broker.take(bus)
    assert (turn.instance, turn.data, turn.context) == ("writer/k", b'"early"', b'{"topic":"news"}')
    assert await complete(bus, turn)
    await bus.subscribe(ALL_NEWS)  # the same message by another subscription
    assert await heard(broker, bus) == []


async def test_an_existing_agent_gets_no_messages_from_before_its_subscription(broker: Broker, bus: EventBus) -> None:
    await bus.note_agent("writer")
    await bus.publish("m", "news", "k", b"1")
    await bus.subscribe(NEWS)
    assert await heard(broker, bus) == []


async def test_a_new_agent_gets_messages_published_just_before_it_appeared(broker: Broker, bus: EventBus) -> None:
    """Ids that are ahead of the server's clock count on as they do within one millisecond."""
    fields = ("id", "first", "topic", "another", "key", "k", "d", "1", "x", "", "sender", "")
    await broker.call("XADD", broker.keys.undelivered, f"{(await bus.time_ms()) + 60_000}-0", *fields)
    await bus.publish("before", "news", "before", b"1")
    await bus.note_agent("writer")
    await bus.publish("after", "news", "after", b"1")
    await bus.subscribe(NEWS)
    assert await heard(broker, bus) == ["writer/before"]


async def test_a_step_of_the_clock_does_not_end_the_retention_of_a_message(broker: Broker, bus: EventBus) -> None:
    """It was published before the server's clock stepped an hour ahead, so its id looks an hour older than it is."""
    step = 3_600_000
    fields = ("id", "before", "topic", "news", "key", "k", "d", "1", "x", "", "sender", "")
    await broker.call("XADD", broker.keys.undelivered, f"{await bus.time_ms() - step - 1000}-0", *fields)
    await broker.pass_time(-step)
    await bus.subscribe(NEWS)
    assert await heard(broker, bus) == ["writer/k"]


@pytest.mark.parametrize("offset", [-3_600_000, 3_600_000])
async def test_corrected_steps_of_the_clock_lose_and_add_no_message(broker: Broker, bus: EventBus, offset: int) -> None:
    await broker.pass_time(offset)
    await bus.publish("before", "news", "before", b"1")
    await bus.note_agent("writer")
    await bus.publish("after", "news", "after", b"1")
    await bus.subscribe(NEWS)
    assert await heard(broker, bus) == ["writer/before"]


async def test_a_message_with_a_subscriber_is_not_kept(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.publish("m", "news", "k", b"1")
    await broker.pass_time(5)
    await bus.subscribe(NEWS_OF_EDITOR)
    assert await heard(broker, bus) == ["writer/k"]


@pytest.mark.parametrize("waits", [True, False])
async def test_a_turn_publishes_with_its_commit(broker: Broker, bus: EventBus, waits: bool) -> None:
    await bus.subscribe(NEWS_OF_EDITOR)
    await broker.submit(bus, "t", "desk")
    turn = await broker.take(bus)
    if waits:
        assert await suspend(bus, turn, publish("news"), ask("1"))
        assert (await broker.task("t"))["j:0"].startswith(DIGEST + "K")
    else:
        assert await complete(bus, turn, publish("news"))
    assert (await broker.take(bus)).instance == "editor/k"


async def test_a_fenced_turn_publishes_nothing(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS_OF_EDITOR)
    await broker.submit(bus, "t", "desk")
    turn = await broker.take(bus)
    assert await complete(bus, turn, publish("news"))
    assert not await complete(bus, turn, publish("news", step="1"))
    assert await heard(broker, bus) == ["editor/k"]


async def test_a_message_for_another_partition_is_sent_by_the_relay(broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", "desk")
    assert await complete(bus, await broker.take(bus), publish("@news", sender="desk/d"))
    (entry,) = await broker.entries("asks")
    assert {name: entry[name] for name in ("publish", "topic", "key", "d", "sender")} == {
        "publish": "message-0", "topic": "news", "key": "k", "d": '"hello"', "sender": "desk/d",
    }  # fmt: skip


async def test_a_full_broker_refuses_a_message(broker: Broker, bus: EventBus) -> None:
    await broker.call("HSET", broker.keys.meta, "overload", "the memory is full")
    with pytest.raises(Rejected, match="the memory is full"):
        await bus.publish("m", "news", "k", b"1")


async def test_a_key_of_another_type_changes_nothing(broker: Broker, bus: EventBus) -> None:
    await bus.subscribe(NEWS)
    await bus.subscribe(NEWS_OF_EDITOR)
    await broker.call("SET", f"{broker.keys.base}inst:editor/k", "not a hash")
    before = await broker.snapshot()
    with pytest.raises(Exception, match="WRONGTYPE"):
        await bus.publish("m", "news", "k", b"1")
    assert await broker.snapshot() == before


async def test_undelivered_messages_are_bounded(broker: Broker, bus: EventBus) -> None:
    for number in range(1300):
        await bus.publish(f"m{number}", "news", "k", b"1")
    assert len(await broker.entries("undelivered")) < 1250


async def test_undelivered_messages_are_bounded_in_bytes(broker: Broker, bus: EventBus) -> None:
    """Large messages push out as many old ones as they need room for, and the newest always stays."""
    mebibyte = b'"' + b"x" * (1024 * 1024 - 2) + b'"'
    for number in range(40):
        await bus.publish(f"small-{number}", "news", "k", b"1")
    for number in range(30):
        await bus.publish(f"large-{number}", "news", "k", mebibyte)
    kept = await broker.entries("undelivered")
    assert [entry["id"] for entry in kept] == [f"large-{number}" for number in range(15, 30)]
    await bus.publish("huge", "news", "k", b'"' + b"x" * (17 * 1024 * 1024) + b'"')
    assert [entry["id"] for entry in await broker.entries("undelivered")] == ["huge"]
    await bus.publish("after", "news", "k", b"1")
    assert [entry["id"] for entry in await broker.entries("undelivered")] == ["after"]
    assert await bus.subscribe(NEWS)
    assert await broker.status(task_of_message("after", NEWS.agent, "k")) == "accepted"


async def test_undelivered_messages_of_an_older_release_are_counted_out(broker: Broker, bus: EventBus) -> None:
    """Their entries do not say how many bytes came before them."""
    fields = ("topic", "news", "key", "k", "d", "1", "x", "", "sender", "")
    for number in range(3):
        await broker.call("XADD", broker.keys.undelivered, "*", "id", f"old-{number}", *fields)
    await bus.publish("first", "news", "k", b"1")
    assert len(await broker.entries("undelivered")) == 4
    for number in range(16):
        await bus.publish(f"large-{number}", "news", "k", b'"' + b"x" * (1024 * 1024) + b'"')
    kept = [entry["id"] for entry in await broker.entries("undelivered")]
    assert kept == [f"large-{number}" for number in range(1, 16)]


@pytest.mark.parametrize("source", ["a", "b", "c", "d"])
async def test_an_agent_that_subscribes_during_a_publish_gets_one_task_in_its_partition(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    async with two_partitions(broker) as pair:
        topics, home = Topics(pair.buses), pair.here.bus
        look = home.subscriptions

        async def subscribe_after_the_look() -> list[TopicSubscription]:
            found = await look()
            monkeypatch.undo()
            await topics.subscribe(NEWS)
            return found

        monkeypatch.setattr(home, "subscriptions", subscribe_after_the_look)
        for _ in range(2):
            assert await topics.publish("m", "news", source, b'"hello"') == 1
        task = task_of_message("m", "writer", source)
        there = [bool(await side.broker.task(task)) for side in pair.sides]
        assert there.count(True) == 1
        assert there[partition_of(instance_address("writer", source), 2)]
