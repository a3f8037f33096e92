"""Topics: subscriptions, and delivery of messages to subscribers in all partitions."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from typing import cast

import msgspec

from runtime_core.bus.connection import Reply
from runtime_core.bus.deliveries import pairs
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import group_of
from runtime_core.bus.tasks import TopicSubscription
from runtime_core.errors import Rejected
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import checked_topic, fingerprint, instance_address, partition_of

OVERLOADED_SECONDS = 0.5

_CONTEXT = msgspec.json.Decoder(dict[str, msgspec.Raw])


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

    def __init__(self, buses: Sequence[EventBus]) -> None:
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
        """Return all subscriptions, sorted by topic."""
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
        bus = self._buses[partition_of(place, len(self._buses))]
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
