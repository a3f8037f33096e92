"""Topics: subscriptions, and delivery of messages to subscribers, in one partition and in all together."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from runtime_core.bus.commits import CommitVerbs
from runtime_core.bus.connection import Reply, text
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.keys import group_of
from runtime_core.bus.tasks import TaskVerbs
from runtime_core.errors import Rejected
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import checked_topic, fingerprint, instance_address, partition_of

OVERLOADED_SECONDS = 0.5

_CONTEXT = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class TopicSubscription:
    """An agent gets messages on a topic, or on all topics that begin with a prefix."""

    topic: str
    agent: str
    prefix: bool = False


class TopicVerbs(TaskVerbs, CommitVerbs):
    """Topics of this partition, and the agents that subscribe to them. A message starts a task for each of these."""

    async def publish(
        self, message: str, topic: str, key: str, data: bytes, context: bytes = b"", sender: str = ""
    ) -> int:
        """Start a task for each agent that subscribes to the topic, and return how many there are.

        `message` is its id: a repeat starts nothing. `key` names the instance of each agent (empty: a new one), and
        `sender` an instance that does not get it. Raises `Rejected` if the broker is full, `NotDurable` as `submit`
        does.
        """
        found = await self._publish(message, topic, key, data, context, sender, "")
        assert found is not None
        return found

    async def keep_undelivered(
        self, message: str, topic: str, key: str, data: bytes, context: bytes = b"", sender: str = ""
    ) -> bool:
        """Keep a message without a subscriber. Return False if the topic has one by now. Raises as `publish`."""
        return await self._publish(message, topic, key, data, context, sender, "1") is not None

    async def _publish(
        self, message: str, topic: str, key: str, data: bytes, context: bytes, sender: str, keep: str
    ) -> int | None:
        connection = self.transport.reconnects
        reply = cast(list[Reply], await self.call("publish", message, topic, key, data, context, sender, keep))
        if reply[0] == b"overloaded":
            raise Rejected("overloaded", text(reply[1]), retry_after_seconds=1.0)
        if reply[0] == b"heard":
            return None
        await self.make_durable(connection, wrote=False)  # the reply does not say whether it wrote anything
        return cast(int, reply[1])

    async def subscribe(self, wanted: TopicSubscription, *, deliver: bool = True) -> bool:
        """Subscribe. Return False if there is an equal subscription.

        With `deliver`, the agent gets messages without a subscriber that were published before it first appeared.
        """
        kind = "prefix" if wanted.prefix else "type"
        return await self.call("subscribe", kind, wanted.topic, wanted.agent, "1" if deliver else "") == 1

    async def note_agent(self, agent: str) -> None:
        """Note that this agent exists: it does not get later messages of topics that it does not subscribe to."""
        await self.call("subscribe", "agent", "", agent, "")

    async def knows_subscriber(self, agent: str) -> bool:
        """Return whether this agent was noted, and not dropped since."""
        return await self.transport.call("HEXISTS", self.keys.topics, f"@{agent}") == 1

    async def unsubscribe(self, unwanted: TopicSubscription) -> bool:
        """End a subscription. Return False if there is none."""
        kind = "prefix" if unwanted.prefix else "type"
        return await self.call("unsubscribe", kind, unwanted.topic, unwanted.agent) == 1

    async def subscriptions(self) -> list[TopicSubscription]:
        """Return all subscriptions, sorted by topic."""
        reply = cast(list[bytes], await self.transport.call("HGETALL", self.keys.topics))
        found = []
        for name, value in zip(reply[::2], reply[1::2], strict=True):
            field = name.decode()
            if field.startswith("="):
                found += [TopicSubscription(field[1:], agent) for agent in value.decode().split("\n")]
            elif field == "^":
                for line in value.decode().split("\n"):
                    prefix, _, agent = line.partition(" ")
                    found.append(TopicSubscription(prefix, agent, prefix=True))
        return sorted(found, key=lambda each: (each.topic, each.prefix, each.agent))


def published(context: bytes, topic: str, sender: str = "", traceparent: str = "") -> bytes:
    """Return the context of a published message: its publisher's without the time limit, with topic and sender."""
    known = _carried(context)
    if traceparent:
        known["traceparent"] = msgspec.Raw(msgspec.json.encode(traceparent))
    known["topic"] = msgspec.Raw(msgspec.json.encode(topic))
    if sender:
        known["sender"] = msgspec.Raw(msgspec.json.encode(sender))
    return msgspec.json.encode(known)


def sent(context: bytes) -> bytes:
    """Return the context of a message to an agent: its sender's without time limit, topic and sender."""
    known = _carried(context)
    return msgspec.json.encode(known) if known else b""


