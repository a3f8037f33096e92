"""Verbs for topics: subscribe, and publish to who has subscribed."""

from __future__ import annotations

from typing import cast

from runtime_core.bus.reply import text
from runtime_core.bus.transport import Reply
from runtime_core.bus.values import TopicSubscription
from runtime_core.bus.verbs.durability import DurabilityVerbs
from runtime_core.errors import Rejected


class TopicVerbs(DurabilityVerbs):
    """Topics of this partition, and the agents that have subscribed to them."""

    async def publish(
        self, message: str, topic: str, key: str, data: bytes, context: bytes = b"", sender: str = ""
    ) -> int:
        """Start a task for each agent that has subscribed to the topic; returns how many there are.

        `message` is its id: a repeat starts nothing again. `key` names the instance of each agent (empty: one of its
        own), `sender` an instance that does not get it. Raises `Rejected` where the broker is full, `NotDurable` as
        `submit` does.
        """
        connection = self.transport.reconnects
        reply = cast(list[Reply], await self.call("publish", message, topic, key, data, context, sender))
        if reply[0] == b"overloaded":
            raise Rejected("overloaded", text(reply[1]), retry_after_seconds=1.0)
        await self.make_durable(connection, wrote=False)  # whether a repeat wrote anything, the reply does not say
        return cast(int, reply[1])

    async def subscribe(self, wanted: TopicSubscription, *, deliver: bool = True) -> bool:
        """Subscribe; False where there is an equal subscription.

        `deliver` gives the agent what nobody had subscribed to, if that was before the agent was first heard of.
        """
        kind = "prefix" if wanted.prefix else "type"
        return await self.call("subscribe", kind, wanted.topic, wanted.agent, "1" if deliver else "") == 1

    async def note_agent(self, agent: str) -> None:
        """Note that there is this agent: from now on a topic without it has chosen to be without it."""
        await self.call("subscribe", "agent", "", agent, "")

    async def unsubscribe(self, unwanted: TopicSubscription) -> bool:
        """End a subscription; False where there is none."""
        kind = "prefix" if unwanted.prefix else "type"
        return await self.call("unsubscribe", kind, unwanted.topic, unwanted.agent) == 1

    async def subscriptions(self) -> list[TopicSubscription]:
        """All of them, by topic."""
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
