"""Subscriptions of this process, and messages to topics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from runtime_core.actors.actor import ActorRun
from runtime_core.actors.host import ActorHost
from runtime_core.actors.identity import Address, Topic, agent_name, instance_key
from runtime_core.actors.message import MessageEnvelope, encode_envelope
from runtime_core.actors.requests import SOURCE
from runtime_core.actors.vocabulary import Vocabulary
from runtime_core.bus.spans import TOPICS, sending
from runtime_core.bus.topics import published
from runtime_core.bus.values import TopicSubscription
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import fingerprint
from runtime_core.wire.commands import Submission

logger = logging.getLogger(__name__)


class Publishing:
    """Who gets what. Subscriptions are Any: another library's classes, with `id`, `is_match` and `map_to_agent`."""

    def __init__(self, host: ActorHost, vocabulary: Vocabulary) -> None:
        self._host = host
        self._vocabulary = vocabulary
        self._subscriptions: list[Any] = []

    # -- subscriptions -----------------------------------------------------------------------------------------

    async def subscribe(self, subscription: Any) -> None:
        """Raises ValueError where this process has an equal one; another process may."""
        if any(known == subscription or known.id == subscription.id for known in self._subscriptions):
            raise ValueError("Subscription already exists")
        self._subscriptions.append(subscription)
        wanted = self._vocabulary.topic_of(subscription)
        if wanted is None:
            return
        try:
            await (await self._host.topics()).subscribe(wanted)
        except InvalidInput:
            logger.debug("%r can match no topic: its text is none", subscription)
        except BaseException:
            self._subscriptions.remove(subscription)
            raise

    async def unsubscribe(self, id: str) -> None:
        """Raises LookupError for an id that this process does not have."""
        found = [subscription for subscription in self._subscriptions if subscription.id == id]
        if not found:
            raise LookupError(f"this runtime has no subscription {id!r}")
        self._subscriptions.remove(found[0])
        unwanted = self._vocabulary.topic_of(found[0])
        if unwanted is not None:
            await (await self._host.topics()).unsubscribe(unwanted)

    # -- messages ----------------------------------------------------------------------------------------------

    async def publish(
        self, run: ActorRun | None, topic: Topic, sender: Address | None, envelope: MessageEnvelope
    ) -> None:
        """Publish, inside of a handler with its run. The envelope has an id, or gets one from the run."""
        only_here = await self._recipients_only_here(topic, sender)
        if run is None:
            await self._publish_outside(topic, sender, envelope, only_here)
            return
        run.publish(topic, envelope)
        for recipient in only_here:
            run.send(recipient, envelope)

    async def _publish_outside(
        self, topic: Topic, sender: Address | None, envelope: MessageEnvelope, only_here: Sequence[Address]
    ) -> None:
        data, source = encode_envelope(envelope), instance_key(topic.source)
        address = "" if sender is None else f"{agent_name(sender.type)}/{instance_key(sender.key)}"
        with sending(TOPICS, message=envelope.message_id) as traceparent:
            context = published(b"", topic.type, address, traceparent)
            await self._publish_to_all(topic, source, address, envelope.message_id, data, context)
        for recipient in only_here:
            await self._send(envelope.message_id, recipient, data, context)

    async def _publish_to_all(
        self, topic: Topic, source: str, address: str, id: str, data: bytes, context: bytes
    ) -> None:
        topics = await self._host.topics()
        while True:
            try:
                await topics.publish(id, topic.type, source, data, context=context, sender=address)
                return
            except Rejected as error:
                if error.retry_after_seconds is None:
                    raise
                await asyncio.sleep(error.retry_after_seconds)

    async def _send(self, id: str, recipient: Address, data: bytes, context: bytes) -> None:
        name, key = agent_name(recipient.type), instance_key(recipient.key)
        bus, _ = await self._host.place(name, key)
        task = fingerprint(id, name, key, digits=32)
        new = Submission(task, SOURCE, task, fingerprint(data.decode()), name, data, key=key, context=context)
        while True:
            try:
                await bus.submit(new)
                return
            except Rejected as error:
                if error.retry_after_seconds is None:
                    # As on the broker: one recipient that is none does not keep the message from the others.
                    logger.warning("a subscription leads to %s/%s: %s", recipient.type, recipient.key, error.message)
                    return
                await asyncio.sleep(error.retry_after_seconds)

    async def _recipients_only_here(self, topic: Topic, sender: Address | None) -> list[Address]:
        """Agents that get it by subscriptions which the broker does not keep, and by none that it keeps."""
        found: dict[tuple[str, str], Address] = {}
        for subscription in self._subscriptions:
            if self._vocabulary.topic_of(subscription) is None and subscription.is_match(topic):
                agent = subscription.map_to_agent(topic)
                found[agent_name(agent.type), agent.key] = agent
        if sender is not None:
            found.pop((agent_name(sender.type), sender.key), None)
        if found:
            for kept in await (await self._host.topics()).subscriptions():
                if _matches(kept, topic.type):
                    found.pop((kept.agent, topic.source), None)
        return list(found.values())


def _matches(kept: TopicSubscription, topic: str) -> bool:
    return topic.startswith(kept.topic) if kept.prefix else topic == kept.topic