def _carried(context: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a context that a message passes on if nobody waits for it."""
    known = _CONTEXT.decode(context) if context else {}
    for own in ("deadline", "topic", "sender", "~chain"):
        known.pop(own, None)
    return known


class Topics:
    """Subscriptions and publishing over all partitions of a namespace.

    With one partition each verb is one function on the broker. With several, subscriptions are kept in all of them
    and the recipients are found here, since each lives in the partition of its instance.
    """

    def __init__(self, buses: Sequence[TopicVerbs]) -> None:
        self._buses = buses

    async def subscribe(self, wanted: TopicSubscription, *, replay: bool = True) -> bool:
        """Subscribe. Return False if there is an equal subscription. The agent need not exist yet.

        With `replay`, the agent gets messages without a subscriber that were published before it first appeared. Raises
        InvalidInput for an invalid topic.
        """
        if wanted.topic or not wanted.prefix:
            checked_topic(wanted.topic)
        if len(self._buses) == 1:
            return await self._buses[0].subscribe(wanted, deliver=replay)
        new = [await bus.subscribe(wanted, deliver=False) for bus in self._buses]
        if new[0] and replay:
            await self._deliver_kept(wanted)
        return any(new)

    async def unsubscribe(self, unwanted: TopicSubscription) -> bool:
        """End a subscription. Return False if there is none."""
        return any([await bus.unsubscribe(unwanted) for bus in self._buses])

    async def subscriptions(self) -> list[TopicSubscription]:
        return await self._buses[0].subscriptions()

    async def publish(
        self, message: str, topic: str, source: str, data: bytes, *, context: bytes = b"", sender: str = ""
    ) -> int:
        """Start a task for each subscriber, and return how many there are.

        `message` is its id: a repeat starts nothing. `context` travels with it (see `published`). Raises InvalidInput
        for an invalid topic, and `Rejected` if the broker is full: publish the message again, with the same id, after
        the time that the error names.
        """
        checked_topic(topic)
        if len(self._buses) == 1:
            return await self._buses[0].publish(message, topic, source, data, context, sender)
        # An agent may subscribe in the meantime: the home partition keeps a message only if it has no subscriber.
        while not (agents := await self._subscribers(topic)):
            if await self._buses[0].keep_undelivered(message, topic, source, data, context, sender):
                return 0
        recipients = [agent for agent in dict.fromkeys(agents) if instance_address(agent, source) != sender]
        for agent in recipients:
            await self._start(message, agent, source, data, context)
        return len(recipients)

    async def _subscribers(self, topic: str) -> list[str]:
        return [
            wanted.agent
            for wanted in await self._buses[0].subscriptions()
            if (topic.startswith(wanted.topic) if wanted.prefix else topic == wanted.topic)
        ]

    async def idle(self) -> bool:
        """Return whether no partition has work to do. Runs that wait for a timer or a person do not count."""
        first = [await bus.idle() for bus in self._buses]
        if any(left for left, _ in first):
            return False
        if len(self._buses) == 1:
            return True
        # Work that one partition sends to another is briefly in neither. Two equal results show that nothing moved.
        return first == [await bus.idle() for bus in self._buses]

    async def _start(self, message: str, agent: str, source: str, data: bytes, context: bytes) -> None:
        task = task_of_message(message, agent, source)
        place = instance_address(agent, source) if source else task
        bus = self._buses[partition_of(place, len(self._buses), "source")]
        new = Submission(
            task_id=task,
            source="weft",
            event_id=task,
            digest=fingerprint(task, agent),
            agent=agent,
            key=source,
            input_json=data,
            context=context,
        )
        try:
            await bus.submit(new)
        except Rejected as error:
            if error.retry_after_seconds is not None:
                raise
            # As within one partition, one unreachable recipient does not keep the message from the others.
            await bus.keep_letter((
                "reason", "unknown_name", "stream", "agent", "group", group_of("agent"),
                "time", time.time_ns() // 1_000_000, "taskid", message, "name", agent,
                "error", msgspec.json.encode({"type": "UnknownName", "message": str(error)}), "errors", "[]", "d", data,
            ))  # fmt: skip

    async def _deliver_kept(self, wanted: TopicSubscription) -> None:
        """Deliver messages without a subscriber that were published before the agent first appeared."""
        home = self._buses[0]
        newest = await home.transport.call("HGET", home.keys.topics, f"@{wanted.agent}")
        kept = await home.transport.call("XRANGE", home.keys.undelivered, "-", cast(bytes, newest))
        for _, fields in pairs(cast(list[Reply], kept)):
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            topic, source = entry[b"topic"].decode(), entry[b"key"].decode()
            matches = topic.startswith(wanted.topic) if wanted.prefix else topic == wanted.topic
            if not matches or instance_address(wanted.agent, source) == entry[b"sender"].decode():
                continue
            await self._start_when_there_is_room(entry[b"id"].decode(), wanted.agent, source, entry[b"d"], entry[b"x"])

    async def _start_when_there_is_room(
        self, message: str, agent: str, source: str, data: bytes, context: bytes
    ) -> None:
        while True:
            try:
                return await self._start(message, agent, source, data, context)
            except Rejected:
                await asyncio.sleep(OVERLOADED_SECONDS)


def task_of_message(message: str, agent: str, source: str) -> str:
    """Return the id of the task by which an agent gets a published message, as in `shared/messages.lua`."""
    address = f"{message}\n{agent}/{source}"
    return hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()[:32]
